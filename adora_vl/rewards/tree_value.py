"""The value of an expression tree, which is computed from the values of its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import reduce

from adora_vl.rewards.grammar import (
    ExpressionTree,
    ParseError,
    is_angle_in_radians,
    unknown_names,
)
from adora_vl.rewards.number_with_error import (
    NumberWithError,
    factorial_or_binomial,
    function_value,
    logarithm,
    pi,
    power_of,
    principal_root,
)

# The largest exponent in a closed form; `2^{65}` is `too_large`.
MAX_CONSTANT_EXPONENT = 64

# The value of each unknown by its name; None for a closed form, which has no unknowns.
UnknownValues = Mapping[str, Fraction] | None


def evaluate_tree(tree: ExpressionTree, unknown_values: UnknownValues) -> NumberWithError:
    """Return the value of an expression tree, with a bound on its error.

    If `unknown_values` is None, the tree has to be a closed form: without unknowns, and real in all
    its parts. Raises `ParseError` with the reason `has_unknown`, `undefined` or `too_large`.
    """
    evaluate_kind = _EVALUATE_BY_KIND[tree[0]]
    result = evaluate_kind(tree, unknown_values)
    # A closed form has to be real. A function may be compared at a point where it is complex.
    if unknown_values is None and not result.is_real:
        raise ParseError("undefined")
    return result


def _evaluate_literal(tree: ExpressionTree, unknown_values: UnknownValues) -> NumberWithError:
    """Return the value of `("num", "12.5")`, which is exact."""
    return NumberWithError(Fraction(tree[1]))


def _evaluate_mixed(tree: ExpressionTree, unknown_values: UnknownValues) -> NumberWithError:
    """Return the value of `("mixed", "7", "1", "2")`, the mixed number 7 1/2."""
    _, integer, numerator, denominator = tree
    return NumberWithError(int(integer) + Fraction(int(numerator), int(denominator)))


def _evaluate_pi(tree: ExpressionTree, unknown_values: UnknownValues) -> NumberWithError:
    """Return the value of `("pi",)`."""
    return pi()


def _evaluate_unknown(tree: ExpressionTree, unknown_values: UnknownValues) -> NumberWithError:
    """Return the value of `("unknown", "x")`; a closed form raises `has_unknown`."""
    if unknown_values is None:
        raise ParseError("has_unknown")
    return NumberWithError(unknown_values[tree[1]])


def _evaluate_sum(tree: ExpressionTree, unknown_values: UnknownValues) -> NumberWithError:
    """Return the value of `("sum", (1, tree), (-1, tree), ...)`, with the sign of each term."""
    terms = []
    for sign, term in tree[1:]:
        absolute = evaluate_tree(term, unknown_values)
        terms.append(absolute if sign > 0 else -absolute)
    return reduce(NumberWithError.__add__, terms)


def _evaluate_product(tree: ExpressionTree, unknown_values: UnknownValues) -> NumberWithError:
    """Return the value of `("product", ("*", tree), ("/", tree), ...)`, which begins with a `*`."""
    result = evaluate_tree(tree[1][1], unknown_values)
    for operator, factor in tree[2:]:
        factor_value = evaluate_tree(factor, unknown_values)
        result = result / factor_value if operator == "/" else result * factor_value
    return result


def _evaluate_fraction(tree: ExpressionTree, unknown_values: UnknownValues) -> NumberWithError:
    """Return the value of `("frac", numerator, denominator)`."""
    _, numerator, denominator = tree
    return evaluate_tree(numerator, unknown_values) / evaluate_tree(denominator, unknown_values)


def _evaluate_power(tree: ExpressionTree, unknown_values: UnknownValues) -> NumberWithError:
    """Return the value of `("power", base, exponent)`.

    The exponent is evaluated first. So the reason why `x^{999}` is refused is that it is too large,
    and not that `x` has no value.
    """
    _, base, exponent = tree
    exponent_value = evaluate_tree(exponent, unknown_values)
    # Without values for unknowns the tree has none: it is a constant, whose exponent has a limit.
    is_constant = unknown_values is None
    is_large = exponent_value.is_exact and abs(exponent_value.value) > MAX_CONSTANT_EXPONENT
    if is_constant and is_large:
        raise ParseError("too_large")
    return power_of(evaluate_tree(base, unknown_values), exponent_value)


def _evaluate_root(tree: ExpressionTree, unknown_values: UnknownValues) -> NumberWithError:
    """Return the value of `("root", degree, radicand)`.

    The cube root of a constant -8 is -2, as at school. If the radicand has unknowns, the root is
    the principal one, which is complex for a negative radicand.
    """
    _, degree, radicand_tree = tree
    radicand = evaluate_tree(radicand_tree, unknown_values)
    # Without values for unknowns the whole tree has none. With values the radicand may have none.
    is_constant_radicand = unknown_values is None or not unknown_names(radicand_tree)
    is_negative = radicand.is_real and radicand.value < 0
    if degree % 2 == 1 and is_constant_radicand and is_negative:
        return -principal_root(-radicand, degree)
    return principal_root(radicand, degree)


def _evaluate_call(tree: ExpressionTree, unknown_values: UnknownValues) -> NumberWithError:
    """Return the value of `("call", name, argument)`, such as a sine."""
    _, name, argument = tree
    argument_value = evaluate_tree(argument, unknown_values)
    return function_value(name, argument_value, is_in_radians=is_angle_in_radians(argument))


def _evaluate_logarithm(tree: ExpressionTree, unknown_values: UnknownValues) -> NumberWithError:
    """Return the value of `("log", base, argument)`."""
    _, base, argument = tree
    natural_logarithm = logarithm(evaluate_tree(argument, unknown_values))
    return natural_logarithm / logarithm(evaluate_tree(base, unknown_values))


def _evaluate_factorial_or_binomial(
    tree: ExpressionTree, unknown_values: UnknownValues
) -> NumberWithError:
    """Return the value of `("factorial", tree)` or of `("binomial", tree, tree)`."""
    numbers = [evaluate_tree(part, unknown_values) for part in tree[1:]]
    return factorial_or_binomial(*numbers)


# The kinds are those that `grammar` lists.
_EVALUATE_BY_KIND: Mapping[str, Callable[[ExpressionTree, UnknownValues], NumberWithError]] = {
    "num": _evaluate_literal,
    "mixed": _evaluate_mixed,
    "pi": _evaluate_pi,
    "unknown": _evaluate_unknown,
    "sum": _evaluate_sum,
    "product": _evaluate_product,
    "frac": _evaluate_fraction,
    "power": _evaluate_power,
    "root": _evaluate_root,
    "call": _evaluate_call,
    "log": _evaluate_logarithm,
    "factorial": _evaluate_factorial_or_binomial,
    "binomial": _evaluate_factorial_or_binomial,
}
