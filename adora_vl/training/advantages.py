"""Turns the grades of a generation into the advantages that the loss gets.

Each batch of rollouts is judged when it is graded. The groups that are learned from are weighed
once, when none of them is replaced any more: some methods weigh a group by all the others. The
mathematics is in `adora_vl.advantage`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from adora_vl.advantage import Groups
from adora_vl.advantage.adora import AdoraWeighting
from adora_vl.advantage.grpo import deviation, is_constant, stock_advantages
from adora_vl.advantage.methods import AdvantagePipeline
from adora_vl.training.scoring import Scores, weighted_sum
from adora_vl.types import Batch, StepContext, loss_mask


@dataclass(frozen=True)
class Advantages:
    """The advantages of a batch, of all ranks, and why they are what they are."""

    groups: Groups
    weighting: AdoraWeighting  # the weights that were applied, and their reasons
    raw_PG: Tensor  # as TRL made them
    advantages_PG: Tensor  # as the loss gets them
    figures: dict[str, float]  # of the methods, for the log

    @property
    def live_B(self) -> Tensor:
        """Which rollouts are of groups with signal, and have not left them, bool, (P x G,)."""
        return (
            self.advantages_PG.bool().any(dim=1, keepdim=True) & self.groups.scored_PG
        ).flatten()


class AdvantageComputer:
    """Judges and weighs whole groups by the run's methods, on the host: all ranks compute the same
    from gathered figures, a few numbers, and whatever looks at one on a device waits for it.
    """

    def __init__(
        self,
        context: StepContext,
        methods: AdvantagePipeline,
        reward_weights_F: Tensor,
        *,
        tools: bool = False,
    ) -> None:
        """`reward_weights_F`: of the functions.

        `tools`: then what has no end is truncated, however short.
        """
        config = context.config
        self.scale = str(config.scale_rewards)
        self.accelerator = context.accelerator
        self.correct_above = config.adora_correct_above
        self.methods = methods
        self.reward_weights_F = reward_weights_F
        # From so many tokens on an answer is truncated; None: where it has no end.
        self.truncated_at = None if tools else config.truncated_at
        self.masked = config.mask_truncated_completions

    def judged(
        self, scores: Scores, batch: Batch, generations: int, step: int, *, training: bool
    ) -> Advantages:
        """What the criteria say of rollouts that have just been graded.

        `batch` is this rank's.

        In a training nothing is learned from them so far: the advantages are 0, and the batch gets
        the columns by which its groups can be chosen, and weighed later. In an evaluation it gets
        the advantages that TRL would give it.
        """
        surprisal_B = self.accelerator.gather(self._surprisal(batch)).cpu()
        facts = (scores.lengths_B, scores.unended_B.float(), surprisal_B)
        grades_BK = torch.cat([scores.rewards.counted_BF, torch.stack(facts, dim=1)], dim=1)
        groups, raw_PG = self._groups(grades_BK, generations, step)
        rows = len(batch["completion_ids"])
        device = batch["completion_ids"].device
        own = slice(
            self.accelerator.process_index * rows, (self.accelerator.process_index + 1) * rows
        )
        if training:
            batch["grades"] = grades_BK[own].to(device, non_blocking=True)
            signal_B = self.methods.signal(groups).repeat_interleave(generations)
            batch["signal"] = signal_B[own].to(device, non_blocking=True)
        else:
            batch["advantages"] = raw_PG.flatten()[own].to(device, non_blocking=True)
        advantages_PG = torch.zeros_like(raw_PG) if training else raw_PG
        figures = {"frac_reward_zero_std": self._equal_share(groups, raw_PG)}
        return Advantages(
            groups=groups,
            weighting=self.methods.weigh(groups),
            raw_PG=raw_PG,
            advantages_PG=advantages_PG,
            figures=figures,
        )

    def _equal_share(self, groups: Groups, raw_PG: Tensor) -> float:
        """TRL's share of the groups with a reward whose rewards do not differ, in the unit by which
        they are scaled.
        """
        rewards_PG = groups.rewards_PG
        if not self.methods.sums_rewards:  # the deviation of normalised sums, over itself and 1e-4
            spread = deviation(raw_PG.flatten(), raw_PG.mean()) / 1e4
        elif self.scale == "batch":
            spread = deviation(rewards_PG.flatten(), torch.nanmean(rewards_PG))
        else:
            spread = deviation(rewards_PG, torch.nanmean(rewards_PG, dim=1, keepdim=True))
        equal_P = torch.isclose(spread, torch.zeros_like(spread)).expand(len(rewards_PG), 1)
        return equal_P[groups.scored_PG.any(dim=1)].float().mean().item()

    def __call__(self, batch: Batch, generations: int, step: int) -> Advantages:
        """Of the groups that are learned from.

        `batch` is this rank's, with the columns that `judged` gave its rows.
        """
        grades_BK = self.accelerator.gather(batch["grades"]).cpu()
        groups, raw_PG = self._groups(grades_BK, generations, step)
        advantages_PG = self.methods(groups, raw_PG)
        assert self.methods.weighting is not None
        return Advantages(
            groups=groups,
            weighting=self.methods.weighting,
            raw_PG=raw_PG,
            advantages_PG=advantages_PG,
            figures=dict(self.methods.figures),
        )

    def _groups(self, grades_BK: Tensor, generations: int, step: int) -> tuple[Groups, Tensor]:
        """The groups, and the advantages that TRL would give them, (P, G)."""
        rewards_BF = grades_BK[:, :-3]
        lengths_PG, unended_PG, surprisal_PG = (
            part.view(-1, generations) for part in grades_BK[:, -3:].unbind(dim=1)
        )
        unended_PG = unended_PG > 0
        rewards_PGF = rewards_BF.view(len(lengths_PG), generations, -1)
        varied_P = None
        if not self.methods.sums_rewards:
            weighed_PFG = rewards_PGF[
                :, :, self.reward_weights_F.to(rewards_BF.device) != 0
            ].transpose(1, 2)
            varied_P = ~is_constant(weighed_PFG.flatten(0, 1)).view(len(lengths_PG), -1).all(dim=1)
        sums = self.methods.sums_rewards
        raw_PG = stock_advantages(
            rewards_PGF, weights=self.reward_weights_F, scale=self.scale, sums_rewards=sums
        )
        return Groups(
            rewards_PG=weighted_sum(rewards_BF, self.reward_weights_F).view(-1, generations),
            lengths_PG=lengths_PG,
            truncated_PG=unended_PG
            if self.truncated_at is None
            else lengths_PG >= self.truncated_at,
            tokens_PG=torch.where(unended_PG, 0.0, lengths_PG) if self.masked else lengths_PG,
            surprisal_PG=None if surprisal_PG.isnan().any() else surprisal_PG,
            correct_above=self.correct_above,
            step=step,
            varied_P=varied_P,
        ), raw_PG

    def _surprisal(self, batch: Batch) -> Tensor:
        """Mean surprisal of each rollout of this rank in nats per token, (B,); NaN where the engine
        gave none.
        """
        logps_BC = batch.get("sampling_per_token_logps")
        mask_BC = loss_mask(batch)
        if logps_BC is None:
            return torch.full((len(mask_BC),), torch.nan, device=mask_BC.device)
        total_B = (torch.nan_to_num(logps_BC) * mask_BC).sum(dim=1)
        return -total_B / mask_BC.sum(dim=1).clamp(min=1)
