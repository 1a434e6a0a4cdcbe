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
    """The advantages of a batch, of all ranks, and why they are what they are.

    There are P groups of G rollouts.
    """

    groups: Groups
    weighting: AdoraWeighting  # the weights that were applied, and their reasons
    raw_PG: Tensor  # as TRL made them
    advantages_PG: Tensor  # as the loss gets them
    figures: dict[str, float]  # of the methods, for the log

    @property
    def live_B(self) -> Tensor:
        """Which rollouts are of groups with signal, and have not left them, bool, (P x G,)."""
        has_signal_P1 = self.advantages_PG.bool().any(dim=1, keepdim=True)
        return (has_signal_P1 & self.groups.scored_PG).flatten()


class AdvantageComputer:
    """Judges and weighs whole groups by the run's methods.

    All ranks compute the same from gathered figures. They do so on the host: the figures are few,
    and whatever looks at a number on a device waits for the device.
    """

    def __init__(
        self,
        context: StepContext,
        methods: AdvantagePipeline,
        reward_weights_F: Tensor,
        *,
        tools: bool = False,
    ) -> None:
        """Build the computer.

        Args:
            context: what every part of a training step is built from.
            methods: weigh the groups.
            reward_weights_F: the weight of each reward function in the sum.
            tools: whether the run has tools. What they answer takes room, so an answer without an
                end is truncated, however few tokens it has.
        """
        config = context.config
        self.scale = str(config.scale_rewards)
        self.accelerator = context.accelerator
        self.correct_above = config.adora_correct_above
        self.methods = methods
        self.reward_weights_F = reward_weights_F
        # An answer of at least this many tokens is truncated; None: an answer without an end.
        self.truncated_at = None if tools else config.truncated_at
        self.masked = config.mask_truncated_completions

    def judged(
        self, scores: Scores, batch: Batch, generations: int, step: int, *, training: bool
    ) -> Advantages:
        """Judge rollouts that have just been graded by the methods' criteria. Collective.

        In a training nothing is learned from them so far: the advantages are 0, and the batch gets
        the columns by which its groups can be chosen and weighed later. In an evaluation it gets
        the advantages that TRL would give it.

        Args:
            scores: of all ranks.
            batch: of this rank; gets the columns.
            generations: rollouts of a group, G.
            step: optimizer steps that have been made.
            training: whether the batch is of a training.
        """
        # Collective: figures of all ranks.
        surprisal_B = self.accelerator.gather(self._surprisal(batch)).cpu()
        facts_B4 = torch.stack(
            [scores.lengths_B, scores.unended_B.float(), surprisal_B, scores.work_B], dim=1
        )
        grades_BK = torch.cat([scores.rewards.counted_BF, facts_B4], dim=1)
        groups, raw_PG = self._groups(grades_BK, generations, step)
        rows = len(batch["completion_ids"])
        device = batch["completion_ids"].device
        rank = self.accelerator.process_index
        of_rank = slice(rank * rows, (rank + 1) * rows)
        if training:
            batch["grades"] = grades_BK[of_rank].to(device, non_blocking=True)
            signal_B = self.methods.signal(groups).repeat_interleave(generations)
            batch["signal"] = signal_B[of_rank].to(device, non_blocking=True)
        else:
            batch["advantages"] = raw_PG.flatten()[of_rank].to(device, non_blocking=True)
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
        """TRL's share of groups whose rewards do not differ, of the groups that have a reward.

        The difference is measured in the unit by which rewards are scaled.
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
        """Final advantages of the groups that the loss will use. Collective.

        Args:
            batch: of this rank, with the columns that `judged` gave its rows.
            generations: rollouts of a group, G.
            step: optimizer steps that have been made.
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
        """The groups, and the advantages that TRL would give them, (P, G).

        `grades_BK` has the column `grades` of all ranks.
        """
        # The last four columns are facts, in the order in which `judged` joins them.
        rewards_BF, facts_B4 = torch.split(grades_BK, [grades_BK.size(1) - 4, 4], dim=1)
        lengths_B, unended_B, surprisal_B, work_B = facts_B4.unbind(dim=1)
        lengths_PG = lengths_B.view(-1, generations)
        unended_PG = unended_B.view(-1, generations) > 0
        surprisal_PG = surprisal_B.view(-1, generations)
        rewards_PGF = rewards_BF.view(len(lengths_PG), generations, -1)
        work_PG = work_B.view(-1, generations)
        is_work_known = self.methods.compares_work or not bool(work_PG.isnan().all())
        varied_P = None
        if not self.methods.sums_rewards:  # a group has signal where any weighed function varies
            is_weighed_F = self.reward_weights_F.to(rewards_BF.device) != 0
            weighed_PFG = rewards_PGF[:, :, is_weighed_F].transpose(1, 2)
            constant_PF = is_constant(weighed_PFG.flatten(0, 1)).view(len(lengths_PG), -1)
            varied_P = ~constant_PF.all(dim=1)
        raw_PG = stock_advantages(
            rewards_PGF,
            weights=self.reward_weights_F,
            scale=self.scale,
            sums_rewards=self.methods.sums_rewards,
        )
        truncated_PG = unended_PG if self.truncated_at is None else lengths_PG >= self.truncated_at
        # With `mask_truncated_completions` the loss counts no token of an answer without an end.
        tokens_PG = torch.where(unended_PG, 0.0, lengths_PG) if self.masked else lengths_PG
        groups = Groups(
            rewards_PG=weighted_sum(rewards_BF, self.reward_weights_F).view(-1, generations),
            lengths_PG=lengths_PG,
            truncated_PG=truncated_PG,
            tokens_PG=tokens_PG,
            surprisal_PG=None if surprisal_PG.isnan().any() else surprisal_PG,
            correct_above=self.correct_above,
            step=step,
            varied_P=varied_P,
            work_PG=work_PG if is_work_known else None,
        )
        return groups, raw_PG

    def _surprisal(self, batch: Batch) -> Tensor:
        """Mean surprisal of each rollout of this rank in nats per token, (B,).

        NaN where the batch lacks the engine's log-probabilities.
        """
        logps_BC = batch.get("sampling_per_token_logps")
        mask_BC = loss_mask(batch)
        if logps_BC is None:
            return torch.full((len(mask_BC),), torch.nan, device=mask_BC.device)
        total_B = (torch.nan_to_num(logps_BC) * mask_BC).sum(dim=1)
        return -total_B / mask_BC.sum(dim=1).clamp(min=1)
