"""Figures of a run: `metrics.jsonl`, seconds per phase, the progress line, and ADORA's shares."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import TrainerCallback

from adora_vl.advantage import Adora, AdoraWeighting
from adora_vl.advantage.grpo import deviation
from adora_vl.record.figures import ACCURACY, FIGURES, MISSING, PASS, PROGRESS
from adora_vl.training.advantages import Advantages, JudgedGroups
from adora_vl.training.rollout_facts import RolloutFacts
from adora_vl.utils.files import replace_file

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


METRICS = "metrics.jsonl"
Line = dict[str, Any]


def kind_of(logs: Mapping[str, Any]) -> str:
    """Return the kind of a log entry: `end` for the last one, `eval`, or `train`.

    A step in which nothing was sampled is `train` as well.
    """
    if "train_runtime" in logs:
        return "end"
    return "eval" if any(key.startswith("eval_") for key in logs) else "train"


def as_line(logs: Mapping[str, Any], step: int, now: str | None) -> Line:
    """Return a log entry as a line of JSON.

    A figure that is not finite becomes None. `now` is the time as text, None for an entry that a
    checkpoint's history has.
    """
    figures = {key: _finite(value) for key, value in logs.items() if key != "step"}
    return {"step": step, "kind": kind_of(logs), "time": now, **figures}


def _finite(value: object) -> object:
    """Return a logged value in a type of JSON; None for a number that is not finite."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    try:
        number = float(value)  # type: ignore[arg-type]  # refused below
    except (TypeError, ValueError):  # the user's own callbacks may log anything
        return str(value)
    return number if math.isfinite(number) else None


def read_metrics(path: Path) -> list[Line]:
    """Read the lines of the file; there are none if it is missing.

    A last line that a crash has cut off is left out.
    """
    if not path.is_file():
        return []
    lines = []
    for text in path.read_bytes().split(b"\n"):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int) and "kind" in line:
            lines.append(line)
    return lines


def resumed_lines(
    recorded: Iterable[Line], history: Sequence[Mapping[str, Any]], step: int
) -> list[Line]:
    """Return the lines of the file of a run that resumes after `step`.

    Later lines and the run's last entry are dropped; what the file lacks of the checkpoint's
    history is added.

    Args:
        recorded: the lines of the file so far.
        history: the log entries in the checkpoint.
        step: the optimizer step of the checkpoint.
    """
    lines = [*recorded, *(as_line(entry, int(entry["step"]), None) for entry in history)]
    unique: dict[_LineKey, Line] = {}
    for line in lines:
        if line["step"] <= step and line["kind"] != "end":
            unique.setdefault(_line_key(line), line)
    return sorted(unique.values(), key=lambda line: (line["step"], line["kind"] != "eval"))


class _LineKey(NamedTuple):
    """What identifies a line: a step has one line for its training, and one for each evaluation."""

    step: int
    kind: str
    evaluation: str


def _line_key(line: Line) -> _LineKey:
    """Return what tells a line from others: its step, its kind, and its evaluation."""
    return _LineKey(
        step=line["step"],
        kind=line["kind"],
        evaluation=min((key for key in line if key.startswith("eval_")), default=""),
    )


class MetricsFile(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Writes the file in `output_dir`, on the first rank."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Begin the file: empty, or with the lines up to the step from which the run resumes."""
        if not state.is_world_process_zero:
            return
        path = Path(args.output_dir) / METRICS
        path.parent.mkdir(parents=True, exist_ok=True)
        lines: list[Line] = []
        if state.global_step:
            lines = resumed_lines(read_metrics(path), state.log_history, state.global_step)
        replace_file(path, _as_text(lines))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: object,
    ) -> None:
        """Append a line, which is on the disk when this returns."""
        if state.is_world_process_zero and logs:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            with (Path(args.output_dir) / METRICS).open("a", encoding="utf-8") as stream:
                stream.write(_as_text([as_line(logs, state.global_step, now)]))
                stream.flush()
                os.fsync(stream.fileno())


