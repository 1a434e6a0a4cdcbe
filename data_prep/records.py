"""A record of somebody's table becomes a problem with its pictures."""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from string import ascii_uppercase
from typing import Any
from urllib.parse import unquote

from adora_vl.data.images import UnreadableImageError, file_within
from adora_vl.rewards import canonical_gold, verify_gold
from adora_vl.rewards.completion import last_boxed
from adora_vl.utils.cli import GivenTwiceError, read_json, shown
from data_prep.chat import pictures_of_chat, text_of_chat, without_instruction
from data_prep.columns import Columns
from data_prep.placeholders import in_words, place_images
from data_prep.problem import MAX_FILE_BYTES, RawProblem, RowError, reads_as_letter, storable

_DATA_URL = re.compile(r"data:image(?:/[\w.+-]+)?(?:;[\w=.+-]+)*;base64,", re.IGNORECASE)
_FILE_URL = "file://"
_WEB = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_LONGEST_PATH = 1024  # a longer text is Base64
Fetch = Callable[[str], bytes]


class PictureError(ValueError):
    """A value gives no picture. `kind`: the broken rule in one word; `remedy`: what to do."""

    def __init__(self, kind: str, why: str, remedy: str) -> None:
        super().__init__(why)
        self.kind, self.remedy = kind, remedy


@dataclass(frozen=True)
class FileRoot:
    """Where the paths in a table lead: they start in `folder`, the table's own, and may not leave `root`, the input's.

    Both are None where there are no files, as in a stream from the hub. `stored`: the beginning of the paths of the
    hub's own files, whose bytes `fetch` gets.
    """

    folder: Path | None = None
    root: Path | None = None
    stored: str = ""
    fetch: Fetch | None = None


def picture_bytes(value: Any, files: FileRoot) -> bytes:
    """The encoded picture of a value: bytes, `{"bytes": ..., "path": ...}`, a data URL, Base64, a path or its file URL.

    Raises `PictureError`.
    """
    if isinstance(value, dict):
        value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if not isinstance(value, str) or not value.strip():
        raise PictureError("no_image", f"is {shown(value)}", "put the picture, or its path, into")
    text = value.strip()
    if text[:5].lower() == "data:":
        return _of_data_url(text)
    if files.stored and text.startswith(files.stored):
        assert files.fetch is not None
        try:
            return files.fetch(text)
        except Exception as error:  # the hub's library raises its own, the network's and the file system's
            why = f"is {shown(text)}, which the hub does not give ({type(error).__name__})"
            raise PictureError("file_missing", why, "check it in") from error
    if _WEB.match(text) and not text.lower().startswith(_FILE_URL):
        raise PictureError(
            "not_a_file", f"is the address {shown(text)}, and nothing is downloaded", "put the picture itself into"
        )
    if len(text) > _LONGEST_PATH:
        return _of_base64(text, "is a text that is neither a path nor Base64")
    return _of_file(text, files)


def named_files(value: Any, files: FileRoot) -> list[Path]:
    """The files inside the input's folder that the value of an images column names."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = read_json(value)
        except (ValueError, RecursionError):
            return []
    found = []
    for item in value if isinstance(value, list) else [value]:
        name = item.get("path") if isinstance(item, dict) and item.get("bytes") is None else item
        if isinstance(name, str) and len(name) <= _LONGEST_PATH and name[:5].lower() != "data:":
            with suppress(PictureError):
                found.append(_inside(name.strip(), files))
    return found


def _of_data_url(text: str) -> bytes:
    head = _DATA_URL.match(text)
    if not head:
        why = f"is {shown(text)}, not a data URL of an image"
        raise PictureError("not_base64", why, "write data:image/png;base64,... in")
    return _of_base64(text[head.end() :], "has a data URL whose Base64 is broken")


def _of_base64(text: str, why: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError("not_base64", f"{why} ({error})", "encode the picture again in") from error


def _inside(name: str, files: FileRoot) -> Path:
    """The file that a path or file URL leads to. Raises `PictureError` where that is not in the input's folder."""
    if files.folder is None or files.root is None:
        raise PictureError("not_a_file", f"is the path {shown(name)}, and there are no files", "put the bytes into")
    path = unquote(name[len(_FILE_URL) :]) if name.lower().startswith(_FILE_URL) else name
    if Path(path).is_absolute():
        path = os.path.relpath(path, files.folder)
    try:
        return file_within(files.folder, path, files.root)
    except UnreadableImageError as error:
        if error.kind == "path_outside":
            wrong, remedy = (
                "which leads out of the input's folder",
                "put the picture into the folder, and its path into",
            )
        else:
            wrong, remedy = f"which is none ({error.__cause__})", "correct it in"
        raise PictureError(error.kind, f"is the path {shown(name)}, {wrong}", remedy) from error


