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

from adora_vl.data.shared_images import KeptImage, content_digest

if TYPE_CHECKING:
    from transformers import BaseImageProcessor
    from transformers.image_utils import ImageInput

Preprocess = Callable[..., BatchFeature]
Normalize = Callable[[Tensor], Tensor]  # bytes (R, F) to the numbers that a tower reads, (R, D)
PASSING = "adora_passing"  # key in the `info` of an image that is used once and not cached


@dataclass(frozen=True)
class ProcessedImage:
    """One image as the processor cuts it into patches, before rescaling and normalisation.

    Of the frames of a patch, which are equal, one is held: an eighth of the bytes of the numbers
    that the vision tower reads.
    """

    key: str  # digest of the image's content and of the processor's settings
    frames_RF: Tensor  # uint8; R patches of F = channels x height x width
    grid_3: Tensor  # (temporal, height, width) in patches


def can_cache(image_processor: object) -> bool:
    """Return whether the cache can take apart the output of this processor."""
    return isinstance(image_processor, Qwen2VLImageProcessor)


class PatchNormalizer:
    """Makes an image's bytes the numbers that the vision tower reads, as the image processor does.

    A byte of a channel has one of 256 values, so the processor's own method is asked for each value
    once. So the numbers are the same on every device, and no device is waited for.
    """

    def __init__(self, image_processor: "BaseImageProcessor", settings: dict[str, Any]) -> None:
        """Ask the processor for its numbers. `settings`: the result of `effective_settings`."""
        channels = len(settings["image_mean"])
        bytes_CV = torch.arange(256, dtype=torch.uint8).expand(channels, -1)
        numbers: Tensor = image_processor.rescale_and_normalize(
            bytes_CV[None, :, :, None],
            settings["do_rescale"],
            settings["rescale_factor"],
            settings["do_normalize"],
            settings["image_mean"],
            settings["image_std"],
        )
        # An engine that normalises by itself asks for the bytes, which need no table.
        self._changes_values = settings["do_rescale"] or settings["do_normalize"]
        self._channels = channels
        self._frames = int(settings["temporal_patch_size"])
        self._numbers = numbers.flatten()  # (C x 256,)
        self._first_of_channel = 256 * torch.arange(channels, dtype=torch.int32)[:, None]
        self._on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, frames_RF: Tensor) -> Tensor:
        """Return patches (R, D) for one frame of each, (R, F), uint8, on the same device.

        The numbers are float32; they are the bytes where the processor changes no value.
        """
        rows = len(frames_RF)
        frame = frames_RF.view(rows, self._channels, -1)
        if self._changes_values:
            numbers, first_of_channel = self._tables(frames_RF.device)
            # Each channel has 256 numbers of its own, one for each value of a byte.
            table_indices = frame.int() + first_of_channel
            looked_up = numbers.index_select(0, table_indices.flatten())
            frame = looked_up.view(rows, self._channels, -1)
        return frame[:, :, None].expand(-1, -1, self._frames, -1).reshape(rows, -1)

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the numbers, and the place of each channel's first one, on a device."""
        if device not in self._on_device:
            self._on_device[device] = (
                self._numbers.to(device, non_blocking=True),
                self._first_of_channel.to(device, non_blocking=True),
            )
        return self._on_device[device]


