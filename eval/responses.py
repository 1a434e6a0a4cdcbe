"""Statistics of the answers besides right and wrong: their lengths, how many were cut off, and reflective words."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Any

from eval.statistics import wilson

# Words by which a model takes a step back. ADORA's authors watch such words grow more frequent (arXiv 2602.10019); the
# list is ours, and fixed, so that two runs can be compared.
REFLECTIVE = (
    "wait",
    "verify",
    "check",
    "recheck",
    "double-check",
    "reconsider",
    "rethink",
    "alternatively",
    "however",
    "mistake",
    "let me see",
    "hold on",
)
_PATTERNS = {
    word: re.compile(rf"(?<!\w){re.escape(word).replace(chr(92) + '-', '[- ]?')}(?:s|ed|ing)?(?!\w)", re.IGNORECASE)
    for word in REFLECTIVE
}
_PATTERNS["recheck"] = re.compile(r"(?<!\w)re-?check(?:s|ed|ing)?(?!\w)", re.IGNORECASE)
# Not the end of `re-check` and `double-check`, which count as themselves.
_PATTERNS["check"] = re.compile(r"(?<![\w-])(?<!double )check(?:s|ed|ing)?(?!\w)", re.IGNORECASE)


def lengths(tokens: Sequence[int]) -> dict[str, float | int] | None:
    """Mean, median, 90th percentile and maximum of completion lengths in tokens; None of none."""
    if not tokens:
        return None
    ordered = sorted(tokens)
    return {
        "mean": statistics.fmean(ordered),
        "median": statistics.median(ordered),
        "p90": ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))],
        "max": ordered[-1],
    }


def truncation(finish_reasons: Sequence[str]) -> dict[str, Any] | None:
    """How many answers were cut off at the token limit; None of no answers."""
    if not finish_reasons:
        return None
    cut, total = sum(reason == "length" for reason in finish_reasons), len(finish_reasons)
    return {"count": cut, "total": total, "share": cut / total, "wilson_95": list(wilson(cut, total))}


def reflection(responses: Sequence[str]) -> dict[str, Any] | None:
    """How many answers have a reflective word, and how often each word occurs in 1,000 answers; None of no answers."""
    if not responses:
        return None
    counts = {word: sum(len(pattern.findall(text)) for text in responses) for word, pattern in _PATTERNS.items()}
    having = sum(any(pattern.search(text) for pattern in _PATTERNS.values()) for text in responses)
    total = len(responses)
    return {
        "answers": having,
        "total": total,
        "share": having / total,
        "wilson_95": list(wilson(having, total)),
        "per_1000_answers": {word: 1000 * count / total for word, count in counts.items() if count},
    }
