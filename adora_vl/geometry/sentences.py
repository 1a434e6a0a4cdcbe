"""The grammar of sentences: which patterns are facts, and what each says in logic form."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

from adora_vl.geometry.circle_sentences import (
    chord,
    chord_in_front,
    chords,
    circle,
    circle_around,
    circle_in,
    circle_of_radius,
    diameter,
    diameter_in_front,
    inscribed,
    inscribed_angle,
    on_arc,
    on_circle,
    polygon_around,
    secant,
    tangent,
    tangent_at,
    two_secants,
    two_tangents,
)
from adora_vl.geometry.draft import (
    POINT_PATTERN,
    SHAPE_PATTERN,
    Draft,
    SentenceError,
    make_term,
    split_point_names,
)
from adora_vl.geometry.forms import Term
from adora_vl.geometry.line_sentences import (
    bisect_each,
    bisects_angle,
    bisects_line,
    both_lines,
    collinear,
    diagonals_meet,
    draw,
    extended,
    intersection,
    meet,
    midpoint,
    nothing,
    on_extension,
    on_line,
    on_lines,
    perpendicular_at,
    perpendicular_bisector,
    place,
    right_angle,
    two_lines,
    two_midpoints,
)
from adora_vl.geometry.shape_sentences import (
    alike,
    apex,
    base,
    bisector,
    both_alike,
    centre_of_triangle,
    diagonal,
    from_corner,
    hypotenuse,
    line_of_triangle,
    line_to_side,
    midsegment,
    midsegment_parallel,
    right_at,
    shape,
    shape_behind,
    special,
    special_behind,
    two_roles_meet,
)
from adora_vl.geometry.spelling import plain_sentence
from adora_vl.geometry.text_sides import WORDS as SIDE_WORDS
from adora_vl.geometry.text_sides import check_word, read_side

COORDINATE_PATTERN = r"(-?\d+(?:\.\d+)?)"
SEGMENT_PATTERN = rf"{POINT_PATTERN}{POINT_PATTERN}"
_SEG = rf"({POINT_PATTERN})({POINT_PATTERN})"
_NAMES = rf"((?:{POINT_PATTERN}){{3,}})"
_LIST = rf"((?:{POINT_PATTERN})(?:,? ?(?:and )?{POINT_PATTERN})*)"
_ADJECTIVES = "regular|isosceles|right|equilateral|cyclic"
_ANY_ADJECTIVES = rf"((?:{_ADJECTIVES})(?: (?:{_ADJECTIVES}))?)"
_IN_CIRCLE = rf"(?:,? ?(?:in )?circle(?:(?: (?:with )?center)? ?({POINT_PATTERN}))?)"
# Words between two facts of one sentence.
_CLAUSE_JOINT_PATTERN = re.compile(
    r",?\s+(?:with|and|where|such that|so that|has|have|having|whose)\s+"
)
_QUESTION_PATTERN = re.compile(r"find (.+?) (?:if|when|in (?=[a-z])) ?(.+)")
_MAX_CLAUSES = 8  # facts of one sentence


def read_sentence(draft: Draft, sentence: str) -> None:
    """Take a sentence into the draft: one fact, or several with "and" or "with" between them.

    Raises `SentenceError` where a part is none of the grammar.
    """
    plain = plain_sentence(sentence)
    if not plain:
        return  # such as "In the figure,"
    question = _QUESTION_PATTERN.fullmatch(plain)
    if question:
        # "Find AC if AB = 5": the facts may name what the question refers to.
        plain = question[2]
    clauses = _split_into_clauses(plain, _MAX_CLAUSES)
    if clauses is None and "=" not in plain and "congruent" in plain:
        # Of measures, congruent says no more than equal.
        plain = plain.replace("congruent", "=")
    if clauses is None and "=" not in plain:
        raise SentenceError(_describe_fault(plain))
    for clause in clauses or [plain]:
        _read_clause(draft, clause)
    if question:
        _add_question(draft, question[1])


def _split_into_clauses(plain: str, limit: int) -> list[str] | None:
    """Split a sentence into facts, as few as possible; None where a part is none."""
    if _is_one_clause(plain):
        return [plain]
    if limit <= 1:
        return None
    # From the last joint on, so that the first clause is as long as possible.
    joints = list(_CLAUSE_JOINT_PATTERN.finditer(plain))
    for joint in reversed(joints):
        first_clause = plain[: joint.start()]
        if not _is_one_clause(first_clause):
            continue
        further_clauses = _split_into_clauses(plain[joint.end() :], limit - 1)
        if further_clauses is not None:
            return [first_clause, *further_clauses]
    return None


def _is_one_clause(plain: str) -> bool:
    """Tell whether a text is one fact: a pattern of the grammar fits, or it is an equation."""
    if _find_rule(plain) is not None:
        return True
    return "=" in plain and not _CLAUSE_JOINT_PATTERN.search(plain)


def _find_rule(plain: str) -> tuple[Callable[..., None], re.Match[str]] | None:
    """Return the first pattern that fits, with its match."""
    for pattern, build in _GRAMMAR:
        match = re.fullmatch(pattern, plain)
        if match:
            return build, match
    return None


def _read_clause(draft: Draft, plain: str) -> None:
    """Take one fact into the draft. Raises `SentenceError`."""
    rule = _find_rule(plain)
    if rule is None:
        _add_equation(draft, plain)
        return
    build, match = rule
    build(draft, *match.groups())


def _describe_fault(plain: str) -> str:
    """Say which word of a sentence is not known, or that the sentence as a whole is none."""
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


def _add_equation(draft: Draft, text: str) -> None:
    """Note an equation of two or more sides: each side equals the one before it.

    Sides such as `AB : BC` are ratios, which agree part by part.
    """
    sides = [_read_ratio(draft, _note_and_drop_roles(draft, side)) for side in text.split("=")]
    for parts, partners in pairwise(sides):
        if len(parts) != len(partners):
            raise SentenceError("the ratios on its sides have not as many parts")
        if len(parts) == 1:
            draft.add_equation(parts[0], partners[0])
            continue
        for i in range(1, len(parts)):
            ratio = make_term("RatioOf", parts[i - 1], parts[i])
            draft.add_equation(ratio, make_term("RatioOf", partners[i - 1], partners[i]))


def _read_ratio(draft: Draft, side: str) -> list[Term]:
    """Return the parts of a side between colons; of most sides there is one."""
    return [read_side(draft, part) for part in side.split(":")]


def _note_and_drop_roles(draft: Draft, side: str) -> str:
    """Return a side without words such as "diameter", which are noted as facts."""

    def take(match: re.Match[str]) -> str:
        """Note the fact, and leave the segment."""
        _add_role(draft, match[1], match[2])
        return match[2]

    return re.sub(rf"\b({_ROLE_PATTERN}) ({SEGMENT_PATTERN})(?!{POINT_PATTERN})", take, side)


_ROLE_PATTERN = (
    "diameter|radius|chord|altitude|height|median|hypotenuse|base|leg|midsegment|tangent"
)


def _add_role(draft: Draft, role: str, segment: str) -> None:
    """Note that a segment is called a diameter or the like, of the only shape that has one."""
    start, end = split_point_names(segment)
    if role == "diameter":
        diameter(draft, start=start, end=end, centre=None)
    elif role == "radius":
        # One end is the centre of a circle that is known; else the second end is taken for it.
        centre = start if start in draft.circles else end
        draft.name_circle(centre)
        point_on_circle = end if centre == start else start
        draft.put_on_circle(point_on_circle, centre)
    elif role == "chord":
        chord(draft, start=start, end=end, centre=None)
    elif role == "tangent":
        tangent(draft, start=start, end=end, centre=None, at=None)
    elif role in ("altitude", "median", "height"):
        corners = draft.triangle_with(start)
        line_of_triangle(draft, start=start, end=end, role=role, names="".join(corners))
    elif role == "hypotenuse":
        hypotenuse(draft, start, end)
    elif role == "base":
        base(draft, start, end)


def _add_role_behind(draft: Draft, segment: str, role: str) -> None:
    """Note a segment named before its role, in the only triangle that has it."""
    _add_role(draft, role, segment)


def _add_question(draft: Draft, measure: str) -> None:
    """Note the question: what is to be computed."""
    parts = _read_ratio(draft, _note_and_drop_roles(draft, measure))
    if len(parts) > 2:
        raise SentenceError("a ratio that is asked for has two parts")
    goal = parts[0] if len(parts) == 1 else make_term("RatioOf", *parts)
    draft.question.append(make_term("Find", goal))


def _add_size(draft: Draft, measure: str, size: str) -> None:
    """Note a size without a sign before it, as in "with radius 5"."""
    draft.add_equation(read_side(draft, measure), read_side(draft, size))


def _add_angle_ratio(draft: Draft, first: str, second: str, third: str, ratio: str) -> None:
    """Note that the angles of a triangle are in a ratio, in the order of its corners."""
    draft.draw_polygon("Triangle", (first, second, third))
    _add_equation(draft, f"angle {first} : angle {second} : angle {third} = {ratio}")


def _add_pair_of_measures(draft: Draft, first: str, second: str, word: str) -> None:
    """Note that two angles are supplementary or complementary; two measures are equal."""
    # In "angle A and B" the word stands once for both.
    if first.startswith("angle") and not second.startswith("angle"):
        second = f"angle {second}"
    measures = [read_side(draft, first), read_side(draft, second)]
    if word in ("equal", "congruent"):
        draft.add_equation(measures[0], measures[1])
        return
    draft.facts.append(make_term(word.capitalize(), *measures))


def _add_pair_around_word(draft: Draft, first: str, word: str, second: str) -> None:
    """Note two angles with their relation between them: `angle 1 supplementary to angle 2`."""
    _add_pair_of_measures(draft, first, second, word)


def _add_equal_corners(draft: Draft, first: str, second: str, word: str) -> None:
    """Note that two angles are equal, which are named by their corners alone."""
    _add_pair_of_measures(draft, f"angle {first}", f"angle {second}", word)


_MEASURE = rf"(?:angle )?(?:\d+|{POINT_PATTERN}(?:{POINT_PATTERN}{POINT_PATTERN})?)"
_EQUAL_PART = rf"(?:angle (?:\d+|{POINT_PATTERN}(?:{POINT_PATTERN}{POINT_PATTERN})?)|(?:arc )?{SEGMENT_PATTERN})"
_MAYBE_SHAPE = rf"(?:({SHAPE_PATTERN}) ?)?"
_GRAMMAR: tuple[tuple[str, Callable[..., None]], ...] = (
    (r"find (.+)", _add_question),
    (rf"({POINT_PATTERN}) at \(?{COORDINATE_PATTERN}, ?{COORDINATE_PATTERN}\)?", place),
    (rf"draw {_SEG}", draw),
    # Shapes
    (rf"({SHAPE_PATTERN}) {_NAMES}", shape),
    (rf"(?:(?:{SHAPE_PATTERN}) )?{_NAMES} ({SHAPE_PATTERN})", shape_behind),
    (rf"{_ANY_ADJECTIVES} ({SHAPE_PATTERN}|polygon) {_NAMES}", special),
    (
        rf"(?:(?:{SHAPE_PATTERN}) )?{_NAMES} {_ANY_ADJECTIVES}(?: ({SHAPE_PATTERN}|polygon))?",
        special_behind,
    ),
    (rf"(?:triangle )?{_NAMES} right (?:triangle )?at ({POINT_PATTERN})", right_at),
    (rf"right triangle {_NAMES} (?:(?:with )?right angle )?at ({POINT_PATTERN})", right_at),
    (rf"{_MAYBE_SHAPE}{_NAMES} (similar|congruent) (?:(?:{SHAPE_PATTERN}) )?{_NAMES}", alike),
    (
        rf"(?:(?:{SHAPE_PATTERN}) )?{_NAMES} and (?:(?:{SHAPE_PATTERN}) )?{_NAMES} (similar|congruent)"
        rf"(?: (?:{SHAPE_PATTERN}))?",
        both_alike,
    ),
    (rf"base {_SEG}", base),
    (rf"{_SEG} base", base),
    (rf"(?:vertex|apex|vertex angle)(?: at)? ({POINT_PATTERN})", apex),
    (rf"hypotenuse {_SEG}", hypotenuse),
    (rf"{_SEG} hypotenuse(?: (?:right )?triangle {_NAMES})?", hypotenuse),
    # Lines and points
    (rf"{_SEG} (parallel|perpendicular) {_SEG}", two_lines),
    (rf"{_SEG} perpendicular {_SEG} at ({POINT_PATTERN})", perpendicular_at),
    (rf"{_SEG} and {_SEG} (parallel|perpendicular)(?: each other)?", both_lines),
    (rf"{_LIST} on ?circle(?: ({POINT_PATTERN}))?", on_circle),
    (rf"({POINT_PATTERN}) (?:on )?between ({POINT_PATTERN}) and ({POINT_PATTERN})", on_line),
    (rf"({POINT_PATTERN}) on {_SEG}", on_line),
    (rf"{_LIST} on {_SEG}", on_lines),
    (rf"{_LIST} collinear", collinear),
    (
        rf"({POINT_PATTERN}) on extension {_SEG}(?: (?:beyond|past|through) ({POINT_PATTERN}))?",
        on_extension,
    ),
    (
        rf"{_SEG} extended(?: (?:beyond|past|through) ({POINT_PATTERN}))? ({POINT_PATTERN})",
        extended,
    ),
    (rf"({POINT_PATTERN}) midpoint {_SEG}", midpoint),
    (
        rf"({POINT_PATTERN}) and ({POINT_PATTERN}) midpoint ({SEGMENT_PATTERN} and {SEGMENT_PATTERN})",
        two_midpoints,
    ),
    (rf"{_SEG} (?:and )?{_SEG} meet at ({POINT_PATTERN})", meet),
    (rf"{_SEG} meet {_SEG} at ({POINT_PATTERN})", meet),
    (rf"({POINT_PATTERN}) intersection {_SEG} and {_SEG}", intersection),
    (rf"diagonals meet at ({POINT_PATTERN})", diagonals_meet),
    (rf"{_SEG} diagonal(?: {_MAYBE_SHAPE}{_NAMES})?", diagonal),
    (rf"{_SEG} bisects angle ((?:{POINT_PATTERN})+)", bisects_angle),
    (rf"{_SEG} (?:angle )?bisector (?:angle )?((?:{POINT_PATTERN})+)", bisects_angle),
    (rf"{_SEG} (?:angle )?bisector triangle {_NAMES}", bisector),
    (rf"{_SEG} bisects {_SEG}(?: at ({POINT_PATTERN}))?", bisects_line),
    (rf"{_SEG} and {_SEG} bisect each other(?: at ({POINT_PATTERN}))?", bisect_each),
    (rf"{_SEG} perpendicular bisector {_SEG}", perpendicular_bisector),
    (rf"right angle (?:at )?((?:{POINT_PATTERN})+)", right_angle),
    (rf"angle ((?:{POINT_PATTERN})+) right(?: angle)?", right_angle),
    # Lines of triangles and trapezoids
    (rf"{_SEG} (altitude|height|median) (?:(?:{SHAPE_PATTERN}) )?{_NAMES}", line_of_triangle),
    (
        rf"{_SEG} (altitude|height|median) (?:from {POINT_PATTERN} )?({SEGMENT_PATTERN})",
        line_to_side,
    ),
    (rf"(altitude|height|median|hypotenuse) ({SEGMENT_PATTERN})", _add_role),
    (
        r"(altitude|median|(?:angle )?bisector)(?: from)?(?: angle)? "
        rf"({POINT_PATTERN}(?:{POINT_PATTERN}{POINT_PATTERN})?)"
        rf" meet ({SEGMENT_PATTERN}) at ({POINT_PATTERN})",
        from_corner,
    ),
    (
        rf"(altitudes|medians|(?:angle )?bisectors) {_SEG} and {_SEG} (?:triangle {_NAMES} )?"
        rf"meet at ({POINT_PATTERN})",
        two_roles_meet,
    ),
    (rf"({SEGMENT_PATTERN}) (altitude|median)", _add_role_behind),
    (rf"{_SEG} midsegment(?: (triangle|trapezoid)?)?(?: ?{_NAMES})?", midsegment),
    (rf"{_SEG} midsegment triangle {_NAMES} parallel ({SEGMENT_PATTERN})", midsegment_parallel),
    (
        rf"({POINT_PATTERN}) (centroid|incenter|orthocenter|circumcenter) (?:triangle )?{_NAMES}",
        centre_of_triangle,
    ),
    # Circles
    (rf"circle ?({POINT_PATTERN})(?: ?(?::|with|through) ?{_LIST})?", circle),
    (rf"circle with radius ([^A-Z=]+?) (?:and|with) center ({POINT_PATTERN})", circle_of_radius),
    (rf"circle (?:with )?center ({POINT_PATTERN})(?: ?(?::|with|through) ?{_LIST})?", circle),
    (rf"({POINT_PATTERN}) center(?: circle)?(?: (?:through|with) {_LIST})?", circle),
    (rf"{_SEG} tangent{_IN_CIRCLE}?(?: ?at ({POINT_PATTERN}))?", tangent),
    (rf"{_SEG} tangent at ({POINT_PATTERN}){_IN_CIRCLE}", tangent_at),
    (
        rf"({SEGMENT_PATTERN}) and ({SEGMENT_PATTERN}) tangent{_IN_CIRCLE}?"
        rf"(?: ?at ({POINT_PATTERN} and {POINT_PATTERN}))?{_IN_CIRCLE}?",
        two_tangents,
    ),
    (rf"{_NAMES} secant{_IN_CIRCLE}?", secant),
    (rf"secants? {_NAMES} and {_NAMES}{_IN_CIRCLE}?", two_secants),
    (rf"{_NAMES} and {_NAMES} secants?{_IN_CIRCLE}?", two_secants),
    (rf"{_SEG} diameter{_IN_CIRCLE}?", diameter),
    (rf"diameter {_SEG}", diameter_in_front),
    (rf"{_SEG} chord{_IN_CIRCLE}?", chord),
    (rf"({SEGMENT_PATTERN}) and ({SEGMENT_PATTERN}) chord{_IN_CIRCLE}?", chords),
    (rf"chord {_SEG}", chord_in_front),
    (rf"({POINT_PATTERN}) on (?:(major|minor) )?arc {_SEG}", on_arc),
    (rf"angle {_NAMES} (inscribed|central)(?: angle)?{_IN_CIRCLE}?", inscribed_angle),
    (
        rf"(?:{_ANY_ADJECTIVES} )?(?:({SHAPE_PATTERN}|polygon) )?{_NAMES} inscribed{_IN_CIRCLE}",
        inscribed,
    ),
    (rf"circle ({POINT_PATTERN}) inscribed in {_MAYBE_SHAPE}{_NAMES}", circle_in),
    (rf"circle ({POINT_PATTERN}) around {_MAYBE_SHAPE}{_NAMES}", circle_around),
    (rf"{_MAYBE_SHAPE}{_NAMES} around{_IN_CIRCLE}", polygon_around),
    # Sizes without an equals sign
    (rf"({_MEASURE}) and ({_MEASURE}) (supplementary|complementary)", _add_pair_of_measures),
    (
        rf"({_MEASURE}) (supplementary|complementary) ({_MEASURE})",
        _add_pair_around_word,
    ),
    (rf"({_EQUAL_PART}) and ({_EQUAL_PART}) (equal|congruent)", _add_pair_of_measures),
    (
        rf"angle ({POINT_PATTERN}) and ({POINT_PATTERN}) (equal|congruent)",
        _add_equal_corners,
    ),
    (
        rf"angle triangle ({POINT_PATTERN})({POINT_PATTERN})({POINT_PATTERN}) in ratio (.+)",
        _add_angle_ratio,
    ),
    (
        r"(radius|diameter|circumference|area|perimeter|height|side(?: length)?)s? ([^A-Z=]+)",
        _add_size,
    ),
    (rf"circle(?: {POINT_PATTERN})?|triangle|there", nothing),
)
_KNOWN_WORDS = (
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
