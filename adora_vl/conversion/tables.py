"""Finds tables of a user's data, alone or in folders, and reads their records split by split."""

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
    SAVED_DATASET,
    SUFFIXES,
    TEXT_TABLES,
    format_of,
    open_table,
    parquet_row_count,
)
from adora_vl.conversion.leakage import without_punctuation
from adora_vl.conversion.pictures import ImageSource, PictureError, picture_bytes
from adora_vl.conversion.problem import RowReaders
from adora_vl.conversion.records import (
    BadRecord,
    PositionedRecords,
    TableContext,
    pictures_in_columns,
    question_and_pictures,
    read_record,
)
from adora_vl.data.dataset import SPLITS
from adora_vl.utils.errors import UserError

HUB_ID_PATTERN = re.compile(r"[\w.-]+/[\w.-]+(?:@[\w./-]+)?")
SPLIT_BY_NAME = {
    "train": "train",
    "validation": "validation",
    "val": "validation",
    "valid": "validation",
    "dev": "validation",
    "test": "test",
}
_SPLIT_NAME_PATTERN = re.compile(rf"({'|'.join(SPLIT_BY_NAME)})(?:[-_.].*)?", re.IGNORECASE)


@dataclass(frozen=True)
class SplitTable:
    """A table of a split: one file, or a stream from the hub."""

    location: str  # the table's name in messages
    # Begins to read the records, each with its position as the file counts it: `line 14`.
    read_records: Callable[[], PositionedRecords]
    image_source: ImageSource  # where the paths in the records lead
    texts_only: bool = False  # all cells are texts (CSV), so that a list is written as JSON
    file: Path | None = None  # None for a stream
    format_guess: str = ""  # how the table is read, where that had to be guessed


@dataclass(frozen=True)
class OpenedDataset:
    """A data set whose tables are known, and of which no row was read yet."""

    format: str  # the format of its tables
    tables_by_split: dict[str, list[SplitTable]]  # the tables of each split
    revision: str | None = None  # the commit of a data set of the hub
    # How many rows each split has; empty where only reading all of them would tell.
    row_counts: dict[str, int] = field(default_factory=dict)


def is_test_question(index: int, share: float, seed: int) -> bool:
    """Return whether the question `index` of the training split moves to the test split.

    The questions are cut into blocks of `1 / share`, and one question of each block is drawn. For
    example, a share of 0.25 draws one of the questions 0 to 3, one of 4 to 7, and so on. So the
    test split gets its exact share, and questions that are added later do not change it.
    """
    # A fraction, since rounding errors of the float 0.7 would put some questions into the wrong
    # block.
    exact_share = Fraction(str(share))
    block = floor(index * exact_share)
    first_index = ceil(block / exact_share)
    end_index = ceil((block + 1) / exact_share)
    drawn_index = random.Random(f"{seed}/{block}").randrange(first_index, end_index)
    return index == drawn_index


