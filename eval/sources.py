"""A benchmark's rows as their owners publish them: by hub id, or from a folder or file, Parquet or JSON."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # pyarrow ships no types
import pyarrow.parquet as pq  # pyarrow ships no types
from PIL import Image

from adora_vl.errors import UserError
from adora_vl.hub import no_hub, why_missing
from adora_vl.rows import PLACEHOLDER, problem_with_row
from eval.engines import HUB_ID
from eval.fingerprint import digest
from eval.predictions import Complaints, missing_fields, row_fault

Row = dict[str, Any]
Images = Callable[[], list[Image.Image]]


@dataclass(frozen=True)
class LoadedRows:
    """The rows without their images, how to decode the image of each, and a hash of it all."""

    rows: list[Row]
    images: list[Images]
    hash: str
    origin: str


def load_rows(
    data: str,
    split: str,
    revision: str | None,
    needed: Sequence[str],
    image_columns: Sequence[str],
    check: Callable[[Row], str | None],
) -> LoadedRows:
    """The rows of a split. `image_columns`: where an image may be, the first that is there and not null counts.

    `data` is a hub id, a file, or a folder with Parquet files named after the split (or any), or `{split}.json`,
    `.jsonl`, whose rows name image files relative to the folder. Raises `UserError` with a line for each row that lacks
    one of `needed` or in which `check` finds something wrong: before an answer is paid for, not when it is scored.
    """
    path = Path(data)
    if path.exists():
        loaded = _local(path, split, image_columns)
    elif HUB_ID.fullmatch(data) and not path.parent.is_dir():
        loaded = _hub(data, split, revision, image_columns)
    else:
        raise UserError(f"data: {data!r} is neither a file or folder here nor a hub id of the form owner/name")
    _check(loaded, needed, check)
    return loaded


def _check(loaded: LoadedRows, needed: Sequence[str], check: Callable[[Row], str | None]) -> None:
    """Raise `UserError` with one line per row that lacks a field or has a fault, or if there is no row."""
    wrong = Complaints(f"data: {loaded.origin}")
    for number, row in enumerate(loaded.rows, start=1):
        fault = missing_fields(row, needed) or row_fault({**row, "pid": _pid(row), "response": ""}) or check(row)
        if fault:
            wrong.add(f"row {number} {fault}")
    wrong.settle()
    if not loaded.rows:
        raise UserError(f"data: {loaded.origin} has no rows")


def _pid(row: Row) -> Any:
    """The id of a row as `row_fault` wants it: a number is one too."""
    found = row.get("pid", row.get("index"))
    return str(found) if isinstance(found, int) and not isinstance(found, bool) else found


def unaskable(prompt: Any, choices: Sequence[str] | None = None) -> str | None:
    """What is wrong with the text that the model would be asked; None where nothing is.

    A literal `<image>` is only text here: the placeholders of the images are put in by the chat template.
    """
    if not isinstance(prompt, str):
        return f"has the question {prompt!r:.60}, expected a text"
    text = prompt.replace(PLACEHOLDER, " ")
    return problem_with_row({"id": "-", "problem": text, "answer": "-", "images": [], "choices": choices})


def _local(path: Path, split: str, image_columns: Sequence[str]) -> LoadedRows:
    """The rows of a file, or of the files of a split in a folder."""
    files = [path] if path.is_file() else _files(path, split)
    if files[0].suffix == ".parquet":
        return _from_table(_tables(files), image_columns, digest(files), str(path))
    return _from_json(files[0], image_columns)


def _files(folder: Path, split: str) -> list[Path]:
    """The files of a split: Parquet named after it, JSON named after it, else all Parquet if no split is in a name."""
    patterns = (f"{split}-*.parquet", f"{split}.parquet", f"{split}.jsonl", f"{split}.json")
    places = [place for place in (folder, folder / "data") if place.is_dir()]
    for pattern in patterns:
        for place in places:
            found = sorted(place.glob(pattern))
            if found:
                return found
    everything = [path for place in places for path in sorted(place.glob("*.parquet"))]
    if len(everything) == 1:  # MMStar's single file is named after the benchmark
        return everything
    names = ", ".join(path.name for path in everything) or "no Parquet or JSON file"
    raise UserError(f"data: {str(folder)!r} has nothing for the split {split!r}; it has {names}; see --split")


def _tables(files: Iterable[Path]) -> pa.Table:
    """The rows of several Parquet files as one table. Raises `UserError`."""
    tables = []
    for path in files:
        try:
            tables.append(pq.read_table(path))
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"data: {str(path)!r} is not a readable Parquet file ({error})") from None
    try:
        return pa.concat_tables(tables)
    except pa.ArrowException as error:
        raise UserError(f"data: the files of one split have different columns ({error})") from None


def _hub(name: str, split: str, revision: str | None, image_columns: Sequence[str]) -> LoadedRows:
    """The rows of a dataset on the hub. Raises `UserError` if it cannot be loaded."""
    from datasets import load_dataset

    no_hub()  # asked first, since the library tries again for minutes; what it has loaded once is found
    try:
        dataset = load_dataset(name, split=split, revision=revision)
    except Exception as error:  # the hub's library raises its own, the network's and the file system's
        reason = why_missing(name, error)
        raise UserError(f"data: {name!r} split {split!r} cannot be loaded from the hub ({reason})") from error
    # The hub library's fingerprint is of the data and what was done to it.
    return _from_table(dataset.with_format("arrow")[:], image_columns, str(dataset._fingerprint), name)


def _from_table(table: pa.Table, image_columns: Sequence[str], data_hash: str, origin: str) -> LoadedRows:
    """The rows without their images, which are decoded one by one when they are asked for."""
    columns = [column for column in image_columns if column in table.column_names]
    # A column of paths and texts stays with the rows too: the benchmarks' `image` may be either.
    binary = [column for column in columns if not pa.types.is_string(table.schema.field(column).type)]
    try:
        rows = table.drop_columns(binary).to_pylist()
    except UnicodeDecodeError as error:
        raise UserError(f"data: {origin} has a text that is not UTF-8 ({error})") from None
    for row in rows:
        row.update(dict.fromkeys(binary))
    folder = Path(origin) if Path(origin).is_dir() else Path(origin).parent

    def images(index: int) -> Images:
        return lambda: _decoded([table.column(column)[index].as_py() for column in columns], folder)

    return LoadedRows(rows, [images(index) for index in range(len(rows))], data_hash, origin)


def _from_json(path: Path, image_columns: Sequence[str]) -> LoadedRows:
    """A list, an object of rows by id (as MathVista's own file), or one object per line."""
    try:
        content = path.read_bytes()
        if path.suffix == ".jsonl":
            rows: Any = [json.loads(line) for line in content.splitlines() if line.strip()]
        else:
            rows = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"data: {str(path)!r} is not JSON ({error})") from None
    if isinstance(rows, dict):
        rows = [{"pid": pid, **row} if isinstance(row, dict) else row for pid, row in rows.items()]
    if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
        raise UserError(f"data: {str(path)!r} is not a list of objects, nor an object of them")
    hash_ = hashlib.sha256(content)
    for row in rows:
        for name in (row.get(column) for column in image_columns):
            file = path.parent / name if isinstance(name, str) and len(name) < 300 else None
            if file is not None and file.is_file():
                hash_.update(f"{name}\0{file.stat().st_size}\0".encode())

    def images(row: Row) -> Images:
        return lambda: _decoded([row.get(column) for column in image_columns], path.parent)

    return LoadedRows(rows, [images(row) for row in rows], hash_.hexdigest()[:16], str(path))


def _decoded(values: Sequence[Any], folder: Path) -> list[Image.Image]:
    """The image that the first usable of `values` holds: bytes, a struct of bytes or path, a path, or base64."""
    for value in values:
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes):
            return [_opened(io.BytesIO(value))]
        if isinstance(value, str) and value:
            if len(value) > 300:
                return [_opened(io.BytesIO(base64.b64decode(value, validate=True)))]
            if value == values[-1] or (folder / value).is_file():
                return [_opened(folder / value)]
    raise ValueError("the row has no image")


def _opened(source: Path | io.BytesIO) -> Image.Image:
    """The image as RGB, read completely."""
    with Image.open(source) as image:
        return image.convert("RGB")
