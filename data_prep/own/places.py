"""Where a stranger's data set is: a table, or a folder with a table of each split; and which rows are for the test."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import ceil, floor
from pathlib import Path

from adora_vl.errors import UserError
from data_prep.clean_row import RawProblem
from data_prep.own.columns import Columns
from data_prep.own.pictures import Surroundings
from data_prep.own.records import Broken, Context, Record, read_record
from data_prep.own.tables import ENDINGS, TEXT_TABLES, check_columns, records
from data_prep.storage import SPLITS

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(?:@[\w./-]+)?")
_SPLIT_OF = {"train": "train", "validation": "validation", "val": "validation", "valid": "validation",
             "dev": "validation", "test": "test"}  # fmt: skip
_NAMED = re.compile(rf"({'|'.join(_SPLIT_OF)})(?:[-_.].*)?", re.IGNORECASE)
Reads = Iterator[Callable[[], RawProblem]]


@dataclass(frozen=True)
class TablePart:
    """A run of records, such as a file, and where the paths in it lead. `begin` starts to read them."""

    location: str
    begin: Callable[[], Iterator[Record | Broken]]
    place: Surroundings
    texts_only: bool = False
    file: Path | None = None


@dataclass(frozen=True)
class Opened:
    """A data set that is there: the parts of each split. `kind`: its format. `revision`: of the hub's."""

    kind: str
    parts: dict[str, list[TablePart]]
    revision: str | None = None
    totals: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class HeldOutShare:
    """How many rows of train become the split test: of each `1 / share` rows in a row one, drawn by `seed`."""

    share: float = 0.0
    seed: int = 0

    def __contains__(self, index: int) -> bool:
        if not self.share:
            return False
        block = floor(index * self.share)
        first, end = ceil(block / self.share), ceil((block + 1) / self.share)
        return index == random.Random(f"{self.seed}/{block}").randrange(first, end)


def open_local(path: Path, columns: Columns) -> Opened:
    """A file, or a folder with tables and what they name. Raises `UserError`, also for a column that is not there."""
    if path.is_file():
        root, found = path.parent.resolve(), {_split_named(path.stem) or "train": [path]}
    elif path.is_dir():
        root, found = path.resolve(), _tables(path)
    else:
        raise UserError(f"input: there is no file or folder {str(path)!r}, nor is it a hub id such as owner/name")
    for file in (file for files in found.values() for file in files):
        if file.suffix.lower() not in ENDINGS:
            known = ", ".join(ENDINGS)
            raise UserError(f"input: {str(path)!r} is none of the known tables; give a file with one of {known}")
        if path.is_dir() and not file.resolve().is_relative_to(root):
            raise UserError(f"input: {str(file)!r} leads out of {str(path)!r}; copy the table into it")
        check_columns(file, columns)
    endings = {file.suffix.lower()[1:] for files in found.values() for file in files}
    parts = {split: [_part(file, path, root, columns) for file in found[split]] for split in SPLITS if split in found}
    return Opened("+".join(sorted(endings)), parts)


def reads(opened: Opened, split: str, name: str, columns: Columns, tests: HeldOutShare, limit: int | None) -> Reads:
    """One call per row of the split, in the order of the tables; the first `limit`."""
    drawn = bool(tests.share)
    source = "train" if drawn else split
    number = given = 0
    for part in opened.parts[source]:
        context = Context(name, split, part.location, columns, part.place, part.texts_only)
        for index, record in enumerate(part.begin()):
            wanted = not drawn or (number in tests) == (split == "test")
            number += 1
            if limit is not None and given >= limit:
                return
            given += wanted
            if wanted:
                yield partial(read_record, record, index, number - 1, context)


def splits_of(opened: Opened, tests: HeldOutShare) -> list[str]:
    """The splits that will be written. Raises `UserError` where a share of train cannot be taken for a test."""
    if not tests.share:
        return list(opened.parts)
    if "test" in opened.parts or "train" not in opened.parts:
        raise UserError(
            f"test_share: {tests.share:g} of train is for data without a split test; leave --test-share out"
        )
    return [*opened.parts, "test"]


def _part(file: Path, given: Path, root: Path, columns: Columns) -> TablePart:
    name = str(file.relative_to(given)) if given.is_dir() else file.name
    place = Surroundings(file.parent.resolve(), root)
    return TablePart(name, partial(records, file, columns), place, file.suffix.lower() in TEXT_TABLES, file)


def _split_named(stem: str) -> str | None:
    match = _NAMED.fullmatch(stem)
    return _SPLIT_OF[match[1].lower()] if match else None


def _tables(folder: Path) -> dict[str, list[Path]]:
    """The tables of a folder by split, which their names or those of their folders say; a lone one is train."""
    found: dict[str, list[Path]] = {}
    inside = sorted(path for path in folder.iterdir() if path.is_dir())
    for place in (folder, folder / "data"):
        for path in _in(place):
            split = _split_named(path.stem)
            if split is not None:
                found.setdefault(split, []).append(path)
        if found:
            break
    for place in inside:
        split = _split_named(place.name)
        if split is not None and split not in found and (own := _in(place)):
            found[split] = own
    if not found and (lone := _in(folder) or _in(folder / "data")):
        if len(lone) > 1:
            names = ", ".join(path.name for path in lone[:5])
            raise UserError(
                f"input: {str(folder)!r} has {len(lone)} tables ({names}) and none is called train or test; "
                "give one of them, or name them after their splits"
            )
        found["train"] = lone
    for split, paths in found.items():
        if len({path.suffix.lower() for path in paths}) > 1:
            names = " and ".join(repr(path.name) for path in paths[:2])
            raise UserError(f"input: {names} are both the split {split!r} in {str(folder)!r}; keep one of them")
    if not found:
        known = ", ".join(ENDINGS)
        raise UserError(f"input: {str(folder)!r} has no table ({known}), such as metadata.csv; put one into it")
    return found


def _in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in ENDINGS and path.is_file())
