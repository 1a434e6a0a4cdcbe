"""The rewards of knights and knaves: every person named with the right kind, in the last `<answer>`
block or box.
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
from adora_vl.rewards.thinking import THINK_TAGS
from adora_vl.utils.errors import UserError

# as in the `adora` preset
RIGHT = 1.0
COMPLETE = 0.1
NOTHING = 0.0
# Of Logic-RL and the half of ADORA for language models (`verl/utils/reward_score/kk.py` of its
# repository): 1 or -1 for the form, and 2 for the right answer, -1.5 for a wrong one, -2 for none.
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


def logic_rl_roles(text: str, names: Iterable[str]) -> dict[str, str] | None:
    """Who is what as the reference reads it.

    None where someone is missing, or where knights and knaves are not mentioned as often as there
    are people.
    """
    found: dict[str, str] = {}
    for name in names:
        said = re.search(rf"\b{re.escape(name)}\s+is\s+a\s+(knight|knave)\b", text, re.IGNORECASE)
        if said is None:
            return None
        found[name] = said[1].lower()
    mentions = text.lower().count("knight") + text.lower().count("knave")
    return found if mentions == len(found) else None


def has_logic_rl_form(text: str) -> bool:
    """Whether the tags of thinking and answer stand in the text once each and in order, whatever is
    around them.
    """
    places = [text.find(tag) for tag in _TAGS]
    return all(text.count(tag) == 1 for tag in _TAGS) and places == sorted(places)


def knights_verdict(response: str, reference: str) -> tuple[str, str | None]:
    """`correct`, `wrong` or `unparseable`, and the answer as it was read (`last_answer`).

    One that names other people, leaves someone out or contradicts itself is unparseable. Raises
    `UserError` for a reference answer without roles.
    """
    expected = _expected(reference)
    given = last_answer(response) or ""
    return _verdict(given, roles_in(given), expected)


def _verdict(
    given: str, roles: dict[str, str] | None, expected: dict[str, str]
) -> tuple[str, str | None]:
    if roles is None or roles.keys() != expected.keys():
        return "unparseable", None
    return ("correct" if roles == expected else "wrong"), given


def logic_rl_verdict(response: str, reference: str) -> tuple[str, str | None]:
    """As `knights_verdict`, by the reference's rules: no box, and `logic_rl_roles` reads the last
    `<answer>` block.
    """
    expected = _expected(reference)
    given = (answer_block(response) or "").partition(ANSWER_TAGS[1])[0].strip()
    return _verdict(given, logic_rl_roles(given, expected), expected)


def _expected(reference: str) -> dict[str, str]:
    expected = roles_in(reference)
    if not expected:
        raise UserError(
            f"answer {reference!r} names no knight and no knave: prepare the data with data_prep "
            "knights"
        )
    return expected


def knights_reward(completions: Sequence[Any] = (), **columns: Any) -> list[float]:
    """TRL's reward function: 1.0 for all roles right, 0.1 for a whole but wrong answer, 0.0 for
    none.
    """
    rewards = {"correct": RIGHT, "wrong": COMPLETE, "unparseable": NOTHING}
    return [rewards[verdict] for _, verdict in _verdicts(knights_verdict, completions, **columns)]


def knights_logic_rl_reward(completions: Sequence[Any] = (), **columns: Any) -> list[float]:
    """TRL's reward function with the rewards of Logic-RL and ADORA's repository: 3 for a right
    answer in the form that `has_logic_rl_form` checks, -0.5 for a wrong one, -1 for none in that
    form, -3 for another form. Answers are read as there (`logic_rl_roles`), which is stricter than
    `knights_reward`.
    """
    found = _verdicts(logic_rl_verdict, completions, **columns)
    return [LOGIC_RL[verdict] if has_logic_rl_form(text) else WRONG_FORM for text, verdict in found]


def _verdicts(
    judge: Callable[[str, str], tuple[str, str | None]],
    completions: Sequence[Any],
    answer: Sequence[str] | None = None,
    thinking_opened: Sequence[bool] | None = None,
    log_extra: Callable[[str, list[Any]], None] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **columns: Any,
) -> list[tuple[str, str]]:
    """Each text with the verdict on it, which goes into the record and the log."""
    if answer is None:
        raise UserError(
            "the dataset has no column 'answer': the reward needs the reference answer of every row"
        )
    texts = response_texts(completions, thinking_opened)
    graded = [judge(text, reference) for text, reference in zip(texts, answer, strict=True)]
    verdicts = [verdict for verdict, _ in graded]
    if log_extra:
        log_extra("verdict", verdicts)
        log_extra("extracted", [answered for _, answered in graded])
    if log_metric and graded:
        for name in ("correct", "wrong", "unparseable"):
            log_metric(f"grading/{name}", verdicts.count(name) / len(verdicts))
    return list(zip(texts, verdicts, strict=True))
