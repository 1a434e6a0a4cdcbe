"""The rewards of knights and knaves: every person named with the right kind, in the last `<answer>` block or box.

Deterministic string work on bounded text: no parser that could hang, so no worker process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from adora_vl.errors import UserError
from adora_vl.rewards.boxed import ANSWER_TAGS, last_answer
from adora_vl.rewards.completion import completion_text
from adora_vl.rewards.thinking import THINK_TAGS

RIGHT, COMPLETE, NOTHING = 1.0, 0.1, 0.0  # the `adora` preset's steps
# Of Logic-RL and the half of ADORA for language models (`verl/utils/reward_score/kk.py` of its repository): 1 or -1 for
# the form, and 2 for the right answer, -1.5 for a wrong one, -2 for none.
LOGIC_RL = {"correct": 3.0, "wrong": -0.5, "unparseable": -1.0}
WRONG_FORM = -3.0
_TAGS = (*THINK_TAGS, *ANSWER_TAGS)
_ROLE = re.compile(r"\b([A-Za-z]+)\s+is\s+(?:a\s+)?((?i:knight|knave))\b")


def roles_in(text: str) -> dict[str, str] | None:
    """Who is said to be what; None where someone is said to be both."""
    found: dict[str, str] = {}
    for name, role in _ROLE.findall(text):
        if found.setdefault(name, role.lower()) != role.lower():
            return None
    return found


def has_logic_rl_form(text: str) -> bool:
    """Whether the tags of thinking and answer stand in the text once each and in order, whatever is around them."""
    places = [text.find(tag) for tag in _TAGS]
    return all(text.count(tag) == 1 for tag in _TAGS) and places == sorted(places)


def knights_verdict(response: str, gold: str) -> tuple[str, str | None]:
    """`correct`, `wrong` or `unparseable`, and the answer as it was read (`last_answer`).

    Wrong is an answer that names exactly the people of the gold with one kind each; whatever names others, leaves
    someone out or contradicts itself is no answer. Raises `UserError` for a gold without roles.
    """
    expected = roles_in(gold)
    if not expected:
        raise UserError(f"answer {gold!r} names nobody as a knight or a knave: prepare the data with data_prep knights")
    given = last_answer(response)
    roles = roles_in(given) if given is not None else None
    if roles is None or roles.keys() != expected.keys():
        return "unparseable", None
    return ("correct" if roles == expected else "wrong"), given


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
    texts = [completion_text(completion) for completion in completions]
    rewards = {"correct": RIGHT, "wrong": COMPLETE, "unparseable": NOTHING}
    return [rewards[verdict] for verdict in _verdicts(texts, answer, log_extra, log_metric)]


def knights_logic_rl_reward(
    prompts: Sequence[Any] | None = None,
    completions: Sequence[Any] = (),
    completion_ids: Sequence[Any] | None = None,
    *,
    answer: Sequence[str] | None = None,
    log_extra: Callable[[str, list[Any]], None] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **columns: Any,
) -> list[float]:
    """TRL's reward function with the rewards of Logic-RL and ADORA's repository: 3 for a right answer in the form that
    `has_logic_rl_form` checks, -0.5 for a wrong one, -1 for none in that form, -3 for another form.
    """
    texts = [completion_text(completion) for completion in completions]
    verdicts = _verdicts(texts, answer, log_extra, log_metric)
    return [
        LOGIC_RL[verdict] if has_logic_rl_form(text) else WRONG_FORM
        for text, verdict in zip(texts, verdicts, strict=True)
    ]


def _verdicts(
    texts: Sequence[str],
    answer: Sequence[str] | None,
    log_extra: Callable[[str, list[Any]], None] | None,
    log_metric: Callable[[str, float], None] | None,
) -> list[str]:
    """The verdict on each text, which goes into the record and the log."""
    if answer is None:
        raise UserError("the dataset has no column 'answer': the reward needs the gold of every row")
    graded = [knights_verdict(text, gold) for text, gold in zip(texts, answer, strict=True)]
    verdicts = [verdict for verdict, _ in graded]
    if log_extra:
        log_extra("verdict", verdicts)
        log_extra("extracted", [answered for _, answered in graded])
    if log_metric and graded:
        for name in ("correct", "wrong", "unparseable"):
            log_metric(f"grading/{name}", verdicts.count(name) / len(verdicts))
    return verdicts
