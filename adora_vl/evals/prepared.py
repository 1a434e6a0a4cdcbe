"""The problems of a prepared data set, as an evaluation asks them."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adora_vl.data.dataset import data_hash, load_split
from adora_vl.data.images import decoded_image
from adora_vl.data.prompts import Template, template
from adora_vl.data.rows import (
    has_choices,
    problem_with_prompt,
    problem_with_row,
    rows_without_pixels,
)
from adora_vl.evals.inference.dataset import pictured
from adora_vl.evals.inference.predictions import refuse_rows
from adora_vl.evals.records import Problem

if TYPE_CHECKING:
    from datasets import Dataset

# The forms of an answer. The first pattern that is found decides.
_FORMS = (
    ("radical", re.compile(r"\\sqrt|√")),
    ("pi", re.compile(r"\\pi|π")),
    ("fraction", re.compile(r"\\[dt]?frac|/")),
    ("integer", re.compile(r"^-?\d+$")),
    ("decimal", re.compile(r"^-?\d*\.\d+$")),
)


def answer_form(answer: str, choices: Sequence[str] | None = None) -> str:
    r"""How the reference answer is written: `letter`, `radical`, `pi`, `fraction`, `integer`,
    `decimal` or `other`.

    One with several of them counts as the first in this order: `2 \sqrt { 3 } \pi` is a radical.
    """
    text = "".join(answer.split())
    if choices and re.fullmatch(r"\(?[A-Z]\)?", text):
        return "letter"
    return next((name for name, pattern in _FORMS if pattern.search(text)), "other")


_TRAINING_TEXTS = (
    "solution",
    "slip",
)  # of `meta`; what the warm start of the tiny model learns from


def load(options: Namespace) -> tuple[list[Problem], str]:
    """The problems of a split of a prepared dataset folder, and a hash of it.

    A template that changes no problem becomes None in the options: the same questions have the same
    fingerprint. Raises `UserError` with a line for each row that cannot be asked about.
    """
    held = data_hash(
        Path(options.data), options.split
    )  # before the rows are read: a later change is another hash
    dataset = load_split(options.data, options.split)
    made = template(options.prompt) if getattr(options, "prompt", None) else None
    if made is not None:
        made.check_columns(dataset.column_names, f"{options.data!r} split {options.split!r}")
    where = f"data: {options.data}, split {options.split!r},"
    table = dataset.with_format("arrow")[:]
    if made is not None and made.asks_the_problem_alone(with_choices=has_choices(table)):
        made = options.prompt = None
    rows = enumerate(rows_without_pixels(table))
    wrong = [
        (row.get("id") or f"number {index}", fault)
        for index, row in rows
        if (fault := problem_with_row(row))
    ]
    refuse_rows(where, [f"row {name}: {fault}" for name, fault in wrong])
    asked = problems(dataset, made)
    faults = (
        (one.pid, problem_with_prompt(one.prompt, one.n_images))
        for one in asked
        if made is not None
    )
    refuse_rows(where, [f"row {pid}: {fault}" for pid, fault in faults if fault])
    return asked, held


def problems(dataset: Dataset, made: Template | None = None) -> list[Problem]:
    """The rows of a prepared split, images encoded until they are needed.

    `made`: the template of what is asked.
    """
    encoded = dataset.with_format("arrow")  # bytes as they are in the file
    texts = dataset.remove_columns("images")
    counts = [
        count
        for chunk in encoded["images"][:].chunks
        for count in chunk.value_lengths().to_pylist()
    ]
    asked = []
    for index, (row, count) in enumerate(zip(texts, counts, strict=True)):
        text = row["problem"] if made is None else made(row)
        problem = pictured(
            _fields(row), text, count or 0, partial(_stored, encoded, index), decoded_image
        )
        asked.append(replace(problem, facts=row.get("facts") or None))
    return asked


def _fields(row: dict[str, Any]) -> dict[str, Any]:
    """What a prediction keeps of a row of the dataset."""
    known = {key: row[key] for key in ("source", "split") if row.get(key)}
    meta = {
        key: value for key, value in (row.get("meta") or {}).items() if key not in _TRAINING_TEXTS
    }
    return {
        "pid": row["id"],
        "question": row["problem"],
        "answer": row["answer"],
        "choices": row.get("choices"),
        "metadata": {**known, **meta},
    }


def _stored(encoded: Dataset, index: int) -> list[bytes]:
    images = encoded[index]["images"][0].as_py() or []
    return [image["bytes"] or Path(image["path"]).read_bytes() for image in images]
