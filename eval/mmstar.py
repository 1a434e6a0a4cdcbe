"""`python -m eval.mmstar`: MMStar, with its official scoring."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from adora_vl.evals.inference.dataset import load_problems
from adora_vl.evals.inference.predictions import (
    TEXT_VALUE,
    describe_field_fault,
    matching_text,
    read_predictions,
    row_key,
)
from adora_vl.evals.inference.views import without_images
from adora_vl.evals.options import HubDataOptions, ScoreOptions, option
from adora_vl.evals.records import (
    CORRECT,
    WRONG,
    Benchmark,
    BenchmarkSummary,
    GradedAnswer,
    LoadedProblems,
    Prediction,
    PublishedResults,
    RowGrade,
)
from adora_vl.evals.scoring.choice import extract_choice, lettered_options
from adora_vl.evals.scoring.score import (
    build_extraction_item,
    correctness_by_pid,
    grade_rows,
)
from adora_vl.evals.scoring.statistics import difference_interval
from adora_vl.evals.scoring.table import percent_with_interval
from adora_vl.utils.cli import none_or, path_option
from adora_vl.utils.errors import UserError

# The columns that each row has, and what their values have to be.
REQUIRED_COLUMNS = {
    "question": TEXT_VALUE,
    "answer": matching_text(r"\s*[A-Da-d]\s*", "a letter from A to D"),
    "category": TEXT_VALUE,
    "l2_category": TEXT_VALUE,
}
_OPTION_MARK_PATTERN = re.compile(r"(?:^|[\s,])([A-Z]): ")
check_row = partial(describe_field_fault, types=REQUIRED_COLUMNS)


@dataclass(frozen=True, kw_only=True)
class MMStarDataOptions(HubDataOptions):
    """Which problems are asked, with their images or without."""

    # The action is not argparse's BooleanOptionalAction, which takes every option that starts with
    # `--no-` for a no.
    no_image: bool = option(
        False, help="ask without the image, for the leakage metrics", action="store_true"
    )


@dataclass(frozen=True, kw_only=True)
class MMStarScoreOptions(ScoreOptions):
    """Which letter counts, and the runs that gain and leakage are measured against."""

    rules: Literal["official", "letter"] = option(
        "letter", help="official is made for answers that start with the letter"
    )
    without_image: Path | None = option(
        None,
        help="predictions made with --no-image",
        type=none_or(path_option),
        metavar="FILE.jsonl",
    )
    text_only: Path | None = option(
        None,
        help="predictions of the language backbone",
        type=none_or(path_option),
        metavar="FILE.jsonl",
    )


def is_officially_right(response: str, answer: str) -> bool:
    """Return whether a response is right by the official rule.

    The response has to begin with the right letter, as it is or in one of three forms: `B`, `(B`,
    `option B` or `the answer is B`. So `It is B` is wrong, and `Based on` counts as B.

    Source: eval/mmstar_eval/evaluate in MMStar-Benchmark/MMStar.
    """
    letter = answer.lower().strip().replace("\n", " ")
    text = response.lower().strip().replace("\n", " ")
    beginnings = (letter, f"({letter}", f"option {letter}", f"the answer is {letter}")
    return text.startswith(beginnings)


def read_choices(question: str) -> list[str]:
    """Return the texts of the options in a question such as `... Options: A: a park, B: a dam`.

    Every question has four options. They are empty texts where the question does not list them.
    """
    _, _, text_of_options = question.rpartition("Options:")
    return lettered_options(text_of_options, _OPTION_MARK_PATTERN) or [""] * 4


def grade(row: Prediction, options: MMStarScoreOptions) -> RowGrade:
    """Grade the response of a row by `options.rules`: by its beginning, or by its letter."""
    right_letter = row["answer"]
    if options.rules == "official":
        is_right = is_officially_right(row["response"], right_letter)
        # The official rule extracts no letter, so the score file shows the beginning it looks at.
        extracted = row["response"][:20]
        rule = "official"
    else:
        extracted, rule = extract_choice(row["response"], read_choices(row["question"]))
        is_right = extracted == right_letter.strip().upper()
    return RowGrade(
        verdict=CORRECT if is_right else WRONG,
        extracted=extracted,
        reason=rule,
        groups={"category": [row["category"]], "l2_category": [row["l2_category"]]},
    )


def _summary(
    rows: Sequence[Prediction], graded_answers: Sequence[GradedAnswer], options: MMStarScoreOptions
) -> BenchmarkSummary:
    """Report how much the picture adds (MG), and how much a model knows the answers by heart (ML).

    Both compare this run with other runs that the score options name. They are None where no other
    run is named.
    """
    leakage = _compute_leakage(rows, graded_answers, options)
    lines: list[str] = []
    if leakage is not None:
        gain = percent_with_interval(leakage["MG"], leakage["MG_95"])
        lines.append(
            f"multi-modal gain MG: {gain}, S_v {leakage['S_v']:.3f}, S_wv {leakage['S_wv']:.3f}"
        )
        if "ML" in leakage:
            leakage_text = percent_with_interval(leakage["ML"], leakage["ML_95"])
            lines.append(f"leakage ML: {leakage_text}, S_t {leakage['S_t']:.3f}")
    return BenchmarkSummary(extra_keys={"leakage": leakage}, lines=lines)


def _compute_leakage(
    rows: Sequence[Prediction], graded_answers: Sequence[GradedAnswer], options: MMStarScoreOptions
) -> dict[str, Any] | None:
    """Compute the multi-modal gain MG = S_v - S_wv and the leakage ML = max(0, S_wv - S_t).

    Source: Chen et al. 2024, MMStar, section 3.3. Each S is an accuracy on the same problems: S_v
    with the images, S_wv without them, and S_t by the language model that the model was built from.
    S_v = 0.6, S_wv = 0.4 and S_t = 0.3 give MG = 0.2 and ML = 0.1. Both differences have an
    interval over the problems.

    Args:
        rows: The predictions of this run.
        graded_answers: Their grades, in the same order.
        options: The score options, which name the predictions without images and, for the leakage,
            those of the language model.

    Returns the metrics by name; None where no predictions without images are named. The keys
    `MG_95` and `ML_95` have the intervals.
    """
    if options.without_image is None:
        if options.text_only is not None:
            raise UserError("text_only: the leakage needs --without-image too (ML = S_wv - S_t)")
        return None
    # The accuracy on each problem.
    with_image = _accuracy_of_each_problem(graded_answers)
    without_image = _accuracies_of_other_run(
        options.without_image, rows=rows, options=options, option_name="without_image"
    )
    gains = [
        accuracy - blind_accuracy
        for accuracy, blind_accuracy in zip(with_image, without_image, strict=True)
    ]
    pids = list(correctness_by_pid(graded_answers))
    metrics: dict[str, Any] = {
        "S_v": fmean(with_image),
        "S_wv": fmean(without_image),
        "MG": fmean(gains),
        "MG_95": difference_interval(gains, pids),
    }
    if options.text_only is not None:
        language_model = _accuracies_of_other_run(
            options.text_only, rows=rows, options=options, option_name="text_only"
        )
        leaks = [
            blind_accuracy - text_accuracy
            for blind_accuracy, text_accuracy in zip(without_image, language_model, strict=True)
        ]
        low, high = difference_interval(leaks, pids)
        metrics["S_t"] = fmean(language_model)
        metrics["ML"] = max(0.0, fmean(leaks))
        metrics["ML_95"] = (max(0.0, low), max(0.0, high))
    return metrics


def _accuracies_of_other_run(
    file: Path, rows: Sequence[Prediction], options: MMStarScoreOptions, option_name: str
) -> list[float]:
    """Grade another run on the same problems, and return its accuracy on each.

    Args:
        file: The predictions of the other run.
        rows: The predictions of this run, in whose order the accuracies are. The other run has to
            have the same problems and samples.
        options: The score options, by which the answers are graded.
        option_name: The option that names the file, for messages.

    Raises `UserError` where the other run has other problems.
    """
    other_rows = read_predictions(file, check=check_row, id_column=BENCHMARK.id_column)
    other_row_by_key = {row_key(row): row for row in other_rows}
    missing_pids = [row["pid"] for row in rows if row_key(row) not in other_row_by_key]
    # The other run lacks answers of this run, or has further ones.
    if missing_pids or len(other_row_by_key) != len(rows):
        fault = f"it has {len(other_row_by_key)} rows and this run {len(rows)}"
        if missing_pids:
            fault = f"pid {missing_pids[0]!r} is missing"
        raise UserError(
            f"{option_name}: {file} does not have the items of this run ({fault}); run it on the "
            "same data"
        )
    rows_in_order = [other_row_by_key[row_key(row)] for row in rows]
    _, graded_answers = grade_rows(BENCHMARK, rows_in_order, options)
    return _accuracy_of_each_problem(graded_answers)


def _accuracy_of_each_problem(graded_answers: Sequence[GradedAnswer]) -> list[float]:
    """Return the accuracy on each problem, which may have several answers."""
    return [
        sum(are_correct) / len(are_correct)
        for are_correct in correctness_by_pid(graded_answers).values()
    ]


def load(options: MMStarDataOptions) -> LoadedProblems:
    """Load the problems of a split, with their images or, with `--no-image`, without them.

    The question is asked as it is, since it lists its options.
    """
    loaded = load_problems(
        options,
        required_columns=("index", *REQUIRED_COLUMNS),
        image_columns=("image",),
        prompt=itemgetter("question"),
        check=check_row,
        id_column="index",
        stored_columns=("index", *REQUIRED_COLUMNS, "meta_info"),
    )
    if options.no_image:
        return loaded._replace(problems=[without_images(problem) for problem in loaded.problems])
    return loaded


_PUBLISHED = PublishedResults(
    source="ADORA, arXiv 2602.10019, pass@1; MathVista by VLMEvalKit's rules",
    rows={
        "Qwen2.5-VL-7B-Instruct": {"all": 63.9},
        "MM-EUREKA-8B": {"all": 64.3},
        "MMR1-math-v0": {"all": 64.9},
        "GRPO": {"all": 61.9},
        "ADORA": {"all": 63.8},
    },
)
BENCHMARK = Benchmark(
    name="mmstar",
    split="val",
    load=load,
    grade=grade,
    rules=lambda options: {"rules": options.rules},
    score_options=MMStarScoreOptions,
    data_options=MMStarDataOptions,
    check=check_row,
    fingerprint=("data_revision", "no_image"),
    id_column="index",
    summary=_summary,
    item=build_extraction_item,
    published=_PUBLISHED,
)
if __name__ == "__main__":
    from eval.command import main

    raise SystemExit(main(BENCHMARK))
