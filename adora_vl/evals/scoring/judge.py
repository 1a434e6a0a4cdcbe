"""Extracts the answer of a response: by rules, from the file, or by a language model, the judge.

The judge stands behind an OpenAI-compatible endpoint and is off by default. A call that fails is
counted as a failure: it is never taken for an answer, and never stored. Answers are kept on disk,
so that scoring again asks nothing twice.
"""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tqdm import tqdm

from adora_vl.data.prompts import with_letters
from adora_vl.evals.inference.predictions import NOT_ASKED_REASONS, score_path
from adora_vl.evals.options import ScoreOptions, option
from adora_vl.evals.records import JUDGE_FAILED, Extraction, Prediction
from adora_vl.evals.scoring.choice import extract_choice
from adora_vl.evals.scoring.number import extract_list, extract_number
from adora_vl.evals.scoring.response_text import MAX_RESPONSE_CHARS
from adora_vl.rewards.completion import answer_block, last_boxed
from adora_vl.rewards.judge import KEY_VARIABLE, text_in_tags
from adora_vl.utils.cli import (
    integer_between,
    none_or,
    number_between,
    path_option,
    pluralize,
    text_option,
)
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import naming_write_errors
from adora_vl.utils.openai_client import ChatClient, Endpoint, EndpointError, Messages, check_url

# The form that an answer should have.
AnswerKind = Literal["choice", "integer", "float", "list", "text"]


@dataclass(frozen=True, kw_only=True)
class ExtractionOptions(ScoreOptions):
    """How the answer is read out of a response, and where the judge is that may do it."""

    extraction: Literal["rules", "stored", "judge"] = option(
        "rules", help="how the answer is found"
    )
    judge_url: str | None = option(
        None,
        help="an OpenAI-compatible endpoint, such as http://localhost:8000/v1",
        type=none_or(text_option),
    )
    judge_model: str | None = option(None, help="its name there", type=none_or(text_option))
    judge_cache: Path | None = option(
        None, help="default: beside the score", type=none_or(path_option), metavar="FILE.jsonl"
    )
    judge_timeout: float = option(
        60.0, help="of one call; default 60", type=number_between(0.001, 86400), metavar="SECONDS"
    )
    judge_budget: int | None = option(
        None,
        help="calls at most, attempts counted; default: any",
        type=none_or(integer_between(0)),
        metavar="N",
    )
    judge_attempts: int = option(
        4,
        help="before a row counts as failed; default 4",
        type=integer_between(1, 100),
        metavar="N",
    )
    judge_wait: float = option(
        1.0,
        help="before a second try; doubles",
        type=number_between(0.001, 3600),
        metavar="SECONDS",
    )


class Question(NamedTuple):
    """What an extraction needs to know of a problem, and the response to it."""

    kind: AnswerKind
    """The form that the answer should have, such as `choice` or `integer`."""
    text: str
    """The text of the question."""
    choices: Sequence[str]
    """The options, for the kind `choice` alone."""
    response: str
    """The response of the model, without a block of thinking."""


def extract_answers(
    rows: Sequence[Prediction],
    options: ExtractionOptions,
    question_of: Callable[[Prediction], Question],
    extract: Callable[[Prediction], Extraction] | None = None,
    judge: ChatClient | None = None,
) -> list[Prediction]:
    """Extract the answers of all rows, in the way that `options.extraction` names.

    Args:
        rows: The predictions.
        options: How answers are extracted: by rules, by the judge (a language model on a server),
            or as they are stored in the rows.
        question_of: Builds the question of a row.
        extract: Extracts by rules of the benchmark, in place of `extract_by_rules`.
        judge: The client of the judge, in place of one that is built from the options.

    Returns the rows, each with its `Extraction` under the key `parsed_answer`. Raises `UserError`
    if extractions should be stored in the rows and one is missing, or if the judge cannot be asked.
    """
    if options.extraction == "judge":
        questions: list[Question | None] = []
        for row in rows:
            was_asked = row.get("finish_reason") not in NOT_ASKED_REASONS
            questions.append(question_of(row) if was_asked else None)
        extractions = extract_with_judge(questions, judge or create_judge_client(options))
    elif options.extraction == "rules":
        if extract is None:
            extractions = [extract_by_rules(question_of(row)) for row in rows]
        else:
            extractions = [extract(row) for row in rows]
    else:
        pids_without = [row["pid"] for row in rows if "extraction" not in row]
        if pids_without:
            raise UserError(
                f"extraction: {len(pids_without)} of {len(rows)} rows have no stored extraction, "
                f"the first is pid {pids_without[0]!r}; use --extraction rules"
            )
        extractions = [Extraction(row["extraction"], "stored") for row in rows]
    return [
        {**row, "parsed_answer": extraction}
        for row, extraction in zip(rows, extractions, strict=True)
    ]


