"""Replay of earlier groups (SSR of VL-Rethinker, arXiv 2504.08837)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from adora_vl.config.speed import regroup_obstacle
from adora_vl.errors import UserError


@dataclass
class ReplayOptions:
    """Which earlier groups take the places of groups without signal."""

    adora_replay_groups: int = field(
        default=0,
        metadata={
            "help": "Sample replay: keep up to so many groups with signal per process, and learn from some of them "
            "again in the places of groups whose advantages are all zero; 0 is off."
        },
    )
    adora_replay_alpha: float = field(
        default=1.0,
        metadata={"help": "A kept group is drawn with a chance like the sum of its |advantages| to this power."},
    )


def check_replay(config: Any) -> None:
    """Check the keys against the others. Raises `UserError`."""
    kept, rows = config.adora_replay_groups, config.per_device_train_batch_size * config.steps_per_generation
    if not kept:
        return
    key = f"adora_replay_groups: {kept}"
    if rows % config.num_generations:
        raise UserError(
            f"{key} needs whole groups on every process, but one samples {rows} rollouts at a time and num_generations "
            f"is {config.num_generations}; make per_device_train_batch_size a multiple of it"
        )
    obstacle = regroup_obstacle(config)
    if obstacle:
        raise UserError(f"{key} does not go with {obstacle}, which depends on the rows of a micro-batch; set it to 0")
    if config.sync_ref_model:
        raise UserError(
            f"{key} does not go with sync_ref_model: true, whose reference is another one by then; set it to 0"
        )
    if not config.adora_cache_images:
        raise UserError(
            f"{key} needs adora_cache_images: true; else every rollout would be kept with an image of its own"
        )


def replay_needs(config: Any) -> list[str]:
    """What it costs, for the first lines of the run."""
    kept = config.adora_replay_groups
    if not kept:
        return []
    lines = [f"sample replay: up to {kept} groups and their images per process, in memory and in every checkpoint"]
    if config.delta is None:
        lines.append(
            "sample replay: without TRL's delta, a token of a wrong answer that is likely by now is not clipped"
        )
    return lines
