"""Quantities and relations: the few primitives that every fact of a diagram comes down to.

A quantity is a number that a figure has, such as a length or an angle. A relation is a condition on
a figure. Solver, angle chase and later checks all read these, so that a fact is understood once, in
`adora_vl.geometry.primitives`. Angles are in degrees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Unit = Literal["length", "area", "degrees", "plain"]
Function = Literal["+", "-", "*", "/", "^", "sin", "cos", "tan", "log"]


@dataclass(frozen=True)
class Constant:
    """A number; degrees where it is an angle."""

    value: float


@dataclass(frozen=True)
class Unknown:
    """A letter of the problem, a radius (`radius O`) or a numbered angle (`angle 1`)."""

    name: str


@dataclass(frozen=True)
class Distance:
    """The distance of two points, 0 or more."""

    start: str
    end: str


@dataclass(frozen=True)
class LineDistance:
    """How far a point is from a line, 0 or more."""

    point: str
    start: str
    end: str


@dataclass(frozen=True)
class Angle:
    """The angle at `corner`, from `first` to `last`.

    `turn` is 1 or -1 where the picture shows on which side `last` lies: against the clock or with
    it. The angle is then negative in a mirrored figure, so that a mirrored corner is no solution,
    and smooth at 0 and 180. With 0 it is from 0 to 180 on either side.
    """

    first: str
    corner: str
    last: str
    turn: int = 0


@dataclass(frozen=True)
class Sweep:
    """The angle at `corner` from `first` to `last` in one sense, from 0 to 360.

    The sense is against the clock where `turn` is 1, and with it where it is -1.
    """

    first: str
    corner: str
    last: str
    turn: int


@dataclass(frozen=True)
class Area:
    """The area of a polygon, 0 or more."""

    corners: tuple[str, ...]


@dataclass(frozen=True)
class Arithmetic:
    """Arithmetic on quantities.

    A power is computed of the absolute value of its base, since a search for a figure may pass
    through negative lengths on its way. Only an odd whole exponent keeps the sign of a negative
    base (`sign_of_power`).
    """

    function: Function
    parts: tuple[Quantity, ...]


Quantity = Constant | Unknown | Distance | LineDistance | Angle | Sweep | Area | Arithmetic


@dataclass(frozen=True)
class Equal:
    """Two quantities are equal; `unit` says how a difference between them is scaled."""

    left: Quantity
    right: Quantity
    unit: Unit


@dataclass(frozen=True)
class Parallel:
    """The line through `a` and `b` is parallel to that through `c` and `d`, or the same."""

    a: str
    b: str
    c: str
    d: str


@dataclass(frozen=True)
class Perpendicular:
    """The line through `a` and `b` is perpendicular to that through `c` and `d`."""

    a: str
    b: str
    c: str
    d: str


@dataclass(frozen=True)
class Mean:
    """A point is the mean of others: the midpoint of two, the centroid of three."""

    point: str
    points: tuple[str, ...]


@dataclass(frozen=True)
class Between:
    """A point of a line lies between two others, and on neither of them.

    It holds in a whole range of figures, so it never fixes anything.
    """

    point: str
    start: str
    end: str


Relation = Equal | Parallel | Perpendicular | Mean | Between


def plus(*parts: Quantity) -> Quantity:
    """Return the sum of one or more quantities."""
    return parts[0] if len(parts) == 1 else Arithmetic(function="+", parts=parts)


def minus(total: Quantity, part: Quantity) -> Quantity:
    """Return the first quantity without the second."""
    return Arithmetic(function="-", parts=(total, part))


def times(*parts: Quantity) -> Quantity:
    """Return the product of quantities."""
    return Arithmetic(function="*", parts=parts)


def over(numerator: Quantity, denominator: Quantity) -> Quantity:
    """Return the quotient of two quantities."""
    return Arithmetic(function="/", parts=(numerator, denominator))


def power(base: Quantity, exponent: float) -> Quantity:
    """Return a quantity to a constant exponent."""
    return Arithmetic(function="^", parts=(base, Constant(exponent)))


def atoms_of(quantity: Quantity) -> Iterator[Quantity]:
    """Yield the quantities that arithmetic is done on: AB and CD for `2 AB + CD`."""
    if isinstance(quantity, Arithmetic):
        for part in quantity.parts:
            yield from atoms_of(part)
    else:
        yield quantity


def sides_of_equation(relation: Relation) -> Iterator[Quantity]:
    """Yield the two sides of an equation; other relations have no quantities."""
    if isinstance(relation, Equal):
        yield relation.left
        yield relation.right


def points_in_quantity(quantity: Quantity) -> Iterator[str]:
    """Yield the points that a quantity is of."""
    for atom in atoms_of(quantity):
        if isinstance(atom, Area):
            yield from atom.corners
        elif isinstance(atom, Distance):
            yield from (atom.start, atom.end)
        elif isinstance(atom, LineDistance):
            yield from (atom.point, atom.start, atom.end)
        elif isinstance(atom, Angle | Sweep):
            yield from (atom.first, atom.corner, atom.last)


def points_in(relation: Relation) -> Iterator[str]:
    """Yield the points that a relation is about."""
    if isinstance(relation, Equal):
        yield from points_in_quantity(relation.left)
        yield from points_in_quantity(relation.right)
    elif isinstance(relation, Mean):
        yield from (relation.point, *relation.points)
    elif isinstance(relation, Between):
        yield from (relation.point, relation.start, relation.end)
    else:
        yield from (relation.a, relation.b, relation.c, relation.d)


def constant_of(quantity: Quantity) -> float | None:
    """Return the value of arithmetic on numbers alone.

    None where a letter, a length or another unknown stands in it, or where it has no value.
    """
    number = number_of_quantity(quantity)
    return None if number is None or math.isnan(number) else number


def number_of_quantity(quantity: Quantity) -> float | None:
    """Return the value of arithmetic on numbers alone; None with an unknown in it.

    It is NaN where the arithmetic has no value, as a division by zero.
    """
    if isinstance(quantity, Constant):
        return quantity.value
    if not isinstance(quantity, Arithmetic):
        return None
    values = [number_of_quantity(part) for part in quantity.parts]
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values):
        return None
    try:
        return _compute(quantity.function, numbers)
    except (ZeroDivisionError, OverflowError, ValueError):
        return math.nan


def _compute(function: Function, numbers: Sequence[float]) -> float:
    """Compute one operation on numbers. Raises what Python's arithmetic raises."""
    if function == "+":
        return math.fsum(numbers)
    if function == "*":
        return math.prod(numbers)
    if function == "-":
        return numbers[0] - numbers[1]
    if function == "/":
        return numbers[0] / numbers[1]
    if function == "^":
        return sign_of_power(numbers[0], numbers[1]) * math.pow(abs(numbers[0]), numbers[1])
    if function == "log":
        return math.log(abs(numbers[0]))
    functions = {"sin": math.sin, "cos": math.cos, "tan": math.tan}
    return functions[function](math.radians(numbers[0]))


