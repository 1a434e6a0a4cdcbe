"""Reads the answer out of a response: by rules, from the file, or by a language model, the judge.

The judge stands behind an OpenAI-compatible endpoint and is off by default. A call that fails is
counted as a failure: it is never taken for an answer, and never stored. Answers are kept on disk,
so that scoring again asks nothing twice.
"""

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tqdm import tqdm

from adora_vl.data.prompts import lettered
from adora_vl.evals.inference.predictions import NOT_ASKED, score_path
from adora_vl.evals.options import ScoreOptions, option
from adora_vl.evals.records import JUDGE_FAILED, Extraction, Prediction
from adora_vl.evals.scoring.choice import extract_choice
from adora_vl.evals.scoring.number import extract_list, extract_number
from adora_vl.evals.scoring.response_text import MAX_CHARS
from adora_vl.rewards.completion import answer_block, last_boxed
from adora_vl.rewards.thinking import final_part
from adora_vl.utils.cli import amount, number, optional, path, text, whole
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import written_to
from adora_vl.utils.openai_client import ChatClient, Endpoint, EndpointError, Messages, check_url

Kind = Literal["choice", "integer", "float", "list", "text"]


@dataclass(frozen=True, kw_only=True)
class ExtractionOptions(ScoreOptions):
    """How the answer is read out of a response, and where the judge is that may do it."""

    extraction: Literal["rules", "stored", "judge"] = option(
        "rules", help="how the answer is found", choices=("rules", "stored", "judge")
    )
    judge_url: str | None = option(
        None,
        help="an OpenAI-compatible endpoint, such as http://localhost:8000/v1",
        type=optional(text),
    )
    judge_model: str | None = option(None, help="its name there", type=optional(text))
    judge_cache: Path | None = option(
        None, help="default: beside the score", type=optional(path), metavar="FILE.jsonl"
    )
    judge_timeout: float = option(
        60.0, help="of one call; default 60", type=number(0.001, 86400), metavar="SECONDS"
    )
    judge_budget: int | None = option(
        None,
        help="calls at most, attempts counted; default: any",
        type=optional(whole(0)),
        metavar="N",
    )
    judge_attempts: int = option(
        4, help="before a row counts as failed; default 4", type=whole(1, 100), metavar="N"
    )
    judge_wait: float = option(
        1.0, help="before a second try; doubles", type=number(0.001, 3600), metavar="SECONDS"
    )


class Question(NamedTuple):
    """A problem as an extraction needs it, with the response to it."""

    kind: Kind
    """The form that the answer should have."""
    text: str
    """The text of the question."""
    choices: Sequence[str]
    """The options, for the kind `choice` alone."""
    response: str
    """The response of the model."""


def with_extractions(
    rows: Sequence[Prediction],
    options: ExtractionOptions,
    question_of: Callable[[Prediction], Question],
    rules: Callable[[Prediction], Extraction] | None = None,
    judge: ChatClient | None = None,
) -> list[Prediction]:
    """Return the rows, each with its `Extraction` by `--extraction` under the key `parsed_answer`.

    Args:
        rows: The predictions.
        options: How the answer is found.
        question_of: Makes the question of a row.
        rules: Extracts by rules of the benchmark, in place of `by_rules`.
        judge: The judge, in place of the one that the options name.

    Raises `UserError` where a row has no stored extraction, or the judge cannot be asked.
    """
    if options.extraction == "judge":
        questions = []
        for row in rows:
            was_asked = row.get("finish_reason") not in NOT_ASKED
            questions.append(question_of(row) if was_asked else None)
        extractions = extract_with_judge(questions, judge or judge_client(options))
    elif options.extraction == "rules":
        extractions = [rules(row) if rules else by_rules(question_of(row)) for row in rows]
    else:
        without = [row["pid"] for row in rows if "extraction" not in row]
        if without:
            raise UserError(
                f"extraction: {len(without)} of {len(rows)} rows have no stored extraction, the "
                f"first is pid {without[0]!r}; use --extraction rules"
            )
        extractions = [Extraction(row["extraction"], "stored") for row in rows]
    return [
        {**row, "parsed_answer": extraction}
        for row, extraction in zip(rows, extractions, strict=True)
    ]


def extraction_rules(options: ExtractionOptions) -> dict[str, Any]:
    """Return the part of a benchmark's rules on how, and by which judge, answers were found."""
    judge = options.judge_model if options.extraction == "judge" else None
    return {"extraction": options.extraction, "judge": judge}


def by_rules(question: Question) -> Extraction:
    """Return the answer in a response by our rules, and the rule that found it.

    They read what stands behind the thinking, and of that the `<answer>` block where there is one.
    """
    part = final_part(question.response)
    question = question._replace(response=answer_block(part) or part)
    quick = quick_extract(question)
    if quick is not None:
        return quick
    if question.kind == "choice":
        return extract_choice(question.response, question.choices)
    if question.kind == "list":
        return extract_list(question.response)
    if question.kind == "text":
        box = last_boxed(question.response)
        if box is None:
            return Extraction(question.response.strip(), "whole")
        return Extraction(box, "box")
    extraction = extract_number(question.response, question.text)
    # `5.0` is the integer that was asked for, also to a rule set with a strict `int`
    if question.kind == "integer":
        integer = re.sub(r"^(-?\d+)\.0+$", r"\1", extraction.text)
        return Extraction(integer, extraction.method)
    return extraction


