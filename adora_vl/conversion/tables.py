"""Files, splits and records of somebody's data: tables of any of the formats, alone or in folders."""

import hashlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, floor
from pathlib import Path

from adora_vl.conversion.answers import Record
from adora_vl.conversion.columns import Columns
from adora_vl.conversion.formats import (
    ENDINGS,
    SAVED,
    TEXT_TABLES,
    Records,
    format_of,
    open_table,
    row_count,
)
from adora_vl.conversion.leakage import question_key
from adora_vl.conversion.pictures import FileRoot, PictureError, picture_bytes
from adora_vl.conversion.problem import Reads
from adora_vl.conversion.records import (
    BadRecord,
    Context,
    pictures_beside,
    question_in,
    read_record,
)
from adora_vl.data.dataset import SPLITS
from adora_vl.utils.errors import UserError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(?:@[\w./-]+)?")
SPLIT_OF = {
    "train": "train",
    "validation": "validation",
    "val": "validation",
    "valid": "validation",
    "dev": "validation",
    "test": "test",
}
_NAMED = re.compile(rf"({'|'.join(SPLIT_OF)})(?:[-_.].*)?", re.IGNORECASE)


@dataclass(frozen=True)
class TablePart:
    """The records of one file or stream, and where the paths in them lead."""

    location: str
    begin: Callable[[], Records]  # each with its place as the file counts it: `line 14`
    files: FileRoot
    texts_only: bool = False
    file: Path | None = None
    said: str = ""  # of how it is read, where that had to be found


@dataclass(frozen=True)
class Opened:
    kind: str  # the format
    parts: dict[str, list[TablePart]]  # of each split
    revision: str | None = None  # of the hub
    totals: dict[str, int] = field(default_factory=dict)  # of rows, where known


def held_out(index: int, share: float, seed: int) -> bool:
    """Whether a question becomes one of the test: of every `1 / share` consecutive ones one does,
    drawn by `seed`.
    """
    block = floor(index * share)
    first = ceil(block / share)
    end = ceil((block + 1) / share)
    return index == random.Random(f"{seed}/{block}").randrange(first, end)


class DrawnTests:
    """Which rows of train become the split test: all rows that ask one question of one picture go
    together.

    A row of train whose question is in the test is a leak, and dropped. Rows are taken in order,
    once for each split.
    """

    def __init__(self, share: float, seed: int, columns: Columns) -> None:
        self._share = share
        self._seed = seed
        self._columns = columns
        self._questions: dict[
            bytes, int
        ] = {}  # each with its number, in the order in which they come
        self._held: list[bool] = []  # of each row that was taken

    def takes(self, number: int, record: Record | BadRecord, part: TablePart) -> bool:
        if number == len(self._held):
            key = hashlib.sha256(self._asked(number, record, part)).digest()[:16]
            question = self._questions.setdefault(key, len(self._questions))
            self._held.append(held_out(question, self._share, self._seed))
        return self._held[number]

    def _asked(self, number: int, record: Record | BadRecord, part: TablePart) -> bytes:
        if isinstance(record, BadRecord):
            return f"broken {number}".encode()
        text, inside = question_in(record, self._columns)
        asked = [question_key(str(text)).encode("utf-8", "replace")]
        for image in pictures_beside(record, self._columns, texts_only=part.texts_only) + inside:
            try:
                asked.append(hashlib.sha256(picture_bytes(image, part.files)).digest())
            except PictureError:
                asked.append(repr(image).encode())
        return b"\0".join(asked)


def open_local(path: Path, columns: Columns, root: Path | None = None) -> Opened:
    """A file, or a folder with tables and what they name.

    Raises `UserError`, also for a column that is not there.

    `root`: the folder that no link and no path of a table may leave; by default that of the input.
    """
    if path.is_file():
        root = root or path.parent.resolve()
        found = {_split_named(path.stem) or "train": [path]}
    elif path.is_dir():
        root = root or path.resolve()
        found = _tables(path)
    else:
        raise UserError(
            f"input: there is no file or folder {str(path)!r}, nor is it a hub id such as "
            "owner/name"
        )
    for file in (file for files in found.values() for file in files):
        if file.suffix.lower() not in ENDINGS:
            known = ", ".join(ENDINGS)
            saved = (
                "; save it as .xlsx or CSV UTF-8"
                if file.suffix.lower() in (".xls", ".xlsb", ".ods")
                else ""
            )
            raise UserError(
                f"input: {str(path)!r} is none of the known tables; give a file with one of "
                f"{known}{saved}"
            )
        if path.is_dir() and not file.resolve().is_relative_to(root):
            raise UserError(
                f"input: {str(file)!r} leads out of {str(path)!r}; copy the table into it"
            )
    parts = {
        split: [_part(file, path, root, columns) for file in found[split]]
        for split in SPLITS
        if split in found
    }
    endings = {format_of(file).removeprefix(".") for files in found.values() for file in files}
    endings = {"save_to_disk" if ending == SAVED else ending for ending in endings}
    totals = (
        {split: sum(map(row_count, found[split])) for split in parts}
        if endings == {"parquet"}
        else {}
    )
    return Opened("+".join(sorted(endings)), parts, totals=totals)


