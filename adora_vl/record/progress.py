"""What a run prints on its way: one line a step, and a warning where nothing is learned."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm
from transformers import TrainerCallback

from adora_vl.record.figures import ACCURACY, FIGURES, MISSING, PASS, PROGRESS
from adora_vl.record.metrics import kind_of
from adora_vl.record.phases import PHASES

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


# After so many steps without any signal the run warns
SILENT_STEPS = 5
# The remaining time is estimated from this many steps
_WINDOW = 20


def duration(seconds: float) -> str:
    """Return a duration as text: `45s`, `3m05s`, `2h07m`, `1d03h`."""
    total = round(seconds)
    for long_s, short_s, long_unit, short_unit in (
        (86400, 3600, "d", "h"),
        (3600, 60, "h", "m"),
        (60, 1, "m", "s"),
    ):
        if total >= long_s:
            return f"{total // long_s}{long_unit}{total % long_s // short_s:02}{short_unit}"
    return f"{total}s"


def differs_from_pass(logs: Mapping[str, Any]) -> bool:
    """Return whether the accuracy tells more than the share that passes.

    It does where several reward functions are summed, or where the two figures differ.
    """
    functions = [key for key in logs if key.startswith("rewards/") and key.endswith("/mean")]
    accuracy = logs.get(ACCURACY)
    passed = logs.get(PASS)
    return (
        len(functions) > 1
        or passed is None
        or accuracy is None
        or not math.isclose(accuracy, passed, abs_tol=1e-4)
    )


def progress_line(logs: Mapping[str, Any], step: int, total: int, left_s: float | None) -> str:
    """Return one line with the known figures of a log entry.

    Seconds are means per step since the last.

    Args:
        logs: the log entry.
        step: optimizer steps that were made.
        total: optimizer steps of the run.
        left_s: seconds that remain, None where nothing is known.
    """
    parts = [f"step {step:>{len(str(total))}}/{total}"]
    for key in PROGRESS:
        value = logs.get(key)
        if value is None:
            continue
        if key == ACCURACY and not differs_from_pass(logs):
            continue
        # Most runs have a reward for every rollout, so that a share of 0 says nothing.
        if key == MISSING and not value:
            continue
        parts.append(FIGURES[key].in_line(value))
    seconds = {phase: logs.get(f"seconds/{phase}") for phase in PHASES}
    logged = {phase: value for phase, value in seconds.items() if value is not None}
    line = "  ".join(parts)
    if logged:
        line += f" | {_seconds_text(sum(logged.values()))} s: "
        line += " ".join(f"{phase} {_seconds_text(value)}" for phase, value in logged.items())
    return line if left_s is None else f"{line} | {duration(left_s)} left"


def _seconds_text(seconds: float) -> str:
    """Return seconds as text, with decimals where they are few."""
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.0f}"


class ProgressLine(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Replaces Transformers' progress bar and printed dictionaries. Only the first rank prints."""

    def __init__(self) -> None:
        """Begin without a bar and without steps."""
        # None on all ranks but the first, and outside of a training
        self._bar: tqdm[Any] | None = None
        # the numbers of the last steps, and the times when they ended
        self._step_ends: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        # whether the present stretch of steps without signal was warned of
        self._has_warned = False

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Open the bar, which shows only in a terminal."""
        if not state.is_world_process_zero:
            return
        self._step_ends.clear()
        self._step_ends.append((state.global_step, time.monotonic()))
        off = args.disable_tqdm or not sys.stderr.isatty()
        done = state.global_step
        self._bar = tqdm(
            total=state.max_steps, initial=done, disable=off, unit="step", dynamic_ncols=True
        )

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Begin to measure at the first step.

        The self-check and all else before it is done once, and says nothing about later steps.
        """
        if len(self._step_ends) == 1:
            self._step_ends[0] = (state.global_step, time.monotonic())

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Note the time at which the step ended."""
        if self._bar is not None:
            self._step_ends.append((state.global_step, time.monotonic()))
            self._bar.update(1)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: object,
    ) -> None:
        """Write the line of a step, and a warning where the last steps had no signal."""
        if self._bar is None or not logs:
            return
        if "reward" not in logs and "rewards/missing" not in logs:
            return
        left_s = self._seconds_left(state.max_steps)
        self._bar.write(
            progress_line(logs, step=state.global_step, total=state.max_steps, left_s=left_s)
        )
        sys.stdout.flush()
        silence = no_signal(state.log_history)
        if silence and not self._has_warned:
            self._bar.write(f"warning: {silence}", file=sys.stderr)
        # so that each stretch of such steps is warned of once
        self._has_warned = bool(silence)

    def _seconds_left(self, max_steps: int) -> float | None:
        """Return seconds until the last step, from the pace of the latest ones.

        None before the first.
        """
        (first, began) = self._step_ends[0]
        (last, ended) = self._step_ends[-1]
        if last <= first:
            return None
        return (ended - began) / (last - first) * (max_steps - last)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def no_signal(history: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what to say of a run in whose last steps no group had a signal; None where one had.

    The text says for how many steps (`SILENT_STEPS` at least), the likeliest reason, and what to
    look at. `history` is the trainer's log history, or the lines of the file.
    """
    silent: list[Mapping[str, Any]] = []  # the entries without signal, the newest first
    last_step_with_signal = 0
    for entry in reversed(history):
        silent_share = entry.get("frac_reward_zero_std")
        if kind_of(entry) != "train" or silent_share is None:
            continue
        if silent_share < 1:
            last_step_with_signal = int(entry["step"])
            break
        silent.append(entry)
    if not silent:
        return None
    silent_steps = int(silent[0]["step"]) - last_step_with_signal
    if silent_steps < SILENT_STEPS:
        return None
    return (
        f"nothing was learned in the last {silent_steps} steps: in every group all rewards were "
        f"equal, since {_silence_reason(silent)}"
    )


def _silence_reason(silent: Sequence[Mapping[str, Any]]) -> str:
    """Return the likeliest reason why these log entries have no signal, and what to look at."""
    rates = {entry.get(PASS) for entry in silent}
    if rates == {0.0}:
        return (
            "no answer was right. `python -m adora_vl.rewards.explain` says what the reward makes "
            "of one (a run's answers are in its report), `python -m data_prep filter` keeps the "
            "problems that the model solves sometimes, and the built-in tiny models know drawn "
            "problems alone"
        )
    if rates == {1.0}:
        return (
            "every answer was right. `python -m data_prep filter` keeps the problems that it "
            "does not always solve"
        )
    if not any(entry.get("reward_std") for entry in silent):
        return (
            f"every answer had the reward {silent[0].get('reward', math.nan):g}. `python -m "
            "adora_vl.rewards.explain --reward FILE.py:FUNCTION` says what yours returns for one"
        )
    return (
        "the answers to a problem are all alike. A higher temperature or more num_generations "
        "makes them differ, `python -m data_prep filter` finds problems where they do"
    )
