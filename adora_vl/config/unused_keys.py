"""Keys of TRL and Transformers that would do nothing in a run, or something wrong.

A key that a user sets in order to train differently is refused; others are named in a line before
the run. A key counts as set if its value is not its default, so that commands and Python code get
the same lines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from adora_vl.config.batch_plan import regroups_micro_batches
from adora_vl.config.losses import CLIPPED_LOSSES
from adora_vl.utils.cli import enum_value
from adora_vl.utils.convert import field_default
from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from trl import ModelConfig

    from adora_vl.config.schema import AdoraGRPOConfig


@dataclass(frozen=True)
class RunSettings:
    """What decides whether a run reads a key.

    `trains_adapter`: whether an adapter such as LoRA is trained. `trl_evaluates`: whether TRL's own
    evaluation runs during training, on a data set that Python code has passed.
    """

    config: AdoraGRPOConfig
    model: ModelConfig
    trains_adapter: bool
    trl_evaluates: bool


@dataclass(frozen=True)
class ConditionalKeys:
    """Keys that a run reads only under a certain condition.

    `reason`: the end of the line "KEY does nothing ...", for a run that does not read them.
    `are_used`: whether a run with these settings reads them.
    """

    keys: tuple[str, ...]
    reason: str
    are_used: Callable[[RunSettings], bool]


_SCHEDULES_WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau")
_OPTIMIZERS_WITHOUT_ADAM = ("adafactor", "adagrad", "galore_adafactor", "rmsprop", "sgd")
_LOW_RANK_OPTIMIZERS = ("apollo", "galore")


def _corrects_importance(settings: RunSettings) -> bool:
    config = settings.config
    return bool(config.use_vllm and config.vllm_importance_sampling_correction)


def _uses_plateau_schedule(settings: RunSettings) -> bool:
    return enum_value(settings.config.lr_scheduler_type) == "reduce_lr_on_plateau"


def _pads_as_trl_does(settings: RunSettings) -> bool:
    return not regroups_micro_batches(settings.config)


def _reads_epsilon(settings: RunSettings) -> bool:
    """Return whether `epsilon` is read: it is CISPO's cap where `epsilon_high` is not set."""
    config = settings.config
    is_cap = config.loss_type == "cispo" and config.epsilon_high is None
    return config.loss_type in CLIPPED_LOSSES or is_cap


def _never(settings: RunSettings) -> bool:
    return False


