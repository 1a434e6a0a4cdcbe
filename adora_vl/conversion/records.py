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
    TableAnswer,
    TableOptions,
    gold_of_option,
    option_letter,
    parse_list_cell,
    read_answer,
    read_choices,
)
from adora_vl.conversion.chat import (
    ProblemAndInstruction,
    pictures_of_chat,
    question_of_chat,
    replace_img_tags,
    split_off_instruction,
)
from adora_vl.conversion.columns import Columns
from adora_vl.conversion.final_answer import is_sentence
from adora_vl.conversion.options_in_text import options_in_text
from adora_vl.conversion.pictures import (
    ImageSource,
    PictureError,
    corrected_path,
    picture_bytes,
    pictures_in_cell,
)
from adora_vl.conversion.placeholders import MisplacedImagesError, TextWithImages, place_images
from adora_vl.conversion.problem import (
    ROW_LOCATION,
    MakeRowError,
    RawProblem,
    RowError,
    can_encode_utf8,
    check_gold,
    collect_row_errors,
)
from adora_vl.utils.cli import short_repr

_EMPTY_PICTURES: tuple[Any, ...] = (None, "", [], (), {"bytes": None, "path": None})
# pandas and other libraries write these words into a text table where a row has no picture.
_WORDS_FOR_NO_PICTURE = ("nan", "NaN", "None", "null", "NULL")
_LONGEST_ID = 200


@dataclass(frozen=True)
class BadRecord:
    """A line of a table that cannot be read as a record."""

    reason: str  # the broken rule in one word, such as `not_json`
    wrong: str  # what is wrong
    remedy: str  # what to do, where `ROW_LOCATION` stands for the place of the line
    original: bytes = b""  # the bytes of the line


# Pairs of a position in a file, in words (`line 14`), and the record that stands there.
PositionedRecords = Iterator[tuple[str, dict[str, Any] | BadRecord]]
HEAD_RECORDS = 100  # how many records are read to learn the columns of a table without a header


class Table(NamedTuple):
    """A table that was opened, before its records are read."""

    column_names: list[str]
    # How the table is read, where that had to be guessed: `a.csv, with semicolons between the
    # cells`. Else it is empty.
    format_guess: str
    read_records: Callable[[], PositionedRecords]  # begins at the first record with each call


@dataclass(frozen=True)
class TableContext:
    """What all records of one table have in common.

    Each record goes to a worker process together with it. So it has values of the table, and not
    the table itself, whose open file cannot be pickled.
    """

    name: str  # the name of the data set
    split: str
    location: str  # the table's name in messages
    columns: Columns
    image_source: ImageSource
    texts_only: bool = False  # all cells are texts (CSV), so that a list is written as JSON
    drop_instruction: bool = False
    has_truth_values: bool = False  # the first answer of the table is true or false
    format_guess: str = ""  # how the table is read, where that had to be guessed


