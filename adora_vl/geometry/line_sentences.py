"""What sentences of points, lines and angles say in logic form."""

from __future__ import annotations

from adora_vl.geometry.draft import (
    LogicFormDraft,
    SentenceError,
    make_term,
    polygon_kind,
    split_point_names,
)


def two_lines(draft: LogicFormDraft, a: str, b: str, relation: str, c: str, d: str) -> None:
    """Add that two lines are parallel or perpendicular: "AB is parallel to CD"."""
    draft.facts.append(
        make_term(relation.capitalize(), draft.draw_line(a, b), draft.draw_line(c, d))
    )


def parallel_bases(draft: LogicFormDraft, a: str, b: str, c: str, d: str) -> None:
    """Add that two sides are the bases of a trapezoid, which are parallel: "bases AB and CD"."""
    two_lines(draft, a, b, relation="parallel", c=c, d=d)


def perpendicular_at(draft: LogicFormDraft, a: str, b: str, c: str, d: str, at: str) -> None:
    """Add that two lines are perpendicular and meet in a point: "AB is perpendicular to CD at E".

    The point may be an end of either line.
    """
    for start, end in ((a, b), (c, d)):
        if at not in (start, end):
            draft.put_on_line(at, start, end)
    draft.facts.append(make_term("Perpendicular", draft.draw_line(a, b), draft.draw_line(c, d)))


def on_lines(draft: LogicFormDraft, points: str, start: str, end: str) -> None:
    """Add that several points lie on one segment: "D and E on AC"."""
    for point in split_point_names(points):
        draft.put_on_line(point, start, end)


def collinear(draft: LogicFormDraft, points: str) -> None:
    """Add that points lie on one line, in the order of their names: "A, B, C are collinear"."""
    names = split_point_names(points)
    for point in names[1:-1]:
        draft.put_on_line(point, names[0], names[-1])


def extended(draft: LogicFormDraft, start: str, end: str, beyond: str | None, point: str) -> None:
    """Add that a segment goes on to a point: "BC is extended to D".

    C then lies between B and D. `beyond` is the end beyond which the segment goes on; by default it
    is the second end.
    """
    near_end = beyond or end
    far_end = start if near_end == end else end
    draft.put_on_line(near_end, start=far_end, end=point)


def midpoint(draft: LogicFormDraft, point: str, start: str, end: str) -> None:
    """Add that a point is the midpoint of a segment: "M is the midpoint of AB"."""
    draft.put_on_line(point, start, end)
    draft.facts.append(
        make_term("IsMidpointOf", make_term("Point", point), make_term("Line", start, end))
    )


def two_midpoints(
    draft: LogicFormDraft, first: str, second: str, a: str, b: str, c: str, d: str
) -> None:
    """Add that two points are midpoints of two segments: "M and N are midpoints of AB and CD"."""
    midpoint(draft, point=first, start=a, end=b)
    midpoint(draft, point=second, start=c, end=d)


def meet(draft: LogicFormDraft, a: str, b: str, c: str, d: str, point: str) -> None:
    """Add that two lines meet in a point, which may be an end of either: "AC and BD meet at E"."""
    for start, end in ((a, b), (c, d)):
        if point not in (start, end):
            draft.put_on_line(point, start, end)


def meets_two_lines(
    draft: LogicFormDraft, line: str, first: str, near: str, second: str, far: str
) -> None:
    """Add that a line meets two others: "EF meets AB at G and CD at H".

    Its points are E, G, H and F in this order: `near`, where it meets the first of the others, is
    nearer to the end of the line that is named first.
    """
    start, end = split_point_names(line)
    for name, point in ((first, near), (second, far)):
        c, d = split_point_names(name)
        meet(draft, start, end, c, d, point)
    if near != start and far != end:
        draft.put_on_line(near, start, far)


def cut_two_lines(
    draft: LogicFormDraft,
    first: str,
    second: str,
    line: str,
    near: str,
    far: str,
    relation: str | None,
) -> None:
    """Add that a line meets two others: "parallel lines AB and CD are cut by EF at G and H".

    `relation` is there if the two others are parallel.
    """
    if relation is not None:
        a, b = split_point_names(first)
        c, d = split_point_names(second)
        two_lines(draft, a, b, relation="parallel", c=c, d=d)
    meets_two_lines(draft, line, first, near, second, far)


def diagonals_meet(
    draft: LogicFormDraft, point: str, kind: str | None = None, corner_names: str | None = None
) -> None:
    """Add that the diagonals of a quadrilateral meet in a point.

    Without `corner_names` it is the polygon that was named last. Its kind is a fact as well. Raises
    `SentenceError` where the polygon is no quadrilateral.
    """
    if corner_names is not None:
        draft.add_shape(kind or polygon_kind(corner_names), corner_names)
    corners = draft.last_polygon().names
    if len(corners) != 4:
        raise SentenceError("it does not say which diagonals are meant; name them")
    meet(draft, corners[0], corners[2], corners[1], corners[3], point)


