"""`python -m eval.geometry3k`: Geometry3K, graded as in training."""

from __future__ import annotations

import re
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adora_vl.utils.cli import imports

with imports():
    from adora_vl.data.dataset import data_hash, load_split
    from adora_vl.data.images import decoded_image
    from adora_vl.data.prompts import NAMES_OF_CHOICES, Template, template
    from adora_vl.data.rows import (
        has_choices,
        problem_with_prompt,
        problem_with_row,
        rows_without_pixels,
    )
    from adora_vl.rewards import grade as graded_as_in_training
    from adora_vl.utils.cli import amount, optional, text
    from eval.command import main
    from eval.inference.dataset import pictured
    from eval.inference.predictions import refuse_rows
    from eval.inference.provenance import OF_THE_RUN
    from eval.records import Benchmark, Graded, OwnFigures, Prediction, Problem, Published, RowGrade
    from eval.scoring.score import metadata_groups

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
_METADATA_GROUPS = ("goal", "shapes", "family")  # of `meta`; `family`: of a drawn problem


def grade(row: Prediction, options: Namespace) -> RowGrade:
    """The verdict on a row.

    `options.rounding`: also accept a decimal that is the reference answer rounded.
    `options.answer_tags`: also accept an answer in `<answer> </answer>` without a box.
    """
    rules = {"rounding": options.rounding, "answer_tags": options.answer_tags}
    found = graded_as_in_training(
        row["response"], row["answer"], choices=row.get("choices"), **rules
    )
    return RowGrade(found.verdict, found.extracted, found.reason, _groups(row))


def _rules(options: Namespace) -> dict[str, Any]:
    return {"rounding": options.rounding, **({"answer_tags": True} if options.answer_tags else {})}


def _summary(
    rows: Sequence[Prediction], graded: Sequence[Graded], options: Namespace
) -> OwnFigures:
    """The number of reference answers that the grader cannot read, and the rules in words."""
    unusable = sum(item.grade.reason.startswith("gold_") for item in graded)
    warning = (
        f"{amount(unusable, 'gold')} cannot be graded against; see the items with a gold_ reason"
    )
    by = "rounded decimals accepted" if options.rounding else "exact answers"
    by += ", in <answer> tags too" if options.answer_tags else ""
    notes = {"unusable_golds": unusable, "data_set": _data_set(rows)}
    return OwnFigures(notes=notes, warnings=[warning] if unusable else [], by=by)


def _data_set(rows: Sequence[Prediction]) -> dict[str, Any]:
    """What the problems are of: their sources and splits, as the rows of a prepared folder say it,
    and how many there are.
    """
    metadata = [row.get("metadata") or {} for row in rows]
    return {
        "sources": sorted({str(one.get("source")) for one in metadata}),
        "splits": sorted({str(one.get("split")) for one in metadata}),
        "problems": len({row["pid"] for row in rows}),
    }


def _groups(row: Prediction) -> dict[str, list[str]]:
    """The groups of a row: goal, shapes, family and kind, and form of the answer."""
    metadata = row.get("metadata") or {}
    groups = metadata_groups(row, _METADATA_GROUPS)
    if metadata.get("kind"):
        groups["kind"] = [f"{metadata.get('family')}, {metadata['kind']}"]  # `crossing, vertical`
    return {**groups, "answer_form": [answer_form(row["answer"], row.get("choices"))]}


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


def _score_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--rounding", action=BooleanOptionalAction, default=False, help="accept rounded decimals"
    )


def _data_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--prompt",
        type=optional(text),
        default=OF_THE_RUN,
        metavar="TEMPLATE",
        help="the problem's text from its columns, or none for the problem alone; default: that "
        "of the model's own training, else with the choices listed",
    )


def _caution(score: Mapping[str, Any]) -> str | None:
    """Why a score is not comparable with the published rows, or None: its prompts showed the
    choices.
    """
    prompt = ((score.get("fingerprint") or {}).get("fields") or {}).get("prompt")
    if not any(f"{{{name}}}" in (prompt or "") for name in NAMES_OF_CHOICES):
        return None
    return (
        "the quoted rows are of open questions, and here choices were shown; --prompt none asks so"
    )


_TEST_PROBLEMS = 601  # of Geometry3K's test split
_LEAST = 0.95  # of them, since preparing it may leave out some whose answers nobody can meet


def _is_the_test_split(score: Mapping[str, Any]) -> bool:
    """Whether a score is of the whole test split of Geometry3K, with its own pictures."""
    data_set = score.get("data_set") or {}
    view = ((score.get("fingerprint") or {}).get("fields") or {}).get("view", "image")
    return (
        data_set.get("sources") == ["geometry3k"]
        and data_set.get("splits") == ["test"]
        and data_set.get("problems", 0) >= _LEAST * _TEST_PROBLEMS
        and view == "image"
    )


_PUBLISHED = Published(
    "EasyR1's reports, Geometry3K test",
    {
        "7B before GRPO": {"all": 37.0},
        "7B GRPO": {"all": 48.0},
        "7B DAPO": {"all": 50.0},
        "7B SAPO": {"all": 54.0},
        "3B before GRPO": {"all": 24.0},
        "3B GRPO": {"all": 38.0},
    },
    _caution,
    _is_the_test_split,
)
BENCHMARK = Benchmark(
    "geometry3k",
    "test",
    load,
    grade,
    _rules,
    _score_options,
    _data_options,
    fingerprint=("prompt",),
    summary=_summary,
    published=_PUBLISHED,
)
if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
