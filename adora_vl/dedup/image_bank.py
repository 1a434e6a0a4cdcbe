"""Holds each distinct image of a generation batch once. The rows of the batch refer to its patches.

In `pixel_values` a reference stands in for each patch. References are an integer tensor of shape (R, 1) with the
numbers of the patches in the bank. Everything that TRL does with `pixel_values` (splitting by grid, shuffling, slicing)
works on references too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from adora_vl.rollout.image_cache import ProcessedImage


def first_patches(references: Tensor, grids: Tensor) -> list[int]:
    """The number of the first patch of each image in a row. This number identifies the image."""
    patches = grids.prod(dim=-1)
    firsts: list[int] = references[patches.cumsum(0) - patches, 0].tolist()
    return firsts


class ImageBank:
    """The patches of distinct images. `first` is the number of the first patch; no two banks share numbers."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.end = first
        self._starts: dict[str, int] = {}
        self._images: dict[int, tuple[Tensor, Tensor]] = {}  # start -> (patches, grid)
        self.frozen_features: dict[int, Any] = {}  # start -> features, if the vision tower is frozen
        self.features_due = True  # whether images may have been added since

    def __len__(self) -> int:
        return len(self._images)

    def references(self, image: ProcessedImage, normalize: Callable[[Tensor], Tensor], device: torch.device) -> Tensor:
        """(R, 1) numbers of the patches of `image`. An image that is new is normalised and moved to `device` first."""
        if image.key in self._starts:
            return self._numbers(self._starts[image.key])
        return self.hold(image.key, normalize(image.patches_RD).to(device), image.grid_3)

    def hold(self, key: str, patches_RD: Tensor, grid_3: Tensor) -> Tensor:
        """(R, 1) numbers of these patches, which are ready for the model. They are stored if `key` is new."""
        if key not in self._starts:
            self._starts[key] = self.end
            self._images[self.end] = (patches_RD, grid_3)
            self.end += len(patches_RD)
        return self._numbers(self._starts[key])

    def image(self, start: int) -> tuple[str, Tensor, Tensor]:
        """Key, patches (R, D) and grid (3,) of the image whose first patch is `start`."""
        return next(key for key, own in self._starts.items() if own == start), *self._images[start]

    def _numbers(self, start: int) -> Tensor:
        return torch.arange(start, start + len(self._images[start][0]))[:, None]

    def pixels(self, starts: list[int]) -> tuple[Tensor, Tensor]:
        """Patches (R, D) and grids (N, 3) of the images whose first patches are `starts`."""
        patches, grids = zip(*(self._images[start] for start in starts), strict=True)
        return torch.cat(patches), torch.stack(grids)

    @property
    def starts(self) -> list[int]:
        return list(self._images)


_ANOTHER = "another"  # beside the modes `train` and `eval`


class ImageBanks:
    """The banks that are in use: one for the training batch and one for the evaluation batch."""

    def __init__(self) -> None:
        self._banks: dict[str, ImageBank] = {}
        self._next = 0

    def new(self, mode: str) -> ImageBank:
        """Replace the bank of `mode` (`train` or `eval`) by an empty one."""
        if mode in self._banks:
            self._next = max(self._next, self._banks[mode].end)
        self._banks[mode] = ImageBank(max([self._next, *(bank.end for bank in self._banks.values())]))
        return self._banks[mode]

    def more(self) -> ImageBank | None:
        """The bank of the training batch, to which every rank is about to add images. None before the first batch."""
        bank = self._banks.get("train")
        if bank is not None:
            bank.features_due = True
        return bank

    def of_training(self) -> ImageBank | None:
        """The bank of the training batch, or the one in its place. None before the first batch."""
        return self._banks.get(_ANOTHER, self._banks.get("train"))

    @contextmanager
    def another(self) -> Iterator[ImageBank]:
        """An empty bank that takes the place of the training batch's inside the block."""
        bank = self.new(_ANOTHER)
        try:
            yield bank
        finally:
            self._next = max(self._next, bank.end)
            del self._banks[_ANOTHER]

    def of(self, reference: int) -> ImageBank:
        """The bank that holds this patch."""
        for bank in self._banks.values():
            if bank.first <= reference < bank.end:
                return bank
        raise AssertionError(f"patch {reference} is in no bank that is still held")
