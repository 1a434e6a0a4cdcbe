"""Intervals over problems that are asked in several versions, and of values that are all equal."""

import random

import pytest

from adora_vl.evals.scoring.statistics import (
    bonett_price_interval,
    bootstrap_mean_interval,
    clustered_wilson_interval,
    difference_interval,
    interval_of_equal_values,
    ratio_interval,
    wilson_interval,
)


def ids(count: int, versions: int = 1) -> list[str]:
    """The problem of each answer, with equally many versions each: 0, 0, 1, 1 for `ids(2, 2)`."""
    return [str(number) for number in range(count) for _ in range(versions)]


def width(interval: tuple[float, float]) -> float:
    """Return the distance between the two ends of an interval."""
    low, high = interval
    return high - low


def test_answers_to_versions_of_a_problem_count_as_fewer() -> None:
    """Answers to versions of a problem have the interval of fewer independent answers.

    How many they are worth is computed by hand.
    """
    # Of each problem's four versions all are right or none is: they are worth one answer.
    all_or_none = [number < 40 for number in range(100) for _ in range(4)]
    assert clustered_wilson_interval(all_or_none, ids(100, versions=4)) == pytest.approx(
        wilson_interval(40, 100)
    )
    # Half of each problem's versions are right: they are worth no more than independent answers.
    half_right = [version < 2 for _ in range(100) for version in range(4)]
    # quantiles of the normal distribution, and of Student's with so many problems
    few_problems_factor = (1.959964 / 2.042) ** 2
    independent_answers = 400 * few_problems_factor
    by_hand = wilson_interval(independent_answers / 2, independent_answers)
    assert clustered_wilson_interval(half_right, ids(100, versions=4)) == pytest.approx(
        by_hand, abs=1e-6
    )
    # One version a problem: Wilson's own interval.
    one_version_each = [number < 40 for number in range(100)]
    assert clustered_wilson_interval(one_version_each, ids(100)) == wilson_interval(40, 100)
    # Unequal numbers of versions: 5 answers, in the worst case worth 5^2 / (4^2 + 1).
    assert clustered_wilson_interval([True] * 5, list("aaaab")) == wilson_interval(25 / 17, 25 / 17)
    assert clustered_wilson_interval([False, True], ["a", "a"]) == wilson_interval(0.5, 1)


def test_the_interval_of_versions_holds_the_truth_as_often_as_it_says() -> None:
    """The interval of versions holds the true share in at least 92 % of 400 drawn data sets.

    The five versions of a drawn problem have one difficulty. As independent answers they would get
    a narrower interval, which holds the share in at most 82 %.
    """
    generator = random.Random(5)
    problems = ids(40, versions=5)
    n_draws = 400
    covered = 0
    covered_as_independent = 0
    for _ in range(n_draws):
        are_right: list[bool] = []
        for _ in range(40):
            chance = generator.betavariate(0.4, 0.6)  # 0.4 on average, which is the truth
            are_right += [generator.random() < chance for _ in range(5)]
        low, high = clustered_wilson_interval(are_right, problems)
        if low <= 0.4 <= high:
            covered += 1
        low, high = wilson_interval(sum(are_right), len(are_right))
        if low <= 0.4 <= high:
            covered_as_independent += 1
    # a 95 % interval; as of independent answers it would be too narrow
    assert covered >= 0.92 * n_draws
    assert covered_as_independent <= 0.82 * n_draws


def test_the_paired_interval_of_single_answers_agrees_with_the_exact_test() -> None:
    """Four problems that only one run solves are no difference, and six are, as by McNemar."""
    # By hand, (0 + 1) / 102 on either side: 1.96 * sqrt(2 / 102 / 102).
    assert bonett_price_interval(0, 0, total=100) == pytest.approx((-0.02717, 0.02717), abs=1e-5)
    four_gained, _ = difference_interval([1.0] * 4 + [0.0] * 96, ids(100))
    six_gained, _ = difference_interval([1.0] * 6 + [0.0] * 94, ids(100))
    assert four_gained < 0 < six_gained
    low, high = difference_interval([1.0] * 4 + [0.0] * 96, ids(100))
    assert difference_interval([-1.0] * 4 + [0.0] * 96, ids(100)) == pytest.approx((-high, -low))


def test_equal_values_leave_something_uncertain() -> None:
    """After n drawn problems without an exception, up to 3.84 / (n + 3.84) of all may be one."""
    unseen_share = 3.8415 / (20 + 3.8415)  # 3.8415 is the square of 1.96
    low, high = interval_of_equal_values(0.5, 20, lowest=0.0, highest=1.0)
    assert low == pytest.approx(0.5 - 0.5 * unseen_share, abs=1e-4)
    assert high == pytest.approx(0.5 + 0.5 * unseen_share, abs=1e-4)
    assert bootstrap_mean_interval([0.5] * 20, ids(20), lowest=0.0, highest=1.0) == (low, high)
    # Several answers to a problem, and versions of it, whose differences are all the same.
    quarter_gained = difference_interval([0.25] * 20, ids(20))
    assert quarter_gained == interval_of_equal_values(0.25, 20, lowest=-1.0, highest=1.0)
    # a hundred answers to twenty problems are less certain than to a hundred problems
    assert width(difference_interval([0.0] * 100, ids(20, versions=5))) > 0.3
    assert width(difference_interval([0.0] * 100, ids(100))) < 0.06


def test_versions_make_a_paired_interval_no_narrower() -> None:
    """A paired interval over versions that all change alike is as wide as over one of them."""
    generator = random.Random(1)
    one_version_each = [generator.choice([-1.0, 0.0, 0.5, 1.0]) for _ in range(50)]
    five_times = [difference for difference in one_version_each for _ in range(5)]
    assert difference_interval(five_times, ids(50, versions=5)) == pytest.approx(
        difference_interval(one_version_each, ids(50)), abs=1e-9
    )
    width_of_versions = width(difference_interval(five_times, ids(50, versions=5)))
    width_as_independent = width(difference_interval(five_times, ids(250)))
    assert width_as_independent < 0.5 * width_of_versions


def test_the_interval_of_a_ratio_has_a_width_too() -> None:
    """A share of single answers has Wilson's interval; an equal ratio is not certain either."""
    # Of 3 solved from words all are solved from the picture.
    solved_from_both = [1.0] * 3 + [0.0] * 7
    assert ratio_interval(solved_from_both, solved_from_both, ids(10)) == wilson_interval(3, 3)
    # Nothing is solved without looking, but half of it may be with several answers.
    low, high = ratio_interval([0.0] * 10, [0.5] * 10, ids(10))
    assert low == 0.0
    assert high == pytest.approx(2 * 3.8415 / 13.8415, abs=1e-4)
    equal_shares = [0.5, 1.0] * 5
    low, high = ratio_interval(equal_shares, equal_shares, ids(10))
    assert low < 1.0 < high
