"""Advantages per token, by how much each depends on the image (VPPO): the mathematics and the
passes.
"""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from adora_vl.dedup.image_store import (
    ImageBank,
    ImageBanks,
    can_cache,
    effective_settings,
    first_patches,
    normalized,
)
from adora_vl.dedup.images import DistinctImages
from adora_vl.training.generation import Extension, Generation
from adora_vl.types import Batch, StepContext, loss_mask
from adora_vl.utils.errors import refuse
from adora_vl.utils.seeding import generator_at

_LARGEST = 10.0  # nats for one token, as in the repository
_EVEN = 1e-6  # nats; a smaller difference between rollouts is rounding
# The largest factor is at most so many times as far above the smallest one as their mean, which is
# 1. The repository takes the mean over a micro-batch of 16, where no factor can be larger. Over a
# whole generation the factor of a single rollout could reach hundreds.
_FURTHEST = 16.0


def visual_dependency(seen_BC: Tensor, blind_BC: Tensor, mask_BC: Tensor) -> Tensor:
    """How much each token depends on the image, (B, C), in nats; 0 outside `mask_BC`.

    `exp(d) - d - 1` with `d = blind - seen`: an estimate of the divergence between the model with
    the image and the model with half of it, from the sampled token alone. `seen_BC` and `blind_BC`
    are its log-probabilities under each.
    """
    difference_BC = (blind_BC - seen_BC).clamp(-20.0, 20.0)
    dependency_BC: Tensor = (difference_BC.exp() - difference_BC - 1).clamp(0.0, _LARGEST)
    return torch.where(mask_BC.bool(), dependency_BC, 0.0)


def most_dependent(dependency_BC: Tensor, mask_BC: Tensor, share: float) -> Tensor:
    """The `share`, rounded up, of a rollout's tokens that depend most on the image, bool, (B, C);
    ties: the first.
    """
    counts = [math.ceil(share * int(tokens) - 1e-9) for tokens in mask_BC.sum(dim=1).tolist()]
    ranked_BC = dependency_BC.masked_fill(~mask_BC.bool(), -torch.inf)
    order_BC = ranked_BC.argsort(dim=1, descending=True, stable=True)
    counts_B = torch.tensor(counts, device=mask_BC.device)
    chosen_BC = torch.arange(mask_BC.size(1), device=mask_BC.device) < counts_B[:, None]
    return torch.zeros_like(chosen_BC).scatter(1, order_BC, chosen_BC)


def rollout_scale(own_B: Tensor, all_N: Tensor, smallest: float) -> Tensor:
    """The factor of each rollout's advantage, (B,), from `smallest` up, with a mean of 1 over all N
    rollouts, or below where one would be above `smallest + 16 (1 - smallest)`. `own_B` and `all_N`:
    mean dependency per token of this rank's rollouts and of all ranks', NaN for a rollout that is
    not to be compared, whose factor is 1.
    """
    known_N = all_N[~all_N.isnan()]
    if known_N.numel() < 2 or known_N.max() - known_N.min() <= _EVEN:
        return torch.ones_like(own_B)
    low = known_N.min()
    spread = known_N.max() - known_N.min()
    largest = smallest + (1 - smallest) / ((known_N - low) / spread).mean()
    scale_B = smallest + ((own_B - low) / spread * (largest - smallest)).clamp(
        max=_FURTHEST * (1 - smallest)
    )
    return torch.where(own_B.isnan(), 1.0, scale_B)


# of the patches, each drawn by itself, as in VPPO's repository (`verl/workers/perc_utils.py`)
BLACK_SHARE = 0.5


def black_patch(image_processor: Any, values: int) -> Tensor:
    """What the processor makes of a black patch, (values,).

    Raises `UserError` for a processor of another kind.
    """
    kind = type(image_processor).__name__
    uncut = f"{kind} does not cut images into patches of its own, which could be blackened"
    refuse(
        (not can_cache(image_processor), f"adora_extensions.visual_tokens: {uncut}; leave it out")
    )
    return normalized(
        image_processor, torch.zeros(1, values), effective_settings(image_processor, {})
    )[0]


def blackened(patches_RD: Tensor, black_D: Tensor, key: str) -> Tensor:
    """A copy of the patches of one image, about half of them black.

    It is the same for the same `key`.
    """
    hidden_R = torch.rand(len(patches_RD), generator=generator_at(f"black/{key}")) < BLACK_SHARE
    return torch.where(hidden_R[:, None].to(patches_RD.device), black_D.to(patches_RD), patches_RD)


@contextmanager
def half_black(
    banks: ImageBanks, image_processor: Any, batch: Batch, place: str
) -> Iterator[Tensor | None]:
    """Yields the `pixel_values` of the batch with about half of every image black, the same half
    for all rollouts of a group (`place` seeds it); None without the column. Inside the block the
    training batch's bank is of these images.
    """
    pixels = batch.get("pixel_values")
    grids = batch.get("image_grid_thw")
    with banks.another() as bank:
        assert pixels is None or grids is not None, (
            "pixels without a grid: of a family that check_extensions refuses"
        )
        if pixels is None or grids is None or not len(grids):
            yield pixels
        elif pixels.is_floating_point():
            yield _of_pixels(pixels, grids, image_processor, place)
        else:
            yield _of_references(pixels, grids, banks, bank, image_processor, place)


