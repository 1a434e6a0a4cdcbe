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
from adora_vl.conversion.pictures import named_files
from adora_vl.conversion.pipeline import Cleaning, SplitRows, prepare, recorded_options
from adora_vl.conversion.records import pictures_beside, question_in
from adora_vl.conversion.tables import DrawnTests, Opened, TablePart, open_local
from adora_vl.data.dataset import Manifest, read_manifest
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import replace_file
from adora_vl.utils.hashing import content_hash

_NAME = re.compile(r"[\w.-]{1,80}")


@dataclass(frozen=True)
class Conversion(Cleaning):
    """The options that decide which rows there are; `limit` takes the first rows of a split."""

    name: str | None = None  # the data set's name, with which the ids of rows begin
    test_share: float = 0.0  # the share of train that becomes the split test, drawn by `seed`
    seed: int = 0
    subset: str | None = None  # the configuration of a data set of the hub
    splits: Mapping[str, str] = field(default_factory=dict)  # our splits to those of the hub
    split_name: str | None = None  # the split of a single table, in place of what its name says
    # Take off the instruction on how to answer that problems of other trainers end with.
    drop_instruction: bool = False


def convert(
    location: str,
    output: Path,
    columns: Columns,
    *,
    options: Conversion | None = None,
    revision: str | None = None,
    workers: int = 1,
    overwrite: bool = False,
) -> Manifest:
    """Convert the table, folder or hub id `location` into the prepared folder `output`.

    `revision` is the branch, tag or commit of a data set of the hub.

    Returns the manifest.

    Raises `UserError`, and then nothing was written but, where too many rows were refused,
    `OUTPUT.quarantine`.
    """
    conversion = options or Conversion()
    if conversion.name is not None and not _NAME.fullmatch(conversion.name):
        raise UserError(
            f"name: {conversion.name!r:.60} is not one word of letters, digits, _ . and -; choose "
            "another"
        )

    def begin() -> tuple[dict[str, Any], dict[str, SplitRows]]:
        """Open the data, and return its description and the reads of each split."""
        opened = open_source(location, columns=columns, revision=revision, options=conversion)
        name = conversion.name or _name_of(location)
        description: dict[str, Any] = {
            "source": f"own/{opened.kind}",
            "input": location,
            "revision": opened.revision,
        }
        description["arguments"] = {
            **recorded_options(asdict(conversion)),
            "name": name,
            "splits": dict(conversion.splits),
            "columns": columns.described(),
        }
        tests = None
        if conversion.test_share:
            tests = DrawnTests(conversion.test_share, conversion.seed, columns)
        rows = partial(
            tables.row_readers,
            opened,
            name=name,
            columns=columns,
            tests=tests,
            limit=conversion.limit,
            drop_instruction=conversion.drop_instruction,
        )
        # How many rows become tests is known only when all of them were read.
        totals = {} if conversion.test_share else opened.totals
        splits = tables.output_splits(opened, conversion.test_share)
        return description, {
            split: SplitRows(partial(rows, split), totals.get(split)) for split in splits
        }

    return prepare(
        output, conversion, begin, columns.features, workers=workers, overwrite=overwrite
    )


def open_source(
    location: str, columns: Columns, revision: str | None, options: Conversion
) -> Opened:
    """Open the data set at a path, or else that of the hub with this id.

    Raises `UserError` as `open_local` and `open_hub`, and for options that belong to the other of
    the two.
    """
    path = Path(location)
    is_hub = (
        not path.exists()
        and tables.HUB_ID.fullmatch(location) is not None
        and not path.parent.is_dir()
    )
    if not is_hub:
        for key, value in (
            ("revision", revision),
            ("subset", options.subset),
            ("splits", options.splits),
        ):
            if value:
                raise UserError(
                    f"{key}: {value!r} is for a hub id, and {location!r} is none; leave --{key} out"
                )
        return tables.with_split_name(open_local(path, columns), options.split_name)
    if columns.image_dir:
        raise UserError(
            f"image_dir: {columns.image_dir!r} is for paths in a table; leave it out with a hub id"
        )
    if options.split_name:
        raise UserError(
            f"split_name: {options.split_name!r} is for a file; name a hub's splits with --splits"
        )
    name, _, at = location.partition("@")
    if revision and at:
        raise UserError(f"revision: {revision!r} and {location!r} name one each; give one of them")
    return open_hub(
        name,
        columns=columns,
        revision=revision or at or None,
        subset=options.subset,
        splits=options.splits,
    )


