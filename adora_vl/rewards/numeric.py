r"""The values of closed forms, and of expressions at chosen points, and whether two are the same.

The values are numbers with a bound on their error (`number_with_error`). Nothing here can hang: the
length and depth of a tree, its costly nodes and the digits of a literal are capped (`grammar`), and
so is the size of every value, before it is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Literal, NamedTuple

from adora_vl.rewards.grammar import (
    ExpressionTree,
    ParseError,
    direct_subtrees,
    replace_node,
    subtrees,
    unknown_names,
)
from adora_vl.rewards.number_with_error import ONE, NumberWithError, Value
from adora_vl.rewards.tree_value import UnknownValues, evaluate_tree

# A long decimal such as 0.3333333 may stand for a value with more digits, such as 1/3. The largest
# relative distance between the two.
RELATIVE_TOLERANCE = Fraction(1, 10**6)
# The fewest significant digits of a long decimal. A shorter one can come that near only by chance.
MIN_DIGITS_OF_LONG_DECIMAL = 6
# The largest distance of an answer from a reference value that can be 0, where no relative distance
# is defined.
ABSOLUTE_TOLERANCE = Fraction(1, 10**12)

# Two inexact values count as equal if their error is this many times smaller than the tolerance.
_ERROR_MARGIN = 1000
# A long decimal has to be off by less than one unit in its last place. The unit is made a little
# smaller, so that the rounding of floats cannot let a whole unit pass.
_ROUNDED_UNIT = 1 - 2.0**-40
# Two inexact products count as equal only if their relative error is at most this large.
_MAX_PRODUCT_ERROR = 2.0**-60

# The six numbers that stand for an unknown where two functions are compared by their values. They
# differ in sign and size, and no honest answer is likely to be 0 at one of them.
_UNKNOWN_VALUES = [
    Fraction(text) for text in ("37/23", "-53/31", "211/17", "7/41", "-389/29", "1009/13")
]

Comparison = Literal["equal", "different", "undefined", "too_large", "undecided"]
# A value at a point, or the reason why there is none.
_ValueOrReason = NumberWithError | Literal["too_large", "undefined"]


def evaluate_closed_form(tree: ExpressionTree) -> NumberWithError:
    r"""Return the value of an expression tree without unknowns, with a bound on its error.

    The `NumberWithError` also says two things about how the value is written, because they decide
    whether an answer is right:

    - `is_unevaluated`: whether arithmetic on rational numbers is still to be done, as in
      `180-40`.
    - `last_digit_growth`: how much the value changes with the last digit of a long decimal in it.

    For example, `180-40` gives 140 with undone arithmetic, and `1.0471976` gives itself with a
    growth of 0.0000001.

    Raises `ParseError` with the reason `too_large`, `undefined` (no value, as `1/0`), or
    `has_unknown` for a tree that has unknowns.
    """
    # No unknown has a value here, so a tree with one raises `ParseError`.
    number = evaluate_tree(tree, unknown_values=None)
    # Most answers are a number of few characters: it has no arithmetic and is no long decimal.
    is_short_number = tree[0] == "num" and len(tree[1]) <= MIN_DIGITS_OF_LONG_DECIMAL
    if is_short_number:
        return number
    all_subtrees = list(subtrees(tree))
    is_unevaluated = False
    if number.is_exact:
        is_unevaluated = any(map(_is_unevaluated_operation, all_subtrees))
    last_digit_growth = None
    if any(map(_is_long_decimal, all_subtrees)):
        last_digit_growth = _last_digit_growth(tree, number, unknown_values=None)
    return replace(number, is_unevaluated=is_unevaluated, last_digit_growth=last_digit_growth)


def _is_unevaluated_operation(tree: ExpressionTree) -> bool:
    r"""Return whether the root of a tree adds, subtracts or multiplies two rational numbers.

    Only the root is looked at, not the trees inside it.

    - True: `180-40`, `5\cdot7`, `\frac{1}{2}\cdot3\cdot4`, `3/4/5`.
    - False, since these are ways to write a number: `\frac{1}{2}` and `1/2`, the power `2^3`, the
      mixed number `3+\frac{1}{2}`, and `1.5\cdot10^3`.
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
    # The first factor always has `*`. A single `/` after it is a fraction, such as `1/2`.
    operators = [operator for operator, factor in factors if _is_rational(factor)]
    return operators.count("*") > 1 or operators.count("/") > 1


