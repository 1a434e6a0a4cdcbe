"""Where Geometry3K comes from. A source only reads: what every row has to satisfy stands in `data_prep.clean`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from data_prep.clean import RawProblem
from data_prep.sources.intergps import InterGPS
from data_prep.sources.tabular import from_hub, from_parquet

SOURCES = ("hub", "parquet", "intergps")


class Source(Protocol):
    """What the preparation needs to know of a source."""

    @property
    def sizes(self) -> dict[str, int]:
        """Rows of each split, under our names: train, validation, test."""

    def problems(self, split: str) -> Iterator[Callable[[], RawProblem]]:
        """One call a row, in a stable order: a row that cannot be read raises `RowError` and the iteration goes on."""


def open_source(kind: str, location: str) -> Source:
    """The source `kind` (one of `SOURCES`) at a dataset id or a path. Raises `UserError` where there is none."""
    if kind == "hub":
        return from_hub(location)
    return from_parquet(Path(location)) if kind == "parquet" else InterGPS(Path(location))