def read_record(
    record: Record | BadRecord, *, position: str, index: int, context: TableContext
) -> RawProblem:
    """Return the problem in a record of a user's table, with its answer and its pictures.

    Args:
        record: the record, or what is wrong with a line that is none.
        position: where it stands in its file, in words (`line 14`).
        index: its number in the split, from 0.
        context: what all records of the table share.

    Raises:
        RowError: the record cannot be used. The error names all faults that can be seen at once.
    """
    origin = f"{position} of {context.location}"
    numbered_id = f"{context.name}/{context.split}/{index}"  # for a record without an id
    if isinstance(record, BadRecord):
        raise RowError(
            row_id=numbered_id,
            reason=record.reason,
            wrong=record.wrong,
            remedy=record.remedy.replace(ROW_LOCATION, origin),
            original_files=(record.original,) if record.original else (),
        )
    columns = context.columns
    # `row_error(reason, wrong, remedy)` makes the error of this record. A fault of the id itself is
    # reported under the number of the record.
    id_error: MakeRowError = partial(_make_row_error, record, columns, origin, numbered_id)
    row_id = _row_id(record, context=context, numbered_id=numbered_id, row_error=id_error)
    row_error: MakeRowError = partial(_make_row_error, record, columns, origin, row_id)
    parts = _read_parts(record, context, row_error)
    question = parts.question
    images = parts.pictures.images
    text_with_images = _place_images_or_refuse(
        question.problem, image_count=len(images), columns=columns, row_error=row_error
    )
    extras = {}  # the values of the user's further columns
    for our_name, table_name in columns.extras:
        extras[our_name] = _extra_text(record.get(table_name), table_name, row_error)
    return RawProblem(
        id=row_id,
        split=context.split,
        source=context.name,
        origin=origin,
        images=tuple(images[image_index] for image_index in text_with_images.order),
        problem=text_with_images.text,
        answer=question.answer,
        choices=None if question.choices is None else tuple(question.choices),
        answer_is_text=question.choices is not None,
        text_only=not images,
        extras=extras,
        warnings=_row_warnings(
            parts, row_id=row_id, context=context, text_with_images=text_with_images
        ),
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

    problem_and_instruction: ProblemAndInstruction
    answer: TableAnswer
    options: TableOptions
    pictures: _Pictures
    question: _Question  # made of the problem, the answer and the options


def _read_parts(record: Record, context: TableContext, row_error: MakeRowError) -> _Parts:
    """Return the question, the answer, the options and the pictures of a record.

    Each part is read even where an earlier one has a fault, so that the user sees all faults at
    once. `row_error` makes the error of a fault.

    Raises `RowError`, with all of these faults.
    """
    columns = context.columns
    # The column of the question as it is: its text, and the pictures that are named in it.
    raw_question = question_and_pictures(record, columns)
    # `try_call` returns None for a function that raises `RowError`. The errors are raised together
    # at the end of the block.
    with collect_row_errors() as try_call:
        problem_and_instruction: ProblemAndInstruction | None = try_call(
            _read_problem, raw_question.text, record, context, row_error
        )
        answer: TableAnswer | None = try_call(
            read_answer, record, columns, row_error, has_truth_values=context.has_truth_values
        )
        options: TableOptions | None = try_call(
            read_choices, record, columns, texts_only=context.texts_only, row_error=row_error
        )
        pictures: _Pictures | None = try_call(
            _read_pictures, raw_question.pictures, record, context, row_error
        )
        question: _Question | None = None
        if answer is not None:
            question = try_call(
                _question_with_answer,
                problem=problem_and_instruction.problem if problem_and_instruction else "",
                answer=answer.text,
                choices=options.texts if options is not None else None,
                columns=columns,
                other_parts_are_read=problem_and_instruction is not None and pictures is not None,
                row_error=row_error,
            )
    # Where a part could not be read, the block above has raised.
    assert problem_and_instruction is not None
    assert answer is not None
    assert options is not None
    assert pictures is not None
    assert question is not None
    return _Parts(
        problem_and_instruction=problem_and_instruction,
        answer=answer,
        options=options,
        pictures=pictures,
        question=question,
    )


def _row_warnings(
    parts: _Parts, row_id: str, context: TableContext, text_with_images: TextWithImages
) -> dict[str, str]:
    """Return what the user should know of a record that is used all the same.

    The keys are those of `WARNING_TEXTS`, the texts that are printed, and the values are what
    stands there as an example: {"parts": "geo/train/17"}. `text_with_images` is the text of the
    problem with `<image>` where its images stand.
    """
    warnings = {}
    if parts.problem_and_instruction.instruction:
        warnings["instruction"] = parts.problem_and_instruction.instruction
    if parts.question.had_options_in_text:
        warnings["options_in_text"] = row_id
    if parts.options.name_images:
        warnings["options"] = row_id
    if parts.answer.was_extracted:  # words such as `The answer is` stood before it
        warnings["stated"] = f"{row_id} ({short_repr(parts.answer.text, max_characters=40)})"
    if parts.pictures.respelled:
        warnings["spelling"] = f"{row_id} ({parts.pictures.respelled})"
    if context.format_guess:
        warnings["format"] = context.format_guess
    if text_with_images.numbers_parts:
        warnings["parts"] = row_id
    # A table without a column for images is of texts alone, which needs no warning.
    if context.columns.images and not parts.pictures.images:
        warnings["without_image"] = row_id
    return warnings


def _place_images_or_refuse(
    problem: str, image_count: int, columns: Columns, row_error: MakeRowError
) -> TextWithImages:
    """Return the text of a problem with `<image>` at the place of each of its images.

    Raises `RowError`, which `row_error` makes, where the marks in the text, such as `<image1>`, do
    not fit the number of images.
    """
    try:
        return place_images(problem, image_count)
    except MisplacedImagesError as error:
        remedy = error.remedy
        if image_count == 0 and not columns.images:
            remedy = "name the column with the pictures, images=COLUMN, or take the mark out"
        wrong = f"the problem {short_repr(problem)} {error.wrong}"
        raise row_error("placeholder", wrong, f"{remedy}, in {ROW_LOCATION}") from error


def _question_with_answer(
    problem: str,
    answer: str,
    choices: list[str] | None,
    columns: Columns,
    other_parts_are_read: bool,
    row_error: MakeRowError,
) -> _Question:
    """Return the question with its answer and its options, if it has any.

    - `What? A. 3 B. 4` with the answer B becomes `What?` with the options 3 and 4 and the answer 4,
      unless the table has a column for options, or the user keeps options in the text.
    - With `choices` the answer B becomes the text of option B.
    - The answer to an open question stays as it is. A sentence is refused, unless the user wants
      such answers.

    The answer to an open question is usually checked later, when `to_row` makes the row. But a row
    with another fault never comes so far. Without `other_parts_are_read` the answer is therefore
    checked here, so that the user sees its fault too.

    Raises `RowError`, which `row_error` makes, for an answer that is none of the options, or a
    sentence.
    """
    if not columns.choices and not columns.keep_options_in_text:
        multiple_choice = _options_out_of_text(
            problem, answer=answer, columns=columns, row_error=row_error
        )
        if multiple_choice is not None:
            return multiple_choice
    if choices is not None:
        letter = option_letter(answer, choices, answer_is=columns.answer_is, row_error=row_error)
        return _Question(problem=problem, answer=gold_of_option(letter, choices), choices=choices)
    if not columns.text_answers and is_sentence(answer):
        raise row_error(
            "gold_sentence",
            f"the right answer {answer!r:.200} is a sentence, which hardly any answer repeats",
            f"write the answer alone, or keep such texts with --text-answers, in {ROW_LOCATION}",
        )
    if not other_parts_are_read:
        check_gold(answer, row_error)
    return _Question(problem=problem, answer=answer)


def _options_out_of_text(
    problem: str, answer: str, columns: Columns, row_error: MakeRowError
) -> _Question | None:
    """Return the question `What?` with the choices 3 and 4 for the text `What? A. 3 B. 4`.

    Returns None where the text has no options, or where the answer is none of them.
    """
    problem_and_options = options_in_text(problem)
    if problem_and_options is None:
        return None
    choices = problem_and_options.options
    try:
        letter = option_letter(
            answer, choices, answer_is=columns.answer_is or "value", row_error=row_error
        )
    except RowError:
        return None
    return _Question(
        problem=problem_and_options.problem,
        answer=gold_of_option(letter, choices),
        choices=choices,
        had_options_in_text=True,
    )


def _make_row_error(
    record: Record, columns: Columns, origin: str, row_id: str, reason: str, wrong: str, remedy: str
) -> RowError:
    """Return the error of a record that cannot be used, with its texts for the quarantine.

    Args:
        record: the record.
        columns: the columns of its table. Pictures are not among the texts.
        origin: where the record stands, in words.
        row_id: its id.
        reason: the broken rule in one word.
        wrong: what is wrong.
        remedy: what to do, where `ROW_LOCATION` stands for the place of the record.
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
        reason=reason,
        wrong=wrong,
        remedy=remedy.replace(ROW_LOCATION, origin),
        record=shown_values,
    )


def _row_id(
    record: Record, context: TableContext, numbered_id: str, row_error: MakeRowError
) -> str:
    """Return `DATA_SET/SPLIT/ID` for the id in the record; `numbered_id` where it has none.

    For example, both `17` and `geo/train/17` give `geo/train/17`.

    Raises `RowError`, which `row_error` makes, for an id that is neither a short text nor a whole
    number.
    """
    column = context.columns.id
    value = None if column is None else record.get(column)
    if value is None or value == "":
        return numbered_id
    # True is an `int` in Python, but no id.
    is_text_or_number = isinstance(value, str | int) and not isinstance(value, bool)
    text = str(value) if is_text_or_number else ""
    if not text.strip() or len(text) > _LONGEST_ID or not can_encode_utf8(text):
        raise row_error(
            "field_type",
            f"{column!r} is {short_repr(value)}",
            f"make it a text of up to {_LONGEST_ID} letters in {ROW_LOCATION}",
        )
    prefix = f"{context.name}/{context.split}/"
    # The ids of a prepared folder that is converted once more have the prefix already.
    return text if text.startswith(prefix) else prefix + text


def _read_problem(
    text: object, record: Record, context: TableContext, row_error: MakeRowError
) -> ProblemAndInstruction:
    """Return the problem of a record as a text, and the instruction on how to answer in it.

    `text` is the question as `question_and_pictures` returns it. The instruction, such as `Put the
    answer in \\boxed{}`, also stays in the text unless the user drops it.

    Raises `RowError`, which `row_error` makes, where there is no such text.
    """
    column = context.columns.problem
    if not isinstance(text, str) or not can_encode_utf8(text):
        value = parse_list_cell(record.get(column, MISSING), texts_only=True)
        remedy = f"make it a text, or a conversation with one question, in {ROW_LOCATION}"
        raise row_error("field_type", f"{column!r} is {short_repr(value)}", remedy)
    split_text = split_off_instruction(text)
    if split_text.instruction and context.drop_instruction:
        return split_text
    return ProblemAndInstruction(problem=text, instruction=split_text.instruction)


class QuestionAndPictures(NamedTuple):
    """The question of a record as it stands there, and the pictures inside it."""

    text: Any  # a text, or whatever value the record has in its place
    pictures: list[Any]  # each a path, an address or `{"bytes": ...}`


def question_and_pictures(record: Record, columns: Columns) -> QuestionAndPictures:
    """Return the question of a record, which may be a text or a conversation, and its pictures.

    The pictures are those in the image parts of the conversation, or else those that `<img>` tags
    in the text name. Pictures in columns of their own are not among them.
    """
    value = parse_list_cell(record.get(columns.problem, MISSING), texts_only=True)
    text = question_of_chat(value) if isinstance(value, list) else value
    paths_in_text: list[Any] = []
    if isinstance(text, str):
        text, paths_in_text = replace_img_tags(text)
    return QuestionAndPictures(text=text, pictures=pictures_of_chat(value) or paths_in_text)


def pictures_in_columns(record: Record, columns: Columns, *, texts_only: bool) -> list[Any]:
    """Return the pictures in a record's columns for images, each a path, an address or bytes.

    With `texts_only` all cells of the table are texts, so that a list is written as JSON.
    """
    if not columns.images:
        return []
    if len(columns.images) > 1:  # one picture a column; a column without one is empty
        values = [record.get(name) for name in columns.images]
        return [value for value in values if value not in _EMPTY_PICTURES]
    value = parse_list_cell(record.get(columns.images[0]), texts_only)
    if isinstance(value, str):
        value = value.strip()
    is_nan = isinstance(value, float) and value != value  # as pandas has an empty cell
    is_word_for_none = texts_only and value in _WORDS_FOR_NO_PICTURE
    if is_nan or is_word_for_none or value in _EMPTY_PICTURES:
        return []
    return pictures_in_cell(value)


def _read_pictures(
    from_question: list[Any], record: Record, context: TableContext, row_error: MakeRowError
) -> _Pictures:
    """Return the encoded pictures of a record, from its columns for images or from its question.

    `from_question` are the pictures inside the question, as `question_and_pictures` returns them.
    `row_error` makes the error of a fault from the broken rule, what is wrong, and what to do.

    Raises `RowError` for pictures in both places, for a picture that cannot be read, and where
    every row has to have a picture and this one has none.
    """
    from_columns = pictures_in_columns(record, context.columns, texts_only=context.texts_only)
    if from_columns and from_question:
        raise row_error(
            "field_type",
            "there are pictures in the conversation and beside it",
            f"leave them out of one of the two in {ROW_LOCATION}",
        )
    images = []
    respelled = ""
    for number, picture in enumerate(from_columns or from_question):
        try:
            images.append(picture_bytes(picture, context.image_source))
        except PictureError as error:
            raise row_error(error.reason, f"image {number} {error}", error.remedy) from error
        if not respelled:
            respelled_file = corrected_path(picture, context.image_source)
            if respelled_file:
                respelled = f"{short_repr(picture)} is {short_repr(respelled_file)}"
    if not images and context.columns.requires_image:
        raise row_error("no_image", "images [] is empty", f"add the diagram in {ROW_LOCATION}")
    return _Pictures(images=tuple(images), respelled=respelled)


def _extra_text(value: object, column: str, row_error: MakeRowError) -> str | None:
    """Return the value of a user's further column as a text; a value that is no text as JSON.

    For example, `easy` stays as it is, and the list [1, 2] gives `[1, 2]`.

    Raises `RowError`, which `row_error` makes, for a value that cannot be stored as a text.
    """
    if value is None:
        return None
    text = value if isinstance(value, str) else None
    if text is None:
        with suppress(ValueError, TypeError, RecursionError):  # for a value that JSON cannot have
            text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)
    if text is None or not can_encode_utf8(text):
        raise row_error(
            "field_type",
            f"{column!r} is {short_repr(value)}",
            f"make it a text or a number in {ROW_LOCATION}",
        )
    return text
