"""The groups of a generation, and options whose value may change from step to step."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adora_vl.advantage.grpo import is_constant

SCHEDULE_SHAPES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class Schedule:
    """A value that changes during training, or a constant.

    With `steps: (first, last)` it is `start` up to the first step and `end` from the last step on.
    Between them it follows a line or half a cosine. ADORA's authors suggest to change lambda and
    tau during training (arXiv 2602.10019) without a formula; the shapes are the usual ones.

    Raises `ValueError` if the fields contradict each other.
    """

    shorthand: ClassVar[str] = "start"  # as an option: 0.1 is {start: 0.1}

    start: float
    end: float | None = None
    shape: str = "constant"
    steps: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        """Raise `ValueError` if the fields contradict each other.

        A constant takes no other `end`; the other shapes need `end` and a range of steps.
        """
        if self.shape not in SCHEDULE_SHAPES:
            raise ValueError(f"shape: {self.shape!r} is not one of {', '.join(SCHEDULE_SHAPES)}")
        if self.shape == "constant" and self.end not in (None, self.start):
            raise ValueError(
                f"end: {self.end} needs shape: linear or cosine, a constant stays at {self.start}"
            )
        first_step, last_step = self.steps
        has_end_and_range = self.end is not None and 0 <= first_step < last_step
        if self.shape != "constant" and not has_end_and_range:
            raise ValueError(
                f"shape: {self.shape} needs end: a number, and steps: [first, last] with 0 <= "
                "first < last"
            )

    def __str__(self) -> str:
        return f"{self.start:g}" if self.end is None else f"{self.start:g} to {self.end:g}"

    def at(self, step: int) -> float:
        """Return the value in a step, counted from 0.

        For example, a line from 0.1 to 0.5 over the steps 10 to 20 has 0.1 in step 3, 0.3 in step
        15, and 0.5 in step 30.
        """
        if self.shape == "constant" or self.end is None:
            return self.start
        first_step, last_step = self.steps
        progress = min(max((step - first_step) / (last_step - first_step), 0.0), 1.0)
        if self.shape == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return self.start + (self.end - self.start) * progress

    @property
    def values(self) -> tuple[float, float]:
        """The first and the last value; all others lie between them."""
        return self.start, self.start if self.end is None else self.end


def as_schedule(value: Schedule | float) -> Schedule:
    """Return the schedule itself, or a constant schedule of the number."""
    return value if isinstance(value, Schedule) else Schedule(value)


@dataclass(frozen=True)
class Groups:
    """The P groups of one generation, each with all its G rollouts.

    A generation is one sampling of rollouts, which is learned from in one or more optimizer steps.
    """

    rewards_PG: Tensor
    """NaN for a rollout without a reward: its advantage is 0, and it counts in no mean."""
    lengths_PG: Tensor
    """The number of completion tokens."""
    truncated_PG: Tensor
    """Whether a completion was cut off, bool."""
    tokens_PG: Tensor | None = None
    """The number of tokens that the loss counts; None means all."""
    surprisal_PG: Tensor | None = None
    """The mean of -log p over the sampled tokens, in nats per token."""
    correct_above: float = 0.5
    """A rollout is correct if its reward is above this."""
    step: int = 0
    """The optimizer step, counted from 0."""
    any_function_differs_P: Tensor | None = None
    """Whether any reward function gives a group different rewards, bool.

    None where only the sums of the functions' rewards count, which are `rewards_PG`.
    """
    net_claims_PG: Tensor | None = None
    """The true and new claims of each rollout less its false ones, at least 0.

    NaN for a problem without a figure; None in a run that does not measure it.
    """

    @property
    def has_reward_PG(self) -> Tensor:
        """Which rollouts have a reward, bool."""
        return ~torch.isnan(self.rewards_PG)

    @property
    def rewards_differ_P(self) -> Tensor:
        """Whether the rewards of a group differ, so that it can have advantages, bool."""
        if self.any_function_differs_P is not None:
            return self.any_function_differs_P
        return ~is_constant(self.rewards_PG)

    @property
    def loss_tokens_PG(self) -> Tensor:
        """The number of tokens that the loss counts, float32."""
        tokens_PG = self.lengths_PG if self.tokens_PG is None else self.tokens_PG
        return tokens_PG.to(torch.float32)

    @property
    def pass_rate_P(self) -> Tensor:
        """The share of correct rollouts among the scored ones; 0 where no rollout is scored."""
        return self.correct_PG.sum(dim=1) / self.has_reward_PG.sum(dim=1).clamp(min=1)

    @property
    def correct_PG(self) -> Tensor:
        """Which rollouts are correct, bool."""
        return self.rewards_PG > self.correct_above

    @property
    def wrong_PG(self) -> Tensor:
        """Which rollouts are scored and not correct, bool."""
        return ~self.correct_PG & self.has_reward_PG

    @property
    def finished_wrong_PG(self) -> Tensor:
        """Which rollouts are wrong and not truncated, bool."""
        return self.wrong_PG & ~self.truncated_PG

    @property
    def longest_correct_P(self) -> Tensor:
        """The length of the longest correct rollout, float32; -inf where no rollout is correct."""
        return self.largest_correct_P(self.lengths_PG)

    @property
    def mean_finished_wrong_P(self) -> Tensor:
        """The mean length of the untruncated wrong rollouts, float32; NaN without any."""
        return self.mean_of_finished_wrong_P(self.lengths_PG)

    @property
    def has_net_claims_P(self) -> Tensor:
        """Which groups have a problem with a figure, so that their net claims are known, bool."""
        if self.net_claims_PG is None:
            return torch.zeros(len(self.rewards_PG), dtype=torch.bool)
        return ~torch.isnan(self.net_claims_PG).any(dim=1)

    def largest_correct_P(self, measure_PG: Tensor) -> Tensor:
        """Return the largest measure of a correct rollout in each group, float32.

        It is -inf where no rollout is correct. For example, of the measures 4, 9, 7, of which the
        first and the last belong to correct rollouts, it is 7.
        """
        measure_PG = measure_PG.to(torch.float32)
        return torch.where(self.correct_PG, measure_PG, -torch.inf).amax(dim=1)

    def mean_of_finished_wrong_P(self, measure_PG: Tensor) -> Tensor:
        """Return the mean measure of the untruncated wrong rollouts of each group, float32.

        It is NaN where there are none.
        """
        measure_PG = measure_PG.to(torch.float32)
        total_P = torch.where(self.finished_wrong_PG, measure_PG, 0.0).sum(dim=1)
        return total_P / self.finished_wrong_PG.sum(dim=1)


def find_missing_scores(
    rewards_NF: Tensor, failed_NF: Tensor, weights_F: Tensor, group_size: int
) -> Tensor:
    """Return for N rollouts and F reward functions whether a score is missing: bool, (N, F).

    A reward function that returns None for a whole group, without a failed call, does not apply to
    the problem, and TRL leaves it out of the sum. Any other None is a missing score. For example,
    the scores 1, None, 0 of a group have a missing one, and None, None, None have none. The score
    of a function with the weight 0 is never missing.

    Args:
        rewards_NF: the scores, group by group, NaN where a function returned None.
        failed_NF: where the call of the function failed, bool.
        weights_F: TRL's `reward_weights`.
        group_size: the number of rollouts in each of the P groups, G.
    """
    has_no_score_NF = torch.isnan(rewards_NF)
    # A function applies to a problem if it has scored one of its rollouts, or has tried to.
    scored_or_failed_NF = ~has_no_score_NF | failed_NF
    scored_or_failed_PGF = scored_or_failed_NF.view(-1, group_size, len(weights_F))
    applies_PF = scored_or_failed_PGF.any(dim=1)
    applies_NF = applies_PF.repeat_interleave(group_size, dim=0)
    return has_no_score_NF & applies_NF & (weights_F != 0)


def rollouts_without_reward(
    rewards_NF: Tensor, lacks_score_NF: Tensor, weights_F: Tensor
) -> Tensor:
    """Return which of N rollouts have no complete reward: bool, (N,).

    Such a rollout lacks a score, or no function with a weight other than 0 has scored it.

    Args:
        rewards_NF: the score of each of F reward functions, NaN where it returned None.
        lacks_score_NF: where a score is missing, as `find_missing_scores` returns it: NaN of a
            function that applies to the rollout's problem.
        weights_F: TRL's `reward_weights`.
    """
    has_weighted_score_NF = ~torch.isnan(rewards_NF) & (weights_F != 0)
    return lacks_score_NF.any(dim=1) | ~has_weighted_score_NF.any(dim=1)


def rollouts_that_leave(is_unrewarded_N: Tensor, group_size: int) -> Tensor:
    """Return which of N rollouts are left out of their group: bool, (N,).

    These are the rollouts without a reward. If a single rollout remains in a group, it is left out
    too, since a group of one has no signal. For example, in groups of 3, if the rollouts 1, 3 and
    4, counted from 0, have no reward, the rollouts 1, 3, 4 and 5 leave.
    """
    # For each of P groups.
    remaining_P = (~is_unrewarded_N).view(-1, group_size).sum(dim=1)
    # With `num_generations: 1` a group has one rollout and has lost none.
    has_lost_rollouts_P = remaining_P < group_size
    leaves_as_a_whole_P = has_lost_rollouts_P & (remaining_P < 2)
    return is_unrewarded_N | leaves_as_a_whole_P.repeat_interleave(group_size)
