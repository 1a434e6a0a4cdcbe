"""`python -m eval.mathvista`: MathVista, with its official prompt, extraction and scoring."""

import re
from argparse import BooleanOptionalAction
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

from adora_vl.utils.cli import imports

with imports():
    from adora_vl.data.prompts import lettered
    from adora_vl.evals.inference.dataset import load_problems
    from adora_vl.evals.inference.predictions import ANY, TEXT, one_of, wrong_fields
    from adora_vl.evals.options import HubDataOptions, option
    from adora_vl.evals.records import (
        Benchmark,
        Extraction,
        Graded,
        OwnFigures,
        Prediction,
        Published,
        RowGrade,
    )
    from adora_vl.evals.scoring.judge import (
        ExtractionOptions,
        Kind,
        Question,
        extraction_rules,
        with_extractions,
    )
    from adora_vl.evals.scoring.score import (
        cell_from_counts,
        correct_by_problem,
        metadata_groups,
        verdict_of,
    )

_NUMBER = "requiring a floating-point number with {} and provide the final value, e.g., {}"
_ASKED_FOR = {
    "choice": "and provide the correct option letter, e.g., A, B, C, D",
    "integer": "requiring an integer answer and provide the final value, e.g., 1, 2, 3",
    "list": "requiring a Python list as an answer and provide the final list, e.g., [1, 2, 3], [1.2, "
    "1.3, 1.4]",
    "one place": _NUMBER.format("one decimal place", "1.2, 1.3, 1.4"),
    "two places": _NUMBER.format("two decimal places", "1.23, 1.34, 1.45"),
}


def build_query(row: dict[str, Any]) -> str:
    """Return the official prompt of one item: a hint, the question with its unit, and the choices.

    `row` has `question_type` and the other fields of the data.
    """
    kind = "choice" if row["question_type"] == "multi_choice" else row["answer_type"]
    if kind not in ("choice", "integer", "list"):
        kind = "one place" if row["precision"] == 1 else "two places"  # a float on the hub
    hint = f"Hint: Please answer the question {_ASKED_FOR[kind]}, at the end."
    lines = [hint, f"Question: {row['question']}"]
    if row.get("unit"):
        lines[-1] += f" (Unit: {row['unit']})"
    if row["choices"]:
        lines += ["Choices:", *lettered(row["choices"])]
    return "\n".join(lines).strip()


RuleSet = Literal["official", "published_2023", "vlmevalkit", "vlmevalkit_1680"]
RULE_SETS: tuple[RuleSet, ...] = get_args(RuleSet)
_OF_VLMEVALKIT = ("vlmevalkit", "vlmevalkit_1680")  # before and after its pull request 1680
# The texts that VLMEvalKit takes for no answer at all.
_REFUSED = (
    "Failed to obtain answer via API",
    "Sorry, I can't help with images of people yet.",
    "I can't process this file.",
    "I'm sorry, but without the image provided",
    "Cannot determine the answer",
)
_STATED_LETTER = re.compile(r"answer\s+is\s+\**([A-D])", re.IGNORECASE)
_LETTER_IN_BRACKETS = re.compile(r"\(([a-zA-Z])\)")
_NOT_A_NUMBER = (ValueError, TypeError, OverflowError)  # what `int` and `float` raise


@dataclass(frozen=True, kw_only=True)
class MathVistaScoreOptions(ExtractionOptions):
    """How the extracted answer is compared with the reference answer."""

    rules: RuleSet = option(
        "official", help="how it is compared with the reference answer", choices=RULE_SETS
    )
    ignore_empty_extractions: bool = option(
        False,
        help="an empty extraction is wrong, not the nearest choice",
        action=BooleanOptionalAction,
    )


class Hit(NamedTuple):
    """Whether an extraction is right, and the text that was compared."""

    correct: bool
    prediction: str | None
    """The normalised extraction; None if there is none."""


def judge_extraction(row: dict[str, Any], extraction: object, rules: RuleSet) -> Hit:
    """Normalise the extraction of a row, and compare it with the reference answer.

    `rules` is one of `RULE_SETS`.
    """
    if rules in _OF_VLMEVALKIT:
        return _vlmevalkit(row, extraction, lists=rules == "vlmevalkit_1680")
    if row["question_type"] == "multi_choice":
        text = row["choices"][chosen(extraction, row["choices"])]
        return Hit(text == row["answer"], text)
    prediction = _normalised(row, extraction, strict_int=rules == "published_2023")
    return Hit(prediction == row["answer"], prediction)


def chosen(extraction: object, choices: Sequence[str]) -> int:
    """Return the position of the choice that an extraction means.

    If none matches, the one with the smallest edit distance.
    """
    text = extraction.strip() if isinstance(extraction, str) else str(extraction)
    in_brackets = _LETTER_IN_BRACKETS.search(text)
    if in_brackets:
        text = in_brackets[1].upper()
    if len(text) == 1 and 0 <= ord(text) - ord("A") < len(choices):
        return ord(text) - ord("A")
    distances = [edit_distance(text, choice) for choice in choices]
    return distances.index(min(distances))


