"""The formats of a table, as records with their places: JSON, CSV, Excel, Parquet, folders of
`save_to_disk`.
"""

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
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from adora_vl.conversion.columns import Columns, class_names, pick_columns, require_columns
from adora_vl.conversion.records import BadRecord
from adora_vl.conversion.webdataset import samples
from adora_vl.data.images import named_content
from adora_vl.utils.cli import GivenTwiceError, each_once, read_json
from adora_vl.utils.errors import UserError, in_one_line

Records = Iterator[tuple[str, dict[str, Any] | BadRecord]]
# its columns, how it is read, what begins to read it
Table = tuple[list[str], str, Callable[[], Records]]
# of a data set that `save_to_disk` wrote
EXCEL = (".xlsx", ".xlsm")
SAVED = "state.json"
TEXT_TABLES = (".csv", ".tsv", *EXCEL)  # a cell is one value, so a list is written as JSON
WEBDATASET = ".tar"
ENDINGS = (".jsonl", ".ndjson", ".json", *TEXT_TABLES, ".parquet", ".arrow", WEBDATASET)
_ARROW = (".parquet", ".arrow", SAVED)
_BATCH_ROWS = 64  # in memory at a time
_FIRST = 100  # JSON records that are looked through for a column
_PIECE = 2**16  # characters of a list that are read at once
_LONGEST_CELL = 2**31 - 1  # of CSV; Python's own limit is less than a picture in Base64
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}
_KEEP_ONE = "keep the right value in"  # of a key that is given twice


def format_of(path: Path) -> str:
    """The ending of a file, or `state.json` for a data set of `save_to_disk`, whose folder has a
    file of that name.
    """
    saved = path.name == SAVED and all(
        file.is_file() for file in (path, path.with_name("dataset_info.json"))
    )
    return SAVED if saved else path.suffix.lower()


def open_table(path: Path, columns: Columns) -> tuple[str, Callable[[], Records]]:
    """What is to be said of how a file is read, and what begins to read its wanted columns.

    Raises `UserError`.
    """
    features: Mapping[str, Any] = {}
    with _readable(path):
        with path.open("rb") as file:
            known = named_content(file.read(512))
        if known and format_of(path) not in EXCEL:
            raise UserError(f"input: {str(path)!r} is {known[1]}")
        if format_of(path) in _ARROW:
            (present, said, begin), features = _arrow(path, columns)
        else:
            readers = {**dict.fromkeys(EXCEL, _workbook), ".csv": _csv, ".tsv": _csv}
            text = {**readers, WEBDATASET: _shard}.get(format_of(path), _json)
            present, said, begin = text(path, columns)
        double = next((name for name in columns.table_names if present.count(name) > 1), None)
        if double is not None:
            raise UserError(
                f"columns: {path.name!r} has {present.count(double)} columns {double!r}; rename "
                "all but one"
            )
        if present:  # else it is empty, which is said when its rows are counted
            require_columns(columns, present, repr(path.name))
        names = class_names(columns, {**_described(path), **features})

    def records() -> Records:
        with _readable(path):
            for place, record in begin():
                yield (
                    place,
                    pick_columns(record, columns, names) if isinstance(record, dict) else record,
                )

    return said, records


@contextmanager
def _readable(path: Path) -> Iterator[None]:
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
    """The features of the data set as its card, or `dataset_infos.json`, beside or above the table
    has them.
    """
    for folder in (path.parent, path.parent.parent):
        with suppress(Exception):  # any README may be there
            card = folder / "README.md"
            if (folder / "dataset_infos.json").is_file() or "class_label" in card.read_text(
                encoding="utf-8"
            ):
                from datasets.info import DatasetInfosDict

                infos = DatasetInfosDict.from_directory(str(folder))
                return next((info.features for info in infos.values() if info.features), {})
    return {}


def row_count(path: Path) -> int:
    with _readable(path):
        return int(pq.read_metadata(path).num_rows)


def _stored(path: Path) -> Any:
    from datasets import Dataset, load_from_disk

    try:
        return (
            load_from_disk(str(path.parent))
            if format_of(path) == SAVED
            else Dataset.from_file(str(path))
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"input: {str(path)!r} cannot be read ({in_one_line(error):.200}); save it again"
        ) from error