_CONDITIONAL_KEYS = (
    ConditionalKeys(
        (
            "lora_alpha",
            "lora_dropout",
            "lora_modules_to_save",
            "lora_r",
            "lora_target_modules",
            "lora_target_parameters",
            "lora_task_type",
            "use_dora",
            "use_rslora",
        ),
        "without use_peft: true, so all weights are trained",
        lambda settings: settings.trains_adapter,
    ),
    ConditionalKeys(
        ("bnb_4bit_quant_storage", "bnb_4bit_quant_type", "use_bnb_nested_quant"),
        "without load_in_4bit: true",
        lambda settings: settings.model.load_in_4bit,
    ),
    ConditionalKeys(
        (
            "vllm_importance_sampling_correction",
            "vllm_max_model_length",
            "vllm_mode",
            "vllm_structured_outputs_regex",
        ),
        "without use_vllm: true",
        lambda settings: settings.config.use_vllm,
    ),
    ConditionalKeys(
        ("vllm_group_port", "vllm_server_base_url", "vllm_server_port", "vllm_server_timeout"),
        "without use_vllm: true and vllm_mode: server",
        lambda settings: settings.config.uses_servers,
    ),
    ConditionalKeys(
        (
            "vllm_enable_sleep_mode",
            "vllm_gpu_memory_utilization",
            "vllm_model_impl",
            "vllm_tensor_parallel_size",
        ),
        "without use_vllm: true and vllm_mode: colocate; a server is told when it is started",
        lambda settings: settings.config.has_colocated_engine,
    ),
    ConditionalKeys(
        (
            "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_clip_min",
            "vllm_importance_sampling_mode",
        ),
        "without use_vllm: true and vllm_importance_sampling_correction: true",
        _corrects_importance,
    ),
    ConditionalKeys(
        ("cache_implementation", "ds3_gather_for_generation"),
        "with use_vllm: true",
        lambda settings: not settings.config.use_vllm,
    ),
    ConditionalKeys(
        ("entropy_coef_delta", "entropy_coef_max", "entropy_coef_min", "entropy_target"),
        "without use_adaptive_entropy: true",
        lambda settings: settings.config.use_adaptive_entropy,
    ),
    ConditionalKeys(
        ("ref_model_mixup_alpha", "ref_model_sync_steps"),
        "without sync_ref_model: true",
        lambda settings: settings.config.sync_ref_model,
    ),
    ConditionalKeys(
        ("use_bias_correction_kl",),
        "with beta: 0",
        lambda settings: settings.config.beta != 0,
    ),
    ConditionalKeys(
        ("delta",),
        "with this loss_type, which does not clip on both sides",
        lambda settings: settings.config.loss_type in CLIPPED_LOSSES,
    ),
    ConditionalKeys(("epsilon",), "with this loss_type, which has no lower clip", _reads_epsilon),
    ConditionalKeys(
        ("epsilon_high",),
        "with this loss_type, which has no upper clip",
        lambda settings: settings.config.loss_type in CLIPPED_LOSSES | {"cispo"},
    ),
    ConditionalKeys(
        ("sapo_temperature_neg", "sapo_temperature_pos"),
        "without loss_type: sapo",
        lambda settings: settings.config.loss_type == "sapo",
    ),
    ConditionalKeys(
        ("vespo_k_neg", "vespo_k_pos", "vespo_lambda_neg", "vespo_lambda_pos"),
        "without loss_type: vespo",
        lambda settings: settings.config.loss_type == "vespo",
    ),
    ConditionalKeys(
        ("adora_recompute", "gradient_checkpointing_kwargs"),
        "with gradient_checkpointing: false",
        lambda settings: settings.config.gradient_checkpointing,
    ),
    ConditionalKeys(
        ("liger_kernel_config",),
        "without use_liger_kernel: true",
        lambda settings: settings.config.use_liger_kernel,
    ),
    ConditionalKeys(
        ("warmup_steps",),
        "with this lr_scheduler_type; constant_with_warmup has a warmup",
        lambda settings: (
            enum_value(settings.config.lr_scheduler_type) not in _SCHEDULES_WITHOUT_WARMUP
        ),
    ),
    ConditionalKeys(
        ("adam_beta1", "adam_beta2", "adam_epsilon"),
        "with this optim",
        lambda settings: not enum_value(settings.config.optim).startswith(_OPTIMIZERS_WITHOUT_ADAM),
    ),
    ConditionalKeys(
        ("optim_target_modules",),
        "without an optim of GaLore or APOLLO",
        lambda settings: enum_value(settings.config.optim).startswith(_LOW_RANK_OPTIMIZERS),
    ),
    ConditionalKeys(
        (
            "adora_eval",
            "adora_eval_limit",
            "do_eval",
            "eval_delay",
            "eval_steps",
        ),
        "without eval_strategy: steps",
        lambda settings: settings.config.evaluates,
    ),
    ConditionalKeys(
        ("num_generations_eval", "per_device_eval_batch_size"),
        "here, because an evaluation on the way asks each problem once",
        lambda settings: settings.trl_evaluates,
    ),
    ConditionalKeys(
        (
            "hub_always_push",
            "hub_model_id",
            "hub_private_repo",
            "hub_revision",
            "hub_strategy",
        ),
        "without push_to_hub: true",
        lambda settings: settings.config.push_to_hub,
    ),
    ConditionalKeys(
        ("project", "trackio_bucket_id", "trackio_space_id", "trackio_static_space_id"),
        "without report_to: trackio",
        lambda settings: "trackio" in (settings.config.report_to or ()),
    ),
    ConditionalKeys(
        ("log_unique_prompts", "num_completions_to_print"),
        "without log_completions: true",
        lambda settings: settings.config.log_completions,
    ),
    ConditionalKeys(
        ("greater_is_better", "metric_for_best_model"),
        "here, because no checkpoint is chosen by an evaluation",
        _uses_plateau_schedule,
    ),
    ConditionalKeys(
        (
            "batch_eval_metrics",
            "bf16_full_eval",
            "eval_accumulation_steps",
            "eval_do_concat_batches",
            "eval_use_gather_object",
            "fp16_full_eval",
            "include_for_metrics",
            "label_names",
            "prediction_loss_only",
        ),
        "here, because evaluations read answers and no predictions",
        _never,
    ),
    ConditionalKeys(("do_predict",), "here, as in any Trainer", _never),
    ConditionalKeys(
        ("average_tokens_across_devices",),
        "here, because the losses count the tokens of all processes",
        _never,
    ),
    ConditionalKeys(
        ("include_num_input_tokens_seen",), "here; num_tokens of the log says it", _never
    ),
    ConditionalKeys(
        ("pad_to_multiple_of",),
        "here, because micro-batches are cut to the length of their rows",
        _pads_as_trl_does,
    ),
    ConditionalKeys(("length_column_name",), "here, because no rows are sorted by length", _never),
    ConditionalKeys(
        ("transformers_continuous_batching_config",),
        "here, because whoever samples is vLLM or the policy itself",
        _never,
    ),
)


