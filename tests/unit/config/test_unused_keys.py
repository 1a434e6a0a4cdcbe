"""A key of TRL or Transformers that a user sets does something, is refused, or is named."""

from collections.abc import Iterator
from typing import Any

import pytest
from trl import ModelConfig

from adora_vl.config.batch_plan import build_batch_layout
from adora_vl.config.trl_keys import OUR_LIBRARY, config_key_by_name
from adora_vl.config.unused_keys import (
    _CONDITIONAL_KEYS,
    RunSettings,
    notes_on_unused_keys,
    refuse_unusable_keys,
)
from adora_vl.utils.errors import UserError
from tests.support.stand_ins import checked_config

# Those that a run reads, or that are refused by another check. Before a key of a new version of TRL
# or Transformers comes to them, somebody has looked at what reads it.
KEYS_THAT_ARE_READ = """
accelerator_config attn_implementation auto_find_batch_size beta bf16 cast_lm_head_to_fp32
chat_template_kwargs data_seed dataloader_drop_last dataloader_num_workers dataloader_pin_memory
dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb
ddp_find_unused_parameters ddp_static_graph ddp_timeout debug deepspeed disable_dropout
disable_tqdm do_train dtype entropy_coef eval_strategy fp16 fsdp fsdp_config
full_determinism generation_batch_size generation_kwargs gradient_accumulation_steps
gradient_checkpointing hub_token ignore_data_skip importance_sampling_level learning_rate
load_best_model_at_end load_in_4bit load_in_8bit local_rank log_completions
log_completions_hub_repo log_level log_level_replica log_multimodal log_on_each_node
logging_first_step logging_nan_inf_filter logging_steps logging_strategy loss_type
lr_scheduler_kwargs lr_scheduler_type mask_truncated_completions max_completion_length
max_grad_norm max_steps min_p model_init_kwargs model_name_or_path model_revision
multi_objective_aggregation num_generations num_iterations num_train_epochs
off_policy_mask_threshold optim optim_args output_dir per_device_train_batch_size push_to_hub
remove_unused_columns repetition_penalty report_to restore_callback_states_from_checkpoint
resume_from_checkpoint reward_weights router_aux_loss_coef run_name save_on_each_node save_steps
save_strategy save_total_limit scale_rewards seed shuffle_dataset skip_memory_metrics
steps_per_generation sync_ref_model temperature tf32 top_entropy_quantile top_k top_p
torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps trust_remote_code
use_adaptive_entropy use_cache use_cpu use_liger_kernel use_peft
use_transformers_continuous_batching use_transformers_paged use_vllm vllm_importance_sampling_cap
weight_decay
"""
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"label_smoothing_factor": 0.1}, "label_smoothing_factor: 0.1 has no labels"),
    ({"train_sampling_strategy": "sequential"}, ".*set shuffle_dataset: false"),
    ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy: group_by_length"),
    ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha: 5.0 puts noise"),
    ({"eval_on_start": True}, "eval_on_start: true with eval_strategy: no"),
    ({"save_only_model": True}, "save_only_model: true leaves out"),
    ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint: true is not needed"),
    ({"dataloader_in_order": False}, "dataloader_in_order: false would"),
    ({"dataloader_persistent_workers": True}, "dataloader_persistent_workers: true needs"),
    ({"dataloader_multiprocessing_context": "spawn"}, "dataloader_multiprocessing_context: spawn"),
    ({"accelerator_config": {"split_batches": True}}, "accelerator_config: split_batches and"),
    (
        {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}},
        "accelerator_config: gradient_accumulation_kwargs: num_steps counts",
    ),
]


def unused_key_lines(
    model: ModelConfig | None = None, trains_adapter: bool = False, **keys: Any
) -> list[str]:
    """Return the lines about keys that have no effect in a run with these."""
    return notes_on_unused_keys(
        RunSettings(
            checked_config(**keys), model or ModelConfig(), trains_adapter, trl_evaluates=False
        )
    )


def test_every_key_of_the_libraries_is_read_named_or_refused():
    """Every key of TRL and Transformers is read, noted as unused, or refused.

    Only `accelerator_config` is in two of these sets: it is read, and some entries are refused.
    """
    may_be_unused = {key for group in _CONDITIONAL_KEYS for key in group.keys}
    refused = {key for keys, _ in REFUSED for key in keys} | {"parallelism_config"}
    always_read = set(KEYS_THAT_ARE_READ.split())
    keys_of_libraries = {
        key.name for key in config_key_by_name().values() if key.library != OUR_LIBRARY
    }
    assert always_read | may_be_unused | refused >= keys_of_libraries, "what reads these?"
    assert always_read.isdisjoint(may_be_unused)
    assert refused.isdisjoint(may_be_unused)
    assert always_read & refused == {"accelerator_config"}
    assert always_read | refused <= keys_of_libraries
    assert may_be_unused <= set(config_key_by_name())


