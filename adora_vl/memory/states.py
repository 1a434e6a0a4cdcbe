"""Weights, gradients, optimizer and reference: what stays on a GPU from step to step, and what a step adds.

DeepSpeed's numbers are those of ZeRO (arXiv 1910.02054, section 3.1: 2 + 2 + 12 bytes per parameter with Adam in mixed
precision) and of the buffers in DeepSpeed 0.19.8 (`runtime/zero/config.py`, `stage3.py`, `stage_1_and_2.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from adora_vl.memory.model import ModelShape
from adora_vl.memory.sharding import Sharding

BUCKET = 500_000_000  # reduce_bucket_size, in parameters: allocated whole, however small the model is
LIVE_PARAMETERS = 1_000_000_000  # stage3_max_live_parameters: gathered for the layers at work
SUB_GROUP = 1_000_000_000  # sub_group_size: what one part of the optimizer step turns into float32
_FLOAT, _ADAM = 4, 2  # Adam keeps two moments


@dataclass(frozen=True)
class States:
    """Bytes on one card; `host_optimizer` in its host's memory, for this card."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    gathered: int  # of other ranks' weights, while layers are at work (ZeRO-3)
    step: int  # in addition, while the optimizer steps
    host_optimizer: int


def states(shape: ModelShape, sharding: Sharding, *, reference: bool, mixed: bool) -> States:
    """`mixed`: DeepSpeed computes in bfloat16 or float16, and then keeps float32 master weights.

    Without DeepSpeed gradients and moments have the dtype of the weights, and LoRA's own weights are float32 (peft's
    default). The reference model is whole on each card but for ZeRO-3, and LoRA needs none (TRL).
    """
    if sharding.stage is None:
        return _plain(shape, sharding.processes, reference)
    byte = 2 if mixed else shape.weight_bytes
    ranks = sharding.processes
    everything, trained = shape.total * byte, shape.trained
    over = {level: ranks if sharding.stage >= level else 1 for level in (1, 2, 3)}
    optimizer = trained * (_ADAM * _FLOAT + (_FLOAT if mixed else 0)) // over[1]
    # DeepSpeed's optimizer on the host has weights and gradients in float32 of its own, whatever the model has
    on_host = trained * ((_ADAM + 2) * _FLOAT + byte) // over[1]
    gradients = trained * byte // over[2]
    bucket = BUCKET * byte if sharding.stage >= 2 else 0
    part = trained // over[1]
    return States(
        weights=0 if sharding.offload_parameters else everything // over[3],
        gradients=bucket + (0 if sharding.offload_optimizer else gradients),
        optimizer=0 if sharding.offload_optimizer else optimizer,
        reference=everything // over[3] if reference and not shape.adapters else 0,
        gathered=min(shape.total, LIVE_PARAMETERS) * byte if sharding.stage == 3 and ranks > 1 else 0,
        step=0 if sharding.offload_optimizer or not mixed else _FLOAT * (min(part, SUB_GROUP) if over[3] > 1 else part),
        host_optimizer=on_host if sharding.offload_optimizer else 0,
    )


def _plain(shape: ModelShape, processes: int, reference: bool) -> States:
    byte = _FLOAT if shape.adapters else shape.weight_bytes
    base = (shape.total - shape.trained) if shape.adapters else shape.total
    weights = base * shape.weight_bytes + (shape.trained * byte if shape.adapters else 0)
    copies = 2 if processes > 1 else 1  # DDP's buckets are a second copy of the gradients
    return States(
        weights=weights,
        gradients=shape.trained * byte * copies,
        optimizer=_ADAM * shape.trained * byte,
        reference=shape.total * shape.weight_bytes if reference and not shape.adapters else 0,
        gathered=0,
        step=0,
        host_optimizer=0,
    )
