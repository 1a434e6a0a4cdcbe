"""Every private or overridden name of TRL, Transformers and vLLM that we build on: a new version that moves one fails
here, with its name, and not in the middle of a run."""

from __future__ import annotations

import ast
import inspect
import textwrap

from trl import GRPOTrainer
from trl.data_utils import prepare_multimodal_messages
from trl.distributed import DistributedBackend
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer import grpo_trainer
from trl.trainer.utils import (
    RepeatSampler,
    get_config_model_id,
    split_pixel_values_by_grid,
    strip_images_from_messages,
    unsplit_pixel_values_by_grid,
)

from adora_vl.rollout.engine import AdoraVLLMGeneration
from adora_vl.trainer import AdoraGRPOTrainer
from adora_vl.utils.launch import prepare_engine_environment

prepare_engine_environment()

SIGNATURES = {
    GRPOTrainer.train: ["self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
    GRPOTrainer._generate_and_score_completions: ["self", "inputs"],
    GRPOTrainer._compute_loss: ["self", "model", "inputs"],
    GRPOTrainer.save_model: ["self", "output_dir", "_internal_call"],
    GRPOTrainer.create_model_card: ["self", "model_name", "dataset_name", "tags"],
    GRPOTrainer._save_checkpoint: ["self", "model", "trial"],
    GRPOTrainer._get_output_dir: ["self", "trial"],
    GRPOTrainer._push_from_checkpoint: ["self", "checkpoint_folder"],
    GRPOTrainer._load_from_checkpoint: ["self", "resume_from_checkpoint", "model"],
    GRPOTrainer._load_optimizer_and_scheduler: ["self", "checkpoint"],
    GRPOTrainer._get_train_sampler: ["self", "dataset"],
    GRPOTrainer._get_dataloader: [
        "self", "dataset", "description", "batch_size", "sampler_fn", "is_training", "dataloader_key",
    ],
    GRPOTrainer._prepare_inputs: ["self", "generation_batch"],
    GRPOTrainer.training_step: ["self", "model", "inputs", "num_items_in_batch"],
    GRPOTrainer._get_per_token_logps_and_entropies: [
        "self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy",
        "compute_aux_loss", "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes",
        "num_tiles", "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
    ],
    split_pixel_values_by_grid: ["batch"],
    unsplit_pixel_values_by_grid: ["batch"],
    RepeatSampler.__init__: [
        "self", "data_source", "mini_repeat_count", "batch_size", "repeat_count", "shuffle", "seed",
    ],
    VLLMGeneration._init_vllm: ["self"],
    VLLMGeneration._iter_named_params: ["self"],
    VLLMGeneration.sync_weights: ["self"],
    VLLMGeneration._place_features: ["self", "features", "prompt_ids"],
    VLLMGeneration._fix_param_name_to_vllm: ["self", "name", "extra_prefixes"],
    vllm_generation.empty_cache: [],
    GRPOTrainer._generate_single_turn: [
        "self", "prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images",
    ],
    prepare_multimodal_messages: ["messages", "images"],
    disable_gradient_checkpointing: ["model", "gradient_checkpointing_kwargs"],
}  # fmt: skip


def test_the_signatures_are_those_that_we_override_or_call():
    found = {function: list(inspect.signature(function).parameters) for function in SIGNATURES}
    assert {f.__qualname__: names for f, names in found.items() if names != SIGNATURES[f]} == {}


def test_every_override_is_held_to_its_signature_and_says_what_stock_does():
    held = {function.__name__ for function in SIGNATURES}
    for ours, theirs in ((AdoraGRPOTrainer, GRPOTrainer), (AdoraVLLMGeneration, VLLMGeneration)):
        layers = ours.__mro__[: ours.__mro__.index(theirs)]
        overrides = [
            function
            for layer in layers
            for name, function in vars(layer).items()
            if inspect.isfunction(function) and hasattr(theirs, name) and name != "__init__"
        ]
        assert overrides and [f.__qualname__ for f in overrides if f.__name__ not in held] == [], "add its signature"
        assert [f.__qualname__ for f in overrides if "Stock TRL" not in (f.__doc__ or "")] == []


def _calls(function, name):
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == name]