def _is_mixed(
    first_term: tuple[int, ExpressionTree], second_term: tuple[int, ExpressionTree]
) -> bool:
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


def _is_rational(tree: ExpressionTree) -> bool:
    """Return whether an expression tree has nothing but numbers, arithmetic and integer powers."""
    if tree[0] in {"num", "mixed"}:
        return True
    if tree[0] == "power" and not _is_integer(tree[2]):
        return False
    if tree[0] not in {"frac", "sum", "product", "power"}:
        return False
    return all(map(_is_rational, direct_subtrees(tree)))


def _is_integer(exponent: ExpressionTree) -> bool:
    """Return whether an exponent is a rational expression with an integer value."""
    if not _is_rational(exponent):
        return False
    number = evaluate_tree(exponent, unknown_values=None)
    return bool(number.value.denominator == 1)


def _is_scientific(
    first_factor: ExpressionTree, second_operator_and_factor: tuple[str, ExpressionTree]
) -> bool:
    r"""Return whether two factors are a number in scientific notation, as `1.5\cdot10^3`.

    The number is from 1 to 10. The operator before the second factor is `*` or `/`.
    """
    operator, second_factor = second_operator_and_factor
    is_power_of_ten = second_factor[0] == "power" and second_factor[1] == ("num", "10")
    if operator != "*" or not is_power_of_ten or first_factor[0] != "num":
        return False
    return 1 <= Fraction(first_factor[1]) < 10


@lru_cache(maxsize=256)
def _raise_last_digit(tree: ExpressionTree) -> ExpressionTree | None:
    r"""Return the tree with its long decimal increased by one unit in the last place.

    For example, the tree of `2\cdot0.333333` becomes that of `2\cdot0.333334`. Returns None if the
    tree has no long decimal (`_is_long_decimal`), or several.
    """
    long_decimals = [node for node in subtrees(tree) if _is_long_decimal(node)]
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


def _is_long_decimal(node: ExpressionTree) -> bool:
    """Return whether a node is a decimal that may stand for a value with more digits.

    It has at least six significant digits (`MIN_DIGITS_OF_LONG_DECIMAL`), and its decimal places
    are not all 0. So `3.14159` is a long decimal; `3.1416`, `1000.00` and `0.000123` are not.
    """
    if node[0] != "num" or "." not in node[1] or len(node[1]) <= MIN_DIGITS_OF_LONG_DECIMAL:
        return False
    integer, _, places = node[1].partition(".")
    significant_digits = (integer + places).lstrip("0")
    return places.strip("0") != "" and len(significant_digits) >= MIN_DIGITS_OF_LONG_DECIMAL


def _last_digit_growth(
    tree: ExpressionTree, number: NumberWithError, unknown_values: UnknownValues
) -> Value | None:
    r"""Return how much the value of a tree grows if its long decimal grows by its last place.

    `2\cdot1.047198` grows by 0.000002. `same_number` uses this as the tolerance of the decimal.

    Args:
        tree: any tree. The result is None if it has no long decimal, or several.
        number: the value of the tree at `unknown_values`.
        unknown_values: the value of each unknown; None for a tree without unknowns.
    """
    raised_tree = _raise_last_digit(tree)
    if raised_tree is None:
        return None
    try:
        return (evaluate_tree(raised_tree, unknown_values) - number).value
    except ParseError:
        return None


