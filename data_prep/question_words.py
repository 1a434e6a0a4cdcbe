"""The question of a logic form as a person would ask it, such as `Find the area`."""

import re
from collections.abc import Sequence

from adora_vl.geometry.forms import LogicForm, Term
from adora_vl.geometry.shapes import COLOUR_HEADS, CORNER_COUNT_BY_SHAPE, parse_terms

_WORDS_BY_MEASURE = {
    "AreaOf": "the area of {}",
    "PerimeterOf": "the perimeter of {}",
    "CircumferenceOf": "the circumference of {}",
    "RadiusOf": "the radius of {}",
    "DiameterOf": "the diameter of {}",
    "HeightOf": "the height of {}",
    "AltitudeOf": "the altitude of {}",
    "BaseOf": "the base of {}",
    "SideOf": "the side of {}",
    "LegOf": "a leg of {}",
    "HypotenuseOf": "the hypotenuse of {}",
    "SinOf": "sin {}",
    "CosOf": "cos {}",
    "TanOf": "tan {}",
    "HalfOf": "half of {}",
    "SquareOf": "the square of {}",
}
_WORDS_BY_OPERATION = {
    "RatioOf": "the ratio of {} to {}",
    "Div": "the ratio of {} to {}",
    "ScaleFactorOf": "the scale factor from {} to {}",
    "Add": "{} + {}",
    "SumOf": "{} + {}",
    "Sub": "{} - {}",
    "Mul": "{} times {}",
}
_WORDS_BY_FACT = {
    "Parallel": "{} is parallel to {}",
    "Perpendicular": "{} is perpendicular to {}",
    "Tangent": "{} is tangent to {}",
    "Similar": "{} is similar to {}",
    "Congruent": "{} is congruent to {}",
    "BisectsAngle": "{} bisects {}",
    "InscribedIn": "{} is inscribed in {}",
    "CircumscribedTo": "{} is circumscribed about {}",
    "PointLiesOnLine": "{} lies on {}",
    "PointLiesOnCircle": "{} lies on {}",
    "IsMidpointOf": "{} is the midpoint of {}",
    "IsDiameterOf": "{} is a diameter of {}",
    "IsChordOf": "{} is a chord of {}",
    "IsRadiusOf": "{} is a radius of {}",
    "IsMedianOf": "{} is a median of {}",
    "IsAltitudeOf": "{} is an altitude of {}",
    "IsMidsegmentOf": "{} is a midsegment of {}",
    "IsDiagonalOf": "{} is a diagonal of {}",
    "IsHypotenuseOf": "{} is the hypotenuse of {}",
    "IsCentroidOf": "{} is the centroid of {}",
    "IsIncenterOf": "{} is the incenter of {}",
    "IsOrthocenterOf": "{} is the orthocenter of {}",
    "IsPerpendicularBisectorOf": "{} is a perpendicular bisector of {}",
}
_ADJECTIVE_HEADS = ("Right", "Isosceles", "Equilateral", "Regular")
# Heads that name something and say nothing of it.
_HEADS_WITHOUT_WORDS = (
    "Circle",
    "Triangle",
    "Quadrilateral",
    "Line",
    "Shape",
    "Polygon",
    "Angle",
    "Arc",
    "UseTheorem",
    "Point",
)


def question_in_words(form: LogicForm) -> str | None:
    """Put the question of a logic form into words, with the facts that stand in it.

    An example is `a = 4. Find b.` Returns None where a part of the question has no words here.
    """
    statements: list[str] = []
    requests: list[str] = []
    for term in parse_terms(form.question):
        if term.head == "Find":
            goal_noun = noun_phrase(term.arguments[0]) if term.arguments else None
            if goal_noun is None:
                return None
            requests.append(f"Find {goal_noun}.")
            continue
        sentence = _fact_as_sentence(term)
        if sentence is None:
            return None
        if sentence:
            # A single letter is an unknown of the problem, and stays small: `a = 4.`
            begins_with_word = re.match("[a-z]{2}", sentence) is not None
            if begins_with_word:
                sentence = f"{sentence[0].upper()}{sentence[1:]}"
            statements.append(f"{sentence}.")
    if not requests:
        return None
    return " ".join(dict.fromkeys([*statements, *requests]))  # each sentence once, in order


