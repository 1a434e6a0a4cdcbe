"""Finds rows of a split that ask the same question of the same pictures.

Rows that repeat another one, answer and all, are counted. Rows whose answers contradict each other
are left out.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

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
CREATE TABLE answered_rows (split TEXT, question BLOB, number INTEGER, id TEXT, gold TEXT,
                            origin TEXT, PRIMARY KEY (split, question, number)) WITHOUT ROWID;
CREATE TABLE pictures (picture BLOB PRIMARY KEY, count INTEGER, id TEXT) WITHOUT ROWID;
"""


def _disk_full_error(error: sqlite3.OperationalError) -> OSError:
    """Return the usual error of a full disk for the error that SQLite has for it."""
    return OSError(errno.ENOSPC, f"no room for what was seen of the rows ({error})")


class SeenRows:
    """The hashes and answers of all rows so far, in an SQLite file instead of in memory.

    It is a context manager; the end of the `with` block removes the file.
    """

    def __init__(self, file: Path) -> None:
        """Name the file, which is written when the `with` block begins."""
        self._file = file
        self._row_count = 0

    def __enter__(self) -> SeenRows:
        """Open the database in its file. Raises `OSError` where the disk has no room for it."""
        # All is written in one transaction that is never committed, since nobody reads it later.
        self._database = sqlite3.connect(self._file, isolation_level=None)
        try:
            self._database.executescript(_TABLES + "BEGIN")
        except sqlite3.OperationalError as error:
            raise _disk_full_error(error) from error
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Remove the file, and turn an error of SQLite into the usual one of a full disk."""
        self.close()
        if isinstance(error, sqlite3.OperationalError):
            raise _disk_full_error(error) from error

    def close(self) -> None:
        """Forget all rows, and remove the file."""
        self._database.close()
        self._file.unlink(missing_ok=True)

    def is_new(self, row_id: str) -> bool:
        """Remember the id of a row, and return whether no earlier row had it."""
        id_hash = hashlib.sha256(row_id.encode()).digest()[:12]
        inserted = self._database.execute("INSERT OR IGNORE INTO ids VALUES (?)", (id_hash,))
        return inserted.rowcount == 1

    def add(self, split: str, question: bytes, pictures: Sequence[bytes], row: AnsweredRow) -> bool:
        """Remember a row, and return whether an earlier row has the same question and answer.

        Only rows of the same split are compared. `question` and `pictures` are the hashes of the
        row's `Fingerprint`.
        """
        self._row_count += 1
        earlier_golds = self._database.execute(
            "SELECT gold FROM answered_rows WHERE split = ? AND question = ?", (split, question)
        ).fetchall()
        self._database.execute(
            "INSERT INTO answered_rows VALUES (?, ?, ?, ?, ?, ?)",
            (split, question, self._row_count, row.row_id, row.gold, row.origin),
        )
        for picture in set(pictures):
            self._database.execute(
                "INSERT INTO pictures VALUES (?, 1, ?) ON CONFLICT DO UPDATE SET count = count + 1",
                (picture, row.row_id),
            )
        return any(_has_same_answer(gold, row.gold) for (gold,) in earlier_golds)

    def contradicting(self, split: str) -> dict[str, Contradiction]:
        """Find the rows of a split that have the same question as another row, but another answer.

        Returns them by their ids, each with the first row that contradicts it.
        """
        # Only questions whose answers are not all spelt the same need to be compared.
        questions = self._database.execute(
            "SELECT question FROM answered_rows WHERE split = ? GROUP BY question "
            "HAVING COUNT(*) > 1 AND "
            "MIN(gold) < MAX(gold)",
            (split,),
        )
        contradictions = {}
        for (question,) in questions:
            records = self._database.execute(
                "SELECT id, gold, origin FROM answered_rows WHERE split = ? AND question = ? "
                "ORDER BY number",
                (split, question),
            )
            rows = [
                AnsweredRow(row_id=row_id, gold=gold, origin=origin)
                for row_id, gold, origin in records
            ]
            for row in rows:
                rivals = (rival for rival in rows if not _has_same_answer(rival.gold, row.gold))
                first_rival = next(rivals, None)
                if first_rival is not None:
                    contradictions[row.row_id] = Contradiction(row=row, rival=first_rival)
        return contradictions

    def shared_pictures(self) -> tuple[int, str]:
        """Return how many rows have a picture that many rows share, and the id of one of them."""
        row_count, example_id = self._database.execute(
            "SELECT COALESCE(SUM(count), 0), MIN(id) FROM pictures WHERE count >= ?",
            (_MANY_ROWS_PER_PICTURE,),
        ).fetchone()
        return row_count, example_id


def _has_same_answer(answer: str, gold: str) -> bool:
    r"""Return whether the grader takes `answer`, written in a \boxed{}, as right for `gold`."""
    return answer == gold or grade(rf"\boxed{{{answer}}}", gold).verdict == "correct"


class Contradiction(NamedTuple):
    """A row, and another row with the same question and another answer."""

    row: AnsweredRow
    rival: AnsweredRow


def write_without_contradictions(
    folder: Path,
    split: str,
    features: Features,
    contradicting: Mapping[str, Contradiction],
    quarantine: Quarantine,
) -> int:
    """Write a split of `folder` again without the rows that contradict each other.

    They go into the quarantine instead. All rows were written first, since a contradiction is known
    only when the last row was read, and the rows are never all in memory.

    `contradicting` has these rows by their ids. Returns how many rows the split has left.
    """
    new_folder = folder / "again"

    def remaining_rows() -> Iterator[Row]:
        """Yield the rows that contradict no other, and put the rest into the quarantine."""
        for row in stored_rows(folder, split):
            contradiction = contradicting.get(row["id"])
            if contradiction is None:
                yield row
            else:
                quarantine.add(split, _error_of(row, contradiction))

    # The old files are removed only when the new ones are complete.
    row_count = write_split(remaining_rows(), folder=new_folder, split=split, features=features)
    for old_file in (folder / "data").glob(f"{split}-*.parquet"):
        old_file.unlink()
    for new_file in (new_folder / "data").iterdir():
        new_file.replace(folder / "data" / new_file.name)
    shutil.rmtree(new_folder)
    return row_count


def _error_of(row: Row, contradiction: Contradiction) -> RowError:
    """Return the error that sends a stored row to the quarantine, because another contradicts it."""
    refused = contradiction.row
    rival = contradiction.rival
    return RowError(
        row_id=refused.row_id,
        kind="contradiction",
        wrong=(
            f"its question and pictures are those of {rival.origin} ({rival.row_id}), where the "
            f"answer is {shown(rival.gold)} and not {shown(refused.gold)}"
        ),
        remedy=f"correct one of them, or remove {refused.origin}",
        originals=[image["bytes"] for image in row["images"]],
        record={name: row[name] for name in ("problem", "answer", "answer_raw", "choices")},
    )