def same_number(answer: NumberWithError, reference: NumberWithError) -> bool | None:
    r"""Return whether two values are equal, or one is a long decimal that stands for the other.

    A long decimal stands for a value if it is the value rounded or cut at its last place, and
    within 1e-6 relative. Two long decimals have to be equal.

    - True: `\sqrt{12}` and `2\sqrt{3}`; `0.333333` and `\frac{1}{3}`; `3.141592` and `3.141593`,
      each beside `\pi`.
    - False: `0.333` and `\frac{1}{3}`; `0.333333` and `0.3333333`; `1000000.5` and `1000000`;
      `\frac{355}{113}` and `\pi`.
    - None where the errors are too large to tell. No digit of pi is left in
      `10^{60}\cdot10^{60}+\pi-10^{60}\cdot10^{60}`.
    """
    # The change of value with one unit in the last place, if exactly one side has a long decimal.
    last_digit_growth = None
    if reference.last_digit_growth is None:
        last_digit_growth = answer.last_digit_growth
    elif answer.last_digit_growth is None:
        last_digit_growth = reference.last_digit_growth
    if answer.is_exact and reference.is_exact:
        return _same_exact_number(answer.value, reference.value, last_digit_growth)
    answer_value = answer.as_mpmath()
    reference_value = reference.as_mpmath()
    # The tolerance is relative to the reference value, unless that can be 0.
    tolerance = float(ABSOLUTE_TOLERANCE)
    if reference_value.least_magnitude > 0:
        tolerance = float(RELATIVE_TOLERANCE) * reference_value.magnitude
    distance = NumberWithError(answer_value.value - reference_value.value).magnitude
    error = answer_value.error + reference_value.error
    if distance > error:  # the values are surely not equal
        if last_digit_growth is None:
            return False
        # The long decimal may still stand for the other value: if less than one unit is between.
        unit_in_last_place = NumberWithError(last_digit_growth).magnitude * _ROUNDED_UNIT
        return distance < min(tolerance, unit_in_last_place)
    # The values are equal within their errors. This counts only if the errors are small.
    return True if _ERROR_MARGIN * error < tolerance else None


def _same_exact_number(
    answer: Fraction, reference: Fraction, last_digit_growth: Value | None
) -> bool:
    """Return whether two fractions are equal, or one is a long decimal that stands for the other.

    `last_digit_growth`: how much that decimal grows with one unit in its last place; None if
    neither, or each, is a long decimal.
    """
    if answer == reference:
        return True
    if last_digit_growth is None:
        return False
    gap = abs(answer - reference)
    is_near = gap <= RELATIVE_TOLERANCE * abs(reference)
    return bool(gap < abs(last_digit_growth) and is_near)


def same_function(answer: ExpressionTree, reference: ExpressionTree) -> Comparison:
    """Compare two expression trees with the same unknowns by their values at six points.

    At each point a tree has a value, which may be complex, or a reason why it has none:
    `undefined`, as for a division by 0, or `too_large`, where the value would take too long to
    compute. The first point that decides ends the comparison:

    - `undecided`: both have a value, but the errors are too large to compare them.
    - `different`: both have values that differ, or one has a value where the other is undefined.
    - `too_large`: one has a value, and the value of the other is too large to compute.

    If no point decides, the result is `equal` if both have a value at one point at least. Else it
    is `too_large` or `undefined`, the reason why they have none. For example, `2(x+1)` and `2x+2`
    are equal, and `x^2` and `2x` are different.
    """
    compared_points = 0
    # The result if the trees have no value at any point.
    result_without_points: Comparison = "undefined"
    names = unknown_names(answer) | unknown_names(reference)
    for unknown_values, reference_value in zip(
        _comparison_points(names), _reference_values(reference, names), strict=True
    ):
        answer_value = _value_with_last_digit_growth(answer, unknown_values)
        # A value is a `NumberWithError`, or else the reason why the tree has none here.
        takes_too_long = "too_large" in (answer_value, reference_value)
        if isinstance(answer_value, NumberWithError) and isinstance(
            reference_value, NumberWithError
        ):
            is_same = same_number(answer_value, reference_value)
            if is_same is None:
                # The bounds on the errors of both overlap, but are too wide to call them equal.
                return "undecided"
            if not is_same:
                return "different"
            compared_points += 1
        elif isinstance(answer_value, NumberWithError) or isinstance(
            reference_value, NumberWithError
        ):
            # Only one of the trees has a value. The other is undefined here, or was not computed.
            return "too_large" if takes_too_long else "different"
        elif takes_too_long:
            # Neither has a value: the point is skipped.
            result_without_points = "too_large"
    return "equal" if compared_points > 0 else result_without_points


