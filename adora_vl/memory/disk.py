"""The size of a checkpoint."""

from __future__ import annotations

from adora_vl.memory.model import ModelShape
from adora_vl.memory.sharding import Sharding

_SMALL = 2 * 2**20  # scheduler, random states, trainer_state.json and manifest, beside the tokenizer of a small model
_FLOAT, _ADAM = 4, 2


def checkpoint_bytes(shape: ModelShape, sharding: Sharding, *, mixed: bool, processor: int = 0) -> int:
    """One `checkpoint-N` folder of all ranks: weights (with LoRA the adapter alone), optimizer, processor.

    DeepSpeed writes, beside the model for `from_pretrained`, its own float32 master weights, the moments and, for
    ZeRO-2 and below, the module's weights once more.
    """
    if sharding.stage is None:
        byte = _FLOAT if shape.adapters else shape.weight_bytes
        model = shape.trained * byte if shape.adapters else shape.total * byte
        return model + _ADAM * shape.trained * byte + processor + _SMALL
    byte = 2 if mixed else shape.weight_bytes
    model = (shape.trained if shape.adapters else shape.total) * byte
    optimizer = shape.trained * (_ADAM + 1) * _FLOAT
    module = shape.total * byte if sharding.stage < 3 else (shape.total - shape.trained) * byte
    return model + optimizer + module + processor + _SMALL


def replay_bytes(groups: int, processes: int, image_tokens: int, shape: ModelShape) -> int:
    """The images of `adora_replay_groups` in a checkpoint, of all processes. Their tokens are small beside them."""
    return groups * processes * image_tokens * shape.merge**2 * shape.patch_values * _FLOAT


def run_bytes(checkpoint: int, model: int, kept: int) -> int:
    """The largest size of a run's folder: `kept` checkpoints, the one that is written before the oldest is deleted, and
    the final model."""
    return checkpoint * (kept + 1) + model
