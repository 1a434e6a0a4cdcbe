"""The question of a logic form as a person would ask it, such as `Find the area`.

A logic form is made of terms. The head of the term `AreaOf(Circle(A))` is `AreaOf`, the word before
the bracket, and its arguments are the terms in the bracket. The names of a term are the heads of
its arguments: `A`, `B` and `C` of `Triangle(A, B, C)`. A name `$` stands for a part without a name.
"""

import re
from collections.abc import Sequence

from adora_vl.geometry.logic_form import LogicForm, Term
from adora_vl.geometry.shapes import COLOUR_HEADS, CORNER_COUNT_BY_SHAPE, parse_terms

_TEMPLATE_BY_MEASURE = {
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
_TEMPLATE_BY_OPERATION = {
    "RatioOf": "the ratio of {} to {}",
    "Div": "the ratio of {} to {}",
    "ScaleFactorOf": "the scale factor from {} to {}",
    "Add": "{} + {}",
    "SumOf": "{} + {}",
    "Sub": "{} - {}",
    "Mul": "{} times {}",
}
_TEMPLATE_BY_FACT = {
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
# Some annotations misspell the circle as `Cirle`.
_FIGURE_HEADS = (
    *("Angle", "Arc", "Circle", "Sector", "Cirle", "Shape", "Polygon"),
    *CORNER_COUNT_BY_SHAPE,
)
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
    """Return the question of a logic form in words, with the facts that stand in it.

    For example, `Equals(a, 4)` and `Find(b)` give `a = 4. Find b.` Returns None where a part of the
    question has no words here.
    """
    statements: list[str] = []
    requests: list[str] = []
    for term in parse_terms(form.question):
        if term.head == "Find":  # `Find` is the word before the bracket of `Find(b)`
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
    """Return a fact in words, without a full stop: `AB is parallel to CD` for `Parallel(AB, CD)`.

    The head of a term is the word before its bracket, `Parallel`. Returns an empty text for a fact
    that only names something, such as `Triangle`, and None where there are no words for it.
    """
    head = term.head
    if head in _HEADS_WITHOUT_WORDS:
        return ""
    if head in CORNER_COUNT_BY_SHAPE or head in _ADJECTIVE_HEADS:
        return _shape_fact_in_words(term)
    if term.is_equation:
        return _equation_in_words(term)
    # `$` stands for a part without a name. The fact is then about all parts that look like it.
    has_no_name = bool(term.arguments) and "$" in "".join(term.arguments[0].names)
    if head == "Tangent" and has_no_name:
        return "segments that appear to be tangent are tangent"
    if head == "Similar" and has_no_name:
        shape = _head_without_adjectives(term.arguments[0]).lower().replace("shape", "figure")
        return f"the two {shape}s are similar"
    if head == "RightAngle":
        angle = noun_phrase(term.arguments[0])
        return None if angle is None else f"{angle} is a right angle"
    argument_nouns = _nouns_of_arguments(term)
    if argument_nouns is None:
        return None
    if head == "IntersectAt" and len(argument_nouns) > 2:
        *lines, point = argument_nouns
        return f"{', '.join(lines[:-1])} and {lines[-1]} meet at {point}"
    template = _TEMPLATE_BY_FACT.get(head)
    if template is None or len(argument_nouns) != 2:
        return None
    return template.format(*argument_nouns)


def _shape_fact_in_words(term: Term) -> str | None:
    """Return in words what a fact says of a shape: `ABCD is a rectangle`, `ABC is isosceles`.

    The fact is `Rectangle(A, B, C, D)`, or `Isosceles(Triangle(A, B, C))`. Returns an empty text
    for a shape without a name, since the question itself says what it is, and None where there are
    no words.
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
    """Return an equation in words: `AB = 10` for `Equals(LengthOf(Line(A, B)), 10)`.

    A number that an angle equals has the word `degrees` behind it. Returns an empty text for an
    equation on a whole shape, and None where there are no words.
    """
    left_term, right_term = term.arguments
    left = noun_phrase(left_term)
    right = noun_phrase(right_term)
    # An equation on a shape, such as `Equals(Triangle(A, B, C), ...)`, only gives it a name.
    if left_term.head in CORNER_COUNT_BY_SHAPE:
        return ""
    if left is None or right is None:
        return None
    # A segment that is called a part of a shape: `AB is the base of triangle ABC`.
    if right_term.head in ("AltitudeOf", "HypotenuseOf", "BaseOf", "SideOf", "HeightOf"):
        return f"{left} is {right}"
    is_angle = any(part.head in ("MeasureOf", "Angle") for part in left_term.walk())
    is_number = re.fullmatch(r"[\d.]+", right) is not None
    unit = " degrees" if is_angle and is_number else ""
    return f"{left.removeprefix('the measure of ')} = {right}{unit}"


def noun_phrase(term: Term) -> str | None:
    """Return a term as a noun: `angle ABC` for `Angle(A, B, C)`, whose head is `Angle`.

    Further examples are `AB` and `the area of the shaded sector`. Returns None for a term without
    words here.
    """
    head = term.head
    names = term.names
    if not term.arguments:
        return _noun_of_bare_text(head)
    if head in COLOUR_HEADS:
        return _noun_of_coloured_part(head, term.arguments[0])
    if head in _ADJECTIVE_HEADS or head in ("Minor", "Major"):
        return _noun_with_adjective(head, term.arguments[0])
    if head in ("Line", "Point"):
        return "the line" if "$" in names[0] else "".join(names)
    if head in _FIGURE_HEADS:
        return _noun_of_figure(head, names)
    if head in ("LengthOf", "MeasureOf"):
        return _noun_of_length_or_angle(term)
    argument_nouns = _nouns_of_arguments(term)
    if argument_nouns is None:
        return None
    if len(argument_nouns) == 1:
        return _noun_of_single_measure(head, argument_nouns[0])
    if head in ("SumOf", "Add"):
        return " + ".join(argument_nouns)
    template = _TEMPLATE_BY_OPERATION.get(head)
    if template is None or len(argument_nouns) != 2:
        return None
    return template.format(*argument_nouns)


def _nouns_of_arguments(term: Term) -> list[str] | None:
    """Return the nouns of all arguments of a term; None where one of them has no words.

    `Parallel(Line(A, B), Line(C, D))` has the nouns `AB` and `CD`.
    """
    argument_nouns = []
    for argument in term.arguments:
        argument_noun = noun_phrase(argument)
        if argument_noun is None:
            return None
        argument_nouns.append(argument_noun)
    return argument_nouns


def _noun_of_coloured_part(colour: str, part: Term) -> str:
    """Return a shaded or coloured part as a noun: `the shaded region`, `the blue sector`.

    `colour` is the head of `Blue(Sector(A, B, C))`, say, and `part` the term in its bracket.
    """
    shape = _head_without_adjectives(part).lower()
    if shape == "shape":
        shape = "region" if colour == "Shaded" else "figure"
    return f"the {colour.lower()} {shape}"


def _noun_with_adjective(adjective: str, part: Term) -> str | None:
    """Return a part with its adjective: `the regular pentagon`, `minor arc AB`.

    `adjective` is the head of `Minor(Arc(A, B))`, say, and `part` the term in its bracket. Returns
    None for a part without words.
    """
    part_noun = noun_phrase(part)
    if part_noun is None:
        return None
    if adjective in ("Minor", "Major"):
        return f"{adjective.lower()} {part_noun}"
    # A part with a name, such as `triangle ABC`, has no article and stays as it is.
    return part_noun.replace("the ", f"the {adjective.lower()} ", 1)


def _noun_of_single_measure(head: str, part_noun: str) -> str | None:
    """Return a measure of one part as a noun: `the area of circle A` for `AreaOf(Circle(A))`.

    `head` is `AreaOf` then, and `part_noun` is `circle A`. Returns None for one without words.
    """
    if head == "RatioOf":
        return f"{part_noun} as a fraction"
    template = _TEMPLATE_BY_MEASURE.get(head)
    if template is None:
        return None
    if head in ("SinOf", "CosOf", "TanOf"):  # `sin ABC`
        part_noun = part_noun.removeprefix("angle ")
    return template.format(part_noun)


def _noun_of_bare_text(text: str) -> str | None:
    """Return a term without arguments as a noun; None for one that no question names."""
    if text in ("Radius", "Diameter"):
        return f"the {text.lower()}"
    return None if "$" in text or "_" in text else text


def _noun_of_figure(head: str, names: Sequence[str]) -> str:
    """Return `triangle ABC` for the head `Triangle` and the names A, B and C of its points.

    Returns `the triangle` for one without a name, whose points are `$`.
    """
    shape = {"Cirle": "circle", "Shape": "figure"}.get(head, head.lower())
    has_no_name = any("$" in name for name in names) or (head == "Shape" and names == ["A"])
    are_letters = all(re.fullmatch(r"[A-Za-z]'?|\d+", name) for name in names)
    if has_no_name or not are_letters:
        return f"the {shape}"
    return f"{shape} {''.join(names)}"


def _noun_of_length_or_angle(term: Term) -> str | None:
    """Return the noun of `LengthOf(...)` or `MeasureOf(...)`: `AB`, `the measure of angle ABC`.

    Returns None where the part in the bracket has no words.
    """
    part = term.arguments[0]
    part_noun = noun_phrase(part)
    # `LengthOf(A, B)` is `AB`, as the usual `LengthOf(Line(A, B))` is.
    has_two_names = len(term.names) == 2
    if has_two_names and (part_noun is None or not part.arguments):
        return "".join(term.names)
    if part_noun is None:
        return None
    if term.head == "LengthOf":
        is_length = part.head == "Line" or part.head in _TEMPLATE_BY_MEASURE or not part.arguments
        return part_noun if is_length else f"the length of {part_noun}"
    is_letter = not part.arguments and len(part_noun) == 1
    return part_noun if is_letter else f"the measure of {part_noun}"


def _head_without_adjectives(term: Term) -> str:
    """Return the head below colours and adjectives: `Circle` for `Shaded(Circle(A))`."""
    while term.head in (*COLOUR_HEADS, *_ADJECTIVE_HEADS) and term.arguments:
        term = term.arguments[0]
    return term.head
