"""Whether the grader can tell right from wrong on this dataset, and whether the reward says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from adora_vl.doctor.result import Check, failed, passed
from adora_vl.rewards.grade import grade, verify_gold

WRONG = "918273.645"  # no problem's answer
Row = Mapping[str, Any]


def _boxed(answer: str) -> str:
    return rf"The answer is \boxed{{{answer}}}."


def _options(row: Row) -> list[str] | None:
    return list(row["choices"]) if row.get("choices") else None


def check_golds(rows: Sequence[Row], *, rounding: bool = False) -> Check:
    """Each gold, boxed, is correct against itself, and a number that is nobody's answer is not."""
    title = f"grader on {len(rows)} golds"
    remedy = "prepare the dataset with `python -m data_prep`, which keeps such rows aside (quarantine)"
    for row in rows:
        name, gold, choices = str(row.get("id", "?")), row["answer"], _options(row)
        problem = verify_gold(gold, choices) if isinstance(gold, str) else "not a string"
        if problem:
            return failed(title, f"{name}: the gold {gold!r} cannot be graded against ({problem})", remedy)
        right = grade(_boxed(gold), gold, choices=choices, rounding=rounding)
        if right.verdict != "correct":
            detail = f"{name}: the gold {gold!r}, given as the answer, is {right.verdict} ({right.reason})"
            return failed(title, detail, remedy)
        wrong = grade(_boxed(WRONG), gold, choices=choices, rounding=rounding)
        if wrong.verdict == "correct":
            return failed(title, f"{name}: {WRONG} is accepted for the gold {gold!r}", remedy)
    return passed(title, f"each is right by itself, and {WRONG} is not")


def check_rewards(
    rows: Sequence[Row],
    functions: Sequence[Callable[..., list[float]]],
    weights: Sequence[float] | None,
    correct_above: float,
) -> Check:
    """The summed reward of a right answer is above `adora_correct_above`, that of a wrong one is not.

    Two presets whose sum lifts a wrong answer over the line would make every rollout count as correct.
    """
    title = "reward tells right from wrong"
    columns = {"answer": [row["answer"] for row in rows], "choices": [_options(row) for row in rows]}

    def least_and_most(answers: Sequence[str]) -> tuple[float, float]:
        sums = [0.0] * len(rows)
        for function, weight in zip(functions, weights or [1.0] * len(functions), strict=True):
            got = function(completions=[_boxed(answer) for answer in answers], **columns)
            sums = [total + weight * value for total, value in zip(sums, got, strict=True)]
        return min(sums), max(sums)

    right, _ = least_and_most(columns["answer"])
    _, wrong = least_and_most([WRONG] * len(rows))
    facts = f"right at least {right:g}, wrong at most {wrong:g}, adora_correct_above: {correct_above:g}"
    if not wrong <= correct_above < right:
        return failed(
            title,
            facts,
            "set adora_correct_above between the two, or change adora_reward and reward_weights: the criteria would "
            "count wrong rollouts as correct, or none",
        )
    return passed(title, facts)
