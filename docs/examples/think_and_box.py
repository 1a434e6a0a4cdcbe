"""The format reward of NoisyRollout's recipe: the thinking in its block, and then a box."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def think_and_box(
    completions: Sequence[Any], thinking_opened: Sequence[bool] | None = None, **columns: Any
) -> list[float]:
    """1.0 for an answer that begins with `<think>` and has a box that is closed after `</think>`,
    else 0.0.

    `thinking_opened`: whether the prompt of each answer has written `<think>` already.
    """
    opened = [False] * len(completions) if thinking_opened is None else thinking_opened
    rewards: list[float] = []
    for completion, is_open in zip(completions, opened, strict=True):
        text = completion[-1]["content"]
        rewards.append(float(_has_form(f"<think>{text}" if is_open else text)))
    return rewards


def _has_form(text: str) -> bool:
    _, thought, rest = text.partition("</think>")
    _, boxed, inside = rest.partition("\\boxed{")
    return text.startswith("<think>") and bool(thought and boxed) and "}" in inside
