"""What is known of rollouts that were graded: rewards, lengths, ends, calls of tools.

Ranks measure their own rollouts and gather once. From then on every rank holds the facts of all
ranks on the host, so each computes alike whatever follows from them, without a collective call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from adora_vl.advantage.groups import (
    find_missing_scores,
    rollouts_that_leave,
    rollouts_without_reward,
)

_ALONE_IN_GROUP_REASON = "no other rollout of its group has a reward"


def rows_of_rank(values_N: Tensor, accelerator: Accelerator) -> Tensor:
    """Return this rank's part, (B,), of the values of the N rollouts of all ranks, (N,).

    Every rank has B = N / processes rollouts. For example, of 6 values on 3 ranks, rank 1 has the
    third and the fourth.

    Args:
        values_N: a value for each rollout, rank by rank.
        accelerator: that of the trainer, which knows the rank.
    """
    rows_per_rank = len(values_N) // accelerator.num_processes
    first_row = accelerator.process_index * rows_per_rank
    return values_N[first_row : first_row + rows_per_rank]


def weighted_sum(rewards_BF: Tensor, weights_F: Tensor) -> Tensor:
    """Return a reward for each of B rollouts: the weighted sum of F rewards, as TRL computes it.

    A NaN, for a function that gave no score, counts as 0. If all are NaN, the result is NaN. For
    example, with the weights 1 and 2, the rewards (0.5, NaN) give 0.5.

    Args:
        rewards_BF: the reward of each function for each rollout.
        weights_F: the weights of the functions.
    """
    rewards_B = (rewards_BF * weights_F.to(rewards_BF.device)).nansum(dim=1)
    is_unscored_B = torch.isnan(rewards_BF).all(dim=1)
    return torch.where(is_unscored_B, torch.nan, rewards_B)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutFacts:
    """Rewards, lengths and further measurements of N graded rollouts of all ranks, on the CPU.

    A tensor whose name ends in `_N` has a value for each rollout, and one that ends in `_NF` has
    one for each rollout and each of F reward functions. The rollouts of a group are neighbours.
    """

    rewards_NF: Tensor
    """The reward of each function, float32; NaN where it gave no score."""
    counted_rewards_NF: Tensor
    """The rewards that count: those of `rewards_NF`, but NaN for a rollout without a reward.

    `without_unrewarded` fills it. Before, it equals `rewards_NF`.
    """
    prompt_length_N: Tensor
    """Tokens of the prompt."""
    length_N: Tensor
    """Tokens that the policy has sampled."""
    has_no_end_N: Tensor
    """Whether the rollout has no end, by `StopCriteria`, bool."""
    reflective_words_N: Tensor
    """Reflective words in the text of the last turn."""
    surprisal_N: Tensor
    """Mean surprisal in nats per token; NaN where the sampler gives no log-probabilities."""
    tool_calls_N: Tensor
    """Calls of tools."""
    failed_calls_N: Tensor
    """Calls of tools that failed."""
    tool_seconds_N: Tensor
    """Seconds that all calls took together."""
    unanswered_N: Tensor
    """Whether the last turn may call a tool and nobody answers, bool."""
    net_claims_N: Tensor
    """True and new claims of the rollout less its errors, at least 0, as `steps` counts them. NaN
    where a row has no figure, and where nothing counts them."""
    missing_reward_reasons: tuple[str | None, ...] = ()
    """Why a rollout has no reward; None where it has one. `without_unrewarded` fills it."""
    extra_columns: Mapping[str, list[Any]] = field(default_factory=dict)
    """Columns of N values that reward functions have given to TRL's `log_extra`."""
    logged_metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that reward functions have given to TRL's `log_metric`."""

    @classmethod
    def gather_from_ranks(cls, measured: RolloutFacts, accelerator: Accelerator) -> RolloutFacts:
        """Gather the facts of all ranks' rollouts, and return them on each rank. Collective.

        There is a single gather: all facts are packed as the K float32 columns of one tensor,
        (B, K), and get their own dtypes again afterwards.

        Args:
            measured: the facts of this rank's B rollouts.
            accelerator: that of the trainer.
        """
        if accelerator.num_processes == 1:
            return measured
        # The facts with one value for each rollout. The rewards have F of them.
        fact_names = [fact.name for fact in fields(cls) if fact.name.endswith("_N")]
        columns = [getattr(measured, name).float()[:, None] for name in fact_names]
        packed_BK = torch.cat([measured.rewards_NF, *columns], dim=1)
        packed_NK = accelerator.gather(packed_BK.to(accelerator.device, non_blocking=True)).cpu()
        function_count = measured.rewards_NF.size(1)
        # In the order in which they were packed: first the rewards, then the other facts.
        rewards_NF = packed_NK[:, :function_count]
        other_columns = packed_NK[:, function_count:].unbind(dim=1)
        facts: dict[str, Any] = {"rewards_NF": rewards_NF, "counted_rewards_NF": rewards_NF}
        for name, values_N in zip(fact_names, other_columns, strict=True):
            facts[name] = values_N.to(getattr(measured, name).dtype)
        return cls(**facts)

    def without_unrewarded(
        self,
        reason_by_failed_call: Mapping[tuple[int, int], str],
        weights_F: Tensor,
        function_names: Sequence[str],
        group_size: int,
    ) -> RolloutFacts:
        """Take rollouts that lack a reward out of their groups, and store why they lack it.

        A rollout lacks a reward where a function that applies to its problem failed or returned
        None. A function that returns None for a whole group does not apply to its problem. A
        rollout that is taken out gets NaN in `counted_rewards_NF`. So it does not count in its
        group's mean, and its advantage is 0. If a single rollout remains in a group, it is taken
        out too.

        For example, in a group of 3 rollouts a function gives 1, None, 0. The second rollout is
        taken out. With 1, None, None all three are taken out.

        Args:
            reason_by_failed_call: the reason for each failed call of a reward function, by the
                number of the rollout over all ranks and the number of the function.
            weights_F: weights of the reward functions.
            function_names: names of the reward functions.
            group_size: rollouts of a group.
        """
        weights_F = weights_F.to(self.rewards_NF.device)
        has_failed_NF = torch.zeros_like(self.rewards_NF, dtype=torch.bool)
        for rollout, function in reason_by_failed_call:
            has_failed_NF[rollout, function] = True
        lacks_score_NF = find_missing_scores(
            self.rewards_NF, has_failed_NF, weights_F=weights_F, group_size=group_size
        )
        lacks_reward_N = rollouts_without_reward(self.rewards_NF, lacks_score_NF, weights_F)
        missing_reward_reasons: list[str | None] = [None] * len(self.rewards_NF)
        for rollout in lacks_reward_N.nonzero().flatten().tolist():
            functions_without_score = lacks_score_NF[rollout].nonzero().flatten().tolist()
            reasons = []
            for function in functions_without_score:
                # A function that has not failed has returned None.
                reason = reason_by_failed_call.get((rollout, function), "None")
                reasons.append(f"{function_names[function]}: {reason}")
            missing_reward_reasons[rollout] = "; ".join(reasons) or "no reward function scored it"
        # The rollouts without a reward, and those that would be the only one of their group.
        leaves_group_N = rollouts_that_leave(lacks_reward_N, group_size)
        return replace(
            self,
            counted_rewards_NF=torch.where(leaves_group_N[:, None], torch.nan, self.rewards_NF),
            missing_reward_reasons=tuple(missing_reward_reasons),
        )

    def select(self, rollouts: Sequence[int]) -> RolloutFacts:
        """Return the facts of rollouts with these indices, without extra columns and metrics."""
        selected_tensors: dict[str, Any] = {
            name: values[list(rollouts)] for name, values in self._tensors().items()
        }
        return replace(
            self,
            **selected_tensors,
            missing_reward_reasons=tuple(
                self.missing_reward_reasons[number] for number in rollouts
            ),
            extra_columns={},
            logged_metrics={},
        )

    def append(self, appended: RolloutFacts) -> RolloutFacts:
        """Return the facts of these rollouts, followed by the facts of the appended rollouts."""
        appended_tensors = appended._tensors()
        joined_tensors: dict[str, Any] = {
            name: torch.cat([values, appended_tensors[name]])
            for name, values in self._tensors().items()
        }
        return replace(
            self,
            **joined_tensors,
            missing_reward_reasons=(*self.missing_reward_reasons, *appended.missing_reward_reasons),
        )

    def append_graded(self, appended: RolloutFacts) -> RolloutFacts:
        """Append facts as `append` does, and average the metrics that reward functions have logged.

        A metric becomes the mean over both, weighted by rollouts. For example, 0.5 over 8 rollouts
        and 1.0 over 24 appended ones become 0.875. The extra columns are left out.

        Args:
            appended: the facts of rollouts that were graded later in the same generation.
        """
        rollouts = len(self.length_N)
        appended_rollouts = len(appended.length_N)
        metrics = dict(self.logged_metrics)
        for name, appended_mean in appended.logged_metrics.items():
            # A metric that was not logged before gets the mean of the appended rollouts.
            mean = self.logged_metrics.get(name, appended_mean)
            total = mean * rollouts + appended_mean * appended_rollouts
            metrics[name] = total / (rollouts + appended_rollouts)
        return replace(self.append(appended), extra_columns={}, logged_metrics=metrics)

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors by the names of their fields."""
        names = [fact.name for fact in fields(self) if fact.name.endswith(("_N", "_NF"))]
        return {name: getattr(self, name) for name in names}

    @property
    def reasons_not_learned_from(self) -> list[str | None]:
        """The reason why nothing is learned from each rollout; None where something is.

        `without_unrewarded` takes a rollout out of its group if its reward is missing or
        incomplete. It also takes out one with a reward that is the only one of its group, since
        there is nothing to compare it with. Such rollouts have NaN for all functions in
        `counted_rewards_NF`.
        """
        has_left_N = torch.isnan(self.counted_rewards_NF).all(dim=1).tolist()
        return [
            _ALONE_IN_GROUP_REASON if has_left and reason is None else reason
            for reason, has_left in zip(self.missing_reward_reasons, has_left_N, strict=True)
        ]

    @property
    def missing_reward_share(self) -> float:
        """Share of the rollouts without a reward."""
        lack_reward = [reason is not None for reason in self.missing_reward_reasons]
        return lack_reward.count(True) / len(lack_reward)

    @property
    def reflective_per_1000_tokens(self) -> float:
        """Reflective words per 1,000 tokens of all rollouts; NaN where no rollout has a token."""
        return (1000 * self.reflective_words_N.sum() / self.length_N.sum()).item()

    @property
    def tokens(self) -> int:
        """Tokens of all prompts and completions."""
        return int(self.prompt_length_N.double().sum() + self.length_N.double().sum())

    def with_logged(
        self, extra_columns: Mapping[str, list[Any]], logged_metrics: Mapping[str, float]
    ) -> RolloutFacts:
        """Return the facts with what reward functions logged, and the `net_claims_N` from it.

        Args:
            extra_columns: values of TRL's `log_extra` for all N rollouts, by the column's name.
            logged_metrics: values of TRL's `log_metric`, by the metric's name.
        """
        return replace(
            self,
            extra_columns=extra_columns,
            logged_metrics=logged_metrics,
            net_claims_N=_net_claims(extra_columns, len(self.length_N)),
        )


def _net_claims(extra_columns: Mapping[str, list[Any]], rollout_count: int) -> Tensor:
    """Return the net claims of N rollouts, (N,): true claims about the figure less false ones.

    They are at least 0. The reward function `steps` counts claims, and logs the columns `new` (true
    ones that a rollout makes for the first time) and `false`. If it has logged none, they are NaN.
    For example, `new` [3, 1, None] and `false` [1, 2, None] give 2, 0, NaN.

    Args:
        extra_columns: what reward functions have logged for all rollouts, by the column's name.
        rollout_count: N.
    """
    no_counts: list[Any] = [None] * rollout_count
    true_claims_by_rollout = extra_columns.get("new", no_counts)
    false_claims_by_rollout = extra_columns.get("false", no_counts)
    net_claims = []
    for true_claims, false_claims in zip(
        true_claims_by_rollout, false_claims_by_rollout, strict=True
    ):
        # A function of the user's may log other values under these names.
        if isinstance(true_claims, int) and isinstance(false_claims, int):
            net_claims.append(max(0.0, float(true_claims - false_claims)))
        else:
            net_claims.append(torch.nan)
    return torch.tensor(net_claims, dtype=torch.float32)
