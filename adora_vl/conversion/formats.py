"""The formats of a table, each read as records with their positions in the file.

The formats are JSON, CSV, Excel, Parquet, Arrow, shards of webdataset, and the folders that
`save_to_disk` of `datasets` writes. Rows are read one at a time or in small batches, so that a
table may be larger than the memory.
"""

from __future__ import annotations

import codecs
import csv
import io
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from adora_vl.conversion.columns import Columns, class_names, pick_columns, require_columns
from adora_vl.conversion.json_tables import open_json
from adora_vl.conversion.problem import ROW_LOCATION
from adora_vl.conversion.records import HEAD_RECORDS, BadRecord, PositionedRecords, Table
from adora_vl.conversion.webdataset import read_shard
from adora_vl.data.images import describe_non_picture
from adora_vl.utils.errors import UserError, describe_error

if TYPE_CHECKING:
    from openpyxl.cell.read_only import ReadOnlyCell
    from openpyxl.worksheet._read_only import ReadOnlyWorksheet

EXCEL_SUFFIXES = (".xlsx", ".xlsm")
SAVED_DATASET = "state.json"  # a file in each folder that `save_to_disk` of `datasets` wrote
TEXT_TABLES = (
    ".csv",
    ".tsv",
    *EXCEL_SUFFIXES,
)  # a cell is one value, so that a list is written as JSON
WEBDATASET_SUFFIX = ".tar"
SUFFIXES = (".jsonl", ".ndjson", ".json", *TEXT_TABLES, ".parquet", ".arrow", WEBDATASET_SUFFIX)
_ARROW_FORMATS = (".parquet", ".arrow", SAVED_DATASET)
_BATCH_ROWS = 64  # in memory at a time
_LONGEST_CELL = 2**31 - 1  # Python's limit for a cell of CSV is less than a picture in Base64
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}


def format_of(path: Path) -> str:
    """Return the format of a table: its suffix in lower case, such as `.csv`.

    A folder that `save_to_disk` of `datasets` wrote is named by its file `state.json`; its format
    is that name.
    """
    is_saved_dataset = (
        path.name == SAVED_DATASET
        and path.is_file()
        and path.with_name("dataset_info.json").is_file()
    )
    return SAVED_DATASET if is_saved_dataset else path.suffix.lower()


def open_table(path: Path, columns: Columns) -> Table:
    """Open a table of any known format, and check that it has the columns that are to be read.

    The records of the returned table have only the columns that are named in `columns`.

    Raises `UserError` for a file that cannot be read, for one that is something else than its name
    says, and for a column that it lacks or has twice.
    """
    # The types of its columns, which a file that `datasets` wrote has in it.
    features: Mapping[str, Any] = {}
    with _user_errors_for(path):
        with path.open("rb") as file:
            non_picture = describe_non_picture(file.read(512))
        # An Excel workbook is a zip file, which is none of the wrong contents here.
        if non_picture and format_of(path) not in EXCEL_SUFFIXES:
            raise UserError(f"input: {str(path)!r} is {non_picture.description}")
        if format_of(path) in _ARROW_FORMATS:
            table, features = _open_arrow(path, columns)
        elif format_of(path) in EXCEL_SUFFIXES:
            table = _open_workbook(path, columns)
        elif format_of(path) in (".csv", ".tsv"):
            table = _open_csv(path, columns)
        elif format_of(path) == WEBDATASET_SUFFIX:
            table = _open_webdataset(path, columns)
        else:
            table = open_json(path, columns)
        for name in columns.table_names:
            count = table.column_names.count(name)
            if count > 1:
                raise UserError(
                    f"columns: {path.name!r} has {count} columns {name!r}; rename all but one"
                )
        if table.column_names:  # else it is empty, which is reported when its rows are counted
            require_columns(columns, table.column_names, repr(path.name))
        # What the file itself says of its classes comes before what a card beside it says.
        names_by_column = class_names(columns, {**_features_from_card(path), **features})

    def read_chosen_columns() -> PositionedRecords:
        """Yield each row with its position and its wanted columns, or what is wrong with it."""
        with _user_errors_for(path):
            for position, record in table.read_records():
                if isinstance(record, dict):
                    record = pick_columns(record, columns, names_by_column)
                yield position, record

    return table._replace(read_records=read_chosen_columns)


