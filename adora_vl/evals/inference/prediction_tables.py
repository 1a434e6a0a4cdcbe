"""Reads predictions that another program wrote as a table: VLMEvalKit's .xlsx and .tsv, or .csv."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from adora_vl.evals.records import Prediction
from adora_vl.utils.errors import UserError, describe_error

if TYPE_CHECKING:
    from pandas import DataFrame

_WORKBOOK_SUFFIXES = (".xlsx", ".xlsm")
_SEPARATOR_BY_SUFFIX = {".tsv": "\t", ".csv": ","}
# The fields of a prediction that are numbers. In a table every cell is text.
_NUMBER_FIELDS = ("precision", "sample", "n_tokens")
# The fields of a prediction that are texts, also where they have the form of a list or an object:
# the answer `[1, 2]`, or a response that is JSON.
_TEXT_FIELDS = ("pid", "question", "option", "answer", "response", "figure")


def is_table(path: Path) -> bool:
    """Return whether the name of a file says that it is a table."""
    return path.suffix.lower() in (*_WORKBOOK_SUFFIXES, *_SEPARATOR_BY_SUFFIX)


def read_table_rows(path: Path, columns: Mapping[str, str]) -> Iterator[Prediction]:
    """Yield the rows of a table of predictions, with the values that their cells stand for.

    Other programs write no column `metadata`, which holds an object. Without it all cells of a row
    are its metadata, since the groups of a score are looked up there.

    Args:
        path: The table.
        columns: The names of its columns by our names, if they differ. Our name says what a cell
            stands for; the rows have the names of the table.

    Raises `UserError` for a table that cannot be read, and where openpyxl is missing.
    """
    our_name_by_theirs = {theirs: ours for ours, theirs in columns.items()}
    for cells in _read_table(path).to_dict(orient="records"):
        row: Prediction = {}
        for name, cell in cells.items():
            our_name = our_name_by_theirs.get(str(name), str(name))
            row[str(name)] = _parse_cell(our_name, cell)
        row.setdefault("metadata", dict(row))
        yield row


def _read_table(path: Path) -> DataFrame:
    """Read a table with all cells as text, and empty ones as empty texts."""
    import pandas as pd  # it takes half a second, and most predictions are no table

    suffix = path.suffix.lower()
    try:
        if suffix in _WORKBOOK_SUFFIXES:
            return pd.read_excel(path, dtype=str, keep_default_na=False)
        separator = _SEPARATOR_BY_SUFFIX[suffix]
        return pd.read_csv(path, sep=separator, dtype=str, keep_default_na=False)
    except ImportError as error:
        raise UserError(
            f"predictions: {str(path)!r} is an Excel workbook, for which openpyxl is missing; pip "
            "install openpyxl (the extra 'excel'), or save it as .tsv"
        ) from error
    except Exception as error:  # zipfile, the XML parser and pandas raise errors of their own
        raise UserError(
            f"predictions: {str(path)!r} cannot be read as a table "
            f"({describe_error(error):.200}); save it again"
        ) from error


def _parse_cell(name: str, cell: str) -> object:
    """Return what a cell stands for: None, a number, a list, an object, or its text.

    - An empty cell is None, and so is `nan`, which pandas writes for a missing value. Only a
      response may really be `nan`.
    - `512.0` in the column `n_tokens` is 512. The name of the column decides whether a cell is a
      number, so that the `answer` `5` stays a text.
    - `['3', '5']` and `{"a": 1}` are a list and an object, in Python or in JSON, except in columns
      of texts, such as the answer.
    - Any other cell is its text, such as `[3, 5)`.
    """
    if not cell or (cell == "nan" and name != "response"):
        return None
    if name in _NUMBER_FIELDS:
        with suppress(ValueError):
            number = float(cell)
            return int(number) if math.isfinite(number) and number.is_integer() else number
    if cell[0] in "[{" and name not in _TEXT_FIELDS:
        for parse in (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                return parse(cell)
    return cell
