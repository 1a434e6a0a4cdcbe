"""A record of somebody's table becomes a problem with its pictures."""

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

from adora_vl.conversion.answers import (
    MISSING,
    Record,
    Refuse,
    answer_of,
    choices_of,
    gold_of,
    letter_of,
    listed,
)
from adora_vl.conversion.chat import (
    pictures_of_chat,
    pictures_of_text,
    text_of_chat,
    without_instruction,
)
from adora_vl.conversion.columns import Columns
from adora_vl.conversion.options_in_text import options_in_text
from adora_vl.conversion.pictures import (
    FileRoot,
    PictureError,
    listed_pictures,
    other_spelling,
    picture_bytes,
)
from adora_vl.conversion.placeholders import place_images
from adora_vl.conversion.problem import RawProblem, RowError, check_gold, several_faults, storable
from adora_vl.conversion.stated import is_sentence
from adora_vl.utils.cli import shown

_EMPTY_PICTURES: tuple[Any, ...] = (None, "", [], (), {"bytes": None, "path": None})
# What pandas and others write into a text table where there is no picture.
_NO_PICTURE = ("nan", "NaN", "None", "null", "NULL")
_LONGEST_ID = 200


@dataclass(frozen=True)
class BadRecord:
    """A line that is no record: `kind`, what is wrong, what to do, and its bytes."""

    kind: str
    wrong: str
    remedy: str
    original: bytes = b""


@dataclass(frozen=True)
class Context:
    name: str  # of the data set
    split: str
    location: str  # as people know the table
    columns: Columns
    files: FileRoot
    texts_only: bool = False  # cells are texts, as in CSV, so a list is written as JSON
    drop_instruction: bool = False
    truths: bool = False  # the first answer of the table is true or false
    said: str = ""  # of how it is read, for the notes


def read_record(
    record: Record | BadRecord, place: str, number: int, context: Context
) -> RawProblem:
    """The problem of a record: at `place` in its file, `number` in its split, from 0.

    Raises `RowError`.
    """
    origin = f"{place} of {context.location}"
    row_id = f"{context.name}/{context.split}/{number}"
    if isinstance(record, BadRecord):
        originals = (record.original,) if record.original else ()
        raise RowError(
            row_id=row_id,
            kind=record.kind,
            wrong=record.wrong,
            remedy=f"{record.remedy} {origin}",
            originals=originals,
        )
    columns = context.columns
    refuse = partial(_refusal, record, columns, origin)
    row_id = _row_id(record, context=context, by_number=row_id, refuse=partial(refuse, row_id))
    refuse = partial(refuse, row_id)
    with several_faults() as read:
        found: tuple[str, dict[str, str]] | None = read(_problem, record, context, refuse)
        problem, notes = found or ("", {})
        answer, stated = read(answer_of, record, columns, refuse, context.truths) or (None, False)
        choices, named = read(choices_of, record, columns, context.texts_only, refuse) or (
            None,
            False,
        )
        pictures = read(_images, record, context, refuse)
        images, spelled, has_none = pictures or ((), "", False)
        sure = None not in (found, pictures)
        if answer is not None:
            settled = read(_settled, problem, answer, choices, columns, sure, refuse)
            asked = settled or _Asked(problem, answer, choices)
        else:
            asked = _Asked(problem, "", choices)
    if asked.in_text:
        notes["options_in_text"] = row_id
    if named:
        notes["options"] = row_id
    if stated:
        notes["stated"] = f"{row_id} ({shown(answer, 40)})"
    if spelled:
        notes["spelling"] = f"{row_id} ({spelled})"
    if context.said:
        notes["format"] = context.said
    placed = place_images(asked.problem, len(images))
    if isinstance(placed, str):
        wrong, _, remedy = placed.partition("; ")
        if has_none and not columns.images:
            remedy = "name the column with the pictures, images=COLUMN, or take the mark out"
        raise refuse("placeholder", f"the problem {shown(asked.problem)} {wrong}", f"{remedy}, in")
    if placed.parts:
        notes["parts"] = row_id
    if has_none and columns.images:
        notes["without_image"] = row_id
    extras = {name: _extra(record.get(theirs), theirs, refuse) for name, theirs in columns.extras}
    return RawProblem(
        id=row_id,
        split=context.split,
        source=context.name,
        origin=origin,
        images=tuple(images[number] for number in placed.order),
        problem=placed.text,
        answer=asked.answer,
        choices=None if asked.choices is None else tuple(asked.choices),
        value_answer=asked.choices is not None,
        text_only=has_none,
        extras=extras,
        notes=notes,
    )


@dataclass(frozen=True)
class _Asked:
    """A problem with its reference answer and options.

    `in_text`: the options stood in the problem.
    """

    problem: str
    answer: str
    choices: list[str] | None
    in_text: bool = False


def _settled(
    problem: str,
    answer: str,
    choices: list[str] | None,
    columns: Columns,
    sure: bool,
    refuse: Refuse,
) -> _Asked:
    """What is asked, with the right option's text as the answer where there are options.

    `sure`: the rest of the row is sound, and the answer of an open question is checked with it.
    Raises `RowError` for an answer that is none of the options, or no answer.
    """
    if not columns.choices and not columns.keep_options_in_text:
        found = _with_options_in_text(problem, answer, columns, refuse)
        if found is not None:
            return found
    if choices is not None:
        letter = letter_of(answer, choices, columns.answer_is, refuse)
        return _Asked(problem, gold_of(letter, choices), choices)
    if not columns.text_answers and is_sentence(answer):
        _refuse_sentence(answer, refuse)
    if not sure:
        check_gold(answer, refuse)
    return _Asked(problem, answer, None)


