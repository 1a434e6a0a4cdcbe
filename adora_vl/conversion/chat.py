"""Reads rows of other trainers, whose problem is a conversation, or ends with an instruction."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from adora_vl.data.prompts import IMAGE_PLACEHOLDER

_ROLE_BY_SHAREGPT_NAME = {
    "human": "user",
    "gpt": "assistant",
}  # the roles of ShareGPT in OpenAI's words
_PICTURE_PART_TYPES = ("image", "image_url")
_SENTENCE_ENDS_PATTERN = re.compile(r"(?<=[.?!:])\s+|\n+")
# Each of the sentences of an instruction has one of these words, and one of them a format.
_ANSWER_INSTRUCTION_PATTERN = re.compile(
    r"</?think>|</?answer>|\\boxed|####|step[ -]by[ -]step|reasoning process|thinking "
    r"process|internal monologue"
    r"|final answer|thinks? (?:first|about)",
    re.IGNORECASE,
)
_FORMAT_INSTRUCTION_PATTERN = re.compile(
    r"</?think>|</?answer>|\\boxed\s*\{\s*\}|####|step[ -]by[ -]step", re.IGNORECASE
)


def question_of_chat(value: object) -> str | None:
    """Return the text of the only question in a conversation, with `<image>` for each image in it.

    For example, [{"role": "user", "content": "Find x."}, {"role": "assistant", "content": "5"}]
    gives `Find x.` Returns None where there are several questions, or none, or no conversation.
    """
    questions = _contents_of_role(value, "user")
    return _content_as_text(questions[0]) if len(questions) == 1 else None


def pictures_of_chat(value: object) -> list[Any]:
    """Return the pictures in the parts of a conversation's only question.

    Each is a path, an address, or a struct `{"bytes": ...}`. The part `{"type": "image"}` has no
    picture and gives None: it marks the place of an image. If no part has a picture, the list is
    empty, and the pictures stand in a column of their own.
    """
    questions = _contents_of_role(value, "user")
    has_parts = len(questions) == 1 and isinstance(questions[0], list)
    if not has_parts:
        return []
    pictures = []
    for part in questions[0]:
        if isinstance(part, Mapping) and part.get("type") in _PICTURE_PART_TYPES:
            pictures.append(picture_in_part(part))
    are_only_marks = all(picture is None for picture in pictures)
    return [] if are_only_marks else pictures


def answer_of_chat(value: object) -> str | None:
    """Return the answer of the assistant in a conversation with one question.

    Returns None where there are several questions or answers, or none.
    """
    if len(_contents_of_role(value, "user")) != 1:
        return None
    answers = _contents_of_role(value, "assistant")
    return _content_as_text(answers[0]) if len(answers) == 1 else None


_IMG_TAG_PATTERN = re.compile(
    r"<img>([^<>]+)</img>|<img\s[^<>]*?src\s*=\s*[\"']([^\"'<>]+)[\"'][^<>]*>", re.IGNORECASE
)


class TextAndPaths(NamedTuple):
    """A text with `<image>` at the place of each picture, and the paths of the pictures."""

    text: str
    paths: list[Any]


def replace_img_tags(text: str) -> TextAndPaths:
    """Return a text with `<image>` in place of each `<img>PATH</img>`, and the paths.

    Qwen-VL writes images so. `<img src="PATH">` is replaced too.
    """
    if "<img" not in text.lower():  # most texts, which the expression below would search slowly
        return TextAndPaths(text, paths=[])
    # The path is in the first group for `<img>PATH</img>`, in the second for `<img src="PATH">`.
    paths = [(match[1] or match[2]).strip() for match in _IMG_TAG_PATTERN.finditer(text)]
    return TextAndPaths(_IMG_TAG_PATTERN.sub(IMAGE_PLACEHOLDER, text), paths)


def _contents_of_role(value: object, wanted_role: str) -> list[Any]:
    """Return the contents of a conversation's messages of one role; [] for any other value.

    A conversation is a list of messages in the spelling of OpenAI, `{"role": "user", "content":
    "Find x."}`, or of ShareGPT, `{"from": "human", "value": "Find x."}`.
    """
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        return []
    contents = []
    for message in value:
        role = message.get("role", message.get("from"))
        if isinstance(role, str):
            role = _ROLE_BY_SHAREGPT_NAME.get(role, role)
        if role == wanted_role:
            contents.append(message.get("content", message.get("value")))
    return contents


def picture_in_part(part: Mapping[str, Any]) -> Any:
    """Return the picture X that an image part holds, or None.

    The part is `{"image_url": {"url": X}}`, or has X under `image_url`, `image`, `url` or `path`.
    """
    for key in ("image_url", "image", "url", "path"):
        value = part.get(key)
        if isinstance(value, Mapping) and "url" in value:
            value = value["url"]
        # Parquet fills the keys that a row lacks with None.
        is_empty_struct = isinstance(value, Mapping) and all(
            inner is None for inner in value.values()
        )
        if value and not is_empty_struct:
            return value
    return None


def _content_as_text(content: object) -> str | None:
    """Return the text of a message's content, with `<image>` for each image part.

    Returns None for a content that is neither a text nor a list of such parts.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        return None
    pieces = []
    for part in content:
        if part.get("type") in _PICTURE_PART_TYPES:
            pieces.append(IMAGE_PLACEHOLDER)
        elif isinstance(part.get("text"), str):
            pieces.append(part["text"])
        else:
            return None
    return "".join(pieces)


class ProblemAndInstruction(NamedTuple):
    """A problem, and the instruction on how to answer that stood at its end."""

    problem: str
    instruction: str  # empty where there was none


def split_off_instruction(problem: str) -> ProblemAndInstruction:
    """Split a problem from the instruction on how to answer at its end.

    The text is cut before the last sentences that all say how to answer. At least one of them has
    to name tags, a box or steps. For example, `Find x. Think step by step. Put the answer in
    \\boxed{}.` has the problem `Find x.`, and the rest is the instruction. The instruction is empty
    where there are no such sentences, or where nothing stands before them.
    """
    no_instruction = ProblemAndInstruction(problem, instruction="")
    sentence_starts = [0, *(gap.end() for gap in _SENTENCE_ENDS_PATTERN.finditer(problem))]
    # Go backwards from the last sentence, as long as each one says how to answer.
    instruction_start = len(problem)
    for start in reversed(sentence_starts):
        sentence = problem[start:instruction_start]
        if sentence.strip() and not _ANSWER_INSTRUCTION_PATTERN.search(sentence):
            break
        instruction_start = start
    question = problem[:instruction_start].rstrip()
    instruction = problem[instruction_start:].strip()
    if not question or not _FORMAT_INSTRUCTION_PATTERN.search(instruction):
        return no_instruction
    return ProblemAndInstruction(question, instruction)
