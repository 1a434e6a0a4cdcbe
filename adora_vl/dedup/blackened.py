"""Images of which a random half of the patches is black, to see what a rollout owes to its image."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from adora_vl.batch import Batch
from adora_vl.dedup.image_bank import ImageBank, ImageBanks, first_patches
from adora_vl.errors import UserError
from adora_vl.rollout.image_cache import can_cache, effective_settings, normalized
from adora_vl.seeds import generator_at

SHARE = 0.5  # VPPO's repository (`verl/workers/perc_utils.py`); each patch is drawn by itself


def black_patch(image_processor: Any, values: int) -> Tensor:
    """What the processor makes of a black patch, (values,). Raises `UserError` for a processor of another kind."""
    if not can_cache(image_processor):
        raise UserError(
            f"adora_visual_tokens: {type(image_processor).__name__} does not cut images into patches of its own, which "
            "could be blackened; set adora_visual_tokens and adora_visual_scale_min to 1"
        )
    return normalized(image_processor, torch.zeros(1, values), effective_settings(image_processor, {}))[0]


def blackened(patches_RD: Tensor, black_D: Tensor, key: str) -> Tensor:
    """A copy of the patches of one image, about half of them black. It is the same for the same `key`."""
    hidden_R = torch.rand(len(patches_RD), generator=generator_at(f"black/{key}")) < SHARE
    return torch.where(hidden_R[:, None].to(patches_RD.device), black_D.to(patches_RD), patches_RD)


@contextmanager
def half_black(banks: ImageBanks, image_processor: Any, batch: Batch, place: str) -> Iterator[Tensor | None]:
    """Yields the `pixel_values` of the batch with about half of every image black; None where it has no such column.

    `place` seeds what is black, together with the image: all rollouts of a group see the same half. Inside the block
    the bank of the training batch is that of these images.
    """
    pixels, grids = batch.get("pixel_values"), batch.get("image_grid_thw")
    with banks.another() as bank:
        if pixels is None:
            yield None
        elif grids is None:
            raise AssertionError("pixels without a grid: of a family that check_visual refuses")
        elif not len(grids):
            yield pixels
        elif pixels.is_floating_point():
            yield _of_pixels(pixels, grids, image_processor, place)
        else:
            yield _of_references(pixels, grids, banks, bank, image_processor, place)


def _of_pixels(pixels: Tensor, grids: Tensor, image_processor: Any, place: str) -> Tensor:
    """Without a bank an image is known by its content alone."""
    black_D = black_patch(image_processor, pixels.size(1))
    images = torch.split(pixels, grids.prod(dim=-1).tolist())
    keys = [hashlib.blake2b(image.float().cpu().numpy().tobytes(), digest_size=16).hexdigest() for image in images]
    return torch.cat([blackened(image, black_D, f"{place}/{key}") for image, key in zip(images, keys, strict=True)])


def _of_references(
    references: Tensor, grids: Tensor, banks: ImageBanks, bank: ImageBank, image_processor: Any, place: str
) -> Tensor:
    found: dict[int, Tensor] = {}
    starts = first_patches(references, grids)
    black_D = black_patch(image_processor, banks.of(starts[0]).pixels(starts[:1])[0].size(1))
    for start in starts:
        if start not in found:
            key, patches_RD, grid_3 = banks.of(start).image(start)
            found[start] = bank.hold(key, blackened(patches_RD, black_D, f"{place}/{key}"), grid_3)
    return torch.cat([found[start] for start in starts]).to(references.device)
