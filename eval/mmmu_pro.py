"""`python -m eval.mmmu_pro`: MMMU-Pro (vision), whose questions stand in their pictures, with its
official score.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Literal

from adora_vl.utils.cli import imports

with imports():
    from adora_vl.evals.inference.dataset import load_problems
    from adora_vl.evals.inference.predictions import ANY, TEXT, wrong_fields
    from adora_vl.evals.options import HubDataOptions, ScoreOptions, option
    from adora_vl.evals.records import (
        Benchmark,
        Graded,
        LoadedProblems,
        OwnFigures,
        Prediction,
        RowGrade,
    )
    from adora_vl.evals.scoring.choice import extract_choice
    from adora_vl.evals.scoring.score import extraction_item, rule_set, verdict_of
    from adora_vl.utils.cli import amount

RULE_SETS = ("official", "letter")
COLUMNS = {"options": ANY, "answer": TEXT, "subject": TEXT}
_LAST_LINE = (
    "The last line of your response should be of the following format: 'Answer: $LETTER' (without "
    "quotes) where LETTER is one of options."
)
QUERIES = {
    "cot": f"Write out the multiple-choice question in the image and then solve it. {_LAST_LINE} "
    "Think step by step before answering.",
    "direct": f"Answer with the option letter from the given choices directly. {_LAST_LINE}",
}


@dataclass(frozen=True, kw_only=True)
class MMMUProDataOptions(HubDataOptions):
    """Which problems are asked, and in which words."""

    query: Literal["cot", "direct"] = option(
        "cot", help="for reasoning (cot), or the letter alone", choices=QUERIES
    )


@dataclass(frozen=True, kw_only=True)
class MMMUProScoreOptions(ScoreOptions):
    """Which letter counts."""

    rules: Literal["official", "letter"] = option(
        "official", help="letter: ours, for any form of answer", choices=RULE_SETS
    )


def options_of(row: Prediction) -> list[str]:
    """Return the options, which the hub has as the text of a Python list.

    Raises `ValueError` and `SyntaxError` for a text that is none, and `TypeError` for no list.
    """
    stored = row["options"]
    if isinstance(stored, str):
        stored = ast.literal_eval(stored)
    return [str(option) for option in stored]


def official_letter(response: str, options: Sequence[str]) -> str | None:
    """Return the letter by the official extraction (mmmu-pro/evaluate.py in MMMU-Benchmark/MMMU).

    It is the only letter behind the last `Answer:`, else the last of the letters in brackets, before
    a space or before a full stop, else that of the option whose text comes last. None where the
    official code would draw a letter at random.
    """
    letters = ascii_uppercase[: len(options)]
    # The prompt asks for the letter behind this mark.
    _, mark, tail = response.rpartition("Answer:")
    if mark:
        in_tail = [letter for letter in letters if letter in tail]
        if len(in_tail) == 1:
            return in_tail[0]
    for sign in ",.!?;:'":
        response = response.strip(sign)
    response = f" {response} "
    # The official code looks for one form, and takes the position of another.
    for form, position in (("({})", "({})"), ("{} ", " {} "), ("{}.", " {} ")):
        in_form = [letter for letter in letters if form.format(letter) in response]
        if in_form:
            return max(in_form, key=lambda letter: response.rfind(position.format(letter)))
    # The official code looks for the text of an option in longer answers only.
    if len(response.split()) <= 5:
        return None
    lowered = response.lower()
    texts = dict(zip(letters, map(str.lower, options), strict=True))
    by_text = [letter for letter in letters if texts[letter] in lowered]
    return max(by_text, key=lambda letter: lowered.rfind(texts[letter]), default=None)


def check(row: Prediction) -> str | None:
    """Return what is wrong with the fields of a row; None where nothing is."""
    fault = wrong_fields(row, COLUMNS)
    try:
        letters = ascii_uppercase[: 0 if fault else len(options_of(row))]
    except (ValueError, SyntaxError, TypeError):
        return f"has options = {row['options']!r:.60}, expected a list"
    expected = f"a letter from A to {letters[-1:]}"
    return fault or wrong_fields(
        row, {"answer": ((lambda answer: answer in (*letters,)), expected)}
    )


def grade(row: Prediction, options: MMMUProScoreOptions) -> RowGrade:
    """Return the verdict on a row by `options.rules`; an answer without a letter is wrong."""
    choices = options_of(row)
    if options.rules == "official":
        letter = official_letter(row["response"], choices)
        rule = "official"
    else:
        letter, rule = extract_choice(row["response"], choices)
    return RowGrade(
        verdict=verdict_of(letter == row["answer"]),
        extracted=letter,
        reason=rule if letter else "drawn",
        groups={"subject": [row["subject"]]},
    )


def _summary(
    rows: Sequence[Prediction], graded: Sequence[Graded], options: MMMUProScoreOptions
) -> OwnFigures:
    """Return how many answers name no letter, for which the official score draws one."""
    drawn = sum(item.grade.reason == "drawn" for item in graded)
    line = (
        f"note: {amount(drawn, 'answer')} without a letter, wrong here; the official score draws "
        "one at random"
    )
    return OwnFigures(
        notes={"drawn": drawn}, lines=[line] if drawn and options.rules == "official" else []
    )


def load(options: MMMUProDataOptions) -> LoadedProblems:
    """Return the problems of a split, the same question for each, and a hash of the data."""
    return load_problems(
        options,
        needed=("id", *COLUMNS),
        image_columns=("image",),
        prompt=lambda row: QUERIES[options.query],
        check=check,
        id_column="id",
        config="vision",
    )


BENCHMARK = Benchmark(
    name="mmmu_pro",
    split="test",
    load=load,
    grade=grade,
    rules=rule_set,
    score_options=MMMUProScoreOptions,
    data_options=MMMUProDataOptions,
    check=check,
    fingerprint=("data_revision", "query"),
    id_column="id",
    summary=_summary,
    item=extraction_item,
)
if __name__ == "__main__":
    with imports():
        from eval.command import main
    raise SystemExit(main(BENCHMARK))
