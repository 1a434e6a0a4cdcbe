"""What sentences of polygons and of the lines of triangles say in logic form."""

from __future__ import annotations

from collections.abc import Sequence

from adora_vl.geometry.draft import (
    LogicFormDraft,
    SentenceError,
    SpecialTriangle,
    make_term,
    polygon_kind,
    split_point_names,
)
from adora_vl.geometry.line_sentences import (
    bisects_angle,
    meet,
    right_angle,
    right_corner,
)
from adora_vl.geometry.shapes import CORNER_COUNT_BY_SHAPE


def special(draft: LogicFormDraft, adjectives: str, kind: str | None, corner_names: str) -> None:
    """Add a shape of a special kind, such as "regular hexagon ABCDEF".

    `adjectives` are one or two words such as "right isosceles". Without `kind` the number of
    corners says the kind. Later sentences may say which sides of an isosceles triangle are equal,
    or which corner of a right one is right. So these two words are settled after the last sentence.
    A cyclic shape gets a circle through its corners, whose centre is a new point.

    Raises `SentenceError` where the kind has another number of corners.
    """
    corners = split_point_names(corner_names)
    kind = kind or polygon_kind(corner_names)
    head = kind.capitalize()
    count = CORNER_COUNT_BY_SHAPE.get(head, len(corners))
    if len(corners) != count or len(set(corners)) != len(corners):
        raise SentenceError(
            f"a {kind} has {count} corners, and {corner_names} names {len(set(corners))}"
        )
    polygon = draft.draw_polygon(head, corners)
    words = adjectives.split()
    if "cyclic" in words:
        words.remove("cyclic")
        centre = draft.free_name()
        for corner in corners:
            draft.put_on_circle(corner, centre)
    unsettled_words: frozenset[str] = frozenset()
    if head == "Triangle":
        unsettled_words = frozenset(words) & {"isosceles", "right"}
    if unsettled_words:
        triangle = SpecialTriangle(
            corners=tuple(corners),
            adjectives=unsettled_words,
            line=draft.line_number,
            sentence=draft.sentence,
        )
        draft.special_triangles.append(triangle)
    for word in words:
        if word not in unsettled_words:
            draft.facts.append(make_term(word.capitalize(), polygon))
    if not words:
        draft.facts.append(polygon)


def right_at(draft: LogicFormDraft, corner_names: str, corner: str) -> None:
    """Note that a triangle has its right angle at a corner: `triangle ABC is right-angled at B`."""
    draft.add_shape(polygon_kind(corner_names), corner_names)
    right_corner(draft, corner)


def base(draft: LogicFormDraft, start: str, end: str) -> None:
    """Add which side of an isosceles triangle is its base: "base BC". The two others are equal."""
    for special in draft.special_triangles:
        if {start, end} <= set(special.corners) and "isosceles" in special.adjectives:
            apex = next(name for name in special.corners if name not in (start, end))
            equal_legs(draft, apex, special.corners)
            return
    draft.draw_line(start, end)


def apex(draft: LogicFormDraft, corner: str) -> None:
    """Add which corner of an isosceles triangle lies between its equal sides: "vertex A".

    Raises `SentenceError` where no isosceles triangle has that corner.
    """
    for special in draft.special_triangles:
        if corner in special.corners and "isosceles" in special.adjectives:
            equal_legs(draft, corner, special.corners)
            return
    raise SentenceError(f"it does not say of which isosceles triangle {corner} is the vertex")


def equal_legs(draft: LogicFormDraft, apex: str, corners: Sequence[str]) -> None:
    """Add that the two sides of a triangle that meet at its apex are equal."""
    ends = [name for name in corners if name != apex]
    legs = [make_term("LengthOf", draft.draw_line(apex, end)) for end in ends]
    draft.add_equation(legs[0], legs[1])


def diagonal(
    draft: LogicFormDraft,
    start: str,
    end: str,
    kind: str | None = None,
    corner_names: str | None = None,
) -> None:
    """Add that a segment is a diagonal of a shape: "AC is a diagonal of rectangle ABCD".

    The kind of the shape is a fact as well, which may say more.
    """
    if corner_names is not None:
        draft.add_shape(kind or polygon_kind(corner_names), corner_names)
    draft.draw_line(start, end)