def _of_file(name: str, files: FileRoot) -> bytes:
    file = _inside(name, files)
    try:
        if not file.is_file():  # a folder, a pipe, a device
            raise PictureError("file_missing", f"is {shown(name)}, where there is no file", "put the file there for")
        if file.stat().st_size > MAX_FILE_BYTES:
            raise PictureError("file_too_large", f"is {shown(name)} of over {MAX_FILE_BYTES} bytes", "shrink it for")
        return file.read_bytes()
    except OSError as error:
        why = f"is {shown(name)}, which cannot be read ({error.strerror})"
        raise PictureError("file_missing", why, "make it readable for") from error


_LETTER = re.compile(r"\(?([A-Z])[).]?")
_ANSWER_BLOCK = re.compile(r"(?:\s*<think>.*</think>)?\s*<answer>((?:(?!</?answer>).)*)</answer>\s*", re.DOTALL)
_EMPTY_PICTURES: tuple[Any, ...] = (None, "", [], (), {"bytes": None, "path": None})
_LONGEST_ID = 200
Record = Mapping[str, Any]


class _Missing:
    def __repr__(self) -> str:
        return "missing"


_MISSING = _Missing()


@dataclass(frozen=True)
class BadRecord:
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
    files: FileRoot
    texts_only: bool = False
    drop_instruction: bool = False


