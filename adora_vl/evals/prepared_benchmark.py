"""A benchmark of prepared problems, graded as in training.

`eval.geometry3k` and `eval.problems` are two names of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adora_vl.data.prompts import DEFAULT_PROMPT
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
from adora_vl.evals.variants import variant_lines, with_variants
from adora_vl.rewards import grade as graded_as_in_training
from adora_vl.utils.cli import amount, optional, text, whole

# The fields of `meta` by which answers are grouped; only a drawn problem has a `family`.
_METADATA_GROUPS = ("goal", "shapes", "family")


@dataclass(frozen=True, kw_only=True)
class PreparedDataOptions(DataOptions):
    """Which problems are asked, and in which words."""

    prompt: str | None = option(
        DEFAULT_PROMPT,
        help="the problem's text from its columns, or none for the problem alone; default: that "
        "of the model's own training, else with the choices listed",
        parser_default=OF_THE_RUN,
        type=optional(text),
        metavar="TEMPLATE",
    )
    variants: int = option(
        0,
        help="ask so many variants of each problem too, from the folder <dataset>-variants, and "
        "compare (data_prep variants --for-evaluation makes them)",
        type=whole(0),
        metavar="N",
    )


def load(options: PreparedDataOptions) -> LoadedProblems:
    """Return the problems of a prepared dataset folder, in the words of the prompt."""
    loaded = load_prepared(options, options.prompt)
    if not options.variants:
        return loaded
    return with_variants(loaded, options, options.prompt, options.variants)


def grade(row: Prediction, options: GraderOptions) -> RowGrade:
    """Return the verdict on a row.

    `options.rounding`: also accept a decimal that is the reference answer rounded.
    `options.answer_tags`: also accept an answer in `<answer> </answer>` without a box.
    """
    rules = {"rounding": options.rounding, "answer_tags": options.answer_tags}
    result = graded_as_in_training(
        row["response"], row["answer"], choices=row.get("choices"), **rules
    )
    return RowGrade(
        verdict=result.verdict,
        extracted=result.extracted,
        reason=result.reason,
        groups=_groups(row),
    )


def _rules(options: GraderOptions) -> dict[str, Any]:
    """Return the rules of a score."""
    rules = {"rounding": options.rounding}
    if options.answer_tags:
        rules["answer_tags"] = True
    return rules


def _summary(
    rows: Sequence[Prediction], graded: Sequence[Graded], options: GraderOptions
) -> OwnFigures:
    """Return the number of unreadable reference answers, and the rules in words."""
    unusable = sum(item.grade.reason.startswith("gold_") for item in graded)
    unreadable = amount(unusable, "reference answer")
    warning = f"{unreadable} cannot be graded against; see the items with a gold_ reason"
    by = "rounded decimals accepted" if options.rounding else "exact answers"
    by += ", in <answer> tags too" if options.answer_tags else ""
    notes = {"unusable_golds": unusable, "data_set": _data_set(rows)}
    return OwnFigures(
        notes=notes, warnings=[warning] if unusable else [], by=by, lines=variant_lines(graded)
    )


def _data_set(rows: Sequence[Prediction]) -> dict[str, Any]:
    """Return the sources and splits of the problems, as the rows of a prepared folder say it.

    The number of problems goes with them, for figures that apply to a whole split alone.
    """
    metadata = [row.get("metadata") or {} for row in rows]
    return {
        "sources": sorted({str(fields.get("source")) for fields in metadata}),
        "splits": sorted({str(fields.get("split")) for fields in metadata}),
        "problems": len({row["pid"] for row in rows}),
    }


def _groups(row: Prediction) -> dict[str, list[str]]:
    """Return the groups of a row: goal, shapes, family and kind, and form of the answer."""
    metadata = row.get("metadata") or {}
    groups = metadata_groups(row, _METADATA_GROUPS)
    # The kind of a variant is its original, which groups nothing.
    if metadata.get("kind") and metadata.get("family") != "variant":
        groups["kind"] = [f"{metadata.get('family')}, {metadata['kind']}"]  # `crossing, vertical`
    return {**groups, "answer_form": [answer_form(row["answer"], row.get("choices"))]}


def prepared_benchmark(name: str, *, published: Published | None = None) -> Benchmark:
    """Return the benchmark of this name on prepared problems.

    `published`: figures to quote beside it.
    """
    return Benchmark(
        name=name,
        split="test",
        load=load,
        grade=grade,
        rules=_rules,
        score_options=GraderOptions,
        data_options=PreparedDataOptions,
        fingerprint=("prompt",),
        summary=_summary,
        published=published,
    )
