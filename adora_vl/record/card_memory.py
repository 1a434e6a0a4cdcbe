"""What a generation and a policy step take of the card, as two figures of the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from adora_vl.utils.files import GIB

SLEEP = "sleep"  # the phase in which the engine frees its memory
ROLLOUT = "memory/rollout"
POLICY = "memory/policy"


class CardMemory(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """The memory of a card while it samples and while it learns, in GiB, of the fullest process.

    `memory/rollout` is what all processes on the card had in use when the engine went to sleep, or
    at the end of the step where it does not sleep. `memory/policy` is the most that torch had
    reserved since then.
    """

    def __init__(
        self,
        log: Callable[[str, float], None],
        largest: Callable[[float], float],
        device: torch.device,
        *,
        sleep_mode: bool,
    ) -> None:
        """Begin to measure.

        Args:
            log: takes the name and the value of a figure of the present step.
            largest: the largest value of all ranks. Collective.
            device: the card of this process.
            sleep_mode: whether the engine sleeps between generations.
        """
        self._log = log
        self._largest = largest
        self._device = device
        self._sleep_mode = sleep_mode
        self._rollout: float | None = None

    @contextmanager
    def phase(
        self, name: str, clock: Callable[[str], AbstractContextManager[None]]
    ) -> Iterator[None]:
        """Time a phase of the engine by `clock`, and look at the card before it sleeps."""
        if name == SLEEP:
            self._rollout = max(self._rollout or 0.0, self._in_use())
        with clock(name):
            yield
        if name == SLEEP:
            torch.cuda.reset_peak_memory_stats(self._device)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Log the figures of the step. Collective: every rank logs the same."""
        if not self._sleep_mode:
            self._rollout = self._in_use()
        # the second optimizer step of a generation has no rollouts of its own
        if self._rollout is not None:
            self._log(ROLLOUT, self._largest(self._rollout))
        self._rollout = None
        policy = torch.cuda.max_memory_reserved(self._device) / GIB
        self._log(POLICY, self._largest(policy))
        torch.cuda.reset_peak_memory_stats(self._device)

    def _in_use(self) -> float:
        """What all processes on the card have in use, in GiB."""
        free, total = torch.cuda.mem_get_info(self._device)
        return (total - free) / GIB
