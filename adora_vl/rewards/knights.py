"""The reward of knights and knaves: every person named with the right kind, in the last box.

Deterministic string work on bounded text: no parser that could hang, so no worker process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from adora_vl.errors import UserError
from adora_vl.rewards.boxed import last_boxed
from adora_vl.rewards.completion import completion_text

RIGHT, COMPLETE, NOTHING = 1.0, 0.1, 0.0  # the `adora` preset's steps
_ROLE = re.compile(r"\b([A-Za-z]+)\s+is\s+(?:a\s+)?((?i:knight|knave))\b")


def roles_in(text: str) -> dict[str, str] | None:
    """Who is said to be what; None where someone is said to be both."""
    found: dict[str, str] = {}
    for name, role in _ROLE.findall(text):
        if found.setdefault(name, role.lower()) != role.lower():
            return None
    return found


def knights_verdict(response: str, gold: str) -> tuple[str, str | None]:
    """`correct`, `wrong` or `unparseable`, and the last box as it was read.

    Wrong is a box that names exactly the people of the gold with one kind each; whatever names others, leaves someone
    out or contradicts itself has no answer in it. Raises `UserError` for a gold without roles.
    """
    expected = roles_in(gold)
    if not expected:
        raise UserError(f"answer {gold!r} names nobody as a knight or a knave: prepare the data with data_prep knights")
    box = last_boxed(response)
    roles = roles_in(box) if box is not None else None
    if roles is None or roles.keys() != expected.keys():
        return "unparseable", None
    return ("correct" if roles == expected else "wrong"), box


def knights_reward(
    prompts: Sequence[Any] | None = None,
    completions: Sequence[Any] = (),
    completion_ids: Sequence[Any] | None = None,
    *,
    answer: Sequence[str] | None = None,
    log_extra: Callable[[str, list[Any]], None] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **columns: Any,
) -> list[float]:
    """TRL's reward function: 1.0 for all roles right, 0.1 for a whole but wrong answer, 0.0 for none."""
    if answer is None:
        raise UserError("the dataset has no column 'answer': the reward needs the gold of every row")
    texts = [completion_text(completion) for completion in completions]
    verdicts = [knights_verdict(text, gold) for text, gold in zip(texts, answer, strict=True)]
    if log_extra:
        log_extra("verdict", [verdict for verdict, _ in verdicts])
        log_extra("extracted", [box for _, box in verdicts])
    if log_metric and verdicts:
        for name in ("correct", "wrong", "unparseable"):
            log_metric(f"grading/{name}", sum(verdict == name for verdict, _ in verdicts) / len(verdicts))
    rewards = {"correct": RIGHT, "wrong": COMPLETE, "unparseable": NOTHING}
    return [rewards[verdict] for verdict, _ in verdicts]
