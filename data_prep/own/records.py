"""A record of a stranger's table as a problem: texts, numbers and options are told apart, and nothing is guessed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from string import ascii_uppercase
from typing import Any

from adora_vl.commands import amount
from adora_vl.rewards import verify_gold
from adora_vl.rows import PLACEHOLDER
from data_prep.clean_row import RawProblem, RowError
from data_prep.own.columns import Columns
from data_prep.own.pictures import PictureError, Surroundings, picture_bytes

_LETTER = re.compile(r"\(?([A-Z])[).]?")
_LONGEST_ID = 200
Record = Mapping[str, Any]
_MISSING = object()


@dataclass(frozen=True)
class Broken:
    """A line that is no record: `kind`, what is wrong, what to do, and its bytes."""

    kind: str
    wrong: str
    remedy: str
    original: bytes = b""


@dataclass(frozen=True)
class Context:
    """What the records of one table have in common. `name`: of the data set; `location`: as people know the table.

    `texts_only`: cells are texts, as in CSV, so a list is written as JSON.
    """

    name: str
    split: str
    location: str
    columns: Columns
    place: Surroundings
    texts_only: bool = False


def read_record(record: Record | Broken, index: int, number: int, context: Context) -> RawProblem:
    """The problem of a record: `index` in its file, `number` in all files of its split, from 0. Raises `RowError`."""
    origin = f"row {index} of {context.location}"
    row_id = f"{context.name}/{context.split}/{number}"
    if isinstance(record, Broken):
        originals = (record.original,) if record.original else ()
        raise RowError(row_id, record.kind, record.wrong, f"{record.remedy} {origin}", originals=originals)
    columns = context.columns
    refuse = partial(_refusal, record, columns, origin)
    row_id = _row_id(record, context, row_id, partial(refuse, row_id))
    refuse = partial(refuse, row_id)
    problem = _text(record, columns.problem, refuse)
    answer = _answer(record, columns.answer, refuse)
    choices = _choices(record, context, refuse)
    images, has_none = _images(record, context, refuse)
    problem = _placed(problem, len(images), refuse)
    extras = {name: _extra(record.get(theirs), theirs, refuse) for name, theirs in columns.extras}
    if choices is not None:
        letter = _letter_of(answer, choices, refuse)
        answer = _gold(letter, choices)
    return RawProblem(
        id=row_id,
        split=context.split,
        source=context.name,
        origin=origin,
        images=images,
        problem=problem,
        answer=answer,
        choices=None if choices is None else tuple(choices),
        value_answer=choices is not None,
        text_only=has_none,
        extras=extras,
    )


Refuse = Callable[[str, str, str], RowError]


def _refusal(
    record: Record, columns: Columns, origin: str, row_id: str, kind: str, wrong: str, remedy: str
) -> RowError:
    texts = {name: _plain(record[name]) for name in columns.wanted if name in record and name not in columns.images}
    return RowError(row_id, kind, wrong, f"{remedy} {origin}", record=texts)


def _plain(value: Any) -> Any:
    """As it can stand in a line of JSON, which knows neither bytes nor NaN."""
    if value is None or isinstance(value, str | int | bool):
        return value
    return f"{value!r:.200}"


def _row_id(record: Record, context: Context, place: str, refuse: Refuse) -> str:
    """The row's own id behind the names of data set and split; its place in the table where it has none."""
    column = context.columns.id
    own = None if column is None else record.get(column)
    if own is None or own == "":
        return place
    text = str(own) if isinstance(own, str | int) and not isinstance(own, bool) else ""
    if not text.strip() or len(text) > _LONGEST_ID or not _storable(text):
        raise refuse("field_type", f"{column!r} is {_shown(own)}", f"make it a text of up to {_LONGEST_ID} letters in")
    return f"{context.name}/{context.split}/{text}"


def _text(record: Record, column: str, refuse: Refuse) -> str:
    value = record.get(column, _MISSING)
    if isinstance(value, str) and _storable(value):
        return value
    raise refuse("field_type", f"{column!r} is {_shown(value)}", "make it a text in")


def _answer(record: Record, column: str, refuse: Refuse) -> str:
    value = record.get(column, _MISSING)
    found = _number_or_text(value)
    if found is None or not found.strip():
        raise refuse("field_type", f"{column!r} is {_shown(value)}", "make it a text or a finite number in")
    return found.strip()


