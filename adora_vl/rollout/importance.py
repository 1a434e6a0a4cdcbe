"""Measures and corrects the difference between the engine and the policy.

Drift is the difference of their log-probabilities; the importance ratio corrects the loss for it.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from adora_vl.types import Batch, StepContext, loss_mask
from adora_vl.utils.stop_message import stop_message_with_checkpoint

DRIFT_CAUSES = (
    "min_pixels/max_pixels differ between the trainer and the model folder that vLLM reads",
    "weights did not reach the engine (sync, sleep and wake, LoRA merging)",
    "stale prefix or encoder caches after a sync",
    "the engine's dtype is lower than the trainer's (adora_vllm_dtype)",
    "a chat template or tokenizer in the model folder other than the trainer's",
)


@dataclass(frozen=True)
class Drift:
    """How far two tensors of log-probabilities differ on some tokens: absolute values in nats."""

    mean: float
    largest: float
    tokens: int = 0  # number of tokens that were compared


def drift_sums(policy_logps_BC: Tensor, engine_logps_BC: Tensor, mask_BC: Tensor) -> Tensor:
    """Sum the absolute differences of two tensors of log-probabilities over the sampled tokens.

    Returns `[sum, count, largest]`, (3,) float64. For example, the policy's -1.0 -2.0 -3.0 and the
    engine's -1.5 -2.0 NaN give [0.5, 2, 0.5]. The means of ranks could not be merged, since ranks
    have different numbers of tokens. These three can.

    Tokens without a log-probability of the engine (NaN) are left out. The sum is infinite if engine
    or policy gave no finite number, or if none of the sampled tokens can be compared.

    Args:
        policy_logps_BC: the policy's log-probabilities of B rollouts with C tokens.
        engine_logps_BC: the engine's log-probabilities.
        mask_BC: 1 at sampled tokens.
    """
    sampled_BC = mask_BC.bool()
    scored_BC = sampled_BC & ~torch.isnan(engine_logps_BC)
    gaps_BC = (
        (policy_logps_BC - engine_logps_BC)
        .abs()
        .double()
        .nan_to_num(nan=torch.inf, posinf=torch.inf)
    )
    # Indexing with a mask would wait for the GPU.
    scored_gaps_BC = torch.where(scored_BC, gaps_BC, 0.0)
    count = scored_BC.sum()
    has_only_unscored_tokens = sampled_BC.any() & (count == 0)
    infinity_or_0 = torch.where(has_only_unscored_tokens, torch.inf, 0.0)
    total = scored_gaps_BC.sum() + infinity_or_0
    largest = scored_gaps_BC.max() + infinity_or_0
    return torch.stack([total, count.double(), largest])


def rollout_drift(policy_logps_BC: Tensor, engine_logps_BC: Tensor, mask_BC: Tensor) -> Tensor:
    """Return the mean absolute difference of log-probabilities of each of B rollouts, (B,).

    The arguments are those of `drift_sums`, (B, C) for at most C tokens. Tokens without a
    log-probability of the engine (NaN) are left out. A rollout of such tokens alone gets NaN. For
    example, the policy's -1.0 -2.0 -3.0 and the engine's -1.5 -2.0 NaN give 0.25.
    """
    scored_BC = mask_BC.bool() & ~torch.isnan(engine_logps_BC)
    gaps_BC = torch.where(scored_BC, (policy_logps_BC - engine_logps_BC).abs(), 0.0)
    return gaps_BC.sum(dim=1) / scored_BC.sum(dim=1)


def merge_drift_sums(sums_R3: Tensor) -> Drift:
    """Merge the sums that `drift_sums` has returned on R ranks, (R, 3), into one `Drift`."""
    totals, counts, largest = zip(*sums_R3.tolist(), strict=True)
    mean = sum(totals) / max(sum(counts), 1)
    return Drift(mean=mean, largest=max(largest), tokens=int(sum(counts)))


def drift_over_ranks(
    accelerator: Accelerator, logps_BC: Tensor, reference_logps_BC: Tensor, mask_BC: Tensor
) -> Drift:
    """Return how far two tensors of log-probabilities differ, over all ranks. Collective.

    Args:
        accelerator: that of the trainer.
        logps_BC: the policy's log-probabilities of B rollouts of this rank, with C tokens.
        reference_logps_BC: those that they are compared with.
        mask_BC: 1 at the tokens that count.
    """
    # The sum of the differences, their count, and the largest one. Unlike means, these three can be
    # merged over the ranks.
    sums_3 = drift_sums(logps_BC, reference_logps_BC, mask_BC)
    return merge_drift_sums(accelerator.gather(sums_3[None]))


def drift_message(drift: Drift, bound: float, step: int, checkpoint: Path | str | None) -> str:
    """Return the message of a run that stops since engine and policy differ by too much.

    Args:
        drift: the difference of their log-probabilities.
        bound: the largest mean difference that is allowed (`adora_max_drift`).
        step: the number of optimizer steps that were made.
        checkpoint: the last checkpoint, from which the run can go on.
    """
    causes = "\n".join(f"  - {cause}" for cause in DRIFT_CAUSES)
    line = stop_message_with_checkpoint(
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
    engine_logps_BC: Tensor,
    mask_BC: Tensor,
    *,
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> Tensor:
    """Return the importance sampling ratio exp(policy - engine), limited to bounds.

    The definitions are TRL's (`vllm_importance_sampling_mode`), after Yao et al., "Your Efficient
    RL Framework Secretly Brings You Off-Policy RL Training" (2025). For example, two tokens have
    the ratios 1.5 and 4, and the upper bound is 3:

        token_truncate      1.5  3
        token_mask          1.5  0
        sequence_truncate   3       (the ratio of the sequence is 6)
        sequence_mask       0

    Args:
        logps_BC: the policy's log-probabilities of B rollouts with C tokens.
        engine_logps_BC: the engine's; NaN for a token that has none, whose ratio is 1.
        mask_BC: which tokens the loss counts.
        mode: `token_*` for a ratio of each token, (B, C), `sequence_*` for one of each rollout,
            (B, 1). `*_truncate` clamps it to the bounds, `*_mask` sets a ratio outside of them to
            0.
        clip_min: the lower bound; None: there is none.
        clip_max: the upper bound; None: there is none.
    """
    # A difference of 0 gives the ratio 1, for tokens without a log-probability by the engine.
    difference = torch.nan_to_num((logps_BC - engine_logps_BC) * mask_BC, nan=0.0)
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


class RatioMetric(NamedTuple):
    """A metric of the importance ratio over the rollouts of all ranks."""

    name: str  # TRL's
    value: float  # NaN where no token or rollout counts; the log leaves it out
    weight: float  # how many tokens or rollouts count


def ratio_sums(ratio: Tensor, logps_BC: Tensor, engine_logps_BC: Tensor, mask_BC: Tensor) -> Tensor:
    """Return seven numbers of one rank, (7,) float64, from which TRL's metrics are computed.

        of the differences of log-probabilities:  sum, count, largest
        of the ratios:                            sum, count, smallest, largest

    The means of ranks could not be merged, since ranks have different numbers of tokens. These
    numbers can (`merge_ratio_sums`).

    A rollout counts, with all of its tokens, if the engine gave a log-probability for at least one
    of them. As in TRL a token without one has the ratio 1. Values that do not count are replaced by
    0 or infinity, since indexing with a mask would wait for the GPU.

    Args:
        ratio: (B, C) for B rollouts of C tokens, or (B, 1) for a ratio of sequences.
        logps_BC: the policy's log-probabilities.
        engine_logps_BC: the engine's; NaN for a token that has none.
        mask_BC: which tokens the loss counts.
    """
    in_loss_BC = mask_BC.bool()
    has_engine_logp_B1 = (in_loss_BC & ~engine_logps_BC.isnan()).any(dim=1, keepdim=True)
    # As in TRL, a rollout without any token to learn from has the ratio 1 and counts. If the engine
    # has seen other images than the policy, a rollout has no log-probabilities and does not count.
    row_counts_B1 = has_engine_logp_B1 | ~in_loss_BC.any(dim=1, keepdim=True)
    token_counts_BC = in_loss_BC & row_counts_B1
    gaps_BC = (logps_BC - engine_logps_BC).abs().double()
    gap_counts_BC = token_counts_BC & ~gaps_BC.isnan()
    counted_gaps_BC = torch.where(gap_counts_BC, gaps_BC, 0.0)
    is_per_token = ratio.size(1) > 1
    ratio_counts = token_counts_BC if is_per_token else row_counts_B1
    ratio = ratio.double()
    counted_ratios = torch.where(ratio_counts, ratio, 0.0)
    sums = [
        counted_gaps_BC.sum(),
        gap_counts_BC.sum().double(),
        counted_gaps_BC.amax(),
        counted_ratios.sum(),
        ratio_counts.sum().double(),
        torch.where(ratio_counts, ratio, torch.inf).amin(),
        counted_ratios.amax(),
    ]
    return torch.stack(sums)


def merge_ratio_sums(sums_R7: Tensor) -> list[RatioMetric]:
    """Return TRL's metrics of the ratio over all ranks.

    `sums_R7`: what each of R ranks has summed, (R, 7). The columns are, of the differences of
    log-probabilities, their sum, number and maximum, and of the ratios their sum, number, minimum
    and maximum.
    """
    columns = [list(column) for column in zip(*sums_R7.tolist(), strict=True)]
    # A gap is the difference of a token's two log-probabilities.
    gap_sums, gap_counts, largest_gaps, *ratio_columns = columns
    ratio_sums, ratio_counts, smallest_ratios, largest_ratios = ratio_columns
    gap_count = sum(gap_counts)
    ratio_count = sum(ratio_counts)
    mean_gap = sum(gap_sums) / max(gap_count, 1)
    mean_ratio = sum(ratio_sums) / max(ratio_count, 1)
    metrics = [
        RatioMetric("sampling/sampling_logp_difference/mean", mean_gap, gap_count),
        RatioMetric("sampling/sampling_logp_difference/max", max(largest_gaps), gap_count),
        RatioMetric("sampling/importance_sampling_ratio/min", min(smallest_ratios), ratio_count),
        RatioMetric("sampling/importance_sampling_ratio/mean", mean_ratio, ratio_count),
        RatioMetric("sampling/importance_sampling_ratio/max", max(largest_ratios), ratio_count),
    ]
    return [metric if metric.weight else metric._replace(value=math.nan) for metric in metrics]


class ImportanceRatio:
    """Computes the importance sampling ratio from the policy's log-probabilities in the loss.

    The ratio corrects the loss for sampling with the engine, whose probabilities differ a little
    from the policy's. Stock TRL makes a forward pass of its own for it. There are B rollouts of C
    tokens.
    """

    def __init__(self, context: StepContext) -> None:
        self.accelerator = context.accelerator
        self.config = context.config

    def needs_ratio(self, batch: Batch) -> bool:
        """Return whether the batch has the engine's log-probabilities but no ratio yet."""
        return "importance_sampling_ratio" not in batch and "sampling_per_token_logps" in batch

    def add_to_batch(self, batch: Batch, logps_BC: Tensor) -> list[RatioMetric]:
        """Put the importance sampling ratio into a batch, and return its metrics over all ranks.

        Collective.

        Args:
            batch: the micro-batch, which gets the column `importance_sampling_ratio`.
            logps_BC: the policy's log-probabilities, detached.
        """
        mask_BC = loss_mask(batch)
        engine_logps_BC = batch["sampling_per_token_logps"]
        config = self.config
        ratio = importance_ratio(
            logps_BC,
            engine_logps_BC=engine_logps_BC,
            mask_BC=mask_BC,
            mode=config.vllm_importance_sampling_mode,
            clip_min=config.vllm_importance_sampling_clip_min,
            clip_max=config.vllm_importance_sampling_clip_max,
        )
        batch["importance_sampling_ratio"] = ratio
        sums_7 = ratio_sums(
            ratio, logps_BC=logps_BC, engine_logps_BC=engine_logps_BC, mask_BC=mask_BC
        )
        return merge_ratio_sums(self.accelerator.gather(sums_7[None]))
