"""The uncertainty of a figure: intervals for one run, and tests for the difference between two."""

import random
from collections.abc import Sequence
from fractions import Fraction
from math import comb, sqrt
from statistics import fmean, stdev, variance

_Z_95 = 1.959963984540054  # the normal distribution's 97.5 % quantile
# The resamples of a bootstrap. The ends of an interval vary by about a tenth of its width.
RESAMPLES = 2000
SEED = 0


# Student's t, 97.5 % quantile, by degrees of freedom from 1
_T_95 = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
    2.080,
    2.074,
    2.069,
    2.064,
    2.060,
    2.056,
    2.052,
    2.048,
    2.045,
    2.042,
)


def student_95(degrees: float) -> float:
    """Return the 97.5 % quantile of Student's t distribution.

    There is at least one degree of freedom.
    """
    rounded = max(1, int(degrees))
    # beyond 30 it is at most 4 % too wide
    return _T_95[rounded - 1] if rounded <= len(_T_95) else _T_95[-1]


def half_width(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of the mean of at least two values, by Student's t."""
    return student_95(len(values) - 1) * stdev(values) / sqrt(len(values))


def paired_t(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of at least two paired differences, by Student's t."""
    middle = fmean(differences)
    half = half_width(differences)
    return middle - half, middle + half


def welch(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of mean(second) - mean(first), by Welch's t.

    Each has at least two values.
    """
    difference = fmean(second) - fmean(first)
    # the squared standard error of each mean
    first_error = variance(first) / len(first)
    second_error = variance(second) / len(second)
    total_error = first_error + second_error
    if not total_error:
        return difference, difference
    # the Welch-Satterthwaite equation
    denominator = first_error**2 / (len(first) - 1) + second_error**2 / (len(second) - 1)
    degrees_of_freedom = total_error**2 / denominator
    half = student_95(degrees_of_freedom) * sqrt(total_error)
    return difference - half, difference + half


def wilson(correct: float, total: int) -> tuple[float, float]:
    """Return the 95 % score interval of an accuracy (Wilson 1927, without continuity correction).

    `total` is over 0; `correct` may be a fraction of answers.
    """
    share = correct / total
    spread = _Z_95**2 / total
    centre = (share + spread / 2) / (1 + spread)
    half = sqrt(share * (1 - share) * spread + spread**2 / 4) / (1 + spread)
    # Exact at the ends, where rounding would leave 1e-17 or 1 + 1e-16.
    return (0.0 if correct == 0 else centre - half, 1.0 if correct == total else centre + half)


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean of `values`, by drawing them anew.

    There is at least one value. The seed is fixed, so that a score can be repeated.
    """
    draw = random.Random(SEED)
    means = sorted(sum(draw.choices(values, k=len(values))) / len(values) for _ in range(RESAMPLES))
    return means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES) - 1]


def bootstrap_ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % percentile interval of sum(above) / sum(below), by drawing the pairs anew.

    A draw whose denominator is 0 has no ratio and is left out; at least one value of `below` is
    over 0. The draws are seeded, so that equal values give the same interval.
    """
    draw = random.Random(SEED)
    pairs = list(zip(above, below, strict=True))
    ratios: list[float] = []
    for _ in range(RESAMPLES):
        drawn = draw.choices(pairs, k=len(pairs))
        total = sum(second for _, second in drawn)
        if total:
            ratios.append(sum(first for first, _ in drawn) / total)
    ratios.sort()
    if not ratios:
        return 0.0, float("inf")
    return ratios[int(0.025 * len(ratios))], ratios[max(0, int(0.975 * len(ratios)) - 1)]


def pass_at(k: int, samples: int, correct: int) -> float:
    """Return the chance that one of `k` answers, drawn from `samples`, is right.

    `correct` of the samples are right, and `k` is at most `samples`. It is the unbiased estimate of
    Chen et al. 2021 (arXiv 2107.03374), section 2.1.
    """
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p of McNemar's test.

    The arguments are the numbers of items that only one of two runs has right.
    """
    total = only_first + only_second
    tail = sum(comb(total, i) for i in range(min(only_first, only_second) + 1))
    return min(1.0, float(Fraction(2 * tail, 2**total)))  # exact for any number of items
