"""The file of answers, `predictions.jsonl`: one JSON object per answer and line.

Rows are appended per batch, so a kill loses one batch.
"""

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

from adora_vl.evals.inference.prediction_tables import is_table, rows_of_table
from adora_vl.evals.records import Prediction
from adora_vl.utils.cli import MistakesError, read_json
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import replace_file, unwritable, written_to

# in the output folder of `run`
PREDICTIONS = "predictions.jsonl"
SCORE = "score.json"
REQUIRED_FIELDS = ("pid", "answer", "response")
# The finish reasons of a problem that was never asked: its image is broken, or its prompt leaves no
# room for an answer.
IMAGE_FAILED = "image_failed"
TOO_LONG = "prompt_too_long"
NOT_ASKED = (IMAGE_FAILED, TOO_LONG)
# The id of a problem, and the number of an answer among those to it, from 0 on.
RowKey = tuple[str, int]


def score_path(output: Path) -> Path:
    """Return the file of a score.

    It is `output` itself if its name ends in .json, else score.json in it.
    """
    if output.suffix == ".json" and not output.is_dir():
        return output
    return output / SCORE


def key(row: Prediction) -> RowKey:
    """Return the key of a row, unique in its file: the problem, and the number of its answer."""
    return row["pid"], row.get("sample", 0)


def read_predictions(
    path: Path,
    check: Callable[[Prediction], str | None] | None = None,
    id_column: str = "pid",
    columns: Mapping[str, str] | None = None,
) -> list[Prediction]:
    """Return all rows of a predictions file, in its order.

    The file has an object a line, or one list of objects, or one object with a row under each id,
    as MathVista publishes them; or it is a table (.xlsx, .tsv, .csv), as VLMEvalKit writes them.

    `check` says what a benchmark finds wrong with a row. A numeric `pid` becomes text, a missing
    one is taken from `id_column`, and a null response is an empty one. `columns`: from our names to
    those of the file, in which a dot leads into an object or a list. Raises `UserError` with a
    line for each row (counted from 1) that is no JSON object, has a fault (`row_fault`), or has an
    id that an earlier row has.
    """
    if not path.is_file():
        raise UserError(f"predictions: no file {str(path)!r}; make it with the `infer` verb")
    rows: dict[RowKey, tuple[int, Prediction]] = {}
    faults: list[str] = []
    for number, parsed in enumerate(_objects(path), start=1):
        row = _completed(parsed, id_column, columns or {}) if isinstance(parsed, dict) else parsed
        fault = row if isinstance(row, str) else row_fault(row) or (check(row) if check else None)
        if fault is None and isinstance(row, dict):
            first, _ = rows.setdefault(key(row), (number, row))
            if first != number:
                fault = f"has the pid {row['pid']!r} of row {first}; keep one of them"
        if fault:
            faults.append(f"row {number} {fault}")
    if faults and "lacks the field" in faults[0]:
        faults.append(": where fields have other names, say --columns pid=NAME response=NAME")
    refuse_rows(f"predictions: {path}", faults)
    if not rows:
        raise UserError(f"predictions: {path} has no rows")
    return [row for _, row in rows.values()]


# faults in a message, and characters of one: a value may be huge
_SHOWN = 20
_LONGEST = 300


def refuse_rows(where: str, faults: Sequence[str]) -> None:
    """Raise `UserError` if rows have faults, with a line for each of the first of them."""
    lines = [
        f"{where} {line if len(line) <= _LONGEST else line[:_LONGEST] + '...'}"
        for line in faults[:_SHOWN]
    ]
    n_hidden = len(faults) - _SHOWN
    rest = "1 more row is wrong" if n_hidden == 1 else f"{n_hidden} more rows are wrong"
    if faults:
        raise MistakesError(lines + ([f"{where}: {rest}"] if n_hidden > 0 else []))


def missing_fields(row: Prediction, needed: Sequence[str]) -> str | None:
    """Return a text that names the fields that a row lacks; None where it has all."""
    missing = [field for field in needed if field not in row]
    if not missing:
        return None
    fields = ("the field " if len(missing) == 1 else "the fields ") + ", ".join(map(repr, missing))
    return f"lacks {fields}; it has {', '.join(row) or 'none'}, needed are {', '.join(needed)}"


