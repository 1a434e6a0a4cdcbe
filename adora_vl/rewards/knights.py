"""The rewards of knights and knaves puzzles.

An answer is right if it names every person with the right kind, in the last `<answer>` block or
box.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from adora_vl.rewards.completion import (
    ANSWER_TAGS,
    answer_block,
    last_answer,
    response_texts,
)
from adora_vl.rewards.grade import VERDICTS
from adora_vl.rewards.thinking import THINK_TAGS
from adora_vl.utils.errors import UserError

# The rewards of the preset `boxed_accuracy`.
RIGHT_REWARD = 1.0
COMPLETE_REWARD = 0.1
NO_ANSWER_REWARD = 0.0
# The rewards of Logic-RL and of ADORA's code for language models (`verl/utils/reward_score/kk.py`
# of its repository): 1 or -1 for the form, and 2 for the right answer, -1.5 for a wrong one, -2 for
# none.
LOGIC_RL_REWARD_BY_VERDICT = {"correct": 3.0, "wrong": -0.5, "unparseable": -1.0}
WRONG_FORM_REWARD = -3.0
_THINK_AND_ANSWER_TAGS = (*THINK_TAGS, *ANSWER_TAGS)
_ROLE_PATTERN = re.compile(r"\b([A-Za-z]+)\s+is\s+(?:a\s+)?((?i:knight|knave))\b")


def parse_roles(text: str) -> dict[str, str] | None:
    """Return the kind of each person that a text names; None where it calls somebody both."""
    roles: dict[str, str] = {}
    for name, role in _ROLE_PATTERN.findall(text):
        if roles.setdefault(name, role.lower()) != role.lower():
            return None
    return roles


def parse_logic_rl_roles(text: str, names: Iterable[str]) -> dict[str, str] | None:
    """Return the kind of each of `names` as the reference implementation reads it.

    It looks for `Ada is a knight`, in capitals or not. None where somebody is missing, or where
    knights and knaves are not mentioned exactly as often as there are people.
    """
    roles: dict[str, str] = {}
    for name in names:
        statement = re.search(
            rf"\b{re.escape(name)}\s+is\s+a\s+(knight|knave)\b", text, re.IGNORECASE
        )
        if statement is None:
            return None
        roles[name] = statement[1].lower()
    mentions = text.lower().count("knight") + text.lower().count("knave")
    return roles if mentions == len(roles) else None


def has_logic_rl_form(text: str) -> bool:
    """Return whether each tag of thinking and answer occurs exactly once and in order.

    It does not matter what stands around the tags.
    """
    occur_once = all(text.count(tag) == 1 for tag in _THINK_AND_ANSWER_TAGS)
    positions = [text.find(tag) for tag in _THINK_AND_ANSWER_TAGS]
    return occur_once and positions == sorted(positions)


def knights_verdict(response: str, reference: str) -> tuple[str, str | None]:
    """Return `correct`, `wrong` or `unparseable`, and the answer that was read (`last_answer`).

    An answer is wrong if it names exactly the people of the reference answer, with a wrong kind
    among them. An answer that names somebody else, leaves somebody out or contradicts itself is
    unparseable. Raises `UserError` for a reference answer without roles.
    """
    expected_roles = _parse_reference_roles(reference)
    answer = last_answer(response) or ""
    return _verdict_on_roles(answer, parse_roles(answer), expected_roles)


def _verdict_on_roles(
    answer: str, roles: dict[str, str] | None, expected_roles: dict[str, str]
) -> tuple[str, str | None]:
    """Return the verdict on an answer with these roles, and the answer if it is readable."""
    if roles is None or roles.keys() != expected_roles.keys():
        return "unparseable", None
    return ("correct" if roles == expected_roles else "wrong"), answer


def logic_rl_verdict(response: str, reference: str) -> tuple[str, str | None]:
    """Return the verdict of `knights_verdict` by the reference implementation's rules.

    A box does not count, and `parse_logic_rl_roles` reads the last `<answer>` block.
    """
    expected_roles = _parse_reference_roles(reference)
    # `answer_block` includes the rest of the response where a box stands in it. The reference
    # implementation knows no boxes: only what stands before the closing tag is the answer.
    block, _, _ = (answer_block(response) or "").partition(ANSWER_TAGS[1])
    answer = block.strip()
    return _verdict_on_roles(answer, parse_logic_rl_roles(answer, expected_roles), expected_roles)


def _parse_reference_roles(reference: str) -> dict[str, str]:
    """Return the roles in a reference answer. Raises `UserError` where it has none."""
    roles = parse_roles(reference)
    if not roles:
        raise UserError(
            f"answer {reference!r} names no knight and no knave: prepare the data with data_prep "
            "knights"
        )
    return roles


def knights_reward(completions: Sequence[Any] = (), **columns: Any) -> list[float]:
    """Return 1 if all roles are right, 0.1 for a complete but wrong answer, else 0.

    It is a reward function with TRL's signature.
    """
    rewards = {"correct": RIGHT_REWARD, "wrong": COMPLETE_REWARD, "unparseable": NO_ANSWER_REWARD}
    return [
        rewards[verdict]
        for _, verdict in _grade_and_log_responses(knights_verdict, completions, **columns)
    ]


def knights_logic_rl_reward(completions: Sequence[Any] = (), **columns: Any) -> list[float]:
    """Return the reward `knights_logic_rl`, with the values of Logic-RL and ADORA's repository.

    It gives 3 for a right answer in the form that `has_logic_rl_form` checks, -0.5 for a wrong
    answer and -1 for no answer in that form, and -3 for any other form. Answers are read by
    `parse_logic_rl_roles`, which is stricter than `knights_reward`. It is a reward function in
    TRL's form.
    """
    verdicts = _grade_and_log_responses(logic_rl_verdict, completions, **columns)
    return [
        LOGIC_RL_REWARD_BY_VERDICT[verdict] if has_logic_rl_form(text) else WRONG_FORM_REWARD
        for text, verdict in verdicts
    ]


def _grade_and_log_responses(
    grade_response: Callable[[str, str], tuple[str, str | None]],
    completions: Sequence[Any],
    answer: Sequence[str] | None = None,
    thinking_opened: Sequence[bool] | None = None,
    log_extra: Callable[[str, list[Any]], None] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **columns: Any,
) -> list[tuple[str, str]]:
    """Return each response with its verdict; the verdicts also go into the record and the log.

    `grade_response` returns the verdict on a response by its reference answer, and the answer that
    it has read. `thinking_opened` says whether each prompt ends in `<think>`. The other arguments
    are those that TRL passes to a reward function. Raises `UserError` where the data set has no
    column `answer`.
    """
    if answer is None:
        raise UserError(
            "the dataset has no column 'answer': the reward needs the reference answer of every row"
        )
    texts = response_texts(completions, thinking_opened)
    results = [
        grade_response(text, reference) for text, reference in zip(texts, answer, strict=True)
    ]
    verdicts = [verdict for verdict, _ in results]
    if log_extra:
        log_extra("verdict", verdicts)
        log_extra("extracted", [extracted for _, extracted in results])
    if log_metric and results:
        for name in VERDICTS:
            log_metric(f"grading/{name}", verdicts.count(name) / len(verdicts))
    return list(zip(texts, verdicts, strict=True))
