"""`python -m eval.mathverse`: MathVerse by rules of our own; its official score asks a judge what
is right.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Literal

from adora_vl.evals.inference.dataset import DataLayout, load_problems
from adora_vl.evals.inference.predictions import (
    ANY_VALUE,
    TEXT_VALUE,
    describe_field_fault,
    one_of,
    or_null,
)
from adora_vl.evals.inference.views import without_images
from adora_vl.evals.options import HubDataOptions, option
from adora_vl.evals.records import (
    CORRECT,
    JUDGE_FAILED,
    WRONG,
    Benchmark,
    BenchmarkSummary,
    Extraction,
    GradedAnswer,
    LoadedProblems,
    Prediction,
    Problem,
    RowGrade,
)
from adora_vl.evals.scoring.choice import extract_choice, lettered_options
from adora_vl.evals.scoring.judge import (
    ExtractionOptions,
    Question,
    ask_judge,
    create_judge_client,
    describe_extraction,
    extract_answers,
    read_answer_tags,
)
from adora_vl.evals.scoring.number import extract_number
from adora_vl.evals.scoring.response_text import without_markup
from adora_vl.evals.scoring.score import accuracy_metric, groups_from_metadata
from adora_vl.rewards.completion import last_boxed
from adora_vl.rewards.grade import grade as grade_as_in_training
from adora_vl.utils.cli import pluralize
from adora_vl.utils.openai_client import EndpointError

TEXT_ONLY = "Text Only"
PROBLEM_VERSIONS = (
    "Text Dominant",
    "Text Lite",
    "Vision Intensive",
    "Vision Dominant",
    "Vision Only",
    TEXT_ONLY,
)
_SPLIT_NAMES = (
    "testmini",
    "testmini_text_only",
)  # the five versions with images, and the one without
# Options that stand in the picture alone have no text, only letters; no question has more of them.
_UNKNOWN_CHOICES = [""] * 6
_OPTION_MARK_PATTERN = re.compile(r"(?:^|\s)([A-H])\s*[:.]")
# Words that announce the answer, such as `the answer is`.
_ANSWER_WORDS_PATTERN = re.compile(
    r"(?:\banswer\b[^.\n:=]{0,40}?(?:\bis\b|[:：=]))\s*:?\s*", re.IGNORECASE
)
# What an answer may have around its value: a name before it, as in `Area = 9` and `f(x) = 3x`, and
# a unit after it.
_ANSWER_NAME_PREFIX = re.compile(
    r"^\s*(?:[A-Za-z][A-Za-z. ]*|[A-Za-z](?:_\d)?\s*\([a-z]\)|\(x, ?y\))?\s*=(?!.*=)\s*"
)
# A point or an interval: its brackets and its two values.
_PAIR_PATTERN = re.compile(
    r"(?P<opening>[(\[])(?P<first>[^,]+),(?P<second>[^,]+)(?P<closing>[)\]])"
)
# A single line with no more words than this is an answer, and not a sentence.
_MAX_WORDS_OF_BARE_ANSWER = 4
_UNIT_WORD_REGEX = (
    r"(?:[cdkm]?m|[ck]?g|km/h|square|cubic|units?|met(?:er|re)s?|lit(?:er|re)s?|inch(?:es)?"
    r"|feet|degrees?|T)"
)
_VALUE_WITH_UNIT_PATTERN = re.compile(
    rf"(.*(?:[\d)}}]|\\pi))\s*{_UNIT_WORD_REGEX}(?:\s+{_UNIT_WORD_REGEX})*\s*(?:\^\s*\{{?[23]\}}?|[²³])?",
    re.IGNORECASE | re.DOTALL,
)


def read_choices(row: Prediction) -> list[str]:
    """Return the options of a multiple-choice question, in the order of their letters.

    The list is empty where the question does not list them, since they are drawn in its picture.
    """
    question = _question_text(row)
    if "Choice" not in question:
        return []
    text_of_options = re.split(r"Choices?:", question)[-1]
    return lettered_options(text_of_options, _OPTION_MARK_PATTERN)


def strip_to_value(answer: str) -> str:
    r"""Strip an answer to its value, without a name before it or a unit after it.

    `Area $=9 \mathrm{~cm}^{2}$` becomes `9`.
    """
    # Some reference answers have a degree sign that was decoded as a Chinese character. It is
    # removed like every degree sign, with dollars and fonts (`without_markup`).
    answer = answer.replace("掳", "°")
    # A unit such as `\mathrm{~cm}` becomes ` cm`, which the pattern of units knows.
    with_plain_units = re.sub(r"\\mathrm\s*\{~?\s*([A-Za-z]+)\s*\}", r" \1", answer)
    without_commands = without_markup(with_plain_units).replace("\\quad", " ")
    normalised = re.sub(r"\s+", " ", without_commands).strip().rstrip(".")
    value = _ANSWER_NAME_PREFIX.sub("", normalised).strip()
    value_with_unit = _VALUE_WITH_UNIT_PATTERN.fullmatch(value)
    if value_with_unit:
        value = value_with_unit[1]  # the part before the unit
    return value.strip()


def is_same_answer(answer: str, reference: str) -> tuple[bool, str]:
    r"""Tell whether a free-form answer is the same as its reference, by their values.

    Returns this, and the name of the rule that decided. The rules in their order:

    - `X = 5` is the same as `5`: without a name and a unit it is the same text
    - `(\frac{2}{2}, 2)` is the same as `(1, 2)`: points and intervals are compared value by value
    - `x^2 + y^2 = 4` is the same as `x^2 + y^2 - 4 = 0`: their sides differ by the same
    - `0.5` is the same as `\frac{1}{2}`: the grader of the training compares the values
    - `\sqrt{2}` is the same as `1.41`: the exact value meets a reference that is rounded
    """
    value = strip_to_value(answer)
    reference_value = strip_to_value(reference)
    if not value:
        return False, "no_answer"
    if value.replace(" ", "").lower() == reference_value.replace(" ", "").lower():
        return True, "same_text"
    pair = _PAIR_PATTERN.fullmatch(value)
    reference_pair = _PAIR_PATTERN.fullmatch(reference_value)
    if pair and reference_pair:
        return _is_same_pair(pair, reference_pair), "pair"
    # Two equations are compared by the left side minus the right side of each.
    if value.count("=") == 1 and reference_value.count("=") == 1:
        value = _subtract_sides(value)
        reference_value = _subtract_sides(reference_value)
    result = grade_as_in_training(rf"\boxed{{{value}}}", reference_value)
    if result.verdict == "correct":
        return True, result.reason
    # The grader accepts a rounded answer to an exact reference. Here the reference may be the
    # rounded one, so the two change places.
    swapped_result = grade_as_in_training(rf"\boxed{{{reference_value}}}", value, rounding=True)
    if swapped_result.reason == "rounded":
        return True, "rounded"
    return False, result.reason


def _is_same_pair(pair: re.Match[str], reference_pair: re.Match[str]) -> bool:
    """Return whether two points or intervals are the same, value by value.

    Their brackets count too, since `(1, 2)` and `[1, 2]` are different intervals. The arguments are
    matches of `_PAIR_PATTERN`, with the groups `opening`, `first`, `second` and `closing`.
    """
    for group_name in ("first", "second"):
        is_same_value, _ = is_same_answer(pair[group_name], reference_pair[group_name])
        if not is_same_value:
            return False
    brackets = (pair["opening"], pair["closing"])
    return brackets == (reference_pair["opening"], reference_pair["closing"])


def _subtract_sides(equation: str) -> str:
    """Turn an equation `a=b` into the expression `(a)-(b)`, so that the grader can compare it."""
    left_side, right_side = equation.split("=")
    return f"({left_side})-({right_side})"


def find_reference_letter(row: Prediction, choices: Sequence[str]) -> str | None:
    """Return the letter of the right option of a multiple-choice question.

    The reference answer of a row is a letter, such as `C` or `(C)`, or the value of an option:
    `5 cm` is `B` among the options 4, 5 and 6. Returns None where it is neither, as for a question
    with several right options.
    """
    reference = row["answer"]
    letter = re.fullmatch(r"\s*\(?([A-H])\)?\s*", reference)
    if letter:
        return letter[1]
    choice_values = [strip_to_value(choice).lower() for choice in choices]
    reference_value = strip_to_value(reference).lower()
    # No option is the reference answer, or several have the same value.
    if choice_values.count(reference_value) != 1:
        return None
    return chr(ord("A") + choice_values.index(reference_value))


# The columns that each row has, and what their values have to be.
REQUIRED_COLUMNS = {
    "problem_index": ANY_VALUE,
    "problem_version": one_of(*PROBLEM_VERSIONS),
    "question": or_null(TEXT_VALUE),
    "answer": TEXT_VALUE,
    "question_type": one_of("multi-choice", "free-form"),
    "metadata": ANY_VALUE,
}


def check_row(row: Prediction) -> str | None:
    """Return what is wrong with the fields of a row of the data; None where nothing is."""
    fault = describe_field_fault(row, REQUIRED_COLUMNS)
    if fault:
        return fault
    # A row without the optional column is checked as one in which it is null.
    return describe_field_fault({"question_for_eval": None, **row}, _TYPE_BY_OPTIONAL_COLUMN)


_TYPE_BY_OPTIONAL_COLUMN = {"question_for_eval": or_null(TEXT_VALUE)}


def build_question(row: Prediction) -> Question:
    """Build the `Question` from which the judge extracts an answer, with the response of the model.

    Without the texts of its options a multiple-choice question counts as one that asks for a text.
    """
    choices = read_choices(row) if row["question_type"] == "multi-choice" else []
    return Question(
        kind="choice" if choices else "text",
        text=_question_text(row),
        choices=choices,
        response=row["response"],
    )


def _question_text(row: Prediction) -> str:
    """Return the question of a row, in its fullest wording.

    The versions of a problem leave out in words what their picture shows. The optional column
    `question_for_eval` has the full question with its options.
    """
    return str(row.get("question_for_eval") or row["question"] or "")


def _prepare(rows: Sequence[Prediction], options: ExtractionOptions) -> list[Prediction]:
    """Extract the answers of all rows, before `grade` gets the rows one by one.

    Each row gets its `Extraction` under the key `parsed_answer`. With a judge, a language model on
    a server, it also gets the key `judge_reply`: an `Extraction` whose text is `1` if the judge
    says that the answer is right and `0` if not, or None where our rules decide without the judge.
    """
    judge = create_judge_client(options) if options.extraction == "judge" else None
    extracted_rows = extract_answers(
        rows, options=options, question_of=build_question, extract=extract_by_rules, judge=judge
    )
    if judge is None:
        return extracted_rows
    # None in the place of a row that needs no judge; its reply is None too.
    conversations = [_judge_messages(row) if _needs_judge(row) else None for row in extracted_rows]
    replies = ask_judge(conversations, judge, _read_one_or_zero)
    return [
        {**row, "judge_reply": reply} for row, reply in zip(extracted_rows, replies, strict=True)
    ]


def _needs_judge(row: Prediction) -> bool:
    """Return whether only the judge, a language model, can decide if an answer is right.

    Our rules cannot say that a free-form answer is wrong, since it may be written in another way
    than the reference. They cannot grade an answer to a multiple-choice question whose reference is
    no single letter. An empty answer is wrong in any case.
    """
    answer = row["parsed_answer"].text
    if not answer:
        return False
    if row["question_type"] == "free-form":
        is_same, _ = is_same_answer(str(answer), row["answer"])
        return not is_same
    return find_reference_letter(row, read_choices(row)) is None


_JUDGE_INSTRUCTION = (
    "You are given a question, its reference answer, and the answer of somebody else. Say whether "
    "the two answers mean the same: 1 if they do, though written otherwise or in another unit, as "
    "0.5 m and 50 cm; 0 if they differ or one has less in it. Put 1 or 0 between <answer> and "
    "</answer>, and nothing else."
)


def _judge_messages(row: Prediction) -> list[dict[str, str]]:
    """Build the conversation that asks the judge whether an answer means the same as its reference.

    The official score asks such a question too.
    """
    text_by_tag = {
        "question": _question_text(row),
        "reference": row["answer"],
        "other": row["parsed_answer"].text,
    }
    lines = [f"<{tag}>\n{text}\n</{tag}>" for tag, text in text_by_tag.items()]
    return [
        {"role": "system", "content": _JUDGE_INSTRUCTION},
        {"role": "user", "content": "\n".join(lines)},
    ]


def _read_one_or_zero(reply: str) -> str:
    """Return the `1` or `0` that a judge puts between `<answer>` and `</answer>`.

    Raises `EndpointError` for any other text, so that the judge is asked again.
    """
    answer = read_answer_tags(reply)
    if answer not in ("0", "1"):
        raise EndpointError(f"the report is {answer!r:.60}, neither 1 nor 0")
    return answer


def extract_by_rules(row: Prediction) -> Extraction:
    r"""Extract the answer of a response by rules, without a judge.

    The answer to a multiple-choice question is a letter. A free-form answer is, in this order:

    1. the content of the last box: `so \boxed{5}` gives `5`
    2. what follows words such as `the answer is`: `The answer is 3.5. Good.` gives `3.5`
    3. the whole of a short response: `7 cm`
    4. the number that the response states
    """
    response = row["response"]
    if row["question_type"] == "multi-choice":
        return extract_choice(response, read_choices(row) or _UNKNOWN_CHOICES)
    box = last_boxed(response)
    if box is not None:
        return Extraction(box, "box")
    answer_words = list(_ANSWER_WORDS_PATTERN.finditer(response))
    if answer_words:
        text_after = response[answer_words[-1].end() :]
        rest_of_line = text_after.split("\n")[0]
        # The sentence ends at a full stop, unlike the point in `3.5`.
        statement = re.split(r"\.(?:\s|$)", rest_of_line)[0]
        if re.search(r"\w", statement):
            return Extraction(statement.strip(), "stated")
    # A short line with few words, besides commands of LaTeX, is a bare answer.
    without_latex_commands = re.sub(r"\\[a-z]+", "", response)
    words = re.findall(r"[A-Za-z]{2,}", without_latex_commands)
    if "\n" not in response.strip() and len(words) <= _MAX_WORDS_OF_BARE_ANSWER:
        return Extraction(response.strip(), "whole")
    return extract_number(response, _question_text(row))


def _find_letter(answer: str, choices: Sequence[str]) -> str:
    """Return the letter that an extracted answer is, or the letter of the option that it means.

    `(C)` is `C`, and `5` is `B` among the options 4, 5 and 6.
    """
    lone_letter = re.fullmatch(r"\W*([A-H])\W*", answer)
    if lone_letter:
        return lone_letter[1]
    return str(extract_choice(answer, choices or _UNKNOWN_CHOICES).text)


def grade(row: Prediction, options: ExtractionOptions) -> RowGrade:
    """Grade the answer that `_prepare` has extracted from a response.

    Where a judge was asked, its reply decides. Otherwise a free-form answer is compared by value,
    and an answer to a multiple-choice question by its letter.
    """
    reference = row["answer"]
    extraction: Extraction = row["parsed_answer"]
    answer = "" if extraction.text is None else str(extraction.text)
    # Only rows that needed a judge have a reply (see `_prepare`).
    judge_reply: Extraction | None = row.get("judge_reply")
    if judge_reply is not None:
        is_right = judge_reply.text == "1"
        reason = "judge"
        # A score counts the failures of the judge by the method of the extraction.
        if judge_reply.method == JUDGE_FAILED:
            extraction = judge_reply
    elif row["question_type"] == "free-form":
        is_right, reason = is_same_answer(answer, reference)
    else:
        choices = read_choices(row)
        answer = _find_letter(answer, choices)
        right_letter = find_reference_letter(row, choices)
        is_right = answer == right_letter
        # No letter is right for a reference with several letters.
        reason = "letter" if right_letter is not None else "gold_several_letters"
    groups = {"version": [row["problem_version"]], "question_type": [row["question_type"]]}
    groups |= groups_from_metadata(row, ("subject", "subfield"))
    return RowGrade(
        verdict=CORRECT if is_right else WRONG,
        extracted=answer,
        reason=reason,
        groups=groups,
        extraction=extraction,
    )


def _describe_rules(options: ExtractionOptions) -> dict[str, Any]:
    """Return the `rules` of a score file: in words, and the judge where one was asked."""
    extraction = describe_extraction(options)
    if extraction["judge"]:
        rules = "ours, and a judge where they do not find a free answer right"
    else:
        rules = "ours, in place of the official judge"
    return {"rules": rules, **extraction}


def _summary(
    rows: Sequence[Prediction], graded_answers: Sequence[GradedAnswer], options: ExtractionOptions
) -> BenchmarkSummary:
    """Compute the accuracy that papers quote: over the five versions with images.

    A note says that the score is not the official one. A warning counts the reference answers with
    several letters, since no answer is right for them.
    """
    with_images = [
        graded
        for row, graded in zip(rows, graded_answers, strict=True)
        if row["problem_version"] != TEXT_ONLY
    ]
    overall = accuracy_metric(with_images) if with_images else None
    n_several_letters = sum(
        graded.grade.reason == "gold_several_letters" for graded in graded_answers
    )
    warnings: list[str] = []
    if n_several_letters:
        references = pluralize(n_several_letters, "reference answer")
        warnings.append(f"{references} with several letters, which no answer meets")
    note = "note: not the official score, which asks a judge whether an answer is right"
    if options.extraction == "judge":
        note = (
            f"note: {options.judge_model} was the judge; the official score's own may say otherwise"
        )
    return BenchmarkSummary(
        metrics={"overall": {"five_versions": overall}}, lines=[note], warnings=warnings
    )


@dataclass(frozen=True, kw_only=True)
class MathVerseDataOptions(HubDataOptions):
    """Which problems are asked, and in which words."""

    query: Literal["cot", "wo"] = option("cot", help="for reasoning (cot), or the answer alone")


def load(options: MathVerseDataOptions) -> LoadedProblems:
    """Load the problems of one split, or of both splits for `--split all`.

    The split `testmini` asks each problem in five versions with a picture, `testmini_text_only` in
    a version of words alone. Both count their samples from 1, so ids of the second get a prefix
    here.
    """
    problems: list[Problem] = []
    hashes: list[str] = []
    splits = _SPLIT_NAMES if options.split == "all" else (options.split,)
    for split in splits:
        loaded = load_problems(
            replace(options, split=split),
            required_columns=("sample_index", *REQUIRED_COLUMNS, "query_wo", "query_cot"),
            image_columns=("image",),
            check=check_row,
            prompt=itemgetter(f"query_{options.query}"),
            stored_columns=(*REQUIRED_COLUMNS, *_TYPE_BY_OPTIONAL_COLUMN),
            id_column="sample_index",
            # on the hub each split is a configuration of its own
            layout=DataLayout(hub_config=split),
        )
        for problem in loaded.problems:
            if problem.fields["problem_version"] == TEXT_ONLY:
                fields = {**problem.fields, "pid": f"text_only_{problem.pid}"}
                problem = replace(without_images(problem), fields=fields)
            problems.append(problem)
        hashes.append(loaded.data_hash)
    return LoadedProblems(problems=problems, data_hash="+".join(hashes))


BENCHMARK = Benchmark(
    name="mathverse",
    split="testmini",
    load=load,
    grade=grade,
    rules=_describe_rules,
    score_options=ExtractionOptions,
    data_options=MathVerseDataOptions,
    check=check_row,
    fingerprint=("data_revision", "query"),
    id_column="sample_index",
    original_id=lambda row: str(row["problem_index"]),
    prepare=_prepare,
    summary=_summary,
)
if __name__ == "__main__":
    from eval.command import main

    raise SystemExit(main(BENCHMARK))