Kind = tuple[Callable[[Any], bool], str]  # what a value has to be, and that in words
ANY: Kind = (lambda value: True, "anything")
TEXT: Kind = (lambda value: isinstance(value, str), "a string")
TEXTS: Kind = (
    lambda value: isinstance(value, list) and all(map(TEXT[0], value)),
    "a list of texts",
)


def one_of(*words: str) -> Kind:
    """Return a value that is one of these words."""
    return (lambda value: value in words), f"one of {', '.join(words)}"


def matching(pattern: str, expected: str) -> Kind:
    """Return a text that matches a pattern as a whole; `expected` says it in words."""
    return (
        lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None
    ), expected


def or_null(kind: Kind) -> Kind:
    """Return a value of a kind, or None."""
    return (lambda value: value is None or kind[0](value)), f"{kind[1]} or null"


def wrong_fields(row: Prediction, kinds: Mapping[str, Kind]) -> str | None:
    """Return what is wrong with the fields of a row: one is missing, or is not of its kind.

    It names the first such field, and is None where there is none.
    """
    missing = missing_fields(row, tuple(kinds))
    if missing:
        return missing
    for name, (holds, expected) in kinds.items():
        if not holds(row[name]):
            return f"has {name} = {row[name]!r:.60}, expected {expected}"
    return None


def _objects(path: Path) -> Iterator[Prediction | str]:
    """Yield the objects of a predictions file.

    A text says what is wrong where one is not an object.
    """
    if is_table(path):
        yield from rows_of_table(path)
        return
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"predictions: {str(path)!r} cannot be read ({error.strerror})") from error
    lines = content.splitlines()
    first = _parsed(lines[0]) if lines else ""
    a_line_each = isinstance(first, dict) and not all(
        isinstance(row, dict) for row in first.values()
    )
    document = None
    if not a_line_each:
        with suppress(ValueError, RecursionError):
            document = read_json(content)
    if isinstance(document, list):
        kind = "is no object of the list"
        yield from (row if isinstance(row, dict) else kind for row in document)
    elif isinstance(document, dict) and all(isinstance(row, dict) for row in document.values()):
        yield from ({"pid": name, **row} for name, row in document.items())
    else:
        yield from map(_parsed, lines)


def _parsed(line: bytes) -> Prediction | str:
    """Return the row of a line, or a text that says what is wrong with the line."""
    try:
        row = read_json(line)
    except (ValueError, RecursionError) as error:
        return f"is not JSON ({error}); expected one object a line"
    return row if isinstance(row, dict) else f"is a JSON {type(row).__name__}, expected an object"


def _completed(row: Prediction, id_column: str, columns: Mapping[str, str]) -> Prediction:
    """Return the row with its id as a text, and with our names of its fields."""
    for ours, theirs in columns.items():
        for value in _inside(row, theirs):
            row[ours] = value
    if "pid" not in row and id_column in row:
        row["pid"] = row[id_column]
    if isinstance(row.get("pid"), int) and not isinstance(row["pid"], bool):
        row["pid"] = str(row["pid"])
    if "response" in row and row["response"] is None:
        row["response"] = ""
    return row


def _inside(row: object, path: str) -> list[Any]:
    """Return the value under a name, or under names with dots between them, as a list of one.

    The list is empty where there is no such value.
    """
    if isinstance(row, dict) and path in row:
        return [row[path]]
    name, _, rest = path.partition(".")
    if isinstance(row, list) and name.isdecimal() and int(name) < len(row):
        value = row[int(name)]
    elif isinstance(row, dict) and name in row:
        value = row[name]
    else:
        return []
    return _inside(value, rest) if rest else [value]


def columns_of(words: Sequence[str]) -> dict[str, str]:
    """Return the words `pid=index response=prediction` as a mapping from our names to theirs.

    Raises `UserError` for a word of another form.
    """
    names = {}
    for word in words:
        ours, sign, theirs = word.partition("=")
        if not (ours and sign and theirs):
            raise UserError(f"columns: {word!r:.60} is not OURS=THEIRS")
        names[ours] = theirs
    return names


def row_fault(row: Prediction) -> str | None:
    """Return what is wrong with the fields that every benchmark has, or None."""
    present = {name: kind for name, kind in _OPTIONAL.items() if name in row}
    return wrong_fields(row, dict.fromkeys(REQUIRED_FIELDS, TEXT)) or wrong_fields(row, present)