def test_trl_still_builds_its_engine_by_the_names_that_we_replace():
    (generation,) = _calls(GRPOTrainer.__init__, "VLLMGeneration")
    assert {"processing_class", "generation_kwargs", "model"} <= {keyword.arg for keyword in generation.keywords}
    (llm,) = _calls(VLLMGeneration._init_vllm, "LLM")
    ours = {"dtype", "enforce_eager", "revision", "mm_processor_kwargs", "limit_mm_per_prompt"}
    assert not ours & {keyword.arg for keyword in llm.keywords}, "TRL has an argument of its own now: use that"
    assert grpo_trainer.VLLMGeneration is VLLMGeneration


def test_trl_still_shows_a_table_that_leaves_the_images_of_prompts_out():
    table = inspect.getsource(GRPOTrainer.log)
    assert '**self._logs["extra"]' in table
    assert 'strip_images_from_messages(messages) for messages in self._logs["prompt"]' in table
    assert [words for words in ("wandb", "trackio") if f'"{words}" in self.args.report_to' not in table] == []
    assert strip_images_from_messages([{"role": "user", "content": "x"}]) == [{"role": "user", "content": "x"}]


def test_trl_still_has_the_attributes_that_we_read():
    """Names that are set in a constructor have no signature; the source that sets them is what can be checked."""
    trainer = inspect.getsource(GRPOTrainer.__init__)
    names = (
        "_tokenizer", "eos_token_ids", "reward_weights", "multi_objective_aggregation", "num_generations_eval",
        "generation_kwargs", "generation_config", "vllm_generation", "_metrics", "_logs", "_dist", "_buffered_inputs",
        "_entropy_bonus_enabled", "aux_loss_enabled", "vllm_importance_sampling_correction",
        "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max",
    )  # fmt: skip
    assert [name for name in names if f"self.{name} = " not in trainer] == []
    generation = inspect.getsource(vllm_generation)
    for name in ("model_executor.driver_worker.model_runner", "_llm_weights_sleeping", "vllm_client", "tp_group"):
        assert f"{name}" in generation, name
    client = inspect.getsource(VLLMClient)
    assert "self.session = " in client and "self.base_url = " in client and "self.host = " in client
    assert list(inspect.signature(VLLMClient.check_server).parameters) == ["self", "total_timeout", "retry_interval"]
    assert "requests.get(url)" in inspect.getsource(VLLMClient.check_server)  # past the session, and without a limit
    assert {"gather_params", "is_fsdp", "is_zero3"} <= set(dir(DistributedBackend))
    assert list(inspect.signature(get_config_model_id).parameters) == ["config"]


def test_trl_still_reads_the_ratio_after_the_policys_pass():
    """We put it into the micro-batch during that pass; and a micro-batch is used as it lies in the buffer."""
    source = inspect.getsource(GRPOTrainer._compute_loss)
    formed = source.index("self._get_per_token_logps_and_entropies(")
    read = source.index('per_token_loss * inputs["importance_sampling_ratio"]')
    assert formed < read and "inputs = " not in source
    buffered = "self._buffered_inputs[self._step % self.args.steps_per_generation]"
    assert buffered in inspect.getsource(GRPOTrainer._prepare_inputs)


def test_the_model_takes_a_mask_and_labels_of_our_own():
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
    from trl.trainer.utils import add_fused_lm_head

    assert "labels = shift_labels" in inspect.getsource(add_fused_lm_head)
    assert "self.get_image_features(pixel_values, image_grid_thw" in inspect.getsource(Qwen2_5_VLModel.forward)
    assert {"mm_token_type_ids", "image_grid_thw"} <= set(inspect.signature(Qwen2_5_VLModel.get_rope_index).parameters)


def test_the_sizes_that_the_memory_formulas_take_from_trl_and_deepspeed():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    from adora_vl.planning import activations
    from adora_vl.planning import memory as states

    assert chunked_logprob.TOKEN_CHUNK_SIZE == activations.TILE_TOKENS
    assert utils._CHUNKED_LOGPROB_CHUNK_SIZE == activations.TILE_VOCABULARY
    zero = DeepSpeedZeroConfig()
    assert zero.reduce_bucket_size == states.BUCKET
    assert zero.max_live_parameters == states.LIVE_PARAMETERS and zero.sub_group_size == states.SUB_GROUP


