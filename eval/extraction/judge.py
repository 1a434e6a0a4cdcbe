"""A language model behind an OpenAI-compatible endpoint reads the answer out of a response. Off by default.

A call that fails is counted as a failure. It is never taken for an answer, and never stored. Answers are kept on disk,
so that scoring again asks nothing twice and gives the same figures.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from adora_vl.commands import amount
from adora_vl.errors import UserError
from adora_vl.files import written_to
from eval.extraction.rules import quick_extract
from eval.extraction.text import MAX_CHARS, Extraction
from eval.predictions import IMAGE_FAILED, Prediction

JUDGE_FAILED = "judge_failed"
KEY_VARIABLE = "ADORA_VL_JUDGE_KEY"
_NO_ANSWER = "NONE"
_LONGEST_ANSWER = 200  # characters; an extraction that is longer is an essay, not an answer
_RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
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


@dataclass(frozen=True)
class Judge:
    """The address of the judge, and how long to wait for it. `wait_s` doubles from one attempt to the next."""

    url: str
    model: str
    cache: Path
    timeout_s: float = 60.0
    attempts: int = 4
    wait_s: float = 1.0
    workers: int = 8


class JudgeError(Exception):
    """One call gave no usable answer; `str` says why. `again`: whether another attempt may succeed."""

    def __init__(self, reason: str, *, again: bool = True) -> None:
        super().__init__(reason)
        self.again = again


def judge_of(options: Namespace) -> Judge:
    """The judge that the command line names. Raises `UserError` where the address or the model is missing."""
    for name in ("judge_url", "judge_model"):
        if not getattr(options, name):
            raise UserError(f"--{name.replace('_', '-')} is missing; --extraction judge needs an endpoint and a model")
    if not options.judge_url.startswith(("http://", "https://")):
        raise UserError(
            f"judge_url: {options.judge_url!r} is no http address; give one such as http://localhost:8000/v1"
        )
    named = options.verb == "score" and options.output.suffix == ".json" and not options.output.is_dir()
    beside = options.output.parent if named else options.output
    return Judge(
        options.judge_url,
        options.judge_model,
        options.judge_cache or beside / "judge_cache.jsonl",
        options.judge_timeout,
        options.judge_attempts,
        options.judge_wait,
    )


def judged(rows: Sequence[Prediction], judge: Judge) -> list[Extraction]:
    """One extraction per row, in order. The judge is asked once per row, if the official code would ask one."""
    cache = _Cache(judge)
    with ThreadPoolExecutor(judge.workers) as pool:
        found = pool.map(lambda row: _extraction(row, judge, cache), rows)
        extractions = list(tqdm(found, total=len(rows), unit="row", desc="judge", disable=None))
    failures = [extraction.text for extraction in extractions if extraction.how == JUDGE_FAILED]
    if failures:
        print(
            f"warning: the judge failed on {amount(len(failures), 'row')}, the first time: {failures[0]}",
            file=sys.stderr,
        )
    return [Extraction(None, JUDGE_FAILED) if found.how == JUDGE_FAILED else found for found in extractions]


def _extraction(row: Prediction, judge: Judge, cache: _Cache) -> Extraction:
    """The judge's extraction of one row, from the cache if it was asked before."""
    if row.get("finish_reason") == IMAGE_FAILED:
        return Extraction(None, IMAGE_FAILED)
    quick = quick_extract(row)
    if quick is not None:
        return quick
    messages = messages_for(row)
    key = cache.key(messages)
    answer = cache.get(key)
    if answer is not None:
        return Extraction(answer, "judge_cached")
    try:
        answer = _ask_patiently(judge, messages)
    except JudgeError as error:
        return Extraction(str(error), JUDGE_FAILED)
    cache.put(key, answer)
    return Extraction(answer, "judge")


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


def _ask_patiently(judge: Judge, messages: list[dict[str, str]]) -> str:
    """Ask until there is an answer, or until the attempts are used up. Raises `JudgeError`."""
    wait = judge.wait_s
    for attempt in range(1, judge.attempts + 1):
        try:
            return _ask(judge, messages)
        except JudgeError as error:
            if attempt == judge.attempts or not error.again:
                raise JudgeError(f"{error} (attempt {attempt})") from error
        time.sleep(wait)
        wait *= 2
    raise AssertionError("at least one attempt")


def _ask(judge: Judge, messages: list[dict[str, str]]) -> str:
    """One call. Raises `JudgeError` for whatever is not a usable answer."""
    body = json.dumps({"model": judge.model, "messages": messages, "temperature": 0, "max_tokens": 256}).encode()
    headers = {"Content-Type": "application/json"}
    if os.environ.get(KEY_VARIABLE):
        headers["Authorization"] = f"Bearer {os.environ[KEY_VARIABLE]}"
    request = urllib.request.Request(f"{judge.url.rstrip('/')}/chat/completions", body, headers)  # noqa: S310 checked
    try:
        with urllib.request.urlopen(request, timeout=judge.timeout_s) as reply:  # noqa: S310 http(s), checked
            content = reply.read()
    except urllib.error.HTTPError as error:
        raise JudgeError(f"HTTP {error.code}", again=error.code in _RETRIED) from error
    except (OSError, http.client.HTTPException) as error:  # no connection, a time-out at any stage, no HTTP
        raise JudgeError(f"{type(error).__name__}: {error}") from error
    try:
        text = json.loads(content)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError) as error:
        raise JudgeError("the reply is not a chat completion") from error
    return reported(text)


def reported(text: Any) -> str:
    """The report in a judge's reply, empty where it says that there is no answer. Raises `JudgeError` without one."""
    if not isinstance(text, str) or "<answer>" not in text or "</answer>" not in text:
        raise JudgeError("the reply has no <answer>...</answer>")
    report = text.rsplit("<answer>", 1)[1].split("</answer>", 1)[0].strip()
    if len(report) > _LONGEST_ANSWER:
        raise JudgeError(f"the report has {len(report)} characters")
    return "" if report in ("", _NO_ANSWER) else report


class _Cache:
    """Answers by model and conversation, one per JSON line. A line that cannot be read is ignored."""

    def __init__(self, judge: Judge) -> None:
        self._judge, self._answers = judge, dict[str, str]()
        with written_to("judge_cache", judge.cache):
            judge.cache.parent.mkdir(parents=True, exist_ok=True)
            content = judge.cache.read_text(encoding="utf-8", errors="replace") if judge.cache.exists() else ""
        lines = content.splitlines()
        for line in lines:
            try:
                entry = json.loads(line)
                self._answers[str(entry["key"])] = str(entry["answer"])
            except (ValueError, LookupError, TypeError):
                continue

    def key(self, messages: list[dict[str, str]]) -> str:
        return hashlib.sha256(json.dumps([self._judge.model, messages]).encode()).hexdigest()

    def get(self, key: str) -> str | None:
        return self._answers.get(key)

    def put(self, key: str, answer: str) -> None:
        self._answers[key] = answer
        with (
            written_to("judge_cache", self._judge.cache),
            self._judge.cache.open("a", encoding="utf-8") as file,
        ):  # one write of a short line: whole, whichever thread is first
            file.write(json.dumps({"key": key, "answer": answer}) + "\n")
