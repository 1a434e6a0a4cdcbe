"""Differences of scores on their common problems, with tests for paired values."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from adora_vl.evals.score_files import ScoreFile
from adora_vl.evals.scoring.statistics import difference_interval, mcnemar_p
from adora_vl.utils.cli import amount


@dataclass(frozen=True)
class Difference:
    """The difference of two means, with its 95 % interval where there is one."""

    first: float
    """The mean that is subtracted."""
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
    def points(self) -> str:
        """The difference of two shares in points: `+35.0 points, 95 % [+1.2, +68.0]`."""
        assert self.low is not None
        assert self.high is not None
        return (
            f"{100 * self.value:+.1f} points, 95 % [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"
        )


def common_problems(runs: Sequence[ScoreFile]) -> list[str]:
    """Return the ids of the problems that all runs answered, in the order of the first run."""
    return [pid for pid in runs[0].shares if all(pid in run.shares for run in runs)]


def difference_between(
    first_side: Sequence[ScoreFile], second_side: Sequence[ScoreFile]
) -> Difference | None:
    """Compute the difference of accuracy between two sides, on the problems that all runs answered.

    A side is one run, or several runs whose shares are averaged. The interval is paired, and over
    the problems: how the difference would vary if other problems had been drawn. None where the
    runs have no common problem.
    """
    common_pids = common_problems([*first_side, *second_side])
    if not common_pids:
        return None
    first_shares = [fmean(run.shares[pid] for run in first_side) for pid in common_pids]
    second_shares = [fmean(run.shares[pid] for run in second_side) for pid in common_pids]
    problems = first_side[0].problems_of(common_pids)
    difference = paired_difference(first_shares, second_shares, problems)
    return replace(difference, over=problem_amount(problems))


def problem_amount(problems: Sequence[str], noun: str = "problem") -> str:
    """Say how many problems there are, and in how many versions: `788 problems in 3940 versions`.

    `problems`: the problem of each version; versions are not mentioned where each has one.
    """
    n_problems = len(set(problems))
    text = amount(n_problems, noun)
    return text if n_problems == len(problems) else f"{text} in {len(problems)} versions"


def paired_difference(
    before: Sequence[float], after: Sequence[float], problems: Sequence[str]
) -> Difference:
    """Compute the difference of the means of paired shares, with its interval over the problems.

    `problems` has the problem of each pair; see `difference_interval`.
    """
    differences = [second - first for first, second in zip(before, after, strict=True)]
    low, high = difference_interval(differences, problems)
    return Difference(first=fmean(before), second=fmean(after), low=low, high=high)


class PairedTest(NamedTuple):
    """How many paired values changed, and whether that may be chance."""

    gained: int
    """The values that are larger after."""
    lost: int
    """The values that were larger before."""
    p: float | None
    """McNemar's p; None where a value is neither 0 nor 1, or a problem has several versions, since
    the test is for single answers to independent problems."""


def paired_test(
    before: Sequence[float], after: Sequence[float], problems: Sequence[str]
) -> PairedTest:
    """Count the paired values that grew and shrank, and test by McNemar whether that is chance.

    The values (0, 1, 0) before and (1, 1, 0) after give one gained and none lost. `problems` has
    the problem of each pair.
    """
    gained = 0
    lost = 0
    for first, second in zip(before, after, strict=True):
        if second > first:
            gained += 1
        elif second < first:
            lost += 1
    has_versions = len(set(problems)) < len(problems)
    are_single_answers = {*before, *after} <= {0.0, 1.0} and not has_versions
    p = mcnemar_p(only_first=lost, only_second=gained) if are_single_answers else None
    return PairedTest(gained=gained, lost=lost, p=p)


def solves_more(before: Sequence[float], after: Sequence[float], problems: Sequence[str]) -> bool:
    """Return whether significantly more is solved after than before.

    The values are the shares of right answers to each problem. `problems` has the problem of each
    pair.
    """
    test = paired_test(before, after, problems)
    # McNemar's test does not apply to several answers to a problem, or to versions of it. Then the
    # interval of the difference has to lie over 0.
    if test.p is None:
        return (paired_difference(before, after, problems).low or 0) > 0
    return test.gained > test.lost and test.p < 0.05
