"""The result of a run: its held-out accuracy, or else what its training shows, with an interval.

The page of a run and its last lines say the same, since both call this module.
"""

import re
from collections.abc import Mapping, Sequence
from math import hypot, isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, TypeGuard

import pyarrow as pa

from adora_vl.evals.inference.predictions import SCORE
from adora_vl.evals.score_differences import Difference, difference_between
from adora_vl.evals.score_files import ScoreFile, read_run
from adora_vl.evals.scoring.coverage import share_of_the_data
from adora_vl.evals.scoring.statistics import welch
from adora_vl.evals.scoring.table import name_of_data, percent_with_interval
from adora_vl.record.figures import PASS
from adora_vl.record.metrics import kind_of
from adora_vl.record.rollouts import ROLLOUTS, parts, read_part
from adora_vl.utils.cli import amount
from adora_vl.utils.errors import UserError

# Below the folder of a run: the score of its model, and of the model before the training.
AFTER = Path("eval") / SCORE
BEFORE = Path("before") / SCORE
REWARD = "reward"
_EVALUATED = re.compile(r"eval_(.*)_accuracy")
Log = Sequence[Mapping[str, Any]]


def result_of(folder: Path, log: Log) -> str | None:
    """Return the result of a run in one line; None where nothing was logged.

    A score of the held-out problems in the run's folder goes first, then the evaluations on the
    way, then the pass rate and the reward of the training.
    """
    return _held_out_result(folder) or _evaluation_result(log) or _training_result(folder, log)


def is_noise(change: Difference) -> bool:
    """Return whether the interval of a change has 0 in it.

    The data cannot tell such a change from none.
    """
    return change.low is not None and change.high is not None and change.low <= 0 <= change.high


