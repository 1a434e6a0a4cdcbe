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
from typing import Any, BinaryIO, NamedTuple, Self

from adora_vl.evals.inference.prediction_tables import is_table, read_table_rows
from adora_vl.evals.records import Prediction
from adora_vl.utils.cli import MultiLineUserError, read_json
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import naming_write_errors, replace_file, unwritable_error
from adora_vl.utils.nested_values import NO_VALUE, value_at_path

# The names of files in the output folder of `run`.
PREDICTIONS_FILE = "predictions.jsonl"
SCORE_FILE = "score.json"
REQUIRED_FIELDS = ("pid", "answer", "response")
# The finish reasons of a problem that was never asked. Its image is broken, or its prompt is so
# long that the context has no room for an answer.
IMAGE_FAILED = "image_failed"
PROMPT_TOO_LONG = "prompt_too_long"
NOT_ASKED_REASONS = (IMAGE_FAILED, PROMPT_TOO_LONG)
# The id of a problem, and the number of one of the answers to it, from 0 on.
RowKey = tuple[str, int]


def score_path(output: Path) -> Path:
    """Return the score file for `--output`: the path itself if it ends in .json, else one in it."""
    if output.suffix == ".json" and not output.is_dir():
        return output
    return output / SCORE_FILE


def row_key(row: Prediction) -> RowKey:
    """Return the key of a row, unique in its file: the problem, and the number of its answer."""
    return row["pid"], row.get("sample", 0)


def read_predictions(
    path: Path,
    check: Callable[[Prediction], str | None] | None = None,
    id_column: str = "pid",
    columns: Mapping[str, str] | None = None,
) -> list[Prediction]:
    """Read all rows of a file of predictions, and check them.

    The file has an object a line, or one list of objects, or one object with a row under each id,
    as MathVista publishes them. It may also be a table (.xlsx, .tsv, .csv), as VLMEvalKit writes
    it.

    Args:
        path: The file.
        check: A benchmark's own check: returns what is wrong with a row, or None.
        id_column: The field from which a missing `pid` is taken.
        columns: The names of fields in the file by our names, if they differ, such as
            `{"answer": "meta.answers.0"}`. A dot leads into an object or a list.

    Returns the rows in the order of the file, with numbers as ids turned into texts and null
    responses into empty ones. Raises `UserError` with a line for each row that is no JSON object,
    has a fault (`describe_row_fault`), or has the key of an earlier row, and for a name in
    `columns` that no row has.
    """
    if not path.is_file():
        raise UserError(f"predictions: no file {str(path)!r}; make it with the `infer` verb")
    rows: list[Prediction] = []
    row_number_by_key: dict[RowKey, int] = {}
    faults: list[str] = []
    columns = columns or {}
    unseen_names = set(columns.values())  # the names that no row has had so far
    for number, row_or_fault in enumerate(_read_objects(path, columns), start=1):
        if isinstance(row_or_fault, str):  # what is wrong with an object that cannot be read
            faults.append(f"row {number} {row_or_fault}")
            continue
        unseen_names = {
            name for name in unseen_names if value_at_path(row_or_fault, name) is NO_VALUE
        }
        fault = _describe_column_fault(row_or_fault, columns)
        row = _rename_fields(row_or_fault, id_column, columns)
        fault = fault or describe_row_fault(row)
        if not fault and check is not None:
            fault = check(row)
        if not fault:
            first_number = row_number_by_key.setdefault(row_key(row), number)
            if first_number != number:
                fault = f"has the pid {row['pid']!r} of row {first_number}; keep one of them"
        if fault:
            faults.append(f"row {number} {fault}")
        else:
            rows.append(row)
    if faults and "lacks the field" in faults[0]:
        faults.append(": where fields have other names, say --columns pid=NAME response=NAME")
    raise_row_faults(f"predictions: {path}", faults)
    if not rows:
        raise UserError(f"predictions: {path} has no rows")
    if unseen_names:
        names = ", ".join(repr(name) for name in sorted(unseen_names))
        raise UserError(f"columns: no row of {path} has the field {names}; correct the name")
    return rows


_MAX_FAULTS_IN_MESSAGE = 20
_MAX_FAULT_CHARS = 300  # of one fault, whose value may be huge


