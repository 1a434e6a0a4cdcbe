"""The formats of a table, each read as records with their positions in the file.

The formats are JSON, CSV, Excel, Parquet, Arrow, shards of webdataset, and the folders that
`save_to_disk` of `datasets` writes. Rows are read one at a time or in small batches, so that a table
may be larger than the memory.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from adora_vl.conversion.columns import Columns, class_names, pick_columns, require_columns
from adora_vl.conversion.records import BadRecord
from adora_vl.conversion.webdataset import samples
from adora_vl.data.images import describe_non_picture
from adora_vl.utils.cli import GivenTwiceError, each_once, read_json
from adora_vl.utils.errors import UserError, in_one_line

if TYPE_CHECKING:
    from openpyxl.cell.read_only import ReadOnlyCell
    from openpyxl.worksheet._read_only import ReadOnlyWorksheet

Records = Iterator[tuple[str, dict[str, Any] | BadRecord]]
# The names of a table's columns, a note on how it is read, and what begins to read its records.
Table = tuple[list[str], str, Callable[[], Records]]
EXCEL = (".xlsx", ".xlsm")
SAVED = "state.json"  # stands in each folder that `save_to_disk` wrote
TEXT_TABLES = (".csv", ".tsv", *EXCEL)  # a cell is one value, so that a list is written as JSON
WEBDATASET = ".tar"
ENDINGS = (".jsonl", ".ndjson", ".json", *TEXT_TABLES, ".parquet", ".arrow", WEBDATASET)
_ARROW = (".parquet", ".arrow", SAVED)
_BATCH_ROWS = 64  # in memory at a time
_FIRST = 100  # JSON records that are looked through for a column
_PIECE = 2**16  # characters of a list that are read at once
_LONGEST_CELL = 2**31 - 1  # Python's limit for a cell of CSV is less than a picture in Base64
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}
_KEEP_ONE = "keep the right value in"  # the remedy for a key that an object has twice


def format_of(path: Path) -> str:
    """Return the ending of a file in small letters, such as `.csv`.

    It is `state.json` for the file of that name in a folder that `save_to_disk` wrote.
    """
    saved = path.name == SAVED and all(
        file.is_file() for file in (path, path.with_name("dataset_info.json"))
    )
    return SAVED if saved else path.suffix.lower()


def open_table(path: Path, columns: Columns) -> tuple[str, Callable[[], Records]]:
    """Return a note on how a file is read, and what begins to read the records of its columns.

    The note is empty where nothing had to be guessed.

    Raises `UserError` for a file that cannot be read, for one that is something else than its name
    says, and for a column that it lacks or has twice.
    """
    features: Mapping[str, Any] = {}
    with _readable(path):
        with path.open("rb") as file:
            content = describe_non_picture(file.read(512))
        if content and format_of(path) not in EXCEL:
            raise UserError(f"input: {str(path)!r} is {content[1]}")
        if format_of(path) in _ARROW:
            (present, format_note, begin), features = _arrow(path, columns)
        else:
            readers = {**dict.fromkeys(EXCEL, _workbook), ".csv": _csv, ".tsv": _csv}
            open_format = {**readers, WEBDATASET: _shard}.get(format_of(path), _json)
            present, format_note, begin = open_format(path, columns)
        double = next((name for name in columns.table_names if present.count(name) > 1), None)
        if double is not None:
            raise UserError(
                f"columns: {path.name!r} has {present.count(double)} columns {double!r}; rename "
                "all but one"
            )
        if present:  # else the table is empty, which is reported when its rows are counted
            require_columns(columns, present, repr(path.name))
        names = class_names(columns, {**_described(path), **features})

    def records() -> Records:
        """Yield the place of each row with its wanted columns, or with what is broken in it."""
        with _readable(path):
            for position, record in begin():
                if isinstance(record, dict):
                    record = pick_columns(record, columns, names)
                yield position, record

    return format_note, records


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn the errors of reading a file into a `UserError` that names the file."""
    try:
        yield
    except (OSError, UnicodeError, csv.Error, pa.ArrowException, tarfile.TarError) as error:
        reason = (
            error.strerror if isinstance(error, OSError) and error.strerror else in_one_line(error)
        )
        raise UserError(
            f"input: {str(path)!r} cannot be read ({reason:.200}); mend it, or save it again"
        ) from error