def other_value(default: Any) -> Any:
    """Return a value of the same type as the default of a key, but another one."""
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1
    return "other"


def keys_that_may_be_unused() -> Iterator[tuple[str, str]]:
    """Yields each key that may do nothing, and the reason as a line about it says it."""
    for group in _CONDITIONAL_KEYS:
        for key in group.keys:
            yield key, group.reason


@pytest.mark.parametrize(("key", "reason"), list(keys_that_may_be_unused()))
def test_a_key_that_does_nothing_is_named_before_the_run(key, reason):
    """A key that does nothing with the other keys has a note, if its value is not the default.

    `reason` is how the note ends, as in `with use_vllm: true`.
    """
    settings = RunSettings(
        checked_config(), ModelConfig(), trains_adapter=False, trl_evaluates=False
    )
    assert notes_on_unused_keys(settings) == []
    if reason.startswith("with "):  # it is unused with these values of other keys
        settings.config.use_vllm = True
        settings.config.gradient_checkpointing = False
        settings.config.optim = "sgd"
        settings.config.lr_scheduler_type = "constant"
        settings.config.loss_type = "vespo"
    keys: Any = settings.model if hasattr(settings.model, key) else settings.config
    setattr(keys, key, other_value(getattr(keys, key)))
    assert notes_on_unused_keys(settings) == [f"{key}: does nothing {reason}"]


def test_keys_with_one_reason_share_a_line_and_what_is_read_has_none():
    """Keys that do nothing for one reason share a line; a key that is read has none."""
    lora = ModelConfig(lora_r=4, lora_target_modules=["q_proj"])
    line = "lora_r, lora_target_modules: do nothing without use_peft: true, so all weights are"
    assert unused_key_lines(lora)[0].startswith(line)
    assert unused_key_lines(lora, trains_adapter=True) == []
    assert unused_key_lines(beta=0.1, use_bias_correction_kl=False) == []
    assert unused_key_lines(loss_type="sapo", sapo_temperature_pos=2.0) == []
    assert unused_key_lines(use_vllm=True, vllm_mode="server", vllm_server_port=8001) == []
    assert unused_key_lines(push_to_hub=False, hub_model_id="a/b") == [
        "hub_model_id: does nothing without push_to_hub: true"
    ]


@pytest.mark.parametrize(("keys", "begins"), REFUSED)
def test_a_key_that_would_not_do_what_it_is_set_for_is_refused(keys, begins):
    with pytest.raises(UserError, match=f"^{begins}"):
        refuse_unusable_keys(checked_config(**keys), trl_evaluates=False)


def test_a_rate_that_waits_for_evaluations_needs_those_of_trl():
    """`reduce_lr_on_plateau` is refused without TRL's evaluation, whose loss it has to be told.

    The evaluators of this project do not tell it theirs.
    """
    plateau = checked_config(
        lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps", eval_steps=2
    )
    refuse_unusable_keys(plateau, trl_evaluates=True)
    with pytest.raises(UserError, match="^lr_scheduler_type: reduce_lr_on_plateau is never told"):
        refuse_unusable_keys(plateau, trl_evaluates=False)


def test_a_step_that_passes_over_a_generation_twice_is_refused():
    """An optimizer step that has a generation's rollouts twice in it is refused.

    The weights do not change in between, so the second gradient would be the first one.
    """
    # steps_per_generation, num_iterations, gradient_accumulation_steps, whether they are taken
    cases = [
        (4, 2, 4, True),
        (8, 3, 4, True),
        (2, 1, 4, True),
        (2, 2, 4, False),
        (4, 2, 6, False),
    ]
    for steps, passes, accumulated, is_taken in cases:
        training_config = checked_config(
            per_device_train_batch_size=8,
            num_generations=8,
            steps_per_generation=steps,
            num_iterations=passes,
            gradient_accumulation_steps=accumulated,
        )
        if is_taken:
            build_batch_layout(training_config, 1)
            continue
        with pytest.raises(UserError, match=f"^num_iterations: {passes} with .* same rollouts"):
            build_batch_layout(training_config, 1)
