"""Chooses how many layers of the language model the backward pass computes again.

Gradient checkpointing keeps only the input of a layer and computes the layer a second time, which
is a fifth and more of a step's work. If the GPU has room for all activations of a layer, that work
is wasted. So each micro-batch recomputes as few layers as its tokens and the free memory allow, by
the formulas of the dry run. A layer has the same values either way.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import is_flash_attention_requested

from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.sharding import Sharding
from adora_vl.models.activations import PassSize
from adora_vl.models.families import LANGUAGE_MODEL, component_of
from adora_vl.models.peak_memory import ActivationMemory, usable_bytes
from adora_vl.models.shape import ModelShape
from adora_vl.packing.split_attention import configured_attention
from adora_vl.training.model_states import dtypes_of, predict_state_bytes
from adora_vl.types import StepContext

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RECOMPUTED_LAYERS_KEY = "adora/recomputed_layers"
# Gradients are copied before a pass, so that they can be restored when it runs out of memory. That
# is done if they take at most this share of the GPU. An adapter's gradients do.
_MAX_COPIED_SHARE = 0.02


class GpuBytes(NamedTuple):
    """The memory of a GPU, in bytes."""

    free: int  # that this process can still take
    total: int


def recomputable_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """Return the decoder layers that gradient checkpointing can recompute, in their order."""
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, GradientCheckpointingLayer) and component_of(name) == LANGUAGE_MODEL
    ]


def gpu_bytes(device: torch.device) -> GpuBytes:
    """Return how much memory of its GPU this process can still take, and how much the GPU has.

    Memory is free if the driver says so, or if torch has reserved it and no tensor uses it. The
    gaps within reserved blocks that are partly in use do not count as free. For example, with 20 GB
    free by the driver, 60 reserved, 50 allocated and 4 in gaps, 26 GB are free.
    """
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    reserved = stats.get("reserved_bytes.all.current", 0)
    allocated = stats.get("allocated_bytes.all.current", 0)
    gaps = stats.get("inactive_split_bytes.all.current", 0)
    free_in_cache = reserved - allocated - gaps
    return GpuBytes(free=free + free_in_cache, total=total)


class RecomputedLayers:
    """Decides for each training pass in how many decoder layers gradient checkpointing is on.

    A layer with gradient checkpointing is recomputed in the backward pass, which saves memory and
    costs time. The vision tower stays as it is. `count`: how many layers were recomputed in the
    last training pass.
    """

    def __init__(
        self,
        context: StepContext,
        model: "PreTrainedModel",
        shape: Callable[[], ModelShape],
        sharding: Sharding,
        read_gpu_bytes: Callable[[], GpuBytes] | None,
    ) -> None:
        """Build the object by the key `adora_recompute`: `all`, a number of layers, or `auto`.

        Args:
            context: accelerator, config, log and state, which every part of a training step gets.
            model: the policy, with or without a wrapper.
            shape: returns the sizes of the policy.
            sharding: how the run divides the weights among ranks.
            read_gpu_bytes: returns the memory of this process's GPU. None on a CPU, where `auto`
                recomputes all layers, since other processes use the same memory.
        """
        config = context.config
        self._accelerator = context.accelerator
        self._log = context.log
        self._sharding = sharding
        self._read_gpu_bytes = read_gpu_bytes
        self._layers = recomputable_layers(model)
        self._trained_parameters = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        attention = configured_attention(model.config)
        self._uses_flash_attention = is_flash_attention_requested(
            requested_attention_implementation=attention
        )
        self._has_printed_count = False
        self.count = len(self._layers)
        requested = config.adora_recompute
        # torch.compile would compile the layers again for every change.
        can_switch = config.gradient_checkpointing and not config.torch_compile
        # The number of layers that the user has chosen; None: `all` or `auto`.
        self._fixed_count: int | None = None
        if can_switch and isinstance(requested, int):
            self._fixed_count = min(requested, len(self._layers))
        # Predicts the memory of a pass with `auto`; None: the layers are not switched by memory.
        self._activation_memory: ActivationMemory | None = None
        if can_switch and requested == "auto" and read_gpu_bytes is not None:
            sizes = shape()
            # The prediction counts decoder layers, so these have to be the recomputable ones.
            if sizes.text.layers == len(self._layers):
                self._activation_memory = activation_memory_of(config, sizes, sharding)
        # Whether a micro-batch that runs out of memory is run once more. With several ranks it is
        # not, since a rank that repeats a pass alone leaves the others waiting. With TRL's adaptive
        # coefficient it is not, since TRL sums entropies in a pass and would count both tries.
        is_single_process = self._accelerator.num_processes == 1 and sharding.zero_stage is None
        self._can_retry = is_single_process and not config.use_adaptive_entropy

    @contextmanager
    def switched(self, size: PassSize) -> Iterator[None]:
        """Switch gradient checkpointing of layers on or off, for the forward pass inside the block.

        As few layers are recomputed as memory allows. It is called once for each micro-batch, on
        every rank together. A layer reads its flag in the forward pass alone, so all flags are as
        before when the block ends.

        `size`: the size of the pass, from which its memory is predicted.
        """
        count = self._count_for(size)
        if count is None:
            yield
            return
        self.count = count
        self._log(RECOMPUTED_LAYERS_KEY, float(count))
        self._print_count_once(size)
        flags_before = [layer.gradient_checkpointing for layer in self._layers]
        for index, layer in enumerate(self._layers):
            layer.gradient_checkpointing = index < count
        try:
            yield
        finally:
            for layer, flag in zip(self._layers, flags_before, strict=True):
                layer.gradient_checkpointing = flag

    def _count_for(self, size: PassSize) -> int | None:
        """Return how many layers a pass of this size recomputes; None: no layer is switched.

        Collective with several processes.
        """
        # A number that the user has chosen, or all layers after the memory ran out.
        if self._fixed_count is not None:
            return self._fixed_count
        # Nothing predicts the memory: `all`, or a run that cannot switch layers.
        if self._activation_memory is None:
            return None
        # Flash attention reads lengths where other kernels read a mask.
        has_padding_mask = size.has_padding_mask and not self._uses_flash_attention
        size = replace(size, has_padding_mask=has_padding_mask)
        count = self._activation_memory.fewest_recomputed_layers(
            size, self._bytes_for_activations(self._activation_memory)
        )
        if self._accelerator.num_processes == 1:
            return count
        # Collective: under ZeRO-3 a recomputed layer gathers its weights twice. The ranks go
        # through the layers in lockstep, so all recompute as many as the rank that needs most.
        count_1 = torch.tensor([count], device=self._accelerator.device)
        return int(self._accelerator.gather(count_1).max())

    def _bytes_for_activations(self, activation_memory: ActivationMemory) -> int:
        """Return the bytes of the GPU that the activations of a pass may take."""
        assert self._read_gpu_bytes is not None, "memory is predicted only for a GPU"
        gpu = self._read_gpu_bytes()
        usable = usable_bytes(gpu_bytes=gpu.total, free_bytes=gpu.free)
        return usable - self._bytes_of_new_gradients(activation_memory)

    def _bytes_of_new_gradients(self, activation_memory: ActivationMemory) -> int:
        """Return the bytes of gradients that a pass allocates, and of weights that it gathers.

        Without DeepSpeed no weights are gathered, and gradients that exist already do not count.
        """
        if self._sharding.zero_stage is None:
            return sum(
                parameter.nbytes for parameter in self._trained_parameters if parameter.grad is None
            )
        # DeepSpeed allocates some of its buffers in the first backward pass and holds them, so they
        # may be counted twice: a few layers more than necessary are then recomputed.
        computes_in_16_bits = activation_memory.dtypes.compute_bytes == 2
        buffers = predict_state_bytes(
            activation_memory.shape,
            sharding=self._sharding,
            has_reference=False,
            mixed_precision=computes_in_16_bits,
        )
        return buffers.gradient_bytes + buffers.gathered_weight_bytes

    def _print_count_once(self, size: PassSize) -> None:
        """Print how many layers the first micro-batch recomputes, once in a run."""
        if self._has_printed_count or not self._accelerator.is_main_process:
            return
        self._has_printed_count = True
        print(
            f"{self.count} of {len(self._layers)} layers are recomputed in the first micro-batch "
            f"of {size.tokens} tokens (adora_recompute; {RECOMPUTED_LAYERS_KEY} has those of each step)",
            flush=True,
        )

    def run_with_retry(
        self,
        train_micro_batch: Callable[[], Tensor],
        snapshot_log: Callable[[], Callable[[], None]],
    ) -> Tensor:
        """Train on a micro-batch, and once more with all layers recomputed if memory runs out.

        What the first try has changed in gradients and log is undone, and all layers are recomputed
        in the rest of the run. The error ends the run if all layers were recomputed already. It
        does so with several processes too: the others would wait in the backward pass for the
        gradients of this one, or under ZeRO-3 for its part of the weights.

        Args:
            train_micro_batch: runs the micro-batch forward and backward, and returns its loss, ().
            snapshot_log: returns a function that undoes what was logged since.
        """
        if self._activation_memory is None or not self._can_retry:
            return train_micro_batch()
        assert self._read_gpu_bytes is not None
        gradients_before = GradientSnapshots(
            self._trained_parameters,
            max_copied_bytes=int(_MAX_COPIED_SHARE * self._read_gpu_bytes().total),
        )
        restore_log = snapshot_log()
        try:
            return train_micro_batch()
        except torch.OutOfMemoryError:
            if self.count == len(self._layers) or not gradients_before.restore():
                raise
        # The second try stands behind the `except` block. The traceback of the error holds what the
        # failed pass has allocated, and is freed when the block ends.
        restore_log()
        self._recompute_all()
        return train_micro_batch()

    def _recompute_all(self) -> None:
        """Recompute all layers in the rest of the run, print that, and empty torch's cache."""
        print(
            f"out of the card's memory with {self.count} of {len(self._layers)} layers recomputed: "
            "the micro-batch is made once more, and all are from here on; adora_recompute: all does "
            "so from the beginning",
            flush=True,
        )
        self._activation_memory = None
        self._fixed_count = len(self._layers)
        gc.collect()
        if self._accelerator.device.type == "cuda":
            torch.cuda.empty_cache()


