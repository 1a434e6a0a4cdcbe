"""Where Geometry3K comes from. A source only reads: what every row has to satisfy stands in `data_prep.clean_row`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from adora_vl.errors import UserError
from data_prep.clean_row import RawProblem
from data_prep.sources.hub import DATASET_ID, from_hub
from data_prep.sources.intergps import DIAGRAMS, InterGPS
from data_prep.sources.tabular import from_parquet

__all__ = ["DATASET_ID", "DIAGRAMS", "SOURCES", "Source", "open_source"]

SOURCES = ("hub", "parquet", "intergps")


class Source(Protocol):
    """What the preparation needs to know of a source."""

    @property
    def sizes(self) -> dict[str, int]:
        """Rows of each split, under our names: train, validation, test."""

    @property
    def revision(self) -> str | None:
        """The commit that was read, where the source has one."""

    def problems(self, split: str) -> Iterator[Callable[[], RawProblem]]:
        """One call per row, in a stable order: a row that cannot be read raises `RowError` and the iteration goes on.

        The calls can be pickled, so that another process can make them.
        """


def open_source(kind: str, location: str | None, *, revision: str | None = None, diagram: str | None = None) -> Source:
    """The source `kind` (one of `SOURCES`) at a dataset id or a path. Raises `UserError` where there is none."""
    if revision is not None and kind != "hub":
        raise UserError(f"revision: {revision!r} is for --source hub alone; leave it out with --source {kind}")
    if diagram is not None and kind != "intergps":
        raise UserError(f"diagram: {diagram!r} is for --source intergps alone; leave it out with --source {kind}")
    if kind == "hub":
        return from_hub(location or DATASET_ID, revision)
    if not location:
        raise UserError(f"input: missing; --source {kind} needs the path of the data")
    return from_parquet(Path(location)) if kind == "parquet" else InterGPS(Path(location), diagram or "plain")
