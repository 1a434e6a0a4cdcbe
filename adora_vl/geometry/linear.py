"""Equations between quantities that are linear in the atoms, so that all are one matrix product."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from adora_vl.geometry.layout import Vector
from adora_vl.geometry.quantities import Arithmetic, Quantity, constant_of


class LinearSum(NamedTuple):
    """A quantity as a sum of atoms times factors, and a constant.

    `factors` has one number for each atom of the figure, shape (atoms,).
    """

    factors: Vector
    constant: float


def linear_sum(quantity: Quantity, row_by_atom: Mapping[Quantity, int]) -> LinearSum | None:
    """Write a quantity as a sum over all atoms; None where it is not linear in them."""
    factors = np.zeros(len(row_by_atom))
    constant = _add_quantity(quantity, factor=1.0, factors=factors, row_by_atom=row_by_atom)
    if constant is None:
        return None
    return LinearSum(factors=factors, constant=constant)


def _add_quantity(
    quantity: Quantity, factor: float, factors: Vector, row_by_atom: Mapping[Quantity, int]
) -> float | None:
    """Add a quantity times a factor to the factors of the atoms in it.

    Returns the constant that is left beside the atoms; None where the quantity is not linear. The
    factors are of no use then.
    """
    constant = constant_of(quantity)
    if constant is not None:
        return factor * constant
    if not isinstance(quantity, Arithmetic):
        factors[row_by_atom[quantity]] += factor
        return 0.0
    if quantity.function in ("+", "-"):
        return _add_sum(quantity, factor, factors=factors, row_by_atom=row_by_atom)
    if quantity.function == "*":
        constants = [constant_of(part) for part in quantity.parts]
        numbers = [number for number in constants if number is not None]
        variable_parts = [
            part for part, number in zip(quantity.parts, constants, strict=True) if number is None
        ]
        # A product of two atoms is not linear.
        if len(variable_parts) == 1:
            product = factor * math.prod(numbers)
            return _add_quantity(
                variable_parts[0], product, factors=factors, row_by_atom=row_by_atom
            )
    if quantity.function == "/":
        divisor = constant_of(quantity.parts[1])
        if divisor:
            quotient = factor / divisor
            return _add_quantity(
                quantity.parts[0], quotient, factors=factors, row_by_atom=row_by_atom
            )
    return None


def _add_sum(
    quantity: Arithmetic, factor: float, factors: Vector, row_by_atom: Mapping[Quantity, int]
) -> float | None:
    """Add a sum or a difference, as `_add_quantity` does."""
    total = 0.0
    for number, part in enumerate(quantity.parts):
        is_subtracted = quantity.function == "-" and number == 1
        sign = -1.0 if is_subtracted else 1.0
        constant = _add_quantity(part, sign * factor, factors=factors, row_by_atom=row_by_atom)
        if constant is None:
            return None
        total += constant
    return total
