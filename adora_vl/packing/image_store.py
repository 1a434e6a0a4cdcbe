"""Storage of processed images: a cache of the processor's results, and banks for the batches.

A batch holds references into a bank, the numbers of patches, in place of pixels.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_utils import make_flat_list_of_images
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from adora_vl.data.images import KeptImage, content_digest

if TYPE_CHECKING:
    from transformers import BaseImageProcessor
    from transformers.image_utils import ImageInput

Preprocess = Callable[..., BatchFeature]
PASSING = "adora_passing"  # key in the `info` of an image that is used once and not cached


@dataclass(frozen=True)
class ProcessedImage:
    """One image as the processor cuts it into patches, before rescaling and normalisation."""

    key: str  # digest of the image's content and of the processor's settings
    patches_RD: Tensor  # uint8; R patches of D = channels x temporal patch x height x width
    grid_3: Tensor  # (temporal, height, width) in patches


def can_cache(image_processor: object) -> bool:
    """Return whether the cache can take apart the output of this processor."""
    return isinstance(image_processor, Qwen2VLImageProcessor)


def normalize_patches(
    image_processor: "BaseImageProcessor", patches_RD: Tensor, settings: dict[str, Any]
) -> Tensor:
    """Return the patches rescaled and normalised by the processor's own method, (R, D) float32."""
    patch = settings["patch_size"]
    temporal = settings["temporal_patch_size"]
    channels_first = patches_RD.view(len(patches_RD), -1, temporal, patch, patch).transpose(1, 2)
    pixels: Tensor = image_processor.rescale_and_normalize(
        channels_first,
        settings["do_rescale"],
        settings["rescale_factor"],
        settings["do_normalize"],
        settings["image_mean"],
        settings["image_std"],
    )
    return pixels.transpose(1, 2).reshape(len(patches_RD), -1)


def effective_settings(
    image_processor: "BaseImageProcessor", overrides: dict[str, Any]
) -> dict[str, Any]:
    """Return the processor's settings, overridden by the arguments of one call.

    Pixel limits are found under `size`, whichever way they were set.
    """
    arguments = {name: value for name, value in overrides.items() if name != "return_tensors"}
    settings = {**image_processor.to_dict(), **arguments}
    min_pixels = settings.pop("min_pixels", None)
    max_pixels = settings.pop("max_pixels", None)
    if min_pixels is not None and max_pixels is not None:
        settings["size"] = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
    settings["size"] = dict(settings["size"])
    return settings


class ImageCache:
    """A cache of processed images by content: least recently used first out, bounded in bytes.

    `processed` counts how often an image really went through the processor. `cached_bytes` is the
    size of the cached patches.
    """

    def __init__(self, limit_bytes: int) -> None:
        """Create an empty cache of at most `limit_bytes`."""
        self.limit_bytes = limit_bytes
        self.cached_bytes = 0
        self.processed = 0
        self._images: OrderedDict[str, ProcessedImage] = OrderedDict()

    def get(
        self, image_processor: "BaseImageProcessor", image: "ImageInput", settings: dict[str, Any]
    ) -> ProcessedImage:
        """Return the processed `image`, from the cache or else from the processor.

        `settings`: the result of `effective_settings`.
        """
        key = _key(image, settings)
        if key in self._images:
            self._images.move_to_end(key)
            return self._images[key]
        size = settings["size"]
        # The method of the class: the object's may have been replaced by one that asks this cache.
        output = type(image_processor).preprocess(
            image_processor,
            [image],
            do_rescale=False,
            do_normalize=False,
            min_pixels=size["shortest_edge"],
            max_pixels=size["longest_edge"],
            return_tensors="pt",
        )
        self.processed += 1
        entry = ProcessedImage(key, output["pixel_values"], output["image_grid_thw"][0])
        if isinstance(image, Image.Image) and image.info.get(PASSING):
            return entry
        self._images[key] = entry
        self.cached_bytes += entry.patches_RD.nbytes
        while self.cached_bytes > self.limit_bytes and len(self._images) > 1:
            _, oldest = self._images.popitem(last=False)
            self.cached_bytes -= oldest.patches_RD.nbytes
        return entry

    def preprocess(self, image_processor: "BaseImageProcessor") -> Preprocess:
        """Return the processor's `preprocess` with this cache before it.

        The function has the same arguments and the same output.
        """

        def cached(images: "ImageInput", **overrides: Any) -> BatchFeature:
            """Return the patches and grids of images; those that the cache holds are not computed."""
            settings = effective_settings(image_processor, overrides)
            entries = [self.get(image_processor, image, settings) for image in flat_images(images)]
            patches = [entry.patches_RD for entry in entries]
            # a single image is passed on without a copy
            pixels = torch.cat(patches) if len(patches) > 1 else patches[0]
            if settings["do_rescale"] or settings["do_normalize"]:
                pixels = normalize_patches(image_processor, pixels, settings)
            grids = torch.stack([entry.grid_3 for entry in entries])
            return BatchFeature({"pixel_values": pixels, "image_grid_thw": grids})

        return cached


def flat_images(images: "ImageInput") -> Sequence[Any]:
    """Return the images of a batch in order, whatever their nesting."""
    if isinstance(images, Image.Image):
        return [images]
    rows_with_images = [row for row in images if not isinstance(row, list) or row]
    flattened: Sequence[Any] = make_flat_list_of_images(rows_with_images)
    return flattened


