"""The text form: facts as a teacher writes them, one a sentence, become a form.

    triangle ABC
    AB = 5, BC = 7, angle ABC = 40
    D on AC, BD bisects angle ABC
    find AD

Points are capital letters. Without places the order comes from words: D on AC lies between A and C,
and the corners of a named shape go round. `A at 120, 56` gives a place, in pixels with y downwards,
as a screenshot has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from adora_vl.geometry.draft import (
    POINT_PATTERN,
    LogicFormDraft,
    SentenceError,
    SpecialTriangle,
    make_term,
)
from adora_vl.geometry.logic_form import LogicForm
from adora_vl.geometry.sentences import COORDINATE_PATTERN, SEGMENT_PATTERN, read_sentence
from adora_vl.geometry.shape_sentences import equal_legs
from adora_vl.utils.errors import UserError

MAX_TEXT = 20_000  # characters
_POINT_LIST_END_PATTERN = re.compile(
    rf"(?:and )?{POINT_PATTERN}(?:,? and {POINT_PATTERN})?|{COORDINATE_PATTERN}"
)
# What a list of points, or the place of a point, ends with before a further comma.
_UNFINISHED_LIST_PATTERN = re.compile(rf"{POINT_PATTERN}$|\bat \(?{COORDINATE_PATTERN}$")
_POINT_LIST_PATTERN = re.compile(rf"(?:[Pp]oints )?{POINT_PATTERN}(?:, {POINT_PATTERN})*")
# Lines of one kind, as in "medians AD, BE and CF".
_LINE_LIST_PATTERN = re.compile(rf"[A-Za-z]+s (?:{SEGMENT_PATTERN}, )*{SEGMENT_PATTERN}")


def read_form_from_text(text: str) -> LogicForm:
    """Read facts and a question.

    Raises `UserError` with the line and the sentence that cannot be read.
    """
    if len(text) > MAX_TEXT:
        raise UserError(f"facts: the text has {len(text)} characters, over {MAX_TEXT}")
    draft = LogicFormDraft()
    for number, sentence in _split_into_sentences(text):
        draft.line_number = number
        draft.sentence = sentence
        try:
            read_sentence(draft, sentence)
        except SentenceError as error:
            raise _sentence_error(number, sentence, str(error)) from None
    for special in draft.special_triangles:
        _settle_special_triangle(draft, special)
    if not draft.question:
        raise UserError("facts: nothing is asked; add a line such as 'find AC' or 'find x'")
    return LogicForm(
        lines=tuple(draft.lines),
        circles=tuple(draft.circles),
        points=dict(draft.places),
        facts=tuple(str(fact) for fact in draft.facts),
        question=tuple(str(goal) for goal in draft.question),
    )


def _sentence_error(line: int, sentence: str, reason: str) -> UserError:
    """Return the error for a sentence, with its place."""
    return UserError(f"facts: line {line}, {sentence!r:.80}: {reason}")


def _settle_special_triangle(draft: LogicFormDraft, special: SpecialTriangle) -> None:
    """Add what a triangle that is called right or isosceles says, once all sentences are read.

    Raises `UserError` where neither a sentence nor the places say which parts are meant.
    """
    names = "".join(special.corners)
    polygon = make_term("Triangle", *special.corners)
    has_places = set(special.corners) <= draft.places.keys()
    corner = draft.right_corner(special.corners)
    if "right" in special.adjectives and corner is None:
        if not has_places:
            reason = _ask_for_parts(names, f"angle {names} = 90")
            raise _sentence_error(special.line, special.sentence, reason)
        draft.facts.append(make_term("Right", polygon))
    if "isosceles" not in special.adjectives or draft.has_equal_parts(special.corners):
        return
    if "right" in special.adjectives and corner is not None:
        # The hypotenuse is longer than either leg, so only the legs can be equal.
        equal_legs(draft, apex=corner, corners=special.corners)
    elif has_places:
        draft.facts.append(make_term("Isosceles", polygon))
    else:
        example = f"{names[0]}{names[1]} = {names[0]}{names[2]}"
        raise _sentence_error(special.line, special.sentence, _ask_for_parts(names, example))


def _ask_for_parts(names: str, example: str) -> str:
    """Return what is to be added where a triangle does not say which of its parts are meant."""
    return f"it does not say which parts of {names} are meant; write such as {example}"


def _split_into_sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield the sentences with the numbers of their lines.

    They end with a point, a semicolon, a comma or the line. A comma inside a list of points or a
    place ends none; what stands behind `#` is a remark.
    """
    for number, line in enumerate(text.splitlines(), start=1):
        sentence = ""
        for part in re.split(r"[,;?!]|\.(?!\d)", line.split("#")[0]):
            piece = part.strip()
            if not piece:
                continue
            # A comma inside of a list of points or lines, or of a place, ends no sentence.
            is_end_of_list = bool(_POINT_LIST_END_PATTERN.fullmatch(piece))
            ends_list = is_end_of_list and bool(_UNFINISHED_LIST_PATTERN.search(sentence))
            is_in_points = bool(_POINT_LIST_PATTERN.fullmatch(sentence))
            begins_with_segment = bool(re.match(SEGMENT_PATTERN, piece))
            is_in_lines = begins_with_segment and bool(_LINE_LIST_PATTERN.fullmatch(sentence))
            if ends_list or is_in_points or is_in_lines:
                sentence = f"{sentence}, {piece}"
                continue
            if sentence:
                yield number, sentence
            sentence = piece
        if sentence:
            yield number, sentence
