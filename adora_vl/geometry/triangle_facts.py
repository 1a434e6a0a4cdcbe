"""What medians, altitudes, midsegments and centres of triangles say in primitives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from adora_vl.geometry.logic_form import Term
from adora_vl.geometry.quantities import (
    Mean,
    Parallel,
    Perpendicular,
    Relation,
)
from adora_vl.geometry.relations import (
    collinear,
    opposite_right_angle,
    point_of_term,
    require_four,
    same_angle,
)
from adora_vl.geometry.shapes import UnreadError
from adora_vl.geometry.term_reader import TermReader


def median(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say what a median or an altitude is, as `IsMedianOf(Line(A, M), Triangle(A, B, C))` does.

    It goes from a corner of the triangle to the opposite side. The median of a trapezoid joins the
    middles of the legs instead. Where the fact does not name the corners, the picture shows the
    triangle or trapezoid.
    """
    drawing = term_reader.drawing
    line, shape = term.arguments
    ends = drawing.ends_of_line(line)
    corners: list[str] = []
    if len(shape.names) > 2 or shape.head == "Trapezoid":
        corners = drawing.corners_of_shape(shape)
    if len(corners) == 4:
        yield from _trapezoid_midsegment(term_reader, ends, corners)
        return
    yield from foot_relations(
        term_reader, line=ends, corners=corners, is_median=term.head == "IsMedianOf"
    )


def midsegment(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say that a line joins the middles of two sides, or of the legs of a trapezoid.

    The fact is `IsMidsegmentOf(Line(D, E), Triangle(A, B, C))`.
    """
    line = term_reader.drawing.ends_of_line(term.arguments[0])
    names = term_reader.drawing.corners_of_shape(term.arguments[1])
    if len(names) == 4:
        yield from _trapezoid_midsegment(term_reader, line, names)
        return
    for point in line:
        yield Mean(point=point, points=term_reader.drawing.side_with(point, names))


def _trapezoid_midsegment(
    term_reader: TermReader, line: tuple[str, str], corners: Sequence[str]
) -> Iterator[Relation]:
    """Say that the midsegment of a trapezoid joins the middles of its legs.

    `corners` are those of the trapezoid, whose bases are parallel. The picture shows which end
    lies on which leg. Without places the first end of the line lies on the leg b-c.
    """
    a, b, c, d = require_four(term_reader.drawing.with_base_first(corners))
    yield Parallel(a=a, b=b, c=d, d=c)
    if set(line) <= term_reader.drawing.places.keys():
        for point in line:
            yield Mean(point=point, points=term_reader.drawing.side_with(point, corners))
        return
    yield Mean(point=line[0], points=(b, c))
    yield Mean(point=line[1], points=(d, a))


def foot_relations(
    term_reader: TermReader, line: tuple[str, str], corners: Sequence[str], *, is_median: bool
) -> Iterator[Relation]:
    """Say where a line from a corner of a triangle meets the opposite side.

    It goes to the middle of that side, or is perpendicular to it.

    Args:
        term_reader: makes the quantities.
        line: the two ends of the line.
        corners: the corners of the triangle; empty where the form does not name it.
        is_median: whether the line is a median; else it is an altitude.

    Raises:
        UnreadError: neither the triangle nor the picture shows on which side the line ends.
    """
    tops = [name for name in line if name in corners]
    feet = [name for name in line if name not in corners]
    base = [name for name in corners if name not in line]
    # The line goes from one corner of the triangle to a point on the side of the two others.
    if len(corners) == 3 and len(tops) == 1 and len(base) == 2:
        yield collinear(feet[0], base[0], base[1])
        yield _foot_relation(line, feet[0], (base[0], base[1]), is_median=is_median)
        return
    # Without a triangle the foot is the end that lies within another line of the picture.
    for top, foot_point in (line, line[::-1]):
        for drawn_line in term_reader.drawing.all_lines:
            if foot_point in drawn_line[1:-1] and top not in drawn_line:
                position = drawn_line.index(foot_point)
                base_ends = (drawn_line[position - 1], drawn_line[position + 1])
                yield _foot_relation((top, foot_point), foot_point, base_ends, is_median=is_median)
                return
    raise UnreadError(f"the form does not say where {''.join(line)} stands")


def _foot_relation(
    line: tuple[str, str], foot_point: str, base: tuple[str, str], *, is_median: bool
) -> Relation:
    """Say that a line's foot is the middle of a base, or that the line is perpendicular to it.

    `foot_point` is the end of the line on the base, and `base` has the two points beside it.
    """
    if is_median:
        return Mean(point=foot_point, points=base)
    return Perpendicular(a=line[0], b=line[1], c=base[0], d=base[1])


def centroid(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say that a point is the mean of the corners: `IsCentroidOf(Point(G), Triangle(A, B, C))`.

    A drawn line from a corner through the point ends at the midpoint of the opposite side.
    """
    drawing = term_reader.drawing
    point = point_of_term(term_reader, term.arguments[0])
    names = drawing.corners_of_shape(term.arguments[1])
    yield Mean(point=point, points=tuple(names))
    for corner in names:
        ends = [name for name in names if name != corner]
        for line in drawing.all_lines:
            if corner not in line or point not in line:
                continue
            for foot in line:
                if foot not in names and drawing.are_on_one_line((foot, *ends)):
                    yield Mean(point=foot, points=tuple(ends))


def incenter(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say that a point lies on the bisectors of all angles of a triangle.

    The fact is `IsIncenterOf(Point(I), Triangle(A, B, C))`. With `Angle(A, B, C)` in place of the
    triangle the point lies on the bisector of that angle alone.
    """
    point = point_of_term(term_reader, term.arguments[0])
    names = term.arguments[1].names
    if term.arguments[1].head == "Angle" and len(names) == 3:
        yield same_angle(term_reader, (names[0], names[1], point), (point, names[1], names[2]))
        return
    names = term_reader.drawing.corners_of_shape(term.arguments[1])
    for i in range(3):
        corner = names[i - 1]
        angle_before = (names[i - 2], corner, point)
        angle_behind = (point, corner, names[i])
        yield same_angle(term_reader, angle_before, angle_behind)


def orthocenter(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say that a point lies on two altitudes of a triangle, and so on the third.

    The fact is `IsOrthocenterOf(Point(H), Triangle(A, B, C))`.
    """
    point = point_of_term(term_reader, term.arguments[0])
    a, b, c = term_reader.drawing.corners_of_shape(term.arguments[1])[:3]
    yield Perpendicular(a=point, b=a, c=b, d=c)
    yield Perpendicular(a=point, b=b, c=a, d=c)


def hypotenuse(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say that a side is a hypotenuse, as `IsHypotenuseOf(Line(A, B), Triangle(A, B, C))` does."""
    yield from opposite_right_angle(
        term.arguments[0].names, term_reader.drawing.corners_of_shape(term.arguments[1])
    )
