"""A prepared dataset on disk: `data/{split}-*.parquet` with the images inside, and `manifest.json`."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa  # pyarrow ships no types
import pyarrow.parquet as pq  # pyarrow ships no types
from datasets import Dataset, Features, Value, config, disable_progress_bars, load_dataset
from datasets.exceptions import DatasetGenerationError
from PIL import Image

from adora_vl.errors import UserError, in_one_line
from data_prep.images import png_bytes
from data_prep.schema import FEATURES, REQUIRED_COLUMNS, Row

Manifest = dict[str, Any]

SPLITS = ("train", "validation", "test")  # in the order in which people see them
MANIFEST_NAME = "manifest.json"
MADE_BY = "data_prep"  # how a folder of ours is told from a stranger's
_BATCH_ROWS = 64  # in memory at a time, and a row group of the file
_PACKAGES = ("datasets", "numpy", "pillow", "pyarrow", "transformers")  # what the bytes of the output depend on


def write_split(rows: Iterable[Row], folder: Path, split: str, features: Features = FEATURES) -> int:
    """Write one split into `folder` (a folder still being made), a batch at a time. Returns the number of rows.

    An image is a Pillow image, stored as PNG, or already `{"bytes": ..., "path": ...}`. `features`: the schema, with
    columns of the user's own behind it.
    """
    (folder / "data").mkdir(parents=True, exist_ok=True)
    schema = features.arrow_schema
    stored = (_stored(row, features) for row in rows)
    count = 0
    path = folder / "data" / f"{split}-00000-of-00001.parquet"
    # Statistics would keep the least and the greatest picture of every row group in memory and in the file.
    with pq.ParquetWriter(path, schema, write_statistics=False) as writer:
        while batch := list(islice(stored, _BATCH_ROWS)):
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))
            count += len(batch)
    if not count:
        path.unlink()  # a split without rows is no split
    return count


def _stored(row: Row, features: Features) -> Row:
    assert row.keys() == features.keys(), f"columns {sorted(row)} are not those of the schema"
    assert row["meta"].keys() == features["meta"].keys(), f"meta {sorted(row['meta'])} is not that of the schema"
    images = [
        {"bytes": png_bytes(image), "path": None} if isinstance(image, Image.Image) else image
        for image in row["images"]
    ]
    return {**row, "images": images}


def write_manifest(
    folder: Path,
    description: Mapping[str, Any],
    counts: Mapping[str, int],
    quarantined: Mapping[str, Any] | None = None,
    leaks: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write, and return, what `folder` holds, when all else is in it. Nothing in it depends on the time or the machine.

    `description`: source, input, revision and arguments.
    """
    manifest = {
        **description,
        "made_by": MADE_BY,
        "counts": dict(counts),
        "quarantined": quarantined or {"rows": 0, "reasons": {}},
        "leaks": leaks or {"found": 0, "dropped": 0, "rows": []},
        "files": file_hashes(folder),
        "versions": {package: version(package) for package in _PACKAGES},
    }
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return manifest


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder that we prepared; None where there is no manifest or it is not one of ours."""
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("made_by") == MADE_BY else None


def file_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 in hexadecimal of every file below `folder` but the manifest, by its path inside `folder`."""
    hashes = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != MANIFEST_NAME:
            with path.open("rb") as stream:
                hashes[name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashes


def split_files(folder: Path) -> dict[str, list[Path]]:
    """The Parquet files of each split of a prepared folder. Raises `UserError` where there is no such folder."""
    if not folder.is_dir():
        raise UserError(f"dataset: no folder {str(folder)!r}; make one with `python -m data_prep`")
    files: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("data/*.parquet")):
        files.setdefault(path.name.split("-")[0], []).append(path)
    return {split: files[split] for split in (*SPLITS, *files) if split in files}