class DrawnTestSplit:
    """Draws the rows of the training split that become the test split.

    All rows with the same question and pictures go to one split, since otherwise those in the
    training split would be dropped as leaks. The table is read twice, once for each of the two
    splits; the second time the decisions of the first are remembered.
    """

    def __init__(self, share: float, seed: int, columns: Columns) -> None:
        """Set how test rows are drawn; no row was read yet.

        Args:
            share: the share of the questions that become tests.
            seed: the seed of the draw.
            columns: which columns have the question and the pictures.
        """
        self._share = share
        self._seed = seed
        self._columns = columns
        self._index_by_question: dict[bytes, int] = {}  # by its hash, counted from 0
        self._is_test_row: list[bool] = []  # for each row that was read so far

    def contains(self, row_index: int, record: Record | BadRecord, table: SplitTable) -> bool:
        """Return whether a row of the training split becomes a test row.

        The rows have to come in order, since a question is counted where it is seen first.

        Args:
            row_index: the number of the row in the training split, from 0.
            record: the row.
            table: the table that has it.
        """
        if row_index == len(self._is_test_row):  # the row is read for the first time
            identity = self._question_and_pictures(row_index, record, table)
            question_hash = hashlib.sha256(identity).digest()[:16]
            new_index = len(self._index_by_question)
            question_index = self._index_by_question.setdefault(question_hash, new_index)
            is_test_row = is_test_question(question_index, share=self._share, seed=self._seed)
            self._is_test_row.append(is_test_row)
        return self._is_test_row[row_index]

    def _question_and_pictures(
        self, row_index: int, record: Record | BadRecord, table: SplitTable
    ) -> bytes:
        """Return bytes that are equal for two rows with the same question and pictures."""
        if isinstance(record, BadRecord):
            return f"broken {row_index}".encode()  # equal to no other row
        question = question_and_pictures(record, self._columns)
        identity = [without_punctuation(str(question.text)).encode("utf-8", "replace")]
        pictures = pictures_in_columns(record, self._columns, texts_only=table.texts_only)
        for picture in pictures + question.pictures:
            try:
                encoded = picture_bytes(picture, table.image_source)
                identity.append(hashlib.sha256(encoded).digest())
            except PictureError:  # its path or address stands for a picture that cannot be read
                identity.append(repr(picture).encode())
        return b"\0".join(identity)


def open_local(path: Path, columns: Columns, root: Path | None = None) -> OpenedDataset:
    """Open a table, or a folder with tables and the pictures that they name, without reading rows.

    Args:
        path: the file or folder that the user named.
        columns: the columns that are wanted of the tables.
        root: the folder that no link and no path in a table may lead out of. By default it is the
            input folder, or the folder of the input file.

    Raises:
        UserError: there is no table, or one has an unknown format, cannot be read, lacks a column,
            or is a link out of `root`.
    """
    if path.is_file():
        root = root or path.parent.resolve()
        files_of_split = {_split_from_name(path.stem) or "train": [path]}
    elif path.is_dir():
        root = root or path.resolve()
        files_of_split = _find_tables(path)
    else:
        raise UserError(
            f"input: there is no file or folder {str(path)!r}, nor is it a hub id such as "
            "owner/name"
        )
    files = [file for split_files in files_of_split.values() for file in split_files]
    for file in files:
        _check_table(file, path, root)
    tables: dict[str, list[SplitTable]] = {}  # by split
    for split in SPLITS:
        if split in files_of_split:
            tables[split] = [
                _open_split_table(file, source=path, root=root, columns=columns)
                for file in files_of_split[split]
            ]
    formats = set()
    for file in files:
        name = format_of(file).removeprefix(".")
        formats.add("save_to_disk" if name == SAVED_DATASET else name)
    row_counts: dict[str, int] = {}
    if formats == {"parquet"}:  # its metadata has the number of rows
        for split in tables:
            row_counts[split] = sum(parquet_row_count(file) for file in files_of_split[split])
    return OpenedDataset(
        format="+".join(sorted(formats)), tables_by_split=tables, row_counts=row_counts
    )


