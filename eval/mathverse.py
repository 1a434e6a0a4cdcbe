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
        judge_of,
        reported,
        reports,
        with_extractions,
    )
    from adora_vl.evals.scoring.number import extract_number, plain
    from adora_vl.evals.scoring.score import cell, metadata_groups, verdict
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
    """The options of a question, [] where they stand in its picture alone.

    `question_for_eval` has them even so.
    """
    question = _asked(row)
    return (
        lettered_options(re.split(r"Choices?:", question)[-1], _OPTION)
        if "Choice" in question
        else []
    )


def value_of(answer: str) -> str:
    r"""The value in an answer, without a name before it or a unit behind it: `9` of `Area $=9
    \mathrm{~cm}^{2}$`.
    """
    spaced = re.sub(r"\\mathrm\s*\{~?\s*([A-Za-z]+)\s*\}", r" \1", answer.replace("掳", "°"))
    shown = (
        re.sub(r"\s+", " ", plain(spaced).replace("\\quad", " ").replace("$", ""))
        .strip()
        .rstrip(".")
    )
    value = _NAME.sub("", shown).strip()
    found = _UNIT.fullmatch(value)
    return (found[1] if found else value).strip()


def same_answer(answer: str, reference: str) -> tuple[bool, str]:
    """Whether two free answers have the same value, and the rule that decided.

    The rules are those of the training's grader. Beside it a decimal is met by a value that is
    rounded to it, points and intervals are compared by their ends, equations by their difference,
    and anything else as text.
    """
    given = value_of(answer)
    wanted = value_of(reference)
    if not given:
        return False, "no_answer"
    if given.replace(" ", "").lower() == wanted.replace(" ", "").lower():
        return True, "same_text"
    pair = _PAIR.fullmatch(given)
    other = _PAIR.fullmatch(wanted)
    if pair and other:
        same = all(same_answer(pair[i], other[i])[0] for i in (2, 3))
        return same and (pair[1], pair[4]) == (other[1], other[4]), "pair"
    if given.count("=") == 1 == wanted.count("="):
        given, wanted = ("({})-({})".format(*each.split("=")) for each in (given, wanted))
    found = graded_answer(rf"\boxed{{{given}}}", wanted)
    if (
        found.verdict != "correct"
        and graded_answer(rf"\boxed{{{wanted}}}", given, rounding=True).reason == "rounded"
    ):
        return True, "rounded"
    return found.verdict == "correct", found.reason


def reference_letter(row: Prediction, choices: Sequence[str]) -> str | None:
    """The letter of the right option, which some rows name as `(C)` or by its text; None where a
    row names several.
    """
    found = re.fullmatch(r"\s*\(?([A-H])\)?\s*", row["answer"])
    if found:
        return found[1]
    texts = [value_of(choice).lower() for choice in choices]
    wanted = value_of(row["answer"]).lower()
    return chr(ord("A") + texts.index(wanted)) if texts.count(wanted) == 1 else None


COLUMNS = {
    "problem_index": ANY,
    "problem_version": one_of(*VERSIONS),
    "question": or_null(TEXT),
    "answer": TEXT,
    "question_type": one_of("multi-choice", "free-form"),
    "metadata": ANY,
}


def check(row: Prediction) -> str | None:
    return wrong_fields(row, COLUMNS) or wrong_fields({"question_for_eval": None, **row}, _MAY_HAVE)


_MAY_HAVE = {"question_for_eval": or_null(TEXT)}


def question_of(row: Prediction) -> Question:
    choices = choices_of(row) if row["question_type"] == "multi-choice" else []
    return Question(
        kind="choice" if choices else "text",
        text=_asked(row),
        choices=choices,
        response=row["response"],
    )


def _asked(row: Prediction) -> str:
    return str(row.get("question_for_eval") or row["question"] or "")


def _prepare(rows: Sequence[Prediction], options: ExtractionOptions) -> list[Prediction]:
    """The rows, each with its `Extraction` under the key `read`, and with a judge its word under
    the key `same`.
    """
    judge = judge_of(options) if options.extraction == "judge" else None
    read = with_extractions(
        rows, options=options, question_of=question_of, rules=by_rules, judge=judge
    )
    if judge is None:
        return read
    words = reports(
        [_asks_whether_same(row) if _is_left_to_judge(row) else None for row in read],
        judge,
        _one_or_zero,
    )
    return [{**row, "same": word} for row, word in zip(read, words, strict=True)]


def _is_left_to_judge(row: Prediction) -> bool:
    """Whether there is an answer that our rules cannot decide on: no letter, and not the value of
    the reference.
    """
    if row["read"].text and row["question_type"] == "free-form":
        return not same_answer(str(row["read"].text), row["answer"])[0]
    return bool(row["read"].text) and reference_letter(row, choices_of(row)) is None


