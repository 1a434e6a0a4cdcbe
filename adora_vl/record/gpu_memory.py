"""A callback that logs how much GPU memory a generation and a policy step take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from adora_vl.utils.files import GIB

ROLLOUT_MEMORY_KEY = "memory/rollout"
POLICY_MEMORY_KEY = "memory/policy"


class GpuMemoryCallback(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Logs the GPU memory while rollouts are sampled and while the policy learns, in GiB.

    Each metric is that of the rank whose GPU is fullest.

    `memory/rollout` is what all processes on the GPU had in use when the engine went to sleep, or
    at the end of the step where it does not sleep. `memory/policy` is the most that torch had
    reserved since then.
    """

    def __init__(
        self,
        log: Callable[[str, float], None],
        largest_of_ranks: Callable[[float], float],
        device: torch.device,
        *,
        sleep_mode: bool,
    ) -> None:
        """Begin to measure.

        Args:
            log: takes the name and the value of a metric of the present step.
            largest_of_ranks: returns the largest of the values that the ranks give it. Collective.
            device: the GPU of this process.
            sleep_mode: whether the engine sleeps between generations.
        """
        self._log = log
        self._largest_of_ranks = largest_of_ranks
        self._device = device
        self._sleep_mode = sleep_mode
        # None until this step has sampled rollouts, and in a step that samples none
        self._rollout_gib: float | None = None

    @contextmanager
    def around_sleep(self) -> Iterator[None]:
        """Note the memory in use before the engine frees its own, which happens in the `with`."""
        # the engine may sleep several times in a step; the fullest moment counts
        self._rollout_gib = max(self._rollout_gib or 0.0, self._used_gib())
        yield
        # from here on the peak is that of the policy
        torch.cuda.reset_peak_memory_stats(self._device)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Log the memory of the step, in GiB. Collective: every rank logs the same."""
        # An engine that never sleeps has the same memory throughout, so any moment will do.
        if not self._sleep_mode:
            self._rollout_gib = self._used_gib()
        # It is None in a step that samples no rollouts, such as the second optimizer step of a
        # generation. All ranks sample in the same steps, so all of them make the collective call or
        # none does.
        if self._rollout_gib is not None:
            self._log(ROLLOUT_MEMORY_KEY, self._largest_of_ranks(self._rollout_gib))
        self._rollout_gib = None
        policy_gib = torch.cuda.max_memory_reserved(self._device) / GIB
        self._log(POLICY_MEMORY_KEY, self._largest_of_ranks(policy_gib))
        torch.cuda.reset_peak_memory_stats(self._device)

    def _used_gib(self) -> float:
        """Return what all processes on the GPU have in use, in GiB."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return (total_bytes - free_bytes) / GIB
