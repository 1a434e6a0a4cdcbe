"""What sentences of circles say in logic form: chords, tangents, shapes inside and around."""

from __future__ import annotations

from adora_vl.geometry.draft import (
    LogicFormDraft,
    SentenceError,
    make_term,
    polygon_kind,
    split_point_names,
)
from adora_vl.geometry.line_sentences import meet
from adora_vl.geometry.logic_form import Term
from adora_vl.geometry.shape_sentences import special
from adora_vl.geometry.text_sides import read_side


def on_circle(draft: LogicFormDraft, points: str, centre: str | None) -> None:
    """Add that points lie on a circle: "A, B and C lie on circle O".

    `points` is the list as it is written. Without a centre the only circle is meant.
    """
    for point in split_point_names(points):
        draft.put_on_circle(point, centre)


def in_order_on_circle(draft: LogicFormDraft, points: str, centre: str | None) -> None:
    """Add that points follow one another on a circle: "A, B, C and D lie on circle O in order"."""
    names = split_point_names(points)
    if len(names) > 2:
        draft.draw_polygon(polygon_kind(points).capitalize(), names)
        draft.facts.append(draft.last_polygon())
    on_circle(draft, points, centre)


def on_arc(draft: LogicFormDraft, point: str, size: str | None, start: str, end: str) -> None:
    """Add that a point lies on the longer or shorter arc between two others: "C on major arc AB".

    The angle ACB tells the two arcs apart. With C on the longer arc it is half the shorter arc AB,
    as every inscribed angle is half of the arc opposite. With C on the shorter arc it is 180
    degrees minus that half. An arc of 80 degrees gives 40 and 140.
    """
    centre = next((name for name, points in draft.circles.items() if start in points), None)
    for name in (start, end, point):
        draft.put_on_circle(name, centre)
    draft.draw_line(start, point)
    draft.draw_line(point, end)
    inscribed = make_term("MeasureOf", make_term("Angle", start, point, end))
    half = make_term(
        "HalfOf", make_term("MeasureOf", make_term("Minor", make_term("Arc", start, end)))
    )
    if size == "major":
        draft.add_equation(inscribed, half)
    else:
        draft.add_equation(inscribed, make_term("Sub", Term(head="180"), half))


def circle(draft: LogicFormDraft, centre: str, points: str | None = None) -> None:
    """Add a circle with its centre, and the points on it if any are named: "circle O: A, B, C"."""
    draft.name_circle(centre)
    on_circle(draft, points or "", centre)


def circle_of_radius(draft: LogicFormDraft, radius: str, centre: str) -> None:
    """Add a circle with its radius and its centre: "circle with radius 5 and center O"."""
    draft.add_equation(make_term("RadiusOf", draft.name_circle(centre)), read_side(draft, radius))


def tangent(
    draft: LogicFormDraft, start: str, end: str, centre: str | None = None, at: str | None = None
) -> None:
    """Add that a line touches a circle: "DA tangent to circle O at A".

    `at` is the point where the line touches the circle. Without `at` it is the end of the line that
    lies on the circle. Raises `SentenceError` where there is no such end either.
    """
    circle = draft.name_circle(centre)
    name = circle.names[0]
    touching = at or next((point for point in (start, end) if point in draft.circles[name]), None)
    if touching is None:
        raise SentenceError(
            "it does not say where the line touches the circle; add 'at' and the point"
        )
    draft.put_on_circle(touching, name)
    if touching not in (start, end):
        draft.put_on_line(touching, start, end)
    draft.draw_line(name, touching)
    draft.facts.append(make_term("Tangent", draft.draw_line(start, end), circle))


def two_tangents(
    draft: LogicFormDraft,
    first: str,
    second: str,
    centre: str | None,
    a: str | None,
    b: str | None,
    behind: str | None = None,
) -> None:
    """Add that two lines touch a circle: "PA and PB are tangent to circle O at A and B".

    `first` and `second` are the lines, and they touch it at `a` and `b`. The circle is named before
    these points (`centre`), behind them (`behind`), or not at all.
    """
    circle = centre or behind
    for line, second_line, point in ((first, second, a), (second, first, b)):
        start, end = split_point_names(line)
        touching = point or free_end(draft, line=line, second_line=second_line, centre=circle)
        tangent(draft, start=start, end=end, centre=circle, at=touching)


def free_end(draft: LogicFormDraft, line: str, second_line: str, centre: str | None) -> str | None:
    """Return the end of a tangent at which it touches the circle; None where nothing says which.

    For the tangents PA and PB it is A: the end that lies on the circle, or else the end that is not
    an end of `second_line`, the other tangent.
    """
    name = draft.name_circle(centre).names[0]
    on_circle = [point for point in split_point_names(line) if point in draft.circles[name]]
    if on_circle:
        return on_circle[0]
    second_ends = split_point_names(second_line)
    free_ends = [point for point in split_point_names(line) if point not in second_ends]
    return free_ends[0] if len(free_ends) == 1 else None


