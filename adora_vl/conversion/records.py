"""Reads a record of a user's table as a problem with its reference answer and its pictures."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from adora_vl.conversion.answers import (
    MISSING,
    Record,
    Refuse,
    TableAnswer,
    TableOptions,
    gold_of_option,
    list_in_cell,
    option_letter,
    read_answer,
    read_choices,
)
from adora_vl.conversion.chat import (
    ProblemAndInstruction,
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
from adora_vl.conversion.placeholders import MisplacedImagesError, Placed, place_images
from adora_vl.conversion.problem import RawProblem, RowError, check_gold, several_faults, storable
from adora_vl.conversion.stated import is_sentence
from adora_vl.utils.cli import shown

_EMPTY_PICTURES: tuple[Any, ...] = (None, "", [], (), {"bytes": None, "path": None})
# pandas and other libraries write these words into a text table where a row has no picture.
_NO_PICTURE = ("nan", "NaN", "None", "null", "NULL")
_LONGEST_ID = 200


@dataclass(frozen=True)
class BadRecord:
    """A line of a table that is no record."""

    kind: str  # the name of the rule that it breaks
    wrong: str  # what is wrong
    remedy: str  # what to do, as words that end before the place of the line: `write it anew in`
    original: bytes = b""  # the bytes of the line


# Each record with its position in its file, in words (`line 14`).
Records = Iterator[tuple[str, dict[str, Any] | BadRecord]]
HEAD_RECORDS = 100  # so many records are read to learn the columns of a table without a header


class Table(NamedTuple):
    """A table that was opened, before its records are read."""

    column_names: list[str]
    format_note: str  # how it is read, where that had to be guessed; else empty
    read_records: Callable[[], Records]  # begins at the first record with each call


@dataclass(frozen=True)
class Context:
    """What all records of one table have in common.

    Each record goes to a worker process together with it. So it has values of the table, and not
    the table itself, whose open file cannot be pickled.
    """

    name: str  # the name of the data set
    split: str
    location: str  # the table's name in messages
    columns: Columns
    files: FileRoot
    texts_only: bool = False  # all cells are texts (CSV), so that a list is written as JSON
    drop_instruction: bool = False
    has_truth_values: bool = False  # the first answer of the table is true or false
    format_note: str = ""  # how the table is read, where that had to be guessed


def read_record(
    record: Record | BadRecord, *, position: str, index: int, context: Context
) -> RawProblem:
    """Turn a record of a user's table into a problem with its answer and its pictures.

    `position` is where the record stands in its file, in words (`line 14`), and `index` its number
    in the split, from 0. `context` has what all records of the table share.

    Raises `RowError`, which names all faults of the record that can be seen in one pass.
    """
    origin = f"{position} of {context.location}"
    numbered_id = f"{context.name}/{context.split}/{index}"
    if isinstance(record, BadRecord):
        raise RowError(
            row_id=numbered_id,
            kind=record.kind,
            wrong=record.wrong,
            remedy=f"{record.remedy} {origin}",
            originals=(record.original,) if record.original else (),
        )
    columns = context.columns
    # `refuse(kind, wrong, remedy)` makes the error that refuses this record. A fault of the id itself
    # is reported under the number of the record.
    refuse_id: Refuse = partial(_refusal, record, columns, origin, numbered_id)
    row_id = _row_id(record, context=context, numbered_id=numbered_id, refuse=refuse_id)
    refuse: Refuse = partial(_refusal, record, columns, origin, row_id)
    parts = _read_parts(record, context, refuse)
    question = parts.question
    images = parts.pictures.images
    placed = _placed_images(question.problem, len(images), columns, refuse)
    extras = {
        our_name: _extra_text(record.get(table_name), table_name, refuse)
        for our_name, table_name in columns.extras
    }
    return RawProblem(
        id=row_id,
        split=context.split,
        source=context.name,
        origin=origin,
        images=tuple(images[index] for index in placed.order),
        problem=placed.text,
        answer=question.answer,
        choices=None if question.choices is None else tuple(question.choices),
        value_answer=question.choices is not None,
        text_only=not images,
        extras=extras,
        notes=_notes_on(parts, row_id=row_id, context=context, placed=placed),
    )


@dataclass(frozen=True)
class _Question:
    """The text of a problem with its reference answer and options."""

    problem: str
    answer: str
    choices: list[str] | None = None  # None for an open question
    had_options_in_text: bool = False  # the choices were taken from the text of the problem


@dataclass(frozen=True)
class _Pictures:
    """The pictures of a row, encoded; there are none where no column has any."""

    images: tuple[bytes, ...]
    # `PATH is FILE` for the first path that leads to a file in another spelling alone; else empty.
    respelled: str


@dataclass(frozen=True)
class _Parts:
    """The parts of a record without faults, which are read one by one."""

    question: _Question
    pictures: _Pictures
    instruction: str  # on how to answer, at the end of the problem; empty where there is none
    # The answer, where words such as `The answer is` stood before it; else empty.
    stated_answer: str
    has_image_options: bool  # an option names an image


def _read_parts(record: Record, context: Context, refuse: Refuse) -> _Parts:
    """Read the question, the answer, the options and the pictures of a record.

    Each part is read even where an earlier one has a fault, so that the user sees all faults at
    once. `refuse` makes the error of a fault.

    Raises `RowError`, with all of these faults.
    """
    columns = context.columns
    # `read_part` calls a function, and returns None where that raises `RowError`. The errors are
    # raised together at the end of the block.
    with several_faults() as read_part:
        problem: ProblemAndInstruction | None = read_part(_read_problem, record, context, refuse)
        answer: TableAnswer | None = read_part(
            read_answer, record, columns, refuse, has_truth_values=context.has_truth_values
        )
        options: TableOptions | None = read_part(
            read_choices, record, columns, texts_only=context.texts_only, refuse=refuse
        )
        pictures: _Pictures | None = read_part(_read_pictures, record, context, refuse)
        question: _Question | None = None
        if answer is not None:
            question = read_part(
                _question_with_gold,
                problem=problem.problem if problem is not None else "",
                answer=answer.text,
                choices=options.texts if options is not None else None,
                columns=columns,
                rest_is_faultless=problem is not None and pictures is not None,
                refuse=refuse,
            )
    # Where a part could not be read, the block above has raised.
    assert problem is not None
    assert answer is not None
    assert options is not None
    assert pictures is not None
    assert question is not None
    return _Parts(
        question=question,
        pictures=pictures,
        instruction=problem.instruction,
        stated_answer=answer.text if answer.is_announced else "",
        has_image_options=options.name_images,
    )


def _notes_on(parts: _Parts, row_id: str, context: Context, placed: Placed) -> dict[str, str]:
    """Return remarks on a record that is used, which the user should know of.

    The keys are names of `NOTES`, and the values how this record is shown as an example. `placed`
    is the text of the problem with marks where its images stand.
    """
    notes = {}
    if parts.instruction:
        notes["instruction"] = parts.instruction
    if parts.question.had_options_in_text:
        notes["options_in_text"] = row_id
    if parts.has_image_options:
        notes["options"] = row_id
    if parts.stated_answer:
        notes["stated"] = f"{row_id} ({shown(parts.stated_answer, 40)})"
    if parts.pictures.respelled:
        notes["spelling"] = f"{row_id} ({parts.pictures.respelled})"
    if context.format_note:
        notes["format"] = context.format_note
    if placed.numbers_parts:
        notes["parts"] = row_id
    # A table without a column for images is of texts alone, which needs no note.
    if context.columns.images and not parts.pictures.images:
        notes["without_image"] = row_id
    return notes


def _placed_images(problem: str, image_count: int, columns: Columns, refuse: Refuse) -> Placed:
    """Return the text of a problem with `<image>` at the place of each of its images.

    Raises `RowError` where the text has another number of places than there are images.
    """
    try:
        return place_images(problem, image_count)
    except MisplacedImagesError as error:
        remedy = error.remedy
        if image_count == 0 and not columns.images:
            remedy = "name the column with the pictures, images=COLUMN, or take the mark out"
        wrong = f"the problem {shown(problem)} {error.wrong}"
        raise refuse("placeholder", wrong, f"{remedy}, in") from error


def _question_with_gold(
    problem: str,
    answer: str,
    choices: list[str] | None,
    columns: Columns,
    rest_is_faultless: bool,
    refuse: Refuse,
) -> _Question:
    """Return the question with its answer and its options, if it has any.

    - `What? A. 3 B. 4` with the answer B becomes `What?` with the options 3 and 4 and the answer 4,
      unless the table has a column for options, or the user keeps options in the text.
    - With `choices` the answer B becomes the text of option B.
    - The answer to an open question stays as it is. A sentence is refused, unless the user wants
      such answers.

    The answer to an open question is usually checked later, when `to_row` makes the row. But a row
    with another fault never comes so far. Without `rest_is_faultless` the answer is therefore
    checked here, so that the user sees its fault too.

    Raises `RowError` for an answer that is none of the options, or a sentence.
    """
    if not columns.choices and not columns.keep_options_in_text:
        question = _with_options_in_text(problem, answer, columns, refuse)
        if question is not None:
            return question
    if choices is not None:
        letter = option_letter(answer, choices, columns.answer_is, refuse)
        return _Question(problem, answer=gold_of_option(letter, choices), choices=choices)
    if not columns.text_answers and is_sentence(answer):
        raise refuse(
            "gold_sentence",
            f"the right answer {answer!r:.200} is a sentence, which hardly any answer repeats",
            "write the answer alone, or keep such texts with --text-answers, in",
        )
    if not rest_is_faultless:
        check_gold(answer, refuse)
    return _Question(problem, answer=answer)


def _with_options_in_text(
    problem: str, answer: str, columns: Columns, refuse: Refuse
) -> _Question | None:
    """Take the options out of the text of a problem, and make them its choices.

    Returns None where the text has no options, or where the answer is none of them.
    """
    problem_and_options = options_in_text(problem)
    if problem_and_options is None:
        return None
    choices = problem_and_options.options
    try:
        letter = option_letter(answer, choices, columns.answer_is or "value", refuse)
    except RowError:
        return None
    return _Question(
        problem=problem_and_options.problem,
        answer=gold_of_option(letter, choices),
        choices=choices,
        had_options_in_text=True,
    )


def _refusal(
    record: Record, columns: Columns, origin: str, row_id: str, kind: str, wrong: str, remedy: str
) -> RowError:
    """Return the error that refuses a record, with the record's texts for the quarantine.

    Args:
        record: the record.
        columns: the columns of its table. Pictures are not among the texts.
        origin: where the record stands, in words.
        row_id: its id.
        kind: the name of the rule that it breaks.
        wrong: what is wrong.
        remedy: what to do, as words that end before `origin`: `correct it in`.
    """
    shown_values = {}
    for name in columns.table_names:
        if name not in record or name in columns.images:
            continue
        value = record[name]
        # The quarantine writes these values as a line of JSON, which knows neither bytes nor NaN.
        is_json = isinstance(value, (type(None), str, int))
        shown_values[name] = value if is_json else f"{value!r:.200}"
    return RowError(
        row_id=row_id,
        kind=kind,
        wrong=wrong,
        remedy=f"{remedy} {origin}",
        record=shown_values,
    )


def _row_id(record: Record, context: Context, numbered_id: str, refuse: Refuse) -> str:
    """Return `DATA_SET/SPLIT/ID` for the id in the record; `numbered_id` where it has none.

    For example, both `17` and `geo/train/17` give `geo/train/17`.

    Raises `RowError` for an id that is neither a short text nor a whole number.
    """
    column = context.columns.id
    value = None if column is None else record.get(column)
    if value is None or value == "":
        return numbered_id
    # True is an `int` in Python, but no id.
    is_text_or_number = isinstance(value, str | int) and not isinstance(value, bool)
    text = str(value) if is_text_or_number else ""
    if not text.strip() or len(text) > _LONGEST_ID or not storable(text):
        raise refuse(
            "field_type",
            f"{column!r} is {shown(value)}",
            f"make it a text of up to {_LONGEST_ID} letters in",
        )
    prefix = f"{context.name}/{context.split}/"
    # The ids of a prepared folder that is converted once more have the prefix already.
    return text if text.startswith(prefix) else prefix + text


def _read_problem(record: Record, context: Context, refuse: Refuse) -> ProblemAndInstruction:
    """Return the text of the problem and the instruction in it; a conversation has both too.

    The instruction says how to answer, such as `Put the answer in \\boxed{}`. It is returned beside
    the text, and it also stays in the text unless the user drops it.

    Raises `RowError` where there is no such text.
    """
    column = context.columns.problem
    text = question_in(record, context.columns).text
    if not isinstance(text, str) or not storable(text):
        value = list_in_cell(record.get(column, MISSING), texts_only=True)
        remedy = "make it a text, or a conversation with one question, in"
        raise refuse("field_type", f"{column!r} is {shown(value)}", remedy)
    split_text = without_instruction(text)
    if split_text.instruction and context.drop_instruction:
        return split_text
    return ProblemAndInstruction(problem=text, instruction=split_text.instruction)


class QuestionAndPictures(NamedTuple):
    """The question of a record as it stands there, and the pictures inside it."""

    text: Any  # a text, or whatever value the record has in its place
    pictures: list[Any]  # each a path, an address or `{"bytes": ...}`


def question_in(record: Record, columns: Columns) -> QuestionAndPictures:
    """Return the question of a record, which may be a text or a conversation.

    The pictures are those in the image parts of the conversation, or else those that `<img>` tags
    in the text name.
    """
    value = list_in_cell(record.get(columns.problem, MISSING), texts_only=True)
    text = text_of_chat(value) if isinstance(value, list) else value
    paths_in_text: list[Any] = []
    if isinstance(text, str):
        text, paths_in_text = pictures_of_text(text)
    return QuestionAndPictures(text=text, pictures=pictures_of_chat(value) or paths_in_text)


def pictures_beside(record: Record, columns: Columns, *, texts_only: bool) -> list[Any]:
    """Return the pictures in the columns for images: paths, addresses, bytes as they stand there.

    With `texts_only` all cells of the table are texts, so that a list is written as JSON.
    """
    if not columns.images:
        return []
    if len(columns.images) > 1:  # one picture a column; a column without one is empty
        values = [record.get(name) for name in columns.images]
        return [value for value in values if value not in _EMPTY_PICTURES]
    value = list_in_cell(record.get(columns.images[0]), texts_only)
    if isinstance(value, str):
        value = value.strip()
    is_nan = isinstance(value, float) and value != value  # as pandas has an empty cell
    is_word_for_none = texts_only and value in _NO_PICTURE
    if is_nan or is_word_for_none or value in _EMPTY_PICTURES:
        return []
    return listed_pictures(value)


def _read_pictures(record: Record, context: Context, refuse: Refuse) -> _Pictures:
    """Read the pictures of a record, from its columns for images or from its question.

    `refuse` makes the error of a record from the rule, what is wrong, and what to do.

    Raises `RowError` for pictures in both places, for a picture that cannot be read, and where
    every row has to have a picture and this one has none.
    """
    pictures_in_columns = pictures_beside(record, context.columns, texts_only=context.texts_only)
    pictures_in_question = question_in(record, context.columns).pictures
    if pictures_in_columns and pictures_in_question:
        raise refuse(
            "field_type",
            "there are pictures in the conversation and beside it",
            "leave them out of one of the two in",
        )
    images = []
    respelled = ""
    for number, picture in enumerate(pictures_in_columns or pictures_in_question):
        try:
            images.append(picture_bytes(picture, context.files))
        except PictureError as error:
            raise refuse(error.kind, f"image {number} {error}", error.remedy) from error
        if not respelled:
            respelled_file = other_spelling(picture, context.files)
            if respelled_file:
                respelled = f"{shown(picture)} is {shown(respelled_file)}"
    if not images and context.columns.requires_image:
        raise refuse("no_image", "images [] is empty", "add the diagram in")
    return _Pictures(images=tuple(images), respelled=respelled)


def _extra_text(value: object, column: str, refuse: Refuse) -> str | None:
    """Return the value of a user's further column as a text; a value that is no text as JSON.

    For example, `easy` stays as it is, and the list [1, 2] gives `[1, 2]`.

    Raises `RowError` for a value that cannot be stored as a text.
    """
    if value is None:
        return None
    text = value if isinstance(value, str) else None
    if text is None:
        with suppress(ValueError, TypeError, RecursionError):  # for a value that JSON cannot have
            text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)
    if text is None or not storable(text):
        raise refuse("field_type", f"{column!r} is {shown(value)}", "make it a text or a number in")
    return text
