"""VPPO's weights of tokens and rollouts, by how much they depend on the image.

Source: Visually-Perceptive Policy Optimization, arXiv 2510.09285, and its repository (huaixuheqing/VPPO-RL,
`verl/workers/actor/dp_actor.py`). A token depends on the image if its log-probability changes when half of the image is
black. The loss takes a share of each rollout's tokens, those that depend on it most, and a rollout that depends on it
more than others has a larger advantage.

The repository takes smallest and largest dependency of one rank's mini-batch, and the mean of a micro-batch. Ours takes
all three of all groups with signal of a generation, so the sizes of batches and the number of ranks do not matter.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LARGEST = 10.0  # nats, for one token; the repository's bound
_EVEN = 1e-6  # below this spread all rollouts depend on their images alike
# How many times as far above the smallest factor as the mean the largest may lie. In the repository, where the mean is
# that of a micro-batch of 16, it cannot lie further; of a whole generation one rollout could take hundreds of times.
_FURTHEST = 16.0


def visual_dependency(seen_BC: Tensor, blind_BC: Tensor, mask_BC: Tensor) -> Tensor:
    """How much each token depends on the image, (B, C), in nats; 0 outside `mask_BC`.

    `exp(d) - d - 1` with `d = blind - seen`: an estimate of the divergence between the model with the image and the
    model with half of it, from the sampled token alone. `seen_BC` and `blind_BC` are its log-probabilities under each.
    """
    difference_BC = (blind_BC - seen_BC).clamp(-20.0, 20.0)
    dependency_BC: Tensor = (difference_BC.exp() - difference_BC - 1).clamp(0.0, _LARGEST)
    return torch.where(mask_BC.bool(), dependency_BC, 0.0)


def most_dependent(dependency_BC: Tensor, mask_BC: Tensor, share: float) -> Tensor:
    """The `share` of each rollout's tokens that depend most on the image, bool, (B, C): n tokens rounded up, and of
    equal ones the earlier.
    """
    counts = [math.ceil(share * int(tokens) - 1e-9) for tokens in mask_BC.sum(dim=1).tolist()]
    ranked_BC = dependency_BC.masked_fill(~mask_BC.bool(), -torch.inf)
    order_BC = ranked_BC.argsort(dim=1, descending=True, stable=True)
    chosen_BC = (
        torch.arange(mask_BC.size(1), device=mask_BC.device) < torch.tensor(counts, device=mask_BC.device)[:, None]
    )
    return torch.zeros_like(chosen_BC).scatter(1, order_BC, chosen_BC)


def rollout_scale(own_B: Tensor, all_N: Tensor, smallest: float) -> Tensor:
    """The factor of each rollout's advantage, (B,), from `smallest` up, with a mean of 1 over all N rollouts.

    `own_B` and `all_N`: mean dependency per token of this rank's rollouts and of all ranks', NaN for a rollout that is
    not to be compared, whose factor is 1. The dependency is first brought to 0 to 1, from the smallest of all rollouts
    to the largest. No factor is above `smallest + 16 (1 - smallest)`; where one would be, the mean is below 1.
    """
    known_N = all_N[~all_N.isnan()]
    if known_N.numel() < 2 or known_N.max() - known_N.min() <= _EVEN:
        return torch.ones_like(own_B)
    low, spread = known_N.min(), known_N.max() - known_N.min()
    largest = smallest + (1 - smallest) / ((known_N - low) / spread).mean()
    scale_B = smallest + ((own_B - low) / spread * (largest - smallest)).clamp(max=_FURTHEST * (1 - smallest))
    return torch.where(own_B.isnan(), 1.0, scale_B)
