r"""The values of closed forms, and of expressions at chosen points, and whether two are the same.

The values are numbers with a bound on their error (`ball`). Nothing here can hang: the length and
depth of a tree, its costly nodes and the digits of a literal are capped (`grammar`), and so is the
size of every value, before it is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache, reduce
from typing import Literal, NamedTuple

from adora_vl.rewards.ball import (
    ONE,
    Ball,
    Value,
    factorial_or_binomial,
    function_value,
    logarithm,
    pi,
    power_of,
    principal_root,
)
from adora_vl.rewards.grammar import (
    NotReadError,
    Tree,
    children,
    is_angle_in_radians,
    nodes,
    replace_node,
    unknowns,
)

# How near a decimal has to be to a value with more digits.
RELATIVE_TOLERANCE = Fraction(1, 10**6)
# The fewest digits of such a decimal: with fewer it comes that near by chance only.
MIN_DIGITS_OF_LONG_DECIMAL = 6
# How near an answer has to be to a reference answer of 0, also to a sum that cancels.
ABSOLUTE_TOLERANCE = Fraction(1, 10**12)

# How many times smaller than the tolerance an error has to be, so that two values are believed equal.
_ERROR_MARGIN = 1000
# How much less than one unit in its last place a long decimal may be off, whatever floats round.
_ROUNDED_UNIT = 1 - 2.0**-40
# The largest error of a product, as a share of it, with which two products are believed equal.
_MAX_PRODUCT_ERROR = 2.0**-60

MAX_CONSTANT_EXPONENT = 64  # of a constant

# The points at which two functions of unknowns are compared. They differ in sign and size, and no
# honest answer is likely to be 0 at one of them.
_UNKNOWN_VALUES = [
    Fraction(text) for text in ("37/23", "-53/31", "211/17", "7/41", "-389/29", "1009/13")
]

Comparison = Literal["equal", "different", "undefined", "too_large", "undecided"]
# A value at a point, or the reason why there is none.
_ValueOrReason = Ball | Literal["too_large", "undefined"]


def evaluate_closed_form(tree: Tree) -> Ball:
    r"""Return the value of a tree without unknowns, with a bound on its error.

    The `Ball` also says how the value is written, which decides what is right: whether a rational
    number is arithmetic still to be done, as in `180-40`; and, if it is written with one decimal of
    many digits, how much the last digit counts (`Ball.last_digit_growth`).

    Raises `NotReadError` with the reason `too_large`, `undefined` (no value, as `1/0`), or `has_unknown`
    for a tree that has unknowns.
    """
    ball = _evaluate(tree, None)  # without a point, so that an unknown raises
    if tree[0] == "num" and len(tree[1]) <= MIN_DIGITS_OF_LONG_DECIMAL:
        return ball  # neither applies to a short number, and most answers are one
    all_nodes = list(nodes(tree))
    has_undone_arithmetic = False
    if ball.is_exact:
        has_undone_arithmetic = any(map(_is_undone_arithmetic, all_nodes))
    last_digit_growth = None
    if any(map(_is_long_decimal, all_nodes)):
        last_digit_growth = _last_digit_growth(tree, ball, None)
    return replace(
        ball, has_undone_arithmetic=has_undone_arithmetic, last_digit_growth=last_digit_growth
    )


def _is_undone_arithmetic(tree: Tree) -> bool:
    r"""Return whether the root of a tree adds, subtracts or multiplies two rational numbers.

    That is so in `180-40`, `5\cdot7`, `\frac{1}{2}\cdot3\cdot4`, and the sum in `\sqrt{3^2+4^2}`. A
    single fraction, also written as `1/2`, a power, a mixed number, also as `3+\frac{1}{2}`, and
    `1.5\cdot10^3` are ways to write a number.
    """
    if tree[0] == "sum":
        # Each term is a sign, 1 or -1, and a tree.
        terms = tree[1:]
        if len(terms) == 2 and _is_mixed(terms[0], terms[1]):
            return False
        rational_terms = [term for _, term in terms if _is_rational(term)]
        return len(rational_terms) > 1
    if tree[0] != "product":
        return False
    # Each factor is an operator, `*` or `/`, and a tree.
    factors = tree[1:]
    if len(factors) > 1 and _is_scientific(factors[0][1], factors[1]):
        factors = factors[1:]  # a number times a power of ten counts as one factor
    # A single `*` and a single `/` are a number that is written as a fraction, such as `1/2`.
    operators = [operator for operator, factor in factors if _is_rational(factor)]
    return operators.count("*") > 1 or operators.count("/") > 1


def _is_mixed(first_term: tuple[int, Tree], second_term: tuple[int, Tree]) -> bool:
    r"""Return whether two terms of a sum are a mixed number, as in `3+\frac{1}{2}`.

    They are if the first is an integer and the second a fraction below 1 of the same sign. Each
    term is a sign, 1 or -1, and a tree.
    """
    first_sign, integer = first_term
    second_sign, fraction = second_term
    if second_sign != first_sign or integer[0] != "num" or fraction[0] != "frac":
        return False
    _, numerator, denominator = fraction
    are_integers = all(
        number[0] == "num" and number[1].isdigit() for number in (integer, numerator, denominator)
    )
    return are_integers and int(numerator[1]) < int(denominator[1])


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


def _is_scientific(first_factor: Tree, second_operator_and_factor: tuple[str, Tree]) -> bool:
    r"""Return whether two factors are a number in scientific notation, as `1.5\cdot10^3`.

    The number is from 1 to 10. The operator before the second factor is `*` or `/`.
    """
    operator, second_factor = second_operator_and_factor
    is_times_power_of_ten = (
        operator == "*" and second_factor[0] == "power" and second_factor[1] == ("num", "10")
    )
    return (
        is_times_power_of_ten and first_factor[0] == "num" and 1 <= Fraction(first_factor[1]) < 10
    )


@lru_cache(maxsize=256)
def _raise_last_digit(tree: Tree) -> Tree | None:
    """Return the tree with its long decimal increased by one unit in the last place.

    The change in value tells how far the decimal may be from the value that it stands for. A long
    decimal has `MIN_DIGITS_OF_LONG_DECIMAL` digits or more. None if the tree has none, or several.
    """
    long_decimals = [node for node in nodes(tree) if _is_long_decimal(node)]
    if len(long_decimals) != 1:
        return None
    (long_decimal,) = long_decimals
    # The decimal is raised as an integer without its point, which is then set back.
    text = long_decimal[1]
    places = len(text.partition(".")[2])
    raised_integer = int(Fraction(text) * 10**places) + 1
    digits = str(raised_integer).zfill(places + 1)
    raised_decimal = ("num", f"{digits[:-places]}.{digits[-places:]}")
    return replace_node(tree, long_decimal, raised_decimal)


def _is_long_decimal(node: Tree) -> bool:
    """Return whether a node is a decimal that may stand for a value with more digits.

    It has `MIN_DIGITS_OF_LONG_DECIMAL` significant digits or more, and other decimal places than zeros.
    """
    if node[0] != "num" or "." not in node[1] or len(node[1]) <= MIN_DIGITS_OF_LONG_DECIMAL:
        return False
    integer, _, places = node[1].partition(".")
    significant_digits = (integer + places).lstrip("0")
    return places.strip("0") != "" and len(significant_digits) >= MIN_DIGITS_OF_LONG_DECIMAL


def _last_digit_growth(
    tree: Tree, ball: Ball, point: Mapping[str, Fraction] | None
) -> Value | None:
    """Return how much a tree grows with one unit in the last place of its long decimal.

    `same_number` allows that much between the decimal and the value that it stands for. None if the
    tree has no long decimal, or several. `ball` is the value of the tree at `point`, which has the
    value of each unknown, or is None for a tree without unknowns.
    """
    raised_tree = _raise_last_digit(tree)
    if raised_tree is None:
        return None
    try:
        return (_evaluate(raised_tree, point) - ball).value
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
    # What one unit in the last place of the long decimal counts, where exactly one side is one.
    last_digit_growth = None
    if reference.last_digit_growth is None:
        last_digit_growth = answer.last_digit_growth
    elif answer.last_digit_growth is None:
        last_digit_growth = reference.last_digit_growth
    if answer.is_exact and reference.is_exact:
        is_equal = bool(answer.value == reference.value)
        if is_equal or last_digit_growth is None:
            return is_equal
        gap = abs(answer.value - reference.value)
        is_near = gap <= RELATIVE_TOLERANCE * abs(reference.value)
        return bool(gap < abs(last_digit_growth) and is_near)
    answer_value = answer.as_mpmath()
    reference_value = reference.as_mpmath()
    # The tolerance is relative to the reference value, unless that can be 0.
    tolerance = float(ABSOLUTE_TOLERANCE)
    if reference_value.least_magnitude > 0:
        tolerance = float(RELATIVE_TOLERANCE) * reference_value.magnitude
    distance = Ball(answer_value.value - reference_value.value).magnitude
    error = answer_value.error + reference_value.error
    if distance > error:  # they are not equal
        if last_digit_growth is None:
            return False
        # A distance of exactly one unit is too much.
        return distance < min(tolerance, Ball(last_digit_growth).magnitude * _ROUNDED_UNIT)
    return True if _ERROR_MARGIN * error < tolerance else None


def same_function(answer: Tree, reference: Tree) -> Comparison:
    """Compare two trees with the same unknowns by their values at six points.

    They are `equal` if they have the same value at every point at which both have one. The value may
    be complex. At a point a tree has no value where it is undefined, as a root of a negative number
    or a division by 0, or where computing the value would take too long (`too_large`).
    """
    compared_points = 0
    # The result where no point has a value of both: nothing is known of the trees.
    result_without_points: Comparison = "undefined"
    names = unknowns(answer) | unknowns(reference)
    for point, reference_value in zip(
        _comparison_points(names), _reference_values(reference, names), strict=True
    ):
        answer_value = _value_with_last_digit(answer, point)
        # A value is a `Ball`, or else the reason why the tree has none here.
        takes_too_long = "too_large" in (answer_value, reference_value)
        if isinstance(answer_value, Ball) and isinstance(reference_value, Ball):
            is_same = same_number(answer_value, reference_value)
            if is_same is None:
                # The bounds on the errors of both overlap, but are too wide to call them equal.
                return "undecided"
            if not is_same:
                return "different"
            compared_points += 1
        elif isinstance(answer_value, Ball) or isinstance(reference_value, Ball):
            # Only one of the trees has a value. The other is undefined here, or nobody knows.
            return "too_large" if takes_too_long else "different"
        elif takes_too_long:
            # Neither has a value: the point is skipped.
            result_without_points = "too_large"
    return "equal" if compared_points > 0 else result_without_points


class _ValuePair(NamedTuple):
    """The values of an answer and of a reference answer at one point."""

    answer: Ball
    reference: Ball

    @property
    def are_real_and_nonzero(self) -> bool:
        """Whether both are real and surely not 0."""
        return all(ball.is_real and ball.least_magnitude > 0 for ball in self)

    def is_proportional_to(self, base: _ValuePair) -> bool:
        """Return whether the answer is the same multiple of the reference answer in both pairs."""
        return _are_equal_products((self.answer, base.reference), (base.answer, self.reference))


def sign_of_factor_between(answer: Tree, reference: Tree) -> int:
    """Return the sign of the constant c with `answer = c * reference`: 1, -1, or 0 without such a c.

    Two inequalities say the same where their trees differ by a positive factor. The trees are
    compared at six points. At a point where one is 0 the other has to be 0 too.
    """
    pairs = _value_pairs(answer, reference)
    # The first point at which both have a sign gives the factor, which has to hold at all others.
    base = next((pair for pair in pairs if pair.are_real_and_nonzero), None)
    if base is None:
        return 0
    if not all(pair is base or pair.is_proportional_to(base) for pair in pairs):
        return 0
    return 1 if (base.answer.value > 0) == (base.reference.value > 0) else -1


def _value_pairs(answer: Tree, reference: Tree) -> list[_ValuePair]:
    """Return the values of two trees at each of the six points at which they have one.

    Returns no pair at all if at any point only one of them has a value, or both have none for
    different reasons: such trees are not the same up to a factor.
    """
    names = unknowns(answer) | unknowns(reference)
    pairs = []
    for point, reference_value in zip(
        _comparison_points(names), _reference_values(reference, names), strict=True
    ):
        answer_value = _value_at(answer, point)
        if isinstance(answer_value, Ball) and isinstance(reference_value, Ball):
            pairs.append(_ValuePair(answer_value, reference_value))
        elif answer_value != reference_value:
            return []
    return pairs


def is_constant(tree: Tree) -> bool:
    """Return whether a tree has the same value at six points, although it has unknowns.

    Points at which it has no value are skipped.
    """
    earlier_value: Ball | None = None
    for point in _comparison_points(unknowns(tree)):
        value = _value_at(tree, point)
        if isinstance(value, Ball):
            if earlier_value is not None and not _are_equal_products(
                (value, ONE), (earlier_value, ONE)
            ):
                return False
            earlier_value = value
    return True


def solve_linear(tree: Tree) -> tuple[Ball, int] | None:
    """Return the zero of a tree that is linear in its only unknown, and the sign of its slope.

    None for a tree that is not linear, or constant.
    """
    (name,) = unknowns(tree)
    zero_and_slope = _zero_and_slope(tree, name)
    if zero_and_slope is None:
        return None
    zero, slope = zero_and_slope
    # How far the zero moves with the last digit of a long decimal in the tree.
    raised_tree = _raise_last_digit(tree)
    raised_zero_and_slope = _zero_and_slope(raised_tree, name) if raised_tree else None
    if raised_zero_and_slope is not None:
        raised_zero, _ = raised_zero_and_slope
        zero = replace(zero, last_digit_growth=(raised_zero - zero).value)
    return zero, 1 if slope.value > 0 else -1


def _zero_and_slope(tree: Tree, name: str) -> tuple[Ball, Ball] | None:
    """Return the zero and the slope of a tree that is linear in the unknown `name`, else None.

    The values at 0 and 1 give the line. To be linear, the tree has to lie on it at six points too.
    """
    at_0 = _value_at(tree, {name: Fraction(0)})
    at_1 = _value_at(tree, {name: Fraction(1)})
    if not (isinstance(at_0, Ball) and isinstance(at_1, Ball) and at_0.is_real and at_1.is_real):
        return None
    try:
        slope = at_1 - at_0
        zero = -at_0 / slope
        for x in _UNKNOWN_VALUES:
            at_x = _value_at(tree, {name: x})
            if not isinstance(at_x, Ball):
                return None
            rise = at_x - at_0
            if not _are_equal_products((rise, ONE), (slope, Ball(x))):
                return None
    except NotReadError:
        return None
    return zero, slope


def _are_equal_products(
    first_factors: tuple[Ball, Ball], second_factors: tuple[Ball, Ball]
) -> bool:
    """Return whether two factors have the same product as two others.

    Products that are not exact fractions count as equal if they differ by no more than their error,
    and the error is small beside them.
    """
    try:
        first = first_factors[0] * first_factors[1]
        second = second_factors[0] * second_factors[1]
        difference = first - second
    except NotReadError:
        return False
    if difference.is_exact:
        return bool(difference.value == 0)
    largest_error = _MAX_PRODUCT_ERROR * max(first.magnitude, second.magnitude)
    return difference.magnitude <= difference.error <= largest_error


def _comparison_points(names: Iterable[str]) -> Iterator[dict[str, Fraction]]:
    """Yield six points at which functions are compared: at each the values of the unknowns.

    Each unknown runs through the six numbers of `_UNKNOWN_VALUES`, v0 to v5, from another start. The
    second one is also raised by 1, the third by 2, and so on, so that no two unknowns are equal at a
    point. For example, x and y have the points (v0, v1 + 1), (v1, v2 + 1), ..., (v5, v0 + 1).
    """
    sorted_names = sorted(names)
    for index in range(len(_UNKNOWN_VALUES)):
        point = {}
        for shift, name in enumerate(sorted_names):
            point[name] = _UNKNOWN_VALUES[(index + shift) % len(_UNKNOWN_VALUES)] + shift
        yield point


@lru_cache(maxsize=256)
def _reference_values(reference: Tree, names: frozenset[str]) -> tuple[_ValueOrReason, ...]:
    """Return the values of a reference answer at the six points of `_comparison_points`.

    They are cached, since all rollouts of a group have the same reference answer.
    """
    return tuple(_value_with_last_digit(reference, point) for point in _comparison_points(names))


def _value_with_last_digit(tree: Tree, point: Mapping[str, Fraction]) -> _ValueOrReason:
    """Return the value of a tree at a point, or the reason why it has none.

    The value says too by how much it would change if the last digit of a decimal in the tree did
    (`Ball.last_digit_growth`).
    """
    ball = _value_at(tree, point)
    if not isinstance(ball, Ball):
        return ball
    return replace(ball, last_digit_growth=_last_digit_growth(tree, ball, point))


def _value_at(tree: Tree, point: Mapping[str, Fraction]) -> _ValueOrReason:
    """Return the value of a tree where its unknowns have the values in `point`.

    Where it has none, the reason is returned: over the caps, or undefined there.
    """
    try:
        return _evaluate(tree, point)
    except NotReadError as error:
        return "too_large" if error.reason == "too_large" else "undefined"


def _evaluate(tree: Tree, point: Mapping[str, Fraction] | None) -> Ball:
    """Compute the value of a tree from the values of its parts.

    `point` has the values of the unknowns. With None the tree has to be a closed form without
    unknowns, and all its parts have to be real. Raises `NotReadError`.
    """
    kind = tree[0]
    if kind == "num":
        ball = Ball(Fraction(tree[1]))
    elif kind == "unknown":
        if point is None:
            raise NotReadError("has_unknown")
        ball = Ball(point[tree[1]])
    elif kind == "sum":
        terms = []
        for sign, term in tree[1:]:
            absolute = _evaluate(term, point)
            terms.append(absolute if sign > 0 else -absolute)
        ball = reduce(Ball.__add__, terms)
    elif kind == "product":
        ball = _evaluate(tree[1][1], point)
        for operator, factor in tree[2:]:
            factor_value = _evaluate(factor, point)
            ball = ball / factor_value if operator == "/" else ball * factor_value
    elif kind == "frac":
        ball = _evaluate(tree[1], point) / _evaluate(tree[2], point)
    elif kind == "mixed":
        _, integer, numerator, denominator = tree
        ball = Ball(int(integer) + Fraction(int(numerator), int(denominator)))
    elif kind == "power":
        # The exponent comes first: `x^{999}` is too large, although `x` has no value here.
        exponent = _evaluate(tree[2], point)
        if point is None and exponent.is_exact and abs(exponent.value) > MAX_CONSTANT_EXPONENT:
            raise NotReadError("too_large")
        ball = power_of(_evaluate(tree[1], point), exponent)
    elif kind in {"factorial", "binomial"}:
        ball = factorial_or_binomial(*[_evaluate(term, point) for term in tree[1:]])
    elif kind == "pi":
        ball = pi()
    elif kind == "root":
        ball = _evaluate_root(tree, point)
    elif kind == "log":
        ball = logarithm(_evaluate(tree[2], point)) / logarithm(_evaluate(tree[1], point))
    else:  # ("call", name, argument)
        ball = function_value(
            tree[1], _evaluate(tree[2], point), is_in_radians=is_angle_in_radians(tree[2])
        )
    # A closed form has to be real. A function may be compared at a point where it is complex.
    if point is None and not ball.is_real:
        raise NotReadError("undefined")
    return ball


def _evaluate_root(tree: Tree, point: Mapping[str, Fraction] | None) -> Ball:
    """Compute the value of a root, as `_evaluate` does for any tree.

    The cube root of the constant -8 is -2. In a function of unknowns it is the principal one, which
    is complex.
    """
    _, degree, radicand_tree = tree
    radicand = _evaluate(radicand_tree, point)
    # Without a point the tree has no unknowns at all; with one the radicand may still have none.
    is_constant_radicand = point is None or not unknowns(radicand_tree)
    is_negative = radicand.is_real and radicand.value < 0
    if degree % 2 == 1 and is_constant_radicand and is_negative:
        return -principal_root(-radicand, degree)
    return principal_root(radicand, degree)
