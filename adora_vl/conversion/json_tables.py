"""Opens tables of JSON: an object a line, a list of objects, or one object that holds the rows."""

import codecs
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from adora_vl.conversion.columns import Columns
from adora_vl.conversion.problem import ROW_LOCATION
from adora_vl.conversion.records import HEAD_RECORDS, BadRecord, PositionedRecords, Table
from adora_vl.utils.cli import DuplicateKeyError, read_json, refuse_repeated_keys
from adora_vl.utils.errors import UserError, describe_error

_PIECE_CHARACTERS = 2**16  # of a list, read at once
# What to do where an object has a key twice.
_REPEATED_KEY_REMEDY = f"keep the right value in {ROW_LOCATION}"


def open_json(path: Path, columns: Columns) -> Table:
    """Open a table of JSON, and learn its columns from its first records.

    The suffix of its name and its first character say how the file is read:

        .jsonl, .json with any other character      one object a line
        .json that begins with `[`                  one list of objects
        .json that begins with `{`                  one object that holds the rows, unless the first
                                                    line is an object and another line follows

    Raises `UserError` for a file in UTF-16.
    """
    read_records: Callable[[], PositionedRecords] = partial(_records_by_line, path)
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # as PowerShell writes it
            raise UserError(f"input: {str(path)!r} is JSON in UTF-16; save it as UTF-8")
        may_be_one_text = path.suffix.lower() == ".json"  # `.jsonl` is one object a line
        if may_be_one_text and start[:1] == b"[":
            read_records = partial(_records_of_list, path)
        elif may_be_one_text and start[:1] == b"{" and not _has_object_per_line(file):
            read_records = partial(_records_in_object, path, columns)
    # A key is a column where one of the first records has it; the dict keeps their order.
    column_names: dict[str, None] = {}
    for _, record in islice(read_records(), HEAD_RECORDS):
        if isinstance(record, dict):
            column_names |= dict.fromkeys(record)
    return Table(list(column_names), format_guess="", read_records=read_records)


