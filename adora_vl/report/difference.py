"""How far apart two sides are, with an interval, and what they were at an equal budget. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from adora_vl.commands import amount
from eval.compare import ScoreFile
from eval.statistics import bootstrap, paired_t, welch

Axis = Literal["rollouts", "seconds"]
WINDOW = 0.1  # a noisy figure is averaged over the last tenth of its budget


@dataclass(frozen=True)
class Difference:
    """B - A: the means of both, and the 95 % interval of the difference, where there is one, with what it is over."""

    first: float
    second: float
    low: float | None = None
    high: float | None = None
    over: str = "one seed per side: no interval"

    @property
    def value(self) -> float:
        return self.second - self.first


def between_seeds(first: Mapping[int, float], second: Mapping[int, float]) -> Difference:
    """The difference of one value per seed. Paired where both sides have the same seeds."""
    means = fmean(first.values()), fmean(second.values())
    if len(first) < 2 or len(second) < 2:
        few = "one seed on a side: no interval" if max(len(first), len(second)) > 1 else Difference.over
        return Difference(*means, over=few)
    if first.keys() == second.keys():
        low, high = paired_t([second[seed] - first[seed] for seed in first])
        return Difference(*means, low, high, f"{len(first)} pairs of seeds")
    low, high = welch(list(first.values()), list(second.values()))
    return Difference(*means, low, high, f"{len(first)} and {len(second)} seeds")


def between_problems(first: Sequence[ScoreFile], second: Sequence[ScoreFile]) -> Difference:
    """The difference on the problems that all runs answered; its interval is over the problems, as if other ones had
    been drawn. Raises `ValueError` if there is no common problem.
    """
    runs = [*first, *second]
    common = [pid for pid in runs[0].shares if all(pid in run.shares for run in runs)]
    if not common:
        raise ValueError("no problem in common")
    sides = [[fmean(run.shares[pid] for run in side) for pid in common] for side in (first, second)]
    low, high = bootstrap([after - before for before, after in zip(*sides, strict=True)])
    return Difference(fmean(sides[0]), fmean(sides[1]), low, high, amount(len(common), "problem"))


def at_budget(points: Sequence[tuple[float, float]], budget: float, window: float = WINDOW) -> float | None:
    """The mean of the values within the last `window` of the budget; the newest before it if none is there; None for
    none. `points`: (spent, value), in order.
    """
    before = [(spent, value) for spent, value in points if spent <= budget * (1 + 1e-9)]
    if not before:
        return None
    recent = [value for spent, value in before if spent > budget * (1 - window)]
    return fmean(recent) if recent else before[-1][1]
