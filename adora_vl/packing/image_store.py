"""Storage of processed images: a cache of the processor's results, and banks for the batches.

A batch holds the numbers of patches in a bank in place of pixels.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_utils import make_flat_list_of_images
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from adora_vl.data.shared_images import ImageWithDigest, content_digest

if TYPE_CHECKING:
    from transformers import BaseImageProcessor
    from transformers.image_utils import ImageInput

Preprocess = Callable[..., BatchFeature]
# Takes patches as they are stored, (R, F), uint8, and returns them as a vision tower reads them,
# (R, D); see `PatchNormalizer`.
Normalize = Callable[[Tensor], Tensor]
# A key in the `info` of a PIL image. An image that has it is used in one pass, and is not cached.
PASSING = "adora_passing"


@dataclass(frozen=True)
class ProcessedImage:
    """One image as the processor cuts it into patches, before rescaling and normalisation.

    A patch has two equal frames, and only one of them is held. As bytes it takes an eighth of the
    memory of the float32 patch that the vision tower reads.
    """

    key: str  # digest of the image's content and of the processor's settings
    frames_RF: Tensor  # uint8; R patches of F = channels x height x width values
    grid_thw: Tensor  # (temporal, height, width) in patches


def can_cache(image_processor: object) -> bool:
    """Return whether the cache can take apart the output of this processor."""
    return isinstance(image_processor, Qwen2VLImageProcessor)


class PatchNormalizer:
    """Converts patches of bytes to the normalised float32 patches that the vision tower reads.

    A byte of a channel has one of 256 values. So the processor's own method normalises each of them
    once, and the results are stored as a table of channels x 256 values. For example, byte 7 of
    channel 2 becomes entry 2 x 256 + 7. These values are equal to the processor's to the bit, on
    every device, and the CPU waits for no GPU. There are R patches, of F values in a frame and D
    values in all frames.
    """

    def __init__(self, image_processor: "BaseImageProcessor", settings: dict[str, Any]) -> None:
        """Build the table of the normalised value of each byte in each channel.

        Args:
            image_processor: that of the model.
            settings: its settings, the result of `effective_settings`.
        """
        channels = len(settings["image_mean"])
        # C channels, and the V = 256 values of a byte
        bytes_CV = torch.arange(256, dtype=torch.uint8).expand(channels, -1)
        normalized: Tensor = image_processor.rescale_and_normalize(
            bytes_CV[None, :, :, None],  # as one image of 256 x 1 pixels
            settings["do_rescale"],
            settings["rescale_factor"],
            settings["do_normalize"],
            settings["image_mean"],
            settings["image_std"],
        )
        # An engine that normalises by itself asks for the bytes, which need no table.
        self._changes_values = settings["do_rescale"] or settings["do_normalize"]
        self._channels = channels
        self._frames_per_patch = int(settings["temporal_patch_size"])
        self._table = normalized.flatten()  # (C x 256,), the values of one channel after the other
        # (C, 1), the index in the table of each channel's value for byte 0
        self._channel_offsets = 256 * torch.arange(channels, dtype=torch.int32)[:, None]
        self._tables_by_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, frames_RF: Tensor) -> Tensor:
        """Return normalised patches, (R, D), from one frame of each patch, (R, F), uint8.

        They are float32, on the same device. Where the processor changes no value they stay bytes.
        A patch has its frame several times behind each channel: with two channels of the frames x
        and y, and two frames per patch, `x y` becomes `x x y y`.
        """
        rows = len(frames_RF)
        values = frames_RF.view(rows, self._channels, -1)  # (R, channels, pixels of a frame)
        if self._changes_values:
            table, channel_offsets = self._tables(frames_RF.device)
            # A channel's part of the table has 256 entries, one for each value of a byte.
            table_indices = values.int() + channel_offsets
            values = table.index_select(0, table_indices.flatten()).view_as(values)

        repeated_values = values[:, :, None].expand(-1, -1, self._frames_per_patch, -1)
        return repeated_values.reshape(rows, -1)

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return copies of the table, and of the offset of each channel in it, on a device."""
        if device not in self._tables_by_device:
            self._tables_by_device[device] = (
                self._table.to(device, non_blocking=True),
                self._channel_offsets.to(device, non_blocking=True),
            )
        return self._tables_by_device[device]


