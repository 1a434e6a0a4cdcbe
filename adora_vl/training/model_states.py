"""What a training holds on each GPU all the time: weights, gradients, optimizer and reference.

The figures are in bytes, by how the run is spread over processes.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from adora_vl.config.sharding import Sharding
from adora_vl.models.activations import FLOAT32_BYTES, DtypeBytes
from adora_vl.models.shape import ModelShape

# DeepSpeed's reduce_bucket_size, which it allocates whole, however small the model is
REDUCE_BUCKET_PARAMETERS = 500_000_000
# its stage3_max_live_parameters: how many parameters are gathered for the layers that compute
MAX_LIVE_PARAMETERS = 1_000_000_000
# its sub_group_size: how many gradients are copied to float32 at a time in an optimizer step
SUB_GROUP_PARAMETERS = 1_000_000_000
ADAM_MOMENTS = 2  # how many numbers Adam keeps for each parameter


@dataclass(frozen=True)
class ModelStateBytes:
    """The bytes that a training holds on one GPU all the time, by what they are for.

    `host_optimizer_bytes` is the exception: it lies in host memory, for this GPU.
    """

    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    reference_bytes: int
    gathered_weight_bytes: int = 0  # those of other ranks, while a layer computes (ZeRO-3)
    step_bytes: int = 0  # in addition, during an optimizer step
    host_optimizer_bytes: int = 0  # optimizer states with offload, in host memory


class _OptimizerBytes(NamedTuple):
    """The bytes of the optimizer's states and of what its step needs in addition, on one GPU."""

    state_bytes: int
    step_bytes: int


def predict_state_bytes(
    shape: ModelShape, sharding: Sharding, *, has_reference: bool, mixed_precision: bool
) -> ModelStateBytes:
    """Predict the bytes of weights, gradients, optimizer and reference model on one GPU.

    For example, full training of 1e9 parameters in bfloat16 by ZeRO-2 on 4 GPUs: weights 2 GB,
    gradients 1.5 GB (0.5 GB and a bucket of 1 GB), optimizer 3 GB, and 1 GB more during its step.

    Args:
        shape: Numbers of parameters: of the model, and of what is trained.
        sharding: Processes, ZeRO stage and offload.
        has_reference: Whether the run has a reference model (`beta` above 0). It is whole on each
            GPU except under ZeRO-3. LoRA needs none, since TRL switches the adapter off instead.
        mixed_precision: Whether DeepSpeed computes in bfloat16 or float16, and so keeps float32
            master weights. Without it gradients and moments have the dtype of the weights, and
            those of a LoRA adapter are float32 (the default of PEFT).
    """
    if sharding.zero_stage is None:
        return _states_without_deepspeed(shape, sharding.processes, has_reference=has_reference)
    bytes_per_weight = 2 if mixed_precision else shape.bytes_per_weight
    ranks = sharding.processes
    # ZeRO-1 divides the optimizer states over the ranks, ZeRO-2 the gradients too, ZeRO-3 also the
    # weights.
    optimizer_ranks = ranks if sharding.zero_stage >= 1 else 1
    gradient_ranks = ranks if sharding.zero_stage >= 2 else 1
    weight_ranks = ranks if sharding.zero_stage >= 3 else 1

    weight_bytes = shape.total_parameters * bytes_per_weight // weight_ranks
    keeps_reference = has_reference and not shape.has_adapters
    gathered_weight_bytes = 0
    if sharding.zero_stage == 3 and ranks > 1:
        gathered_weight_bytes = min(shape.total_parameters, MAX_LIVE_PARAMETERS) * bytes_per_weight
    bucket_bytes = REDUCE_BUCKET_PARAMETERS * bytes_per_weight if sharding.zero_stage >= 2 else 0
    states = ModelStateBytes(
        weight_bytes=0 if sharding.offload_parameters else weight_bytes,
        gradient_bytes=bucket_bytes,
        optimizer_bytes=0,
        reference_bytes=weight_bytes if keeps_reference else 0,
        gathered_weight_bytes=gathered_weight_bytes,
    )
    if sharding.offload_optimizer:
        # DeepSpeed's optimizer on the host keeps float32 weights and gradients of its own beside
        # the moments, whatever dtype the model has, and one buffer in that dtype.
        bytes_per_parameter = (ADAM_MOMENTS + 2) * FLOAT32_BYTES + bytes_per_weight
        host_optimizer_bytes = shape.trained_parameters * bytes_per_parameter // optimizer_ranks
        return replace(states, host_optimizer_bytes=host_optimizer_bytes)
    optimizer = _optimizer_bytes(
        shape.trained_parameters,
        optimizer_ranks=optimizer_ranks,
        weight_ranks=weight_ranks,
        mixed_precision=mixed_precision,
    )
    gradient_bytes = shape.trained_parameters * bytes_per_weight // gradient_ranks
    return replace(
        states,
        gradient_bytes=bucket_bytes + gradient_bytes,
        optimizer_bytes=optimizer.state_bytes,
        step_bytes=optimizer.step_bytes,
    )