class _GradientSnapshot(NamedTuple):
    """The gradient of a parameter before a backward pass."""

    gradient: Tensor | None
    version: int  # torch's count of changes in place
    copy: Tensor | None  # of the gradient's values; None where they were not copied


class GradientSnapshots:
    """The gradients of parameters before a backward pass that may run out of memory."""

    def __init__(self, parameters: Sequence[nn.Parameter], max_copied_bytes: int) -> None:
        """Keep the gradients, with copies of their values if these take at most `max_copied_bytes`.

        Without copies torch's version counter of a gradient still tells whether a pass changed it.
        """
        self._parameters = parameters
        gradients = [parameter.grad for parameter in parameters]
        total_bytes = sum(gradient.nbytes for gradient in gradients if gradient is not None)
        copies_values = total_bytes <= max_copied_bytes
        self._snapshots = []
        for gradient in gradients:
            version = 0
            copy = None
            if gradient is not None:
                version = gradient._version
                copy = gradient.clone() if copies_values else None
            self._snapshots.append(_GradientSnapshot(gradient=gradient, version=version, copy=copy))

    def restore(self) -> bool:
        """Undo what a pass has added to the gradients, and return whether that was possible.

        It is impossible if the pass has changed a gradient whose values were not copied.
        """
        changed_snapshots = [
            snapshot
            for snapshot in self._snapshots
            if snapshot.gradient is not None and snapshot.gradient._version != snapshot.version
        ]
        if any(snapshot.copy is None for snapshot in changed_snapshots):
            return False
        # A parameter that had no gradient has none again.
        for parameter, snapshot in zip(self._parameters, self._snapshots, strict=True):
            parameter.grad = snapshot.gradient
        for snapshot in changed_snapshots:
            assert snapshot.gradient is not None
            assert snapshot.copy is not None
            snapshot.gradient.copy_(snapshot.copy)
        return True


def activation_memory_of(
    config: AdoraGRPOConfig, shape: ModelShape, sharding: Sharding, *, on_gpu: bool = True
) -> ActivationMemory:
    """Return the object that predicts how much memory the policy's activations take in a pass.

    Args:
        config: says whether gradient checkpointing is on, and in which dtypes passes compute.
        shape: the sizes of the policy.
        sharding: how the run divides the weights among ranks.
        on_gpu: whether the passes run on a GPU, with its kernels.
    """
    is_mixed_precision = bool(config.bf16 or config.fp16)
    return ActivationMemory(
        shape=shape,
        dtypes=dtypes_of(shape, sharding, mixed_precision=is_mixed_precision),
        checkpointing=config.gradient_checkpointing,
        shares_vision=config.shares_vision,
        on_gpu=on_gpu,
    )
