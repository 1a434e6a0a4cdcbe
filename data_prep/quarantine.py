"""Keeps rows that cannot be used: `quarantine.jsonl` has the reasons, and `quarantine/` the original bytes.

The bytes are separate files instead of text in the JSON. A viewer can then open a picture, `less` stays usable, and a
40 MB scan is not one line. Files are named by their content, so that nothing from the input becomes part of a path.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from adora_vl.errors import UserError
from data_prep.clean_row import RowError

QUARANTINE_NAME = "quarantine.jsonl"
LEAK = "leak"  # a sound row of the training split that stands in a held-out one too
MAX_SHARE = 0.02  # of the rows; above it the source is broken rather than a few of its rows
_SIGNATURES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg", b"GIF8": "gif", b"{": "json"}


class Quarantine:
    """Written into `folder`, a folder still being made, row by row, so that nothing of it stays in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._first = ""
        self.kinds: Counter[str] = Counter()

    def add(self, split: str, error: RowError) -> None:
        """Keep one row's id, reason, texts and original bytes."""
        line = {
            "id": error.row_id,
            "split": split,
            "reason": error.kind,
            "detail": str(error),
            "record": error.record,
            "files": [self._kept(original) for original in error.originals],
        }
        with (self._folder / QUARANTINE_NAME).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line, sort_keys=True) + "\n")  # ASCII: half a surrogate pair is kept as well
        self.kinds[error.kind] += 1
        self._first = self._first or str(error)

    @property
    def broken(self) -> int:
        """Rows that cannot be used; a leak can."""
        return sum(self.kinds.values()) - self.kinds[LEAK]

    def summary(self) -> dict[str, Any]:
        """The counts of refused rows, as the manifest has them."""
        return {"rows": sum(self.kinds.values()), "reasons": dict(sorted(self.kinds.items()))}

    def check(self, rows: int, kept: int, allowed: float, report: Path) -> None:
        """Raise `UserError` where more than the share `allowed` of `rows` is broken, or no row is left."""
        if self.broken <= allowed * rows and kept:
            return
        kind, count = Counter({k: n for k, n in self.kinds.items() if k != LEAK} or self.kinds).most_common(1)[0]
        share = self.broken / rows
        remedy = (
            f"mend them, or accept them with --allow-quarantined {_rounded_up(share)}"
            if kept
            else "no row is left to use"
        )
        raise UserError(
            f"input: {self.broken} of {rows} rows ({share:.1%}) cannot be used, over the {allowed * 100:g}% allowed; "
            f"the commonest reason is {kind!r} ({count}); the first: {self._first}; "
            f"all of them: {report / QUARANTINE_NAME}; {remedy}"
        )

    def copy_to(self, folder: Path) -> None:
        """Into another folder, for a preparation that ends without output."""
        for name in (QUARANTINE_NAME, "quarantine"):
            path = self._folder / name
            if path.is_dir():
                shutil.copytree(path, folder / name)
            elif path.exists():
                shutil.copyfile(path, folder / name)

    def _kept(self, original: bytes) -> str:
        ending = next((end for sign, end in _SIGNATURES.items() if original.startswith(sign)), "bin")
        name = f"quarantine/{hashlib.sha256(original).hexdigest()[:24]}.{ending}"
        path = self._folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(original)
        return name


def _rounded_up(share: float) -> str:
    """A share of at least this much, in whole per cent."""
    return f"{-(-share * 100 // 1) / 100:.2f}"
