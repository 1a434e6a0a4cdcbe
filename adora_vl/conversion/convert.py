"""Turns a stranger's data set into a prepared folder: `python -m data_prep convert`, or
`adora_columns` in a config.
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
from adora_vl.conversion.pipeline import Cleaning, SplitReads, prepare, recorded
from adora_vl.conversion.records import pictures_beside, question_in
from adora_vl.conversion.tables import DrawnTests, Opened, TablePart, open_local
from adora_vl.data.dataset import Manifest, read_manifest
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import replace_file
from adora_vl.utils.hashing import content_hash

_NAME = re.compile(r"[\w.-]{1,80}")


@dataclass(frozen=True)
class Conversion(Cleaning):
    """The options that decide which rows there are: of the `limit` the first ones."""

    name: str | None = None  # with which the ids of rows begin
    test_share: float = 0.0  # of the rows of train that become the split test, drawn by `seed`
    seed: int = 0
    subset: str | None = None  # of the hub, as `splits`
    splits: Mapping[str, str] = field(default_factory=dict)
    split_name: str | None = None  # of a single table, in place of what its name says
    # take off what the problems of another trainer say on how to answer
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

    Returns the manifest.

    `revision`: of the hub. Raises `UserError`, and then nothing was written but, where too many
    rows were refused, `OUTPUT.quarantine`.
    """
    wanted = options or Conversion()
    if wanted.name is not None and not _NAME.fullmatch(wanted.name):
        raise UserError(
            f"name: {wanted.name!r:.60} is not one word of letters, digits, _ . and -; choose "
            "another"
        )

    def begin() -> tuple[dict[str, Any], dict[str, SplitReads]]:
        opened = open_own(location, columns=columns, revision=revision, options=wanted)
        name = wanted.name or _name_of(location)
        own = {"name": name, "splits": dict(wanted.splits), "columns": columns.described()}
        description: dict[str, Any] = {
            "source": f"own/{opened.kind}",
            "input": location,
            "revision": opened.revision,
        }
        description["arguments"] = {**recorded(asdict(wanted)), **own}
        drawn = DrawnTests(wanted.test_share, wanted.seed, columns) if wanted.test_share else None
        rows = partial(
            tables.reads, opened, name=name, columns=columns, tests=drawn, limit=wanted.limit
        )
        rows = partial(rows, drop_instruction=wanted.drop_instruction)
        totals = {} if wanted.test_share else opened.totals
        splits = tables.splits_of(opened, wanted.test_share)
        return description, {
            split: SplitReads(partial(rows, split), totals.get(split)) for split in splits
        }

    return prepare(output, wanted, begin, columns.features, workers=workers, overwrite=overwrite)


def open_own(location: str, columns: Columns, revision: str | None, options: Conversion) -> Opened:
    """The data set at a path, else of the hub. Raises `UserError`."""
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
        return tables.named_split(open_local(path, columns), options.split_name)
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
    """The prepared folder, in `cache`, of what a training config names with its columns: made where
    it is missing, and again where a file that it was made from has changed. Several processes may
    call this at once. Raises `UserError`.
    """
    columns = columns_from(mapping, "adora_columns")
    place = Path(location)
    where = str(place.resolve()) if place.exists() else location
    key = hashlib.sha256(
        json.dumps([where, columns.described()], sort_keys=True).encode()
    ).hexdigest()[:16]
    folder = cache / f"own-{key}"
    seen = cache / f"own-{key}.files.json"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f".own-{key}.lock"):
        try:
            manifest = read_manifest(folder)
            if manifest is None or not _unchanged(
                manifest, seen=seen, location=location, columns=columns
            ):
                # before it is read: what changes now is seen next time
                held = _held(source_files(location, columns))
                convert(location, folder, columns, overwrite=True)
                replace_file(seen, json.dumps(held))
        except UserError as error:
            raise UserError(
                f"dataset_name: {location!r} with adora_columns: {error}; `python -m data_prep "
                "convert` has options for such data, and makes a folder to name here"
            ) from error
    return folder


def _unchanged(manifest: Manifest, seen: Path, location: str, columns: Columns) -> bool:
    """Whether the files, or the hub's commit, are those of the folder; without a network it serves
    as it is.
    """
    if not Path(location).exists():
        name, _, revision = location.partition("@")
        try:
            return bool(commit_of(name, revision or None) == manifest["revision"])
        except Exception:  # the hub's library raises its own, the network's and the file system's
            return True
    try:
        before = json.loads(seen.read_text(encoding="utf-8"))
        tables = [str(part.file) for part in _parts(location, columns)]
        return bool(set(tables) <= before.keys() and _held(before) == before)
    except (OSError, ValueError, AttributeError):
        return False


def _parts(location: str, columns: Columns) -> list[TablePart]:
    return [part for parts in open_local(Path(location), columns).parts.values() for part in parts]


def source_files(location: str, columns: Columns) -> list[str]:
    """The tables of a data set and the pictures that they name; none for the hub's."""
    if not Path(location).exists():
        return []
    found: list[str] = []
    for part in _parts(location, columns):
        found.append(str(part.file))
        for _, record in part.begin():
            if isinstance(record, Mapping):
                held = (
                    pictures_beside(record, columns, texts_only=part.texts_only)
                    + question_in(record, columns)[1]
                )
                found += (str(path) for value in held for path in named_files(value, part.files))
    return list(dict.fromkeys(found))


def _held(paths: Iterable[str]) -> dict[str, str]:
    """The `content_hash` of each file; empty for one that is gone."""
    found = dict.fromkeys(paths, "")
    for path in found:
        with suppress(OSError):
            found[path] = content_hash([Path(path)])
    return found


def _name_of(location: str) -> str:
    """A file's or folder's name, or that of a hub's data set, with what an id should not have left
    out.
    """
    last = Path(location.partition("@")[0] if not Path(location).exists() else location).resolve()
    stem = last.stem if last.suffix else last.name
    return re.sub(r"[^\w.-]+", "-", stem)[:80].strip("-") or "own"
