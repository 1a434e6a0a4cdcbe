"""A-GRAE: positive advantages held back while the policy is weak, and attention that moves from easy to hard prompts.

Source: arXiv 2602.05548 and its repository (Yu7-code/A-GRAE), whose formulas these are, with the share of right
answers in the place of the mean reward (the same for 0/1 rewards).
"""

from __future__ import annotations

import torch
from torch import Tensor


def a_grae(
    advantages: Tensor, pass_rates: Tensor, *, curriculum: bool = True, alpha: float | None = 1.0, eps: float = 1e-6
) -> Tensor:
    """With p a prompt's pass rate and R the mean of p over the batch, which stands for progress:

    - curriculum: x [ (1 - R) 0.5 / (1 - sqrt p) + R 0.5 / sqrt p ]: easy prompts first, hard ones later;
    - suppression: positive advantages x min(1, R / alpha).

    Args:
        advantages: (P, G), GRPO's or another's.
        pass_rates: (P,), between 0 and 1.
        curriculum: False leaves the first factor out.
        alpha: the batch's pass rate from which nothing is held back (the repository: 1 for mathematics, 0.5 for
            Geometry3K); None leaves the second factor out. Without both this is GRPO.

    Returns:
        (P, G). Where p is 0 or 1 the first factor is left out: it has no finite value there, and with 0/1 rewards such
        groups have advantages of 0 anyway.
    """
    if alpha is not None and alpha <= 0:
        raise ValueError(f"alpha: {alpha} must be above 0, or null")
    progress = pass_rates.mean()
    if curriculum:
        root_P = pass_rates.sqrt()
        factor_P = (1 - progress) * 0.5 / (1 - root_P + eps) + progress * 0.5 / (root_P + eps)
        mixed_P = (pass_rates > 0) & (pass_rates < 1)
        advantages = advantages * torch.where(mixed_P, factor_P, 1.0)[:, None]
    if alpha is not None:
        held_back = advantages * (progress / alpha).clamp(max=1.0)
        advantages = torch.where(advantages > 0, held_back, advantages)
    return advantages
