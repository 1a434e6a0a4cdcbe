"""Quantities that are sums of parts times factors, as most equations of a figure are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from adora_vl.geometry.quantities import Arithmetic, Quantity, constant_of

# What a sum has a factor for: an atom such as a distance, or the name of a line's direction.
Part = TypeVar("Part")


@dataclass(frozen=True)
class LinearSum(Generic[Part]):
    """A constant plus parts, each times a factor."""

    constant: float = 0.0
    factors: Mapping[Part, float] = field(default_factory=dict)

    def plus(self, addend: LinearSum[Part], factor: float = 1.0) -> LinearSum[Part]:
        """Return this sum and a multiple of another."""
        factors = dict(self.factors)
        for part, part_factor in addend.factors.items():
            factors[part] = factors.get(part, 0.0) + factor * part_factor
        return LinearSum(constant=self.constant + factor * addend.constant, factors=factors)

    def minus(self, subtrahend: LinearSum[Part]) -> LinearSum[Part]:
        """Return this sum without another one."""
        return self.plus(subtrahend, factor=-1.0)

    def times(self, factor: float) -> LinearSum[Part]:
        """Return a multiple of this sum."""
        zero: LinearSum[Part] = LinearSum()
        return zero.plus(self, factor=factor)


class NotLinearError(ValueError):
    """A quantity is no sum of parts times factors."""


def linear_sum(
    quantity: Quantity, sum_of_atom: Callable[[Quantity], LinearSum[Part]]
) -> LinearSum[Part]:
    """Write a quantity as a sum: `2 AB + 3` is the constant 3 and the factor 2 for AB.

    `sum_of_atom` writes one atom, such as AB, as a sum. Raises `NotLinearError` for other
    arithmetic, such as a product of two atoms.
    """
    constant = constant_of(quantity)
    if constant is not None:
        return LinearSum(constant=constant)
    if not isinstance(quantity, Arithmetic):
        return sum_of_atom(quantity)
    if quantity.function not in ("+", "-", "*", "/"):
        raise NotLinearError
    parts = [linear_sum(part, sum_of_atom) for part in quantity.parts]
    if quantity.function == "+":
        total: LinearSum[Part] = LinearSum()
        for part in parts:
            total = total.plus(part)
        return total
    if quantity.function == "-":
        return parts[0].minus(parts[1])
    constants = [part.constant for part in parts if not part.factors]
    variable_parts = [part for part in parts if part.factors]
    if quantity.function == "*" and len(variable_parts) == 1:
        return variable_parts[0].times(math.prod(constants))
    if quantity.function == "/" and variable_parts == parts[:1] and constants[0] != 0:
        return parts[0].times(1 / constants[0])
    raise NotLinearError
