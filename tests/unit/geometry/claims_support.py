"""Marked responses, and how well the grammar reads them.

A mark is `[[T|AB = 5]]`: T for a claim that is true, G for one that stands in the facts, F for a
false one, O where the facts do not say. A chain of equations has one mark, F where one of them is
false. A small letter says in addition how it is true, or of a chain its head: n new, g given,
i nothing new, a said again; f and o are as F and O.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from adora_vl.geometry.check import checked_figure_of
from adora_vl.geometry.checked import TRUE_VERDICTS, CheckedClaim, ClaimVerdict

_MARK_PATTERN = re.compile(r"\[\[([TFGOngiafo])\|(.*?)\]\](?!\])", re.DOTALL)
_ALLOWED_VERDICTS_BY_MARK: dict[str, tuple[ClaimVerdict, ...]] = {
    "T": TRUE_VERDICTS,
    "G": TRUE_VERDICTS,
    "F": ("false", "follows"),
    "O": ("open",),
    "n": TRUE_VERDICTS,
    "g": TRUE_VERDICTS,
    "i": TRUE_VERDICTS,
    "a": TRUE_VERDICTS,
    "f": ("false", "follows"),
    "o": ("open",),
}
_EXACT_VERDICTS_BY_MARK: dict[str, tuple[ClaimVerdict, ...]] = {
    "n": ("new",),
    "g": ("given", "nothing"),
    "i": ("given", "nothing"),
    "a": ("again", "nothing"),
}


class MarkedSpan(NamedTuple):
    """What a mark encloses: its first place in the text, the place behind it, and its letter."""

    start: int
    end: int
    letter: str


@dataclass
class ReadingOfMarks:
    """How well the claims of marked texts were read.

    `counts` has how many marks there are (`marked`), how many were read with the right verdict
    (`right`) or another one (`wrong`), how many claims have no mark (`alarm`), and how many true
    claims have the very verdict of their mark (`exact`) or another true one (`inexact`).
    `faults` and `inexact` say where.
    """

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    inexact: list[str] = field(default_factory=list)

    @property
    def precision(self) -> float:
        """The share of what was read that is marked and has the verdict of its mark."""
        read_count = self.counts["right"] + self.counts["wrong"] + self.counts["alarm"]
        return self.counts["right"] / read_count

    @property
    def recall(self) -> float:
        """The share of the marks that were read, with the right verdict."""
        return self.counts["right"] / self.counts["marked"]

    @property
    def exactness(self) -> float:
        """The share of the marks in small letters, and read rightly, that are true as marked."""
        return self.counts["exact"] / (self.counts["exact"] + self.counts["inexact"])


def text_without_marks(marked_text: str) -> tuple[str, list[MarkedSpan]]:
    """Return the text without its marks, and what each of them encloses."""
    text = ""
    spans = []
    position = 0
    for match in _MARK_PATTERN.finditer(marked_text):
        letter = match[1]
        enclosed_text = match[2]
        text += marked_text[position : match.start()]
        spans.append(MarkedSpan(start=len(text), end=len(text) + len(enclosed_text), letter=letter))
        text += enclosed_text
        position = match.end()
    return text + marked_text[position:], spans


def read_marked_texts(path: Path) -> ReadingOfMarks:
    """Read the claims of the marked texts of a file, and compare them with the marks."""
    record = json.loads(path.read_text(encoding="utf-8"))
    reading = ReadingOfMarks()
    for entry in record["texts"]:
        figure = checked_figure_of(record["figures"][entry["problem"]])
        text, spans = text_without_marks(entry["marked"])
        name = f"{entry['source']} {entry['id']}"
        _compare_with_marks(reading, name, spans, figure.claims(text))
    return reading


def _compare_with_marks(
    reading: ReadingOfMarks, name: str, spans: list[MarkedSpan], claims: list[CheckedClaim]
) -> None:
    """Add the claims of one text to a reading; `name` is that of the text, for the faults."""
    claims_by_mark: list[list[CheckedClaim]] = [[] for _ in spans]
    for claim in claims:
        if claim.verdict == "unread":  # it counts as not read, so its mark may be missed
            continue
        mark_number = _mark_around_claim(claim, spans)
        if mark_number is None:
            reading.counts["alarm"] += 1
            reading.faults.append(f"{name}: {claim.claim.words!r} is not marked")
        else:
            claims_by_mark[mark_number].append(claim)
    for span, marked_claims in zip(spans, claims_by_mark, strict=True):
        letter = span.letter
        allowed_verdicts = _ALLOWED_VERDICTS_BY_MARK[letter]
        right_claims = [claim for claim in marked_claims if claim.verdict in allowed_verdicts]
        # A chain of equations that is false or open may have true ones among them.
        may_have_others = letter in "FOfo"
        is_right = bool(right_claims) and (
            may_have_others or len(right_claims) == len(marked_claims)
        )
        # Nothing was read inside a mark that is missed.
        outcome = "wrong" if marked_claims else "missed"
        if is_right:
            outcome = "right"
        reading.counts["marked"] += 1
        reading.counts[outcome] += 1
        if not is_right:
            reading.faults.append(f"{name}: {letter} {outcome}: {marked_claims}")
        elif letter in _EXACT_VERDICTS_BY_MARK:
            first_claim = marked_claims[0]
            is_exact = first_claim.verdict in _EXACT_VERDICTS_BY_MARK[letter]
            reading.counts["exact" if is_exact else "inexact"] += 1
            if not is_exact:
                reading.inexact.append(f"{name}: {letter}: {first_claim}")


def _mark_around_claim(checked: CheckedClaim, spans: list[MarkedSpan]) -> int | None:
    """Return the number of the mark that a claim overlaps most, or None.

    It has to overlap at least 0.6 of the shorter of both.
    """
    claim = checked.claim
    smallest_share = 0.6
    best_number: int | None = None
    best_overlap = 0
    for mark_number, span in enumerate(spans):
        overlap = min(span.end, claim.end) - max(span.start, claim.start)
        if overlap > best_overlap:
            best_number = mark_number
            best_overlap = overlap
    if best_number is None:
        return None
    best_span = spans[best_number]
    shorter_length = min(best_span.end - best_span.start, claim.end - claim.start)
    return best_number if best_overlap >= smallest_share * shorter_length else None
