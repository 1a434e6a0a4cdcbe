"""D^3S at the level of samples: only the rollouts whose advantages vary most are learned from.

Source: arXiv 2509.22115, its sample level, within groups or across the batch. Its token level and its saving of compute
are not implemented: rollouts that are left out get an advantage of 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def most_varied(values: Tensor, keep: int) -> Tensor:
    """The `keep` values of each row whose variance is largest, as shares between 0 and 1. (P, N).

    Such a subset always consists of some of the smallest and some of the largest values, so only `keep + 1` candidates
    have to be compared. Values that tie at the edge of the subset share its places, as a random choice would give on
    average.
    """
    count = values.shape[1]
    if keep >= count:
        return torch.ones_like(values)
    ordered_PN = values.to(torch.float64).sort(dim=1).values
    zero_P1 = ordered_PN.new_zeros(len(values), 1)
    sums = [torch.cat([zero_P1, (ordered_PN**power).cumsum(dim=1)], dim=1) for power in (1, 2)]
    lowest_K = torch.arange(keep + 1, device=values.device)  # how many of the smallest values are taken
    first, second = (s[:, lowest_K] + s[:, -1:] - s[:, count - keep + lowest_K] for s in sums)
    spread_PK = second - first**2 / keep
    best_P1 = lowest_K[(spread_PK - spread_PK.amax(dim=1, keepdim=True)).abs().lt(1e-12).int().argmax(dim=1)][:, None]
    smaller_PN = (values[:, None, :] < values[:, :, None]).sum(dim=2)
    larger_PN = (values[:, None, :] > values[:, :, None]).sum(dim=2)
    tied_PN = count - smaller_PN - larger_PN
    low_PN = ((best_P1 - smaller_PN) / tied_PN).clamp(0.0, 1.0)
    high_PN = ((keep - best_P1 - larger_PN) / tied_PN).clamp(0.0, 1.0)
    return (low_PN + high_PN).clamp(max=1.0).to(values.dtype)


def d3s(advantages: Tensor, *, keep: float = 0.5, across: str = "group") -> Tensor:
    """Advantages of the rollouts that are kept, scaled so that a mean over all rows is the mean over the kept ones.

    Args:
        advantages: (P, G).
        keep: share of the rollouts to keep, above 0 and at most 1. At least two are kept. 1 is GRPO.
        across: `"group"` chooses within each group, `"batch"` among all rollouts.

    Returns:
        (P, G).
    """
    if not 0 < keep <= 1:
        raise ValueError(f"keep: {keep} must be above 0 and at most 1")
    if across not in ("group", "batch"):
        raise ValueError(f"across: {across!r} is not one of group, batch")
    pool = advantages if across == "group" else advantages.reshape(1, -1)
    count = pool.shape[1]
    kept = min(count, max(2, round(keep * count)))
    if kept == count:
        return advantages
    return (pool * most_varied(pool, kept) * (count / kept)).view_as(advantages)
