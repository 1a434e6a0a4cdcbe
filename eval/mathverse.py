"""`python -m eval.mathverse`: MathVerse by rules of our own; its official score asks a judge what
is right.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Literal

from adora_vl.utils.cli import imports

with imports():
    from adora_vl.evals.inference.dataset import load_problems
    from adora_vl.evals.inference.predictions import ANY, TEXT, one_of, or_null, wrong_fields
    from adora_vl.evals.inference.views import without_images
    from adora_vl.evals.options import HubDataOptions, option
    from adora_vl.evals.records import (
        JUDGE_FAILED,
        Benchmark,
        Extraction,
        Graded,
        LoadedProblems,
        OwnFigures,
        Prediction,
        Problem,
        RowGrade,
    )
    from adora_vl.evals.scoring.choice import extract_choice, lettered_options
    from adora_vl.evals.scoring.judge import (
        ExtractionOptions,
        Question,
        extraction_rules,
        judge_client,
        judge_reports,
        report_in,
        with_extractions,
    )
    from adora_vl.evals.scoring.number import extract_number, plain
    from adora_vl.evals.scoring.score import accuracy_cell, metadata_groups, verdict_of
    from adora_vl.rewards.completion import last_boxed
    from adora_vl.rewards.grade import grade as graded_answer
    from adora_vl.rewards.thinking import final_part
    from adora_vl.utils.cli import amount
    from adora_vl.utils.openai_client import EndpointError

TEXT_ONLY = "Text Only"
VERSIONS = (
    "Text Dominant",
    "Text Lite",
    "Vision Intensive",
    "Vision Dominant",
    "Vision Only",
    TEXT_ONLY,
)
_SPLITS = ("testmini", "testmini_text_only")  # the five versions with images, and the one without
_MOST_CHOICES = 6
_OPTION = re.compile(r"(?:^|\s)([A-H])\s*[:.]")
_STATED = re.compile(r"(?:\banswer\b[^.\n:=]{0,40}?(?:\bis\b|[:：=]))\s*:?\s*", re.IGNORECASE)
# What an answer may have around its value: a name before it, as in `Area = 9` and `f(x) = 3x`, and
# a unit behind it.
_NAME = re.compile(
    r"^\s*(?:[A-Za-z][A-Za-z. ]*|[A-Za-z](?:_\d)?\s*\([a-z]\)|\(x, ?y\))?\s*=(?!.*=)\s*"
)
_PAIR = re.compile(r"([(\[])([^,]+),([^,]+)([)\]])")  # a point or an interval
_BARE_WORDS = 4  # an answer on a single line with at most so many words is not a sentence
_UNIT_WORD = r"(?:[cdkm]?m|[ck]?g|km/h|square|cubic|units?|met(?:er|re)s?|lit(?:er|re)s?|inch(?:es)?|feet|degrees?|T)"
_UNIT = re.compile(
    rf"(.*(?:[\d)}}]|\\pi))\s*{_UNIT_WORD}(?:\s+{_UNIT_WORD})*\s*(?:\^\s*\{{?[23]\}}?|[²³])?",
    re.IGNORECASE | re.DOTALL,
)


def choices_of(row: Prediction) -> list[str]:
    """Return the options of a question, [] where they stand in its picture alone.

    `question_for_eval` has them even so.
    """
    question = _question_text(row)
    if "Choice" not in question:
        return []
    return lettered_options(re.split(r"Choices?:", question)[-1], _OPTION)


def value_of(answer: str) -> str:
    r"""Return the value in an answer, without a name before it or a unit behind it.

    It is `9` for `Area $=9 \mathrm{~cm}^{2}$`.
    """
    spaced = re.sub(r"\\mathrm\s*\{~?\s*([A-Za-z]+)\s*\}", r" \1", answer.replace("掳", "°"))
    unmarked = plain(spaced).replace("\\quad", " ").replace("$", "")
    normalised = re.sub(r"\s+", " ", unmarked).strip().rstrip(".")
    value = _NAME.sub("", normalised).strip()
    with_unit = _UNIT.fullmatch(value)
    return (with_unit[1] if with_unit else value).strip()


def same_answer(answer: str, reference: str) -> tuple[bool, str]:
    """Return whether two free answers have the same value, and the rule that decided.

    The rules are those of the training's grader. Beside it a decimal is met by a value that is
    rounded to it, points and intervals are compared by their ends, equations by their difference,
    and anything else as text.
    """
    value = value_of(answer)
    target = value_of(reference)
    if not value:
        return False, "no_answer"
    if value.replace(" ", "").lower() == target.replace(" ", "").lower():
        return True, "same_text"
    pair = _PAIR.fullmatch(value)
    target_pair = _PAIR.fullmatch(target)
    if pair and target_pair:
        same = all(same_answer(pair[i], target_pair[i])[0] for i in (2, 3))
        return same and (pair[1], pair[4]) == (target_pair[1], target_pair[4]), "pair"
    if value.count("=") == 1 == target.count("="):
        value = _difference_of_sides(value)
        target = _difference_of_sides(target)
    result = graded_answer(rf"\boxed{{{value}}}", target)
    if (
        result.verdict != "correct"
        and graded_answer(rf"\boxed{{{target}}}", value, rounding=True).reason == "rounded"
    ):
        return True, "rounded"
    return result.verdict == "correct", result.reason


def _difference_of_sides(equation: str) -> str:
    """Return the left side of an equation minus the right one, by which equations are compared."""
    first_side, second_side = equation.split("=")
    return f"({first_side})-({second_side})"


def reference_letter(row: Prediction, choices: Sequence[str]) -> str | None:
    """Return the letter of the right option, which some rows name as `(C)` or by its text.

    None where a row names several.
    """
    letter = re.fullmatch(r"\s*\(?([A-H])\)?\s*", row["answer"])
    if letter:
        return letter[1]
    texts = [value_of(choice).lower() for choice in choices]
    text = value_of(row["answer"]).lower()
    if texts.count(text) != 1:
        return None
    return chr(ord("A") + texts.index(text))


COLUMNS = {
    "problem_index": ANY,
    "problem_version": one_of(*VERSIONS),
    "question": or_null(TEXT),
    "answer": TEXT,
    "question_type": one_of("multi-choice", "free-form"),
    "metadata": ANY,
}


def check(row: Prediction) -> str | None:
    """Return what is wrong with the fields of a row; None where nothing is."""
    return wrong_fields(row, COLUMNS) or wrong_fields({"question_for_eval": None, **row}, _MAY_HAVE)


_MAY_HAVE = {"question_for_eval": or_null(TEXT)}


def question_of(row: Prediction) -> Question:
    """Return the question of a row for an extraction.

    It is a choice where its options stand in the text.
    """
    choices = choices_of(row) if row["question_type"] == "multi-choice" else []
    return Question(
        kind="choice" if choices else "text",
        text=_question_text(row),
        choices=choices,
        response=row["response"],
    )


def _question_text(row: Prediction) -> str:
    """Return the question with its options, if the data have it, else that of the version."""
    return str(row.get("question_for_eval") or row["question"] or "")


def _prepare(rows: Sequence[Prediction], options: ExtractionOptions) -> list[Prediction]:
    """Return the rows, each with its `Extraction` under the key `read`.

    With a judge, its word on whether the answer is right stands under the key `same`.
    """
    judge = judge_client(options) if options.extraction == "judge" else None
    read = with_extractions(
        rows, options=options, question_of=question_of, rules=by_rules, judge=judge
    )
    if judge is None:
        return read
    conversations = [_judge_messages(row) if _is_left_to_judge(row) else None for row in read]
    words = judge_reports(conversations, judge, _one_or_zero)
    return [{**row, "same": word} for row, word in zip(read, words, strict=True)]


def _is_left_to_judge(row: Prediction) -> bool:
    """Return whether a row has an answer that our rules cannot decide on.

    It is a free answer that has not the value of the reference, or any answer to a question of
    which the reference names no letter.
    """
    answer = row["read"].text
    if not answer:
        return False
    if row["question_type"] == "free-form":
        return not same_answer(str(answer), row["answer"])[0]
    return reference_letter(row, choices_of(row)) is None


_SAME = (
    "You are given a question, its reference answer, and the answer of somebody else. Say whether "
    "the two answers mean the same: 1 if they do, though written otherwise or in another unit, as "
    "0.5 m and 50 cm; 0 if they differ or one has less in it. Put 1 or 0 between <answer> and "
    "</answer>, and nothing else."
)


def _judge_messages(row: Prediction) -> list[dict[str, str]]:
    """Return the conversation with the judge about an answer and its reference.

    The official score has such a one too.
    """
    parts = {"question": _question_text(row), "reference": row["answer"], "other": row["read"].text}
    lines = [f"<{name}>\n{value}\n</{name}>" for name, value in parts.items()]
    return [{"role": "system", "content": _SAME}, {"role": "user", "content": "\n".join(lines)}]


def _one_or_zero(reply: str) -> str:
    """Return the report of the judge. Raises `EndpointError` if it is neither 1 nor 0."""
    word = report_in(reply)
    if word not in ("0", "1"):
        raise EndpointError(f"the report is {word!r:.60}, neither 1 nor 0")
    return word


def by_rules(row: Prediction) -> Extraction:
    """Return the answer in a response behind its thinking, and the rule that found it.

    It is the letter of an option, or else a box, a stated answer, a bare value or a number.
    """
    response = final_part(row["response"])
    if row["question_type"] == "multi-choice":
        return Extraction(*extract_choice(response, choices_of(row) or [""] * _MOST_CHOICES))
    box = last_boxed(response)
    if box is not None:
        return Extraction(box, "box")
    stated = list(_STATED.finditer(response))
    if stated:
        line = response[stated[-1].end() :].split("\n")[0]
        statement = re.split(r"\.(?:\s|$)", line)[0]
        if re.search(r"\w", statement):
            return Extraction(statement.strip(), "stated")
    words = re.findall(r"[A-Za-z]{2,}", re.sub(r"\\[a-z]+", "", response))
    if "\n" not in response.strip() and len(words) <= _BARE_WORDS:
        return Extraction(response.strip(), "whole")
    return extract_number(response, _question_text(row))


def _letter_of(answer: str, choices: Sequence[str]) -> str:
    """Return the letter that an answer is, or else that of the choice that it means."""
    lone_letter = re.fullmatch(r"\W*([A-H])\W*", answer)
    if lone_letter:
        return lone_letter[1]
    return str(extract_choice(answer, choices or [""] * _MOST_CHOICES).text)


def grade(row: Prediction, options: ExtractionOptions) -> RowGrade:
    """Return the verdict on a row: by the judge if it was asked, else by value or letter."""
    groups = {"version": [row["problem_version"]], "question_type": [row["question_type"]]}
    extraction = row["read"]
    groups = groups | metadata_groups(row, ("subject", "subfield"))
    answer = "" if extraction.text is None else str(extraction.text)
    # Where a judge was asked, its 1 or 0 decides; a judge that failed counts as wrong.
    judge_reply: Extraction | None = row.get("same")
    if judge_reply is not None:
        judged = judge_reply if judge_reply.method == JUDGE_FAILED else extraction
        return RowGrade(
            verdict=verdict_of(judge_reply.text == "1"),
            extracted=answer,
            reason="judge",
            groups=groups,
            extraction=judged,
        )
    if row["question_type"] == "free-form":
        right, reason = same_answer(answer, row["answer"])
        return RowGrade(
            verdict=verdict_of(right),
            extracted=answer,
            reason=reason,
            groups=groups,
            extraction=extraction,
        )
    choices = choices_of(row)
    right_letter = reference_letter(row, choices)
    letter = _letter_of(answer, choices)
    # A reference with several letters cannot be matched by one, so that nobody gets it right.
    if right_letter is None:
        return RowGrade(
            verdict=verdict_of(False),
            extracted=letter,
            reason="gold_several_letters",
            groups=groups,
            extraction=extraction,
        )
    return RowGrade(
        verdict=verdict_of(letter == right_letter),
        extracted=letter,
        reason="letter",
        groups=groups,
        extraction=extraction,
    )


def _rules(options: ExtractionOptions) -> dict[str, Any]:
    """Return the rules of a score, and whether a judge was asked."""
    ours = "in place of the official judge"
    judged = "and a judge where they do not find a free answer right"
    extraction = extraction_rules(options)
    return {"rules": f"ours, {judged if extraction['judge'] else ours}", **extraction}


def _summary(
    rows: Sequence[Prediction], graded: Sequence[Graded], options: ExtractionOptions
) -> OwnFigures:
    """Return the overall figure, which the benchmark takes over its five versions with images.

    A warning counts the reference answers with several letters, which no answer meets.
    """
    five = [
        item for row, item in zip(rows, graded, strict=True) if row["problem_version"] != TEXT_ONLY
    ]
    several = sum(item.grade.reason == "gold_several_letters" for item in graded)
    warnings = (
        [f"{amount(several, 'reference answer')} with several letters, which no answer meets"]
        if several
        else []
    )
    lines = ["note: not the official score, which asks a judge whether an answer is right"]
    if options.extraction == "judge":
        lines = [
            f"note: {options.judge_model} was the judge; the official score's own may say otherwise"
        ]
    return OwnFigures(
        {"overall": {"five_versions": accuracy_cell(five) if five else None}},
        lines=lines,
        warnings=warnings,
    )


@dataclass(frozen=True, kw_only=True)
class MathVerseDataOptions(HubDataOptions):
    """Which problems are asked, and in which words."""

    query: Literal["cot", "wo"] = option(
        "cot", help="for reasoning (cot), or the answer alone", choices=("cot", "wo")
    )


def load(options: MathVerseDataOptions) -> LoadedProblems:
    """Return the problems of a split, or with `all` of both, and a hash of the data.

    One split has the five versions with images, the other the version without. That one counts its
    samples from 1 again, so its ids say that they are of text only.
    """
    problems = list[Problem]()
    hashes = list[str]()
    splits = _SPLITS if options.split == "all" else (options.split,)
    for split in splits:
        loaded = load_problems(
            options,
            needed=("sample_index", *COLUMNS, "query_wo", "query_cot"),
            image_columns=("image",),
            check=check,
            split=split,
            prompt=itemgetter(f"query_{options.query}"),
            stored_columns=(*COLUMNS, *_MAY_HAVE),
            id_column="sample_index",
            config=split,
        )
        for problem in loaded.problems:
            if problem.fields["problem_version"] != TEXT_ONLY:
                problems.append(problem)
                continue
            fields = {**problem.fields, "pid": f"text_only_{problem.pid}"}
            problems.append(replace(without_images(problem), fields=fields))
        hashes.append(loaded.data_hash)
    return LoadedProblems(problems=problems, data_hash="+".join(hashes))


BENCHMARK = Benchmark(
    name="mathverse",
    split="testmini",
    load=load,
    grade=grade,
    rules=_rules,
    score_options=ExtractionOptions,
    data_options=MathVerseDataOptions,
    check=check,
    fingerprint=("data_revision", "query"),
    id_column="sample_index",
    prepare=_prepare,
    summary=_summary,
)
if __name__ == "__main__":
    with imports():
        from eval.command import main
    raise SystemExit(main(BENCHMARK))