_SAME = (
    "You are given a question, its reference answer, and the answer of somebody else. Say whether "
    "the two answers mean the same: 1 if they do, though written otherwise or in another unit, as "
    "0.5 m and 50 cm; 0 if they differ or one has less in it. Put 1 or 0 between <answer> and "
    "</answer>, and nothing else."
)


def _asks_whether_same(row: Prediction) -> list[dict[str, str]]:
    """The conversation with the judge about an answer and its reference, as the official score has
    one.
    """
    parts = {"question": _asked(row), "reference": row["answer"], "other": row["read"].text}
    lines = [f"<{name}>\n{value}\n</{name}>" for name, value in parts.items()]
    return [{"role": "system", "content": _SAME}, {"role": "user", "content": "\n".join(lines)}]


def _one_or_zero(reply: str) -> str:
    word = reported(reply)
    if word not in ("0", "1"):
        raise EndpointError(f"the report is {word!r:.60}, neither 1 nor 0")
    return word


def by_rules(row: Prediction) -> Extraction:
    """The answer in a response behind its thinking: the letter of an option; or a box, a stated
    answer, a bare value or a number.
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
        said = re.split(r"\.(?:\s|$)", line)[0]
        if re.search(r"\w", said):
            return Extraction(said.strip(), "stated")
    words = re.findall(r"[A-Za-z]{2,}", re.sub(r"\\[a-z]+", "", response))
    if "\n" not in response.strip() and len(words) <= _BARE_WORDS:
        return Extraction(response.strip(), "whole")
    return extract_number(response, _asked(row))


def grade(row: Prediction, options: ExtractionOptions) -> RowGrade:
    groups = {"version": [row["problem_version"]], "question_type": [row["question_type"]]}
    extraction = row["read"]
    groups = groups | metadata_groups(row, ("subject", "subfield"))
    answer = "" if extraction.text is None else str(extraction.text)
    same: Extraction | None = row.get("same")
    if same is not None:
        judged = same if same.method == JUDGE_FAILED else extraction
        return RowGrade(
            verdict=verdict(same.text == "1"),
            extracted=answer,
            reason="judge",
            groups=groups,
            extraction=judged,
        )
    if row["question_type"] == "free-form":
        right, reason = same_answer(answer, row["answer"])
        return RowGrade(
            verdict=verdict(right),
            extracted=answer,
            reason=reason,
            groups=groups,
            extraction=extraction,
        )
    choices = choices_of(row)
    found = re.fullmatch(r"\W*([A-H])\W*", answer)
    wanted = reference_letter(row, choices)
    letter = (
        found[1] if found else str(extract_choice(answer, choices or [""] * _MOST_CHOICES).text)
    )
    if wanted is None:
        return RowGrade(
            verdict=verdict(False),
            extracted=letter,
            reason="gold_several_letters",
            groups=groups,
            extraction=extraction,
        )
    return RowGrade(
        verdict=verdict(letter == wanted),
        extracted=letter,
        reason="letter",
        groups=groups,
        extraction=extraction,
    )


def _rules(options: ExtractionOptions) -> dict[str, Any]:
    ours = "in place of the official judge"
    judged = "and a judge where they do not find a free answer right"
    found = extraction_rules(options)
    return {"rules": f"ours, {judged if found['judge'] else ours}", **found}


def _summary(
    rows: Sequence[Prediction], graded: Sequence[Graded], options: ExtractionOptions
) -> OwnFigures:
    """The overall figure, which the benchmark takes over its five versions with images; and what no
    answer can meet.
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
        {"overall": {"five_versions": cell(five) if five else None}}, lines=lines, warnings=warnings
    )


@dataclass(frozen=True, kw_only=True)
class MathVerseDataOptions(HubDataOptions):
    """Which problems are asked, and in which words."""

    query: Literal["cot", "wo"] = option(
        "cot", help="for reasoning (cot), or the answer alone", choices=("cot", "wo")
    )


def load(options: MathVerseDataOptions) -> LoadedProblems:
    """The problems of a split, or with `all` of both, the five versions with images and the one
    without; and a hash.

    The version without images counts its samples from 1 again, so its ids say what they are of.
    """
    problems = list[Problem]()
    hashes = list[str]()
    for split in _SPLITS if options.split == "all" else (options.split,):
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
        for one in loaded.problems:
            if one.fields["problem_version"] == TEXT_ONLY:
                one = replace(
                    without_images(one), fields={**one.fields, "pid": f"text_only_{one.pid}"}
                )
            problems.append(one)
        hashes.append(loaded.data_hash)
    return LoadedProblems(problems, "+".join(hashes))


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
