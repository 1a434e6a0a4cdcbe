r"""From predictions to a score file: each answer graded, then counted overall and by group."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any

from adora_vl.rewards import grade
from eval.fingerprint import FILE_NAME, read, versions
from eval.predictions import IMAGE_FAILED, Prediction, read_predictions

Score = dict[str, Any]
FAILED = "failed"  # the verdict on a problem whose image could not be read; counts as not correct

_Z_95 = 1.959963984540054  # the normal distribution's 97.5 % quantile
# The first that is found names the form.
_FORMS = (
    ("radical", re.compile(r"\\sqrt|√")),
    ("pi", re.compile(r"\\pi|π")),
    ("fraction", re.compile(r"\\[dt]?frac|/")),
    ("integer", re.compile(r"^-?\d+$")),
    ("decimal", re.compile(r"^-?\d*\.\d+$")),
)


@dataclass(frozen=True)
class Graded:
    """One graded prediction. `groups`: for each kind of group, the values that this problem counts for."""

    pid: str
    verdict: str
    extracted: str | None
    reason: str
    n_tokens: int | None = None
    groups: dict[str, list[str]] = field(default_factory=dict)

    @property
    def correct(self) -> bool:
        return self.verdict == "correct"


def score_file(predictions: Path, *, rounding: bool = False) -> Score:
    """The score of a predictions file, with the fingerprint that lies beside it (null where there is none).

    `rounding`: also accept a decimal that is the gold rounded, which the paper preset does not.
    """
    graded = [grade_row(row, rounding=rounding) for row in read_predictions(predictions)]
    fingerprint = predictions.parent / FILE_NAME
    return {
        "benchmark": "geometry3k",
        **aggregate(graded),
        "rules": {"rounding": rounding},
        "versions": versions(),
        "fingerprint": read(fingerprint) if fingerprint.is_file() else None,
        "items": [
            {"pid": item.pid, "verdict": item.verdict, "extracted": item.extracted, "reason": item.reason}
            for item in graded
        ],
    }


def grade_row(row: Prediction, *, rounding: bool = False) -> Graded:
    """The verdict on one predictions row, and the groups that it counts for."""
    groups = _groups(row)
    if row.get("finish_reason") == IMAGE_FAILED:
        return Graded(row["pid"], FAILED, None, row.get("error") or IMAGE_FAILED, groups=groups)
    result = grade(row["response"], row["answer"], choices=row.get("choices"), rounding=rounding)
    return Graded(row["pid"], result.verdict, result.extracted, result.reason, row.get("n_tokens"), groups)


def _groups(row: Prediction) -> dict[str, list[str]]:
    metadata = row.get("metadata") or {}
    values = {
        "goal": metadata.get("goal"),
        "family": metadata.get("family"),
        "answer_form": answer_form(row["answer"], row.get("choices")),
        "finish_reason": row.get("finish_reason"),
    }
    return {key: [str(value)] for key, value in values.items() if value}


def answer_form(answer: str, choices: Sequence[str] | None = None) -> str:
    r"""How the gold is written: `letter`, `radical`, `pi`, `fraction`, `integer`, `decimal` or `other`.

    A gold with several counts as the first of them in this order: `2 \sqrt { 3 } \pi` is a radical.
    """
    text = "".join(answer.split())
    if choices and re.fullmatch(r"\(?[A-Z]\)?", text):
        return "letter"
    return next((name for name, pattern in _FORMS if pattern.search(text)), "other")


def aggregate(graded: Sequence[Graded]) -> Score:
    """Counts over all items (at least one) and each group. The total has every item, also where the image failed."""
    members: dict[str, dict[str, list[Graded]]] = defaultdict(lambda: defaultdict(list))
    for item in graded:
        for key, values in item.groups.items():
            for value in values:
                members[key][value].append(item)
    return {
        **_cell(graded),
        "groups": {key: {value: _cell(members[key][value]) for value in sorted(members[key])} for key in members},
        "verdicts": dict(Counter(item.verdict for item in graded).most_common()),
        "image_failed": sum(item.verdict == FAILED for item in graded),
        "unusable_golds": sum(item.reason.startswith("gold_") for item in graded),
        "mean_tokens": {
            "correct": _mean(item.n_tokens for item in graded if item.correct),
            "wrong": _mean(item.n_tokens for item in graded if not item.correct and item.verdict != FAILED),
        },
    }


def _cell(items: Sequence[Graded]) -> Score:
    correct, total = sum(item.correct for item in items), len(items)
    return {"correct": correct, "total": total, "accuracy": correct / total, "wilson_95": list(wilson(correct, total))}


def wilson(correct: int, total: int) -> tuple[float, float]:
    """The 95 % score interval of an accuracy, `total` over 0 (Wilson 1927, without continuity correction)."""
    share, spread = correct / total, _Z_95**2 / total
    centre = (share + spread / 2) / (1 + spread)
    half = sqrt(share * (1 - share) * spread + spread**2 / 4) / (1 + spread)
    # Exact at the ends, where rounding would leave 1e-17 or 1 + 1e-16.
    return (0.0 if correct == 0 else centre - half, 1.0 if correct == total else centre + half)


def _mean(values: Iterable[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