def sign_of_power(base: float, exponent: float) -> float:
    """Return the sign of a power: -1 for a negative base with an odd whole exponent, else 1."""
    return -1.0 if base < 0 and exponent % 2 == 1 else 1.0


def has_no_real_power(base: Quantity, exponent: Quantity) -> bool:
    """Tell whether a power is a root of a negative number, as (-4)^0.5 is.

    Only powers of numbers are judged. With an unknown in it, as in `x^0.5`, the answer is no: `x`
    may be negative for a while as the search for a figure changes it, and positive at its end.
    """
    base_number = constant_of(base)
    exponent_number = constant_of(exponent)
    if base_number is None or exponent_number is None:
        return False
    return base_number < 0 and not exponent_number.is_integer()


def unit_of_quantity(quantity: Quantity) -> Unit:
    """Return what a quantity is measured in; letters and numbers are `plain`."""
    if isinstance(quantity, Distance | LineDistance):
        return "length"
    if isinstance(quantity, Area):
        return "area"
    if isinstance(quantity, Angle | Sweep):
        return "degrees"
    if isinstance(quantity, Unknown):
        if quantity.name.startswith("angle "):
            return "degrees"
        return "length" if quantity.name.startswith("radius ") else "plain"
    if isinstance(quantity, Arithmetic) and quantity.function in ("+", "-"):
        units = [unit_of_quantity(part) for part in quantity.parts]
        return next((unit for unit in units if unit != "plain"), "plain")
    return "plain"
