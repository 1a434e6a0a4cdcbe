"""What a training holds on each card all the time: weights, gradients, optimizer and reference.

The figures are in bytes, by how the run is spread over processes.
"""

from dataclasses import dataclass

from adora_vl.config.sharding import Sharding
from adora_vl.models.activations import FLOAT, DtypeBytes
from adora_vl.models.shape import ModelShape

# reduce_bucket_size, in parameters: allocated whole, however small the model is
BUCKET = 500_000_000
LIVE_PARAMETERS = 1_000_000_000  # stage3_max_live_parameters: gathered for the layers at work
SUB_GROUP = 1_000_000_000  # sub_group_size: what one part of the optimizer step turns into float32
MOMENTS = 2  # of a parameter, in Adam


@dataclass(frozen=True)
class States:
    """The states of a training in bytes on one card.

    `host_optimizer` is the exception: it lies in host memory, for this card.
    """

    weights: int
    gradients: int
    optimizer: int
    reference: int
    gathered: int = 0  # of other ranks' weights, while layers are at work (ZeRO-3)
    step: int = 0  # in addition, while the optimizer steps
    host_optimizer: int = 0


def states(shape: ModelShape, sharding: Sharding, *, reference: bool, mixed: bool) -> States:
    """Return the bytes of weights, gradients, optimizer and reference model on one card.

    Args:
        shape: Sizes of the model and of what is trained.
        sharding: Processes, ZeRO stage and offload.
        reference: Whether a reference model is held (`beta` above 0). It is whole on each card
            except under ZeRO-3. LoRA needs none, since TRL switches the adapter off instead.
        mixed: Whether DeepSpeed computes in bfloat16 or float16, and so keeps float32 master
            weights. Without it gradients and moments have the dtype of the weights, and those of
            a LoRA adapter are float32 (the default of PEFT).
    """
    if sharding.stage is None:
        return _plain(shape, sharding.processes, reference)
    byte = 2 if mixed else shape.weight_bytes
    ranks = sharding.processes
    # The number of ranks over which each kind of state is divided: ZeRO-1 divides the optimizer,
    # ZeRO-2 the gradients too, ZeRO-3 also the weights.
    optimizer_ranks = ranks if sharding.stage >= 1 else 1
    gradient_ranks = ranks if sharding.stage >= 2 else 1
    weight_ranks = ranks if sharding.stage >= 3 else 1
    weights = shape.total * byte // weight_ranks
    gradients = shape.trained * byte // gradient_ranks
    bucket = BUCKET * byte if sharding.stage >= 2 else 0
    master_bytes = FLOAT if mixed else 0
    optimizer = shape.trained * (MOMENTS * FLOAT + master_bytes) // optimizer_ranks
    # DeepSpeed's optimizer on the host has weights and gradients in float32 of its own, whatever
    # the model has
    on_host = shape.trained * ((MOMENTS + 2) * FLOAT + byte) // optimizer_ranks
    gathered = 0
    if sharding.stage == 3 and ranks > 1:
        gathered = min(shape.total, LIVE_PARAMETERS) * byte
    step = 0  # float32 copies of the gradients while the optimizer steps
    if mixed and not sharding.offload_optimizer:
        parameters = shape.trained // optimizer_ranks
        step = FLOAT * (min(parameters, SUB_GROUP) if weight_ranks > 1 else parameters)
    return States(
        weights=0 if sharding.offload_parameters else weights,
        gradients=bucket + (0 if sharding.offload_optimizer else gradients),
        optimizer=0 if sharding.offload_optimizer else optimizer,
        reference=weights if reference and not shape.adapters else 0,
        gathered=gathered,
        step=step,
        host_optimizer=on_host if sharding.offload_optimizer else 0,
    )


def _plain(shape: ModelShape, processes: int, reference: bool) -> States:
    """Return the states without DeepSpeed.

    They are whole on every card, with DDP where there are several.
    """
    byte = FLOAT if shape.adapters else shape.weight_bytes
    weights = shape.base_bytes(shape.weight_bytes) + (shape.trained * byte if shape.adapters else 0)
    copies = 2 if processes > 1 else 1  # DDP's buckets are a second copy of the gradients
    return States(
        weights=weights,
        gradients=shape.trained * byte * copies,
        optimizer=MOMENTS * shape.trained * byte,
        reference=shape.total * shape.weight_bytes if reference and not shape.adapters else 0,
    )


def dtypes_of(shape: ModelShape, sharding: Sharding, *, mixed: bool) -> DtypeBytes:
    """Return the sizes of the dtypes of a pass; `mixed`: bf16 or fp16."""
    # DeepSpeed casts the weights, and the residual stream with them; else they stay as they are
    cast = sharding.stage is not None and mixed
    return DtypeBytes(
        compute=2 if mixed else shape.weight_bytes, residual=2 if cast else shape.weight_bytes
    )
