"""What facts of points and lines say in primitives: on, parallel, midpoint, bisector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from adora_vl.geometry.drawing import Drawing
from adora_vl.geometry.logic_form import Term
from adora_vl.geometry.quantities import (
    Constant,
    Equal,
    Mean,
    Parallel,
    Perpendicular,
    Relation,
    over,
)
from adora_vl.geometry.relations import (
    collinear,
    point_of_term,
    right_angle_at,
    same_angle,
    same_length,
)
from adora_vl.geometry.shapes import UnreadError
from adora_vl.geometry.term_reader import TermReader

_MAX_DIFFERENCE_OF_HALVES = 0.12  # share by which two halves may differ and still look like halves


def on_line(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say that a point lies on a line, as the fact `PointLiesOnLine(D, Line(A, B))` does.

    The point is collinear with both ends. Nothing is said of a point that is an end itself.
    """
    point = term_reader.drawing.require_point(term.names[0])
    start, end = term_reader.drawing.ends_of_line(term.arguments[1])
    if point not in (start, end):
        yield collinear(point, start, end)


def perpendicular(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say that two lines are perpendicular, as `Perpendicular(Line(A, B), Line(C, D))` does."""
    a, b = term_reader.drawing.ends_of_line(term.arguments[0])
    c, d = term_reader.drawing.ends_of_line(term.arguments[1])
    yield Perpendicular(a=a, b=b, c=c, d=d)


def parallel(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say that lines are parallel to the first one, as `Parallel(Line(A, B), Line(C, D))` does.

    Lines without names in the picture, as in `Parallel(Line(m), Line(n))`, are the drawn lines that
    look most parallel. Raises `UnreadError` where only some of the lines are unknown.
    """
    try:
        lines = [term_reader.drawing.ends_of_line(line) for line in term.arguments]
    except UnreadError:
        if not all(line.head == "Line" and len(line.names) == 1 for line in term.arguments):
            raise
        lines = term_reader.drawing.most_parallel_lines(len(term.arguments))
    for line in lines[1:]:
        yield Parallel(a=lines[0][0], b=lines[0][1], c=line[0], d=line[1])


def intersect(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say that lines meet in a point, as `IntersectAt(Line(A, B), Line(C, D), Point(E))` does.

    The point is collinear with the two ends of each line.
    """
    point = term_reader.drawing.require_point(term.arguments[-1].names[0])
    for line in term.arguments[:-1]:
        if line.head == "Line" and len(line.names) == 2 and point not in line.names:
            yield collinear(point, line.names[0], line.names[1])


def midpoint(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say that a point is a midpoint, as the fact `IsMidpointOf(Point(M), Line(A, B))` does.

    In place of the line may stand `LegOf(...)` or `SideOf(...)` with a shape. This means the side
    of the shape on which the point lies. Raises `UnreadError` for anything else.
    """
    point = point_of_term(term_reader, term.arguments[0])
    target = term.arguments[1]
    if target.head == "Line" and len(target.names) == 2:
        yield Mean(point=point, points=term_reader.drawing.ends_of_line(target))
    elif target.head in ("LegOf", "SideOf"):
        names = term_reader.drawing.corners_of_shape(target.arguments[0])
        yield Mean(point=point, points=term_reader.drawing.side_with(point, names))
    else:
        raise UnreadError(f"the form does not say of which segment {point} is the midpoint")


def right_angle(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say that an angle is right, as the fact `RightAngle(Angle(A, B, C))` does."""
    first, corner, last = term_reader.drawing.points_of_angle(term.arguments[0])
    yield right_angle_at(corner, first, last)


def bisects(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say that a line halves a segment or an angle: `BisectsAngle(Line(B, D), Angle(A, B, C))`.

    A segment is halved where the line meets it. An angle may be named by three points, by its
    corner alone, or by a triangle in which the line begins at one corner.

    Raises `UnreadError` where the form does not say where the lines meet, or the line does not
    begin at the corner of the angle.
    """
    drawing = term_reader.drawing
    line = drawing.ends_of_line(term.arguments[0])
    target = term.arguments[1]
    if target.head == "Line" and len(target.names) == 2:
        middles = [name for name in line if drawing.are_on_one_line((name, *target.names))]
        if not middles:
            raise UnreadError(
                f"the form does not say where {''.join(line)} meets {''.join(target.names)}"
            )
        yield Mean(point=middles[0], points=drawing.ends_of_line(target))
        return
    angle = _bisected_angle(drawing, term, line)
    corner = angle[1]
    far_ends = [name for name in line if name != corner]
    if len(far_ends) != 1:
        raise UnreadError(f"{''.join(line)} does not begin at {corner}")
    (far_end,) = far_ends
    first = angle[0]
    last = angle[2]
    yield same_angle(term_reader, (first, corner, far_end), (far_end, corner, last))
    if not drawing.places:
        # Two equal angles alone would also allow a line on the opposite side of the corner, outside
        # of the angle. A picture excludes that; without one each half is said to be half the angle.
        half = over(term_reader.angle_between(first, corner, last), Constant(2.0))
        angle_at_line = term_reader.angle_between(first, corner, far_end)
        yield Equal(left=angle_at_line, right=half, unit="degrees")


def _bisected_angle(drawing: Drawing, term: Term, line: tuple[str, str]) -> Sequence[str]:
    """Return the three points of the angle that a line bisects, with the corner in the middle.

    `term` is the fact, and `line` has the two ends of the bisector. The angle may be named by its
    points, by its corner alone, by `$` for the corner with most drawn lines, or by a triangle.

    Raises `UnreadError` for a shape that does not have one end of the line as its corner.
    """
    target = term.arguments[1]
    names = target.names
    if target.head != "Angle":
        if len(names) != 3 or len(set(names) & set(line)) != 1:
            raise UnreadError(f"{term} is no bisector that is known")
        corner = next(name for name in names if name in line)
        first, last = [name for name in names if name != corner]
        return first, corner, last
    if names == ["$"]:
        names = [max(line, key=lambda name: len(drawing.neighbours.get(name, ())))]
    if len(names) == 1:
        (corner,) = names
        inner_end = next(name for name in line if name != corner)
        return drawing.angle_around(corner, inner_end)
    return names


def perpendicular_bisector(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say that a line is the perpendicular bisector of a segment, or of all sides of a triangle.

    - `IsPerpendicularBisectorOf(Line(A, B), Line(C, D))`: AB is perpendicular to CD, and A is as
      far from C as from D.
    - With a triangle in place of `Line(C, D)` the perpendicular bisectors of its sides meet in the
      point that a fact `IntersectAt` names. That point is equally far from all corners.

    Raises `UnreadError` where no fact names that point.
    """
    names = term.arguments[1].names
    if term.arguments[1].head == "Triangle" and len(names) == 3:
        yield from _bisectors_meet(term_reader, corners=names)
        return
    start, end = term_reader.drawing.ends_of_line(term.arguments[0])
    if len(names) != 2:
        raise UnreadError(
            "the form does not say of which segment the line is the perpendicular bisector"
        )
    yield Perpendicular(a=start, b=end, c=names[0], d=names[1])
    yield same_length(term_reader, (start, names[0]), (start, names[1]))


def _bisectors_meet(term_reader: TermReader, corners: Sequence[str]) -> Iterator[Relation]:
    """Say that the perpendicular bisectors of a triangle meet where a fact `IntersectAt` says.

    That point is equally far from all corners. Raises `UnreadError` where no fact names it.
    """
    meeting_points = [
        fact.arguments[-1].names[0]
        for fact in term_reader.drawing.terms
        if fact.head == "IntersectAt" and fact.arguments[-1].names
    ]
    if not meeting_points:
        raise UnreadError("the form does not say where the perpendicular bisectors meet")
    centre = meeting_points[0]
    for i in range(3):
        yield same_length(term_reader, (centre, corners[i]), (centre, corners[i - 1]))
        yield from _midpoint_of_drawn_foot(
            term_reader.drawing, start=corners[i], end=corners[i - 1], corners=corners
        )


def _midpoint_of_drawn_foot(
    drawing: Drawing, start: str, end: str, corners: Sequence[str]
) -> Iterator[Relation]:
    """Say of the drawn point that looks like the midpoint of a side that it is the midpoint.

    The perpendicular bisector of the side is drawn through that point. The side goes from `start`
    to `end`. `corners` are the corners of the triangle, which are passed over. Nothing is said
    where no point looks like the midpoint.
    """
    places = drawing.places
    # Each point on the side, with the share by which the parts before and behind it differ.
    differences: list[tuple[float, str]] = []
    for line in drawing.drawn_lines:
        if start in line and end in line:
            for point in line:
                if point not in corners:
                    first_half = abs(places[point] - places[start])
                    second_half = max(abs(places[point] - places[end]), 1e-9)
                    differences.append((abs(first_half / second_half - 1), point))
    if not differences:
        return
    least_difference, foot = min(differences)
    if least_difference < _MAX_DIFFERENCE_OF_HALVES:
        yield Mean(point=foot, points=(start, end))
