"""Relations that the facts of several kinds come down to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from adora_vl.geometry.logic_form import Term
from adora_vl.geometry.quantities import (
    Equal,
    LineDistance,
    Parallel,
    Perpendicular,
    Relation,
)
from adora_vl.geometry.shapes import Circle, UnreadError
from adora_vl.geometry.term_reader import TermReader


def collinear(point: str, start: str, end: str) -> Parallel:
    """Say that three points lie on one line: the ways between them are parallel."""
    return Parallel(a=point, b=start, c=point, d=end)


def right_angle_at(corner: str, first: str, last: str) -> Perpendicular:
    """Say that the angle at a corner is right: the ways from it to the others are perpendicular."""
    return Perpendicular(a=corner, b=first, c=corner, d=last)


def opposite_right_angle(hypotenuse: Sequence[str], triangle: Sequence[str]) -> Iterator[Relation]:
    """Say that the corner of a triangle that is no end of the hypotenuse has a right angle."""
    corners = [name for name in triangle if name not in hypotenuse]
    if len(corners) == 1 and len(hypotenuse) == 2:
        yield right_angle_at(corners[0], hypotenuse[0], hypotenuse[1])


def same_length(term_reader: TermReader, first: Sequence[str], second: Sequence[str]) -> Relation:
    """Say that two distances are equal; each is named by its two points."""
    return Equal(
        left=term_reader.distance(*first), right=term_reader.distance(*second), unit="length"
    )


def same_angle(term_reader: TermReader, first: Sequence[str], second: Sequence[str]) -> Relation:
    """Say that two angles are equal, each named by three points with the corner in the middle."""
    return Equal(
        left=term_reader.angle_between(*first),
        right=term_reader.angle_between(*second),
        unit="degrees",
    )


def lies_on_circle(term_reader: TermReader, point: str, circle: Circle) -> Relation:
    """Say that a point's distance from the centre of a circle is the radius."""
    return Equal(
        left=term_reader.distance(point, circle.centre),
        right=term_reader.radius(circle),
        unit="length",
    )


def touches_line(term_reader: TermReader, circle: Circle, line: tuple[str, str]) -> Relation:
    """Say that a line touches a circle.

    It is perpendicular to the radius at the point that they share, else at the distance of a
    radius.
    """
    drawing = term_reader.drawing
    shared_points = [name for name in line if name in circle.points]
    if not shared_points:
        shared_points = [name for name in circle.points if drawing.are_on_one_line((name, *line))]
    if shared_points:
        touching_point = shared_points[0]
        far_end = next(name for name in line if name != touching_point)
        return Perpendicular(a=circle.centre, b=touching_point, c=touching_point, d=far_end)
    distance_to_line = LineDistance(point=circle.centre, start=line[0], end=line[1])
    return Equal(left=distance_to_line, right=term_reader.radius(circle), unit="length")


def point_of_term(term_reader: TermReader, term: Term) -> str:
    """Return the name of the point that a term is (`A`) or names (`Point(A)`)."""
    name = term.names[0] if term.arguments else term.head
    return term_reader.drawing.require_point(name)


def require_four(corners: Sequence[str]) -> tuple[str, str, str, str]:
    """Return the four corners of a shape. Raises `UnreadError` for another number."""
    if len(corners) != 4:
        raise UnreadError(f"{''.join(corners)} has not four corners")
    return corners[0], corners[1], corners[2], corners[3]
