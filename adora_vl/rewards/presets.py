"""Reward functions in TRL's form, by name. Each grades a completion once and logs what it found."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from adora_vl.errors import UserError, nearest
from adora_vl.rewards.grade import VERDICTS, Grade, grade, verify_gold

RewardFunction = Callable[..., list[float]]

# Rewards for (a correct answer, a complete box that is not correct, no complete box).
#   adora: the paper's, source: the grading policy, point 7.
#   easyr1: 0.9 x accuracy + 0.1 x format, the weights of EasyR1's examples/reward_function/math.py. There the format is
#     a <think> block and a box; here it is a complete box, since our prompt asks for no block. So it equals `adora`.
#   accuracy: the verdict alone.
PRESETS: Mapping[str, tuple[float, float, float]] = {
    "adora": (1.0, 0.1, 0.0),
    "easyr1": (0.9 + 0.1, 0.1, 0.0),
    "accuracy": (1.0, 0.0, 0.0),
}


def reward_function(preset: str, rounding: bool = False) -> RewardFunction:
    """The TRL reward function of a preset, named `<preset>_reward`.

    It takes TRL's keyword arguments and returns one float a completion. The dataset columns it reads are `answer` (a
    canonical gold) and, where there is one, `choices` (a list of strings or None). It adds the columns `verdict` and
    `extracted` to TRL's completions table, and logs the shares `grading/<verdict>` and the time `grading/ms_p99`.

    Raises `UserError` for an unknown preset; the function raises it for a missing or unusable gold, since a reward of
    zero for every answer to a problem would never be noticed.
    """
    if preset not in PRESETS:
        known = ", ".join(PRESETS)
        raise UserError(f"reward preset '{preset}' is unknown, use one of {known}{nearest(preset, PRESETS)}")
    correct, boxed, none = PRESETS[preset]

    def reward(
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] = (),
        completion_ids: Sequence[Any] | None = None,
        *,
        answer: Sequence[str] | None = None,
        choices: Sequence[Sequence[str] | None] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        golds = _golds(answer, choices, len(completions))
        grades: list[Grade] = []
        times_ms: list[float] = []
        for completion, (gold, options) in zip(completions, golds, strict=True):
            start = time.perf_counter()
            grades.append(grade(_text(completion), gold, choices=options, rounding=rounding))
            times_ms.append(1000 * (time.perf_counter() - start))
        if log_extra:
            log_extra("verdict", [one.verdict for one in grades])
            log_extra("extracted", [one.extracted for one in grades])
        if log_metric and grades:
            for verdict in VERDICTS:
                log_metric(f"grading/{verdict}", sum(one.verdict == verdict for one in grades) / len(grades))
            log_metric("grading/ms_p99", _p99(times_ms))
        return [correct if one.verdict == "correct" else none if one.extracted is None else boxed for one in grades]

    reward.__name__ = reward.__qualname__ = f"{preset}_reward"
    return reward


def _golds(
    answer: Sequence[str] | None, choices: Sequence[Sequence[str] | None] | None, count: int
) -> list[tuple[str, Sequence[str] | None]]:
    """One (gold, choices) a completion. Raises `UserError` where a gold is missing or does not verify itself."""
    if answer is None:
        raise UserError("the dataset has no column 'answer': the reward needs the gold of every row")
    if len(answer) != count or (choices is not None and len(choices) != count):
        raise UserError(f"'answer' and 'choices' need one value for each of the {count} completions")
    golds: list[tuple[str, Sequence[str] | None]] = []
    usable: set[tuple[str, tuple[str, ...]]] = set()  # the G rollouts of a prompt share a gold
    for row, gold in enumerate(answer):
        options = choices[row] if choices is not None else None
        key = (str(gold), tuple(options) if options is not None else ())
        if key not in usable:
            reason = verify_gold(*key) if isinstance(gold, str) else "not_a_string"
            if reason:
                raise UserError(f"answer {gold!r} cannot be graded against ({reason}): prepare the data with data_prep")
            usable.add(key)
        golds.append(key)
    return golds


def _text(completion: Any) -> str:
    """The text of a completion in either of TRL's forms: a string, or messages whose content is a string or parts."""
    if isinstance(completion, str):
        return completion
    content = completion[-1]["content"] if completion else ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content or [])


def _p99(values: list[float]) -> float:
    """The 99th percentile (nearest rank) of at least one value."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]
