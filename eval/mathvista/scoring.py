"""The score of MathVista answers: extraction, one of the rule sets, and the published groups."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from typing import Any

from adora_vl.errors import UserError
from eval.extraction.judge import JUDGE_FAILED, judge_of, judged
from eval.extraction.rules import extract
from eval.extraction.text import Extraction
from eval.mathvista.rules import judge_extraction
from eval.predictions import Prediction, missing_fields
from eval.scoring import FAILED, Graded, Score, aggregate, answers, common_groups, counted, failed_image

METADATA_GROUPS = ("language", "source", "category", "task", "context", "grade", "skills")
_GEOMETRY_TASK, _GEOMETRY_SKILL = "geometry problem solving", "geometry reasoning"
ID_OOD = (
    "ID pools the items of task `geometry problem solving` and the items with skill `geometry reasoning`, an item in "
    "both counted twice; OOD is everything correct minus ID's, over all items minus ID's. The split of ADORA's table, "
    "inferred from its figures; because of the double count the intervals are a little too narrow."
)
_QUESTION_TYPES, _ANSWER_TYPES = ("multi_choice", "free_form"), ("text", "integer", "float", "list")
_MOST_PLACES = 15  # what a float holds
_NEEDED = ("pid", "question", "question_type", "answer_type", "precision", "choices", "answer", "metadata", "response")


def check(row: Prediction) -> str | None:
    """What is wrong with a MathVista predictions row; None where nothing is."""
    lacking = missing_fields(row, _NEEDED)
    if lacking:
        return lacking
    for field, known in (("question_type", _QUESTION_TYPES), ("answer_type", _ANSWER_TYPES)):
        if row[field] not in known:
            return f"has {field} = {row[field]!r}, expected one of {', '.join(known)}"
    if row["question_type"] == "multi_choice" and not 1 <= len(row["choices"] or []) <= 26:
        return f"is multiple choice with choices = {row['choices']!r}, expected 1 to 26 of them"
    precision = row["precision"]
    if row["answer_type"] == "float" and not (isinstance(precision, int | float) and 0 <= precision <= _MOST_PLACES):
        return f"has precision = {precision!r}, expected a number from 0 to {_MOST_PLACES} for a float answer"
    if not isinstance(row["question"], str):
        return f"has question = {row['question']!r:.60}, expected a string"
    return None


def score(rows: Sequence[Prediction], options: Namespace) -> Score:
    """The score by `options.extraction` and `options.rules`; a failed call of the judge is counted as a failure."""
    extractions = _extractions(rows, options)
    graded = [_graded(row, extraction, options) for row, extraction in zip(rows, extractions, strict=True)]
    figures = aggregate(graded)
    mix = Counter(extraction.how for extraction in extractions)
    return {
        **figures,
        "id_ood": {"definition": ID_OOD, **_id_ood(figures)},
        **answers(rows, graded),
        "rules": {
            "rules": options.rules,
            "extraction": options.extraction,
            "ignore_empty_extractions": options.ignore_empty_extractions,
            "judge": options.judge_model if options.extraction == "judge" else None,
        },
        "extraction_mix": dict(mix.most_common()),
        "extraction_failed": mix[JUDGE_FAILED],
        "items": [
            _item(row, item, extraction) for row, item, extraction in zip(rows, graded, extractions, strict=True)
        ],
    }


def _extractions(rows: Sequence[Prediction], options: Namespace) -> list[Extraction]:
    """One extraction per row, made in the way that `--extraction` names."""
    if options.extraction == "judge":
        return judged(rows, judge_of(options))
    if options.extraction == "rules":
        return [extract(row) for row in rows]
    lacking = [row["pid"] for row in rows if "extraction" not in row]
    if lacking:
        raise UserError(
            f"extraction: {len(lacking)} of {len(rows)} rows have no stored extraction, the first is pid "
            f"{lacking[0]!r}; use --extraction rules"
        )
    return [Extraction(row["extraction"], "stored") for row in rows]


def _graded(row: Prediction, extraction: Extraction, options: Namespace) -> Graded:
    """A row with its verdict by the chosen rules, and the groups that it counts in."""
    groups = _groups(row)
    failed = failed_image(row, groups)
    if failed:
        return failed
    if extraction.how == JUDGE_FAILED:
        verdict, prediction = FAILED, None
    elif options.ignore_empty_extractions and not str(extraction.text or "").strip():
        verdict, prediction = "wrong", None
    else:
        hit = judge_extraction(row, extraction.text, options.rules)
        verdict, prediction = "correct" if hit.correct else "wrong", hit.prediction
    return Graded(row["pid"], verdict, prediction, extraction.how, row.get("n_tokens"), groups, row.get("sample", 0))


def _groups(row: Prediction) -> dict[str, list[str]]:
    """The groups of a row: the fields of MathVista's metadata, each with its values."""
    metadata = row["metadata"] or {}
    groups = {"question_type": [row["question_type"]], "answer_type": [row["answer_type"]]}
    for name in METADATA_GROUPS:
        value = metadata.get(name)
        if value:
            groups[name] = [str(part) for part in value] if isinstance(value, list) else [str(value)]
    return {**groups, **common_groups(row)}


def _item(row: Prediction, item: Graded, extraction: Extraction) -> dict[str, Any]:
    """The entry of a row under `items` in the score file."""
    return {
        "pid": item.pid,
        **({"sample": item.sample} if item.sample else {}),
        "verdict": item.verdict,
        "correct": item.correct,
        "answer": row["answer"],
        "extraction": extraction.text,
        "prediction": item.extracted,
        "how": item.reason,
    }


def _id_ood(figures: Score) -> dict[str, Score | None]:
    """ID and OOD as ADORA's table has them (docs/evaluation.md); None where no items are left."""
    groups = figures["groups"]
    parts = (groups.get("task", {}).get(_GEOMETRY_TASK), groups.get("skills", {}).get(_GEOMETRY_SKILL))
    correct, total = (sum(part[name] for part in parts if part) for name in ("correct", "total"))
    answers_each = figures["samples"]["k"] if "samples" in figures else 1
    # On a small set with mostly geometry the double count can leave OOD with less than nothing: then it has no figure.
    return {
        "ID": counted(correct, total, answers_each),
        "OOD": counted(figures["correct"] - correct, figures["total"] - total, answers_each),
    }
