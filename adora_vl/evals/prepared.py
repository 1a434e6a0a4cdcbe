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
from adora_vl.data.prompts import Template, read_template
from adora_vl.data.rows import (
    fault_in_prompt,
    fault_in_row,
    has_choices,
    rows_without_pixels,
)
from adora_vl.evals.inference.dataset import problem_with_images
from adora_vl.evals.inference.predictions import raise_row_faults
from adora_vl.evals.options import DataOptions, ScoreOptions, option
from adora_vl.evals.records import LoadedProblems, Problem

if TYPE_CHECKING:
    from datasets import Dataset

# The forms in which a reference answer may be written. The first pattern that is found decides.
_PATTERN_BY_ANSWER_FORM = (
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
    r"""Return the form in which a reference answer is written, by which answers are grouped.

    It is `letter`, `radical`, `pi`, `fraction`, `integer`, `decimal` or `other`. An answer that
    fits several has the first of them in this order: `2 \sqrt { 3 } \pi` is a radical. Only an
    answer with choices can be a letter.
    """
    text = "".join(answer.split())
    if choices and re.fullmatch(r"\(?[A-Z]\)?", text):
        return "letter"
    return next(
        (form for form, pattern in _PATTERN_BY_ANSWER_FORM if pattern.search(text)), "other"
    )


# The fields of `meta` with texts that the tiny model learns from in its warm start. A prediction
# leaves them out.
_WARM_START_FIELDS = (
    "solution",
    "slip",
)


def load(options: DataOptions, prompt: str | None = None) -> LoadedProblems:
    """Load the problems of a split of a prepared dataset folder, with a hash of the split.

    Args:
        options: The folder and its split.
        prompt: The template that makes the text to ask from the columns of a row; None asks the
            problem alone. A template that would change no problem is not used, and is returned
            among the unused options.

    Raises `UserError` with a line for each row that cannot be asked.
    """
    # The data are hashed before their rows are read: a change in between gives another hash later.
    split_hash = data_hash(Path(options.data), options.split)
    dataset = load_split(options.data, options.split)
    prompt_template = read_template(prompt) if prompt else None
    if prompt_template is not None:
        split_in_words = f"{options.data!r} split {options.split!r}"
        prompt_template.check_columns(dataset.column_names, split_in_words)
    table = dataset.with_format("arrow")[:]
    unused_options: tuple[str, ...] = ()
    if prompt_template and prompt_template.asks_the_problem_alone(with_choices=has_choices(table)):
        prompt_template = None
        unused_options = ("prompt",)
    error_prefix = f"data: {options.data}, split {options.split!r},"
    faults: list[str] = []
    for index, row in enumerate(rows_without_pixels(table)):
        fault = fault_in_row(row)
        if fault:
            faults.append(f"row {row.get('id') or f'number {index}'}: {fault}")
    raise_row_faults(error_prefix, faults)
    loaded_problems = build_problems(dataset, prompt_template)
    # A template can make a text that cannot be asked from a row that could.
    if prompt_template is not None:
        for problem in loaded_problems:
            fault = fault_in_prompt(problem.prompt, problem.n_images)
            if fault:
                faults.append(f"row {problem.pid}: {fault}")
        raise_row_faults(error_prefix, faults)
    return LoadedProblems(loaded_problems, split_hash, unused_options)


def build_problems(dataset: Dataset, prompt_template: Template | None = None) -> list[Problem]:
    """Build the problems of a prepared split; their images stay encoded until they are needed.

    Args:
        dataset: The rows of the split.
        prompt_template: Makes the text to ask from the columns of a row; None asks the problem
            alone.
    """
    encoded_dataset = dataset.with_format("arrow")  # its images are bytes, as in the file
    rows_without_images = dataset.remove_columns("images")
    image_counts: list[int | None] = []
    for chunk in encoded_dataset["images"][:].chunks:
        image_counts += chunk.value_lengths().to_pylist()
    built_problems: list[Problem] = []
    for index, (row, n_images) in enumerate(zip(rows_without_images, image_counts, strict=True)):
        prompt = row["problem"]
        if prompt_template is not None:
            prompt = prompt_template(row)
        problem = problem_with_images(
            _prediction_fields(row),
            prompt=prompt,
            n_images=n_images or 0,  # a row without the list has None
            read_images=partial(_read_images, encoded_dataset, index),
        )
        built_problems.append(replace(problem, facts=row.get("facts") or None))
    return built_problems


def _prediction_fields(row: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a row of the dataset that a row of predictions keeps.

    They are its `pid`, `question`, `answer`, `choices` and `metadata`, and the solved `figure` if
    it has one. Of `meta` the texts are left out that only the tiny model's warm start needs.
    """
    metadata = {key: row[key] for key in ("source", "split") if row.get(key)}
    for key, value in (row.get("meta") or {}).items():
        if key not in _WARM_START_FIELDS:
            metadata[key] = value
    fields = {
        "pid": row["id"],
        "question": row["problem"],
        "answer": row["answer"],
        "choices": row.get("choices"),
        "metadata": metadata,
    }
    # The solved figure of a problem, on which the claims of an answer are checked.
    if row.get("figure"):
        fields["figure"] = row["figure"]
    return fields


def _read_images(encoded_dataset: Dataset, index: int) -> list[bytes]:
    """Read the encoded images of a row; each is stored as bytes or as the path of a file."""
    images = encoded_dataset[index]["images"][0].as_py() or []
    return [image["bytes"] or Path(image["path"]).read_bytes() for image in images]
