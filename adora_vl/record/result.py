"""The result of a run: its held-out accuracy, or else what its training shows, with an interval.

The page of a run and its last lines say the same, since both call this module.
"""

import re
from collections.abc import Mapping, Sequence
from math import hypot, inf, isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeGuard, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from adora_vl.evals.inference.predictions import SCORE_FILE
from adora_vl.evals.score_differences import Difference, accuracy_difference
from adora_vl.evals.score_files import ScoreFile, read_run
from adora_vl.evals.scoring.coverage import count_noun, describe_scored_part
from adora_vl.evals.scoring.statistics import welch_interval
from adora_vl.evals.scoring.table import percent_with_interval, scored_dataset_name
from adora_vl.record.metrics import log_entry_kind
from adora_vl.record.record_files import ROLLOUTS_FOLDER, list_record_files, read_record_file
from adora_vl.record.shown_metrics import PASS_RATE_KEY
from adora_vl.utils.cli import pluralize
from adora_vl.utils.errors import UserError

# Below the folder of a run: the score of its model, and of the model before the training.
SCORE_FILE_AFTER = Path("eval") / SCORE_FILE
SCORE_FILE_BEFORE = Path("before") / SCORE_FILE
REWARD_KEY = "reward"
_ACCURACY_KEY_PATTERN = re.compile(r"eval_(.*)_accuracy")
# the entries of a run's log, or the lines of its `metrics.jsonl`
LogEntries = Sequence[Mapping[str, Any]]
_Value = TypeVar("_Value")


def describe_result(folder: Path, log: LogEntries) -> str | None:
    """Return in one line what a run has achieved; None where nothing was logged.

    The first of these sources that the run has is taken:

        1. a score of held-out problems in its folder
        2. the evaluations during the training
        3. the pass rate or the reward of the training itself

    Args:
        folder: the output_dir of the run.
        log: its log history, or the lines of its metrics.
    """
    return _held_out_result(folder) or _evaluation_result(log) or _training_result(folder, log)


def is_noise(change: Difference) -> bool:
    """Return whether 0 lies in the interval of a change, which may then be chance.

    A change without an interval is not called noise.
    """
    return change.low is not None and change.high is not None and change.low <= 0 <= change.high


def training_change(folder: Path, log: LogEntries, key: str) -> Difference | None:
    """Return how a metric changed from the first to the last fifth of a run's logged steps.

    The 95 % interval of the change comes from the recorded groups of these steps. A group has one
    value, the mean of its answers, since answers to one problem are not independent of each other.
    Without a record the interval comes from the logged values of the steps.

    Args:
        folder: the output_dir of the run.
        log: its log history, or the lines of its metrics.
        key: `adora/pass_rate` or `reward`.

    Returns:
        the change; None for a log of fewer than two steps. It has no interval where a fifth has a
        single value, or where all values of each fifth are equal.
    """
    lines = [line for line in log if log_entry_kind(line) != "eval" and _is_number(line.get(key))]
    if len(lines) < 2:
        return None
    first_lines, last_lines = first_and_last_fifth(lines)
    step_samples = _MetricSamples(
        first_fifth=[float(line[key]) for line in first_lines],
        last_fifth=[float(line[key]) for line in last_lines],
        unit="logged step",
    )
    # A line has the metrics of all steps since the line before it.
    line_before_last_fifth = lines[-len(last_lines) - 1]
    group_samples = _samples_of_recorded_groups(
        folder,
        end_of_first_fifth=first_lines[-1].get("step", 0),
        begin_of_last_fifth=line_before_last_fifth.get("step", 0) + 1,
        key=key,
    )
    return _change_with_interval(
        first_mean=fmean(step_samples.first_fifth),
        last_mean=fmean(step_samples.last_fifth),
        samples=group_samples or step_samples,
        is_share=key == PASS_RATE_KEY,
    )


