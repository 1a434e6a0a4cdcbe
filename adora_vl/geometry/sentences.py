"""The grammar of sentences: which patterns are facts, and what each says in logic form."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

from adora_vl.geometry.draft import (
    POINT,
    SHAPES,
    Draft,
    NotReadError,
    SpecialTriangle,
    kind_of,
    split_names,
    term,
)
from adora_vl.geometry.forms import Term
from adora_vl.geometry.shapes import CORNERS
from adora_vl.geometry.spelling import plain_sentence
from adora_vl.geometry.text_sides import WORDS as SIDE_WORDS
from adora_vl.geometry.text_sides import check_word, side_of

PLACE = r"(-?\d+(?:\.\d+)?)"
SEGMENT = rf"{POINT}{POINT}"
_S = rf"({POINT})({POINT})"
_NAMES = rf"((?:{POINT}){{3,}})"
_LIST = rf"((?:{POINT})(?:,? ?(?:and )?{POINT})*)"
_ADJECTIVES = "regular|isosceles|right|equilateral|cyclic"
_ANY_ADJECTIVES = rf"((?:{_ADJECTIVES})(?: (?:{_ADJECTIVES}))?)"
_IN_CIRCLE = rf"(?:,? ?(?:in )?circle(?:(?: (?:with )?center)? ?({POINT}))?)"
# Words between two facts of one sentence.
_JOINS = re.compile(r",?\s+(?:with|and|where|such that|so that|has|have|having|whose)\s+")
_QUESTION = re.compile(r"find (.+?) (?:if|when|in (?=[a-z])) ?(.+)")
_MAX_CLAUSES = 8  # facts of one sentence


def read_sentence(draft: Draft, sentence: str) -> None:
    """Take a sentence into the draft: one fact, or several with "and" or "with" between them.

    Raises `NotReadError` where a part is none of the grammar.
    """
    plain = plain_sentence(sentence)
    if not plain:
        return  # such as "In the figure,"
    question = _QUESTION.fullmatch(plain)
    if question:
        # "Find AC if AB = 5": the facts may name what the question refers to.
        plain = question[2]
    clauses = _clauses(plain, _MAX_CLAUSES)
    if clauses is None and "=" not in plain and "congruent" in plain:
        # Of measures, congruent says no more than equal.
        plain = plain.replace("congruent", "=")
    if clauses is None and "=" not in plain:
        raise NotReadError(_what_is_wrong(plain))
    for clause in clauses or [plain]:
        _read_clause(draft, clause)
    if question:
        _find(draft, question[1])


def _clauses(plain: str, limit: int) -> list[str] | None:
    """Split a sentence into facts, as few as possible; None where a part is none."""
    joins = list(_JOINS.finditer(plain))
    if _rule_of(plain) is not None or ("=" in plain and not joins):
        return [plain]
    if limit <= 1:
        return None
    for join in reversed(joins):
        before = plain[: join.start()]
        if _rule_of(before) is None and ("=" not in before or _JOINS.search(before)):
            continue
        behind = _clauses(plain[join.end() :], limit - 1)
        if behind is not None:
            return [before, *behind]
    return None


def _rule_of(plain: str) -> tuple[Callable[..., None], re.Match[str]] | None:
    """The first pattern that fits, with its match."""
    for pattern, build in _GRAMMAR:
        match = re.fullmatch(pattern, plain)
        if match:
            return build, match
    return None


def _read_clause(draft: Draft, plain: str) -> None:
    """Take one fact into the draft. Raises `NotReadError`."""
    rule = _rule_of(plain)
    if rule is None:
        _equation(draft, plain)
        return
    build, match = rule
    build(draft, *match.groups())


def _what_is_wrong(plain: str) -> str:
    """Say which word of a sentence is not known, or that the sentence as a whole is none."""
    for word in re.findall(r"[a-z]{2,}", plain):
        try:
            check_word(word, _WORDS)
        except NotReadError as error:
            return str(error)
    return (
        "this is no fact that is known; facts are such as AB = 5, angle ABC = 40, D on AC, AB "
        "parallel CD"
    )


# Equations and the question


def _equation(draft: Draft, text: str) -> None:
    """An equation of two or more sides: each side equals the one before it.

    Sides such as `AB : BC` are ratios, which agree part by part.
    """
    sides = [_ratio(draft, _with_roles(draft, side)) for side in text.split("=")]
    for left, right in pairwise(sides):
        if len(left) != len(right):
            raise NotReadError("the ratios on its sides have not as many parts")
        if len(left) == 1:
            draft.equal(left[0], right[0])
            continue
        for i in range(1, len(left)):
            first = term("RatioOf", left[i - 1], left[i])
            draft.equal(first, term("RatioOf", right[i - 1], right[i]))


def _ratio(draft: Draft, side: str) -> list[Term]:
    """The parts of a side between colons; of most sides there is one."""
    return [side_of(draft, part) for part in side.split(":")]


def _with_roles(draft: Draft, side: str) -> str:
    """A side without words such as "diameter" before a segment, which are facts of their own."""

    def take(match: re.Match[str]) -> str:
        """Note the fact, and leave the segment."""
        _role(draft, match[1], match[2])
        return match[2]

    return re.sub(rf"\b({_ROLES}) ({SEGMENT})(?!{POINT})", take, side)


_ROLES = "diameter|radius|chord|altitude|height|median|hypotenuse|base|leg|midsegment|tangent"


def _role(draft: Draft, role: str, segment: str) -> None:
    """A segment is called a diameter, an altitude or the like, of the only shape that has one."""
    start, end = split_names(segment)
    if role == "diameter":
        _diameter(draft, start=start, end=end, centre=None)
    elif role == "radius":
        centre = draft.circle(start if start in draft.circles else end).names[0]
        draft.on_circle(end if centre == start else start, centre)
    elif role == "chord":
        _chord(draft, start=start, end=end, centre=None)
    elif role == "tangent":
        _tangent(draft, start=start, end=end, centre=None, at=None)
    elif role in ("altitude", "median", "height"):
        corners = draft.triangle_with(start)
        _line_of_triangle(draft, start=start, end=end, role=role, names="".join(corners))
    elif role == "hypotenuse":
        _hypotenuse(draft, start, end)
    elif role == "base":
        _base(draft, start, end)


def _find(draft: Draft, measure: str) -> None:
    """The question: what is to be computed."""
    parts = _ratio(draft, _with_roles(draft, measure))
    if len(parts) > 2:
        raise NotReadError("a ratio that is asked for has two parts")
    goal = parts[0] if len(parts) == 1 else term("RatioOf", *parts)
    draft.question.append(term("Find", goal))


def _length_of_size(draft: Draft, measure: str, size: str) -> None:
    """A size without a sign before it, as in "with radius 5"."""
    draft.equal(side_of(draft, measure), side_of(draft, size))


def _angles_in_ratio(draft: Draft, first: str, second: str, third: str, ratio: str) -> None:
    """The angles of a triangle are in a ratio, in the order of its corners."""
    draft.polygon("Triangle", (first, second, third))
    _equation(draft, f"angle {first} : angle {second} : angle {third} = {ratio}")


def _together(draft: Draft, first: str, second: str, word: str) -> None:
    """Two angles are supplementary or complementary; two measures are equal."""
    # In "angle A and B" the word stands once for both.
    if first.startswith("angle") and not second.startswith("angle"):
        second = f"angle {second}"
    left = side_of(draft, first)
    right = side_of(draft, second)
    if word in ("equal", "congruent"):
        draft.equal(left, right)
        return
    draft.facts.append(term(word.capitalize(), left, right))


# Shapes


def _shape(draft: Draft, kind: str, names: str) -> None:
    """A shape with all its corners named, such as `rectangle ABCD`."""
    draft.named_shape(kind, names)


def _shape_behind(draft: Draft, names: str, kind: str) -> None:
    """A shape named before its kind: `ABCD is a rectangle`."""
    draft.named_shape(kind, names)


def _special(draft: Draft, adjectives: str, kind: str, names: str) -> None:
    """A shape of a special kind, such as `regular hexagon ABCDEF` or `right isosceles triangle ABC`.

    Which parts of a triangle are equal or right may be told by another sentence.
    """
    corners = split_names(names)
    head = "Polygon" if kind == "polygon" else kind.capitalize()
    count = CORNERS.get(head, len(corners))
    if len(corners) != count or len(set(corners)) != len(corners):
        raise NotReadError(f"a {kind} has {count} corners, and {names} names {len(set(corners))}")
    polygon = draft.polygon(head, corners)
    words = adjectives.split()
    if "cyclic" in words:
        words.remove("cyclic")
        _on_circle(draft, names, draft.free_name())
    vague = frozenset(words) & {"isosceles", "right"} if head == "Triangle" else frozenset()
    if vague:
        special = SpecialTriangle(
            corners=tuple(corners),
            adjectives=vague,
            line=draft.line_number,
            sentence=draft.sentence,
        )
        draft.special.append(special)
    for word in words:
        if word not in vague:
            draft.facts.append(term(word.capitalize(), polygon))
    if not words:
        draft.facts.append(polygon)


def _special_behind(draft: Draft, names: str, adjectives: str, kind: str | None) -> None:
    """A shape named before its special kind: `ABC is an equilateral triangle`."""
    _special(draft, adjectives=adjectives, kind=kind or kind_of(names), names=names)


def _right_at(draft: Draft, names: str, corner: str) -> None:
    """A triangle has its right angle at a corner: `triangle ABC is right-angled at B`."""
    draft.named_shape(kind_of(names), names)
    _right_corner(draft, corner)


def _base(draft: Draft, start: str, end: str) -> None:
    """The side of an isosceles triangle that is no leg; the two others are equal."""
    for special in draft.special:
        if {start, end} <= set(special.corners) and "isosceles" in special.adjectives:
            apex = next(name for name in special.corners if name not in (start, end))
            _equal_legs(draft, apex, special.corners)
            return
    draft.line(start, end)


def _apex(draft: Draft, corner: str) -> None:
    """The corner of an isosceles triangle between its equal sides."""
    for special in draft.special:
        if corner in special.corners and "isosceles" in special.adjectives:
            _equal_legs(draft, corner, special.corners)
            return
    raise NotReadError(f"it does not say of which isosceles triangle {corner} is the vertex")


def _equal_legs(draft: Draft, apex: str, corners: Sequence[str]) -> None:
    """The two sides of a triangle at its apex are equal."""
    ends = [name for name in corners if name != apex]
    legs = [term("LengthOf", draft.line(apex, end)) for end in ends]
    draft.equal(legs[0], legs[1])


def _hypotenuse(draft: Draft, start: str, end: str) -> None:
    """The side of a right triangle opposite its right angle."""
    shapes = [shape.names for shape in draft.polygons if len(shape.names) == 3]
    for names in reversed(shapes):
        if {start, end} <= set(names):
            corner = next(name for name in names if name not in (start, end))
            _right_angle(draft, f"{start}{corner}{end}")
            return
    raise NotReadError(f"it does not say of which triangle {start}{end} is the hypotenuse")


def _alike(draft: Draft, kind: str | None, first: str, relation: str, second: str) -> None:
    """Two shapes are similar or congruent."""
    names = split_names(first)
    partners = split_names(second)
    if len(names) != len(partners):
        raise NotReadError(f"{first} and {second} have not as many corners")
    head = kind_of(first).capitalize()
    shapes = (draft.polygon(head, names), draft.polygon(head, partners))
    draft.facts.append(term(relation.capitalize(), *shapes))


def _both_alike(draft: Draft, first: str, second: str, relation: str) -> None:
    """Two shapes named before their relation: `ABC and DEF are similar`."""
    _alike(draft, kind=None, first=first, relation=relation, second=second)


# Lines and points


def _two_lines(draft: Draft, a: str, b: str, relation: str, c: str, d: str) -> None:
    """Two lines are parallel or perpendicular."""
    draft.facts.append(term(relation.capitalize(), draft.line(a, b), draft.line(c, d)))


def _both_lines(draft: Draft, a: str, b: str, c: str, d: str, relation: str) -> None:
    """Two lines named before their relation: `AB and CD are parallel`."""
    _two_lines(draft, a, b, relation, c, d)


def _perpendicular_at(draft: Draft, a: str, b: str, c: str, d: str, at: str) -> None:
    """Two lines are perpendicular, and meet in a point that may be an end of either."""
    for start, end in ((a, b), (c, d)):
        if at not in (start, end):
            draft.on_line(at, start, end)
    draft.facts.append(term("Perpendicular", draft.line(a, b), draft.line(c, d)))


def _on_line(draft: Draft, point: str, start: str, end: str) -> None:
    """A point lies on a segment, which is drawn."""
    draft.on_line(point, start, end)


def _on_lines(draft: Draft, points: str, start: str, end: str) -> None:
    """Several points lie on one segment."""
    for point in split_names(points):
        draft.on_line(point, start, end)


def _collinear(draft: Draft, points: str) -> None:
    """Points lie on one line, in the order in which they are named."""
    names = split_names(points)
    for point in names[1:-1]:
        draft.on_line(point, names[0], names[-1])


def _extended(draft: Draft, start: str, end: str, beyond: str | None, point: str) -> None:
    """A segment goes on to a point, beyond its second end if it does not say beyond which."""
    behind = beyond or end
    before = start if behind == end else end
    draft.on_line(behind, before, point)


def _on_extension(draft: Draft, point: str, start: str, end: str, beyond: str | None) -> None:
    """A point lies where a segment goes on: `D on the extension of BC beyond C`."""
    _extended(draft, start=start, end=end, beyond=beyond, point=point)


def _midpoint(draft: Draft, point: str, start: str, end: str) -> None:
    """A point is the midpoint of a segment."""
    draft.on_line(point, start, end)
    draft.facts.append(term("IsMidpointOf", term("Point", point), term("Line", start, end)))


def _two_midpoints(draft: Draft, first: str, second: str, lines: str) -> None:
    """Two points are the midpoints of two segments, in this order."""
    a, b, c, d = split_names(lines)
    _midpoint(draft, point=first, start=a, end=b)
    _midpoint(draft, point=second, start=c, end=d)


def _meet(draft: Draft, a: str, b: str, c: str, d: str, point: str) -> None:
    """Two lines meet in a point, which may be an end of either."""
    for start, end in ((a, b), (c, d)):
        if point not in (start, end):
            draft.on_line(point, start, end)


def _intersection(draft: Draft, point: str, a: str, b: str, c: str, d: str) -> None:
    """A point named before the lines that meet in it."""
    _meet(draft, a, b, c, d, point)


def _diagonals_meet(draft: Draft, point: str) -> None:
    """The diagonals of the quadrilateral that was named last meet in a point."""
    names = draft.last_polygon(None).names
    if len(names) != 4:
        raise NotReadError("it does not say which diagonals are meant; name them")
    _meet(draft, names[0], names[2], names[1], names[3], point)


def _bisects_angle(draft: Draft, start: str, end: str, names: str) -> None:
    """A line halves an angle."""
    corners = split_names(names)
    line = draft.line(start, end)
    if len(corners) == 1 and corners[0] in (start, end) and draft.polygons:
        corners = _sides_at(draft, corners[0], end if corners[0] == start else start)
    if len(corners) == 3:
        draft.line(corners[0], corners[1])
        draft.line(corners[1], corners[2])
    elif len(corners) != 1:
        raise NotReadError(f"{names} is no angle; write its three points")
    draft.facts.append(term("BisectsAngle", line, term("Angle", *corners)))


def _sides_at(draft: Draft, corner: str, inside: str) -> list[str]:
    """The angle of the last polygon with this corner by three points; the corner alone without one."""
    for shape in reversed(draft.polygons):
        if corner in shape.names and inside not in shape.names:
            i = shape.names.index(corner)
            return [shape.names[i - 1], corner, shape.names[(i + 1) % len(shape.names)]]
    return [corner]


def _bisector(draft: Draft, start: str, end: str, names: str) -> None:
    """A line is the bisector of an angle, or of that corner of a triangle at which it begins."""
    corners = split_names(names)
    ends = {start, end} & set(corners)
    if len(corners) == 3 and corners[1] not in (start, end) and len(ends) == 1:
        corner = ends.pop()
        sides = [name for name in corners if name != corner]
        names = f"{sides[0]}{corner}{sides[1]}"
        draft.polygon("Triangle", corners)
        foot = end if start == corner else start
        draft.on_line(foot, sides[0], sides[1])
    _bisects_angle(draft, start, end, names)


def _bisects_line(draft: Draft, a: str, b: str, c: str, d: str, at: str | None) -> None:
    """A line halves a segment in the point where they meet, which may be an end of it."""
    foot = at or next((end for end in (b, a) if term_on(draft, end, c, d)), b)
    if foot not in (a, b):
        draft.on_line(foot, a, b)
    draft.line(a, b)
    _midpoint(draft, point=foot, start=c, end=d)


def term_on(draft: Draft, point: str, start: str, end: str) -> bool:
    """Whether a sentence has put a point on a segment."""
    lines = [term("Line", start, end), term("Line", end, start)]
    return any(term("PointLiesOnLine", point, line) in draft.facts for line in lines)


def _bisect_each(draft: Draft, a: str, b: str, c: str, d: str, at: str | None) -> None:
    """Two segments halve each other."""
    if at is None:
        raise NotReadError("it does not say where the segments meet; add 'at' and the point")
    _midpoint(draft, point=at, start=a, end=b)
    _midpoint(draft, point=at, start=c, end=d)


def _perpendicular_bisector(draft: Draft, a: str, b: str, c: str, d: str) -> None:
    """A line is the perpendicular bisector of a segment."""
    line = draft.line(a, b)
    draft.facts.append(term("IsPerpendicularBisectorOf", line, draft.line(c, d)))


def _right_angle(draft: Draft, names: str) -> None:
    """An angle is right, by its three points or by its corner."""
    corners = split_names(names)
    if len(corners) == 1:
        _right_corner(draft, corners[0])
        return
    if len(corners) != 3:
        raise NotReadError(f"{names} is no angle; write its three points")
    sides = [draft.line(corners[1], corners[0]), draft.line(corners[1], corners[2])]
    draft.facts.append(term("Perpendicular", *sides))


def _right_corner(draft: Draft, corner: str) -> None:
    """The angle at a corner is right."""
    draft.facts.append(term("RightAngle", term("Angle", corner)))


# Lines of triangles and trapezoids


def _line_of_triangle(draft: Draft, start: str, end: str, role: str, names: str) -> None:
    """A median or an altitude of a triangle, with its foot on the opposite side."""
    corners = split_names(names)
    if len(corners) == 4:
        _line_of_trapezoid(draft, start, end, role, names)
        return
    if len(corners) != 3 or len({start, end} & set(corners)) != 1:
        raise NotReadError(
            f"{start}{end} does not go from a corner of {names} to a point of the opposite side"
        )
    foot = end if start in corners else start
    base = [name for name in corners if name not in (start, end)]
    draft.on_line(foot, base[0], base[1])
    head = "IsMedianOf" if role == "median" else "IsAltitudeOf"
    draft.facts.append(term(head, draft.line(start, end), draft.polygon("Triangle", corners)))


def _line_of_trapezoid(draft: Draft, start: str, end: str, role: str, names: str) -> None:
    """The median of a trapezoid, which is its midsegment. Raises `NotReadError` for an altitude."""
    if role != "median":
        raise NotReadError(f"write on which side {end} lies, and that {start}{end} stands on it")
    _midsegment(draft, start=start, end=end, kind="trapezoid", names=names)


def _line_to_side(draft: Draft, start: str, end: str, role: str, side: str) -> None:
    """A median or an altitude to a side: `AD altitude to BC`."""
    ends = split_names(side)
    top = start if end in ends or start not in ends else end
    foot = end if top == start else start
    names = [top, *ends]
    if foot in ends:
        # A leg of a right triangle is an altitude as well.
        _right_angle(draft, f"{top}{foot}{next(name for name in ends if name != foot)}")
        return
    _line_of_triangle(draft, start=start, end=end, role=role, names="".join(names))


def _from_corner(draft: Draft, role: str, corner: str, side: str, foot: str) -> None:
    """A line of a triangle by where it begins and ends: `the altitude from A meets BC at D`."""
    ends = split_names(side)
    if "bisector" in role:
        draft.on_line(foot, ends[0], ends[1])
        middle = split_names(corner)[len(split_names(corner)) // 2]
        _bisects_angle(draft, middle, foot, f"{ends[0]}{middle}{ends[1]}")
        return
    names = f"{corner}{side}"
    _line_of_triangle(draft, start=corner, end=foot, role=role, names=names)


def _two_roles_meet(
    draft: Draft, role: str, a: str, b: str, c: str, d: str, triangle: str | None, at: str
) -> None:
    """Two medians, altitudes or bisectors of one triangle meet in a point."""
    for start, end in ((a, b), (c, d)):
        names = triangle or "".join(draft.triangle_with(start))
        if role.endswith("bisectors"):
            _bisector(draft, start, end, names)
        else:
            _line_of_triangle(draft, start=start, end=end, role=role[:-1], names=names)
    _meet(draft, a, b, c, d, at)


def _midsegment(
    draft: Draft, start: str, end: str, kind: str | None = None, names: str | None = None
) -> None:
    """A segment joins the middles of two sides of a triangle or of the legs of a trapezoid."""
    shape = draft.last_polygon(kind) if names is None else None
    corners = split_names(names) if names is not None else (shape.names if shape else [])
    if len(corners) not in (3, 4):
        raise NotReadError("a midsegment is of a triangle or of a trapezoid; name it")
    head = "Triangle" if len(corners) == 3 else "Trapezoid"
    polygon = draft.polygon(head, corners)
    if head == "Trapezoid":
        draft.facts.append(polygon)
    draft.facts.append(term("IsMidsegmentOf", draft.line(start, end), polygon))


def _midsegment_parallel(draft: Draft, start: str, end: str, names: str, base: str) -> None:
    """A midsegment by the side of the triangle that it is parallel to."""
    corners = split_names(names)
    ends = split_names(base)
    tops = [name for name in corners if name not in ends]
    if len(tops) != 1 or len(corners) != 3:
        raise NotReadError(f"{base} is no side of {names}")
    for point, corner in ((start, ends[0]), (end, ends[1])):
        draft.on_line(point, tops[0], corner)
    _midsegment(draft, start=start, end=end, kind="triangle", names=names)


_CENTRES = {
    "centroid": "IsCentroidOf",
    "incenter": "IsIncenterOf",
    "orthocenter": "IsOrthocenterOf",
}


def _centre_of_triangle(draft: Draft, point: str, centre: str, names: str) -> None:
    """A point where the medians, bisectors or altitudes of a triangle meet, or the centre of its
    circle.
    """
    corners = split_names(names)
    polygon = draft.polygon("Triangle", corners)
    if centre == "circumcenter":
        _on_circle(draft, names, point)
        return
    for corner in corners:
        draft.line(corner, point)
    draft.facts.append(term(_CENTRES[centre], term("Point", point), polygon))


# Circles


def _on_circle(draft: Draft, points: str, centre: str | None) -> None:
    """Points lie on a circle."""
    for point in split_names(points):
        draft.on_circle(point, centre)


def _on_arc(draft: Draft, point: str, size: str | None, start: str, end: str) -> None:
    """A point lies on an arc between two others, of the longer or the shorter way round.

    The angle that the ends have there tells the two ways apart: half the shorter arc from the
    longer one, and what that lacks to 180 from the shorter one.
    """
    centre = next((name for name, points in draft.circles.items() if start in points), None)
    for name in (start, end, point):
        draft.on_circle(name, centre)
    draft.line(start, point)
    draft.line(point, end)
    inscribed = term("MeasureOf", term("Angle", start, point, end))
    half = term("HalfOf", term("MeasureOf", term("Minor", term("Arc", start, end))))
    if size == "major":
        draft.equal(inscribed, half)
    else:
        draft.equal(inscribed, term("Sub", Term(head="180"), half))


def _circle(draft: Draft, centre: str, points: str | None) -> None:
    """A circle with its centre and points."""
    draft.circle(centre)
    _on_circle(draft, points or "", centre)


def _circle_of_radius(draft: Draft, radius: str, centre: str) -> None:
    """A circle by its radius and its centre."""
    draft.equal(term("RadiusOf", draft.circle(centre)), side_of(draft, radius))


def _tangent(draft: Draft, start: str, end: str, centre: str | None, at: str | None) -> None:
    """A line touches a circle."""
    circle = draft.circle(centre)
    name = circle.names[0]
    touching = at or next((point for point in (start, end) if point in draft.circles[name]), None)
    if touching is None:
        raise NotReadError(
            "it does not say where the line touches the circle; add 'at' and the point"
        )
    draft.on_circle(touching, name)
    if touching not in (start, end):
        draft.on_line(touching, start, end)
    draft.line(name, touching)
    draft.facts.append(term("Tangent", draft.line(start, end), circle))


def _tangent_at(draft: Draft, start: str, end: str, at: str, centre: str | None) -> None:
    """A line touches a circle, with the point named first."""
    _tangent(draft, start=start, end=end, centre=centre, at=at)


def _two_tangents(
    draft: Draft,
    first: str,
    second: str,
    centre: str | None,
    at: str | None,
    behind: str | None = None,
) -> None:
    """Two lines touch a circle, at two points in the same order."""
    points = split_names(at) if at else [None, None]
    for line, point in zip((first, second), points, strict=True):
        start, end = split_names(line)
        circle = centre or behind
        touching = point or _free_end(draft, line, first if line == second else second, circle)
        _tangent(draft, start=start, end=end, centre=circle, at=touching)


def _free_end(draft: Draft, line: str, second_line: str, centre: str | None) -> str | None:
    """The end of a tangent at which it touches: the one on the circle, else the one it does not
    share with the second tangent.
    """
    name = draft.circle(centre).names[0]
    on_circle = [point for point in split_names(line) if point in draft.circles[name]]
    free = [point for point in split_names(line) if point not in split_names(second_line)]
    candidates = on_circle or (free if len(free) == 1 else [])
    return candidates[0] if candidates else None


def _secant(draft: Draft, names: str, centre: str | None) -> None:
    """A line from a point outside meets a circle twice: `PAB secant` has A and B on the circle."""
    outside, near, far = split_names(names)
    draft.on_line(near, outside, far)
    draft.on_circle(near, centre)
    draft.on_circle(far, centre)


def _two_secants(draft: Draft, first: str, second: str, centre: str | None) -> None:
    """Two secants, each named by its three points."""
    _secant(draft, first, centre)
    _secant(draft, second, centre)


def _diameter(draft: Draft, start: str, end: str, centre: str | None) -> None:
    """A segment is a diameter of a circle."""
    circle = draft.circle(centre)
    name = circle.names[0]
    draft.on_circle(start, name)
    draft.on_circle(end, name)
    draft.on_line(name, start, end)
    draft.facts.append(term("IsDiameterOf", term("Line", start, end), circle))


def _chord(draft: Draft, start: str, end: str, centre: str | None) -> None:
    """A segment is a chord of a circle."""
    draft.line(start, end)
    draft.on_circle(start, centre)
    draft.on_circle(end, centre)


def _chords(draft: Draft, first: str, second: str, centre: str | None) -> None:
    """Two segments are chords of a circle."""
    for line in (first, second):
        start, end = split_names(line)
        _chord(draft, start=start, end=end, centre=centre)


def _chord_in_front(draft: Draft, start: str, end: str) -> None:
    """A segment that is called a chord of the only circle."""
    _chord(draft, start=start, end=end, centre=None)


def _diameter_in_front(draft: Draft, start: str, end: str) -> None:
    """A segment that is called a diameter of the only circle."""
    _diameter(draft, start=start, end=end, centre=None)


def _inscribed(
    draft: Draft,
    adjectives: str | None,
    kind: str | None,
    names: str,
    centre: str | None,
) -> None:
    """A polygon has its corners on a circle."""
    if adjectives is not None:
        _special_behind(draft, names, adjectives, kind)
    elif (kind or kind_of(names)) == "polygon":
        draft.facts.append(draft.polygon("Polygon", split_names(names)))
    else:
        _shape(draft, kind or kind_of(names), names)
    _on_circle(draft, names, centre)


def _circle_around(draft: Draft, centre: str, kind: str | None, names: str) -> None:
    """A circle goes through the corners of a polygon."""
    draft.circle(centre)
    _inscribed(draft, adjectives=None, kind=kind, names=names, centre=centre)


def _circle_in(draft: Draft, centre: str, kind: str | None, names: str) -> None:
    """A circle touches all sides of a polygon, which may be of a kind that says more."""
    polygon = draft.named_shape(kind or kind_of(names), names)
    draft.facts.append(term("CircumscribedTo", polygon, draft.circle(centre)))


def _polygon_around(draft: Draft, kind: str | None, names: str, centre: str | None) -> None:
    """A polygon whose sides all touch a circle."""
    _circle_in(draft, centre=draft.circle(centre).names[0], kind=kind, names=names)


def _inscribed_angle(draft: Draft, names: str, kind: str, centre: str | None) -> None:
    """An angle with its corner on a circle or in its centre, and its sides through two points."""
    corners = split_names(names)
    if kind == "central":
        draft.circle(corners[1])
        corners = [corners[0], corners[2]]
    _on_circle(draft, "".join(corners), centre if kind == "inscribed" else split_names(names)[1])


def _place(draft: Draft, point: str, x: str, y: str) -> None:
    """A point has a place in the picture."""
    draft.places[point] = (float(x), float(y))


def _draw(draft: Draft, start: str, end: str) -> None:
    """A segment is drawn."""
    draft.line(start, end)


def _nothing(draft: Draft) -> None:
    """A turn of speech that says nothing of the figure."""


_MEASURE = rf"(?:angle )?(?:\d+|{POINT}(?:{POINT}{POINT})?)"
_EQUAL_PART = rf"(?:angle (?:\d+|{POINT}(?:{POINT}{POINT})?)|(?:arc )?{SEGMENT})"
_MAYBE_SHAPE = rf"(?:({SHAPES}) ?)?"
_GRAMMAR: tuple[tuple[str, Callable[..., None]], ...] = (
    (r"find (.+)", _find),
    (rf"({POINT}) at \(?{PLACE}, ?{PLACE}\)?", _place),
    (rf"draw {_S}", _draw),
    # Shapes
    (rf"({SHAPES}) {_NAMES}", _shape),
    (rf"(?:(?:{SHAPES}) )?{_NAMES} ({SHAPES})", _shape_behind),
    (rf"{_ANY_ADJECTIVES} ({SHAPES}|polygon) {_NAMES}", _special),
    (rf"(?:(?:{SHAPES}) )?{_NAMES} {_ANY_ADJECTIVES}(?: ({SHAPES}|polygon))?", _special_behind),
    (rf"(?:triangle )?{_NAMES} right (?:triangle )?at ({POINT})", _right_at),
    (rf"right triangle {_NAMES} (?:(?:with )?right angle )?at ({POINT})", _right_at),
    (rf"{_MAYBE_SHAPE}{_NAMES} (similar|congruent) (?:(?:{SHAPES}) )?{_NAMES}", _alike),
    (
        rf"(?:(?:{SHAPES}) )?{_NAMES} and (?:(?:{SHAPES}) )?{_NAMES} (similar|congruent)"
        rf"(?: (?:{SHAPES}))?",
        _both_alike,
    ),
    (rf"base {_S}|{_S} base", lambda draft, a, b, c, d: _base(draft, a or c, b or d)),
    (rf"(?:vertex|apex|vertex angle)(?: at)? ({POINT})", _apex),
    (rf"hypotenuse {_S}", _hypotenuse),
    (
        rf"{_S} hypotenuse(?: (?:right )?triangle {_NAMES})?",
        lambda d, a, b, _: _hypotenuse(d, a, b),
    ),
    # Lines and points
    (rf"{_S} (parallel|perpendicular) {_S}", _two_lines),
    (rf"{_S} perpendicular {_S} at ({POINT})", _perpendicular_at),
    (rf"{_S} and {_S} (parallel|perpendicular)(?: each other)?", _both_lines),
    (rf"{_LIST} on ?circle(?: ({POINT}))?", _on_circle),
    (rf"({POINT}) (?:on )?between ({POINT}) and ({POINT})", _on_line),
    (rf"({POINT}) on {_S}", _on_line),
    (rf"{_LIST} on {_S}", _on_lines),
    (rf"{_LIST} collinear", _collinear),
    (rf"({POINT}) on extension {_S}(?: (?:beyond|past|through) ({POINT}))?", _on_extension),
    (rf"{_S} extended(?: (?:beyond|past|through) ({POINT}))? ({POINT})", _extended),
    (rf"({POINT}) midpoint {_S}", _midpoint),
    (rf"({POINT}) and ({POINT}) midpoint ({SEGMENT} and {SEGMENT})", _two_midpoints),
    (rf"{_S} (?:and )?{_S} meet at ({POINT})", _meet),
    (rf"{_S} meet {_S} at ({POINT})", _meet),
    (rf"({POINT}) intersection {_S} and {_S}", _intersection),
    (rf"diagonals meet at ({POINT})", _diagonals_meet),
    (rf"{_S} diagonal(?: (?:{SHAPES})?(?: ?{_NAMES})?)?", lambda d, a, b, _: _draw(d, a, b)),
    (rf"{_S} bisects angle ((?:{POINT})+)", _bisects_angle),
    (rf"{_S} (?:angle )?bisector (?:angle )?((?:{POINT})+)", _bisects_angle),
    (rf"{_S} (?:angle )?bisector triangle {_NAMES}", _bisector),
    (rf"{_S} bisects {_S}(?: at ({POINT}))?", _bisects_line),
    (rf"{_S} and {_S} bisect each other(?: at ({POINT}))?", _bisect_each),
    (rf"{_S} perpendicular bisector {_S}", _perpendicular_bisector),
    (rf"right angle (?:at )?((?:{POINT})+)", _right_angle),
    (rf"angle ((?:{POINT})+) right(?: angle)?", _right_angle),
    # Lines of triangles and trapezoids
    (rf"{_S} (altitude|height|median) (?:(?:{SHAPES}) )?{_NAMES}", _line_of_triangle),
    (rf"{_S} (altitude|height|median) (?:from {POINT} )?({SEGMENT})", _line_to_side),
    (rf"(altitude|height|median|hypotenuse) ({SEGMENT})", _role),
    (
        rf"(altitude|median|(?:angle )?bisector)(?: from)?(?: angle)? ({POINT}(?:{POINT}{POINT})?)"
        rf" meet ({SEGMENT}) at ({POINT})",
        _from_corner,
    ),
    (
        rf"(altitudes|medians|(?:angle )?bisectors) {_S} and {_S} (?:triangle {_NAMES} )?"
        rf"meet at ({POINT})",
        _two_roles_meet,
    ),
    (rf"{_S} (altitude|median)", lambda draft, a, b, role: _role(draft, role, f"{a}{b}")),
    (rf"{_S} midsegment(?: (triangle|trapezoid)?)?(?: ?{_NAMES})?", _midsegment),
    (rf"{_S} midsegment triangle {_NAMES} parallel ({SEGMENT})", _midsegment_parallel),
    (
        rf"({POINT}) (centroid|incenter|orthocenter|circumcenter) (?:triangle )?{_NAMES}",
        _centre_of_triangle,
    ),
    # Circles
    (rf"circle ?({POINT})(?: ?(?::|with|through) ?{_LIST})?", _circle),
    (rf"circle with radius ([^A-Z=]+?) (?:and|with) center ({POINT})", _circle_of_radius),
    (rf"circle (?:with )?center ({POINT})(?: ?(?::|with|through) ?{_LIST})?", _circle),
    (rf"({POINT}) center(?: circle)?(?: (?:through|with) {_LIST})?", _circle),
    (rf"{_S} tangent{_IN_CIRCLE}?(?: ?at ({POINT}))?", _tangent),
    (rf"{_S} tangent at ({POINT}){_IN_CIRCLE}", _tangent_at),
    (
        rf"({SEGMENT}) and ({SEGMENT}) tangent{_IN_CIRCLE}?(?: ?at ({POINT} and {POINT}))?"
        rf"{_IN_CIRCLE}?",
        _two_tangents,
    ),
    (rf"{_NAMES} secant{_IN_CIRCLE}?", _secant),
    (rf"secants? {_NAMES} and {_NAMES}{_IN_CIRCLE}?", _two_secants),
    (rf"{_NAMES} and {_NAMES} secants?{_IN_CIRCLE}?", _two_secants),
    (rf"{_S} diameter{_IN_CIRCLE}?", _diameter),
    (rf"diameter {_S}", _diameter_in_front),
    (rf"{_S} chord{_IN_CIRCLE}?", _chord),
    (rf"({SEGMENT}) and ({SEGMENT}) chord{_IN_CIRCLE}?", _chords),
    (rf"chord {_S}", _chord_in_front),
    (rf"({POINT}) on (?:(major|minor) )?arc {_S}", _on_arc),
    (rf"angle {_NAMES} (inscribed|central)(?: angle)?{_IN_CIRCLE}?", _inscribed_angle),
    (
        rf"(?:{_ANY_ADJECTIVES} )?(?:({SHAPES}|polygon) )?{_NAMES} inscribed{_IN_CIRCLE}",
        _inscribed,
    ),
    (rf"circle ({POINT}) inscribed in {_MAYBE_SHAPE}{_NAMES}", _circle_in),
    (rf"circle ({POINT}) around {_MAYBE_SHAPE}{_NAMES}", _circle_around),
    (rf"{_MAYBE_SHAPE}{_NAMES} around{_IN_CIRCLE}", _polygon_around),
    # Sizes without an equals sign
    (rf"({_MEASURE}) and ({_MEASURE}) (supplementary|complementary)", _together),
    (
        rf"({_MEASURE}) (supplementary|complementary) ({_MEASURE})",
        lambda draft, first, word, second: _together(draft, first, second, word),
    ),
    (rf"({_EQUAL_PART}) and ({_EQUAL_PART}) (equal|congruent)", _together),
    (
        rf"angle ({POINT}) and ({POINT}) (equal|congruent)",
        lambda draft, first, second, word: _together(draft, f"angle {first}", second, word),
    ),
    (rf"angle triangle ({POINT})({POINT})({POINT}) in ratio (.+)", _angles_in_ratio),
    (
        r"(radius|diameter|circumference|area|perimeter|height|side(?: length)?)s? ([^A-Z=]+)",
        _length_of_size,
    ),
    (rf"circle(?: {POINT})?|triangle|there", _nothing),
)
_WORDS = (
    *SIDE_WORDS,
    *_ADJECTIVES.split("|"),
    *("find", "at", "draw", "on", "between", "and", "in", "with", "through", "from", "right"),
    *("parallel", "perpendicular", "midpoint", "bisects", "bisector", "bisect", "each", "other"),
    *("meet", "intersection", "intersect", "extension", "extended", "beyond", "past", "collinear"),
    *("tangent", "secant", "diameter", "chord", "inscribed", "central", "around", "center"),
    *("similar", "congruent", "equal", "supplementary", "complementary", "polygon", "diagonals"),
    *("altitude", "median", "midsegment", "centroid", "incenter", "orthocenter", "circumcenter"),
    *("base", "vertex", "apex", "hypotenuse", "where", "such", "that", "has", "whose"),
)
