r"""The values of closed forms, and of expressions at chosen points, with a bound on their error.

Integers, decimals, fractions and their whole powers are exact `Fraction`s. Roots, `\pi`, logarithms
and angles are computed by mpmath with `PRECISION` bits. Each value carries a bound on its absolute
error, so that a comparison knows when cancellation has left too few digits to decide. Nothing here
can hang: the length and depth of a tree, its costly nodes and the digits of a literal are capped
(`grammar`), and so is the size of every value, before it is computed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, reduce
from typing import Any, Literal

from adora_vl.rewards.grammar import NotReadError, Tree, children, in_radians, nodes, unknowns

# How near a decimal has to be to a value with more digits.
RELATIVE_TOLERANCE = Fraction(1, 10**6)
# The fewest digits of such a decimal: with fewer it comes that near by chance only.
MIN_DIGITS = 6
# How near an answer has to be to a reference answer of 0, also to a sum that cancels.
ABSOLUTE_TOLERANCE = Fraction(1, 10**12)

MAX_EXPONENT = 64  # of a constant
MAX_BITS = 1000  # of a numerator or denominator; any other value is 0 or between 2^-1000 and 2^1000
MAX_COUNTED = 170  # of a factorial
PRECISION = 320  # bits, about 96 digits
_SPARE_BITS = 16  # mpmath errs in the last bit or, in a power, in the last ten; the bound allows 16
_LEAST_ERROR = sys.float_info.min  # so that the float of an error never becomes 0

# The points at which two functions of unknowns are compared. They differ in sign and size, and no
# honest answer is likely to be 0 at one of them.
_POINTS = [Fraction(text) for text in ("37/23", "-53/31", "211/17", "7/41", "-389/29", "1009/13")]

Value = Any  # a Fraction, or mpmath's mpf or mpc, which have no types
Comparison = Literal["equal", "different", "undefined", "too_large", "undecided"]


@dataclass(frozen=True)
class Ball:
    r"""A value and a bound on its absolute error, which is 0 for a fraction.

    `unevaluated` says that a rational number is written as arithmetic still to be done, such as
    `180-40`, `(180-40)/2` or `\sqrt{3^2+4^2}`. `step` is how much the value grows with one unit in
    the last place of the long decimal that it is written with, 0.0000001 for `1.0471976`; None
    without such a decimal, or with several.
    """

    value: Value
    error: float = 0.0
    unevaluated: bool = False
    step: Value | None = None

    @property
    def exact(self) -> bool:
        """Whether the value is a fraction."""
        return isinstance(self.value, Fraction)

    @property
    def real(self) -> bool:
        """Whether the value has no imaginary part."""
        return self.exact or not isinstance(self.value, _mp().mpc)

    @property
    def size(self) -> float:
        """The absolute value; infinite where a float is too small for it."""
        parts = complex(self.value)
        return math.hypot(parts.real, parts.imag)  # abs() would raise

    @property
    def least(self) -> float:
        """The lower bound of the absolute value; 0 or less where the value can be 0."""
        return self.size - self.error

    def inexact(self) -> Ball:
        """Return the same value as a number of mpmath."""
        if not self.exact:
            return self
        return _rounded_result(_mp().mpf(self.value.numerator) / self.value.denominator)

    def __neg__(self) -> Ball:
        return Ball(-self.value, self.error, step=self.step)

    def __add__(self, addend: Ball) -> Ball:
        """Return the sum; the errors add up."""
        if self.exact and addend.exact:
            return _exact_result(self.value + addend.value)
        first = self.inexact()
        second = addend.inexact()
        return _rounded_result(first.value + second.value, first.error + second.error)

    def __mul__(self, factor: Ball) -> Ball:
        """Return the product; its error follows from `(a + da)(b + db) - ab`."""
        if self.exact and factor.exact:
            return _exact_result(self.value * factor.value)
        if self.value == 0 == self.error or factor.value == 0 == factor.error:
            return Ball(Fraction(0))
        first = self.inexact()
        second = factor.inexact()
        error = first.size * second.error + second.size * first.error + first.error * second.error
        return _rounded_result(first.value * second.value, error)

    def __truediv__(self, divisor: Ball) -> Ball:
        """Return the quotient.

        Raises `NotReadError("undefined")` where the divisor is 0 within its error.
        """
        if divisor.least <= 0:
            raise NotReadError("undefined")
        if self.exact and divisor.exact:
            return _exact_result(self.value / divisor.value)
        above = self.inexact()
        below = divisor.inexact()
        value = above.value / below.value
        return _rounded_result(value, (above.error + Ball(value).size * below.error) / below.least)


_ONE = Ball(Fraction(1))


def number_of(tree: Tree) -> Ball:
    """Return the value of a tree without unknowns.

    Raises `NotReadError` with the reason `too_large`, `undefined`, or for an unknown `beyond`.
    """
    ball = _evaluate(tree, None)
    if tree[0] == "num" and len(tree[1]) <= MIN_DIGITS:
        return ball  # as most numbers are
    all_nodes = list(nodes(tree))
    # An exact value that is still written as a sum or product is arithmetic that was not done.
    unevaluated = False
    if ball.exact:
        terms = [node for node in all_nodes if node[0] in {"sum", "product"}]
        unevaluated = any(map(_is_arithmetic, terms))
    decimals = [node for node in all_nodes if node[0] == "num" and "." in node[1]]
    step = _step_of(tree, ball, None) if any(map(_is_long_decimal, decimals)) else None
    return Ball(value=ball.value, error=ball.error, unevaluated=unevaluated, step=step)


def _is_arithmetic(tree: Tree) -> bool:
    r"""Return whether the root of a tree adds, subtracts or multiplies two rational numbers.

    That is so in `180-40`, `5\cdot7`, `\frac{1}{2}\cdot3\cdot4`, and the sum in `\sqrt{3^2+4^2}`. A
    single fraction, also written as `1/2`, a power, a mixed number, also as `3+\frac{1}{2}`, and
    `1.5\cdot10^3` are ways to write a number.
    """
    if tree[0] == "sum":
        if len(tree) == 3 and _is_mixed(tree[1], tree[2]):
            return False
        return sum(_is_rational(term) for _, term in tree[1:]) > 1
    if tree[0] != "product":
        return False
    factors = tree[1:]
    if len(factors) > 1 and _is_scientific(factors[0][1], factors[1]):
        factors = factors[1:]
    signs = [sign for sign, factor in factors if _is_rational(factor)]
    return signs.count("*") > 1 or signs.count("/") > 1


def _is_mixed(integer: tuple[int, Tree], part: tuple[int, Tree]) -> bool:
    """Return whether two terms are an integer and a fraction below 1 of the same sign."""
    fraction = part[1]
    if part[0] != integer[0] or integer[1][0] != "num" or fraction[0] != "frac":
        return False
    numbers = (integer[1], fraction[1], fraction[2])
    integers = all(number[0] == "num" and number[1].isdigit() for number in numbers)
    return integers and int(fraction[1][1]) < int(fraction[2][1])


def _is_rational(tree: Tree) -> bool:
    """Return whether a tree has nothing but numbers, arithmetic and integer powers."""
    if tree[0] in {"num", "mixed"}:
        return True
    if tree[0] == "power" and not _is_integer(tree[2]):
        return False
    return tree[0] in {"frac", "sum", "product", "power"} and all(map(_is_rational, children(tree)))


def _is_integer(exponent: Tree) -> bool:
    """Return whether an exponent is a rational expression with an integer value."""
    return _is_rational(exponent) and bool(_evaluate(exponent, None).value.denominator == 1)


def _is_scientific(first: Tree, second: tuple[str, Tree]) -> bool:
    """Return whether `first` times `second` is a number from 1 to 10 times a power of ten."""
    sign, factor = second
    powers = sign == "*" and factor[0] == "power" and factor[1] == ("num", "10")
    return powers and first[0] == "num" and 1 <= Fraction(first[1]) < 10


@lru_cache(maxsize=256)
def _raise_last_place(tree: Tree) -> Tree | None:
    """Return the tree with its long decimal increased by one unit in the last place.

    A long decimal has `MIN_DIGITS` digits or more. None where the tree has none, or several.
    """
    decimals = [node for node in nodes(tree) if _is_long_decimal(node)]
    if len(decimals) != 1:
        return None
    places = len(decimals[0][1].partition(".")[2])
    raised = Fraction(decimals[0][1]) + Fraction(1, 10**places)
    digits = str(raised * 10**places).zfill(places + 1)
    return _replace_node(tree, decimals[0], ("num", f"{digits[:-places]}.{digits[-places:]}"))


def _is_long_decimal(node: Tree) -> bool:
    """Return whether a node is a decimal that may stand for a value with more digits."""
    if node[0] != "num" or "." not in node[1] or len(node[1]) <= MIN_DIGITS:
        return False
    integer, _, decimals = node[1].partition(".")
    return decimals.strip("0") != "" and len((integer + decimals).lstrip("0")) >= MIN_DIGITS


def _replace_node(tree: Tree, old: Tree, new: Tree) -> Tree:
    """Return the tree with `new` in the place of `old`."""
    if tree == old:
        return new
    return tuple(
        _replace_node(child, old, new) if isinstance(child, tuple) else child for child in tree
    )


def _step_of(tree: Tree, ball: Ball, at: Mapping[str, Fraction] | None) -> Value | None:
    """Return `Ball.step` of a tree with the value `ball`, whose unknowns have the values `at`."""
    raised = _raise_last_place(tree)
    if raised is None:
        return None
    try:
        return (_evaluate(raised, at) + -ball).value
    except NotReadError:
        return None


def same_number(answer: Ball, reference: Ball) -> bool | None:
    r"""Return whether two values are equal, or one is a long decimal that stands for the other.

    `0.3333333` stands for `\frac{1}{3}`, while 1000000.5 is not 1000000, and `\frac{355}{113}` is
    not `\pi`. Such a decimal has to be the value rounded or cut at its last place, and within 1e-6
    relative. Two long decimals have to be equal.

    None where the errors leave the question open: `10^{60}\cdot10^{60}+\pi-10^{60}\cdot10^{60}` has
    no digit of pi left.
    """
    step = None
    if answer.step is None or reference.step is None:
        step = reference.step if answer.step is None else answer.step
    if answer.exact and reference.exact:
        same = bool(answer.value == reference.value)
        if same or step is None:
            return same
        gap = abs(answer.value - reference.value)
        return bool(gap < abs(step) and gap <= RELATIVE_TOLERANCE * abs(reference.value))
    answer_value = answer.inexact()
    reference_value = reference.inexact()
    bound = (
        float(RELATIVE_TOLERANCE) * reference_value.size
        if reference_value.least > 0
        else float(ABSOLUTE_TOLERANCE)
    )
    distance = Ball(answer_value.value - reference_value.value).size
    error = answer_value.error + reference_value.error
    if distance > error:
        # A step is not less than itself, whatever its float is.
        return step is not None and distance < min(bound, Ball(step).size * (1 - 2.0**-40))
    return True if 1000 * error < bound else None  # where they may be equal, and not only near


def same_function(answer: Tree, reference: Tree) -> Comparison:
    """Compare two trees with the same unknowns by their values at six points.

    Complex values count too. The trees are `different` where only one has a value. A point at which
    both are over the caps is skipped. Where only one is, or every point is skipped, the result is
    `too_large`. Two trees without a value anywhere are `undefined`, since nothing is known of them.
    The result is `undecided` where the errors leave a point open.
    """
    compared = 0
    without_values: Comparison = "undefined"
    names = unknowns(answer) | unknowns(reference)
    for at, reference_value in zip(
        _comparison_points(names), _reference_values(reference, names), strict=True
    ):
        answer_value = _value_with_step(answer, at)
        if isinstance(answer_value, Ball) and isinstance(reference_value, Ball):
            same = same_number(answer_value, reference_value)
            if not same:
                return "undecided" if same is None else "different"
            compared += 1
        elif isinstance(answer_value, Ball) or isinstance(reference_value, Ball):
            return "too_large" if "too_large" in (answer_value, reference_value) else "different"
        elif "too_large" in (answer_value, reference_value):
            without_values = "too_large"
    return "equal" if compared else without_values


def factor_between(answer: Tree, reference: Tree) -> int:
    """Return the sign of the constant factor between two trees, 1 or -1; 0 where they have none.

    The trees are compared at six points. At a point where one is 0 the other has to be 0 too.
    """
    base: tuple[Ball, Ball] | None = None
    zeros = []
    names = unknowns(answer) | unknowns(reference)
    for at, reference_value in zip(
        _comparison_points(names), _reference_values(reference, names), strict=True
    ):
        answer_value = _value_at(answer, at)
        if not isinstance(answer_value, Ball) or not isinstance(reference_value, Ball):
            if answer_value != reference_value:
                return 0
        elif base is not None:
            if not _is_same_product(answer_value, b=base[1], c=base[0], d=reference_value):
                return 0
        elif all(ball.real and ball.least > 0 for ball in (answer_value, reference_value)):
            base = answer_value, reference_value
        else:
            zeros.append((answer_value, reference_value))
    if base is None or not all(
        _is_same_product(answer_value, b=base[1], c=base[0], d=reference_value)
        for answer_value, reference_value in zeros
    ):
        return 0
    return 1 if (base[0].value > 0) == (base[1].value > 0) else -1


def is_constant(tree: Tree) -> bool:
    """Return whether a tree has the same value at all those of six points where it has a value."""
    earlier_value: Ball | None = None
    for point in _comparison_points(unknowns(tree)):
        value = _value_at(tree, point)
        if isinstance(value, Ball):
            # With factors of 1 the products are the same where the values are.
            if earlier_value is not None and not _is_same_product(
                value, b=_ONE, c=earlier_value, d=_ONE
            ):
                return False
            earlier_value = value
    return True


def zero_of(tree: Tree) -> tuple[Ball, int] | None:
    """Return the zero of a tree that is linear in its only unknown, and the sign of its slope.

    None for a tree that is not linear, or constant.
    """
    (name,) = unknowns(tree)
    zero_and_slope = _zero_and_slope(tree, name)
    if zero_and_slope is None:
        return None
    zero, slope = zero_and_slope
    raised = _raise_last_place(tree)
    moved = _zero_and_slope(raised, name) if raised else None
    if moved is not None:
        zero = replace(zero, step=(moved[0] + -zero).value)
    return zero, 1 if slope.value > 0 else -1


def _zero_and_slope(tree: Tree, name: str) -> tuple[Ball, Ball] | None:
    """Return the zero and the slope of a tree that is linear in the unknown `name`, else None.

    Two points give the line, and the six points have to lie on it.
    """
    at_0 = _value_at(tree, {name: Fraction(0)})
    at_1 = _value_at(tree, {name: Fraction(1)})
    if not (isinstance(at_0, Ball) and isinstance(at_1, Ball) and at_0.real and at_1.real):
        return None
    try:
        slope = at_1 + -at_0
        zero = -at_0 / slope
        for point in _POINTS:
            ball = _value_at(tree, {name: point})
            if not isinstance(ball, Ball) or not _is_same_product(
                ball + -at_0, b=_ONE, c=slope, d=Ball(point)
            ):
                return None
    except NotReadError:
        return None
    return zero, slope


def _is_same_product(a: Ball, b: Ball, c: Ball, d: Ball) -> bool:
    """Return whether `ab` is `cd`, either exactly or within an error that is small beside both."""
    try:
        first = a * b
        second = c * d
        difference = first + -second
    except NotReadError:
        return False
    if difference.exact:
        return bool(difference.value == 0)
    return difference.size <= difference.error <= 2.0**-60 * max(first.size, second.size)


def _comparison_points(names: Iterable[str]) -> Iterator[dict[str, Fraction]]:
    """Yield six points at which functions are compared: at each the values of the unknowns."""
    ordered = sorted(names)
    for index in range(len(_POINTS)):
        yield {name: _POINTS[(index + k) % len(_POINTS)] + k for k, name in enumerate(ordered)}


@lru_cache(maxsize=256)
def _reference_values(
    reference: Tree, names: frozenset[str]
) -> tuple[Ball | Literal["too_large", "undefined"], ...]:
    """Return the values of a reference answer at the six points.

    The rollouts of a group share them.
    """
    return tuple(_value_with_step(reference, at) for at in _comparison_points(names))


def _value_with_step(
    tree: Tree, at: Mapping[str, Fraction]
) -> Ball | Literal["too_large", "undefined"]:
    """Return the value as `_value_at` gives it, with its `step`."""
    ball = _value_at(tree, at)
    return replace(ball, step=_step_of(tree, ball, at)) if isinstance(ball, Ball) else ball


def _value_at(tree: Tree, at: Mapping[str, Fraction]) -> Ball | Literal["too_large", "undefined"]:
    """Return the value where the unknowns have the values `at`, or the reason why there is none."""
    try:
        return _evaluate(tree, at)
    except NotReadError as error:
        return "too_large" if error.reason == "too_large" else "undefined"


def _evaluate(tree: Tree, at: Mapping[str, Fraction] | None) -> Ball:
    """Return the value of a tree, computed recursively.

    `at` has the values of the unknowns. With None the tree is a closed form, and all its parts have
    to be real. Raises `NotReadError`.
    """
    kind = tree[0]
    if kind == "num":
        ball = Ball(Fraction(tree[1]))
    elif kind == "unknown":
        if at is None:
            raise NotReadError("beyond")
        ball = Ball(at[tree[1]])
    elif kind == "sum":
        signed = (
            _evaluate(term, at) if sign > 0 else -_evaluate(term, at) for sign, term in tree[1:]
        )
        ball = reduce(Ball.__add__, signed)
    elif kind == "product":
        ball = _evaluate(tree[1][1], at)
        for operator, factor in tree[2:]:
            ball = ball / _evaluate(factor, at) if operator == "/" else ball * _evaluate(factor, at)
    elif kind == "frac":
        ball = _evaluate(tree[1], at) / _evaluate(tree[2], at)
    elif kind == "mixed":
        ball = Ball(int(tree[1]) + Fraction(int(tree[2]), int(tree[3])))
    elif kind == "power":
        # capped before the base is evaluated, which may be an unknown: `x^{999}`
        exponent = _evaluate(tree[2], at)
        if at is None and exponent.exact and abs(exponent.value) > MAX_EXPONENT:
            raise NotReadError("too_large")
        ball = _power(_evaluate(tree[1], at), exponent)
    elif kind in {"factorial", "binomial"}:
        ball = _factorial_or_binomial(*[_evaluate(term, at) for term in tree[1:]])
    elif kind == "pi":
        ball = _pi()
    elif kind == "root":
        # of a negative constant the real root, at a point the principal one
        radicand = _evaluate(tree[2], at)
        negative = (
            tree[1] % 2
            and (at is None or not unknowns(tree[2]))
            and radicand.real
            and radicand.value < 0
        )
        ball = (
            -_principal_root(-radicand, tree[1]) if negative else _principal_root(radicand, tree[1])
        )
    elif kind == "log":
        ball = _log(_evaluate(tree[2], at)) / _log(_evaluate(tree[1], at))
    else:
        ball = _evaluate_function(tree[1], _evaluate(tree[2], at), in_radians(tree[2]))
    if at is None and not ball.real:
        raise NotReadError("undefined")
    return ball


_context_cache: dict[str, Any] = {}


def _mp() -> Any:
    """Return the context of mpmath that all threads share.

    It is created when the first value needs it. mpmath caches the digits of its constants and is
    not safe for threads while it computes more of them. So they are computed here at once, with as
    many digits as any argument under the caps can ask for.
    """
    if "context" in _context_cache:
        return _context_cache["context"]
    from mpmath import MPContext

    context = MPContext()
    context.prec = 2 * (MAX_BITS + PRECISION)
    _ = context.pi + context.ln2
    context.prec = PRECISION
    return _context_cache.setdefault("context", context)


def _exact_result(value: Fraction) -> Ball:
    """Return an exact result, or a number of mpmath where the fraction has too many digits."""
    return Ball(value) if _size_in_bits(value) <= MAX_BITS else Ball(value).inexact()


def _size_in_bits(value: Fraction) -> int:
    """Return the size in bits of the larger one of numerator and denominator."""
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _rounded_result(value: Value, error: float = 0.0) -> Ball:
    """Return the result of one operation of mpmath, with a bound on its error.

    `error` is what the errors of the operands make of it; the rounding error of the operation is
    added. An imaginary part within the error counts as 0. Raises `NotReadError("too_large")` over
    the caps.
    """
    size = Ball(value).size
    error += size * 2.0 ** (_SPARE_BITS - PRECISION) + _LEAST_ERROR
    if not size + error < 2.0**MAX_BITS or (value != 0 and size < 2.0**-MAX_BITS):
        raise NotReadError("too_large")
    if isinstance(value, _mp().mpc) and abs(float(value.imag)) <= error:
        value = value.real
    return Ball(value, error)


def _pi() -> Ball:
    """Return the number pi."""
    return _rounded_result(+_mp().pi)


def _exp(ball: Ball) -> Ball:
    """Return the exponential function.

    Raises `NotReadError("too_large")` where the result would be too large or too small, or where
    the error of the exponent leaves little of it.
    """
    ball = ball.inexact()
    if abs(float(ball.value.real)) > MAX_BITS or ball.error > 1:
        raise NotReadError("too_large")
    value = _mp().exp(ball.value)
    return _rounded_result(value, 2 * Ball(value).size * ball.error)


def _log(ball: Ball) -> Ball:
    """Return the principal value of the logarithm. Raises `NotReadError("undefined")` for 0."""
    if ball.least <= 0:
        raise NotReadError("undefined")
    ball = ball.inexact()
    return _rounded_result(_mp().ln(ball.value), ball.error / ball.least)


def _power(base: Ball, exponent: Ball) -> Ball:
    """Return `base ** exponent`, the principal value.

    The size of the result is bounded before it is computed. Raises `NotReadError` for 0 to a power
    that is not above 0, and where the result is over the cap.
    """
    power = exponent.value
    if base.least <= 0:  # 0, but for its error
        return _zero_raised(base, exponent)
    if not exponent.exact:
        return _exp(_log(base) * exponent)
    if base.exact and power.denominator == 1 and _size_in_bits(base.value) * abs(power) <= MAX_BITS:
        return Ball(Fraction(base.value ** int(power)))
    base = base.inexact()
    magnitude = abs(float(power))
    relative_error = magnitude * base.error / base.least
    # The size of the result in bits; the second term bounds the rounding error of the logarithm.
    bits = magnitude * (abs(math.log2(base.size)) + 2.0**-50)
    if bits > 2 * MAX_BITS or relative_error > 1:
        raise NotReadError("too_large")
    if power.denominator == 1:
        value = base.value ** int(power)
    else:
        value = base.value ** (_mp().mpf(power.numerator) / power.denominator)
    return _rounded_result(value, 2 * Ball(value).size * relative_error)


def _zero_raised(base: Ball, exponent: Ball) -> Ball:
    """Return a power of a base that is 0 but for its error.

    The result is 0 too, with the largest power of the base's error at either end of the exponent.
    """
    power = exponent.value
    if not exponent.real or power - exponent.error <= 0:
        raise NotReadError("undefined")
    if not base.error:
        return Ball(Fraction(0))
    exponent_ends = (float(power) - exponent.error, float(power) + exponent.error)
    try:
        error = 2 * max(math.pow(base.size + base.error, end) for end in exponent_ends)
        return _rounded_result(_mp().mpf(0), error)
    except OverflowError:
        raise NotReadError("too_large") from None


def _principal_root(radicand: Ball, degree: int) -> Ball:
    """Return the principal root.

    It is exact if the radicand is a perfect power, as in the square root of 4/9.
    """
    value = radicand.value
    if radicand.exact and value >= 0:
        exact = Fraction(
            round(float(value.numerator) ** (1 / degree)),
            round(float(value.denominator) ** (1 / degree)),
        )
        if exact**degree == value:
            return Ball(exact)
    return _power(radicand, Ball(Fraction(1, degree)))


def _factorial_or_binomial(total: Ball, chosen: Ball | None = None) -> Ball:
    """Return the factorial of `total`, or the binomial coefficient `total` over `chosen`.

    Raises `NotReadError`: `undefined` for anything but natural numbers, `too_large` over
    `MAX_COUNTED`.
    """
    for ball in (total, chosen or total):
        if not ball.exact or ball.value.denominator != 1 or ball.value < 0:
            raise NotReadError("undefined")
        if ball.value > MAX_COUNTED:
            raise NotReadError("too_large")
    if chosen:
        return _exact_result(Fraction(math.comb(int(total.value), int(chosen.value))))
    return _exact_result(Fraction(math.factorial(int(total.value))))


def _evaluate_function(name: str, argument: Ball, radians: bool) -> Ball:
    """Return the value of a trigonometric function, of an inverse one in degrees, or of `ln`.

    An argument is in degrees unless `radians` says otherwise, because the canonical form has no
    degree signs.
    """
    half_turn = Ball(Fraction(180))
    if name == "ln":
        return _log(argument)
    if name.startswith("arc"):
        return _inverse_angle(name, argument.inexact()) * half_turn / _pi()
    if not radians:
        degrees = Ball(argument.value % 360) if argument.exact else argument
        argument = degrees / half_turn * _pi()
    angle = argument.inexact()
    height = abs(float(angle.value.imag))
    if height > MAX_BITS / 2 or angle.error > 1:
        raise NotReadError("too_large")
    error = math.exp(height + 1) * angle.error  # within 1 of the angle, neither function is steeper
    raw_cosine, raw_sine = _mp().cos_sin(angle.value)
    cosine = _rounded_result(raw_cosine, error)
    sine = _rounded_result(raw_sine, error)
    above, below = {
        "sin": (sine, _ONE),
        "cos": (cosine, _ONE),
        "tan": (sine, cosine),
        "sec": (_ONE, cosine),
        "csc": (_ONE, sine),
        "cot": (cosine, sine),
    }[name]
    return above / below


def _inverse_angle(name: str, sine: Ball) -> Ball:
    """Return the angle in radians with this sine, cosine or tangent, as `name` says.

    Its error follows from its slope, 1/sqrt(1 - z^2) or 1/(1 + z^2); at an end, where a sine is 1,
    an error of d in the sine is one of about sqrt(2d) in the angle.
    """
    squared = sine * sine
    if name == "arctan":
        steepness = _ONE + squared
        if steepness.least <= 0:
            raise NotReadError("undefined")
        return _rounded_result(_mp().atan(sine.value), sine.error / steepness.least)
    steepness = _ONE + -squared
    error = 8 * math.sqrt(sine.error)
    if steepness.least > 0:
        error = sine.error / math.sqrt(steepness.least)
    if name == "arcsin":
        return _rounded_result(_mp().asin(sine.value), error)
    return _rounded_result(_mp().acos(sine.value), error)
