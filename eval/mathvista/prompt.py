"""MathVista's prompt, as the `query` of its data has it (lupantech/MathVista, evaluation/build_query.py)."""

from __future__ import annotations

from typing import Any

_HINT = "Hint: Please answer the question "
_CHOICE = "and provide the correct option letter, e.g., A, B, C, D, at the end."
_INTEGER = "requiring an integer answer and provide the final value, e.g., 1, 2, 3, at the end."
_ONE_PLACE = (
    "requiring a floating-point number with one decimal place and provide the final value, e.g., 1.2, 1.3, 1.4, "
    "at the end."
)
_TWO_PLACES = (
    "requiring a floating-point number with two decimal places and provide the final value, e.g., 1.23, 1.34, 1.45, "
    "at the end."
)
_LIST = "requiring a Python list as an answer and provide the final list, e.g., [1, 2, 3], [1.2, 1.3, 1.4], at the end."


def build_query(row: dict[str, Any]) -> str:
    """Hint, question with its unit, and choices of one item (`question_type` and the other fields of the data)."""
    lines = [_HINT + _asks_for(row), f"Question: {row['question']}"]
    if row.get("unit"):
        lines[-1] += f" (Unit: {row['unit']})"
    if row["choices"]:
        lines += ["Choices:", *(f"({chr(ord('A') + i)}) {choice}" for i, choice in enumerate(row["choices"]))]
    return "\n".join(lines).strip()


def _asks_for(row: dict[str, Any]) -> str:
    if row["question_type"] == "multi_choice":
        return _CHOICE
    if row["answer_type"] == "integer":
        return _INTEGER
    if row["answer_type"] == "list":
        return _LIST
    # The precision is a float on the hub.
    return _ONE_PLACE if row["precision"] == 1 else _TWO_PLACES
