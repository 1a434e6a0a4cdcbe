"""How far the policy is from the engine that sampled for it: the truncated importance ratio of TRL, from any pass."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def importance_ratio(
    logps_BC: Tensor,
    sampling_BC: Tensor,
    mask_BC: Tensor,
    *,
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> Tensor:
    """exp(policy - engine), cut off: (B, C) for `token_*` modes, (B, 1) for `sequence_*`.

    `*_truncate` clamps the ratio to the bounds, `*_mask` sets what lies outside to 0. A token that the engine gave no
    log-probability (NaN) counts as equal. The definitions are TRL's (`vllm_importance_sampling_mode`), after Yao et
    al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025).
    """
    difference = torch.nan_to_num((logps_BC - sampling_BC) * mask_BC, nan=0.0)
    if mode.startswith("sequence"):
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = torch.exp(difference)
    if mode.endswith("truncate"):
        return ratio.clamp(min=clip_min, max=clip_max) if (clip_min, clip_max) != (None, None) else ratio
    low = -math.inf if clip_min is None else clip_min
    high = math.inf if clip_max is None else clip_max
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