def _arrow(path: Path, columns: Columns) -> tuple[Table, Mapping[str, Any]]:
    schema = pq.read_schema(path) if format_of(path) == ".parquet" else _stored(path).data.schema
    features: Mapping[str, Any] = {}
    if b"huggingface" in (schema.metadata or {}):
        from datasets import Features

        features = Features.from_arrow_schema(schema)
    held = columns.to_read(schema.names)

    def batches() -> Iterator[Any]:
        if format_of(path) != ".parquet":
            yield from _stored(path).select_columns(held).with_format("arrow").iter(_BATCH_ROWS)
            return
        with pq.ParquetFile(path, pre_buffer=False) as file:
            yield from file.iter_batches(_BATCH_ROWS, columns=held)

    def records() -> Records:
        return ((f"row {number}", record) for number, record in enumerate(_rows_of(batches()), 1))

    return (schema.names, "", records), features


def _rows_of(batches: Iterable[Any]) -> Iterator[dict[str, Any] | BadRecord]:
    """The rows of a batch; one by one where they cannot be read as a whole."""
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
    """CSV in the encoding and with the sign between cells that the file has, as Excel writes them
    by its language.

    For its encoding a file is read once more than its rows are: its last letter may be the first
    that is not UTF-8.
    """
    encoding = _encoding(path)
    with path.open(encoding=encoding, newline="") as file:
        first = file.readline()
        # of Excel
        marked = (
            first[4:5] if first.lower().startswith("sep=") and first[4:5] in _DELIMITERS else ""
        )
        start = (file.readline() if marked else first) + "".join(islice(file, _FIRST))
    usual = "\t" if path.suffix.lower() == ".tsv" else ","
    headers = {
        sign: _header(start, sign) for sign in ([marked] if marked else [usual, *_DELIMITERS])
    }
    found = {sign: (len(columns.to_read(names)), len(names)) for sign, names in headers.items()}
    delimiter = max(found, key=lambda sign: found[sign])
    other = [f"with {_DELIMITERS[delimiter]} between the cells"] if delimiter != usual else []
    other += [
        {"cp1252": "in the encoding of Windows (cp1252)", "utf-16": "in UTF-16"}.get(encoding, "")
    ]
    said = " ".join(filter(None, other))
    names = headers[delimiter]
    begin = partial(_csv_rows, path, encoding, delimiter, bool(marked), columns)
    return names, said and f"{path.name}, {said}", begin


def _header(start: str, delimiter: str) -> list[str]:
    with suppress(csv.Error):  # a quote that only another sign closes
        return [
            name.strip() for name in next(_reader(io.StringIO(start, newline=""), delimiter), [])
        ]
    return []


