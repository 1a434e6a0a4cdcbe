"""MC-GRPO: the baseline is the median instead of the mean, and one rollout more is sampled than is learned from.

Source: arXiv 2601.22582 and its repository (lotusroot-kim/MC-GRPO): `(r - median) / (MAD + eps)` over G + 1 rollouts,
where the pivot, which is the median rollout, is left out of the update.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adora_vl.advantage.grpo import deviation, group_advantages, is_constant

CENTRES = ("median", "mean")
SPREADS = ("mad", "std")


def mc_grpo(
    rewards: Tensor, *, centre: str = "median", spread: str = "mad", exclude_pivot: bool = True, eps: float = 1e-4
) -> Tensor:
    """Median-centred advantages of groups with an odd number of rollouts.

    Args:
        rewards: (P, G + 1), NaN for an unscored rollout. If the number of scored rewards is even, the lower of the two
            middle ones is the median.
        centre: `"mean"` with `spread="std"` and `exclude_pivot=False` is GRPO.
        spread: `"mad"` divides by the median absolute deviation. With rewards of 0 and 1 it is 0 in every group in
            which one value has the majority, so the division would multiply by 1/eps. There we divide by the standard
            deviation about the centre instead. This exception is ours: the repository uses an eps of 1e-3.
        exclude_pivot: give the pivot an advantage of 0, and multiply the others by (G + 1) / G. A mean over all rows is
            then the mean over the G rows that count. This is exact for losses that divide by sequences. Losses that
            divide by tokens still count the tokens of the pivot.

    Returns:
        (P, G + 1). Constant groups are exactly 0.
    """
    for name, value, known in (("centre", centre, CENTRES), ("spread", spread, SPREADS)):
        if value not in known:
            raise ValueError(f"{name}: {value!r} is not one of {', '.join(known)}")
    count = rewards.shape[1]
    share = count / (count - 1) if exclude_pivot and count > 1 else 1.0
    if (centre, spread) == ("mean", "std"):
        return group_advantages(rewards, eps=eps) * share
    middle_P1 = torch.nanmean(rewards, dim=1, keepdim=True)
    if centre == "median":
        middle_P1 = torch.nanmedian(rewards, dim=1, keepdim=True).values
    centred_PG = rewards - middle_P1
    spread_P1 = deviation(rewards, middle_P1)
    if spread == "mad":
        mad_P1 = torch.nanmedian(centred_PG.abs(), dim=1, keepdim=True).values
        spread_P1 = torch.where(mad_P1 > 0, mad_P1, spread_P1)
    advantages_PG = torch.nan_to_num(centred_PG / (spread_P1 + eps), nan=0.0) * share
    return torch.where(is_constant(rewards)[:, None], 0.0, advantages_PG)
