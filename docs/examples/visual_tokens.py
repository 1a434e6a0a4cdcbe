"""VPPO (Visually-Perceptive Policy Optimization, arXiv 2510.09285) as an extension of your own.

    adora_extensions: {docs/examples/visual_tokens.py:VisualTokens: {share: 0.4, scale_min: 0.9}}

Each generation is also passed with half of every image black. The tokens whose log-probability
changes most depend on the image most, and they alone are learned from; a rollout that depends more
on its image gets larger advantages. It was written from the paper and the authors' repository; its
results have not been reproduced.
"""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import BaseImageProcessor, PretrainedConfig

from adora_vl.advantage import option
from adora_vl.config import AdoraGRPOConfig
from adora_vl.models.families import family_of, sees_images
from adora_vl.packing.image_store import (
    ImageBank,
    ImageBanks,
    PatchNormalizer,
    can_cache,
    effective_settings,
    first_patches,
)
from adora_vl.packing.images import DistinctImages
from adora_vl.training.advantages import Advantages
from adora_vl.training.extensions import Extension
from adora_vl.training.generation import Generation
from adora_vl.training.rollout_facts import rows_of_rank
from adora_vl.types import Batch, StepContext, loss_mask
from adora_vl.utils.errors import UserError
from adora_vl.utils.seeding import generator_for_key

# The share of the patches that are black, each drawn by itself, as in the authors' repository.
BLACK_SHARE = 0.5
LARGEST_SCALE = 10.0  # nats for one token, as in the repository
EVENNESS = 1e-6  # nats; a smaller difference between rollouts is rounding
# The largest factor is at most so many times as far above the smallest one as their mean, which is
# 1. The repository takes the mean over a micro-batch of 16, where no factor can be larger. Over a
# whole generation the factor of a single rollout could reach hundreds.
FURTHEST_SCALE = 16.0


def visual_dependency(seen_BC: Tensor, blind_BC: Tensor, mask_BC: Tensor) -> Tensor:
    """How much each token depends on the image, (B, C), in nats; 0 outside `mask_BC`.

    `exp(d) - d - 1` with `d = blind - seen` estimates the divergence between the model with the
    image and the model with half of it, from the sampled token alone. `seen_BC` and `blind_BC` are
    the log-probabilities under each.
    """
    difference_BC = (blind_BC - seen_BC).clamp(-20.0, 20.0)
    dependency_BC = (difference_BC.exp() - difference_BC - 1).clamp(0.0, LARGEST_SCALE)
    return torch.where(mask_BC.bool(), dependency_BC, 0.0)


def most_dependent(dependency_BC: Tensor, mask_BC: Tensor, share: float) -> Tensor:
    """The tokens of each rollout that depend most on the image, bool, (B, C).

    They are the `share` of its tokens, rounded up; where values tie the first are taken.
    """
    counts = [math.ceil(share * int(tokens) - 1e-9) for tokens in mask_BC.sum(dim=1).tolist()]
    counts_B = torch.tensor(counts, device=mask_BC.device)
    ranked_BC = dependency_BC.masked_fill(~mask_BC.bool(), -torch.inf)
    order_BC = ranked_BC.argsort(dim=1, descending=True, stable=True)
    chosen_BC = torch.arange(mask_BC.size(1), device=mask_BC.device) < counts_B[:, None]
    return torch.zeros_like(chosen_BC).scatter(1, order_BC, chosen_BC)


def rollout_scale(own_B: Tensor, all_N: Tensor, smallest: float) -> Tensor:
    """The factor of each rollout's advantage, (B,), from `smallest` up.

    The dependency is first brought to 0 to 1, from the smallest of all rollouts to the largest. The
    mean of the factors is 1 over all N rollouts, or less where one factor would be above `smallest
    + 16 (1 - smallest)`. `own_B` and `all_N` are the mean dependency per token of this rank's
    rollouts and of all ranks'; NaN is a rollout that is not compared, whose factor is 1.
    """
    known_N = all_N[~all_N.isnan()]
    if known_N.numel() < 2 or known_N.max() - known_N.min() <= EVENNESS:
        return torch.ones_like(own_B)
    low = known_N.min()
    spread = known_N.max() - low
    largest = smallest + (1 - smallest) / ((known_N - low) / spread).mean()
    above_B = (own_B - low) / spread * (largest - smallest)
    scale_B = smallest + above_B.clamp(max=FURTHEST_SCALE * (1 - smallest))
    return torch.where(own_B.isnan(), 1.0, scale_B)


