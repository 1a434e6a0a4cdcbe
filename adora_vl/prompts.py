"""From a dataset row to a conversation: the same words in training, warm start and evaluation."""

from __future__ import annotations

from typing import Any

# The prompt of the ADORA reference's recipe (shadecloak/ADORA, VLM preset).
SYSTEM_PROMPT = r"Please reason step by step, and put your final answer within \boxed{}."

Message = dict[str, Any]


def conversation(problem: str, system_prompt: str | None = SYSTEM_PROMPT) -> list[Message]:
    """Messages without images; TRL puts the row's images before the text of the first user message."""
    messages: list[Message] = [{"role": "user", "content": problem}]
    if system_prompt:
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def conversation_with_images(problem: str, n_images: int, system_prompt: str | None = SYSTEM_PROMPT) -> list[Message]:
    """The same conversation with one placeholder an image, as a processor's chat template expects it."""
    messages = conversation(problem, system_prompt)
    parts: list[Message] = [{"type": "image"} for _ in range(n_images)]
    messages[-1] = {"role": "user", "content": [*parts, {"type": "text", "text": problem}]}
    return messages
