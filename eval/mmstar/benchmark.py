"""MMStar as a benchmark: its rows as problems, and the options of its score."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from PIL import Image

from adora_vl.commands import optional, path, text
from eval.command import Benchmark
from eval.mmstar.scoring import RULE_SETS, check, score
from eval.runner import Problem
from eval.sources import load_rows, unaskable

_NEEDED = ("index", "question", "answer", "category", "l2_category")
_KEPT = (*_NEEDED, "meta_info")


def load(options: Namespace) -> tuple[list[Problem], str]:
    """The problems of a split, the question as it is (its options are in it), and a hash of the data."""
    loaded = load_rows(options.data, options.split, options.data_revision, _NEEDED, ("image",), _fault)
    problems = [
        Problem(_fields(row), row["question"], 0 if options.no_image else 1, _none if options.no_image else images)
        for row, images in zip(loaded.rows, loaded.images, strict=True)
    ]
    return problems, loaded.hash


def _none() -> list[Image.Image]:
    """The images of a problem that is asked without its image."""
    return []


def _fault(row: dict[str, Any]) -> str | None:
    """What is wrong with a row of the data, or None."""
    return check({**row, "pid": "", "response": ""}) or unaskable(row["question"])


def _fields(row: dict[str, Any]) -> dict[str, Any]:
    """What a prediction keeps of a row of the data."""
    return {"pid": str(row["index"]), **{name: row.get(name) for name in _KEPT}}


def _data_options(parser: ArgumentParser) -> None:
    parser.add_argument("--data-revision", type=optional(text), metavar="NAME", help="of the data on the hub")
    # Not argparse's BooleanOptionalAction: that takes every option that starts with `--no-` for a no.
    parser.add_argument("--no-image", action="store_true", help="ask without the image, for the leakage metrics")


def _score_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--rules", choices=RULE_SETS, default="letter", help="official is made for answers that start with the letter")
    add("--without-image", type=optional(path), metavar="FILE.jsonl", help="predictions made with --no-image")
    add("--text-only", type=optional(path), metavar="FILE.jsonl", help="predictions of the language backbone")


BENCHMARK = Benchmark("mmstar", "val", load, score, _score_options, _data_options, check, ("data_revision", "no_image"))
