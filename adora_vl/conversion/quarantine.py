"""Stores rows that cannot be used, and has the notes on rows that are used all the same.

`quarantine.jsonl` has the reasons, and the folder `quarantine` the original bytes. The bytes are
separate files instead of text in the JSON. A viewer can then open a picture, `less` stays usable,
and a 40 MB scan is not one line. Files are named by their content, so that nothing from the input
becomes part of a path.
"""

import hashlib
import json
import math
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adora_vl.conversion.problem import RowError
from adora_vl.utils.cli import MistakesError, amount, shown

QUARANTINE_NAME = "quarantine.jsonl"
LEAK = "leak"  # a sound row of the training split that stands in a held-out one too
MAX_SHARE = 0.02  # with a larger share of broken rows, the source itself is taken for broken
_SIGNATURES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg", b"GIF8": "gif", b"{": "json"}


class Quarantine:
    """Writes refused rows into `folder`, one at a time, so that none stays in memory."""

    def __init__(self, folder: Path) -> None:
        """Begin without a refused row; the file is written to `folder` with the first one."""
        self._folder = folder
        self._first_faults: dict[str, str] = {}  # by kind of fault, the first row and what is wrong
        self._row_count = 0
        self.broken_count = 0  # of rows that are unusable; a leak is sound in itself
        self.kind_counts: Counter[str] = Counter()  # rows with a fault, by the kind of fault

    def add(self, split: str, error: RowError) -> None:
        """Write a refused row of a split, with all its faults and its original bytes."""
        line: dict[str, Any] = {
            "id": error.row_id,
            "split": split,
            "reason": error.kind,
            "detail": str(error),
            "record": error.record,
            "files": [self._store(original) for original in error.originals],
        }
        if error.further_faults:
            line["also"] = [
                {"reason": fault.kind, "detail": fault.sentence} for fault in error.further_faults
            ]
        with (self._folder / QUARANTINE_NAME).open("a", encoding="utf-8") as stream:
            # In ASCII even half a surrogate pair can be written.
            stream.write(json.dumps(line, sort_keys=True) + "\n")
        self._row_count += 1
        if error.kind != LEAK:
            self.broken_count += 1
        # A row with two faults of one kind counts once for it.
        fault_by_kind = {fault.kind: fault for fault in (*error.further_faults, error)}
        for kind, fault in fault_by_kind.items():
            self.kind_counts[kind] += 1
            self._first_faults.setdefault(kind, f"{error.row_id}: {fault.sentence}")

    def summary(self) -> dict[str, Any]:
        """Return the counts of refused rows for the manifest.

        A row with several faults counts for each of their kinds.
        """
        return {"rows": self._row_count, "reasons": dict(sorted(self.kind_counts.items()))}

    def check(self, rows: int, stored: int, allowed: float, report: Path) -> None:
        """Refuse a source with too many unusable rows, which is probably broken as a whole.

        `rows` is how many were read, `stored` how many of them are stored, and `allowed` the
        largest share that may be unusable. `report` is the folder where the user will find the
        refused rows.

        Raises `MistakesError`, with a line for each kind of fault, where a larger share is unusable,
        or no row is stored.
        """
        if self.broken_count <= allowed * rows and stored:
            return
        share = self.broken_count / rows
        # The share is rounded up, so that the option that is proposed suffices.
        percent = math.ceil(share * 100)
        remedy = "no row is left to use"
        if stored:
            remedy = f"mend them, or accept them with --allow-quarantined {percent / 100:.2f}"
        lines_on_kinds = []
        for kind, count in self.kind_counts.most_common():
            # Leaks are no fault of the source. They are named only where nothing else was refused.
            if kind != LEAK or not self.broken_count:
                first_fault = self._first_faults[kind]
                lines_on_kinds.append(f"{kind}: {amount(count, 'row')}, the first is {first_fault}")
        raise MistakesError(
            [
                f"input: {self.broken_count} of {rows} rows ({share:.1%}) cannot be used, over the "
                f"{allowed * 100:g}% allowed",
                *lines_on_kinds,
                f"all of them are in {report / QUARANTINE_NAME}; {remedy}",
            ]
        )

    def move_to(self, folder: Path) -> None:
        """Move all refused rows into another folder, for a preparation that fails."""
        for path in (self._folder / QUARANTINE_NAME, self._folder / "quarantine"):
            if path.exists():
                shutil.move(path, folder / path.name)

    def _store(self, original: bytes) -> str:
        """Write the bytes of a row into a file named by its hash; return the name in the folder."""
        endings = (end for start, end in _SIGNATURES.items() if original.startswith(start))
        ending = next(endings, "bin")
        name = f"quarantine/{hashlib.sha256(original).hexdigest()[:24]}.{ending}"
        path = self._folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(original)
        return name


def first_details(folder: Path) -> list[str]:
    """Return for each kind of fault what is wrong with the first row that has it; leaks are left out.

    `folder` is a data set with a quarantine, the file of its unusable rows.
    """
    details: dict[str, str] = {}  # by the kind of fault
    with (folder / QUARANTINE_NAME).open(encoding="utf-8") as stream:
        for line in map(json.loads, stream):
            for fault in (line, *line.get("also", ())):
                if fault["reason"] != LEAK and fault["reason"] not in details:
                    # The first fault of a line names the row already.
                    prefix = "" if fault is line else f"{line['id']}: "
                    details[fault["reason"]] = f"{prefix}{fault['detail']}"
    return list(details.values())


# The name of each note, and the words that follow "12 of the rows", with a row as an example.
NOTES = {
    "no_facts": "have no facts in words, such as {example}: what their diagram says does not suffice "
    "without looking",
    "without_image": "have no image, such as {example}",
    "parts": (
        "number more images than they have, such as {example}, as where the parts of one picture are numbered: it "
        'stands at the first number, and the others stay as the words "image 2"'
    ),
    "options": 'have options that name an image, such as {example}: there it stays as the words "image '
    '2"',
    "repeats": "repeat another row, answer and all, such as {example}; they were kept",
    "percent": (
        "have a percentage as the answer, such as {example}, which the problem does not ask for: 50 is wrong for 50%, "
        'so say "in percent" in the problem, or give the number alone'
    ),
    "words": (
        "have words beside a number as the answer, such as {example}: the number alone is wrong "
        "for them, so give the number, and say in the problem what it counts"
    ),
    "stated": (
        "have a solution or a sentence as the answer, such as {example}: what stands behind its last "
        "`Answer:` or `The answer is` was taken"
    ),
    "options_in_text": (
        "have their options in the text of the problem, such as {example}: they became choices, "
        "which the prompt lists; --keep-options-in-text leaves them there"
    ),
    "no_answer": (
        "have an answer that many tables write where there is none, such as {example}: it is "
        "taken as a text, so leave such rows out unless it is one"
    ),
    "letter": (
        "have a letter as the answer and no options, such as {example}: name the column with the "
        "options, choices=COLUMN, or write them into the problem"
    ),
    "signs": (
        "have an answer that can be read as a text of signs alone, such as {example}: another "
        "spelling is wrong for it, so write a number, an expression or a word where one is meant"
    ),
    "one_picture": (
        "share one picture with seven others or more, such as {example}: see whether "
        "images=COLUMN names the right one"
    ),
    "spelling": "name a picture in another spelling than its file has, such as {example}; that file was "
    "taken",
    "format": "were read from {example}; see whether the prompt below is right, or save the table as "
    "CSV UTF-8",
    "instruction": "end with an instruction on how to answer, such as {example}; ",
}
_KEPT = "it was kept, beside the training's own system prompt: --drop-instruction takes it off"
_DROPPED = "it was taken off"
_SHOWN = 100  # characters of an example that are printed


def note_lines(manifest: Mapping[str, Any]) -> list[str]:
    """Return the remarks of a manifest on rows that were used, as lines for the user to read.

    A note in the manifest has the number of rows that it is true of, and one of them as an example.
    """
    lines = []
    for name, note in (manifest.get("noted") or {}).items():
        example = shown(note["example"], _SHOWN) if name == "instruction" else note["example"]
        line = f"noted: {note['rows']} of the rows {NOTES[name].format(example=example)}"
        if name == "instruction":
            line += _DROPPED if manifest["arguments"].get("drop_instruction") else _KEPT
        lines.append(line)
    return lines
