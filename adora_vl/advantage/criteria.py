"""ADORA's criteria: which prompts are temporarily advantageous (TAS) or disadvantageous (TDS) to learn from now.

Source: arXiv 2602.10019 and the reference code (ShadeCloak/ADORA, VLM branch).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupFacts:
    """What the criteria look at in each group. Every tensor is (P,) or (P, G)."""

    correct_PG: Tensor  # bool: the reward is above `correct_above`
    wrong_PG: Tensor  # bool: scored, and the reward is not above it
    finished_wrong_PG: Tensor  # bool: wrong and not truncated
    lengths_PG: Tensor  # float

    @property
    def any_correct_P(self) -> Tensor:
        return self.correct_PG.any(dim=1)

    @property
    def any_finished_wrong_P(self) -> Tensor:
        return self.finished_wrong_PG.any(dim=1)

    @property
    def any_scored_P(self) -> Tensor:
        return (self.correct_PG | self.wrong_PG).any(dim=1)

    @property
    def pass_rate_P(self) -> Tensor:
        """Share of correct rollouts among the scored ones; 0 where none was scored."""
        scored_P = (self.correct_PG | self.wrong_PG).sum(dim=1)
        return self.correct_PG.sum(dim=1) / scored_P.clamp(min=1)


def group_facts(rewards_PG: Tensor, lengths_PG: Tensor, correct_above: float, truncated_PG: Tensor) -> GroupFacts:
    """Sort the rollouts of each group. A NaN reward (no reward function scored it) is neither correct nor wrong."""
    correct_PG = rewards_PG > correct_above
    wrong_PG = ~correct_PG & ~torch.isnan(rewards_PG)
    return GroupFacts(correct_PG, wrong_PG, wrong_PG & ~truncated_PG, lengths_PG.to(torch.float32))


def length_advantage(facts: GroupFacts, empty_wrong: str) -> Tensor:
    """TAS where the longest correct rollout is longer than the mean of the untruncated wrong ones. Bool, (P,).

    Where there is no untruncated wrong rollout, there is no mean to compare with. The VLM reference takes it as +inf,
    so the group is TDS (`empty_wrong="attenuate"`). The LLM reference takes it as -inf, so the group is TAS (`"keep"`).
    """
    longest_P = torch.where(facts.correct_PG, facts.lengths_PG, -torch.inf).amax(dim=1)
    count_P = facts.finished_wrong_PG.sum(dim=1)
    total_P = torch.where(facts.finished_wrong_PG, facts.lengths_PG, 0.0).sum(dim=1)
    mean_P = total_P / count_P.clamp(min=1)
    nothing = torch.inf if empty_wrong == "attenuate" else -torch.inf
    return longest_P > torch.where(count_P > 0, mean_P, nothing)


def difficulty_advantage(facts: GroupFacts, tau: float, needs_correct: bool = False) -> Tensor:
    """TAS where the pass rate is at most `tau`; a pass rate of 0 is included (paper, Eq. 6). Bool, (P,).

    `needs_correct` excludes a pass rate of 0, so that TAS means hard now, but solvable. A group without a scored
    rollout has no pass rate, so it is not TAS.
    """
    counted_P = facts.any_correct_P if needs_correct else facts.any_scored_P
    return counted_P & (facts.pass_rate_P <= tau)
