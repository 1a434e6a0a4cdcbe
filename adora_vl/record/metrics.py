"""Figures of a run: `metrics.jsonl`, the seconds of each phase, the progress line, and ADORA's
shares.
"""

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
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import TrainerCallback

from adora_vl.advantage import Adora, AdoraWeighting
from adora_vl.advantage.grpo import deviation
from adora_vl.training.advantages import Advantages
from adora_vl.training.scoring import Scores
from adora_vl.utils.files import replace_file

METRICS = "metrics.jsonl"
Line = dict[str, Any]


def kind_of(logs: Mapping[str, Any]) -> str:
    """`end` for the run's last entry, `eval` for an evaluation, else `train`, also where nothing
    was sampled.
    """
    if "train_runtime" in logs:
        return "end"
    return "eval" if any(key.startswith("eval_") for key in logs) else "train"


def as_line(logs: Mapping[str, Any], step: int, now: str | None) -> Line:
    figures = {key: _finite(value) for key, value in logs.items() if key != "step"}
    return {"step": step, "kind": kind_of(logs), "time": now, **figures}


def _finite(value: Any) -> Any:
    if isinstance(value, bool | int | str) or value is None:
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):  # the user's own callbacks may log anything
        return str(value)
    return number if math.isfinite(number) else None


def read_metrics(path: Path) -> list[Line]:
    """The lines of the file, none if it is missing.

    A last line that a crash has cut off is left out.
    """
    lines = []
    for text in path.read_bytes().split(b"\n") if path.is_file() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int) and "kind" in line:
            lines.append(line)
    return lines


def resumed_lines(
    found: Iterable[Line], history: Sequence[Mapping[str, Any]], step: int
) -> list[Line]:
    """The file of a run that resumes after `step`: no later line, and what it lacks of the
    checkpoint's history.
    """
    lines = [*found, *(as_line(entry, int(entry["step"]), None) for entry in history)]
    kept: dict[tuple[Any, ...], Line] = {}
    for line in lines:
        if line["step"] <= step and line["kind"] != "end":
            kept.setdefault(_identity(line), line)
    return sorted(kept.values(), key=lambda line: (line["step"], line["kind"] != "eval"))


def _identity(line: Line) -> tuple[Any, ...]:
    """What a line is known by: a step has one line for its training, and one for each evaluation."""
    return (
        line["step"],
        line["kind"],
        min((key for key in line if key.startswith("eval_")), default=""),
    )


class MetricsFile(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Writes the file in `output_dir`, on the first rank."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        path = Path(args.output_dir) / METRICS
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (
            resumed_lines(read_metrics(path), state.log_history, state.global_step)
            if state.global_step
            else []
        )
        replace_file(path, _as_text(lines))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            with (Path(args.output_dir) / METRICS).open("a", encoding="utf-8") as stream:
                stream.write(_as_text([as_line(logs, state.global_step, now)]))
                stream.flush()
                os.fsync(stream.fileno())


def _as_text(lines: Iterable[Line]) -> str:
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)


PHASES = ("rollout", "grading", "policy", "sync", "wake", "sleep", "other")
_OF_SLEEP_MODE = {"wake", "sleep"}
_OF_THE_HOST = {"grading", "other"}  # a step starts nothing there that the device is long at


def settle() -> None:
    """Wait for the GPU, so that each phase is charged for its own work; the next one would soon
    wait anyway.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


class PhaseClock(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Divides the time among phases, and puts the seconds of each into the log of a step.

    A phase inside another one pauses it. Inside a step, time that is in no other phase counts as
    `policy`. The time between two steps (loading data, saving, evaluating) is `other`, of the later
    one.
    """

    def __init__(
        self,
        log: Callable[[str, float], None],
        now: Callable[[], float] = time.perf_counter,
        settle: Callable[[], None] = settle,
        *,
        sleep_mode: bool = False,
    ) -> None:
        """`sleep_mode`: whether the run's engine sleeps between generations; else it has no phases
        for that.
        """
        self._log = log
        self._now = now
        self._settle = settle
        self._phases = [phase for phase in PHASES if sleep_mode or phase not in _OF_SLEEP_MODE]
        self._open: list[str] = []
        self._seconds = dict.fromkeys(self._phases, 0.0)
        self._mark = now()

    def enter(self, phase: str) -> None:
        assert phase in self._phases, phase
        self._count()
        self._open.append(phase)

    def leave(self) -> None:
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
        """The seconds of every phase since the last call. Their sum is the time that has passed."""
        self._count()
        taken = self._seconds
        self._seconds = dict.fromkeys(self._phases, 0.0)
        return taken

    def _count(self) -> None:
        if not self._open or self._open[-1] not in _OF_THE_HOST:
            self._settle()
        now = self._now()
        self._seconds[self._open[-1] if self._open else "other"] += now - self._mark
        self._mark = now

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.take()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.enter("policy")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.leave()
        for phase, seconds in self.take().items():
            self._log(f"seconds/{phase}", seconds)


