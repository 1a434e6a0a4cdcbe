"""Finds rows of a split that ask the same question of the same pictures.

Rows that repeat another one, answer and all, are counted. Rows whose answers contradict each other
are left out.
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
class AnsweredRow:
    """The answer of a row, and where the row stands."""

    row_id: str
    gold: str
    origin: str  # where the row stands in its source


_MANY_ROWS_PER_PICTURE = 8  # rows that share one picture; versions of one problem are fewer
_TABLES = """
PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;
CREATE TABLE ids (id BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE asked (split TEXT, asked BLOB, number INTEGER, id TEXT, gold TEXT, origin TEXT,
                    PRIMARY KEY (split, asked, number)) WITHOUT ROWID;
CREATE TABLE pictures (picture BLOB PRIMARY KEY, count INTEGER, id TEXT) WITHOUT ROWID;
"""


def _disk_full_error(error: sqlite3.OperationalError) -> OSError:
    """Return the error of a full disk, which SQLite reports as an I/O error of its own."""
    return OSError(errno.ENOSPC, f"no room for what was seen of the rows ({error})")


class SeenRows:
    """The hashes and answers of all rows so far, in a file, so that memory does not grow with them.

    It is used by `with`, whose end removes the file.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._number = 0

    def __enter__(self) -> SeenRows:
        """Open the data base in its file. Raises `OSError` where the disk has no room for it."""
        self._base = sqlite3.connect(self._file, isolation_level=None)
        try:
            self._base.executescript(_TABLES + "BEGIN")
        except sqlite3.OperationalError as error:
            raise _disk_full_error(error) from error
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close, and raise `OSError` for what the disk refused, as any other writing does."""
        self.close()
        if isinstance(error, sqlite3.OperationalError):
            raise _disk_full_error(error) from error

    def close(self) -> None:
        """Forget everything, and remove the file."""
        self._base.close()
        self._file.unlink(missing_ok=True)

    def is_new(self, row_id: str) -> bool:
        """Remember an id, and return whether no row before had it."""
        key = hashlib.sha256(row_id.encode()).digest()[:12]
        return self._base.execute("INSERT OR IGNORE INTO ids VALUES (?)", (key,)).rowcount == 1

    def add(self, split: str, question: bytes, pictures: Sequence[bytes], row: AnsweredRow) -> bool:
        """Remember a row, and return whether it repeats one of its split before, answer and all.

        `question` and `pictures` are the hashes of a `Fingerprint`.
        """
        self._number += 1
        before = self._base.execute(
            "SELECT gold FROM asked WHERE split = ? AND asked = ?", (split, question)
        ).fetchall()
        values = (split, question, self._number, row.row_id, row.gold, row.origin)
        self._base.execute("INSERT INTO asked VALUES (?, ?, ?, ?, ?, ?)", values)
        for picture in set(pictures):
            counted = (
                "INSERT INTO pictures VALUES (?, 1, ?) ON CONFLICT DO UPDATE SET count = count + 1"
            )
            self._base.execute(counted, (picture, row.row_id))
        return any(_has_same_answer(gold, row.gold) for (gold,) in before)

    def contradicting(self, split: str) -> Contradictions:
        """Return each row that another row of its split contradicts, by id, with that other row."""
        several = (
            "SELECT asked FROM asked WHERE split = ? GROUP BY asked HAVING COUNT(*) > 1 AND "
            "MIN(gold) < MAX(gold)"
        )
        pairs = {}
        for (question,) in self._base.execute(several, (split,)):
            where = (
                "SELECT id, gold, origin FROM asked WHERE split = ? AND asked = ? ORDER BY number"
            )
            rows = [AnsweredRow(*row) for row in self._base.execute(where, (split, question))]
            for row in rows:
                rival = next(
                    (rival for rival in rows if not _has_same_answer(rival.gold, row.gold)), None
                )
                if rival is not None:
                    pairs[row.row_id] = (row, rival)
        return pairs

    def shared_pictures(self) -> tuple[int, str]:
        """Return how many rows have a picture that many rows share, and the id of one of them."""
        counted = "SELECT COALESCE(SUM(count), 0), MIN(id) FROM pictures WHERE count >= ?"
        rows, example = self._base.execute(counted, (_MANY_ROWS_PER_PICTURE,)).fetchone()
        return rows, example


def _has_same_answer(answer: str, gold: str) -> bool:
    """Return whether an answer would be graded as correct against `gold`."""
    return answer == gold or grade(rf"\boxed{{{answer}}}", gold).verdict == "correct"


# A row and one that contradicts it, by the id of the first.
Contradictions = dict[str, tuple[AnsweredRow, AnsweredRow]]


def write_without_contradictions(
    folder: Path,
    split: str,
    features: Features,
    contradicting: Contradictions,
    quarantine: Quarantine,
) -> int:
    """Write a split of `folder` once more without the contradicting rows, and return its size.

    These rows go into the quarantine. A contradiction is known only when the last row was read, and
    by then the first rows are written, since rows are never all in memory.
    """
    again = folder / "again"

    def remaining_rows() -> Iterator[Row]:
        """Yield the rows that contradict no other, and put the others into the quarantine."""
        for row in stored_rows(folder, split):
            if row["id"] not in contradicting:
                yield row
                continue
            refused, rival = contradicting[row["id"]]
            where = f"{rival.origin} ({rival.row_id})"
            answers = f"{shown(rival.gold)} and not {shown(refused.gold)}"
            wrong = f"its question and pictures are those of {where}, where the answer is {answers}"
            originals = [image["bytes"] for image in row["images"]]
            record = {name: row[name] for name in ("problem", "answer", "answer_raw", "choices")}
            fault = RowError(
                row_id=refused.row_id,
                kind="contradiction",
                wrong=wrong,
                remedy=f"correct one of them, or remove {refused.origin}",
                originals=originals,
                record=record,
            )
            quarantine.add(split, fault)

    # The old files go only when the new ones are whole.
    count = write_split(remaining_rows(), folder=again, split=split, features=features)
    for old_file in (folder / "data").glob(f"{split}-*.parquet"):
        old_file.unlink()
    for path in (again / "data").iterdir():
        path.replace(folder / "data" / path.name)
    shutil.rmtree(again)
    return count
