"""The methods by name. Each has its function, its options, and the settings of TRL that belong to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adora_vl.advantage import options as opt
from adora_vl.advantage.a_grae import a_grae
from adora_vl.advantage.canon import canon
from adora_vl.advantage.d3s import d3s
from adora_vl.advantage.dapo import drop_constant, overlong_penalty
from adora_vl.advantage.daro import bin_losses, bin_sums, bins_of, daro
from adora_vl.advantage.groups import Groups
from adora_vl.advantage.grpo import group_advantages, is_constant
from adora_vl.advantage.mc_grpo import mc_grpo
from adora_vl.advantage.ngrpo import ngrpo
from adora_vl.advantage.rrb import rrb
from adora_vl.advantage.ssb import ssb

if TYPE_CHECKING:
    from adora_vl.advantage.run import MethodRun


def _adora(groups: Groups, advantages_PG: Tensor, options: opt.AdoraOptions, run: MethodRun) -> Tensor:
    assert run.weighting is not None
    return advantages_PG * run.weighting.weights_P[:, None]


def _dapo(groups: Groups, advantages_PG: Tensor, options: opt.DapoOptions, run: MethodRun) -> Tensor:
    rewards_PG = groups.rewards_PG
    if options.overlong_cache is not None:
        rewards_PG = rewards_PG + overlong_penalty(groups.lengths_PG, run.max_length, options.overlong_cache)
        advantages_PG = group_advantages(rewards_PG, scale=run.scale)
    if options.drop_constant:
        advantages_PG = drop_constant(advantages_PG, groups.loss_tokens_PG, is_constant(rewards_PG))
    return advantages_PG


def _canon(groups: Groups, advantages_PG: Tensor, options: opt.CanonOptions, run: MethodRun) -> Tensor:
    measure_PG = groups.lengths_PG if options.measure == "length" else groups.surprisal_PG
    if measure_PG is None:
        raise ValueError("measure: entropy needs the log-probabilities of the rollouts")
    return canon(groups.rewards_PG, measure_PG, inter=options.inter.at(groups.step))


def _daro(groups: Groups, advantages_PG: Tensor, options: opt.DaroOptions, run: MethodRun) -> Tensor:
    """Weigh the advantages with the present weights, then update the weights on the same loss.

    This runs on the CPU. On a GPU sums by index are added in any order, and all ranks have to agree to the bit.
    """
    generations, bins = advantages_PG.shape[1], max(1, advantages_PG.shape[1] - 1)
    raw_PG, tokens_PG, rates_P = (t.cpu() for t in (advantages_PG, groups.loss_tokens_PG, groups.pass_rate_P))
    bins_P, learned = bins_of(rates_P, generations), run.daro_weights(bins, options)
    weights_M = learned.weights_M
    shape = {"by_bin_tokens": options.by_bin_tokens, "drop_outside": options.drop_outside}
    weighed_PG = daro(raw_PG, tokens_PG, rates_P, weights_M, **shape)
    losses_M = bin_losses(raw_PG, tokens_PG, bins_P, bins, options.bin_loss)
    present_M = bin_sums(torch.ones_like(tokens_PG), bins_P, bins) > 0
    for number, (weight, loss, present) in enumerate(zip(weights_M, losses_M, present_M, strict=True), 1):
        run.figures[f"daro/weight_{number}_of_{generations}"] = weight.item()
        if present:
            run.figures[f"daro/loss_{number}_of_{generations}"] = loss.item()
    learned.update(losses_M, present_M)
    return weighed_PG.to(advantages_PG.device)


@dataclass(frozen=True)
class Method:
    """One method. `plain(options)` says whether it leaves every advantage as TRL computed it, whatever the rewards."""

    apply: Callable[[Groups, Tensor, Any, MethodRun], Tensor] | None = None
    options: type = opt.NoOptions
    settings: Mapping[str, Any] = field(default_factory=dict)  # TRL's keys that belong to it
    plain: Callable[[Any], bool] = lambda options: False
    remakes: bool = False  # computes advantages from the rewards and ignores those of TRL
    source: str = ""


METHODS: Mapping[str, Method] = {
    "grpo": Method(plain=lambda o: True, source="arXiv 2402.03300"),
    "dr_grpo": Method(
        settings={"loss_type": "dr_grpo", "scale_rewards": "none"}, plain=lambda o: True, source="arXiv 2503.20783"
    ),
    "lite_ppo": Method(
        settings={"loss_type": "dapo", "scale_rewards": "batch"}, plain=lambda o: True, source="arXiv 2508.08221"
    ),
    "dapo": Method(
        _dapo,
        opt.DapoOptions,
        {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "mask_truncated_completions": True, "beta": 0.0},
        plain=lambda o: not o.drop_constant and o.overlong_cache is None,
        source="arXiv 2503.14476",
    ),
    "adora": Method(
        _adora,
        opt.AdoraOptions,
        plain=lambda o: o.mode == "off" or set(o.factor.values) == {1.0},
        source="arXiv 2602.10019",
    ),
    "daro": Method(_daro, opt.DaroOptions, {"loss_type": "dapo"}, source="arXiv 2510.09001"),
    "mc_grpo": Method(
        lambda g, a, o, run: mc_grpo(g.rewards_PG, centre=o.centre, spread=o.spread, exclude_pivot=o.exclude_pivot),
        opt.McGrpoOptions,
        remakes=True,
        source="arXiv 2601.22582",
    ),
    "ngrpo": Method(
        lambda g, a, o, run: ngrpo(g.rewards_PG, virtual=o.virtual, max_reward=o.max_reward),
        opt.NgrpoOptions,
        {"epsilon": 0.16, "epsilon_high": 0.24},
        remakes=True,
        source="arXiv 2509.18851",
    ),
    "a_grae": Method(
        lambda g, a, o, run: a_grae(a, g.pass_rate_P, curriculum=o.curriculum, alpha=o.alpha),
        opt.AGraeOptions,
        plain=lambda o: not o.curriculum and o.alpha is None,
        source="arXiv 2602.05548",
    ),
    "canon": Method(
        _canon,
        opt.CanonOptions,
        {"loss_type": "dr_grpo", "scale_rewards": "none", "epsilon_high": 0.28},
        remakes=True,
        source="arXiv 2509.23962",
    ),
    "d3s": Method(
        lambda g, a, o, run: d3s(a, keep=o.keep.at(g.step), across=o.across), opt.D3sOptions, source="arXiv 2509.22115"
    ),
    "ssb": Method(
        lambda g, a, o, run: ssb(a, share=o.share, alpha=o.replay_alpha),
        opt.SsbOptions,
        plain=lambda o: o.share == 0,
        source="arXiv 2504.08837, 2504.16656",
    ),
    "rrb": Method(
        lambda g, a, o, run: rrb(a, g.rewards_PG, full_range=o.full_range, power=o.range_power),
        opt.RrbOptions,
        plain=lambda o: o.range_power == 0,
        source="arXiv 2603.01106",
    ),
}