def _check_table(file: Path, source: Path, root: Path) -> None:
    """Raise `UserError` for a table of an unknown format, or one that a link leads out of `root`.

    `source` is the file or folder that the user named.
    """
    ending = file.suffix.lower()
    if ending not in SUFFIXES:
        endings = ", ".join(SUFFIXES)
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
    opened: OpenedDataset,
    split: str,
    *,
    name: str,
    columns: Columns,
    drawn_test_split: DrawnTestSplit | None = None,
    limit: int | None = None,
    drop_instruction: bool = False,
) -> RowReaders:
    """Yield for each row of a split a function that reads it, in the order of the tables.

    Args:
        opened: the data set.
        split: the split whose rows are wanted, also `test` where it is drawn.
        name: the name of the data set, with which row ids begin.
        columns: the columns of its tables.
        drawn_test_split: says which rows of the training split become the split `test`; None where
            no test split is drawn.
        limit: the largest number of rows that are yielded.
        drop_instruction: whether problems lose an instruction on how to answer at their end.
    """
    # Rows of a drawn test split come from the training split too.
    source_split = split if drawn_test_split is None else "train"
    row_index = -1  # counts all rows of `source_split`, also those that are not yielded
    yielded_count = 0
    for table in opened.tables_by_split[source_split]:
        context = TableContext(
            name=name,
            split=split,
            location=table.location,
            columns=columns,
            image_source=table.image_source,
            texts_only=table.texts_only,
            drop_instruction=drop_instruction,
            format_guess=table.format_guess,
        )
        for index_in_table, (position, record) in enumerate(table.read_records()):
            row_index += 1
            if index_in_table == 0 and not isinstance(record, BadRecord):
                # Only if the first answer is true or false may the others be so. A true that
                # comes later, among texts, is a mistake, and that row is refused.
                has_truth_values = isinstance(record.get(columns.answer), bool)
                context = replace(context, has_truth_values=has_truth_values)
            is_in_split = True
            if drawn_test_split is not None:
                is_test_row = drawn_test_split.contains(row_index, record, table)
                is_in_split = is_test_row == (split == "test")
            if limit is not None and yielded_count >= limit:
                return
            if is_in_split:
                yielded_count += 1
                yield partial(
                    read_record, record, position=position, index=row_index, context=context
                )


def rename_split(opened: OpenedDataset, split: str | None) -> OpenedDataset:
    """Return a data set with its only split renamed to `split`; unchanged where `split` is None.

    Raises `UserError` where it has several splits.
    """
    if split is None:
        return opened
    if len(opened.tables_by_split) > 1:
        raise UserError(
            f"split_name: {split!r} is for one table, and here are "
            f"{', '.join(opened.tables_by_split)}; leave it out"
        )
    (old_name,) = opened.tables_by_split
    row_counts = {split: opened.row_counts[old_name]} if opened.row_counts else {}
    return replace(
        opened, tables_by_split={split: opened.tables_by_split[old_name]}, row_counts=row_counts
    )


def output_splits(opened: OpenedDataset, share: float) -> list[str]:
    """Return the names of the splits that will be written, if `share` of train becomes `test`.

    For example, data with train and validation gives train, validation and test. A share of 0 draws
    no test split.

    Raises `UserError` where the data has no training split to take the share from, or has a test
    split already.
    """
    if not share:  # no test split is drawn
        return list(opened.tables_by_split)
    if "train" not in opened.tables_by_split:
        split, tables = next(iter(opened.tables_by_split.items()))
        raise UserError(
            f"test_share: {tables[0].location} is the split {split} by its name, so there is no "
            f"train to take {share:g} of; say that it is with --split-name train, or leave "
            "--test-share out"
        )
    if "test" in opened.tables_by_split:
        location = opened.tables_by_split["test"][0].location
        raise UserError(
            f"test_share: there is a split test already, {location}; leave --test-share out"
        )
    return [*opened.tables_by_split, "test"]


def _open_split_table(file: Path, source: Path, root: Path, columns: Columns) -> SplitTable:
    """Open one table of a data set, without reading its rows.

    Args:
        file: the table.
        source: the file or folder that the user named.
        root: the folder that no path in the table may lead out of.
        columns: the columns that are wanted, with the folder for images, if the user named one.

    Raises:
        UserError: the table cannot be read, or the folder for images does not exist.
    """
    # Messages name a folder of `save_to_disk`, and not the file `state.json` inside.
    shown_path = file.parent if format_of(file) == SAVED_DATASET else file
    location = shown_path.name
    if source.is_dir() and shown_path != source:
        location = str(shown_path.relative_to(source))
    image_source = ImageSource(folder=file.parent.resolve(), root=root)
    if columns.image_dir:
        folder = Path(columns.image_dir)
        if not folder.is_dir():
            raise UserError(
                f"image_dir: there is no folder {columns.image_dir!r}; name the one that has the "
                "pictures"
            )
        image_source = ImageSource(
            folder=folder.resolve(), root=folder.resolve(), match_path_end=True
        )
    table = open_table(file, columns)
    return SplitTable(
        location=location,
        read_records=table.read_records,
        image_source=image_source,
        texts_only=format_of(file) in TEXT_TABLES,
        file=file,
        format_guess=table.format_guess,
    )


