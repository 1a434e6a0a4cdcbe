"""What equations say, and which sums two angles have that are called so."""

from __future__ import annotations

from collections.abc import Iterator

from adora_vl.geometry.expressions import number_in_text
from adora_vl.geometry.logic_form import Term
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
from adora_vl.geometry.shapes import CORNER_COUNT_BY_SHAPE, UnreadError, unwrap_shape
from adora_vl.geometry.term_reader import TermReader, unit_of_term
from adora_vl.geometry.triangle_facts import foot_relations


def equals(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say that two sides of an equation are equal, as `Equals(LengthOf(Line(A, B)), 5)` does.

    The first rule that fits decides:

    1. `Equals(Circle(O), ...)` and other shapes: only a name, which the drawing knows; says nothing
    2. `Equals(Line(A, D), AltitudeOf(...))`: the line is an altitude
    3. `Equals(Line(A, B), HypotenuseOf(...))`: the angle opposite of it is right
    4. `Equals(Line(A, B), BaseOf(Isosceles(...)))`, or `LegOf`: which sides are equal
    5. any other equation: both sides are equal; a number over 180 for an angle means the other way
       round it

    Raises `UnreadError` unless there are two sides.
    """
    if len(term.arguments) != 2:
        raise UnreadError(f"{term} has not two sides")
    measure, size = term.arguments
    if measure.head in CORNER_COUNT_BY_SHAPE or measure.head in ("Shape", "Circle", "Polygon"):
        return  # it says which shape is called so, which the drawing knows
    if measure.head == "Line" and size.head in ("AltitudeOf", "HeightOf"):
        yield from foot_relations(
            term_reader,
            line=term_reader.drawing.ends_of_line(measure),
            corners=size.arguments[0].names,
            is_median=False,
        )
        return
    is_hypotenuse = size.head == "HypotenuseOf" and len(size.arguments[0].names) == 3
    if measure.head == "Line" and is_hypotenuse:
        yield from opposite_right_angle(measure.names, size.arguments[0].names)
        return
    if measure.head == "Line" and _is_side_of_isosceles(size):
        yield from _relations_of_called_side(term_reader, measure, size)
        return
    unit = unit_of_term(measure)
    if unit == "length":
        unit = unit_of_term(size)
    value = term_reader.quantity(measure)
    size_value = term_reader.quantity(size)
    goes_other_way = unit == "degrees" and (
        _means_other_side(measure, size) or _is_shorter_arc(term_reader, term)
    )
    if goes_other_way:
        value = minus(Constant(360.0), value)
    yield Equal(left=value, right=size_value, unit=unit)


def _is_side_of_isosceles(term: Term) -> bool:
    """Tell whether a term is the base or a leg of an isosceles triangle with named corners."""
    if term.head not in ("BaseOf", "LegOf") or len(term.arguments) != 1:
        return False
    shape = term.arguments[0]
    return shape.head == "Isosceles" and len(unwrap_shape(shape).names) == 3


def _relations_of_called_side(
    term_reader: TermReader, line: Term, role: Term
) -> Iterator[Relation]:
    """Say that a side of an isosceles triangle is called its base, or one of its legs.

    The term `role` is `BaseOf(Isosceles(...))` or `LegOf(Isosceles(...))`. One leg says nothing
    yet; the second one says that it is as long as the first. Raises `UnreadError` for a segment
    that is no side.
    """
    corners = unwrap_shape(role.arguments[0]).names
    ends = term_reader.drawing.ends_of_line(line)
    if not set(ends) <= set(corners):
        raise UnreadError(f"{''.join(ends)} is no side of {''.join(corners)}")
    if role.head == "BaseOf":
        apex = next(name for name in corners if name not in ends)
        yield same_length(term_reader, (apex, ends[0]), (apex, ends[1]))
        return
    legs = [
        term.arguments[0].names
        for term in term_reader.drawing.terms
        if term.is_equation and term.arguments[1] == role
    ]
    for leg in legs:
        if set(leg) != set(ends):
            yield same_length(term_reader, ends, leg)


def angle_sum(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say that two angles are 180 degrees together (`Supplementary`) or 90 (`Complementary`)."""
    total = 180.0 if term.head == "Supplementary" else 90.0
    angles = [term_reader.quantity(angle) for angle in term.arguments]
    if len(angles) != 2:
        raise UnreadError(f"{term} has not two angles")
    yield Equal(left=plus(*angles), right=Constant(total), unit="degrees")


def _is_shorter_arc(term_reader: TermReader, term: Term) -> bool:
    """Tell whether an arc of three letters is the shorter way round, by its size alone.

    This is so for `Equals(MeasureOf(Arc(A, B, C)), 100)` where no picture shows the place of B. An
    arc whose size does not say so is the longer way round.
    """
    measure, size = term.arguments
    arc = _inside_measure(measure)
    if arc.head != "Arc" or len(arc.names) != 3 or arc.names[1] in term_reader.drawing.places:
        return False
    if arc.names[1] == term_reader.drawing.circle_of_arc(arc.names).centre:
        return False
    degrees = _number_of_term(size)
    return degrees is not None and degrees < 180


def _means_other_side(measure: Term, size: Term) -> bool:
    """Tell whether a number over 180 says that the other side of an angle or an arc is meant.

    Angles, and arcs with two letters, are measured as the shorter of the two ways round. So 240
    degrees are the longer way.
    """
    degrees = _number_of_term(size)
    if degrees is None or degrees <= 180:
        return False
    inner = _inside_measure(measure)
    if inner.head == "Angle":
        return len(inner.names) == 3 or inner.names[0].isupper()
    return inner.head == "Arc" and len(inner.names) == 2


def _inside_measure(term: Term) -> Term:
    """Return the angle or arc inside `MeasureOf(...)`, or the term itself."""
    return term.arguments[0] if term.head == "MeasureOf" and term.arguments else term


def _number_of_term(term: Term) -> float | None:
    """Return the number that a term writes, such as `5`; None for any other term."""
    return None if term.arguments else number_in_text(term.head)
