"""Geometry3K as a benchmark: the prepared dataset's rows as problems."""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from datasets import Image as ImageFeature
from PIL import Image

from adora_vl.commands import optional, text
from adora_vl.prompt_template import Template, template
from adora_vl.rows import problem_with_prompt, problem_with_row, rows_without_pixels
from data_prep.storage import load_split
from eval.command import Benchmark
from eval.fingerprint import data_hash
from eval.geometry3k.scoring import score
from eval.predictions import Complaints
from eval.prompting import OF_THE_RUN
from eval.runner import Problem

_TRAINING_TEXTS = ("solution", "slip")  # of `meta`; what the warm start of the tiny model learns from


def load(options: Namespace) -> tuple[list[Problem], str]:
    """The problems of a split of a prepared dataset folder, and a hash of it.

    Raises `UserError` with a line for each row that cannot be asked about.
    """
    dataset = load_split(options.data, options.split)
    made = template(options.prompt) if getattr(options, "prompt", None) else None
    if made is not None:
        made.check_columns(dataset.column_names, f"{options.data!r} split {options.split!r}")
    wrong = Complaints(f"data: {options.data}, split {options.split!r},")
    for index, row in enumerate(rows_without_pixels(dataset.with_format("arrow")[:])):
        fault = problem_with_row(row)
        if fault:
            wrong.add(f"row {row.get('id') or f'number {index}'}: {fault}")
    wrong.settle()
    asked = problems(dataset, made)
    for problem in asked if made is not None else ():
        fault = problem_with_prompt(problem.prompt, problem.n_images)
        if fault:
            wrong.add(f"row {problem.pid}: {fault}")
    wrong.settle()
    return asked, data_hash(Path(options.data), options.split)


def problems(dataset: Dataset, made: Template | None = None) -> list[Problem]:
    """The rows of a prepared split as the runner takes them; images stay encoded until they are needed.

    `made`: the template of the text that is asked.
    """
    encoded = dataset.with_format("arrow")  # bytes as they are in the file
    texts = dataset.remove_columns("images")
    counts = [count for chunk in encoded["images"][:].chunks for count in chunk.value_lengths().to_pylist()]
    return [
        Problem(
            _fields(row), row["problem"] if made is None else made(row), count or 0, partial(_decode, encoded, index)
        )
        for index, (row, count) in enumerate(zip(texts, counts, strict=True))
    ]


def _fields(row: dict[str, Any]) -> dict[str, Any]:
    """What a prediction keeps of a row of the dataset."""
    known = {key: row[key] for key in ("source", "split") if row.get(key)}
    meta = {key: value for key, value in (row.get("meta") or {}).items() if key not in _TRAINING_TEXTS}
    return {
        "pid": row["id"],
        "question": row["problem"],
        "answer": row["answer"],
        "choices": row.get("choices"),
        "metadata": {**known, **meta},
    }


def _decode(encoded: Dataset, index: int) -> list[Image.Image]:
    """The images of one row, decoded when they are asked for."""
    images = encoded[index]["images"][0].as_py() or []
    return [ImageFeature().decode_example(image).convert("RGB") for image in images]


def _score_options(parser: ArgumentParser) -> None:
    parser.add_argument("--rounding", action=BooleanOptionalAction, default=False, help="accept rounded decimals")


def _data_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--prompt", type=optional(text), default=OF_THE_RUN, metavar="TEMPLATE",
        help="the problem's text from columns, such as '{problem} Choices: {choices}'; default: the training's",
    )  # fmt: skip


BENCHMARK = Benchmark("geometry3k", "test", load, score, _score_options, _data_options, fingerprint=("prompt",))
