"""GRPO's advantages, and DAPO's changes to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from adora_vl.advantage.method import Method, RunKeys, Settings, option

if TYPE_CHECKING:
    from adora_vl.advantage.groups import Groups
    from adora_vl.advantage.methods import AdvantagePipeline

SCALES = ("group", "batch", "none")


def is_constant(rewards_PG: Tensor) -> Tensor:
    """Which groups carry no signal because all their scored rewards are equal.

    Bool, (P,). NaN means unscored.
    """
    scored_PG = ~torch.isnan(rewards_PG)
    highest_P = torch.where(scored_PG, rewards_PG, -torch.inf).amax(dim=1)
    lowest_P = torch.where(scored_PG, rewards_PG, torch.inf).amin(dim=1)
    return highest_P <= lowest_P  # also true where nothing was scored: -inf <= inf


def deviation(rewards: Tensor, mean: Tensor) -> Tensor:
    """Sample standard deviation about `mean` along the last dimension.

    NaN is ignored; fewer than two values give 0.

    The order of operations is that of TRL (`trl.trainer.utils.nanstd`), so that both agree to the
    bit.
    """
    count = (~torch.isnan(rewards)).sum(dim=-1, keepdim=True)
    variance = torch.nanmean((rewards - mean) ** 2, dim=-1, keepdim=True) * (
        count / (count - 1).clamp(min=1)
    )
    return torch.where(count > 1, variance, 0.0).sqrt()


def group_advantages(rewards: Tensor, *, scale: str = "group", eps: float = 1e-4) -> Tensor:
    """`(r - mean of its group) / (std + eps)`, (P, G), of rewards (P, G), NaN for a rollout that no
    function scored.

    `scale`, as TRL's `scale_rewards`: the deviation is that of the group or the batch, or `none`
    divides. `eps`: TRL uses 1e-4, the reference 1e-9. An unscored rollout gets 0, and so does a
    group of equal rewards, exactly: in float32 the mean of seven times 0.1 is not 0.1, and a tiny
    `eps` would turn that into advantages near 1. Raises `ValueError` for another scale.
    """
    if scale not in SCALES:
        raise ValueError(f"scale: {scale!r} is not one of {', '.join(SCALES)}")
    advantages_PG = torch.nan_to_num(_normalised(rewards, scale, eps), nan=0.0)
    return torch.where(is_constant(rewards)[:, None], 0.0, advantages_PG)


def _normalised(rewards: Tensor, scale: str, eps: float) -> Tensor:
    """The rewards about the mean of their group, along the last dimension, in the unit that `scale`
    says.
    """
    centred = rewards - (mean := torch.nanmean(rewards, dim=-1, keepdim=True))
    unit = torch.ones(())
    if scale == "group":
        unit = deviation(rewards, mean) + eps
    elif scale == "batch":
        unit = deviation(rewards.flatten(), torch.nanmean(rewards)) + eps
    return centred / unit


def stock_advantages(
    rewards: Tensor, weights: Tensor, *, scale: str, sums_rewards: bool, eps: float = 1e-4
) -> Tensor:
    """What TRL's `_generate_and_score_completions` makes of (P, G, F) rewards, NaN where a function
    gave none: (P, G).

    `weights`: TRL's `reward_weights`. `scale`: its `scale_rewards`. `sums_rewards`: its
    `sum_then_normalize`, else its `normalize_then_sum`, which normalises each function by group and
    the sum by batch.
    """
    parts = (
        rewards
        if sums_rewards
        else _normalised(rewards.transpose(1, 2), "group", eps).transpose(1, 2)
    )
    sums = (parts * weights.to(rewards.device)).nansum(dim=2)
    sums = torch.where(torch.isnan(rewards).all(dim=2), torch.nan, sums)
    made = (
        _normalised(sums, scale, eps)
        if sums_rewards
        else _normalised(sums.view(1, -1), "group", eps)
    )
    return torch.nan_to_num(made, nan=0.0).view_as(sums)


def overlong_penalty(lengths: Tensor, max_length: int, cache: int) -> Tensor:
    """What DAPO adds to the reward (arXiv 2503.14476, equation 13): 0 up to `max_length - cache`
    tokens, then falling to -1 at `max_length`. Raises `ValueError` for a `cache` outside of that.
    """
    if not 0 < cache <= max_length:
        raise ValueError(
            f"overlong_cache: {cache} must be above 0 and at most max_completion_length: "
            f"{max_length}"
        )
    return ((max_length - cache - lengths.to(torch.float32)) / cache).clamp(-1.0, 0.0)


@dataclass(frozen=True)
class Grpo(Method):
    source = "arXiv 2402.03300"
    plain = True


@dataclass(frozen=True)
class DrGrpo(Grpo):
    settings: ClassVar[Settings] = {"loss_type": "dr_grpo", "scale_rewards": "none"}
    source = "arXiv 2503.20783"


@dataclass(frozen=True)
class Dapo(Method):
    """DAPO samples until a batch is full of groups that are neither all right nor all wrong.

    Dropped groups are not replaced here: the batch becomes smaller, and TRL's token mean is taken
    over the tokens of the rollouts that have a signal and have not left their group.
    """

    settings: ClassVar[Settings] = {
        "loss_type": "dapo",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "mask_truncated_completions": True,
        "beta": 0.0,
    }
    source = "arXiv 2503.14476"

    drop_constant: bool = option(
        True, "Take the mean over the tokens of the groups that have a signal."
    )
    overlong_cache: int | None = option(
        None,
        "Over so many last tokens before max_completion_length the reward falls by up to 1; null: "
        "it does not.",
    )

    @property
    def remakes(self) -> bool:
        return self.overlong_cache is not None

    @property
    def plain(self) -> bool:
        return not self.drop_constant and self.overlong_cache is None

    def apply(self, groups: Groups, advantages_PG: Tensor, run: AdvantagePipeline) -> Tensor:
        if self.overlong_cache is not None:
            advantages_PG = group_advantages(self._lowered(groups, run), scale=run.scale)
        if self.drop_constant:
            silent_PG = ~advantages_PG.any(dim=1, keepdim=True) | ~groups.scored_PG
            tokens_PG = groups.loss_tokens_PG
            left = torch.where(silent_PG, 0.0, tokens_PG).sum()
            advantages_PG = (
                advantages_PG * (tokens_PG.sum() / left) if bool(left > 0) else advantages_PG
            )
        return advantages_PG

    def signal(self, groups: Groups, signal_P: Tensor, run: AdvantagePipeline) -> Tensor:
        return ~is_constant(self._lowered(groups, run)) if self.overlong_cache else signal_P

    def _lowered(self, groups: Groups, run: AdvantagePipeline) -> Tensor:
        return groups.rewards_PG + overlong_penalty(
            groups.lengths_PG, run.max_length, self.overlong_cache or 0
        )

    def check(self, keys: RunKeys) -> None:
        if self.overlong_cache is not None:
            overlong_penalty(torch.zeros(1), keys.max_completion_length, self.overlong_cache)

    def costs(self, keys: RunKeys) -> str:
        return "groups without signal are dropped and not replaced"