@contextmanager
def _user_errors_for(path: Path) -> Iterator[None]:
    """Turn the errors of reading a file in the `with` block into a `UserError` that names it."""
    try:
        yield
    except (OSError, UnicodeError, csv.Error, pa.ArrowException, tarfile.TarError) as error:
        reason = describe_error(error)
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        raise UserError(
            f"input: {str(path)!r} cannot be read ({reason:.200}); mend it, or save it again"
        ) from error


def _features_from_card(path: Path) -> Mapping[str, Any]:
    """Return the types of a table's columns, the `Features` in the card of its data set.

    They have the names of classes, which the table has as numbers. The card (`README.md`) or
    `dataset_infos.json` stands beside the table or in the folder above. Returns {} where there is
    none.
    """
    for folder in (path.parent, path.parent.parent):
        with suppress(Exception):  # a README may have any content
            has_infos = (folder / "dataset_infos.json").is_file()
            # Most cards name no classes, and `datasets` takes a second to import.
            if has_infos or "class_label" in (folder / "README.md").read_text(encoding="utf-8"):
                from datasets.info import DatasetInfosDict

                infos = DatasetInfosDict.from_directory(str(folder))
                return next((info.features for info in infos.values() if info.features), {})
    return {}


def parquet_row_count(path: Path) -> int:
    """Return how many rows a Parquet file has, by its metadata."""
    with _user_errors_for(path):
        return int(pq.read_metadata(path).num_rows)


def _open_dataset(path: Path) -> Any:
    """Return an Arrow file, or the folder of `save_to_disk` around `path`, as a `Dataset`."""
    from datasets import Dataset, load_from_disk

    try:
        if format_of(path) == SAVED_DATASET:
            return load_from_disk(str(path.parent))
        return Dataset.from_file(str(path))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"input: {str(path)!r} cannot be read ({describe_error(error):.200}); save it again"
        ) from error


def _open_arrow(path: Path, columns: Columns) -> tuple[Table, Mapping[str, Any]]:
    """Open a table of Parquet or Arrow; return it with the types of its columns in `datasets`.

    These `Features` are {} where the file has none.
    """
    is_parquet = format_of(path) == ".parquet"
    schema = pq.read_schema(path) if is_parquet else _open_dataset(path).data.schema
    features: Mapping[str, Any] = {}
    if b"huggingface" in (schema.metadata or {}):
        from datasets import Features

        features = Features.from_arrow_schema(schema)
    names = columns.needed_from(schema.names)

    def read_batches() -> Iterator[Any]:
        """Yield the needed columns a batch of rows at a time, so that a large table fits."""
        if is_parquet:
            with pq.ParquetFile(path, pre_buffer=False) as file:
                yield from file.iter_batches(_BATCH_ROWS, columns=names)
        else:
            dataset = _open_dataset(path).select_columns(names).with_format("arrow")
            yield from dataset.iter(_BATCH_ROWS)

    def read_records() -> PositionedRecords:
        """Yield the rows with their positions, from `row 1` on."""
        for number, record in enumerate(_rows_of_batches(read_batches()), 1):
            yield f"row {number}", record

    return Table(schema.names, format_guess="", read_records=read_records), features


def _rows_of_batches(batches: Iterable[Any]) -> Iterator[dict[str, Any] | BadRecord]:
    """Yield the rows of Arrow batches as dicts, and a bad record for one that cannot be converted.

    A batch that cannot be converted as a whole is cut into its rows, to find the faulty ones.
    """
    for batch in batches:
        rows: Iterable[dict[str, Any] | BadRecord]
        try:
            rows = batch.to_pylist()
        except (UnicodeDecodeError, pa.ArrowException, ValueError, OverflowError) as error:
            if batch.num_rows > 1:
                single_rows = (batch.slice(index, length=1) for index in range(batch.num_rows))
                rows = _rows_of_batches(single_rows)
            else:
                bad_record = BadRecord(
                    reason="field_type",
                    wrong=f"a value cannot be read ({describe_error(error):.200})",
                    remedy=f"write it anew in {ROW_LOCATION}",
                )
                rows = [bad_record]
        yield from rows


