"""`python -m eval.mathvista`: MathVista, with its official prompt, extraction and scoring."""

import re
from argparse import BooleanOptionalAction
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from string import ascii_uppercase
from typing import Any, Literal, NamedTuple

from adora_vl.data.prompts import with_letters
from adora_vl.evals.inference.dataset import load_problems
from adora_vl.evals.inference.predictions import ANY_VALUE, TEXT_VALUE, describe_field_fault, one_of
from adora_vl.evals.options import HubDataOptions, option
from adora_vl.evals.records import (
    CORRECT,
    WRONG,
    Benchmark,
    BenchmarkSummary,
    Extraction,
    GradedAnswer,
    Prediction,
    PublishedResults,
    RowGrade,
)
from adora_vl.evals.scoring.judge import (
    AnswerKind,
    ExtractionOptions,
    Question,
    describe_extraction,
    extract_answers,
)
from adora_vl.evals.scoring.score import (
    accuracy_from_counts,
    accuracy_metric,
    groups_from_metadata,
    samples_per_problem,
)

_NUMBER_REQUEST = "requiring a floating-point number with {} and provide the final value, e.g., {}"
# The words of the hint in the official prompt, by the kind of the answer.
_REQUEST_BY_KIND = {
    "choice": "and provide the correct option letter, e.g., A, B, C, D",
    "integer": "requiring an integer answer and provide the final value, e.g., 1, 2, 3",
    "list": "requiring a Python list as an answer and provide the final list, e.g., [1, 2, 3], [1.2, "
    "1.3, 1.4]",
    "one place": _NUMBER_REQUEST.format("one decimal place", "1.2, 1.3, 1.4"),
    "two places": _NUMBER_REQUEST.format("two decimal places", "1.23, 1.34, 1.45"),
}


def build_query(row: dict[str, Any]) -> str:
    """Build the official prompt of a row: a hint, the question with its unit, and the choices.

    The hint says which form the answer should have: `Hint: Please answer the question requiring an
    integer answer ...`.
    """
    answer_kind = "choice" if row["question_type"] == "multi_choice" else row["answer_type"]
    # Any other kind is a float or a text. The official code gives a text the hint for two places.
    if answer_kind not in ("choice", "integer", "list"):
        answer_kind = "one place" if row["precision"] == 1 else "two places"
    hint = f"Hint: Please answer the question {_REQUEST_BY_KIND[answer_kind]}, at the end."
    question = f"Question: {row['question']}"
    if row.get("unit"):
        question += f" (Unit: {row['unit']})"
    lines = [hint, question]
    if row["choices"]:
        lines += ["Choices:", *with_letters(row["choices"])]
    return "\n".join(lines).strip()


RuleSet = Literal["official", "published_2023", "vlmevalkit", "vlmevalkit_1680"]
_VLMEVALKIT_RULE_SETS = ("vlmevalkit", "vlmevalkit_1680")  # before and after its pull request 1680
# A response with one of these texts is no answer for VLMEvalKit.
_REFUSAL_TEXTS = (
    "Failed to obtain answer via API",
    "Sorry, I can't help with images of people yet.",
    "I can't process this file.",
    "I'm sorry, but without the image provided",
    "Cannot determine the answer",
)
_STATED_LETTER_PATTERN = re.compile(r"answer\s+is\s+\**([A-D])", re.IGNORECASE)
_BRACKETED_LETTER_PATTERN = re.compile(r"\(([a-zA-Z])\)")
_CONVERSION_ERRORS = (ValueError, TypeError, OverflowError)  # what `int` and `float` raise


@dataclass(frozen=True, kw_only=True)
class MathVistaScoreOptions(ExtractionOptions):
    """How the extracted answer is compared with the reference answer."""

    rules: RuleSet = option("official", help="how it is compared with the reference answer")
    ignore_empty_extractions: bool = option(
        False,
        help="an empty extraction is wrong, not the nearest choice",
        action=BooleanOptionalAction,
    )


class Comparison(NamedTuple):
    """Whether an extracted answer is right, and the text that was compared."""

    is_right: bool
    prediction: str | None
    """The extracted answer, written as the reference answer is; None if it cannot be."""


