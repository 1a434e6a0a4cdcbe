"""Finds the tables of a user's data, alone or in folders, and reads their records split by split."""

import hashlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
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
from adora_vl.conversion.leakage import without_punctuation
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
    # How many rows each split has; empty where only reading all of them would tell.
    row_counts: dict[str, int] = field(default_factory=dict)


def is_test_question(index: int, share: float, seed: int) -> bool:
    """Return whether the question `index` of the training split moves to the test split.

    The questions are cut into blocks of `1 / share`, and one question of each block is drawn. For
    example, a share of 0.25 draws one of the questions 0 to 3, one of 4 to 7, and so on. So the
    test split gets its exact share, and later questions do not change it.
    """
    # A fraction, since rounding errors of the float 0.7 would put some questions into the wrong block.
    exact_share = Fraction(str(share))
    block = floor(index * exact_share)
    first_index = ceil(block / exact_share)
    end_index = ceil((block + 1) / exact_share)
    drawn_index = random.Random(f"{seed}/{block}").randrange(first_index, end_index)
    return index == drawn_index


class DrawnTests:
    """Draws the rows of the training split that become the test split.

    All rows with the same question and pictures go to one split, since otherwise those in the
    training split would be dropped as leaks. The table is read once for each of the two splits; the
    second time the decisions of the first are remembered.
    """

    def __init__(self, share: float, seed: int, columns: Columns) -> None:
        """Begin before the first row. `share` is the share of the questions that become tests."""
        self._share = share
        self._seed = seed
        self._columns = columns
        self._index_by_question: dict[bytes, int] = {}  # by its hash, counted from 0
        self._is_test_row: list[bool] = []  # for each row that was read so far

    def contains(self, row_index: int, record: Record | BadRecord, part: TablePart) -> bool:
        """Return whether a row of the training split becomes a test row.

        `row_index` is the number of the row in that split, from 0. The rows have to come in order.
        `part` is the table of the record.
        """
        if row_index == len(self._is_test_row):  # the row is read for the first time
            identity = self._question_and_pictures(row_index, record, part)
            question_hash = hashlib.sha256(identity).digest()[:16]
            new_index = len(self._index_by_question)
            question_index = self._index_by_question.setdefault(question_hash, new_index)
            is_test_row = is_test_question(question_index, share=self._share, seed=self._seed)
            self._is_test_row.append(is_test_row)
        return self._is_test_row[row_index]

    def _question_and_pictures(
        self, row_index: int, record: Record | BadRecord, part: TablePart
    ) -> bytes:
        """Return bytes that are equal for two rows with the same question and pictures."""
        if isinstance(record, BadRecord):
            return f"broken {row_index}".encode()  # equal to no other row
        question = question_in(record, self._columns)
        pieces = [without_punctuation(str(question.text)).encode("utf-8", "replace")]
        pictures = pictures_beside(record, self._columns, texts_only=part.texts_only)
        for picture in pictures + question.pictures:
            try:
                pieces.append(hashlib.sha256(picture_bytes(picture, part.files)).digest())
            except PictureError:
                pieces.append(repr(picture).encode())  # its path, say, in place of its bytes
        return b"\0".join(pieces)


def open_local(path: Path, columns: Columns, root: Path | None = None) -> Opened:
    """Open a file, or a folder with tables and the pictures that they name.

    No link and no path in a table may lead out of the folder `root`. By default it is the input
    folder, or the folder of the input file.

    Raises `UserError` where there is no table, for a format that is not known, for a link out of
    the folder, and where `open_table` raises it.
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
    row_counts = {}
    if formats == {"parquet"}:  # its metadata has the number of rows
        row_counts = {split: sum(map(row_count, files_of_split[split])) for split in parts}
    return Opened(kind="+".join(sorted(formats)), parts=parts, row_counts=row_counts)


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
    *,
    name: str,
    columns: Columns,
    drawn_tests: DrawnTests | None = None,
    limit: int | None = None,
    drop_instruction: bool = False,
) -> RowReaders:
    """Yield for each row of a split a function that reads it, in the order of the tables.

    `name` is the name of the data set, with which row ids begin. `drawn_tests` says which rows of
    the training split become the split `test`; it is None where no test split is drawn. At most
    `limit` rows are yielded.
    """
    # Rows of a drawn test split come from the training split too.
    source_split = split if drawn_tests is None else "train"
    row_index = -1  # counts all rows of `source_split`, also those that are not yielded
    yielded_count = 0
    for part in opened.parts[source_split]:
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
        for index_in_part, (position, record) in enumerate(part.begin()):
            row_index += 1
            if index_in_part == 0 and not isinstance(record, BadRecord):
                # Only if the first answer is true or false may the others be so. A true that
                # comes later, among texts, is a mistake, and is refused.
                has_truth_values = isinstance(record.get(columns.answer), bool)
                context = replace(context, has_truth_values=has_truth_values)
            is_in_split = True
            if drawn_tests is not None:
                is_test_row = drawn_tests.contains(row_index, record, part)
                is_in_split = is_test_row == (split == "test")
            if limit is not None and yielded_count >= limit:
                return
            if is_in_split:
                yielded_count += 1
                yield partial(
                    read_record, record, position=position, index=row_index, context=context
                )


def with_split_name(opened: Opened, split: str | None) -> Opened:
    """Return a data set whose only split is called `split`; unchanged where `split` is None.

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
    row_counts = {split: opened.row_counts[old_name]} if opened.row_counts else {}
    return replace(opened, parts={split: opened.parts[old_name]}, row_counts=row_counts)


