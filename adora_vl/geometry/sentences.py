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
    POINT,
    SHAPES,
    Draft,
    SentenceError,
    split_names,
    term,
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

    Raises `SentenceError` where a part is none of the grammar.
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
        raise SentenceError(_what_is_wrong(plain))
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
    """Return the first pattern that fits, with its match."""
    for pattern, build in _GRAMMAR:
        match = re.fullmatch(pattern, plain)
        if match:
            return build, match
    return None


def _read_clause(draft: Draft, plain: str) -> None:
    """Take one fact into the draft. Raises `SentenceError`."""
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
        except SentenceError as error:
            return str(error)
    return (
        "this is no fact that is known; facts are such as AB = 5, angle ABC = 40, D on AC, AB "
        "parallel CD"
    )


# Equations and the question


def _equation(draft: Draft, text: str) -> None:
    """Note an equation of two or more sides: each side equals the one before it.

    Sides such as `AB : BC` are ratios, which agree part by part.
    """
    sides = [_ratio(draft, _with_roles(draft, side)) for side in text.split("=")]
    for parts, partners in pairwise(sides):
        if len(parts) != len(partners):
            raise SentenceError("the ratios on its sides have not as many parts")
        if len(parts) == 1:
            draft.equal(parts[0], partners[0])
            continue
        for i in range(1, len(parts)):
            ratio = term("RatioOf", parts[i - 1], parts[i])
            draft.equal(ratio, term("RatioOf", partners[i - 1], partners[i]))


def _ratio(draft: Draft, side: str) -> list[Term]:
    """Return the parts of a side between colons; of most sides there is one."""
    return [side_of(draft, part) for part in side.split(":")]


def _with_roles(draft: Draft, side: str) -> str:
    """Return a side without words such as "diameter", which are noted as facts."""

    def take(match: re.Match[str]) -> str:
        """Note the fact, and leave the segment."""
        _role(draft, match[1], match[2])
        return match[2]

    return re.sub(rf"\b({_ROLES}) ({SEGMENT})(?!{POINT})", take, side)


_ROLES = "diameter|radius|chord|altitude|height|median|hypotenuse|base|leg|midsegment|tangent"


def _role(draft: Draft, role: str, segment: str) -> None:
    """Note that a segment is called a diameter or the like, of the only shape that has one."""
    start, end = split_names(segment)
    if role == "diameter":
        diameter(draft, start=start, end=end, centre=None)
    elif role == "radius":
        centre = draft.circle(start if start in draft.circles else end).names[0]
        draft.on_circle(end if centre == start else start, centre)
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


def _role_behind(draft: Draft, segment: str, role: str) -> None:
    """Note a segment named before its role, in the only triangle that has it."""
    _role(draft, role, segment)


def _find(draft: Draft, measure: str) -> None:
    """Note the question: what is to be computed."""
    parts = _ratio(draft, _with_roles(draft, measure))
    if len(parts) > 2:
        raise SentenceError("a ratio that is asked for has two parts")
    goal = parts[0] if len(parts) == 1 else term("RatioOf", *parts)
    draft.question.append(term("Find", goal))


def _length_of_size(draft: Draft, measure: str, size: str) -> None:
    """Note a size without a sign before it, as in "with radius 5"."""
    draft.equal(side_of(draft, measure), side_of(draft, size))


def _angles_in_ratio(draft: Draft, first: str, second: str, third: str, ratio: str) -> None:
    """Note that the angles of a triangle are in a ratio, in the order of its corners."""
    draft.polygon("Triangle", (first, second, third))
    _equation(draft, f"angle {first} : angle {second} : angle {third} = {ratio}")


def _together(draft: Draft, first: str, second: str, word: str) -> None:
    """Note that two angles are supplementary or complementary; two measures are equal."""
    # In "angle A and B" the word stands once for both.
    if first.startswith("angle") and not second.startswith("angle"):
        second = f"angle {second}"
    measures = [side_of(draft, first), side_of(draft, second)]
    if word in ("equal", "congruent"):
        draft.equal(measures[0], measures[1])
        return
    draft.facts.append(term(word.capitalize(), *measures))


def _together_between(draft: Draft, first: str, word: str, second: str) -> None:
    """Note two angles with their relation between them: `angle 1 supplementary to angle 2`."""
    _together(draft, first, second, word)


