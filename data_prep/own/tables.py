"""Records of JSONL, JSON, CSV and Parquet files, one after the other; a line that is no record does not end the file.

Values are read as they are written. Libraries that guess the types of a CSV file make NaN of the answer `NA` and 7 of
`007`, and those that read JSONL as one table refuse all of it for one line.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa  # pyarrow ships no types
import pyarrow.parquet as pq  # pyarrow ships no types

from adora_vl.errors import UserError, in_one_line
from data_prep.own.columns import Columns, require_columns
from data_prep.own.records import Broken

Records = Iterator[dict[str, Any] | Broken]
TEXT_TABLES = (".csv", ".tsv")
ENDINGS = (".jsonl", ".ndjson", ".json", *TEXT_TABLES, ".parquet")
_BATCH_ROWS = 64  # in memory at a time
_FIRST = 100  # records in which a column has to be, where they differ from row to row
_LONGEST_CELL = 2**31 - 1  # of CSV; Python's own limit is less than a picture in Base64


def records(path: Path, columns: Columns) -> Records:
    """The records of a file with the wanted columns alone. Raises `UserError` for a file that cannot be read at all."""
    ending = path.suffix.lower()
    with _readable(path):
        if ending == ".parquet":
            yield from _parquet(path, columns)
        elif ending in TEXT_TABLES:
            yield from _csv(path, columns)
        else:
            wanted = columns.wanted
            for record in _json(path):
                whole = isinstance(record, dict)
                yield {name: record[name] for name in wanted if name in record} if whole else record  # type: ignore


def check_columns(path: Path, columns: Columns) -> None:
    """Raise `UserError` where the file lacks a column, before anything is read from it."""
    where, ending = repr(path.name), path.suffix.lower()
    with _readable(path):
        if ending == ".parquet":
            present: Sequence[str] = pq.read_schema(path).names
        elif ending in TEXT_TABLES:
            with path.open(encoding="utf-8-sig", newline="") as file:
                present = next(_reader(file, path), [])
            if not present:
                return  # an empty file, which is said when its rows are counted
            double = next((name for name in columns.wanted if present.count(name) > 1), None)
            if double is not None:
                raise UserError(f"columns: {where} has {present.count(double)} columns {double!r}; rename all but one")
        else:
            found = [record for record in islice(_json(path), _FIRST) if isinstance(record, dict)]
            if not found:
                return
            present = list(dict.fromkeys(name for record in found for name in record))
        require_columns(columns, present, where)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError, csv.Error, pa.ArrowException) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else in_one_line(error)
        raise UserError(f"input: {str(path)!r} cannot be read ({reason:.200}); mend it, or save it again") from error


def _parquet(path: Path, columns: Columns) -> Records:
    with pq.ParquetFile(path, pre_buffer=False) as file:
        present = set(file.schema_arrow.names)
        for batch in file.iter_batches(_BATCH_ROWS, columns=[name for name in columns.wanted if name in present]):
            try:
                yield from batch.to_pylist()
            except (UnicodeDecodeError, pa.ArrowException, ValueError, OverflowError):
                yield from _one_by_one(batch)


def _one_by_one(batch: Any) -> Records:
    """The rows of a batch that cannot be read as a whole."""
    for index in range(batch.num_rows):
        try:
            (record,) = batch.slice(index, 1).to_pylist()
            yield record
        except (UnicodeDecodeError, pa.ArrowException, ValueError, OverflowError) as error:
            yield Broken("field_type", f"a value cannot be read ({in_one_line(error):.200})", "write it anew in")


def _csv(path: Path, columns: Columns) -> Records:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = _reader(file, path)
        header: list[str] = next(rows, [])
        wanted = {name: header.index(name) for name in columns.wanted if name in header}
        for row in rows:
            if not row:
                continue  # an empty line
            if len(row) != len(header):
                wrong = f"the line has {len(row)} cells and the header {len(header)}"
                yield Broken("not_a_row", wrong, "quote cells that have a comma or a line break in", _line(row))
                continue
            yield {name: row[at] for name, at in wanted.items()}


def _reader(file: Any, path: Path) -> Any:
    csv.field_size_limit(min(_LONGEST_CELL, sys.maxsize))
    return csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)


def _line(cells: Sequence[str]) -> bytes:
    return ",".join(cells).encode("utf-8", errors="replace")


def _json(path: Path) -> Records:
    """A list of objects, or one object per line, whatever the file is called."""
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if start == b"[" and path.suffix.lower() == ".json":
        yield from _json_list(path)
        return
    with path.open("rb") as file:
        for number, line in enumerate(file):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
            if line.strip():
                yield _object(line, number)


def _json_list(path: Path) -> Records:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"input: {str(path)!r} is not JSON ({in_one_line(error):.200}); mend it") from error
    for item in content:
        yield item if isinstance(item, dict) else Broken("not_json", f"it is {item!r:.60}", "make it an object in")


def _object(line: bytes, number: int) -> dict[str, Any] | Broken:
    try:
        found = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        wrong = f"line {number + 1} is not JSON ({in_one_line(error):.200})"
        return Broken("not_json", wrong, "write one object a line in", line)
    if not isinstance(found, dict):
        return Broken("not_json", f"line {number + 1} is {found!r:.60}, no object", "write one object a line in", line)
    return found
