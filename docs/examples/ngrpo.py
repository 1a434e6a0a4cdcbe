"""NGRPO (arXiv 2509.18851) as a method of your own.

    adora_method: docs/examples/ngrpo.py:Ngrpo
    adora_method: {docs/examples/ngrpo.py:Ngrpo: {virtual: 2}, dapo: {}}

It is meant for data on which many groups are wrong throughout: such a group teaches nothing under
GRPO, and gets negative advantages here. It was written from the paper; its results have not been
reproduced. The paper also drops groups that are right throughout; here their tokens still count
where a loss divides by tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adora_vl.advantage import AdvantagePipeline, Groups, Method, group_advantages, option


@dataclass(frozen=True)
class Ngrpo(Method):
    """GRPO's advantages with imagined rollouts of the highest reward in every group.

    Mean and deviation are taken with them, and they are removed again. So all rollouts of a group
    that are wrong get negative advantages. A group whose rewards are all `max_reward` gets 0, and
    `virtual: 0` is GRPO.
    """

    starts_from_rewards = True  # so it stands first
    settings: ClassVar[dict[str, object]] = {"epsilon": 0.16, "epsilon_high": 0.24}
    source = "arXiv 2509.18851"

    virtual: int = option(1, "How many rollouts are imagined per group.")
    max_reward: float = option(1.0, "Their reward.")

    def __post_init__(self) -> None:
        if self.virtual < 0:
            raise ValueError(f"virtual: {self.virtual} must be at least 0")

    def apply(self, groups: Groups, advantages_PG: Tensor, run: AdvantagePipeline) -> Tensor:
        rewards_PG = groups.rewards_PG
        prompts, generations = rewards_PG.shape
        imagined = rewards_PG.new_full((prompts, self.virtual), self.max_reward)
        with_imagined = torch.cat([rewards_PG, imagined], dim=1)
        return group_advantages(with_imagined)[:, :generations]
