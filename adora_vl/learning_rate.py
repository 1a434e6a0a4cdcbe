"""The learning rate of an optimizer step, multiplied by what the run's method says (`assign: rate`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback


class ScaledRate(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Multiplies the rate of every parameter group for the time of one optimizer step, and restores it to the bit.

    Multiplying advantages would not do: Adam divides by the size of the gradient, so a factor that stays the same over
    the steps changes nothing at all.
    """

    def __init__(self, factor: Callable[[], float]) -> None:
        """`factor`: for the step that comes; 1 leaves the rates alone."""
        self.factor = factor
        self._before: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        factor = self.factor()
        self._before = []
        if factor != 1.0:
            self._before = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        for group, rate in zip(optimizer.param_groups, self._before, strict=False):
            group["lr"] = rate
        self._before = []