def _fact_as_sentence(term: Term) -> str | None:
    """Put a fact into words, without a full stop: `AB is parallel to CD` for `Parallel(AB, CD)`.

    The head of a term is the word before its bracket. Returns an empty text for a fact that only
    names something, and None where there are no words for it.
    """
    head = term.head
    if head in _HEADS_WITHOUT_WORDS:
        return ""
    if head in CORNER_COUNT_BY_SHAPE or head in _ADJECTIVE_HEADS:
        return _shape_kind_in_words(term)
    if term.is_equation:
        return _equation_in_words(term)
    # `$` stands for a part without a name. The fact is then about all parts that look like it.
    has_no_name = bool(term.arguments) and "$" in "".join(term.arguments[0].names)
    if head == "Tangent" and has_no_name:
        return "segments that appear to be tangent are tangent"
    if head == "Similar" and has_no_name:
        kind = _head_without_adjectives(term.arguments[0]).lower().replace("shape", "figure")
        return f"the two {kind}s are similar"
    if head == "RightAngle":
        angle = noun_phrase(term.arguments[0])
        return None if angle is None else f"{angle} is a right angle"
    part_nouns = _nouns_of_arguments(term)
    if part_nouns is None:
        return None
    if head == "IntersectAt" and len(part_nouns) > 2:
        *lines, point = part_nouns
        return f"{', '.join(lines[:-1])} and {lines[-1]} meet at {point}"
    words = _WORDS_BY_FACT.get(head)
    return words.format(*part_nouns) if words and len(part_nouns) == 2 else None


def _shape_kind_in_words(term: Term) -> str | None:
    """Put a fact on the kind of a shape into words, such as `ABCD is a rectangle`.

    Returns an empty text for a shape without a name, since the question itself says its kind.
    """
    if term.head in _ADJECTIVE_HEADS:
        has_shape = bool(term.arguments) and bool(term.arguments[0].arguments)
        shape = noun_phrase(term.arguments[0]) if has_shape else None
        return None if shape is None else f"{shape} is {term.head.lower()}"
    if len(term.names) != CORNER_COUNT_BY_SHAPE[term.head]:
        return ""
    article = "an" if term.head[0] in "AEIO" else "a"
    return f"{''.join(term.names)} is {article} {term.head.lower()}"


def _equation_in_words(term: Term) -> str | None:
    """Put an equation into words: `AB = 10`, `angle ABC = 40 degrees`.

    Returns an empty text for an equation on a whole shape, and None where there are no words.
    """
    left_term, right_term = term.arguments
    left = noun_phrase(left_term)
    right = noun_phrase(right_term)
    if left_term.head in CORNER_COUNT_BY_SHAPE:
        return ""
    if left is None or right is None:
        return None
    if right_term.head in ("AltitudeOf", "HypotenuseOf", "BaseOf", "SideOf", "HeightOf"):
        return f"{left} is {right}"
    is_angle = any(part.head in ("MeasureOf", "Angle") for part in left_term.walk())
    is_number = re.fullmatch(r"[\d.]+", right) is not None
    unit = " degrees" if is_angle and is_number else ""
    return f"{left.removeprefix('the measure of ')} = {right}{unit}"