def training_change(folder: Path, log: Log, key: str) -> Difference | None:
    """Return how a figure changed from the first to the last fifth of the logged steps.

    Its interval is over the groups of the record, since the answers to one problem are not
    independent; without a record, over the logged steps. None where there are not two steps.

    Args:
        folder: the output_dir of the run.
        log: its log history, or the lines of its metrics.
        key: `adora/pass_rate` or `reward`.
    """
    lines = [line for line in log if kind_of(line) != "eval" and _is_number(line.get(key))]
    if len(lines) < 2:
        return None
    fifth = max(1, len(lines) // 5)
    first_lines = lines[:fifth]
    last_lines = lines[-fifth:]
    first_values = [float(line[key]) for line in first_lines]
    last_values = [float(line[key]) for line in last_lines]
    change = Difference(fmean(first_values), fmean(last_values), over="no interval")
    groups = _groups_at_the_ends(folder, first=first_lines, last=last_lines, key=key)
    first_sample, last_sample = groups or (first_values, last_values)
    if min(len(first_sample), len(last_sample)) < 2:
        return change
    low, high = welch(first_sample, last_sample)
    half = (high - low) / 2
    unit = "group" if groups else "logged step"
    return Difference(
        first=change.first,
        second=change.second,
        low=change.value - half,
        high=change.value + half,
        over=f"{len(first_sample)} and {amount(len(last_sample), unit)}",
    )


def _is_number(value: object) -> TypeGuard[float]:
    """Return whether a value of the log is a finite number."""
    return isinstance(value, int | float) and isfinite(value)


def _groups_at_the_ends(
    folder: Path, first: Log, last: Log, key: str
) -> tuple[list[float], list[float]] | None:
    """Return the figure of each recorded group in the first and the last of the logged steps.

    It is None where the record lacks one of the ends: beyond its bound the oldest steps are deleted.
    """
    column = "pass_rate" if key == PASS else REWARD
    try:
        groups = _means_of_groups(folder, column)
    except (UserError, OSError, pa.ArrowException):  # damaged, older, or merged just now
        return None
    last_early_step = first[-1].get("step", 0)
    first_late_step = last[0].get("step", 0)
    early = [value for step, value in groups if step <= last_early_step]
    late = [value for step, value in groups if step >= first_late_step]
    return (early, late) if early and late else None


def _means_of_groups(folder: Path, column: str) -> list[tuple[int, float]]:
    """Return the step and the mean of a column of each recorded group."""
    values_of_group: dict[tuple[int, int], list[float]] = {}
    for part in parts(folder / ROLLOUTS):
        for row in read_part(part, ["step", "group", column]).to_pylist():
            if _is_number(row[column]):
                group = (row["step"], row["group"])
                values_of_group.setdefault(group, []).append(float(row[column]))
    return [(step, fmean(values)) for (step, _), values in values_of_group.items()]


def _held_out_result(folder: Path) -> str | None:
    """Return the score of the held-out problems in a run's folder, and that of its start."""
    score_after = _read_score(folder / AFTER)
    if score_after is None:
        return None
    score = score_after.score
    problems = f"{share_of_the_data(score) or score['total']} problems"
    title = f"held-out accuracy, {name_of_data(score)}"
    score_before = _read_score(folder / BEFORE)
    change = None
    if score_before is not None and score_before.score["benchmark"] == score["benchmark"]:
        change = difference_between([score_before], [score_after])
    if change is None:
        accuracy = percent_with_interval(score["accuracy"], score["wilson_95"])
        return f"{title} {accuracy} of {problems} ({AFTER})"
    return f"{title} {_share_change_text(change)} ({change.over}, of {problems}; {BEFORE}, {AFTER})"


def _read_score(file: Path) -> ScoreFile | None:
    """Return a score file; None where there is none that can be read."""
    try:
        return read_run(str(file)) if file.is_file() else None
    except UserError:
        return None


def _evaluation_result(log: Log) -> str | None:
    """Return the change from the first to the last evaluation on the way, in one line.

    Where problems were asked in several ways, that with their pictures is taken.
    """
    keys = {key for line in log for key in line if _EVALUATED.fullmatch(key)}
    by_rank = sorted(keys, key=lambda key: (not key.endswith("_image_accuracy"), key))
    for key in by_rank:
        lines = [line for line in log if _is_number(line.get(key))]
        if lines:
            name = key.removeprefix("eval_").removesuffix("_accuracy")
            change = _evaluation_change(lines[0], lines[-1], key)
            return f"held-out accuracy, {name} {_share_change_text(change)} (first and last evaluation)"
    return None


def _evaluation_change(first: Mapping[str, Any], last: Mapping[str, Any], key: str) -> Difference:
    """Return the difference of two logged accuracies, with Newcombe's interval from those of both.

    It takes the evaluations for independent, so it is too wide for answers to the same problems:
    the log does not say which of them were right (Newcombe 1998, method 10).
    """
    change = Difference(first[key], last[key], over="no interval")
    bounds: list[float] = []
    for line in (first, last):
        for name in (f"{key}_low", f"{key}_high"):
            bound = line.get(name)
            if not _is_number(bound):
                return change
            bounds.append(bound)
    if first is last:
        return change
    first_low, first_high, last_low, last_high = bounds
    below = hypot(change.second - last_low, first_high - change.first)
    above = hypot(last_high - change.second, change.first - first_low)
    return Difference(
        first=change.first,
        second=change.second,
        low=change.value - below,
        high=change.value + above,
        over="two evaluations",
    )


def _training_result(folder: Path, log: Log) -> str | None:
    """Return the change of the pass rate in training, or else of the reward, in one line."""
    for key, title in ((PASS, "pass rate in training"), (REWARD, REWARD)):
        lines = [line for line in log if _is_number(line.get(key))]
        if not lines:
            continue
        is_share = key == PASS
        change = training_change(folder, log, key)
        if change is None:
            value = lines[-1][key]
            text = _in_per_cent(value) if is_share else f"{value:.3g}"
            return f"{title} {text} (one logged step)"
        over = "" if change.low is None else f", {change.over}"
        text = _share_change_text(change) if is_share else _change_text(change)
        return f"{title} {text} (first and last fifth of the steps{over})"
    return None


def _in_per_cent(value: float) -> str:
    """Return a share in per cent."""
    return f"{100 * value:.0f} %"


def _share_change_text(change: Difference) -> str:
    """Return a change of shares: `52 % → 38 %: -14.6 points, 95 % [-34.6, +5.4], within noise`."""
    text = f"{_in_per_cent(change.first)} → {_in_per_cent(change.second)}"
    if change.low is None:
        return text
    return f"{text}: {change.points}{_noise_words(change)}"


def _change_text(change: Difference) -> str:
    """Return a change of a figure that is no share: `0.52 → 0.38: -0.14, 95 % [-0.34, +0.06]`."""
    text = f"{change.first:.3g} → {change.second:.3g}"
    return text if change.low is None else f"{text}: {interval_of(change)}"


def interval_of(change: Difference, *, of_share: bool = False) -> str:
    """Return a change with its interval: `-0.146, 95 % [-0.346, +0.054], within noise`.

    `of_share`: in points, since the share itself is a percentage.
    """
    assert change.low is not None
    assert change.high is not None
    if of_share:
        return f"{change.points}{_noise_words(change)}"
    interval = f"95 % [{change.low:+.3f}, {change.high:+.3f}]"
    return f"{change.value:+.3f}, {interval}{_noise_words(change)}"


def _noise_words(change: Difference) -> str:
    """Return words for a change that the data cannot tell from none; else an empty text."""
    return ", within noise" if is_noise(change) else ""