def ensure_converted(location: str, mapping: Mapping[str, Any], cache: Path) -> Path:
    """Return the prepared folder in `cache` of the data set that a config names with its columns.

    It is made where it is missing, and made again where a file that it was made from has changed.
    Several processes may call this at once; a lock lets one of them work.

    Raises `UserError` as `convert`.
    """
    columns = columns_from(mapping, "adora_columns")
    path = Path(location)
    where = str(path.resolve()) if path.exists() else location
    key = hashlib.sha256(
        json.dumps([where, columns.described()], sort_keys=True).encode()
    ).hexdigest()[:16]
    folder = cache / f"own-{key}"
    hashes_file = cache / f"own-{key}.files.json"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f".own-{key}.lock"):
        try:
            manifest = read_manifest(folder)
            if manifest is None or not _unchanged(
                manifest, hashes_file=hashes_file, location=location, columns=columns
            ):
                # The files are hashed before they are read, so that a change during the reading is
                # seen the next time.
                hashes = _hashes(source_files(location, columns))
                convert(location, folder, columns, overwrite=True)
                replace_file(hashes_file, json.dumps(hashes))
        except UserError as error:
            raise UserError(
                f"dataset_name: {location!r} with adora_columns: {error}; `python -m data_prep "
                "convert` has options for such data, and makes a folder to name here"
            ) from error
    return folder


def _unchanged(manifest: Manifest, hashes_file: Path, location: str, columns: Columns) -> bool:
    """Return whether a folder was prepared from the present files, or the hub's commit.

    Without a network nobody knows, and the folder is used as it is, so that a run can go on.
    """
    if not Path(location).exists():
        name, _, revision = location.partition("@")
        try:
            return bool(commit_of(name, revision or None) == manifest["revision"])
        except Exception:  # errors of the hub's library, of the network and of the file system
            return True
    try:
        hashes = json.loads(hashes_file.read_text(encoding="utf-8"))
        tables = [str(part.file) for part in _parts(location, columns)]
        return bool(set(tables) <= hashes.keys() and _hashes(hashes) == hashes)
    except (OSError, ValueError, AttributeError):
        return False


def _parts(location: str, columns: Columns) -> list[TablePart]:
    """Return the tables of all splits of the data set at a path."""
    return [part for parts in open_local(Path(location), columns).parts.values() for part in parts]


def source_files(location: str, columns: Columns) -> list[str]:
    """Return the paths of a data set's tables and of the pictures that they name.

    There are none for a data set of the hub.
    """
    if not Path(location).exists():
        return []
    paths: list[str] = []
    for part in _parts(location, columns):
        paths.append(str(part.file))
        for _, record in part.begin():
            if isinstance(record, Mapping):
                pictures = pictures_beside(record, columns, texts_only=part.texts_only)
                pictures += question_in(record, columns)[1]
                for picture in pictures:
                    paths += [str(path) for path in named_files(picture, part.files)]
    return list(dict.fromkeys(paths))


def _hashes(paths: Iterable[str]) -> dict[str, str]:
    """Return the `content_hash` of each file by its path; an empty text for one that is gone."""
    hashes = dict.fromkeys(paths, "")
    for path in hashes:
        with suppress(OSError):
            hashes[path] = content_hash([Path(path)])
    return hashes


def _name_of(location: str) -> str:
    """Return the name of a file, a folder or a data set of the hub, in letters that an id may have."""
    last = Path(location.partition("@")[0] if not Path(location).exists() else location).resolve()
    stem = last.stem if last.suffix else last.name
    return re.sub(r"[^\w.-]+", "-", stem)[:80].strip("-") or "own"
