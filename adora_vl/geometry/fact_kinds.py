"""What kind of fact a relation is, as far as it matters for whether a claim says something new.

A claim that follows from given values by arithmetic says nothing new. What follows from a line, a
right angle or a circle has to be found out, so it may be new.
"""

from __future__ import annotations

from adora_vl.geometry.quantities import (
    Angle,
    Arithmetic,
    Constant,
    Distance,
    Equal,
    Parallel,
    Perpendicular,
    Quantity,
    Relation,
    Unknown,
    atoms_of,
    number_of_quantity,
    sides_of_equation,
)


def gives_value(relation: Relation) -> bool:
    """Tell whether a fact gives one name a number: `AB = 5`, and not `AB + BC = 5`."""
    sides = list(sides_of_equation(relation))
    has_number = any(number_of_quantity(side) is not None for side in sides)
    return has_number and any(not isinstance(side, Arithmetic) for side in sides)


def joins_names(relation: Equal) -> bool:
    """Tell whether a fact says that two names are equal: `AB = BC`, `angle 1 = angle ABC`."""
    return not isinstance(relation.left, Arithmetic) and not isinstance(relation.right, Arithmetic)


def gives_expression(relation: Relation) -> bool:
    """Tell whether a fact gives one name an expression of letters: `AB = 2x + 1`.

    Once the letters are known, the value of the name follows by arithmetic.
    """
    sides = list(sides_of_equation(relation))
    return any(
        not isinstance(side, Arithmetic | Unknown) and _has_letters_alone(partner)
        for side, partner in zip(sides, reversed(sides), strict=True)
    )


def _has_letters_alone(quantity: Quantity) -> bool:
    """Tell whether a quantity is made of letters and numbers, with a letter among them."""
    atoms = list(atoms_of(quantity))
    has_letter = any(isinstance(atom, Unknown) for atom in atoms)
    return has_letter and all(isinstance(atom, Unknown | Constant) for atom in atoms)


def is_collinear(relation: Relation) -> bool:
    """Tell whether a fact says that three points lie on one line."""
    return isinstance(relation, Parallel) and bool(
        {relation.a, relation.b} & {relation.c, relation.d}
    )


def names_angle(relation: Relation) -> bool:
    """Tell whether a fact only gives an angle its number in the picture: `angle 1 = angle ABC`."""
    sides = list(sides_of_equation(relation))
    numbers = [side for side in sides if isinstance(side, Unknown)]
    is_numbered = any(side.name.startswith("angle ") for side in numbers)
    return is_numbered and any(isinstance(side, Angle) for side in sides)


def is_radial(relation: Relation) -> bool:
    """Tell whether a fact says that a point lies on a circle."""
    sides = list(sides_of_equation(relation))
    return any(is_radius(side) for side in sides) and any(
        isinstance(side, Distance) for side in sides
    )


def is_radius(quantity: Quantity) -> bool:
    """Tell whether a quantity is the radius of a circle."""
    return isinstance(quantity, Unknown) and quantity.name.startswith("radius ")


def is_direction(relation: Relation) -> bool:
    """Tell whether a relation says that lines are parallel or perpendicular.

    It may also do so by an angle of 90 or 180 degrees.
    """
    if isinstance(relation, Parallel | Perpendicular):
        return True
    sides = list(sides_of_equation(relation))
    has_angle = any(isinstance(side, Angle) for side in sides)
    return has_angle and any(number_of_quantity(side) in (90.0, 180.0) for side in sides)
