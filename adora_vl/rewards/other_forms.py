"""Reward functions in the forms of EasyR1 and verl, called as TRL calls its own.

Their sub-scores are logged.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from adora_vl.rewards.completion import completion_text

Score = float | Mapping[str, float]


def in_trl_form(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, or around one of another trainer's form one of TRL's with the same name.

    The reference answer is the row's `answer`; the score is `overall` in EasyR1, and in verl a
    number, or `score` of a mapping.
    """
    try:
        names = set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin may not say what it takes
        return function
    if "reward_inputs" in names:
        return _called(function, "overall", lambda rows: function(reward_inputs=rows))
    if "reward_input" in names:
        return _called(
            function, "overall", lambda rows: [function(reward_input=row) for row in rows]
        )
    if {"solution_str", "ground_truth"} <= names:
        return _called(
            function,
            "score",
            lambda rows: [
                function(
                    data_source=row["data_source"],
                    solution_str=row["response"],
                    ground_truth=row["ground_truth"],
                    extra_info=row["extra_info"],
                )
                for row in rows
            ],
        )
    return function


def _called(
    function: Callable[..., Any],
    total: str,
    scores_of: Callable[[list[dict[str, Any]]], Sequence[Score]],
) -> Callable[..., list[float]]:
    """`total`: the name of the reward among sub-scores."""

    def reward(
        completions: Sequence[Any],
        answer: Sequence[str],
        completion_ids: Sequence[Sequence[int]] = (),
        log_metric: Callable[[str, float], None] = lambda name, value: None,
        **columns: Any,
    ) -> list[float]:
        count = len(completions)
        sources = columns.get("data_source", [""] * count)
        extra = columns.get("extra_info", [{}] * count)
        lengths = [len(ids) for ids in completion_ids] or [0] * count
        rows = [
            {
                "response": completion_text(text),
                "response_length": length,
                "ground_truth": gold,
                "data_source": source,
                "extra_info": more,
            }
            for text, length, gold, source, more in zip(
                completions, lengths, answer, sources, extra, strict=True
            )
        ]
        parts: defaultdict[str, list[float]] = defaultdict(list)
        found = []
        for score in scores_of(rows):
            scores = score if isinstance(score, Mapping) else {total: score}
            found.append(float(scores[total]))
            for name, value in scores.items():
                if name != total and isinstance(value, int | float):
                    parts[name].append(float(value))
        for name, values in parts.items():
            log_metric(f"{function_name}/{name}", fmean(values))
        return found

    function_name = reward.__name__ = getattr(function, "__name__", "reward")
    return reward
