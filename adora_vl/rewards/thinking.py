"""Rewards for the form of an answer that thinks first; `adora_response_format` asks for it.

String search alone, in one pass: a completion of any length costs microseconds, and no pattern can be made to hang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adora_vl.rewards.boxed import ANSWER_TAGS
from adora_vl.rewards.completion import completion_text

THINK_TAGS = ("<think>", "</think>")


def is_think(text: str) -> bool:
    """`<think> ... </think> ...`: one block with something in it, first, and something after it."""
    rest = _after_block(text.strip(), THINK_TAGS)
    return rest is not None and rest != "" and not _has(rest, (*THINK_TAGS, *ANSWER_TAGS))


def is_think_answer(text: str) -> bool:
    """`<think> ... </think> <answer> ... </answer>`: both blocks once, with something in them, and nothing else."""
    rest = _after_block(text.strip(), THINK_TAGS)
    return rest is not None and _after_block(rest, ANSWER_TAGS) == ""


def _after_block(text: str, tags: tuple[str, str]) -> str | None:
    """What follows the block that `text` begins with, stripped; None where there is no such block, or an empty one."""
    begin, end = tags
    inside, found, rest = text.removeprefix(begin).partition(end)
    if not text.startswith(begin) or not found or not inside.strip() or _has(inside, (*THINK_TAGS, *ANSWER_TAGS)):
        return None
    return rest.strip()


def _has(text: str, tags: Sequence[str]) -> bool:
    return any(tag in text for tag in tags)


def think_format_reward(completions: Sequence[Any] = (), **columns: Any) -> list[float]:
    """TRL's reward function: 1.0 where the thinking stands in its block before the answer, else 0.0."""
    return [float(is_think(completion_text(completion))) for completion in completions]


def think_answer_format_reward(completions: Sequence[Any] = (), **columns: Any) -> list[float]:
    """TRL's reward function: 1.0 where thinking and answer stand in their blocks and nothing else, else 0.0."""
    return [float(is_think_answer(completion_text(completion))) for completion in completions]
