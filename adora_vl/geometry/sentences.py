"""The grammar of sentences: which patterns are facts, and what each says in logic form."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise

from adora_vl.geometry.circle_sentences import (
    chord,
    chords,
    circle,
    circle_around,
    circle_in,
    circle_of_radius,
    diameter,
    in_order_on_circle,
    inscribed,
    inscribed_angle,
    on_arc,
    on_circle,
    polygon_around,
    secant,
    sector,
    tangent,
    two_secants,
    two_tangents,
)
from adora_vl.geometry.draft import (
    ADJECTIVE_PATTERN,
    POINT_PATTERN,
    SHAPE_PATTERN,
    LogicFormDraft,
    SentenceError,
    make_term,
    split_point_names,
)
from adora_vl.geometry.line_sentences import (
    bisect_each,
    bisects_angle,
    bisects_line,
    collinear,
    cut_two_lines,
    diagonals_meet,
    extended,
    meet,
    meets_two_lines,
    midpoint,
    nothing,
    on_lines,
    parallel_bases,
    perpendicular_at,
    perpendicular_bisector,
    place,
    right_angle,
    two_lines,
    two_midpoints,
)
from adora_vl.geometry.logic_form import Term
from adora_vl.geometry.shape_sentences import (
    alike,
    apex,
    base,
    bisector,
    centre_of_triangle,
    diagonal,
    from_corner,
    hypotenuse,
    line_of_triangle,
    line_to_side,
    midsegment,
    midsegment_parallel,
    right_at,
    special,
    two_roles_meet,
)
from adora_vl.geometry.spelling import plain_sentence
from adora_vl.geometry.text_sides import WORDS as SIDE_WORDS
from adora_vl.geometry.text_sides import check_word, read_side

COORDINATE_PATTERN = r"(-?\d+(?:\.\d+)?)"
SEGMENT_PATTERN = rf"{POINT_PATTERN}{POINT_PATTERN}"
# A shape with its corners, such as `isosceles triangle ABC`.
_NAMED_SHAPE_PATTERN = (
    rf"(?:(?:{ADJECTIVE_PATTERN})\s+)*(?:{SHAPE_PATTERN})\s+(?:{POINT_PATTERN}){{3,}}"
)
_SHAPE_AT_END_PATTERN = re.compile(rf"(?P<fact>.+?)\s+(?P<shape>{_NAMED_SHAPE_PATTERN})")
_SHAPE_AT_BEGIN_PATTERN = re.compile(rf"(?P<shape>{_NAMED_SHAPE_PATTERN})\s+(?P<fact>.+)")
# Words between two facts of one sentence.
_CLAUSE_JOINT_PATTERN = re.compile(
    r",?\s+(?:with|and|where|such(?: that)?|so(?: that)?|has|have|having|whose"
    rf"|in(?=\s+{_NAMED_SHAPE_PATTERN}))\s+"
)
_QUESTION_PATTERN = re.compile(r"find (.+?) (?:if|when|in (?=[a-z])) ?(.+)")
_MAX_CLAUSES = 8  # facts of one sentence


def read_sentence(draft: LogicFormDraft, sentence: str) -> None:
    """Take a sentence into the draft: one fact, or several with "and" or "with" between them.

    Raises `SentenceError` where the grammar does not have a part.
    """
    plain = plain_sentence(sentence)
    if not plain:
        return  # such as "In the figure,"
    question = _QUESTION_PATTERN.fullmatch(plain)
    if question:
        # "Find AC if AB = 5": the facts may name what the question refers to.
        plain = question[2]
    clauses = _split_into_clauses(plain, _MAX_CLAUSES)
    if clauses is None:
        # Angles or lengths that are called congruent are equal, so the word becomes an equals sign.
        plain = plain.replace("congruent", "=")
        clauses = _split_into_clauses(plain, _MAX_CLAUSES)
    if clauses is None and "=" not in plain:
        raise SentenceError(_describe_fault(plain))
    for clause in clauses or [plain]:
        _read_clause(draft, clause)
    if question:
        _add_question(draft, question[1])


def _split_into_clauses(plain: str, limit: int) -> list[str] | None:
    """Split a sentence into at most `limit` facts, by the first division that leaves only facts.

    Returns None where there is no such division. For example, `D on BC and DE parallel AC triangle
    ABC` gives the three facts `D on BC`, `triangle ABC` and `DE parallel AC`.
    """
    if _is_one_clause(plain):
        return [plain]
    if limit <= 1:
        return None
    for first_part, rest in _possible_splits(plain):
        if not _is_one_clause(first_part):
            continue
        further_clauses = _split_into_clauses(rest, limit - 1)
        if further_clauses is not None:
            return [first_part, *further_clauses]
    return None


def _possible_splits(plain: str) -> Iterator[tuple[str, str]]:
    """Yield the ways to divide a sentence in two.

    First it is divided at words such as "and", from the last one on. Then a shape at its end or at
    its begin is taken for a fact of its own: "DE is parallel to BC of triangle ABC". Such a shape
    is the first part, since the other one may refer to it: "AB is the base of isosceles triangle
    ABC".
    """
    joints = list(_CLAUSE_JOINT_PATTERN.finditer(plain))
    for joint in reversed(joints):
        yield plain[: joint.start()], plain[joint.end() :]
    shape_at_end = _SHAPE_AT_END_PATTERN.fullmatch(plain)
    if shape_at_end:
        yield shape_at_end["shape"], shape_at_end["fact"]
    shape_at_begin = _SHAPE_AT_BEGIN_PATTERN.fullmatch(plain)
    if shape_at_begin:
        yield shape_at_begin["shape"], shape_at_begin["fact"]
    for joint in joints:
        # A shape behind the first fact of several.
        shape_at_end = _SHAPE_AT_END_PATTERN.fullmatch(plain[: joint.start()])
        if shape_at_end:
            yield shape_at_end["shape"], f"{shape_at_end['fact']}{plain[joint.start() :]}"


def _is_one_clause(plain: str) -> bool:
    """Tell whether a text is one fact: a pattern of the grammar fits, or it is an equation."""
    if _find_rule(plain) is not None:
        return True
    if "=" in plain:
        return not _CLAUSE_JOINT_PATTERN.search(plain)
    # With its roles a segment may stand in any fact: "chord AB perpendicular diameter CD".
    return _find_rule(_ROLE_OF_SEGMENT_PATTERN.sub(r"\g<segment>", plain)) is not None


def _find_rule(plain: str) -> tuple[Callable[..., object], dict[str, str | None]] | None:
    """Return what the first pattern that fits calls, with its arguments by their names."""
    for pattern, build in _GRAMMAR:
        match = pattern.fullmatch(plain)
        if match:
            return build, match.groupdict()
    return None


def _read_clause(draft: LogicFormDraft, plain: str) -> None:
    """Take one fact into the draft. Raises `SentenceError`."""
    rule = _find_rule(plain)
    if rule is None and "=" not in plain:
        rule = _find_rule(_note_descriptions(draft, plain))
    if rule is None:
        _add_equation(draft, plain)
        return
    build, arguments = rule
    build(draft, **arguments)


def _describe_fault(plain: str) -> str:
    """Say which word of a sentence is not known, or that the sentence as a whole is not known."""
    for word in re.findall(r"[a-z]{2,}", plain):
        try:
            check_word(word, _KNOWN_WORDS)
        except SentenceError as error:
            return str(error)
    return (
        "this is no fact that is known; facts are such as AB = 5, angle ABC = 40, D on AC, AB "
        "parallel CD"
    )


# Equations and the question


def _add_equation(draft: LogicFormDraft, text: str) -> None:
    """Note an equation of two or more sides.

    `AB = CD = 5` gives AB = CD and CD = 5. With ratios `AB : BC : CA = 3 : 4 : 5` gives
    AB : BC = 3 : 4 and BC : CA = 4 : 5.
    """
    sides = [_read_ratio(draft, _note_descriptions(draft, side)) for side in text.split("=")]
    for parts, partners in pairwise(sides):
        if len(parts) != len(partners):
            raise SentenceError("the ratios on its sides have not as many parts")
        if len(parts) == 1:
            draft.add_equation(parts[0], partners[0])
            continue
        for i in range(1, len(parts)):
            ratio = make_term("RatioOf", parts[i - 1], parts[i])
            draft.add_equation(ratio, make_term("RatioOf", partners[i - 1], partners[i]))


def _read_ratio(draft: LogicFormDraft, side: str) -> list[Term]:
    """Return the parts of a side between colons, such as 3, 4, 5 of `3 : 4 : 5`; most have one."""
    return [read_side(draft, part) for part in side.split(":")]


def _note_descriptions(draft: LogicFormDraft, side: str) -> str:
    """Return a side without the words that describe what it measures, and note what these say.

    | a side | what is left | what is noted |
    |---|---|---|
    | `diameter AB` | `AB` | AB is a diameter |
    | `perimeter equilateral triangle ABC` | `perimeter triangle ABC` | ABC is equilateral |
    | `central angle AOB` | `angle AOB` | A and B lie on the circle O |
    | `arc AB circle O` | `arc AB` | A and B lie on the circle O |
    | `exterior angle at C triangle ABC` | `exterior angle C` | ABC is a triangle |
    | `AB square ABCD` | `AB` | ABCD is a square |
    """

    def note_role(match: re.Match[str]) -> str:
        _add_role(draft, match["role"], match["segment"])
        return match["segment"]

    def note_shape(match: re.Match[str]) -> str:
        special(draft, **match.groupdict())
        return f"{match['kind'] or ''} {match['corner_names']}".strip()

    def note_angle(match: re.Match[str]) -> str:
        inscribed_angle(draft, match["angle_name"], kind=match["kind"], centre=None)
        return f"angle {match['angle_name']}"

    def note_arc(match: re.Match[str]) -> str:
        on_circle(draft, match["points"], match["centre"])
        return f"arc {match['points']}"

    def note_shape_of_part(match: re.Match[str]) -> str:
        _read_clause(draft, match["shape"])
        return match["part"].replace(" at ", " ")

    for pattern, note in (
        (_PART_OF_SHAPE_PATTERN, note_shape_of_part),
        (_ROLE_OF_SEGMENT_PATTERN, note_role),
        (_SPECIAL_SHAPE_PATTERN, note_shape),
        (_KIND_OF_ANGLE_PATTERN, note_angle),
        (_ARC_OF_CIRCLE_PATTERN, note_arc),
    ):
        side = pattern.sub(note, side)
    return side


_ROLE_PATTERN = (
    "diameter|radius|chord|altitude|height|median|hypotenuse|base|leg|midsegment|tangent"
)
_ROLE_OF_SEGMENT_PATTERN = re.compile(
    rf"\b(?P<role>{_ROLE_PATTERN}) (?P<segment>{SEGMENT_PATTERN})(?!{POINT_PATTERN})"
)
_SPECIAL_SHAPE_PATTERN = re.compile(
    rf"\b(?P<adjectives>(?:{ADJECTIVE_PATTERN})(?: (?:{ADJECTIVE_PATTERN}))?) "
    rf"(?:(?P<kind>{SHAPE_PATTERN}|polygon) )?(?P<corner_names>(?:{POINT_PATTERN}){{3,}})"
)
_KIND_OF_ANGLE_PATTERN = re.compile(
    rf"\b(?P<kind>central|inscribed) angle (?P<angle_name>(?:{POINT_PATTERN}){{3}})"
)
_PART_OF_SHAPE_PATTERN = re.compile(
    rf"\b(?P<part>(?:exterior )?angle (?:at )?(?:{POINT_PATTERN})+|{SEGMENT_PATTERN}) "
    rf"(?:in )?(?P<shape>{_NAMED_SHAPE_PATTERN})"
)
_ARC_OF_CIRCLE_PATTERN = re.compile(
    rf"\barc (?P<points>(?:{POINT_PATTERN}){{2,3}}) circle (?P<centre>{POINT_PATTERN})"
)


def _add_role(draft: LogicFormDraft, role: str, segment: str) -> None:
    """Note that a segment is what its `role` says: a diameter, a radius, an altitude, ..."""
    start, end = split_point_names(segment)
    if role == "diameter":
        diameter(draft, start, end)
    elif role == "radius":
        # The first end is the centre if a circle with that centre is known; else the second end is.
        centre = start if start in draft.circles else end
        draft.name_circle(centre)
        point_on_circle = end if centre == start else start
        draft.put_on_circle(point_on_circle, centre)
    elif role == "chord":
        chord(draft, start, end)
    elif role == "tangent":
        tangent(draft, start, end)
    elif role in ("altitude", "median", "height"):
        corners = draft.triangle_with(start)
        line_of_triangle(draft, start=start, end=end, role=role, corner_names="".join(corners))
    elif role == "hypotenuse":
        hypotenuse(draft, start, end)
    elif role == "base":
        base(draft, start, end)


def _add_midpoint_of_role(
    draft: LogicFormDraft,
    point: str,
    role: str,
    segment: str,
    adjectives: str | None,
    corner_names: str | None,
) -> None:
    """Note the midpoint of a side by its role: "D is the midpoint of hypotenuse AB".

    The triangle of the side may be named behind it, as in "of right triangle ABC".
    """
    if corner_names is not None:
        special(draft, adjectives or "", kind="triangle", corner_names=corner_names)
    _add_role(draft, role, segment)
    start, end = split_point_names(segment)
    midpoint(draft, point=point, start=start, end=end)


def _add_question(draft: LogicFormDraft, measure: str) -> None:
    """Note the question: what is to be computed."""
    parts = _read_ratio(draft, _note_descriptions(draft, measure))
    if len(parts) > 2:
        raise SentenceError("a ratio that is asked for has two parts")
    goal = parts[0] if len(parts) == 1 else make_term("RatioOf", *parts)
    draft.question.append(make_term("Find", goal))


def _add_size(draft: LogicFormDraft, measure: str, size: str) -> None:
    """Note a size without a sign before it, as in "with radius 5"."""
    draft.add_equation(read_side(draft, measure), read_side(draft, size))


def _add_angle_ratio(
    draft: LogicFormDraft, first: str, second: str, third: str, ratio: str
) -> None:
    """Note that the angles of a triangle are in a ratio, in the order of its corners."""
    draft.draw_polygon("Triangle", (first, second, third))
    _add_equation(draft, f"angle {first} : angle {second} : angle {third} = {ratio}")


def _add_pair_of_measures(draft: LogicFormDraft, first: str, second: str, word: str) -> None:
    """Note that two angles are supplementary or complementary, or that two measures are equal."""
    # "angle A and B" means two angles, so B becomes "angle B".
    if first.startswith("angle") and not second.startswith("angle"):
        second = f"angle {second}"
    measures = [read_side(draft, first), read_side(draft, second)]
    if word in ("equal", "congruent"):
        draft.add_equation(measures[0], measures[1])
        return
    draft.facts.append(make_term(word.capitalize(), *measures))


# What may stand in the gaps of the patterns below: `<name:kind>` is a part of that kind, handed on
# as the argument `name`; `<name>` is a point, and `<:kind>` is handed on to nobody.
_PATTERN_BY_KIND = {
    "point": POINT_PATTERN,
    "segment": SEGMENT_PATTERN,
    "corners": rf"(?:{POINT_PATTERN}){{3,}}",
    "angle": rf"(?:{POINT_PATTERN})+",
    "points": rf"(?:{POINT_PATTERN})(?:,? ?(?:and )?{POINT_PATTERN})*",
    "number": COORDINATE_PATTERN,
    "shape": SHAPE_PATTERN,
    "adjectives": rf"(?:{ADJECTIVE_PATTERN})(?: (?:{ADJECTIVE_PATTERN}))?",
    "measure": rf"(?:angle )?(?:\d+|{POINT_PATTERN}(?:{POINT_PATTERN}{POINT_PATTERN})?)",
    "part": rf"(?:angle (?:\d+|{POINT_PATTERN}(?:{POINT_PATTERN}{POINT_PATTERN})?)"
    rf"|(?:arc )?{SEGMENT_PATTERN})",
    "size": "[^A-Z=]+",
    "text": ".+",
}
# The words "in circle O", behind what lies in it. The name of the centre may be left out.
_IN_CIRCLE = r"(?:,? ?(?:in )?circle(?:(?: (?:with )?center)? ?<centre>)?)"
_SENTENCES: tuple[tuple[str, Callable[..., object]], ...] = (
    (r"find <measure:text>", _add_question),
    (r"<point> at \(?<x:number>, ?<y:number>\)?", place),
    (r"draw <start><end>", LogicFormDraft.draw_line),
    # Shapes
    (r"<kind:shape> <corner_names:corners>", LogicFormDraft.add_shape),
    (r"(?:<:shape> )?<corner_names:corners> <kind:shape>", LogicFormDraft.add_shape),
    (r"<adjectives:adjectives> (?P<kind>polygon|<:shape>) <corner_names:corners>", special),
    (
        r"(?:<:shape> )?<corner_names:corners> <adjectives:adjectives>"
        r"(?: (?P<kind>polygon|<:shape>))?",
        special,
    ),
    (r"(?:triangle )?<corner_names:corners> right (?:triangle )?at <corner>", right_at),
    (r"right triangle <corner_names:corners> (?:(?:with )?right angle )?at <corner>", right_at),
    (
        r"(?:<:shape> ?)?<first:corners> (?P<relation>similar|congruent) "
        r"(?:<:shape> )?<second:corners>",
        alike,
    ),
    (
        r"(?:<:shape> )?<first:corners> and (?:<:shape> )?<second:corners> "
        r"(?P<relation>similar|congruent)(?: <:shape>)?",
        alike,
    ),
    (r"bases? <a><b> and <c><d>", parallel_bases),
    (r"base <start><end>", base),
    (r"<start><end> base", base),
    (r"(?:vertex|apex|vertex angle)(?: at)? <corner>", apex),
    (r"hypotenuse <start><end>", hypotenuse),
    (r"<start><end> hypotenuse(?: (?:right )?triangle <triangle:corners>)?", hypotenuse),
    # Lines and points
    (r"<a><b> (?P<relation>parallel|perpendicular) <c><d>", two_lines),
    (r"(?P<relation>parallel|perpendicular) <a><b> and <c><d>", two_lines),
    (r"<a><b> perpendicular <c><d> at <at>", perpendicular_at),
    (r"<a><b> and <c><d> (?P<relation>parallel|perpendicular)(?: each other)?", two_lines),
    (r"<points:points> on ?circle(?: <centre>)?", on_circle),
    (r"<points:points> on ?circle(?: <centre>)? in (?:this )?order", in_order_on_circle),
    (r"<point> (?:on )?between <start> and <end>", LogicFormDraft.put_on_line),
    (r"<point> on <start><end>", LogicFormDraft.put_on_line),
    (r"<points:points> on <start><end>", on_lines),
    (r"<points:points> collinear", collinear),
    (r"<point> on extension <start><end>(?: (?:beyond|past|through) <beyond>)?", extended),
    (r"<start><end> extended(?: (?:beyond|past|through) <beyond>)? <point>", extended),
    (r"<point> midpoint <start><end>", midpoint),
    (
        r"<point> midpoint (?P<role>hypotenuse|diameter|chord|base|leg) <segment:segment>"
        r"(?: (?:<adjectives:adjectives> )?triangle <corner_names:corners>)?",
        _add_midpoint_of_role,
    ),
    (r"<first> and <second> midpoint <a><b> and <c><d>", two_midpoints),
    (r"<a><b> (?:and )?<c><d> meet at <point>", meet),
    (r"<a><b> meet <c><d> at <point>", meet),
    (
        r"<line:segment> meet <first:segment> at <near> and <second:segment> at <far>",
        meets_two_lines,
    ),
    (
        r"(?P<relation>parallel )?<first:segment> and <second:segment> meet by <line:segment> "
        r"at <near> and <far>",
        cut_two_lines,
    ),
    (r"<point> intersection <a><b> and <c><d>", meet),
    (r"diagonals(?: (?:<kind:shape> )?<corner_names:corners>)? meet at <point>", diagonals_meet),
    (r"<start><end> diagonal(?: (?:<kind:shape> ?)?<corner_names:corners>)?", diagonal),
    (r"<start><end> bisects angle <angle_name:angle>", bisects_angle),
    (r"<start><end> (?:angle )?bisector (?:angle )?<angle_name:angle>", bisects_angle),
    (r"<start><end> (?:angle )?bisector triangle <corner_names:corners>", bisector),
    (r"<a><b> bisects <c><d>(?: at <at>)?", bisects_line),
    (r"<a><b> and <c><d> bisect each other(?: at <at>)?", bisect_each),
    (r"<a><b> perpendicular bisector <c><d>", perpendicular_bisector),
    (r"right angle (?:at )?<angle_name:angle>", right_angle),
    (r"angle <angle_name:angle> right(?: angle)?", right_angle),
    # Lines of triangles and trapezoids
    (
        r"<start><end> (?P<role>altitude|height|median) (?:<:shape> )?<corner_names:corners>"
        r"(?: <side:segment>)?",
        line_of_triangle,
    ),
    (
        r"<start><end> (?P<role>altitude|height|median) (?:from <:point> )?<side:segment>",
        line_to_side,
    ),
    (r"(?P<role>altitude|height|median|hypotenuse) <segment:segment>", _add_role),
    (
        r"(?P<role>altitude|median|(?:angle )?bisector)(?: from)?(?: angle)? "
        r"(?P<corner><:point>(?:<:point><:point>)?) meet <side:segment> at <foot>",
        from_corner,
    ),
    (
        r"(?P<role>altitudes|medians|(?:angle )?bisectors) <a><b> and <c><d> "
        r"(?:triangle <triangle:corners> )?meet at <at>",
        two_roles_meet,
    ),
    (r"<segment:segment> (?P<role>altitude|median)", _add_role),
    (
        r"<start><end> midsegment(?: (?P<kind>triangle|trapezoid)?)?(?: ?<corner_names:corners>)?",
        midsegment,
    ),
    (
        r"<start><end> midsegment triangle <corner_names:corners> parallel <base:segment>",
        midsegment_parallel,
    ),
    (
        r"<point> (?P<centre>centroid|incenter|orthocenter|circumcenter) "
        r"(?:triangle )?<corner_names:corners>",
        centre_of_triangle,
    ),
    # Circles
    (r"circle ?<centre>(?: ?(?::|with|through) ?<points:points>)?", circle),
    (r"circle with radius (?P<radius>[^A-Z=]+?) (?:and|with) center <centre>", circle_of_radius),
    (r"<:point> (?:outside|inside) circle <centre>", circle),
    (r"circle (?:with )?center <centre>(?: ?(?::|with|through) ?<points:points>)?", circle),
    (r"<centre> center(?: circle)?(?: (?:through|with) <points:points>)?", circle),
    (rf"<start><end> tangent{_IN_CIRCLE}?(?: ?at <at>)?(?: from <:point>)?", tangent),
    (rf"<start><end> tangent at <at>{_IN_CIRCLE}", tangent),
    (
        rf"<first:segment> and <second:segment> tangent{_IN_CIRCLE}?(?: ?at <a> and <b>)?"
        rf"{_IN_CIRCLE.replace('<centre>', '<behind>')}?(?: from <:point>)?",
        two_tangents,
    ),
    (
        rf"tangent <first:segment> and <second:segment>(?: from <:point>)?{_IN_CIRCLE}?"
        r"(?: ?at <a> and <b>)?(?: from <:point>)?",
        two_tangents,
    ),
    (rf"<points:corners> secant{_IN_CIRCLE}?", secant),
    (rf"secants? <first:corners> and (?:secant )?<second:corners>{_IN_CIRCLE}?", two_secants),
    (rf"<first:corners> and <second:corners> secants?{_IN_CIRCLE}?", two_secants),
    (rf"<start><end> diameter{_IN_CIRCLE}?", diameter),
    (r"diameter <start><end>", diameter),
    (rf"<start><end> chord{_IN_CIRCLE}?", chord),
    (rf"<a><b> and <c><d> chord{_IN_CIRCLE}?(?: meet at <at>)?", chords),
    (rf"chord <a><b> and <c><d>{_IN_CIRCLE}?(?: meet at <at>)?", chords),
    (rf"sector <start><corner><end>{_IN_CIRCLE}?", sector),
    (r"chord <start><end>", chord),
    (r"<point> on (?:(?P<size>major|minor) )?arc <start><end>", on_arc),
    (
        rf"angle <angle_name:corners> (?P<kind>inscribed|central)(?: angle)?{_IN_CIRCLE}?",
        inscribed_angle,
    ),
    (
        r"(?:<adjectives:adjectives> )?(?:(?P<kind>polygon|<:shape>) )?<corner_names:corners> "
        rf"inscribed{_IN_CIRCLE}",
        inscribed,
    ),
    (rf"<corner_names:corners> <kind:shape> inscribed{_IN_CIRCLE}", inscribed),
    (r"circle <centre> inscribed in (?:<kind:shape> ?)?<corner_names:corners>", circle_in),
    (r"circle <centre> around (?:<kind:shape> ?)?<corner_names:corners>", circle_around),
    (rf"(?:<kind:shape> ?)?<corner_names:corners> around{_IN_CIRCLE}", polygon_around),
    # Sizes without an equals sign
    (
        r"<first:measure> and <second:measure> (?P<word>supplementary|complementary)",
        _add_pair_of_measures,
    ),
    (
        r"<first:measure> (?P<word>supplementary|complementary) <second:measure>",
        _add_pair_of_measures,
    ),
    (r"<first:part> and <second:part> (?P<word>equal|congruent)", _add_pair_of_measures),
    (
        r"(?P<first>angle <:point>) and <second> (?P<word>equal|congruent)",
        _add_pair_of_measures,
    ),
    (r"angle triangle <first><second><third> in ratio <ratio:text>", _add_angle_ratio),
    (
        r"(?P<measure>radius|diameter|circumference|area|perimeter|height|side(?: length)?)s? "
        r"<size:size>",
        _add_size,
    ),
    (r"circle(?: <:point>)?|triangle|there", nothing),
)


def _compile_pattern(sentence: str) -> re.Pattern[str]:
    """Return the pattern of a sentence with what may stand in its gaps."""

    def fill(gap: re.Match[str]) -> str:
        """Return the pattern of one gap; a group with its name, where it has one."""
        name = gap["name"]
        kind = gap["kind"] or "point"
        group = f"?P<{name}>" if name else "?:"
        return f"({group}{_PATTERN_BY_KIND[kind]})"

    # A named group of the regular expression, `(?P<name>...)`, is no gap.
    return re.compile(re.sub(r"(?<!\?P)<(?P<name>\w*):?(?P<kind>\w*)>", fill, sentence))


_GRAMMAR = tuple((_compile_pattern(sentence), build) for sentence, build in _SENTENCES)
_KNOWN_WORDS = (
    *SIDE_WORDS,
    *ADJECTIVE_PATTERN.split("|"),
    *("find", "at", "draw", "on", "between", "and", "in", "with", "through", "from", "right"),
    *("parallel", "perpendicular", "midpoint", "bisects", "bisector", "bisect", "each", "other"),
    *("meet", "intersection", "intersect", "extension", "extended", "beyond", "past", "collinear"),
    *("tangent", "secant", "diameter", "chord", "inscribed", "central", "around", "center"),
    *("similar", "congruent", "equal", "supplementary", "complementary", "polygon", "diagonals"),
    *("altitude", "median", "midsegment", "centroid", "incenter", "orthocenter", "circumcenter"),
    *("base", "vertex", "apex", "hypotenuse", "where", "such", "that", "has", "whose"),
)
