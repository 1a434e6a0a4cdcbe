"""How the answer is read out of a response: by rules, from the file, or by a language model, the
judge.

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
from adora_vl.evals.scoring.number import MAX_CHARS, extract_list, extract_number
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
    kind: Kind
    text: str
    choices: Sequence[str]  # for the kind `choice` alone
    response: str


def with_extractions(
    rows: Sequence[Prediction],
    options: ExtractionOptions,
    question_of: Callable[[Prediction], Question],
    rules: Callable[[Prediction], Extraction] | None = None,
    judge: ChatClient | None = None,
) -> list[Prediction]:
    """The rows, each with its `Extraction` by `--extraction` under the key `read`.

    Raises `UserError`.
    """
    if options.extraction == "judge":
        asked = [
            None if row.get("finish_reason") in NOT_ASKED else question_of(row) for row in rows
        ]
        found = judged(asked, judge or judge_of(options))
    elif options.extraction == "rules":
        found = [rules(row) if rules else by_rules(question_of(row)) for row in rows]
    else:
        lacking = [row["pid"] for row in rows if "extraction" not in row]
        if lacking:
            without = (
                f"{len(lacking)} of {len(rows)} rows have no stored extraction, the first is pid "
                f"{lacking[0]!r}"
            )
            raise UserError(f"extraction: {without}; use --extraction rules")
        found = [Extraction(row["extraction"], "stored") for row in rows]
    return [{**row, "read": extraction} for row, extraction in zip(rows, found, strict=True)]


def extraction_rules(options: ExtractionOptions) -> dict[str, Any]:
    judge = options.judge_model if options.extraction == "judge" else None
    return {"extraction": options.extraction, "judge": judge}


def by_rules(question: Question) -> Extraction:
    """The answer in a response behind its thinking, or in its `<answer>` block, by our rules, and
    the rule that found it.
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
        return (
            Extraction(question.response.strip(), "whole")
            if box is None
            else Extraction(box, "box")
        )
    found = extract_number(question.response, question.text)
    # `5.0` is the integer that was asked for, also to a rule set with a strict `int`
    if question.kind == "integer":
        return Extraction(re.sub(r"^(-?\d+)\.0+$", r"\1", found.text), found.how)
    return found


def quick_extract(question: Question) -> Extraction | None:
    """What MathVista's official code takes without asking a language model; None where it asks."""
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


def judge_of(options: ExtractionOptions) -> ChatClient:
    """The judge that the options name.

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


def judged(questions: Sequence[Question | None], judge: ChatClient) -> list[Extraction]:
    """One extraction each; the judge is asked where the official code asks one.

    None was never asked.
    """
    quick = [
        Extraction(None, "not_asked") if each is None else quick_extract(each) for each in questions
    ]
    pairs = zip(questions, quick, strict=True)
    asked = [
        messages_for(each) if each is not None and found is None else None for each, found in pairs
    ]
    made = [
        found or report
        for found, report in zip(quick, reports(asked, judge, reported), strict=True)
    ]
    return [each for each in made if each is not None]


def reports(
    asked: Sequence[Messages | None], judge: ChatClient, read: Callable[[str], str]
) -> list[Extraction | None]:
    """What the judge reports on each of the conversations, in order, from the cache if it was asked
    before; None where there is nothing to ask. `read`: what is made of its reply.
    """
    failures: list[str] = []
    with tqdm(total=len(asked), unit="row", desc="judge", disable=None) as bar:

        def one(messages: Messages | None) -> Extraction | None:
            found = None
            if messages is not None and (known := judge.cached(messages)) is not None:
                found = Extraction(known, "judge_cached")
            elif messages is not None:
                try:
                    found = Extraction(judge.ask(messages, read), "judge")
                except EndpointError as error:
                    failures.append(str(error))
                    found = Extraction(None, JUDGE_FAILED)
            bar.update()
            return found

        found: list[Extraction | None] = judge.each(one, asked)
    if failures:
        rows = amount(len(failures), "row")
        print(
            f"warning: the judge failed on {rows}, the first time: {failures[0]}", file=sys.stderr
        )
    return found


def messages_for(question: Question) -> list[dict[str, str]]:
    """The conversation with the judge about one answer; the reference answer is not in it."""
    form = _FORMS.get(question.kind, "Report it as briefly as it can be said.")
    lines = [
        f"<question>\n{question.text}",
        *(lettered(question.choices) if question.kind == "choice" else []),
    ]
    reply = final_part(question.response)[-MAX_CHARS:]
    lines.append(f"</question>\n<reply>\n{reply}\n</reply>")
    told = _INSTRUCTION.format(form=form)
    return [{"role": "system", "content": told}, {"role": "user", "content": "\n".join(lines)}]


def reported(text: Any) -> str:
    """The report in the final part of a judge's reply, empty for no answer.

    Raises `EndpointError` where there is no report.
    """
    text = final_part(text) if isinstance(text, str) else ""
    if "<answer>" not in text or "</answer>" not in text:
        raise EndpointError("the reply has no <answer>...</answer>")
    report = text.rsplit("<answer>", 1)[1].split("</answer>", 1)[0].strip()
    if len(report) > _LONGEST_ANSWER:
        raise EndpointError(f"the report has {len(report)} characters")
    return "" if report in ("", _NO_ANSWER) else report
