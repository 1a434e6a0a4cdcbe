"""Facts of rollouts, for tests of what follows from them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adora_vl.training.rollout_facts import RolloutFacts


def rollout_facts(rewards_NF: Tensor, **columns: Any) -> RolloutFacts:
    """Facts of rollouts with these rewards; `columns` are those that are not 0, false or unknown."""
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


def counted_facts(
    rewards_NF: Tensor,
    generations: int,
    *,
    failed: Mapping[tuple[int, int], str] | None = None,
    weights: Sequence[float] | None = None,
    **columns: Any,
) -> RolloutFacts:
    """The same, with the rollouts taken out of groups of `generations` that lack a reward.

    The functions are `accuracy` and `judge`; `failed` has the calls that failed.
    """
    weights_F = torch.ones(rewards_NF.size(1)) if weights is None else torch.tensor(weights)
    facts = rollout_facts(rewards_NF, **columns)
    return facts.without_unrewarded(
        failed or {}, weights_F=weights_F, names=["accuracy", "judge"], group_size=generations
    )