def compare_with_reference(row: dict[str, Any], extraction: object, rules: RuleSet) -> Comparison:
    """Write an extracted answer as the reference answer is written, and compare both.

    `B` becomes the text of the second choice, and `1.25` becomes `1.2` where the reference has one
    decimal place.

    Args:
        row: The question, its choices and the reference answer.
        extraction: The extracted answer, which may be any value of JSON.
        rules: The name of the rules to compare by.
    """
    if rules in _VLMEVALKIT_RULE_SETS:
        return _compare_as_vlmevalkit(row, extraction, compare_lists=rules == "vlmevalkit_1680")
    if row["question_type"] == "multi_choice":
        choices = row["choices"]
        prediction = choices[official_choice(extraction, choices)]
    else:
        # The official code of 2023 did not take `5.0` for an integer.
        strict_int = rules == "published_2023"
        prediction = _write_as_reference(row, extraction, strict_int=strict_int)
    return Comparison(is_right=prediction == row["answer"], prediction=prediction)


def official_choice(extraction: object, choices: Sequence[str]) -> int:
    """Return the index of the choice that an extracted answer means by the official rules.

    `B` and `it is (b)` mean the second choice. Any other text means the choice with the smallest
    edit distance, however large that distance is.
    """
    text = extraction.strip() if isinstance(extraction, str) else str(extraction)
    letter_in_brackets = _BRACKETED_LETTER_PATTERN.search(text)
    if letter_in_brackets:
        text = letter_in_brackets[1].upper()
    if len(text) == 1:
        index = ord(text) - ord("A")
        if 0 <= index < len(choices):
            return index
    distances = [edit_distance(text, choice) for choice in choices]
    return distances.index(min(distances))


def vlmevalkit_choice(extraction: object, choices: Sequence[str]) -> int | None:
    """Return the index of the choice that an extracted answer means by VLMEvalKit's rules, or None.

    The first of these rules that applies decides (vlmeval/utils/matching_util.py):

    1. One letter of a choice is among the words, and it is one of the last four words.
    2. A letter stands after `answer is`.
    3. The text of one choice stands in the answer, which is short.

    Unlike the official rules these never guess the nearest choice.
    """
    text = str(extraction)
    # The model that extracted the answer has found none.
    if any(phrase in text for phrase in _REFUSAL_TEXTS):
        return None
    words = re.sub(r"[.()\[\],:;!*#{}]", " ", text).split()
    letters = ascii_uppercase[: len(choices)]
    letters_in_text = [letter for letter in letters if letter in words]
    if len(letters_in_text) == 1:
        letter = letters_in_text[0]
        # Earlier in the text a letter may be a word, such as `A`.
        is_near_end = words.index(letter) > len(words) - 5
        if is_near_end:
            return letters.index(letter)
    # The extracting model is asked to write `Z` if no choice is meant.
    if not letters_in_text and "Z" in words:
        return None
    stated_letter = _STATED_LETTER_PATTERN.search(text)
    if stated_letter and stated_letter[1].upper() in letters:
        return letters.index(stated_letter[1].upper())
    # In a long text the words of a choice may stand for any reason.
    n_choice_characters = sum(len(choice) for choice in choices)
    if len(text) > 2 * n_choice_characters:
        return None
    contained_indices = [
        index for index, choice in enumerate(choices) if choice.lower() in text.lower()
    ]
    return contained_indices[0] if len(contained_indices) == 1 else None


def edit_distance(first: str, second: str) -> int:
    """Compute Levenshtein's distance: the fewest characters to insert, delete or replace.

    `kitten` and `sitting` have the distance 3. Only two rows of the table of distances are kept:
    `current_row[j]` is the distance between the first `i` characters of `first` and the first `j`
    of `second`, and `previous_row` has those for `i - 1`.
    """
    previous_row = list(range(len(second) + 1))
    for i, first_char in enumerate(first, start=1):
        current_row = [i]
        for j, second_char in enumerate(second, start=1):
            insertion = current_row[j - 1] + 1
            deletion = previous_row[j] + 1
            replacement = previous_row[j - 1]
            if first_char != second_char:
                replacement += 1
            current_row.append(min(deletion, insertion, replacement))
        previous_row = current_row
    return previous_row[-1]


def _write_as_reference(row: dict[str, Any], extraction: Any, *, strict_int: bool) -> str | None:
    """Write an extracted answer as the reference answer is written, as a text.

    With the `answer_type` `float` and a `precision` of 1, `1.25` becomes `1.2`; with `integer`,
    `5.0` becomes `5`. Returns None if there is no answer, or if a number is asked for and the
    answer is none.

    Args:
        row: Its `answer_type` says which form the answer has, and `precision` how many decimal
            places.
        extraction: The extracted answer, which may be any value of JSON.
        strict_int: Refuse `5.0` as an integer.
    """
    try:
        if row["answer_type"] == "integer":
            return str(int(extraction) if strict_int else int(float(extraction)))
        if row["answer_type"] == "float":
            # `round` needs an `int`, but in a file that pandas wrote the precision is a float.
            places = int(float(row["precision"]))
            return str(round(float(extraction), places))
    except _CONVERSION_ERRORS:
        return None
    return None if extraction is None else str(extraction)


