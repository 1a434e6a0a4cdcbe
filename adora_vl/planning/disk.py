"""The disk space that a run will need, computed from shapes alone, in bytes."""

from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.sharding import Sharding
from adora_vl.config.states import MOMENTS
from adora_vl.models.activations import FLOAT
from adora_vl.models.shape import ModelShape

# Scheduler, random states, trainer_state.json and manifest, beside the tokenizer of a small model
_SMALL_FILES = 2 * 2**20


def checkpoint_bytes(
    shape: ModelShape, sharding: Sharding, *, mixed: bool, reference: bool = False
) -> int:
    """Return the size of one `checkpoint-N` folder of all ranks.

    It has weights (with LoRA the adapter alone), optimizer, and with `reference` a reference model
    that moves (`sync_ref_model`). DeepSpeed writes, beside the model for `from_pretrained`, its own
    float32 master weights, the moments and, for ZeRO-2 and below, the module's weights once more.
    """
    saved_parameters = shape.trained_parameters if shape.has_adapters else shape.total_parameters
    reference_bytes = shape.total_parameters * shape.weight_bytes if reference else 0
    if sharding.stage is None:
        parameter_bytes = FLOAT if shape.has_adapters else shape.weight_bytes
        model = saved_parameters * parameter_bytes
        optimizer = MOMENTS * shape.trained_parameters * parameter_bytes
        return model + optimizer + reference_bytes + _SMALL_FILES
    parameter_bytes = 2 if mixed else shape.weight_bytes
    model = saved_parameters * parameter_bytes
    optimizer = shape.trained_parameters * (MOMENTS + 1) * FLOAT
    # Under ZeRO-3 the module's file has only the weights that are not trained.
    module_parameters = shape.total_parameters
    if sharding.stage >= 3:
        module_parameters -= shape.trained_parameters
    module = module_parameters * parameter_bytes
    return model + optimizer + module + reference_bytes + _SMALL_FILES


def checkpoint_of(config: AdoraGRPOConfig, shape: ModelShape, sharding: Sharding) -> int:
    """Return bytes of one checkpoint of a run."""
    mixed = bool(config.bf16 or config.fp16)
    return checkpoint_bytes(shape, sharding=sharding, mixed=mixed, reference=config.sync_ref_model)


def run_bytes(checkpoint: int, model: int, checkpoints: int) -> int:
    """Return the largest size of a run's folder, in bytes.

    It holds `checkpoints` finished checkpoints, one that is being written, and the final model.
    """
    return checkpoint * (checkpoints + 1) + model