def _of_pixels(pixels: Tensor, grids: Tensor, image_processor: Any, place: str) -> Tensor:
    """Without a bank an image is known by its content alone."""
    black_D = black_patch(image_processor, pixels.size(1))
    found = []
    for image in torch.split(pixels, grids.prod(dim=-1).tolist()):
        key = hashlib.blake2b(image.float().cpu().numpy().tobytes(), digest_size=16).hexdigest()
        found.append(blackened(image, black_D, f"{place}/{key}"))
    return torch.cat(found)


def _of_references(
    references: Tensor,
    grids: Tensor,
    banks: ImageBanks,
    bank: ImageBank,
    image_processor: Any,
    place: str,
) -> Tensor:
    found: dict[int, Tensor] = {}
    starts = first_patches(references, grids)
    black_D = black_patch(image_processor, banks.of(starts[0]).pixels(starts[:1])[0].size(1))
    for start in starts:
        if start not in found:
            key, patches_RD, grid_3 = banks.of(start).image(start)
            found[start] = bank.hold(key, blackened(patches_RD, black_D, f"{place}/{key}"), grid_3)
    return torch.cat([found[start] for start in starts]).to(references.device)


class VisualDependency(Extension):
    """Weighs the tokens of a generation. All ranks call every method together."""

    def __init__(self, context: StepContext, images: DistinctImages, *, has_dropout: bool) -> None:
        """`has_dropout`: whether the pass for the old log-probabilities has, so that it cannot be
        compared with another one. Raises `UserError` where no patch can be blackened.
        """
        unknown = "the image processor of this model cuts images in a way that is not known here"
        wrong = images.shown and not images.knows_patches
        refuse((wrong, f"adora_extensions.visual_tokens: {unknown}; leave it out"))
        self.accelerator = context.accelerator
        self.log = context.log
        self.config = context.config
        self.options = context.config.adora_extensions.visual_tokens
        self.policy_logps = context.policy_logps
        self.images = images
        self.has_dropout = has_dropout

    def after_weighing(self, generation: Generation) -> None:
        """Give every token an advantage of its own."""
        assert generation.advantages is not None
        live_B = generation.of_rank(generation.advantages.live_B, self.accelerator.process_index)
        self.weigh(
            generation.batch, live_B, f"{self.config.seed}/{generation.key}/{generation.attempt}"
        )

    def weigh(self, batch: Batch, live_B: Tensor, place: str) -> None:
        """Turn the advantages of a generation, (B,), into those of its tokens, (B, C).

        `live_B`: the rollouts of groups with signal, which alone are compared with one another.
        `place`: where the run is, which seeds what is black.
        """
        mask_BC = loss_mask(batch)
        seen_BC = None if self.has_dropout else batch.get("old_per_token_logps")
        seen_BC = self.policy_logps(batch) if seen_BC is None else seen_BC
        with half_black(self.images.banks, self.images.image_processor, batch, place) as pixels:
            blind_BC = self.policy_logps(batch, pixels)
        dependency_BC = visual_dependency(seen_BC, blind_BC, mask_BC)
        images = batch.get("num_images") or [int("pixel_values" in batch)] * len(mask_BC)
        tokens_B = mask_BC.sum(dim=1)
        shown_B = torch.tensor(images, device=mask_BC.device) > 0
        own_B = torch.where(
            shown_B & (tokens_B > 0), dependency_BC.sum(dim=1) / tokens_B, torch.nan
        )
        learned_BC = most_dependent(dependency_BC, mask_BC, self.options.share) | ~shown_B[:, None]
        compared_B = own_B.masked_fill(~live_B.to(own_B.device), torch.nan)
        scale_B = rollout_scale(
            compared_B, self.accelerator.gather(compared_B), self.options.scale_min
        )
        batch["advantages"] = batch["advantages"][:, None] * (
            learned_BC * mask_BC * scale_B[:, None]
        )
        batch["visual_dependency"], batch["visual_scale"] = own_B, scale_B
        self._log(own_B, (learned_BC * mask_BC).sum(dim=1), tokens_B)

    def _log(self, own_B: Tensor, learned_B: Tensor, tokens_B: Tensor) -> None:
        sums_B4 = torch.stack(
            [torch.nan_to_num(own_B), (~own_B.isnan()).float(), learned_B, tokens_B], dim=1
        )
        dependency, known, learned, tokens = self.accelerator.gather(sums_B4).sum(dim=0).tolist()
        self.log("adora/visual_dependency", dependency / max(known, 1))
        self.log("adora/visual_tokens", learned / max(tokens, 1))
