"""MathVista as a benchmark: its rows as problems, and the options of its score."""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from typing import Any

from adora_vl.commands import number, optional, path, text, whole
from eval.command import Benchmark
from eval.mathvista.prompt import build_query
from eval.mathvista.rules import RULE_SETS
from eval.mathvista.scoring import check, score
from eval.runner import Problem
from eval.sources import load_rows, unaskable

_NEEDED = ("pid", "question", "question_type", "answer_type", "precision", "choices", "answer", "metadata")
_KEPT = (*_NEEDED[1:4], "precision", "unit", "choices", "answer", "metadata")


def load(options: Namespace) -> tuple[list[Problem], str]:
    """The problems of a split (testmini), and a hash of the data."""
    loaded = load_rows(options.data, options.split, options.data_revision, _NEEDED, ("decoded_image", "image"), _fault)
    problems = [
        Problem(_fields(row), row.get("query") or build_query(row), 1, images)
        for row, images in zip(loaded.rows, loaded.images, strict=True)
    ]
    return problems, loaded.hash


def _fault(row: dict[str, Any]) -> str | None:
    """What is wrong with a row of the data, or None."""
    fault = check({**row, "pid": "", "response": ""})
    # `query` is the official prompt where the data has it.
    return fault or unaskable(row.get("query") or build_query(row), row["choices"])


def _fields(row: dict[str, Any]) -> dict[str, Any]:
    """What a prediction keeps of a row of the data."""
    return {"pid": str(row["pid"]), **{name: row.get(name) for name in _KEPT}}


def _data_options(parser: ArgumentParser) -> None:
    parser.add_argument("--data-revision", type=optional(text), metavar="NAME", help="of the data on the hub")


def _score_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--extraction", choices=("rules", "stored", "judge"), default="rules", help="how the answer is found")
    add("--rules", choices=RULE_SETS, default="official", help="how it is compared with the gold")
    add(
        "--ignore-empty-extractions",
        action=BooleanOptionalAction,
        default=False,
        help="an empty extraction is wrong, not the nearest choice",
    )
    add("--judge-url", type=optional(text), help="an OpenAI-compatible endpoint, such as http://localhost:8000/v1")
    add("--judge-model", type=optional(text), help="its name there")
    add("--judge-cache", type=optional(path), metavar="FILE.jsonl", help="default: beside the score")
    add("--judge-timeout", type=number(0.001, 86400), default=60.0, metavar="SECONDS", help="of one call; default 60")
    add(
        "--judge-budget",
        type=optional(whole(0)),
        metavar="N",
        help="calls at most, attempts counted; default: any number",
    )
    add("--judge-attempts", type=whole(1, 100), default=4, metavar="N", help="before a row counts as failed; default 4")
    add(
        "--judge-wait",
        type=number(0.001, 3600),
        default=1.0,
        metavar="SECONDS",
        help="before the second attempt; doubles",
    )


BENCHMARK = Benchmark("mathvista", "testmini", load, score, _score_options, _data_options, check, ("data_revision",))
