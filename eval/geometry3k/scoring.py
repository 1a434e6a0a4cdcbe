"""The score of Geometry3K answers: the training's grader, and the groups by which this data is looked at."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Sequence

from adora_vl.rewards import grade
from eval.predictions import Prediction
from eval.scoring import Graded, Score, aggregate, answers, common_groups, failed_image

# The first that is found names the form.
_FORMS = (
    ("radical", re.compile(r"\\sqrt|√")),
    ("pi", re.compile(r"\\pi|π")),
    ("fraction", re.compile(r"\\[dt]?frac|/")),
    ("integer", re.compile(r"^-?\d+$")),
    ("decimal", re.compile(r"^-?\d*\.\d+$")),
)
_METADATA_GROUPS = ("goal", "shapes", "family")  # of `meta`: what is asked for, in which shapes, which synthetic kind


def score(rows: Sequence[Prediction], options: Namespace) -> Score:
    """The score of predictions. `options.rounding`: also accept a decimal that is the gold rounded.
    `options.answer_tags`, where it is there: also accept an answer in `<answer> </answer>`, without a box.
    """
    tags = bool(getattr(options, "answer_tags", False))
    graded = [grade_row(row, rounding=options.rounding, answer_tags=tags) for row in rows]
    return {
        **aggregate(graded),
        **answers(rows, graded),
        "unusable_golds": sum(item.reason.startswith("gold_") for item in graded),
        "rules": {"rounding": options.rounding, **({"answer_tags": True} if tags else {})},
        "items": [
            {
                "pid": item.pid,
                **({"sample": item.sample} if item.sample else {}),
                "verdict": item.verdict,
                "extracted": item.extracted,
                "reason": item.reason,
            }
            for item in graded
        ],
    }


def grade_row(row: Prediction, *, rounding: bool = False, answer_tags: bool = False) -> Graded:
    """The verdict on one predictions row, and the groups that it counts for."""
    groups = _groups(row)
    failed = failed_image(row, groups)
    if failed:
        return failed
    result = grade(
        row["response"], row["answer"], choices=row.get("choices"), rounding=rounding, answer_tags=answer_tags
    )
    return Graded(
        row["pid"],
        result.verdict,
        result.extracted,
        result.reason,
        row.get("n_tokens"),
        groups,
        row.get("sample", 0),
    )


def _groups(row: Prediction) -> dict[str, list[str]]:
    """The groups of a row: goal, shapes, family and kind, form of the answer, and those that every benchmark has."""
    metadata = row.get("metadata") or {}
    groups = {}
    for key in _METADATA_GROUPS:
        value = metadata.get(key)
        if value:
            groups[key] = [str(part) for part in value] if isinstance(value, list) else [str(value)]
    if metadata.get("kind"):
        groups["kind"] = [f"{metadata.get('family')}, {metadata['kind']}"]  # `crossing, vertical`
    return {**groups, "answer_form": [answer_form(row["answer"], row.get("choices"))], **common_groups(row)}


def answer_form(answer: str, choices: Sequence[str] | None = None) -> str:
    r"""How the gold is written: `letter`, `radical`, `pi`, `fraction`, `integer`, `decimal` or `other`.

    A gold with several counts as the first of them in this order: `2 \sqrt { 3 } \pi` is a radical.
    """
    text = "".join(answer.split())
    if choices and re.fullmatch(r"\(?[A-Z]\)?", text):
        return "letter"
    return next((name for name, pattern in _FORMS if pattern.search(text)), "other")
