"""Selective sample replay: rollouts without an advantage give their places to ones that have one.

Source: Selective Sample Replay of VL-Rethinker (arXiv 2504.08837) and the Selective Sample Buffer of Skywork R1V2
(arXiv 2504.16656): a stored sample is drawn with probability |A|^alpha / sum |A|^alpha. Ours replays from the same
generation batch, and each sample as often as it would be drawn on average: since the policy loss is linear in a
positive factor of the advantage, that is a factor, without copies and without chance (losses that divide by tokens go
on dividing by those that were sampled). Samples of earlier steps are not kept.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ssb(advantages: Tensor, *, share: float = 1.0, alpha: float = 1.0) -> Tensor:
    """`A_i (1 + share N_0 |A_i|^alpha / sum |A|^alpha)`, N_0 the number of rollouts with advantage 0.

    Args:
        advantages: (P, G), all ranks'.
        share: of the free places that are filled; 0 is GRPO.
        alpha: 0 draws evenly, larger ones prefer large advantages.

    Returns:
        (P, G).
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share: {share} must be between 0 and 1")
    if alpha < 0:
        raise ValueError(f"alpha: {alpha} must be at least 0")
    magnitude = advantages.abs()
    live = magnitude > 0
    if share == 0 or not bool(live.any()):
        return advantages
    # the largest is taken out first: powers of huge advantages would overflow
    chance = torch.where(live, (magnitude / magnitude.max()) ** alpha, 0.0)
    return advantages * (1 + share * (~live).sum() * chance / chance.sum())
