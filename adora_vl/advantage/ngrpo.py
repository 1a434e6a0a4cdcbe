"""NGRPO: an imagined rollout with the highest reward takes part in the mean and standard deviation of its group.

Source: arXiv 2509.18851, "Advantage Calibration". Its asymmetric clipping (0.16 down, 0.24 up) is set by TRL's
`epsilon` and `epsilon_high`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adora_vl.advantage.grpo import group_advantages


def ngrpo(rewards: Tensor, *, virtual: int = 1, max_reward: float = 1.0, eps: float = 1e-4) -> Tensor:
    """GRPO's advantages, computed with `virtual` additional rewards of `max_reward`, which are then removed again.

    If all rollouts of a group are wrong, all get negative advantages. If all have the reward `max_reward`, all get 0.
    `virtual=0` is GRPO.

    Args:
        rewards: (P, G), NaN for an unscored rollout.

    Returns:
        (P, G). A group in which nothing was scored gets 0.
    """
    if virtual < 0:
        raise ValueError(f"virtual: {virtual} must be at least 0")
    if virtual == 0:
        return group_advantages(rewards, eps=eps)
    imagined = rewards.new_full((rewards.shape[0], virtual), max_reward)
    return group_advantages(torch.cat([rewards, imagined], dim=1), eps=eps)[:, : rewards.shape[1]]