def raise_row_faults(prefix: str, faults: Sequence[str]) -> None:
    """Raise `UserError` if rows have faults, with a line for each of the first 20.

    A line is for example `predictions: FILE row 3 lacks the field 'answer'`.

    Args:
        prefix: The beginning of each line, which names the data.
        faults: What is wrong with each faulty row, beginning with `row` and its number.
    """
    if not faults:
        return
    lines: list[str] = []
    for fault in faults[:_MAX_FAULTS_IN_MESSAGE]:
        short_fault = fault if len(fault) <= _MAX_FAULT_CHARS else fault[:_MAX_FAULT_CHARS] + "..."
        lines.append(f"{prefix} {short_fault}")
    n_hidden = len(faults) - _MAX_FAULTS_IN_MESSAGE
    if n_hidden == 1:
        lines.append(f"{prefix}: 1 more row is wrong")
    elif n_hidden > 1:
        lines.append(f"{prefix}: {n_hidden} more rows are wrong")
    raise MultiLineUserError(lines)


def describe_missing_fields(row: Prediction, required: Sequence[str]) -> str | None:
    """Say which of the required fields a row lacks; None if it has all of them.

    For example, `lacks the field 'answer'; it has pid, gold, needed are pid, answer`.
    """
    missing_fields = [field for field in required if field not in row]
    if not missing_fields:
        return None
    noun = "field" if len(missing_fields) == 1 else "fields"
    names = ", ".join(repr(field) for field in missing_fields)
    present_names = ", ".join(row) or "none"
    return f"lacks the {noun} {names}; it has {present_names}, needed are {', '.join(required)}"


class FieldType(NamedTuple):
    """What the value of a field has to be."""

    is_valid: Callable[[Any], bool]
    """Whether a value is of this type."""
    expected: str
    """The type in words, for messages: `a string`."""


