"""Files, splits and records of somebody's data: JSONL, JSON, CSV and Parquet, alone, in folders or in archives."""

from __future__ import annotations

import csv
import hashlib
import json
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from math import ceil, floor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from adora_vl.data.dataset import SPLITS
from adora_vl.utils.cli import GivenTwiceError, each_once, read_json
from adora_vl.utils.errors import UserError, in_one_line
from data_prep.columns import Columns, picked, require_columns
from data_prep.leakage import question_key
from data_prep.problem import Reads
from data_prep.records import (
    BadRecord,
    Context,
    FileRoot,
    PictureError,
    Record,
    picture_bytes,
    pictures_asked,
    read_record,
)

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(?:@[\w./-]+)?")
SPLIT_OF = {"train": "train", "validation": "validation", "val": "validation", "valid": "validation",
             "dev": "validation", "test": "test"}  # fmt: skip
_NAMED = re.compile(rf"({'|'.join(SPLIT_OF)})(?:[-_.].*)?", re.IGNORECASE)


@dataclass(frozen=True)
class TablePart:
    """The records of one file or stream, and where the paths in them lead. `begin` starts to read them, each with its
    place as the file counts it: `line 14`.
    """

    location: str
    begin: Callable[[], Iterator[tuple[str, Record | BadRecord]]]
    files: FileRoot
    texts_only: bool = False
    file: Path | None = None


@dataclass(frozen=True)
class Opened:
    """The parts of each split. `kind`: the format. `revision`: of the hub. `totals`: numbers of rows, where known."""

    kind: str
    parts: dict[str, list[TablePart]]
    revision: str | None = None
    totals: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class HeldOutShare:
    """Which rows of train become the split test: of every `1 / share` consecutive rows one, drawn by `seed`."""

    share: float = 0.0
    seed: int = 0

    def __contains__(self, index: int) -> bool:
        if not self.share:
            return False
        block = floor(index * self.share)
        first, end = ceil(block / self.share), ceil((block + 1) / self.share)
        return index == random.Random(f"{self.seed}/{block}").randrange(first, end)


class DrawnTests:
    """Which rows of train become the split test: all rows that ask one question of one picture go together.

    A row of train whose question is in the test is a leak, which would be dropped. Rows are taken in the order of the
    tables, once for each split.
    """

    def __init__(self, share: HeldOutShare, columns: Columns) -> None:
        self._share, self._columns = share, columns
        self._questions: dict[bytes, int] = {}  # each with its number, in the order in which they come
        self._held: list[bool] = []  # of each row that was taken

    def takes(self, number: int, record: Record | BadRecord, files: FileRoot) -> bool:
        """Whether the row `number` is one of the test."""
        if number == len(self._held):
            key = hashlib.sha256(self._asked(number, record, files)).digest()[:16]
            self._held.append(self._questions.setdefault(key, len(self._questions)) in self._share)
        return self._held[number]

    def _asked(self, number: int, record: Record | BadRecord, files: FileRoot) -> bytes:
        if isinstance(record, BadRecord):
            return f"broken {number}".encode()
        asked = [question_key(str(record.get(self._columns.problem))).encode("utf-8", "replace")]
        for value in (*(record.get(name) for name in self._columns.images), pictures_asked(record, self._columns)):
            for image in value if isinstance(value, list | tuple) else [value]:
                try:
                    asked.append(hashlib.sha256(picture_bytes(image, files)).digest())
                except PictureError:
                    asked.append(repr(image).encode())
        return b"\0".join(asked)


def open_local(path: Path, columns: Columns, root: Path | None = None) -> Opened:
    """A file, or a folder with tables and what they name. Raises `UserError`, also for a column that is not there.

    `root`: the folder that no link and no path of a table may leave; by default that of the input.
    """
    if path.is_file():
        root, found = root or path.parent.resolve(), {_split_named(path.stem) or "train": [path]}
    elif path.is_dir():
        root, found = root or path.resolve(), _tables(path)
    else:
        raise UserError(f"input: there is no file or folder {str(path)!r}, nor is it a hub id such as owner/name")
    for file in (file for files in found.values() for file in files):
        if file.suffix.lower() not in ENDINGS:
            known = ", ".join(ENDINGS)
            raise UserError(f"input: {str(path)!r} is none of the known tables; give a file with one of {known}")
        if path.is_dir() and not file.resolve().is_relative_to(root):
            raise UserError(f"input: {str(file)!r} leads out of {str(path)!r}; copy the table into it")
        check_columns(file, columns)
    endings = {file.suffix.lower()[1:] for files in found.values() for file in files}
    parts = {split: [_part(file, path, root, columns) for file in found[split]] for split in SPLITS if split in found}
    totals = {split: sum(map(_row_count, found[split])) for split in parts} if endings == {"parquet"} else {}
    return Opened("+".join(sorted(endings)), parts, totals=totals)


