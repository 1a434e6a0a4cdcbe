"""Numbers that may change over the steps of a run, and ranges of steps in which something is on."""

from __future__ import annotations

import math
from dataclasses import dataclass

SHAPES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class Schedule:
    """`start` up to step `steps[0]`, `end` from step `steps[1]` on, and a line or half a cosine between them.

    ADORA's authors suggest changing lambda and tau during training (arXiv 2602.10019). The shapes are the usual ones.
    """

    start: float
    end: float | None = None
    shape: str = "constant"
    steps: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        """Raises `ValueError` if the fields contradict each other."""
        if self.shape not in SHAPES:
            raise ValueError(f"shape: {self.shape!r} is not one of {', '.join(SHAPES)}")
        if self.shape == "constant" and self.end not in (None, self.start):
            raise ValueError(f"end: {self.end} needs shape: linear or cosine, a constant stays at {self.start}")
        if self.shape != "constant" and (self.end is None or not 0 <= self.steps[0] < self.steps[1]):
            raise ValueError(
                f"shape: {self.shape} needs end: a number, and steps: [first, last] with 0 <= first < last"
            )

    def at(self, step: int) -> float:
        """The value in a step, counted from 0."""
        if self.shape == "constant" or self.end is None:
            return self.start
        first, last = self.steps
        done = min(max((step - first) / (last - first), 0.0), 1.0)
        if self.shape == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        return self.start + (self.end - self.start) * done

    @property
    def values(self) -> tuple[float, float]:
        """The first and the last value; all others lie between them."""
        return self.start, self.start if self.end is None else self.end


def constant(value: float) -> Schedule:
    return Schedule(start=value)


def within(step: int, steps: tuple[int, int] | None) -> bool:
    """Whether a step, counted from 0, lies in the half-open range `steps`, [first, end). None means all steps."""
    return steps is None or steps[0] <= step < steps[1]
