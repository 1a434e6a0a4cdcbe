"""The disk space that a run will need, computed from shapes alone, in bytes."""

import math

from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.batch_plan import BatchLayout, total_optimizer_steps
from adora_vl.config.sharding import Sharding
from adora_vl.models.activations import FLOAT32_BYTES
from adora_vl.models.shape import ModelShape
from adora_vl.training.model_states import ADAM_MOMENTS

# Scheduler, random states, trainer_state.json and manifest, beside the tokenizer of a small model
_SMALL_FILES_BYTES = 2 * 2**20


def predict_checkpoint_bytes(config: AdoraGRPOConfig, shape: ModelShape, sharding: Sharding) -> int:
    """Predict the bytes of one `checkpoint-N` folder, with the files of all ranks.

    A checkpoint has the weights and the optimizer. With LoRA the weights are those of the adapter
    alone. DeepSpeed writes files of its own beside the model for `from_pretrained`: float32 master
    weights, Adam's moments, and the module's weights once more. A reference model that changes in
    the run (`sync_ref_model`) is saved too.

    Args:
        config: The training keys.
        shape: The number of parameters of the model, and how many of them are trained.
        sharding: Processes and ZeRO stage.
    """
    saved_parameters = shape.trained_parameters if shape.has_adapters else shape.total_parameters
    reference_bytes = (
        shape.total_parameters * shape.bytes_per_weight if config.sync_ref_model else 0
    )
    # Without DeepSpeed, weights and Adam's moments have the dtype of the training. For an adapter
    # that is float32.
    if sharding.zero_stage is None:
        bytes_per_parameter = FLOAT32_BYTES if shape.has_adapters else shape.bytes_per_weight
        model_bytes = saved_parameters * bytes_per_parameter
        optimizer_bytes = ADAM_MOMENTS * shape.trained_parameters * bytes_per_parameter
        return model_bytes + optimizer_bytes + reference_bytes + _SMALL_FILES_BYTES
    bytes_per_parameter = 2 if config.bf16 or config.fp16 else shape.bytes_per_weight
    model_bytes = saved_parameters * bytes_per_parameter
    master_and_moments_bytes = (1 + ADAM_MOMENTS) * FLOAT32_BYTES
    optimizer_bytes = shape.trained_parameters * master_and_moments_bytes
    # Under ZeRO-3 the module's file has only the weights that are not trained.
    module_parameters = shape.total_parameters
    if sharding.zero_stage >= 3:
        module_parameters -= shape.trained_parameters
    module_bytes = module_parameters * bytes_per_parameter
    return model_bytes + optimizer_bytes + module_bytes + reference_bytes + _SMALL_FILES_BYTES


def max_checkpoint_count(
    config: AdoraGRPOConfig, layout: BatchLayout, rows: int | None
) -> int | None:
    """Return the largest number of checkpoints that a run's folder has at once.

    An old checkpoint is deleted only after a new one is complete. So there is one more than
    `save_total_limit` while the new one is written. A short run writes fewer.

    For example, with a limit of 2 a run of 100 steps that saves every 10 steps has 3 at once. A run
    of 15 steps has 2.

    Args:
        config: The run's config.
        layout: The sizes of its batches.
        rows: The number of rows to train on; None where it is not known.

    Returns None where no limit is set and the length of the run is not known.
    """
    if config.save_strategy == "no":
        return 0
    counts = []
    if config.save_total_limit is not None:
        counts.append(config.save_total_limit + 1)
    steps_between_checkpoints: int | None = int(config.save_steps)
    if config.save_strategy == "epoch":
        steps_between_checkpoints = None
        if rows is not None:
            steps_between_checkpoints = layout.optimizer_steps_per_epoch(rows)
    total_steps = total_optimizer_steps(config, layout, rows)
    if total_steps is not None and steps_between_checkpoints is not None:
        # The last step of a run is saved too.
        counts.append(math.ceil(total_steps / steps_between_checkpoints))
    return min(counts, default=None)


def max_run_folder_bytes(
    checkpoint_bytes: int, model_bytes: int, checkpoint_count: int, record_gb: float
) -> int:
    """Return the largest size of a run's folder, in bytes.

    The folder is largest at the end: then it has all its checkpoints, the final model, and a full
    record of the rollouts.

    Args:
        checkpoint_bytes: Bytes of one checkpoint.
        model_bytes: Bytes of the final model.
        checkpoint_count: How many checkpoints the folder has at once, as `max_checkpoint_count`
            counts them.
        record_gb: The key `adora_record_gb`, in 10^9 bytes.
    """
    return checkpoint_bytes * checkpoint_count + model_bytes + int(record_gb * 1e9)