def _described(path: Path) -> Mapping[str, Any]:
    """Return the features of a data set out of its card or its `dataset_infos.json`.

    These stand beside the table, or in the folder above; {} is returned where there are none.
    """
    for folder in (path.parent, path.parent.parent):
        with suppress(Exception):  # the folder may have a README of any kind
            card = folder / "README.md"
            if (folder / "dataset_infos.json").is_file() or "class_label" in card.read_text(
                encoding="utf-8"
            ):
                from datasets.info import DatasetInfosDict

                infos = DatasetInfosDict.from_directory(str(folder))
                return next((info.features for info in infos.values() if info.features), {})
    return {}


def row_count(path: Path) -> int:
    """Return how many rows a Parquet file has, by its metadata."""
    with _readable(path):
        return int(pq.read_metadata(path).num_rows)


def _stored(path: Path) -> Any:
    """Open an Arrow file, or the folder of `save_to_disk` that `path` stands in, as a `Dataset`."""
    from datasets import Dataset, load_from_disk

    try:
        if format_of(path) == SAVED:
            return load_from_disk(str(path.parent))
        return Dataset.from_file(str(path))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"input: {str(path)!r} cannot be read ({in_one_line(error):.200}); save it again"
        ) from error


def _arrow(path: Path, columns: Columns) -> tuple[Table, Mapping[str, Any]]:
    """Open a table of Parquet or Arrow, and return its features beside it."""
    schema = pq.read_schema(path) if format_of(path) == ".parquet" else _stored(path).data.schema
    features: Mapping[str, Any] = {}
    if b"huggingface" in (schema.metadata or {}):
        from datasets import Features

        features = Features.from_arrow_schema(schema)
    names = columns.to_read(schema.names)

    def batches() -> Iterator[Any]:
        """Yield the needed columns a batch of rows at a time, so that a large table fits."""
        if format_of(path) != ".parquet":
            yield from _stored(path).select_columns(names).with_format("arrow").iter(_BATCH_ROWS)
            return
        with pq.ParquetFile(path, pre_buffer=False) as file:
            yield from file.iter_batches(_BATCH_ROWS, columns=names)

    def records() -> Records:
        """Begin to read the rows, numbered from 1."""
        return ((f"row {number}", record) for number, record in enumerate(_rows_of(batches()), 1))

    return (schema.names, "", records), features


def _rows_of(batches: Iterable[Any]) -> Iterator[dict[str, Any] | BadRecord]:
    """Yield the rows of batches, one by one where a batch cannot be converted as a whole."""
    for batch in batches:
        try:
            rows: Iterable[dict[str, Any] | BadRecord] = batch.to_pylist()
        except (UnicodeDecodeError, pa.ArrowException, ValueError, OverflowError) as error:
            wrong = f"a value cannot be read ({in_one_line(error):.200})"
            rows = [BadRecord("field_type", wrong, "write it anew in")]
            if batch.num_rows > 1:
                rows = _rows_of(batch.slice(index, 1) for index in range(batch.num_rows))
        yield from rows


