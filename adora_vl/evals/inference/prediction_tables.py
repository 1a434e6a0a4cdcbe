"""Reads predictions that another program wrote as a table: VLMEvalKit's .xlsx and .tsv, or .csv."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from adora_vl.evals.records import Prediction
from adora_vl.utils.errors import UserError, in_one_line

if TYPE_CHECKING:
    from pandas import DataFrame

_WORKBOOKS = (".xlsx", ".xlsm")
_SEPARATORS = {".tsv": "\t", ".csv": ","}
# A cell is text, and these fields of a prediction are numbers.
_NUMBERS = ("precision", "sample", "n_tokens")


def is_table(path: Path) -> bool:
    """Whether a file's name says that it is a table."""
    return path.suffix.lower() in (*_WORKBOOKS, *_SEPARATORS)


def rows_of_table(path: Path) -> Iterator[Prediction]:
    """The rows of a table of predictions, as objects.

    A cell is text; an empty one is None; one that holds a list or an object, as JSON or as Python
    prints it, is that. A table has no column of objects, so where it lacks `metadata` a row's
    metadata are all of its cells: the groups of a score are found there. Raises `UserError` for a
    table that cannot be read, and where openpyxl is missing.
    """
    for cells in _read(path).to_dict(orient="records"):
        row: Prediction = {str(name): _value(str(name), cell) for name, cell in cells.items()}
        row.setdefault("metadata", dict(row))
        yield row


def _read(path: Path) -> DataFrame:
    """Return the table with all cells as text, and empty ones as empty texts."""
    import pandas as pd  # it takes half a second, and most predictions are no table

    suffix = path.suffix.lower()
    try:
        if suffix in _WORKBOOKS:
            return pd.read_excel(path, dtype=str, keep_default_na=False)
        return pd.read_csv(path, sep=_SEPARATORS[suffix], dtype=str, keep_default_na=False)
    except ImportError as error:
        raise UserError(
            f"predictions: {str(path)!r} is an Excel workbook, for which openpyxl is missing; pip "
            "install openpyxl (the extra 'excel'), or save it as .tsv"
        ) from error
    except Exception as error:  # zipfile, the XML parser and the parsers of pandas have their own
        raise UserError(
            f"predictions: {str(path)!r} cannot be read as a table "
            f"({in_one_line(error):.200}); save it again"
        ) from error


def _value(name: str, cell: str) -> object:
    """What a cell holds: None, a number, a list, an object, or its text."""
    if not cell or (cell == "nan" and name != "response"):
        return None
    if name in _NUMBERS:
        with suppress(ValueError):
            number = float(cell)
            return int(number) if math.isfinite(number) and number.is_integer() else number
    if cell[0] in "[{":
        for parse in (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                return parse(cell)
    return cell
