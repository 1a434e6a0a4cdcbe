"""Files of Geometry3K's logic forms (InterGPS, Lu et al. 2021), and the facts of a form in words.

`Equals(LengthOf(Line(A, B)), 10)` is `AB = 10`. The words are for a model that is asked without the
picture; where they do not suffice to solve the problem, as for a shaded region, there are none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain

from adora_vl.geometry.logic_form import POINT_NAME, LogicForm, Term, parse_term
from adora_vl.geometry.shapes import CORNER_COUNT_BY_SHAPE

# Shapes with more corners have no words here.
_CORNER_COUNT_BY_SHAPE = {name: count for name, count in CORNER_COUNT_BY_SHAPE.items() if count < 7}
# How many points name each part. Some annotations misspell the circle as `Cirle`.
_POINT_COUNTS_BY_HEAD = {
    "Line": (2,),
    "Angle": (1, 3),
    "Arc": (2, 3),
    "Circle": (1,),
    "Cirle": (1,),
} | {name: (corners,) for name, corners in _CORNER_COUNT_BY_SHAPE.items()}
_TEMPLATE_BY_HEAD = {
    **{
        f"{name}Of": f"the {name.lower()} of {{}}"
        for name in ("Area", "Perimeter", "Height", "Diameter")
    },
    **{
        name: f"{{}} is {name.lower()} to {{}}" for name in ("Perpendicular", "Parallel", "Tangent")
    },
    **{name: f"{name.lower()} {{}}" for name in ("Minor", "Major")},
    "MeasureOf": "{}",
}


def facts_in_words(form: LogicForm, problem: str) -> str | None:
    """Return the facts of a diagram as sentences, with which a model can solve it without looking.

    `form` has the facts and the question, and `problem` is the text of the problem. For example:
    "Drawn segments: BA, CA, CB. AB = 5. Angle CAB = 65 degrees." None is returned where the
    sentences would not suffice:

    - a fact cannot be read,
    - the problem is about a coloured region, or about a shape that the annotation does not name,
    - the problem speaks of a point, an unknown or an angle that no fact has.
    """
    if re.search(r"\b(?:shaded|blue|green|red|yellow)\b", problem, re.IGNORECASE):
        return None
    sentences = _position_sentences(form)
    for term in form.terms:
        # Which points lie on a line or a circle is said already, once for each line and circle.
        if term is not None and term.head.startswith("PointLies"):
            continue
        fact_in_words = describe_term(term)
        if fact_in_words is None:
            return None
        if fact_in_words:
            sentences.append(fact_in_words)
    # `dict.fromkeys` drops repeated sentences, and keeps the order.
    capitalised = [f"{sentence[0].upper()}{sentence[1:]}" for sentence in dict.fromkeys(sentences)]
    text = ". ".join(capitalised)
    return f"{text}." if text and _mentions_all_asked(text, form) else None


def _position_sentences(form: LogicForm) -> list[str]:
    """Return sentences on which points lie on which line and circle of a diagram.

    For example, `A, B and C lie on one line, in this order` and `drawn segments: AB, BC`.
    """
    sentences = []
    segments = []  # lines with two points, such as `AB`
    for points_on_line in form.lines_with_points:
        if len(points_on_line) == 2:
            segments.append(_join_point_names(points_on_line))
        elif len(points_on_line) > 2:
            # The points are in order along the line where all of them have coordinates.
            is_ordered = set(points_on_line) <= form.points.keys()
            order = ", in this order" if is_ordered else ""
            sentences.append(f"{_list_in_words(points_on_line)} lie on one line{order}")
    if segments:
        sentences.append(f"drawn segments: {', '.join(segments)}")
    for (centre, _), points_on_circle in form.points_by_circle.items():
        if points_on_circle:
            verb = "lies" if len(points_on_circle) == 1 else "lie"
            sentences.append(
                f"{_list_in_words(points_on_circle)} {verb} on the circle with centre {centre}"
            )
        else:
            sentences.append(f"{centre} is the centre of a circle")
    return sentences


def _is_only_shape(form: LogicForm, head: str, points_on_lines: set[str]) -> bool:
    """Return whether a diagram has only one shape of a kind, such as one circle or one triangle.

    It has only one triangle if three points lie on its lines.

    Args:
        form: the facts of the diagram.
        head: the kind of shape as a logic form names it, such as `Circle` or `Triangle`.
        points_on_lines: all points of the diagram that lie on a line.
    """
    if head == "Circle":
        return len(form.points_by_circle) == 1
    return len(points_on_lines) == _CORNER_COUNT_BY_SHAPE.get(head)


def _mentions_all_asked(text: str, form: LogicForm) -> bool:
    """Return whether the facts in words mention all that the question of a diagram asks about.

    `text` are the facts in words, and `form` has the question. In a question `$` stands for a shape
    without a name. The diagram says which shape is meant only if it has one shape of that kind.
    """
    points_on_lines = set(chain.from_iterable(form.lines_with_points))
    texts = [text]
    asked_terms: list[Term] = []  # all terms of the question, also those inside of others
    for part in form.question:
        if not part.strip():
            continue
        question_term = parse_term(part)
        if question_term is None:  # it cannot be read
            return False
        asked_terms += question_term.walk()
        if question_term.head != "Find":  # a fact in the question, such as `x = 3`
            texts.append(str(describe_term(question_term)))
    all_facts = " ".join(texts)
    for term in asked_terms:
        head = term.head
        names = term.names
        if "$" in "".join(names) and not _is_only_shape(form, head, points_on_lines):
            return False
        # A point that is on no line and on no circle of the diagram could lie anywhere.
        is_point = not names and re.fullmatch("[A-Z]'?", head)
        if is_point and head not in form.drawn_points:
            return False
        # `Find(x)` needs a fact with x. The x in a command such as \max does not count.
        is_unknown = head == "Find" and re.fullmatch("[a-z]", names[0])
        if is_unknown and not re.search(rf"(?<![a-z\\]){names[0]}(?![a-z])", all_facts):
            return False
        # An angle may be named by the number that the diagram writes into it.
        is_numbered_angle = head == "Angle" and len(names) == 1 and names[0].isdigit()
        if is_numbered_angle and not re.search(rf"\bangle {names[0]}\b", text, re.IGNORECASE):
            return False
    return True


def describe_term(term: Term | None) -> str | None:
    """Return a term of a logic form in words: `AB = 10` for `Equals(LengthOf(Line(A, B)), 10)`.

    Its head is the word before the bracket, and its names are the heads of its arguments.
    Returns None for a term without words. A term that could not be read is None, and gives None.
    """
    if term is None:
        return None
    if not term.arguments:
        return None if "$" in term.head else term.head
    head = term.head
    names = term.names
    argument_words = [describe_term(argument) for argument in term.arguments]
    are_points = all(re.fullmatch(rf"{POINT_NAME}|\d+", name) for name in names)
    # A shape named by its points: `Triangle(A,B,C)` is `triangle ABC`, and `Line(A,B)` is `AB`.
    if len(names) in _POINT_COUNTS_BY_HEAD.get(head, ()) and are_points:
        shape = head.lower().replace("cirle", "circle")  # some annotations are misspelt
        return f"{shape} {_join_point_names(names)}".removeprefix("line ")
    if None in argument_words:
        return None
    if head == "LengthOf":
        # `AB` alone is the length of a segment; an arc without a word would be its angle.
        is_arc = names[0] == "Arc"
        return f"the length of {argument_words[0]}" if is_arc else argument_words[0]
    if head == "Equals" and len(argument_words) == 2:
        left_side, right_side = argument_words
        # Degrees belong to a measure that equals a number, not one that equals another measure.
        is_in_degrees = names[0] == "MeasureOf" and not term.arguments[1].arguments
        equation = f"{left_side} = {right_side}"
        return f"{equation} degrees" if is_in_degrees else equation
    template = _TEMPLATE_BY_HEAD.get(head, "")
    if not template or template.count("{}") != len(argument_words):
        return None
    return template.format(*argument_words)


def _join_point_names(names: Sequence[str]) -> str:
    """Return `ABC` for the names A, B and C; `A point_26` where a name is a word."""
    has_word = any("_" in name for name in names)
    return " ".join(names) if has_word else "".join(names)


def _list_in_words(words: Sequence[str]) -> str:
    """Return names as a list in words: `A, B and C`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
