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
from adora_vl.conversion.pictures import ImageSource
from adora_vl.conversion.records import PositionedRecords
from adora_vl.conversion.tables import SPLIT_BY_NAME, OpenedDataset, SplitTable, open_local
from adora_vl.utils.errors import UserError, describe_error, did_you_mean
from adora_vl.utils.hub import hub_unavailable_reason

if TYPE_CHECKING:
    from datasets import IterableDataset


def open_hub(
    name: str, columns: Columns, revision: str | None, subset: str | None, splits: Mapping[str, str]
) -> OpenedDataset:
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
    no_hub_reason = hub_unavailable_reason()
    try:
        commit = commit_of(name, revision)
        loaded = load_dataset(name, subset, revision=commit, streaming=True)
        chosen = _chosen_splits(name, list(loaded), splits)
        tables = {}
        row_counts = {}
        image_source = ImageSource(
            hub_prefix=f"hf://datasets/{name}@{commit}/", download=_download_file
        )
        for our_split, hub_split in chosen.items():  # the split's name here, and on the hub
            stream = loaded[hub_split].decode(enable=False)  # pictures stay encoded
            if stream.column_names is None:  # only the first rows say which columns there are
                stream = stream._resolve_features()
            require_columns(columns, stream.column_names, f"split {hub_split!r} of {name!r}")
            selected = stream.select_columns(columns.needed_from(stream.column_names))
            location = f"split {hub_split} of {name}"
            read_records = partial(_read_stream, selected, columns, location)
            tables[our_split] = [
                SplitTable(location=location, read_records=read_records, image_source=image_source)
            ]
            split_info = (loaded[hub_split].info.splits or {}).get(hub_split)
            if split_info is not None and split_info.num_examples:
                row_counts[our_split] = int(split_info.num_examples)
    except UserError:
        raise
    except Exception as error:  # errors of the hub's library, of the network, of the file system
        raise _unreachable_error(name, revision, no_hub_reason or describe_error(error)) from error
    return OpenedDataset(
        format="hub", tables_by_split=tables, revision=commit, row_counts=row_counts
    )


def download_parquet(name: str, columns: Columns, revision: str | None) -> OpenedDataset:
    """Download all Parquet files of a data set into the cache of `huggingface_hub`.

    Without a network the files in the cache are used.

    Raises `UserError` where the data set cannot be loaded, or has no such file.
    """
    from huggingface_hub import snapshot_download

    no_hub_reason = hub_unavailable_reason()
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
        raise _unreachable_error(name, revision, no_hub_reason or describe_error(error)) from error
    if next(folder.rglob("*.parquet"), None) is None:
        raise UserError(
            f"input: {name!r} has no Parquet file on the hub; give another id, or a downloaded copy"
        )
    # In the cache CACHED/snapshots/COMMIT/x.parquet is a link to CACHED/blobs/HASH. So links may
    # lead into CACHED, and the name of the folder is the commit.
    opened = open_local(folder, columns, root=folder.parents[1].resolve())
    return replace(opened, format="hub", revision=folder.name)


def _unreachable_error(name: str, revision: str | None, reason: str) -> UserError:
    """Return the error for a data set of the hub that cannot be loaded; `reason` says why."""
    at_revision = f" at revision {revision!r}" if revision else ""
    return UserError(
        f"input: {name!r}{at_revision} cannot be loaded from the hub ({reason:.300}); check the id "
        "and the network, or give a downloaded copy"
    )


def commit_of(name: str, revision: str | None) -> str:
    """Return the commit of a data set that a branch, a tag or a commit means; the newest for None.

    `name` is the id of the data set. Raises what the library of the hub raises.
    """
    from huggingface_hub import HfApi

    # Where the hub does not answer, this switches it off: the library would try for minutes.
    hub_unavailable_reason()
    return str(HfApi().dataset_info(name, revision=revision).sha)


def _chosen_splits(name: str, hub_splits: list[str], splits: Mapping[str, str]) -> dict[str, str]:
    """Return which splits of a data set are read: their names on the hub, by our names.

    For example, a data set with `train`, `dev` and `extra` gives {"train": "train", "validation":
    "dev"} without a choice of the user.

    Args:
        name: the id of the data set.
        hub_splits: all its splits.
        splits: those that the user has chosen, in the form of the result. If it is empty, the
            splits with a usual name are read.

    Raises:
        UserError: the data set lacks a chosen split, or none of its splits has a usual name.
    """
    if not splits:
        usual_splits = {}
        for hub_split in hub_splits:
            if hub_split in SPLIT_BY_NAME:
                usual_splits[SPLIT_BY_NAME[hub_split]] = hub_split
        if usual_splits:
            return usual_splits
        raise UserError(
            f"splits: {name!r} has {', '.join(hub_splits)}, none of which is train or test; write "
            f"--splits train={hub_splits[0]}"
        )
    for hub_split in splits.values():
        if hub_split not in hub_splits:
            raise UserError(
                f"splits: {name!r} has no split {hub_split!r}{did_you_mean(hub_split, hub_splits)}"
                f"; it has {', '.join(hub_splits)}"
            )
    return dict(splits)


def _read_stream(stream: IterableDataset, columns: Columns, location: str) -> PositionedRecords:
    """Yield the records of a stream from the hub, each with its position, such as `row 14`.

    `location` names the stream in messages. Raises `UserError` where the stream breaks off.
    """
    try:
        names_by_column = class_names(columns, stream.features or {})
        for number, record in enumerate(stream, 1):
            yield f"row {number}", pick_columns(record, columns, names_by_column)
    except Exception as error:  # errors of the hub's library, of the network, of the file system
        raise UserError(
            f"input: {location} broke off ({describe_error(error):.300}); start again, what was "
            "loaded is kept"
        ) from error


def _download_file(path: str) -> bytes:
    """Return the bytes of a file on the hub, whose path begins with `hf://datasets/`.

    The caller has checked that the file is in the repository of the data set that is read.
    """
    from huggingface_hub import HfFileSystem

    content: bytes = HfFileSystem().cat_file(path)
    return content