def test_deepspeed_still_pins_what_it_has_on_the_host():
    """accelerate's file has no key for it. Copies from memory that is not pinned make the GPU wait for each of them."""
    from accelerate.utils import DeepSpeedPlugin
    from deepspeed.runtime.zero.config import DeepSpeedZeroOffloadOptimizerConfig

    plugin = DeepSpeedPlugin(zero_stage=3, offload_optimizer_device="cpu")
    offload = plugin.deepspeed_config["zero_optimization"]["offload_optimizer"]
    assert offload["device"] == "cpu" and DeepSpeedZeroOffloadOptimizerConfig(**offload).pin_memory


def test_deepspeed_still_has_the_gradients_on_the_host_twice():
    """As they come, and in float32 for each part of the optimizer step: 18 bytes per parameter in all."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    states = inspect.getsource(DeepSpeedZeroOptimizer_Stage3.initialize_optimizer_states)
    assert "self.fp32_partitioned_groups_flat[i].grad = subgroup_gradient_buffer.to(" in states
    source = inspect.getsource(DeepSpeedZeroOptimizer_Stage3)
    assert "self.grad_partitions_flat_buffer: Tensor = torch.zeros(" in source


def test_transformers_still_splits_the_vision_towers_windows_and_hands_flash_attention_their_bounds():
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionAttention
    from transformers.utils.generic import is_flash_attention_requested

    from adora_vl.dedup.vision import BATCHED

    assert is_flash_attention_requested(requested_attention_implementation=BATCHED)
    source = inspect.getsource(Qwen2_5_VLVisionAttention.forward)
    assert "cu_seq_lens_q=cu_seqlens" in source and "cu_seq_lens_k=cu_seqlens" in source
    assert "for q, k, v in zip(*splits)" in source, "Transformers batches windows itself now"


def test_peft_merges_as_we_do():
    from peft.tuners.lora import Linear

    assert list(inspect.signature(Linear.get_delta_weight).parameters) == ["self", "adapter"]


def test_the_engine_has_the_entry_points_of_weight_sync():
    from vllm import LLM
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert "weights_iterator" in inspect.signature(GPUModelRunner.reload_weights).parameters
    assert "reset_running_requests" in inspect.signature(LLM.reset_prefix_cache).parameters
    assert list(inspect.signature(LLMEngine.reset_encoder_cache).parameters) == ["self"]
    assert callable(InprocClient.shutdown)
    assert callable(LLM.wake_up) and callable(LLM.sleep)


def test_trl_still_takes_its_ratios_from_where_we_read_them():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    assert "per_token_logps, entropies, aux_loss = self._get_per_token_logps_and_entropies(" in source
    assert 'old_per_token_logps = inputs.get("old_per_token_logps")' in source
    assert "log_ratio = per_token_logps - old_per_token_logps" in source


def test_deepspeed_still_skips_gradients_that_are_not_finite():
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    for optimizer in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
        assert "is_invalid_grad_norm(scaled_global_grad_norm)" in inspect.getsource(optimizer)
    assert DeepSpeedBF16Config().check_grad_overflow


def test_deepspeed_still_mixes_up_what_we_put_right_after_a_universal_checkpoint():
    """Once it does not, `_GroupsAsBefore` has nothing left to do."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from transformers import Trainer

    source = inspect.getsource(DeepSpeedZeroOptimizer_Stage3.load_hp_checkpoint_state_from_checkpoint_dir_stage3)
    assert """self.optimizer.state[fp32_param]['step'] = state_step""" in source
    assert """optim_sd[OPTIMIZER_STATE_DICT]["param_groups"][0].items()""" in source
    groups = inspect.getsource(Trainer.create_optimizer)
    assert groups.index('"weight_decay": self.args.weight_decay') < groups.index('"weight_decay": 0.0')