def secant(draft: LogicFormDraft, points: str, centre: str | None) -> None:
    """Add that a line from outside meets a circle twice: "PAB secant" meets it in A and B."""
    outside, near, far = split_point_names(points)
    draft.put_on_line(near, outside, far)
    draft.put_on_circle(near, centre)
    draft.put_on_circle(far, centre)


def two_secants(draft: LogicFormDraft, first: str, second: str, centre: str | None) -> None:
    """Add two secants, each named by its three points: "secants PAB and PCD"."""
    secant(draft, first, centre)
    secant(draft, second, centre)


def diameter(draft: LogicFormDraft, start: str, end: str, centre: str | None = None) -> None:
    """Add that a segment is a diameter of a circle: "AB is a diameter of circle O"."""
    circle = draft.name_circle(centre)
    name = circle.names[0]
    draft.put_on_circle(start, name)
    draft.put_on_circle(end, name)
    draft.put_on_line(name, start, end)
    draft.facts.append(make_term("IsDiameterOf", make_term("Line", start, end), circle))


def chord(draft: LogicFormDraft, start: str, end: str, centre: str | None = None) -> None:
    """Add that a segment is a chord of a circle: "AB is a chord of circle O"."""
    draft.draw_line(start, end)
    draft.put_on_circle(start, centre)
    draft.put_on_circle(end, centre)


def chords(
    draft: LogicFormDraft, a: str, b: str, c: str, d: str, centre: str | None, at: str | None = None
) -> None:
    """Add that two segments are chords of a circle: "AB and CD are chords of circle O".

    `at` is the point in which they meet, if one is named. A circle that no sentence names gets a
    new centre.
    """
    centre = centre or centre_of_any_circle(draft)
    chord(draft, start=a, end=b, centre=centre)
    chord(draft, start=c, end=d, centre=centre)
    if at is not None:
        meet(draft, a, b, c, d, at)


def centre_of_any_circle(draft: LogicFormDraft) -> str | None:
    """Return a new centre where there is no circle yet, else None for the only circle."""
    return None if draft.circles else draft.free_name()


def sector(draft: LogicFormDraft, start: str, corner: str, end: str, centre: str | None) -> None:
    """Add a sector of a circle, with the circle's centre between its ends: "sector AOB".

    Raises `SentenceError` where the circle that is named has another centre.
    """
    if centre is not None and centre != corner:
        raise SentenceError(f"the sector {start}{corner}{end} is not one of circle {centre}")
    draft.name_circle(corner)
    for point in (start, end):
        draft.put_on_circle(point, corner)
        draft.draw_line(corner, point)


def inscribed(
    draft: LogicFormDraft,
    corner_names: str,
    kind: str | None,
    centre: str | None,
    adjectives: str | None = None,
) -> None:
    """Add that a polygon has its corners on a circle: "triangle ABC is inscribed in circle O".

    The polygon may have adjectives such as "isosceles", and a kind such as "triangle". A circle
    that no sentence names gets a new centre.
    """
    if adjectives is not None:
        special(draft, adjectives=adjectives, kind=kind, corner_names=corner_names)
    elif (kind or polygon_kind(corner_names)) == "polygon":
        draft.facts.append(draft.draw_polygon("Polygon", split_point_names(corner_names)))
    else:
        draft.add_shape(kind or polygon_kind(corner_names), corner_names)
    on_circle(draft, corner_names, centre or centre_of_any_circle(draft))


def circle_around(draft: LogicFormDraft, centre: str, kind: str | None, corner_names: str) -> None:
    """Add that a circle goes through the corners of a polygon: "circle O around triangle ABC"."""
    draft.name_circle(centre)
    inscribed(draft, corner_names=corner_names, kind=kind, centre=centre)


def circle_in(draft: LogicFormDraft, centre: str, kind: str | None, corner_names: str) -> None:
    """Add that a circle touches all sides of a polygon: "circle O inscribed in square ABCD".

    The kind of the polygon is a fact as well, which may say more.
    """
    polygon = draft.add_shape(kind or polygon_kind(corner_names), corner_names)
    draft.facts.append(make_term("CircumscribedTo", polygon, draft.name_circle(centre)))


def polygon_around(
    draft: LogicFormDraft, kind: str | None, corner_names: str, centre: str | None
) -> None:
    """Add a polygon whose sides all touch a circle: "square ABCD around circle O"."""
    circle_in(
        draft, centre=draft.name_circle(centre).names[0], kind=kind, corner_names=corner_names
    )


def inscribed_angle(draft: LogicFormDraft, angle_name: str, kind: str, centre: str | None) -> None:
    """Add an angle with its corner on a circle or in its centre: "ABC is inscribed in circle O".

    `kind` is "inscribed" or "central". The other two points of a central angle lie on the circle.
    """
    if kind == "inscribed":
        on_circle(draft, angle_name, centre)
        return
    corners = split_point_names(angle_name)
    on_circle(draft, f"{corners[0]}{corners[2]}", centre=corners[1])