def stored_rows(folder: Path, split: str) -> Iterator[Row]:
    """The rows of a split with images as they are stored, `{"bytes": ..., "path": ...}`, a batch in memory at a time.

    Raises `UserError` as `load_split` does, without a copy in the cache of `datasets`.
    """
    for path in _files_of(folder, split):
        with _parquet(path) as file:
            _require_columns(file.schema_arrow, folder, split)
            try:
                for batch in file.iter_batches(_BATCH_ROWS):
                    yield from batch.to_pylist()
            except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                raise UserError(f"dataset: {str(path)!r} cannot be read ({error}); prepare it again") from error


def row_count(folder: Path, split: str) -> int:
    """Rows of a split, from the ends of its files."""
    return sum(int(_parquet(path).metadata.num_rows) for path in _files_of(folder, split))


def features_of(folder: Path, split: str) -> Features:
    """The schema of a split: ours, and behind it the columns of the user's own (`data_prep convert`)."""
    with _parquet(_files_of(folder, split)[0]) as file:
        own = [name for name in file.schema_arrow.names if name not in FEATURES]
    return Features({**FEATURES, **{name: Value("string") for name in own}})


def load_split(folder: str | Path, split: str) -> Dataset:
    """One split of a prepared folder, images decoded on access.

    Raises `UserError` where the folder, the split, its rows or a required column are missing, a file is damaged, or the
    disk is full.
    """
    folder = Path(folder)
    files = _files_of(folder, split)
    rows = 0
    for path in files:
        with _parquet(path) as file:
            _require_columns(file.schema_arrow, folder, split)
            rows += file.metadata.num_rows
    if not rows:
        raise UserError(
            f"dataset: {str(folder)!r} has no rows in the split {split!r}; prepare it again, or name another"
        )
    if not sys.stderr.isatty():
        disable_progress_bars()  # a log is no place for one, and an error is one line
    try:
        return load_dataset("parquet", data_files={split: [str(path) for path in files]}, split=split)
    except (OSError, DatasetGenerationError) as error:
        cause = error.__cause__ or error
        reason = in_one_line(cause)
        if getattr(cause, "errno", None) is None:  # not of the disk: Arrow, of what is in the file
            raise UserError(f"dataset: {str(folder)!r} cannot be read ({reason}); prepare it again") from error
        raise UserError(
            f"dataset: {str(folder)!r} cannot be put into the cache of `datasets`, {str(config.HF_DATASETS_CACHE)!r} "
            f"({reason}); make room there, or name another place with HF_DATASETS_CACHE"
        ) from error


def _parquet(path: Path) -> Any:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"dataset: {str(path)!r} is not a Parquet file ({error}); prepare the dataset again") from error


def _files_of(folder: Path, split: str) -> list[Path]:
    files = split_files(folder)
    if split not in files:
        raise UserError(
            f"dataset: {str(folder)!r} has no split {split!r} (expected data/{split}-*.parquet); "
            f"it has {', '.join(files) or 'none'}"
        )
    return files[split]


def _require_columns(schema: pa.Schema, folder: Path, split: str) -> None:
    present = schema.names
    missing = [column for column in REQUIRED_COLUMNS if column not in present]
    if missing:
        raise UserError(
            f"dataset: {str(folder)!r} split {split!r} lacks the column {missing[0]!r}; "
            f"it has {', '.join(present)}; prepare it with `python -m data_prep`"
        )
    images = schema.field("images").type
    if not pa.types.is_list(images) and not pa.types.is_large_list(images):
        raise UserError(
            f"dataset: the column 'images' of {str(folder)!r} split {split!r} is {str(images)!r:.80}, not a list of "
            "images; prepare it with `python -m data_prep`"
        )


def require(name: str, value: int, low: int, high: int | None = None) -> None:
    """Raise `UserError` unless the argument `name` is within its limits."""
    if value < low or (high is not None and value > high):
        raise UserError(f"{name}: {value} is not {f'at least {low}' if high is None else f'between {low} and {high}'}")