def _as_text(lines: Iterable[Line]) -> str:
    """Return lines as the text of a JSONL file."""
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)


PHASES = ("rollout", "grading", "policy", "sync", "wake", "sleep", "other")
# Phases that only an engine in sleep mode has
_SLEEP_MODE_PHASES = {"wake", "sleep"}
# Phases of the host: no long GPU work is started in them, so that nobody waits for it
_HOST_PHASES = {"grading", "other"}


def settle() -> None:
    """Wait for the GPU, so that each phase is charged for its own work.

    It costs little: the next phase would soon wait anyway.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


class PhaseClock(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Divides the time among phases, and puts the seconds of each phase into the log of a step.

    A phase inside another one pauses it. Inside a step, time that is in no other phase counts as
    `policy`. The time between two steps (loading data, saving, evaluating) counts as `other` in the
    later step.
    """

    def __init__(
        self,
        log: Callable[[str, float], None],
        now: Callable[[], float] = time.perf_counter,
        settle: Callable[[], None] = settle,
        *,
        sleep_mode: bool = False,
    ) -> None:
        """Start the clock.

        Args:
            log: takes the name and the value of a figure of the present step.
            now: the time in seconds.
            settle: waits for the GPU.
            sleep_mode: whether the engine sleeps between generations; otherwise there are no phases
                `wake` and `sleep`.
        """
        self._log = log
        self._now = now
        self._settle = settle
        self._phases = [phase for phase in PHASES if sleep_mode or phase not in _SLEEP_MODE_PHASES]
        self._open: list[str] = []
        self._seconds = dict.fromkeys(self._phases, 0.0)
        self._mark = now()

    def enter(self, phase: str) -> None:
        """Begin a phase, which pauses the present one until `leave`."""
        assert phase in self._phases, phase
        self._count()
        self._open.append(phase)

    def leave(self) -> None:
        """End the present phase; the one around it goes on."""
        self._count()
        self._open.pop()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of a step.

        Outside of steps it counts as `other`: an evaluation also syncs and samples.
        """
        if not self._open or self._open[-1] == name:
            yield
            return
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def take(self) -> dict[str, float]:
        """Return the seconds of every phase since the last call.

        Their sum is the time that has passed.
        """
        self._count()
        seconds = self._seconds
        self._seconds = dict.fromkeys(self._phases, 0.0)
        return seconds

    def _count(self) -> None:
        """Charge the time since the last mark to the present phase."""
        if not self._open or self._open[-1] not in _HOST_PHASES:
            self._settle()
        now = self._now()
        self._seconds[self._open[-1] if self._open else "other"] += now - self._mark
        self._mark = now

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Forget the time before the training."""
        self.take()

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Begin the phase `policy`."""
        self.enter("policy")

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Log the seconds of each phase."""
        self.leave()
        for phase, seconds in self.take().items():
            self._log(f"seconds/{phase}", seconds)


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
        line += f" | {_short(sum(logged.values()))} s: "
        line += " ".join(f"{phase} {_short(value)}" for phase, value in logged.items())
    return line if left_s is None else f"{line} | {duration(left_s)} left"


def _short(seconds: float) -> str:
    """Return seconds as text, with decimals where they are few."""
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.0f}"


