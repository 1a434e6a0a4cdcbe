r"""Whether two trees are the same number, or the same function of their unknowns, by sympy. Runs in a worker only.

No text is parsed here: sympy's own parser runs Python's `eval`, and the LaTeX grammars misread what `grammar` refuses,
so trees come in and sympy objects are built from a closed list of nodes. Even so a small tree can ask for a huge
number, which is why a worker has limits and a deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import sympy

from adora_vl.rewards.tolerance import ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE

Comparison = Literal["equal", "different", "undefined"]

_DIGITS = 30
_MAX_PRECISION = 1000  # sympy may use this many binary digits to overcome cancellation
# Where two functions of unknowns are compared. Unlike each other in sign and size, and no zero of anything honest.
_POINTS = ("37/23", "-53/31", "211/17", "7/41", "-389/29", "1009/13")

_DEGREE = sympy.pi / 180
_TO_DEGREES: dict[str, Callable[..., Any]] = {"arcsin": sympy.asin, "arccos": sympy.acos, "arctan": sympy.atan}
_OF_ANGLE: dict[str, Callable[..., Any]] = {
    "sin": sympy.sin,
    "cos": sympy.cos,
    "tan": sympy.tan,
    "sec": sympy.sec,
    "csc": sympy.csc,
    "cot": sympy.cot,
}


class _UndefinedError(Exception):
    """The value does not exist, or is not finite."""


def compare(answer: Sequence[Any], gold: Sequence[Any]) -> Comparison:
    """Whether the values of two trees are equal to within the policy's tolerance, at every point if there are unknowns.

    `undefined`: the answer has no finite real value (division by zero, the root of a negative number).
    """
    left, right = build(answer), build(gold)
    names = sorted(left.free_symbols | right.free_symbols, key=str)
    if not names:
        try:
            return "equal" if _close(_value(left, real=True), _value(right, real=True)) else "different"
        except _UndefinedError:
            return "undefined"
    compared = 0
    for index in range(len(_POINTS)):
        at = {name: sympy.Rational(_POINTS[(index + k) % len(_POINTS)]) + k for k, name in enumerate(names)}
        sides = [_value_or_none(side.subs(at)) for side in (left, right)]
        if (sides[0] is None) != (sides[1] is None):
            return "different"
        if sides[0] is not None and not _close(*sides):
            return "different"
        compared += sides[0] is not None
    return "equal" if compared else "undefined"


def _close(answer: Any, gold: Any) -> bool:
    """Compares as `grade` does: integers exactly, other numbers within the tolerance."""
    if answer.is_Integer and gold.is_Integer:
        return bool(answer == gold)
    bound = max(RELATIVE_TOLERANCE * abs(gold), ABSOLUTE_TOLERANCE)
    return bool(abs(answer - gold) <= bound)


def _value_or_none(expression: Any) -> Any:
    try:
        return _value(expression, real=False)
    except _UndefinedError:
        return None


def _value(expression: Any, *, real: bool) -> Any:
    """An integer exactly, any other constant to 30 digits. Raises `_UndefinedError`."""
    if expression.is_Integer:
        return expression
    value = sympy.N(expression, _DIGITS, maxn=_MAX_PRECISION)
    if not value.is_number or value.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo) or (real and not value.is_real):
        raise _UndefinedError
    return value


def build(tree: Sequence[Any]) -> Any:
    """The sympy expression of a tree."""
    kind = tree[0]
    if kind == "num":
        return sympy.Rational(tree[1])
    if kind == "pi":
        return sympy.pi
    if kind == "unknown":
        return sympy.Symbol(tree[1])
    if kind == "mixed":
        return sympy.Integer(tree[1]) + sympy.Rational(int(tree[2]), int(tree[3]))
    if kind == "sum":
        return sympy.Add(*(sign * build(term) for sign, term in tree[1:]))
    if kind == "product":
        return sympy.Mul(*(build(term) if operator == "*" else 1 / build(term) for operator, term in tree[1:]))
    if kind == "frac":
        return build(tree[1]) / build(tree[2])
    if kind == "power":
        return sympy.Pow(build(tree[1]), build(tree[2]))
    if kind == "root":
        radicand = build(tree[2])
        return sympy.real_root(radicand, tree[1]) if radicand.is_real else sympy.root(radicand, tree[1])
    if kind == "log":
        return sympy.log(build(tree[2]), build(tree[1]))
    assert kind == "call", kind
    return _called(tree[1], build(tree[2]))


def _called(name: str, argument: Any) -> Any:
    r"""Angles are in degrees, as in `numbers`, since the sign is stripped; one with a pi in it is in radians."""
    if name == "ln":
        return sympy.log(argument)
    if name in _TO_DEGREES:
        return _TO_DEGREES[name](argument) / _DEGREE
    return _OF_ANGLE[name](argument if argument.has(sympy.pi) else argument * _DEGREE)