def _records_by_line(path: Path) -> PositionedRecords:
    """Yield the records of a file that has an object on each line, and a bad one for other lines.

    Each comes with its position, such as `line 14`.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not line.strip():
                continue
            remedy = f"write one object a line in {ROW_LOCATION}"
            try:
                record = _object_or_fault(read_json(line.decode("utf-8")), remedy)
            except DuplicateKeyError as error:
                record = BadRecord(
                    reason="given_twice", wrong=str(error), remedy=_REPEATED_KEY_REMEDY
                )
            except (ValueError, RecursionError) as error:
                wrong = f"it is not JSON ({describe_error(error):.200})"
                record = BadRecord(reason="not_json", wrong=wrong, remedy=remedy)
            if isinstance(record, BadRecord):
                record = replace(record, original=line)
            yield f"line {number}", record


def _has_object_per_line(file: BinaryIO) -> bool:
    """Return whether a file that begins with an object seems to have an object on each line.

    It does where the first line is a complete object and another line follows.
    """
    file.seek(0)
    lines = (line for line in file if line.strip())
    first_line = next(lines, b"")
    second_line = next(lines, b"")
    with suppress(ValueError, RecursionError):
        json.loads(first_line.decode("utf-8-sig"))
        return bool(second_line)
    return False


def _records_of_list(path: Path) -> PositionedRecords:
    """Yield the objects of a file with one JSON list, without the whole list in memory.

    Each comes with its position, such as `item 14`. The file is read piece by piece. An item that
    is not complete in the text so far is decoded again from its beginning once more text is there.
    Each time the next piece is twice as long, so that a long item is decoded only a few times.

    Raises `UserError` where the file is not one list.
    """
    decoder = json.JSONDecoder(object_pairs_hook=_object_with_unique_keys)
    number = 1  # of the next item
    piece_size = _PIECE_CHARACTERS
    with path.open(encoding="utf-8-sig") as file:
        # The text from the next item on, without the bracket that opens the list.
        text = file.read(_PIECE_CHARACTERS).lstrip()[1:].lstrip()
        is_end_of_file = False
        is_list_closed = False
        while not is_list_closed:
            if number == 1 and text.startswith("]"):  # an empty list
                text = text[1:]
                break
            try:
                item = _first_item(text, decoder, is_end_of_file=is_end_of_file)
            except (ValueError, RecursionError) as error:
                reason = f"item {number}: {getattr(error, 'msg', error)}"
                raise UserError(
                    f"input: {str(path)!r} is not JSON ({reason:.200}); mend it"
                ) from error
            if item is None:  # it may go on behind the text that was read so far
                piece = file.read(piece_size)
                piece_size *= 2
                text = (text + piece).lstrip()
                is_end_of_file = not piece
                continue
            yield (
                f"item {number}",
                _object_or_fault(item.value, f"make it an object in {ROW_LOCATION}"),
            )
            number += 1
            piece_size = _PIECE_CHARACTERS
            is_list_closed = item.is_last
            text = item.text_behind
        if (text + file.read()).strip():
            raise UserError(
                f"input: {str(path)!r} is not JSON (more stands behind its list); mend it"
            )


class _ListItem(NamedTuple):
    """An item of a JSON list, and what follows it."""

    value: Any
    is_last: bool  # a `]` follows it, and not a comma
    text_behind: str  # without that `]` or comma


def _first_item(text: str, decoder: json.JSONDecoder, *, is_end_of_file: bool) -> _ListItem | None:
    """Return the item of a JSON list that a text begins with.

    Returns None where it may not be complete yet, unless the text goes to the end of the file.

    Raises `ValueError` at the end of the file for an item that is not JSON.
    """
    try:
        value, item_end = decoder.raw_decode(text)
        text_behind = text[item_end:].lstrip()
        mark = text_behind[:1]
        # An item counts only once the `,` or `]` behind it is read: a number at the end of a piece
        # may go on in the next piece.
        if mark not in (",", "]"):
            raise json.JSONDecodeError("Expecting ',' delimiter", text, item_end)
    except ValueError:
        if is_end_of_file:
            raise
        return None
    return _ListItem(value, is_last=mark == "]", text_behind=text_behind[1:].lstrip())


def _object_or_fault(item: object, remedy: str) -> dict[str, Any] | BadRecord:
    """Return an object of JSON as it is, and a bad record with this remedy for anything else."""
    if isinstance(item, dict | BadRecord):
        return item
    return BadRecord(reason="not_json", wrong=f"it is {item!r:.60}", remedy=remedy)


def _records_in_object(path: Path, columns: Columns) -> PositionedRecords:
    """Yield the rows of a file that is one JSON object.

    The first of these that fits is read, here for the columns `problem` and `answer`:

        {"problem": ..., "answer": ...}         one row, since it has one of the wanted `columns`
        {"version": 1, "data": [{...}, {...}]}  the rows of its only list of objects
        {"17": {...}, "18": {...}}              a row under each key

    Raises `UserError` where none fits, or where the file is no JSON.
    """
    try:
        content = json.loads(path.read_bytes(), object_pairs_hook=_object_with_unique_keys)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"input: {str(path)!r} is not JSON ({describe_error(error):.200}); mend it"
        ) from error
    # Pairs of a row's number or key, which messages name, and the row.
    items: Iterable[tuple[object, Any]] = [(1, content)]
    list_name = ""
    if isinstance(content, dict) and not columns.needed_from(content):
        keys_of_lists = [name for name, value in content.items() if _is_list_of_objects(value)]
        if len(keys_of_lists) == 1:
            items = enumerate(content[keys_of_lists[0]], 1)
            list_name = f" under {keys_of_lists[0]!r}"
        elif content and _is_list_of_objects(list(content.values())):
            items = [(repr(name), value) for name, value in content.items()]
        else:
            names = ", ".join(f"{name:.40}" for name in islice(content, 5))
            raise UserError(
                f"input: {str(path)!r} is one object of {names or 'nothing'} and not a list of "
                "rows; write its rows as a list, [{...}, {...}], or one object a line"
            )
    for position, item in items:
        yield (
            f"item {position}{list_name}",
            _object_or_fault(item, f"make it an object in {ROW_LOCATION}"),
        )


def _is_list_of_objects(value: object) -> bool:
    """Return whether a value is a list of objects alone, and not empty."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict | BadRecord) for item in value)
    )


def _object_with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any] | BadRecord:
    """Return the object of JSON with these pairs of key and value, as `object_pairs_hook`.

    Returns a bad record where the object, or one inside it, has a key twice.
    """
    try:
        record = refuse_repeated_keys(pairs)
    except DuplicateKeyError as error:
        return BadRecord(reason="given_twice", wrong=str(error), remedy=_REPEATED_KEY_REMEDY)
    for value in record.values():
        items = value if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, BadRecord):
                return item
    return record