def inferred(extraction: object, choices: Sequence[str]) -> int | None:
    """Return the position of the choice that VLMEvalKit reads out of an extraction, or None.

    The rules are those of vlmeval/utils/matching_util.py. The position is that of the one letter
    among the words, if it is one of the last four; else of a letter behind `answer is`, else of the
    choice whose text stands in the extraction. It never is the nearest one.
    """
    text = str(extraction)
    # The extracting model said that there is no answer.
    if any(phrase in text for phrase in _REFUSED):
        return None
    words = re.sub(r"[.()\[\],:;!*#{}]", " ", text).split()
    letters = [chr(ord("A") + index) for index in range(len(choices))]
    letters_in_text = [letter for letter in letters if letter in words]
    # A letter that stands further ahead may be a word, as `A` is.
    if len(letters_in_text) == 1 and words.index(letters_in_text[0]) > len(words) - 5:
        return letters.index(letters_in_text[0])
    if not letters_in_text and "Z" in words:  # its word for none of them
        return None
    stated = _STATED_LETTER.search(text)
    if stated and stated[1].upper() in letters:
        return letters.index(stated[1].upper())
    # In a long text the words of a choice may stand for any reason.
    if len(text) > 2 * sum(map(len, choices)):
        return None
    contained = [index for index, choice in enumerate(choices) if choice.lower() in text.lower()]
    return contained[0] if len(contained) == 1 else None


def edit_distance(first: str, second: str) -> int:
    """Return Levenshtein's distance.

    Insertions, deletions and substitutions of a character count 1 each.
    """
    previous = list(range(len(second) + 1))
    for i, first_char in enumerate(first, start=1):
        current = [i]
        for j, second_char in enumerate(second, start=1):
            substitution = previous[j - 1]
            if first_char != second_char:
                substitution += 1
            current.append(min(previous[j] + 1, current[-1] + 1, substitution))
        previous = current
    return previous[-1]


def _normalised(row: dict[str, Any], extraction: Any, *, strict_int: bool) -> str | None:
    """Return an extraction in the form of the reference answer, as text; None if it cannot be.

    `strict_int`: `5.0` is no integer. `extraction` may be any value of JSON.
    """
    try:
        if row["answer_type"] == "integer":
            return str(int(extraction) if strict_int else int(float(extraction)))
        if row["answer_type"] == "float":
            # `round` takes no float as its precision, and pandas makes one of it.
            return str(round(float(extraction), int(float(row["precision"]))))
    except _NOT_A_NUMBER:
        return None
    return None if extraction is None else str(extraction)


def _vlmevalkit(row: dict[str, Any], extraction: Any, *, lists: bool) -> Hit:
    """Compare an extraction with the reference answer by the rules of VLMEvalKit.

    `lists`: a list is right if it is the same text. Before pull request 1680 it never was, whatever
    the extraction.
    """
    # VLMEvalKit compares letters, so only the first of two equal choices is right.
    if row["question_type"] == "multi_choice":
        choices = row["choices"]
        index = inferred(extraction, choices)
        text = None if index is None else choices[index]
        return Hit(text == row["answer"] and choices.index(text) == index, text)
    convert = {"integer": int, "float": float}.get(row["answer_type"])
    if convert is None:
        text = None if extraction is None or not lists else str(extraction)
        return Hit(text == row["answer"], text)
    try:
        value = convert(extraction)
        return Hit(value == convert(row["answer"]), str(value))
    except _NOT_A_NUMBER:
        return Hit(False, None)


METADATA_GROUPS = ("language", "source", "category", "task", "context", "grade", "skills")
_GEOMETRY_TASK = "geometry problem solving"
_GEOMETRY_SKILL = "geometry reasoning"
ID_OOD = (
    "ID pools the items of task `geometry problem solving` and the items with skill `geometry "
    "reasoning`, an item in both counted twice; OOD is everything correct minus ID's, over all "
    "items minus ID's. The split of ADORA's table, inferred from its figures; because of the "
    "double count the intervals are a little too narrow."
)
COLUMNS = {
    "question": TEXT,
    "question_type": one_of("multi_choice", "free_form"),
    "answer_type": one_of("text", "integer", "float", "list"),
    "precision": ANY,
    "choices": ANY,
    "answer": TEXT,
    "metadata": ANY,
}
_MOST_PLACES = 15  # decimal places that a float holds


def check(row: Prediction) -> str | None:
    """Return what is wrong with the fields of a row; None where nothing is."""
    fault = wrong_fields(row, COLUMNS)
    if fault:
        return fault
    if row["question_type"] == "multi_choice" and not 1 <= len(row["choices"] or []) <= 26:
        return f"is multiple choice with choices = {row['choices']!r}, expected 1 to 26 of them"
    precision = row["precision"]
    if row["answer_type"] == "float" and not (
        isinstance(precision, int | float) and 0 <= precision <= _MOST_PLACES
    ):
        return (
            f"has precision = {precision!r}, expected a number from 0 to {_MOST_PLACES} for a "
            "float answer"
        )
    return None


