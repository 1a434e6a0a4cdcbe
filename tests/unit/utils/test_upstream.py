"""Parts of TRL, vLLM and DeepSpeed that we build on, and that could change in silence.

A new version that moves one fails here. What would raise an error is found by the tests that use
it.
"""

import inspect

from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from adora_vl.rollout.engine import AdoraVLLMGeneration
from adora_vl.trainer import AdoraGRPOTrainer
from adora_vl.utils.launch import prepare_engine_environment

prepare_engine_environment()

ANY_PARAMETERS = ["self", "args", "kwargs"]  # an override that hands everything on


def parameter_names(function):
    """Return the names of a function's parameters, in order."""
    return list(inspect.signature(function).parameters)


def test_every_override_has_stocks_parameters_and_says_what_stock_does():
    """An override has stock's parameters, or hands all on; its docstring names stock TRL."""
    for our_class, stock_class in (
        (AdoraGRPOTrainer, GRPOTrainer),
        (AdoraVLLMGeneration, VLLMGeneration),
    ):
        our_classes = our_class.__mro__[: our_class.__mro__.index(stock_class)]
        overrides = {
            function: getattr(stock_class, name)
            for layer in our_classes
            for name, function in vars(layer).items()
            if inspect.isfunction(function) and hasattr(stock_class, name) and name != "__init__"
        }
        stock_parameters_by_override = {
            override.__qualname__: parameter_names(stock)
            for override, stock in overrides.items()
            if parameter_names(override) != ANY_PARAMETERS
        }
        assert overrides
        assert stock_parameters_by_override == {
            override.__qualname__: parameter_names(override)
            for override in overrides
            if override.__qualname__ in stock_parameters_by_override
        }
        undocumented_names = [
            override.__qualname__
            for override in overrides
            if "stock trl" not in (override.__doc__ or "").lower()
        ]
        assert undocumented_names == []


def test_trl_still_reads_ratios_and_advantages_where_we_put_them():
    """TRL reads the ratio after the pass, from the micro-batch as it lies in the buffer.

    So we may put the ratio into the micro-batch during the pass.
    """
    source = inspect.getsource(GRPOTrainer._compute_loss)
    place_of_pass = source.index(
        "per_token_logps, entropies, aux_loss = self._get_per_token_logps_and_entropies("
    )
    place_of_ratio = source.index('per_token_loss * inputs["importance_sampling_ratio"]')
    assert place_of_pass < place_of_ratio
    assert "inputs = " not in source
    assert 'old_per_token_logps = inputs.get("old_per_token_logps")' in source
    assert "log_ratio = per_token_logps - old_per_token_logps" in source
    buffered_expression = "self._buffered_inputs[self._step % self.args.steps_per_generation]"
    assert buffered_expression in inspect.getsource(GRPOTrainer._prepare_inputs)


def test_trl_still_shows_a_table_that_leaves_the_images_of_prompts_out():
    """TRL's `log` strips images from prompts, and sends tables to W&B and Trackio."""
    source_of_log = inspect.getsource(GRPOTrainer.log)
    assert '**self._logs["extra"]' in source_of_log
    assert (
        'strip_images_from_messages(messages) for messages in self._logs["prompt"]' in source_of_log
    )
    assert [
        logger
        for logger in ("wandb", "trackio")
        if f'"{logger}" in self.args.report_to' not in source_of_log
    ] == []


def test_the_sizes_that_the_memory_formulas_take_from_trl_and_deepspeed():
    """Our constants are those of the installed versions."""
    from accelerate.utils import DeepSpeedPlugin
    from deepspeed.runtime.zero.config import (
        DeepSpeedZeroConfig,
        DeepSpeedZeroOffloadOptimizerConfig,
    )
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    from adora_vl.models import activations
    from adora_vl.training import model_states

    assert chunked_logprob.TOKEN_CHUNK_SIZE == activations.HEAD_TILE_TOKENS
    assert utils._CHUNKED_LOGPROB_CHUNK_SIZE == activations.HEAD_TILE_VOCABULARY
    zero = DeepSpeedZeroConfig()
    assert zero.reduce_bucket_size == model_states.REDUCE_BUCKET_PARAMETERS
    assert zero.max_live_parameters == model_states.MAX_LIVE_PARAMETERS
    assert zero.sub_group_size == model_states.SUB_GROUP_PARAMETERS
    deepspeed_plugin = DeepSpeedPlugin(zero_stage=3, offload_optimizer_device="cpu")
    offload = deepspeed_plugin.deepspeed_config["zero_optimization"]["offload_optimizer"]
    assert DeepSpeedZeroOffloadOptimizerConfig(**offload).pin_memory, (
        "or the GPU waits for each copy"
    )
    # The gradients are on the host twice, as they come and in float32: 18 bytes per parameter in
    # all.
    source = inspect.getsource(DeepSpeedZeroOptimizer_Stage3)
    assert "self.fp32_partitioned_groups_flat[i].grad = subgroup_gradient_buffer.to(" in source
    assert "self.grad_partitions_flat_buffer: Tensor = torch.zeros(" in source


def test_deepspeed_still_skips_gradients_that_are_not_finite():
    """DeepSpeed's optimizers of all ZeRO stages check the norm of gradients, also in bfloat16."""
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    for optimizer in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
        assert "is_invalid_grad_norm(scaled_global_grad_norm)" in inspect.getsource(optimizer)
    assert DeepSpeedBF16Config().check_grad_overflow


def test_the_engine_has_the_entry_points_that_only_a_gpu_uses():
    """vLLM has the functions that we call on a GPU alone, so that no other test here calls them."""
    from vllm import LLM
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.engine.llm_engine import LLMEngine

    assert "reset_running_requests" in parameter_names(LLM.reset_prefix_cache)
    assert parameter_names(LLMEngine.reset_encoder_cache) == ["self"]
    assert callable(InprocClient.shutdown)
    assert callable(LLM.wake_up)
    assert callable(LLM.sleep)