# rewards above adora_correct_above, and right answers
PASS = "adora/pass_rate"  # noqa: S105
ACCURACY = "grading/correct"
# Title, key of the log, format, factor
_FIGURES = (
    ("reward", "reward", "{:.3f}", 1),
    ("without reward", "rewards/missing", "{:.1f}%", 100),
    ("pass", PASS, "{:.0f}%", 100),
    ("accuracy", ACCURACY, "{:.0f}%", 100),
    ("TDS", "adora/tds_share", "{:.0f}%", 100),
    ("length", "completions/mean_length", "{:.0f}", 1),
    ("drift", "adora/drift", "{:.1g}", 1),
)
SILENT_STEPS = 5  # without any signal, then the run says so
_WINDOW = 20  # the remaining time is estimated from this many steps


def duration(seconds: float) -> str:
    """`45s`, `3m05s`, `2h07m`, `1d03h`."""
    whole = round(seconds)
    for big, small, long, short in (
        (86400, 3600, "d", "h"),
        (3600, 60, "h", "m"),
        (60, 1, "m", "s"),
    ):
        if whole >= big:
            return f"{whole // big}{long}{whole % big // small:02}{short}"
    return f"{whole}s"


def differs_from_pass(logs: Mapping[str, Any]) -> bool:
    """Whether accuracy is to stand beside the share that passes: several functions are summed, or
    the two differ.
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
    """One line with the figures that are known. Seconds are per step: means since the last line."""
    parts = [f"step {step:>{len(str(total))}}/{total}"]
    for title, key, form, factor in _FIGURES:
        if key == ACCURACY and not differs_from_pass(logs):
            continue
        if logs.get(key) is not None and (logs[key] or key != "rewards/missing"):
            parts.append(f"{title} {form.format(factor * logs[key])}")
    seconds = {phase: logs.get(f"seconds/{phase}") for phase in PHASES}
    known = {phase: value for phase, value in seconds.items() if value is not None}
    line = "  ".join(parts)
    if known:
        line += f" | {_short(sum(known.values()))} s: "
        line += " ".join(f"{phase} {_short(value)}" for phase, value in known.items())
    return line if left_s is None else f"{line} | {duration(left_s)} left"


def _short(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.0f}"


class ProgressLine(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Replaces Transformers' progress bar and printed dictionaries. Only the first rank prints."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._ends: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._warned = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._ends.clear()
        self._ends.append((state.global_step, time.monotonic()))
        off = args.disable_tqdm or not sys.stderr.isatty()
        done = state.global_step
        self._bar = tqdm(
            total=state.max_steps, initial=done, disable=off, unit="step", dynamic_ncols=True
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if len(self._ends) == 1:  # what comes before the first step, as the self-check, comes once
            self._ends[0] = (state.global_step, time.monotonic())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._ends.append((state.global_step, time.monotonic()))
            self._bar.update(1)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self._bar is not None and logs and ("reward" in logs or "rewards/missing" in logs):
            (first, began) = self._ends[0]
            (last, ended) = self._ends[-1]
            left_s = (
                (ended - began) / (last - first) * (state.max_steps - last)
                if last > first
                else None
            )
            self._bar.write(
                progress_line(logs, step=state.global_step, total=state.max_steps, left_s=left_s)
            )
            sys.stdout.flush()
            silence = no_signal(state.log_history)
            if silence and not self._warned:
                self._bar.write(f"warning: {silence}", file=sys.stderr)
            self._warned = bool(silence)  # once for each stretch of such steps

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def no_signal(history: Sequence[Mapping[str, Any]]) -> str | None:
    """What to say of a run in whose last steps, `SILENT_STEPS` at least, no group had anything to
    teach: since when, the likeliest reason, and what to look at. None if there was something.
    `history`: of the log, or of the file.
    """
    silent: list[Mapping[str, Any]] = []
    before = 0
    for entry in reversed(history):
        if kind_of(entry) == "train" and (share := entry.get("frac_reward_zero_std")) is not None:
            if share < 1:
                before = int(entry["step"])
                break
            silent.append(entry)
    steps = int(silent[0]["step"]) - before if silent else 0
    if steps < SILENT_STEPS:
        return None
    rates = {entry.get(PASS) for entry in silent}
    if rates == {0.0}:
        reason = (
            "no answer was right. `python -m adora_vl.rewards.explain` says what the reward makes "
            "of one (a run's answers are in its report), `python -m data_prep filter` keeps the "
            "problems that the model solves sometimes, and the built-in tiny models know drawn "
            "problems alone"
        )
    elif rates == {1.0}:
        reason = (
            "every answer was right. `python -m data_prep filter` keeps the problems that it "
            "does not always solve"
        )
    elif not any(entry.get("reward_std") for entry in silent):
        reason = (
            f"every answer had the reward {silent[0].get('reward', math.nan):g}. `python -m "
            "adora_vl.rewards.explain --reward FILE.py:FUNCTION` says what yours returns for one"
        )
    else:
        reason = (
            "the answers to a problem are all alike. A higher temperature or more num_generations "
            "makes them differ, `python -m data_prep filter` finds problems where they do"
        )
    return (
        f"nothing was learned in the last {steps} steps: in every group all rewards were equal, "
        f"since {reason}"
    )


def _mean_where(values: Tensor, chosen: Tensor) -> float:
    """The mean of the chosen values.

    It is NaN if none is chosen; TRL's log leaves such figures out.
    """
    return values[chosen].mean().item() if bool(chosen.any()) else float("nan")


def adora_metrics(weighting: AdoraWeighting) -> dict[str, float]:
    """Shares of prompts, and mean lengths of rollouts in tokens.

    A group without any reward counts nowhere.
    """
    groups = weighting.groups
    judged_P, any_correct_P, any_wrong_P = (
        each_PG.any(dim=1) for each_PG in (groups.scored_PG, groups.correct_PG, groups.wrong_PG)
    )
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
    """TDS groups that have both right and wrong rollouts, bool, (P,)."""
    groups = weighting.groups
    return weighting.tds_P & groups.correct_PG.any(dim=1) & groups.wrong_PG.any(dim=1)


class TieNotice:
    """Says once in a run, on the first rank, that many of the attenuated groups are ties of length."""

    # nothing is said below either
    SHARE = 0.1
    GROUPS = 50

    def __init__(self, options: Adora, *, speaks: bool) -> None:
        """`options`: of the run's ADORA, with the mode `off` where it has none."""
        self._silent = not speaks or options.mode != "attenuation" or options.plain
        self._marked = self._ties = 0

    def count(self, weighting: AdoraWeighting) -> None:
        """Called with every generation that is learned from."""
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


