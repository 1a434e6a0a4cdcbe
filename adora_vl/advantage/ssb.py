"""Selective sample replay: rollouts without an advantage give their places to rollouts that have one.

Source: Selective Sample Replay of VL-Rethinker (arXiv 2504.08837) and the Selective Sample Buffer of Skywork R1V2
(arXiv 2504.16656): a stored sample is drawn with probability |A|^alpha / sum |A|^alpha.

We replay only from the same generation batch, and each sample as often as it would be drawn on average. The policy loss
is linear in a positive factor of the advantage, so replaying is multiplying by a factor: nothing is copied, and nothing
is left to chance. Losses that divide by tokens still divide by the tokens that were sampled. Samples of earlier steps
are not kept.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ssb(advantages: Tensor, *, share: float = 1.0, alpha: float = 1.0) -> Tensor:
    """`A_i (1 + share N_0 |A_i|^alpha / sum |A|^alpha)`, where N_0 is the number of rollouts with advantage 0.

    Args:
        advantages: (P, G), of all ranks.
        share: the share of the free places that are filled. 0 is GRPO.
        alpha: 0 draws all samples equally often. Larger values prefer large advantages.

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
    # divide by the largest first, because powers of huge advantages would overflow
    chance = torch.where(live, (magnitude / magnitude.max()) ** alpha, 0.0)
    return advantages * (1 + share * (~live).sum() * chance / chance.sum())
