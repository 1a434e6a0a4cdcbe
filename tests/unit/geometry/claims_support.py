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

from adora_vl.geometry.check import checked_figure_of
from adora_vl.geometry.checked import TRUE_VERDICTS, CheckedClaim, ClaimVerdict

_MARK = re.compile(r"\[\[([TFGOngiafo])\|(.*?)\]\](?!\])", re.DOTALL)
_FITTING: dict[str, tuple[ClaimVerdict, ...]] = {
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
_EXACT: dict[str, tuple[ClaimVerdict, ...]] = {
    "n": ("new",),
    "g": ("given", "nothing"),
    "i": ("given", "nothing"),
    "a": ("again", "nothing"),
}


@dataclass
class Reading:
    """How the claims of marked texts were read."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    inexact: list[str] = field(default_factory=list)

    @property
    def precision(self) -> float:
        """The share of what was read that is marked and has the verdict of its mark."""
        read = self.counts["right"] + self.counts["wrong"] + self.counts["alarm"]
        return self.counts["right"] / read

    @property
    def recall(self) -> float:
        """The share of the marks that were read, with the right verdict."""
        return self.counts["right"] / self.counts["marked"]

    @property
    def exactness(self) -> float:
        """The share of the marks in small letters, and read rightly, that are true as marked."""
        return self.counts["exact"] / (self.counts["exact"] + self.counts["inexact"])


def unmarked(marked: str) -> tuple[str, list[tuple[int, int, str]]]:
    """Return the text without marks, and for each mark its first and last place and its letter."""
    text = ""
    spans = []
    position = 0
    for match in _MARK.finditer(marked):
        text += marked[position : match.start()]
        spans.append((len(text), len(text) + len(match[2]), match[1]))
        text += match[2]
        position = match.end()
    return text + marked[position:], spans


def reading_of(path: Path) -> Reading:
    """Read the marked texts of a file."""
    record = json.loads(path.read_text(encoding="utf-8"))
    reading = Reading()
    for entry in record["texts"]:
        figure = checked_figure_of(record["figures"][entry["problem"]])
        text, spans = unmarked(entry["marked"])
        _compare(reading, f"{entry['source']} {entry['id']}", spans, figure.claims(text))
    return reading


def _compare(
    reading: Reading, name: str, spans: list[tuple[int, int, str]], claims: list[CheckedClaim]
) -> None:
    of_mark: list[list[CheckedClaim]] = [[] for _ in spans]
    for checked in claims:
        if checked.verdict == "unread":
            continue
        number = _mark_of(checked, spans)
        if number is None:
            reading.counts["alarm"] += 1
            reading.faults.append(f"{name}: {checked.claim.words!r} is not marked")
        else:
            of_mark[number].append(checked)
    for (_, _, letter), found in zip(spans, of_mark, strict=True):
        fitting = [checked for checked in found if checked.verdict in _FITTING[letter]]
        is_right = bool(fitting) and (letter in "FOfo" or len(fitting) == len(found))
        outcome = "right" if is_right else "wrong" if found else "missed"
        reading.counts["marked"] += 1
        reading.counts[outcome] += 1
        if not is_right:
            reading.faults.append(f"{name}: {letter} {outcome}: {found}")
        elif letter in _EXACT:
            is_exact = found[0].verdict in _EXACT[letter]
            reading.counts["exact" if is_exact else "inexact"] += 1
            if not is_exact:
                reading.inexact.append(f"{name}: {letter}: {found[0]}")


def _mark_of(checked: CheckedClaim, spans: list[tuple[int, int, str]]) -> int | None:
    """Return the mark that a claim overlaps most, by more than half of the shorter of both."""
    claim = checked.claim
    best: tuple[int, int] | None = None
    for number, (start, end, _) in enumerate(spans):
        overlap = min(end, claim.end) - max(start, claim.start)
        if overlap > 0 and (best is None or overlap > best[0]):
            best = (overlap, number)
    if best is None:
        return None
    start, end, _ = spans[best[1]]
    shorter = min(end - start, claim.end - claim.start)
    return best[1] if best[0] >= 0.6 * shorter else None
