"""The clock of a run: how many seconds of each step go to which phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather
from transformers import TrainerCallback

from adora_vl.record.gpu_memory import GpuMemoryCallback

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from adora_vl.config import AdoraGRPOConfig
    from adora_vl.types import LogMetric


# Returns the context in which a named phase of a step is measured.
TimedPhase = Callable[[str], AbstractContextManager[None]]
# The phase between two steps in which a run is evaluated
EVALUATION_PHASE = "evaluation"
# The phase in which the engine frees its memory, so that the policy can use it
SLEEP_PHASE = "sleep"
# Phases that only an engine in sleep mode has
_SLEEP_MODE_PHASES = {"wake", SLEEP_PHASE}
# The phases of which training consists
TRAINING_PHASES = ("rollout", "grading", "policy", "sync", "wake", "sleep", "other")
PHASES = (*TRAINING_PHASES, EVALUATION_PHASE)
# Phases of the host: no long GPU work is started in them, so that nobody waits for it
_HOST_PHASES = {"grading", "other"}


def wait_for_gpu() -> None:
    """Wait until the GPU has finished its work, so that a phase is charged for what it started.

    That costs little: the next phase would soon wait anyway.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


class PhaseClock(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Divides the time among phases, and puts the seconds of each phase into the log of a step.

    A phase inside another one pauses it. Inside a step, time that is in no other phase counts as
    `policy`. The time between two steps (loading data, saving) counts as `other` in the later step,
    and an evaluation there as `evaluation`.
    """

    def __init__(
        self,
        log: Callable[[str, float], None],
        *,
        sleep_mode: bool,
        evaluates: bool,
        memory: GpuMemoryCallback | None,
    ) -> None:
        """Start the clock.

        Args:
            log: takes the name and the value of a metric of the present step.
            sleep_mode: whether the engine sleeps between generations; otherwise there are no phases
                `wake` and `sleep`.
            evaluates: whether the run is evaluated on its way; otherwise there is no phase
                `evaluation`.
            memory: logs the GPU memory of rollouts and policy; None on a CPU.
        """
        self._log = log
        self.memory = memory
        absent_phases: set[str] = set()
        if not sleep_mode:
            absent_phases |= _SLEEP_MODE_PHASES
        if not evaluates:
            absent_phases.add(EVALUATION_PHASE)
        self._phases = [phase for phase in PHASES if phase not in absent_phases]
        # the phases that were entered and not left, the innermost last; empty outside of steps
        self._open_phases: list[str] = []
        self._seconds_by_phase = dict.fromkeys(self._phases, 0.0)
        # up to this time all seconds are charged to a phase
        self._charged_until = perf_counter()

    def enter_phase(self, phase: str) -> None:
        """Begin a phase, which pauses the present one until `leave_phase`."""
        assert phase in self._phases, phase
        self._charge_time()
        self._open_phases.append(phase)

    def leave_phase(self) -> None:
        """End the present phase; the one around it goes on."""
        self._charge_time()
        self._open_phases.pop()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time inside a `with` to a phase, and where the engine sleeps, note the memory.

        An evaluation also syncs and samples. Inside an evaluation the time still counts as
        `evaluation`, and outside of steps as `other`.
        """
        memory_context: AbstractContextManager[None] = nullcontext()
        if self.memory is not None and name == SLEEP_PHASE:
            memory_context = self.memory.around_sleep()
        with memory_context, self._charged_to(name):
            yield

    @contextmanager
    def _charged_to(self, name: str) -> Iterator[None]:
        """Charge the time inside a `with` to a phase, as `phase` does; the memory is not noted."""
        is_outside_of_steps = not self._open_phases
        if is_outside_of_steps or self._open_phases[-1] in (name, EVALUATION_PHASE):
            yield  # the time goes on counting as before
            return
        self.enter_phase(name)
        try:
            yield
        finally:
            self.leave_phase()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Charge the time inside a `with`, which stands between two steps, to `evaluation`."""
        self.enter_phase(EVALUATION_PHASE)
        try:
            yield
        finally:
            self.leave_phase()

    def pop_seconds(self) -> dict[str, float]:
        """Return the seconds of every phase since the last call, and begin at 0 again.

        Their sum is the time that has passed.
        """
        self._charge_time()
        seconds_by_phase = self._seconds_by_phase
        self._seconds_by_phase = dict.fromkeys(self._phases, 0.0)
        return seconds_by_phase

    def _charge_time(self) -> None:
        """Charge the time since the last call of this to the innermost open phase."""
        is_between_steps = not self._open_phases
        phase = "other" if is_between_steps else self._open_phases[-1]
        # A phase of the host starts no GPU work, so there is nothing to wait for.
        if is_between_steps or phase not in _HOST_PHASES:
            wait_for_gpu()
        now = perf_counter()
        self._seconds_by_phase[phase] += now - self._charged_until
        self._charged_until = now

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Forget the time before the training."""
        self.pop_seconds()

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Begin the phase `policy`, which has all time of the step that no other phase has."""
        self.enter_phase("policy")

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Log the seconds of each phase in the step, and since the step before it."""
        self.leave_phase()
        for phase, seconds in self.pop_seconds().items():
            self._log(f"seconds/{phase}", seconds)


def start_clock(config: AdoraGRPOConfig, log: LogMetric, *, evaluates: bool) -> PhaseClock:
    """Begin to measure the seconds of each phase of a step, and on a GPU its memory.

    Args:
        config: the training arguments.
        log: takes the name and the value of a metric of the present step.
        evaluates: whether the run is evaluated on its way, which is a phase of its own.
    """

    def largest_of_ranks(value: float) -> float:
        """Return the largest value of all ranks. Collective."""
        return float(gather(torch.tensor([value], device=config.device)).max())

    engine_sleeps = config.use_vllm and config.vllm_enable_sleep_mode
    memory = None
    if config.device.type == "cuda":
        memory = GpuMemoryCallback(
            log,
            largest_of_ranks=largest_of_ranks,
            device=config.device,
            sleep_mode=engine_sleeps,
        )
    return PhaseClock(log, sleep_mode=engine_sleeps, evaluates=evaluates, memory=memory)