def hypotenuse(draft: LogicFormDraft, start: str, end: str, triangle: str | None = None) -> None:
    """Add that a segment lies opposite a right angle: "AB is the hypotenuse of triangle ABC".

    Without `triangle` the last triangle with this side is meant. Raises `SentenceError` where no
    triangle has the side.
    """
    if triangle is not None:
        draft.add_shape("triangle", triangle)
    shapes = [shape.names for shape in draft.polygons if len(shape.names) == 3]
    for names in reversed(shapes):
        if {start, end} <= set(names):
            corner = next(name for name in names if name not in (start, end))
            right_angle(draft, f"{start}{corner}{end}")
            return
    raise SentenceError(f"it does not say of which triangle {start}{end} is the hypotenuse")


def alike(draft: LogicFormDraft, first: str, relation: str, second: str) -> None:
    """Add that two shapes are similar or congruent: "triangle ABC is similar to DEF".

    Raises `SentenceError` where they have not as many corners.
    """
    names = split_point_names(first)
    partners = split_point_names(second)
    if len(names) != len(partners):
        raise SentenceError(f"{first} and {second} have not as many corners")
    head = polygon_kind(first).capitalize()
    shapes = (draft.draw_polygon(head, names), draft.draw_polygon(head, partners))
    draft.facts.append(make_term(relation.capitalize(), *shapes))


_HEAD_BY_CENTRE = {
    "centroid": "IsCentroidOf",
    "incenter": "IsIncenterOf",
    "orthocenter": "IsOrthocenterOf",
}


def line_of_triangle(
    draft: LogicFormDraft,
    start: str,
    end: str,
    role: str,
    corner_names: str,
    side: str | None = None,
) -> None:
    """Add a median or an altitude of a triangle: "AD is the altitude of ABC", or "of ABC to BC".

    It goes from a corner to a foot on the opposite side. `role` is "median", "altitude" or
    "height". Raises `SentenceError` where the line does not begin at one corner, and where `side`
    is not the opposite side.
    """
    corners = split_point_names(corner_names)
    if len(corners) == 4:
        line_of_trapezoid(draft, start, end, role, corner_names)
        return
    if len(corners) != 3 or len({start, end} & set(corners)) != 1:
        raise SentenceError(
            f"{start}{end} does not go from a corner of {corner_names} to a point of the opposite side"
        )
    foot = end if start in corners else start
    base = [name for name in corners if name not in (start, end)]
    if side is not None and set(split_point_names(side)) != set(base):
        raise SentenceError(f"{start}{end} does not go to the side {side} of {corner_names}")
    draft.put_on_line(foot, base[0], base[1])
    head = "IsMedianOf" if role == "median" else "IsAltitudeOf"
    draft.facts.append(
        make_term(head, draft.draw_line(start, end), draft.draw_polygon("Triangle", corners))
    )


def line_of_trapezoid(
    draft: LogicFormDraft, start: str, end: str, role: str, corner_names: str
) -> None:
    """Add the median of a trapezoid, which is its midsegment.

    It goes from `start` to `end`. `corner_names` are those of the trapezoid, "ABCD". `role` is
    "median", "altitude" or "height". Raises `SentenceError` for an altitude or a height, since its
    name does not say where it stands.
    """
    if role != "median":
        raise SentenceError(f"write on which side {end} lies, and that {start}{end} stands on it")
    midsegment(draft, start=start, end=end, kind="trapezoid", corner_names=corner_names)


def line_to_side(draft: LogicFormDraft, start: str, end: str, role: str, side: str) -> None:
    """Add a median or an altitude to a side: "AD is the altitude to BC".

    `role` is as in `line_of_triangle`.
    """
    ends = split_point_names(side)
    begins_at_foot = start in ends and end not in ends
    top = end if begins_at_foot else start
    foot = start if begins_at_foot else end
    if foot in ends:
        # A leg of a right triangle is an altitude as well.
        other_end = next(name for name in ends if name != foot)
        right_angle(draft, f"{top}{foot}{other_end}")
        return
    line_of_triangle(draft, start=start, end=end, role=role, corner_names=f"{top}{side}")


