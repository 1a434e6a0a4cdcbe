"""Facts of rollouts, for tests of what follows from them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adora_vl.training.rollout_facts import RolloutFacts


def rollout_facts(rewards_NF: Tensor, **columns: Any) -> RolloutFacts:
    """Return facts of rollouts with these rewards.

    `columns`: further facts. What is not among them is 0, false or, as NaN, unknown.
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
        "work_N": torch.full_like(zeros_N, torch.nan),
        "missing_reasons": (None,) * len(rewards_NF),
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
    """Return facts of rollouts, of which those that lack a reward have left their groups.

    The reward functions are `accuracy` and `judge`.

    Args:
        rewards_NF: the rewards of each function; NaN where it gave none.
        generations: rollouts of a group.
        failed: the reason of each failed call, by the numbers of the rollout and of the function.
        weights: the weights of the functions, by default 1.
        columns: further facts.
    """
    weights_F = torch.ones(rewards_NF.size(1)) if weights is None else torch.tensor(weights)
    facts = rollout_facts(rewards_NF, **columns)
    return facts.without_unrewarded(
        failed or {}, weights_F=weights_F, names=["accuracy", "judge"], group_size=generations
    )
