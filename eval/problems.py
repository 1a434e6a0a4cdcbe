"""`python -m eval.problems`: problems of your own, drawn ones and mixtures, graded as in training.

`eval.geometry3k` is another name of this benchmark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adora_vl.data.prompts import DEFAULT_PROMPT, NAMES_OF_CHOICES
from adora_vl.evals.options import PROMPT_OF_TRAINING, DataOptions, option
from adora_vl.evals.prepared import GraderOptions, answer_form
from adora_vl.evals.prepared import load as load_prepared
from adora_vl.evals.records import (
    Benchmark,
    BenchmarkSummary,
    GradedAnswer,
    LoadedProblems,
    Prediction,
    PublishedResults,
    RowGrade,
)
from adora_vl.evals.score_files import fingerprint_part
from adora_vl.evals.scoring.score import groups_from_metadata
from adora_vl.evals.variants import add_variants, get_original_id, variant_lines
from adora_vl.rewards import grade as grade_as_in_training
from adora_vl.utils.cli import integer_between, none_or, pluralize, text_option

# The fields of `meta` by which answers are grouped; only a drawn problem has a `family`.
_METADATA_GROUPS = ("goal", "shapes", "family")


@dataclass(frozen=True, kw_only=True)
class PreparedDataOptions(DataOptions):
    """Which problems are asked, and in which words."""

    prompt: str | None = option(
        DEFAULT_PROMPT,
        help="the problem's text from its columns, or none for the problem alone; default: that "
        "of the model's own training, else with the choices listed",
        parser_default=PROMPT_OF_TRAINING,
        type=none_or(text_option),
        metavar="TEMPLATE",
    )
    variants: int = option(
        0,
        help="ask so many variants of each problem too, from the folder <dataset>-variants, and "
        "compare (data_prep variants --for-evaluation makes them)",
        type=integer_between(0),
        metavar="N",
    )


def load(options: PreparedDataOptions) -> LoadedProblems:
    """Load the problems of a prepared dataset folder; with `--variants`, also variants of them.

    A variant is the same problem with other numbers.
    """
    loaded = load_prepared(options, options.prompt)
    if not options.variants:
        return loaded
    return add_variants(
        loaded, options=options, prompt=options.prompt, n_per_problem=options.variants
    )


def grade(row: Prediction, options: GraderOptions) -> RowGrade:
    """Grade one answer as the accuracy reward of a training does.

    `options.rounding` also accepts a decimal that is the reference answer rounded, and
    `options.answer_tags` an answer in `<answer> </answer>` without a box.
    """
    result = grade_as_in_training(
        row["response"],
        row["answer"],
        choices=row.get("choices"),
        rounding=options.rounding,
        answer_tags=options.answer_tags,
    )
    return RowGrade(
        verdict=result.verdict,
        extracted=result.extracted,
        reason=result.reason,
        groups=_find_groups(row),
    )


def _rules(options: GraderOptions) -> dict[str, Any]:
    """Return the `rules` of a score file; `answer_tags` is left out if it is off."""
    rules = {"rounding": options.rounding}
    if options.answer_tags:
        rules["answer_tags"] = True
    return rules


def _summary(
    rows: Sequence[Prediction], graded_answers: Sequence[GradedAnswer], options: GraderOptions
) -> BenchmarkSummary:
    """Describe the rules and the data of a score, and compare problems with their variants.

    A warning counts the reference answers that the grader cannot read: no answer is right for them.
    """
    rules_text = "rounded decimals accepted" if options.rounding else "exact answers"
    if options.answer_tags:
        rules_text += ", in <answer> tags too"
    # The grader's reason begins with `gold_` if the reference answer is at fault.
    n_unreadable = sum(graded.grade.reason.startswith("gold_") for graded in graded_answers)
    warnings: list[str] = []
    if n_unreadable:
        references = pluralize(n_unreadable, "reference answer")
        warnings.append(f"{references} cannot be graded against; see the items with a gold_ reason")
    return BenchmarkSummary(
        extra_keys={"unusable_golds": n_unreadable, "data_set": _describe_data(rows)},
        warnings=warnings,
        rules_text=rules_text,
        lines=variant_lines(graded_answers),
    )


def _describe_data(rows: Sequence[Prediction]) -> dict[str, Any]:
    """Describe the data of a score: its sources, its splits, and the number of its problems.

    The score needs this, because published figures are shown only beside a score of a whole split.
    """
    metadata_of_rows = [row.get("metadata") or {} for row in rows]
    return {
        "sources": sorted({str(metadata.get("source")) for metadata in metadata_of_rows}),
        "splits": sorted({str(metadata.get("split")) for metadata in metadata_of_rows}),
        "problems": len({row["pid"] for row in rows}),
    }


def _find_groups(row: Prediction) -> dict[str, list[str]]:
    """Return the groups in which an answer is counted, such as `{"goal": ["length"], ...}`.

    They are what the problem asks for (`goal`), the shapes in it, and the form of its reference
    answer, such as `fraction`. A drawn problem also has its family and its kind.
    """
    metadata = row.get("metadata") or {}
    groups = groups_from_metadata(row, _METADATA_GROUPS)
    family = metadata.get("family")
    # The kind of a variant is the id of its original problem, which would give too many groups.
    if metadata.get("kind") and family != "variant":
        groups["kind"] = [f"{family}, {metadata['kind']}"]  # such as `crossing, vertical`
    return {**groups, "answer_form": [answer_form(row["answer"], row.get("choices"))]}


def _describe_incomparability(score: Mapping[str, Any]) -> str | None:
    """Say why a score cannot be compared with the published ones, None if it can.

    Those were measured without showing the choices to the model. Here it sees them if the template
    of the prompt has a placeholder for them.
    """
    prompt = fingerprint_part(score, "fields").get("prompt") or ""
    shows_choices = any(f"{{{name}}}" in prompt for name in NAMES_OF_CHOICES)
    if not shows_choices:
        return None
    return (
        "the quoted rows are of open questions, and here choices were shown; --prompt none asks so"
    )


_TEST_PROBLEM_COUNT = 601  # the problems of Geometry3K's test split, as it is published
# A score over at least this share of them counts as one of the whole split, since preparing the
# data leaves out the few problems whose reference answers cannot be read.
_MIN_SHARE_OF_WHOLE_SPLIT = 0.95


def _is_the_test_split(score: Mapping[str, Any]) -> bool:
    """Return whether a score is of Geometry3K's whole test split, asked with its pictures.

    Only such a score is shown beside published ones. The `view` of a run is what the model was
    shown: the picture (`image`), its facts in words, both, or a grey picture.
    """
    data_set = score.get("data_set") or {}
    # A fingerprint names the view only where it is not the picture.
    view = fingerprint_part(score, "fields").get("view", "image")
    problem_count = data_set.get("problems", 0)
    is_whole_split = problem_count >= _MIN_SHARE_OF_WHOLE_SPLIT * _TEST_PROBLEM_COUNT
    return (
        data_set.get("sources") == ["geometry3k"]
        and data_set.get("splits") == ["test"]
        and is_whole_split
        and view == "image"
    )


_PUBLISHED = PublishedResults(
    source="EasyR1's reports, Geometry3K test",
    rows={
        "7B before GRPO": {"all": 37.0},
        "7B GRPO": {"all": 48.0},
        "7B DAPO": {"all": 50.0},
        "7B SAPO": {"all": 54.0},
        "3B before GRPO": {"all": 24.0},
        "3B GRPO": {"all": 38.0},
    },
    why_not_comparable=_describe_incomparability,
    is_same_data=_is_the_test_split,
)
BENCHMARK = Benchmark(
    name="problems",
    split="test",
    load=load,
    grade=grade,
    rules=_rules,
    score_options=GraderOptions,
    data_options=PreparedDataOptions,
    fingerprint=("prompt",),
    original_id=get_original_id,
    summary=_summary,
    published=_PUBLISHED,
)
if __name__ == "__main__":
    from eval.command import main

    raise SystemExit(main(BENCHMARK))