def _is_list_of_texts(value: object) -> bool:
    """Return whether a value is a list of texts."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


ANY_VALUE = FieldType(lambda value: True, "anything")
TEXT_VALUE = FieldType(lambda value: isinstance(value, str), "a string")
LIST_OF_TEXTS = FieldType(_is_list_of_texts, "a list of texts")


def one_of(*words: str) -> FieldType:
    """Return the type of a value that has to be one of these words."""
    return FieldType(lambda value: value in words, f"one of {', '.join(words)}")


def matching_text(pattern: str, expected: str) -> FieldType:
    """Return the type of a text that has to match a pattern as a whole.

    `expected` says in words what matches, such as `a letter from A to H`.
    """

    def is_valid(value: object) -> bool:
        return isinstance(value, str) and re.fullmatch(pattern, value) is not None

    return FieldType(is_valid, expected)


def or_null(field_type: FieldType) -> FieldType:
    """Return the type of a value that is of this type or None."""
    return FieldType(
        lambda value: value is None or field_type.is_valid(value),
        expected=f"{field_type.expected} or null",
    )


def describe_field_fault(row: Prediction, types: Mapping[str, FieldType]) -> str | None:
    """Say what is wrong with the fields of a row: some are missing, or one is of another type.

    For example, `has answer = 5, expected a string`. Returns None if nothing is wrong.

    Args:
        row: The row.
        types: The type of each field that it has to have, by name.
    """
    fault = describe_missing_fields(row, tuple(types))
    if fault:
        return fault
    for name, field_type in types.items():
        if not field_type.is_valid(row[name]):
            return f"has {name} = {row[name]!r:.60}, expected {field_type.expected}"
    return None


def _read_objects(path: Path, columns: Mapping[str, str]) -> Iterator[Prediction | str]:
    """Yield the rows of a file of predictions, in any of the forms that `read_predictions` names.

    For a row that is no object, a text that says what is wrong is yielded instead. The rows keep
    the names of their file. `columns` has the names that differ, by our names.
    """
    if is_table(path):
        yield from read_table_rows(path, columns)
        return
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"predictions: {str(path)!r} cannot be read ({error.strerror})") from error
    lines = content.splitlines()
    document: Any = None  # stays None for a file that is no single JSON value
    if not _begins_with_a_row(lines):
        with suppress(ValueError, RecursionError):
            document = read_json(content)
    if isinstance(document, list):
        for item in document:
            yield item if isinstance(item, dict) else "is no object of the list"
    elif isinstance(document, dict) and all(isinstance(row, dict) for row in document.values()):
        for pid, row in document.items():
            yield {"pid": pid, **row}
    else:
        for line in lines:
            yield _parse_line(line)


def _begins_with_a_row(lines: Sequence[bytes]) -> bool:
    """Return whether the first line is a whole row, as in a file with a row in each line.

    `{"pid": "1", "response": "B"}` is a row. `{"1": {"response": "B"}}` may be a whole file in one
    line, with a row under each id, since all its values are objects.
    """
    if not lines:
        return False
    first_row = _parse_line(lines[0])
    if not isinstance(first_row, dict):
        return False
    return not all(isinstance(value, dict) for value in first_row.values())


def _parse_line(line: bytes) -> Prediction | str:
    """Return the row of a line, or a text that says what is wrong with the line."""
    try:
        row = read_json(line)
    except (ValueError, RecursionError) as error:
        return f"is not JSON ({error}); expected one object a line"
    return row if isinstance(row, dict) else f"is a JSON {type(row).__name__}, expected an object"


def _describe_column_fault(row: Prediction, columns: Mapping[str, str]) -> str | None:
    """Say what is wrong if a row lacks a field that `--columns` names, but has a field of our name.

    With `--columns answer=gold`, a row without `gold` but with `answer` has this fault: its
    `answer`, which may be that of the model, would be taken for the reference answer. Returns None
    if nothing is wrong.
    """
    for our_name, path in columns.items():
        if our_name in row and value_at_path(row, path) is NO_VALUE:
            return (
                f"has no {path!r}, which --columns names for {our_name!r}, but a field "
                f"{our_name!r} of its own; correct the name"
            )
    return None


def _rename_fields(row: Prediction, id_column: str, columns: Mapping[str, str]) -> Prediction:
    """Give the fields of a row our names, and make its `pid` and its `response` texts.

    The row is changed in place, and returned. The arguments are those of `read_predictions`.
    """
    # All fields are read before any is written. With `answer=gold response=answer` the response is
    # the old `answer` of the row, not the new one.
    renamed_fields: dict[str, Any] = {}
    for our_name, path in columns.items():
        value = value_at_path(row, path)
        if value is not NO_VALUE:
            renamed_fields[our_name] = value
    row.update(renamed_fields)
    if "pid" not in row and id_column in row:
        row["pid"] = row[id_column]
    # A truth value is an `int` too, and no id.
    if isinstance(row.get("pid"), int) and not isinstance(row["pid"], bool):
        row["pid"] = str(row["pid"])
    if "response" in row and row["response"] is None:
        row["response"] = ""
    return row


def parse_columns(words: Sequence[str]) -> dict[str, str]:
    """Parse words such as `pid=index` into the names of fields in a file, by our names.

    `pid=index response=prediction` gives `{"pid": "index", "response": "prediction"}`. Raises
    `UserError` for a word of another form.
    """
    their_name_by_ours: dict[str, str] = {}
    for word in words:
        ours, sign, theirs = word.partition("=")
        if not (ours and sign and theirs):
            raise UserError(f"columns: {word!r:.60} is not OURS=THEIRS")
        their_name_by_ours[ours] = theirs
    return their_name_by_ours


def describe_row_fault(row: Prediction) -> str | None:
    """Say what is wrong with the fields that a row of any benchmark has; None if nothing is."""
    fault = describe_field_fault(row, dict.fromkeys(REQUIRED_FIELDS, TEXT_VALUE))
    if fault:
        return fault
    present_types = {
        name: field_type for name, field_type in _TYPE_BY_OPTIONAL_FIELD.items() if name in row
    }
    return describe_field_fault(row, present_types)


def _is_count(value: object) -> bool:
    """Return whether a value is a whole number from 0 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_size(value: object) -> bool:
    """Return whether a value is a list of a width and a height."""
    return isinstance(value, list) and len(value) == 2 and all(_is_count(side) for side in value)


_COUNT_VALUE = FieldType(_is_count, "a whole number from 0 on")
_TYPE_BY_OPTIONAL_FIELD = {
    "choices": or_null(FieldType(_is_list_of_texts, "a list of strings")),
    "metadata": or_null(FieldType(lambda value: isinstance(value, dict), "an object")),
    "sample": _COUNT_VALUE,
    "n_tokens": or_null(_COUNT_VALUE),
    "finish_reason": or_null(TEXT_VALUE),
    "error": or_null(TEXT_VALUE),
    "figure": or_null(TEXT_VALUE),  # a solved figure, on which claims are checked
    "calls": or_null(FieldType(lambda value: isinstance(value, list), "a list")),
    "thinking_opened": FieldType(lambda value: isinstance(value, bool), "true or false"),
    "image_size": or_null(FieldType(_is_size, "width and height")),
}


