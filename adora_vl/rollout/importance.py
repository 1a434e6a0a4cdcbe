"""TRL's truncated importance ratio of the policy to the engine that sampled, computed from any forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from adora_vl.batch import Batch, LogFigure, loss_mask


def importance_ratio(
    logps_BC: Tensor,
    sampling_BC: Tensor,
    mask_BC: Tensor,
    *,
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> Tensor:
    """exp(policy - engine), cut off: (B, C) for `token_*` modes, (B, 1) for `sequence_*`.

    `*_truncate` clamps the ratio to the bounds, `*_mask` sets what lies outside to 0. Where the engine gave no
    log-probability (NaN), the ratio is 1. The definitions are TRL's (`vllm_importance_sampling_mode`), after Yao et
    al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025).
    """
    difference = torch.nan_to_num((logps_BC - sampling_BC) * mask_BC, nan=0.0)
    if mode.startswith("sequence"):
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = torch.exp(difference)
    if mode.endswith("truncate"):
        return ratio.clamp(min=clip_min, max=clip_max) if (clip_min, clip_max) != (None, None) else ratio
    low = -math.inf if clip_min is None else clip_min
    high = math.inf if clip_max is None else clip_max
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def ratio_figures(
    ratio: Tensor, logps_BC: Tensor, sampling_BC: Tensor, mask_BC: Tensor
) -> list[tuple[str, Tensor, Callable[[Tensor], Tensor]]]:
    """TRL's metrics of the ratio: name, value on this rank, and how the values of all ranks are combined."""
    seen = ratio.flatten() if ratio.size(1) == 1 else ratio[mask_BC.bool()]
    gap = (logps_BC - sampling_BC).abs()[mask_BC.bool()]
    gap = gap[~gap.isnan()]
    figures: list[tuple[str, Tensor, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
        ("sampling/sampling_logp_difference/mean", gap, torch.mean, torch.nanmean),
        ("sampling/sampling_logp_difference/max", gap, torch.amax, torch.amax),
        ("sampling/importance_sampling_ratio/min", seen, torch.amin, torch.amin),
        ("sampling/importance_sampling_ratio/mean", seen, torch.mean, torch.nanmean),
        ("sampling/importance_sampling_ratio/max", seen, torch.amax, torch.amax),
    ]
    none = torch.zeros((), device=logps_BC.device)
    return [(name, here(part) if part.numel() else none, everywhere) for name, part, here, everywhere in figures]


@dataclass(frozen=True)
class RatioSettings:
    """TRL's `vllm_importance_sampling_*`: the mode and the bounds."""

    mode: str
    clip_min: float | None
    clip_max: float | None


class ImportanceRatio:
    """Computes the ratio in the policy's own pass. Stock TRL makes a separate pass for it."""

    def __init__(self, settings: RatioSettings, accelerator: Accelerator, log: LogFigure) -> None:
        self.settings, self.accelerator, self.log = settings, accelerator, log

    def is_due(self, micro: Batch) -> bool:
        """Whether the batch has the engine's log-probabilities but no ratio yet."""
        return "importance_sampling_ratio" not in micro and "sampling_per_token_logps" in micro

    def complete(self, micro: Batch, logps_BC: Tensor) -> None:
        """Put the ratio into the micro-batch, and its figures into the log under TRL's names."""
        mask_BC, sampling_BC, settings = loss_mask(micro), micro["sampling_per_token_logps"], self.settings
        ratio = importance_ratio(
            logps_BC,
            sampling_BC,
            mask_BC,
            mode=settings.mode,
            clip_min=settings.clip_min,
            clip_max=settings.clip_max,
        )
        micro["importance_sampling_ratio"] = ratio
        same_B = ~micro["distorted"] if "distorted" in micro else slice(None)  # of the others the ratio is 1
        for name, own, everywhere in ratio_figures(
            ratio[same_B], logps_BC[same_B], sampling_BC[same_B], mask_BC[same_B]
        ):
            self.log(name, everywhere(self.accelerator.gather(own.reshape(1))).item())


def has_dropout(model: nn.Module) -> bool:
    """Whether the model has active dropout, so that two passes over the same tokens differ."""
    config = getattr(model, "config", None)
    attention = getattr(config.get_text_config() if config is not None else None, "attention_dropout", 0.0)
    return bool(attention) or any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules())