def read_record(record: Record | BadRecord, place: str, number: int, context: Context) -> RawProblem:
    """The problem of a record: at `place` in its file, `number` in its split, from 0. Raises `RowError`."""
    origin = f"{place} of {context.location}"
    row_id = f"{context.name}/{context.split}/{number}"
    if isinstance(record, BadRecord):
        originals = (record.original,) if record.original else ()
        raise RowError(row_id, record.kind, record.wrong, f"{record.remedy} {origin}", originals=originals)
    columns = context.columns
    refuse = partial(_refusal, record, columns, origin)
    row_id = _row_id(record, context, row_id, partial(refuse, row_id))
    refuse = partial(refuse, row_id)
    problem, notes = _problem(record, context, refuse)
    answer = _answer(record, columns.answer, refuse)
    choices, named = _choices(record, context, refuse)
    if named:
        notes["options"] = row_id
    images, has_none = _images(record, context, refuse)
    if has_none and columns.pictured:
        raise refuse("no_image", "images [] is empty", "add the diagram in")
    placed = place_images(problem, len(images))
    if isinstance(placed, str):
        wrong, _, remedy = placed.partition("; ")
        if has_none and not columns.images:
            remedy = "name the column with the pictures, images=COLUMN, or take the mark out"
        raise refuse("placeholder", f"the problem {shown(problem)} {wrong}", f"{remedy}, in")
    if placed.parts:
        notes["parts"] = row_id
    if has_none and columns.images:
        notes["without_image"] = row_id
    extras = {name: _extra(record.get(theirs), theirs, refuse) for name, theirs in columns.extras}
    if choices is not None:
        letter = _letter_of(answer, choices, refuse)
        answer = _gold(letter, choices)
    return RawProblem(
        id=row_id,
        split=context.split,
        source=context.name,
        origin=origin,
        images=tuple(images[number] for number in placed.order),
        problem=placed.text,
        answer=answer,
        choices=None if choices is None else tuple(choices),
        value_answer=choices is not None,
        text_only=has_none,
        extras=extras,
        notes=notes,
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


def _row_id(record: Record, context: Context, by_number: str, refuse: Refuse) -> str:
    """The row's own id behind the names of data set and split; `by_number` where it has none."""
    column = context.columns.id
    own = None if column is None else record.get(column)
    if own is None or own == "":
        return by_number
    text = str(own) if isinstance(own, str | int) and not isinstance(own, bool) else ""
    if not text.strip() or len(text) > _LONGEST_ID or not storable(text):
        raise refuse("field_type", f"{column!r} is {shown(own)}", f"make it a text of up to {_LONGEST_ID} letters in")
    before = f"{context.name}/{context.split}/"
    return text if text.startswith(before) else before + text  # a prepared folder has ids of this form


def _problem(record: Record, context: Context, refuse: Refuse) -> tuple[str, dict[str, str]]:
    """The text of the problem, also where it stands in a conversation, and what is noted of it."""
    column = context.columns.problem
    value = _listed(record.get(column, _MISSING), texts_only=True)
    found = text_of_chat(value) if isinstance(value, list) else value
    if not isinstance(found, str) or not storable(found):
        remedy = "make it a text, or a conversation with one question, in"
        raise refuse("field_type", f"{column!r} is {shown(value)}", remedy)
    rest, instruction = without_instruction(found)
    if not instruction:
        return found, {}
    return (rest if context.drop_instruction else found), {"instruction": instruction}


def _answer(record: Record, column: str, refuse: Refuse) -> str:
    value = record.get(column, _MISSING)
    found = _number_or_text(value)
    if found is None or not found.strip():
        raise refuse("field_type", f"{column!r} is {shown(value)}", "make it a text or a finite number in")
    block = _ANSWER_BLOCK.fullmatch(found)
    found = block[1] if block else found
    inside = last_boxed(found) if found.count("\\boxed") == 1 else None  # also that of a whole solution
    return inside or found.strip()


def _number_or_text(value: Any) -> str | None:
    """A text, or a finite number as people write it; None for anything else."""
    if isinstance(value, str):
        return value if storable(value) else None
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
            found = read_json(value)
        except GivenTwiceError as error:
            return [error]  # what no list may hold, so the row is refused with these words
        except (ValueError, RecursionError):
            return value
        return found if isinstance(found, list) else value
    return value


def _choices(record: Record, context: Context, refuse: Refuse) -> tuple[list[str] | None, bool]:
    """The options, None where there are none, so that the question is open; and whether any of them names an image."""
    names = context.columns.choices
    if len(names) > 1:  # one option a column; the last ones may be empty
        values = [record.get(name) for name in names]
        while values and values[-1] in (None, ""):
            values.pop()
        value: Any = values or None
    else:
        value = _listed(record.get(names[0]), context.texts_only) if names else None
    if value is None or value in ([], ()) or (isinstance(value, str) and not value.strip()):
        return None, False
    name = ", ".join(names)
    found = [_number_or_text(item) for item in value] if isinstance(value, list | tuple) else [None]
    if any(item is None or not item.strip() for item in found):
        raise refuse("field_type", f"{name!r} is {shown(value)}", "make it a list of texts or numbers, or null, in")
    options = [item.strip() for item in found if item is not None]
    worded = [in_words(item) for item in options]
    if None in worded:
        remedy = "number its images as the problem does, in"
        raise refuse("placeholder", f"{name!r} is {shown(value)}, an option with the mark of an image", remedy)
    return [item for item in worded if item is not None], worded != options


def _letter_of(answer: str, choices: Sequence[str], refuse: Refuse) -> str:
    """The letter of the right option, which the answer names by its letter or by its text."""
    letters = ascii_uppercase[: len(choices)]
    if len(choices) > len(ascii_uppercase):
        raise refuse("field_type", f"there are {len(choices)} options", f"leave at most {len(ascii_uppercase)} in")
    match = _LETTER.fullmatch(answer)
    by_letter = match[1] if match and match[1] in letters else None
    by_text = [letter for letter, choice in zip(letters, choices, strict=True) if choice == answer]
    if not by_text and not by_letter:  # a prepared folder has the canonical form of the right option
        by_text = [letters[i] for i, choice in enumerate(choices) if canonical_gold(choice) == canonical_gold(answer)]
    found = {*by_text, *([by_letter] if by_letter else [])}
    if len(found) == 1:
        return found.pop()
    if found:
        wrong = f"the answer {shown(answer)} may be {' or '.join(sorted(found))} of {shown(list(choices))}"
        raise refuse("ambiguous_answer", wrong, "make the options differ in")
    wrong = f"the answer {shown(answer)} is neither a letter of {shown(list(choices))} nor one of them"
    raise refuse("letter_without_choice", wrong, f"write one of {', '.join(letters)} in")


def _gold(letter: str, choices: Sequence[str]) -> str:
    """The option's text where it can be graded, since a model may answer with it; else its letter."""
    text = choices[ascii_uppercase.index(letter)]
    return letter if verify_gold(text, choices) is not None or reads_as_letter(text) else text


def pictures_asked(record: Record, columns: Columns) -> list[Any]:
    """The pictures that stand in the conversation itself, in the parts of its question."""
    return pictures_of_chat(_listed(record.get(columns.problem), texts_only=True))


def _images(record: Record, context: Context, refuse: Refuse) -> tuple[tuple[bytes, ...], bool]:
    """The pictures, and whether there are none: no such column was named, or the row has nothing in it."""
    names = context.columns.images
    if len(names) > 1:  # one picture a column; those without one are empty
        values = [value for name in names if (value := record.get(name)) not in _EMPTY_PICTURES]
    else:
        value = _listed(record.get(names[0]), context.texts_only) if names else None
        value = value.strip() if isinstance(value, str) else value
        values = list(value) if isinstance(value, list | tuple) else [] if value in _EMPTY_PICTURES else [value]
    asked = pictures_asked(record, context.columns)
    if values and asked:
        wrong = "there are pictures in the conversation and beside it"
        raise refuse("field_type", wrong, "leave them out of one of the two in")
    values = values or asked
    found = []
    for number, value in enumerate(values):
        try:
            found.append(picture_bytes(value, context.files))
        except PictureError as error:
            raise refuse(error.kind, f"image {number} {error}", error.remedy) from error
    return tuple(found), not found


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
