"""What equations say, and which sums two angles have that are called so."""

from __future__ import annotations

from collections.abc import Iterator

from adora_vl.geometry.expressions import number_of
from adora_vl.geometry.forms import Term
from adora_vl.geometry.measures import Measures, unit_of
from adora_vl.geometry.quantities import (
    Constant,
    Equal,
    Relation,
    minus,
    plus,
)
from adora_vl.geometry.relations import (
    opposite_right_angle,
    same_length,
)
from adora_vl.geometry.shapes import CORNERS, UnreadError, unwrapped
from adora_vl.geometry.triangle_facts import foot


def equals(measures: Measures, term: Term) -> Iterator[Relation]:
    """An equation; also a line that is called a height or a hypotenuse."""
    if len(term.arguments) != 2:
        raise UnreadError(f"{term} has not two sides")
    left, right = term.arguments
    if left.head in CORNERS or left.head in ("Shape", "Circle", "Polygon"):
        return  # it says which shape is called so, which the drawing knows
    if left.head == "Line" and right.head in ("AltitudeOf", "HeightOf"):
        yield from foot(
            measures,
            line=measures.drawing.segment(left),
            names=right.arguments[0].names,
            is_median=False,
        )
        return
    if left.head == "Line" and right.head == "HypotenuseOf" and len(right.arguments[0].names) == 3:
        yield from opposite_right_angle(left.names, right.arguments[0].names)
        return
    if left.head == "Line" and _is_side_of_isosceles(right):
        yield from _side_called(measures, left, right)
        return
    unit = unit_of(left)
    if unit == "length":
        unit = unit_of(right)
    left_value = measures.value(left)
    right_value = measures.value(right)
    if unit == "degrees" and _is_other_side(left, right):
        left_value = minus(Constant(360.0), left_value)
    yield Equal(left=left_value, right=right_value, unit=unit)


def _is_side_of_isosceles(term: Term) -> bool:
    """Whether a term is the base or a leg of an isosceles triangle with named corners."""
    if term.head not in ("BaseOf", "LegOf") or len(term.arguments) != 1:
        return False
    shape = term.arguments[0]
    return shape.head == "Isosceles" and len(unwrapped(shape).names) == 3


def _side_called(measures: Measures, line: Term, role: Term) -> Iterator[Relation]:
    """A side of an isosceles triangle is called its base, or one of its legs.

    One leg says nothing yet; the second one says that it is as long as the first. Raises
    `UnreadError` for a segment that is no side.
    """
    corners = unwrapped(role.arguments[0]).names
    ends = measures.drawing.segment(line)
    if not set(ends) <= set(corners):
        raise UnreadError(f"{''.join(ends)} is no side of {''.join(corners)}")
    if role.head == "BaseOf":
        apex = next(name for name in corners if name not in ends)
        yield same_length(measures, (apex, ends[0]), (apex, ends[1]))
        return
    legs = [
        term.arguments[0].names
        for term in measures.drawing.terms
        if term.is_equation and term.arguments[1] == role
    ]
    for leg in legs:
        if set(leg) != set(ends):
            yield same_length(measures, ends, leg)


def angle_sum(measures: Measures, term: Term) -> Iterator[Relation]:
    """Two angles are supplementary, 180 degrees together, or complementary, 90."""
    total = 180.0 if term.head == "Supplementary" else 90.0
    angles = [measures.value(angle) for angle in term.arguments]
    if len(angles) != 2:
        raise UnreadError(f"{term} has not two angles")
    yield Equal(left=plus(*angles), right=Constant(total), unit="degrees")


def _is_other_side(left: Term, right: Term) -> bool:
    """Whether a number over 180 for an angle or an arc of two letters means the other side."""
    size = number_of(right.head) if not right.arguments else None
    if size is None or size <= 180:
        return False
    inner = left.arguments[0] if left.head == "MeasureOf" and left.arguments else left
    if inner.head == "Angle":
        return len(inner.names) == 3 or inner.names[0].isupper()
    return inner.head == "Arc" and len(inner.names) == 2
