"""Turns rewards and lengths of rollouts into the advantages that the loss gets.

`AdvantageComputer.assess` says which groups are worth learning from. It is called as soon as a
batch is scored. `compute` returns the final advantages. It is called once in a generation, when no
group is replaced any more, because some methods weigh a group by all the others. The mathematics
is in `adora_vl.advantage`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from adora_vl.advantage import Groups
from adora_vl.advantage.adora import AdoraWeighting
from adora_vl.advantage.grpo import compute_trl_advantages, is_constant
from adora_vl.advantage.methods import AdvantagePipeline
from adora_vl.training.rollout_facts import RolloutFacts, weighted_sum
from adora_vl.types import StepContext


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupAssessment:
    """Signal, weights and first advantages of all ranks' groups, before the final advantages.

    There are P groups of G rollouts.
    """

    groups: Groups
    weighting: AdoraWeighting
    """ADORA's weights and their reasons."""
    trl_advantages_PG: Tensor
    """TRL's advantages, before any method of this package changes them."""
    has_signal_P: Tensor
    """Which groups have something to teach, bool. A group of equal rewards has nothing to teach."""
    equal_reward_share: float
    """TRL's share of groups whose rewards do not differ."""
    num_ranks: int
    """Processes. Each has equally many of the groups."""

    @property
    def has_signal_by_rank(self) -> Tensor:
        """Which groups of each rank have signal, bool, (ranks, groups of a rank).

        `has_signal_P` has the groups of the first rank, then of the second, and so on.
        """
        return self.has_signal_P.view(self.num_ranks, -1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """The final advantages of all ranks' groups that the loss uses: P groups of G rollouts."""

    assessment: GroupAssessment
    final_PG: Tensor
    """The advantages as the loss gets them."""
    metrics: dict[str, float]
    """Metrics of the methods, for the log."""

    @property
    def has_signal_N(self) -> Tensor:
        """Which rollouts teach something, bool, (P x G,).

        A rollout teaches something if it has a reward, and any advantage of its group is not 0. For
        example, in a group with the advantages 1, -1, 0, whose last rollout has no reward, the
        first two do.
        """
        has_signal_P1 = self.final_PG.bool().any(dim=1, keepdim=True)
        return (has_signal_P1 & self.assessment.groups.has_reward_PG).flatten()


class AdvantageComputer:
    """Computes the advantages of whole groups by the run's methods (`adora_methods`).

    Every rank computes those of all ranks' groups, from the same facts. It does so on the CPU: the
    numbers are few, and reading one from a GPU waits for the GPU. A tensor whose name ends in `_PG`
    has P groups of G rollouts. One that ends in `_N` has all N = P x G rollouts, and one that ends
    in `_NF` their rewards by F reward functions.
    """

    def __init__(
        self,
        context: StepContext,
        pipeline: AdvantagePipeline,
        reward_weights_F: Tensor,
        *,
        has_tools: bool = False,
    ) -> None:
        """Build the computer.

        Args:
            context: accelerator, config, log and state, which every part of a training step gets.
            pipeline: its methods change TRL's advantages one after the other, for example by
                ADORA's weights.
            reward_weights_F: the weight of each reward function in the sum.
            has_tools: whether the run has tools. Their answers take up part of a completion, so the
                number of sampled tokens does not tell whether it was truncated. With tools every
                answer without an end counts as truncated.
        """
        config = context.config
        self.scale_rewards = str(config.scale_rewards)
        self.num_ranks = context.accelerator.num_processes
        # A rollout with a reward above this is correct.
        self.correct_above = config.adora_correct_above
        self.pipeline = pipeline
        self.reward_weights_F = reward_weights_F
        # A rollout of at least this many tokens is truncated; None: a rollout without an end is.
        self.truncated_at = None if has_tools else config.truncated_at
        self.masks_truncated = config.mask_truncated_completions

    def assess(self, facts: RolloutFacts, group_size: int, step: int) -> GroupAssessment:
        """Return TRL's advantages, ADORA's weights, and which groups have signal.

        Groups without signal may be replaced, and are then assessed anew. So this is called several
        times in a generation, and changes no state of the methods.

        Args:
            facts: rewards and lengths of all ranks' rollouts.
            group_size: rollouts of a group, G.
            step: optimizer steps that have been made.
        """
        groups = self._groups(facts, group_size, step)
        trl_result = compute_trl_advantages(
            facts.counted_rewards_NF.view(len(groups.rewards_PG), group_size, -1),
            weights_F=self.reward_weights_F,
            scale=self.scale_rewards,
            sums_rewards=self.pipeline.sums_rewards,
        )
        return GroupAssessment(
            groups=groups,
            weighting=self.pipeline.weigh(groups),
            trl_advantages_PG=trl_result.advantages_PG,
            has_signal_P=self.pipeline.groups_with_signal(groups),
            equal_reward_share=_equal_reward_share(groups, trl_result.standard_deviation),
            num_ranks=self.num_ranks,
        )

    def compute(self, assessment: GroupAssessment) -> Advantages:
        """Return the final advantages of the groups that the loss uses.

        It is called once in a generation, since a method such as DARO learns from every call.

        `assessment`: the last one of the generation, when no group is replaced any more.
        """
        pipeline = self.pipeline
        # The call also sets `pipeline.metrics`, which are logged.
        final_PG = pipeline.compute_advantages(
            assessment.groups, assessment.trl_advantages_PG, assessment.weighting
        )
        return Advantages(
            assessment=assessment,
            final_PG=final_PG,
            metrics=dict(pipeline.metrics),
        )

    def _groups(self, facts: RolloutFacts, group_size: int, step: int) -> Groups:
        """Return rewards, lengths and further facts by group, (P, G), from those by rollout, (N,).

        The arguments are those of `assess`.
        """
        rewards_NF = facts.counted_rewards_NF
        rewards_PG = weighted_sum(rewards_NF, self.reward_weights_F).view(-1, group_size)
        lengths_PG = facts.length_N.view(-1, group_size)
        has_no_end_PG = facts.has_no_end_N.view(-1, group_size)
        is_truncated_PG = has_no_end_PG
        if self.truncated_at is not None:
            is_truncated_PG = lengths_PG >= self.truncated_at
        # With `mask_truncated_completions` the loss counts no token of an answer without an end.
        loss_tokens_PG = lengths_PG
        if self.masks_truncated:
            loss_tokens_PG = torch.where(has_no_end_PG, 0.0, lengths_PG)
        # Surprisal is the mean of -log p over the tokens. It is NaN if the engine gives no
        # log-probabilities. Then it is NaN for all rollouts.
        surprisal_PG = facts.surprisal_N.view(-1, group_size)
        has_surprisal = not surprisal_PG.isnan().any()
        # Net claims are the true claims in a rollout less the false ones. They are NaN for a
        # problem without a figure, and a batch may have problems of both kinds. A method that
        # compares them decides itself about a batch in which all of them are NaN.
        net_claims_PG = facts.net_claims_N.view(-1, group_size)
        has_net_claims = self.pipeline.compares_net_claims or not net_claims_PG.isnan().all()
        return Groups(
            rewards_PG=rewards_PG,
            lengths_PG=lengths_PG,
            truncated_PG=is_truncated_PG,
            tokens_PG=loss_tokens_PG,
            surprisal_PG=surprisal_PG if has_surprisal else None,
            correct_above=self.correct_above,
            step=step,
            any_function_differs_P=self._rewards_vary(rewards_NF, group_size),
            net_claims_PG=net_claims_PG if has_net_claims else None,
        )

    def _rewards_vary(self, rewards_NF: Tensor, group_size: int) -> Tensor | None:
        """Return which groups get unequal rewards from at least one function, bool, (P,).

        It is needed where each function's rewards are normalised on their own. For example, a group
        of two rollouts with the rewards (1, 0) by one function and (0, 1) by another has signal
        then, though both sums are 1. If the sums are normalised, the result is None. Functions of
        weight 0 do not count.

        Args:
            rewards_NF: the rewards of each function.
            group_size: rollouts of a group, G.
        """
        if self.pipeline.sums_rewards:
            return None
        has_weight_F = self.reward_weights_F.to(rewards_NF.device) != 0
        rewards_PGF = rewards_NF.view(-1, group_size, rewards_NF.size(1))
        # One row for each group and function, with the rewards of the group's rollouts.
        rewards_PFG = rewards_PGF[:, :, has_weight_F].transpose(1, 2)
        is_constant_PF = is_constant(rewards_PFG.flatten(0, 1)).view(len(rewards_PFG), -1)
        return ~is_constant_PF.all(dim=1)


def _equal_reward_share(groups: Groups, standard_deviation: Tensor) -> float:
    """Return the share of groups whose rewards are equal, as TRL computes it for its log.

    Groups without any reward are left out. For TRL the rewards of a group are equal where the
    standard deviation by which it scales them is 0.

    Args:
        groups: all P groups of the generation, of G rollouts each.
        standard_deviation: TRL's, one for each group or one for all of them. With one for all,
            either all groups count as equal or none does.
    """
    is_zero = torch.isclose(standard_deviation, torch.zeros_like(standard_deviation))
    is_equal_P1 = is_zero.expand(len(groups.rewards_PG), 1)
    has_reward_P = groups.has_reward_PG.any(dim=1)
    return is_equal_P1[has_reward_P].float().mean().item()