def question_of(row: Prediction) -> Question:
    """Return the question of a row for an extraction."""
    kind: Kind = "choice" if row["question_type"] == "multi_choice" else row["answer_type"]
    return Question(
        kind=kind, text=row["question"], choices=row["choices"] or (), response=row["response"]
    )


def grade(row: Prediction, options: MathVistaScoreOptions) -> RowGrade:
    """Return the verdict on a row by `options.rules`, and the groups that it counts in."""
    extraction: Extraction = row["parsed_answer"]
    hit = Hit(False, None)
    if str(extraction.text or "").strip() or not options.ignore_empty_extractions:
        hit = judge_extraction(row, extraction.text, options.rules)
    groups = {"question_type": [row["question_type"]], "answer_type": [row["answer_type"]]}
    groups |= metadata_groups(row, METADATA_GROUPS)
    return RowGrade(
        verdict=verdict_of(hit.correct),
        extracted=hit.prediction,
        reason=extraction.method,
        groups=groups,
        extraction=extraction,
    )


def _item(row: Prediction, graded: Graded) -> dict[str, Any]:
    """Return the entry of an answer in the score file."""
    grade = graded.grade
    fields = {"correct": graded.correct, "answer": row["answer"]}
    read = {"extraction": row["parsed_answer"].text, "prediction": grade.extracted}
    return {"verdict": grade.verdict, **fields, **read, "how": grade.reason}


def _summary(
    rows: Sequence[Prediction], graded: Sequence[Graded], options: MathVistaScoreOptions
) -> OwnFigures:
    """Return ID and OOD as ADORA's table has them (docs/evaluation.md)."""
    id_total = 0
    id_correct = 0
    for item in graded:
        groups = item.grade.groups
        # An item counts in ID not at all, once or twice: by its task and by its skills.
        count = groups.get("task", []).count(_GEOMETRY_TASK)
        count += groups.get("skills", []).count(_GEOMETRY_SKILL)
        id_total += count
        if item.correct:
            id_correct += count
    answers_each = max(map(len, correct_by_problem(graded).values()))
    id_cell = cell_from_counts(id_correct, id_total, answers_each)
    # By the double count, ID of a small set can have more answers than there are; then OOD has no
    # figure.
    all_correct = sum(item.correct for item in graded)
    ood_cell = cell_from_counts(all_correct - id_correct, len(graded) - id_total, answers_each)
    return OwnFigures(figures={"id_ood": {"definition": ID_OOD, "ID": id_cell, "OOD": ood_cell}})


def _rules(options: MathVistaScoreOptions) -> dict[str, Any]:
    """Return the rules of a score, and how answers were extracted."""
    empty = options.ignore_empty_extractions
    return {"rules": options.rules, "ignore_empty_extractions": empty, **extraction_rules(options)}


# The column `query` is the official prompt where the data has it.
load = partial(
    load_problems,
    needed=("pid", *COLUMNS),
    image_columns=("decoded_image", "image"),
    prompt=lambda row: row.get("query") or build_query(row),
    check=check,
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


_BY_OTHER_RULES = (
    "the quoted rows are by the rules `vlmevalkit`; score with --rules vlmevalkit to compare"
)


def _caution(score: Mapping[str, Any]) -> str | None:
    """Return why a score is not comparable with the published rows; None where it is."""
    if score["rules"].get("rules") == "vlmevalkit":
        return None
    return _BY_OTHER_RULES


_PUBLISHED = Published(
    source="ADORA, arXiv 2602.10019, pass@1; MathVista by VLMEvalKit's rules",
    rows={
        "Qwen2.5-VL-7B-Instruct": {"all": 67.3, "ID": 69.6, "OOD": 65.5},
        "MM-EUREKA-8B": {"all": 68.1, "ID": 73.4, "OOD": 63.8},
        "MMR1-math-v0": {"all": 70.2, "ID": 72.3, "OOD": 68.5},
        "Vision-R1-7B (its report)": {"all": 73.5, "ID": 81.9, "OOD": 66.8},
        "GRPO": {"all": 70.2, "ID": 71.6, "OOD": 69.1},
        "ADORA": {"all": 73.5, "ID": 76.1, "OOD": 71.4},
    },
    caution=_caution,
)
BENCHMARK = Benchmark(
    name="mathvista",
    split="testmini",
    load=load,
    grade=grade,
    rules=_rules,
    score_options=MathVistaScoreOptions,
    data_options=HubDataOptions,
    check=check,
    fingerprint=("data_revision",),
    prepare=partial(with_extractions, question_of=question_of),
    summary=_summary,
    item=_item,
    published=_PUBLISHED,
)
if __name__ == "__main__":
    with imports():
        from eval.command import main
    raise SystemExit(main(BENCHMARK))
