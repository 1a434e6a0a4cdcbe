"""`predictions.jsonl`: one JSON object a line and a problem, appended by the batch, so a killed run loses one."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from adora_vl.errors import UserError

REQUIRED_FIELDS = ("pid", "answer", "response")
IMAGE_FAILED = "image_failed"  # the finish reason of a problem that was never asked
Prediction = dict[str, Any]


def read_predictions(path: Path) -> list[Prediction]:
    """All rows of a predictions file, in its order.

    Raises `UserError` with the row number (from 1) for a row that is no JSON object, lacks one of `REQUIRED_FIELDS`,
    has a field of the wrong type, or has an id that an earlier row has.
    """
    if not path.is_file():
        raise UserError(f"predictions: no file {str(path)!r}; make it with the `infer` verb")
    rows: list[Prediction] = []
    rows_by_pid: dict[str, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        row = _parsed(line, path, number)
        _check_fields(row, path, number)
        earlier = rows_by_pid.setdefault(row["pid"], number)
        if earlier != number:
            raise UserError(
                f"predictions: {path} row {number} has the pid {row['pid']!r} of row {earlier}; keep one of them"
            )
        rows.append(row)
    if not rows:
        raise UserError(f"predictions: {path} has no rows")
    return rows


def _parsed(line: bytes, path: Path, number: int) -> Prediction:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"predictions: {path} row {number} is not JSON ({error}); expected one object a line") from None
    if not isinstance(row, dict):
        raise UserError(f"predictions: {path} row {number} is a JSON {type(row).__name__}, expected an object")
    return row


def _check_fields(row: Prediction, path: Path, number: int) -> None:
    for field in REQUIRED_FIELDS:
        if field not in row:
            raise UserError(
                f"predictions: {path} row {number} lacks the field {field!r}; it has {', '.join(row) or 'none'}, "
                f"needed are {', '.join(REQUIRED_FIELDS)}"
            )
        if not isinstance(row[field], str):
            raise UserError(f"predictions: {path} row {number} has {field} = {row[field]!r}, expected a string")
    choices = row.get("choices")
    if choices is not None and not (isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)):
        raise UserError(
            f"predictions: {path} row {number} has choices = {choices!r}, expected a list of strings or null"
        )
    if not isinstance(row.get("metadata") or {}, dict):
        raise UserError(
            f"predictions: {path} row {number} has metadata = {row['metadata']!r}, expected an object or null"
        )


class PredictionLog:
    """A predictions file open for appending, by one process at a time.

    A last line without its newline (a write that was cut off) is taken away on entering, so its problem is asked again.
    `done` holds the ids that are in the file. Raises `UserError` when another process holds the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: set[str] = set()

    def __enter__(self) -> Self:
        self._file = self.path.open("a+b")
        try:
            self._lock()
            self._repair()
            self.done = {row["pid"] for row in read_predictions(self.path)} if self._file.tell() else set()
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
        self.done.update(row["pid"] for row in rows)

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
