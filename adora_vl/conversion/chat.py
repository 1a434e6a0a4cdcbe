"""Rows of other trainers: the problem inside a conversation, and the instruction that they append
to each problem.
"""

import re
from collections.abc import Mapping
from typing import Any

from adora_vl.data.prompts import PLACEHOLDER

_ROLES = {"human": "user", "gpt": "assistant"}  # in the form of ShareGPT
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


def text_of_chat(value: Any) -> str | None:
    """The one question of a conversation, with `<image>` for each image part in it.

    None where there are several, or none, or it is no conversation. What a system message or an
    answer says is no part of the problem.
    """
    asked = _turns(value, "user")
    return _text_of_content(asked[0]) if len(asked) == 1 else None


def pictures_of_chat(value: Any) -> list[Any]:
    """What the image parts of the one question hold: a path, an address, `{"bytes": ...}`; None for
    a part that is only a mark. Empty where all of them are, since the pictures then stand in a
    column of their own.
    """
    asked = _turns(value, "user")
    parts = asked[0] if len(asked) == 1 and isinstance(asked[0], list) else []
    found = [
        picture_of(part)
        for part in parts
        if isinstance(part, Mapping) and part.get("type") in _PICTURES
    ]
    return found if any(picture is not None for picture in found) else []


def answer_of_chat(value: Any) -> str | None:
    """What the assistant answers to the one question of a conversation; None where it does not, or
    several times.
    """
    said = _turns(value, "assistant") if len(_turns(value, "user")) == 1 else []
    return _text_of_content(said[0]) if len(said) == 1 else None


_IMG = re.compile(
    r"<img>([^<>]+)</img>|<img\s[^<>]*?src\s*=\s*[\"']([^\"'<>]+)[\"'][^<>]*>", re.IGNORECASE
)


def pictures_of_text(text: str) -> tuple[str, list[Any]]:
    """A text with `<image>` for each `<img>PATH</img>`, as Qwen-VL has them, and the paths."""
    if "<img" not in text.lower():
        return text, []
    return _IMG.sub(PLACEHOLDER, text), [
        (match[1] or match[2]).strip() for match in _IMG.finditer(text)
    ]


def _turns(value: Any, of: str) -> list[Any]:
    """The contents of the messages of one role; none where it is no conversation."""
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        return []
    found = []
    for message in value:
        role = message.get("role", message.get("from"))
        if (_ROLES.get(role, role) if isinstance(role, str) else role) == of:
            found.append(message.get("content", message.get("value")))
    return found


def picture_of(part: Mapping[str, Any]) -> Any:
    """`{"image_url": {"url": X}}`, `{"image_url": X}`, `{"image": X}` and `{"url": X}` hold X."""
    for key in ("image_url", "image", "url", "path"):
        value = part.get(key)
        value = value["url"] if isinstance(value, Mapping) and "url" in value else value
        if value and not (
            isinstance(value, Mapping) and all(inner is None for inner in value.values())
        ):
            return value
    return None


def _text_of_content(content: Any) -> str | None:
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
    """The problem, and the instruction behind it on how to answer, `First output the thinking
    process in <think>...`.

    An instruction is the last sentences that all speak of how to answer, one of them of tags, a box
    or steps; it is empty where there is none, or nothing before it.
    """
    ends = [match.span() for match in _SENTENCE_ENDS.finditer(problem)]
    starts = [0, *(end for _, end in ends)]
    stops = [*(start for start, _ in ends), len(problem)]
    first = len(starts)
    while first and (
        not (last := problem[starts[first - 1] : stops[first - 1]]).strip()
        or _SAYS_HOW.search(last)
    ):
        first -= 1
    if first in (0, len(starts)):
        return problem, ""
    rest = problem[: starts[first]].rstrip()
    instruction = problem[starts[first] :].strip()
    return (rest, instruction) if rest and _SAYS_WHERE.search(instruction) else (problem, "")