class _ValuePair(NamedTuple):
    """The values of an answer and of a reference answer at one point."""

    answer: NumberWithError
    reference: NumberWithError

    @property
    def are_real_and_nonzero(self) -> bool:
        """Whether both are real and surely not 0."""
        return all(number.is_real and number.least_magnitude > 0 for number in self)

    def is_proportional_to(self, base: _ValuePair) -> bool:
        """Return whether the answer is the same multiple of the reference answer in both pairs."""
        return _are_equal_products((self.answer, base.reference), (base.answer, self.reference))


def sign_of_factor_between(answer: ExpressionTree, reference: ExpressionTree) -> int:
    """Return the sign of the constant c with `answer = c * reference`, or 0 if there is no such c.

    For example, with the reference `x-2`, `2x-4` gives 1, `2-x` gives -1, and `x-3` gives 0. Two
    inequalities `answer < 0` and `reference < 0` say the same if the sign is 1. The trees are
    compared at six points.
    """
    pairs = _value_pairs(answer, reference)
    # The factor is taken at the first point where both are real and not 0. It has to be the same at
    # all other points, so where one tree is 0 the other has to be 0 too.
    base = next((pair for pair in pairs if pair.are_real_and_nonzero), None)
    if base is None:
        return 0
    if not all(pair is base or pair.is_proportional_to(base) for pair in pairs):
        return 0
    return 1 if (base.answer.value > 0) == (base.reference.value > 0) else -1


def _value_pairs(answer: ExpressionTree, reference: ExpressionTree) -> list[_ValuePair]:
    """Return the values of two expression trees at each of the six points at which they have one.

    Returns no pair at all if at any point only one of them has a value, or both have none for
    different reasons: such trees are not the same up to a factor.
    """
    names = unknown_names(answer) | unknown_names(reference)
    pairs = []
    for unknown_values, reference_value in zip(
        _comparison_points(names), _reference_values(reference, names), strict=True
    ):
        answer_value = _value_at(answer, unknown_values)
        if isinstance(answer_value, NumberWithError) and isinstance(
            reference_value, NumberWithError
        ):
            pairs.append(_ValuePair(answer=answer_value, reference=reference_value))
        elif answer_value != reference_value:
            return []
    return pairs


def is_constant(tree: ExpressionTree) -> bool:
    """Return whether an expression tree has the same value at six points, although it has unknowns.

    `x-x+3` has, and `x+1` has not. Points at which the tree has no value are skipped.
    """
    earlier_value: NumberWithError | None = None
    for unknown_values in _comparison_points(unknown_names(tree)):
        value = _value_at(tree, unknown_values)
        if not isinstance(value, NumberWithError):
            continue
        # Values are equal up to rounding if their products with 1 are.
        if earlier_value is not None and not _are_equal_products(
            (value, ONE), (earlier_value, ONE)
        ):
            return False
        earlier_value = value
    return True


def solve_linear(tree: ExpressionTree) -> tuple[NumberWithError, int] | None:
    """Return the zero of a tree that is linear in its only unknown, and the sign of its slope.

    For example, `2x-6` gives 3 and 1, and `6-2x` gives 3 and -1. Returns None for a tree that is
    not linear or is constant, such as `x^2` and `x-x`.
    """
    (name,) = unknown_names(tree)
    zero_and_slope = _zero_and_slope(tree, name)
    if zero_and_slope is None:
        return None
    zero, slope = zero_and_slope
    slope_sign = 1 if slope.value > 0 else -1
    # If the tree has a long decimal, such as 0.333333, its last digit may be rounded. So the zero
    # says by how much it moves if that digit is raised by one: a comparison then allows for the
    # rounding.
    raised_tree = _raise_last_digit(tree)
    if raised_tree is None:
        return zero, slope_sign
    raised_zero_and_slope = _zero_and_slope(raised_tree, name)
    if raised_zero_and_slope is not None:
        raised_zero, _ = raised_zero_and_slope
        zero = replace(zero, last_digit_growth=(raised_zero - zero).value)
    return zero, slope_sign


