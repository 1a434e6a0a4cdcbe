"""`python -m eval.mmmu_pro`: MMMU-Pro (vision), whose questions stand in their pictures, with its
official score.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Literal

from adora_vl.evals.inference.dataset import DataLayout, load_problems
from adora_vl.evals.inference.predictions import (
    ANY_VALUE,
    TEXT_VALUE,
    FieldType,
    describe_field_fault,
)
from adora_vl.evals.options import HubDataOptions, ScoreOptions, option
from adora_vl.evals.records import (
    CORRECT,
    WRONG,
    Benchmark,
    BenchmarkSummary,
    GradedAnswer,
    LoadedProblems,
    Prediction,
    RowGrade,
)
from adora_vl.evals.scoring.choice import extract_choice
from adora_vl.evals.scoring.score import (
    build_extraction_item,
)
from adora_vl.utils.cli import pluralize

# The columns that each row has, and what their values have to be.
REQUIRED_COLUMNS = {"options": ANY_VALUE, "answer": TEXT_VALUE, "subject": TEXT_VALUE}
_LAST_LINE_REQUEST = (
    "The last line of your response should be of the following format: 'Answer: $LETTER' (without "
    "quotes) where LETTER is one of options."
)
PROMPT_BY_QUERY = {
    "cot": f"Write out the multiple-choice question in the image and then solve it. {_LAST_LINE_REQUEST} "
    "Think step by step before answering.",
    "direct": f"Answer with the option letter from the given choices directly. {_LAST_LINE_REQUEST}",
}


@dataclass(frozen=True, kw_only=True)
class MMMUProDataOptions(HubDataOptions):
    """Which problems are asked, and in which words."""

    query: Literal["cot", "direct"] = option("cot", help="for reasoning (cot), or the letter alone")


@dataclass(frozen=True, kw_only=True)
class MMMUProScoreOptions(ScoreOptions):
    """Which letter counts."""

    rules: Literal["official", "letter"] = option(
        "official", help="letter: ours, for any form of answer"
    )


def read_choices(row: Prediction) -> list[str]:
    """Return the texts of the options of a row.

    On the hub the column is a text in the form of a Python list. Raises `ValueError` or
    `SyntaxError` for a text of another form, and `TypeError` for a value that is no list.
    """
    choices = row["options"]
    if isinstance(choices, str):
        choices = ast.literal_eval(choices)
    return [str(choice) for choice in choices]


def official_letter(response: str, choices: Sequence[str]) -> str | None:
    """Extract the letter of a response as the official score does.

    Source: mmmu-pro/evaluate.py in MMMU-Benchmark/MMMU. The first of these rules that finds a
    letter decides:

    1. The only letter after the last `Answer:`, as in `So. Answer: B`.
    2. The last letter in a form such as `(B)` (see `_last_letter_in_form`).
    3. In a response of more than five words, the letter of the option whose text comes last: with
       `a dam` as option B, `It must be a dam, as the water is so high` is B.

    Returns None if no rule finds a letter. The official code then draws one at random.
    """
    letters = ascii_uppercase[: len(choices)]
    _, answer_prefix, text_after_answer = response.rpartition("Answer:")
    if answer_prefix:
        stated_letters = [letter for letter in letters if letter in text_after_answer]
        if len(stated_letters) == 1:
            return stated_letters[0]
    for sign in ",.!?;:'":
        response = response.strip(sign)
    response = f" {response} "
    letter = _last_letter_in_form(response, letters)
    if letter is not None or len(response.split()) <= 5:
        return letter
    # The last position of the text of each option that the response has.
    position_by_letter: dict[str, int] = {}
    for choice_letter, choice in zip(letters, choices, strict=True):
        position = response.lower().rfind(choice.lower())
        if position >= 0:
            position_by_letter[choice_letter] = position
    return max(position_by_letter, key=lambda letter: position_by_letter[letter], default=None)


def _last_letter_in_form(response: str, letters: str) -> str | None:
    """Return the last of the letters that a response has in a form such as `(B)`.

    The forms are `(B)`, `B ` and `B.`, and only the first of them that the response has counts:
    `I think (A), no (B)` gives B. Returns None if no letter has any of the forms.
    """
    # The official code finds a letter by the first template, and its last position by the second.
    # A letter that the second template does not find has the position -1, before all others.
    templates = (("({})", "({})"), ("{} ", " {} "), ("{}.", " {} "))
    for letter_template, position_template in templates:
        position_by_letter: dict[str, int] = {}
        for letter in letters:
            if letter_template.format(letter) in response:
                position_by_letter[letter] = response.rfind(position_template.format(letter))
        if position_by_letter:
            return max(position_by_letter, key=lambda letter: position_by_letter[letter])
    return None


def check_row(row: Prediction) -> str | None:
    """Return what is wrong with the fields of a row, None if nothing is wrong.

    The options have to be a list, and the answer the letter of one of them.
    """
    fault = describe_field_fault(row, REQUIRED_COLUMNS)
    if fault:
        return fault
    try:
        letters = list(ascii_uppercase[: len(read_choices(row))])
    except (ValueError, SyntaxError, TypeError):
        return f"has options = {row['options']!r:.60}, expected a list"
    last_letter = letters[-1] if letters else ""
    letter_of_option = FieldType(
        is_valid=lambda answer: answer in letters, expected=f"a letter from A to {last_letter}"
    )
    return describe_field_fault(row, {"answer": letter_of_option})


def grade(row: Prediction, options: MMMUProScoreOptions) -> RowGrade:
    """Grade the response of a row by the letter of the option that it picks.

    `options.rules` says how the letter is extracted. A response without a letter is wrong. Its
    reason is `drawn`, because the official score draws a letter at random for it.
    """
    choices = read_choices(row)
    if options.rules == "official":
        letter = official_letter(row["response"], choices)
        rule = "official"
    else:
        letter, rule = extract_choice(row["response"], choices)
    return RowGrade(
        verdict=CORRECT if letter == row["answer"] else WRONG,
        extracted=letter,
        reason=rule if letter else "drawn",
        groups={"subject": [row["subject"]]},
    )


def _summary(
    rows: Sequence[Prediction], graded_answers: Sequence[GradedAnswer], options: MMMUProScoreOptions
) -> BenchmarkSummary:
    """Count the answers without a letter, for which the official score draws one at random."""
    n_drawn = sum(graded.grade.reason == "drawn" for graded in graded_answers)
    lines: list[str] = []
    if n_drawn and options.rules == "official":
        lines.append(
            f"note: {pluralize(n_drawn, 'answer')} without a letter, wrong here; the official "
            "score draws one at random"
        )
    return BenchmarkSummary(extra_keys={"drawn": n_drawn}, lines=lines)


def load(options: MMMUProDataOptions) -> LoadedProblems:
    """Load the problems of a split.

    All problems have the same prompt, since the question and the options are written in the
    picture.
    """
    return load_problems(
        options,
        required_columns=("id", *REQUIRED_COLUMNS),
        image_columns=("image",),
        prompt=lambda row: PROMPT_BY_QUERY[options.query],
        check=check_row,
        id_column="id",
        layout=DataLayout(hub_config="vision"),
    )


BENCHMARK = Benchmark(
    name="mmmu_pro",
    split="test",
    load=load,
    grade=grade,
    rules=lambda options: {"rules": options.rules},
    score_options=MMMUProScoreOptions,
    data_options=MMMUProDataOptions,
    check=check_row,
    fingerprint=("data_revision", "query"),
    id_column="id",
    summary=_summary,
    item=build_extraction_item,
)
if __name__ == "__main__":
    from eval.command import main

    raise SystemExit(main(BENCHMARK))
