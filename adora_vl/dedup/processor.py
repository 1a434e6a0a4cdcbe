"""A processor for one generation batch that processes every distinct prompt and image once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from transformers.feature_extraction_utils import BatchFeature

from adora_vl import compat
from adora_vl.dedup.image_bank import ImageBank
from adora_vl.rollout.image_cache import ImageCache, effective_settings, flat, normalized


def distinct_rows(keys: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """The first row of each distinct key, and for every row the number of its key."""
    number: dict[Hashable, int] = {}
    rows: list[int] = []
    for row, key in enumerate(keys):
        if key not in number:
            number[key] = len(rows)
            rows.append(row)
    return rows, [number[key] for key in keys]


class StepProcessor:
    """Stands in for the trainer's processor while TRL prepares a batch. It replaces `apply_chat_template` and the call;
    everything else is passed on.
    """

    def __init__(self, processor: Any, cache: ImageCache, bank: ImageBank, device: torch.device) -> None:
        self._processor = processor
        self._cache, self._bank, self._device = cache, bank, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)

    def apply_chat_template(self, conversation: Any, tokenize: bool = False, **kwargs: Any) -> Any:
        """Like the processor's, but equal conversations with identical images are processed once."""
        if not tokenize or not kwargs.get("return_dict"):
            return self._processor.apply_chat_template(conversation, tokenize=tokenize, **kwargs)
        if not conversation or not isinstance(conversation[0], list):
            return self._processor.apply_chat_template(conversation, tokenize=tokenize, **kwargs)
        keys = [repr(_described(messages)) for messages in conversation]
        rows, number = distinct_rows(keys)
        with self._referring():
            once = self._processor.apply_chat_template([conversation[row] for row in rows], tokenize=True, **kwargs)
        images = [_count_images(conversation[row]) for row in rows]
        return _expanded(once, number, images)

    def __call__(self, images: Any = None, text: Any = None, **kwargs: Any) -> BatchFeature:
        """Like the processor's, but `pixel_values` are references (`adora_vl.dedup.image_bank`)."""
        if images is None:
            output: BatchFeature = self._processor(text=text, **kwargs)
            return output
        keys = [(words, tuple(map(id, row or []))) for words, row in zip(text, images, strict=True)]
        rows, number = distinct_rows(keys)
        with self._referring():
            shown = [image for row in rows for image in images[row] or []]  # TRL passes None for a row without images
            once = self._processor(images=shown, text=[text[row] for row in rows], **kwargs)
        return _expanded(once, number, [len(images[row] or []) for row in rows])

    def _referring(self) -> Any:
        """Inside this context the image processor returns references into the bank instead of pixels."""
        image_processor = self._processor.image_processor
        original = type(image_processor).preprocess.__get__(image_processor)

        def preprocess(images: Any, **overrides: Any) -> BatchFeature:
            settings = effective_settings(image_processor, overrides)
            entries = [self._cache.get(image_processor, original, image, settings) for image in flat(images)]

            def normalize(patches: Any) -> Any:
                return normalized(image_processor, patches, settings)

            references = [self._bank.references(entry, normalize, self._device) for entry in entries]
            grids = torch.stack([entry.grid_3 for entry in entries])
            return BatchFeature({"pixel_values": torch.cat(references), "image_grid_thw": grids})

        return compat.IMAGE_PROCESSING.replaced_by(preprocess, on=image_processor)


class FlatProcessor:
    """Stands in for the trainer's processor if nothing is cached. For a row without images TRL passes None, which
    Transformers refuses. So this passes one flat list of all images, which is read in the order of the placeholders.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)

    def __call__(self, images: Any = None, text: Any = None, **kwargs: Any) -> BatchFeature:
        if images is not None and any(row is None or isinstance(row, list) for row in images):
            images = [image for row in images for image in row or []]
        output: BatchFeature = self._processor(images=images, text=text, **kwargs)
        return output


def _described(messages: Any) -> Any:
    """The messages with each image replaced by its identity, so that comparing them compares no pixels."""
    if isinstance(messages, dict):
        return {key: _described(value) for key, value in messages.items()}
    if isinstance(messages, (list, tuple)):
        return [_described(value) for value in messages]
    return messages if isinstance(messages, (str, int, float, bool, type(None))) else id(messages)


def _count_images(messages: Any) -> int:
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    return sum(part["type"] == "image" for part in parts)


def _expanded(once: Any, number: list[int], images: list[int]) -> BatchFeature:
    """Repeat the output for the distinct rows for all rows. `images`: number of images in each distinct row."""
    values: dict[str, Any] = dict(once)
    grids, references = values.get("image_grid_thw"), values.get("pixel_values")
    if grids is not None and references is not None:
        grids_of = torch.split(torch.as_tensor(grids), images)
        sizes = [int(grid.prod(dim=-1).sum()) for grid in grids_of]
        references_of = torch.split(references, sizes)
        values["image_grid_thw"] = torch.cat([grids_of[n] for n in number])
        values["pixel_values"] = torch.cat([references_of[n] for n in number])
    for name, value in values.items():
        if name in ("image_grid_thw", "pixel_values"):
            continue
        values[name] = value[number] if isinstance(value, torch.Tensor) else [value[n] for n in number]
    return BatchFeature(values)
