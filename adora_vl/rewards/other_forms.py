"""Adapts reward functions with the signatures of EasyR1 and verl to that of TRL.

Their sub-scores are logged.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any

from adora_vl.rewards.completion import completion_text
from adora_vl.utils.cli import read_json

Score = float | Mapping[str, float]
RewardInputs = list[dict[str, Any]]  # `response`, `ground_truth` and more, for each completion


def as_trl_reward_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reward function with TRL's signature that calls `function`.

    One with TRL's signature is returned itself. Others are recognised by their argument names:

    - EasyR1: `compute_score(reward_inputs)` takes a list of answers, or `reward_input` a single
      one, with `response` and `ground_truth`. The score is `overall`.
    - verl: `compute_score(data_source, solution_str, ground_truth, extra_info)`. The score is a
      number, or `score` of a mapping.

    The reference answer is the row's `answer`, and `extra_info` a mapping, also where the data set
    has it as a text in JSON. The adapter has the name of the function.
    """
    try:
        parameters = set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin may not say what it takes
        return function
    if "reward_inputs" in parameters:
        return _adapt(function, reward_key="overall", score_batch=_easyr1_batch_scores)
    if "reward_input" in parameters:
        return _adapt(function, reward_key="overall", score_batch=_easyr1_scores)
    if {"solution_str", "ground_truth"} <= parameters:
        return _adapt(function, reward_key="score", score_batch=_verl_scores)
    return function


def _easyr1_batch_scores(
    function: Callable[..., Any], reward_inputs: RewardInputs
) -> Sequence[Score]:
    """Return the scores of an EasyR1 function that takes the whole batch."""
    scores: Sequence[Score] = function(reward_inputs=reward_inputs)
    return scores


def _easyr1_scores(function: Callable[..., Any], reward_inputs: RewardInputs) -> Sequence[Score]:
    """Return the scores of an EasyR1 function that takes one answer."""
    return [function(reward_input=reward_input) for reward_input in reward_inputs]


def _verl_scores(function: Callable[..., Any], reward_inputs: RewardInputs) -> Sequence[Score]:
    """Return the scores of a verl function, which is called for each completion alone."""
    return [
        function(
            data_source=reward_input["data_source"],
            solution_str=reward_input["response"],
            ground_truth=reward_input["ground_truth"],
            extra_info=reward_input["extra_info"],
        )
        for reward_input in reward_inputs
    ]


def _as_mapping(extra_info: object) -> object:
    """Return the value of a column `extra_info` as the mapping that functions of verl expect.

    A prepared data set has the mapping as a text in JSON, and None for a row without it. Any other
    value is returned as it is.
    """
    if extra_info is None:
        return {}
    if isinstance(extra_info, str) and extra_info.lstrip().startswith("{"):
        with suppress(ValueError, RecursionError):
            return read_json(extra_info)
    return extra_info


def _adapt(
    function: Callable[..., Any],
    reward_key: str,
    score_batch: Callable[[Callable[..., Any], RewardInputs], Sequence[Score]],
) -> Callable[..., list[float]]:
    """Return a reward function with TRL's signature that scores a batch by `function`.

    Args:
        function: the user's function, with the signature of EasyR1 or verl.
        reward_key: the key of the reward in a score that is a mapping, such as `overall` in
            `{"overall": 1.0, "format": 0.5}`.
        score_batch: calls `function` with the arguments that it takes, and returns a score for each
            completion of a batch.
    """

    function_name = getattr(function, "__name__", "reward")

    def reward(
        completions: Sequence[Any],
        answer: Sequence[str],
        completion_ids: Sequence[Sequence[int]] = (),
        log_metric: Callable[[str, float], None] = lambda name, value: None,
        **columns: Any,
    ) -> list[float]:
        """Return the reward of each completion, and log the batch means of all other sub-scores."""
        reward_inputs = _reward_inputs(completions, answer, completion_ids, columns)
        sub_scores_by_name: defaultdict[str, list[float]] = defaultdict(list)
        rewards = []
        for score in score_batch(function, reward_inputs):
            # A bare number is the reward alone.
            score_by_name = score if isinstance(score, Mapping) else {reward_key: score}
            rewards.append(float(score_by_name[reward_key]))
            for name, value in score_by_name.items():
                if name != reward_key and isinstance(value, int | float):
                    sub_scores_by_name[name].append(float(value))
        for name, sub_scores in sub_scores_by_name.items():
            log_metric(f"{function_name}/{name}", fmean(sub_scores))
        return rewards

    reward.__name__ = function_name
    return reward


def _reward_inputs(
    completions: Sequence[Any],
    answer: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Any],
) -> RewardInputs:
    """Return for each completion a mapping that functions of EasyR1 and of verl can be called with.

    Its keys are `response`, `response_length` and `ground_truth` of EasyR1, and `data_source` and
    `extra_info` of verl.
    """
    count = len(completions)
    data_sources = columns.get("data_source", [""] * count)
    extra_infos = [_as_mapping(value) for value in columns.get("extra_info", [{}] * count)]
    # Columns that the data set lacks, and token ids that the caller leaves out, have neutral
    # values.
    lengths = [len(ids) for ids in completion_ids] or [0] * count
    reward_inputs: RewardInputs = []
    for completion, length, reference, data_source, extra_info in zip(
        completions, lengths, answer, data_sources, extra_infos, strict=True
    ):
        reward_inputs.append(
            {
                "response": completion_text(completion),
                "response_length": length,
                "ground_truth": reference,
                "data_source": data_source,
                "extra_info": extra_info,
            }
        )
    return reward_inputs