def describe_extraction(options: ExtractionOptions) -> dict[str, Any]:
    """Return what the `rules` of a score say of the extraction, and of the judge if there was one.

    For example, `{"extraction": "judge", "judge": "gpt-4o"}`.
    """
    judge = options.judge_model if options.extraction == "judge" else None
    return {"extraction": options.extraction, "judge": judge}


def extract_by_rules(question: Question) -> Extraction:
    """Extract the answer of a response by our own rules for the kind of the question.

    If there is an `<answer>` block, only that is read. For a question that asks for a text the
    answer is the last box, or the whole response if there is no box.
    """
    response = answer_block(question.response) or question.response
    question = question._replace(response=response)
    exact_extraction = extract_exactly(question)
    if exact_extraction is not None:
        return exact_extraction
    if question.kind == "choice":
        return extract_choice(response, question.choices)
    if question.kind == "list":
        return extract_list(response)
    if question.kind == "text":
        box = last_boxed(response)
        if box is None:
            return Extraction(response.strip(), "whole")
        return Extraction(box, "box")
    extraction = extract_number(response, question.text)
    if question.kind == "integer":
        # `5.0` becomes `5`, because rules that use `int` would refuse `5.0`.
        integer = re.sub(r"^(-?\d+)\.0+$", r"\1", extraction.text)
        return Extraction(integer, extraction.method)
    return extraction


def extract_exactly(question: Question) -> Extraction | None:
    """Extract an answer that is the whole response: the text of a choice, or a number.

    MathVista's official code does the same before it asks a language model. Returns None for a
    response for which it would ask the model.
    """
    response = question.response
    if not response:
        return Extraction("", "empty")
    if question.kind == "choice" and response in question.choices:
        return Extraction(response, "exact")
    convert = {"integer": int, "float": float}.get(question.kind)
    if convert is None:
        return None
    try:
        return Extraction(str(convert(response)), "exact")
    except ValueError:
        return None


_NO_ANSWER_WORD = "NONE"
_MAX_ANSWER_CHARS = 200  # a longer text is an essay, not an answer
# The system prompt of the judge; `{request}` becomes a sentence of `_REQUEST_BY_KIND`.
_JUDGE_INSTRUCTION = (
    "You are given a question and a reply to it. Report the final answer that the reply commits "
    "to, and nothing else: no explanation, no judgement of whether it is right, no repair of its "
    f"mistakes. {{request}} If the reply commits to no answer, report {_NO_ANSWER_WORD}. Put the report "
    "between <answer> and </answer>."
)
_REQUEST_BY_KIND = {
    "choice": "Report the letter of the option that the reply picks.",
    "integer": "Report it as an integer in digits.",
    "float": "Report it as a decimal number in digits.",
    "list": "Report it as a Python list.",
}


def create_judge_client(options: ExtractionOptions) -> ChatClient:
    """Create the client of the judge that the options name.

    Its replies are kept in a file, by default beside the score. Raises `UserError` where the
    address or the model is missing.
    """
    fault = "is missing; --extraction judge needs an endpoint and a model"
    if not options.judge_url:
        raise UserError(f"--judge-url {fault}")
    if not options.judge_model:
        raise UserError(f"--judge-model {fault}")
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
        assert options.output is not None  # the command line needs one
        cache = score_path(options.output).with_name("judge_cache.jsonl")
    with naming_write_errors("judge_cache", cache):
        cache.parent.mkdir(parents=True, exist_ok=True)
    return ChatClient(endpoint, cache=cache, budget=options.judge_budget)


