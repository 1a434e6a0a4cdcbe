"""The problems of a prepared data set, as an evaluation asks them."""

from __future__ import annotations

import re
from argparse import BooleanOptionalAction
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from adora_vl.evals.options import DataOptions, ScoreOptions, option
from adora_vl.evals.records import LoadedProblems, Problem

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


@dataclass(frozen=True, kw_only=True)
class GraderOptions(ScoreOptions):
    """Which answers the grader of the training accepts in an evaluation."""

    rounding: bool = option(False, help="accept rounded decimals", action=BooleanOptionalAction)


def answer_form(answer: str, choices: Sequence[str] | None = None) -> str:
    r"""Return the form in which a reference answer is written.

    It is `letter`, `radical`, `pi`, `fraction`, `integer`, `decimal` or `other`. An answer with
    several of them has the first in this order: `2 \sqrt { 3 } \pi` is a radical.
    """
    text = "".join(answer.split())
    if choices and re.fullmatch(r"\(?[A-Z]\)?", text):
        return "letter"
    return next((name for name, pattern in _FORMS if pattern.search(text)), "other")


# The fields of `meta` from which the warm start of the tiny model learns; a prediction leaves them
# out.
_TRAINING_TEXTS = (
    "solution",
    "slip",
)


def load(options: DataOptions, prompt: str | None = None) -> LoadedProblems:
    """Return the problems of a split of a prepared dataset folder, and a hash of it.

    Args:
        options: The folder and its split.
        prompt: The template of what is asked; None asks the problem alone, and a template that
            changes no problem is named among the unused options.

    Raises `UserError` with a line for each row that cannot be asked about.
    """
    # The data are hashed before their rows are read: a change in between gives another hash later.
    split_hash = data_hash(Path(options.data), options.split)
    dataset = load_split(options.data, options.split)
    asked_as = template(prompt) if prompt else None
    if asked_as is not None:
        asked_as.check_columns(dataset.column_names, f"{options.data!r} split {options.split!r}")
    where = f"data: {options.data}, split {options.split!r},"
    table = dataset.with_format("arrow")[:]
    unused: tuple[str, ...] = ()
    if asked_as and asked_as.asks_the_problem_alone(with_choices=has_choices(table)):
        asked_as = None
        unused = ("prompt",)
    faults = []
    for index, row in enumerate(rows_without_pixels(table)):
        fault = problem_with_row(row)
        if fault:
            faults.append(f"row {row.get('id') or f'number {index}'}: {fault}")
    refuse_rows(where, faults)
    asked_problems = problems(dataset, asked_as)
    if asked_as is not None:
        for problem in asked_problems:
            fault = problem_with_prompt(problem.prompt, problem.n_images)
            if fault:
                faults.append(f"row {problem.pid}: {fault}")
        refuse_rows(where, faults)
    return LoadedProblems(asked_problems, split_hash, unused)


def problems(dataset: Dataset, prompt_template: Template | None = None) -> list[Problem]:
    """Return the problems of the rows of a prepared split, images encoded until they are needed.

    `prompt_template`: makes the text that is asked from the columns of a row; None asks the
    problem alone.
    """
    encoded = dataset.with_format("arrow")  # bytes as they are in the file
    texts = dataset.remove_columns("images")
    counts = [
        count
        for chunk in encoded["images"][:].chunks
        for count in chunk.value_lengths().to_pylist()
    ]
    rows = []
    for index, (row, count) in enumerate(zip(texts, counts, strict=True)):
        text = row["problem"]
        if prompt_template is not None:
            text = prompt_template(row)
        problem = pictured(
            _fields(row),
            prompt=text,
            images=count or 0,
            stored=partial(_stored, encoded, index),
            decoded=decoded_image,
        )
        rows.append(replace(problem, facts=row.get("facts") or None))
    return rows


def _fields(row: dict[str, Any]) -> dict[str, Any]:
    """Return what a prediction keeps of a row of the dataset."""
    origin = {key: row[key] for key in ("source", "split") if row.get(key)}
    meta = {
        key: value for key, value in (row.get("meta") or {}).items() if key not in _TRAINING_TEXTS
    }
    return {
        "pid": row["id"],
        "question": row["problem"],
        "answer": row["answer"],
        "choices": row.get("choices"),
        "metadata": {**origin, **meta},
        # a solved figure, on which the claims of an answer are checked
        **({"figure": row["figure"]} if row.get("figure") else {}),
    }


def _stored(encoded: Dataset, index: int) -> list[bytes]:
    """Return the encoded images of one row, which are read when they are asked for."""
    images = encoded[index]["images"][0].as_py() or []
    return [image["bytes"] or Path(image["path"]).read_bytes() for image in images]
