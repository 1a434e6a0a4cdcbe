"""Measures and corrects the difference between the engine and the policy.

Drift is the difference of their log-probabilities; the importance ratio corrects the loss for it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from adora_vl.types import Batch, StepContext, loss_mask
from adora_vl.utils.stop_message import stopped_before

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
    tokens: int = 0  # number of tokens that were compared


def drift_sums(trainer_BC: Tensor, engine_BC: Tensor, mask_BC: Tensor) -> Tensor:
    """Return `[sum, count, largest]` of |difference| over the masked tokens, (3,) float64.

    Sums are returned instead of a mean, so that a rank with few tokens does not count as much as
    one with many. A token that the engine was not asked for (NaN) is left out. The difference is
    infinite where the engine or the policy gave no finite number, and where the engine was asked
    for no token at all.
    """
    sampled_BC = mask_BC.bool()
    scored_BC = sampled_BC & ~torch.isnan(engine_BC)
    gaps_BC = (trainer_BC - engine_BC).abs().double().nan_to_num(nan=torch.inf, posinf=torch.inf)
    scored_gaps_BC = torch.where(scored_BC, gaps_BC, 0.0)  # an index would make the host wait
    count = scored_BC.sum()
    # Infinite where tokens were sampled and none of them was scored, else 0.
    penalty = torch.where(sampled_BC.any() & (count == 0), torch.inf, 0.0)
    total = scored_gaps_BC.sum() + penalty
    largest = scored_gaps_BC.max() + penalty
    return torch.stack([total, count.double(), largest])


def rollout_drift(trainer_BC: Tensor, engine_BC: Tensor, mask_BC: Tensor) -> Tensor:
    """Mean |difference| of each rollout over its tokens, (B,).

    Tokens that the engine was not asked for are left out; NaN where it was asked for none.
    """
    scored_BC = mask_BC.bool() & ~torch.isnan(engine_BC)
    gaps_BC = torch.where(scored_BC, (trainer_BC - engine_BC).abs(), 0.0)
    return gaps_BC.sum(dim=1) / scored_BC.sum(dim=1)


def merge_drift(sums_R3: Tensor) -> Drift:
    """Return one `Drift` from the sums of all ranks, (ranks, 3), of `drift_sums`."""
    totals, counts, largest = zip(*sums_R3.tolist(), strict=True)
    mean = sum(totals) / max(sum(counts), 1)
    return Drift(mean=mean, largest=max(largest), tokens=int(sum(counts)))


def drift_message(drift: Drift, bound: float, step: int, checkpoint: Path | str) -> str:
    """Return the message of a run that stops for drift, in the step after `step` made ones.

    It has figures, the checkpoint and likely causes.
    """
    causes = "\n".join(f"  - {cause}" for cause in CAUSES)
    line = stopped_before(
        step,
        f"the engine's log-probabilities are {drift.mean:.3g} nats per token from the trainer's on "
        f"average (largest {drift.largest:.3g}); adora_max_drift is {bound:g}. Importance ratios "
        "would hide this while nothing is learned",
        remedy="Find the cause",
        checkpoint=checkpoint,
    )
    return f"{line}. Likely causes:\n{causes}"


def importance_ratio(
    logps_BC: Tensor,
    sampling_BC: Tensor,
    mask_BC: Tensor,
    *,
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> Tensor:
    """Return exp(policy - engine), cut off: (B, C) for `token_*` modes, (B, 1) for `sequence_*`.

    `*_truncate` clamps the ratio to the bounds, `*_mask` sets what lies outside to 0. Where the
    engine was not asked for a log-probability (NaN), the ratio is 1. The definitions are TRL's
    (`vllm_importance_sampling_mode`), after Yao et al., "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training" (2025).
    """
    difference = torch.nan_to_num((logps_BC - sampling_BC) * mask_BC, nan=0.0)
    if mode.startswith("sequence"):
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = torch.exp(difference)
    if mode.endswith("truncate"):
        if clip_min is None and clip_max is None:
            return ratio
        return ratio.clamp(min=clip_min, max=clip_max)
    low = -math.inf if clip_min is None else clip_min
    high = math.inf if clip_max is None else clip_max
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


# TRL's metrics of the ratio, and how the values of all ranks are combined
_FIGURES: dict[str, Callable[[Sequence[float]], float]] = {
    "sampling/sampling_logp_difference/mean": fmean,
    "sampling/sampling_logp_difference/max": max,
    "sampling/importance_sampling_ratio/min": min,
    "sampling/importance_sampling_ratio/mean": fmean,
    "sampling/importance_sampling_ratio/max": max,
}


def ratio_figures(ratio: Tensor, logps_BC: Tensor, sampling_BC: Tensor, mask_BC: Tensor) -> Tensor:
    """Return this rank's values of `_FIGURES`, (5,); 0 where there is nothing to count.

    A row counts, with all of its tokens, if the engine was asked for at least one of them; a token
    that it was not asked for has the ratio 1, as in TRL. Masks are not used as indices, for which
    the host would wait: values that do not count become NaN or the neutral value of a reduction.

    Args:
        ratio: (B, C), or (B, 1) for a ratio of sequences.
        logps_BC: the policy's log-probabilities.
        sampling_BC: the engine's; NaN for a token that it was not asked for.
        mask_BC: which tokens the loss counts.
    """
    learned_BC = mask_BC.bool()
    has_engine_logp_B1 = (learned_BC & ~sampling_BC.isnan()).any(dim=1, keepdim=True)
    # A row without any token to learn from has the ratio 1 and counts, as in TRL. A row that the
    # engine was asked for no token of, since it has seen other images than the policy, does not.
    row_counts_B1 = has_engine_logp_B1 | ~learned_BC.any(dim=1, keepdim=True)
    token_counts_BC = learned_BC & row_counts_B1
    gaps_BC = torch.where(token_counts_BC, (logps_BC - sampling_BC).abs(), torch.nan)
    is_per_token = ratio.size(1) > 1
    ratio_counts = token_counts_BC if is_per_token else row_counts_B1
    ratios = torch.where(ratio_counts, ratio, torch.nan)
    smallest_ratio = ratios.nan_to_num(nan=torch.inf, posinf=torch.inf).amin()
    figures = [
        gaps_BC.nanmean(),
        gaps_BC.nan_to_num(nan=0.0, posinf=torch.inf).amax(),
        torch.where(ratios.isnan().all(), torch.nan, smallest_ratio),
        ratios.nanmean(),
        ratios.nan_to_num(nan=0.0, posinf=torch.inf).amax(),
    ]
    return torch.stack(figures).nan_to_num(nan=0.0, posinf=torch.inf)


class ImportanceRatio:
    """Computes the ratio from the policy's own pass; stock TRL makes a separate pass for it."""

    def __init__(self, context: StepContext) -> None:
        self.accelerator = context.accelerator
        self.config = context.config

    def is_due(self, micro: Batch) -> bool:
        """Return whether the batch has the engine's log-probabilities but no ratio yet."""
        return "importance_sampling_ratio" not in micro and "sampling_per_token_logps" in micro

    def complete(self, micro: Batch, logps_BC: Tensor) -> dict[str, float]:
        """Put the ratio into the batch, and return its metrics over all ranks by TRL's names.

        `logps_BC`: the policy's log-probabilities, detached. Collective.
        """
        mask_BC = loss_mask(micro)
        sampling_BC = micro["sampling_per_token_logps"]
        config = self.config
        ratio = importance_ratio(
            logps_BC,
            sampling_BC=sampling_BC,
            mask_BC=mask_BC,
            mode=config.vllm_importance_sampling_mode,
            clip_min=config.vllm_importance_sampling_clip_min,
            clip_max=config.vllm_importance_sampling_clip_max,
        )
        micro["importance_sampling_ratio"] = ratio
        figures_5 = ratio_figures(
            ratio, logps_BC=logps_BC, sampling_BC=sampling_BC, mask_BC=mask_BC
        )
        figures_R5 = self.accelerator.gather(figures_5[None]).tolist()
        metrics = {}
        for (name, combine), values in zip(
            _FIGURES.items(), zip(*figures_R5, strict=True), strict=True
        ):
            metrics[name] = combine(values)
        return metrics
