"""Rows of a split that ask the same of the same pictures: repeats are counted, and contradictions left out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from adora_vl.data.dataset import Row, stored_rows, write_split
from adora_vl.rewards import grade
from adora_vl.utils.cli import shown
from data_prep.problem import RowError
from data_prep.quarantine import Quarantine

if TYPE_CHECKING:
    from datasets import Features


@dataclass(frozen=True)
class Answered:
    """What is remembered of a row: its id, its gold, and where it stands in its source."""

    row_id: str
    gold: str
    origin: str


@dataclass
class SameQuestions:
    """The rows of one split by what they ask, with what each gives as the answer."""

    _rows: dict[bytes, list[Answered]] = field(default_factory=dict)

    def add(self, asked: bytes, row: Answered) -> bool:
        """Remember a row. Returns whether it repeats one before it, answer and all."""
        before = self._rows.setdefault(asked, [])
        before.append(row)
        return any(_agree(other.gold, row.gold) for other in before[:-1])

    def contradicting(self) -> dict[str, tuple[Answered, Answered]]:
        """Each row of a question that has several answers, with a row that disagrees with it."""
        found = {}
        for rows in self._rows.values():
            for row in rows if len(rows) > 1 else ():
                other = next((one for one in rows if not _agree(one.gold, row.gold)), None)
                if other is not None:
                    found[row.row_id] = (row, other)
        return found


def _agree(one: str, other: str) -> bool:
    return one == other or grade(rf"\boxed{{{one}}}", other).verdict == "correct"


def leave_out(
    folder: Path,
    split: str,
    features: Features,
    contradicting: dict[str, tuple[Answered, Answered]],
    quarantine: Quarantine,
) -> int:
    """Write a split of `folder` once more without these rows, which go into the quarantine. Returns how many are left.

    They are known only when the last row was read, and by then the first is written: rows are never all in memory.
    """
    again = folder / "again"

    def kept() -> Iterator[Row]:
        for row in stored_rows(folder, split):
            if row["id"] in contradicting:
                quarantine.add(split, _contradiction(row, *contradicting[row["id"]]))
            else:
                yield row

    count = write_split(kept(), again, split, features)
    for before in (folder / "data").glob(f"{split}-*.parquet"):
        before.unlink()
    for path in (again / "data").iterdir():
        path.replace(folder / "data" / path.name)
    shutil.rmtree(again)
    return count


def _contradiction(row: Row, own: Answered, other: Answered) -> RowError:
    wrong = (
        f"its question and pictures are those of {other.origin} ({other.row_id}), where the answer is "
        f"{shown(other.gold)} and not {shown(own.gold)}"
    )
    originals = [image["bytes"] for image in row["images"]]
    record = {name: row[name] for name in ("problem", "answer", "answer_raw", "choices")}
    remedy = f"correct one of them, or remove {own.origin}"
    return RowError(own.row_id, "contradiction", wrong, remedy, originals=originals, record=record)
