"""Decides which rows of a source are kept. Each row is cleaned alone, then compared with the others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from data_prep.clean_row import PixelLimits, RawProblem, RowError, to_row
from data_prep.images import png_bytes
from data_prep.leakage import Fingerprint, LeakIndex, fingerprint
from data_prep.quarantine import LEAK, Quarantine
from data_prep.schema import Row

HELD_OUT = ("test", "validation")  # read before train, so that a leak is known when its training row comes
_SHOWN_LEAKS = 1000  # in the manifest; a dropped row is in the quarantine anyway


@dataclass(frozen=True)
class Cleaned:
    """A usable row with images as they will be stored, its fingerprint, and its original bytes."""

    row: Row
    print_: Fingerprint
    originals: tuple[bytes, ...]

    def refuse(self, kind: str, wrong: str, remedy: str) -> RowError:
        """The error that sends this row to the quarantine."""
        record = {name: self.row[name] for name in ("problem", "answer", "answer_raw", "choices")}
        return RowError(self.row["id"], kind, wrong, remedy, originals=self.originals, record=record)


def clean_one(read: Callable[[], RawProblem], limits: PixelLimits) -> Cleaned | RowError:
    """Read and clean one row. An error is returned instead of raised, because it is sent between processes."""
    try:
        raw = read()
        row = to_row(raw, limits)
    except RowError as error:
        return error
    print_ = fingerprint(row["problem"], row["answer"], row["images"])
    images = [{"bytes": png_bytes(image), "path": None} for image in row["images"]]
    return Cleaned({**row, "images": images}, print_, raw.originals)


class Intake:
    """Remembers the ids, held-out diagrams and refused rows seen so far. It holds hashes instead of rows."""

    def __init__(self, quarantine: Quarantine, *, keep_leaks: bool) -> None:
        self._quarantine = quarantine
        self._keep_leaks = keep_leaks
        self._ids: set[bytes] = set()
        self._index = LeakIndex()
        self._leaks: list[dict[str, str]] = []
        self.leaks_found = self.leaks_dropped = self.read = 0

    def kept(self, split: str, results: Iterable[Cleaned | RowError]) -> Iterator[Row]:
        """Yields the rows to store, in order. The others go into the quarantine."""
        for result in results:
            self.read += 1
            refused = result if isinstance(result, RowError) else self._refused(split, result)
            if refused is not None:
                self._quarantine.add(split, refused)
                continue
            assert isinstance(result, Cleaned)
            yield result.row

    def leaks(self) -> dict[str, Any]:
        """For the manifest: `rows` names the first thousand."""
        return {"found": self.leaks_found, "dropped": self.leaks_dropped, "rows": self._leaks}

    def _refused(self, split: str, cleaned: Cleaned) -> RowError | None:
        row_id = cleaned.row["id"]
        key = hashlib.sha256(row_id.encode()).digest()[:12]
        if key in self._ids:
            return cleaned.refuse("duplicate_id", "another row has this id", "give every row an id of its own")
        self._ids.add(key)
        return self._leaked(split, cleaned)

    def _leaked(self, split: str, cleaned: Cleaned) -> RowError | None:
        """The error for a training row that is dropped as a leak, or None."""
        leak = self._index.find(split, cleaned.print_)
        if split in HELD_OUT:
            self._index.add(split, cleaned.row["id"], cleaned.print_)
        if leak is None:
            return None
        other, how = leak
        self.leaks_found += 1
        if len(self._leaks) < _SHOWN_LEAKS:
            self._leaks.append({"id": cleaned.row["id"], "also": other, "by": how})
        if self._keep_leaks or split in HELD_OUT:
            return None
        self.leaks_dropped += 1
        wrong = f"the diagram and question of {other} stand in this training row too (by {how} comparison)"
        return cleaned.refuse(LEAK, wrong, "keep such rows with --keep-leaks")
