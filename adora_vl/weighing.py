"""Turns the grades of a generation into the advantages that the loss gets.

Groups are judged once, and the loss, the metrics and the record all use that result. The mathematics is in
`adora_vl.advantage`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from adora_vl.advantage import Groups
from adora_vl.advantage.adora import AdoraWeighting
from adora_vl.advantage.run import MethodRun
from adora_vl.batch import Batch
from adora_vl.reflection import reflective_words


@dataclass(frozen=True)
class Scores:
    """What is known of a generation after grading, of all ranks."""

    rewards_BF: Tensor  # of each reward function; NaN where it did not score the rollout
    lengths_B: Tensor  # completion tokens
    unended_B: Tensor  # bool: without an end-of-turn token
    reflective_B: Tensor  # reflective words in its text

    @classmethod
    def gathered(
        cls,
        rewards_BF: Tensor,
        completions: Sequence[Sequence[int]],
        texts: Sequence[str],
        ends: Collection[int],
        accelerator: Accelerator,
    ) -> Scores:
        """`rewards_BF` is of all ranks, as TRL gathers it; `completions` are this rank's token ids and `texts` what
        they say. A completion has ended if it is empty or its last token is one of `ends`.
        """
        facts_B3 = torch.tensor(
            [
                [len(ids), ids[-1] not in ends if ids else False, sum(reflective_words(text).values())]
                for ids, text in zip(completions, texts, strict=True)
            ],
            dtype=torch.float32,
            device=accelerator.device,
        )
        facts_B3 = accelerator.gather(facts_B3)
        return cls(rewards_BF, facts_B3[:, 0], facts_B3[:, 1] > 0, facts_B3[:, 2])

    @property
    def reflective_per_1000_tokens(self) -> float:
        """Reflective words per 1,000 tokens of all rollouts; NaN where no rollout has a token."""
        return (1000 * self.reflective_B.sum() / self.lengths_B.sum()).item()


@dataclass(frozen=True)
class Weighed:
    """The advantages of a generation, of all ranks, and why they are what they are."""

    groups: Groups
    weighting: AdoraWeighting  # the weights that were applied, and their reasons
    raw_PG: Tensor  # as TRL made them
    advantages_PG: Tensor  # as the loss gets them
    figures: dict[str, float]  # of the methods, for the log

    @property
    def live_B(self) -> Tensor:
        """Which rollouts are of groups with signal, bool, (P x G,)."""
        return self.advantages_PG.bool().any(dim=1, keepdim=True).expand_as(self.advantages_PG).flatten()


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


def weighted_sum(rewards_BF: Tensor, weights_F: Tensor) -> Tensor:
    """One reward per rollout, (B,), as TRL sums them; NaN where no function scored it."""
    rewards_B = (rewards_BF * weights_F.to(rewards_BF.device)).nansum(dim=1)
    return torch.where(torch.isnan(rewards_BF).all(dim=1), torch.nan, rewards_B)


class Weigher:
    """Applies the run's methods to whole groups. All ranks compute the same from gathered figures."""

    def __init__(
        self,
        methods: MethodRun,
        accelerator: Accelerator,
        *,
        reward_weights_F: Tensor,
        truncation: Truncation,
        correct_above: float,
    ) -> None:
        self.methods, self.accelerator = methods, accelerator
        self.reward_weights_F, self.truncation, self.correct_above = reward_weights_F, truncation, correct_above

    def __call__(self, scores: Scores, batch: Batch, generations: int, step: int, *, training: bool) -> Weighed:
        """`batch` is this rank's, with TRL's advantages. In an evaluation the groups are judged, but the advantages are
        left as TRL made them.
        """
        groups = self._groups(scores, batch, generations, step)
        raw_PG = self.accelerator.gather(batch["advantages"]).view(-1, generations)
        if not training:
            return Weighed(groups, self.methods.judge(groups), raw_PG, raw_PG, {})
        advantages_PG = self.methods(groups, raw_PG)
        assert self.methods.weighting is not None
        return Weighed(groups, self.methods.weighting, raw_PG, advantages_PG, dict(self.methods.figures))

    def _groups(self, scores: Scores, batch: Batch, generations: int, step: int) -> Groups:
        rewards_B = weighted_sum(scores.rewards_BF, self.reward_weights_F)
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
