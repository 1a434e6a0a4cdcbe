"""From a dataset row to a conversation: the same words in training, warm start and evaluation."""

from __future__ import annotations

from typing import Any

PLACEHOLDER = "<image>"  # in a problem: here stands the next image; the same word as in `rows`

# The prompt of the ADORA reference's recipe (shadecloak/ADORA, VLM preset).
SYSTEM_PROMPT = r"Please reason step by step, and put your final answer within \boxed{}."

# What `adora_response_format` asks for, beside the box that the grader reads. The wording is that of R1's template.
RESPONSE_FORMATS = {
    "boxed": SYSTEM_PROMPT,
    "think": (
        "First think about the reasoning process, then give the answer. The reasoning process is enclosed within "
        r"<think> </think> tags, and the final answer after them stands within \boxed{}."
    ),
    "think_answer": (
        "First think about the reasoning process, then give the answer. The reasoning process and the answer are "
        r"enclosed within <think> </think> and <answer> </answer> tags, and the final answer stands within \boxed{}: "
        r"<think> reasoning process here </think><answer> \boxed{answer here} </answer>"
    ),
}

Message = dict[str, Any]


def asks_for_answer_tags(*prompts: str | None) -> bool:
    """Whether a system prompt or a template asks for `<answer> </answer>`, so that an answer may stand there alone."""
    return any("<answer>" in (prompt or "") for prompt in prompts)


def conversation(problem: str, system_prompt: str | None = SYSTEM_PROMPT) -> list[Message]:
    """Messages without images; TRL puts the row's images before the text of the first user message.

    For a problem without `<image>`: where it has some, `conversation_with_images` says where each image stands.
    """
    messages: list[Message] = [{"role": "user", "content": problem}]
    if system_prompt:
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def conversation_with_images(problem: str, n_images: int, system_prompt: str | None = SYSTEM_PROMPT) -> list[Message]:
    """The same conversation with one placeholder an image, as a processor's chat template expects it.

    Each `<image>` of the problem becomes one; in a problem without any, they stand before the text.
    """
    messages = conversation(problem, system_prompt)
    messages[-1] = {"role": "user", "content": _parts(problem, n_images)}
    return messages


def conversations(problems: list[str], n_images: list[int], system_prompt: str | None) -> list[list[Message]]:
    """The conversations of a whole data set, in one form, since a column of a table has one type.

    They are plain texts, unless an image has its place inside a problem.
    """
    if not any(PLACEHOLDER in problem for problem in problems):
        return [conversation(problem, system_prompt) for problem in problems]
    made = []
    for problem, count in zip(problems, n_images, strict=True):
        messages = conversation_with_images(problem, count, system_prompt)
        if system_prompt:
            messages[0] = {"role": "system", "content": [{"type": "text", "text": system_prompt}]}
        made.append(messages)
    return made


def _parts(problem: str, n_images: int) -> list[Message]:
    if PLACEHOLDER not in problem:
        return [*({"type": "image"} for _ in range(n_images)), {"type": "text", "text": problem}]
    assert problem.count(PLACEHOLDER) == n_images, "the rows are checked before"
    first, *rest = problem.split(PLACEHOLDER)
    parts: list[Message] = [{"type": "text", "text": first}]
    for text in rest:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    return [part for part in parts if part.get("text") != ""]