def _open_csv(path: Path, columns: Columns) -> Table:
    """Open a table of CSV, whose encoding and delimiter are guessed.

    Excel chooses both by the language it runs in. The whole file is read for its encoding, since
    its last letter may be the first that is not UTF-8. The delimiter is the one with which the
    header has most of the wanted columns.
    """
    encoding = _guess_encoding(path)
    stated_delimiter = ""
    with path.open(encoding=encoding, newline="") as file:
        header_line = file.readline()
        # Excel may name the delimiter in a line of its own, `sep=;`, before the header.
        if header_line.lower().startswith("sep=") and header_line[4:5] in _DELIMITERS:
            stated_delimiter = header_line[4:5]
            header_line = file.readline()
        # More than one line, since a cell in quotes may have line breaks.
        first_lines = header_line + "".join(islice(file, HEAD_RECORDS))
    usual_delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    delimiters = [stated_delimiter] if stated_delimiter else [usual_delimiter, *_DELIMITERS]
    header_by_delimiter = {
        delimiter: _parse_header(first_lines, delimiter) for delimiter in delimiters
    }

    def column_counts(delimiter: str) -> tuple[int, int]:
        """Return how many columns are wanted, and how many there are, if this is the delimiter."""
        header = header_by_delimiter[delimiter]
        return len(columns.needed_from(header)), len(header)

    delimiter = max(header_by_delimiter, key=column_counts)  # the first of equally good ones
    guesses = []
    if delimiter != usual_delimiter:
        guesses.append(f"with {_DELIMITERS[delimiter]} between the cells")
    if encoding == "cp1252":
        guesses.append("in the encoding of Windows (cp1252)")
    elif encoding == "utf-16":
        guesses.append("in UTF-16")
    format_guess = f"{path.name}, {' '.join(guesses)}" if guesses else ""
    read_rows = partial(
        _csv_rows,
        path,
        encoding=encoding,
        delimiter=delimiter,
        has_delimiter_line=bool(stated_delimiter),
        columns=columns,
    )
    return Table(header_by_delimiter[delimiter], format_guess=format_guess, read_records=read_rows)


def _parse_header(first_lines: str, delimiter: str) -> list[str]:
    """Return the names of the columns in a CSV file if `delimiter` separates its cells.

    `first_lines` begin with the header. Returns [] where they cannot be read with this delimiter.
    """
    with suppress(csv.Error):  # a quoted cell has no end where another delimiter stands behind it
        rows = _csv_reader(io.StringIO(first_lines, newline=""), delimiter)
        return [name.strip() for name in next(rows, [])]
    return []


def _guess_encoding(path: Path) -> str:
    """Return the name of a text file's encoding, as far as its bytes say it.

    It is UTF-16 if a byte order mark says so, UTF-8 if the whole file can be decoded as such, and
    else cp1252 of Windows.

    Raises `UserError` for a file that is none of them.
    """
    with path.open("rb") as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            return "utf-16"
        for encoding in ("utf-8-sig", "cp1252"):
            file.seek(0)
            decoder = codecs.getincrementaldecoder(encoding)()
            with suppress(UnicodeDecodeError):
                for piece in iter(partial(file.read, 2**20), b""):
                    decoder.decode(piece)
                decoder.decode(b"", final=True)
                return encoding
    raise UserError(
        f"input: {str(path)!r} is not UTF-8 text; save it as UTF-8 (in Excel: as CSV UTF-8)"
    )


def _csv_rows(
    path: Path, encoding: str, delimiter: str, has_delimiter_line: bool, columns: Columns
) -> PositionedRecords:
    """Yield the rows of a CSV file with their positions, such as `line 14`.

    Only the needed `columns` are in a row. With `has_delimiter_line` a line before the header names
    the delimiter (`sep=;`), as Excel writes it.
    """
    with path.open(encoding=encoding, newline="") as file:
        skipped_lines = 0
        if has_delimiter_line:
            file.readline()
            skipped_lines = 1  # the reader below does not count it
        rows = _csv_reader(file, delimiter)
        header = [name.strip() for name in next(rows, [])]
        indices = {name: header.index(name) for name in columns.needed_from(header)}
        lines_read = rows.line_num + skipped_lines
        for row in rows:
            # A row begins behind the last line that was read; a cell in quotes may have several.
            position = f"line {lines_read + 1}"
            lines_read = rows.line_num + skipped_lines
            if not any(row):
                continue  # an empty line
            if len(row) != len(header):
                delimiter_name = {",": "comma", ";": "semicolon"}.get(delimiter, "tab")
                bad_record = BadRecord(
                    reason="not_a_row",
                    wrong=f"the line has {len(row)} cells and the header {len(header)}",
                    remedy=(
                        f"quote cells that have a {delimiter_name} or a line break in "
                        f"{ROW_LOCATION}"
                    ),
                    original=delimiter.join(row).encode("utf-8", "replace"),
                )
                yield position, bad_record
                continue
            yield position, {name: row[index] for name, index in indices.items()}


