"""The rule-based extraction of a MathVista item, after the official quick checks."""

from __future__ import annotations

import re
from typing import Any

from adora_vl.rewards.boxed import last_boxed
from eval.extraction.choice import extract_choice
from eval.extraction.number import extract_list, extract_number
from eval.extraction.text import Extraction


def extract(row: dict[str, Any]) -> Extraction:
    """The answer of a predictions row, and how it was found."""
    quick = quick_extract(row)
    if quick is not None:
        return quick
    response = row["response"]
    if row["question_type"] == "multi_choice":
        return extract_choice(response, row["choices"])
    if row["answer_type"] == "list":
        return extract_list(response)
    if row["answer_type"] == "text":
        box = last_boxed(response)
        return Extraction(response.strip(), "whole") if box is None else Extraction(box, "box")
    found = extract_number(response, row["question"])
    if (
        row["answer_type"] == "integer"
    ):  # `5.0` is the integer that was asked for, also to a rule set with a strict `int`
        return Extraction(re.sub(r"^(-?\d+)\.0+$", r"\1", found.text), found.how)
    return found


def quick_extract(row: dict[str, Any]) -> Extraction | None:
    """What the official code takes without asking a language model; None where it asks (scoring.md, Extraction)."""
    response = row["response"]
    if not response:
        return Extraction("", "empty")
    if row["question_type"] == "multi_choice" and response in row["choices"]:
        return Extraction(response, "exact")
    convert = {"integer": int, "float": float}.get(row["answer_type"])
    if convert is not None:
        try:
            return Extraction(str(convert(response)), "exact")
        except ValueError:
            return None
    return None