def from_corner(draft: LogicFormDraft, role: str, corner: str, side: str, foot: str) -> None:
    """Add a line from a corner of a triangle: "the altitude from A meets BC at D".

    `corner` may also name the angle by three points, as the bisector of "angle ABC" does.
    """
    ends = split_point_names(side)
    if "bisector" in role:
        draft.put_on_line(foot, ends[0], ends[1])
        angle_points = split_point_names(corner)
        vertex = angle_points[len(angle_points) // 2]
        angle_name = f"{ends[0]}{vertex}{ends[1]}"
        bisects_angle(draft, start=vertex, end=foot, angle_name=angle_name)
        return
    line_of_triangle(draft, start=corner, end=foot, role=role, corner_names=f"{corner}{side}")


def two_roles_meet(
    draft: LogicFormDraft, role: str, a: str, b: str, c: str, d: str, triangle: str | None, at: str
) -> None:
    """Add that two medians, altitudes or bisectors of one triangle meet in a point.

    `role` is the word in the plural, such as "medians". The two lines go from a to b and from c to
    d. Without `triangle` a line belongs to the only triangle that has its first point.
    """
    for start, end in ((a, b), (c, d)):
        corner_names = triangle or "".join(draft.triangle_with(start))
        if role.endswith("bisectors"):
            bisector(draft, start, end, corner_names)
        else:
            line_of_triangle(draft, start=start, end=end, role=role[:-1], corner_names=corner_names)
    meet(draft, a, b, c, d, at)


def bisector(draft: LogicFormDraft, start: str, end: str, corner_names: str) -> None:
    """Add the bisector of an angle, or of the corner of a triangle where it begins.

    `corner_names` is the angle, "BAC", or the triangle, "ABC". "AD bisector of triangle ABC" begins
    at the corner A and ends on the opposite side.
    """
    angle_name = corner_names
    corners = split_point_names(corner_names)
    ends = {start, end} & set(corners)
    if len(corners) == 3 and corners[1] not in (start, end) and len(ends) == 1:
        corner = ends.pop()
        sides = [name for name in corners if name != corner]
        angle_name = f"{sides[0]}{corner}{sides[1]}"
        draft.draw_polygon("Triangle", corners)
        foot = end if start == corner else start
        draft.put_on_line(foot, sides[0], sides[1])
    bisects_angle(draft, start, end, angle_name)


def midsegment(
    draft: LogicFormDraft,
    start: str,
    end: str,
    kind: str | None = None,
    corner_names: str | None = None,
) -> None:
    """Add that a segment joins the middles of two sides: "DE is a midsegment of triangle ABC".

    The midsegment of a trapezoid joins the middles of its legs. Without a shape the last one is
    meant. Raises `SentenceError` for any other shape.
    """
    corners = split_point_names(corner_names or "")
    if corner_names is None:
        corners = draft.last_polygon(kind).names
    if len(corners) not in (3, 4):
        raise SentenceError("a midsegment is of a triangle or of a trapezoid; name it")
    head = "Triangle" if len(corners) == 3 else "Trapezoid"
    polygon = draft.draw_polygon(head, corners)
    if head == "Trapezoid":
        draft.facts.append(polygon)
    draft.facts.append(make_term("IsMidsegmentOf", draft.draw_line(start, end), polygon))


def midsegment_parallel(
    draft: LogicFormDraft, start: str, end: str, corner_names: str, base: str
) -> None:
    """Add a midsegment and the side parallel to it: "DE is a midsegment of ABC parallel to AB"."""
    corners = split_point_names(corner_names)
    base_ends = split_point_names(base)
    tops = [name for name in corners if name not in base_ends]
    if len(tops) != 1 or len(corners) != 3:
        raise SentenceError(f"{base} is no side of {corner_names}")
    # Its ends lie on the sides from the top to the ends of the base, in the same order.
    (top,) = tops
    draft.put_on_line(start, top, base_ends[0])
    draft.put_on_line(end, top, base_ends[1])
    midsegment(draft, start=start, end=end, kind="triangle", corner_names=corner_names)


def centre_of_triangle(draft: LogicFormDraft, point: str, centre: str, corner_names: str) -> None:
    """Note the centroid, incenter, orthocenter or circumcenter of a triangle."""
    corners = split_point_names(corner_names)
    polygon = draft.draw_polygon("Triangle", corners)
    if centre == "circumcenter":
        for corner in corners:
            draft.put_on_circle(corner, point)
        return
    for corner in corners:
        draft.draw_line(corner, point)
    draft.facts.append(make_term(_HEAD_BY_CENTRE[centre], make_term("Point", point), polygon))
