"""`python -m eval.wemath`: We-Math, with its official prompt, rule and four-way diagnosis, strict
and loose.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, Literal, NamedTuple

from adora_vl.evals.inference.dataset import load_problems
from adora_vl.evals.inference.predictions import TEXT_VALUE, describe_field_fault, matching_text
from adora_vl.evals.options import HubDataOptions, ScoreOptions, option
from adora_vl.evals.records import (
    CORRECT,
    WRONG,
    Benchmark,
    BenchmarkSummary,
    GradedAnswer,
    Prediction,
    RowGrade,
)
from adora_vl.evals.scoring.choice import extract_choice, lettered_options
from adora_vl.evals.scoring.score import (
    accuracy_of_share,
    mean_with_interval,
)
from adora_vl.evals.scoring.table import percent_with_interval
from adora_vl.utils.cli import pluralize

_PROMPT_TEMPLATE = """\
Now, we require you to solve a multiple-choice math question. Please briefly describe your thought process and provide \
the final answer(option).
Question: {question}
Option: {option}
Regarding the format, please answer following the template below, and be sure to include two <> symbols:
<Thought process>: <<your thought process>> <Answer>: <<your option>>"""
_OPTION_MARK_PATTERN = re.compile(r"(?:^|[;\s])\s*([A-H])[.．]")
_OPTIONS_WITHOUT_TEXT = [""] * 5  # no question without texts of its options has more than five
REQUIRED_COLUMNS = {
    "ID": TEXT_VALUE,
    "key": matching_text(
        "2steps_(?:[12]|multi)|3steps_(?:[123]|multi)", "such as 2steps_1, 3steps_3 or 3steps_multi"
    ),
    "knowledge concept": TEXT_VALUE,
    "question": TEXT_VALUE,
    "option": TEXT_VALUE,
    "answer": matching_text("[A-H]", "a letter from A to H"),
}
check_row = partial(describe_field_fault, types=REQUIRED_COLUMNS)
# The brackets of the official form of an answer. One of the groups is the text inside them.
_TEMPLATE_BRACKETS_PATTERN = re.compile(
    r"<\s*(Answer|Thought process)\s*>|<<\s*((?:(?!<<)(?s:.))*?)\s*>>|<\s*([A-H](?:[.:][^<>]*)?)>"
)
_GROUP_BY_STEP_COUNT = {"2": "two steps", "3": "three steps"}


def prompt(row: dict[str, Any]) -> str:
    """Build the official prompt of a row: the question, its options, and the form of the answer."""
    return _PROMPT_TEMPLATE.format(question=row["question"], option=row["option"])


def official_letter(response: str) -> str | None:
    """Extract the letter of a response by the official rule, None if there is none.

    It is the first character after the last word `Answer`, apart from `<`, `>`, `:` and `.`:
    `<Answer>: <<B>>` gives `B`. The rule is made for this form of the official prompt. `boxed{B}`
    gives None.
    """
    text_after_answer = response.split("Answer")[-1].strip()
    without_signs = re.sub(r"[<>:.]", "", text_after_answer).strip()
    if not without_signs or without_signs[0] not in "ABCDEFGH":
        return None
    return without_signs[0]


@dataclass(frozen=True, kw_only=True)
class WeMathScoreOptions(ScoreOptions):
    """Which letter counts."""

    rules: Literal["official", "letter"] = option(
        "letter", help="official is made for answers in the official form"
    )


def grade(row: Prediction, options: WeMathScoreOptions) -> RowGrade:
    """Grade the response of a row by its letter, which `options.rules` says how to find.

    The answer is counted in groups by the number of steps of its question. An answer to a single
    step is also counted by the concept of that step. The `key` of a row says which part of a
    problem is asked: `3steps_2` is the second of three steps, and `3steps_multi` the whole problem.
    """
    if options.rules == "official":
        letter = official_letter(row["response"])
        rule = "official"
    else:
        choices = lettered_options(row["option"], _OPTION_MARK_PATTERN) or _OPTIONS_WITHOUT_TEXT
        letter, rule = extract_choice(_remove_template(row["response"]), choices)
    n_steps, _, step = row["key"].partition("steps_")
    if step == "multi":
        groups = {"steps": [_GROUP_BY_STEP_COUNT[n_steps]]}
    else:
        groups = {"steps": ["one step"], "concept": [row["knowledge concept"]]}
    return RowGrade(
        verdict=CORRECT if letter == row["answer"] else WRONG,
        extracted=letter,
        reason=rule,
        groups=groups,
    )


def _remove_template(response: str) -> str:
    """Remove the brackets of the official answer template, and keep the text inside them.

    `<Answer>: <<B>>` becomes `Answer: B`.
    """

    def text_inside(match: re.Match[str]) -> str:
        """Return the text inside the brackets, which is the one group that has matched."""
        return match[1] or match[2] or match[3] or ""

    return _TEMPLATE_BRACKETS_PATTERN.sub(text_inside, response)


def diagnose(are_steps_right: Sequence[bool], is_whole_right: bool, *, strict: bool) -> str:
    """Diagnose a problem by the answers to its single steps and to the whole problem.

    The diagnoses are those of Qiao et al. 2024, We-Math, section 3.3:

    - IK, insufficient knowledge: the whole is wrong, and at least one step is wrong.
    - IG, inadequate generalisation: the whole is wrong, although all steps are right.
    - CM, complete mastery: the whole is right. Strict: all steps are right. Loose: at least one is.
    - RM, rote memorisation: the whole is right. Strict: a step is wrong. Loose: all steps are.
    """
    if not is_whole_right:
        return "IG" if all(are_steps_right) else "IK"
    is_mastered = all(are_steps_right) if strict else any(are_steps_right)
    return "CM" if is_mastered else "RM"


_SCORE_DEFINITION = (
    "of the problems whose steps were all asked: IK (insufficient knowledge), IG (inadequate "
    "generalisation) and CM (complete mastery) as shares of all of them, RM (rote memorisation) "
    "as a share of CM and RM; the score is the mean of 1 for CM, a half for IG, and 0 for IK and "
    "RM"
)


def _summary(
    rows: Sequence[Prediction], graded_answers: Sequence[GradedAnswer], options: WeMathScoreOptions
) -> BenchmarkSummary:
    """Compute We-Math's strict and loose score, and the share of each diagnosis.

    A problem is diagnosed by whether the answers to its steps and to the whole are right: as
    insufficient knowledge, mastery and so on (see `diagnose`). Problems that lack one of these
    answers are left out, with a warning.
    """
    correctness_by_problem = _collect_correctness(rows, graded_answers)
    complete_problems = {
        problem: correctness
        for problem, correctness in correctness_by_problem.items()
        if _has_all_parts(correctness)
    }
    all_ids = {problem.id for problem in correctness_by_problem}
    incomplete_ids = all_ids - {problem.id for problem in complete_problems}
    warnings: list[str] = []
    if incomplete_ids:
        problems = pluralize(len(incomplete_ids), "problem")
        warnings.append(
            f"{problems} without an answer to every step and the whole, left out of the diagnosis"
        )
    if not complete_problems:
        no_score: dict[str, Any] = {"strict": None, "loose": None, "definition": _SCORE_DEFINITION}
        return BenchmarkSummary(metrics={"score": no_score}, warnings=warnings)
    shares: dict[str, Any] = {}
    scores: dict[str, Any] = {"definition": _SCORE_DEFINITION}
    lines: list[str] = []
    problem_ids = [problem.id for problem in complete_problems]
    for strictness in ("strict", "loose"):
        diagnoses = [
            _diagnose_parts(correctness, strict=strictness == "strict")
            for correctness in complete_problems.values()
        ]
        shares |= _diagnosis_shares(diagnoses, problem_ids, strictness)
        # The score is the mean of the points of the problems. A diagnosis has 0, 0.5 or 1 points.
        points_by_id = _points_by_problem(complete_problems, diagnoses)
        mean = mean_with_interval(list(points_by_id.values()), list(points_by_id))
        scores[strictness] = {"accuracy": mean["value"], "interval_95": mean["interval_95"]}
        score_text = percent_with_interval(mean["value"], mean["interval_95"])
        lines.append(f"We-Math's score, {strictness}: {score_text}")
    metrics = {"score": scores, "diagnosis": shares}
    return BenchmarkSummary(metrics=metrics, lines=lines, warnings=warnings)


def _diagnosis_shares(
    diagnoses: Sequence[str], problem_ids: Sequence[str], strictness: str
) -> dict[str, Any]:
    """Compute the share of each diagnosis, as metrics such as `IK` and `CM_strict`.

    The diagnoses are We-Math's: IK (insufficient knowledge), IG (inadequate generalisation), CM
    (complete mastery) and RM (rote memorisation).

    Args:
        diagnoses: The diagnosis of each sample of each problem, such as `CM`.
        problem_ids: The problem of each diagnosis.
        strictness: Which score the diagnoses are for, `strict` or `loose`.
    """
    shares: dict[str, Any] = {}
    if strictness == "strict":  # IK and IG are the same for both scores
        for kind in ("IK", "IG"):
            shares[kind] = accuracy_of_share(
                [diagnosis == kind for diagnosis in diagnoses], problem_ids
            )
    are_mastered = [diagnosis == "CM" for diagnosis in diagnoses]
    shares[f"CM_{strictness}"] = accuracy_of_share(are_mastered, problem_ids)
    # Rote memorisation is counted among the problems whose last question, the whole, is right: the
    # diagnosis of these is CM or RM.
    are_rote: list[bool] = []
    solved_ids: list[str] = []
    for diagnosis, problem_id in zip(diagnoses, problem_ids, strict=True):
        if diagnosis in ("CM", "RM"):
            are_rote.append(diagnosis == "RM")
            solved_ids.append(problem_id)
    shares[f"RM_{strictness}"] = accuracy_of_share(are_rote, solved_ids) if are_rote else None
    return shares


class _ProblemSample(NamedTuple):
    """One sample of the answers to a problem; with several samples each is diagnosed on its own."""

    id: str
    sample: int


# Whether the answer to each part of a problem is right: `3steps_1` is the first of three steps, and
# `3steps_multi` the whole problem.
PartCorrectness = dict[str, bool]


def _collect_correctness(
    rows: Sequence[Prediction], graded_answers: Sequence[GradedAnswer]
) -> dict[_ProblemSample, PartCorrectness]:
    """Collect whether the answers to the parts of each problem are right.

    A value is for example `{"2steps_1": True, "2steps_2": True, "2steps_multi": False}`. Each
    sample of a problem has a key, since it is diagnosed on its own.
    """
    correctness_by_problem: dict[_ProblemSample, PartCorrectness] = defaultdict(dict)
    for row, graded in zip(rows, graded_answers, strict=True):
        problem = _ProblemSample(row["ID"], graded.sample)
        correctness_by_problem[problem][row["key"]] = graded.correct
    return correctness_by_problem


def _has_all_parts(correctness: PartCorrectness) -> bool:
    """Return whether a problem has an answer to each of its steps and to the whole.

    The keys are the parts with an answer, such as `3steps_1` and `3steps_multi`. The first
    character of each is the number of steps.
    """
    first_key = next(iter(correctness))
    n_steps = int(first_key[0])
    return len(correctness) == n_steps + 1


# The points of each diagnosis in We-Math's score.
_POINTS_BY_DIAGNOSIS = {"CM": 1.0, "IG": 0.5, "IK": 0.0, "RM": 0.0}


def _points_by_problem(
    problem_samples: Iterable[_ProblemSample], diagnoses: Sequence[str]
) -> dict[str, float]:
    """Return the points of each problem in We-Math's score, by its id: the mean over its samples.

    Samples of one problem are not independent, so the interval of the score is over the problems.

    Args:
        problem_samples: The samples of all problems.
        diagnoses: The diagnosis of each sample, in the same order.
    """
    points_by_id: dict[str, list[float]] = defaultdict(list)
    for problem_sample, diagnosis in zip(problem_samples, diagnoses, strict=True):
        points_by_id[problem_sample.id].append(_POINTS_BY_DIAGNOSIS[diagnosis])
    return {problem_id: fmean(points) for problem_id, points in points_by_id.items()}


def _diagnose_parts(correctness: PartCorrectness, *, strict: bool) -> str:
    """Return the diagnosis of a problem, such as `CM`, by the answers to its parts.

    `correctness` is for example `{"2steps_1": True, "2steps_2": True, "2steps_multi": False}`.
    """
    # In alphabetic order the whole comes last.
    *step_keys, whole_key = sorted(correctness)
    are_steps_right = [correctness[key] for key in step_keys]
    return diagnose(are_steps_right, correctness[whole_key], strict=strict)


# The rows are every step of a composite problem, and the whole.
load = partial(
    load_problems,
    required_columns=("question number", *REQUIRED_COLUMNS),
    image_columns=("image_path",),
    prompt=prompt,
    check=check_row,
    id_column="question number",
)


BENCHMARK = Benchmark(
    name="wemath",
    split="testmini",
    load=load,
    grade=grade,
    rules=lambda options: {"rules": options.rules},
    score_options=WeMathScoreOptions,
    data_options=HubDataOptions,
    check=check_row,
    fingerprint=("data_revision",),
    id_column="question number",
    original_id=lambda row: str(row["ID"]),
    summary=_summary,
)
if __name__ == "__main__":
    from eval.command import main

    raise SystemExit(main(BENCHMARK))
