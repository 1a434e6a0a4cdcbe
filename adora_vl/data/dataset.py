"""A prepared data set on disk: Parquet files that contain the images, and a manifest of origins."""

from __future__ import annotations

import glob
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image

from adora_vl.data.images import png_bytes
from adora_vl.utils.errors import UserError, describe_error
from adora_vl.utils.files import read_json_object, refuse_dangling
from adora_vl.utils.hashing import content_hash, file_sha256

if TYPE_CHECKING:  # importing it takes seconds, for which the help of a command need not wait
    from datasets import Dataset, Features

REQUIRED_COLUMNS = ("id", "images", "problem", "answer")
# Our columns and the type of each, for `schema`, which makes the schema of `datasets` of them.
TYPE_BY_COLUMN = {
    "id": "text",  # unique and stable, e.g. geometry3k/train/15
    "images": "images",  # RGB, upright
    # an <image> for each image, where each stands; or none, and they stand before it
    "problem": "text",
    "answer": "text",  # the reference answer in canonical form
    "answer_raw": "text",  # as the source has it
    "choices": "texts",  # null where the problem is open
    "split": "text",
    "source": "text",
    "meta": "meta",
}
TYPE_BY_META_FIELD = {
    "goal": "text",
    "shapes": "texts",
    "family": "text",  # synthetic problems only, else empty
    "kind": "text",  # which case of its family, where there are several (synthetic problems only)
    "solution": "text",  # a worked answer where the source has one, else empty
    # a typical wrong answer to the same problem (synthetic problems only), else empty
    "slip": "text",
}
Row = dict[str, Any]
Manifest = dict[str, Any]
SPLITS = ("train", "validation", "test")  # in the order in which people see them
MANIFEST_NAME = "manifest.json"
PREPARED_BY = "data_prep"  # in a manifest: this package wrote the folder
# On the hub a hash may stand behind the number.
_FILE_NUMBER_PATTERN = re.compile(r"-\d+-of-(?P<total>\d+)(?:-[0-9a-f]+)?\.parquet$")
_BATCH_ROWS = 64  # in memory at a time
# Most rows of a row group. Groups are not made smaller than they have to be, since the writer keeps
# something of each group in memory until its end.
_MAX_GROUP_ROWS = 4096
_MAX_GROUP_IMAGE_BYTES = 2**24
# what the bytes of the output depend on
_VERSIONED_PACKAGES = (
    "datasets",
    "numpy",
    "pillow",
    "pyarrow",
    "transformers",
)


@cache
def schema() -> Features:
    """Return our columns as `Features`, the schema that `datasets` and Parquet use."""
    from datasets import Features, Image, List, Value

    feature_by_type: dict[str, Any] = {
        "text": Value("string"),
        "texts": List(Value("string")),
        "images": List(Image()),
        "meta": {},
    }
    feature_by_type["meta"] = {
        name: feature_by_type[type_name] for name, type_name in TYPE_BY_META_FIELD.items()
    }
    return Features(
        {name: feature_by_type[type_name] for name, type_name in TYPE_BY_COLUMN.items()}
    )


def write_split(
    rows: Iterable[Row], folder: Path, split: str, features: Features | None = None
) -> int:
    """Write one split of a prepared folder, a batch at a time, and return its number of rows.

    Args:
        rows: the rows. Their images are Pillow images, which are stored as PNG, bytes, or structs
            `{"bytes": ..., "path": ...}`.
        folder: the prepared folder.
        split: the name of the split.
        features: the schema, our columns and then the user's; None for ours alone.
    """
    features = features or schema()
    (folder / "data").mkdir(parents=True, exist_ok=True)
    arrow_schema = features.arrow_schema
    rows_to_store = (_row_to_store(row, features) for row in rows)
    count = 0
    path = folder / "data" / f"{split}-00000-of-00001.parquet"
    # Statistics would keep the least and the greatest picture of every row group in memory and in
    # the file.
    with pq.ParquetWriter(path, arrow_schema, write_statistics=False) as writer:
        while batch := list(_next_row_group(rows_to_store)):
            writer.write_table(pa.Table.from_pylist(batch, schema=arrow_schema))
            count += len(batch)
    if not count:
        path.unlink()  # a split without rows is no split
    return count


def _next_row_group(rows: Iterator[Row]) -> Iterator[Row]:
    """Yield the rows of the next row group, and leave the others in `rows`.

    A row group of Parquet is limited in rows and in bytes of images.
    """
    remaining_bytes = _MAX_GROUP_IMAGE_BYTES
    for row in islice(rows, _MAX_GROUP_ROWS):
        yield row
        remaining_bytes -= sum(len(image["bytes"] or b"") for image in row["images"])
        if remaining_bytes <= 0:
            return


