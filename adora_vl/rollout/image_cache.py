"""Each distinct image is processed once: one store for the tokenizer's pass, the policy's passes and vLLM."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_utils import make_flat_list_of_images
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from adora_vl.rollout.distinct_rows import KeptImage, content_digest

Preprocess = Callable[..., BatchFeature]
PASSING = "adora_passing"  # in the `info` of an image that will not be seen again


@dataclass(frozen=True)
class ProcessedImage:
    """One image as the processor cuts it up, before rescaling and normalisation."""

    key: str  # of the content and of how it was processed
    patches_RD: Tensor  # uint8; R patches of D = channels x temporal patch x height x width
    grid_3: Tensor  # (temporal, height, width) in patches


def can_cache(image_processor: Any) -> bool:
    """Whether this is a processor whose output the cache knows how to take apart."""
    return isinstance(image_processor, Qwen2VLImageProcessor)


def normalized(image_processor: Any, patches_RD: Tensor, settings: dict[str, Any]) -> Tensor:
    """What the processor makes of these patches, (R, D) float32: the same operation on the same numbers."""
    patch, temporal = settings["patch_size"], settings["temporal_patch_size"]
    channels_first = patches_RD.view(len(patches_RD), -1, temporal, patch, patch).transpose(1, 2)
    done: Tensor = image_processor.rescale_and_normalize(
        channels_first,
        settings["do_rescale"],
        settings["rescale_factor"],
        settings["do_normalize"],
        settings["image_mean"],
        settings["image_std"],
    )
    return done.transpose(1, 2).reshape(len(patches_RD), -1)


def effective_settings(image_processor: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """The processor's settings under the arguments of one call."""
    settings = {**image_processor.to_dict(), **{k: v for k, v in overrides.items() if k != "return_tensors"}}
    low, high = settings.pop("min_pixels", None), settings.pop("max_pixels", None)
    if low is not None and high is not None:
        settings["size"] = {"shortest_edge": low, "longest_edge": high}
    settings["size"] = dict(settings["size"])
    return settings


class ImageCache:
    """Processed images by content, the most recently used ones, bounded in bytes.

    `processed` counts how often an image really went through the processor.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bytes_held = 0
        self.processed = 0
        self._images: OrderedDict[str, ProcessedImage] = OrderedDict()

    def get(self, image_processor: Any, image: Any, settings: dict[str, Any]) -> ProcessedImage:
        """The processed `image`."""
        key = _key(image, settings)
        if key in self._images:
            self._images.move_to_end(key)
            return self._images[key]
        size = settings["size"]
        # The class's own method: that of the object may be one that asks this cache.
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
        self.bytes_held += entry.patches_RD.nbytes
        while self.bytes_held > self.limit_bytes and len(self._images) > 1:
            _, oldest = self._images.popitem(last=False)
            self.bytes_held -= oldest.patches_RD.nbytes
        return entry

    def preprocess(self, image_processor: Any) -> Preprocess:
        """The processor's `preprocess` with this cache before it: the same arguments, the same output."""

        def cached(images: Any, **overrides: Any) -> BatchFeature:
            settings = effective_settings(image_processor, overrides)
            entries = [self.get(image_processor, image, settings) for image in flat(images)]
            patches = [entry.patches_RD for entry in entries]
            pixels = torch.cat(patches) if len(patches) > 1 else patches[0]  # one image is handed on without a copy
            if settings["do_rescale"] or settings["do_normalize"]:
                pixels = normalized(image_processor, pixels, settings)
            grids = torch.stack([entry.grid_3 for entry in entries])
            return BatchFeature({"pixel_values": pixels, "image_grid_thw": grids})

        return cached


def flat(images: Any) -> Sequence[Any]:
    """The images of a batch in order, whatever the nesting."""
    if isinstance(images, Image.Image):
        return [images]
    flattened: Sequence[Any] = make_flat_list_of_images([row for row in images if not isinstance(row, list) or row])
    return flattened


def _key(image: Any, settings: dict[str, Any]) -> str:
    shape = {name: settings[name] for name in ("size", "resample", "patch_size", "temporal_patch_size", "merge_size")}
    digest = hashlib.blake2b(json.dumps(shape, sort_keys=True, default=str).encode(), digest_size=16)
    if isinstance(image, KeptImage):
        digest.update(image.digest.encode())
    elif isinstance(image, Image.Image):
        digest.update(content_digest(image).encode())
    else:
        array = torch.as_tensor(image).contiguous()
        digest.update(f"{array.dtype} {tuple(array.shape)}".encode())
        digest.update(array.cpu().numpy().tobytes())
    return digest.hexdigest()
