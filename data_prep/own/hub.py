"""A data set of the hub, streamed at one commit: only the rows that are read are downloaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from adora_vl.errors import UserError, in_one_line, nearest
from adora_vl.hub import no_hub
from data_prep.own.columns import Columns, require_columns
from data_prep.own.pictures import Surroundings
from data_prep.own.places import Opened, TablePart
from data_prep.own.records import Broken, Record

_OURS = {"train": "train", "validation": "validation", "val": "validation", "dev": "validation", "test": "test"}


def open_hub(
    name: str, columns: Columns, *, revision: str | None, subset: str | None, splits: Mapping[str, str]
) -> Opened:
    """The data set `name` at the commit that `revision` (None: the newest) stands for.

    `subset`: one of the data set's configurations. `splits`: our names to theirs, {} for those that are called as ours.
    Raises `UserError` where it cannot be had, or lacks a split or a column.
    """
    from datasets import load_dataset

    missing = no_hub()  # asked first, since the library tries again for minutes
    try:
        commit = commit_of(name, revision)
        loaded = load_dataset(name, subset, revision=commit, streaming=True)
        taken = _taken(name, list(loaded), splits)
        parts, totals = {}, {}
        for ours, theirs in taken.items():
            stream = loaded[theirs].decode(False)
            if stream.column_names is None:
                stream = stream._resolve_features()
            require_columns(columns, stream.column_names, f"split {theirs!r} of {name!r}")
            kept = stream.select_columns(columns.wanted)
            parts[ours] = [_part(kept, f"split {theirs} of {name}", f"hf://datasets/{name}@{commit}/")]
            known = (loaded[theirs].info.splits or {}).get(theirs)
            if known is not None and known.num_examples:
                totals[ours] = int(known.num_examples)
    except UserError:
        raise
    except Exception as error:  # the hub's library raises its own, the network's and the file system's
        at, reason = f" at revision {revision!r}" if revision else "", missing or in_one_line(error)
        raise UserError(
            f"input: {name!r}{at} cannot be streamed from the hub ({reason:.300}); check the id and the network, or "
            "give a downloaded copy"
        ) from error
    return Opened("hub", parts, commit, totals)


def commit_of(name: str, revision: str | None) -> str:
    """The commit that a branch, tag or commit of a data set stands for, None for the newest. Raises as the hub does."""
    from huggingface_hub import HfApi

    no_hub()  # the library tries again for minutes, unless it knows
    return str(HfApi().dataset_info(name, revision=revision).sha)


def _taken(name: str, there: list[str], splits: Mapping[str, str]) -> dict[str, str]:
    """Our splits, and what each is called in the data set."""
    if not splits:
        found = {_OURS[split]: split for split in there if split in _OURS}
        if found:
            return found
        listed = ", ".join(there)
        raise UserError(
            f"splits: {name!r} has {listed}, none of which is train or test; write --splits train={there[0]}"
        )
    for theirs in splits.values():
        if theirs not in there:
            listed = ", ".join(there)
            raise UserError(f"splits: {name!r} has no split {theirs!r}{nearest(theirs, there)}; it has {listed}")
    return dict(splits)


def _part(stream: Any, location: str, stored: str) -> TablePart:
    return TablePart(location, partial(_records, stream, location), Surroundings(stored=stored, fetch=_fetch))


def _records(stream: Any, location: str) -> Iterator[Record | Broken]:
    try:
        yield from stream
    except Exception as error:
        raise UserError(
            f"input: {location} broke off ({in_one_line(error):.300}); start again, what was loaded is kept"
        ) from error


def _fetch(path: str) -> bytes:
    """A file of the data set's own repository; `pictures` lets no other path through."""
    from huggingface_hub import HfFileSystem

    content: bytes = HfFileSystem().cat_file(path)
    return content
