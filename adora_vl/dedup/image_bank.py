"""The distinct images of a generation batch, held once; the batch's rows hold references to their patches.

A reference takes the place of a patch in `pixel_values`: an integer tensor of shape (R, 1), the patch's number in the
bank. So everything that TRL does with `pixel_values` (splitting by grid, shuffling, slicing) works on it unchanged.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from adora_vl.rollout.image_cache import ProcessedImage


def first_patches(references: Tensor, grids: Tensor) -> list[int]:
    """The number of the first patch of each image of a row, which tells them apart."""
    patches = grids.prod(dim=-1)
    firsts: list[int] = references[patches.cumsum(0) - patches, 0].tolist()
    return firsts


class ImageBank:
    """Patches of distinct images. `first`: the number of its first patch; no two banks share numbers."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.end = first
        self._starts: dict[str, int] = {}
        self._images: dict[int, tuple[Tensor, Tensor]] = {}  # start -> (patches, grid)
        self.frozen_features: dict[int, Tensor] = {}  # start -> features, where no weight changes them
        self.features_due = True  # new images may have come since they were made

    def __len__(self) -> int:
        return len(self._images)

    def references(self, image: ProcessedImage, normalize: Callable[[Tensor], Tensor], device: torch.device) -> Tensor:
        """(R, 1) numbers of the patches of `image`, which is taken in, normalised and on `device`, the first time."""
        if image.key in self._starts:
            return self._numbers(self._starts[image.key])
        return self.hold(image.key, normalize(image.patches_RD).to(device), image.grid_3)

    def hold(self, key: str, patches_RD: Tensor, grid_3: Tensor) -> Tensor:
        """(R, 1) numbers of these patches, ready for the model, which are taken in the first time that `key` comes."""
        if key not in self._starts:
            self._starts[key] = self.end
            self._images[self.end] = (patches_RD, grid_3)
            self.end += len(patches_RD)
        return self._numbers(self._starts[key])

    def image(self, start: int) -> tuple[str, Tensor, Tensor]:
        """Key, patches (R, D) and grid (3,) of the image that starts there."""
        return next(key for key, own in self._starts.items() if own == start), *self._images[start]

    def _numbers(self, start: int) -> Tensor:
        return torch.arange(start, start + len(self._images[start][0]))[:, None]

    def pixels(self, starts: list[int]) -> tuple[Tensor, Tensor]:
        """Patches (R, D) and grids (N, 3) of the images that start there."""
        patches, grids = zip(*(self._images[start] for start in starts), strict=True)
        return torch.cat(patches), torch.stack(grids)

    @property
    def starts(self) -> list[int]:
        return list(self._images)


class Banks:
    """The banks whose references may still be in use: one of the training batch, one of the evaluation batch."""

    def __init__(self) -> None:
        self._banks: dict[str, ImageBank] = {}
        self._next = 0

    def new(self, mode: str) -> ImageBank:
        """An empty bank that takes the place of the one before."""
        if mode in self._banks:
            self._next = max(self._next, self._banks[mode].end)
        self._banks[mode] = ImageBank(max([self._next, *(bank.end for bank in self._banks.values())]))
        return self._banks[mode]

    def more(self) -> ImageBank | None:
        """The training batch's, to be added to on every rank; None before the first one."""
        bank = self._banks.get("train")
        if bank is not None:
            bank.features_due = True
        return bank

    def of_training(self) -> ImageBank | None:
        """The training batch's; None before the first one."""
        return self._banks.get("train")

    def of(self, reference: int) -> ImageBank:
        """The bank that holds this patch."""
        for bank in self._banks.values():
            if bank.first <= reference < bank.end:
                return bank
        raise AssertionError(f"patch {reference} is in no bank that is still held")
