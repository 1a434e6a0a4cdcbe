"""What a method may know of a generation batch: gathered across ranks, so that every rank computes the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """One generation batch of whole groups. `step` counts optimizer steps from 0."""

    rewards_PG: Tensor  # NaN for a rollout that no reward function scored
    lengths_PG: Tensor  # completion tokens
    truncated_PG: Tensor  # bool
    tokens_PG: Tensor | None = None  # how many tokens the loss counts; None means all
    surprisal_PG: Tensor | None = None  # nats per token: the mean of -log p over the sampled tokens
    correct_above: float = 0.5
    step: int = 0

    @property
    def scored_PG(self) -> Tensor:
        return ~torch.isnan(self.rewards_PG)

    @property
    def loss_tokens_PG(self) -> Tensor:
        """Number of tokens that the loss counts, float32."""
        tokens = self.lengths_PG if self.tokens_PG is None else self.tokens_PG
        return tokens.to(torch.float32)

    @property
    def pass_rate_P(self) -> Tensor:
        """Share of correct rollouts among the scored ones; 0 where none was scored."""
        return (self.rewards_PG > self.correct_above).sum(dim=1) / self.scored_PG.sum(dim=1).clamp(min=1)
