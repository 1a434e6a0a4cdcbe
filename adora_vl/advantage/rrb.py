"""RRB: advantages shrink with the range of the rewards that they come from.

Source: the reward-range-based rescaling of DIVA-GRPO (arXiv 2603.01106). Its repository (Siaaaaaa1/DIVA-GRPO) names the
rescaling but has no code for it, and of the paper only the abstract could be read; the formula, `A (max r - min r) /
R_max`, is the one that published notes on the paper give. The paper applies it to its own advantages over variants of a
problem, we to those of GRPO.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rrb(advantages: Tensor, rewards: Tensor, *, full_range: float = 1.0, power: float = 1.0) -> Tensor:
    """`A (range / full_range)^power`, where the range is the largest reward of the group minus its smallest.

    GRPO divides by the standard deviation, so a group with the rewards 0.0 and 0.1 (no box, a box with a wrong answer)
    gets advantages as large as one with the rewards 0 and 1. This takes the size of the difference back in.

    Args:
        advantages: (P, G), of GRPO or another method.
        rewards: (P, G), NaN for an unscored rollout.
        full_range: the best reward minus the worst one. A group with this range, or a larger one, is left unchanged.
        power: 0 is GRPO, 1 the published formula.

    Returns:
        (P, G).
    """
    if full_range <= 0:
        raise ValueError(f"full_range: {full_range} must be above 0")
    if power < 0:
        raise ValueError(f"range_power: {power} must be at least 0")
    if power == 0:
        return advantages
    unscored = torch.isnan(rewards)
    highest_P1 = rewards.masked_fill(unscored, -torch.inf).amax(dim=1, keepdim=True)
    lowest_P1 = rewards.masked_fill(unscored, torch.inf).amin(dim=1, keepdim=True)
    share_P1 = ((highest_P1 - lowest_P1) / full_range).clamp(0.0, 1.0)  # -inf where nothing was scored
    return advantages * share_P1**power
