"""How far the engine's log-probabilities are from the trainer's for the tokens that the engine sampled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CAUSES = (
    "min_pixels/max_pixels differ between the trainer and the model folder that vLLM reads",
    "weights did not reach the engine (sync, sleep and wake, LoRA merging)",
    "stale prefix or encoder caches after a sync",
    "the engine's dtype is lower than the trainer's (adora_vllm_dtype)",
    "a chat template or tokenizer in the model folder other than the trainer's",
)


@dataclass(frozen=True)
class Drift:
    """Absolute differences in nats over the sampled tokens of one batch."""

    mean: float
    largest: float


def drift_sums(trainer_BC: Tensor, engine_BC: Tensor, mask_BC: Tensor) -> Tensor:
    """`[sum, count, largest]` of |difference| over the masked tokens that the engine scored. (3,), float64.

    Sums are returned instead of a mean, so that a rank with few tokens does not count as much as one with many. A
    token that the engine could not score (NaN) is left out. If the policy's values are NaN, or the engine scored no
    token at all, the difference is infinite.
    """
    sampled_BC = mask_BC.bool()
    scored_BC = sampled_BC & ~torch.isnan(engine_BC)
    counted = (trainer_BC - engine_BC).abs().double()[scored_BC].nan_to_num(nan=torch.inf)
    if sampled_BC.any() and not scored_BC.any():
        counted = counted.new_tensor([torch.inf])
    largest = counted.max() if counted.numel() else counted.new_zeros(())
    return torch.stack([counted.sum(), counted.new_tensor(float(counted.numel())), largest])


def rollout_drift(trainer_BC: Tensor, engine_BC: Tensor, mask_BC: Tensor) -> Tensor:
    """Mean |difference| of each rollout over the tokens that the engine scored, (B,); NaN where it scored none."""
    scored_BC = mask_BC.bool() & ~torch.isnan(engine_BC)
    gaps_BC = torch.where(scored_BC, (trainer_BC - engine_BC).abs(), 0.0)
    return gaps_BC.sum(dim=1) / scored_BC.sum(dim=1)


def merge_drift(sums_R3: Tensor) -> Drift:
    """One `Drift` from the sums of all ranks, (ranks, 3)."""
    total, count = sums_R3[:, 0].sum(), sums_R3[:, 1].sum()
    return Drift(mean=(total / count.clamp(min=1)).item(), largest=sums_R3[:, 2].max().item())


def drift_message(drift: Drift, bound: float, step: int, checkpoint: str) -> str:
    """The message of a run that stops because of drift: the figures, the likely causes and the checkpoint."""
    causes = "\n".join(f"  - {cause}" for cause in CAUSES)
    return (
        f"step {step}: the engine's log-probabilities are {drift.mean:.3g} nats per token from the trainer's on "
        f"average (largest {drift.largest:.3g}); adora_max_drift is {bound:g}. Importance ratios would hide this while "
        f"nothing is learned, so the run stops before the step. Checkpoint: {checkpoint}. Likely causes:\n{causes}"
    )
