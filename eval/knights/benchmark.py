"""Knights and knaves as a benchmark: scored as the reward reads an answer, grouped by the number of people.

The published table of ADORA (its repository's README) has the same groups: ID is 2 to 5 people, OOD 6 to 8.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from adora_vl.rewards.knights import knights_verdict, roles_in
from eval.command import Benchmark
from eval.geometry3k.benchmark import load
from eval.predictions import Prediction
from eval.scoring import Graded, Score, aggregate, answers, common_groups


def score(rows: Sequence[Prediction], options: Namespace) -> Score:
    """The score of predictions; there are no options."""
    graded = [_grade(row) for row in rows]
    items = [
        {
            "pid": item.pid,
            **({"sample": item.sample} if item.sample else {}),
            "verdict": item.verdict,
            "extracted": item.extracted,
            "reason": item.reason,
        }
        for item in graded
    ]
    return {**aggregate(graded), **answers(rows, graded), "rules": {"rules": "everyone's kind"}, "items": items}


def _grade(row: Prediction) -> Graded:
    """A row with its verdict, in the group of its number of people."""
    verdict, extracted = knights_verdict(row["response"], row["answer"])
    people = (row.get("metadata") or {}).get("family")
    groups = {**_by_people(str(people or "")), **common_groups(row)}
    reason = {"correct": "everyone_right", "wrong": "someone_wrong"}.get(verdict, "no_whole_answer")
    return Graded(row["pid"], verdict, extracted, reason, row.get("n_tokens"), groups, row.get("sample", 0))


def _by_people(family: str) -> dict[str, list[str]]:
    """The groups of a puzzle such as `3 people`: by their number, and by the two halves of the published table, whose
    model was trained on few people.
    """
    number, _, word = family.partition(" ")
    if word != "people" or not number.isdecimal():
        return {}
    return {"people": [family], "half": ["2 to 5 people (ID)" if int(number) <= 5 else "6 to 8 people (OOD)"]}


def _no_options(parser: ArgumentParser) -> None:
    """This benchmark's score has no options."""


def _check(row: Prediction) -> str | None:
    """What is wrong with a row, or None."""
    if not roles_in(row["answer"]):
        return f"has answer = {row['answer']!r:.60}, which names nobody as a knight or a knave"
    return None


BENCHMARK = Benchmark("knights", "test", load, score, _no_options, check=_check)