def _key(image: "ImageInput", settings: dict[str, Any]) -> str:
    """Return a digest of the image's content and of the settings that its patches depend on."""
    shape = {
        name: settings[name]
        for name in ("size", "resample", "patch_size", "temporal_patch_size", "merge_size")
    }
    digest = hashlib.blake2b(
        json.dumps(shape, sort_keys=True, default=str).encode(), digest_size=16
    )
    if isinstance(image, KeptImage):
        digest.update(image.digest.encode())
    elif isinstance(image, Image.Image):
        digest.update(content_digest(image).encode())
    else:
        array = torch.as_tensor(image).contiguous()
        digest.update(f"{array.dtype} {tuple(array.shape)}".encode())
        digest.update(array.cpu().numpy().tobytes())
    return digest.hexdigest()


def first_patches(references: Tensor, grids: Tensor) -> list[int]:
    """Return the number of each image's first patch, which identifies the image.

    `references`: (R, 1), the patches of N images one after the other. `grids`: (N, 3), each image's
    (temporal, height, width) in patches.
    """
    patch_counts = grids.prod(dim=-1)
    offsets = patch_counts.cumsum(0) - patch_counts
    starts: list[int] = references[offsets.to(references.device), 0].tolist()
    return starts


class ImageBank:
    """Stores the patches of distinct images under consecutive numbers.

    `first` is the number of the first patch and `end` that behind the last one; no two banks share
    numbers. `frozen_features` keeps the features by the number of an image's first patch, if the
    vision tower is frozen. `features_due` tells whether images may have been added since.
    """

    def __init__(self, first: int) -> None:
        """Create an empty bank, whose first patch gets the number `first`."""
        self.first = first
        self.end = first
        self._starts: dict[str, int] = {}
        # first patch of an image -> its key, patches (R, D) and grid (3,)
        self._images: dict[int, tuple[str, Tensor, Tensor]] = {}
        self.frozen_features: dict[int, Any] = {}
        self.features_due = True

    def __len__(self) -> int:
        return len(self._images)

    def references(
        self, image: ProcessedImage, normalize: Callable[[Tensor], Tensor], device: torch.device
    ) -> Tensor:
        """Return the numbers of the patches of `image`, (R, 1).

        An image that is new is normalised, moved to `device` and stored first.
        """
        if image.key in self._starts:
            return self._numbers(self._starts[image.key])
        patches_RD = normalize(image.patches_RD).to(device, non_blocking=True)
        return self.store(image.key, patches_RD, image.grid_3)

    def store(self, key: str, patches_RD: Tensor, grid_3: Tensor) -> Tensor:
        """Return the numbers of these patches, (R, 1), which are normalised and on the device.

        The patches are stored if `key` is new.
        """
        if key not in self._starts:
            self._starts[key] = self.end
            self._images[self.end] = (key, patches_RD, grid_3)
            self.end += len(patches_RD)
        return self._numbers(self._starts[key])

    def image(self, start: int) -> tuple[str, Tensor, Tensor]:
        """Return key, patches (R, D) and grid (3,) of the image whose first patch is `start`."""
        return self._images[start]

    def _numbers(self, start: int) -> Tensor:
        """Return the numbers of the patches of the image whose first patch is `start`, (R, 1)."""
        return torch.arange(start, start + len(self._images[start][1]))[:, None]

    def pixels(self, starts: list[int]) -> tuple[Tensor, Tensor]:
        """Return patches (R, D) and grids (N, 3) of the images whose first patches are `starts`."""
        _, patches, grids = zip(*(self._images[start] for start in starts), strict=True)
        return torch.cat(patches), torch.stack(grids)

    @property
    def starts(self) -> list[int]:
        """The number of each image's first patch, in the order of storing."""
        return list(self._images)


_TEMPORARY = "temporary"  # a third bank beside those of the modes `train` and `eval`


class ImageBanks:
    """The banks that are in use: one for the training batch and one for the evaluation batch.

    Patches are numbered through all banks, so that a number says which bank has the patch.
    """

    def __init__(self) -> None:
        self._banks: dict[str, ImageBank] = {}
        self._next = 0  # a number that no bank of before has used

    def new(self, mode: str) -> ImageBank:
        """Replace the bank of `mode` (`train` or `eval`) by an empty one."""
        if mode in self._banks:
            self._next = max(self._next, self._banks[mode].end)
        ends = [bank.end for bank in self._banks.values()]
        self._banks[mode] = ImageBank(max([self._next, *ends]))
        return self._banks[mode]

    def extend(self, mode: str = "train") -> ImageBank | None:
        """Return the bank of the present batch, to which every rank is about to add images.

        Collective: all ranks call it together, so that all compute the features of frozen towers
        again. None before the first batch.
        """
        bank = self._banks.get(mode)
        if bank is not None:
            bank.features_due = True
        return bank

    def of_training(self) -> ImageBank | None:
        """Return the bank of the training batch, or its stand-in (`temporary`), if there is one."""
        return self._banks.get(_TEMPORARY, self._banks.get("train"))

    @contextmanager
    def temporary(self) -> Iterator[ImageBank]:
        """Put an empty bank in the place of the training batch's bank inside the block.

        A second pass over the batch can then see other images, and the batch's own are untouched.
        Numbers of the empty bank are not used again behind the block.
        """
        bank = self.new(_TEMPORARY)
        try:
            yield bank
        finally:
            self._next = max(self._next, bank.end)
            del self._banks[_TEMPORARY]

    def of(self, reference: int) -> ImageBank:
        """Return the bank that stores the patch of this number."""
        for bank in self._banks.values():
            if bank.first <= reference < bank.end:
                return bank
        raise AssertionError(f"patch {reference} is in no bank that is still held")