def notes_on_unused_keys(settings: RunSettings) -> list[str]:
    """Return a line for each reason why keys that were set do nothing in this run.

    For example: `delta: does nothing with this loss_type, which does not clip on both sides`.
    """
    set_keys = {*_keys_not_at_default(settings.config), *_keys_not_at_default(settings.model)}
    lines: list[str] = []
    for conditional in _CONDITIONAL_KEYS:
        names = [name for name in conditional.keys if name in set_keys]
        if names and not conditional.are_used(settings):
            verb = "does" if len(names) == 1 else "do"
            lines.append(f"{', '.join(names)}: {verb} nothing {conditional.reason}")
    return lines


def _keys_not_at_default(config: Any) -> list[str]:
    """Return the fields of a config dataclass whose values are not their defaults.

    Empty values are not returned, since they switch nothing on.
    """
    names: list[str] = []
    for field in fields(config):
        value = getattr(config, field.name)
        if value != field_default(field) and value not in (None, [], {}):
            names.append(field.name)
    return names


def refuse_unusable_keys(config: AdoraGRPOConfig, *, trl_evaluates: bool) -> None:
    """Raise `UserError` for a key of TRL or Transformers that cannot do here what it is set for.

    Some of these keys would change nothing in the training. Others would break the groups of
    rollouts, the batches or the checkpoints.

    `trl_evaluates`: whether TRL's own evaluation runs during training, on a data set that Python
    code has passed.
    """
    sampling_strategy = config.train_sampling_strategy
    schedule = enum_value(config.lr_scheduler_type)
    if config.label_smoothing_factor != 0:
        raise UserError(
            f"label_smoothing_factor: {config.label_smoothing_factor} has no labels to smooth in "
            "a policy's loss; leave it out"
        )
    if sampling_strategy == "sequential":
        raise UserError(
            "train_sampling_strategy: sequential is not read here; set shuffle_dataset: false"
        )
    if sampling_strategy != "random":
        raise UserError(
            f"train_sampling_strategy: {sampling_strategy} would tear groups apart; leave it out"
        )
    if config.neftune_noise_alpha is not None:
        raise UserError(
            f"neftune_noise_alpha: {config.neftune_noise_alpha} puts noise into every ratio to the "
            "policy that has sampled; leave it out"
        )
    if schedule == "reduce_lr_on_plateau" and not trl_evaluates:
        raise UserError(
            "lr_scheduler_type: reduce_lr_on_plateau is never told of an evaluation here, so the "
            "rate would stay as it is; choose another one"
        )
    if config.eval_on_start and not config.evaluates and not trl_evaluates:
        raise UserError(
            "eval_on_start: true with eval_strategy: no has nothing to evaluate; set "
            "eval_strategy: steps"
        )
    if config.save_only_model:
        raise UserError(
            "save_only_model: true leaves out what a run goes on with; leave it out, and make a "
            "model of a checkpoint with `python -m adora_vl.export`"
        )
    if config.enable_jit_checkpoint:
        raise UserError(
            "enable_jit_checkpoint: true is not needed: SIGTERM saves a checkpoint in every run; "
            "leave it out"
        )
    _refuse_loader_keys(config)


def _refuse_loader_keys(config: AdoraGRPOConfig) -> None:
    """Raise `UserError` for keys of the data loader that would break a run.

    Some would divide the rollouts of a prompt between ranks or steps. Others would be refused by
    torch, but only after the weights are loaded.
    """
    accelerator = config.accelerator_config
    has_workers = config.dataloader_num_workers > 0
    if accelerator.split_batches or accelerator.dispatch_batches:
        raise UserError(
            "accelerator_config: split_batches and dispatch_batches would tear groups apart; leave "
            "them out"
        )
    if "num_steps" in (accelerator.gradient_accumulation_kwargs or {}):
        raise UserError(
            "accelerator_config: gradient_accumulation_kwargs: num_steps counts the micro-batches "
            "of a step again; set gradient_accumulation_steps"
        )
    if config.parallelism_config is not None:
        raise UserError("parallelism_config: a model is divided by DeepSpeed alone; leave it out")
    if not config.dataloader_in_order:
        raise UserError(
            "dataloader_in_order: false would give ranks parts of different generations; leave it "
            "out"
        )
    if not has_workers and config.dataloader_persistent_workers:
        raise UserError("dataloader_persistent_workers: true needs dataloader_num_workers above 0")
    if not has_workers and config.dataloader_multiprocessing_context is not None:
        raise UserError(
            f"dataloader_multiprocessing_context: {config.dataloader_multiprocessing_context} needs "
            "dataloader_num_workers above 0"
        )
