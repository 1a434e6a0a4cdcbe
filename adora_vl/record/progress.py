"""What a run prints on its way: one line a step, and a warning where nothing is learned."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm
from transformers import TrainerCallback

from adora_vl.record.metrics import log_entry_kind
from adora_vl.record.phases import PHASES
from adora_vl.record.shown_metrics import (
    ACCURACY_KEY,
    METRIC_BY_KEY,
    MISSING_REWARD_KEY,
    PASS_RATE_KEY,
    PROGRESS_LINE_KEYS,
    SIGNAL_SHARE_KEY,
)

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


# After so many steps in which all rewards of each group are equal the run warns
STEPS_WITHOUT_SIGNAL_BEFORE_WARNING = 5
# The remaining time is estimated from this many steps
_STEPS_OF_ESTIMATE = 20


def duration_text(seconds: float) -> str:
    """Return a duration as text: `45s`, `3m05s`, `2h07m`, `1d03h`."""
    minutes, rest_seconds = divmod(round(seconds), 60)
    hours, rest_minutes = divmod(minutes, 60)
    days, rest_hours = divmod(hours, 24)
    # the largest unit that is not 0, and the one below it with two digits
    if days:
        return f"{days}d{rest_hours:02}h"
    if hours:
        return f"{hours}h{rest_minutes:02}m"
    if minutes:
        return f"{minutes}m{rest_seconds:02}s"
    return f"{rest_seconds}s"


def accuracy_is_worth_showing(logs: Mapping[str, Any]) -> bool:
    """Return whether a log entry's accuracy is worth showing beside its pass rate.

    The accuracy is the share of right answers, the pass rate that of rewards above a threshold.
    With one reward function the two are mostly equal, and then the accuracy says nothing new. It is
    shown if several reward functions are summed, if one of the two metrics was not logged, or if
    they differ.
    """
    mean_rewards = [key for key in logs if key.startswith("rewards/") and key.endswith("/mean")]
    accuracy = logs.get(ACCURACY_KEY)
    pass_rate = logs.get(PASS_RATE_KEY)
    has_several_functions = len(mean_rewards) > 1
    if has_several_functions or accuracy is None or pass_rate is None:
        return True
    return not math.isclose(accuracy, pass_rate, abs_tol=1e-4)


def progress_line(
    logs: Mapping[str, Any], step: int, total: int, seconds_left: float | None
) -> str:
    """Return a log entry as one line: step, metrics, seconds of each phase, time that is left.

    For example:

        step  12/500  reward 0.430 | 9.10 s: rollout 6.20 policy 2.90 | 1h14m left

    Metrics that the entry lacks are left out, and so are phases that did not occur. Seconds are
    means per step since the entry before.

    Args:
        logs: the log entry.
        step: optimizer steps that were made.
        total: optimizer steps of the run.
        seconds_left: estimated seconds until the end of the run; None where there is no estimate
            yet.
    """
    parts = [f"step {step:>{len(str(total))}}/{total}"]
    for key in PROGRESS_LINE_KEYS:
        value = logs.get(key)
        if value is None:
            continue
        if key == ACCURACY_KEY and not accuracy_is_worth_showing(logs):
            continue
        # Most runs have a reward for every rollout, so a share of 0 says nothing new.
        if key == MISSING_REWARD_KEY and not value:
            continue
        parts.append(METRIC_BY_KEY[key].format_for_line(value))
    line = "  ".join(parts)
    # A phase of no seconds did not occur, such as `evaluation` in most steps.
    seconds_by_phase = {
        phase: logs[f"seconds/{phase}"] for phase in PHASES if logs.get(f"seconds/{phase}")
    }
    if seconds_by_phase:
        phase_texts = [
            f"{phase} {_seconds_text(value)}" for phase, value in seconds_by_phase.items()
        ]
        total_seconds = sum(seconds_by_phase.values())
        line += f" | {_seconds_text(total_seconds)} s: {' '.join(phase_texts)}"
    return line if seconds_left is None else f"{line} | {duration_text(seconds_left)} left"


def _seconds_text(seconds: float) -> str:
    """Return seconds as text, with two decimals below 10 and without any from there on."""
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.0f}"


class _StepEnd(NamedTuple):
    """When an optimizer step ended."""

    step: int
    monotonic_s: float
    """`time.monotonic()` at that moment."""


class ProgressLine(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Replaces Transformers' progress bar and printed dictionaries. Only the first rank prints."""

    def __init__(self) -> None:
        """Begin without a bar and without steps."""
        # None on all ranks but the first, and outside of a training
        self._bar: tqdm[Any] | None = None
        # when the last steps ended; before the first step ends, when it began
        self._step_ends: deque[_StepEnd] = deque(maxlen=_STEPS_OF_ESTIMATE)
        # whether the run was warned already that its present steps teach nothing
        self._has_warned = False

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Open the bar on the first rank; it is shown in a terminal only."""
        if not state.is_world_process_zero:
            return
        self._step_ends.clear()
        self._step_ends.append(_StepEnd(state.global_step, time.monotonic()))
        is_hidden = args.disable_tqdm or not sys.stderr.isatty()
        self._bar = tqdm(
            total=state.max_steps,
            initial=state.global_step,
            disable=is_hidden,
            unit="step",
            dynamic_ncols=True,
        )

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Let the estimate of the remaining time begin when the first step begins.

        The self-check and all else before that step is done once, and says nothing about how long
        later steps take.
        """
        no_step_has_ended = len(self._step_ends) == 1
        if no_step_has_ended:
            self._step_ends[0] = _StepEnd(state.global_step, time.monotonic())

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Note when the step ended, and move the bar on."""
        if self._bar is not None:
            self._step_ends.append(_StepEnd(state.global_step, time.monotonic()))
            self._bar.update(1)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: object,
    ) -> None:
        """Print the line of a training step, and a warning if the last steps taught nothing."""
        if self._bar is None or not logs:
            return
        # An evaluation has neither key, and nor has the last entry of a run.
        is_training_entry = "reward" in logs or "rewards/missing" in logs
        if not is_training_entry:
            return
        seconds_left = self._seconds_left(state.max_steps)
        self._bar.write(
            progress_line(
                logs, step=state.global_step, total=state.max_steps, seconds_left=seconds_left
            )
        )
        sys.stdout.flush()
        warning = no_signal_warning(state.log_history)
        if warning is not None and not self._has_warned:
            self._bar.write(f"warning: {warning}", file=sys.stderr)
        # The warning is printed once for each series of such steps.
        self._has_warned = warning is not None

    def _seconds_left(self, max_steps: int) -> float | None:
        """Estimate the seconds until the last step from the mean of the latest steps.

        None before the first step has ended.
        """
        oldest = self._step_ends[0]
        newest = self._step_ends[-1]
        if newest.step <= oldest.step:
            return None
        seconds_a_step = (newest.monotonic_s - oldest.monotonic_s) / (newest.step - oldest.step)
        return seconds_a_step * (max_steps - newest.step)

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


def no_signal_warning(history: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a warning if a run has learned nothing in its last steps; None otherwise.

    In a step without signal, all rewards are equal in every group. Then all advantages are 0 and
    nothing is learned, unless a method learns from such groups too. After at least
    `STEPS_WITHOUT_SIGNAL_BEFORE_WARNING` such steps in a row the warning says how many they are,
    the likeliest reason, and what to look at.

    `history`: the trainer's log history, or the lines of `metrics.jsonl`.
    """
    # the entries without signal at the end of the history, the newest first
    entries_without_signal: list[Mapping[str, Any]] = []
    last_step_with_signal = 0
    for entry in reversed(history):
        # TRL's share of groups in which all rewards are equal
        equal_reward_share = entry.get("frac_reward_zero_std")
        if log_entry_kind(entry) != "train" or equal_reward_share is None:
            continue
        # The log lacks it where no rollout of the step has a reward.
        signal_share = entry.get(SIGNAL_SHARE_KEY) or 0.0
        if equal_reward_share < 1 or signal_share > 0:
            last_step_with_signal = int(entry["step"])
            break
        entries_without_signal.append(entry)
    if not entries_without_signal:
        return None
    steps_without_signal = int(entries_without_signal[0]["step"]) - last_step_with_signal
    # A few such steps may be chance.
    if steps_without_signal < STEPS_WITHOUT_SIGNAL_BEFORE_WARNING:
        return None
    return (
        f"nothing was learned in the last {steps_without_signal} steps: in every group all rewards were "
        f"equal, since {_reason_for_equal_rewards(entries_without_signal)}"
    )


def _reason_for_equal_rewards(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the likeliest reason why all rewards of a group are equal, and what to look at.

    `entries`: log entries of steps in which every group is such a group, the newest first.
    """
    pass_rates = {entry.get(PASS_RATE_KEY) for entry in entries}
    if pass_rates == {0.0}:
        return (
            "no answer was right. `python -m adora_vl.rewards.explain` says what the reward makes "
            "of one (a run's answers are in its report), `python -m data_prep filter` keeps the "
            "problems that the model solves sometimes, and the built-in tiny models know drawn "
            "problems alone"
        )
    if pass_rates == {1.0}:
        return (
            "every answer was right. `python -m data_prep filter` keeps the problems that it "
            "does not always solve"
        )
    some_rewards_differ = any(entry.get("reward_std") for entry in entries)
    if not some_rewards_differ:
        reward = entries[0].get("reward", math.nan)
        return (
            f"every answer had the reward {reward:g}. `python -m "
            "adora_vl.rewards.explain --reward FILE.py:FUNCTION` says what yours returns for one"
        )
    return (
        "the answers to a problem are all alike. A higher temperature or more num_generations "
        "makes them differ, `python -m data_prep filter` finds problems where they do"
    )
