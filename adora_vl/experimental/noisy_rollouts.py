"""Some rollouts of every group are sampled on a distorted image; the policy learns from all on the
clean image.

Source: NoisyRollout (arXiv 2504.13055) and its repository (NUS-TRAIL/NoisyRollout,
`verl/utils/image_aug.py`). There is one distortion per prompt and generation, weaker as training
goes on, and the advantages are computed over clean and distorted rollouts together. An image is
first resized to the size that the model sees; the repository rounds the noisy image to whole
patches, and its rotation makes it larger. Ours does neither, so that a prompt has the same image
tokens in the engine and in the trainer.
"""

import math
from typing import Any

import numpy as np
from PIL import Image

from adora_vl.data.images import model_size
from adora_vl.dedup.image_store import PASSING, can_cache
from adora_vl.dedup.images import DistinctImages
from adora_vl.rollout.rollouts import RolloutGroup
from adora_vl.training.generation import Extension, Generation
from adora_vl.types import StepContext
from adora_vl.utils.seeding import number_at

_DIFFUSION_STEPS = 1000


def sigmoid_annealing(progress: float, *, middle: float, steepness: float) -> float:
    """`1 - sigmoid(steepness (progress - middle))`, of shares of the run.

    The repository counts generations from 1, so its middle of 40 of 60 with steepness 30 is a
    `middle` of 39 / 60 here.
    """
    exponent = min(steepness * (progress - middle), 700.0)  # math.exp overflows above 709
    return 1.0 / (1.0 + math.exp(exponent))


def signal_share(step: int) -> float:
    """The factor of the pixels after `step` diffusion steps (0 to 999), between 0 and 1.

    The variance added in a step rises along a sigmoid from 1e-5 to 5e-3.
    """
    rise = 1.0 / (1.0 + np.exp(-np.linspace(-6.0, 6.0, _DIFFUSION_STEPS)))
    return float(np.sqrt(np.prod(1.0 - (1e-5 + (5e-3 - 1e-5) * rise[: step + 1]))))


def gaussian(image: Image.Image, step: int, generator: np.random.Generator) -> Image.Image:
    """`a x + sqrt(1 - a^2) n`, clipped to 0 and 1. a is the `signal_share`, x the pixels, n
    standard normal noise.
    """
    share = signal_share(step)
    pixels = np.asarray(image, dtype=np.float32) / 255
    noise = generator.standard_normal(pixels.shape, dtype=np.float32)
    mixed = share * pixels + math.sqrt(1 - share**2) * noise
    return Image.fromarray((mixed.clip(0, 1) * 255).round().astype(np.uint8))


def as_seen(image: Image.Image, image_processor: Any) -> Image.Image:
    """The image as RGB in the size to which Qwen's processor resizes it.

    With any other processor it keeps its size.
    """
    image = image.convert("RGB")
    if not can_cache(image_processor):
        return image
    size = image_processor.size
    factor = image_processor.patch_size * image_processor.merge_size
    seen = model_size(*image.size, factor, size["shortest_edge"], size["longest_edge"])
    return image.resize(seen, image_processor.resample)


def distorted(image: Image.Image, kind: str, level: float, seed: int) -> Image.Image:
    """A distorted copy of an RGB image, the same for the same seed.

    `level`: the strength in the unit of the kind.
    """
    generator = np.random.default_rng(seed)
    if kind == "gaussian":
        noisy = gaussian(image, int(level), generator)
    else:
        noisy = image.rotate(generator.uniform(-level, level), resample=Image.Resampling.BILINEAR)
    noisy.info[PASSING] = (
        True  # it is seen once, so the cache of processed images should not keep it
    )
    return noisy


class NoisyRollouts(Extension):
    """Chooses the distortion of each generation of a run."""

    def __init__(self, context: StepContext, images: DistinctImages) -> None:
        config = context.config
        self.options = config.adora_extensions.noisy_rollouts
        self.seed = config.seed
        self.count = self.options.count(config.num_generations)
        self.clean = config.num_generations - self.count
        self.accelerator = context.accelerator
        self.log = context.log
        self.state = context.state
        self.images = images

    def level(self, step: int) -> float:
        """The strength at this share of the run; for `gaussian` rounded down to whole steps, as in
        the repository.
        """
        options = self.options
        share = 1.0
        if options.schedule == "sigmoid":
            done = step / max(self.state().max_steps, 1)
            share = sigmoid_annealing(done, middle=options.middle, steepness=options.steepness)
        level = options.at_first * share
        return float(int(level)) if options.kind == "gaussian" else level

    def images_of(self, group: RolloutGroup, images: list[Any]) -> list[list[Any] | None]:
        """The last rollouts of a group get the same distorted objects, so they stay one request.

        The run's seed and the position seed the noise; a resumed run has the same at the same
        position.
        """
        problem = group.problem
        level = self.level(group.problem.step)
        if self.count == 0 or level <= 0:
            return [None] * len(group.rollouts)
        key = f"noise/{self.seed}/{problem.where}/{problem.place}"
        seen = self.images.image_processor
        other = [
            distorted(as_seen(image, seen), self.options.kind, level, number_at(f"{key}/{number}"))
            for number, image in enumerate(images)
        ]
        members = range(group.first_member, group.first_member + len(group.rollouts))
        return [other if member >= self.clean else None for member in members]

    def after_weighing(self, generation: Generation) -> None:
        """Log the share of all ranks' rollouts that saw a distorted image, and the strength."""
        distorted_B = generation.batch["distorted"]
        self.log("adora/noisy_share", self.accelerator.gather(distorted_B.float()).mean().item())
        self.log("adora/noise_level", self.level(generation.step))