def _with_options_in_text(
    problem: str, answer: str, columns: Columns, refuse: Refuse
) -> _Asked | None:
    """The problem without the options in its text, which become choices; None where it has none, or
    the answer is none of them.
    """
    found = options_in_text(problem)
    if found is None:
        return None
    rest, choices = found
    try:
        letter = letter_of(answer, choices, columns.answer_is or "value", refuse)
    except RowError:
        return None
    return _Asked(rest, gold_of(letter, choices), choices, in_text=True)


def _refuse_sentence(answer: str, refuse: Refuse) -> None:
    wrong = f"the gold answer {answer!r:.200} is a sentence, which hardly any answer repeats"
    remedy = "write the answer alone, or keep such texts with --text-answers, in"
    raise refuse("gold_sentence", wrong, remedy)


def _refusal(
    record: Record, columns: Columns, origin: str, row_id: str, kind: str, wrong: str, todo: str
) -> RowError:
    held = {
        name: record[name]
        for name in columns.wanted
        if name in record and name not in columns.images
    }
    # as it can stand in a line of JSON, which knows neither bytes nor NaN
    plain = (type(None), str, int)
    texts = {
        name: value if isinstance(value, plain) else f"{value!r:.200}"
        for name, value in held.items()
    }
    return RowError(row_id=row_id, kind=kind, wrong=wrong, remedy=f"{todo} {origin}", record=texts)


def _row_id(record: Record, context: Context, by_number: str, refuse: Refuse) -> str:
    """The row's own id behind the names of data set and split; `by_number` where it has none."""
    column = context.columns.id
    own = None if column is None else record.get(column)
    if own is None or own == "":
        return by_number
    text = str(own) if isinstance(own, str | int) and not isinstance(own, bool) else ""
    if not text.strip() or len(text) > _LONGEST_ID or not storable(text):
        raise refuse(
            "field_type",
            f"{column!r} is {shown(own)}",
            f"make it a text of up to {_LONGEST_ID} letters in",
        )
    before = f"{context.name}/{context.split}/"
    # a prepared folder has ids of this form
    return text if text.startswith(before) else before + text


def _problem(record: Record, context: Context, refuse: Refuse) -> tuple[str, dict[str, str]]:
    """The text of the problem, also where it stands in a conversation, and what is noted of it."""
    column = context.columns.problem
    found = asked_in(record, context.columns)[0]
    if not isinstance(found, str) or not storable(found):
        value = listed(record.get(column, MISSING), texts_only=True)
        remedy = "make it a text, or a conversation with one question, in"
        raise refuse("field_type", f"{column!r} is {shown(value)}", remedy)
    rest, instruction = without_instruction(found)
    if not instruction:
        return found, {}
    return (rest if context.drop_instruction else found), {"instruction": instruction}


def asked_in(record: Record, columns: Columns) -> tuple[Any, list[Any]]:
    """What a record asks, as a text or what is there instead, and the pictures in it: of parts, or
    of `<img>` tags.
    """
    value = listed(record.get(columns.problem, MISSING), texts_only=True)
    found = text_of_chat(value) if isinstance(value, list) else value
    text, named = pictures_of_text(found) if isinstance(found, str) else (found, [])
    return text, pictures_of_chat(value) or named


def pictures_beside(record: Record, columns: Columns, *, texts_only: bool) -> list[Any]:
    if len(columns.images) > 1:  # one picture a column; those without one are empty
        return [
            value for name in columns.images if (value := record.get(name)) not in _EMPTY_PICTURES
        ]
    value = listed(record.get(columns.images[0]), texts_only) if columns.images else None
    value = value.strip() if isinstance(value, str) else value
    if isinstance(value, float) and value != value:
        value = None
    if texts_only and value in _NO_PICTURE:
        value = None
    return [] if value in _EMPTY_PICTURES else listed_pictures(value)


def _images(
    record: Record, context: Context, refuse: Refuse
) -> tuple[tuple[bytes, ...], str, bool]:
    """The pictures, the first path that was found in another spelling alone, and whether there are
    no pictures: no such column was named, or the row has nothing in it.
    """
    values = pictures_beside(record, context.columns, texts_only=context.texts_only)
    asked = asked_in(record, context.columns)[1]
    if values and asked:
        wrong = "there are pictures in the conversation and beside it"
        raise refuse("field_type", wrong, "leave them out of one of the two in")
    values = values or asked
    found = []
    spelled = ""
    for number, value in enumerate(values):
        try:
            found.append(picture_bytes(value, context.files))
        except PictureError as error:
            raise refuse(error.kind, f"image {number} {error}", error.remedy) from error
        if not spelled and (other := other_spelling(value, context.files)):
            spelled = f"{shown(value)} is {shown(other)}"
    if not found and context.columns.pictured:
        raise refuse("no_image", "images [] is empty", "add the diagram in")
    return tuple(found), spelled, not found


def _extra(value: Any, column: str, refuse: Refuse) -> str | None:
    """A value of a column of the user's own: texts as they are, anything else as JSON."""
    if value is None:
        return None
    if isinstance(value, str):
        found = value
    else:
        try:
            found = json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)
        except (ValueError, TypeError, RecursionError):
            found = ""
    if not storable(found) or (not found and value != ""):
        raise refuse("field_type", f"{column!r} is {shown(value)}", "make it a text or a number in")
    return found