def _csv(path: Path, columns: Columns) -> Table:
    """Open a table of CSV, whose encoding and delimiter are guessed.

    Excel writes both by the language it runs in. The encoding costs another reading of the file,
    since its last letter may be the first that is not UTF-8. The delimiter is the one with which
    the header has the most of the columns that are to be read.
    """
    encoding = _encoding(path)
    stated_delimiter = ""
    with path.open(encoding=encoding, newline="") as file:
        header_line = file.readline()
        # Excel may name the delimiter in a line of its own, `sep=;`, before the header.
        if header_line.lower().startswith("sep=") and header_line[4:5] in _DELIMITERS:
            stated_delimiter = header_line[4:5]
            header_line = file.readline()
        start = header_line + "".join(islice(file, _FIRST))
    usual = "\t" if path.suffix.lower() == ".tsv" else ","
    delimiters = [stated_delimiter] if stated_delimiter else [usual, *_DELIMITERS]
    headers = {sign: _header(start, sign) for sign in delimiters}
    # The most columns that are wanted, then the most columns at all; of equals the first.
    delimiter = max(
        headers, key=lambda sign: (len(columns.to_read(headers[sign])), len(headers[sign]))
    )
    guesses = []
    if delimiter != usual:
        guesses.append(f"with {_DELIMITERS[delimiter]} between the cells")
    if encoding == "cp1252":
        guesses.append("in the encoding of Windows (cp1252)")
    elif encoding == "utf-16":
        guesses.append("in UTF-16")
    format_note = f"{path.name}, {' '.join(guesses)}" if guesses else ""
    read_rows = partial(_csv_rows, path, encoding, delimiter, bool(stated_delimiter), columns)
    return headers[delimiter], format_note, read_rows


def _header(start: str, delimiter: str) -> list[str]:
    """Return the names of the columns at the start of a CSV file, as this delimiter cuts them."""
    with suppress(csv.Error):  # a quote that only another sign closes
        return [
            name.strip() for name in next(_reader(io.StringIO(start, newline=""), delimiter), [])
        ]
    return []


def _encoding(path: Path) -> str:
    """Return the encoding of a text file.

    It is UTF-16 where a byte order mark says so, UTF-8 where the whole file is, else that of Windows.

    Raises `UserError` for a file that is none of them.
    """
    with path.open("rb") as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            return "utf-16"
        for encoding in ("utf-8-sig", "cp1252"):
            file.seek(0)
            decoder = codecs.getincrementaldecoder(encoding)()
            with suppress(UnicodeDecodeError):
                for piece in iter(partial(file.read, 2**20), b""):
                    decoder.decode(piece)
                decoder.decode(b"", final=True)
                return encoding
    raise UserError(
        f"input: {str(path)!r} is not UTF-8 text; save it as UTF-8 (in Excel: as CSV UTF-8)"
    )


def _csv_rows(path: Path, encoding: str, delimiter: str, marked: bool, columns: Columns) -> Records:
    """Yield the rows of a CSV file; `marked`: a line before the header names the delimiter."""
    with path.open(encoding=encoding, newline="") as file:
        skipped = 1 if marked and file.readline() else 0
        rows = _reader(file, delimiter)
        header = [name.strip() for name in next(rows, [])]
        indices = {name: header.index(name) for name in columns.to_read(header)}
        lines_read = rows.line_num + skipped
        for row in rows:
            # A row begins behind the last line that was read; a cell in quotes may have several.
            position = f"line {lines_read + 1}"
            lines_read = rows.line_num + skipped
            if not any(row):
                continue  # an empty line
            if len(row) != len(header):
                wrong = f"the line has {len(row)} cells and the header {len(header)}"
                sign = {",": "comma", ";": "semicolon"}.get(delimiter, "tab")
                remedy = f"quote cells that have a {sign} or a line break in"
                bad_row = BadRecord(
                    kind="not_a_row",
                    wrong=wrong,
                    remedy=remedy,
                    original=delimiter.join(row).encode("utf-8", "replace"),
                )
                yield position, bad_row
                continue
            yield position, {name: row[index] for name, index in indices.items()}


def _reader(file: TextIO, delimiter: str) -> Any:
    """Return the reader of `csv` for a file, with room for a picture in a cell."""
    csv.field_size_limit(min(_LONGEST_CELL, sys.maxsize))
    return csv.reader(file, delimiter=delimiter, strict=True)


