"""Rows of a split that ask the same of the same pictures: repeats are counted, and contradictions
left out.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from adora_vl.conversion.problem import RowError
from adora_vl.conversion.quarantine import Quarantine
from adora_vl.data.dataset import Row, stored_rows, write_split
from adora_vl.rewards import grade
from adora_vl.utils.cli import shown

if TYPE_CHECKING:
    from datasets import Features


@dataclass(frozen=True)
class Answered:
    row_id: str
    gold: str
    origin: str  # where it stands in its source


_MANY = 8  # rows that share a picture: more than the versions of one problem
_TABLES = """
PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;
CREATE TABLE ids (id BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE asked (split TEXT, asked BLOB, number INTEGER, id TEXT, gold TEXT, origin TEXT,
                    PRIMARY KEY (split, asked, number)) WITHOUT ROWID;
CREATE TABLE pictures (picture BLOB PRIMARY KEY, count INTEGER, id TEXT) WITHOUT ROWID;
"""


def _of_the_disk(error: sqlite3.OperationalError) -> OSError:
    # SQLite calls a disk on which its file cannot grow an I/O error.
    return OSError(errno.ENOSPC, f"no room for what was seen of the rows ({error})")


class SeenRows:
    """What was seen of all rows, on the disk, so that the memory does not grow with them.

    Closed by `with`.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._number = 0

    def __enter__(self) -> SeenRows:
        self._base = sqlite3.connect(self._file, isolation_level=None)
        try:
            self._base.executescript(_TABLES + "BEGIN")
        except sqlite3.OperationalError as error:
            raise _of_the_disk(error) from error
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raises `OSError` for what the disk refused, as any other writing does."""
        self.close()
        if isinstance(error, sqlite3.OperationalError):
            raise _of_the_disk(error) from error

    def close(self) -> None:
        """Forget everything, so that no file of it is left."""
        self._base.close()
        self._file.unlink(missing_ok=True)

    def is_new(self, row_id: str) -> bool:
        key = hashlib.sha256(row_id.encode()).digest()[:12]
        return self._base.execute("INSERT OR IGNORE INTO ids VALUES (?)", (key,)).rowcount == 1

    def add(self, split: str, asked: bytes, pictures: Sequence[bytes], row: Answered) -> bool:
        """Remember a row. Returns whether it repeats one of its split before it, answer and all."""
        self._number += 1
        before = self._base.execute(
            "SELECT gold FROM asked WHERE split = ? AND asked = ?", (split, asked)
        ).fetchall()
        values = (split, asked, self._number, row.row_id, row.gold, row.origin)
        self._base.execute("INSERT INTO asked VALUES (?, ?, ?, ?, ?, ?)", values)
        for picture in set(pictures):
            counted = (
                "INSERT INTO pictures VALUES (?, 1, ?) ON CONFLICT DO UPDATE SET count = count + 1"
            )
            self._base.execute(counted, (picture, row.row_id))
        return any(_agree(gold, row.gold) for (gold,) in before)

    def contradicting(self, split: str) -> Pairs:
        """Each row of a question that has several answers, with a row that disagrees with it."""
        several = (
            "SELECT asked FROM asked WHERE split = ? GROUP BY asked HAVING COUNT(*) > 1 AND "
            "MIN(gold) < MAX(gold)"
        )
        found = {}
        for (asked,) in self._base.execute(several, (split,)):
            where = (
                "SELECT id, gold, origin FROM asked WHERE split = ? AND asked = ? ORDER BY number"
            )
            rows = [Answered(*row) for row in self._base.execute(where, (split, asked))]
            for row in rows:
                other = next((one for one in rows if not _agree(one.gold, row.gold)), None)
                if other is not None:
                    found[row.row_id] = (row, other)
        return found

    def shared_pictures(self) -> tuple[int, str]:
        """How many rows have a picture that many share, and the first of them."""
        counted = "SELECT COALESCE(SUM(count), 0), MIN(id) FROM pictures WHERE count >= ?"
        rows, example = self._base.execute(counted, (_MANY,)).fetchone()
        return rows, example


def _agree(one: str, other: str) -> bool:
    return one == other or grade(rf"\boxed{{{one}}}", other).verdict == "correct"


Pairs = dict[str, tuple[Answered, Answered]]  # by the id of the first


def leave_out(
    folder: Path, split: str, features: Features, contradicting: Pairs, quarantine: Quarantine
) -> int:
    """Write a split of `folder` once more without these rows, which go into the quarantine.

    Returns how many are left.

    They are known only when the last row was read, and by then the first is written: rows are never
    all in memory.
    """
    again = folder / "again"

    def kept() -> Iterator[Row]:
        for row in stored_rows(folder, split):
            if row["id"] not in contradicting:
                yield row
                continue
            own, other = contradicting[row["id"]]
            where = f"{other.origin} ({other.row_id})"
            answers = f"{shown(other.gold)} and not {shown(own.gold)}"
            wrong = f"its question and pictures are those of {where}, where the answer is {answers}"
            originals = [image["bytes"] for image in row["images"]]
            record = {name: row[name] for name in ("problem", "answer", "answer_raw", "choices")}
            fault = ("contradiction", wrong, f"correct one of them, or remove {own.origin}")
            quarantine.add(split, RowError(own.row_id, *fault, originals=originals, record=record))

    count = write_split(kept(), folder=again, split=split, features=features)
    for before in (folder / "data").glob(f"{split}-*.parquet"):
        before.unlink()
    for path in (again / "data").iterdir():
        path.replace(folder / "data" / path.name)
    shutil.rmtree(again)
    return count