class ProgressLine(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Replaces Transformers' progress bar and printed dictionaries. Only the first rank prints."""

    def __init__(self) -> None:
        """Begin without a bar and without steps."""
        # None on all ranks but the first, and outside of a training
        self._bar: tqdm[Any] | None = None
        # the numbers of the last steps, and the times when they ended
        self._ends: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        # whether the present stretch of steps without signal was warned of
        self._warned = False

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
        self._ends.clear()
        self._ends.append((state.global_step, time.monotonic()))
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
        if len(self._ends) == 1:
            self._ends[0] = (state.global_step, time.monotonic())

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Note the time at which the step ended."""
        if self._bar is not None:
            self._ends.append((state.global_step, time.monotonic()))
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
        left_s = self._left_s(state.max_steps)
        self._bar.write(
            progress_line(logs, step=state.global_step, total=state.max_steps, left_s=left_s)
        )
        sys.stdout.flush()
        silence = no_signal(state.log_history)
        if silence and not self._warned:
            self._bar.write(f"warning: {silence}", file=sys.stderr)
        # so that each stretch of such steps is warned of once
        self._warned = bool(silence)

    def _left_s(self, max_steps: int) -> float | None:
        """Return seconds until the last step, from the pace of the latest ones.

        None before the first.
        """
        (first, began) = self._ends[0]
        (last, ended) = self._ends[-1]
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


def _mean_where(values: Tensor, chosen: Tensor) -> float:
    """Return the mean of the chosen values; NaN if none is chosen, which TRL's log leaves out."""
    return values[chosen].mean().item() if bool(chosen.any()) else float("nan")


def adora_metrics(weighting: AdoraWeighting) -> dict[str, float]:
    """Return ADORA's figures by name: shares of prompts, and mean lengths of rollouts in tokens.

    A group without any reward counts nowhere.
    """
    groups = weighting.groups
    judged_P = groups.scored_PG.any(dim=1)
    any_correct_P = groups.correct_PG.any(dim=1)
    any_wrong_P = groups.wrong_PG.any(dim=1)
    wrong_all_truncated_P = any_wrong_P & ~groups.finished_wrong_PG.any(dim=1)
    all_correct_P = any_correct_P & ~any_wrong_P
    lengths_PG = groups.lengths_PG.float()
    return {
        "tds_share": _mean_where(weighting.tds_P.float(), judged_P),
        "weight_mean": _mean_where(weighting.weights_P, judged_P),
        "no_correct_share": _mean_where((~any_correct_P).float(), judged_P),
        "all_correct_share": _mean_where(all_correct_P.float(), judged_P),
        "wrong_all_truncated_share": _mean_where(wrong_all_truncated_P.float(), judged_P),
        "length_correct": _mean_where(lengths_PG, groups.correct_PG),
        "length_wrong": _mean_where(lengths_PG, groups.wrong_PG),
        "pass_rate": _mean_where(groups.pass_rate_P, judged_P),
        "ties": _mean_where(weighting.ties_P.float(), _comparable(weighting)),
    }


def _comparable(weighting: AdoraWeighting) -> Tensor:
    """Return TDS groups that have both right and wrong rollouts, bool, (P,)."""
    groups = weighting.groups
    return weighting.tds_P & groups.correct_PG.any(dim=1) & groups.wrong_PG.any(dim=1)


class TieNotice:
    """Says once in a run, on the first rank, that many of the attenuated groups are ties of length.

    It stays silent until there are `GROUPS` comparable groups, and a share of ties above `SHARE`.
    """

    SHARE = 0.1
    GROUPS = 50

    def __init__(self, options: Adora, *, speaks: bool) -> None:
        """Start the count.

        Args:
            options: those of the run's ADORA, with the mode `off` where the run has none.
            speaks: whether this is the first rank.
        """
        # Ties of work are common, and no accident of tokens.
        compares_length = "working" not in options.criteria
        attenuates = options.mode == "attenuation" and not options.plain
        self._silent = not (speaks and attenuates and compares_length)
        self._marked = 0
        self._ties = 0

    def count(self, weighting: AdoraWeighting) -> None:
        """Count the groups of a generation that the loss uses, and say so if many are ties."""
        if self._silent:
            return
        self._marked += int(_comparable(weighting).sum())
        self._ties += int(weighting.ties_P.sum())
        if self._marked >= self.GROUPS and self._ties > self.SHARE * self._marked:
            self._silent = True
            tqdm.write(
                f"{self._ties} of {self._marked} attenuated groups are ties: their longest right "
                "answer is exactly as long as the mean of the wrong ones, so length says nothing "
                "there. The reference attenuates them too; adora_method.adora.ties: keep leaves "
                "them their weight",
                file=sys.stderr,
            )


def learned_figures(advantages: Advantages) -> dict[str, float]:
    """Return the figures of the rollouts that the loss uses, by their names in the log."""
    learned_reward = torch.nanmean(advantages.judged.groups.rewards_PG).item()
    figures = {"learned_reward": learned_reward, **advantages.figures}
    return {f"adora/{name}": value for name, value in figures.items()}


def judged_figures(
    judged: JudgedGroups, facts: RolloutFacts, functions: Sequence[str]
) -> dict[str, float]:
    """Return the figures of all rollouts that were graded, by their names in the log.

    They are TRL's, ADORA's, and those that the reward functions log.

    Args:
        judged: the groups of all ranks, weighed by ADORA's criteria.
        facts: rewards and lengths of the same rollouts.
        functions: the names of the reward functions.
    """
    figures = {f"adora/{name}": value for name, value in adora_metrics(judged.weighting).items()}
    figures["adora/reflective_per_1000_tokens"] = facts.reflective_per_1000_tokens
    figures["rewards/missing"] = facts.missing_share
    figures["completions/clipped_ratio"] = facts.cut_off_N.float().mean().item()
    ended = facts.length_N[~facts.cut_off_N]
    for name, reduce in (("mean", torch.mean), ("min", torch.amin), ("max", torch.amax)):
        figures[f"completions/{name}_length"] = reduce(facts.length_N).item()
        figures[f"completions/{name}_terminated_length"] = (
            reduce(ended).item() if len(ended) else 0.0
        )
    for name, rewards_N in zip(functions, facts.counted_NF.unbind(dim=1), strict=True):
        mean, std = _mean_and_deviation(rewards_N)
        figures[f"rewards/{name}/mean"] = mean
        figures[f"rewards/{name}/std"] = std
    mean, std = _mean_and_deviation(judged.groups.rewards_PG.flatten())
    figures["reward"] = mean
    figures["reward_std"] = std
    figures["frac_reward_zero_std"] = judged.equal_reward_share
    return {**figures, **facts.logged}


def tool_figures(rewards_PG: Tensor, facts: RolloutFacts) -> dict[str, float]:
    """Return the figures of a run with tools, by their names in the log.

    Those of TRL begin with `tools/`. `adora/tool_gain` is the mean reward of the rollouts that
    called a tool minus that of the others in their group, over the groups that have both; it is
    left out where no group has.

    Args:
        rewards_PG: the rewards of all rollouts, (P, G), NaN where a rollout has none.
        facts: of the same rollouts, P x G of them.
    """
    called_PG = facts.calls_N.view_as(rewards_PG) > 0
    has_both_P = called_PG.any(1) & ~called_PG.all(1)
    nan = torch.tensor(torch.nan)
    mean_with_call_P = torch.where(called_PG, rewards_PG, nan).nanmean(1)
    mean_without_call_P = torch.where(~called_PG, rewards_PG, nan).nanmean(1)
    gain = (mean_with_call_P - mean_without_call_P)[has_both_P].nanmean().item()
    failure_frequency = facts.failed_calls_N.sum() / facts.calls_N.sum().clamp(min=1)
    figures = {
        "tools/call_frequency": facts.calls_N.mean().item(),
        "tools/failure_frequency": failure_frequency.item(),
        "adora/called": called_PG.float().mean().item(),
        "adora/unanswered_calls": facts.unanswered_N.float().mean().item(),
        "adora/tools_s": facts.tool_seconds_N.sum().item(),
    }
    if not math.isnan(gain):
        figures["adora/tool_gain"] = gain
    return figures


def _mean_and_deviation(values: Tensor) -> tuple[float, float]:
    """Return the mean and the standard deviation of the values that are not NaN."""
    mean = torch.nanmean(values)
    return mean.item(), deviation(values, mean).item()