def output_splits(opened: Opened, share: float) -> list[str]:
    """Return the splits that will be written, if `share` of the training split becomes `test`.

    For example, data with train and validation gives train, validation and test. A share of 0 draws
    no test split.

    Raises `UserError` where the data has no training split to take the share from, or has a test
    split already.
    """
    if not share:  # no test split is drawn
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

    Raises `UserError` where `open_table` does, and where the folder for images does not exist.
    """
    # A folder of `save_to_disk` is named in messages in place of the file inside.
    shown_path = file.parent if format_of(file) == SAVED else file
    location = shown_path.name
    if source.is_dir() and shown_path != source:
        location = str(shown_path.relative_to(source))
    files = FileRoot(folder=file.parent.resolve(), root=root)
    if columns.image_dir:
        folder = Path(columns.image_dir)
        if not folder.is_dir():
            raise UserError(
                f"image_dir: there is no folder {columns.image_dir!r}; name the one that has the "
                "pictures"
            )
        files = FileRoot(folder=folder.resolve(), root=folder.resolve(), by_tail=True)
    table = open_table(file, columns)
    return TablePart(
        location=location,
        begin=table.read_records,
        files=files,
        texts_only=format_of(file) in TEXT_TABLES,
        file=file,
        format_note=table.format_note,
    )


def _split_named(stem: str) -> str | None:
    """Return the split that the name of a file or folder says; None where it says none.

    For example, `val-00000` and `dev` say validation, `Test` says test, and `training` says none.
    """
    match = _NAMED.fullmatch(stem)
    return SPLIT_OF[match[1].lower()] if match else None


def _tables(folder: Path) -> dict[str, list[Path]]:
    """Find the tables of a folder, by split.

    The first of these that the folder has is taken:

    1. a data set that `save_to_disk` of `datasets` wrote
    2. tables that are named after a split, or stand in a folder that is
    3. a single table with any name, which is the training split

    Raises `UserError` where there is no table, where several tables name no split, and where a
    split has tables in two formats.
    """
    tables_of_datasets = _tables_saved_to_disk(folder)
    if tables_of_datasets:
        return tables_of_datasets
    tables = _tables_by_name(folder)
    if not tables:
        tables_without_split = _tables_in(folder) or _tables_in(folder / "data")
        if len(tables_without_split) > 1:
            names = ", ".join(path.name for path in tables_without_split[:5])
            raise UserError(
                f"input: {str(folder)!r} has {len(tables_without_split)} tables ({names}) and none "
                "is called train or test; give one of them, or name them after their splits"
            )
        if tables_without_split:
            tables["train"] = tables_without_split
    for split, paths in tables.items():
        formats = {path.suffix.lower() for path in paths}
        if len(formats) > 1:
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
    """Find the tables that are named after a split, or stand in a folder that is.

    A split is taken from the first of these places that has it:

    1. tables in `folder` itself, such as `train.csv`
    2. tables in `folder/data`; these are looked for only where the first place has no split at all
    3. tables in a folder that is named after the split, such as `train/rows.csv`
    """
    tables: dict[str, list[Path]] = {}
    subfolders = sorted(path for path in folder.iterdir() if path.is_dir())
    for searched_folder in (folder, folder / "data"):
        for path in _tables_in(searched_folder):
            split = _split_named(path.stem)
            if split is not None:
                tables.setdefault(split, []).append(path)
        if tables:
            break
    for subfolder in subfolders:
        split = _split_named(subfolder.name)
        if split is None or split in tables:
            continue
        tables_inside = _tables_in(subfolder)
        if tables_inside:
            tables[split] = tables_inside
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


def _tables_saved_to_disk(folder: Path) -> dict[str, list[Path]]:
    """Find the tables by split in a folder that `save_to_disk` of `datasets` wrote.

    Returns {} for any other folder.

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
