r"""The solutions of inequalities in one unknown: which numbers solve them, and whether two have the
same ones.

    ("is", "<=", n)     the unknown is at most n, a `Ball`; also with <, >, >=, != and =
    ("and", one, ...)   all of them hold
    ("or", one, ...)    at least one of them holds

Two are compared by trying them at all their ends, and between and beyond them. Nothing is
simplified.
"""

import operator
from collections.abc import Iterator, Sequence
from typing import Any

from adora_vl.rewards.numeric import Ball, same_number

Solution = tuple[Any, ...]
REVERSED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "!=": "!="}
_HOLDS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "!=": operator.ne,
    "=": operator.eq,
}


def of_absolute(atom: Solution) -> Solution | None:
    """What `|x| < 5` says of x, given what it says of `|x|`; None where that is everything, nothing
    or one number.
    """
    _, sign, at = atom
    if float(at.value) <= 0 or sign == "!=":
        return None
    below = -at
    return ("and" if "<" in sign else "or", atom, ("is", REVERSED[sign], below))


def between(low: Ball | str | None, high: Ball | str | None, brackets: str) -> Solution | None:
    """What lies between two ends, also `-infinity` and `infinity`; None where that is nothing, all
    or not known.
    """
    atoms = []
    for end, sign, infinite, bracket in zip(
        (low, high), "><", ("-infinity", "infinity"), brackets, strict=True
    ):
        if end == infinite and bracket in "()":
            continue
        if not isinstance(end, Ball):
            return None
        atoms.append(("is", sign + "=" * (bracket in "[]"), end))
    found = ("and", *atoms)
    return found if atoms and decides(found) else None


def _atoms(solution: Solution) -> Iterator[Solution]:
    if solution[0] == "is":
        yield solution
    else:
        for one in solution[1:]:
            yield from _atoms(one)


def decides(solution: Solution) -> bool:
    """Whether some numbers solve it, and others do not."""
    return len(set(_truths(solution, _ends(solution)))) == 2


def same_solutions(answer: Solution, reference: Solution) -> bool:
    """Whether the same numbers solve both: they agree at all ends of both, and between any two of
    them.
    """
    ends = _ends(answer, reference)
    return _truths(answer, ends) == _truths(reference, ends)


def _ends(*solutions: Solution) -> list[Ball]:
    """The numbers in solutions, in order, each once."""
    found: list[Ball] = []
    every = [atom[2] for solution in solutions for atom in _atoms(solution)]
    for number in sorted(every, key=lambda number: float(number.value)):
        if not found or not same_number(number, found[-1]):
            found.append(number)
    return found


def _truths(solution: Solution, ends: Sequence[Ball]) -> list[bool]:
    """Whether the solution holds below the first end, at it, between it and the second, and so on."""
    if solution[0] == "is":
        _, sign, number = solution
        place = 2 * next(index for index, end in enumerate(ends) if same_number(number, end)) + 1
        return [_HOLDS[sign](at, place) for at in range(2 * len(ends) + 1)]
    columns = zip(*(_truths(one, ends) for one in solution[1:]), strict=True)
    return [(all if solution[0] == "and" else any)(column) for column in columns]
