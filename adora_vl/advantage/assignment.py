"""Who gets ADORA's weights: the groups that the criteria name, or, as controls, others.

Reviewers of ADORA (arXiv 2602.10019) asked whether its gain comes from its criteria, or from attenuating anything at
all, or from a lower learning rate. Each assignment answers one of these questions; the formulas are ours.

A group *carries signal* if its rewards differ. Others have advantages of 0, so that their weights do nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch
from torch import Tensor

from adora_vl.advantage.adora import AdoraWeighting
from adora_vl.advantage.grpo import is_constant

ASSIGNMENTS = ("criterion", "random", "reversed", "rate")


def assign_weights(
    weighting: AdoraWeighting, rewards_PG: Tensor, assign: str, *, mode: str, factor: float, seed: int, step: int
) -> AdoraWeighting:
    """The same judgement with weights that are given out differently.

    Args:
        weighting: what the criteria say.
        rewards_PG: (P, G), of all ranks. NaN marks a rollout that was not scored.
        assign: `"criterion"` leaves the weights where they are. `"random"` shuffles them among the groups that carry
            signal, so that as many are attenuated as the criteria attenuate in this step. `"reversed"` gives `factor`
            to the other side: to TAS groups under attenuation, to TDS groups under amplification. `"rate"` gives every
            group the weight 1, and `rate` is the mean of the weights that the criteria give to groups with signal.
        mode: ADORA's mode; with `"off"` all weights are 1 and stay so.
        factor: ADORA's factor.
        seed: the run's seed.
        step: optimizer steps done. Seed and step decide the shuffle, on all ranks alike; no global state is touched.

    Returns:
        A judgement with new `weights_P` and `rate`; `tds_P` and the facts stay what the criteria say.

    Raises:
        ValueError: `assign` is not one of the four.
    """
    if assign not in ASSIGNMENTS:
        raise ValueError(f"assign: {assign!r} is not one of {', '.join(ASSIGNMENTS)}")
    weights_P = weighting.weights_P
    if assign == "criterion" or mode == "off":
        return weighting
    if assign == "reversed":
        marked_P = weighting.tas_P if mode == "attenuation" else weighting.tds_P
        return replace(weighting, weights_P=torch.where(marked_P, factor, torch.ones_like(weights_P)))
    signal_P = ~is_constant(rewards_PG)
    if assign == "random":
        shuffled_P = weights_P.clone()
        shuffled_P[signal_P] = _shuffled(weights_P[signal_P], seed, step)
        return replace(weighting, weights_P=shuffled_P)
    rate = weights_P[signal_P].mean().item() if bool(signal_P.any()) else 1.0
    return replace(weighting, weights_P=torch.ones_like(weights_P), rate=rate)


def _shuffled(values: Tensor, seed: int, step: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{step}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    order = torch.randperm(len(values), generator=generator)
    return values[order.to(values.device)]
