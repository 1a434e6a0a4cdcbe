"""CANON (arXiv 2509.23962) as a method of your own.

    adora_method: docs/examples/canon.py:Canon
    adora_method: {docs/examples/canon.py:Canon: {measure: length, inter: 0.7}}

The rollouts of a group are split into an upper and a lower half by their entropy or their length,
and each is compared with the mean reward of a half. It was written from the paper; its results have
not been reproduced. The paper's weights that favour one direction of the measure are left out.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from adora_vl.advantage import (
    AdvantagePipeline,
    Groups,
    Method,
    Schedule,
    group_advantages,
    is_constant,
    option,
)
from adora_vl.advantage.method import RunKeys


def upper_half(measure_PG: Tensor) -> Tensor:
    """The share to which each rollout belongs to the upper half of its group, (P, G), float32.

    NaN is a rollout that has left its group, whose share is 0. Rollouts that tie at the cut share
    the places that are left, as a random order among them would give on average. The authors' code
    takes them in the order of the batch, so that a permutation of the rollouts would change the
    result.
    """
    count_P1 = (~torch.isnan(measure_PG)).sum(dim=1, keepdim=True)
    places_P1 = count_P1 - count_P1 // 2
    larger_PG = (measure_PG[:, :, None] < measure_PG[:, None, :]).sum(dim=2)
    tied_PG = (measure_PG[:, :, None] == measure_PG[:, None, :]).sum(dim=2)
    share_PG = (places_P1 - larger_PG) / tied_PG.clamp(min=1)
    return torch.where(torch.isnan(measure_PG), 0.0, share_PG.clamp(0.0, 1.0)).to(torch.float32)


@dataclass(frozen=True)
class Canon(Method):
    """The advantage is `inter (r - mean of the other half) + (1 - inter) (r - mean of its half)`.

    It is not divided by a deviation. `inter: 0.5` is Dr. GRPO, because the two halves together are
    the group.
    """

    starts_from_rewards = True  # so it stands first
    settings: ClassVar[dict[str, object]] = {
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "epsilon_high": 0.28,
    }
    source = "arXiv 2509.23962"

    measure: Literal["length", "entropy"] = option(
        "entropy",
        "What makes the halves: length, or entropy, the mean of -log p over the sampled tokens.",
    )
    inter: Schedule = option(
        Schedule(1.0), "1 compares with the other half, 0 with its own, 0.5 is Dr. GRPO."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.inter.values) < 0 or max(self.inter.values) > 1:
            raise ValueError(f"inter: {self.inter.values} must lie between 0 and 1")

    def check(self, keys: RunKeys) -> None:
        """Raises `ValueError` where nobody says the log-probabilities of the rollouts."""
        if self.measure == "entropy" and not keys.use_vllm:
            raise ValueError("measure: entropy needs use_vllm: true, else set measure: length")

    def apply(self, groups: Groups, advantages_PG: Tensor, run: AdvantagePipeline) -> Tensor:
        rewards_PG = groups.rewards_PG
        inter = self.inter.at(groups.step)
        if inter == 0.5:  # the group's mean to the bit, also where its halves differ in size
            return group_advantages(rewards_PG, scale="none")
        measure_PG = groups.lengths_PG if self.measure == "length" else groups.surprisal_PG
        if measure_PG is None:
            raise ValueError("measure: entropy needs the log-probabilities of all rollouts")
        upper_PG = upper_half(torch.where(groups.has_reward_PG, measure_PG, torch.nan))
        upper_mean_P1 = self._mean(groups, upper_PG)
        lower_mean_P1 = self._mean(groups, 1 - upper_PG)
        as_upper_PG = rewards_PG - inter * lower_mean_P1 - (1 - inter) * upper_mean_P1
        as_lower_PG = rewards_PG - inter * upper_mean_P1 - (1 - inter) * lower_mean_P1
        mixed_PG = upper_PG * as_upper_PG + (1 - upper_PG) * as_lower_PG
        # NaN is a rollout that has left its group; a constant group teaches nothing.
        mixed_PG = torch.nan_to_num(mixed_PG, nan=0.0)
        return torch.where(is_constant(rewards_PG)[:, None], 0.0, mixed_PG)

    def _mean(self, groups: Groups, share_PG: Tensor) -> Tensor:
        """The mean reward of a half, (P, 1); of the group where nobody of the half was scored."""
        weight_PG = torch.where(groups.has_reward_PG, share_PG, 0.0)
        weight_P1 = weight_PG.sum(dim=1, keepdim=True)
        rewards_PG = torch.nan_to_num(groups.rewards_PG)
        total_P1 = (weight_PG * rewards_PG).sum(dim=1, keepdim=True)
        group_mean_P1 = torch.nanmean(groups.rewards_PG, dim=1, keepdim=True)
        return torch.where(weight_P1 > 0, total_P1 / weight_P1.clamp(min=1e-6), group_mean_P1)
