"""A language model behind an OpenAI-compatible endpoint reads the answer out of a response. Off by default.

A call that fails is counted as a failure. It is never taken for an answer, and never stored. Answers are kept on disk,
so that scoring again asks nothing twice and gives the same figures.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from adora_vl.commands import amount
from adora_vl.endpoint import Client, Endpoint, EndpointError, check_url
from adora_vl.errors import UserError
from adora_vl.files import written_to
from eval.extraction.rules import quick_extract
from eval.extraction.text import MAX_CHARS, Extraction
from eval.predictions import IMAGE_FAILED, Prediction

JUDGE_FAILED = "judge_failed"
KEY_VARIABLE = "ADORA_VL_JUDGE_KEY"
_NO_ANSWER = "NONE"
_LONGEST_ANSWER = 200  # characters; an extraction that is longer is an essay, not an answer
_INSTRUCTION = (
    "You are given a question and a reply to it. Report the final answer that the reply commits to, and nothing else: "
    "no explanation, no judgement of whether it is right, no repair of its mistakes. {form} If the reply commits to no "
    f"answer, report {_NO_ANSWER}. Put the report between <answer> and </answer>."
)
_FORMS = {
    "multi_choice": "Report the letter of the option that the reply picks.",
    "integer": "Report it as an integer in digits.",
    "float": "Report it as a decimal number in digits.",
    "list": "Report it as a Python list.",
}


def judge_of(options: Namespace) -> Client:
    """The judge that the command line names. Raises `UserError` where the address or the model is missing."""
    for name in ("judge_url", "judge_model"):
        if not getattr(options, name):
            raise UserError(f"--{name.replace('_', '-')} is missing; --extraction judge needs an endpoint and a model")
    endpoint = Endpoint(
        check_url("judge_url", options.judge_url),
        options.judge_model,
        KEY_VARIABLE,
        options.judge_timeout,
        options.judge_attempts,
        options.judge_wait,
    )
    named = options.verb == "score" and options.output.suffix == ".json" and not options.output.is_dir()
    beside = options.output.parent if named else options.output
    cache: Path = options.judge_cache or beside / "judge_cache.jsonl"
    with written_to("judge_cache", cache):
        cache.parent.mkdir(parents=True, exist_ok=True)
    return Client(endpoint, cache=cache, budget=options.judge_budget)


def judged(rows: Sequence[Prediction], judge: Client) -> list[Extraction]:
    """One extraction per row, in order. The judge is asked once per row, if the official code would ask one."""
    with tqdm(total=len(rows), unit="row", desc="judge", disable=None) as bar:

        def one(row: Prediction) -> Extraction:
            found = _extraction(row, judge)
            bar.update()
            return found

        extractions: list[Extraction] = judge.each(one, rows)
    failures = [extraction.text for extraction in extractions if extraction.how == JUDGE_FAILED]
    if failures:
        print(
            f"warning: the judge failed on {amount(len(failures), 'row')}, the first time: {failures[0]}",
            file=sys.stderr,
        )
    return [Extraction(None, JUDGE_FAILED) if found.how == JUDGE_FAILED else found for found in extractions]


def _extraction(row: Prediction, judge: Client) -> Extraction:
    """The judge's extraction of one row, from the cache if it was asked before."""
    if row.get("finish_reason") == IMAGE_FAILED:
        return Extraction(None, IMAGE_FAILED)
    quick = quick_extract(row)
    if quick is not None:
        return quick
    messages = messages_for(row)
    known = judge.cached(messages)
    if known is not None:
        return Extraction(known, "judge_cached")
    try:
        return Extraction(judge.ask(messages, reported, temperature=0, max_tokens=256), "judge")
    except EndpointError as error:
        return Extraction(str(error), JUDGE_FAILED)


def messages_for(row: Prediction) -> list[dict[str, str]]:
    """The conversation with the judge about one row; the gold is not in it."""
    kind = "multi_choice" if row["question_type"] == "multi_choice" else row["answer_type"]
    form = _FORMS.get(kind, "Report it as briefly as it can be said.")
    lines = [f"<question>\n{row['question']}"]
    if row["question_type"] == "multi_choice":
        lines += [f"({chr(ord('A') + i)}) {choice}" for i, choice in enumerate(row["choices"])]
    lines.append(f"</question>\n<reply>\n{row['response'][-MAX_CHARS:]}\n</reply>")
    return [
        {"role": "system", "content": _INSTRUCTION.format(form=form)},
        {"role": "user", "content": "\n".join(lines)},
    ]


def reported(text: Any) -> str:
    """The report in a judge's reply, empty where it says that there is no answer.

    Raises `EndpointError` where there is no report.
    """
    if not isinstance(text, str) or "<answer>" not in text or "</answer>" not in text:
        raise EndpointError("the reply has no <answer>...</answer>")
    report = text.rsplit("<answer>", 1)[1].split("</answer>", 1)[0].strip()
    if len(report) > _LONGEST_ANSWER:
        raise EndpointError(f"the report has {len(report)} characters")
    return "" if report in ("", _NO_ANSWER) else report