def _csv_reader(file: TextIO, delimiter: str) -> Any:
    """Return the reader of `csv` for a file, with room for a picture in a cell."""
    csv.field_size_limit(min(_LONGEST_CELL, sys.maxsize))
    return csv.reader(file, delimiter=delimiter, strict=True)


def _open_workbook(path: Path, columns: Columns) -> Table:
    """Open the sheet of an Excel workbook whose first row has the most of the columns.

    Raises `UserError` for a workbook that cannot be read, or where openpyxl is missing.
    """
    try:
        import openpyxl
    except ImportError as error:
        raise UserError(
            f"input: {str(path)!r} is an Excel workbook, for which openpyxl is missing; pip "
            "install openpyxl (the extra 'excel'), or save it in Excel as CSV UTF-8"
        ) from error
    try:
        sheets = openpyxl.load_workbook(path, read_only=True, data_only=True).worksheets
        headers = [_first_row(sheet) for sheet in sheets]
    except Exception as error:  # zipfile, the XML parser and openpyxl raise errors of their own
        raise UserError(
            f"input: {str(path)!r} is no workbook that can be read ({describe_error(error):.200})"
        ) from error
    filled_sheets = [
        _Sheet(sheet, column_names=[str(name).strip() for name in header])
        for sheet, header in zip(sheets, headers, strict=True)
        if header
    ]
    if not filled_sheets:
        return Table([], format_guess="", read_records=lambda: iter(()))
    # The first of several sheets that have equally many of the wanted columns.
    chosen = max(filled_sheets, key=lambda sheet: len(columns.needed_from(sheet.column_names)))
    format_guess = ""
    if len(filled_sheets) > 1:
        format_guess = f"{path.name}, the sheet {chosen.worksheet.title!r} of {len(filled_sheets)}"
    read_rows = partial(_sheet_rows, chosen.worksheet, chosen.column_names)
    return Table(chosen.column_names, format_guess=format_guess, read_records=read_rows)


class _Sheet(NamedTuple):
    """A sheet of a workbook that is not empty, with the names in its first row."""

    worksheet: ReadOnlyWorksheet
    column_names: list[str]


def _first_row(sheet: ReadOnlyWorksheet) -> list[Any]:
    """Return the cells of the first row of a sheet that is not empty; [] where there is none."""
    for _, cells in _filled_rows(sheet):
        return cells
    return []


def _filled_rows(sheet: ReadOnlyWorksheet) -> Iterator[tuple[int, list[Any]]]:
    """Yield the rows of a sheet that are not empty, each with its number, from 1."""
    sheet.reset_dimensions()  # some programs write wrong ones
    for number, row in enumerate(sheet.iter_rows(), 1):
        values = [_cell_value(cell) for cell in row]
        while values and values[-1] in (None, ""):
            values.pop()
        if values:
            yield number, values


def _cell_value(cell: ReadOnlyCell) -> Any:
    """Return the value of a cell as Excel shows it: `50%` for 0.5 in per cent, up to 15 digits."""
    value = cell.value
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bool) or not isinstance(value, int | float):  # a date, or no value
        return value
    if "%" in (cell.number_format or ""):
        return f"{value * 100:.15g}%"
    return float(f"{value:.15g}") if isinstance(value, float) else value


def _sheet_rows(sheet: ReadOnlyWorksheet, names: list[str]) -> PositionedRecords:
    """Yield the rows of a sheet below its header with their positions, such as `row 14`.

    `names` are the names of the columns. Cells that a row lacks are None.
    """
    rows = _filled_rows(sheet)
    next(rows)  # the header
    for number, values in rows:
        missing_values = [None] * (len(names) - len(values))
        yield f"row {number}", dict(zip(names, [*values, *missing_values], strict=False))


def _open_webdataset(path: Path, columns: Columns) -> Table:
    """Open a tar of webdataset, whose columns are those of its first rows."""
    names: dict[str, None] = {}  # a dict keeps their order
    for _, record in islice(read_shard(path), HEAD_RECORDS):
        if isinstance(record, dict):
            names |= dict.fromkeys(record)
    return Table(list(names), format_guess="", read_records=partial(read_shard, path))
