"""Statistics of the answers besides right and wrong: their lengths, how many were cut off, and reflective words."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from adora_vl.reflection import REFLECTIVE, reflective_words
from eval.statistics import wilson


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
    found = [reflective_words(text) for text in responses]
    counts = {word: sum(each.get(word, 0) for each in found) for word in REFLECTIVE}
    having, total = sum(map(bool, found)), len(responses)
    return {
        "answers": having,
        "total": total,
        "share": having / total,
        "wilson_95": list(wilson(having, total)),
        "per_1000_answers": {word: 1000 * count / total for word, count in counts.items() if count},
    }