def learned_figures(weighed: Advantages) -> dict[str, float]:
    """The figures of the rollouts that are learned from, by their names in the log."""
    figures = {"learned_reward": torch.nanmean(weighed.groups.rewards_PG).item(), **weighed.figures}
    return {f"adora/{name}": value for name, value in figures.items()}


def judged_figures(
    judged: Advantages, scores: Scores, functions: Sequence[str]
) -> dict[str, float]:
    """The figures of all rollouts that were graded: TRL's under its names, ADORA's, and what the
    `functions` log.
    """
    figures = {f"adora/{name}": value for name, value in adora_metrics(judged.weighting).items()}
    figures["adora/reflective_per_1000_tokens"] = scores.reflective_per_1000_tokens
    figures["rewards/missing"] = scores.rewards.missing_share
    figures["completions/clipped_ratio"] = scores.unended_B.float().mean().item()
    ended = scores.lengths_B[~scores.unended_B]
    for name, of in (("mean", torch.mean), ("min", torch.amin), ("max", torch.amax)):
        figures[f"completions/{name}_length"] = of(scores.lengths_B).item()
        figures[f"completions/{name}_terminated_length"] = of(ended).item() if len(ended) else 0.0
    for name, rewards_B in zip(functions, scores.rewards.counted_BF.unbind(dim=1), strict=True):
        figures[f"rewards/{name}/mean"], figures[f"rewards/{name}/std"] = _mean_and_deviation(
            rewards_B
        )
    figures["reward"], figures["reward_std"] = _mean_and_deviation(
        judged.groups.rewards_PG.flatten()
    )
    return {**figures, **judged.figures, **scores.logged}


def tool_figures(rewards_PG: Tensor, facts_N4: Tensor) -> dict[str, float]:
    """Of a run with tools, TRL's under its names.

    `facts_N4`: of each rollout its calls, those that failed, their seconds, whether its last turn
    was unanswered. `adora/tool_gain`: by how much those that called have more reward than others of
    the group.
    """
    calls_N, failed_N, seconds_N, unanswered_N = facts_N4.unbind(dim=1)
    called_PG = calls_N.view_as(rewards_PG) > 0
    both_P = called_PG.any(1) & ~called_PG.all(1)
    nothing = torch.tensor(torch.nan)
    with_P, without_P = (
        torch.where(one, rewards_PG, nothing).nanmean(1) for one in (called_PG, ~called_PG)
    )
    gain = (with_P - without_P)[both_P].nanmean().item()
    return {
        "tools/call_frequency": calls_N.mean().item(),
        "tools/failure_frequency": (failed_N.sum() / calls_N.sum().clamp(min=1)).item(),
        "adora/called": called_PG.float().mean().item(),
        "adora/unanswered_calls": unanswered_N.mean().item(),
        "adora/tools_s": seconds_N.sum().item(),
        **({} if math.isnan(gain) else {"adora/tool_gain": gain}),
    }


def _mean_and_deviation(values: Tensor) -> tuple[float, float]:
    """Of those that are not NaN."""
    mean = torch.nanmean(values)
    return mean.item(), deviation(values, mean).item()