def _is_count(value: object) -> bool:
    """Return whether a value is a number of tokens."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_COUNT: Kind = (_is_count, "a whole number from 0 on")
_OPTIONAL = {  # fields that a row may lack
    "choices": or_null((TEXTS[0], "a list of strings")),
    "metadata": or_null((lambda value: isinstance(value, dict), "an object")),
    "sample": _COUNT,
    "n_tokens": or_null(_COUNT),
    "finish_reason": or_null(TEXT),
    "error": or_null(TEXT),
    "figure": or_null(TEXT),  # a solved figure, on which claims are checked
    "calls": or_null((lambda value: isinstance(value, list), "a list")),
    "thinking_opened": (lambda value: isinstance(value, bool), "true or false"),
    "image_size": or_null(
        (
            lambda value: (
                isinstance(value, list) and len(value) == 2 and all(map(_is_count, value))
            ),
            "width and height",
        )
    ),
}


class PredictionLog:
    """A predictions file open for appending, by one process at a time.

    A last line without its newline (a write that was cut off) is taken away on entering, so its
    problem is asked again. `done` holds the keys of the rows that are in the file. Raises
    `UserError` when another process holds the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: set[RowKey] = set()

    def __enter__(self) -> Self:
        """Open and lock the file, cut off a half line at its end, and read which rows are done."""
        # Unbuffered, or what a full disk refused would be written again when the file is closed.
        with written_to("output", self.path):
            self._file = self.path.open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.seek(0)
            end = self._file.read().rfind(b"\n") + 1
            self._file.truncate(end)
            self.done = {key(row) for row in read_predictions(self.path)} if end else set()
        except BaseException as error:
            busy = f"{_holder(self._file)} is writing {self.path}"
            self._file.close()
            if isinstance(error, BlockingIOError):
                raise UserError(f"output: {busy}; wait for it or use another --output") from None
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, rows: Iterable[Prediction]) -> None:
        """Write `rows`, and return when they are on the disk.

        If it is full, none of them is written.
        """
        rows = list(rows)
        before = self._file.seek(0, os.SEEK_END)
        remaining = memoryview("".join(json.dumps(row) + "\n" for row in rows).encode())
        try:
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(before)
            raise unwritable("output", self.path, error) from error
        self.done.update(key(row) for row in rows)


def _holder(file: BinaryIO) -> str:
    """Return the process that has locked a file, with its command, as far as the system says it."""
    inode = str(os.fstat(file.fileno()).st_ino)
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            _, kind, _, _, pid, location, *_ = line.split()
            if kind == "FLOCK" and location.split(":")[2] == inode and int(pid) > 0:
                command_line = Path(f"/proc/{int(pid)}/cmdline").read_bytes()
                words = command_line.decode(errors="replace").split("\0")
                return f"process {pid} ({' '.join(words).strip():.120})"
    return "another process"


def read_rows(path: Path) -> list[Prediction]:
    """Return the rows of a predictions file; none where there is no file or it is empty."""
    return read_predictions(path) if path.is_file() and path.stat().st_size else []


def part_path(folder: Path, rank: int) -> Path:
    """Return the file of one of several processes, until it is merged."""
    return folder / f"predictions.rank{rank}.jsonl"


def absorb_parts(folder: Path, log: PredictionLog) -> bool:
    """Move the rows of the parts in `folder` into `log`, and say whether there were any.

    A part goes only when its rows are on the disk in the log, so being killed here loses nothing
    and doubles nothing.
    """
    parts = sorted(folder.glob("predictions.rank*.jsonl"))
    for path in parts:
        with PredictionLog(path):  # repairs a torn last line, and locks the file
            log.append(row for row in read_rows(path) if key(row) not in log.done)
            path.unlink()
    return bool(parts)


def sort_rows(path: Path, order: Sequence[RowKey]) -> None:
    """Rewrite a predictions file in this order. The new file replaces the old one at once."""
    rows = {key(row): row for row in read_rows(path)}
    text = "".join(json.dumps(rows[at]) + "\n" for at in order if at in rows)
    with written_to("output", path):
        replace_file(path, text)