def _zero_and_slope(
    tree: ExpressionTree, name: str
) -> tuple[NumberWithError, NumberWithError] | None:
    """Return the zero and the slope of a tree that is linear in the unknown `name`, else None.

    The values at 0 and 1 give a line. The tree is linear if it lies on that line at the six numbers
    of `_UNKNOWN_VALUES` too.
    """
    at_0 = _value_at(tree, {name: Fraction(0)})
    at_1 = _value_at(tree, {name: Fraction(1)})
    if not (
        isinstance(at_0, NumberWithError)
        and isinstance(at_1, NumberWithError)
        and at_0.is_real
        and at_1.is_real
    ):
        return None
    try:
        slope = at_1 - at_0
        # A slope of 0, which has no zero, raises `ParseError`.
        zero = -at_0 / slope
        for x in _UNKNOWN_VALUES:
            at_x = _value_at(tree, {name: x})
            if not isinstance(at_x, NumberWithError):
                return None
            rise = at_x - at_0
            if not _are_equal_products((rise, ONE), (slope, NumberWithError(x))):
                return None
    except ParseError:
        return None
    return zero, slope


def _are_equal_products(
    first_factors: tuple[NumberWithError, NumberWithError],
    second_factors: tuple[NumberWithError, NumberWithError],
) -> bool:
    """Return whether two pairs of factors have the same product: (2, 6) and (3, 4) have.

    If a product is no exact fraction, two conditions have to hold: the products differ by no more
    than their error, and the error is small beside the products.
    """
    try:
        first = first_factors[0] * first_factors[1]
        second = second_factors[0] * second_factors[1]
        difference = first - second
    except ParseError:
        return False
    if difference.is_exact:
        return bool(difference.value == 0)
    largest_error = _MAX_PRODUCT_ERROR * max(first.magnitude, second.magnitude)
    return difference.magnitude <= difference.error <= largest_error


def _comparison_points(names: Iterable[str]) -> Iterator[dict[str, Fraction]]:
    """Yield six points at which functions are compared: at each the values of the unknowns.

    Let v0 to v5 be the six numbers of `_UNKNOWN_VALUES`. The unknowns x and y then have the points
    (v0, v1 + 1), (v1, v2 + 1), ..., (v5, v0 + 1), and a third unknown begins with v2 + 2. The shift
    and the summand keep the unknowns of a point different from each other.
    """
    sorted_names = sorted(names)
    for index in range(len(_UNKNOWN_VALUES)):
        unknown_values = {}
        for shift, name in enumerate(sorted_names):
            unknown_values[name] = _UNKNOWN_VALUES[(index + shift) % len(_UNKNOWN_VALUES)] + shift
        yield unknown_values


@lru_cache(maxsize=256)
def _reference_values(
    reference: ExpressionTree, names: frozenset[str]
) -> tuple[_ValueOrReason, ...]:
    """Return the values of a reference answer at the six points of `_comparison_points`.

    They are cached, since all rollouts of a group have the same reference answer.
    """
    return tuple(
        _value_with_last_digit_growth(reference, unknown_values)
        for unknown_values in _comparison_points(names)
    )


def _value_with_last_digit_growth(
    tree: ExpressionTree, unknown_values: Mapping[str, Fraction]
) -> _ValueOrReason:
    """Return the value of an expression tree at a point, or the reason why it has none.

    The `NumberWithError` has its `last_digit_growth` set, which `_value_at` leaves empty.
    """
    number = _value_at(tree, unknown_values)
    if not isinstance(number, NumberWithError):
        return number
    return replace(number, last_digit_growth=_last_digit_growth(tree, number, unknown_values))


def _value_at(tree: ExpressionTree, unknown_values: Mapping[str, Fraction]) -> _ValueOrReason:
    """Return the value of a tree where its unknowns have the values in `unknown_values`.

    If it has no value there, the reason is returned: `too_large` or `undefined`.
    """
    try:
        return evaluate_tree(tree, unknown_values)
    except ParseError as error:
        return "too_large" if error.reason == "too_large" else "undefined"
