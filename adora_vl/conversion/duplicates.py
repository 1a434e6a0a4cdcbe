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
from adora_vl.utils.cli import short_repr

if TYPE_CHECKING:
    from datasets import Features


@dataclass(frozen=True)
class AnsweredRow:
    """What is remembered of a row to compare its answer with those of others."""

    row_id: str
    answer: str
    origin: str  # where the row stands in its source


_MANY_ROWS_PER_PICTURE = 8  # rows that share one picture; versions of one problem are fewer
_CREATE_TABLES = """
PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;
CREATE TABLE ids (id BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE answered_rows (split TEXT, prompt BLOB, number INTEGER, id TEXT, answer TEXT,
                            origin TEXT, PRIMARY KEY (split, prompt, number)) WITHOUT ROWID;
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
        """Set the path of the database, which is written when the `with` block begins."""
        self._file = file
        self._row_count = 0

    def __enter__(self) -> SeenRows:
        """Open the database in its file. Raises `OSError` where the disk has no room for it."""
        # All is written in one transaction that is never committed, since nobody reads it later.
        self._database = sqlite3.connect(self._file, isolation_level=None)
        try:
            self._database.executescript(_CREATE_TABLES + "BEGIN")
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

    def add_id(self, row_id: str) -> bool:
        """Remember the id of a row; return False where an earlier row had it, else True."""
        id_hash = hashlib.sha256(row_id.encode()).digest()[:12]
        inserted = self._database.execute("INSERT OR IGNORE INTO ids VALUES (?)", (id_hash,))
        return inserted.rowcount == 1

    def add(self, split: str, prompt: bytes, pictures: Sequence[bytes], row: AnsweredRow) -> bool:
        """Remember a row, and return whether an earlier row has the same question and answer.

        Only rows of the same split are compared.

        Args:
            split: the split of the row.
            prompt: the hash of all that a model is given, from the row's `Fingerprint`.
            pictures: a hash of each of its pictures, from there too.
            row: its answer, its id, and where it stands.
        """
        self._row_count += 1
        earlier_answers = self._database.execute(
            "SELECT answer FROM answered_rows WHERE split = ? AND prompt = ?", (split, prompt)
        ).fetchall()
        self._database.execute(
            "INSERT INTO answered_rows VALUES (?, ?, ?, ?, ?, ?)",
            (split, prompt, self._row_count, row.row_id, row.answer, row.origin),
        )
        for picture in set(pictures):
            self._database.execute(
                "INSERT INTO pictures VALUES (?, 1, ?) ON CONFLICT DO UPDATE SET count = count + 1",
                (picture, row.row_id),
            )
        return any(_is_same_answer(answer, row.answer) for (answer,) in earlier_answers)

    def find_contradictions(self, split: str) -> dict[str, Contradiction]:
        """Return the rows of a split that have the question of another row, but another answer.

        They are returned by their ids, each with the first row that contradicts it.
        """
        # Only questions whose answers are not all spelt the same need to be compared.
        prompts = self._database.execute(
            "SELECT prompt FROM answered_rows WHERE split = ? GROUP BY prompt "
            "HAVING COUNT(*) > 1 AND MIN(answer) < MAX(answer)",
            (split,),
        )
        contradictions = {}
        for (prompt,) in prompts:
            records = self._database.execute(
                "SELECT id, answer, origin FROM answered_rows WHERE split = ? AND prompt = ? "
                "ORDER BY number",
                (split, prompt),
            )
            rows = [
                AnsweredRow(row_id=row_id, answer=answer, origin=origin)
                for row_id, answer, origin in records
            ]
            for row in rows:
                for other_row in rows:
                    if not _is_same_answer(other_row.answer, row.answer):
                        contradictions[row.row_id] = Contradiction(row=row, other_row=other_row)
                        break
        return contradictions

    def shared_pictures(self) -> tuple[int, str]:
        """Return how many rows have a picture that many rows share, and the id of one of them."""
        row_count, example_id = self._database.execute(
            "SELECT COALESCE(SUM(count), 0), MIN(id) FROM pictures WHERE count >= ?",
            (_MANY_ROWS_PER_PICTURE,),
        ).fetchone()
        return row_count, example_id


def _is_same_answer(answer: str, reference: str) -> bool:
    r"""Return whether the grader takes `answer`, in a \boxed{}, as right where `reference` is."""
    return answer == reference or grade(rf"\boxed{{{answer}}}", reference).verdict == "correct"


class Contradiction(NamedTuple):
    """A row, and another row with the same question and another answer."""

    row: AnsweredRow
    other_row: AnsweredRow


def write_without_contradictions(
    folder: Path,
    split: str,
    features: Features,
    contradictions: Mapping[str, Contradiction],
    quarantine: Quarantine,
) -> int:
    """Write a split again without the rows that contradict each other; return how many are left.

    These rows go into the quarantine instead. All rows were written first, since a contradiction is
    known only when the last row was read, and the rows are never all in memory.

    Args:
        folder: the data set.
        split: the split that is written again.
        features: the schema of its rows.
        contradictions: the rows that contradict another row, by their ids.
        quarantine: the file of unusable rows.
    """
    new_folder = folder / "again"

    def remaining_rows() -> Iterator[Row]:
        """Yield the rows that contradict no other, and put the rest into the quarantine."""
        for row in stored_rows(folder, split):
            contradiction = contradictions.get(row["id"])
            if contradiction is None:
                yield row
            else:
                quarantine.add(split, _contradiction_error(row, contradiction))

    # The old files are removed only when the new ones are complete.
    row_count = write_split(remaining_rows(), folder=new_folder, split=split, features=features)
    for old_file in (folder / "data").glob(f"{split}-*.parquet"):
        old_file.unlink()
    for new_file in (new_folder / "data").iterdir():
        new_file.replace(folder / "data" / new_file.name)
    shutil.rmtree(new_folder)
    return row_count


def _contradiction_error(row: Row, contradiction: Contradiction) -> RowError:
    """Return the error of a stored row that another row contradicts, for the quarantine."""
    refused_row = contradiction.row
    other_row = contradiction.other_row
    return RowError(
        row_id=refused_row.row_id,
        reason="contradiction",
        wrong=(
            f"its question and pictures are those of {other_row.origin} ({other_row.row_id}), "
            f"where the answer is {short_repr(other_row.answer)} and not {short_repr(refused_row.answer)}"
        ),
        remedy=f"correct one of them, or remove {refused_row.origin}",
        original_files=[image["bytes"] for image in row["images"]],
        record={name: row[name] for name in ("problem", "answer", "answer_raw", "choices")},
    )
