"""The uncertainty of a metric: intervals for one run, and tests for the difference between two."""

import random
from collections.abc import Sequence
from fractions import Fraction
from math import comb, sqrt
from statistics import fmean, stdev, variance
from typing import NamedTuple

from adora_vl.evals.records import ShareMetric

_NORMAL_QUANTILE_95 = 1.959963984540054  # the normal distribution's 97.5 % quantile
# The number of resamples of a bootstrap. With another seed the ends of an interval would move by
# about a tenth of its width.
BOOTSTRAP_RESAMPLES = 2000
BOOTSTRAP_SEED = 0  # the same for every bootstrap, so that an interval can be reproduced
# A spread below this counts as none, because sums of shares have rounding errors.
_ZERO_TOLERANCE = 1e-9


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


def t_quantile(degrees_of_freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t distribution.

    4 degrees of freedom give 2.776. Fractions of a degree, as in Welch's test, are rounded down,
    which makes the quantile a little larger. Over 30 degrees the last entry of the table is
    returned, which is at most 4 % too large.
    """
    whole_degrees = min(max(1, int(degrees_of_freedom)), len(_STUDENT_QUANTILES_95))
    return _STUDENT_QUANTILES_95[whole_degrees - 1]


def t_half_width(values: Sequence[float]) -> float:
    """Return half the width of a mean's 95 % interval by Student's t, for at least two values."""
    return t_quantile(len(values) - 1) * stdev(values) / sqrt(len(values))


def paired_t_interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean of at least two paired differences, by Student's t.

    Returns None if all differences are equal, because Student's t needs a spread.
    """
    mean = fmean(differences)
    half_width = t_half_width(differences)
    if half_width < _ZERO_TOLERANCE:
        return None
    return mean - half_width, mean + half_width


def welch_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of mean(second) - mean(first), by Welch's t.

    Each sequence has at least two values, and the two variances may differ. Returns None if neither
    sequence has any spread, because Student's t needs one.
    """
    difference = fmean(second) - fmean(first)
    # The variance of each mean, which is its standard error squared.
    first_variance = variance(first) / len(first)
    second_variance = variance(second) / len(second)
    total_variance = first_variance + second_variance
    if sqrt(total_variance) < _ZERO_TOLERANCE:
        return None
    # The Welch-Satterthwaite equation.
    denominator = first_variance**2 / (len(first) - 1) + second_variance**2 / (len(second) - 1)
    degrees_of_freedom = total_variance**2 / denominator
    half_width = t_quantile(degrees_of_freedom) * sqrt(total_variance)
    return difference - half_width, difference + half_width


def wilson_interval(correct: float, total: float) -> tuple[float, float]:
    """Return the 95 % score interval of an accuracy (Wilson 1927, without continuity correction).

    Args:
        correct: The number of right answers. It may be a fraction if several answers to a problem
            count as one.
        total: The number of answers, more than 0. It may be a fraction if answers are not
            independent and count as fewer (see `clustered_wilson_interval`).

    For example, 6 of 10 right answers give (0.313, 0.832).
    """
    share = correct / total
    spread = _NORMAL_QUANTILE_95**2 / total
    centre = (share + spread / 2) / (1 + spread)
    half_width = sqrt(share * (1 - share) * spread + spread**2 / 4) / (1 + spread)
    # Exact at the ends, where rounding would leave 1e-17 or 1 + 1e-16.
    low = 0.0 if correct == 0 else centre - half_width
    high = 1.0 if correct == total else centre + half_width
    return low, high


def clustered_wilson_interval(
    successes: Sequence[bool], problem_ids: Sequence[str]
) -> tuple[float, float]:
    """Return the 95 % score interval of a share of answers, clustered by problem.

    Several answers to one problem are not independent, so they say less than as many answers to
    different problems. The interval is that of the same share of a smaller, effective number of
    independent answers.

    Args:
        successes: Whether each answer is right (or cut off, or whatever is counted); at least one.
        problem_ids: The problem of each answer.
    """
    n_answers = len(successes)
    n_successes = sum(successes)
    effective_size = _effective_sample_size(successes, problem_ids)
    # The last line would round in two cases that are exact: all answers are independent, or all are
    # successes.
    if effective_size == n_answers:
        return wilson_interval(n_successes, n_answers)
    if n_successes == n_answers:
        return wilson_interval(effective_size, effective_size)
    return wilson_interval(n_successes / n_answers * effective_size, effective_size)


def share_metric(successes: Sequence[bool], problem_ids: Sequence[str]) -> ShareMetric:
    """Return a share with its counts and its Wilson interval clustered by problem.

    Args:
        successes: Whether each answer counts, such as one that was cut off; at least one.
        problem_ids: The problem of each answer. Answers to one problem are not independent.
    """
    count = sum(successes)
    total = len(successes)
    return {
        "count": count,
        "total": total,
        "share": count / total,
        "interval_95": list(clustered_wilson_interval(successes, problem_ids)),
    }


def _effective_sample_size(successes: Sequence[bool], problem_ids: Sequence[str]) -> float:
    """Return how many independent answers would give the share as exactly as these answers do.

    Two answers to each of two problems, both right for one problem and both wrong for the other,
    count as 2 independent answers. Four answers to four problems count as 4.

    The result is the number of answers divided by the design effect (Kish 1965): the variance of
    the share divided by its variance for independent answers. The variance is estimated from the
    residuals summed over each problem. With few problems this estimate is itself uncertain, which
    the quantile of Student's t accounts for (Korn and Graubard 1998).
    """
    n_answers = len(successes)
    share = sum(successes) / n_answers
    residual_by_problem = dict.fromkeys(problem_ids, 0.0)
    n_answers_by_problem = dict.fromkeys(problem_ids, 0)
    for is_success, problem_id in zip(successes, problem_ids, strict=True):
        residual_by_problem[problem_id] += is_success - share
        n_answers_by_problem[problem_id] += 1
    n_problems = len(n_answers_by_problem)
    if n_problems == n_answers:
        return n_answers
    # The smallest possible number: all answers to a problem are the same. If each problem has
    # equally many answers, it is the number of problems.
    smallest_size = n_answers**2 / sum(n**2 for n in n_answers_by_problem.values())
    # No variance can be estimated if all answers are the same, or if there is only one problem.
    if share in (0.0, 1.0) or n_problems == 1:
        return smallest_size
    squared_residuals = sum(residual**2 for residual in residual_by_problem.values())
    variance_of_share = squared_residuals * n_problems / (n_problems - 1) / n_answers**2
    independent_variance = share * (1 - share) / n_answers
    # A design effect below 1 would make the answers count for more than their number.
    design_effect = max(1.0, variance_of_share / independent_variance)
    quantile_ratio = _NORMAL_QUANTILE_95 / t_quantile(n_problems - 1)
    return max(smallest_size, n_answers / design_effect * quantile_ratio**2)


class ProblemSum(NamedTuple):
    """The sum of the values of one problem, and the number of them."""

    total: float
    n_values: int


def sum_by_problem(values: Sequence[float], problem_ids: Sequence[str]) -> list[ProblemSum]:
    """Sum the values of each problem, in the order in which the problems first occur.

    The values 1, 0 and 0.5 of the problems a, b and a give (1.5, 2) for a and (0, 1) for b.

    Args:
        values: The values, such as the accuracy of each version of a problem.
        problem_ids: The problem of each value.
    """
    sum_by_id: dict[str, ProblemSum] = {}
    for value, problem_id in zip(values, problem_ids, strict=True):
        total, n_values = sum_by_id.get(problem_id, ProblemSum(0.0, 0))
        sum_by_id[problem_id] = ProblemSum(total + value, n_values + 1)
    return list(sum_by_id.values())


def bootstrap_mean_interval(
    values: Sequence[float], problem_ids: Sequence[str], *, lowest: float, highest: float
) -> tuple[float, float]:
    """Return the 95 % interval of the mean of values, by a bootstrap clustered by problem.

    Whole problems are drawn, each with all its values. If all problems have the same mean, every
    draw has it too, and the interval would have no width. Then it is that of
    `interval_of_equal_values`.

    Args:
        values: At least one value.
        problem_ids: The problem of each value.
        lowest: The lowest possible value.
        highest: The highest possible value.
    """
    sums = sum_by_problem(values, problem_ids)
    means = [total / n_values for total, n_values in sums]
    if min(means) == max(means):
        return interval_of_equal_values(means[0], len(means), lowest=lowest, highest=highest)
    # The mean is the ratio of two sums over the problems: of their totals and of their counts.
    return _bootstrap_ratio(sums)


def interval_of_equal_values(
    value: float, count: int, *, lowest: float, highest: float
) -> tuple[float, float]:
    """Return a 95 % interval of the mean if all values that were seen are the same.

    Other problems could have other values, although none of `count` values shows it. Their share of
    all problems is at most 3.84 / (count + 3.84), the upper end of Wilson's interval for 0 of
    `count`. In the worst case all their values are `lowest`, or all are `highest`. For example, 10
    values of 1.0 between 0 and 1 give (0.72, 1.0).

    Args:
        value: The value.
        count: How often it was seen.
        lowest: The lowest possible value.
        highest: The highest possible value.
    """
    _, unseen_share = wilson_interval(correct=0, total=count)
    low = value - unseen_share * (value - lowest)
    high = value + unseen_share * (highest - value)
    return low, high


def bonett_price_interval(only_first: int, only_second: int, total: int) -> tuple[float, float]:
    """Return the 95 % interval of the difference in accuracy of two runs on the same problems.

    The difference is second - first. The interval is the adjusted Wald interval of Bonett and Price
    (2012), Journal of Educational and Behavioral Statistics 37, equation 3, which adds one problem
    to each of the two counts. A bootstrap would give an interval without width for two runs that
    agree on all problems. It would also exclude 0 if only one run has four of ten problems right;
    this interval is then (-0.02, 0.69).

    Args:
        only_first: The number of problems that only the first run has right.
        only_second: The number of problems that only the second run has right.
        total: The number of all problems.
    """
    lost_share = (only_first + 1) / (total + 2)
    gained_share = (only_second + 1) / (total + 2)
    centre = gained_share - lost_share
    standard_error = sqrt((gained_share + lost_share - centre**2) / (total + 2))
    half_width = _NORMAL_QUANTILE_95 * standard_error
    return max(-1.0, centre - half_width), min(1.0, centre + half_width)


def difference_interval(
    differences: Sequence[float], problem_ids: Sequence[str]
) -> tuple[float, float]:
    """Return the 95 % interval of the mean difference in accuracy between two runs.

    With one answer to each problem it is Bonett and Price's interval, otherwise a bootstrap
    clustered by problem.

    Args:
        differences: The difference in accuracy on each version of a problem, from -1 to 1.
        problem_ids: The problem of each difference.
    """
    are_single_answers = set(differences) <= {-1.0, 0.0, 1.0}
    if are_single_answers and len(set(problem_ids)) == len(differences):
        return bonett_price_interval(
            only_first=sum(difference < 0 for difference in differences),
            only_second=sum(difference > 0 for difference in differences),
            total=len(differences),
        )
    return bootstrap_mean_interval(differences, problem_ids, lowest=-1.0, highest=1.0)


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], problem_ids: Sequence[str]
) -> tuple[float, float]:
    """Return the 95 % interval of sum(numerators) / sum(denominators), clustered by problem.

    An example is how much of what a model solves from words it solves from the picture too. The
    cases in the order of the code:

    - All values are 0 or 1, and no numerator is over its denominator: the ratio is a share of the
      answers whose denominator is 1, with a Wilson interval.
    - Otherwise it is a bootstrap, which draws whole problems, each with all its pairs.
    - All draws have the same ratio: the interval is widened by the problems that could have other
      numerators without being seen (see `interval_of_equal_values`).

    Args:
        numerators: Values from 0 to 1, one for each version of a problem.
        denominators: As many values from 0 to 1, with a sum above 0.
        problem_ids: The problem of each pair.
    """
    pairs = list(zip(numerators, denominators, strict=True))
    are_single_answers = {*numerators, *denominators} <= {0.0, 1.0}
    is_share = all(numerator <= denominator for numerator, denominator in pairs)
    if are_single_answers and is_share:
        successes: list[bool] = []
        counted_ids: list[str] = []
        for (numerator, denominator), problem_id in zip(pairs, problem_ids, strict=True):
            if denominator:
                successes.append(bool(numerator))
                counted_ids.append(problem_id)
        return clustered_wilson_interval(successes, counted_ids)
    numerator_sums = [total for total, _ in sum_by_problem(numerators, problem_ids)]
    denominator_sums = [total for total, _ in sum_by_problem(denominators, problem_ids)]
    sums = list(zip(numerator_sums, denominator_sums, strict=True))
    low, high = _bootstrap_ratio(sums)
    if low == high:  # all draws have the same ratio
        _, unseen_share = wilson_interval(correct=0, total=len(sums))
        margin = unseen_share * len(pairs) / sum(denominators)
        return max(0.0, low - margin), high + margin
    return low, high


def _bootstrap_ratio(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the 95 % percentile interval of the ratio of two sums, by resampling pairs.

    Each pair is a numerator and a denominator. A draw whose denominators sum to 0 has no ratio and
    is left out. If all draws are left out, the interval is from 0 to infinity. The seed is fixed,
    so that the same values always have the same interval.
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


def pass_at_k(k: int, samples: int, correct: int) -> float:
    """Return pass@k: the chance that one of `k` answers, drawn from all to a problem, is right.

    It is the unbiased estimate of Chen et al. 2021 (arXiv 2107.03374), section 2.1.

    Args:
        k: The number of answers that are drawn, at most `samples`.
        samples: The number of answers to the problem.
        correct: The number of right answers among them.

    For example, one right answer among four gives a pass@2 of 0.5.
    """
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def mcnemar_p(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p of McNemar's test for two runs on the same problems.

    The arguments are the number of problems that only the first run has right, and the number that
    only the second run has right. For example, 1 and 5 give 0.219.
    """
    total = only_first + only_second
    tail = sum(comb(total, i) for i in range(min(only_first, only_second) + 1))
    # As a fraction, since 2**total may be too large for a float.
    return min(1.0, float(Fraction(2 * tail, 2**total)))
