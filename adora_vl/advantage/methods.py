"""The methods by name, and the methods of one run applied in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adora_vl.advantage.adora import AdoraOptions, AdoraWeighting, assign_weights, weigh_groups
from adora_vl.advantage.daro import OUTSIDE, DaroOptions, DaroWeights, bin_losses, bin_sums, bins_of, daro
from adora_vl.advantage.experimental import (
    AGraeOptions,
    CanonOptions,
    D3sOptions,
    McGrpoOptions,
    NgrpoOptions,
    RrbOptions,
    SsbOptions,
    a_grae,
    canon,
    d3s,
    mc_grpo,
    ngrpo,
    rrb,
    rrb_all_low,
    ssb,
)
from adora_vl.advantage.groups import Groups, NoOptions, scheduled
from adora_vl.advantage.grpo import DapoOptions, drop_constant, group_advantages, is_constant, overlong_penalty


def _adora(groups: Groups, advantages_PG: Tensor, options: AdoraOptions, run: AdvantagePipeline) -> Tensor:
    assert run.weighting is not None
    return advantages_PG * run.weighting.weights_P[:, None]


def _dapo(groups: Groups, advantages_PG: Tensor, options: DapoOptions, run: AdvantagePipeline) -> Tensor:
    if options.overlong_cache is not None:
        advantages_PG = group_advantages(_with_penalty(groups, options.overlong_cache, run), scale=run.scale)
    if options.drop_constant:
        silent_PG = ~advantages_PG.any(dim=1, keepdim=True) | ~groups.scored_PG
        advantages_PG = drop_constant(advantages_PG, groups.loss_tokens_PG, silent_PG)
    return advantages_PG


def _with_penalty(groups: Groups, cache: int, run: AdvantagePipeline) -> Tensor:
    return groups.rewards_PG + overlong_penalty(groups.lengths_PG, run.max_length, cache)


def _canon(groups: Groups, advantages_PG: Tensor, options: CanonOptions, run: AdvantagePipeline) -> Tensor:
    measure_PG = groups.lengths_PG if options.measure == "length" else groups.surprisal_PG
    if measure_PG is None:
        raise ValueError("measure: entropy needs the log-probabilities of the rollouts")
    return canon(groups.rewards_PG, measure_PG, inter=options.inter.at(groups.step))


def _rrb(groups: Groups, advantages_PG: Tensor, options: RrbOptions, run: AdvantagePipeline) -> Tensor:
    if options.rule == "all_low":
        return rrb_all_low(advantages_PG, groups.rewards_PG, low=options.low, factor=options.low_factor)
    return rrb(advantages_PG, groups.rewards_PG, full_range=options.full_range, power=options.range_power)


def _bins(groups: Groups) -> Tensor:
    return bins_of(groups.pass_rate_P, groups.rewards_PG.shape[1])


def _daro(groups: Groups, advantages_PG: Tensor, options: DaroOptions, run: AdvantagePipeline) -> Tensor:
    """Weigh the advantages with the present weights, then update the weights on the same loss.

    This runs on the CPU. On a GPU sums by index are added in any order, and all ranks have to agree to the bit.
    """
    generations, bins = advantages_PG.shape[1], max(1, advantages_PG.shape[1] - 1)
    raw_PG, tokens_PG, rates_P, scored_PG = (
        t.cpu() for t in (advantages_PG, groups.loss_tokens_PG, groups.pass_rate_P, groups.scored_PG)
    )
    bins_P, learned = _bins(groups).cpu(), run.daro_weights(bins, options)
    weights_M = learned.weights_M
    shape = {"by_bin_tokens": options.by_bin_tokens, "drop_outside": options.drop_outside}
    weighed_PG = daro(raw_PG, tokens_PG, rates_P, weights_M, scored_PG, **shape)
    losses_M = bin_losses(raw_PG, torch.where(scored_PG, tokens_PG, 0.0), bins_P, bins, options.bin_loss)
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

    apply: Callable[[Groups, Tensor, Any, AdvantagePipeline], Tensor] | None = None
    options: type = NoOptions
    settings: Mapping[str, Any] = field(default_factory=dict)  # TRL's keys that belong to it
    plain: Callable[[Any], bool] = lambda options: False
    remakes: bool = False  # computes advantages from the rewards of a group, and ignores those of TRL
    # What it changes about which groups have signal. None: nothing, or what `apply` says if it remakes.
    signal: Callable[[Groups, Tensor, Any, AdvantagePipeline], Tensor] | None = None
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
        DapoOptions,
        {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "mask_truncated_completions": True, "beta": 0.0},
        plain=lambda o: not o.drop_constant and o.overlong_cache is None,
        signal=lambda g, s, o, run: ~is_constant(_with_penalty(g, o.overlong_cache, run)) if o.overlong_cache else s,
        source="arXiv 2503.14476",
    ),
    "adora": Method(
        _adora,
        AdoraOptions,
        plain=lambda o: o.mode == "off" or set(scheduled(o.factor).values) == {1.0},
        source="arXiv 2602.10019",
    ),
    "daro": Method(
        _daro,
        DaroOptions,
        {"loss_type": "dapo"},
        signal=lambda g, s, o, run: s & (_bins(g) != OUTSIDE) if o.drop_outside else s,
        source="arXiv 2510.09001",
    ),
    "mc_grpo": Method(
        lambda g, a, o, run: mc_grpo(g.rewards_PG, centre=o.centre, spread=o.spread, exclude_pivot=o.exclude_pivot),
        McGrpoOptions,
        remakes=True,
        source="arXiv 2601.22582",
    ),
    "ngrpo": Method(
        lambda g, a, o, run: ngrpo(g.rewards_PG, virtual=o.virtual, max_reward=o.max_reward),
        NgrpoOptions,
        {"epsilon": 0.16, "epsilon_high": 0.24},
        remakes=True,
        source="arXiv 2509.18851",
    ),
    "a_grae": Method(
        lambda g, a, o, run: a_grae(a, g.pass_rate_P, scored=g.scored_PG, curriculum=o.curriculum, alpha=o.alpha),
        AGraeOptions,
        plain=lambda o: not o.curriculum and o.alpha is None,
        source="arXiv 2602.05548",
    ),
    "canon": Method(
        _canon,
        CanonOptions,
        {"loss_type": "dr_grpo", "scale_rewards": "none", "epsilon_high": 0.28},
        remakes=True,
        source="arXiv 2509.23962",
    ),
    "d3s": Method(
        lambda g, a, o, run: d3s(a, scored=g.scored_PG, keep=o.keep.at(g.step), across=o.across),
        D3sOptions,
        source="arXiv 2509.22115",
    ),
    "ssb": Method(
        lambda g, a, o, run: ssb(a, scored=g.scored_PG, share=o.share, alpha=o.replay_alpha),
        SsbOptions,
        plain=lambda o: o.share == 0,
        source="arXiv 2504.08837, 2504.16656",
    ),
    "rrb": Method(
        _rrb,
        RrbOptions,
        plain=lambda o: (o.range_power == 0) if o.rule == "range" else o.low_factor == 1,
        signal=lambda g, s, o, run: s & _rrb(g, torch.ones_like(g.rewards_PG), o, run).any(dim=1),
        source="arXiv 2603.01106",
    ),
}


class AdvantagePipeline:
    """Applies the chosen methods in order. Holds their state and the figures of the last batch."""

    def __init__(
        self,
        chosen: Mapping[str, Any],
        *,
        scale: str = "group",
        max_length: int = 0,
        sums_rewards: bool = True,
        judged_by: AdoraOptions | None = None,
        seed: int = 0,
    ) -> None:
        """Set up a run.

        Args:
            chosen: the options of each method, in order.
            scale: TRL's `scale_rewards`.
            max_length: TRL's `max_completion_length`.
            sums_rewards: whether the advantages come from the sum of the rewards, so that a group of equal sums gets 0.
            judged_by: ADORA's options where it is not among the methods; what its criteria say is logged even then.
            seed: that of the run, for methods that draw at random.
        """
        self.chosen = dict(chosen)
        self.judged_by: AdoraOptions = self.chosen.get("adora", judged_by or AdoraOptions(mode="off"))
        self.scale = scale
        self.max_length = max_length
        self.sums_rewards = sums_rewards
        self.seed = seed
        self.rate = 1.0  # by which the learning rate of the present generation's optimizer steps is multiplied
        self.figures: dict[str, float] = {}
        self.weighting: AdoraWeighting | None = None  # of the last batch
        self._daro: DaroWeights | None = None
        self._saved: dict[str, Any] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether TRL's advantages stay unchanged, to the bit."""
        return all(METHODS[name].plain(options) for name, options in self.chosen.items())

    def weigh(self, groups: Groups) -> AdoraWeighting:
        """ADORA's weights and their reasons. The weights are 1 if ADORA is not among the methods."""
        options, step = self.judged_by, groups.step
        weighting = weigh_groups(groups, options, step)
        return assign_weights(weighting, self.signal(groups), options, seed=self.seed, step=step)

    def signal(self, groups: Groups) -> Tensor:
        """Which groups have something to teach, bool, (P,). Each is judged alone, whatever else is in the batch, so
        groups can be chosen by it before they are weighed; nothing is remembered.
        """
        signal_P = groups.differs_P
        for name, options in self.chosen.items():
            method = METHODS[name]
            if method.signal is not None:
                signal_P = method.signal(groups, signal_P, options, self)
            elif method.remakes and method.apply is not None:
                made_PG = method.apply(groups, torch.zeros_like(groups.rewards_PG), options, self)
                signal_P = made_PG.any(dim=1)
        return signal_P & groups.scored_PG.any(dim=1)

    def __call__(self, groups: Groups, advantages_PG: Tensor) -> Tensor:
        """Turn TRL's advantages of whole groups into the ones to learn from, both (P, G). Call it once in a generation,
        with all groups that are learned from and no others: some methods weigh a group by the rest, and DARO learns.

        Afterwards `weighting` holds the weights that were applied, and their reasons.
        """
        self.figures, self.weighting = {}, self.weigh(groups)
        self.rate = self.weighting.rate
        if self.judged_by.assign == "rate":
            self.figures["rate_scale"] = self.rate
        if self.is_plain:
            return advantages_PG
        # TRL's float32 mean leaves up to 6e-4 in a constant group
        advantages_PG = torch.where(groups.differs_P[:, None], advantages_PG, 0.0)
        for name, options in self.chosen.items():
            apply = METHODS[name].apply
            if apply is not None:
                advantages_PG = apply(groups, advantages_PG, options, self)
        return advantages_PG

    def daro_weights(self, bins: int, options: DaroOptions) -> DaroWeights:
        """DARO's learnable weights, which are created at the first batch."""
        if self._daro is None:
            self._daro = DaroWeights(bins, options.learning_rate, options.floor)
            if self._saved is not None:
                self._daro.load(self._saved)
        return self._daro

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, in a form that JSON can hold. Empty if no method remembers anything."""
        daro = self._daro.state() if self._daro is not None else self._saved
        return {
            **({} if daro is None else {"daro": daro}),
            **({"rate": self.rate} if self.judged_by.assign == "rate" else {}),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned. Call it before the first batch."""
        self._saved, self._daro = state.get("daro"), None
        self.rate = float(state.get("rate", 1.0))
