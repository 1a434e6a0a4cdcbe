r"""The solutions of inequalities in one unknown: which numbers solve them, and whether two have the
same ones.

Two solutions are compared by trying them at all their ends, and between and beyond them. Nothing is
simplified.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from adora_vl.rewards.number_with_error import NumberWithError
from adora_vl.rewards.numeric import same_number


class SingleCondition(NamedTuple):
    """The condition that the unknown is in a relation to a number.

    `sign` is `<`, `<=`, `>`, `>=`, `!=` or `=`: with `<=` the unknown is at most `number`.
    """

    sign: str
    number: NumberWithError


class JoinedConditions(NamedTuple):
    """Several conditions, of which all hold (`and`) or at least one (`or`)."""

    word: Literal["and", "or"]
    parts: tuple[Solution, ...]


Solution: TypeAlias = SingleCondition | JoinedConditions
REVERSED_SIGN = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "!=": "!="}
_OPERATOR_BY_SIGN = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "!=": operator.ne,
    "=": operator.eq,
}


def interval_solution(
    low: NumberWithError | str, high: NumberWithError | str, brackets: str
) -> Solution | None:
    """Return the numbers of an interval as a solution.

    Args:
        low: the lower end, as a number, or a text such as `-infinity`.
        high: the upper end, as a number, or a text such as `infinity`.
        brackets: the opening and the closing bracket; a square one includes its end.

    None where the interval is empty or everything, and where an end is neither a number nor an open
    infinity on its side.
    """
    opening = brackets[0]
    closing = brackets[1]
    # An open infinity bounds nothing, so its side needs no condition.
    is_bounded_below = not (low == "-infinity" and opening in "()")
    is_bounded_above = not (high == "infinity" and closing in "()")
    conditions: list[Solution] = []
    if is_bounded_below:
        if not isinstance(low, NumberWithError):
            return None
        lower_sign = ">=" if opening in "[]" else ">"
        conditions.append(SingleCondition(sign=lower_sign, number=low))
    if is_bounded_above:
        if not isinstance(high, NumberWithError):
            return None
        upper_sign = "<=" if closing in "[]" else "<"
        conditions.append(SingleCondition(sign=upper_sign, number=high))
    solution = JoinedConditions(word="and", parts=tuple(conditions))
    # Without a condition it is all numbers; with two that contradict, as in `(3, 1)`, it is none.
    if not conditions or not excludes_some_but_not_all(solution):
        return None
    return solution


def _numbers(solution: Solution) -> Iterator[NumberWithError]:
    """Yield the number of each condition in a solution."""
    if isinstance(solution, SingleCondition):
        yield solution.number
    else:
        for part in solution.parts:
            yield from _numbers(part)


def excludes_some_but_not_all(solution: Solution) -> bool:
    """Return whether some numbers solve a condition and others do not.

    A condition that every number solves, or none, says nothing of the unknown.
    """
    truths = _truth_by_position(solution, _sorted_ends(solution))
    return any(truths) and not all(truths)


def same_solutions(answer: Solution, reference: Solution) -> bool:
    """Return whether the same numbers solve both.

    They do if both agree at all ends of both, between any two neighbouring ends, and beyond the
    outer ones, since no solution changes anywhere else.
    """
    ends = _sorted_ends(answer, reference)
    return _truth_by_position(answer, ends) == _truth_by_position(reference, ends)


def _sorted_ends(*solutions: Solution) -> list[NumberWithError]:
    """Return the numbers in solutions in ascending order, without repetition."""
    numbers: list[NumberWithError] = []
    for solution in solutions:
        numbers += _numbers(solution)
    distinct_numbers: list[NumberWithError] = []
    for number in sorted(numbers, key=lambda number: float(number.value)):
        if not distinct_numbers or not same_number(number, distinct_numbers[-1]):
            distinct_numbers.append(number)
    return distinct_numbers


def _truth_by_position(solution: Solution, ends: Sequence[NumberWithError]) -> list[bool]:
    """Return whether the solution holds before, at and behind each of the ends, in order.

    For n ends there are 2 n + 1 positions: the even ones are gaps between ends, the odd ones are
    ends. With the ends 1 and 3, `x > 1` is false at the positions 0 (below 1) and 1 (at 1), and
    true at 2, 3 and 4.
    """
    if isinstance(solution, SingleCondition):
        sign, number = solution
        end_index = next(index for index, end in enumerate(ends) if same_number(number, end))
        number_position = 2 * end_index + 1
        holds = _OPERATOR_BY_SIGN[sign]
        return [holds(position, number_position) for position in range(2 * len(ends) + 1)]
    truths_of_parts = [_truth_by_position(part, ends) for part in solution.parts]
    combine = all if solution.word == "and" else any
    return [combine(truths) for truths in zip(*truths_of_parts, strict=True)]
