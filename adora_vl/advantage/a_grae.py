"""A-GRAE: positive advantages are reduced while the policy is weak, and weight moves from easy to hard prompts.

Source: arXiv 2602.05548 and its repository (Yu7-code/A-GRAE), which has these formulas. We use the pass rate where the
repository uses the mean reward; for rewards of 0 and 1 both are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor


def a_grae(
    advantages: Tensor, pass_rates: Tensor, *, curriculum: bool = True, alpha: float | None = 1.0, eps: float = 1e-6
) -> Tensor:
    """Scale the advantages by two factors. p is the pass rate of a prompt, and R, the mean of p over the batch,
    measures how far training has come.

    - Curriculum: all advantages x [(1 - R) 0.5 / (1 - sqrt p) + R 0.5 / sqrt p]. Easy prompts first, hard ones later.
    - Suppression: positive advantages x min(1, R / alpha).

    Args:
        advantages: (P, G), of GRPO or another method.
        pass_rates: (P,), between 0 and 1.
        curriculum: False omits the first factor.
        alpha: the pass rate of the batch from which on nothing is reduced. The repository uses 1 for mathematics and
            0.5 for Geometry3K. None omits the second factor. Without both factors this is GRPO.

    Returns:
        (P, G). The first factor is omitted where p is 0 or 1, because it has no finite value there. With rewards of 0
        and 1 such groups have advantages of 0 anyway.
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
