"""`python -m eval.geometry3k`: Geometry3K, graded as in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adora_vl.utils.cli import imports

with imports():
    from adora_vl.data.prompts import DEFAULT_PROMPT, NAMES_OF_CHOICES
    from adora_vl.evals.options import OF_THE_RUN, DataOptions, option
    from adora_vl.evals.prepared import GraderOptions, answer_form
    from adora_vl.evals.prepared import load as load_prepared
    from adora_vl.evals.records import (
        Benchmark,
        Graded,
        LoadedProblems,
        OwnFigures,
        Prediction,
        Published,
        RowGrade,
    )
    from adora_vl.evals.scoring.score import metadata_groups
    from adora_vl.rewards import grade as graded_as_in_training
    from adora_vl.utils.cli import amount, optional, text

_METADATA_GROUPS = ("goal", "shapes", "family")  # of `meta`; `family`: of a drawn problem


@dataclass(frozen=True, kw_only=True)
class Geometry3KDataOptions(DataOptions):
    """Which problems are asked, and in which words."""

    prompt: str | None = option(
        DEFAULT_PROMPT,
        help="the problem's text from its columns, or none for the problem alone; default: that "
        "of the model's own training, else with the choices listed",
        parser_default=OF_THE_RUN,
        type=optional(text),
        metavar="TEMPLATE",
    )


def load(options: Geometry3KDataOptions) -> LoadedProblems:
    """The problems of a prepared dataset folder, in the words of the prompt."""
    return load_prepared(options, options.prompt)


def grade(row: Prediction, options: GraderOptions) -> RowGrade:
    """The verdict on a row.

    `options.rounding`: also accept a decimal that is the reference answer rounded.
    `options.answer_tags`: also accept an answer in `<answer> </answer>` without a box.
    """
    rules = {"rounding": options.rounding, "answer_tags": options.answer_tags}
    found = graded_as_in_training(
        row["response"], row["answer"], choices=row.get("choices"), **rules
    )
    return RowGrade(found.verdict, found.extracted, found.reason, _groups(row))


def _rules(options: GraderOptions) -> dict[str, Any]:
    return {"rounding": options.rounding, **({"answer_tags": True} if options.answer_tags else {})}


def _summary(
    rows: Sequence[Prediction], graded: Sequence[Graded], options: GraderOptions
) -> OwnFigures:
    """The number of reference answers that the grader cannot read, and the rules in words."""
    unusable = sum(item.grade.reason.startswith("gold_") for item in graded)
    warning = (
        f"{amount(unusable, 'gold')} cannot be graded against; see the items with a gold_ reason"
    )
    by = "rounded decimals accepted" if options.rounding else "exact answers"
    by += ", in <answer> tags too" if options.answer_tags else ""
    return OwnFigures(
        notes={"unusable_golds": unusable}, warnings=[warning] if unusable else [], by=by
    )


def _groups(row: Prediction) -> dict[str, list[str]]:
    """The groups of a row: goal, shapes, family and kind, and form of the answer."""
    metadata = row.get("metadata") or {}
    groups = metadata_groups(row, _METADATA_GROUPS)
    if metadata.get("kind"):
        groups["kind"] = [f"{metadata.get('family')}, {metadata['kind']}"]  # `crossing, vertical`
    return {**groups, "answer_form": [answer_form(row["answer"], row.get("choices"))]}


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
)
BENCHMARK = Benchmark(
    name="geometry3k",
    split="test",
    load=load,
    grade=grade,
    rules=_rules,
    score_options=GraderOptions,
    data_options=Geometry3KDataOptions,
    fingerprint=("prompt",),
    summary=_summary,
    published=_PUBLISHED,
)
if __name__ == "__main__":
    with imports():
        from eval.command import main
    raise SystemExit(main(BENCHMARK))
