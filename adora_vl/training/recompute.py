"""Chooses how many layers of the language model the backward pass computes again.

Gradient checkpointing keeps the input of a layer alone and computes the layer a second time, which
is a fifth and more of a step's work. Where the card has room for what a layer keeps, that work buys
nothing. So for each micro-batch as few layers are recomputed as its tokens and the free memory
allow, by the formulas of the dry run. A layer has the same values either way.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import is_flash_attention_requested

from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.sharding import Sharding
from adora_vl.config.states import dtypes_of, states
from adora_vl.models.activations import ActivationMemory, PassSize, usable_bytes
from adora_vl.models.families import LANGUAGE_MODEL, component_of
from adora_vl.models.shape import ModelShape
from adora_vl.packing.split_attention import configured_attention
from adora_vl.types import StepContext

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIGURE = "adora/recomputed_layers"
# Of a card: gradients up to this share are copied before a pass, so that they can be restored when
# it runs out of memory. Those of an adapter are smaller.
_COPIED = 0.02

# returns the bytes that are free on the card of this process, and those that it has
CardBytes = Callable[[], tuple[int, int]]


def language_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """Return the layers of the language model that checkpointing can recompute, in their order."""
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, GradientCheckpointingLayer) and component_of(name) == LANGUAGE_MODEL
    ]


def card_bytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes that this process can still take on its card, and those of the whole card.

    What an engine that sleeps in the process has left there, and what other processes have, is
    taken. What torch has in its cache is free, but for the gaps in blocks that are in use.
    """
    free, total = torch.cuda.mem_get_info(device)
    figures = torch.cuda.memory_stats(device)
    cached = figures.get("reserved_bytes.all.current", 0)
    cached -= figures.get("allocated_bytes.all.current", 0)
    cached -= figures.get("inactive_split_bytes.all.current", 0)
    return free + cached, total


class RecomputedLayers:
    """Switches the checkpoints of the language model's layers for each pass that learns.

    `number` is that of the last such pass. The vision tower stays as gradient checkpointing has it.
    """

    def __init__(
        self,
        context: StepContext,
        model: "PreTrainedModel",
        shape: Callable[[], ModelShape],
        sharding: Sharding,
        card: CardBytes | None,
    ) -> None:
        """Look at what the run asks for.

        Args:
            context: of the run.
            model: the policy, in whatever wrapper.
            shape: returns the sizes of the policy.
            sharding: of the run.
            card: tells the memory of this process's card; None on a CPU, whose memory is not this
                process's alone, so that `auto` recomputes all layers there.
        """
        config = context.config
        self._accelerator = context.accelerator
        self._log = context.log
        self._sharding = sharding
        self._card = card
        self._layers = language_layers(model)
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        attention = configured_attention(model.config)
        self._flash = is_flash_attention_requested(requested_attention_implementation=attention)
        self._said = False
        self.number = len(self._layers)
        key = config.adora_recompute
        # Another number would compile the layer again
        switches = config.gradient_checkpointing and not config.torch_compile
        self._fixed = min(key, self.number) if switches and isinstance(key, int) else None
        self._activation_memory: ActivationMemory | None = None
        if switches and key == "auto" and card is not None:
            self._activation_memory = self._activation_memory_of(shape(), config)
        # TRL's adaptive coefficient sums entropies in a pass, and would count a retried one twice
        alone = self._accelerator.num_processes == 1 and sharding.stage is None
        self._can_retry = alone and not config.use_adaptive_entropy

    def _activation_memory_of(
        self, shape: ModelShape, config: AdoraGRPOConfig
    ) -> ActivationMemory | None:
        """Return what the formulas read; None where they do not know these layers."""
        if shape.text.layers != len(self._layers):
            return None
        return activation_memory_of(config, shape, self._sharding)

    @contextmanager
    def chosen(self, size: PassSize) -> Iterator[None]:
        """Recompute as few layers as need be in the pass of this size inside the block.

        It is called once for each micro-batch, on every rank together. The flags are read in the
        forward pass alone, so they are as before when the block ends.
        """
        number = self._number_for(size)
        if number is None:
            yield
            return
        self.number = number
        self._log(FIGURE, float(number))
        self._say(size)
        flags = [layer.gradient_checkpointing for layer in self._layers]
        for index, layer in enumerate(self._layers):
            layer.gradient_checkpointing = index < number
        try:
            yield
        finally:
            for layer, flag in zip(self._layers, flags, strict=True):
                layer.gradient_checkpointing = flag

    def _number_for(self, size: PassSize) -> int | None:
        """Return the layers to recompute in a pass; None leaves them as they are."""
        if self._fixed is not None:
            return self._fixed
        if self._activation_memory is None:
            return None
        # flash attention reads lengths where others read a mask
        size = replace(size, has_padding_mask=size.has_padding_mask and not self._flash)
        number = self._activation_memory.fewest_recomputed_layers(size, self._room())
        if self._accelerator.num_processes == 1:
            return number
        # Collective: under ZeRO-3 a recomputed layer gathers its weights twice, so the ranks, which
        # go through the layers in lockstep, recompute the same ones: as many as the rank needs that
        # has most tokens, or least memory.
        numbers = torch.tensor([number], device=self._accelerator.device)
        return int(self._accelerator.gather(numbers).max())

    def _room(self) -> int:
        """Return the bytes that the activations of a pass may take."""
        assert self._card is not None
        assert self._activation_memory is not None
        free, total = self._card()
        return usable_bytes(total, free) - self._coming(self._activation_memory)

    def _coming(self, activation_memory: ActivationMemory) -> int:
        """Return the bytes of gradients, and of gathered weights, that the pass brings."""
        if self._sharding.stage is None:
            missing = [parameter.nbytes for parameter in self._trained if parameter.grad is None]
            return sum(missing)
        # DeepSpeed allocates some of its buffers in the first backward pass and holds them, so that
        # they may be counted twice: a few layers more are then recomputed than need be.
        buffers = states(
            activation_memory.shape,
            sharding=self._sharding,
            has_reference=False,
            mixed_precision=activation_memory.dtypes.compute == 2,
        )
        return buffers.gradients + buffers.gathered

    def _say(self, size: PassSize) -> None:
        """Say once how many layers are recomputed."""
        if self._said or not self._accelerator.is_main_process:
            return
        self._said = True
        print(
            f"{self.number} of {len(self._layers)} layers are recomputed in the first micro-batch "
            f"of {size.tokens} tokens (adora_recompute; {FIGURE} has those of each step)",
            flush=True,
        )

    def retried(self, step: Callable[[], Tensor], figures: Mapping[str, list[float]]) -> Tensor:
        """Run `step`, and once more with all layers recomputed where it runs out of memory.

        What the first try has left in gradients and in the log is undone, and all layers are
        recomputed in the rest of the run. A process that is one of several cannot go back alone: the
        others would wait in the backward pass for its gradients, or under ZeRO-3 for its part of the
        weights. There, and where all layers were recomputed already, the error ends the run.

        Args:
            step: computes a micro-batch forward and backward, and returns its loss, ().
            figures: the lists of figures for the log, to which `step` appends.
        """
        if self._activation_memory is None or not self._can_retry:
            return step()
        assert self._card is not None
        _, total_bytes = self._card()
        before = Gradients(self._trained, int(_COPIED * total_bytes))
        counts = {name: len(values) for name, values in figures.items()}
        try:
            return step()
        except torch.OutOfMemoryError:
            if self.number == len(self._layers) or not before.restore():
                raise
        # The error is gone here, and with its traceback what the failed pass held
        for name, values in figures.items():
            del values[counts.get(name, 0) :]
        self._recompute_all()
        return step()

    def _recompute_all(self) -> None:
        """Recompute all layers from here on, and say so."""
        print(
            f"out of the card's memory with {self.number} of {len(self._layers)} layers recomputed: "
            "the micro-batch is made once more, and all are from here on; adora_recompute: all does "
            "so from the beginning",
            flush=True,
        )
        self._activation_memory = None
        self._fixed = len(self._layers)
        gc.collect()
        if self._accelerator.device.type == "cuda":
            torch.cuda.empty_cache()