def _compare_as_vlmevalkit(
    row: dict[str, Any], extraction: Any, *, compare_lists: bool
) -> Comparison:
    """Compare an extracted answer with the reference answer by the rules of VLMEvalKit.

    Args:
        row: The question, its choices and the reference answer.
        extraction: The extracted answer, which may be any value of JSON.
        compare_lists: Whether a list is right if it has the text of the reference. Before pull
            request 1680 of VLMEvalKit a list never was right.
    """
    reference = row["answer"]
    if row["question_type"] == "multi_choice":
        choices = row["choices"]
        index = vlmevalkit_choice(extraction, choices)
        if index is None:
            return Comparison(is_right=False, prediction=None)
        text = choices[index]
        # VLMEvalKit compares letters, so only the first of two equal choices is right.
        # `index` of a list finds the first one.
        is_first_of_equal = choices.index(text) == index
        return Comparison(is_right=text == reference and is_first_of_equal, prediction=text)
    convert = {"integer": int, "float": float}.get(row["answer_type"])
    if convert is None:  # a text or a list
        prediction = None if extraction is None or not compare_lists else str(extraction)
        return Comparison(is_right=prediction == reference, prediction=prediction)
    try:
        value = convert(extraction)
        return Comparison(is_right=value == convert(reference), prediction=str(value))
    except _CONVERSION_ERRORS:
        return Comparison(is_right=False, prediction=None)


METADATA_GROUPS = ("language", "source", "category", "task", "context", "grade", "skills")
_GEOMETRY_TASK = "geometry problem solving"
_GEOMETRY_SKILL = "geometry reasoning"
ID_OOD_DEFINITION = (
    "ID pools the items of task `geometry problem solving` and the items with skill `geometry "
    "reasoning`, an item in both counted twice; OOD is everything correct minus ID's, over all "
    "items minus ID's. The split of ADORA's table, inferred from its figures. ID's "
    "interval is over the problems; OOD's is that of as many items as are left."
)
# The columns that each row has, and what their values have to be.
REQUIRED_COLUMNS = {
    "question": TEXT_VALUE,
    "question_type": one_of("multi_choice", "free_form"),
    "answer_type": one_of("text", "integer", "float", "list"),
    "precision": ANY_VALUE,
    "choices": ANY_VALUE,
    "answer": TEXT_VALUE,
    "metadata": ANY_VALUE,
}
_MAX_DECIMAL_PLACES = 15  # decimal places that a float holds


def check_row(row: Prediction) -> str | None:
    """Return what is wrong with the fields of a row, None if nothing is wrong.

    Each row needs some columns. A multiple-choice question needs choices too, and an answer of the
    type `float` needs a number of decimal places.
    """
    fault = describe_field_fault(row, REQUIRED_COLUMNS)
    if fault:
        return fault
    if row["question_type"] == "multi_choice":
        choices = row["choices"]
        if not 1 <= len(choices or []) <= 26:  # each choice has a letter
            return f"is multiple choice with choices = {choices!r}, expected 1 to 26 of them"
        if row["answer"] not in choices:  # all rules compare with the text of a choice
            return f"has answer = {row['answer']!r}, expected the text of one of its choices"
    if row["answer_type"] == "float":
        places = row["precision"]
        if not isinstance(places, int | float) or not 0 <= places <= _MAX_DECIMAL_PLACES:
            return (
                f"has precision = {places!r}, expected a number from 0 to {_MAX_DECIMAL_PLACES} for a "
                "float answer"
            )
    return None


def build_question(row: Prediction) -> Question:
    """Build the question from which an answer is extracted, with the response of the model."""
    is_choice = row["question_type"] == "multi_choice"
    kind: AnswerKind = "choice" if is_choice else row["answer_type"]
    return Question(
        kind=kind, text=row["question"], choices=row["choices"] or (), response=row["response"]
    )


def grade(row: Prediction, options: MathVistaScoreOptions) -> RowGrade:
    """Grade the answer that was extracted from a response, by `options.rules`.

    `extract_answers` has put it into the row under `parsed_answer`. By the official rules an empty
    one means the nearest choice, unless `options.ignore_empty_extractions` says that it is wrong.
    """
    extraction: Extraction = row["parsed_answer"]
    is_empty = not str(extraction.text or "").strip()
    if is_empty and options.ignore_empty_extractions:
        comparison = Comparison(is_right=False, prediction=None)
    else:
        comparison = compare_with_reference(row, extraction.text, options.rules)
    groups = {"question_type": [row["question_type"]], "answer_type": [row["answer_type"]]}
    groups |= groups_from_metadata(row, METADATA_GROUPS)
    return RowGrade(
        verdict=CORRECT if comparison.is_right else WRONG,
        extracted=comparison.prediction,
        reason=extraction.method,
        groups=groups,
        extraction=extraction,
    )


