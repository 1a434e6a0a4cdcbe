"""`python -m eval.mathvision`: MathVision (MATH-V), with its official prompt and its official
score, and with ours.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from string import ascii_uppercase
from typing import Any, Literal

from adora_vl.utils.cli import imports

with imports():
    from adora_vl.data.prompts import PLACEHOLDER, lettered
    from adora_vl.evals.inference.dataset import load_problems
    from adora_vl.evals.inference.predictions import ANY, TEXT, TEXTS, one_of, wrong_fields
    from adora_vl.evals.options import HubDataOptions, option
    from adora_vl.evals.records import (
        CORRECT,
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
        Question,
        by_rules,
        extraction_rules,
        with_extractions,
    )
    from adora_vl.evals.scoring.number import extract_number
    from adora_vl.evals.scoring.score import extraction_item, verdict_of
    from adora_vl.rewards import grade as graded_as_in_training
    from adora_vl.rewards.completion import last_boxed
    from adora_vl.utils.cli import amount
    from adora_vl.utils.errors import UserError

    from .mathvision_value import latex_value

_INSTRUCTION = (
    'Please solve the problem step by step and put your answer in one "\\boxed{}". If it is a '
    'multiple choice question, only one letter is allowed in the "\\boxed{}".'
)
_LETTERS = "ABCDE"  # options that are only these are drawn in the picture
_PLACE = re.compile(r"<image(\d*)>")


def build_query(row: dict[str, Any]) -> str:
    """Return the instruction, question and options of one item.

    `<image>` is where its picture stands. Every row has one picture, whose parts the question
    numbers. It stands at the place of the first number, and the others become the words `image 2`.
    """
    is_first = True

    def place_image(match: re.Match[str]) -> str:
        """Return the marker of the image at its first place, and its name at all later ones."""
        nonlocal is_first
        if is_first:
            is_first = False
            return PLACEHOLDER
        return f"image {match[1]}".strip()

    question = _PLACE.sub(place_image, row["question"])
    options = [] if "".join(row["options"]) == _LETTERS else lettered(row["options"])
    return "\n".join([_INSTRUCTION, question, *options]) + "\n"


RULE_SETS = ("official", "strict")
_STATED = ("the final answer is", "the answer is", "the correct answer is", "the answer should be")
# The parts that the official score removes from an answer, in this order.
_REMOVED = (
    *("\\text", "\\mbox"),
    *(
        "\\left",
        "\\right",
        "^{\\circ}",
        "^\\circ",
        "{m}^3",
        "m^3",
        "{units}",
        "units",
        "{km}",
        "km",
    ),
    "\\!",
)


def official_answer(response: str) -> str:
    """Return the answer that the official score reads out of a response.

    The faults of its code (evaluation/evaluate.py in mathllm/MATH-V) are kept. `is` anywhere before
    a number counts as a statement; a choice is known as such only where the response ends with
    ` (B).` or begins with a line `(B)`; of a long answer without a box all of it is the answer.
    """
    answer = response.strip()
    for letter in _LETTERS:
        if answer.endswith((f" {letter}.", f" ({letter}).")) or answer.startswith(
            (f"{letter}\n", f"({letter})\n", f"({letter}) {letter}\n")
        ):
            answer = letter
    tail = answer.split("is ")[-1].rstrip(".")
    with suppress(ValueError):
        float(tail)
        answer = tail
    if "oxed{" not in answer:
        statements = [form for stated in _STATED for form in (stated, stated.replace("the", "The"))]
        for statement in statements:
            if statement in answer:
                answer = answer.split(statement)[-1].strip().split("\n")[0].split(". ")[0]
            else:
                answer = answer.strip()
    elif answer.count("oxed{") > 1:
        answer = "\\boxed{" + answer.split("oxed{")[-1]
    answer = _without_latex(answer)
    for opening, closing in ("()", "{}"):
        for letter in _LETTERS.lower():
            answer = answer.replace(opening + letter + closing, letter)
    return answer.rstrip(".").lstrip(":").strip()


def _without_latex(answer: str) -> str:
    """Return an answer in lower case, without spaces, units and dollars.

    Of a box the content counts, and of an equation what stands behind the last `=` or `\\approx`.
    """
    answer = answer.lower().replace("{}", "")
    boxed = re.findall(r"oxed{(.*)}", answer, flags=re.DOTALL)
    answer = boxed[-1] if boxed else answer
    closed = answer.find("}")
    opened = answer.find("{")
    if closed != -1 and (opened == -1 or closed < opened):
        answer = answer[:closed]
    answer = answer.split("=")[-1].split("\\approx")[-1]
    answer = (
        answer.replace(" ", "")
        .replace("\\,", "")
        .replace("∞", "\\infty")
        .replace("+\\infty", "\\infty")
    )
    answer = answer.replace("\\\\", "\\").replace("\n", "")
    for part in _REMOVED:
        answer = answer.replace(part, "")
    answer = answer.replace("\\\\", "\\").replace("tfrac", "frac").replace("dfrac", "frac")
    for part in ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$", "$", "\\%"):
        answer = answer.replace(part, "")
    answer = answer.replace("{.", "{0.")
    return _respelt("0" + answer if answer.startswith(".") else answer)


def _respelt(answer: str) -> str:
    """Return an answer with braces at roots and fractions, and fractions for `3/4` and `0.5`."""
    if "sqrt" in answer:
        head, *roots = answer.split("\\sqrt")
        answer = head + "".join("\\sqrt" + _braced(root, 1) for root in roots)
        head, *fractions = answer.split("\\frac")
        if all(fraction.startswith("{") or len(fraction) > 1 for fraction in fractions):
            answer = head + "".join("\\frac" + _braced(fraction, 2) for fraction in fractions)
    # The official code knows this decimal alone.
    if answer == "0.5":
        return "\\frac{1}{2}"
    numerator, slash, denominator = answer.partition("/")
    are_numbers = (
        numerator.removeprefix("-").isdecimal() and denominator.removeprefix("-").isdecimal()
    )
    if slash and are_numbers and answer == f"{int(numerator)}/{int(denominator)}":
        return f"\\frac{{{int(numerator)}}}{{{int(denominator)}}}"
    return answer


def _braced(part: str, arguments: int) -> str:
    """Return a part whose first characters, the arguments of its command, are put in braces.

    It is as before where it begins with a brace.
    """
    if not part or part.startswith("{"):
        return part
    braced = ""
    for _ in range(arguments):
        if part.startswith("{"):
            break
        braced = braced + f"{{{part[0]}}}"
        part = part[1:]
    return braced + part


def officially_equal(first: str, second: str) -> bool:
    """Return whether two answers are equal as text without capitals, as tuples, or as numbers.

    Numbers are rounded to two places.
    """
    first = first.lower()
    second = second.lower()
    if not first.replace(" ", "") or not second.replace(" ", ""):
        return False
    if first.strip() == second.strip():
        return True
    first = _tuple_of_numbers(first)
    second = _tuple_of_numbers(second)
    if first == second:
        return True
    first_value = latex_value(first)
    second_value = latex_value(second)
    if first_value is None or second_value is None:
        return False
    return round(first_value, 2) == round(second_value, 2)


def _tuple_of_numbers(answer: str) -> str:
    """Return a tuple with the values of its parts, `(0.5,3)` for `(2/4,3)`.

    The text is as before where a part has no value, is not infinite, and is not `a`.
    """
    parts = answer[1:-1].split(",")
    if len(parts) < 2 or answer[0] + answer[-1] not in ("()", "[]"):
        return answer
    texts = []
    for part in parts:
        if "infty" in part or part in ("a", "-a"):
            texts.append(part)
            continue
        value = latex_value(part)
        if value is None:
            return answer
        texts.append(str(round(value or 0, 2)))
    return answer[0] + ",".join(texts) + answer[-1]


def is_officially_right(answer: str, reference: str, options: Sequence[str]) -> bool:
    """Return whether an answer is the reference answer, or the option whose letter that is."""
    value = options[ord(reference) - ord("A")] if options else ""
    return officially_equal(reference, answer) or officially_equal(value, answer)


COLUMNS = {"question": TEXT, "options": TEXTS, "answer": TEXT, "level": ANY, "subject": TEXT}


def check(row: Prediction) -> str | None:
    """Return what is wrong with the fields of a row; None where nothing is."""
    fault = wrong_fields(row, COLUMNS)
    if fault or not row["options"]:
        return fault
    return wrong_fields(row, {"answer": one_of(*ascii_uppercase[: len(row["options"])])})


@dataclass(frozen=True, kw_only=True)
class MathVisionScoreOptions(ExtractionOptions):
    """How the answer is compared with the reference answer."""

    rules: Literal["official", "strict"] = option(
        "official", help="strict: as in training", choices=RULE_SETS
    )


def _prepare(rows: Sequence[Prediction], options: MathVisionScoreOptions) -> list[Prediction]:
    """Return the rows, each with its `Extraction` under the key `read`. Raises `UserError`."""
    official = options.rules == "official"
    if official and options.extraction != "rules":
        raise UserError(
            f"extraction: {options.extraction} needs --rules strict; official has its own "
            "extraction"
        )
    extract = _by_official_rules if official else _by_our_rules
    return with_extractions(rows, options=options, question_of=question_of, rules=extract)


def question_of(row: Prediction) -> Question:
    """Return the question of a row for an extraction."""
    return Question(
        kind="choice" if row["options"] else "text",
        text=row["question"],
        choices=row["options"],
        response=row["response"],
    )


def _by_official_rules(row: Prediction) -> Extraction:
    """Return the answer that the official score reads."""
    return Extraction(official_answer(row["response"]), "official")


def _by_our_rules(row: Prediction) -> Extraction:
    """Return the answer by our rules.

    A free-form response without a box gives the number that it states, and not all of its text.
    """
    if row["options"] or last_boxed(row["response"]) is not None:
        return by_rules(question_of(row))
    return extract_number(row["response"], row["question"])


def grade(row: Prediction, options: MathVisionScoreOptions) -> RowGrade:
    """Return the verdict on a row by `options.rules`, and the groups that it counts in."""
    form = "multiple choice" if row["options"] else "free form"
    groups = {"level": [str(row["level"])], "subject": [row["subject"]], "form": [form]}
    read = row["read"]
    answer = str(read.text or "")
    if options.rules == "official":
        hit = is_officially_right(answer, row["answer"], row["options"])
    else:
        boxed = rf"\boxed{{{answer}}}"
        result = graded_as_in_training(boxed, row["answer"], choices=row["options"] or None)
        hit = result.verdict == CORRECT
    return RowGrade(
        verdict=verdict_of(hit),
        extracted=answer,
        reason=read.method,
        groups=groups,
        extraction=read,
    )


def _summary(
    rows: Sequence[Prediction], graded: Sequence[Graded], options: MathVisionScoreOptions
) -> OwnFigures:
    """Return the number of questions that number parts of a picture which they have as a whole."""
    parts = len({row["pid"] for row in rows if len(_PLACE.findall(row["question"])) > 1})
    line = (
        f"{amount(parts, 'question')} with several numbered images, which are the parts of one "
        "picture"
    )
    return OwnFigures(notes={"several_parts": parts}, lines=[line] if parts else [])


def _rules(options: MathVisionScoreOptions) -> dict[str, Any]:
    """Return the rules of a score; the official ones extract no answer."""
    if options.rules == "official":
        return {"rules": options.rules}
    return {"rules": options.rules, **extraction_rules(options)}


load = partial(
    load_problems,
    needed=("id", *COLUMNS),
    image_columns=("decoded_image", "image"),
    prompt=build_query,
    check=check,
    id_column="id",
)


def _caution(score: Mapping[str, Any]) -> str | None:
    """Return why a score is not comparable with the published rows; None where it is."""
    if score["rules"].get("rules") == "official":
        return None
    return "the quoted rows are by the rules `official`"


_PUBLISHED = Published(
    source="MATH-Vision's repository (mathllm/MATH-V), its outputs by its own score",
    rows={
        "Gemini-Pro": {"all": 17.66},
        "InternLM-XComposer2-VL": {"all": 14.54},
        "Qwen-VL-Max with CoT": {"all": 12.63},
        "ShareGPT4V-7B": {"all": 10.53},
        "SPHINX-v2": {"all": 9.70},
        "LLaVA-v1.5-7B": {"all": 8.52},
    },
    caution=_caution,
)
BENCHMARK = Benchmark(
    name="mathvision",
    split="test",
    load=load,
    grade=grade,
    rules=_rules,
    score_options=MathVisionScoreOptions,
    data_options=HubDataOptions,
    check=check,
    fingerprint=("data_revision",),
    id_column="id",
    prepare=_prepare,
    summary=_summary,
    item=extraction_item,
    published=_PUBLISHED,
)
if __name__ == "__main__":
    with imports():
        from eval.command import main
    raise SystemExit(main(BENCHMARK))