class Gradients:
    """The gradients of parameters before a pass that may fail on its way back."""

    def __init__(self, parameters: Sequence[nn.Parameter], limit: int) -> None:
        """Note the gradients, and copy them if they have at most `limit` bytes together."""
        self._parameters = parameters
        self._before = [parameter.grad for parameter in parameters]
        present = [gradient for gradient in self._before if gradient is not None]
        # A gradient that the pass has added to has another version
        self._versions = [None if grad is None else grad._version for grad in self._before]
        self._copies: list[Tensor | None] = [None] * len(self._before)
        if sum(gradient.nbytes for gradient in present) <= limit:
            self._copies = [None if grad is None else grad.clone() for grad in self._before]

    def restore(self) -> bool:
        """Undo what a pass has added; return whether that was possible."""
        changed = []
        for index, gradient in enumerate(self._before):
            if gradient is not None and gradient._version != self._versions[index]:
                changed.append(index)
        if any(self._copies[index] is None for index in changed):
            return False
        for index, parameter in enumerate(self._parameters):
            parameter.grad = self._before[index]
        for index in changed:
            gradient = self._before[index]
            copy = self._copies[index]
            assert gradient is not None, "a changed gradient has its copy"
            assert copy is not None, "a changed gradient has its copy"
            gradient.copy_(copy)
        return True


def activation_memory_of(
    config: AdoraGRPOConfig, shape: ModelShape, sharding: Sharding, *, accelerator: bool = True
) -> ActivationMemory:
    """Return the policy of a run as it learns; `accelerator`: on a GPU."""
    mixed = bool(config.bf16 or config.fp16)
    tower_is_frozen = not (
        shape.trained_by_component["vision_tower"] or shape.trained_by_component["projector"]
    )
    shared = config.uses("cache_images") and config.uses("share_vision")
    return ActivationMemory(
        shape=shape,
        dtypes=dtypes_of(shape, sharding, mixed_precision=mixed),
        checkpointing=config.gradient_checkpointing,
        reads_features=shared and tower_is_frozen,
        on_gpu=accelerator,
    )


def layers_of(
    context: StepContext,
    model: "PreTrainedModel",
    shape: Callable[[], ModelShape],
    sharding: Sharding,
) -> RecomputedLayers:
    """Return what switches the checkpoints of a policy, on the device of this process."""
    device = context.accelerator.device
    card = partial(card_bytes, device) if device.type == "cuda" else None
    return RecomputedLayers(context, model=model, shape=shape, sharding=sharding, card=card)
