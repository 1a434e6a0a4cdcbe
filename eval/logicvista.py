"""`python -m eval.logicvista`: LogicVista; its official score asks a judge which letters an answer
names.
"""

import re
from functools import partial
from operator import itemgetter

from adora_vl.evals.inference.dataset import DataLayout, load_problems
from adora_vl.evals.inference.predictions import LIST_OF_TEXTS, TEXT_VALUE, describe_field_fault
from adora_vl.evals.options import HubDataOptions
from adora_vl.evals.records import CORRECT, WRONG, Benchmark, Extraction, Prediction, RowGrade
from adora_vl.evals.scoring.choice import extract_choice
from adora_vl.evals.scoring.judge import (
    ExtractionOptions,
    Question,
    describe_extraction,
    extract_answers,
)
from adora_vl.rewards.completion import answer_block, last_boxed

# The columns that each row has, and what their values have to be.
REQUIRED_COLUMNS = {"question": TEXT_VALUE, "answer": TEXT_VALUE, "skill": LIST_OF_TEXTS}
check_row = partial(describe_field_fault, types=REQUIRED_COLUMNS)
_OPTION_LETTERS = "ABCDEFGHI"  # letters that an option may have; the options stand in the picture
# One letter, or several with commas, `&` or `and` between them.
_LETTERS_REGEX = r"[A-I](?:(?:\s*(?:,|&|and)\s*)+[A-I])*"
# Such letters after words like `the answers are`, or on a line of their own.
_STATED_LETTERS_PATTERN = re.compile(
    r"(?:\b(?i:answers?|choices?|options?)\b[^.\n"
    rf"]{{0,40}}?(?i:\b(?:is|are)\b|[:：])\W*|^\W*)({_LETTERS_REGEX})\W*(?=$|\n"
    r"|\.)"
)


def parse_letters(value: object) -> list[str]:
    """Return the letters of the options that an answer names, in lower case and sorted.

    `value` is a text or a list of letters: `A, C`, `AC` and `['c', 'a']` all give `['a', 'c']`.
    """
    if isinstance(value, list):
        words = [str(word) for word in value]
    else:
        words = re.split(r"[\s,;&]+|\band\b", str(value or ""))
    words = [word.strip().strip("'\"[](). ").lower() for word in words]
    # Several letters may be written as one word.
    if len(words) == 1 and re.fullmatch("[a-i]{2,4}", words[0]):
        words = list(words[0])
    return sorted(word for word in words if word)


def extract_letters(response: str) -> Extraction:
    r"""Extract the letters that a response names as its answer, by rules of our own.

    A question may have several right options. The first of these rules that applies decides:

    1. The last box has letters alone: `\boxed{B, D}` gives `B, D`.
    2. The response states letters: `The answers are B and D.` gives `B and D`.
    3. The response names one letter (`extract_choice`): `I choose C because` gives `C`.
    """
    response = answer_block(response) or response
    statements = list(_STATED_LETTERS_PATTERN.finditer(response.strip()))
    last_statement = statements[-1][1] if statements else ""
    candidates = ((last_boxed(response) or "", "box"), (last_statement, "stated_letters"))
    for text, rule in candidates:
        # `\text{B}` becomes `B`. Brackets and spaces around the letters are removed: where they
        # match, the group is empty.
        letters = re.sub(r"\\text\{([^{}]*)\}|[()\s]+$|^[(\s]+", r"\1", text)
        if re.fullmatch(_LETTERS_REGEX, letters):
            return Extraction(letters, rule)
    return extract_choice(response, choices=[""] * len(_OPTION_LETTERS))


def grade(row: Prediction, options: ExtractionOptions) -> RowGrade:
    """Grade one answer, which is right if it names the letters of the reference and no others.

    `extract_answers` has put the extracted answer into the row under `parsed_answer`.
    """
    extraction: Extraction = row["parsed_answer"]
    letters = parse_letters(extraction.text)
    return RowGrade(
        verdict=CORRECT if letters == parse_letters(row["answer"]) else WRONG,
        extracted=", ".join(letters),
        reason=extraction.method,
        groups={"skill": row["skill"]},
        extraction=extraction,
    )


# The question is asked as it is, since its options are in the picture.
load = partial(
    load_problems,
    required_columns=("id", *REQUIRED_COLUMNS),
    image_columns=("image", "imagename"),
    prompt=itemgetter("question"),
    check=check_row,
    id_column="id",
    layout=DataLayout(image_folder="images"),
)
BENCHMARK = Benchmark(
    name="logicvista",
    split="test",
    load=load,
    grade=grade,
    rules=lambda options: {"rules": "official", **describe_extraction(options)},
    score_options=ExtractionOptions,
    data_options=HubDataOptions,
    check=check_row,
    fingerprint=("data_revision",),
    id_column="id",
    prepare=partial(
        extract_answers,
        question_of=lambda row: Question(
            kind="text", text=row["question"], choices=(), response=row["response"]
        ),
        extract=lambda row: extract_letters(row["response"]),
    ),
)
if __name__ == "__main__":
    from eval.command import main

    raise SystemExit(main(BENCHMARK))
