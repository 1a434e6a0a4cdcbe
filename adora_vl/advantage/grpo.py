"""GRPO's advantages, as TRL computes them, and DAPO's changes to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from adora_vl.advantage.method import Method, RunKeys, TrlKeys, option

if TYPE_CHECKING:
    from adora_vl.advantage.groups import Groups
    from adora_vl.advantage.methods import AdvantagePipeline

KNOWN_SCALES = ("group", "batch", "none")
# Losses that divide by the tokens of the generation, which TRL is given with each micro-batch.
LOSSES_WITH_TOKEN_MEAN = frozenset({"dapo", "cispo", "vespo"})
TRL_EPS = 1e-4  # TRL adds it to a standard deviation by which it divides


def is_constant(rewards_PG: Tensor) -> Tensor:
    """Return which of P groups have G equal rewards, and so advantages of 0: bool, (P,).

    NaN marks an unscored rollout, which does not count. For example, the groups [1, 1, NaN] and
    [NaN, NaN, NaN] are constant, and [1, 0, NaN] is not.
    """
    has_reward_PG = ~torch.isnan(rewards_PG)
    highest_P = torch.where(has_reward_PG, rewards_PG, -torch.inf).amax(dim=1)
    lowest_P = torch.where(has_reward_PG, rewards_PG, torch.inf).amin(dim=1)
    return highest_P <= lowest_P  # also true where nothing was scored: -inf <= inf


def nan_standard_deviation(rewards: Tensor, mean: Tensor) -> Tensor:
    """Return the sample standard deviation of rewards about `mean`, along the last dimension.

    The last dimension is kept with size 1. NaN is ignored, and fewer than two values give 0. The
    order of operations is that of TRL (`trl.trainer.utils.nanstd`), so that both agree to the bit.
    """
    count = (~torch.isnan(rewards)).sum(dim=-1, keepdim=True)
    bessel_correction = count / (count - 1).clamp(min=1)
    variance = torch.nanmean((rewards - mean) ** 2, dim=-1, keepdim=True) * bessel_correction
    return torch.where(count > 1, variance, 0.0).sqrt()


def group_advantages(rewards: Tensor, *, scale: str = "group", eps: float = TRL_EPS) -> Tensor:
    """Return the advantages of GRPO, `(reward - mean of the group) / (std + eps)`: (P, G).

    For example, the rewards 1, 0, NaN have the mean 0.5 and get about 0.707, -0.707, 0. An unscored
    rollout (NaN) gets 0.

    A group of equal rewards gets exactly 0. Without this rule, rounding would show: in float32 the
    mean of seven times 0.1 is not 0.1, and that error divided by a tiny `eps` is near 1.

    Args:
        rewards: (P, G), of P groups with G rollouts, NaN for a rollout that no reward function
            scored.
        scale: `group` divides by the standard deviation of the group, `batch` by that of all
            rewards, and `none` does not divide (Dr. GRPO, arXiv 2503.20783). The names are those of
            TRL's `scale_rewards`.
        eps: added to the standard deviation. TRL uses 1e-4, the reference 1e-9.

    Raises `ValueError` for an unknown scale.
    """
    if scale not in KNOWN_SCALES:
        raise ValueError(f"scale: {scale!r} is not one of {', '.join(KNOWN_SCALES)}")
    advantages_PG = torch.nan_to_num(_normalise(rewards, scale=scale, eps=eps), nan=0.0)
    return torch.where(is_constant(rewards)[:, None], 0.0, advantages_PG)


def _standard_deviation(rewards: Tensor, scale: str) -> Tensor:
    """Return the standard deviation of each group, or of all rewards with `scale` `batch`.

    A group is the last dimension, which has size 1 in the result.
    """
    if scale == "batch":
        return nan_standard_deviation(rewards.flatten(), torch.nanmean(rewards))
    return nan_standard_deviation(rewards, torch.nanmean(rewards, dim=-1, keepdim=True))


def _normalise(rewards: Tensor, *, scale: str, eps: float) -> Tensor:
    """Return the rewards minus the mean of their group, divided as TRL's `scale_rewards` says.

    A group is the last dimension. The order of operations is that of TRL, so that both agree to the
    bit. NaN stays NaN.

    Args:
        rewards: of any shape.
        scale: `group` divides by the standard deviation of the group plus `eps`, `batch` by that of
            all rewards, and `none` does not divide.
        eps: added to the standard deviation, so that no division is by 0.
    """
    centred = rewards - torch.nanmean(rewards, dim=-1, keepdim=True)
    return centred if scale == "none" else centred / (_standard_deviation(rewards, scale) + eps)


class TrlAdvantages(NamedTuple):
    """The advantages of TRL, and the standard deviation of the rewards that it logs."""

    advantages_PG: Tensor
    standard_deviation: Tensor  # of each group, (P, 1), or of all rollouts, with one value


def compute_trl_advantages(
    rewards_PGF: Tensor, weights_F: Tensor, *, scale: str, sums_rewards: bool
) -> TrlAdvantages:
    """Compute the advantages as TRL's `_generate_and_score_completions` does.

    There are P groups of G rollouts, and F reward functions.

    Args:
        rewards_PGF: the reward of each function, NaN where it returned none.
        weights_F: TRL's `reward_weights`.
        scale: TRL's `scale_rewards`: `group`, `batch` or `none`.
        sums_rewards: whether the weighted sum of the rewards is normalised
            (`sum_then_normalize`). If not, the rewards of each function are normalised by group,
            and then their weighted sum by batch (`normalize_then_sum`).
    """
    summands_PGF = rewards_PGF
    if not sums_rewards:
        # The rollouts of a group have to be the last dimension.
        rewards_PFG = rewards_PGF.transpose(1, 2)
        summands_PGF = _normalise(rewards_PFG, scale="group", eps=TRL_EPS).transpose(1, 2)
        scale = "batch"
    sums_PG = (summands_PGF * weights_F.to(rewards_PGF.device)).nansum(dim=2)
    # `nansum` gives 0 where no function scored a rollout. NaN keeps it out of the means below.
    is_unscored_PG = torch.isnan(rewards_PGF).all(dim=2)
    sums_PG = torch.where(is_unscored_PG, torch.nan, sums_PG)
    if sums_rewards:
        advantages_PG = _normalise(sums_PG, scale=scale, eps=TRL_EPS)
    else:
        # To normalise by batch is to normalise by group with the whole batch as one group.
        batch_as_one_group = sums_PG.view(1, -1)
        normalised = _normalise(batch_as_one_group, scale="group", eps=TRL_EPS)
        advantages_PG = normalised.view_as(sums_PG)
    return TrlAdvantages(
        advantages_PG=torch.nan_to_num(advantages_PG, nan=0.0),
        standard_deviation=_standard_deviation(sums_PG, scale),
    )


def overlong_penalty(lengths: Tensor, max_length: int, cache: int) -> Tensor:
    """Return DAPO's penalty for long completions, which is added to the reward.

    It is 0 up to `max_length - cache` tokens and falls linearly from there to -1 at `max_length`
    (arXiv 2503.14476, equation 13). For example, with `max_length` 100 and `cache` 20, the lengths
    80, 90, 100 get 0, -0.5, -1. The result has the shape of `lengths`. Raises `ValueError` for a
    `cache` that is not above 0 and at most `max_length`.
    """
    if not 0 < cache <= max_length:
        raise ValueError(
            f"overlong_cache: {cache} must be above 0 and at most max_completion_length: "
            f"{max_length}"
        )
    free_length = max_length - cache
    return ((free_length - lengths.to(torch.float32)) / cache).clamp(-1.0, 0.0)


@dataclass(frozen=True)
class Grpo(Method):
    """GRPO: the advantages of TRL, unchanged."""

    source = "arXiv 2402.03300"
    keeps_trl_advantages = True


@dataclass(frozen=True)
class DrGrpo(Grpo):
    """Dr. GRPO: GRPO without the division by the standard deviation, with its own loss of TRL."""

    settings: ClassVar[TrlKeys] = {"loss_type": "dr_grpo", "scale_rewards": "none"}
    source = "arXiv 2503.20783"


@dataclass(frozen=True)
class Dapo(Method):
    """DAPO: its loss, a penalty for overlong completions, and no groups without signal.

    The paper samples until a batch is full of groups that are neither all right nor all wrong. Here
    dropped groups are not replaced: the batch becomes smaller, and TRL's token mean is taken over
    the tokens of the rollouts that have a signal and have not left their group. There are P groups
    of G rollouts.
    """

    settings: ClassVar[TrlKeys] = {
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
    def starts_from_rewards(self) -> bool:
        return self.overlong_cache is not None

    @property
    def keeps_trl_advantages(self) -> bool:
        return not self.drop_constant and self.overlong_cache is None

    def apply(self, groups: Groups, advantages_PG: Tensor, run: AdvantagePipeline) -> Tensor:
        """Add the penalty, and leave groups of equal rewards out of the token mean: (P, G).

        TRL's loss is a mean over the tokens of all rollouts. Advantages that are scaled up have the
        same effect as a mean over fewer tokens.
        """
        if self.overlong_cache is not None:
            penalized_PG = self._penalized_rewards(groups, run, self.overlong_cache)
            advantages_PG = group_advantages(penalized_PG, scale=run.scale)
        if self.drop_constant:
            has_signal_P1 = advantages_PG.any(dim=1, keepdim=True)
            counts_in_mean_PG = has_signal_P1 & groups.has_reward_PG
            tokens_PG = groups.loss_tokens_PG
            tokens_in_mean = torch.where(counts_in_mean_PG, tokens_PG, 0.0).sum()
            # Without such tokens nothing is learned, and there is nothing to divide by.
            if bool(tokens_in_mean > 0):
                advantages_PG = advantages_PG * (tokens_PG.sum() / tokens_in_mean)
        return advantages_PG

    def groups_with_signal(
        self, groups: Groups, has_signal_P: Tensor, run: AdvantagePipeline
    ) -> Tensor:
        if self.overlong_cache is None:
            return has_signal_P
        return ~is_constant(self._penalized_rewards(groups, run, self.overlong_cache))

    def _penalized_rewards(
        self, groups: Groups, run: AdvantagePipeline, overlong_cache: int
    ) -> Tensor:
        """Return the rewards with the penalty for overlong completions, (P, G)."""
        return groups.rewards_PG + overlong_penalty(
            groups.lengths_PG, max_length=run.max_length, cache=overlong_cache
        )

    def check(self, keys: RunKeys) -> None:
        # `apply` scales advantages up by numbers of tokens, which no other mean would undo.
        if self.drop_constant and keys.loss_type not in LOSSES_WITH_TOKEN_MEAN:
            raise ValueError(
                f"loss_type: {keys.loss_type} with adora_method: dapo, whose drop_constant: true "
                "needs a mean over the tokens of a generation; set loss_type: dapo, or "
                "adora_method.dapo.drop_constant: false"
            )
        if self.overlong_cache is not None:
            overlong_penalty(torch.zeros(1), keys.max_completion_length, self.overlong_cache)

    def costs(self, keys: RunKeys) -> str:
        return "groups without signal are dropped and not replaced"