def _split_from_name(stem: str) -> str | None:
    """Return the split that the name of a file or folder says; None where it says none.

    For example, `val-00000` and `dev` say validation, `Test` says test, and `training` says none.
    """
    match = _SPLIT_NAME_PATTERN.fullmatch(stem)
    return SPLIT_BY_NAME[match[1].lower()] if match else None


def _find_tables(folder: Path) -> dict[str, list[Path]]:
    """Return the tables of a folder by their split: {"train": [train.csv], "test": [test.csv]}.

    The first of these that the folder has is taken:

    1. a data set that `save_to_disk` of `datasets` wrote
    2. tables that are named after a split, or stand in a folder that is
    3. a single table with any name, which is the training split

    Raises `UserError` where there is no table, where several tables name no split, and where a
    split has tables in two formats.
    """
    saved_tables = _find_saved_tables(folder)
    if saved_tables:
        return saved_tables
    tables = _find_tables_by_name(folder)
    if not tables:
        tables_without_split = _list_tables(folder) or _list_tables(folder / "data")
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
        endings = ", ".join(SUFFIXES)
        raise UserError(
            f"input: {str(folder)!r} has no table ({endings}), such as metadata.csv; put one into it"
        )
    return tables


def _find_tables_by_name(folder: Path) -> dict[str, list[Path]]:
    """Return by split the tables that are named after it, or stand in a folder that is.

    A split is taken from the first of these places that has it:

    1. tables in `folder` itself, such as `train.csv`
    2. tables in `folder/data`; these are looked for only where the first place has no split at all
    3. tables in a folder that is named after the split, such as `train/rows.csv`
    """
    tables: dict[str, list[Path]] = {}
    subfolders = sorted(path for path in folder.iterdir() if path.is_dir())
    for searched_folder in (folder, folder / "data"):
        for path in _list_tables(searched_folder):
            split = _split_from_name(path.stem)
            if split is not None:
                tables.setdefault(split, []).append(path)
        if tables:
            break
    for subfolder in subfolders:
        split = _split_from_name(subfolder.name)
        if split is None or split in tables:
            continue
        tables_inside = _list_tables(subfolder)
        if tables_inside:
            tables[split] = tables_inside
    return tables


# These files have the suffix of a table, and describe tables.
_METADATA_FILES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", SAVED_DATASET)
_OPEN_IN_EXCEL = "~$"  # begins the name of the file that Excel writes beside one that it has open


def _list_tables(folder: Path) -> list[Path]:
    """Return the tables in a folder, sorted by name; none where there is no such folder.

    Tables in its subfolders are not among them.
    """
    if not folder.is_dir():
        return []
    tables = []
    for path in sorted(folder.iterdir()):
        has_table_suffix = path.suffix.lower() in SUFFIXES
        is_excluded = path.name in _METADATA_FILES or path.name.startswith(_OPEN_IN_EXCEL)
        if has_table_suffix and not is_excluded and path.is_file():
            tables.append(path)
    return tables


def _find_saved_tables(folder: Path) -> dict[str, list[Path]]:
    """Return by split the tables in a folder that `save_to_disk` of `datasets` wrote.

    Returns {} for any other folder. A table is named by the file `state.json` in its folder.

    Raises `UserError` where none of its splits has a name that is known.
    """
    if format_of(folder / SAVED_DATASET) == SAVED_DATASET:
        return {"train": [folder / SAVED_DATASET]}
    try:
        names = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        tables = {
            SPLIT_BY_NAME[name]: [folder / name / SAVED_DATASET]
            for name in names
            if name in SPLIT_BY_NAME
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    if not tables:
        raise UserError(
            f"input: {str(folder)!r} has {', '.join(names)}, none of which is train or test; give "
            "one of these folders"
        )
    return tables