def _number_or_text(value: Any) -> str | None:
    """A text, or a finite number as people write it; None for anything else."""
    if isinstance(value, str):
        return value if _storable(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return None
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        return None
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))  # a table with one null makes floats of all its whole numbers
    return format(Decimal(repr(value)) if isinstance(value, float) else value, "f")


def _listed(value: Any, texts_only: bool) -> Any:
    """A cell of a text table that is a list in JSON as that list; anything else as it is."""
    if texts_only and isinstance(value, str) and value.lstrip().startswith("["):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return value
        return found if isinstance(found, list) else value
    return value


def _choices(record: Record, context: Context, refuse: Refuse) -> list[str] | None:
    """The options; None where there are none, so that the question is open."""
    names = context.columns.choices
    if len(names) > 1:  # one option a column; the last ones may be empty
        values = [record.get(name) for name in names]
        while values and values[-1] in (None, ""):
            values.pop()
        value: Any = values or None
    else:
        value = _listed(record.get(names[0]), context.texts_only) if names else None
    if value is None or (context.texts_only and value == ""):
        return None
    found = [_number_or_text(item) for item in value] if isinstance(value, list | tuple) else [None]
    if not found or any(item is None or not item.strip() for item in found):
        name = ", ".join(names)
        raise refuse("field_type", f"{name!r} is {_shown(value)}", "make it a list of texts or numbers, or null, in")
    return [item.strip() for item in found if item is not None]


def _letter_of(answer: str, choices: Sequence[str], refuse: Refuse) -> str:
    """The letter of the right option, which the answer names by its letter or by its text."""
    letters = ascii_uppercase[: len(choices)]
    if len(choices) > len(ascii_uppercase):
        raise refuse("field_type", f"there are {len(choices)} options", f"leave at most {len(ascii_uppercase)} in")
    match = _LETTER.fullmatch(answer)
    by_letter = match[1] if match and match[1] in letters else None
    by_text = [letters[index] for index, choice in enumerate(choices) if choice == answer]
    found = {*by_text, *([by_letter] if by_letter else [])}
    if len(found) == 1:
        return found.pop()
    if found:
        wrong = f"the answer {_shown(answer)} may be {' or '.join(sorted(found))} of {_shown(list(choices))}"
        raise refuse("ambiguous_answer", wrong, "make the options differ in")
    wrong = f"the answer {_shown(answer)} is neither a letter of {_shown(list(choices))} nor one of them"
    raise refuse("letter_without_choice", wrong, f"write one of {', '.join(letters)} in")


def _gold(letter: str, choices: Sequence[str]) -> str:
    """The option's own text where it can be graded by itself, since a model may answer with it too; else its letter."""
    text = choices[ascii_uppercase.index(letter)]
    return text if verify_gold(text, choices) is None else letter


def _images(record: Record, context: Context, refuse: Refuse) -> tuple[tuple[bytes, ...], bool]:
    """The pictures, and whether the row says that it has none: it has no such column, or an empty list in it."""
    names = context.columns.images
    if not names:
        return (), True
    if len(names) > 1:  # one picture a column; those without one are null
        values = [value for name in names if (value := record.get(name)) not in (None, "")]
    else:
        value = _listed(record.get(names[0]), context.texts_only)
        if isinstance(value, list | tuple) and not value:
            return (), True
        values = list(value) if isinstance(value, list | tuple) else [value]
    found = []
    for number, value in enumerate(values):
        try:
            found.append(picture_bytes(value, context.place))
        except PictureError as error:
            raise refuse(error.kind, f"image {number} {error}", error.remedy) from error
    return tuple(found), False


def _placed(problem: str, images: int, refuse: Refuse) -> str:
    """The text with a placeholder where each image stands; without any where all stand before the text."""
    asked = problem.count(PLACEHOLDER)
    if asked and asked != images:
        wrong = f"the problem {_shown(problem)} has {asked} {PLACEHOLDER} and the row {amount(images, 'image')}"
        raise refuse("placeholder", wrong, f"give as many {PLACEHOLDER} as images, or none, in")
    text = problem.strip()
    while text.startswith(PLACEHOLDER):
        text = text.removeprefix(PLACEHOLDER).lstrip()
    return problem.strip() if PLACEHOLDER in text else text


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
    if not _storable(found) or (not found and value != ""):
        raise refuse("field_type", f"{column!r} is {_shown(value)}", "make it a text or a number in")
    return found


def _storable(value: str) -> bool:
    """JSON can spell half of a surrogate pair, which is no character."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    if value is _MISSING:
        return "missing"
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
