"""Advantages by visual dependency (VPPO, arXiv 2510.09285)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig

from adora_vl.errors import UserError
from adora_vl.families import family_of, sees_images


@dataclass
class VisualOptions:
    """What is learned from, by how much it depends on the image. Both keys at 1 switch it off."""

    adora_visual_tokens: float = field(
        default=1.0,
        metadata={
            "help": "VPPO: the share of each rollout's tokens that the loss learns from, those that depend most on the "
            "image. The authors use 0.4; 1 learns from all."
        },
    )
    adora_visual_scale_min: float = field(
        default=1.0,
        metadata={
            "help": "VPPO: the factor of the advantage of the rollout that depends least on its image; the factors of "
            "all have a mean of 1. The authors use 0.9; 1 leaves all alike."
        },
    )


def weighs_visually(config: Any) -> bool:
    """Whether either key asks for it."""
    return bool(config.adora_visual_tokens < 1 or config.adora_visual_scale_min < 1)


def check_visual(config: Any, model_config: PretrainedConfig) -> None:
    """Check the keys against the others. Raises `UserError`."""
    if not weighs_visually(config):
        return
    name = "adora_visual_tokens" if config.adora_visual_tokens < 1 else "adora_visual_scale_min"
    key = f"{name}: {getattr(config, name)}"
    if not sees_images(model_config):
        raise UserError(f"{key} needs a model that sees images; leave it out")
    if family_of(model_config) is None:
        raise UserError(f"{key} needs a model whose image patches are known, and {model_config.model_type} is none; "
                        f"set it to 1")  # fmt: skip
    for other, value, off in (
        ("loss_type", config.loss_type, "another loss"),
        ("off_policy_mask_threshold", config.off_policy_mask_threshold, "null"),
    ):
        if value is not None and (other != "loss_type" or value == "vespo"):
            raise UserError(f"{key} gives each token an advantage of its own; {other}: {value} takes one per rollout, "
                            f"so set it to {off}")  # fmt: skip


def visual_needs(config: Any) -> list[str]:
    """What it costs, for the first lines of the run."""
    if not weighs_visually(config):
        return []
    return ["visual dependency: each generation is also passed with half of every image black"]
