"""Geometry3K as a table in the format of hiyouga/geometry3k: `images`, `problem` with a leading `<image>`, `answer`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa  # pyarrow ships no types
import pyarrow.parquet as pq  # pyarrow ships no types
from datasets import Features, Image

from adora_vl.commands import amount
from adora_vl.errors import UserError, nearest
from adora_vl.rows import PLACEHOLDER
from data_prep.clean_row import RawProblem, RowError
from data_prep.storage import SPLITS

_COLUMNS = ("images", "problem", "answer")  # `id` and `choices` are read too where a table has them
_LETTER = re.compile("[A-Z]")
_BATCH_ROWS = 64  # in memory at a time


@dataclass(frozen=True)
class Table:
    """Parquet files of each split under our names. `location`: as people know the table."""

    location: str
    sizes: dict[str, int]
    files: Mapping[str, list[str]]
    revision: str | None = None

    def problems(self, split: str) -> Iterator[Callable[[], RawProblem]]:
        """The rows in the order of the table."""
        rows = enumerate(row for file in self.files[split] for row in _rows(file))
        while True:
            try:
                index, row = next(rows)
            except StopIteration:
                return
            except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                raise UserError(
                    f"input: split {split!r} of {self.location!r} cannot be read ({error}); download it again"
                ) from error
            yield partial(_read, row, split, index, f"row {index} of split {split} of {self.location}")


def _rows(file: str) -> Iterator[dict[str, Any]]:
    """The rows with images as bytes: decoding is the cleaning's work, where a failure has a row id.

    Not through a stream of `datasets`, which reads ahead until the whole file is in memory (pyarrow's `pre_buffer`).
    """
    with pq.ParquetFile(file, pre_buffer=False) as parquet:
        for batch in parquet.iter_batches(_BATCH_ROWS):
            yield from batch.to_pylist()


def from_parquet(path: Path) -> Table:
    """A Parquet file, or a folder of them at any depth, named as on the hub: `train-00000-of-00001.parquet`.

    Read a batch at a time, so no second copy ends up in memory or in a cache. Raises `UserError`.
    """
    files = sorted(path.rglob("*.parquet"), key=lambda file: file.name) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise UserError(
            f"input: {str(path)!r} has no Parquet file; give a folder with files such as train-00000-of-00001.parquet"
        )
    by_split: dict[str, list[str]] = {}
    for file in files:
        by_split.setdefault(_split_name(file.stem.split("-")[0], str(path)), []).append(str(file))
    for split, names in by_split.items():
        for name in names:
            _check_columns(name, split, str(path))
    sizes = {split: sum(_rows_of(file) for file in by_split[split]) for split in SPLITS if split in by_split}
    if not any(sizes.values()):
        raise UserError(f"input: {str(path)!r} has no rows; give the files that have some")
    return Table(str(path), sizes, by_split)


def _split_name(name: str, location: str) -> str:
    """Our name of a split, which is `validation` for `val`. Raises `UserError` for an unknown one."""
    split = "validation" if name == "val" else name
    if split not in SPLITS:
        raise UserError(f"input: {location!r} has a split {name!r}{nearest(name, SPLITS)}; known: {', '.join(SPLITS)}")
    return split


def _rows_of(file: str) -> int:
    """The number of rows, from the metadata of the file."""
    return int(pq.read_metadata(file).num_rows)


def _check_columns(file: str, split: str, location: str) -> None:
    """Raise `UserError` if a file lacks a column or its images are no images."""
    try:
        features = Features.from_arrow_schema(pq.read_schema(file))
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"input: {file!r} is not a readable Parquet file ({error}); download it again") from error
    for column in _COLUMNS:
        if column not in features:
            raise UserError(
                f"input: split {split!r} of {location!r} lacks the column {column!r}{nearest(column, features)}; "
                f"it has {', '.join(features)}, and {', '.join(_COLUMNS)} are needed"
            )
    item = getattr(features["images"], "feature", None)
    if not isinstance(item, Image) and not (isinstance(item, dict) and "bytes" in item):
        raise UserError(
            f"input: the column 'images' of split {split!r} of {location!r} is {features['images']!r:.80}; "
            "it has to be a list of images"
        )


def _read(row: Mapping[str, Any], split: str, index: int, origin: str) -> RawProblem:
    """Read one row. Raises `RowError`, with the original bytes, if a field is not usable."""
    row_id = _id_of(row, split, index)
    images = [image["bytes"] for image in row["images"] or [] if image and image["bytes"] is not None]
    record = {name: value for name, value in row.items() if name != "images" and _is_plain(value)}
    refuse = partial(RowError, row_id, originals=images, record=record)
    for column in ("problem", "answer"):
        if not isinstance(row[column], str):
            raise refuse("field_type", f"{column!r} is {row[column]!r:.60}", f"make it a text in {origin}")
    for number, image in enumerate(row["images"] or []):
        if not image or image["bytes"] is None:
            wrong = f"image {number} has no bytes but {image!r:.60}"
            raise refuse("no_image", wrong, f"put the picture itself into {origin}")
    problem = _without_placeholders(row["problem"])
    if PLACEHOLDER in problem:
        wrong = f"'problem' has {PLACEHOLDER} in the middle of the text ({row['problem']!r:.60})"
        raise refuse("placeholder", wrong, f"put every {PLACEHOLDER} first in {origin}")
    asked = row["problem"].count(PLACEHOLDER)
    if asked and images and asked != len(images):
        wrong = f"'problem' has {asked} {PLACEHOLDER} and the row {amount(len(images), 'image')}"
        raise refuse("placeholder", wrong, f"give as many {PLACEHOLDER} as images, or none, in {origin}")
    choices = row.get("choices")
    if choices is not None and not (isinstance(choices, list) and all(isinstance(item, str) for item in choices)):
        raise refuse("field_type", f"'choices' is {choices!r:.60}", f"make it a list of texts in {origin}")
    return RawProblem(
        id=row_id,
        split=split,
        source="geometry3k",
        origin=origin,
        images=tuple(images),
        problem=problem,
        answer=row["answer"],
        choices=None if choices is None else tuple(choices),
        value_answer=choices is not None and not _LETTER.fullmatch(row["answer"]),
    )


def _id_of(row: Mapping[str, Any], split: str, index: int) -> str:
    """The row's own id where the table has such a column, in our form; else its place in the table."""
    own = row.get("id")
    if isinstance(own, str) and "/" in own:
        return own
    return f"geometry3k/{split}/{index if own is None or own == '' else own}"


def _is_plain(value: Any) -> bool:
    """Whether it can go into a line of JSON as it is."""
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str | int | float | bool)


def _without_placeholders(problem: str) -> str:
    """The text without its leading placeholders; training puts the images there itself."""
    text = problem.strip()
    while text.startswith(PLACEHOLDER):
        text = text.removeprefix(PLACEHOLDER).lstrip()
    return text