def _build_score_item(row: Prediction, graded: GradedAnswer) -> dict[str, Any]:
    """Build the entry of an answer in `items` of the score file.

    It has the answer as it was extracted, such as `B`, and the text that was compared with the
    reference answer (`prediction`), such as the text of choice B.
    """
    return {
        "verdict": graded.grade.verdict,
        "correct": graded.correct,
        "answer": row["answer"],
        "extraction": row["parsed_answer"].text,
        "prediction": graded.grade.extracted,
        "how": graded.grade.reason,
    }


def _summary(
    rows: Sequence[Prediction],
    graded_answers: Sequence[GradedAnswer],
    options: MathVistaScoreOptions,
) -> BenchmarkSummary:
    """Compute the accuracies ID and OOD of the table in ADORA's paper.

    ID (in distribution) is over geometry problems, like those of the training, and OOD (out of
    distribution) over all others. As in the table, a problem counts in ID once if its task is
    geometry, and once more if geometry is among its skills.
    """
    id_answers: list[GradedAnswer] = []
    for graded in graded_answers:
        groups = graded.grade.groups
        count = groups.get("task", []).count(_GEOMETRY_TASK)
        count += groups.get("skills", []).count(_GEOMETRY_SKILL)
        id_answers += count * [graded]  # 0, 1 or 2 times
    # An answer that counts twice is still one for the interval, which is over problems.
    id_metric = accuracy_metric(id_answers) if id_answers else None
    id_correct = sum(graded.correct for graded in id_answers)
    # OOD is all answers minus those of ID. In a small set, where many problems count twice in ID,
    # its counts may be negative, and then its metric is None.
    ood_correct = sum(graded.correct for graded in graded_answers) - id_correct
    ood_total = len(graded_answers) - len(id_answers)
    n_samples = samples_per_problem(graded_answers)
    ood_metric = accuracy_from_counts(ood_correct, ood_total, n_samples)
    return BenchmarkSummary(
        metrics={"id_ood": {"definition": ID_OOD_DEFINITION, "ID": id_metric, "OOD": ood_metric}}
    )


def _describe_rules(options: MathVistaScoreOptions) -> dict[str, Any]:
    """Return the `rules` of a score file: by which an answer is right, and how it was extracted."""
    return {
        "rules": options.rules,
        "ignore_empty_extractions": options.ignore_empty_extractions,
        **describe_extraction(options),
    }


# The column `query` has the official prompt, if the data have this column.
load = partial(
    load_problems,
    required_columns=("pid", *REQUIRED_COLUMNS),
    image_columns=("decoded_image", "image"),
    prompt=lambda row: row.get("query") or build_query(row),
    check=check_row,
    stored_columns=(
        "question",
        "question_type",
        "answer_type",
        "precision",
        "unit",
        "choices",
        "answer",
        "metadata",
    ),
)


_PUBLISHED = PublishedResults(
    source="ADORA, arXiv 2602.10019, pass@1; MathVista by VLMEvalKit's rules",
    rules="vlmevalkit",
    rows={
        "Qwen2.5-VL-7B-Instruct": {"all": 67.3, "ID": 69.6, "OOD": 65.5},
        "MM-EUREKA-8B": {"all": 68.1, "ID": 73.4, "OOD": 63.8},
        "MMR1-math-v0": {"all": 70.2, "ID": 72.3, "OOD": 68.5},
        "Vision-R1-7B (its report)": {"all": 73.5, "ID": 81.9, "OOD": 66.8},
        "GRPO": {"all": 70.2, "ID": 71.6, "OOD": 69.1},
        "ADORA": {"all": 73.5, "ID": 76.1, "OOD": 71.4},
    },
)
BENCHMARK = Benchmark(
    name="mathvista",
    split="testmini",
    load=load,
    grade=grade,
    rules=_describe_rules,
    score_options=MathVistaScoreOptions,
    data_options=HubDataOptions,
    check=check_row,
    fingerprint=("data_revision",),
    prepare=partial(extract_answers, question_of=build_question),
    summary=_summary,
    item=_build_score_item,
    published=_PUBLISHED,
)
if __name__ == "__main__":
    from eval.command import main

    raise SystemExit(main(BENCHMARK))
