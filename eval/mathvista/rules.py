"""The three rule sets that decide whether an extracted MathVista answer is a hit or a miss.

`official`: the repository today (lupantech/MathVista, evaluation/calculate_score.py). `published_2023`: the same with a
strict `int`, which reproduces the numbers of the paper. `vlmevalkit`: option letters, strict `int`, floats without
rounding, list items never right (open-compass/VLMEvalKit, vlmeval/dataset/utils/mathvista.py); ADORA's table uses it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

RuleSet = Literal["official", "published_2023", "vlmevalkit"]
RULE_SETS: tuple[RuleSet, ...] = ("official", "published_2023", "vlmevalkit")

_LETTER_IN_BRACKETS = re.compile(r"\(([a-zA-Z])\)")
_NOT_A_NUMBER = (ValueError, TypeError, OverflowError)  # what `int` and `float` raise


class Hit(NamedTuple):
    """Whether an item is right, and its normalised extraction, or None if there is no prediction."""

    correct: bool
    prediction: str | None


def judge_extraction(row: dict[str, Any], extraction: object, rules: RuleSet) -> Hit:
    """Normalise the extraction of a predictions row and compare it with the gold, by one of the rule sets."""
    if row["question_type"] == "multi_choice":
        index = chosen(extraction, row["choices"])
        text = row["choices"][index]
        if rules == "vlmevalkit":  # letters, so of two equal choices only the first is right
            return Hit(text == row["answer"] and row["choices"].index(text) == index, text)
        return Hit(text == row["answer"], text)
    if rules == "vlmevalkit":
        return _vlmevalkit(row, extraction)
    prediction = _normalised(row, extraction, strict_int=rules == "published_2023")
    return Hit(prediction == row["answer"], prediction)


def chosen(extraction: object, choices: Sequence[str]) -> int:
    """The position of the choice that an extraction means. If none matches, the one with the smallest edit distance."""
    text = extraction.strip() if isinstance(extraction, str) else str(extraction)
    in_brackets = _LETTER_IN_BRACKETS.search(text)
    if in_brackets:
        text = in_brackets[1].upper()
    if len(text) == 1 and 0 <= ord(text) - ord("A") < len(choices):
        return ord(text) - ord("A")
    distances = [edit_distance(text, choice) for choice in choices]
    return distances.index(min(distances))


def edit_distance(one: str, other: str) -> int:
    """Levenshtein's distance: insertions, deletions and substitutions of a character, each 1."""
    previous = list(range(len(other) + 1))
    for i, left in enumerate(one, start=1):
        current = [i]
        for j, right in enumerate(other, start=1):
            current.append(min(previous[j] + 1, current[-1] + 1, previous[j - 1] + (left != right)))
        previous = current
    return previous[-1]


def _normalised(row: dict[str, Any], extraction: Any, *, strict_int: bool) -> str | None:
    try:
        if row["answer_type"] == "integer":
            return str(int(extraction) if strict_int else int(float(extraction)))
        if row["answer_type"] == "float":
            # The precision may be a float after a trip through pandas, which `round` does not take.
            return str(round(float(extraction), int(float(row["precision"]))))
    except _NOT_A_NUMBER:
        return None
    return None if extraction is None else str(extraction)


def _vlmevalkit(row: dict[str, Any], extraction: Any) -> Hit:
    convert = {"integer": int, "float": float}.get(row["answer_type"])
    if convert is None:
        return Hit(False, None)
    try:
        value = convert(extraction)
        return Hit(value == convert(row["answer"]), str(value))
    except _NOT_A_NUMBER:
        return Hit(False, None)