def extract_with_judge(questions: Sequence[Question | None], judge: ChatClient) -> list[Extraction]:
    """Extract the answer to each question, by the judge where the response is not just the answer.

    A question is None for a problem that was never asked. Its extraction has no text.
    """
    # Each question has an extraction, or a conversation with the judge; the other is None.
    extractions_without_judge: list[Extraction | None] = []
    conversations: list[Messages | None] = []
    for question in questions:
        if question is None:
            extractions_without_judge.append(Extraction(None, "not_asked"))
            conversations.append(None)
            continue
        exact_extraction = extract_exactly(question)
        extractions_without_judge.append(exact_extraction)
        conversations.append(
            build_extraction_messages(question) if exact_extraction is None else None
        )
    extractions_by_judge = ask_judge(conversations, judge, read_answer_tags)
    extractions: list[Extraction] = []
    for by_rule, by_judge in zip(extractions_without_judge, extractions_by_judge, strict=True):
        extraction = by_rule or by_judge
        assert extraction is not None  # the judge was asked where no rule applies
        extractions.append(extraction)
    return extractions


def ask_judge(
    conversations: Sequence[Messages | None], judge: ChatClient, parse_reply: Callable[[str], str]
) -> list[Extraction | None]:
    """Send all conversations to the judge in parallel, and return its answers in their order.

    A reply of an earlier run is taken from the judge's cache. A call that fails becomes an
    extraction with the method `JUDGE_FAILED`, and the failures are printed as one warning. Raises
    `UserError` if no call can succeed, because the judge refuses the key or is not there.

    Args:
        conversations: The messages of each conversation. None gives None in the result.
        judge: The client of the judge.
        parse_reply: Returns the answer in a reply. It raises `EndpointError` for a reply without
            one, and the judge is asked again.
    """
    failures: list[str] = []
    with tqdm(total=len(conversations), unit="row", desc="judge", disable=None) as bar:

        def ask_or_look_up(messages: Messages) -> Extraction:
            """Return the judge's answer to one conversation, from the cache if it is there."""
            cached_answer = judge.cached(messages)
            if cached_answer is not None:
                return Extraction(cached_answer, "judge_cached")
            try:
                return Extraction(judge.ask(messages, parse_reply), "judge")
            except EndpointError as error:
                failures.append(str(error))
                return Extraction(None, JUDGE_FAILED)

        def extract_and_advance(messages: Messages | None) -> Extraction | None:
            """Return the judge's answer if there is something to ask, and advance the bar."""
            extraction = None if messages is None else ask_or_look_up(messages)
            bar.update()
            return extraction

        extractions: list[Extraction | None] = judge.map_in_threads(
            extract_and_advance, conversations
        )
    judge.check_server("judge_url")
    if failures:
        rows = pluralize(len(failures), "row")
        print(
            f"warning: the judge failed on {rows}, the first time: {failures[0]}", file=sys.stderr
        )
    return extractions


def build_extraction_messages(question: Question) -> list[dict[str, str]]:
    """Build the conversation that asks the judge which answer a response gives.

    The reference answer is not in it, so that the judge cannot be guided by it.
    """
    request = _REQUEST_BY_KIND.get(question.kind, "Report it as briefly as it can be said.")
    lines = [f"<question>\n{question.text}"]
    if question.kind == "choice":
        lines += with_letters(question.choices)
    reply = question.response[-MAX_RESPONSE_CHARS:]
    lines.append(f"</question>\n<reply>\n{reply}\n</reply>")
    return [
        {"role": "system", "content": _JUDGE_INSTRUCTION.format(request=request)},
        {"role": "user", "content": "\n".join(lines)},
    ]


def read_answer_tags(reply: str) -> str:
    """Return what the judge put between `<answer>` and `</answer>`; `NONE` gives an empty text.

    Raises `EndpointError` for a reply without these tags, or with a text between them that is too
    long to be an answer.
    """
    answer = text_in_tags(reply, "answer")
    if len(answer) > _MAX_ANSWER_CHARS:
        raise EndpointError(f"the report has {len(answer)} characters")
    return "" if answer in ("", _NO_ANSWER_WORD) else answer
