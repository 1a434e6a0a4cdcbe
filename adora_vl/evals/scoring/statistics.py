"""The uncertainty of a figure: intervals for one run, and tests for the difference between two."""

import random
from collections.abc import Sequence
from fractions import Fraction
from math import comb, sqrt
from statistics import fmean, stdev, variance
from typing import NamedTuple

_NORMAL_QUANTILE_95 = 1.959963984540054  # the normal distribution's 97.5 % quantile
# The resamples of a bootstrap. The ends of an interval vary by about a tenth of its width.
BOOTSTRAP_RESAMPLES = 2000
BOOTSTRAP_SEED = 0  # of every bootstrap
# Values that differ by less are equal: sums of shares are rounded.
_ROUNDING = 1e-9


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
    whole_degrees = min(max(1, int(degrees_of_freedom)), len(_STUDENT_QUANTILES_95))
    return _STUDENT_QUANTILES_95[whole_degrees - 1]


def student_half_width(values: Sequence[float]) -> float:
    """Return half the width of the 95 % interval of a mean of at least two values, by Student's t."""
    return student_quantile(len(values) - 1) * stdev(values) / sqrt(len(values))


def paired_t_interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean of at least two paired differences, by Student's t.

    None where the differences are equal, since t needs a spread to say how far the mean may be off.
    """
    mean = fmean(differences)
    half = student_half_width(differences)
    if half < _ROUNDING:
        return None
    return mean - half, mean + half


def welch_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of mean(second) - mean(first), by Welch's t.

    Each has at least two values, and their variances may differ. None where the values of both are
    equal among themselves, since t needs a spread to say how far the means may be off.
    """
    difference = fmean(second) - fmean(first)
    # The squared standard error of each mean.
    first_error = variance(first) / len(first)
    second_error = variance(second) / len(second)
    total_error = first_error + second_error
    if sqrt(total_error) < _ROUNDING:
        return None
    # The Welch-Satterthwaite equation.
    denominator = first_error**2 / (len(first) - 1) + second_error**2 / (len(second) - 1)
    degrees_of_freedom = total_error**2 / denominator
    half = student_quantile(degrees_of_freedom) * sqrt(total_error)
    return difference - half, difference + half


def wilson_interval(correct: float, total: float) -> tuple[float, float]:
    """Return the 95 % score interval of an accuracy (Wilson 1927, without continuity correction).

    Args:
        correct: The number of right answers. It may be a fraction, where several answers to a
            problem count as one.
        total: The number of answers, more than 0. It may be a fraction too, where answers are not
            independent and count as fewer (see `wilson_over_problems`).
    """
    share = correct / total
    spread = _NORMAL_QUANTILE_95**2 / total
    centre = (share + spread / 2) / (1 + spread)
    half = sqrt(share * (1 - share) * spread + spread**2 / 4) / (1 + spread)
    # Exact at the ends, where rounding would leave 1e-17 or 1 + 1e-16.
    low = 0.0 if correct == 0 else centre - half
    high = 1.0 if correct == total else centre + half
    return low, high


def wilson_over_problems(
    are_counted: Sequence[bool], problems: Sequence[str]
) -> tuple[float, float]:
    """Return the 95 % score interval of the share of answers that are counted, over the problems.

    Answers to one problem, or to versions of it, are not independent. The interval is therefore
    that of as many independent answers as are worth them.

    Args:
        are_counted: Whether each answer is counted, such as whether it is right; at least one.
        problems: The problem of each answer.
    """
    n_answers = len(are_counted)
    count = sum(are_counted)
    n_independent = _independent_answers(are_counted, problems)
    # The ends stay exact where all answers are independent or counted, or none is.
    if n_independent == n_answers:
        return wilson_interval(count, n_answers)
    if count == n_answers:
        return wilson_interval(n_independent, n_independent)
    return wilson_interval(count / n_answers * n_independent, n_independent)


def _independent_answers(are_counted: Sequence[bool], problems: Sequence[str]) -> float:
    """Return how many independent answers would know the share of counted ones as exactly as these.

    It is the number of answers by the design effect: the variance of the share over its variance
    for independent answers (Kish 1965), here from the sums of the residuals of each problem. With
    few problems that variance is itself uncertain, which Student's t accounts for (Korn and
    Graubard 1998).
    """
    n_answers = len(are_counted)
    share = sum(are_counted) / n_answers
    residual_by_problem = dict.fromkeys(problems, 0.0)
    answers_by_problem = dict.fromkeys(problems, 0)
    for is_counted, problem in zip(are_counted, problems, strict=True):
        residual_by_problem[problem] += is_counted - share
        answers_by_problem[problem] += 1
    n_problems = len(answers_by_problem)
    if n_problems == n_answers:
        return n_answers
    # The least number is that for answers which are equal within each problem. If each problem has
    # equally many answers, it is the number of problems.
    least_number = n_answers**2 / sum(n**2 for n in answers_by_problem.values())
    # Without any spread of the answers, or with one problem alone, no variance can be estimated.
    if share in (0.0, 1.0) or n_problems == 1:
        return least_number
    squared_residuals = sum(residual**2 for residual in residual_by_problem.values())
    variance_of_share = squared_residuals * n_problems / (n_problems - 1) / n_answers**2
    independent_variance = share * (1 - share) / n_answers
    # Answers that differ within a problem more than chance would are not worth more than others.
    design_effect = max(1.0, variance_of_share / independent_variance)
    quantile_ratio = _NORMAL_QUANTILE_95 / student_quantile(n_problems - 1)
    return max(least_number, n_answers / design_effect * quantile_ratio**2)


class ProblemSums(NamedTuple):
    """The sum of the values of one problem, and the number of them."""

    total: float
    n_values: int


