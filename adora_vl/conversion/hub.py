"""A data set of the hub at one commit: streamed, so that only the rows that are read are
downloaded, or kept.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from adora_vl.conversion.columns import Columns, class_names, pick_columns, require_columns
from adora_vl.conversion.formats import Records
from adora_vl.conversion.pictures import FileRoot
from adora_vl.conversion.tables import SPLIT_OF, Opened, TablePart, open_local
from adora_vl.utils.errors import UserError, did_you_mean, in_one_line
from adora_vl.utils.hub import no_hub


def open_hub(
    name: str, columns: Columns, revision: str | None, subset: str | None, splits: Mapping[str, str]
) -> Opened:
    """The data set `name` at the commit that `revision` (None: the newest) stands for.

    `subset`: one of the data set's configurations. `splits`: our names to theirs, {} for those that
    are called as ours. Raises `UserError` where it cannot be had, or lacks a split or a column.
    """
    from datasets import load_dataset

    missing = no_hub()  # asked first, since the library tries again for minutes
    try:
        commit = commit_of(name, revision)
        loaded = load_dataset(name, subset, revision=commit, streaming=True)
        taken = _taken(name, list(loaded), splits)
        parts, totals = {}, {}
        files = FileRoot(stored=f"hf://datasets/{name}@{commit}/", fetch=_fetch)
        for ours, theirs in taken.items():
            stream = loaded[theirs].decode(False)
            if stream.column_names is None:
                stream = stream._resolve_features()
            require_columns(columns, stream.column_names, f"split {theirs!r} of {name!r}")
            kept = stream.select_columns(columns.to_read(stream.column_names))
            place = f"split {theirs} of {name}"
            parts[ours] = [TablePart(place, partial(_records, kept, columns, place), files)]
            known = (loaded[theirs].info.splits or {}).get(theirs)
            if known is not None and known.num_examples:
                totals[ours] = int(known.num_examples)
    except UserError:
        raise
    except (
        Exception
    ) as error:  # the hub's library raises its own, the network's and the file system's
        raise _unreachable(name, revision, missing or in_one_line(error)) from error
    return Opened(kind="hub", parts=parts, revision=commit, totals=totals)


def download_parquet(name: str, columns: Columns, revision: str | None) -> Opened:
    """All Parquet files of a data set, kept in the cache of `huggingface_hub`, also for offline.

    Raises `UserError`.
    """
    from huggingface_hub import snapshot_download

    missing = no_hub()
    try:
        tables = partial(
            snapshot_download, repo_type="dataset", allow_patterns=["*.parquet"], max_workers=2
        )
        folder = Path(tables(name, revision=revision))
    except (
        Exception
    ) as error:  # the hub's library raises its own, the network's and the file system's
        raise _unreachable(name, revision, missing or in_one_line(error)) from error
    if next(folder.rglob("*.parquet"), None) is None:
        raise UserError(
            f"input: {name!r} has no Parquet file on the hub; give another id, or a downloaded copy"
        )
    # its files are links into a folder beside all snapshots; each snapshot's folder has the name of
    # its commit
    return replace(
        open_local(folder, columns, root=folder.parents[1].resolve()),
        kind="hub",
        revision=folder.name,
    )


def _unreachable(name: str, revision: str | None, reason: str) -> UserError:
    at = f" at revision {revision!r}" if revision else ""
    remedy = "check the id and the network, or give a downloaded copy"
    return UserError(f"input: {name!r}{at} cannot be loaded from the hub ({reason:.300}); {remedy}")


def commit_of(name: str, revision: str | None) -> str:
    """The commit that a branch, tag or commit of a data set stands for, None for the newest.

    Raises as the hub does.
    """
    from huggingface_hub import HfApi

    no_hub()  # the library tries again for minutes, unless it knows
    return str(HfApi().dataset_info(name, revision=revision).sha)


def _taken(name: str, there: list[str], splits: Mapping[str, str]) -> dict[str, str]:
    """Our splits, and what each is called in the data set."""
    if not splits:
        found = {SPLIT_OF[split]: split for split in there if split in SPLIT_OF}
        if found:
            return found
        has = f"{name!r} has {', '.join(there)}"
        raise UserError(
            f"splits: {has}, none of which is train or test; write --splits train={there[0]}"
        )
    for theirs in splits.values():
        if theirs not in there:
            close = did_you_mean(theirs, there)
            raise UserError(
                f"splits: {name!r} has no split {theirs!r}{close}; it has {', '.join(there)}"
            )
    return dict(splits)


def _records(stream: Any, columns: Columns, location: str) -> Records:
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
    """A file of the data set's own repository; `pictures` lets no other path through."""
    from huggingface_hub import HfFileSystem

    content: bytes = HfFileSystem().cat_file(path)
    return content
