"""Further methods that make advantages, each written from its paper. We have reproduced the results of none.

The options of each say what they may be, and are checked when they are made.
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


def a_grae(
    advantages: Tensor, pass_rates: Tensor, *, scored: Tensor | None = None, curriculum: bool = True,
    alpha: float | None = 1.0, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """Scale the advantages by two factors. p is the pass rate of a prompt, and R, the mean of p over the batch,
    measures how far training has come.

    - Curriculum: all advantages x [(1 - R) 0.5 / (1 - sqrt p) + R 0.5 / sqrt p]. Easy prompts first, hard ones later.
    - Suppression: positive advantages x min(1, R / alpha).

    Args:
        advantages: (P, G), of GRPO or another method.
        pass_rates: (P,), between 0 and 1.
        scored: (P, G), bool; a group that all rollouts have left does not count in R. None: none has left.
        curriculum: False omits the first factor.
        alpha: from this pass rate of the batch on, nothing is reduced. The repository uses 1 for mathematics and
            0.5 for Geometry3K. None omits the second factor. Without both factors this is GRPO.

    Returns:
        (P, G). The first factor is omitted where p is 0 or 1, because it has no finite value there. With rewards of 0
        and 1 such groups have advantages of 0 anyway.
    """
    judged_P = torch.ones_like(pass_rates, dtype=torch.bool) if scored is None else scored.any(dim=1)
    if not bool(judged_P.any()):
        return advantages
    progress = pass_rates[judged_P].mean()
    if curriculum:
        root_P = pass_rates.sqrt()
        factor_P = (1 - progress) * 0.5 / (1 - root_P + eps) + progress * 0.5 / (root_P + eps)
        mixed_P = (pass_rates > 0) & (pass_rates < 1)
        advantages = advantages * torch.where(mixed_P, factor_P, 1.0)[:, None]
    if alpha is not None:
        held_back = advantages * (progress / alpha).clamp(max=1.0)
        advantages = torch.where(advantages > 0, held_back, advantages)
    return advantages


def upper_half(measure: Tensor) -> Tensor:
    """The share to which each rollout belongs to the upper half of its group by `measure`. (P, G), float32. NaN marks a
    rollout that has left its group; its share is 0.

    It is 1 or 0, except for rollouts that tie at the cut. These share the places that are left, as a random order among
    them would give on average. The authors' repository takes them in the order of the batch, so that a permutation of
    the rollouts would change the result.
    """
    count = (~torch.isnan(measure)).sum(dim=1, keepdim=True)
    above_PG = (measure[:, :, None] < measure[:, None, :]).sum(dim=2)
    tied_PG = (measure[:, :, None] == measure[:, None, :]).sum(dim=2)
    share_PG = ((count - count // 2 - above_PG) / tied_PG.clamp(min=1)).clamp(0.0, 1.0).to(torch.float32)
    return torch.where(torch.isnan(measure), 0.0, share_PG)


def canon(rewards: Tensor, measure: Tensor, *, inter: float = 0.5) -> Tensor:
    """`inter (r - mean of the other half) + (1 - inter) (r - mean of the own half)`, without dividing by a deviation.

    Args:
        rewards: (P, G), NaN for an unscored rollout.
        measure: (P, G), finite: number of tokens, or nats per token.
        inter: 1 compares each reward with the other half, 0 with its own half. 0.5 is Dr. GRPO.

    Returns:
        (P, G). Constant groups are exactly 0.
    """
    if inter == 0.5:  # both halves together are the group: this gives its mean to the bit, also for odd groups
        return group_advantages(rewards, scale="none")
    scored_PG = ~torch.isnan(rewards)
    upper_PG = upper_half(torch.where(scored_PG, measure, torch.nan))
    means = []
    for share_PG in (upper_PG, 1 - upper_PG):
        weight_PG = torch.where(scored_PG, share_PG, 0.0)
        total_P1 = (weight_PG * torch.nan_to_num(rewards)).sum(dim=1, keepdim=True)
        weight_P1 = weight_PG.sum(dim=1, keepdim=True)
        mean_P1 = torch.nanmean(rewards, dim=1, keepdim=True)  # used for a half without scored rollouts
        means.append(torch.where(weight_P1 > 0, total_P1 / weight_P1.clamp(min=1e-6), mean_P1))
    upper_P1, lower_P1 = means
    as_upper_PG = rewards - inter * lower_P1 - (1 - inter) * upper_P1
    as_lower_PG = rewards - inter * upper_P1 - (1 - inter) * lower_P1
    advantages_PG = torch.nan_to_num(upper_PG * as_upper_PG + (1 - upper_PG) * as_lower_PG, nan=0.0)
    return torch.where(is_constant(rewards)[:, None], 0.0, advantages_PG)


def most_varied(values: Tensor, keep: int) -> Tensor:
    """The `keep` values of each row whose variance is largest, as shares between 0 and 1. (P, N).

    Such a subset always consists of some of the smallest and some of the largest values, so only `keep + 1` candidates
    have to be compared. Values that tie at the edge of the subset share its places, as a random choice would give on
    average.
    """
    count = values.shape[1]
    if keep >= count:
        return torch.ones_like(values)
    ordered_PN = values.to(torch.float64).sort(dim=1).values
    zero_P1 = ordered_PN.new_zeros(len(values), 1)
    sums = [torch.cat([zero_P1, (ordered_PN**power).cumsum(dim=1)], dim=1) for power in (1, 2)]
    lowest_K = torch.arange(keep + 1, device=values.device)  # how many of the smallest values are taken
    first, second = (s[:, lowest_K] + s[:, -1:] - s[:, count - keep + lowest_K] for s in sums)
    spread_PK = second - first**2 / keep
    best_P1 = lowest_K[(spread_PK - spread_PK.amax(dim=1, keepdim=True)).abs().lt(1e-12).int().argmax(dim=1)][:, None]
    smaller_PN = (values[:, None, :] < values[:, :, None]).sum(dim=2)
    larger_PN = (values[:, None, :] > values[:, :, None]).sum(dim=2)
    tied_PN = count - smaller_PN - larger_PN
    low_PN = ((best_P1 - smaller_PN) / tied_PN).clamp(0.0, 1.0)
    high_PN = ((keep - best_P1 - larger_PN) / tied_PN).clamp(0.0, 1.0)
    return (low_PN + high_PN).clamp(max=1.0).to(values.dtype)


def d3s(advantages: Tensor, *, scored: Tensor | None = None, keep: float = 0.5, across: str = "group") -> Tensor:
    """Advantages of the rollouts that are kept, scaled so that a mean over all rows is the mean over the kept ones.

    Args:
        advantages: (P, G).
        scored: (P, G), bool; rollouts that have left their group cannot be chosen. None: none has left.
        keep: share of the rollouts to keep, above 0 and at most 1. At least two are kept. 1 is GRPO.
        across: `"group"` chooses within each group, `"batch"` among all rollouts.

    Returns:
        (P, G).
    """
    pool = advantages if across == "group" else advantages.reshape(1, -1)
    there = torch.ones_like(pool, dtype=torch.bool) if scored is None else scored.reshape(pool.shape)
    counts_N, chosen = there.sum(dim=1), torch.zeros_like(pool)
    for count in sorted({*counts_N.tolist()} - {0}):  # rows of one count form a tensor without gaps
        places = there & (counts_N == count)[:, None]
        values, kept = pool[places].view(-1, count), min(count, max(2, round(keep * count)))
        if kept < count:
            values = values * most_varied(values, kept) * (count / kept)
        chosen[places] = values.flatten()
    return chosen.view_as(advantages)


def mc_grpo(
    rewards: Tensor, *, centre: str = "median", spread: str = "mad", exclude_pivot: bool = True, eps: float = 1e-4
) -> Tensor:
    """Median-centred advantages of groups with an odd number of rollouts.

    Args:
        rewards: (P, G + 1), NaN for an unscored rollout. If the number of scored rewards is even, the lower of the two
            middle ones is the median.
        centre: `"mean"` with `spread="std"` and `exclude_pivot=False` is GRPO.
        spread: `"mad"` divides by the median absolute deviation. With rewards of 0 and 1 it is 0 in every group in
            which one value has the majority, so the division would multiply by 1/eps. There we divide by the standard
            deviation about the centre instead. This exception is ours: the repository uses an eps of 1e-3.
        exclude_pivot: give the pivot an advantage of 0, and multiply the others by (G + 1) / G. A mean over all rows is
            then the mean over the G rows that count (G + 1: scored rollouts of the group). This is exact for losses
            that divide by sequences. Losses that divide by tokens still count the tokens of the pivot.

    Returns:
        (P, G + 1). Constant groups are exactly 0.
    """
    count_P1 = (~torch.isnan(rewards)).sum(dim=1, keepdim=True).to(rewards.dtype)
    share = torch.where(count_P1 > 1, count_P1 / (count_P1 - 1), 1.0) if exclude_pivot else 1.0
    if (centre, spread) == ("mean", "std"):
        return group_advantages(rewards, eps=eps) * share
    middle_P1 = torch.nanmean(rewards, dim=1, keepdim=True)
    if centre == "median":
        middle_P1 = torch.nanmedian(rewards, dim=1, keepdim=True).values
    centred_PG = rewards - middle_P1
    spread_P1 = deviation(rewards, middle_P1)
    if spread == "mad":
        mad_P1 = torch.nanmedian(centred_PG.abs(), dim=1, keepdim=True).values
        spread_P1 = torch.where(mad_P1 > 0, mad_P1, spread_P1)
    advantages_PG = torch.nan_to_num(centred_PG / (spread_P1 + eps), nan=0.0) * share
    return torch.where(is_constant(rewards)[:, None], 0.0, advantages_PG)


def ngrpo(rewards: Tensor, *, virtual: int = 1, max_reward: float = 1.0, eps: float = 1e-4) -> Tensor:
    """GRPO's advantages, computed with `virtual` additional rewards of `max_reward`, which are then removed again.

    If all rollouts of a group are wrong, all get negative advantages. If all have the reward `max_reward`, all get 0.
    `virtual=0` is GRPO.

    Args:
        rewards: (P, G), NaN for an unscored rollout.

    Returns:
        (P, G). A group in which nothing was scored gets 0.
    """
    if virtual == 0:
        return group_advantages(rewards, eps=eps)
    imagined = rewards.new_full((rewards.shape[0], virtual), max_reward)
    return group_advantages(torch.cat([rewards, imagined], dim=1), eps=eps)[:, : rewards.shape[1]]


def rrb(advantages: Tensor, rewards: Tensor, *, full_range: float = 1.0, power: float = 1.0) -> Tensor:
    """`A (range / full_range)^power`, where the range is the largest reward of the group minus its smallest.

    GRPO divides by the standard deviation, so a group with the rewards 0.0 and 0.1 (no box, a box with a wrong answer)
    gets advantages as large as one with the rewards 0 and 1. This takes the size of the difference back in. It is the
    rule of published notes on the paper; its repository has another one, `rrb_all_low`.

    Args:
        advantages: (P, G), of GRPO or another method.
        rewards: (P, G), NaN for an unscored rollout.
        full_range: the best reward minus the worst one. A group with this range, or a larger one, is left unchanged.
        power: 0 is GRPO, 1 the published formula.

    Returns:
        (P, G).
    """
    if power == 0:
        return advantages
    unscored = torch.isnan(rewards)
    highest_P1 = rewards.masked_fill(unscored, -torch.inf).amax(dim=1, keepdim=True)
    lowest_P1 = rewards.masked_fill(unscored, torch.inf).amin(dim=1, keepdim=True)
    share_P1 = ((highest_P1 - lowest_P1) / full_range).clamp(0.0, 1.0)  # -inf where nothing was scored
    return advantages * share_P1**power


def rrb_all_low(advantages: Tensor, rewards: Tensor, *, low: float = 0.15, factor: float = 0.1) -> Tensor:
    """`A factor` for a group all of whose rewards are below `low`, and A for every other one.

    It is the rule of the repository of DIVA-GRPO. A group with the rewards 0.1 and 1 keeps its advantages, of which
    `rrb` leaves nine tenths.

    Args:
        advantages: (P, G), of GRPO or another method.
        rewards: (P, G), NaN for an unscored rollout.
        factor: 1 is GRPO.

    Returns:
        (P, G).
    """
    low_P1 = (torch.isnan(rewards) | (rewards < low)).all(dim=1, keepdim=True)
    return torch.where(low_P1, advantages * factor, advantages)


def ssb(advantages: Tensor, *, scored: Tensor | None = None, share: float = 1.0, alpha: float = 1.0) -> Tensor:
    """`A_i (1 + share N_0 |A_i|^alpha / sum |A|^alpha)`, where N_0 is the number of rollouts with advantage 0.

    Args:
        advantages: (P, G), of all ranks.
        scored: (P, G), bool; rollouts that have left their group do not count in N_0. None: none has left.
        share: the share of the free places that are filled. 0 is GRPO.
        alpha: 0 draws all samples equally often. Larger values prefer large advantages.

    Returns:
        (P, G).
    """
    magnitude = advantages.abs()
    live = magnitude > 0
    if share == 0 or not bool(live.any()):
        return advantages
    # divide by the largest first, because powers of huge advantages would overflow
    chance = torch.where(live, (magnitude / magnitude.max()) ** alpha, 0.0)
    free = ~live if scored is None else ~live & scored
    return advantages * (1 + share * free.sum() * chance / chance.sum())


@dataclass(frozen=True)
class McGrpo(Method):
    remakes = True
    source = "arXiv 2601.22582"

    centre: str = option("median", "What is subtracted.", "median", "mean")
    spread: str = option("mad", "The divisor: the median absolute deviation or the standard one.", "mad", "std")
    exclude_pivot: bool = option(True, "Leave the median rollout out of the update.")

    def apply(self, groups: Groups, advantages_PG: Tensor, run: AdvantagePipeline) -> Tensor:
        return mc_grpo(groups.rewards_PG, centre=self.centre, spread=self.spread, exclude_pivot=self.exclude_pivot)

    def check(self, keys: RunKeys) -> None:
        count = keys.num_generations
        if count % 2 == 0:
            one_more = f"adora_method: mc_grpo samples one more, the median: {count + 1}"
            raise ValueError(f"num_generations: {count} is even; {one_more}")

    def costs(self, keys: RunKeys) -> str:
        return f"of {keys.num_generations} rollouts per prompt, the median is not learned from"


@dataclass(frozen=True)
class Ngrpo(Method):
    remakes = True
    settings: ClassVar[Settings] = {"epsilon": 0.16, "epsilon_high": 0.24}
    source = "arXiv 2509.18851"

    virtual: int = option(1, "How many rollouts are imagined per group.")
    max_reward: float = option(1.0, "Their reward.")

    def __post_init__(self) -> None:
        if self.virtual < 0:
            raise ValueError(f"virtual: {self.virtual} must be at least 0")

    def apply(self, groups: Groups, advantages_PG: Tensor, run: AdvantagePipeline) -> Tensor:
        return ngrpo(groups.rewards_PG, virtual=self.virtual, max_reward=self.max_reward)


@dataclass(frozen=True)
class AGrae(Method):
    source = "arXiv 2602.05548"

    curriculum: bool = option(True, "Easy prompts first, hard ones later.")
    alpha: float | None = option(1.0, "Pass rate of the batch from which on nothing is reduced; null: always.")

    def __post_init__(self) -> None:
        if self.alpha is not None and self.alpha <= 0:
            raise ValueError(f"alpha: {self.alpha} must be above 0, or null")

    @property
    def plain(self) -> bool:
        return not self.curriculum and self.alpha is None

    def apply(self, groups: Groups, advantages_PG: Tensor, run: AdvantagePipeline) -> Tensor:
        rates_P, scored_PG = groups.pass_rate_P, groups.scored_PG
        return a_grae(advantages_PG, rates_P, scored=scored_PG, curriculum=self.curriculum, alpha=self.alpha)


@dataclass(frozen=True)
class Canon(Method):
    remakes = True
    settings: ClassVar[Settings] = {"loss_type": "dr_grpo", "scale_rewards": "none", "epsilon_high": 0.28}
    source = "arXiv 2509.23962"

    measure: str = option(
        "entropy", "What makes the halves: length, or entropy, the mean of -log p over the sampled tokens.",
        "length", "entropy",
    )  # fmt: skip
    inter: Schedule = option(Schedule(1.0), "1 compares with the other half, 0 with the own one, 0.5 is Dr. GRPO.")

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
        return canon(groups.rewards_PG, measure_PG, inter=self.inter.at(groups.step))

    def check(self, keys: RunKeys) -> None:
        if self.reads_surprisal and not keys.use_vllm:
            raise ValueError("measure: entropy needs use_vllm: true, else set measure: length")

    def costs(self, keys: RunKeys) -> str:
        return "vLLM returns the log-probabilities of the rollouts" if keys.use_vllm else ""


@dataclass(frozen=True)
class D3s(Method):
    """The authors begin with few rollouts and keep more later. The default of 0.5 is ours."""

    source = "arXiv 2509.22115"

    keep: Schedule = option(Schedule(0.5), "The share of the rollouts that is kept.")
    across: str = option("group", "Choose within each group, or among all of the batch.", "group", "batch")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < min(self.keep.values) <= max(self.keep.values) <= 1:
            raise ValueError(f"keep: {self.keep.values} must be above 0 and at most 1")

    def apply(self, groups: Groups, advantages_PG: Tensor, run: AdvantagePipeline) -> Tensor:
        return d3s(advantages_PG, scored=groups.scored_PG, keep=self.keep.at(groups.step), across=self.across)

    def costs(self, keys: RunKeys) -> str:
        return "rollouts that are not chosen are still sampled and graded"


@dataclass(frozen=True)
class Ssb(Method):
    source = "arXiv 2504.08837, 2504.16656"

    share: float = option(1.0, "The share of the free places that are filled; 0 is GRPO.")
    replay_alpha: float = option(1.0, "0 draws all samples equally often; more prefers large advantages.")

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or self.replay_alpha < 0:
            raise ValueError(f"share: {self.share} must be in 0 to 1, replay_alpha: {self.replay_alpha} at least 0")

    @property
    def plain(self) -> bool:
        return self.share == 0

    def apply(self, groups: Groups, advantages_PG: Tensor, run: AdvantagePipeline) -> Tensor:
        return ssb(advantages_PG, scored=groups.scored_PG, share=self.share, alpha=self.replay_alpha)


@dataclass(frozen=True)
class Rrb(Method):
    source = "arXiv 2603.01106"

    rule: str = option("range", "range is `rrb`; all_low is `rrb_all_low`, the repository's.", "range", "all_low")
    full_range: float = option(1.0, "range: the best reward minus the worst, 1 for our presets.")
    range_power: float = option(1.0, "range: 1 in the paper; 0 is GRPO.")
    low: float = option(0.15, "all_low: rewards below it are low.")
    low_factor: float = option(0.1, "all_low: the factor of a group of low rewards; 1 is GRPO.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.full_range <= 0 or self.range_power < 0:
            raise ValueError(
                f"full_range: {self.full_range} must be above 0, range_power: {self.range_power} at least 0"
            )
        if not 0 <= self.low_factor <= 1:
            raise ValueError(f"low_factor: {self.low_factor} must be between 0 and 1")

    @property
    def plain(self) -> bool:
        return self.range_power == 0 if self.rule == "range" else self.low_factor == 1

    def apply(self, groups: Groups, advantages_PG: Tensor, run: AdvantagePipeline) -> Tensor:
        if self.rule == "all_low":
            return rrb_all_low(advantages_PG, groups.rewards_PG, low=self.low, factor=self.low_factor)
        return rrb(advantages_PG, groups.rewards_PG, full_range=self.full_range, power=self.range_power)

    def signal(self, groups: Groups, signal_P: Tensor, run: AdvantagePipeline) -> Tensor:
        return signal_P & self.apply(groups, torch.ones_like(groups.rewards_PG), run).any(dim=1)