def sum_by_problem(values: Sequence[float], problems: Sequence[str]) -> list[ProblemSums]:
    """Sum the values of each problem, in the order in which the problems come first.

    Args:
        values: The values, such as the share of right answers to each version of a problem.
        problems: The problem of each value.
    """
    sums_by_problem: dict[str, ProblemSums] = {}
    for value, problem in zip(values, problems, strict=True):
        total, count = sums_by_problem.get(problem, ProblemSums(0.0, 0))
        sums_by_problem[problem] = ProblemSums(total + value, count + 1)
    return list(sums_by_problem.values())


def mean_interval(
    values: Sequence[float], problems: Sequence[str], *, lowest: float, highest: float
) -> tuple[float, float]:
    """Return the 95 % interval of the mean of values, over the problems, by resampling.

    Problems are drawn, each with all its values (a cluster bootstrap). Where all problems have the
    same mean, resampling would say that nothing is uncertain. The interval is then that of
    `interval_of_equal_values`.

    Args:
        values: At least one.
        problems: The problem of each value.
        lowest: The least value that there may be.
        highest: The largest one.
    """
    sums = sum_by_problem(values, problems)
    means = [total / count for total, count in sums]
    if min(means) == max(means):
        return interval_of_equal_values(means[0], len(means), lowest=lowest, highest=highest)
    return _bootstrap_ratio(sums)


def interval_of_equal_values(
    value: float, count: int, *, lowest: float, highest: float
) -> tuple[float, float]:
    """Return a 95 % interval of the mean where all values that were seen are the same.

    Of all problems a share could have other values that none of `count` drawn ones shows: up to
    3.84 / (count + 3.84), the upper end of Wilson's interval for none (the rule of three). In the
    worst case their values are the lowest ones, or the highest.

    Args:
        value: The value.
        count: How often it was seen.
        lowest: The least value that there may be.
        highest: The largest one.
    """
    _, unseen_share = wilson_interval(0, count)
    low = value - unseen_share * (value - lowest)
    high = value + unseen_share * (highest - value)
    return low, high


def paired_answers_interval(only_first: int, only_second: int, total: int) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two accuracies on the same items, second - first.

    It is the adjusted Wald interval of Bonett and Price (2012), Journal of Educational and
    Behavioral Statistics 37, equation 3: one item is added to those that only the first run has
    right, and one to those that only the second has. It is no point where the runs agree on all
    items, and does not exclude 0 for four items that only one of them has right, as resampling
    does.

    Args:
        only_first: The number of items that only the first run has right.
        only_second: The number of those that only the second has right.
        total: The number of all items.
    """
    lost_share = (only_first + 1) / (total + 2)
    gained_share = (only_second + 1) / (total + 2)
    centre = gained_share - lost_share
    error = sqrt((gained_share + lost_share - centre**2) / (total + 2))
    half = _NORMAL_QUANTILE_95 * error
    return max(-1.0, centre - half), min(1.0, centre + half)


def difference_interval(
    differences: Sequence[float], problems: Sequence[str]
) -> tuple[float, float]:
    """Return the 95 % interval of the mean of paired differences from -1 to 1, over the problems.

    For single answers, one to a problem, it is that of `paired_answers_interval`, else that of
    `mean_interval`.

    Args:
        differences: The difference in the share of right answers to each version of a problem.
        problems: The problem of each difference.
    """
    are_single_answers = set(differences) <= {-1.0, 0.0, 1.0}
    if are_single_answers and len(set(problems)) == len(differences):
        return paired_answers_interval(
            only_first=sum(difference < 0 for difference in differences),
            only_second=sum(difference > 0 for difference in differences),
            total=len(differences),
        )
    return mean_interval(differences, problems, lowest=-1.0, highest=1.0)


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], problems: Sequence[str]
) -> tuple[float, float]:
    """Return the 95 % interval of sum(numerators) / sum(denominators), over the problems.

    Where each denominator is 0 or 1 and each numerator a part of it, the ratio is a share of
    answers, with the interval of `wilson_over_problems`. Otherwise problems are drawn, each with
    all its pairs. Where all draws have the same ratio, as many problems as none of those drawn
    shows could still have other numerators (see `interval_of_equal_values`).

    Args:
        numerators: From 0 to 1.
        denominators: From 0 to 1, with a sum above 0.
        problems: The problem of each pair.
    """
    pairs = list(zip(numerators, denominators, strict=True))
    is_share = {*numerators, *denominators} <= {0.0, 1.0} and all(a <= b for a, b in pairs)
    if is_share:
        are_counted: list[bool] = []
        counted_problems: list[str] = []
        for (numerator, denominator), problem in zip(pairs, problems, strict=True):
            if denominator:
                are_counted.append(bool(numerator))
                counted_problems.append(problem)
        return wilson_over_problems(are_counted, counted_problems)
    sums = [
        (numerator.total, denominator.total)
        for numerator, denominator in zip(
            sum_by_problem(numerators, problems),
            sum_by_problem(denominators, problems),
            strict=True,
        )
    ]
    low, high = _bootstrap_ratio(sums)
    if low == high:  # all draws have the same ratio
        _, unseen_share = wilson_interval(0, len(sums))
        margin = unseen_share * len(pairs) / sum(denominators)
        return max(0.0, low - margin), high + margin
    return low, high


def _bootstrap_ratio(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the 95 % percentile interval of the ratio of two sums, by resampling pairs.

    A draw whose denominators sum to 0 has no ratio and is left out. If that is so for all draws,
    the interval is from 0 to infinity. The seed is fixed, so that the same values always have the
    same interval.

    `pairs`: a numerator and a denominator each.
    """
    generator = random.Random(BOOTSTRAP_SEED)
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
