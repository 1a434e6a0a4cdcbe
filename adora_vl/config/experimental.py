"""What the methods that nobody has reproduced here need from a run: rollouts on distorted images, replay of earlier
groups, and advantages by visual dependency. All are off by default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from adora_vl.config.advantage import chosen_methods
from adora_vl.config.keys import NOISE_KINDS
from adora_vl.models.families import family_of, sees_images
from adora_vl.utils.errors import UserError

_STRONGEST = {"gaussian": (999, "diffusion steps"), "rotate": (180, "degrees")}


@dataclass(frozen=True)
class NoiseSettings:
    """The keys `adora_noisy_rollouts` and `adora_noise_*` of a run."""

    count: int  # distorted rollouts per group
    generations: int
    kind: str
    strength: float
    schedule: str
    middle: float
    steepness: float


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
        strength=NOISE_KINDS[config.adora_noise_kind] if strength is None else strength,
        schedule=config.adora_noise_schedule,
        middle=config.adora_noise_middle,
        steepness=config.adora_noise_steepness,
    )


def check_noise(config: Any) -> None:
    """Check the keys of distorted images against the others. Raises `UserError`."""
    share = config.adora_noisy_rollouts
    settings = noise_settings(config)
    strongest, unit = _STRONGEST[settings.kind]
    if settings.strength > strongest:
        raise UserError(f"adora_noise_strength: {settings.strength:g} must be at most {strongest} {unit}")
    if not settings.count:
        return
    if not config.use_vllm or config.vllm_mode != "colocate":
        raise UserError(
            f"adora_noisy_rollouts: {share} needs use_vllm: true and vllm_mode: colocate, where a rollout can see "
            "another image than its group; else set it to 0"
        )
    if any(method.reads_surprisal for method in chosen_methods(config).values()):
        raise UserError(
            f"adora_noisy_rollouts: {share} leaves canon's measure: entropy without log-probabilities on the clean "
            "image; set measure: length, or adora_noisy_rollouts: 0"
        )


def replay_needs(config: Any) -> list[str]:
    """What it costs, for the first lines of the run."""
    kept = config.adora_rollouts.replay
    if not kept:
        return []
    lines = [f"sample replay: up to {kept} groups and their images per process, in memory and in every checkpoint"]
    if config.delta is None:
        lines.append(
            "sample replay: without TRL's delta, a token of a wrong answer that is likely by now is not clipped"
        )
    return lines


def weighs_visually(config: Any) -> bool:
    """Whether either key of visual dependency asks for it."""
    return bool(config.adora_visual_tokens < 1 or config.adora_visual_scale_min < 1)


def check_visual(config: Any, model_config: PretrainedConfig) -> None:
    """Check the keys of visual dependency against the others. Raises `UserError`."""
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
