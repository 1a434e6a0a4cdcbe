"""Arithmetic on values together with their derivatives (forward differentiation)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from adora_vl.geometry.layout import Vector
from adora_vl.geometry.quantities import Arithmetic, Function, sign_of_power


class Differentiated(NamedTuple):
    """The value of a quantity, and its derivatives by all unknowns of a figure, (unknowns,)."""

    value: float
    slope: Vector


def apply_function(quantity: Arithmetic, parts: Sequence[Differentiated]) -> Differentiated:
    """Do the arithmetic of a combined quantity on the values of its parts.

    Powers and logarithms are of the absolute value, as `Arithmetic` says. Raises what Python's
    arithmetic raises: `ZeroDivisionError`, `OverflowError` or `ValueError`.
    """
    if quantity.function in ("sin", "cos", "tan"):
        return _differentiate_trigonometric(quantity.function, parts[0])
    if quantity.function == "log":
        return _differentiate_logarithm(parts[0])
    if quantity.function == "+":
        slopes = [part.slope for part in parts]
        return Differentiated(value=sum(part.value for part in parts), slope=np.sum(slopes, axis=0))
    if quantity.function == "*":
        return _differentiate_product(parts)
    first_part = parts[0]
    second_part = parts[1]
    if quantity.function == "-":
        return Differentiated(
            value=first_part.value - second_part.value,
            slope=first_part.slope - second_part.slope,
        )
    if quantity.function == "/":
        return _differentiate_quotient(first_part, second_part)
    return _differentiate_power(first_part, second_part)


def _differentiate_trigonometric(function: Function, angle: Differentiated) -> Differentiated:
    """Return the sine, cosine or tangent of an angle in degrees, with its derivatives.

    By the chain rule the derivative of sin(a) is π/180 cos(a) a', since a is in degrees; `radians`
    multiplies by π/180.
    """
    radians = math.radians(angle.value)
    if function == "sin":
        value = math.sin(radians)
        slope = math.radians(math.cos(radians)) * angle.slope
    elif function == "cos":
        value = math.cos(radians)
        slope = -math.radians(math.sin(radians)) * angle.slope
    else:
        value = math.tan(radians)
        slope = math.radians(1 / math.cos(radians) ** 2) * angle.slope
    return Differentiated(value=value, slope=slope)


def _differentiate_logarithm(part: Differentiated) -> Differentiated:
    """Return the natural logarithm of an absolute value, with its derivatives: x'/x for ln|x|."""
    return Differentiated(value=math.log(abs(part.value)), slope=part.slope / part.value)


def _differentiate_product(parts: Sequence[Differentiated]) -> Differentiated:
    """Return the product of any number of parts with its derivatives.

    The product rule, (fg)' = f'g + fg', is applied part by part: f is the product so far, and g the
    next part.
    """
    value = 1.0
    slope = np.zeros_like(parts[0].slope)
    for part in parts:
        slope = slope * part.value + value * part.slope
        value *= part.value
    return Differentiated(value=value, slope=slope)


def _differentiate_quotient(
    numerator: Differentiated, denominator: Differentiated
) -> Differentiated:
    """Return the quotient of two parts with its derivatives: (x/y)' = x'/y - x y'/y²."""
    x, dx = numerator
    y, dy = denominator
    return Differentiated(value=x / y, slope=dx / y - (x / y**2) * dy)


def _differentiate_power(base: Differentiated, exponent: Differentiated) -> Differentiated:
    """Return a power of the base's absolute value with its derivatives, as `Arithmetic` says.

    It has the base's sign where the exponent is odd. The derivative of x^y is y x^(y-1) x' plus
    x^y ln(x) y'. At base 0 the derivatives are taken as 0: the formula would divide by zero there.
    """
    x = abs(base.value)
    y = exponent.value
    sign = sign_of_power(base.value, y)
    value = sign * x**y
    slope_base = sign * y * x ** (y - 1) * math.copysign(1.0, base.value) if x else 0.0
    slope_exponent = value * math.log(x) if x else 0.0
    slope = slope_base * base.slope + slope_exponent * exponent.slope
    return Differentiated(value=float(value), slope=slope)
