"""The groups of a generation, and options that may change from step to step."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adora_vl.advantage.grpo import is_constant

SHAPES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class Schedule:
    """`start` up to step `steps[0]`, `end` from step `steps[1]` on, and a line or half a cosine
    between them.

    ADORA's authors suggest changing lambda and tau during training (arXiv 2602.10019). The shapes
    are the usual ones.
    """

    shorthand: ClassVar[str] = "start"  # as an option: 0.1 is {start: 0.1}

    start: float
    end: float | None = None
    shape: str = "constant"
    steps: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ValueError(f"shape: {self.shape!r} is not one of {', '.join(SHAPES)}")
        if self.shape == "constant" and self.end not in (None, self.start):
            raise ValueError(
                f"end: {self.end} needs shape: linear or cosine, a constant stays at {self.start}"
            )
        if self.shape != "constant" and (
            self.end is None or not 0 <= self.steps[0] < self.steps[1]
        ):
            steps = "steps: [first, last] with 0 <= first < last"
            raise ValueError(f"shape: {self.shape} needs end: a number, and {steps}")

    def __str__(self) -> str:
        return f"{self.start:g}" if self.end is None else f"{self.start:g} to {self.end:g}"

    def at(self, step: int) -> float:
        """The value in a step, counted from 0."""
        if self.shape == "constant" or self.end is None:
            return self.start
        first, last = self.steps
        done = min(max((step - first) / (last - first), 0.0), 1.0)
        if self.shape == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        return self.start + (self.end - self.start) * done

    @property
    def values(self) -> tuple[float, float]:
        """The first and the last value; all others lie between them."""
        return self.start, self.start if self.end is None else self.end


def scheduled(value: Schedule | float) -> Schedule:
    """The schedule itself, or one that stays at the number."""
    return value if isinstance(value, Schedule) else Schedule(value)


@dataclass(frozen=True)
class Groups:
    """One generation batch of whole groups. `step` counts optimizer steps from 0."""

    # NaN for a rollout that has left its group: its advantage is 0, and it counts in no mean
    rewards_PG: Tensor
    lengths_PG: Tensor  # completion tokens
    truncated_PG: Tensor  # bool
    tokens_PG: Tensor | None = None  # how many tokens the loss counts; None means all
    surprisal_PG: Tensor | None = None  # nats per token: the mean of -log p over the sampled tokens
    correct_above: float = 0.5
    step: int = 0
    # bool: whether rewards differ within it; None means whether `rewards_PG` do
    varied_P: Tensor | None = None

    @property
    def scored_PG(self) -> Tensor:
        return ~torch.isnan(self.rewards_PG)

    @property
    def differs_P(self) -> Tensor:
        return ~is_constant(self.rewards_PG) if self.varied_P is None else self.varied_P

    @property
    def loss_tokens_PG(self) -> Tensor:
        """Number of tokens that the loss counts, float32."""
        tokens = self.lengths_PG if self.tokens_PG is None else self.tokens_PG
        return tokens.to(torch.float32)

    @property
    def pass_rate_P(self) -> Tensor:
        """Share of correct rollouts among the scored ones; 0 where none is scored."""
        return self.correct_PG.sum(dim=1) / self.scored_PG.sum(dim=1).clamp(min=1)

    @property
    def correct_PG(self) -> Tensor:
        return self.rewards_PG > self.correct_above

    @property
    def wrong_PG(self) -> Tensor:
        return ~self.correct_PG & self.scored_PG

    @property
    def finished_wrong_PG(self) -> Tensor:
        """Wrong and not truncated."""
        return self.wrong_PG & ~self.truncated_PG

    @property
    def longest_correct_P(self) -> Tensor:
        """Tokens, float32; -inf where no rollout is correct."""
        return torch.where(self.correct_PG, self.lengths_PG.to(torch.float32), -torch.inf).amax(
            dim=1
        )

    @property
    def mean_finished_wrong_P(self) -> Tensor:
        """Tokens, float32; NaN where there is no untruncated wrong rollout."""
        total_P = torch.where(self.finished_wrong_PG, self.lengths_PG.to(torch.float32), 0.0).sum(
            dim=1
        )
        return total_P / self.finished_wrong_PG.sum(dim=1)

    @property
    def tied_P(self) -> Tensor:
        """Whether the longest correct rollout is exactly as long as the mean of the untruncated
        wrong ones.
        """
        return self.longest_correct_P == self.mean_finished_wrong_P


def lacking_scores(
    rewards_BF: Tensor, failed_BF: Tensor, weights_F: Tensor, generations: int
) -> Tensor:
    """Which scores a rollout lacks, bool, (B, F): of functions with a weight that apply to its
    problem.

    `rewards_BF` is NaN where a function returned None, `failed_BF` true where the call failed;
    `weights_F`: TRL's `reward_weights`; `generations`: G. A function does not apply where it
    returned None for a whole group without a failure: TRL leaves it out of the sum.
    """
    none_BF = torch.isnan(rewards_BF)
    applies_PGF = (~none_BF | failed_BF).view(-1, generations, len(weights_F))
    applies_BF = applies_PGF.any(dim=1).repeat_interleave(generations, dim=0)
    return none_BF & applies_BF & (weights_F != 0)


def unrewarded(rewards_BF: Tensor, lacks_BF: Tensor, weights_F: Tensor) -> Tensor:
    """Which rollouts lack a score, or have none from a function with a weight, bool, (B,)."""
    scored_BF = ~torch.isnan(rewards_BF) & (weights_F != 0)
    return lacks_BF.any(dim=1) | ~scored_BF.any(dim=1)


def leaving(unrewarded_B: Tensor, generations: int) -> Tensor:
    """Which rollouts leave their group, bool, (B,): those without a reward, and one that would be
    left alone.
    """
    left_P = (~unrewarded_B).view(-1, generations).sum(dim=1)
    dissolved_P = (left_P < 2) & (left_P < generations)
    return unrewarded_B | dissolved_P.repeat_interleave(generations)
