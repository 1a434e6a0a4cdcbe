"""What measures the phases of a step: their seconds, and on a GPU the memory that they take."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from accelerate.utils import gather

from adora_vl.config import AdoraGRPOConfig
from adora_vl.record.gpu_memory import GpuMemoryCallback
from adora_vl.record.phases import PhaseClock
from adora_vl.types import LogMetric

# Returns the context in which the seconds of a named phase of a step are measured.
TimedPhase = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class StepClocks:
    """What measures the phases of a step: `seconds` their time, `memory` the GPU's memory.

    `memory` is None on a CPU.
    """

    seconds: PhaseClock
    memory: GpuMemoryCallback | None

    @property
    def engine_phase(self) -> TimedPhase:
        """The function to time a phase of the engine with: `with engine_phase("sleep"): ...`.

        It measures the seconds of the phase, and on a GPU the memory too.
        """
        if self.memory is None:
            return self.seconds.phase
        return partial(self.memory.phase, clock=self.seconds.phase)


def start_clocks(config: AdoraGRPOConfig, log: LogMetric, *, evaluates: bool) -> StepClocks:
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
    gpu_memory = None
    if config.device.type == "cuda":
        gpu_memory = GpuMemoryCallback(
            log,
            largest_of_ranks=largest_of_ranks,
            device=config.device,
            sleep_mode=engine_sleeps,
        )
    return StepClocks(
        seconds=PhaseClock(log, sleep_mode=engine_sleeps, evaluates=evaluates), memory=gpu_memory
    )