def _encoding(path: Path) -> str:
    """The encoding of a text: as its mark says, else UTF-8 where all of it is, else that of
    Windows.
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
    with path.open(encoding=encoding, newline="") as file:
        before = 1 if marked and file.readline() else 0
        rows = _reader(file, delimiter)
        skipped = before
        header = [name.strip() for name in next(rows, [])]
        held = {name: header.index(name) for name in columns.to_read(header)}
        before = rows.line_num + skipped
        for row in rows:
            # a cell in quotes may have several lines
            place = f"line {before + 1}"
            before = rows.line_num + skipped
            if not any(row):
                continue  # an empty line
            if len(row) != len(header):
                wrong = f"the line has {len(row)} cells and the header {len(header)}"
                sign = {",": "comma", ";": "semicolon"}.get(delimiter, "tab")
                remedy = f"quote cells that have a {sign} or a line break in"
                yield (
                    place,
                    BadRecord(
                        kind="not_a_row",
                        wrong=wrong,
                        remedy=remedy,
                        original=delimiter.join(row).encode("utf-8", "replace"),
                    ),
                )
                continue
            yield place, {name: row[at] for name, at in held.items()}


def _reader(file: Any, delimiter: str) -> Any:
    csv.field_size_limit(min(_LONGEST_CELL, sys.maxsize))
    return csv.reader(file, delimiter=delimiter, strict=True)


def _workbook(path: Path, columns: Columns) -> Table:
    """The sheet of an Excel workbook whose first row has the wanted columns."""
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
    except Exception as error:  # zipfile, the XML parser and openpyxl raise their own
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
    sheet, names = max(filled, key=lambda found: len(columns.to_read(found[1])))
    said = f"{path.name}, the sheet {sheet.title!r} of {len(filled)}" if len(filled) > 1 else ""
    return names, said, partial(_sheet_rows, sheet, names)


def _cells(sheet: Any) -> Iterator[tuple[int, list[Any]]]:
    """The rows of a sheet that are not empty, each with its number."""
    sheet.reset_dimensions()  # some programs write wrong ones
    for number, row in enumerate(sheet.iter_rows(), 1):
        values = [_cell(cell) for cell in row]
        while values and values[-1] in (None, ""):
            values.pop()
        if values:
            yield number, values


def _cell(cell: Any) -> Any:
    """The value as Excel shows it: `50%` for 0.5 in per cent, and 15 digits of a number."""
    value = cell.value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value.strip() if isinstance(value, str) else value
    if "%" in (cell.number_format or ""):
        return f"{value * 100:.15g}%"
    return float(f"{value:.15g}") if isinstance(value, float) else value


def _sheet_rows(sheet: Any, names: list[str]) -> Records:
    rows = _cells(sheet)
    next(rows)
    for number, values in rows:
        yield (
            f"row {number}",
            dict(zip(names, [*values, *[None] * (len(names) - len(values))], strict=False)),
        )


def _shard(path: Path, columns: Columns) -> Table:
    """A tar of webdataset, whose columns are those of its first rows."""
    begin = partial(samples, path)
    names: dict[str, None] = {}
    for _, record in islice(begin(), _FIRST):
        names |= dict.fromkeys(record if isinstance(record, dict) else ())
    return list(names), "", begin


def _json(path: Path, columns: Columns) -> Table:
    """One object per line, or one text that holds all rows, whatever the file is called."""
    begin = partial(_lines, path)
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # as PowerShell writes it
            raise UserError(f"input: {str(path)!r} is JSON in UTF-16; save it as UTF-8")
        if path.suffix.lower() == ".json" and start[:1] == b"[":
            begin = partial(_items, path)
        elif path.suffix.lower() == ".json" and start[:1] == b"{" and not _has_lines(file):
            begin = partial(_in_object, path, columns)
    found = [record for _, record in islice(begin(), _FIRST) if isinstance(record, dict)]
    return list(dict.fromkeys(name for record in found for name in record)), "", begin


def _lines(path: Path) -> Records:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not line.strip():
                continue
            remedy = "write one object a line in"
            try:
                found = _record(read_json(line.decode("utf-8")), remedy)
            except GivenTwiceError as error:
                found = BadRecord("given_twice", str(error), _KEEP_ONE)
            except (ValueError, RecursionError) as error:
                found = BadRecord("not_json", f"it is not JSON ({in_one_line(error):.200})", remedy)
            yield (
                f"line {number}",
                replace(found, original=line) if isinstance(found, BadRecord) else found,
            )


def _has_lines(file: Any) -> bool:
    """Whether a text that begins with an object has one on each line: the first is whole, and
    another follows.
    """
    file.seek(0)
    lines = (line for line in file if line.strip())
    first, second = next(lines, b""), next(lines, b"")
    with suppress(ValueError, RecursionError):
        json.loads(first.decode("utf-8-sig"))
        return bool(second)
    return False


def _items(path: Path) -> Records:
    """The objects of a list, of which one at a time is in memory."""
    decoder = json.JSONDecoder(object_pairs_hook=_once)
    number = 1
    wanted = _PIECE
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
                sign = (rest := text[at:].lstrip())[:1]
                if (sign or end) and sign not in (",", "]"):
                    raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
            except (ValueError, RecursionError) as error:
                if end or isinstance(error, RecursionError):
                    what = f"item {number}: {getattr(error, 'msg', error)}"
                    raise UserError(
                        f"input: {str(path)!r} is not JSON ({what:.200}); mend it"
                    ) from error
                sign = ""
            if sign:
                yield f"item {number}", _record(item, "make it an object in")
                number = number + 1
                wanted = _PIECE
                closed = sign == "]"
                text = rest[1:].lstrip()
            else:  # the item may go on behind the text
                more = file.read(wanted)
                wanted = 2 * wanted
                text = (text + more).lstrip()
                end = not more
        if (text + file.read()).strip():
            raise UserError(
                f"input: {str(path)!r} is not JSON (more stands behind its list); mend it"
            )


def _record(item: Any, remedy: str) -> dict[str, Any] | BadRecord:
    return (
        item
        if isinstance(item, dict | BadRecord)
        else BadRecord("not_json", f"it is {item!r:.60}", remedy)
    )


def _in_object(path: Path, columns: Columns) -> Records:
    """The rows of the list in an object, of an object that has them by key, or that is one itself."""
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
    for place, item in items:
        yield f"item {place}{under}", _record(item, "make it an object in")


def _holds_rows(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict | BadRecord) for item in value)
    )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any] | BadRecord:
    """An object of a list, or what is wrong with it or with an object in it."""
    try:
        found = each_once(pairs)
    except GivenTwiceError as error:
        return BadRecord("given_twice", str(error), _KEEP_ONE)
    inside = (
        one for value in found.values() for one in (value if isinstance(value, list) else [value])
    )
    return next((one for one in inside if isinstance(one, BadRecord)), found)
