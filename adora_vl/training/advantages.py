"""Turns the grades of a generation into the advantages that the loss gets.

Groups are judged once, and the loss, the metrics and the record all use that result. The mathematics is in
`adora_vl.advantage`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adora_vl.advantage import Groups
from adora_vl.advantage.adora import AdoraWeighting
from adora_vl.advantage.methods import AdvantagePipeline
from adora_vl.training.scores import Scores, weighted_sum
from adora_vl.types import Batch, StepContext


@dataclass(frozen=True)
class Advantages:
    """The advantages of a generation, of all ranks, and why they are what they are."""

    groups: Groups
    weighting: AdoraWeighting  # the weights that were applied, and their reasons
    raw_PG: Tensor  # as TRL made them
    advantages_PG: Tensor  # as the loss gets them
    figures: dict[str, float]  # of the methods, for the log

    @property
    def live_B(self) -> Tensor:
        """Which rollouts are of groups with signal, and have not left them, bool, (P x G,)."""
        return (self.advantages_PG.bool().any(dim=1, keepdim=True) & self.groups.scored_PG).flatten()


@dataclass(frozen=True)
class Truncation:
    """Which rollouts count as cut off: from so many tokens on, or (`at` None) those without an end-of-turn token."""

    at: int | None
    masked: bool  # TRL's mask_truncated_completions: the loss does not count unended rollouts

    def truncated(self, lengths_PG: Tensor, unended_PG: Tensor) -> Tensor:
        """Whether each rollout counts as truncated, bool, (P, G)."""
        return unended_PG if self.at is None else lengths_PG >= self.at

    def loss_tokens(self, lengths_PG: Tensor, unended_PG: Tensor) -> Tensor:
        """Completion tokens that the loss counts, (P, G)."""
        return torch.where(unended_PG, 0.0, lengths_PG) if self.masked else lengths_PG


class AdvantageComputer:
    """Applies the run's methods to whole groups. All ranks compute the same from gathered figures."""

    def __init__(self, context: StepContext, methods: AdvantagePipeline, reward_weights_F: Tensor) -> None:
        """`reward_weights_F`: the weight of each reward function in the sum."""
        config = context.config
        self.accelerator, self.correct_above = context.accelerator, config.adora_correct_above
        self.methods, self.reward_weights_F = methods, reward_weights_F
        at = config.truncated_at if config.adora_truncation == "length" else None
        self.truncation = Truncation(at, masked=config.mask_truncated_completions)

    def __call__(self, scores: Scores, batch: Batch, generations: int, step: int, *, training: bool) -> Advantages:
        """`batch` is this rank's, with TRL's advantages. In an evaluation the groups are judged, but the advantages are
        left as TRL made them.
        """
        groups = self._groups(scores, batch, generations, step)
        raw_PG = self.accelerator.gather(batch["advantages"]).view(-1, generations)
        if not training:
            return Advantages(groups, self.methods.weigh(groups), raw_PG, raw_PG, {})
        advantages_PG = self.methods(groups, raw_PG)
        assert self.methods.weighting is not None
        return Advantages(groups, self.methods.weighting, raw_PG, advantages_PG, dict(self.methods.figures))

    def _groups(self, scores: Scores, batch: Batch, generations: int, step: int) -> Groups:
        rewards_B = weighted_sum(scores.rewards.counted_BF, self.reward_weights_F)
        rewards_PG, lengths_PG = rewards_B.view(-1, generations), scores.lengths_B.view(-1, generations)
        unended_PG = scores.unended_B.view(-1, generations)
        return Groups(
            rewards_PG,
            lengths_PG,
            truncated_PG=self.truncation.truncated(lengths_PG, unended_PG),
            tokens_PG=self.truncation.loss_tokens(lengths_PG, unended_PG),
            surprisal_PG=self._surprisal(batch, generations),
            correct_above=self.correct_above,
            step=step,
        )

    def _surprisal(self, batch: Batch, generations: int) -> Tensor | None:
        """Mean surprisal of each rollout of all ranks in nats per token, (P, G). None without the engine's
        log-probabilities.
        """
        logps_BC = batch.get("sampling_per_token_logps")
        if logps_BC is None:
            return None
        mask_BC = batch["completion_mask"]
        total_B = (torch.nan_to_num(logps_BC) * mask_BC).sum(dim=1)
        surprisal_B: Tensor = -self.accelerator.gather(total_B / mask_BC.sum(dim=1).clamp(min=1))
        return surprisal_B.view(-1, generations)
