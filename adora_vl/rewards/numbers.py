r"""The closed forms that geometry answers are written in, evaluated without any symbolic algebra.

Integers, decimals, fractions, mixed numbers, roots, `\pi`, sums, products, small powers and the sine, cosine and
tangent of plain angles in degrees. Rational results are exact `Fraction`s, the others floats with a bound on their
error, so that a comparison knows when cancellation has left too few digits to decide. Nothing here can hang: the depth
of a tree, the digits of a literal (`grammar`) and the size of a power are capped before anything is computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from adora_vl.rewards.grammar import NotReadError, Tree, read_tree

MAX_EXPONENT = 64
MAX_BITS = 1000  # of a numerator or denominator: anything below still converts to a float

_TRIG = {"sin": math.sin, "cos": math.cos, "tan": math.tan}
_ANGLE_EPS = 1e-12  # cos(90 degrees) is 6e-17 in floats, not 0
_EPS = 4 * 2.0**-52  # of one operation on floats, both conversions from fractions included

Value = Fraction | float


@dataclass(frozen=True)
class Number:
    """The value of a closed form.

    `unevaluated`: whether the expression is arithmetic that is still to be done, such as `180-40` or `(180-40)/2`. It
    then has a sum, difference or product of bare integers and decimals somewhere, and no root, pi or sine. `error`: a
    bound on the absolute error of `value`, which is 0 for a fraction.
    """

    value: Value
    unevaluated: bool = False
    error: float = 0.0


def evaluate(text: str) -> Number | None:
    r"""The number that `text` (in canonical form) writes, or None for anything that is not one of the forms above."""
    try:
        return number_of(read_tree(text))
    except NotReadError:
        return None


def number_of(tree: Tree) -> Number:
    """The value of a tree. Raises `NotReadError` with the reason `too_large`, `undefined`, or, for a form that is not
    computed here, `beyond`.
    """
    evaluator = _Evaluator()
    part = evaluator.of(tree)
    return Number(part.value, evaluator.bare_operation and not evaluator.closed_form, part.error)


@dataclass(frozen=True)
class _Part:
    """An intermediate result: its value, a bound on its absolute error, and whether it was made from nothing but
    integers and decimals by addition, subtraction, multiplication and powers (`bare`).
    """

    value: Value
    error: float = 0.0
    bare: bool = False


class _Evaluator:
    """Computes one tree, and notes on the way what `Number.unevaluated` needs. Raises `NotReadError`."""

    def __init__(self) -> None:
        self.bare_operation = False
        self.closed_form = False

    def of(self, tree: Tree) -> _Part:
        """The value of a tree."""
        kind = tree[0]
        if kind == "num":
            return _Part(Fraction(tree[1]), bare=True)
        if kind == "sum":
            return self._sum(tree[1:])
        if kind == "product":
            return self._product(tree[1:])
        if kind == "frac":
            return _divided(self.of(tree[1]), self.of(tree[2]))
        if kind == "mixed":
            return _Part(_sized(int(tree[1]) + Fraction(int(tree[2]), int(tree[3]))))
        if kind == "power":
            exponent = self.of(tree[2])
            # before the base, which may be an unknown: `x^{999}` is over the cap too
            self.closed_form |= _check_exponent(exponent.value).denominator != 1
            return _raised(self.of(tree[1]), exponent)
        if kind in {"pi", "root", "call"}:
            self.closed_form = True
        if kind == "pi":
            return _Part(math.pi, _EPS)
        if kind == "root":
            return _rooted(self.of(tree[2]), tree[1])
        if kind == "call" and tree[1] in _TRIG and tree[2][0] == "num":
            return _trigonometric(tree[1], Fraction(tree[2][1]))
        raise NotReadError("beyond")

    def _sum(self, terms: tuple[tuple[int, Tree], ...]) -> _Part:
        """`terms` are pairs of a sign, 1 or -1, and a tree."""
        total: _Part | None = None
        for sign, tree in terms:
            term = self.of(tree)
            if sign < 0:
                term = _Part(-term.value, term.error, term.bare)
            total = term if total is None else self._joined(total, term, _added(total, term))
        assert total is not None
        return total

    def _product(self, factors: tuple[tuple[str, Tree], ...]) -> _Part:
        """`factors` are pairs of an operator, `*` or `/`, and a tree. They are applied from left to right."""
        result: _Part | None = None
        for operator, tree in factors:
            factor = self.of(tree)
            if result is None:
                result = factor
            elif operator == "/":
                result = _divided(result, factor)
            else:
                result = self._joined(result, factor, _multiplied(result, factor))
        assert result is not None
        return result

    def _joined(self, left: _Part, right: _Part, result: _Part) -> _Part:
        """`result` of an operation on `left` and `right`, which is noted if both sides are bare."""
        bare = left.bare and right.bare
        self.bare_operation |= bare
        return _Part(result.value, result.error, bare)


def _sized(value: Value) -> Value:
    """`value` as it is. Raises `NotReadError("too_large")` if the numerator or denominator of a fraction has more than
    `MAX_BITS`, or if a float is not finite.
    """
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
            raise NotReadError("too_large")
    elif not math.isfinite(value):
        raise NotReadError("too_large")
    return value


def _noise(*values: Value) -> float:
    """A bound on the rounding error of one operation. `values` are its operands and, at the end, its result. Fractions
    are exact, so with a fraction as the result the bound is 0.
    """
    if isinstance(values[-1], Fraction):
        return 0.0
    return _EPS * max(abs(float(value)) for value in values)


def _added(left: _Part, right: _Part) -> _Part:
    """The sum, with the errors of both sides and of the addition."""
    value = _sized(left.value + right.value)
    return _Part(value, left.error + right.error + _noise(left.value, right.value, value))


def _multiplied(left: _Part, right: _Part) -> _Part:
    """The product. Its error follows from `(a + da)(b + db) - ab`."""
    value = _sized(left.value * right.value)
    if isinstance(value, Fraction):
        return _Part(value)
    a, b = abs(float(left.value)), abs(float(right.value))
    return _Part(value, a * right.error + b * left.error + left.error * right.error + _noise(value))


def _divided(above: _Part, below: _Part) -> _Part:
    """The quotient. Raises `NotReadError` where the divisor is 0, or is so inexact that it may be 0."""
    if below.value == 0:
        raise NotReadError("undefined")
    value = _sized(above.value / below.value)
    if isinstance(value, Fraction):
        return _Part(value)
    size = abs(float(below.value)) - below.error
    if size <= 0:
        raise NotReadError("beyond")  # nothing but rounding noise is left below, which may be a zero
    return _Part(value, (above.error + abs(value) * below.error) / size + _noise(value))


def _check_exponent(power: Value) -> Fraction:
    """`power` as it is. Raises `NotReadError` unless it is rational and at most `MAX_EXPONENT` in size."""
    if not isinstance(power, Fraction):
        raise NotReadError("beyond")
    if abs(power) > MAX_EXPONENT:
        raise NotReadError("too_large")
    return power


def _raised(base: _Part, exponent: _Part) -> _Part:
    """`base ** exponent` for a small rational exponent. The size of the result is bounded before it is computed."""
    power, value, bare = _check_exponent(exponent.value), base.value, base.bare and exponent.bare
    if value == 0 and power <= 0:
        raise NotReadError("undefined")
    if value < 0 and power.denominator != 1:
        raise NotReadError("undefined")
    if isinstance(value, Fraction) and power.denominator == 1:
        if max(value.numerator.bit_length(), value.denominator.bit_length()) * abs(power) > MAX_BITS:
            raise NotReadError("too_large")
        return _Part(Fraction(value ** int(power)), bare=bare)
    size = abs(float(value)) - base.error
    if base.error and size <= 0:
        raise NotReadError("beyond")
    try:
        result = _sized(math.pow(float(value), float(power)))
        spread = math.pow(1 + (base.error / size if base.error else 0.0) + _EPS, abs(float(power))) - 1
    except OverflowError:
        raise NotReadError("too_large") from None
    return _Part(result, abs(float(result)) * spread + _noise(result), bare)


def _rooted(radicand: _Part, degree: int) -> _Part:
    """The real root of this degree. It is exact if the radicand is a perfect power, as in the square root of 4/9."""
    negative = radicand.value < 0
    size = -radicand.value if negative else radicand.value
    if radicand.error >= size and radicand.error > 0:
        raise NotReadError("beyond")  # rounding noise: its sign says nothing
    if negative and degree % 2 == 0:
        raise NotReadError("undefined")
    sign = -1 if negative else 1
    if isinstance(size, Fraction):
        exact = Fraction(round(float(size.numerator) ** (1 / degree)), round(float(size.denominator) ** (1 / degree)))
        if exact**degree == size:
            return _Part(sign * exact)
    root = math.pow(float(size), 1 / degree)
    spread = radicand.error / (float(size) - radicand.error) + _EPS
    return _Part(sign * root, root * spread)


def _trigonometric(name: str, degrees: Fraction) -> _Part:
    """The sine, cosine or tangent of a plain angle in degrees."""
    angle = math.radians(float(_sized(degrees)))
    if name == "tan" and abs(math.cos(angle)) < _ANGLE_EPS:
        raise NotReadError("undefined")
    value = _TRIG[name](angle)
    slope = 1 + value * value if name == "tan" else 1.0
    return _Part(value, _EPS * (1 + abs(angle)) * slope)
