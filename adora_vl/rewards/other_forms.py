"""Adapts reward functions in the forms of EasyR1 and verl to TRL's form.

Their sub-scores are logged.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from adora_vl.rewards.completion import completion_text

Score = float | Mapping[str, float]
Rows = list[dict[str, Any]]


def in_trl_form(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reward function in TRL's form that calls `function`.

    One in TRL's form is returned itself. The form is recognised by the names of the arguments:

    - EasyR1: `compute_score(reward_inputs)` takes a list of answers, or `reward_input` a single
      one, with `response` and `ground_truth`. The score is `overall`.
    - verl: `compute_score(data_source, solution_str, ground_truth, extra_info)`. The score is a
      number, or `score` of a mapping.

    The reference answer is the row's `answer`. The adapter has the name of the function.
    """
    try:
        names = set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin may not say what it takes
        return function
    if "reward_inputs" in names:
        return _adapt(function, "overall", _easyr1_batch_scores)
    if "reward_input" in names:
        return _adapt(function, "overall", _easyr1_scores)
    if {"solution_str", "ground_truth"} <= names:
        return _adapt(function, "score", _verl_scores)
    return function


def _easyr1_batch_scores(function: Callable[..., Any], rows: Rows) -> Sequence[Score]:
    """Return the scores of an EasyR1 function that takes the whole batch."""
    scores: Sequence[Score] = function(reward_inputs=rows)
    return scores


def _easyr1_scores(function: Callable[..., Any], rows: Rows) -> Sequence[Score]:
    """Return the scores of an EasyR1 function that takes one answer."""
    return [function(reward_input=row) for row in rows]


def _verl_scores(function: Callable[..., Any], rows: Rows) -> Sequence[Score]:
    """Return the scores of a verl function."""
    return [
        function(
            data_source=row["data_source"],
            solution_str=row["response"],
            ground_truth=row["ground_truth"],
            extra_info=row["extra_info"],
        )
        for row in rows
    ]


def _adapt(
    function: Callable[..., Any],
    total: str,
    call: Callable[[Callable[..., Any], Rows], Sequence[Score]],
) -> Callable[..., list[float]]:
    """Return a reward function in TRL's form around `function`.

    `total` is the name of the reward among sub-scores, and `call` passes the rows of a batch to
    `function` in its own form.
    """

    def reward(
        completions: Sequence[Any],
        answer: Sequence[str],
        completion_ids: Sequence[Sequence[int]] = (),
        log_metric: Callable[[str, float], None] = lambda name, value: None,
        **columns: Any,
    ) -> list[float]:
        """Return the total of each row, and log the mean of every other number of the scores."""
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
                "extra_info": info,
            }
            for text, length, gold, source, info in zip(
                completions, lengths, answer, sources, extra, strict=True
            )
        ]
        parts: defaultdict[str, list[float]] = defaultdict(list)
        totals = []
        for score in call(function, rows):
            # A bare number is the total alone.
            scores = score if isinstance(score, Mapping) else {total: score}
            totals.append(float(scores[total]))
            for name, value in scores.items():
                if name != total and isinstance(value, int | float):
                    parts[name].append(float(value))
        for name, values in parts.items():
            log_metric(f"{function_name}/{name}", fmean(values))
        return totals

    function_name = reward.__name__ = getattr(function, "__name__", "reward")
    return reward