def reads(
    opened: Opened,
    split: str,
    name: str,
    columns: Columns,
    tests: DrawnTests | None,
    limit: int | None,
    *,
    drop_instruction: bool = False,
) -> Reads:
    """One call per row of the split, in the order of the tables; the first `limit`. `tests`: None: none are drawn."""
    source = split if tests is None else "train"
    number = given = 0
    for part in opened.parts[source]:
        context = Context(name, split, part.location, columns, part.files, part.texts_only, drop_instruction)
        for place, record in part.begin():
            wanted = tests is None or tests.takes(number, record, part.files) == (split == "test")
            number += 1
            if limit is not None and given >= limit:
                return
            given += wanted
            if wanted:
                yield partial(read_record, record, place, number - 1, context)


def named_split(opened: Opened, split: str | None) -> Opened:
    """The same table as the split of this name; None: as its own. Raises `UserError` where there are several splits."""
    if split is None:
        return opened
    if len(opened.parts) > 1:
        raise UserError(f"split_name: {split!r} is for one table, and here are {', '.join(opened.parts)}; leave it out")
    (own,) = opened.parts
    totals = {split: opened.totals[own]} if opened.totals else {}
    return replace(opened, parts={split: opened.parts[own]}, totals=totals)


def splits_of(opened: Opened, tests: HeldOutShare) -> list[str]:
    """The splits that will be written. Raises `UserError` where a share of train cannot be taken for a test."""
    if not tests.share:
        return list(opened.parts)
    if "train" not in opened.parts:
        (split, parts), *_ = opened.parts.items()
        raise UserError(
            f"test_share: {parts[0].location} is the split {split} by its name, so there is no train to take "
            f"{tests.share:g} of; say that it is with --split-name train, or leave --test-share out"
        )
    if "test" in opened.parts:
        raise UserError(
            f"test_share: there is a split test already, {opened.parts['test'][0].location}; leave --test-share out"
        )
    return [*opened.parts, "test"]


def _part(file: Path, given: Path, root: Path, columns: Columns) -> TablePart:
    name = str(file.relative_to(given)) if given.is_dir() else file.name
    files = FileRoot(file.parent.resolve(), root)
    return TablePart(name, partial(records, file, columns), files, file.suffix.lower() in TEXT_TABLES, file)


def _split_named(stem: str) -> str | None:
    match = _NAMED.fullmatch(stem)
    return SPLIT_OF[match[1].lower()] if match else None


def _tables(folder: Path) -> dict[str, list[Path]]:
    """The tables of a folder by split, which their names or those of their folders say; a lone one is train."""
    found: dict[str, list[Path]] = {}
    folders = sorted(path for path in folder.iterdir() if path.is_dir())
    for inside in (folder, folder / "data"):
        for path in _in(inside):
            split = _split_named(path.stem)
            if split is not None:
                found.setdefault(split, []).append(path)
        if found:
            break
    for inside in folders:
        split = _split_named(inside.name)
        if split is not None and split not in found and (own := _in(inside)):
            found[split] = own
    if not found and (lone := _in(folder) or _in(folder / "data")):
        if len(lone) > 1:
            names = ", ".join(path.name for path in lone[:5])
            raise UserError(
                f"input: {str(folder)!r} has {len(lone)} tables ({names}) and none is called train or test; "
                "give one of them, or name them after their splits"
            )
        found["train"] = lone
    for split, paths in found.items():
        if len({path.suffix.lower() for path in paths}) > 1:
            names = " and ".join(repr(path.name) for path in paths[:2])
            raise UserError(f"input: {names} are both the split {split!r} in {str(folder)!r}; keep one of them")
    if not found:
        known = ", ".join(ENDINGS)
        raise UserError(f"input: {str(folder)!r} has no table ({known}), such as metadata.csv; put one into it")
    return found


def _in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in ENDINGS and path.is_file())


Records = Iterator[tuple[str, dict[str, Any] | BadRecord]]
TEXT_TABLES = (".csv", ".tsv")
ENDINGS = (".jsonl", ".ndjson", ".json", *TEXT_TABLES, ".parquet")
_BATCH_ROWS = 64  # in memory at a time
_FIRST = 100  # JSON records that are looked through for a column
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
            for place, record in _json(path):
                yield place, picked(record, columns) if isinstance(record, dict) else record


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
            found = [record for _, record in islice(_json(path), _FIRST) if isinstance(record, dict)]
            if not found:
                return
            present = list(dict.fromkeys(name for record in found for name in record))
        require_columns(columns, present, where)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(f"input: {str(path)!r} is not UTF-8 text; save it as UTF-8") from error
    except (OSError, csv.Error, pa.ArrowException) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else in_one_line(error)
        raise UserError(f"input: {str(path)!r} cannot be read ({reason:.200}); mend it, or save it again") from error


