"""Further methods that make advantages, each written from its paper.

We have reproduced the results of none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from adora_vl.advantage.groups import Groups, Schedule
from adora_vl.advantage.grpo import deviation, group_advantages, is_constant
from adora_vl.advantage.method import Method, RunKeys, Settings, option

if TYPE_CHECKING:
    from adora_vl.advantage.methods import AdvantagePipeline


@dataclass(frozen=True)
class McGrpo(Method):
    """Median-centred advantages; of an even number of scored rollouts the lower of the two middle
    ones is the median.

    Where one value has the majority the median absolute deviation is 0, and we divide by the
    standard deviation about the centre instead (the repository uses an eps of 1e-3). The pivot has
    an advantage of 0, and the G others are multiplied by (G + 1) / G, for losses that divide by
    sequences; those that divide by tokens still count its own.
    """

    remakes = True
    source = "arXiv 2601.22582"

    centre: str = option("median", "What is subtracted.", "median", "mean")
    spread: str = option(
        "mad", "The divisor: the median absolute deviation or the standard one.", "mad", "std"
    )
    exclude_pivot: bool = option(True, "Leave the median rollout out of the update.")

    def apply(self, groups: Groups, advantages_PG: Tensor, run: AdvantagePipeline) -> Tensor:
        rewards = groups.rewards_PG
        count_P1 = groups.scored_PG.sum(dim=1, keepdim=True).to(rewards.dtype)
        share = (
            torch.where(count_P1 > 1, count_P1 / (count_P1 - 1), 1.0) if self.exclude_pivot else 1.0
        )
        if (self.centre, self.spread) == ("mean", "std"):
            return group_advantages(rewards) * share
        mean = torch.nanmean(rewards, dim=1, keepdim=True)
        median = torch.nanmedian(rewards, dim=1, keepdim=True)
        middle_P1 = mean if self.centre == "mean" else median.values
        centred_PG = rewards - middle_P1
        spread_P1 = deviation(rewards, middle_P1)
        if self.spread == "mad":
            mad_P1 = torch.nanmedian(centred_PG.abs(), dim=1, keepdim=True).values
            spread_P1 = torch.where(mad_P1 > 0, mad_P1, spread_P1)
        made_PG = torch.nan_to_num(centred_PG / (spread_P1 + 1e-4), nan=0.0) * share
        return torch.where(is_constant(rewards)[:, None], 0.0, made_PG)

    def check(self, keys: RunKeys) -> None:
        if (count := keys.num_generations) % 2 == 0:
            more = f"adora_method: mc_grpo samples one more, the median: {count + 1}"
            raise ValueError(f"num_generations: {count} is even; {more}")

    def costs(self, keys: RunKeys) -> str:
        return f"of {keys.num_generations} rollouts per prompt, the median is not learned from"


@dataclass(frozen=True)
class Ngrpo(Method):
    """GRPO's advantages, computed with `virtual` additional rewards of `max_reward`, which are then
    removed again.
    """

    remakes = True
    settings: ClassVar[Settings] = {"epsilon": 0.16, "epsilon_high": 0.24}
    source = "arXiv 2509.18851"

    virtual: int = option(1, "How many rollouts are imagined per group.")
    max_reward: float = option(1.0, "Their reward.")

    def __post_init__(self) -> None:
        if self.virtual < 0:
            raise ValueError(f"virtual: {self.virtual} must be at least 0")

    def apply(self, groups: Groups, advantages_PG: Tensor, run: AdvantagePipeline) -> Tensor:
        rewards = groups.rewards_PG
        imagined = rewards.new_full((len(rewards), self.virtual), self.max_reward)
        return group_advantages(torch.cat([rewards, imagined], dim=1))[:, : rewards.shape[1]]


@dataclass(frozen=True)
class AGrae(Method):
    """Two factors of p, the pass rate of a prompt, and of R, the mean of p over the batch.

    Curriculum: all advantages x [(1 - R) 0.5 / (1 - sqrt p) + R 0.5 / sqrt p], omitted where p is 0
    or 1. Suppression: positive advantages x min(1, R / alpha). The repository's alpha is 1 for
    mathematics and 0.5 for Geometry3K.
    """

    source = "arXiv 2602.05548"

    curriculum: bool = option(True, "Easy prompts first, hard ones later.")
    alpha: float | None = option(
        1.0, "Pass rate of the batch from which on nothing is reduced; null: always."
    )

    def __post_init__(self) -> None:
        if self.alpha is not None and self.alpha <= 0:
            raise ValueError(f"alpha: {self.alpha} must be above 0, or null")

    @property
    def plain(self) -> bool:
        return not self.curriculum and self.alpha is None

    def apply(self, groups: Groups, advantages_PG: Tensor, run: AdvantagePipeline) -> Tensor:
        # not of a group that all have left
        rates_P = groups.pass_rate_P
        judged_P = groups.scored_PG.any(dim=1)
        if not bool(judged_P.any()):
            return advantages_PG
        progress = rates_P[judged_P].mean()
        if self.curriculum:
            root_P = rates_P.sqrt()
            eps = 1e-6
            factor_P = (1 - progress) * 0.5 / (1 - root_P + eps) + progress * 0.5 / (root_P + eps)
            mixed_P = (rates_P > 0) & (rates_P < 1)
            advantages_PG = advantages_PG * torch.where(mixed_P, factor_P, 1.0)[:, None]
        if self.alpha is not None:
            held_back_PG = advantages_PG * (progress / self.alpha).clamp(max=1.0)
            advantages_PG = torch.where(advantages_PG > 0, held_back_PG, advantages_PG)
        return advantages_PG


def upper_half(measure: Tensor) -> Tensor:
    """The share to which each rollout belongs to the upper half of its group by `measure`, (P, G),
    float32; 0 for NaN, a rollout that has left its group. Rollouts that tie at the cut share the
    places that are left, where the authors' repository takes them in the order of the batch.
    """
    count = (~torch.isnan(measure)).sum(dim=1, keepdim=True)
    above_PG = (measure[:, :, None] < measure[:, None, :]).sum(dim=2)
    tied_PG = (measure[:, :, None] == measure[:, None, :]).sum(dim=2)
    share_PG = (
        ((count - count // 2 - above_PG) / tied_PG.clamp(min=1)).clamp(0.0, 1.0).to(torch.float32)
    )
    return torch.where(torch.isnan(measure), 0.0, share_PG)


@dataclass(frozen=True)
class Canon(Method):
    """`inter (r - mean of the other half) + (1 - inter) (r - mean of the own half)`, not divided by
    a deviation.
    """

    remakes = True
    settings: ClassVar[Settings] = {
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "epsilon_high": 0.28,
    }
    source = "arXiv 2509.23962"

    measure: str = option(
        "entropy",
        "What makes the halves: length, or entropy, the mean of -log p over the sampled tokens.",
        "length",
        "entropy",
    )
    inter: Schedule = option(
        Schedule(1.0), "1 compares with the other half, 0 with the own one, 0.5 is Dr. GRPO."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= min(self.inter.values) <= max(self.inter.values) <= 1:
            raise ValueError(f"inter: {self.inter.values} must lie between 0 and 1")

    @property
    def reads_surprisal(self) -> bool:
        return self.measure == "entropy"

    def apply(self, groups: Groups, advantages_PG: Tensor, run: AdvantagePipeline) -> Tensor:
        measure_PG = groups.lengths_PG if self.measure == "length" else groups.surprisal_PG
        if measure_PG is None:
            raise ValueError("measure: entropy needs the log-probabilities of the rollouts")
        rewards = groups.rewards_PG
        scored_PG = groups.scored_PG
        inter = self.inter.at(groups.step)
        if (
            inter == 0.5
            # both halves together are the group: this gives its mean to the bit, also for odd
            # groups
        ):
            return group_advantages(rewards, scale="none")
        upper_PG = upper_half(torch.where(scored_PG, measure_PG, torch.nan))
        means = []
        for share_PG in (upper_PG, 1 - upper_PG):
            weight_PG = torch.where(scored_PG, share_PG, 0.0)
            total_P1 = (weight_PG * torch.nan_to_num(rewards)).sum(dim=1, keepdim=True)
            weight_P1 = weight_PG.sum(dim=1, keepdim=True)
            mean_P1 = torch.nanmean(
                rewards, dim=1, keepdim=True
            )  # used for a half without scored rollouts
            means.append(torch.where(weight_P1 > 0, total_P1 / weight_P1.clamp(min=1e-6), mean_P1))
        upper_P1, lower_P1 = means
        as_upper_PG = rewards - inter * lower_P1 - (1 - inter) * upper_P1
        as_lower_PG = rewards - inter * upper_P1 - (1 - inter) * lower_P1
        made_PG = torch.nan_to_num(upper_PG * as_upper_PG + (1 - upper_PG) * as_lower_PG, nan=0.0)
        return torch.where(is_constant(rewards)[:, None], 0.0, made_PG)

    def check(self, keys: RunKeys) -> None:
        if self.reads_surprisal and not keys.use_vllm:
            raise ValueError("measure: entropy needs use_vllm: true, else set measure: length")

    def costs(self, keys: RunKeys) -> str:
        return "vLLM returns the log-probabilities of the rollouts" if keys.use_vllm else ""


def most_varied(values: Tensor, keep: int) -> Tensor:
    """The `keep` values of each row whose variance is largest, as shares between 0 and 1, (P, N):
    some of the smallest and some of the largest, so there are `keep + 1` candidates. Values that
    tie at the edge share its places.
    """
    count = values.shape[1]
    if keep >= count:
        return torch.ones_like(values)
    ordered_PN = values.to(torch.float64).sort(dim=1).values
    zero_P1 = ordered_PN.new_zeros(len(values), 1)
    sums = [torch.cat([zero_P1, (ordered_PN**power).cumsum(dim=1)], dim=1) for power in (1, 2)]
    lowest_K = torch.arange(
        keep + 1, device=values.device
    )  # how many of the smallest values are taken
    first, second = (s[:, lowest_K] + s[:, -1:] - s[:, count - keep + lowest_K] for s in sums)
    spread_PK = second - first**2 / keep
    best_P1 = lowest_K[
        (spread_PK - spread_PK.amax(dim=1, keepdim=True)).abs().lt(1e-12).int().argmax(dim=1)
    ][:, None]
    smaller_PN = (values[:, None, :] < values[:, :, None]).sum(dim=2)
    larger_PN = (values[:, None, :] > values[:, :, None]).sum(dim=2)
    tied_PN = count - smaller_PN - larger_PN
    low_PN = ((best_P1 - smaller_PN) / tied_PN).clamp(0.0, 1.0)
    high_PN = ((keep - best_P1 - larger_PN) / tied_PN).clamp(0.0, 1.0)
    return (low_PN + high_PN).clamp(max=1.0).to(values.dtype)


@dataclass(frozen=True)
class D3s(Method):
    """Advantages of the rollouts that are kept, scaled so that a mean over all rows is the mean
    over the kept ones. At least two are kept; all of them is GRPO. The authors begin with few and
    keep more later. The default of 0.5 is ours.
    """

    source = "arXiv 2509.22115"

    keep: Schedule = option(Schedule(0.5), "The share of the rollouts that is kept.")
    across: str = option(
        "group", "Choose within each group, or among all of the batch.", "group", "batch"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < min(self.keep.values) <= max(self.keep.values) <= 1:
            raise ValueError(f"keep: {self.keep.values} must be above 0 and at most 1")

    def apply(self, groups: Groups, advantages_PG: Tensor, run: AdvantagePipeline) -> Tensor:
        pool = advantages_PG if self.across == "group" else advantages_PG.reshape(1, -1)
        there = groups.scored_PG.reshape(pool.shape)
        counts_N = there.sum(dim=1)
        chosen = torch.zeros_like(pool)
        keep = self.keep.at(groups.step)
        for count in sorted(
            {*counts_N.tolist()} - {0}
        ):  # rows of one count form a tensor without gaps
            places = there & (counts_N == count)[:, None]
            values = pool[places].view(-1, count)
            kept = min(count, max(2, round(keep * count)))
            if kept < count:
                values = values * most_varied(values, kept) * (count / kept)
            chosen[places] = values.flatten()
        return chosen.view_as(advantages_PG)

    def costs(self, keys: RunKeys) -> str:
        return "rollouts that are not chosen are still sampled and graded"


@dataclass(frozen=True)
class Ssb(Method):
    """`A_i (1 + share N_0 |A_i|^alpha / sum |A|^alpha)`, where N_0 is the number of rollouts, of
    all ranks, that have the advantage 0 and have not left their group.
    """

    source = "arXiv 2504.08837, 2504.16656"

    share: float = option(1.0, "The share of the free places that are filled; 0 is GRPO.")
    replay_alpha: float = option(
        1.0, "0 draws all samples equally often; more prefers large advantages."
    )

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or self.replay_alpha < 0:
            raise ValueError(
                f"share: {self.share} must be in 0 to 1, replay_alpha: {self.replay_alpha} at "
                "least 0"
            )

    @property
    def plain(self) -> bool:
        return self.share == 0

    def apply(self, groups: Groups, advantages_PG: Tensor, run: AdvantagePipeline) -> Tensor:
        magnitude_PG = advantages_PG.abs()
        live_PG = magnitude_PG > 0
        if self.share == 0 or not bool(live_PG.any()):
            return advantages_PG
        # divide by the largest first, because powers of huge advantages would overflow
        chance_PG = torch.where(
            live_PG, (magnitude_PG / magnitude_PG.max()) ** self.replay_alpha, 0.0
        )
        free = (~live_PG & groups.scored_PG).sum()
        return advantages_PG * (1 + self.share * free * chance_PG / chance_PG.sum())


@dataclass(frozen=True)
class Rrb(Method):
    """`range`, the rule of published notes on the paper: `A (range / full_range)^range_power`,
    where the range is the largest reward of the group minus its smallest. `all_low`, as in the
    repository of DIVA-GRPO: `A low_factor` for a group all of whose rewards are below `low`, and A
    for every other one.
    """

    source = "arXiv 2603.01106"

    rule: str = option(
        "range", "range is that of the paper's notes; all_low the repository's.", "range", "all_low"
    )
    full_range: float = option(1.0, "range: the best reward minus the worst, 1 for our presets.")
    range_power: float = option(1.0, "range: 1 in the paper; 0 is GRPO.")
    low: float = option(0.15, "all_low: rewards below it are low.")
    low_factor: float = option(0.1, "all_low: the factor of a group of low rewards; 1 is GRPO.")

    def __post_init__(self) -> None:
        super().__post_init__()
        full = self.full_range
        power = self.range_power
        if full <= 0 or power < 0:
            raise ValueError(f"full_range: {full} must be above 0, range_power: {power} at least 0")
        if not 0 <= self.low_factor <= 1:
            raise ValueError(f"low_factor: {self.low_factor} must be between 0 and 1")

    @property
    def plain(self) -> bool:
        return self.range_power == 0 if self.rule == "range" else self.low_factor == 1

    def apply(self, groups: Groups, advantages_PG: Tensor, run: AdvantagePipeline) -> Tensor:
        rewards = groups.rewards_PG
        unscored_PG = ~groups.scored_PG
        if self.rule == "all_low":
            low_P1 = (unscored_PG | (rewards < self.low)).all(dim=1, keepdim=True)
            return torch.where(low_P1, advantages_PG * self.low_factor, advantages_PG)
        if self.range_power == 0:
            return advantages_PG
        highest_P1 = rewards.masked_fill(unscored_PG, -torch.inf).amax(dim=1, keepdim=True)
        lowest_P1 = rewards.masked_fill(unscored_PG, torch.inf).amin(dim=1, keepdim=True)
        share_P1 = ((highest_P1 - lowest_P1) / self.full_range).clamp(
            0.0, 1.0
        )  # -inf where nothing was scored
        return advantages_PG * share_P1**self.range_power

    def signal(self, groups: Groups, signal_P: Tensor, run: AdvantagePipeline) -> Tensor:
        return signal_P & self.apply(groups, torch.ones_like(groups.rewards_PG), run).any(dim=1)