def _optimizer_bytes(
    trained_parameters: int, *, optimizer_ranks: int, weight_ranks: int, mixed_precision: bool
) -> _OptimizerBytes:
    """Predict the bytes of DeepSpeed's optimizer on one GPU.

    Args:
        trained_parameters: how many parameters are trained.
        optimizer_ranks: ranks over which the states of the optimizer are divided.
        weight_ranks: ranks over which the weights are divided.
        mixed_precision: whether the optimizer keeps float32 master weights of a 16 bit model.
    """
    master_bytes = FLOAT32_BYTES if mixed_precision else 0
    bytes_per_parameter = ADAM_MOMENTS * FLOAT32_BYTES + master_bytes
    state_bytes = trained_parameters * bytes_per_parameter // optimizer_ranks
    if not mixed_precision:
        return _OptimizerBytes(state_bytes=state_bytes, step_bytes=0)
    # In a step DeepSpeed copies the gradients to float32. ZeRO-3, which alone divides the weights,
    # does so for one sub-group of parameters at a time.
    copied_gradients = trained_parameters // optimizer_ranks
    if weight_ranks > 1:
        copied_gradients = min(copied_gradients, SUB_GROUP_PARAMETERS)
    return _OptimizerBytes(state_bytes=state_bytes, step_bytes=FLOAT32_BYTES * copied_gradients)


def _states_without_deepspeed(
    shape: ModelShape, processes: int, *, has_reference: bool
) -> ModelStateBytes:
    """Predict the bytes of a training without DeepSpeed, where every GPU holds all of them.

    `processes`: with several, DDP adds buckets for the gradients. `has_reference`: whether the run
    has a reference model.
    """
    weight_bytes = shape.base_bytes(shape.bytes_per_weight)
    bytes_per_trained_parameter = shape.bytes_per_weight
    if shape.has_adapters:
        # PEFT makes LoRA matrices in float32, beside the frozen weights.
        bytes_per_trained_parameter = FLOAT32_BYTES
        weight_bytes += shape.trained_parameters * FLOAT32_BYTES
    gradient_copies = 2 if processes > 1 else 1  # DDP's buckets are a second copy
    keeps_reference = has_reference and not shape.has_adapters
    return ModelStateBytes(
        weight_bytes=weight_bytes,
        gradient_bytes=shape.trained_parameters * bytes_per_trained_parameter * gradient_copies,
        optimizer_bytes=ADAM_MOMENTS * shape.trained_parameters * bytes_per_trained_parameter,
        reference_bytes=shape.total_parameters * shape.bytes_per_weight if keeps_reference else 0,
    )


def dtypes_of(shape: ModelShape, sharding: Sharding, *, mixed_precision: bool) -> DtypeBytes:
    """Return the bytes per number in a forward and backward pass.

    `mixed_precision`: whether the run computes in bf16 or fp16.
    """
    # DeepSpeed casts the weights, and so the residual stream, to the 16 bit dtype. torch's autocast
    # leaves both as they are.
    weights_are_cast = sharding.zero_stage is not None and mixed_precision
    return DtypeBytes(
        compute_bytes=2 if mixed_precision else shape.bytes_per_weight,
        residual_bytes=2 if weights_are_cast else shape.bytes_per_weight,
        is_mixed=mixed_precision,
    )
