r"""Numbers with a bound on their error, and the functions that are computed with them.

Integers, decimals, fractions and their whole powers are exact `Fraction`s. Roots, `\pi`, logarithms
and angles are computed by mpmath with `PRECISION_BITS` bits. Each value carries a bound on its
absolute error, so that a comparison knows when cancellation has left too few digits to decide. The
size of every value is capped before it is computed, so that nothing here can hang.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from adora_vl.rewards.grammar import ParseError

# The numerator and the denominator of an exact value have at most this many bits. An inexact value
# is 0, or its magnitude is between 2^-1000 and 2^1000.
MAX_BITS = 1000
# The largest argument of a factorial, and the largest n in "n choose k".
MAX_FACTORIAL_ARGUMENT = 170
PRECISION_BITS = 320  # of mpmath's numbers, about 96 decimal digits
# A result of mpmath may be wrong in its last bit, and that of a power in its last ten. The bound on
# the rounding error allows 16 bits.
_SPARE_BITS = 16
# It is added to each error, so that the error of an inexact value never becomes 0.
_LEAST_ERROR = sys.float_info.min
# The largest imaginary part of an angle. The exponential of it, which bounds the slope of a sine,
# fits a float.
_MAX_IMAGINARY_ANGLE = MAX_BITS / 2
_LOGARITHM_ERROR = 2.0**-50  # bounds the rounding error of `math.log2` of a magnitude
# An error d of a sine near 1 makes an error of about sqrt(2 d) in the angle. The factor 8 is well
# over that sqrt(2).
_STEEP_ERROR_FACTOR = 8
# First-order error bounds are doubled, which covers the terms of higher order.
_HIGHER_ORDER_FACTOR = 2

Value = Any  # a Fraction, or mpmath's mpf or mpc, which have no types


@dataclass(frozen=True)
class NumberWithError:
    """A value and a bound on its absolute error, which is 0 for a fraction."""

    value: Value
    error: float = 0.0
    is_unevaluated: bool = False
    r"""Whether a rational number is written as arithmetic still to be done.

    Examples are `180-40`, `(180-40)/2` and `\sqrt{3^2+4^2}`.
    """
    last_digit_growth: Value | None = None
    """How much the value grows with one unit in the last place of its long decimal.

    It is 0.0000001 for `1.0471976`. A long decimal has six digits or more, so it may stand for a
    value with more digits. None if the value is written without one, or with several.
    """

    @property
    def is_exact(self) -> bool:
        """Whether the value is a fraction."""
        return isinstance(self.value, Fraction)

    @property
    def is_real(self) -> bool:
        """Whether the value has no imaginary part."""
        return self.is_exact or not isinstance(self.value, _mpmath_context().mpc)

    @property
    def magnitude(self) -> float:
        """The absolute value; infinite where a float cannot hold it."""
        parts = complex(self.value)
        return math.hypot(parts.real, parts.imag)  # abs() would raise OverflowError

    @property
    def least_magnitude(self) -> float:
        """A lower bound of the absolute value; 0 or less if the value can be 0 within its error."""
        return self.magnitude - self.error

    def as_mpmath(self) -> NumberWithError:
        """Return the same value as a number of mpmath."""
        if not self.is_exact:
            return self
        return _rounded_result(_mpmath_context().mpf(self.value.numerator) / self.value.denominator)

    def __neg__(self) -> NumberWithError:
        return NumberWithError(-self.value, self.error, last_digit_growth=self.last_digit_growth)

    def __add__(self, addend: NumberWithError) -> NumberWithError:
        """Return the sum; the errors add up."""
        if self.is_exact and addend.is_exact:
            return _exact_result(self.value + addend.value)
        first = self.as_mpmath()
        second = addend.as_mpmath()
        return _rounded_result(first.value + second.value, first.error + second.error)

    def __sub__(self, subtrahend: NumberWithError) -> NumberWithError:
        """Return the difference; the errors add up."""
        return self + -subtrahend

    def __mul__(self, factor: NumberWithError) -> NumberWithError:
        """Return the product; its error follows from `(a + da)(b + db) - ab`."""
        if self.is_exact and factor.is_exact:
            return _exact_result(self.value * factor.value)
        # An exact 0 makes the product 0, however large the error of the other factor is.
        if any(number.is_exact and number.value == 0 for number in (self, factor)):
            return NumberWithError(Fraction(0))
        first = self.as_mpmath()
        second = factor.as_mpmath()
        error = (
            first.magnitude * second.error
            + second.magnitude * first.error
            + first.error * second.error
        )
        return _rounded_result(first.value * second.value, error)

    def __truediv__(self, divisor: NumberWithError) -> NumberWithError:
        """Return the quotient.

        Raises `ParseError("undefined")` where the divisor is 0 within its error.
        """
        if divisor.least_magnitude <= 0:
            raise ParseError("undefined")
        if self.is_exact and divisor.is_exact:
            return _exact_result(self.value / divisor.value)
        numerator = self.as_mpmath()
        denominator = divisor.as_mpmath()
        quotient = numerator.value / denominator.value
        # With q = a / b the error is (a + da) / (b + db) - q = (da - q db) / (b + db).
        error_times_denominator = (
            numerator.error + NumberWithError(quotient).magnitude * denominator.error
        )
        return _rounded_result(quotient, error_times_denominator / denominator.least_magnitude)


ONE = NumberWithError(Fraction(1))
_HALF_TURN = NumberWithError(Fraction(180))  # in degrees

_context_cache: dict[str, Any] = {}


def _mpmath_context() -> Any:
    """Return the context of mpmath that all threads share.

    The first call creates the context. mpmath caches the digits of pi and ln 2, and computing more
    digits is not safe in several threads. So the first call computes as many digits of both as the
    largest argument can need.
    """
    if "context" in _context_cache:
        return _context_cache["context"]
    from mpmath import MPContext

    context = MPContext()
    context.prec = 2 * (MAX_BITS + PRECISION_BITS)
    _ = context.pi + context.ln2  # asking for them computes their digits
    context.prec = PRECISION_BITS
    # If two threads get here at once, both use the context of the first.
    return _context_cache.setdefault("context", context)


def _exact_result(value: Fraction) -> NumberWithError:
    """Return an exact result, or a number of mpmath where the fraction has too many digits."""
    number = NumberWithError(value)
    return number if _size_in_bits(value) <= MAX_BITS else number.as_mpmath()


def _size_in_bits(value: Fraction) -> int:
    """Return the bits of the numerator or denominator, whichever has more: 5 for 3/16."""
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _rounded_result(value: Value, error: float = 0.0) -> NumberWithError:
    """Return the result of one operation of mpmath, with a bound on its error.

    `error` bounds the part of the error that comes from the operands; this function adds the
    rounding error of the operation. An imaginary part that is not larger than the error counts as
    0. Raises `ParseError("too_large")` unless the value is 0 or its magnitude is between
    2^-`MAX_BITS` and 2^`MAX_BITS`.
    """
    magnitude = NumberWithError(value).magnitude
    # The first summand is the rounding error of mpmath. A float may be too small to hold it, so the
    # least error keeps the bound above 0.
    error += magnitude * 2.0 ** (_SPARE_BITS - PRECISION_BITS) + _LEAST_ERROR
    is_small_enough = magnitude + error < 2.0**MAX_BITS  # false for a NaN too, which is refused
    is_too_near_zero = value != 0 and magnitude < 2.0**-MAX_BITS
    if not is_small_enough or is_too_near_zero:
        raise ParseError("too_large")
    if isinstance(value, _mpmath_context().mpc) and abs(float(value.imag)) <= error:
        value = value.real
    return NumberWithError(value, error)


def pi() -> NumberWithError:
    """Return the number pi."""
    # The plus sign makes a number of mpmath's lazy constant.
    return _rounded_result(+_mpmath_context().pi)


def _exponential(number: NumberWithError) -> NumberWithError:
    """Return `e` to the power of a value.

    Raises `ParseError("too_large")` if the result would be too large or too small, or if the
    exponent has an error over 1, so that not even the size of the result is known.
    """
    number = number.as_mpmath()
    if abs(float(number.value.real)) > MAX_BITS or number.error > 1:
        raise ParseError("too_large")
    value = _mpmath_context().exp(number.value)
    return _rounded_result(
        value, _HIGHER_ORDER_FACTOR * NumberWithError(value).magnitude * number.error
    )


def logarithm(number: NumberWithError) -> NumberWithError:
    """Return the principal value of the logarithm. Raises `ParseError("undefined")` for 0."""
    if number.least_magnitude <= 0:
        raise ParseError("undefined")
    number = number.as_mpmath()
    return _rounded_result(
        _mpmath_context().ln(number.value), number.error / number.least_magnitude
    )


def power_of(base: NumberWithError, exponent: NumberWithError) -> NumberWithError:
    """Return `base ** exponent`, the principal value.

    The size of the result is bounded before it is computed. Raises `ParseError`: `undefined` for
    0 to the power of 0 or less, and `too_large` for a result over `MAX_BITS`.
    """
    if base.least_magnitude <= 0:  # the base can be 0
        return _power_of_zero(base, exponent)
    if not exponent.is_exact:
        return _exponential(logarithm(base) * exponent)
    power: Fraction = exponent.value
    if base.is_exact and power.denominator == 1:
        # The exact power is computed only if its numerator and denominator stay short.
        result_bits = _size_in_bits(base.value) * abs(power)
        if result_bits <= MAX_BITS:
            return NumberWithError(Fraction(base.value ** int(power)))
    return _rounded_power(base.as_mpmath(), power)


def _rounded_power(base: NumberWithError, power: Fraction) -> NumberWithError:
    """Return `base ** power` as a number of mpmath, for a base that is not 0.

    Raises `ParseError("too_large")` if the result is over `MAX_BITS`, or if its relative error
    would be over 1.
    """
    absolute_power = abs(float(power))
    # The relative error of `base ** power` is `power` times the relative error of the base.
    relative_error = absolute_power * base.error / base.least_magnitude
    result_bits = absolute_power * (abs(math.log2(base.magnitude)) + _LOGARITHM_ERROR)
    # This rough bound only avoids a costly power; `_rounded_result` applies the exact limit.
    if result_bits > 2 * MAX_BITS:
        raise ParseError("too_large")
    if relative_error > 1:
        raise ParseError("too_large")
    if power.denominator == 1:
        value = base.value ** int(power)
    else:
        value = base.value ** (_mpmath_context().mpf(power.numerator) / power.denominator)
    return _rounded_result(
        value, _HIGHER_ORDER_FACTOR * NumberWithError(value).magnitude * relative_error
    )


def _power_of_zero(base: NumberWithError, exponent: NumberWithError) -> NumberWithError:
    """Return a power of a base that can be 0 within its error.

    The result is 0 as well. Its error is the largest value that the power can have: the largest
    possible base to the smallest or the largest possible exponent. Raises `ParseError`:
    `undefined` for an exponent that is not real or can be 0 or less, `too_large` for an error over
    `MAX_BITS`.
    """
    if not exponent.is_real or exponent.value - exponent.error <= 0:
        raise ParseError("undefined")
    if not base.error:
        return NumberWithError(Fraction(0))
    largest_base = base.magnitude + base.error
    least_exponent = float(exponent.value) - exponent.error
    largest_exponent = float(exponent.value) + exponent.error
    try:
        largest_power = max(
            math.pow(largest_base, least_exponent), math.pow(largest_base, largest_exponent)
        )
        # The factor 2 covers the rounding of the floats above.
        return _rounded_result(_mpmath_context().mpf(0), 2 * largest_power)
    except OverflowError:
        raise ParseError("too_large") from None


def principal_root(radicand: NumberWithError, degree: int) -> NumberWithError:
    """Return the principal root of a value.

    It is exact if the radicand is a perfect power: the square root of 4/9 is the fraction 2/3, and
    the square root of 2 is a number of mpmath.
    """
    value = radicand.value
    if radicand.is_exact and value >= 0:
        # The floats of both roots, rounded to integers, are the only candidate for an exact root.
        guess = Fraction(
            round(float(value.numerator) ** (1 / degree)),
            round(float(value.denominator) ** (1 / degree)),
        )
        if guess**degree == value:
            return NumberWithError(guess)
    return power_of(radicand, NumberWithError(Fraction(1, degree)))


def factorial_or_binomial(
    total: NumberWithError, chosen: NumberWithError | None = None
) -> NumberWithError:
    """Return the factorial of `total`, or the binomial coefficient "`total` choose `chosen`".

    For example, 5 gives 120, and 5 with 2 chosen gives 10. Raises `ParseError`: `undefined` for
    anything but natural numbers, `too_large` over `MAX_FACTORIAL_ARGUMENT`.
    """
    counts = [total] if chosen is None else [total, chosen]
    for number in counts:
        if not number.is_exact or number.value.denominator != 1 or number.value < 0:
            raise ParseError("undefined")
        if number.value > MAX_FACTORIAL_ARGUMENT:
            raise ParseError("too_large")
    if chosen is not None:
        return _exact_result(Fraction(math.comb(int(total.value), int(chosen.value))))
    return _exact_result(Fraction(math.factorial(int(total.value))))


def function_value(name: str, argument: NumberWithError, *, is_in_radians: bool) -> NumberWithError:
    """Return the value of a trigonometric function, of an inverse one, or of `ln`.

    An angle is in degrees unless `is_in_radians` is set, because the canonical text has no degree
    signs: `sin` of 30 is 0.5. An inverse function always gives degrees: `arcsin` of 0.5 is 30.
    """
    if name == "ln":
        return logarithm(argument)
    if name.startswith("arc"):
        return _inverse_function_in_radians(name, argument.as_mpmath()) * _HALF_TURN / pi()
    if is_in_radians:
        return _trigonometric_value(name, argument.as_mpmath())
    # Whole turns do not change the value. A small angle keeps the error of the product with pi
    # small.
    degrees = NumberWithError(argument.value % 360) if argument.is_exact else argument
    return _trigonometric_value(name, (degrees / _HALF_TURN * pi()).as_mpmath())


def _trigonometric_value(name: str, angle: NumberWithError) -> NumberWithError:
    r"""Return the sine, cosine, tangent or a reciprocal of one of them.

    `angle` is a number of mpmath in radians. It may be complex: two functions with `\sin\sqrt{x}`
    may be compared at a negative x. Raises `ParseError("too_large")` if the imaginary part is so
    large that the value would overflow, or if the error of the angle is over 1.
    """
    imaginary_size = abs(float(angle.value.imag))
    if imaginary_size > _MAX_IMAGINARY_ANGLE or angle.error > 1:
        raise ParseError("too_large")
    # The error of the angle is at most 1, and within that distance neither sine nor cosine has a
    # slope over this exponential.
    error = math.exp(imaginary_size + 1) * angle.error
    raw_cosine, raw_sine = _mpmath_context().cos_sin(angle.value)
    cosine = _rounded_result(raw_cosine, error)
    sine = _rounded_result(raw_sine, error)
    numerator, denominator = {
        "sin": (sine, ONE),
        "cos": (cosine, ONE),
        "tan": (sine, cosine),
        "sec": (ONE, cosine),
        "csc": (ONE, sine),
        "cot": (cosine, sine),
    }[name]
    return numerator / denominator


def _inverse_function_in_radians(name: str, argument: NumberWithError) -> NumberWithError:
    """Return the angle in radians whose sine, cosine or tangent is `argument`.

    `name` is `arcsin`, `arccos` or `arctan`. The error of the angle is the error of the argument z
    times the slope: 1/sqrt(1 - z^2) for arcsine and arccosine, 1/(1 + z^2) for arctangent.
    """
    squared = argument * argument
    if name == "arctan":
        slope_divisor = ONE + squared
        if slope_divisor.least_magnitude <= 0:
            raise ParseError("undefined")
        error = argument.error / slope_divisor.least_magnitude
        return _rounded_result(_mpmath_context().atan(argument.value), error)
    squared_slope_divisor = ONE - squared
    # Where z can be 1 or -1 the slope has no bound. There an error d of z makes an error of about
    # sqrt(2 d) in the angle.
    error = _STEEP_ERROR_FACTOR * math.sqrt(argument.error)
    if squared_slope_divisor.least_magnitude > 0:
        error = argument.error / math.sqrt(squared_slope_divisor.least_magnitude)
    if name == "arcsin":
        return _rounded_result(_mpmath_context().asin(argument.value), error)
    return _rounded_result(_mpmath_context().acos(argument.value), error)