def black_patch(image_processor: BaseImageProcessor, values: int) -> Tensor:
    """What the processor makes of a black patch, (values,)."""
    settings = effective_settings(image_processor, {})
    frame = torch.zeros(1, values // settings["temporal_patch_size"], dtype=torch.uint8)
    black: Tensor = PatchNormalizer(image_processor, settings)(frame)[0]
    return black


def blackened(patches_RD: Tensor, black_D: Tensor, key: str) -> Tensor:
    """A copy of the patches of one image, about half of them black, the same for the same key."""
    hidden_R = (
        torch.rand(len(patches_RD), generator=generator_for_key(f"black/{key}")) < BLACK_SHARE
    )
    return torch.where(hidden_R[:, None].to(patches_RD.device), black_D.to(patches_RD), patches_RD)


@contextmanager
def half_black(
    banks: ImageBanks, image_processor: BaseImageProcessor, batch: Batch, seed: str
) -> Iterator[Tensor | None]:
    """Yields the `pixel_values` of the batch with about half of every image black.

    It is the same half for all rollouts of a group, and `seed` seeds it; None is yielded for a
    batch without the column. `pixel_values` are pixels, or patch numbers of the bank of images that
    the training batch shares. Inside the block that bank is one of these half black images.
    """
    pixels = batch.get("pixel_values")
    grids = batch.get("image_grid_thw")
    with banks.temporary() as bank:
        if pixels is None or grids is None or not len(grids):
            yield pixels
        elif pixels.is_floating_point():
            yield _of_pixels(pixels, grids, image_processor, seed)
        else:
            yield _of_patch_numbers(pixels, grids, banks, bank, image_processor, seed)


def _of_pixels(
    pixels: Tensor, grids: Tensor, image_processor: BaseImageProcessor, seed: str
) -> Tensor:
    """The half black pixels. Without a bank an image is known by its content alone."""
    black_D = black_patch(image_processor, pixels.size(1))
    images = []
    for image in torch.split(pixels, grids.prod(dim=-1).tolist()):
        content = image.float().cpu().numpy().tobytes()
        key = hashlib.blake2b(content, digest_size=16).hexdigest()
        images.append(blackened(image, black_D, f"{seed}/{key}"))
    return torch.cat(images)


def _of_patch_numbers(
    patch_numbers: Tensor,
    grids: Tensor,
    banks: ImageBanks,
    bank: ImageBank,
    image_processor: BaseImageProcessor,
    seed: str,
) -> Tensor:
    """Return the patch numbers of half black copies, which are put into `bank` once each."""
    starts = first_patches(patch_numbers, grids)
    copies: dict[int, Tensor] = {}
    for start in starts:
        if start in copies:
            continue
        key, _, grid_3 = banks.of(start).image(start)
        patches_RD, _ = banks.of(start).pixels([start])
        black_D = black_patch(image_processor, patches_RD.size(1))
        copies[start] = bank.store(key, blackened(patches_RD, black_D, f"{seed}/{key}"), grid_3)
    return torch.cat([copies[start] for start in starts]).to(patch_numbers.device)


@dataclass
class VisualTokens(Extension):
    """Weighs the tokens of a generation by how much they depend on the image."""

    share: float = option(
        0.4, "The share of each rollout's tokens that the loss learns from; 1 learns from all."
    )
    scale_min: float = option(
        0.9,
        "The factor of the advantage of the rollout that depends least on its image; the factors "
        "of all have a mean of 1. 1 leaves all alike.",
    )

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share: {self.share} must be above 0 and at most 1")
        if not 0 <= self.scale_min <= 1:
            raise ValueError(f"scale_min: {self.scale_min} must be between 0 and 1")

    def check(self, keys: AdoraGRPOConfig) -> None:
        one_each = f"share: {self.share} gives each token an advantage of its own, and "
        if keys.loss_type == "vespo":
            raise ValueError(f"{one_each}loss_type: vespo takes one per rollout; leave that out")
        if keys.off_policy_mask_threshold:
            raise ValueError(
                f"{one_each}off_policy_mask_threshold: {keys.off_policy_mask_threshold} takes one "
                "per rollout; leave that out"
            )
        if keys.tools or keys.environment_factory:
            raise ValueError("share: tools show pictures, which would not be blackened")

    def check_model(self, model_config: PretrainedConfig) -> None:
        if not sees_images(model_config):
            raise ValueError(f"share: {self.share} needs a model that sees images")
        if family_of(model_config) is None:
            raise ValueError(
                f"share: {self.share} needs a model whose image patches are known, and "
                f"{model_config.model_type} is none"
            )

    def costs(self, keys: AdoraGRPOConfig) -> str:
        return "each generation is passed twice more, once with half of every image black"

    def start(self, context: StepContext, images: DistinctImages) -> None:
        super().start(context, images)
        if images.may_be_shown and not can_cache(images.image_processor):
            kind = type(images.image_processor).__name__
            raise UserError(
                f"adora_extensions.VisualTokens: {kind} cuts images in a way that is not known, so "
                "its patches cannot be blackened; leave it out"
            )

    def after_weighing(self, generation: Generation, batch: Batch, advantages: Advantages) -> None:
        """Turn the advantages of a generation, (B,), into those of its tokens, (B, C)."""
        # Rollouts of groups without signal are not compared: nothing is learned from them.
        live_B = rows_of_rank(advantages.has_signal_N, self.context.accelerator)
        seed = f"{self.context.config.seed}/{generation.key.position}/{generation.key.refill_round}"
        self.weigh(batch, live_B, seed)

    def weigh(self, batch: Batch, live_B: Tensor, seed: str) -> None:
        """Weigh the tokens of a batch. `seed` is where the run is, which seeds what is black."""
        mask_BC = loss_mask(batch)
        seen_BC = self.context.policy_logps(batch)
        with half_black(self.images.banks, self.images.image_processor, batch, seed) as pixels:
            blind_BC = self.context.policy_logps(batch, pixels)
        dependency_BC = visual_dependency(seen_BC, blind_BC, mask_BC)
        images = batch.get("num_images") or [int("pixel_values" in batch)] * len(mask_BC)
        shown_B = torch.tensor(images, device=mask_BC.device) > 0
        tokens_B = mask_BC.sum(dim=1)
        mean_B = dependency_BC.sum(dim=1) / tokens_B
        own_B = torch.where(shown_B & (tokens_B > 0), mean_B, torch.nan)
        compared_B = own_B.masked_fill(~live_B.to(own_B.device), torch.nan)
        everyone_N = self.context.accelerator.gather(compared_B)
        scale_B = rollout_scale(compared_B, everyone_N, self.scale_min)
        learned_BC = most_dependent(dependency_BC, mask_BC, self.share) | ~shown_B[:, None]
        weights_BC = learned_BC * mask_BC * scale_B[:, None]
        batch["advantages"] = batch["advantages"][:, None] * weights_BC
        self._log(own_B, learned_B=(learned_BC * mask_BC).sum(dim=1), tokens_B=tokens_B)

    def _log(self, own_B: Tensor, *, learned_B: Tensor, tokens_B: Tensor) -> None:
        """Log the mean dependency of all ranks' rollouts, and the share of tokens learned from."""
        known_B = (~own_B.isnan()).float()
        columns = [torch.nan_to_num(own_B), known_B, learned_B, tokens_B]
        sums_B4 = torch.stack(columns, dim=1)
        dependency, known, learned, tokens = self.context.accelerator.gather(sums_B4).sum(dim=0)
        self.context.log("visual_tokens/dependency", float(dependency / known.clamp(min=1)))
        self.context.log("visual_tokens/share", float(learned / tokens.clamp(min=1)))