def _angles_equal(draft: Draft, first: str, second: str, word: str) -> None:
    """Note that two angles are equal, which are named by their corners alone."""
    _together(draft, f"angle {first}", f"angle {second}", word)


_MEASURE = rf"(?:angle )?(?:\d+|{POINT}(?:{POINT}{POINT})?)"
_EQUAL_PART = rf"(?:angle (?:\d+|{POINT}(?:{POINT}{POINT})?)|(?:arc )?{SEGMENT})"
_MAYBE_SHAPE = rf"(?:({SHAPES}) ?)?"
_GRAMMAR: tuple[tuple[str, Callable[..., None]], ...] = (
    (r"find (.+)", _find),
    (rf"({POINT}) at \(?{PLACE}, ?{PLACE}\)?", place),
    (rf"draw {_S}", draw),
    # Shapes
    (rf"({SHAPES}) {_NAMES}", shape),
    (rf"(?:(?:{SHAPES}) )?{_NAMES} ({SHAPES})", shape_behind),
    (rf"{_ANY_ADJECTIVES} ({SHAPES}|polygon) {_NAMES}", special),
    (rf"(?:(?:{SHAPES}) )?{_NAMES} {_ANY_ADJECTIVES}(?: ({SHAPES}|polygon))?", special_behind),
    (rf"(?:triangle )?{_NAMES} right (?:triangle )?at ({POINT})", right_at),
    (rf"right triangle {_NAMES} (?:(?:with )?right angle )?at ({POINT})", right_at),
    (rf"{_MAYBE_SHAPE}{_NAMES} (similar|congruent) (?:(?:{SHAPES}) )?{_NAMES}", alike),
    (
        rf"(?:(?:{SHAPES}) )?{_NAMES} and (?:(?:{SHAPES}) )?{_NAMES} (similar|congruent)"
        rf"(?: (?:{SHAPES}))?",
        both_alike,
    ),
    (rf"base {_S}", base),
    (rf"{_S} base", base),
    (rf"(?:vertex|apex|vertex angle)(?: at)? ({POINT})", apex),
    (rf"hypotenuse {_S}", hypotenuse),
    (rf"{_S} hypotenuse(?: (?:right )?triangle {_NAMES})?", hypotenuse),
    # Lines and points
    (rf"{_S} (parallel|perpendicular) {_S}", two_lines),
    (rf"{_S} perpendicular {_S} at ({POINT})", perpendicular_at),
    (rf"{_S} and {_S} (parallel|perpendicular)(?: each other)?", both_lines),
    (rf"{_LIST} on ?circle(?: ({POINT}))?", on_circle),
    (rf"({POINT}) (?:on )?between ({POINT}) and ({POINT})", on_line),
    (rf"({POINT}) on {_S}", on_line),
    (rf"{_LIST} on {_S}", on_lines),
    (rf"{_LIST} collinear", collinear),
    (rf"({POINT}) on extension {_S}(?: (?:beyond|past|through) ({POINT}))?", on_extension),
    (rf"{_S} extended(?: (?:beyond|past|through) ({POINT}))? ({POINT})", extended),
    (rf"({POINT}) midpoint {_S}", midpoint),
    (rf"({POINT}) and ({POINT}) midpoint ({SEGMENT} and {SEGMENT})", two_midpoints),
    (rf"{_S} (?:and )?{_S} meet at ({POINT})", meet),
    (rf"{_S} meet {_S} at ({POINT})", meet),
    (rf"({POINT}) intersection {_S} and {_S}", intersection),
    (rf"diagonals meet at ({POINT})", diagonals_meet),
    (rf"{_S} diagonal(?: {_MAYBE_SHAPE}{_NAMES})?", diagonal),
    (rf"{_S} bisects angle ((?:{POINT})+)", bisects_angle),
    (rf"{_S} (?:angle )?bisector (?:angle )?((?:{POINT})+)", bisects_angle),
    (rf"{_S} (?:angle )?bisector triangle {_NAMES}", bisector),
    (rf"{_S} bisects {_S}(?: at ({POINT}))?", bisects_line),
    (rf"{_S} and {_S} bisect each other(?: at ({POINT}))?", bisect_each),
    (rf"{_S} perpendicular bisector {_S}", perpendicular_bisector),
    (rf"right angle (?:at )?((?:{POINT})+)", right_angle),
    (rf"angle ((?:{POINT})+) right(?: angle)?", right_angle),
    # Lines of triangles and trapezoids
    (rf"{_S} (altitude|height|median) (?:(?:{SHAPES}) )?{_NAMES}", line_of_triangle),
    (rf"{_S} (altitude|height|median) (?:from {POINT} )?({SEGMENT})", line_to_side),
    (rf"(altitude|height|median|hypotenuse) ({SEGMENT})", _role),
    (
        rf"(altitude|median|(?:angle )?bisector)(?: from)?(?: angle)? ({POINT}(?:{POINT}{POINT})?)"
        rf" meet ({SEGMENT}) at ({POINT})",
        from_corner,
    ),
    (
        rf"(altitudes|medians|(?:angle )?bisectors) {_S} and {_S} (?:triangle {_NAMES} )?"
        rf"meet at ({POINT})",
        two_roles_meet,
    ),
    (rf"({SEGMENT}) (altitude|median)", _role_behind),
    (rf"{_S} midsegment(?: (triangle|trapezoid)?)?(?: ?{_NAMES})?", midsegment),
    (rf"{_S} midsegment triangle {_NAMES} parallel ({SEGMENT})", midsegment_parallel),
    (
        rf"({POINT}) (centroid|incenter|orthocenter|circumcenter) (?:triangle )?{_NAMES}",
        centre_of_triangle,
    ),
    # Circles
    (rf"circle ?({POINT})(?: ?(?::|with|through) ?{_LIST})?", circle),
    (rf"circle with radius ([^A-Z=]+?) (?:and|with) center ({POINT})", circle_of_radius),
    (rf"circle (?:with )?center ({POINT})(?: ?(?::|with|through) ?{_LIST})?", circle),
    (rf"({POINT}) center(?: circle)?(?: (?:through|with) {_LIST})?", circle),
    (rf"{_S} tangent{_IN_CIRCLE}?(?: ?at ({POINT}))?", tangent),
    (rf"{_S} tangent at ({POINT}){_IN_CIRCLE}", tangent_at),
    (
        rf"({SEGMENT}) and ({SEGMENT}) tangent{_IN_CIRCLE}?(?: ?at ({POINT} and {POINT}))?"
        rf"{_IN_CIRCLE}?",
        two_tangents,
    ),
    (rf"{_NAMES} secant{_IN_CIRCLE}?", secant),
    (rf"secants? {_NAMES} and {_NAMES}{_IN_CIRCLE}?", two_secants),
    (rf"{_NAMES} and {_NAMES} secants?{_IN_CIRCLE}?", two_secants),
    (rf"{_S} diameter{_IN_CIRCLE}?", diameter),
    (rf"diameter {_S}", diameter_in_front),
    (rf"{_S} chord{_IN_CIRCLE}?", chord),
    (rf"({SEGMENT}) and ({SEGMENT}) chord{_IN_CIRCLE}?", chords),
    (rf"chord {_S}", chord_in_front),
    (rf"({POINT}) on (?:(major|minor) )?arc {_S}", on_arc),
    (rf"angle {_NAMES} (inscribed|central)(?: angle)?{_IN_CIRCLE}?", inscribed_angle),
    (
        rf"(?:{_ANY_ADJECTIVES} )?(?:({SHAPES}|polygon) )?{_NAMES} inscribed{_IN_CIRCLE}",
        inscribed,
    ),
    (rf"circle ({POINT}) inscribed in {_MAYBE_SHAPE}{_NAMES}", circle_in),
    (rf"circle ({POINT}) around {_MAYBE_SHAPE}{_NAMES}", circle_around),
    (rf"{_MAYBE_SHAPE}{_NAMES} around{_IN_CIRCLE}", polygon_around),
    # Sizes without an equals sign
    (rf"({_MEASURE}) and ({_MEASURE}) (supplementary|complementary)", _together),
    (
        rf"({_MEASURE}) (supplementary|complementary) ({_MEASURE})",
        _together_between,
    ),
    (rf"({_EQUAL_PART}) and ({_EQUAL_PART}) (equal|congruent)", _together),
    (
        rf"angle ({POINT}) and ({POINT}) (equal|congruent)",
        _angles_equal,
    ),
    (rf"angle triangle ({POINT})({POINT})({POINT}) in ratio (.+)", _angles_in_ratio),
    (
        r"(radius|diameter|circumference|area|perimeter|height|side(?: length)?)s? ([^A-Z=]+)",
        _length_of_size,
    ),
    (rf"circle(?: {POINT})?|triangle|there", nothing),
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
