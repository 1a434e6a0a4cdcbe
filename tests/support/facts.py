"""`RolloutFacts`: what is known of each rollout after scoring, such as rewards and lengths."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adora_vl.training.rollout_facts import RolloutFacts


def rollout_facts(rewards_NF: Tensor, **columns: Any) -> RolloutFacts:
    """Return the facts of N rollouts with these rewards by F functions, (N, F).

    `columns`: other fields of `RolloutFacts`, with a value for each rollout. Those that are left
    out are 0, false or, where unknown is possible, NaN.
    """
    zeros_N = torch.zeros(len(rewards_NF))
    fields: dict[str, Any] = {
        "counted_rewards_NF": rewards_NF,
        "prompt_length_N": zeros_N,
        "length_N": zeros_N,
        "has_no_end_N": zeros_N.bool(),
        "reflective_words_N": zeros_N,
        "surprisal_N": torch.full_like(zeros_N, torch.nan),
        "tool_calls_N": zeros_N,
        "failed_calls_N": zeros_N,
        "tool_seconds_N": zeros_N,
        "unanswered_N": zeros_N.bool(),
        "net_claims_N": torch.full_like(zeros_N, torch.nan),
        "missing_reward_reasons": (None,) * len(rewards_NF),
    }
    return RolloutFacts(rewards_NF=rewards_NF, **{**fields, **columns})


def facts_without_unrewarded(
    rewards_NF: Tensor,
    generations: int,
    *,
    failed: Mapping[tuple[int, int], str] | None = None,
    weights: Sequence[float] | None = None,
    **columns: Any,
) -> RolloutFacts:
    """Return the facts of rollouts after those without a reward have left their groups.

    A rollout that has left is no part of its group's mean and deviation: its `counted_rewards_NF`
    are NaN. The reward functions are called `accuracy` and `judge`.

    Args:
        rewards_NF: the rewards of each function; NaN where it gave none.
        generations: rollouts of a group.
        failed: the reason of each failed call, by the numbers of the rollout and of the function:
            {(2, 1): "HTTP 503"} says that the judge's call for the third rollout failed.
        weights: the weights of the functions, by default 1.
        columns: further facts.
    """
    weights_F = torch.ones(rewards_NF.size(1)) if weights is None else torch.tensor(weights)
    facts = rollout_facts(rewards_NF, **columns)
    return facts.without_unrewarded(
        failed or {},
        weights_F=weights_F,
        function_names=["accuracy", "judge"],
        group_size=generations,
    )
