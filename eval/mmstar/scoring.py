"""The score of MMStar answers: the official rule or a letter extraction, categories, sub-axes, gain and leakage."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from adora_vl.errors import UserError
from eval.extraction.choice import extract_choice
from eval.predictions import Prediction, key, missing_fields, read_predictions
from eval.scoring import Graded, Score, aggregate, answers, by_problem, common_groups, failed_image
from eval.statistics import bootstrap

RuleSet = Literal["official", "letter"]
RULE_SETS: tuple[RuleSet, ...] = ("official", "letter")
_NEEDED = ("pid", "question", "answer", "category", "l2_category", "response")
_OPTION = re.compile(r"(?:^|[\s,])([A-Z]): ")


def check(row: Prediction) -> str | None:
    """What is wrong with an MMStar predictions row; None where nothing is."""
    lacking = missing_fields(row, _NEEDED)
    if lacking:
        return lacking
    for field in ("question", "category", "l2_category"):
        if not isinstance(row[field], str):
            return f"has {field} = {row[field]!r:.60}, expected a string"
    if not re.fullmatch(r"\s*[A-Za-z]\s*", row["answer"]):
        return f"has answer = {row['answer']!r}, expected a letter"
    return None


def official_hit(response: str, answer: str) -> bool:
    """The official rule: the gold letter at one of four places (MMStar-Benchmark/MMStar, eval/mmstar_eval/evaluate).

    It is made for answers that start with the letter. Of a chain of thought it reads the first letter: `Based on` is B.
    """
    letter, text = answer.lower().strip().replace("\n", " "), response.lower().strip().replace("\n", " ")
    return (
        text[:1] == letter
        or (text[:1] == "(" and text[1:2] == letter)
        or (text[:7] == "option " and text[7:8] == letter)
        or (text[:14] == "the answer is " and text[14:15] == letter)
    )


def options_of(question: str) -> list[str]:
    """The options' texts in `... Options: A: a park, B: a dam`, in the order of their letters.

    Only letters that follow one another from A count, so that `A: ` inside an option does no harm. Four unknown ones
    where the question has none.
    """
    head, found, tail = question.rpartition("Options:")
    spots: list[re.Match[str]] = []
    for match in _OPTION.finditer(tail if found else head + tail):
        if match[1] == chr(ord("A") + len(spots)):
            spots.append(match)
    text = tail if found else question
    ends = [match.start() for match in spots[1:]] + [len(text)]
    texts = [text[match.end() : end].strip().rstrip(",").strip() for match, end in zip(spots, ends, strict=False)]
    return texts or [""] * 4


def score(rows: Sequence[Prediction], options: Namespace) -> Score:
    """The score by `options.rules`; gain and leakage where the runs for them are given."""
    graded = [_graded(row, options.rules) for row in rows]
    return {
        **aggregate(graded),
        **answers(rows, graded),
        "leakage": _leakage(rows, graded, options),
        "rules": {"rules": options.rules},
        "items": [_item(row, item) for row, item in zip(rows, graded, strict=True)],
    }


def _graded(row: Prediction, rules: RuleSet) -> Graded:
    """A row with its verdict by these rules, and the groups that it counts in."""
    groups = {"category": [row["category"]], "l2_category": [row["l2_category"]], **common_groups(row)}
    failed = failed_image(row, groups)
    if failed:
        return failed
    if rules == "official":
        correct, extracted, how = official_hit(row["response"], row["answer"]), row["response"][:20], "official"
    else:
        choices = options_of(row["question"])
        extracted, how = extract_choice(row["response"], choices)
        correct = extracted == row["answer"].strip().upper()
    verdict = "correct" if correct else "wrong"
    return Graded(row["pid"], verdict, extracted, how, row.get("n_tokens"), groups, row.get("sample", 0))


def _item(row: Prediction, item: Graded) -> dict[str, Any]:
    """The entry of a row under `items` in the score file."""
    sample = {"sample": item.sample} if item.sample else {}
    fields = {"verdict": item.verdict, "correct": item.correct, "answer": row["answer"]}
    return {"pid": item.pid, **sample, **fields, "extraction": item.extracted, "how": item.reason}


def _leakage(rows: Sequence[Prediction], graded: Sequence[Graded], options: Namespace) -> Score | None:
    """Multi-modal gain MG = S_v - S_wv and leakage ML = max(0, S_wv - S_t) (Chen et al. 2024, MMStar, section 3.3).

    All three are shares of right answers on the same items. S_v is this run, S_wv the same model without the image, and
    S_t its language backbone.
    """
    if options.text_only and not options.without_image:
        raise UserError("text_only: the leakage needs --without-image too (ML = S_wv - S_t)")
    blind = _others(options.without_image, rows, options, "without_image")
    text = _others(options.text_only, rows, options, "text_only")
    if blind is None:
        return None
    seen = _shares(graded)
    gains = [a - b for a, b in zip(seen, blind, strict=True)]
    leakage: Score = {"S_v": _mean(seen), "S_wv": _mean(blind), "MG": _mean(gains), "MG_bootstrap_95": bootstrap(gains)}
    if text is not None:
        leaks = [a - b for a, b in zip(blind, text, strict=True)]
        low, high = bootstrap(leaks)
        leakage |= {
            "S_t": _mean(text),
            "ML": max(0.0, _mean(leaks)),
            "ML_bootstrap_95": (max(0.0, low), max(0.0, high)),
        }
    return leakage


def _others(path: Path | None, rows: Sequence[Prediction], options: Namespace, name: str) -> list[float] | None:
    """The shares of right answers of another run to the problems of this one, in their order."""
    if path is None:
        return None
    other = {key(row): row for row in read_predictions(path, check)}
    absent = [row["pid"] for row in rows if key(row) not in other]
    if absent or len(other) != len(rows):
        first = f"pid {absent[0]!r} is missing" if absent else f"it has {len(other)} rows and this run {len(rows)}"
        raise UserError(f"{name}: {path} does not have the items of this run ({first}); run it on the same data")
    return _shares([_graded(other[key(row)], options.rules) for row in rows])


def _shares(graded: Sequence[Graded]) -> list[float]:
    """The share of right answers to each problem, in the order of the problems."""
    return [sum(right) / len(right) for right in by_problem(graded).values()]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
