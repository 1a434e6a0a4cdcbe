"""Stores rows that cannot be used, and has the warnings on rows that are used all the same.

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
from adora_vl.utils.cli import MultiLineUserError, pluralize, short_repr

QUARANTINE_NAME = "quarantine.jsonl"
LEAK_REASON = "leak"  # a sound row of the training split that stands in a held-out one too
MAX_BROKEN_SHARE = 0.02  # with a larger share of broken rows, the source itself is taken for broken
_SUFFIX_BY_FIRST_BYTES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg", b"GIF8": "gif", b"{": "json"}


class Quarantine:
    """Writes refused rows into `folder`, one at a time, so that none stays in memory."""

    def __init__(self, folder: Path) -> None:
        """Set the folder; the file in it is written with the first refused row."""
        self._folder = folder
        # The id of the first row with each reason, and what is wrong with it.
        self._first_fault_by_reason: dict[str, str] = {}
        self._row_count = 0
        self.unusable_count = 0  # of refused rows but leaks: a leak is usable in itself
        self.reason_counts: Counter[str] = Counter()  # rows by the reason why they were refused

    def add(self, split: str, error: RowError) -> None:
        """Write a refused row of a split, with all its faults and its original bytes."""
        line: dict[str, Any] = {
            "id": error.row_id,
            "split": split,
            "reason": error.reason,
            "detail": str(error),
            "record": error.record,
            "files": [self._write_file(original) for original in error.original_files],
        }
        if error.further_faults:
            line["also"] = [
                {"reason": fault.reason, "detail": fault.sentence} for fault in error.further_faults
            ]
        with (self._folder / QUARANTINE_NAME).open("a", encoding="utf-8") as stream:
            # In ASCII even half a surrogate pair can be written.
            stream.write(json.dumps(line, sort_keys=True) + "\n")
        self._row_count += 1
        if error.reason != LEAK_REASON:
            self.unusable_count += 1
        # A row with two faults of one reason counts once for it.
        fault_by_reason = {fault.reason: fault for fault in (*error.further_faults, error)}
        for reason, fault in fault_by_reason.items():
            self.reason_counts[reason] += 1
            self._first_fault_by_reason.setdefault(reason, f"{error.row_id}: {fault.sentence}")

    def summary(self) -> dict[str, Any]:
        """Return the counts of refused rows for the manifest.

        For example, {"rows": 2, "reasons": {"gold": 1, "no_image": 2}}: a row with several faults
        counts for each of their reasons.
        """
        return {"rows": self._row_count, "reasons": dict(sorted(self.reason_counts.items()))}

    def check(self, rows: int, stored: int, allowed_share: float, quarantine_folder: Path) -> None:
        """Refuse a source with too many unusable rows, which is probably broken as a whole.

        Rows that were left out as leaks are usable in themselves, and do not count as unusable.

        Args:
            rows: how many rows were read, at least one.
            stored: how many of them are stored.
            allowed_share: the largest share that may be unusable.
            quarantine_folder: where the user will find the refused rows.

        Raises:
            MultiLineUserError: a larger share is unusable, or no row is stored. It has a line for
                each reason.
        """
        share = self.unusable_count / rows
        if share <= allowed_share and stored:
            return
        finding = f"input: {self.unusable_count} of {rows} rows ({share:.1%}) cannot be used"
        if share > allowed_share:
            finding += f", over the {allowed_share * 100:g}% allowed"
        # The share is rounded up, so that the option that is proposed suffices.
        percent = math.ceil(share * 100)
        remedy = "no row is left to use"
        if stored:
            remedy = f"mend them, or accept them with --allow-quarantined {percent / 100:.2f}"
        # Leaks are no fault of the source. They are listed only where nothing else was refused.
        lists_leaks = self.unusable_count == 0
        if lists_leaks:
            finding = f"input: all of {pluralize(rows, 'row')} are left out"
        reason_lines = []
        for reason, count in self.reason_counts.most_common():
            if reason != LEAK_REASON or lists_leaks:
                first_fault = self._first_fault_by_reason[reason]
                reason_lines.append(
                    f"{reason}: {pluralize(count, 'row')}, the first is {first_fault}"
                )
        raise MultiLineUserError(
            [
                finding,
                *reason_lines,
                f"all of them are in {quarantine_folder / QUARANTINE_NAME}; {remedy}",
            ]
        )

    def move_to(self, folder: Path) -> None:
        """Move all refused rows into another folder, for a preparation that fails."""
        for path in (self._folder / QUARANTINE_NAME, self._folder / "quarantine"):
            if path.exists():
                shutil.move(path, folder / path.name)

    def _write_file(self, original: bytes) -> str:
        """Write a file of a refused row, and return its path in the folder.

        The file is named by its hash, and its first bytes say the suffix: `quarantine/3f0a....png`.
        """
        suffix = "bin"
        for first_bytes, suffix_of_format in _SUFFIX_BY_FIRST_BYTES.items():
            if original.startswith(first_bytes):
                suffix = suffix_of_format
        name = f"quarantine/{hashlib.sha256(original).hexdigest()[:24]}.{suffix}"
        path = self._folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(original)
        return name


def first_detail_per_reason(folder: Path) -> list[str]:
    """Return what is wrong with the first refused row of each reason; leaks are left out.

    `folder` is a data set with a quarantine, the file of its unusable rows.
    """
    detail_by_reason: dict[str, str] = {}
    with (folder / QUARANTINE_NAME).open(encoding="utf-8") as stream:
        for line in map(json.loads, stream):
            for fault in (line, *line.get("also", ())):
                reason = fault["reason"]
                if reason != LEAK_REASON and reason not in detail_by_reason:
                    # The detail of the row's first fault begins with its id already.
                    row_id = "" if fault is line else f"{line['id']}: "
                    detail_by_reason[reason] = f"{row_id}{fault['detail']}"
    return list(detail_by_reason.values())


# What a user should know of rows that are used all the same. By the name of each warning, the words
# that follow "12 of the rows", with the first row as an example.
WARNING_TEXTS = {
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
_INSTRUCTION_KEPT = (
    "it was kept, beside the training's own system prompt: --drop-instruction takes it off"
)
_INSTRUCTION_DROPPED = "it was taken off"
_MAX_EXAMPLE_CHARACTERS = 100  # characters of an example that are printed


def warning_lines(manifest: Mapping[str, Any]) -> list[str]:
    """Return the warnings of a manifest on rows that were used, as lines for the user to read.

    The manifest has, by the name of each warning, how many rows have it, and one of them as an
    example: {"percent": {"rows": 2, "example": "geo/train/17"}}.
    """
    lines = []
    for name, warning in (manifest.get("warnings") or {}).items():
        example = warning["example"]
        consequence = ""
        if name == "instruction":
            example = short_repr(example, _MAX_EXAMPLE_CHARACTERS)  # a text, which may be long
            is_dropped = manifest["arguments"].get("drop_instruction")
            consequence = _INSTRUCTION_DROPPED if is_dropped else _INSTRUCTION_KEPT
        text = WARNING_TEXTS[name].format(example=example)
        lines.append(f"noted: {warning['rows']} of the rows {text}{consequence}")
    return lines
