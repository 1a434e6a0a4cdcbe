"""What the methods that nobody has reproduced here need from a run: rollouts on distorted images, replay of earlier
groups, and advantages by visual dependency. All are off by default.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from adora_vl.config.advantage import chosen_methods
from adora_vl.config.keys import NOISE_KINDS, NoiseOptions
from adora_vl.models.families import family_of, sees_images
from adora_vl.utils.errors import UserError

_NOISY = "adora_extensions.noisy_rollouts"
_STRONGEST = {"gaussian": (999, "diffusion steps"), "rotate": (180, "degrees")}


def noisy_count(config: Any) -> int:
    """Distorted rollouts per group. Raises `UserError` if the share does not give whole ones."""
    share, generations = config.adora_extensions.noisy_rollouts.share, config.num_generations
    count: float = share * generations
    if abs(count - round(count)) > 1e-6:
        raise UserError(
            f"{_NOISY}.share: {share} of num_generations: {generations} is {count:g} rollouts; choose a share that "
            f"gives a whole number, such as {max(1, generations // 2) / generations:g}"
        )
    return round(count)


def noise_strength(options: NoiseOptions) -> float:
    """At the beginning of a run, in the unit of the kind."""
    return NOISE_KINDS[options.kind] if options.strength is None else options.strength


def check_noise(config: Any) -> None:
    """Check the options of distorted images against the keys. Raises `UserError`."""
    options, count = config.adora_extensions.noisy_rollouts, noisy_count(config)
    strongest, unit = _STRONGEST[options.kind]
    if noise_strength(options) > strongest:
        raise UserError(f"{_NOISY}.strength: {noise_strength(options):g} must be at most {strongest} {unit}")
    if not count:
        return
    if not config.use_vllm or config.vllm_mode != "colocate":
        raise UserError(
            f"{_NOISY}.share: {options.share} needs use_vllm: true and vllm_mode: colocate, where a rollout can see "
            "another image than its group; else set it to 0"
        )
    if any(method.reads_surprisal for method in chosen_methods(config).values()):
        raise UserError(
            f"{_NOISY}.share: {options.share} leaves canon's measure: entropy without log-probabilities on the clean "
            "image; set measure: length, or the share to 0"
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


def check_visual(config: Any, model_config: PretrainedConfig) -> None:
    """Check the options of visual dependency against the keys and the model. Raises `UserError`."""
    options = config.adora_extensions.visual_tokens
    if not options.on:
        return
    name = "share" if options.share < 1 else "scale_min"
    key = f"adora_extensions.visual_tokens.{name}: {getattr(options, name)}"
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
    if not config.adora_extensions.visual_tokens.on:
        return []
    return ["visual dependency: each generation is also passed with half of every image black"]
