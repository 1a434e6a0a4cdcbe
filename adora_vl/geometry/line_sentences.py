"""What sentences of points, lines and angles say in logic form."""

from __future__ import annotations

from adora_vl.geometry.draft import (
    Draft,
    SentenceError,
    make_term,
    split_point_names,
)


def two_lines(draft: Draft, a: str, b: str, relation: str, c: str, d: str) -> None:
    """Note that two lines are parallel or perpendicular."""
    draft.facts.append(
        make_term(relation.capitalize(), draft.draw_line(a, b), draft.draw_line(c, d))
    )


def both_lines(draft: Draft, a: str, b: str, c: str, d: str, relation: str) -> None:
    """Note two lines named before their relation: `AB and CD are parallel`."""
    two_lines(draft, a, b, relation, c, d)


def perpendicular_at(draft: Draft, a: str, b: str, c: str, d: str, at: str) -> None:
    """Note that two lines are perpendicular, and meet in a point that may be an end of either."""
    for start, end in ((a, b), (c, d)):
        if at not in (start, end):
            draft.put_on_line(at, start, end)
    draft.facts.append(make_term("Perpendicular", draft.draw_line(a, b), draft.draw_line(c, d)))


def on_line(draft: Draft, point: str, start: str, end: str) -> None:
    """Note that a point lies on a segment, which is drawn."""
    draft.put_on_line(point, start, end)


def on_lines(draft: Draft, points: str, start: str, end: str) -> None:
    """Note that several points lie on one segment."""
    for point in split_point_names(points):
        draft.put_on_line(point, start, end)


def collinear(draft: Draft, points: str) -> None:
    """Note that points lie on one line, in the order in which they are named."""
    names = split_point_names(points)
    for point in names[1:-1]:
        draft.put_on_line(point, names[0], names[-1])


def extended(draft: Draft, start: str, end: str, beyond: str | None, point: str) -> None:
    """Note that a segment goes on to a point, beyond its second end if none is named."""
    behind = beyond or end
    before = start if behind == end else end
    draft.put_on_line(behind, before, point)


def on_extension(draft: Draft, point: str, start: str, end: str, beyond: str | None) -> None:
    """Note that a point lies where a segment goes on: `D on the extension of BC beyond C`."""
    extended(draft, start=start, end=end, beyond=beyond, point=point)


def midpoint(draft: Draft, point: str, start: str, end: str) -> None:
    """Note that a point is the midpoint of a segment."""
    draft.put_on_line(point, start, end)
    draft.facts.append(
        make_term("IsMidpointOf", make_term("Point", point), make_term("Line", start, end))
    )


def two_midpoints(draft: Draft, first: str, second: str, lines: str) -> None:
    """Note that two points are the midpoints of two segments, in this order."""
    a, b, c, d = split_point_names(lines)
    midpoint(draft, point=first, start=a, end=b)
    midpoint(draft, point=second, start=c, end=d)


def meet(draft: Draft, a: str, b: str, c: str, d: str, point: str) -> None:
    """Note that two lines meet in a point, which may be an end of either."""
    for start, end in ((a, b), (c, d)):
        if point not in (start, end):
            draft.put_on_line(point, start, end)


def intersection(draft: Draft, point: str, a: str, b: str, c: str, d: str) -> None:
    """Note a point named before the lines that meet in it."""
    meet(draft, a, b, c, d, point)


def diagonals_meet(draft: Draft, point: str) -> None:
    """Note that the diagonals of the quadrilateral that was named last meet in a point."""
    names = draft.last_polygon(None).names
    if len(names) != 4:
        raise SentenceError("it does not say which diagonals are meant; name them")
    meet(draft, names[0], names[2], names[1], names[3], point)


def bisects_angle(draft: Draft, start: str, end: str, names: str) -> None:
    """Note that a line halves an angle."""
    corners = split_point_names(names)
    line = draft.draw_line(start, end)
    if len(corners) == 1 and corners[0] in (start, end) and draft.polygons:
        corners = sides_at(draft, corners[0], end if corners[0] == start else start)
    if len(corners) == 3:
        draft.draw_line(corners[0], corners[1])
        draft.draw_line(corners[1], corners[2])
    elif len(corners) != 1:
        raise SentenceError(f"{names} is no angle; write its three points")
    draft.facts.append(make_term("BisectsAngle", line, make_term("Angle", *corners)))


def sides_at(draft: Draft, corner: str, inside: str) -> list[str]:
    """Return the angle of the last polygon with this corner by three points."""
    for shape in reversed(draft.polygons):
        if corner in shape.names and inside not in shape.names:
            i = shape.names.index(corner)
            return [shape.names[i - 1], corner, shape.names[(i + 1) % len(shape.names)]]
    return [corner]


def bisects_line(draft: Draft, a: str, b: str, c: str, d: str, at: str | None) -> None:
    """Note that a line halves a segment in the point where they meet, which may be an end of it."""
    foot = at or next((end for end in (b, a) if term_on(draft, end, c, d)), b)
    if foot not in (a, b):
        draft.put_on_line(foot, a, b)
    draft.draw_line(a, b)
    midpoint(draft, point=foot, start=c, end=d)


def term_on(draft: Draft, point: str, start: str, end: str) -> bool:
    """Tell whether a sentence has put a point on a segment."""
    lines = [make_term("Line", start, end), make_term("Line", end, start)]
    return any(make_term("PointLiesOnLine", point, line) in draft.facts for line in lines)


def bisect_each(draft: Draft, a: str, b: str, c: str, d: str, at: str | None) -> None:
    """Note that two segments halve each other."""
    if at is None:
        raise SentenceError("it does not say where the segments meet; add 'at' and the point")
    midpoint(draft, point=at, start=a, end=b)
    midpoint(draft, point=at, start=c, end=d)


def perpendicular_bisector(draft: Draft, a: str, b: str, c: str, d: str) -> None:
    """Note that a line is the perpendicular bisector of a segment."""
    line = draft.draw_line(a, b)
    draft.facts.append(make_term("IsPerpendicularBisectorOf", line, draft.draw_line(c, d)))


def right_angle(draft: Draft, names: str) -> None:
    """Note that an angle is right, by its three points or by its corner."""
    corners = split_point_names(names)
    if len(corners) == 1:
        right_corner(draft, corners[0])
        return
    if len(corners) != 3:
        raise SentenceError(f"{names} is no angle; write its three points")
    sides = [draft.draw_line(corners[1], corners[0]), draft.draw_line(corners[1], corners[2])]
    draft.facts.append(make_term("Perpendicular", *sides))


def right_corner(draft: Draft, corner: str) -> None:
    """Note that the angle at a corner is right."""
    draft.facts.append(make_term("RightAngle", make_term("Angle", corner)))


def place(draft: Draft, point: str, x: str, y: str) -> None:
    """Note that a point has a place in the picture."""
    draft.places[point] = (float(x), float(y))


def draw(draft: Draft, start: str, end: str) -> None:
    """Note that a segment is drawn."""
    draft.draw_line(start, end)


def nothing(draft: Draft) -> None:
    """Pass over a turn of speech that says nothing of the figure."""
