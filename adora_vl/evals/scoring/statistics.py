"""The uncertainty of a figure: intervals for one run, and tests for the difference between two."""

import random
from collections.abc import Sequence
from fractions import Fraction
from math import comb, sqrt
from statistics import fmean, stdev, variance

_NORMAL_QUANTILE_95 = 1.959963984540054  # the normal distribution's 97.5 % quantile
# The resamples of a bootstrap. The ends of an interval vary by about a tenth of its width.
BOOTSTRAP_RESAMPLES = 2000
BOOTSTRAP_SEED = 0  # of every bootstrap


# The 97.5 % quantiles of Student's t distribution, for 1, 2, ... degrees of freedom.
_STUDENT_QUANTILES_95 = (
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


def student_quantile(degrees_of_freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t distribution.

    Degrees of freedom that are no whole number, as in Welch's test, are rounded down, which makes
    the quantile larger. Beyond the table it is at most 4 % too large.
    """
    whole_degrees = max(1, int(degrees_of_freedom))
    return (
        _STUDENT_QUANTILES_95[whole_degrees - 1]
        if whole_degrees <= len(_STUDENT_QUANTILES_95)
        else _STUDENT_QUANTILES_95[-1]
    )


def student_half_width(values: Sequence[float]) -> float:
    """Return half the width of the 95 % interval of a mean of at least two values, by Student's t."""
    return student_quantile(len(values) - 1) * stdev(values) / sqrt(len(values))


def paired_t_interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of at least two paired differences, by Student's t."""
    mean = fmean(differences)
    half = student_half_width(differences)
    return mean - half, mean + half


def welch_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of mean(second) - mean(first), by Welch's t.

    Each has at least two values, and their variances may differ.
    """
    difference = fmean(second) - fmean(first)
    # The squared standard error of each mean.
    first_error = variance(first) / len(first)
    second_error = variance(second) / len(second)
    total_error = first_error + second_error
    if not total_error:  # equal values, of which no interval can be computed
        return difference, difference
    # The Welch-Satterthwaite equation.
    denominator = first_error**2 / (len(first) - 1) + second_error**2 / (len(second) - 1)
    degrees_of_freedom = total_error**2 / denominator
    half = student_quantile(degrees_of_freedom) * sqrt(total_error)
    return difference - half, difference + half


def wilson_interval(correct: float, total: int) -> tuple[float, float]:
    """Return the 95 % score interval of an accuracy (Wilson 1927, without continuity correction).

    Args:
        correct: The number of right answers. It may be a fraction, where several answers to a
            problem count as one.
        total: The number of answers, at least 1.
    """
    share = correct / total
    spread = _NORMAL_QUANTILE_95**2 / total
    centre = (share + spread / 2) / (1 + spread)
    half = sqrt(share * (1 - share) * spread + spread**2 / 4) / (1 + spread)
    # Exact at the ends, where rounding would leave 1e-17 or 1 + 1e-16.
    low = 0.0 if correct == 0 else centre - half
    high = 1.0 if correct == total else centre + half
    return low, high


def wilson_over_problems(count: int, pids: Sequence[str]) -> list[float]:
    """Return the 95 % score interval of the share of answers that are counted, over the problems.

    Several answers to one problem are not independent. The interval is therefore that of as many
    answers as there are problems. It is never too narrow, and wider than necessary where the
    answers to a problem differ.

    Args:
        count: The number of answers that are counted, such as the right ones.
        pids: The problem of each answer, at least one.
    """
    n_problems = len(set(pids))
    counted_problems: float = count
    if n_problems < len(pids):
        counted_problems = count / len(pids) * n_problems
    return list(wilson_interval(counted_problems, n_problems))


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean of at least one value, by resampling.

    The seed is fixed, so that the same values always have the same interval.
    """
    generator = random.Random(BOOTSTRAP_SEED)
    n = len(values)
    means = sorted(sum(generator.choices(values, k=n)) / n for _ in range(BOOTSTRAP_RESAMPLES))
    return means[int(0.025 * BOOTSTRAP_RESAMPLES)], means[int(0.975 * BOOTSTRAP_RESAMPLES) - 1]


def bootstrap_ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float]
) -> tuple[float, float]:
    """Return the 95 % percentile interval of sum(numerators) / sum(denominators), by resampling.

    The values are paired, and pairs are drawn. A draw whose denominators sum to 0 has no ratio and
    is left out. If that is so for all draws, the interval is from 0 to infinity. The seed is fixed,
    so that the same values always have the same interval.
    """
    generator = random.Random(BOOTSTRAP_SEED)
    pairs = list(zip(numerators, denominators, strict=True))
    ratios: list[float] = []
    for _ in range(BOOTSTRAP_RESAMPLES):
        drawn_pairs = generator.choices(pairs, k=len(pairs))
        total = sum(denominator for _, denominator in drawn_pairs)
        if total:
            ratios.append(sum(numerator for numerator, _ in drawn_pairs) / total)
    ratios.sort()
    if not ratios:
        return 0.0, float("inf")
    low_index = int(0.025 * len(ratios))
    high_index = max(0, int(0.975 * len(ratios)) - 1)
    return ratios[low_index], ratios[high_index]


def pass_at(k: int, samples: int, correct: int) -> float:
    """Return pass@k: the chance that one of `k` answers, drawn from those to a problem, is right.

    It is the unbiased estimate of Chen et al. 2021 (arXiv 2107.03374), section 2.1.

    Args:
        k: The number of answers that are drawn, at most `samples`.
        samples: The number of answers to the problem.
        correct: The number of them that are right.
    """
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def mcnemar_p(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p of McNemar's test for two runs on the same items.

    The arguments are the numbers of items that only the first run, and only the second, has right.
    """
    total = only_first + only_second
    tail = sum(comb(total, i) for i in range(min(only_first, only_second) + 1))
    # As a fraction, since 2**total may be too large for a float.
    return min(1.0, float(Fraction(2 * tail, 2**total)))
