"""Rollouts that see a distorted image (NoisyRollout, arXiv 2504.13055)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from adora_vl.config.advantage import chosen_methods
from adora_vl.errors import UserError
from adora_vl.rollout.noise import KINDS, SCHEDULES, NoiseSettings


@dataclass
class NoiseOptions:
    """Which rollouts see a distorted image, and how distorted it is."""

    adora_noisy_rollouts: float = field(
        default=0.0,
        metadata={
            "help": "NoisyRollout: this share of each group's rollouts sees a distorted image, all are learned from on "
            "the clean one. The authors use 0.5; 0 is off."
        },
    )
    adora_noise_kind: str = field(
        default="gaussian",
        metadata={"help": "gaussian (the authors' choice) or rotate.", "choices": list(KINDS)},
    )
    adora_noise_strength: float | None = field(
        default=None,
        metadata={
            "help": "At the beginning: diffusion steps of 1,000 for gaussian (the authors use 400 to 500), degrees for "
            "rotate; null: 500 or 15."
        },
    )
    adora_noise_schedule: str = field(
        default="sigmoid",
        metadata={"help": "sigmoid (falls to 0 along a sigmoid) or constant.", "choices": list(SCHEDULES)},
    )
    adora_noise_middle: float = field(
        default=0.667, metadata={"help": "Share of the run after which the sigmoid is at half; the authors' 40 of 60."}
    )
    adora_noise_steepness: float = field(
        default=30.0, metadata={"help": "Steepness of the sigmoid over the whole run; the authors use 30."}
    )


def noise_settings(config: Any) -> NoiseSettings:
    """The settings of a run. Raises `UserError` if the share does not give whole rollouts."""
    share, generations = config.adora_noisy_rollouts, config.num_generations
    count = share * generations
    if abs(count - round(count)) > 1e-6:
        raise UserError(
            f"adora_noisy_rollouts: {share} of num_generations: {generations} is {count:g} rollouts; choose a share "
            f"that gives a whole number, such as {max(1, generations // 2) / generations:g}"
        )
    strength = config.adora_noise_strength
    return NoiseSettings(
        count=round(count),
        generations=generations,
        kind=config.adora_noise_kind,
        strength=KINDS[config.adora_noise_kind] if strength is None else strength,
        schedule=config.adora_noise_schedule,
        middle=config.adora_noise_middle,
        steepness=config.adora_noise_steepness,
    )


def check_noise(config: Any) -> None:
    """Check the keys against the others. Raises `UserError`."""
    share = config.adora_noisy_rollouts
    settings = noise_settings(config)
    if settings.kind == "gaussian" and settings.strength > 999:
        raise UserError(f"adora_noise_strength: {settings.strength:g} must be at most 999 diffusion steps")
    if settings.kind == "rotate" and settings.strength > 180:
        raise UserError(f"adora_noise_strength: {settings.strength:g} must be at most 180 degrees")
    if not settings.count:
        return
    if not config.use_vllm or config.vllm_mode != "colocate":
        raise UserError(
            f"adora_noisy_rollouts: {share} needs use_vllm: true and vllm_mode: colocate, where a rollout can see "
            "another image than its group; else set it to 0"
        )
    canon = chosen_methods(config).get("canon")
    if canon is not None and canon.measure == "entropy":
        raise UserError(
            f"adora_noisy_rollouts: {share} leaves canon's measure: entropy without log-probabilities on the clean "
            "image; set measure: length, or adora_noisy_rollouts: 0"
        )