def _row_count(path: Path) -> int:
    """The rows of a Parquet file, by its metadata."""
    with _readable(path):
        return int(pq.read_metadata(path).num_rows)


def _parquet(path: Path, columns: Columns) -> Records:
    with pq.ParquetFile(path, pre_buffer=False) as file:
        held = columns.held_by(file.schema_arrow.names)
        number = 0
        for batch in file.iter_batches(_BATCH_ROWS, columns=held):
            try:
                rows: Iterable[dict[str, Any] | BadRecord] = batch.to_pylist()
            except (UnicodeDecodeError, pa.ArrowException, ValueError, OverflowError):
                rows = _one_by_one(batch)
            for record in rows:
                number += 1
                yield f"row {number}", picked(record, columns) if isinstance(record, dict) else record


def _one_by_one(batch: Any) -> Iterator[dict[str, Any] | BadRecord]:
    """The rows of a batch that cannot be read as a whole."""
    for index in range(batch.num_rows):
        try:
            (record,) = batch.slice(index, 1).to_pylist()
            yield record
        except (UnicodeDecodeError, pa.ArrowException, ValueError, OverflowError) as error:
            yield BadRecord("field_type", f"a value cannot be read ({in_one_line(error):.200})", "write it anew in")


def _csv(path: Path, columns: Columns) -> Records:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = _reader(file, path)
        header: list[str] = next(rows, [])
        held = {name: header.index(name) for name in columns.held_by(header)}
        before = rows.line_num
        for row in rows:
            place, before = f"line {before + 1}", rows.line_num  # a cell in quotes may have several lines
            if not row:
                continue  # an empty line
            if len(row) != len(header):
                wrong = f"the line has {len(row)} cells and the header {len(header)}"
                remedy = "quote cells that have a comma or a line break in"
                yield place, BadRecord("not_a_row", wrong, remedy, _line(row))
                continue
            yield place, picked({name: row[at] for name, at in held.items()}, columns)


def _reader(file: Any, path: Path) -> Any:
    csv.field_size_limit(min(_LONGEST_CELL, sys.maxsize))
    return csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)


def _line(cells: Sequence[str]) -> bytes:
    return ",".join(cells).encode("utf-8", errors="replace")


def _json(path: Path) -> Records:
    """A list of objects, or one object per line, whatever the file is called."""
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start[:1] == b"[" and path.suffix.lower() == ".json":
        yield from _json_list(path)
        return
    if path.suffix.lower() == ".json" and start.partition(b"\n")[0].strip() == b"{":
        raise UserError(
            f"input: {str(path)!r} is one object of several lines; write its rows as a list, [{{...}}, {{...}}], or "
            "one object a line"
        )
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield f"line {number}", _object(line)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any] | BadRecord:
    """An object of a list, or what is wrong with it or with an object in it."""
    try:
        found = each_once(pairs)
    except GivenTwiceError as error:
        return _twice(error)
    inside = (one for value in found.values() for one in (value if isinstance(value, list) else [value]))
    return next((one for one in inside if isinstance(one, BadRecord)), found)


def _twice(error: GivenTwiceError, line: bytes = b"") -> BadRecord:
    return BadRecord("given_twice", str(error), "keep the right value in", line)


def _json_list(path: Path) -> Records:
    try:
        content = json.loads(path.read_bytes(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise UserError(f"input: {str(path)!r} is not JSON ({in_one_line(error):.200}); mend it") from error
    for number, item in enumerate(content, 1):
        broken = BadRecord("not_json", f"it is {item!r:.60}", "make it an object in")
        yield f"item {number}", item if isinstance(item, dict | BadRecord) else broken


def _object(line: bytes) -> dict[str, Any] | BadRecord:
    remedy = "write one object a line in"
    try:
        found = read_json(line.decode("utf-8"))
    except GivenTwiceError as error:
        return _twice(error, line)
    except (ValueError, RecursionError) as error:
        return BadRecord("not_json", f"it is not JSON ({in_one_line(error):.200})", remedy, line)
    return found if isinstance(found, dict) else BadRecord("not_json", f"it is {found!r:.60}, no object", remedy, line)
