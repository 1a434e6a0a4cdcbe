"""Reads rows of other trainers, whose problem is a conversation, or ends with an instruction."""

import re
from collections.abc import Mapping
from typing import Any

from adora_vl.data.prompts import PLACEHOLDER

_ROLES = {"human": "user", "gpt": "assistant"}  # the roles of ShareGPT in OpenAI's words
_PICTURES = ("image", "image_url")
_SENTENCE_ENDS = re.compile(r"(?<=[.?!:])\s+|\n+")
_SAYS_HOW = re.compile(
    r"</?think>|</?answer>|\\boxed|####|step[ -]by[ -]step|reasoning process|thinking "
    r"process|internal monologue"
    r"|final answer|thinks? (?:first|about)",
    re.IGNORECASE,
)
_SAYS_WHERE = re.compile(
    r"</?think>|</?answer>|\\boxed\s*\{\s*\}|####|step[ -]by[ -]step", re.IGNORECASE
)


def text_of_chat(value: object) -> str | None:
    """Return the one question of a conversation, with `<image>` for each image part in it.

    None is returned where there are several questions, or none, or no conversation at all. System
    messages and answers are no part of the problem.
    """
    questions = _contents(value, "user")
    return _text_of_content(questions[0]) if len(questions) == 1 else None


def pictures_of_chat(value: object) -> list[Any]:
    """Return what the image parts of the one question hold: a path, an address, `{"bytes": ...}`.

    A part that only marks the place of an image gives None. Where all parts are such marks the list
    is empty, since the pictures then stand in a column of their own.
    """
    questions = _contents(value, "user")
    parts = questions[0] if len(questions) == 1 and isinstance(questions[0], list) else []
    pictures = [
        picture_of(part)
        for part in parts
        if isinstance(part, Mapping) and part.get("type") in _PICTURES
    ]
    return pictures if any(picture is not None for picture in pictures) else []


def answer_of_chat(value: object) -> str | None:
    """Return the assistant's answer to the one question of a conversation.

    None is returned where there are several questions or answers, or none.
    """
    if len(_contents(value, "user")) != 1:
        return None
    answers = _contents(value, "assistant")
    return _text_of_content(answers[0]) if len(answers) == 1 else None


_IMG = re.compile(
    r"<img>([^<>]+)</img>|<img\s[^<>]*?src\s*=\s*[\"']([^\"'<>]+)[\"'][^<>]*>", re.IGNORECASE
)


def pictures_of_text(text: str) -> tuple[str, list[Any]]:
    """Replace each `<img>PATH</img>` (the form of Qwen-VL) by `<image>`, and return the paths too."""
    if "<img" not in text.lower():
        return text, []
    return _IMG.sub(PLACEHOLDER, text), [
        (match[1] or match[2]).strip() for match in _IMG.finditer(text)
    ]


def _contents(value: object, wanted_role: str) -> list[Any]:
    """Return the contents of the messages of one role; none where the value is no conversation."""
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        return []
    contents = []
    for message in value:
        role = message.get("role", message.get("from"))
        if isinstance(role, str):
            role = _ROLES.get(role, role)
        if role == wanted_role:
            contents.append(message.get("content", message.get("value")))
    return contents


def picture_of(part: Mapping[str, Any]) -> Any:
    """Return the picture X that an image part holds, or None.

    The part is `{"image_url": {"url": X}}`, or has X under `image_url`, `image`, `url` or `path`.
    """
    for key in ("image_url", "image", "url", "path"):
        value = part.get(key)
        value = value["url"] if isinstance(value, Mapping) and "url" in value else value
        is_empty_struct = isinstance(value, Mapping) and all(
            inner is None for inner in value.values()
        )
        if value and not is_empty_struct:
            return value
    return None


def _text_of_content(content: object) -> str | None:
    """Return the text of a message's content, with `<image>` for each image part.

    None is returned for a content that is neither a text nor a list of such parts.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        return None
    pieces = []
    for part in content:
        if part.get("type") in _PICTURES:
            pieces.append(PLACEHOLDER)
        elif isinstance(part.get("text"), str):
            pieces.append(part["text"])
        else:
            return None
    return "".join(pieces)


def without_instruction(problem: str) -> tuple[str, str]:
    """Split a problem from the instruction at its end (`First output the thinking process in ...`).

    The instruction is the last sentences that all speak of how to answer, at least one of them of
    tags, a box or steps. It is empty where there is none, or where nothing stands before it.
    """
    gaps = [match.span() for match in _SENTENCE_ENDS.finditer(problem)]
    starts = [0, *(gap_end for _, gap_end in gaps)]
    ends = [*(gap_start for gap_start, _ in gaps), len(problem)]
    begin = len(starts)  # the index of the instruction's first sentence
    while begin:
        sentence = problem[starts[begin - 1] : ends[begin - 1]]
        if sentence.strip() and not _SAYS_HOW.search(sentence):
            break
        begin -= 1
    if begin in (0, len(starts)):
        return problem, ""
    question = problem[: starts[begin]].rstrip()
    instruction = problem[starts[begin] :].strip()
    if not question or not _SAYS_WHERE.search(instruction):
        return problem, ""
    return question, instruction
