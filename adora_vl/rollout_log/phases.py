"""How long each phase of a step takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback

PHASES = ("rollout", "grading", "policy", "sync", "other")


def settle() -> None:
    """Wait for the GPU, so that each phase is charged for the work that it started. This costs little: the next phase
    would soon have to wait anyway, because it needs the tokens, the rewards or the weights.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


class PhaseClock:
    """Divides the time among phases. A phase inside another one pauses it. The time outside all phases is `other`."""

    def __init__(self, now: Callable[[], float] = time.perf_counter, settle: Callable[[], None] = settle) -> None:
        self._now, self._settle = now, settle
        self._open: list[str] = []
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._mark = now()

    def enter(self, phase: str) -> None:
        assert phase in PHASES, phase
        self._count()
        self._open.append(phase)

    def leave(self) -> None:
        self._count()
        self._open.pop()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of a step. Outside of steps it counts as `other`: an evaluation also syncs and samples."""
        if not self._open:
            yield
            return
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def take(self) -> dict[str, float]:
        """The seconds of every phase since the last call. Their sum is the time that has passed."""
        self._count()
        taken, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return taken

    def _count(self) -> None:
        self._settle()
        now = self._now()
        self._seconds[self._open[-1] if self._open else "other"] += now - self._mark
        self._mark = now


class StepClock(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Puts the seconds of each step into the log. Inside a step, time that is in no other phase counts as `policy`.

    The time between two steps (loading data, saving, evaluating) counts as `other` of the later step.
    """

    def __init__(self, clock: PhaseClock, log: Callable[[str, float], None]) -> None:
        self.clock, self.log = clock, log

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock.take()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock.enter("policy")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock.leave()
        for phase, seconds in self.clock.take().items():
            self.log(f"seconds/{phase}", seconds)