def reads(
    opened: Opened,
    split: str,
    name: str,
    columns: Columns,
    tests: DrawnTests | None,
    limit: int | None,
    *,
    drop_instruction: bool = False,
) -> Reads:
    """One call per row of the split, in the order of the tables; the first `limit`.

    `tests`: None: none are drawn.
    """
    source = split if tests is None else "train"
    number = given = 0
    for part in opened.parts[source]:
        context = Context(
            name=name,
            split=split,
            location=part.location,
            columns=columns,
            files=part.files,
            texts_only=part.texts_only,
            drop_instruction=drop_instruction,
            format_note=part.format_note,
        )
        for position, (place, record) in enumerate(part.begin()):
            if position == 0 and not isinstance(record, BadRecord):
                truths = isinstance(record.get(columns.answer), bool)
                context = replace(context, truths=truths)
            wanted = tests is None or tests.takes(number, record, part) == (split == "test")
            number += 1
            if limit is not None and given >= limit:
                return
            given += wanted
            if wanted:
                yield partial(read_record, record, place, number - 1, context)


def named_split(opened: Opened, split: str | None) -> Opened:
    """The same table as the split of this name; None: as its own.

    Raises `UserError` where there are several splits.
    """
    if split is None:
        return opened
    if len(opened.parts) > 1:
        raise UserError(
            f"split_name: {split!r} is for one table, and here are {', '.join(opened.parts)}; "
            "leave it out"
        )
    (own,) = opened.parts
    totals = {split: opened.totals[own]} if opened.totals else {}
    return replace(opened, parts={split: opened.parts[own]}, totals=totals)


def splits_of(opened: Opened, share: float) -> list[str]:
    """The splits that will be written.

    Raises `UserError` where a share of train cannot be taken for a test.
    """
    if not share:
        return list(opened.parts)
    if "train" not in opened.parts:
        (split, parts), *_ = opened.parts.items()
        raise UserError(
            f"test_share: {parts[0].location} is the split {split} by its name, so there is no "
            f"train to take {share:g} of; say that it is with --split-name train, or leave "
            "--test-share out"
        )
    if "test" in opened.parts:
        there = opened.parts["test"][0].location
        raise UserError(
            f"test_share: there is a split test already, {there}; leave --test-share out"
        )
    return [*opened.parts, "test"]


def _part(file: Path, given: Path, root: Path, columns: Columns) -> TablePart:
    known = file.parent if format_of(file) == SAVED else file
    name = str(known.relative_to(given)) if given.is_dir() and known != given else known.name
    files = FileRoot(file.parent.resolve(), root)
    if columns.image_dir:
        folder = Path(columns.image_dir)
        if not folder.is_dir():
            raise UserError(
                f"image_dir: there is no folder {columns.image_dir!r}; name the one that has the "
                "pictures"
            )
        files = FileRoot(folder.resolve(), folder.resolve(), by_tail=True)
    format_note, begin = open_table(file, columns)
    return TablePart(
        location=name,
        begin=begin,
        files=files,
        texts_only=format_of(file) in TEXT_TABLES,
        file=file,
        format_note=format_note,
    )


def _split_named(stem: str) -> str | None:
    match = _NAMED.fullmatch(stem)
    return SPLIT_OF[match[1].lower()] if match else None


def _tables(folder: Path) -> dict[str, list[Path]]:
    """The tables of a folder by split, which their names or those of their folders say; a lone one
    is train.
    """
    if saved := _saved(folder):
        return saved
    found: dict[str, list[Path]] = {}
    folders = sorted(path for path in folder.iterdir() if path.is_dir())
    for inside in (folder, folder / "data"):
        for path in _in(inside):
            split = _split_named(path.stem)
            if split is not None:
                found.setdefault(split, []).append(path)
        if found:
            break
    for inside in folders:
        split = _split_named(inside.name)
        if split is not None and split not in found and (own := _in(inside)):
            found[split] = own
    if not found and (lone := _in(folder) or _in(folder / "data")):
        if len(lone) > 1:
            names = ", ".join(path.name for path in lone[:5])
            raise UserError(
                f"input: {str(folder)!r} has {len(lone)} tables ({names}) and none is called "
                "train or test; give one of them, or name them after their splits"
            )
        found["train"] = lone
    for split, paths in found.items():
        if len({path.suffix.lower() for path in paths}) > 1:
            names = " and ".join(repr(path.name) for path in paths[:2])
            raise UserError(
                f"input: {names} are both the split {split!r} in {str(folder)!r}; keep one of them"
            )
    if not found:
        known = ", ".join(ENDINGS)
        raise UserError(
            f"input: {str(folder)!r} has no table ({known}), such as metadata.csv; put one into it"
        )
    return found


# but what describes some
_NO_TABLES = (
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    SAVED,
)


def _in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    known = (
        path
        for path in folder.iterdir()
        if path.suffix.lower() in ENDINGS and path.name not in _NO_TABLES
    )
    opened = "~$"  # before the name of a file that Excel has open
    return sorted(path for path in known if path.is_file() and not path.name.startswith(opened))


def _saved(folder: Path) -> dict[str, list[Path]]:
    """The parts of a folder that `save_to_disk` wrote, of one split or of several; {} for any other
    folder.
    """
    if format_of(folder / SAVED) == SAVED:
        return {"train": [folder / SAVED]}
    try:
        names = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        found = {SPLIT_OF[name]: [folder / name / SAVED] for name in names if name in SPLIT_OF}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    if not found:
        has = f"{str(folder)!r} has {', '.join(names)}"
        raise UserError(f"input: {has}, none of which is train or test; give one of these folders")
    return found