def bisects_angle(draft: LogicFormDraft, start: str, end: str, angle_name: str) -> None:
    """Add that a line halves an angle: "BD bisects angle ABC".

    An angle may be named by its corner alone. Then it is the angle of the last polygon with this
    corner. Raises `SentenceError` for two points, or for more than three.
    """
    corners = split_point_names(angle_name)
    line = draft.draw_line(start, end)
    if len(corners) == 1 and corners[0] in (start, end) and draft.polygons:
        far_end = end if corners[0] == start else start
        corners = angle_of_polygon(draft, corner=corners[0], inside=far_end)
    if len(corners) == 3:
        draft.draw_line(corners[0], corners[1])
        draft.draw_line(corners[1], corners[2])
    elif len(corners) != 1:
        raise SentenceError(f"{angle_name} is no angle; write its three points")
    draft.facts.append(make_term("BisectsAngle", line, make_term("Angle", *corners)))


def angle_of_polygon(draft: LogicFormDraft, corner: str, inside: str) -> list[str]:
    """Return the angle of the last polygon with this corner, by three points.

    For example, the corner B of triangle ABC gives A, B, C. Polygons that have the point `inside`,
    to which the bisector goes, are passed over. Without such a polygon the corner alone is
    returned.
    """
    for shape in reversed(draft.polygons):
        if corner in shape.names and inside not in shape.names:
            i = shape.names.index(corner)
            return [shape.names[i - 1], corner, shape.names[(i + 1) % len(shape.names)]]
    return [corner]


def bisects_line(draft: LogicFormDraft, a: str, b: str, c: str, d: str, at: str | None) -> None:
    """Add that a line halves a segment: "AC bisects BD at E".

    Without "at E" the midpoint of BD is the end of the line AC that an earlier sentence has put on
    BD, or else C, the second end.
    """
    ends_on_segment = [end for end in (b, a) if is_put_on_line(draft, end, c, d)]
    middle = at or (ends_on_segment[0] if ends_on_segment else b)
    if middle not in (a, b):
        draft.put_on_line(middle, a, b)
    draft.draw_line(a, b)
    midpoint(draft, point=middle, start=c, end=d)


def is_put_on_line(draft: LogicFormDraft, point: str, start: str, end: str) -> bool:
    """Tell whether an earlier sentence has put a point on a segment."""
    lines = [make_term("Line", start, end), make_term("Line", end, start)]
    return any(make_term("PointLiesOnLine", point, line) in draft.facts for line in lines)


def bisect_each(draft: LogicFormDraft, a: str, b: str, c: str, d: str, at: str | None) -> None:
    """Add that two segments halve each other: "AC and BD bisect each other at E".

    Raises `SentenceError` where the point in which they meet is not named.
    """
    if at is None:
        raise SentenceError("it does not say where the segments meet; add 'at' and the point")
    midpoint(draft, point=at, start=a, end=b)
    midpoint(draft, point=at, start=c, end=d)


def perpendicular_bisector(draft: LogicFormDraft, a: str, b: str, c: str, d: str) -> None:
    """Add that the line AB is the perpendicular bisector of the segment CD."""
    line = draft.draw_line(a, b)
    draft.facts.append(make_term("IsPerpendicularBisectorOf", line, draft.draw_line(c, d)))


def right_angle(draft: LogicFormDraft, angle_name: str) -> None:
    """Add that an angle is right, by its three points or by its corner: "right angle ABC".

    Raises `SentenceError` for any other number of points.
    """
    corners = split_point_names(angle_name)
    if len(corners) == 1:
        right_corner(draft, corners[0])
        return
    if len(corners) != 3:
        raise SentenceError(f"{angle_name} is no angle; write its three points")
    sides = [draft.draw_line(corners[1], corners[0]), draft.draw_line(corners[1], corners[2])]
    draft.facts.append(make_term("Perpendicular", *sides))


def right_corner(draft: LogicFormDraft, corner: str) -> None:
    """Add that the angle at a corner is right: "right angle at C"."""
    draft.facts.append(make_term("RightAngle", make_term("Angle", corner)))


def place(draft: LogicFormDraft, point: str, x: str, y: str) -> None:
    """Note the place of a point in the picture: "A at 120, 56"."""
    draft.places[point] = (float(x), float(y))


def nothing(draft: LogicFormDraft) -> None:
    """Pass over a turn of speech that says nothing of the figure, as "there is a circle"."""
