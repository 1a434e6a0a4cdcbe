"""The format reward of NoisyRollout's recipe: the thinking in its block, and then a box."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def think_and_box(completions: Sequence[Any], **columns: Any) -> list[float]:
    """1.0 for an answer that begins with `<think>` and has a box that is closed after `</think>`,
    else 0.0.
    """
    return [float(_has_form(completion[-1]["content"])) for completion in completions]


def _has_form(text: str) -> bool:
    _, thought, rest = text.partition("</think>")
    _, boxed, inside = rest.partition("\\boxed{")
    return text.startswith("<think>") and bool(thought and boxed) and "}" in inside
