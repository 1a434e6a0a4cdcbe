"""Turns a user's data set into a prepared folder.

`python -m data_prep convert` does so by command, and the key `adora_columns` of a config at the
start of a training.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock

from adora_vl.conversion import tables
from adora_vl.conversion.columns import Columns, columns_from
from adora_vl.conversion.hub import commit_of, open_hub
from adora_vl.conversion.pictures import files_named_in_cell
from adora_vl.conversion.pipeline import CleaningOptions, OpenedSource, SplitRows, prepare
from adora_vl.conversion.records import pictures_in_columns, question_and_pictures
from adora_vl.conversion.tables import DrawnTestSplit, OpenedDataset, SplitTable, open_local
from adora_vl.data.dataset import Manifest, read_manifest
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import naming_write_errors, replace_file
from adora_vl.utils.hashing import content_hash

_DATA_SET_NAME_PATTERN = re.compile(r"[\w.-]{1,80}")


@dataclass(frozen=True)
class ConversionOptions(CleaningOptions):
    """The options of a conversion that decide which rows there are."""

    name: str | None = None  # of the data set; the ids of its rows begin with it
    test_share: float = 0.0  # the share of train that becomes the split test, drawn by `seed`
    seed: int = 0
    subset: str | None = None  # the configuration of a data set of the hub
    # The splits of the hub that are read, by their names here: {"train": "all"}.
    splits: Mapping[str, str] = field(default_factory=dict)
    split_name: str | None = None  # of a single table; else the name of the file says the split
    # Take off the instruction on how to answer that problems of other trainers end with.
    drop_instruction: bool = False


def convert(
    location: str,
    output: Path,
    columns: Columns,
    *,
    options: ConversionOptions | None = None,
    revision: str | None = None,
    workers: int = 1,
    overwrite: bool = False,
) -> Manifest:
    """Turn a user's data set into one that a training can read, and return its manifest.

    Args:
        location: the path of a table or folder, or the id of a data set of the hub.
        output: the folder that is written.
        columns: which columns have the problem, the answer and the pictures.
        options: which rows there are, and how they are cleaned.
        revision: the branch, tag or commit of a data set of the hub.
        workers: how many processes clean rows.
        overwrite: whether an older data set in `output` is replaced.

    Raises:
        UserError: a wrong argument, or data that cannot be used. Nothing was written then, except
            the folder `OUTPUT.quarantine` with the unusable rows where these are too many.
    """
    conversion = options or ConversionOptions()
    if conversion.name is not None and not _DATA_SET_NAME_PATTERN.fullmatch(conversion.name):
        raise UserError(
            f"name: {conversion.name!r:.60} is not one word of letters, digits, _ . and -; choose "
            "another"
        )

    open_converted = partial(
        _open_converted, location, columns=columns, revision=revision, conversion=conversion
    )
    return prepare(
        output,
        conversion,
        open_source=open_converted,
        features=columns.features,
        workers=workers,
        overwrite=overwrite,
    )


def _open_converted(
    location: str, columns: Columns, revision: str | None, conversion: ConversionOptions
) -> OpenedSource:
    """Return the splits of the data set at a path or on the hub, before a row is read.

    What the manifest says of the conversion is returned with them.

    Args:
        location: the path, or the id on the hub.
        columns: which columns have the problem, the answer and the pictures.
        revision: the branch, tag or commit of a data set of the hub.
        conversion: the other options.

    Raises:
        UserError: as `open_source`.
    """
    opened = open_source(location, columns=columns, revision=revision, options=conversion)
    name = conversion.name or _dataset_name(location)
    description = {
        "source": f"own/{opened.format}",
        "input": location,
        "revision": opened.revision,
        "arguments": {
            **asdict(conversion),
            "name": name,
            "splits": dict(conversion.splits),
            "columns": columns.to_mapping(),
        },
    }
    drawn_test_split = None
    row_counts = opened.row_counts
    if conversion.test_share:
        drawn_test_split = DrawnTestSplit(
            share=conversion.test_share, seed=conversion.seed, columns=columns
        )
        row_counts = {}  # how many rows become tests is known only when all of them were read
    begin_reading = partial(
        tables.row_readers,
        opened,
        name=name,
        columns=columns,
        drawn_test_split=drawn_test_split,
        limit=conversion.limit,
        drop_instruction=conversion.drop_instruction,
    )
    splits = {}
    for split in tables.output_splits(opened, conversion.test_share):
        splits[split] = SplitRows(
            begin_reading=partial(begin_reading, split), row_count=row_counts.get(split)
        )
    return OpenedSource(description, splits)


def open_source(
    location: str, columns: Columns, revision: str | None, options: ConversionOptions
) -> OpenedDataset:
    """Open the data set at a path or on the hub, without reading a row.

    Args:
        location: the path of a table or folder, or the id of a data set of the hub.
        columns: the columns that are read.
        revision: the branch, tag or commit of a data set of the hub.
        options: has further options for files, and others for the hub.

    Raises:
        UserError: the data set cannot be opened, a hub id has options for files, or a path has
            options for the hub.
    """
    path = Path(location)
    # `data/geo` may be a hub id. It is a mistyped path where there is a folder `data`.
    is_hub = (
        not path.exists()
        and tables.HUB_ID_PATTERN.fullmatch(location) is not None
        and not path.parent.is_dir()
    )
    if not is_hub:
        options_of_hub = {
            "revision": revision,
            "subset": options.subset,
            "splits": options.splits,
        }
        for key, value in options_of_hub.items():
            if value:
                raise UserError(
                    f"{key}: {value!r} is for a hub id, and {location!r} is none; leave --{key} out"
                )
        return tables.rename_split(open_local(path, columns), options.split_name)
    if columns.image_dir:
        raise UserError(
            f"image_dir: {columns.image_dir!r} is for paths in a table; leave it out with a hub id"
        )
    if options.split_name:
        raise UserError(
            f"split_name: {options.split_name!r} is for a file; name a hub's splits with --splits"
        )
    # `NAME@REVISION` is an id with its branch, tag or commit.
    name, _, revision_in_id = location.partition("@")
    if revision and revision_in_id:
        raise UserError(f"revision: {revision!r} and {location!r} name one each; give one of them")
    return open_hub(
        name,
        columns=columns,
        revision=revision or revision_in_id or None,
        subset=options.subset,
        splits=options.splits,
    )


def ensure_converted(location: str, mapping: Mapping[str, Any], cache: Path) -> Path:
    """Return the folder of the converted data set that a config names; convert it where needed.

    The folder is in `cache`. The data set is converted again where one of its files has changed
    since. Several processes may call this at once: a lock lets only one of them convert.

    Args:
        location: the key `dataset_name` of the config, a path or a hub id.
        mapping: the key `adora_columns`, such as {"problem": "question", "answer": "label"}.
        cache: a folder with all converted data sets.

    Raises:
        UserError: as `convert`.
    """
    columns = columns_from(mapping, "adora_columns")
    path = Path(location)
    resolved_location = str(path.resolve()) if path.exists() else location
    # The same data with other columns gets another folder.
    identity = json.dumps([resolved_location, columns.to_mapping()], sort_keys=True)
    identity_hash = hashlib.sha256(identity.encode()).hexdigest()[:16]
    folder = cache / f"own-{identity_hash}"
    hashes_file = cache / f"own-{identity_hash}.files.json"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f".own-{identity_hash}.lock"):
        try:
            manifest = read_manifest(folder)
            is_current = manifest is not None and _is_unchanged(
                manifest, hashes_file=hashes_file, location=location, columns=columns
            )
            if not is_current:
                # The files are hashed before they are read. A file that changes while it is read
                # is then converted again the next time.
                hashes = _file_hashes(source_files(location, columns))
                convert(location, folder, columns, overwrite=True)
                with naming_write_errors("output", hashes_file):
                    replace_file(hashes_file, json.dumps(hashes))
        except UserError as error:
            raise UserError(
                f"dataset_name: {location!r} with adora_columns: {error}; `python -m data_prep "
                "convert` has options for such data, and makes a folder to name here"
            ) from error
    return folder


def _is_unchanged(manifest: Manifest, hashes_file: Path, location: str, columns: Columns) -> bool:
    """Return whether the data set at `location` is as it was when it was converted.

    Without a network a data set of the hub counts as unchanged, so that a run can start.

    Args:
        manifest: that of the converted folder. It names the commit of a data set of the hub.
        hashes_file: a JSON file with the hash of each file by its path, for data that is no hub id.
        location: the path or hub id of the data set.
        columns: the columns that are read of it.
    """
    if not Path(location).exists():
        name, _, revision = location.partition("@")
        try:
            return bool(commit_of(name, revision or None) == manifest["revision"])
        except Exception:  # errors of the hub's library, of the network and of the file system
            return True
    try:
        hashes = json.loads(hashes_file.read_text(encoding="utf-8"))
        table_paths = {str(table.file) for table in _all_tables(location, columns)}
        has_no_new_table = table_paths <= hashes.keys()
        return bool(has_no_new_table and _file_hashes(hashes) == hashes)
    except (OSError, ValueError, AttributeError):
        return False


def _all_tables(location: str, columns: Columns) -> list[SplitTable]:
    """Return the tables of all splits in the file or folder at a path."""
    opened = open_local(Path(location), columns)
    return [table for tables in opened.tables_by_split.values() for table in tables]


def source_files(location: str, columns: Columns) -> list[str]:
    """Return the paths of all files that a data set is made from: its tables and their pictures.

    The list is empty for a data set of the hub, whose commit stands for its files.
    """
    if not Path(location).exists():
        return []
    paths: list[str] = []
    for table in _all_tables(location, columns):
        paths.append(str(table.file))
        for _, record in table.read_records():
            if not isinstance(record, Mapping):  # a line that cannot be read as a record
                continue
            pictures = pictures_in_columns(record, columns, texts_only=table.texts_only)
            pictures += question_and_pictures(record, columns).pictures
            for picture in pictures:
                paths += [str(path) for path in files_named_in_cell(picture, table.image_source)]
    return list(dict.fromkeys(paths))  # each path once


def _file_hashes(paths: Iterable[str]) -> dict[str, str]:
    """Return the `content_hash` of each file by its path; an empty text for one that is gone."""
    hashes = dict.fromkeys(paths, "")
    for path in hashes:
        with suppress(OSError):
            hashes[path] = content_hash([Path(path)])
    return hashes


def _dataset_name(location: str) -> str:
    """Return the name of a data set, with which row ids begin: `geo` for the file `data/geo.csv`.

    It is made from the name of the file or folder, or from the hub id. Characters that a row id
    must not have become hyphens.
    """
    path = Path(location)
    if not path.exists():
        path = Path(location.partition("@")[0])  # a hub id, without its revision
    path = path.resolve()
    stem = path.stem if path.suffix else path.name
    return re.sub(r"[^\w.-]+", "-", stem)[:80].strip("-") or "own"
