"""Differences of scores on their common problems, with tests for paired values."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from adora_vl.evals.score_files import ScoreFile
from adora_vl.evals.scoring.statistics import difference_interval, mcnemar_p
from adora_vl.utils.cli import pluralize


@dataclass(frozen=True)
class Difference:
    """The difference of two means, second - first, with its 95 % interval where there is one."""

    first: float
    """The mean that is subtracted, such as the accuracy before a training."""
    second: float
    """The mean from which it is subtracted."""
    low: float | None = None
    """The lower end of the 95 % interval of the difference."""
    high: float | None = None
    """The upper end of it."""
    over: str = "one seed per side: no interval"
    """What the interval is over, in words, such as `512 problems`."""

    @property
    def value(self) -> float:
        """The difference, second - first."""
        return self.second - self.first

    @property
    def text_in_points(self) -> str:
        """The difference of two shares in points: `+35.0 points, 95 % [+1.2, +68.0]`."""
        assert self.low is not None
        assert self.high is not None
        return (
            f"{100 * self.value:+.1f} points, 95 % [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"
        )


def find_common_version_ids(runs: Sequence[ScoreFile]) -> list[str]:
    """Return the ids of the versions that all runs answered, in the order of the first run."""
    common_version_ids = []
    for version_id in runs[0].accuracy_by_version_id:
        if all(version_id in run.accuracy_by_version_id for run in runs):
            common_version_ids.append(version_id)
    return common_version_ids


def accuracy_difference(
    first_runs: Sequence[ScoreFile], second_runs: Sequence[ScoreFile]
) -> Difference | None:
    """Compute the difference in accuracy, second - first, on the problems that all runs answered.

    Either argument has one run, or several whose accuracies on a problem are averaged, such as runs
    with other seeds. The interval says how the difference would vary if other problems had been
    drawn. Returns None where the runs have no common problem.
    """
    common_version_ids = find_common_version_ids([*first_runs, *second_runs])
    if not common_version_ids:
        return None
    first_accuracies = _mean_accuracies(first_runs, common_version_ids)
    second_accuracies = _mean_accuracies(second_runs, common_version_ids)
    problem_ids = first_runs[0].problem_ids_of(common_version_ids)
    difference = paired_difference(first_accuracies, second_accuracies, problem_ids)
    return replace(difference, over=problem_count_text(problem_ids))


def _mean_accuracies(runs: Sequence[ScoreFile], version_ids: Sequence[str]) -> list[float]:
    """Return the accuracy on each of these versions, averaged over the runs."""
    return [
        fmean(run.accuracy_by_version_id[version_id] for run in runs) for version_id in version_ids
    ]


def problem_count_text(problem_ids: Sequence[str], noun: str = "problem") -> str:
    """Say how many problems there are, and in how many versions: `788 problems in 3940 versions`.

    `problem_ids` has the problem of each version; versions are left out where each problem has one.
    """
    n_problems = len(set(problem_ids))
    text = pluralize(n_problems, noun)
    return text if n_problems == len(problem_ids) else f"{text} in {len(problem_ids)} versions"


def paired_difference(
    before: Sequence[float], after: Sequence[float], problem_ids: Sequence[str]
) -> Difference:
    """Compute the difference of the means of paired accuracies, after - before, with its interval.

    Args:
        before: The accuracy on each problem, or on each version of one.
        after: The accuracy on the same problems in another run.
        problem_ids: The problem of each pair, since versions of a problem are not independent.
    """
    differences = [second - first for first, second in zip(before, after, strict=True)]
    low, high = difference_interval(differences, problem_ids)
    return Difference(first=fmean(before), second=fmean(after), low=low, high=high)


class PairedTest(NamedTuple):
    """On how many problems the accuracy rose and fell between two runs, with McNemar's test."""

    gained: int
    """The number of pairs whose accuracy is higher in the second run."""
    lost: int
    """The number of pairs whose accuracy is lower in the second run."""
    p: float | None
    """McNemar's p; None where a value is neither 0 nor 1, or a problem has several versions, since
    the test is for single answers to independent problems."""


def paired_test(
    before: Sequence[float], after: Sequence[float], problem_ids: Sequence[str]
) -> PairedTest:
    """Count the problems with a higher and with a lower accuracy after, and test it by McNemar.

    The accuracies (0, 1, 0) before and (1, 1, 0) after give one gained and none lost. Without
    single answers to independent problems there is no test, and its p is None. The arguments are
    those of `paired_difference`.
    """
    gained = 0
    lost = 0
    for first, second in zip(before, after, strict=True):
        if second > first:
            gained += 1
        elif second < first:
            lost += 1
    has_versions = len(set(problem_ids)) < len(problem_ids)
    are_single_answers = {*before, *after} <= {0.0, 1.0} and not has_versions
    p = mcnemar_p(only_first=lost, only_second=gained) if are_single_answers else None
    return PairedTest(gained=gained, lost=lost, p=p)


def improves_significantly(
    before: Sequence[float], after: Sequence[float], problem_ids: Sequence[str]
) -> bool:
    """Return whether the mean accuracy is higher after than before, at a level of 5 %.

    The arguments are those of `paired_difference`.
    """
    test = paired_test(before, after, problem_ids)
    if test.p is not None:
        return test.gained > test.lost and test.p < 0.05
    # McNemar's test does not apply to several answers to a problem, or to versions of it. Then the
    # interval of the difference has to lie over 0.
    difference = paired_difference(before, after, problem_ids)
    assert difference.low is not None  # a paired difference has an interval
    return difference.low > 0
