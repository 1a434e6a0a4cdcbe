"""Finds the tables of a user's data, alone or in folders, and reads their records split by split."""

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
    format_of,
    open_table,
    row_count,
)
from adora_vl.conversion.leakage import question_key
from adora_vl.conversion.pictures import FileRoot, PictureError, picture_bytes
from adora_vl.conversion.problem import RowReaders
from adora_vl.conversion.records import (
    BadRecord,
    Context,
    Records,
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

    location: str  # the table's name in messages
    # Begins to read the records, each with its position as the file counts it: `line 14`.
    begin: Callable[[], Records]
    files: FileRoot
    texts_only: bool = False
    file: Path | None = None
    format_note: str = ""  # how the table is read, where that had to be guessed


@dataclass(frozen=True)
class Opened:
    """A data set whose tables are known, and of which no row was read yet."""

    kind: str  # the format of its tables
    parts: dict[str, list[TablePart]]  # the tables of each split
    revision: str | None = None  # the commit of a data set of the hub
    totals: dict[str, int] = field(default_factory=dict)  # the rows of each split, where known


def held_out(index: int, share: float, seed: int) -> bool:
    """Return whether the question `index` of train becomes one of the test split.

    One of every `1 / share` consecutive questions does, which is drawn by `seed`. So the share is
    met exactly, and a question's fate does not depend on how many follow.
    """
    block = floor(index * share)
    first = ceil(block / share)
    end = ceil((block + 1) / share)
    return index == random.Random(f"{seed}/{block}").randrange(first, end)


class DrawnTests:
    """Decides which rows of train become the split test.

    All rows that ask one question of one picture go together, since a row of train whose question
    is in the test would be dropped as a leak. Rows come in order, once for each split.
    """

    def __init__(self, share: float, seed: int, columns: Columns) -> None:
        """Begin before the first row. `share`: of the questions that become tests."""
        self._share = share
        self._seed = seed
        self._columns = columns
        # The index of each question in the order in which they come, by its hash.
        self._questions: dict[bytes, int] = {}
        self._in_test: list[bool] = []  # the decision on each row so far

    def takes(self, number: int, record: Record | BadRecord, part: TablePart) -> bool:
        """Return whether the row `number` of train, from 0, becomes one of the test split."""
        if number == len(self._in_test):
            key = hashlib.sha256(self._question_of(number, record, part)).digest()[:16]
            question = self._questions.setdefault(key, len(self._questions))
            self._in_test.append(held_out(question, self._share, self._seed))
        return self._in_test[number]

    def _question_of(self, number: int, record: Record | BadRecord, part: TablePart) -> bytes:
        """Return bytes that two rows have in common if they ask one question of one picture."""
        if isinstance(record, BadRecord):
            return f"broken {number}".encode()
        text, inside = question_in(record, self._columns)
        pieces = [question_key(str(text)).encode("utf-8", "replace")]
        for image in pictures_beside(record, self._columns, texts_only=part.texts_only) + inside:
            try:
                pieces.append(hashlib.sha256(picture_bytes(image, part.files)).digest())
            except PictureError:
                pieces.append(repr(image).encode())
        return b"\0".join(pieces)


def open_local(path: Path, columns: Columns, root: Path | None = None) -> Opened:
    """Open a file, or a folder with tables and the pictures that they name.

    `root` is the folder that no link and no path in a table may lead out of; by default it is that
    of the input.

    Raises `UserError` where there is no table, for a format that is not known, for a link out of
    the folder, and as `open_table`.
    """
    if path.is_file():
        root = root or path.parent.resolve()
        files_of_split = {_split_named(path.stem) or "train": [path]}
    elif path.is_dir():
        root = root or path.resolve()
        files_of_split = _tables(path)
    else:
        raise UserError(
            f"input: there is no file or folder {str(path)!r}, nor is it a hub id such as "
            "owner/name"
        )
    files = [file for split_files in files_of_split.values() for file in split_files]
    for file in files:
        _check_table(file, path, root)
    parts = {}
    for split in SPLITS:
        if split in files_of_split:
            parts[split] = [_part(file, path, root, columns) for file in files_of_split[split]]
    formats = set()
    for file in files:
        name = format_of(file).removeprefix(".")
        formats.add("save_to_disk" if name == SAVED else name)
    totals = {}
    if formats == {"parquet"}:  # its metadata has the number of rows
        totals = {split: sum(map(row_count, files_of_split[split])) for split in parts}
    return Opened("+".join(sorted(formats)), parts, totals=totals)


def _check_table(file: Path, source: Path, root: Path) -> None:
    """Raise `UserError` for a table of an unknown format, or one that a link leads out of `root`.

    `source` is the file or folder that the user named.
    """
    ending = file.suffix.lower()
    if ending not in ENDINGS:
        endings = ", ".join(ENDINGS)
        remedy = ""
        if ending in (".xls", ".xlsb", ".ods"):
            remedy = "; save it as .xlsx or CSV UTF-8"
        raise UserError(
            f"input: {str(source)!r} is none of the known tables; give a file with one of "
            f"{endings}{remedy}"
        )
    if source.is_dir() and not file.resolve().is_relative_to(root):
        raise UserError(
            f"input: {str(file)!r} leads out of {str(source)!r}; copy the table into it"
        )


def row_readers(
    opened: Opened,
    split: str,
    name: str,
    columns: Columns,
    tests: DrawnTests | None,
    limit: int | None,
    *,
    drop_instruction: bool = False,
) -> RowReaders:
    """Yield a call for each row of a split, in the order of the tables, which reads that row.

    `name` is the data set's name in the ids of rows. `tests` draws the split test out of train; it
    is None where none is drawn. At most `limit` rows are yielded.
    """
    source = split if tests is None else "train"
    number = 0  # of the next row in its source, whether or not it belongs to the split
    yielded = 0
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
        for index, (position, record) in enumerate(part.begin()):
            if index == 0 and not isinstance(record, BadRecord):
                # The first row decides, so that a stray true among texts is still refused.
                has_truth_values = isinstance(record.get(columns.answer), bool)
                context = replace(context, has_truth_values=has_truth_values)
            in_split = tests is None or tests.takes(number, record, part) == (split == "test")
            number += 1
            if limit is not None and yielded >= limit:
                return
            if in_split:
                yielded += 1
                yield partial(read_record, record, position, number - 1, context)


def with_split_name(opened: Opened, split: str | None) -> Opened:
    """Return the data set with its one table under the name `split`; as it is for None.

    Raises `UserError` where it has several splits.
    """
    if split is None:
        return opened
    if len(opened.parts) > 1:
        raise UserError(
            f"split_name: {split!r} is for one table, and here are {', '.join(opened.parts)}; "
            "leave it out"
        )
    (old_name,) = opened.parts
    totals = {split: opened.totals[old_name]} if opened.totals else {}
    return replace(opened, parts={split: opened.parts[old_name]}, totals=totals)


def output_splits(opened: Opened, share: float) -> list[str]:
    """Return the splits that will be written, where `share` of train becomes the split test.

    Raises `UserError` where there is no train to take it of, or a test already.
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
        location = opened.parts["test"][0].location
        raise UserError(
            f"test_share: there is a split test already, {location}; leave --test-share out"
        )
    return [*opened.parts, "test"]


def _part(file: Path, source: Path, root: Path, columns: Columns) -> TablePart:
    """Open one table of the file or folder `source`.

    Raises `UserError` as `open_table`, and where the folder for images does not exist.
    """
    # A folder of `save_to_disk` is named in messages in place of the file inside.
    table = file.parent if format_of(file) == SAVED else file
    location = table.name
    if source.is_dir() and table != source:
        location = str(table.relative_to(source))
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
        location=location,
        begin=begin,
        files=files,
        texts_only=format_of(file) in TEXT_TABLES,
        file=file,
        format_note=format_note,
    )


def _split_named(stem: str) -> str | None:
    """Return the split that a file's or folder's name says (`val-00000`), or None."""
    match = _NAMED.fullmatch(stem)
    return SPLIT_OF[match[1].lower()] if match else None


def _tables(folder: Path) -> dict[str, list[Path]]:
    """Find the tables of a folder by split; the names of tables or of their folders say which.

    A single table that no name assigns to a split is train.

    Raises `UserError` where there is no table, where several have no split, and where a split has
    tables in two formats.
    """
    saved = _saved(folder)
    if saved:
        return saved
    tables = _tables_by_name(folder)
    if not tables:
        unnamed = _tables_in(folder) or _tables_in(folder / "data")
        if len(unnamed) > 1:
            names = ", ".join(path.name for path in unnamed[:5])
            raise UserError(
                f"input: {str(folder)!r} has {len(unnamed)} tables ({names}) and none is called "
                "train or test; give one of them, or name them after their splits"
            )
        if unnamed:
            tables["train"] = unnamed
    for split, paths in tables.items():
        if len({path.suffix.lower() for path in paths}) > 1:
            names = " and ".join(repr(path.name) for path in paths[:2])
            raise UserError(
                f"input: {names} are both the split {split!r} in {str(folder)!r}; keep one of them"
            )
    if not tables:
        endings = ", ".join(ENDINGS)
        raise UserError(
            f"input: {str(folder)!r} has no table ({endings}), such as metadata.csv; put one into it"
        )
    return tables


def _tables_by_name(folder: Path) -> dict[str, list[Path]]:
    """Find the tables by split that are named after it, or stand in a folder that is."""
    tables: dict[str, list[Path]] = {}
    subfolders = sorted(path for path in folder.iterdir() if path.is_dir())
    for searched in (folder, folder / "data"):
        for path in _tables_in(searched):
            split = _split_named(path.stem)
            if split is not None:
                tables.setdefault(split, []).append(path)
        if tables:
            break
    for subfolder in subfolders:
        split = _split_named(subfolder.name)
        if split is not None and split not in tables:
            inside = _tables_in(subfolder)
            if inside:
                tables[split] = inside
    return tables


# These files have the ending of a table, and describe tables.
_NO_TABLES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", SAVED)
_OPEN_IN_EXCEL = "~$"  # begins the name of the file that Excel writes beside one that it has open


def _tables_in(folder: Path) -> list[Path]:
    """Return the tables that stand in a folder itself, by name; none where there is no folder."""
    if not folder.is_dir():
        return []
    candidates = (
        path
        for path in folder.iterdir()
        if path.suffix.lower() in ENDINGS and path.name not in _NO_TABLES
    )
    return sorted(
        path for path in candidates if path.is_file() and not path.name.startswith(_OPEN_IN_EXCEL)
    )


def _saved(folder: Path) -> dict[str, list[Path]]:
    """Find the tables by split in a folder that `save_to_disk` wrote; {} for any other folder.

    Raises `UserError` where none of its splits has a name that is known.
    """
    if format_of(folder / SAVED) == SAVED:
        return {"train": [folder / SAVED]}
    try:
        names = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        tables = {SPLIT_OF[name]: [folder / name / SAVED] for name in names if name in SPLIT_OF}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    if not tables:
        has = f"{str(folder)!r} has {', '.join(names)}"
        raise UserError(f"input: {has}, none of which is train or test; give one of these folders")
    return tables