def _workbook(path: Path, columns: Columns) -> Table:
    """Open the sheet of an Excel workbook whose first row has the most of the columns.

    Raises `UserError` for a workbook that cannot be read, or where openpyxl is missing.
    """
    try:
        import openpyxl
    except ImportError as error:
        raise UserError(
            f"input: {str(path)!r} is an Excel workbook, for which openpyxl is missing; pip "
            "install openpyxl (the extra 'excel'), or save it in Excel as CSV UTF-8"
        ) from error
    try:
        sheets = openpyxl.load_workbook(path, read_only=True, data_only=True).worksheets
        headers = [next(_cells(sheet), (0, []))[1] for sheet in sheets]
    except Exception as error:  # zipfile, the XML parser and openpyxl raise errors of their own
        raise UserError(
            f"input: {str(path)!r} is no workbook that can be read ({in_one_line(error):.200})"
        ) from error
    filled = [
        (sheet, [str(name).strip() for name in names])
        for sheet, names in zip(sheets, headers, strict=True)
        if names
    ]
    if not filled:
        return [], "", lambda: iter(())
    sheet, names = max(filled, key=lambda entry: len(columns.to_read(entry[1])))
    format_note = ""
    if len(filled) > 1:
        format_note = f"{path.name}, the sheet {sheet.title!r} of {len(filled)}"
    return names, format_note, partial(_sheet_rows, sheet, names)


def _cells(sheet: ReadOnlyWorksheet) -> Iterator[tuple[int, list[Any]]]:
    """Yield the rows of a sheet that are not empty, each with its number, from 1."""
    sheet.reset_dimensions()  # some programs write wrong ones
    for number, row in enumerate(sheet.iter_rows(), 1):
        values = [_cell(cell) for cell in row]
        while values and values[-1] in (None, ""):
            values.pop()
        if values:
            yield number, values


def _cell(cell: ReadOnlyCell) -> Any:
    """Return the value as Excel shows it: `50%` for 0.5 in per cent, 15 digits of a number."""
    value = cell.value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value.strip() if isinstance(value, str) else value
    if "%" in (cell.number_format or ""):
        return f"{value * 100:.15g}%"
    return float(f"{value:.15g}") if isinstance(value, float) else value


def _sheet_rows(sheet: ReadOnlyWorksheet, names: list[str]) -> Records:
    """Yield the rows of a sheet below its header; cells that a row lacks are None."""
    rows = _cells(sheet)
    next(rows)
    for number, values in rows:
        absent = [None] * (len(names) - len(values))
        yield f"row {number}", dict(zip(names, [*values, *absent], strict=False))


def _shard(path: Path, columns: Columns) -> Table:
    """Open a tar of webdataset, whose columns are those of its first rows."""
    begin = partial(samples, path)
    names: dict[str, None] = {}
    for _, record in islice(begin(), _FIRST):
        names |= dict.fromkeys(record if isinstance(record, dict) else ())
    return list(names), "", begin


def _json(path: Path, columns: Columns) -> Table:
    """Open a table of JSON: one object a line, or one text that holds all rows.

    The ending of the file's name does not decide which of the two it is.

    Raises `UserError` for a file in UTF-16.
    """
    begin = partial(_lines, path)
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # as PowerShell writes it
            raise UserError(f"input: {str(path)!r} is JSON in UTF-16; save it as UTF-8")
        if path.suffix.lower() == ".json" and start[:1] == b"[":
            begin = partial(_items, path)
        elif path.suffix.lower() == ".json" and start[:1] == b"{" and not _has_lines(file):
            begin = partial(_in_object, path, columns)
    records = [record for _, record in islice(begin(), _FIRST) if isinstance(record, dict)]
    return list(dict.fromkeys(name for record in records for name in record)), "", begin