def one_frame(patches_RD: Tensor, settings: dict[str, Any]) -> Tensor:
    """Return one frame of each patch of an image, (R, F).

    The processor repeats an image's only frame, as often as a patch of a film has frames.
    """
    frames = int(settings["temporal_patch_size"])
    values = settings["patch_size"] ** 2
    patches = patches_RD.view(len(patches_RD), -1, frames, values)
    frame = patches[:, :, :1]
    assert torch.equal(frame.expand_as(patches), patches), "an image has one frame"
    return frame.reshape(len(patches_RD), -1)


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
        frames_RF = one_frame(output["pixel_values"], settings)
        entry = ProcessedImage(key, frames_RF, output["image_grid_thw"][0])
        if isinstance(image, Image.Image) and image.info.get(PASSING):
            return entry
        self._images[key] = entry
        self.cached_bytes += entry.frames_RF.nbytes
        while self.cached_bytes > self.limit_bytes and len(self._images) > 1:
            _, oldest = self._images.popitem(last=False)
            self.cached_bytes -= oldest.frames_RF.nbytes
        return entry

    def preprocess(self, image_processor: "BaseImageProcessor") -> Preprocess:
        """Return the processor's `preprocess` with this cache before it.

        The function has the same arguments and the same output.
        """

        def cached(images: "ImageInput", **overrides: Any) -> BatchFeature:
            """Return the patches and grids of images; those that the cache holds are not computed."""
            settings = effective_settings(image_processor, overrides)
            entries = [self.get(image_processor, image, settings) for image in flat_images(images)]
            frames = [entry.frames_RF for entry in entries]
            # a single image is passed on without a copy
            frames_RF = torch.cat(frames) if len(frames) > 1 else frames[0]
            pixels = PatchNormalizer(image_processor, settings)(frames_RF)
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
    names = ("size", "resample", "patch_size", "temporal_patch_size", "merge_size")
    patch_settings = {name: settings[name] for name in names}
    settings_text = json.dumps(patch_settings, sort_keys=True, default=str)
    digest = hashlib.blake2b(settings_text.encode(), digest_size=16)
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

    An image is stored as the bytes of one frame of its patches, (R, F), which become numbers where
    a tower reads them; or as numbers, (R, D), where something has changed them.
    """

    def __init__(self, first: int, normalize: Normalize = Tensor.float) -> None:
        """Create an empty bank, whose first patch gets the number `first`.

        `normalize`: makes bytes the numbers of a tower.
        """
        self.first = first
        self.end = first
        self.normalize = normalize
        self._starts: dict[str, int] = {}
        # first patch of an image -> its key, its bytes or numbers, and its grid (3,)
        self._images: dict[int, tuple[str, Tensor, Tensor]] = {}
        self.frozen_features: dict[int, Any] = {}
        self.features_due = True

    def __len__(self) -> int:
        return len(self._images)

    def references(self, image: ProcessedImage, device: torch.device) -> Tensor:
        """Return the numbers of the patches of `image`, (R, 1).

        The bytes of an image that is new are stored on `device` first.
        """
        if image.key in self._starts:
            return self._numbers(self._starts[image.key])
        frames_RF = image.frames_RF
        if device.type == "cuda":
            frames_RF = frames_RF.pin_memory()  # else the host would wait for the copy
        return self.store(image.key, frames_RF.to(device, non_blocking=True), image.grid_3)

    def store(self, key: str, patches: Tensor, grid_3: Tensor) -> Tensor:
        """Return the numbers of these patches, (R, 1); they are stored if `key` is new.

        `patches`: on the device; bytes (R, F), uint8, or the numbers of a tower, (R, D).
        """
        if key not in self._starts:
            self._starts[key] = self.end
            self._images[self.end] = (key, patches, grid_3)
            self.end += len(patches)
        return self._numbers(self._starts[key])

    def image(self, start: int) -> tuple[str, Tensor, Tensor]:
        """Return key, patches and grid (3,) of the image whose first patch is `start`.

        The patches are as they are stored: bytes or numbers.
        """
        return self._images[start]

    def _numbers(self, start: int) -> Tensor:
        """Return the numbers of the patches of the image whose first patch is `start`, (R, 1)."""
        return torch.arange(start, start + len(self._images[start][1]))[:, None]

    def pixels(self, starts: list[int]) -> tuple[Tensor, Tensor]:
        """Return patches (R, D) and grids (N, 3) of the images whose first patches are `starts`.

        The patches are the numbers that a tower reads.
        """
        _, stored, grids = zip(*(self._images[start] for start in starts), strict=True)
        if all(patches.dtype == torch.uint8 for patches in stored):
            return self.normalize(torch.cat(stored)), torch.stack(grids)
        numbers = [
            self.normalize(patches) if patches.dtype == torch.uint8 else patches
            for patches in stored
        ]
        return torch.cat(numbers), torch.stack(grids)

    @property
    def starts(self) -> list[int]:
        """The number of each image's first patch, in the order of storing."""
        return list(self._images)


_TEMPORARY = "temporary"  # a third bank beside those of the modes `train` and `eval`


class ImageBanks:
    """The banks that are in use: one for the training batch and one for the evaluation batch.

    Patches are numbered through all banks, so that a number says which bank has the patch.
    """

    def __init__(self, normalize: Normalize = Tensor.float) -> None:
        """Begin without any bank. `normalize`: as for an `ImageBank`."""
        self._normalize = normalize
        self._banks: dict[str, ImageBank] = {}
        self._next = 0  # a number that no bank of before has used

    def new(self, mode: str) -> ImageBank:
        """Replace the bank of `mode` (`train` or `eval`) by an empty one."""
        if mode in self._banks:
            self._next = max(self._next, self._banks[mode].end)
        ends = [bank.end for bank in self._banks.values()]
        self._banks[mode] = ImageBank(max([self._next, *ends]), self._normalize)
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
