"""Opens a data set of the hub at one commit.

It is streamed, so that only the rows that are read are downloaded and stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from adora_vl.conversion.columns import Columns, class_names, pick_columns, require_columns
from adora_vl.conversion.pictures import FileRoot
from adora_vl.conversion.records import Records
from adora_vl.conversion.tables import SPLIT_OF, Opened, TablePart, open_local
from adora_vl.utils.errors import UserError, did_you_mean, in_one_line
from adora_vl.utils.hub import why_no_hub

if TYPE_CHECKING:
    from datasets import IterableDataset


def open_hub(
    name: str, columns: Columns, revision: str | None, subset: str | None, splits: Mapping[str, str]
) -> Opened:
    """Open a data set of the hub as a stream, so that only the rows that are read are downloaded.

    Args:
        name: its id.
        columns: the columns to read.
        revision: a branch, tag or commit; None is the newest commit.
        subset: one of its configurations; None is the default one.
        splits: which splits to read. {"train": "all"} reads the data set's split `all` as our split
            `train`. If it is empty, the splits with a usual name are read.

    Raises:
        UserError: the data set cannot be loaded, or lacks a split or a column.
    """
    from datasets import load_dataset

    # Says why the hub cannot be reached, or is empty. It is checked first, since the library of the
    # hub would try for minutes.
    no_hub_reason = why_no_hub()
    try:
        commit = commit_of(name, revision)
        loaded = load_dataset(name, subset, revision=commit, streaming=True)
        chosen = _chosen_splits(name, list(loaded), splits)
        parts = {}
        row_counts = {}
        files = FileRoot(stored=f"hf://datasets/{name}@{commit}/", fetch=_fetch)
        for ours, theirs in chosen.items():  # our name of the split, and the name in the data set
            stream = loaded[theirs].decode(False)  # pictures stay encoded
            if stream.column_names is None:  # only the first rows say which columns there are
                stream = stream._resolve_features()
            require_columns(columns, stream.column_names, f"split {theirs!r} of {name!r}")
            selected = stream.select_columns(columns.to_read(stream.column_names))
            location = f"split {theirs} of {name}"
            begin = partial(_records, selected, columns, location)
            parts[ours] = [TablePart(location, begin, files)]
            split_info = (loaded[theirs].info.splits or {}).get(theirs)
            if split_info is not None and split_info.num_examples:
                row_counts[ours] = int(split_info.num_examples)
    except UserError:
        raise
    except Exception as error:  # errors of the hub's library, of the network, of the file system
        raise _unreachable(name, revision, no_hub_reason or in_one_line(error)) from error
    return Opened(kind="hub", parts=parts, revision=commit, row_counts=row_counts)


def download_parquet(name: str, columns: Columns, revision: str | None) -> Opened:
    """Download all Parquet files of a data set into the cache of `huggingface_hub`.

    Without a network the files in the cache are used.

    Raises `UserError` where the data set cannot be loaded, or has no such file.
    """
    from huggingface_hub import snapshot_download

    no_hub_reason = why_no_hub()
    try:
        snapshot = snapshot_download(
            name,
            revision=revision,
            repo_type="dataset",
            allow_patterns=["*.parquet"],
            max_workers=2,
        )
        folder = Path(snapshot)
    except Exception as error:  # errors of the hub's library, of the network, of the file system
        raise _unreachable(name, revision, no_hub_reason or in_one_line(error)) from error
    if next(folder.rglob("*.parquet"), None) is None:
        raise UserError(
            f"input: {name!r} has no Parquet file on the hub; give another id, or a downloaded copy"
        )
    # In the cache CACHED/snapshots/COMMIT/x.parquet is a link to CACHED/blobs/HASH. So links may lead
    # into CACHED, and the name of the folder is the commit.
    opened = open_local(folder, columns, root=folder.parents[1].resolve())
    return replace(opened, kind="hub", revision=folder.name)


def _unreachable(name: str, revision: str | None, reason: str) -> UserError:
    """Make the error for a data set that cannot be loaded."""
    at = f" at revision {revision!r}" if revision else ""
    remedy = "check the id and the network, or give a downloaded copy"
    return UserError(f"input: {name!r}{at} cannot be loaded from the hub ({reason:.300}); {remedy}")


def commit_of(name: str, revision: str | None) -> str:
    """Return the commit that a branch, a tag or a commit stands for; the newest for None.

    Raises what the library of the hub raises.
    """
    from huggingface_hub import HfApi

    why_no_hub()  # without a network the library would try for minutes, unless it is told so
    return str(HfApi().dataset_info(name, revision=revision).sha)


def _chosen_splits(name: str, present: list[str], splits: Mapping[str, str]) -> dict[str, str]:
    """Return which splits of the data set `name` are read: its names for them, by our names.

    `present` has all splits of the data set. `splits` has those that the user has named, by our
    names; if it is empty, those with a usual name are read. For example, a data set with `train`,
    `dev` and `extra` gives {"train": "train", "validation": "dev"}.

    Raises `UserError` for a split that the data set lacks, or where none has a usual name.
    """
    if not splits:
        by_name = {SPLIT_OF[split]: split for split in present if split in SPLIT_OF}
        if by_name:
            return by_name
        has = f"{name!r} has {', '.join(present)}"
        raise UserError(
            f"splits: {has}, none of which is train or test; write --splits train={present[0]}"
        )
    for theirs in splits.values():
        if theirs not in present:
            close = did_you_mean(theirs, present)
            raise UserError(
                f"splits: {name!r} has no split {theirs!r}{close}; it has {', '.join(present)}"
            )
    return dict(splits)


def _records(stream: IterableDataset, columns: Columns, location: str) -> Records:
    """Yield the records of a stream, each with its position.

    Raises `UserError` where the stream breaks off.
    """
    try:
        names = class_names(columns, stream.features or {})
        for number, record in enumerate(stream, 1):
            yield f"row {number}", pick_columns(record, columns, names)
    except Exception as error:
        why = in_one_line(error)
        raise UserError(
            f"input: {location} broke off ({why:.300}); start again, what was loaded is kept"
        ) from error


def _fetch(path: str) -> bytes:
    """Download a file of the data set's own repository.

    The caller has checked that the path leads to no other place.
    """
    from huggingface_hub import HfFileSystem

    content: bytes = HfFileSystem().cat_file(path)
    return content
