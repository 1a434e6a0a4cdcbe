"""A weight of the policy, changed for as long as a block lasts and put back to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from adora_vl.families import seeing_families
from adora_vl.models.components import LANGUAGE_MODEL, component_of

SCALES = (0.1, 0.3, 1.0, 3.0, 10.0)  # of the tensor's own size, tried until the policy has moved


def choose_parameter(model: Any, *, vision: bool) -> tuple[str, Any] | None:
    """The last trained matrix of the language model's layers, or of what sees; None where nothing there is trained.

    The last one, since its effect on the output is the most direct; of what sees the last one before the embeddings,
    since features that enter at later layers ("deepstack") are added to much larger numbers and hardly move an answer.
    """
    found = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and len(_shape(parameter)) >= 2
        and (component_of(name) != LANGUAGE_MODEL) == vision
        and (vision or ".layers." in name)
    ]
    direct = [one for one in found if any(vision.projector[0] in one[0] for vision in seeing_families().values())]
    chosen = direct or found
    return chosen[-1] if chosen else None


def _shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO-3 leaves a parameter empty between its uses


@contextmanager
def _whole(parameter: Any) -> Iterator[Tensor]:
    """Its numbers, gathered from all ranks under ZeRO-3; what rank 0 writes inside goes back to all."""
    if not hasattr(parameter, "ds_tensor"):
        yield parameter.data
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        yield parameter.data


class Change:
    """`scale(s)` sets the weight to its original plus noise of `s` times its size; the same noise each time."""

    def __init__(self, name: str, parameter: Any, seed: int) -> None:
        self.name, self._parameter = name, parameter
        with _whole(parameter) as values:
            self._original = values.detach().to("cpu", copy=True)
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(self._original.shape, generator=generator)
        size = self._original.float().square().mean().sqrt()
        # LoRA's second factor starts at zero, which has no size of its own
        self._step = noise * (size if size > 0 else 1.0 / max(_shape(parameter)) ** 0.5)

    def scale(self, scale: float) -> None:
        """Add the noise to the weight, `scale` times."""
        self._set((self._original.float() + scale * self._step).to(self._original.dtype))

    def undo(self) -> None:
        """Put the original weight back."""
        self._set(self._original)

    def _set(self, values: Tensor) -> None:
        with _whole(self._parameter) as place:
            place.copy_(values)


@contextmanager
def changed(name: str, parameter: Any, seed: int = 0) -> Iterator[Change]:
    """Puts the weight back whatever happens inside."""
    change = Change(name, parameter, seed)
    with torch.no_grad():
        try:
            yield change
        finally:
            change.undo()
