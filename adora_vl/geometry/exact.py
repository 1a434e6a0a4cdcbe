r"""A number as a person writes it: an integer, a decimal, a fraction, a root, a multiple of pi.

The forms are those of canonical answers: `12`, `7.5`, `\frac{5}{3}`, `6\sqrt{2}`,
`\frac{5\sqrt{3}}{2}`, `18\pi`.
"""

from __future__ import annotations

import math
from fractions import Fraction

_FORM_TOLERANCE = 1e-9  # share of a value that a written form may differ by
# Longer forms are no answers of a school book, and almost every number is near one of them.
_MAX_DENOMINATOR = 60
_MAX_UNDER_ROOT = 1000
_MAX_INTEGER = 10**9
_MAX_DIVISOR_TRIED = 10_000


def short_form(
    value: float, *, share: float = _FORM_TOLERANCE, decimals: bool = True
) -> str | None:
    """Return the shortest form that a value has, in LaTeX; None where it has none.

    `share`: how much of the value the form may differ by. `decimals`: whether `7.5` comes before a
    fraction.
    """
    if not math.isfinite(value) or abs(value) > _MAX_INTEGER:
        return None
    if value < 0:
        positive = short_form(-value, share=share, decimals=decimals)
        return None if positive is None else f"-{positive}"
    tolerance = share * max(1.0, value)
    if abs(value - round(value)) <= tolerance:
        return str(round(value))
    if decimals:
        for digits in (1, 2):
            if abs(value - round(value, digits)) <= tolerance:
                return f"{round(value, digits):.{digits}f}"
    rational = _as_rational(value, tolerance)
    if rational is not None:
        return _write_fraction(rational)
    root = _write_root(value, tolerance)
    if root is not None:
        return root
    factor = _as_rational(value / math.pi, tolerance / math.pi)
    return None if factor is None else _write_fraction(factor, r"\pi")


def round_as_in_school(value: float, digits: int) -> str:
    """Return a value with `digits` decimals, halves away from zero as in school: `2.5` is 3.

    Without decimals it is an integer.
    """
    scale = 10**digits
    # The small number is for halves that binary numbers store a little too low, such as 1.005.
    scaled = math.floor(abs(value) * scale + 0.5 + 1e-9)
    text = f"{scaled / scale:.{digits}f}" if digits else str(scaled)
    return f"-{text}" if value < 0 and scaled else text


def _as_rational(value: float, tolerance: float) -> Fraction | None:
    """Return the value as a fraction as people write it; None where it is no such fraction."""
    rational = Fraction(value).limit_denominator(_MAX_DENOMINATOR)
    return rational if rational and abs(float(rational) - value) <= tolerance else None


def _write_root(value: float, tolerance: float) -> str | None:
    """Return a value as a fraction times a square root; None where it has no such short form.

    The square of such a value is a fraction. For example, 3.4641 has the square 12, so it is the
    root of 12, which is 2 times the root of 3.
    """
    # Where the value is wrong by t, its square is wrong by (value + t)² - value² at most.
    square = value * value
    square_tolerance = 2 * value * tolerance + tolerance * tolerance
    rational = Fraction(square).limit_denominator(_MAX_DENOMINATOR**2)
    if not rational or abs(float(rational) - square) > square_tolerance:
        return None
    # p/q under the root is the root of p*q over q; squares are taken out of p*q.
    radicand = rational.numerator * rational.denominator
    outside = _root_of_largest_square_divisor(radicand)
    factor = Fraction(outside, rational.denominator)
    inside = radicand // outside**2
    if inside > _MAX_UNDER_ROOT or factor.denominator > _MAX_DENOMINATOR:
        return None
    return _write_fraction(factor, rf"\sqrt{{{inside}}}")


def _root_of_largest_square_divisor(number: int) -> int:
    """Return the largest integer whose square divides a number: 6 for 72, which is 2 times 36."""
    largest = 1
    divisor = 2
    while divisor * divisor <= number and divisor <= _MAX_DIVISOR_TRIED:
        while number % (divisor * divisor) == 0:
            largest *= divisor
            number //= divisor * divisor
        # A factor that is left over once belongs to no square.
        if number % divisor == 0:
            number //= divisor
        divisor += 1
    return largest


def _write_fraction(factor: Fraction, symbol: str = "") -> str:
    """Return a fraction times a `symbol`, such as a root or pi; without one the fraction alone."""
    numerator = str(factor.numerator) if factor.numerator != 1 or not symbol else ""
    top = f"{numerator}{symbol}"
    return top if factor.denominator == 1 else rf"\frac{{{top}}}{{{factor.denominator}}}"