def quick_extract(question: Question) -> Extraction | None:
    """Return the extraction that MathVista's official code makes without a language model.

    None where it asks one.
    """
    if not question.response:
        return Extraction("", "empty")
    if question.kind == "choice" and question.response in question.choices:
        return Extraction(question.response, "exact")
    convert = {"integer": int, "float": float}.get(question.kind)
    with suppress(ValueError):
        return None if convert is None else Extraction(str(convert(question.response)), "exact")
    return None


KEY_VARIABLE = "ADORA_VL_JUDGE_KEY"
_NO_ANSWER = "NONE"
_LONGEST_ANSWER = 200  # characters; an extraction that is longer is an essay, not an answer
_INSTRUCTION = (
    "You are given a question and a reply to it. Report the final answer that the reply commits "
    "to, and nothing else: no explanation, no judgement of whether it is right, no repair of its "
    f"mistakes. {{form}} If the reply commits to no answer, report {_NO_ANSWER}. Put the report "
    "between <answer> and </answer>."
)
_FORMS = {
    "choice": "Report the letter of the option that the reply picks.",
    "integer": "Report it as an integer in digits.",
    "float": "Report it as a decimal number in digits.",
    "list": "Report it as a Python list.",
}


def judge_client(options: ExtractionOptions) -> ChatClient:
    """Return the judge that the options name.

    Raises `UserError` where the address or the model is missing.
    """
    needs = "is missing; --extraction judge needs an endpoint and a model"
    if not options.judge_url:
        raise UserError(f"--judge-url {needs}")
    if not options.judge_model:
        raise UserError(f"--judge-model {needs}")
    endpoint = Endpoint(
        url=check_url("judge_url", options.judge_url),
        model=options.judge_model,
        key_variable=KEY_VARIABLE,
        timeout_s=options.judge_timeout,
        attempts=options.judge_attempts,
        wait_s=options.judge_wait,
        body={"temperature": 0, "max_tokens": 256},
    )
    cache = options.judge_cache
    if cache is None:
        assert options.output is not None
        cache = score_path(options.output).with_name("judge_cache.jsonl")
    with written_to("judge_cache", cache):
        cache.parent.mkdir(parents=True, exist_ok=True)
    return ChatClient(endpoint, cache=cache, budget=options.judge_budget)


def extract_with_judge(questions: Sequence[Question | None], judge: ChatClient) -> list[Extraction]:
    """Return one extraction for each question; the judge is asked where the official code asks one.

    A question is None for a problem that was never asked.
    """
    quick: list[Extraction | None] = []
    conversations: list[Messages | None] = []
    for question in questions:
        if question is None:
            quick.append(Extraction(None, "not_asked"))
            conversations.append(None)
            continue
        extraction = quick_extract(question)
        quick.append(extraction)
        conversations.append(messages_for(question) if extraction is None else None)
    extractions: list[Extraction] = []
    for quick_extraction, report in zip(
        quick, judge_reports(conversations, judge, report_in), strict=True
    ):
        settled = quick_extraction or report
        if settled is not None:
            extractions.append(settled)
    return extractions


def judge_reports(
    conversations: Sequence[Messages | None], judge: ChatClient, read: Callable[[str], str]
) -> list[Extraction | None]:
    """Return the judge's reports on conversations, in order, from the cache if possible.

    A conversation is None where there is nothing to ask, and so is its report. `read` makes the
    report of a reply; a call that fails becomes an extraction that failed.
    """
    failures: list[str] = []
    with tqdm(total=len(conversations), unit="row", desc="judge", disable=None) as bar:

        def asked_or_cached(messages: Messages) -> Extraction:
            """Return what the judge says to a conversation, now or in an earlier run."""
            stored = judge.cached(messages)
            if stored is not None:
                return Extraction(stored, "judge_cached")
            try:
                return Extraction(judge.ask(messages, read), "judge")
            except EndpointError as error:
                failures.append(str(error))
                return Extraction(None, JUDGE_FAILED)

        def report_on(messages: Messages | None) -> Extraction | None:
            """Return the judge's word on one row, None where it has nothing to judge."""
            report = None
            if messages is not None:
                report = asked_or_cached(messages)
            bar.update()
            return report

        found_reports: list[Extraction | None] = judge.each(report_on, conversations)
    if failures:
        rows = amount(len(failures), "row")
        print(
            f"warning: the judge failed on {rows}, the first time: {failures[0]}", file=sys.stderr
        )
    return found_reports


def messages_for(question: Question) -> list[dict[str, str]]:
    """Return the conversation with the judge about one answer.

    The reference answer is not in it.
    """
    form = _FORMS.get(question.kind, "Report it as briefly as it can be said.")
    lines = [
        f"<question>\n{question.text}",
        *(lettered(question.choices) if question.kind == "choice" else []),
    ]
    reply = final_part(question.response)[-MAX_CHARS:]
    lines.append(f"</question>\n<reply>\n{reply}\n</reply>")
    instruction = _INSTRUCTION.format(form=form)
    return [
        {"role": "system", "content": instruction},
        {"role": "user", "content": "\n".join(lines)},
    ]


def report_in(text: object) -> str:
    """Return the report in the final part of a judge's reply, empty for no answer.

    Raises `EndpointError` where there is no report.
    """
    reply = final_part(text) if isinstance(text, str) else ""
    if "<answer>" not in reply or "</answer>" not in reply:
        raise EndpointError("the reply has no <answer>...</answer>")
    report = reply.rsplit("<answer>", 1)[1].split("</answer>", 1)[0].strip()
    if len(report) > _LONGEST_ANSWER:
        raise EndpointError(f"the report has {len(report)} characters")
    return "" if report in ("", _NO_ANSWER) else report
