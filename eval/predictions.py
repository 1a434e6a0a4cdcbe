"""`predictions.jsonl`: one JSON object a line and a problem, appended by the batch, so a killed run loses one."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from adora_vl.errors import UserError
from eval.fingerprint import replace_file

REQUIRED_FIELDS = ("pid", "answer", "response")
IMAGE_FAILED = "image_failed"  # the finish reason of a problem that was never asked
Prediction = dict[str, Any]


def key(row: Prediction) -> tuple[str, int]:
    """What is unique in a predictions file: the problem, and which of its answers."""
    return row["pid"], row.get("sample", 0)


def read_predictions(path: Path, check: Callable[[Prediction], str | None] | None = None) -> list[Prediction]:
    """All rows of a predictions file, in its order.

    `check` says what a benchmark finds wrong with a row. A numeric `pid` becomes text, a missing one is taken from
    `index` (MMStar's files have that), and a null response is an empty one. Raises `UserError` with a line for each row
    (counted from 1) that is no JSON object, lacks one of `REQUIRED_FIELDS`, has a field of the wrong type, or has an id
    that an earlier row has.
    """
    if not path.is_file():
        raise UserError(f"predictions: no file {str(path)!r}; make it with the `infer` verb")
    rows: list[Prediction] = []
    earlier: dict[tuple[str, int], int] = {}
    wrong = Complaints(f"predictions: {path}")
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        row = _parsed(line)
        fault = row if isinstance(row, str) else _fault(row) or (check(row) if check else None)
        if fault is None and isinstance(row, dict):
            first = earlier.setdefault(key(row), number)
            if first == number:
                rows.append(row)
                continue
            fault = f"has the pid {row['pid']!r} of row {first}; keep one of them"
        wrong.add(f"row {number} {fault}")
    wrong.settle()
    if not rows:
        raise UserError(f"predictions: {path} has no rows")
    return rows


class Complaints:
    """What is wrong with the rows of a file: one line each, of the first few, raised together."""

    _SHOWN = 20

    def __init__(self, where: str) -> None:
        self._where, self._lines = where, list[str]()

    def add(self, line: str) -> None:
        self._lines.append(f"{self._where} {line}")

    def settle(self) -> None:
        """Raise `UserError` if there is anything."""
        more = len(self._lines) - self._SHOWN
        if self._lines:
            shown = self._lines[: self._SHOWN] + ([f"{self._where}: {more} more rows are wrong"] if more > 0 else [])
            raise UserError("\n".join(shown))


def missing_fields(row: Prediction, needed: Sequence[str]) -> str | None:
    """Names the fields that a row lacks; None where it has all."""
    missing = [field for field in needed if field not in row]
    if not missing:
        return None
    fields = ("the field " if len(missing) == 1 else "the fields ") + ", ".join(map(repr, missing))
    return f"lacks {fields}; it has {', '.join(row) or 'none'}, needed are {', '.join(needed)}"


def _parsed(line: bytes) -> Prediction | str:
    """The row, or what is wrong with its line."""
    try:
        row = json.loads(line)
    except ValueError as error:
        return f"is not JSON ({error}); expected one object a line"
    if not isinstance(row, dict):
        return f"is a JSON {type(row).__name__}, expected an object"
    if "pid" not in row and "index" in row:
        row["pid"] = row["index"]
    if isinstance(row.get("pid"), int) and not isinstance(row["pid"], bool):
        row["pid"] = str(row["pid"])
    if "response" in row and row["response"] is None:
        row["response"] = ""
    return row


def _fault(row: Prediction) -> str | None:
    lacking = missing_fields(row, REQUIRED_FIELDS)
    if lacking:
        return lacking
    for field in REQUIRED_FIELDS:
        if not isinstance(row[field], str):
            return f"has {field} = {row[field]!r}, expected a string"
    choices = row.get("choices")
    if choices is not None and not (isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)):
        return f"has choices = {choices!r}, expected a list of strings or null"
    if not isinstance(row.get("metadata") or {}, dict):
        return f"has metadata = {row['metadata']!r}, expected an object or null"
    sample = row.get("sample", 0)
    if not (isinstance(sample, int) and sample >= 0):
        return f"has sample = {sample!r}, expected a whole number from 0 on"
    return None


class PredictionLog:
    """A predictions file open for appending, by one process at a time.

    A last line without its newline (a write that was cut off) is taken away on entering, so its problem is asked again.
    `done` holds the keys of the rows that are in the file. Raises `UserError` when another process holds the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: set[tuple[str, int]] = set()

    def __enter__(self) -> Self:
        self._file = self.path.open("a+b")
        try:
            self._lock()
            self._repair()
            self.done = {key(row) for row in read_predictions(self.path)} if self._file.tell() else set()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, rows: Iterable[Prediction]) -> None:
        """Write `rows` and return when they are on the disk."""
        rows = list(rows)
        self._file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done.update(key(row) for row in rows)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"output: another process is writing {self.path}; wait for it or use another --output"
            ) from None

    def _repair(self) -> None:
        self._file.seek(0)
        whole = self._file.read()
        self._file.truncate(whole.rfind(b"\n") + 1)
        self._file.seek(0, os.SEEK_END)


def read_rows(path: Path) -> list[Prediction]:
    """The rows of a predictions file; none where there is no file or it is empty."""
    return read_predictions(path) if path.is_file() and path.stat().st_size else []


def part_path(folder: Path, rank: int) -> Path:
    """The file of one of several processes, until it is merged."""
    return folder / f"predictions.rank{rank}.jsonl"


def absorb_parts(folder: Path, log: PredictionLog) -> bool:
    """Move the rows of the parts in `folder` into `log`; whether there were any.

    A part goes only when its rows are on the disk in the log, so being killed here loses nothing and doubles nothing.
    """
    parts = sorted(folder.glob("predictions.rank*.jsonl"))
    for path in parts:
        with PredictionLog(path):  # takes a torn line away, and makes sure that nobody writes it
            log.append(row for row in read_rows(path) if key(row) not in log.done)
            path.unlink()
    return bool(parts)


def sort_rows(path: Path, order: Sequence[tuple[str, int]]) -> None:
    """Rewrite a predictions file in the order of `order`, at once."""
    rows = {key(row): row for row in read_rows(path)}
    text = "".join(json.dumps(rows[at]) + "\n" for at in order if at in rows)
    replace_file(path, text)