def _lines(path: Path) -> Records:
    """Yield the objects of a file that has one on each line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not line.strip():
                continue
            remedy = "write one object a line in"
            try:
                record = _record(read_json(line.decode("utf-8")), remedy)
            except GivenTwiceError as error:
                record = BadRecord("given_twice", str(error), _KEEP_ONE)
            except (ValueError, RecursionError) as error:
                wrong = f"it is not JSON ({in_one_line(error):.200})"
                record = BadRecord("not_json", wrong, remedy)
            if isinstance(record, BadRecord):
                record = replace(record, original=line)
            yield f"line {number}", record


def _has_lines(file: BinaryIO) -> bool:
    """Return whether a file that begins with an object has an object on each line.

    It does where the first line is a whole object and another line follows.
    """
    file.seek(0)
    lines = (line for line in file if line.strip())
    first = next(lines, b"")
    second = next(lines, b"")
    with suppress(ValueError, RecursionError):
        json.loads(first.decode("utf-8-sig"))
        return bool(second)
    return False


def _items(path: Path) -> Records:
    """Yield the objects of a JSON list, of which one at a time is in memory.

    The file is read piece by piece. Where an item is not whole yet, the next piece is twice as
    long, so that a long item is not decoded from its beginning once for every piece.

    Raises `UserError` where the file is not one list.
    """
    decoder = json.JSONDecoder(object_pairs_hook=_once)
    number = 1
    piece_size = _PIECE
    with path.open(encoding="utf-8-sig") as file:
        text = file.read(_PIECE).lstrip()[1:].lstrip()
        end = False
        closed = False
        while not closed:
            if number == 1 and text.startswith("]"):  # an empty list
                text = text[1:]
                break
            try:
                item, at = decoder.raw_decode(text)
                rest = text[at:].lstrip()
                sign = rest[:1]
                if (sign or end) and sign not in (",", "]"):
                    raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
            except (ValueError, RecursionError) as error:
                if end or isinstance(error, RecursionError):
                    reason = f"item {number}: {getattr(error, 'msg', error)}"
                    raise UserError(
                        f"input: {str(path)!r} is not JSON ({reason:.200}); mend it"
                    ) from error
                sign = ""
            if sign:
                yield f"item {number}", _record(item, "make it an object in")
                number += 1
                piece_size = _PIECE
                closed = sign == "]"
                text = rest[1:].lstrip()
            else:  # the item may go on behind the text that was read so far
                piece = file.read(piece_size)
                piece_size *= 2
                text = (text + piece).lstrip()
                end = not piece
        if (text + file.read()).strip():
            raise UserError(
                f"input: {str(path)!r} is not JSON (more stands behind its list); mend it"
            )


def _record(item: object, remedy: str) -> dict[str, Any] | BadRecord:
    """Return an object of JSON as it is, and a bad record for anything else."""
    if isinstance(item, dict | BadRecord):
        return item
    return BadRecord("not_json", f"it is {item!r:.60}", remedy)


def _in_object(path: Path, columns: Columns) -> Records:
    """Yield the rows of a file that is one object.

    The object is a row itself, has one list of rows, or has the rows by key.

    Raises `UserError` where it is none of them, or no JSON.
    """
    try:
        content = json.loads(path.read_bytes(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"input: {str(path)!r} is not JSON ({in_one_line(error):.200}); mend it"
        ) from error
    items: Iterable[tuple[object, Any]] = [(1, content)]
    under = ""
    if isinstance(content, dict) and not columns.to_read(content):
        lists = [name for name, value in content.items() if _holds_rows(value)]
        if len(lists) == 1:
            items = enumerate(content[lists[0]], 1)
            under = f" under {lists[0]!r}"
        elif content and _holds_rows(list(content.values())):
            items = [(repr(name), value) for name, value in content.items()]
        else:
            names = ", ".join(f"{name:.40}" for name in islice(content, 5))
            raise UserError(
                f"input: {str(path)!r} is one object of {names or 'nothing'} and not a list of "
                "rows; write its rows as a list, [{...}, {...}], or one object a line"
            )
    for position, item in items:
        yield f"item {position}{under}", _record(item, "make it an object in")


def _holds_rows(value: object) -> bool:
    """Return whether a value is a list of objects alone, and not empty."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict | BadRecord) for item in value)
    )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any] | BadRecord:
    """Build an object from its pairs; a bad record where it, or an object in it, has a key twice."""
    try:
        record = each_once(pairs)
    except GivenTwiceError as error:
        return BadRecord("given_twice", str(error), _KEEP_ONE)
    for value in record.values():
        items = value if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, BadRecord):
                return item
    return record
