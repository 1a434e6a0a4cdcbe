"""Differences of scores on their common problems, with tests for paired values."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from adora_vl.evals.score_files import ScoreFile
from adora_vl.evals.scoring.statistics import bootstrap, mcnemar
from adora_vl.utils.cli import amount


@dataclass(frozen=True)
class Difference:
    """The difference of the means of two sides, with its 95 % interval where there is one."""

    first: float
    """The mean of the side that is subtracted."""
    second: float
    """The mean of the other side."""
    low: float | None = None
    """The lower end of the 95 % interval of the difference."""
    high: float | None = None
    """The upper end of it."""
    over: str = "one seed per side: no interval"
    """What the interval is over, in words."""

    @property
    def value(self) -> float:
        """The difference, second - first."""
        return self.second - self.first

    @property
    def points(self) -> str:
        """A difference of shares in percentage points, `+35.0 points, 95 % [+1.2, +68.0]`."""
        assert self.low is not None
        assert self.high is not None
        return (
            f"{100 * self.value:+.1f} points, 95 % [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"
        )


def common_problems(runs: Sequence[ScoreFile]) -> list[str]:
    """Return the ids of the problems that all runs answered, in the order of the first run."""
    return [pid for pid in runs[0].shares if all(pid in run.shares for run in runs)]


def between_problems(first: Sequence[ScoreFile], second: Sequence[ScoreFile]) -> Difference | None:
    """Return the difference of two sides on the problems that all their runs answered.

    None if none is. A side is one run, or several runs whose shares are averaged. The interval is a
    paired bootstrap over the problems: how the difference would vary if other problems had been
    drawn.
    """
    common = common_problems([*first, *second])
    if not common:
        return None
    first_shares = [fmean(run.shares[pid] for run in first) for pid in common]
    second_shares = [fmean(run.shares[pid] for run in second) for pid in common]
    difference = paired_difference(first_shares, second_shares)
    return replace(difference, over=amount(len(common), "problem"))


def paired_difference(before: Sequence[float], after: Sequence[float]) -> Difference:
    """Return the difference of paired values, with its bootstrap interval."""
    low, high = bootstrap([second - first for first, second in zip(before, after, strict=True)])
    return Difference(first=fmean(before), second=fmean(after), low=low, high=high)


class PairedTest(NamedTuple):
    """How many paired values changed, and whether that may be chance."""

    gained: int
    """The values that are larger after."""
    lost: int
    """The values that were larger before."""
    p: float | None
    """McNemar's p; None where a value is neither 0 nor 1, since the test is for single answers."""


def paired_test(before: Sequence[float], after: Sequence[float]) -> PairedTest:
    """Return how many paired values are larger after and before, and McNemar's p of both counts."""
    gained = 0
    lost = 0
    for first, second in zip(before, after, strict=True):
        if second > first:
            gained += 1
        elif second < first:
            lost += 1
    are_single_answers = {*before, *after} <= {0.0, 1.0}
    p = mcnemar(lost, gained) if are_single_answers else None
    return PairedTest(gained=gained, lost=lost, p=p)


def solves_more(before: Sequence[float], after: Sequence[float]) -> bool:
    """Return whether more is solved after than before, and not by chance.

    McNemar's test at 5 % says it for single answers. With several answers to a problem it does not
    apply, and the interval of the difference has to lie over 0.
    """
    test = paired_test(before, after)
    if test.p is None:
        return (paired_difference(before, after).low or 0) > 0
    return test.gained > test.lost and test.p < 0.05
