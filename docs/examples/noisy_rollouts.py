"""NoisyRollout (arXiv 2504.13055) as an extension of your own.

    adora_extensions: {docs/examples/noisy_rollouts.py:NoisyRollouts: {share: 0.5}}

Some rollouts of every group are sampled on a distorted image, and the policy learns from all of
them on the clean image. There is one distortion for each problem and generation. It gets weaker as
training goes on, and the advantages are computed over clean and distorted rollouts together.
`noisy_7b_geo3k.yaml` beside this file is the recipe of the authors' repository
(NUS-TRAIL/NoisyRollout). It has not been run on a GPU here.

An image is first resized to the size that the model sees. The authors' code rounds the noisy image
to whole patches afterwards, and its rotation makes it larger. Here it does neither, because a
prompt must have the same image tokens in the engine and in the trainer.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from PIL import Image
from transformers import BaseImageProcessor

from adora_vl.advantage import option
from adora_vl.config import AdoraGRPOConfig
from adora_vl.data.images import PixelLimits, model_size
from adora_vl.packing.image_store import PASSING, can_cache
from adora_vl.rollout.rollouts import RolloutGroup
from adora_vl.training.advantages import Advantages
from adora_vl.training.extensions import Extension
from adora_vl.training.generation import Generation
from adora_vl.types import Batch
from adora_vl.utils.seeding import hash_to_int

DIFFUSION_STEPS = 1000
# Of each kind: its strength at the beginning, the largest one, and the unit of both.
RANGE_AND_UNIT_BY_KIND = {
    "gaussian": (500.0, 999.0, "diffusion steps"),
    "rotate": (15.0, 180.0, "degrees"),
}


def sigmoid_annealing(progress: float, *, middle: float, steepness: float) -> float:
    """`1 - sigmoid(steepness (progress - middle))`, of shares of the run.

    It is near 1 at first, 1/2 at `middle`, and near 0 at the end. The repository counts generations
    from 1, so its middle of 40 of 60 with steepness 30 is a `middle` of 39 / 60 here.
    """
    exponent = min(steepness * (progress - middle), 700.0)  # math.exp overflows above 709
    return 1.0 / (1.0 + math.exp(exponent))


def signal_share(step: int) -> float:
    """The factor of the pixels after `step` diffusion steps (0 to 999), between 0 and 1.

    The variance that a step adds rises along a sigmoid from 1e-5 to 5e-3.
    """
    rise = 1.0 / (1.0 + np.exp(-np.linspace(-6.0, 6.0, DIFFUSION_STEPS)))
    added = 1e-5 + (5e-3 - 1e-5) * rise[: step + 1]
    return float(np.sqrt(np.prod(1.0 - added)))


def gaussian(image: Image.Image, step: int, generator: np.random.Generator) -> Image.Image:
    """`a x + sqrt(1 - a^2) n`, clipped to 0 and 1.

    a is the `signal_share` of `step`, x the pixels between 0 and 1, and n standard normal noise.
    """
    share = signal_share(step)
    pixels = np.asarray(image, dtype=np.float32) / 255
    noise = generator.standard_normal(pixels.shape, dtype=np.float32)
    mixed = share * pixels + math.sqrt(1 - share**2) * noise
    return Image.fromarray((mixed.clip(0, 1) * 255).round().astype(np.uint8))


def as_seen(image: Image.Image, image_processor: BaseImageProcessor) -> Image.Image:
    """The image as RGB in the size to which Qwen's processor resizes it.

    With any other processor it keeps its size.
    """
    image = image.convert("RGB")
    if not can_cache(image_processor):
        return image
    size = image_processor.size
    token_side = image_processor.patch_size * image_processor.merge_size
    limits = PixelLimits(size["shortest_edge"], size["longest_edge"], token_side)
    width, height = model_size(*image.size, limits)
    return image.resize((width, height), image_processor.resample)


def distorted(image: Image.Image, kind: str, level: float, seed: int) -> Image.Image:
    """A distorted copy of an RGB image, the same for the same seed.

    `level` is the strength in the unit of the kind.
    """
    generator = np.random.default_rng(seed)
    if kind == "gaussian":
        noisy = gaussian(image, int(level), generator)
    else:
        angle = generator.uniform(-level, level)
        noisy = image.rotate(angle, resample=Image.Resampling.BILINEAR)
    # It is seen once, so the cache of processed images should not keep it.
    noisy.info[PASSING] = True
    return noisy


@dataclass
class NoisyRollouts(Extension):
    """Chooses the distortion of each group of a run."""

    changes_images: ClassVar[bool] = True

    share: float = option(0.5, "The share of each group's rollouts that see a distorted image.")
    kind: str = option("gaussian", "gaussian, which is the authors' choice, or rotate.")
    strength: float | None = option(
        None,
        "At the beginning: diffusion steps of 1,000 for gaussian (the authors use 400 to 500), "
        "degrees for rotate; null: 500 or 15.",
    )
    schedule: str = option("sigmoid", "sigmoid falls to 0 along a sigmoid; or constant.")
    middle: float = option(0.667, "Share of the run after which the sigmoid is at half.")
    steepness: float = option(30.0, "Steepness of the sigmoid over the whole run.")

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ValueError(f"share: {self.share} must be at least 0 and below 1")
        if self.kind not in RANGE_AND_UNIT_BY_KIND:
            raise ValueError(
                f"kind: {self.kind!r} is not one of {', '.join(RANGE_AND_UNIT_BY_KIND)}"
            )
        if self.schedule not in ("sigmoid", "constant"):
            raise ValueError(f"schedule: {self.schedule!r} is not one of sigmoid, constant")
        _, strongest, unit = RANGE_AND_UNIT_BY_KIND[self.kind]
        if not 0 <= self.at_first <= strongest:
            raise ValueError(f"strength: {self.at_first:g} must be 0 to {strongest:g} {unit}")

    @property
    def at_first(self) -> float:
        """The strength at the beginning of a run, in the unit of the kind."""
        return RANGE_AND_UNIT_BY_KIND[self.kind][0] if self.strength is None else self.strength

    def count(self, generations: int) -> int:
        """Distorted rollouts per group. Raises `ValueError` if the share gives no whole number."""
        count = self.share * generations
        if abs(count - round(count)) > 1e-6:
            half = max(1, generations // 2) / generations
            raise ValueError(
                f"share: {self.share} of num_generations: {generations} is {count:g} rollouts; "
                f"choose a share that gives a whole number, such as {half:g}"
            )
        return round(count)

    def check(self, keys: AdoraGRPOConfig) -> None:
        self.count(keys.num_generations)
        if keys.tools or keys.environment_factory:
            raise ValueError("share: tools show pictures, which would not be distorted")

    def costs(self, keys: AdoraGRPOConfig) -> str:
        return "each group is two requests, one of them with an image of its own"

    def level(self, step: int) -> float:
        """The strength after so many optimizer steps.

        For `gaussian` it is rounded down to whole diffusion steps, as in the repository.
        """
        share = 1.0
        if self.schedule == "sigmoid":
            progress = step / max(self.context.state().max_steps, 1)
            share = sigmoid_annealing(progress, middle=self.middle, steepness=self.steepness)
        level = self.at_first * share
        return float(int(level)) if self.kind == "gaussian" else level

    def images_of(self, group: RolloutGroup, images: list[Any]) -> list[list[Any] | None]:
        """The last rollouts of a group get the same distorted objects, so they stay one request.

        The run's seed and the place of the problem seed the noise, so a resumed run and another
        number of processes have the same. A group that spans ranks is asked for in parts.
        """
        problem = group.problem
        generations = self.context.config.num_generations
        first_distorted = generations - self.count(generations)
        level = self.level(problem.key.step)
        if first_distorted == generations or level <= 0:
            return [None] * len(group.rollouts)
        key = f"noise/{self.context.config.seed}/{problem.key.name}/{problem.group_number}"
        noisy = [
            distorted(
                as_seen(image, self.images.image_processor),
                kind=self.kind,
                level=level,
                seed=hash_to_int(f"{key}/{number}"),
            )
            for number, image in enumerate(images)
        ]
        first_index = group.first_rollout_index
        rollout_indices = range(first_index, first_index + len(group.rollouts))
        return [noisy if index >= first_distorted else None for index in rollout_indices]

    def after_weighing(self, generation: Generation, batch: Batch, advantages: Advantages) -> None:
        """Log the strength of the noise."""
        self.context.log("noisy_rollouts/level", self.level(generation.key.step))