def noun_phrase(term: Term) -> str | None:
    """Return a term as a noun: `AB`, `angle ABC`, `the area of the shaded sector`.

    None where it has no words here.
    """
    head = term.head
    names = term.names
    if not term.arguments:
        return _noun_of_bare_text(head)
    if head in COLOUR_HEADS:
        return _noun_of_coloured_part(head, term.arguments[0])
    if head in _ADJECTIVE_HEADS:  # an adjective, such as `regular`
        part_noun = noun_phrase(term.arguments[0])
        return part_noun and part_noun.replace("the ", f"the {head.lower()} ", 1)
    if head in ("Line", "Point"):
        return "the line" if "$" in names[0] else "".join(names)
    if (
        head in ("Angle", "Arc", "Circle", "Sector", "Cirle", "Shape", "Polygon")
        or head in CORNER_COUNT_BY_SHAPE
    ):
        return _noun_of_figure(head, names)
    if head in ("LengthOf", "MeasureOf"):
        return _noun_of_length_or_angle(term)
    if head in ("Minor", "Major"):
        part_noun = noun_phrase(term.arguments[0])
        return part_noun and f"{head.lower()} {part_noun}"
    part_nouns = _nouns_of_arguments(term)
    if part_nouns is None:
        return None
    if len(part_nouns) == 1:
        return _noun_of_single_measure(head, part_nouns[0])
    if head in ("SumOf", "Add"):
        return " + ".join(part_nouns)
    words = _WORDS_BY_OPERATION.get(head)
    return words.format(*part_nouns) if words and len(part_nouns) == 2 else None


def _nouns_of_arguments(term: Term) -> list[str] | None:
    """Return the words for all arguments of a term; None where one of them has none."""
    part_nouns = []
    for argument in term.arguments:
        part_noun = noun_phrase(argument)
        if part_noun is None:
            return None
        part_nouns.append(part_noun)
    return part_nouns


def _noun_of_coloured_part(head: str, part: Term) -> str:
    """Return a shaded or coloured part as a noun: `the shaded region`, `the blue sector`."""
    kind = _head_without_adjectives(part).lower()
    if kind == "shape":
        kind = "region" if head == "Shaded" else "figure"
    return f"the {head.lower()} {kind}"


def _noun_of_single_measure(head: str, part_noun: str) -> str | None:
    """Return a measure of one part as a noun: `the area of ...`; None where it has no words."""
    if head == "RatioOf":
        return f"{part_noun} as a fraction"
    words = _WORDS_BY_MEASURE.get(head)
    if not words:
        return None
    if head in ("SinOf", "CosOf", "TanOf"):  # `sin ABC`
        part_noun = part_noun.removeprefix("angle ")
    return words.format(part_noun)


def _noun_of_bare_text(text: str) -> str | None:
    """Return a term without arguments as a noun; None for one that no question names."""
    if text in ("Radius", "Diameter"):
        return f"the {text.lower()}"
    return None if "$" in text or "_" in text else text


def _noun_of_figure(head: str, names: Sequence[str]) -> str:
    """Return `triangle ABC`; `the triangle` for one without a name."""
    kind = {"Cirle": "circle", "Shape": "figure", "Polygon": "polygon"}.get(head, head.lower())
    unnamed = any("$" in name for name in names) or (head == "Shape" and names == ["A"])
    if unnamed or any(re.fullmatch(r"[A-Za-z]'?|\d+", name) is None for name in names):
        return f"the {kind}"
    return f"{kind} {''.join(names)}"


def _noun_of_length_or_angle(term: Term) -> str | None:
    """Return `LengthOf` or `MeasureOf` a part as a noun; None where the part has no words."""
    part = term.arguments[0]
    part_noun = noun_phrase(part)
    # `LengthOf(A, B)` is `AB`, as the usual `LengthOf(Line(A, B))` is.
    has_two_names = len(term.names) == 2
    if has_two_names and (part_noun is None or not part.arguments):
        return "".join(term.names)
    if part_noun is None:
        return None
    if term.head == "LengthOf":
        is_length = part.head == "Line" or part.head in _WORDS_BY_MEASURE or not part.arguments
        return part_noun if is_length else f"the length of {part_noun}"
    is_letter = not part.arguments and len(part_noun) == 1
    return part_noun if is_letter else f"the measure of {part_noun}"


def _head_without_adjectives(term: Term) -> str:
    """Return the head of a term below its colours and kinds: `Circle` of a shaded circle."""
    while term.head in (*COLOUR_HEADS, *_ADJECTIVE_HEADS) and term.arguments:
        term = term.arguments[0]
    return term.head