class PredictionLog:
    """A file of predictions that is open for appending, by one process at a time.

    It is a context manager. On entering, a last line without its newline, from a write that was cut
    off, is removed, so that its problem is asked again. Raises `UserError` when another process has
    the file open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written_keys: set[RowKey] = set()
        """The keys of the rows in the file, known from `__enter__` on."""

    def __enter__(self) -> Self:
        """Open and lock the file, cut off a half line at its end, and read the keys of its rows."""
        # Unbuffered: the rest of a buffer that a full disk refused would be written at the close.
        with naming_write_errors("output", self.path):
            self._file = self.path.open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.seek(0)
            end_of_last_line = self._file.read().rfind(b"\n") + 1
            self._file.truncate(end_of_last_line)
            self.written_keys = {row_key(row) for row in read_rows(self.path)}
        except BaseException as error:
            # The process that holds the lock has to be looked up before the file is closed.
            message = f"output: {_describe_lock_holder(self._file)} is writing {self.path}"
            self._file.close()
            if isinstance(error, BlockingIOError):
                raise UserError(f"{message}; wait for it or use another --output") from None
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, rows: Iterable[Prediction]) -> None:
        """Write rows to the end of the file, and return when they are on the disk.

        If the disk is full, none of them stays in the file, and `UserError` is raised.
        """
        rows = list(rows)
        size_before = self._file.seek(0, os.SEEK_END)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        remaining = memoryview(text.encode())
        try:
            # An unbuffered write may write a part only.
            while remaining:
                n_written = self._file.write(remaining)
                remaining = remaining[n_written:]
            os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(size_before)
            raise unwritable_error("output", self.path, error) from error
        self.written_keys.update(row_key(row) for row in rows)


def _describe_lock_holder(file: BinaryIO) -> str:
    """Name the process that has locked a file, such as `process 4242 (python -m eval ...)`.

    Returns `another process` where /proc/locks does not say it.
    """
    inode = str(os.fstat(file.fileno()).st_ino)
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            # Such as `1: FLOCK  ADVISORY  WRITE 4242 08:01:131090 0 EOF`, which ends in the inode.
            _, kind, _, _, pid, location, *_ = line.split()
            if kind == "FLOCK" and location.split(":")[2] == inode and int(pid) > 0:
                command_line = Path(f"/proc/{int(pid)}/cmdline").read_bytes()
                words = command_line.decode(errors="replace").split("\0")
                return f"process {pid} ({' '.join(words).strip():.120})"
    return "another process"


def read_rows(path: Path) -> list[Prediction]:
    """Read the rows of a file of predictions; [] if there is no file, or if it is empty."""
    return read_predictions(path) if path.is_file() and path.stat().st_size else []


def rank_file_path(folder: Path, rank: int) -> Path:
    """Return the file into which one of several ranks writes its answers, until they are merged."""
    return folder / f"predictions.rank{rank}.jsonl"


def merge_rank_files(folder: Path, log: PredictionLog) -> bool:
    """Move the answers that the ranks have written into files of their own to `log`.

    The file of a rank is removed only when its rows are on the disk in the log, so a run that is
    killed here loses nothing. The next run skips rows that the log already has.

    Returns whether there were such files.
    """
    rank_files = sorted(folder.glob("predictions.rank*.jsonl"))
    for path in rank_files:
        with PredictionLog(path):  # removes a half line at the end, and locks the file
            log.append(row for row in read_rows(path) if row_key(row) not in log.written_keys)
            path.unlink()
    return bool(rank_files)


def sort_rows(path: Path, keys: Sequence[RowKey]) -> None:
    """Rewrite a file of predictions in the order of these keys; keys without a row are skipped.

    The new file replaces the old one atomically.
    """
    row_by_key = {row_key(row): row for row in read_rows(path)}
    lines = [json.dumps(row_by_key[key]) + "\n" for key in keys if key in row_by_key]
    with naming_write_errors("output", path):
        replace_file(path, "".join(lines))
