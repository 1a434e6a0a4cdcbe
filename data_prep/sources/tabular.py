"""Geometry3K as a table in the format of hiyouga/geometry3k: `images`, `problem` with a leading `<image>`, `answer`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa  # pyarrow ships no types
import pyarrow.parquet as pq  # pyarrow ships no types
from datasets import Dataset, Image, IterableDataset, List, load_dataset
from huggingface_hub.errors import HFValidationError

from adora_vl.errors import UserError, nearest
from data_prep.clean import RawProblem, RowError
from data_prep.storage import SPLITS

_PLACEHOLDER = "<image>"
_COLUMNS = ("images", "problem", "answer")


@dataclass(frozen=True)
class Table:
    """Splits under our names, images not decoded."""

    location: str
    sizes: dict[str, int]
    tables: Mapping[str, Dataset | IterableDataset]

    def problems(self, split: str) -> Iterator[Callable[[], RawProblem]]:
        """The rows in the order of the table."""
        for index, row in enumerate(self.tables[split]):
            yield partial(_read, row, split, index, f"row {index} of split {split} of {self.location}")


def from_hub(dataset_id: str) -> Table:
    """The dataset of this id on the hub, or from its local cache. Raises `UserError` where it cannot be had."""
    try:
        loaded = load_dataset(dataset_id)
    except (ConnectionError, FileNotFoundError, HFValidationError) as error:
        raise UserError(
            f"input: the dataset {dataset_id!r} cannot be loaded from the hub ({error}); "
            "check the id and the network, or give a downloaded copy with --source parquet"
        ) from error
    tables = {_split_name(str(split), dataset_id): table for split, table in loaded.items()}
    sizes = {split: len(tables[split]) for split in SPLITS if split in tables}
    return Table(dataset_id, sizes, _undecoded(tables, dataset_id))


def from_parquet(path: Path) -> Table:
    """A Parquet file, or a folder of them at any depth, named as on the hub: `train-00000-of-00001.parquet`.

    Streamed, so no second copy ends up in the cache of `datasets`. Raises `UserError`.
    """
    files = sorted(path.rglob("*.parquet"), key=lambda file: file.name) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise UserError(
            f"input: {str(path)!r} has no Parquet file; give a folder with files such as train-00000-of-00001.parquet"
        )
    by_split: dict[str, list[str]] = {}
    for file in files:
        by_split.setdefault(_split_name(file.stem.split("-")[0], str(path)), []).append(str(file))
    sizes = {split: sum(_rows_of(file) for file in by_split[split]) for split in SPLITS if split in by_split}
    tables = load_dataset("parquet", data_files=by_split, streaming=True)
    return Table(str(path), sizes, _undecoded(tables, str(path)))


def _split_name(name: str, location: str) -> str:
    split = "validation" if name == "val" else name
    if split not in SPLITS:
        raise UserError(f"input: {location!r} has a split {name!r}{nearest(name, SPLITS)}; known: {', '.join(SPLITS)}")
    return split


def _rows_of(file: str) -> int:
    try:
        return int(pq.read_metadata(file).num_rows)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"input: {file!r} is not a readable Parquet file ({error}); download it again") from error


def _undecoded(tables: Mapping[str, Any], location: str) -> dict[str, Dataset | IterableDataset]:
    """The tables with images as bytes: decoding is the cleaning's work, where a failure has a row id."""
    for split, table in tables.items():
        for column in _COLUMNS:
            if column not in table.column_names:
                present = table.column_names
                raise UserError(
                    f"input: split {split!r} of {location!r} lacks the column {column!r}{nearest(column, present)}; "
                    f"it has {', '.join(present)}, and {', '.join(_COLUMNS)} are needed"
                )
        images = table.features["images"]
        item = getattr(images, "feature", None)
        if not isinstance(item, Image) and not (isinstance(item, dict) and "bytes" in item):
            raise UserError(
                f"input: the column 'images' of split {split!r} of {location!r} is {images!r:.80}; "
                "it has to be a list of images"
            )
    return {split: table.cast_column("images", List(Image(decode=False))) for split, table in tables.items()}


def _read(row: Mapping[str, Any], split: str, index: int, origin: str) -> RawProblem:
    row_id = f"geometry3k/{split}/{index}"
    for column in ("problem", "answer"):
        if not isinstance(row[column], str):
            raise RowError(row_id, f"{column!r} is {row[column]!r:.60}", f"make it a text in {origin}")
    images = []
    for number, image in enumerate(row["images"] or []):
        if not image or image["bytes"] is None:
            raise RowError(
                row_id, f"image {number} has no bytes but {image!r:.60}", f"put the picture itself into {origin}"
            )
        images.append(image["bytes"])
    return RawProblem(
        id=row_id,
        split=split,
        source="geometry3k",
        origin=origin,
        images=tuple(images),
        problem=_without_placeholder(row["problem"], row_id, origin),
        answer=row["answer"],
    )


def _without_placeholder(problem: str, row_id: str, origin: str) -> str:
    """The text without its leading placeholders; training puts the images there itself."""
    text = problem.strip()
    while text.startswith(_PLACEHOLDER):
        text = text.removeprefix(_PLACEHOLDER).lstrip()
    if _PLACEHOLDER in text:
        wrong = f"'problem' has {_PLACEHOLDER} in the middle of the text ({problem!r:.60})"
        raise RowError(row_id, wrong, f"put every {_PLACEHOLDER} first in {origin}")
    return text
