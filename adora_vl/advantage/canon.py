"""CANON: each group is split in half by a measure (length or entropy), and a reward is compared with both halves.

Source: arXiv 2509.23962 and its repository (biuboomc/CANON), but without its direction weights alpha and beta.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adora_vl.advantage.grpo import group_advantages, is_constant


def upper_half(measure: Tensor) -> Tensor:
    """The share to which each rollout belongs to the upper half of its group by `measure`. (P, G), float32.

    It is 1 or 0, except for rollouts that tie at the cut. These share the places that are left, as a random order among
    them would give on average. The authors' repository takes them in the order of the batch, so that a permutation of
    the rollouts would change the result.
    """
    count = measure.shape[1]
    above_PG = (measure[:, :, None] < measure[:, None, :]).sum(dim=2)
    tied_PG = (measure[:, :, None] == measure[:, None, :]).sum(dim=2)
    return ((count - count // 2 - above_PG) / tied_PG).clamp(0.0, 1.0).to(torch.float32)


def canon(rewards: Tensor, measure: Tensor, *, inter: float = 0.5) -> Tensor:
    """`inter (r - mean of the other half) + (1 - inter) (r - mean of the own half)`, without dividing by a deviation.

    Args:
        rewards: (P, G), NaN for an unscored rollout.
        measure: (P, G), finite: number of tokens, or nats per token.
        inter: 1 compares each reward with the other half, 0 with its own half. 0.5 is Dr. GRPO.

    Returns:
        (P, G). Constant groups are exactly 0.
    """
    if not 0 <= inter <= 1:
        raise ValueError(f"inter: {inter} must be between 0 and 1")
    if inter == 0.5:  # both halves together are the group: this gives its mean to the bit, also for odd groups
        return group_advantages(rewards, scale="none")
    scored_PG = ~torch.isnan(rewards)
    upper_PG = upper_half(measure)
    means = []
    for share_PG in (upper_PG, 1 - upper_PG):
        weight_PG = torch.where(scored_PG, share_PG, 0.0)
        total_P1 = (weight_PG * torch.nan_to_num(rewards)).sum(dim=1, keepdim=True)
        weight_P1 = weight_PG.sum(dim=1, keepdim=True)
        mean_P1 = torch.nanmean(rewards, dim=1, keepdim=True)  # used for a half without scored rollouts
        means.append(torch.where(weight_P1 > 0, total_P1 / weight_P1.clamp(min=1e-6), mean_P1))
    upper_P1, lower_P1 = means
    as_upper_PG = rewards - inter * lower_P1 - (1 - inter) * upper_P1
    as_lower_PG = rewards - inter * upper_P1 - (1 - inter) * lower_P1
    advantages_PG = torch.nan_to_num(upper_PG * as_upper_PG + (1 - upper_PG) * as_lower_PG, nan=0.0)
    return torch.where(is_constant(rewards)[:, None], 0.0, advantages_PG)
