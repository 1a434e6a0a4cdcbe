"""`python -m eval.mathvision`: MathVision (MATH-V), with its official prompt and its official
score, and with ours.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from string import ascii_uppercase
from typing import Any, Literal

from adora_vl.data.prompts import IMAGE_PLACEHOLDER, with_letters
from adora_vl.evals.inference.dataset import load_problems
from adora_vl.evals.inference.predictions import (
    ANY_VALUE,
    LIST_OF_TEXTS,
    TEXT_VALUE,
    describe_field_fault,
    one_of,
)
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
    ExtractionOptions,
    Question,
    describe_extraction,
    extract_answers,
    extract_by_rules,
)
from adora_vl.evals.scoring.number import extract_number
from adora_vl.evals.scoring.score import build_extraction_item
from adora_vl.rewards import grade as grade_as_in_training
from adora_vl.rewards.completion import last_boxed
from adora_vl.utils.cli import pluralize
from adora_vl.utils.errors import UserError

from .mathvision_value import evaluate_latex

_PROMPT_INSTRUCTION = (
    'Please solve the problem step by step and put your answer in one "\\boxed{}". If it is a '
    'multiple choice question, only one letter is allowed in the "\\boxed{}".'
)
_OPTION_LETTERS = "ABCDE"  # options that are only these are drawn in the picture
_IMAGE_TAG_PATTERN = re.compile(r"<image(\d*)>")


def build_query(row: dict[str, Any]) -> str:
    """Build the official prompt of a row: the instruction, the question and its options.

    Every row has one picture, whose parts the question may number as `<image1>`, `<image2>` and so
    on. The first of these tags becomes the placeholder of the picture, and later ones become words
    such as `image 2`.
    """
    is_first = True

    def replace_tag(match: re.Match[str]) -> str:
        """Return the placeholder for the first tag, and words for all others."""
        nonlocal is_first
        if is_first:
            is_first = False
            return IMAGE_PLACEHOLDER
        return f"image {match[1]}".strip()

    question = _IMAGE_TAG_PATTERN.sub(replace_tag, row["question"])
    # Options that are drawn in the picture have no text but their letters in the data.
    options_are_drawn = "".join(row["options"]) == _OPTION_LETTERS
    options = [] if options_are_drawn else with_letters(row["options"])
    return "\n".join([_PROMPT_INSTRUCTION, question, *options]) + "\n"


# The words by which the official score finds a stated answer.
_ANSWER_PHRASES = (
    "the final answer is",
    "the answer is",
    "the correct answer is",
    "the answer should be",
)
# The parts of an answer that the official score removes or replaces, in this order.
_REPLACEMENT_BY_PART = {
    "\\text": "",
    "\\mbox": "",
    "bmatrix": "pmatrix",
    "\\left": "",
    "\\right": "",
    "^{\\circ}": "",
    "^\\circ": "",
    "{m}^3": "",
    "m^3": "",
    "{units}": "",
    "units": "",
    "{km}": "",
    "km": "",
    "\\!": "",
}
# The parts that it removes last, after the renaming of fractions.
_LAST_REMOVED_PARTS = ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$", "$", "\\%")


def official_answer(response: str) -> str:
    """Extract the answer of a response as the official score does, with the faults of its code.

    Source: evaluation/evaluate.py in mathllm/MATH-V. Its faults are:

    - The word `is` anywhere before a number counts as a statement of the answer.
    - The letter of an option is found only if the response ends with ` (B).` or begins with a line
      `(B)`.
    - If a response has neither a box nor words such as `the answer is`, all of it is the answer,
      however long it is.
    """
    answer = response.strip()
    # The letter of an option at the end or at the beginning.
    for letter in _OPTION_LETTERS:
        endings = (f" {letter}.", f" ({letter}).")
        beginnings = (f"{letter}\n", f"({letter})\n", f"({letter}) {letter}\n")
        if answer.endswith(endings) or answer.startswith(beginnings):
            answer = letter
    # A number after the last `is`.
    text_after_is = answer.split("is ")[-1].rstrip(".")
    with suppress(ValueError):
        float(text_after_is)
        answer = text_after_is
    # The last box, or else a statement. The official code looks for the part `oxed{` of `\boxed{`.
    if "oxed{" not in answer:
        for phrase in _ANSWER_PHRASES:
            answer = _text_after_phrase(answer, phrase)
            answer = _text_after_phrase(answer, phrase.replace("the", "The"))
    elif answer.count("oxed{") > 1:
        answer = "\\boxed{" + answer.split("oxed{")[-1]
    answer = _without_latex(answer)
    # Letters in brackets, now in lower case, lose their brackets.
    for letter in _OPTION_LETTERS.lower():
        answer = answer.replace(f"({letter})", letter)
    for letter in _OPTION_LETTERS.lower():
        answer = answer.replace(f"{{{letter}}}", letter)
    return answer.rstrip(".").lstrip(":").strip()


def _text_after_phrase(answer: str, phrase: str) -> str:
    """Return the rest of the sentence after the last occurrence of a phrase in an answer.

    An answer without the phrase only loses its outer spaces.
    """
    if phrase not in answer:
        return answer.strip()
    text_after_phrase = answer.split(phrase)[-1].strip()
    first_line = text_after_phrase.split("\n")[0]
    return first_line.split(". ")[0]


def _without_latex(answer: str) -> str:
    """Reduce an answer to the plain expression that the official score compares.

    Only the content of the last box is kept, and of an equation only the text after the last `=`
    or `\\approx`. Letters become lower case, and spaces, units and dollars are removed. The steps
    and their order are those of the official code.
    """
    answer = answer.lower().replace("{}", "")
    # The official code looks for the part `oxed{` of `\boxed{`.
    boxes = re.findall(r"oxed{(.*)}", answer, flags=re.DOTALL)
    answer = boxes[-1] if boxes else answer
    # The answer ends at a closing brace that has no opening one before it.
    first_closing = answer.find("}")
    first_opening = answer.find("{")
    has_opening = first_opening != -1
    if first_closing != -1 and (not has_opening or first_closing < first_opening):
        answer = answer[:first_closing]
    answer = answer.split("=")[-1].split("\\approx")[-1]
    answer = answer.replace(" ", "").replace("\\,", "")
    answer = answer.replace("∞", "\\infty").replace("+\\infty", "\\infty")
    answer = answer.replace("\\\\", "\\").replace("\n", "")
    for part, replacement in _REPLACEMENT_BY_PART.items():
        answer = answer.replace(part, replacement)
    answer = answer.replace("\\\\", "\\").replace("tfrac", "frac").replace("dfrac", "frac")
    for part in _LAST_REMOVED_PARTS:
        answer = answer.replace(part, "")
    # Decimals get their zero: `.5` becomes `0.5`.
    answer = answer.replace("{.", "{0.")
    if answer.startswith("."):
        answer = "0" + answer
    return _with_latex_fractions(answer)


def _with_latex_fractions(answer: str) -> str:
    r"""Spell the roots and fractions of an answer in the one way that the official score compares.

    `\sqrt2` becomes `\sqrt{2}`, `3/4` becomes `\frac{3}{4}`, and `0.5` becomes `\frac{1}{2}`. As in
    the official code, a `\frac12` gets its braces only in an answer that has a root too.
    """
    if "sqrt" in answer:
        before_first_root, *roots = answer.split("\\sqrt")
        spelled_roots = ["\\sqrt" + _with_braces(root, n_arguments=1) for root in roots]
        answer = before_first_root + "".join(spelled_roots)
        before_first_fraction, *fractions = answer.split("\\frac")
        # A lone character after `\frac` cannot be its two arguments.
        if all(fraction.startswith("{") or len(fraction) > 1 for fraction in fractions):
            spelled_fractions = [
                "\\frac" + _with_braces(fraction, n_arguments=2) for fraction in fractions
            ]
            answer = before_first_fraction + "".join(spelled_fractions)
    # The official code knows no other decimal.
    if answer == "0.5":
        return "\\frac{1}{2}"
    numerator, slash, denominator = answer.partition("/")
    are_integers = (
        numerator.removeprefix("-").isdecimal() and denominator.removeprefix("-").isdecimal()
    )
    # A number with leading zeros, such as `03/4`, stays as it is.
    if slash and are_integers and answer == f"{int(numerator)}/{int(denominator)}":
        return f"\\frac{{{int(numerator)}}}{{{int(denominator)}}}"
    return answer


def _with_braces(text: str, n_arguments: int) -> str:
    """Put the arguments of a LaTeX command into braces; each argument is a single character.

    `text` is the text after the command. With one argument `2+x` becomes `{2}+x`, and with two
    arguments `12` becomes `{1}{2}`. A text that begins with a brace is returned as it is.
    """
    if not text or text.startswith("{"):
        return text
    arguments = ""
    remaining_text = text
    for _ in range(n_arguments):
        if remaining_text.startswith("{"):
            break
        arguments += f"{{{remaining_text[0]}}}"
        remaining_text = remaining_text[1:]
    return arguments + remaining_text


def are_officially_equal(first: str, second: str) -> bool:
    """Compare two answers as the official score does.

    They are equal if they are the same text in lower case, the same tuple of numbers, or the same
    number. Numbers are rounded to two places: `1/3` equals `0.33`. An empty answer equals nothing.
    """
    first = first.lower()
    second = second.lower()
    if not first.replace(" ", "") or not second.replace(" ", ""):
        return False
    if first.strip() == second.strip():
        return True
    first = _evaluate_parts(first)
    second = _evaluate_parts(second)
    if first == second:
        return True
    first_value = evaluate_latex(first)
    second_value = evaluate_latex(second)
    if first_value is None or second_value is None:
        return False
    return round(first_value, 2) == round(second_value, 2)


def _evaluate_parts(answer: str) -> str:
    """Replace the parts of a tuple or an interval by their values: `(2/4,3)` becomes `(0.5,3)`.

    Infinity and the letter `a` stay as they are. An answer that is no tuple is returned unchanged,
    and so is one with a part that has no value.
    """
    parts = answer[1:-1].split(",")
    if len(parts) < 2 or answer[0] + answer[-1] not in ("()", "[]"):
        return answer
    evaluated_parts: list[str] = []
    for part in parts:
        # These have no value to compute.
        if "infty" in part or part in ("a", "-a"):
            evaluated_parts.append(part)
            continue
        value = evaluate_latex(part)
        if value is None:
            return answer
        plain_value = value if value else 0  # `-0.0` becomes `0`
        evaluated_parts.append(str(round(plain_value, 2)))
    return answer[0] + ",".join(evaluated_parts) + answer[-1]


def is_officially_right(answer: str, reference: str, choices: Sequence[str]) -> bool:
    """Return whether an extracted answer is right by the official score.

    Args:
        answer: The extracted answer.
        reference: The reference answer. For a multiple-choice question it is the letter of the
            right option, and the text of that option is right too.
        choices: The texts of the options; empty for a free-form question.
    """
    text_of_right_choice = choices[ord(reference) - ord("A")] if choices else ""
    return are_officially_equal(reference, answer) or are_officially_equal(
        text_of_right_choice, answer
    )


# The columns that each row has, and what their values have to be.
REQUIRED_COLUMNS = {
    "question": TEXT_VALUE,
    "options": LIST_OF_TEXTS,
    "answer": TEXT_VALUE,
    "level": ANY_VALUE,
    "subject": TEXT_VALUE,
}


def check_row(row: Prediction) -> str | None:
    """Return what is wrong with the fields of a row, None if nothing is wrong.

    The reference answer of a multiple-choice question has to be the letter of one of its options. A
    free-form question has no options, and its reference answer may be any text.
    """
    fault = describe_field_fault(row, REQUIRED_COLUMNS)
    if fault or not row["options"]:
        return fault
    letters = ascii_uppercase[: len(row["options"])]
    return describe_field_fault(row, {"answer": one_of(*letters)})


@dataclass(frozen=True, kw_only=True)
class MathVisionScoreOptions(ExtractionOptions):
    """How the answer is compared with the reference answer."""

    rules: Literal["official", "strict"] = option("official", help="strict: as in training")


def _prepare(rows: Sequence[Prediction], options: MathVisionScoreOptions) -> list[Prediction]:
    """Extract the answers of all rows, before `grade` gets them one by one.

    Each row gets its `Extraction` under the key `parsed_answer`. Raises `UserError` for the
    official rules with another extraction than their own.
    """
    is_official = options.rules == "official"
    if is_official and options.extraction != "rules":
        raise UserError(
            f"extraction: {options.extraction} needs --rules strict; official has its own "
            "extraction"
        )
    extract = _extract_by_official_rules if is_official else _extract_by_our_rules
    return extract_answers(rows, options=options, question_of=build_question, extract=extract)


def build_question(row: Prediction) -> Question:
    """Build the question from which an answer is extracted, with the response of the model."""
    return Question(
        kind="choice" if row["options"] else "text",
        text=row["question"],
        choices=row["options"],
        response=row["response"],
    )


def _extract_by_official_rules(row: Prediction) -> Extraction:
    """Return the answer that the official score reads."""
    return Extraction(official_answer(row["response"]), "official")


def _extract_by_our_rules(row: Prediction) -> Extraction:
    """Extract the answer of a response by our own rules.

    A response with a box, or to a question with options, is read by the general rules. From any
    other response the number that it states is taken: the general rules would take all of it, since
    a question may ask for a text.
    """
    has_box = last_boxed(row["response"]) is not None
    if row["options"] or has_box:
        return extract_by_rules(build_question(row))
    return extract_number(row["response"], row["question"])


def grade(row: Prediction, options: MathVisionScoreOptions) -> RowGrade:
    """Grade the answer that `_prepare` has extracted from a response, by `options.rules`."""
    reference = row["answer"]
    choices = row["options"]  # empty for a free-form question
    extraction: Extraction = row["parsed_answer"]
    answer = str(extraction.text or "")
    if options.rules == "official":
        is_right = is_officially_right(answer, reference, choices)
    else:
        # The grader of a training reads the answer out of a box.
        boxed_answer = rf"\boxed{{{answer}}}"
        result = grade_as_in_training(boxed_answer, reference, choices=choices or None)
        is_right = result.verdict == CORRECT
    return RowGrade(
        verdict=CORRECT if is_right else WRONG,
        extracted=answer,
        reason=extraction.method,
        groups={
            "level": [str(row["level"])],
            "subject": [row["subject"]],
            "form": ["multiple choice" if choices else "free form"],
        },
        extraction=extraction,
    )


def _summary(
    rows: Sequence[Prediction],
    graded_answers: Sequence[GradedAnswer],
    options: MathVisionScoreOptions,
) -> BenchmarkSummary:
    """Count the questions that number several images, though each row has one picture.

    Their images are parts of that picture.
    """
    pids = {row["pid"] for row in rows if len(_IMAGE_TAG_PATTERN.findall(row["question"])) > 1}
    lines: list[str] = []
    if pids:
        lines.append(
            f"{pluralize(len(pids), 'question')} with several numbered images, which are the parts "
            "of one picture"
        )
    return BenchmarkSummary(extra_keys={"several_parts": len(pids)}, lines=lines)


def _describe_rules(options: MathVisionScoreOptions) -> dict[str, Any]:
    """Return the `rules` of a score file; the official ones have an extraction of their own."""
    if options.rules == "official":
        return {"rules": options.rules}
    return {"rules": options.rules, **describe_extraction(options)}


load = partial(
    load_problems,
    required_columns=("id", *REQUIRED_COLUMNS),
    image_columns=("decoded_image", "image"),
    prompt=build_query,
    check=check_row,
    id_column="id",
)


_PUBLISHED = PublishedResults(
    source="MATH-Vision's repository (mathllm/MATH-V), its outputs by its own score",
    rules="official",
    rows={
        "Gemini-Pro": {"all": 17.66},
        "InternLM-XComposer2-VL": {"all": 14.54},
        "Qwen-VL-Max with CoT": {"all": 12.63},
        "ShareGPT4V-7B": {"all": 10.53},
        "SPHINX-v2": {"all": 9.70},
        "LLaVA-v1.5-7B": {"all": 8.52},
    },
)
BENCHMARK = Benchmark(
    name="mathvision",
    split="test",
    load=load,
    grade=grade,
    rules=_describe_rules,
    score_options=MathVisionScoreOptions,
    data_options=HubDataOptions,
    check=check_row,
    fingerprint=("data_revision",),
    id_column="id",
    prepare=_prepare,
    summary=_summary,
    item=build_extraction_item,
    published=_PUBLISHED,
)
if __name__ == "__main__":
    from eval.command import main

    raise SystemExit(main(BENCHMARK))