def one_frame(patches_RD: Tensor, settings: dict[str, Any]) -> Tensor:
    """Return one frame of each patch of an image, (R, F), from whole patches, (R, D).

    There are R patches, of F values in a frame and D values in all frames. A patch has room for
    `temporal_patch_size` frames of a film. For an image the processor repeats its only frame in
    each channel: `x x y y` becomes `x y`, where x is the frame of the first channel and y that of
    the second.

    Args:
        patches_RD: the patches of an image, as the processor returns them.
        settings: the processor's settings, the result of `effective_settings`.
    """
    frames = int(settings["temporal_patch_size"])
    frame_pixels = settings["patch_size"] ** 2
    patches = patches_RD.view(len(patches_RD), -1, frames, frame_pixels)  # -1: channels
    first_frames = patches[:, :, :1]
    assert torch.equal(first_frames.expand_as(patches), patches), "an image has one frame"
    return first_frames.reshape(len(patches_RD), -1)


def effective_settings(
    image_processor: "BaseImageProcessor", overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the processor's settings for one call, whose arguments override its own settings.

    Two calls with the same settings make the same patches of an image. `overrides`: the arguments
    of the call, such as `min_pixels`; None for a call without any.
    """
    settings = {**image_processor.to_dict(), **(overrides or {})}
    settings.pop("return_tensors", None)  # it changes the type of the result, and not the patches
    # The processor reads its limits on pixels under `size`. A call may also give them under these
    # older names. It has to give both: one alone does nothing.
    min_pixels = settings.pop("min_pixels", None)
    max_pixels = settings.pop("max_pixels", None)
    if min_pixels is not None and max_pixels is not None:
        settings["size"] = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
    settings["size"] = dict(settings["size"])
    return settings


class ImageCache:
    """A cache of processed images by content: least recently used first out, bounded in bytes.

    `processed_count` says how often an image really went through the processor. `cached_bytes` is
    the size of the cached patches. An image has R patches of F bytes.
    """

    def __init__(self, limit_bytes: int) -> None:
        """Create an empty cache of at most `limit_bytes`."""
        self.limit_bytes = limit_bytes
        self.cached_bytes = 0
        self.processed_count = 0
        self._images: OrderedDict[str, ProcessedImage] = OrderedDict()

    def get(
        self, image_processor: "BaseImageProcessor", image: "ImageInput", settings: dict[str, Any]
    ) -> ProcessedImage:
        """Return the patches of an image, from the cache or else from the processor.

        A new image is added to the cache, and the least recently used ones are dropped until it
        fits.

        Args:
            image_processor: that of the model.
            image: the picture.
            settings: the processor's settings for this call, the result of `effective_settings`.
        """
        key = _image_key(image, settings)
        if key in self._images:
            self._images.move_to_end(key)  # the most recently used one
            return self._images[key]
        pixel_limits = settings["size"]
        # The method of the class, since that of the object may have been replaced by one that reads
        # this cache.
        output = type(image_processor).preprocess(
            image_processor,
            [image],
            do_rescale=False,  # the cache holds bytes, see `PatchNormalizer`
            do_normalize=False,
            min_pixels=pixel_limits["shortest_edge"],
            max_pixels=pixel_limits["longest_edge"],
            return_tensors="pt",
        )
        self.processed_count += 1
        frames_RF = one_frame(output["pixel_values"], settings)
        processed = ProcessedImage(key, frames_RF, grid_thw=output["image_grid_thw"][0])
        # An extension marks an image that it draws for a single pass. In the cache it would only
        # push other images out.
        is_used_once = isinstance(image, Image.Image) and image.info.get(PASSING)
        if is_used_once:
            return processed
        self._images[key] = processed
        self.cached_bytes += processed.frames_RF.nbytes
        # The new image stays, even if it alone is larger than the cache.
        while self.cached_bytes > self.limit_bytes and len(self._images) > 1:
            _, oldest = self._images.popitem(last=False)
            self.cached_bytes -= oldest.frames_RF.nbytes
        return processed

    def make_preprocess(self, image_processor: "BaseImageProcessor") -> Preprocess:
        """Return a function that replaces the processor's `preprocess` and reads this cache first.

        The function has the same arguments and the same output.
        """

        def cached(images: "ImageInput", **overrides: Any) -> BatchFeature:
            """Return the patches and grids of images; images in the cache are not computed."""
            settings = effective_settings(image_processor, overrides)
            processed_images = [
                self.get(image_processor, image, settings) for image in flat_images(images)
            ]
            frames_by_image = [processed.frames_RF for processed in processed_images]
            frames_RF = frames_by_image[0]  # a single image is passed on without a copy
            if len(frames_by_image) > 1:
                frames_RF = torch.cat(frames_by_image)
            normalize = PatchNormalizer(image_processor, settings)
            grids = torch.stack([processed.grid_thw for processed in processed_images])
            return BatchFeature({"pixel_values": normalize(frames_RF), "image_grid_thw": grids})

        return cached


def flat_images(images: "ImageInput") -> Sequence[Any]:
    """Return the images of a batch in order, whatever their nesting."""
    if isinstance(images, Image.Image):
        return [images]
    # Transformers' function does not take a row without images, which is an empty list.
    rows_with_images = [row for row in images if not isinstance(row, list) or row]
    flattened: Sequence[Any] = make_flat_list_of_images(rows_with_images)
    return flattened


def _image_key(image: "ImageInput", settings: dict[str, Any]) -> str:
    """Return a digest of the image's content and of the settings that its patches depend on."""
    names = ("size", "resample", "patch_size", "temporal_patch_size", "merge_size")
    patch_settings = {name: settings[name] for name in names}
    settings_text = json.dumps(patch_settings, sort_keys=True, default=str)
    digest = hashlib.blake2b(settings_text.encode(), digest_size=16)
    if isinstance(image, ImageWithDigest):  # the data set has computed a digest of its content
        digest.update(image.digest.encode())
    elif isinstance(image, Image.Image):
        digest.update(content_digest(image).encode())
    else:
        array = torch.as_tensor(image).contiguous()
        digest.update(f"{array.dtype} {tuple(array.shape)}".encode())
        digest.update(array.cpu().numpy().tobytes())
    return digest.hexdigest()


def first_patches(patch_numbers: Tensor, grids: Tensor) -> list[int]:
    """Return the number of each image's first patch, which identifies the image.

    For example, the patch numbers 40 41 42 43 80 81 and grids of 4 and 2 patches give [40, 80].

    Args:
        patch_numbers: (R, 1), the numbers that an image bank has given to the R patches of N
            images.
        grids: (N, 3), each image's (temporal, height, width) in patches.
    """
    patch_counts = grids.prod(dim=-1)
    first_rows = patch_counts.cumsum(0) - patch_counts  # where each image begins in `patch_numbers`
    starts: list[int] = patch_numbers[first_rows.to(patch_numbers.device), 0].tolist()
    return starts


class BankImage(NamedTuple):
    """An image in an `ImageBank`."""

    key: str  # digest that identifies it
    patches: Tensor  # as they are stored: bytes (R, F), or normalised (R, D)
    grid_thw: Tensor  # (temporal, height, width) in patches


class ImageBank:
    """Stores the patches of distinct images under consecutive numbers.

    A batch has these numbers in place of its pixels. The number of its first patch is the id of an
    image. For example, images of 4 and 2 patches in a bank that begins at 100 get the numbers 100
    to 103 and 104 to 105, and have the ids 100 and 104. No two banks share numbers.

    An image of R patches is stored as bytes: one frame of each patch, (R, F), with F values. They
    are normalised when a vision tower reads them. If an extension has changed the normalised
    patches, such as by noise, these are stored instead, (R, D), with D values each.
    """

    def __init__(self, first_patch: int, normalize: Normalize = Tensor.float) -> None:
        """Create an empty bank, whose first patch gets the number `first_patch`.

        `normalize`: converts the stored bytes for a vision tower. By default it changes their dtype
        alone.
        """
        self.first_patch = first_patch
        self.end_patch = first_patch  # the number that the next patch gets
        self.normalize = normalize
        self._image_id_by_key: dict[str, int] = {}  # the number of the first patch of each image
        # the images by the number of their first patch
        self._images: dict[int, BankImage] = {}
        # The features of images by the number of their first patch. The vision pass fills it if the
        # vision tower is frozen.
        self.frozen_features: dict[int, Any] = {}
        # whether images may have been added since `frozen_features` was filled
        self.may_have_new_images = True

    def __len__(self) -> int:
        return len(self._images)

    def patch_numbers(self, image: ProcessedImage, device: torch.device) -> Tensor:
        """Return the numbers of the patches of `image`, (R, 1).

        A new image is stored first: its bytes are copied to `device`.
        """
        if image.key in self._image_id_by_key:
            return self._numbers_of_image(self._image_id_by_key[image.key])
        frames_RF = image.frames_RF
        if device.type == "cuda":
            frames_RF = frames_RF.pin_memory()  # else the host would wait for the copy
        return self.store(image.key, frames_RF.to(device, non_blocking=True), image.grid_thw)

    def store(self, key: str, patches: Tensor, grid_thw: Tensor) -> Tensor:
        """Store the patches of an image if its `key` is new, and return their numbers, (R, 1).

        Args:
            key: digest that identifies the image.
            patches: on the device: bytes, (R, F), uint8, or normalised patches, (R, D).
            grid_thw: (temporal, height, width) of the image in patches.
        """
        if key not in self._image_id_by_key:
            self._image_id_by_key[key] = self.end_patch
            self._images[self.end_patch] = BankImage(key, patches, grid_thw)
            self.end_patch += len(patches)
        return self._numbers_of_image(self._image_id_by_key[key])

    def image(self, image_id: int) -> BankImage:
        """Return key, patches and grid (3,) of the image whose first patch is `image_id`."""
        return self._images[image_id]

    def _numbers_of_image(self, image_id: int) -> Tensor:
        """Return the patch numbers of the image whose first patch is `image_id`, (R, 1)."""
        patch_count = len(self._images[image_id].patches)
        return torch.arange(image_id, image_id + patch_count)[:, None]

    def pixels(self, image_ids: list[int]) -> tuple[Tensor, Tensor]:
        """Return normalised patches (R, D) and grids (N, 3) of N images, for a vision tower.

        `image_ids`: the number of each image's first patch, which identifies it.
        """
        images = [self._images[image_id] for image_id in image_ids]
        grids = torch.stack([image.grid_thw for image in images])
        stored_patches = [image.patches for image in images]
        # Bytes are still to be normalised. If all images are bytes, they are normalised at once.
        # Otherwise some are stored normalised, and the others are normalised one by one.
        if all(patches.dtype == torch.uint8 for patches in stored_patches):
            return self.normalize(torch.cat(stored_patches)), grids
        normalized_patches = []
        for patches in stored_patches:
            is_normalized = patches.dtype != torch.uint8
            normalized_patches.append(patches if is_normalized else self.normalize(patches))
        return torch.cat(normalized_patches), grids

    @property
    def image_ids(self) -> list[int]:
        """The number of each image's first patch, in the order of storing."""
        return list(self._images)


_TEMPORARY_BANK = "temporary"  # key of a third bank beside those of the modes `train` and `eval`


class ImageBanks:
    """The banks that are in use: one for the training batch and one for the evaluation batch.

    Patches are numbered through all banks, so that a number says which bank has the patch. For
    example, if the training bank has the numbers 0 to 99, the next evaluation bank begins at 100.
    """

    def __init__(self, normalize: Normalize = Tensor.float) -> None:
        """Begin without any bank. `normalize`: as for an `ImageBank`."""
        self._normalize = normalize
        self._banks: dict[str, ImageBank] = {}  # by mode
        self._removed_end = 0  # the largest `end_patch` of the banks that have been removed

    def new(self, mode: str) -> ImageBank:
        """Replace the bank of `mode` (`train` or `eval`) by an empty one, and return the new one.

        Its first patch gets the lowest number that no bank has used yet.
        """
        if mode in self._banks:
            self._removed_end = max(self._removed_end, self._banks[mode].end_patch)
        ends = [bank.end_patch for bank in self._banks.values()]
        first_unused_patch = max([self._removed_end, *ends])
        self._banks[mode] = ImageBank(first_unused_patch, self._normalize)
        return self._banks[mode]

    def bank_to_extend(self, mode: str = "train") -> ImageBank | None:
        """Return the bank of the present batch, to add images to it; None before the first batch.

        It also calls `mark_new_images`. So all ranks call it together, whether or not they have
        images to add: with a frozen tower, the passes over new images are collective.
        """
        self.mark_new_images(mode)
        return self._banks.get(mode)

    def mark_new_images(self, mode: str = "train") -> None:
        """Mark the bank of the present batch as one that may have new images. Collective.

        The next pass of a frozen vision tower then computes their features. Before the first batch
        this does nothing.
        """
        bank = self._banks.get(mode)
        if bank is not None:
            bank.may_have_new_images = True

    def of_training(self) -> ImageBank | None:
        """Return the bank of the training batch, inside of `temporary` the one that replaces it.

        The result is None before the first batch.
        """
        return self._banks.get(_TEMPORARY_BANK, self._banks.get("train"))

    @contextmanager
    def temporary(self) -> Iterator[ImageBank]:
        """Replace the training batch's bank by an empty one inside the block.

        A second pass over the batch can then see other images, and the batch's own images are
        untouched. After the block the numbers of the temporary bank are not used again.
        """
        bank = self.new(_TEMPORARY_BANK)
        try:
            yield bank
        finally:
            self._removed_end = max(self._removed_end, bank.end_patch)
            del self._banks[_TEMPORARY_BANK]

    def of(self, patch_number: int) -> ImageBank:
        """Return the bank that stores the patch of this number."""
        for bank in self._banks.values():
            if bank.first_patch <= patch_number < bank.end_patch:
                return bank
        raise AssertionError(f"patch {patch_number} is in no bank that is still held")