def first_and_last_fifth(values: Sequence[_Value]) -> tuple[Sequence[_Value], Sequence[_Value]]:
    """Return the first and the last fifth of a sequence, rounded down, at least one value each."""
    fifth = max(1, len(values) // 5)
    return values[:fifth], values[-fifth:]


class _MetricSamples(NamedTuple):
    """The values of a metric in the first and in the last fifth of the logged steps."""

    first_fifth: list[float]
    last_fifth: list[float]
    unit: str
    """What has one value each: `group` or `logged step`."""


def _change_with_interval(
    first_mean: float, last_mean: float, samples: _MetricSamples, *, is_share: bool
) -> Difference:
    """Return the change between two means, with an interval as wide as Welch's for the samples.

    The means are those of the log. The means of the samples may differ from them a little, as the
    record also has groups that were replaced. So only the width of the samples' interval is taken.
    There is no interval where one side has fewer than two samples, or where the samples of each
    side are equal. A share (`is_share`) changes by at most 1, where the interval ends too.
    """
    first_count = len(samples.first_fifth)
    last_count = len(samples.last_fifth)
    interval = None
    if min(first_count, last_count) >= 2:
        interval = welch_interval(samples.first_fifth, samples.last_fifth)
    if interval is None:
        return Difference(first=first_mean, second=last_mean, over="no interval")
    low, high = interval
    half_width = (high - low) / 2
    change = last_mean - first_mean
    furthest = 1.0 if is_share else inf
    return Difference(
        first=first_mean,
        second=last_mean,
        low=max(-furthest, change - half_width),
        high=min(furthest, change + half_width),
        over=f"{first_count} and {pluralize(last_count, samples.unit)}",
    )


def _is_number(value: object) -> TypeGuard[float]:
    """Return whether a value of the log is a finite number."""
    return isinstance(value, int | float) and isfinite(value)


def _samples_of_recorded_groups(
    folder: Path, *, end_of_first_fifth: int, begin_of_last_fifth: int, key: str
) -> _MetricSamples | None:
    """Return the mean reward, or the pass rate, of each group of the first and last fifth of steps.

    Returns None if no group of one of the fifths is recorded, since a record that has reached
    `adora_record_gb` deletes its oldest steps, or if a file of the record cannot be read.

    Args:
        folder: the output_dir of the run.
        end_of_first_fifth: the last step of the first fifth.
        begin_of_last_fifth: the first step of the last fifth.
        key: `adora/pass_rate` or `reward`.
    """
    column = "pass_rate" if key == PASS_RATE_KEY else REWARD_KEY
    try:
        groups = _means_of_groups(folder, column)
    # A file is damaged, or a run that still trains has just merged it into another.
    except (UserError, OSError, pa.ArrowException):
        return None
    first_groups = groups.filter(pc.field("step") <= end_of_first_fifth)
    last_groups = groups.filter(pc.field("step") >= begin_of_last_fifth)
    samples = _MetricSamples(
        first_fifth=first_groups["mean"].to_pylist(),
        last_fifth=last_groups["mean"].to_pylist(),
        unit="group",
    )
    has_both = bool(samples.first_fifth) and bool(samples.last_fifth)
    return samples if has_both else None


def _means_of_groups(folder: Path, column: str) -> pa.Table:
    """Return the mean of a column of the record for each group that has a value in it.

    Groups are numbered within their step. The columns of the table are `step`, `group` and `mean`.
    For example, if the rewards of group 0 in step 3 are 1, 0, 0 and 1, its row is 3, 0, 0.5.
    """
    tables = [
        read_record_file(file, ["step", "group", column])
        for file in list_record_files(folder / ROLLOUTS_FOLDER)
    ]
    groups = pa.concat_tables(tables).group_by(["step", "group"]).aggregate([(column, "mean")])
    groups = groups.rename_columns(["step", "group", "mean"])
    return groups.filter(pc.is_finite(pc.field("mean")))


def _held_out_result(folder: Path) -> str | None:
    """Return in one line the score of the run's model on held-out problems.

    Where the model before the training has a score on the same benchmark (in `before/`), the line
    has the change. None where the run's folder has no score.
    """
    file_after = _read_score_file(folder / SCORE_FILE_AFTER)
    if file_after is None:
        return None
    score = file_after.score
    # such as `40 of 512 problems`
    count = f"{describe_scored_part(score) or score['total']} {count_noun([score])}"
    title = f"held-out accuracy, {scored_dataset_name(score)}"
    file_before = _read_score_file(folder / SCORE_FILE_BEFORE)
    change = None
    if file_before is not None and file_before.benchmark == file_after.benchmark:
        change = accuracy_difference([file_before], [file_after])
    # There is no score before, it is of another benchmark, or no problem is in both.
    if change is None:
        accuracy = percent_with_interval(score["accuracy"], score["interval_95"])
        return f"{title} {accuracy} of {count} ({SCORE_FILE_AFTER})"
    basis = f"{change.over}, of {count}; {SCORE_FILE_BEFORE}, {SCORE_FILE_AFTER}"
    return f"{title} {_change_text(change, of_share=True)} ({basis})"


def _read_score_file(file: Path) -> ScoreFile | None:
    """Return a score file; None where there is none that can be read."""
    try:
        return read_run(str(file)) if file.is_file() else None
    except UserError:
        return None


def _evaluation_result(log: LogEntries) -> str | None:
    """Return in one line how the accuracy changed from the first to the last evaluation in the log.

    Where the run evaluates several ways to ask the problems, the accuracy with their pictures is
    taken. None where the log has no evaluation.
    """
    # keys such as `eval_NAME_accuracy`, without those of the interval's bounds
    keys = {key for line in log for key in line if _ACCURACY_KEY_PATTERN.fullmatch(key)}
    keys_with_pictures = sorted(key for key in keys if key.endswith("_image_accuracy"))
    other_keys = sorted(keys.difference(keys_with_pictures))
    for key in [*keys_with_pictures, *other_keys]:
        lines = [line for line in log if _is_number(line.get(key))]
        if lines:
            name = key.removeprefix("eval_").removesuffix("_accuracy")
            change = _evaluation_change(first_line=lines[0], last_line=lines[-1], key=key)
            text = _change_text(change, of_share=True)
            return f"held-out accuracy, {name} {text} (first and last evaluation)"
    return None


def _evaluation_change(
    first_line: Mapping[str, Any], last_line: Mapping[str, Any], key: str
) -> Difference:
    """Return the change between two logged accuracies, with an interval made of their intervals.

    It is Newcombe's interval (1998, method 10) for two independent shares. The evaluations ask the
    same problems, so a paired interval would be narrower, but the log does not say which of the
    answers were right. There is no interval for a single evaluation, or where the log lacks a
    bound.

    Args:
        first_line: the log's line of the first evaluation.
        last_line: the log's line of the last evaluation, which may be the same line.
        key: the accuracy's key; the bounds of its interval have the suffixes `_low` and `_high`.
    """
    change = Difference(first=first_line[key], second=last_line[key], over="no interval")
    first_low = first_line.get(f"{key}_low")
    first_high = first_line.get(f"{key}_high")
    last_low = last_line.get(f"{key}_low")
    last_high = last_line.get(f"{key}_high")
    if first_line is last_line:
        return change
    if not _is_number(first_low) or not _is_number(first_high):
        return change
    if not _is_number(last_low) or not _is_number(last_high):
        return change
    # Each accuracy has a distance to its bound. The two distances make the distance of the change
    # to its bound: it is the root of the sum of their squares.
    distance_below = hypot(change.second - last_low, first_high - change.first)
    distance_above = hypot(last_high - change.second, change.first - first_low)
    return Difference(
        first=change.first,
        second=change.second,
        low=change.value - distance_below,
        high=change.value + distance_above,
        over="two evaluations",
    )


def _training_result(folder: Path, log: LogEntries) -> str | None:
    """Return in one line how the pass rate in training changed, or the reward where it has none."""
    title_by_key = {PASS_RATE_KEY: "pass rate in training", REWARD_KEY: "reward"}
    for key, title in title_by_key.items():
        lines = [line for line in log if _is_number(line.get(key))]
        if not lines:
            continue
        is_share = key == PASS_RATE_KEY
        change = training_change(folder, log, key)
        if change is None:
            text = _value_text(lines[-1][key], of_share=is_share)
            return f"{title} {text} (one logged step)"
        # `over` says what the interval was computed from, such as `40 and 42 groups`.
        over = "" if change.low is None else f", {change.over}"
        text = _change_text(change, of_share=is_share)
        return f"{title} {text} (first and last fifth of the steps{over})"
    return None


def _value_text(value: float, *, of_share: bool) -> str:
    """Return the value of a metric as text; that of a share is in per cent."""
    return f"{100 * value:.0f} %" if of_share else f"{value:.3g}"


def _change_text(change: Difference, *, of_share: bool) -> str:
    """Return a change with both of its values as text: `52 % → 38 %: -14.6 points, 95 % [...]`."""
    first_text = _value_text(change.first, of_share=of_share)
    second_text = _value_text(change.second, of_share=of_share)
    text = f"{first_text} → {second_text}"
    return text if change.low is None else f"{text}: {interval_text(change, of_share=of_share)}"


def interval_text(change: Difference, *, of_share: bool) -> str:
    """Return a change with its interval as text: `-0.146, 95 % [-0.346, +0.054], within noise`.

    `of_share`: whether the metric is a share; its change is written in percentage points. The
    change must have an interval.
    """
    assert change.low is not None
    assert change.high is not None
    if of_share:
        return f"{change.text_in_points}{_noise_words(change)}"
    interval = f"95 % [{change.low:+.3f}, {change.high:+.3f}]"
    return f"{change.value:+.3f}, {interval}{_noise_words(change)}"


def _noise_words(change: Difference) -> str:
    """Return `, within noise` for a change that may be chance, and an empty text for any other."""
    return ", within noise" if is_noise(change) else ""
