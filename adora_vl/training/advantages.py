"""Turns the facts of rollouts into the advantages that the loss gets.

Each batch of rollouts is judged when it is scored. The groups that are learned from are weighed
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
from adora_vl.training.rollout_facts import RolloutFacts, weighted_sum
from adora_vl.types import StepContext


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedGroups:
    """The groups of all ranks, judged: P groups of G rollouts."""

    groups: Groups
    weighting: AdoraWeighting
    """ADORA's weights and their reasons."""
    raw_PG: Tensor
    """The advantages as TRL makes them."""
    signal_P: Tensor
    """Which groups have something to teach, bool."""
    equal_reward_share: float
    """TRL's share of groups whose rewards do not differ."""
    ranks: int
    """Processes, which have equally many of the rollouts each."""

    def signal_of(self, rank: int) -> list[bool]:
        """Return whether each group of a rank has signal. Each rank has whole groups."""
        per_rank, rest = divmod(len(self.signal_P), self.ranks)
        assert rest == 0, "groups are spread over ranks"
        has_signal: list[bool] = self.signal_P[rank * per_rank : (rank + 1) * per_rank].tolist()
        return has_signal


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """The final advantages of the groups that the loss uses, of all ranks."""

    judged: JudgedGroups
    weighting: AdoraWeighting
    """The weights that were applied, and their reasons."""
    final_PG: Tensor
    """The advantages as the loss gets them."""
    figures: dict[str, float]
    """Figures of the methods, for the log."""

    @property
    def has_signal_N(self) -> Tensor:
        """Which rollouts are of groups with signal, and have not left them, bool, (P x G,)."""
        has_signal_P1 = self.final_PG.bool().any(dim=1, keepdim=True)
        return (has_signal_P1 & self.judged.groups.scored_PG).flatten()


class AdvantageComputer:
    """Judges and weighs whole groups by the run's methods.

    All ranks compute the same from the facts that they hold. They do so on the host: the figures
    are few, and whatever looks at a number on a device waits for the device.
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
        self.ranks = context.accelerator.num_processes
        self.correct_above = config.adora_correct_above
        self.methods = methods
        self.reward_weights_F = reward_weights_F
        # An answer of at least this many tokens is truncated; None: an answer without an end.
        self.truncated_at = None if tools else config.truncated_at
        self.masked = config.mask_truncated_completions

    def judge(self, facts: RolloutFacts, group_size: int, step: int) -> JudgedGroups:
        """Judge groups by the methods' criteria. This changes no state.

        Args:
            facts: of all ranks' rollouts.
            group_size: rollouts of a group, G.
            step: optimizer steps that have been made.
        """
        groups, raw_PG = self._groups(facts, group_size, step)
        return JudgedGroups(
            groups=groups,
            weighting=self.methods.weigh(groups),
            raw_PG=raw_PG,
            signal_P=self.methods.signal(groups),
            equal_reward_share=self._equal_share(groups, raw_PG),
            ranks=self.ranks,
        )

    def compute(self, judged: JudgedGroups) -> Advantages:
        """Compute the final advantages of the groups that the loss uses.

        Call it once in a generation: some methods learn from it.
        """
        final_PG = self.methods(judged.groups, judged.raw_PG)
        assert self.methods.weighting is not None
        return Advantages(
            judged=judged,
            weighting=self.methods.weighting,
            final_PG=final_PG,
            figures=dict(self.methods.figures),
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

    def _groups(self, facts: RolloutFacts, group_size: int, step: int) -> tuple[Groups, Tensor]:
        """Return the groups, and the advantages that TRL would give them, (P, G)."""
        rewards_NF = facts.counted_NF
        lengths_PG = facts.length_N.view(-1, group_size)
        cut_off_PG = facts.cut_off_N.view(-1, group_size)
        surprisal_PG = facts.surprisal_N.view(-1, group_size)
        rewards_PGF = rewards_NF.view(len(lengths_PG), group_size, -1)
        work_PG = facts.work_N.view(-1, group_size)
        is_work_known = self.methods.compares_work or not bool(work_PG.isnan().all())
        varied_P = None
        if not self.methods.sums_rewards:  # a group has signal where any weighed function varies
            is_weighed_F = self.reward_weights_F.to(rewards_NF.device) != 0
            weighed_PFG = rewards_PGF[:, :, is_weighed_F].transpose(1, 2)
            constant_PF = is_constant(weighed_PFG.flatten(0, 1)).view(len(lengths_PG), -1)
            varied_P = ~constant_PF.all(dim=1)
        raw_PG = stock_advantages(
            rewards_PGF,
            weights=self.reward_weights_F,
            scale=self.scale,
            sums_rewards=self.methods.sums_rewards,
        )
        truncated_PG = cut_off_PG if self.truncated_at is None else lengths_PG >= self.truncated_at
        # With `mask_truncated_completions` the loss counts no token of an answer without an end.
        tokens_PG = torch.where(cut_off_PG, 0.0, lengths_PG) if self.masked else lengths_PG
        groups = Groups(
            rewards_PG=weighted_sum(rewards_NF, self.reward_weights_F).view(-1, group_size),
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