def _row_to_store(row: Row, features: Features) -> Row:
    """Return a row with its images as they are stored.

    The columns of the row, and the keys in its column `meta`, have to be those of `features`.
    """
    assert row.keys() == features.keys(), f"columns {sorted(row)} are not those of the schema"
    assert row["meta"].keys() == features["meta"].keys(), (
        f"meta {sorted(row['meta'])} is not that of the schema"
    )
    return {**row, "images": [_image_to_store(image) for image in row["images"]]}


def _image_to_store(image: object) -> Any:
    """Return an image as `{"bytes": ..., "path": ...}`, the form in which it is stored.

    A Pillow image is encoded as PNG, and bytes are stored as they are. Any other image is such a
    struct already.
    """
    if isinstance(image, Image.Image):
        image = png_bytes(image)
    if isinstance(image, bytes):
        return {"bytes": image, "path": None}
    return image


def write_manifest(
    folder: Path,
    description: Mapping[str, Any],
    counts: Mapping[str, int],
    quarantined: Mapping[str, Any] | None = None,
    leaks: Mapping[str, Any] | None = None,
    warnings: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write and return the manifest of a prepared folder, whose other files are complete.

    It names no time and no machine, so that the same command writes the same manifest.

    Args:
        folder: the prepared folder.
        description: source, input, revision and arguments of the command.
        counts: how many rows each split has.
        quarantined: how many rows were left out, by reason: {"rows": 1, "reasons": {"gold": 1}}.
            None for none.
        leaks: the rows whose picture is in another split too; None for none.
        warnings: what a user should know of rows that were kept, with a count and an example:
            {"percent": {"rows": 2, "example": "geo/train/17"}}. None for nothing.
    """
    manifest = {
        **description,
        "made_by": PREPARED_BY,
        "counts": dict(counts),
        "quarantined": quarantined or {"rows": 0, "reasons": {}},
        "leaks": leaks or {"found": 0, "dropped": 0, "rows": []},
        **({"warnings": dict(warnings)} if warnings else {}),
        "files": file_hashes(folder),
        "versions": {package: version(package) for package in _VERSIONED_PACKAGES},
    }
    (folder / MANIFEST_NAME).write_text(
        json.dumps(manifest, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
    return manifest


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a folder; None unless `data_prep` of this package has written it."""
    manifest = read_json_object(folder / MANIFEST_NAME)
    return manifest if manifest.get("made_by") == PREPARED_BY else None


VARIANTS_SOURCE = "variants"  # the source of rows with other numbers than their originals


def refuse_test_variants(dataset: object, where: str, folder: Path | None = None) -> None:
    """Raise `UserError` where rows of a training are variants of a test split.

    A variant is a problem with other numbers. Whoever trains on variants of the test trains on the
    test.

    Args:
        dataset: the rows, which may come from elsewhere. Their columns `source` and `split` tell
            whether they are such variants.
        where: names the rows in the error, such as `dataset: 'data/geo' split 'train'`.
        folder: the prepared folder, whose manifest tells it too; None without one.
    """
    manifest = read_manifest(folder) if folder is not None else None
    # A manifest that another program wrote may name no arguments.
    arguments = (manifest or {}).get("arguments") or {}
    is_for_evaluation = bool(arguments.get("for_evaluation"))
    columns = getattr(dataset, "column_names", None) or ()
    data = getattr(dataset, "data", None)
    if not is_for_evaluation and data is not None and {"source", "split"} <= set(columns):
        table = data.table
        is_variant = pc.equal(table["source"], VARIANTS_SOURCE)
        is_test = pc.equal(table["split"], "test")
        is_for_evaluation = bool(pc.any(pc.and_(is_variant, is_test)).as_py())
    if is_for_evaluation:
        raise UserError(
            f"{where} has variants of a test split, written with --for-evaluation; train on variants "
            "of the training split"
        )


def file_hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below `folder` but the manifest, by path inside `folder`."""
    hash_by_name = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != MANIFEST_NAME:
            hash_by_name[name] = file_sha256(path)
    return hash_by_name


def data_hash(folder: Path, split: str = "*") -> str:
    """Return a hash of the content of a prepared folder: its manifest and the files of a split.

    A folder without a manifest is hashed by its files alone. With `*` in place of the name of a
    split all splits are hashed.
    """
    return content_hash([*folder.glob(MANIFEST_NAME), *folder.glob(f"data/{split}-*.parquet")])


def split_files(folder: Path) -> dict[str, list[Path]]:
    """Return the Parquet files of each split of a prepared folder.

    Raises `UserError` where there is no such folder, or a split lacks some of its files.
    """
    if not folder.is_dir():
        refuse_dangling("dataset", folder)  # a link to nothing has an error message that says so
        raise UserError(f"dataset: no folder {str(folder)!r}; make one with `python -m data_prep`")
    files: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("data/*.parquet")):
        files.setdefault(path.name.split("-")[0], []).append(path)
    for split, paths in files.items():
        _require_all_files(folder, split, paths)
    # Our own splits come first, in their usual order.
    return {split: files[split] for split in (*SPLITS, *files) if split in files}


def _require_all_files(folder: Path, split: str, paths: Iterable[Path]) -> None:
    """Raise `UserError` unless a split has all its files, as their names count them.

    `paths` are the files that are there, such as `train-00000-of-00002.parquet`.
    """
    fault = describe_missing_files([path.relative_to(folder).as_posix() for path in paths])
    if fault is not None:
        raise UserError(f"dataset: {str(folder)!r} {fault}")


def describe_missing_files(names: Iterable[str]) -> str | None:
    """Return which of the files of a split are missing, in words, or None where all are there.

    `names` are those that are there: `train-00000-of-00002.parquet` is the first of two files. A
    download that broke off has only some of them, and nothing else would tell that rows are
    missing.
    """
    # By the part of the name before the number, and by how many files it counts: ("train", 2).
    names_by_file_set: dict[tuple[str, int], list[str]] = {}
    for name in names:
        match = _FILE_NUMBER_PATTERN.search(name)
        if match is not None:
            total = int(match["total"])
            names_by_file_set.setdefault((name[: match.start()], total), []).append(name)
    for (stem, total), names_in_set in sorted(names_by_file_set.items()):
        if len(names_in_set) > total:
            return (
                f"has {len(names_in_set)} files {stem}-*-of-{total:05}*.parquet, which are {total} "
                "by their names; remove those of an older download"
            )
        if len(names_in_set) < total:
            return (
                f"has {len(names_in_set)} of the {total} files {stem}-*-of-{total:05}.parquet; get "
                "the others, or rename these to use them alone"
            )
    return None


def stored_rows(folder: Path, split: str) -> Iterator[Row]:
    """Yield the rows of a split with images as they are stored, `{"bytes": ..., "path": ...}`.

    A batch is in memory at a time, and nothing is copied into the cache of `datasets`.

    Raises `UserError` for a split or column that is missing, or a file that is damaged.
    """
    for path in _files_of_split(folder, split):
        with _open_parquet(path) as file:
            _require_columns(file.schema_arrow, folder, split)
            for batch in file.iter_batches(_BATCH_ROWS):
                yield from batch.to_pylist()


def example_row(folder: Path, splits: Iterable[str]) -> Row | None:
    """Return a row to show: the first with choices, else the first; None without any row.

    Its images are as they are stored, and no image of another row is read.

    Raises `UserError` for a split that is missing, or a file that is damaged.
    """
    first_file = None
    for split in splits:
        for path in _files_of_split(folder, split):
            with _open_parquet(path) as file:
                if first_file is None and file.num_row_groups:
                    first_file = path
                position = _first_row_with_choices(file)
            if position is not None:
                return _row_at(path, position)
    if first_file is None:
        return None
    return _row_at(first_file, _RowPosition(row_group=0, row_index=0))


class _RowPosition(NamedTuple):
    """Where a row stands in a Parquet file, whose rows are in groups."""

    row_group: int
    row_index: int  # in the group


def _first_row_with_choices(file: pq.ParquetFile) -> _RowPosition | None:
    """Return the position of the first row with choices in a file; None where no row has any."""
    if "choices" not in file.schema_arrow.names:
        return None
    for row_group in range(file.num_row_groups):
        table = file.read_row_group(row_group, columns=["choices"])
        for index, choices in enumerate(table["choices"].to_pylist()):
            if choices:
                return _RowPosition(row_group, index)
    return None


def _row_at(path: Path, position: _RowPosition) -> Row:
    """Return the row of a file at a position."""
    with _open_parquet(path) as file:
        single_rows = file.iter_batches(batch_size=1, row_groups=[position.row_group])
        batch = next(islice(single_rows, position.row_index, None))
        return dict(batch.to_pylist()[0])


def row_count(folder: Path, split: str) -> int:
    """Return the number of rows of a split, from the footers of its files."""
    count = 0
    for path in _files_of_split(folder, split):
        with _open_parquet(path) as file:
            count += file.metadata.num_rows
    return count


def features_of_split(folder: Path, split: str) -> Features:
    """Return the schema of a split: our columns, then those of the user (`data_prep convert`)."""
    from datasets import Features, Value

    with _open_parquet(_files_of_split(folder, split)[0]) as file:
        user_columns = [name for name in file.schema_arrow.names if name not in TYPE_BY_COLUMN]
    return Features({**schema(), **{name: Value("string") for name in user_columns}})


def load_split(folder: str | Path, split: str) -> Dataset:
    """Return one split of a prepared folder, images decoded on access.

    Raises `UserError` where the folder, the split, its rows or a required column are missing, a
    file is damaged, or the disk is full.
    """
    from datasets import config, disable_progress_bars, load_dataset
    from datasets.exceptions import DatasetGenerationError

    folder = Path(folder)
    files = _files_of_split(folder, split)
    total_rows = 0
    for path in files:
        with _open_parquet(path) as file:
            _require_columns(file.schema_arrow, folder, split)
            total_rows += file.metadata.num_rows
    if not total_rows:
        raise UserError(
            f"dataset: {str(folder)!r} has no rows in the split {split!r}; prepare it again, or "
            "name one"
        )
    if not sys.stderr.isatty():
        disable_progress_bars()  # for a log
    try:
        # `datasets` identifies a file by its path and time only; the name is part of its cache key,
        # so changed contents are read again.
        config_name = f"content-{content_hash(files)}"
        dataset = load_dataset(
            "parquet", config_name, data_files={split: [*map(_literal_path, files)]}, split=split
        )
    except (OSError, DatasetGenerationError) as error:
        cause = error.__cause__ or error
        reason = describe_error(cause)
        # An error without a number is not the disk's, but Arrow's, about the content of a file.
        if getattr(cause, "errno", None) is None:
            raise UserError(
                f"dataset: {str(folder)!r} cannot be read ({reason}); prepare it again"
            ) from error
        raise UserError(
            f"dataset: {str(folder)!r} cannot be put into the cache of `datasets`, "
            f"{str(config.HF_DATASETS_CACHE)!r} ({reason}); make room there, or name another place "
            "with HF_DATASETS_CACHE"
        ) from error
    _require_pictures(dataset, folder, split)
    return dataset


def _literal_path(path: Path) -> str:
    """Return a path with `*`, `?` and `[` escaped, which `datasets` would read as a pattern."""
    return glob.escape(str(path))


@contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    """Open a Parquet file for a `with` block, whose errors in reading it become a `UserError`."""
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"dataset: {str(path)!r} cannot be read ({error}); prepare it again"
        ) from error


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """Return the Parquet files of a split. Raises `UserError` where there is no such split."""
    files = split_files(folder)
    expected = f"(expected data/{split}-*.parquet); it has {', '.join(files) or 'none'}"
    if split not in files:
        raise UserError(f"dataset: {str(folder)!r} has no split {split!r} {expected}")
    return files[split]


def _require_pictures(dataset: Dataset, folder: Path, split: str) -> None:
    """Raise `UserError` where the lists in the column `images` hold anything but pictures.

    A Parquet file of another program may have paths, or bytes that are not marked as pictures;
    these would not be decoded. Lists that are all empty may have any type.
    """
    from datasets import Image

    if isinstance(dataset.features["images"].feature, Image):
        return
    images = dataset.data.column("images")
    image_counts = pc.list_value_length(images)
    if pc.max(image_counts).as_py():
        raise _no_images_error(images.type, folder, split)


def _no_images_error(column_type: pa.DataType, folder: Path, split: str) -> UserError:
    """Return the error for a split whose column `images` has another type than lists of images."""
    return UserError(
        f"dataset: the column 'images' of {str(folder)!r} split {split!r} is "
        f"{str(column_type)!r:.80}, not a list of images; prepare it with `python -m data_prep`"
    )


def _require_columns(schema: pa.Schema, folder: Path, split: str) -> None:
    """Raise `UserError` where a split lacks a column, or its images are no lists."""
    for column in REQUIRED_COLUMNS:
        if column not in schema.names:
            raise UserError(
                f"dataset: {str(folder)!r} split {split!r} lacks the column {column!r}; it has "
                f"{', '.join(schema.names)}; prepare it with `python -m data_prep`"
            )
    images = schema.field("images").type
    if not (pa.types.is_list(images) or pa.types.is_large_list(images)):
        raise _no_images_error(images, folder, split)
