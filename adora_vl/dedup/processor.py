"""A processor for one generation batch that processes every distinct prompt and image once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.feature_extraction_utils import BatchFeature

from adora_vl.dedup.image_store import ImageBank, ImageCache, effective_settings, flat, normalized
from adora_vl.utils import compat

_NEUTRAL = ("continue_final_message", False)  # TRL passes it in only one of its two calls


def distinct_rows(keys: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """The first row of each distinct key, and for every row the number of its key."""
    number: dict[Hashable, int] = {}
    rows: list[int] = []
    for row, key in enumerate(keys):
        if key not in number:
            number[key] = len(rows)
            rows.append(row)
    return rows, [number[key] for key in keys]


@dataclass(frozen=True)
class PromptParts:
    """What the processor makes of one prompt with its images."""

    tokens: dict[str, list[int]]  # `input_ids`, `attention_mask`, `mm_token_type_ids`: a value for each token
    images: list[Any]  # held, so that their identities are not given to others
    references: Tensor  # (R, 1), see `adora_vl.dedup.image_store`
    grids: Tensor  # (N, 3)


def joined(prompts: Sequence[PromptParts], tokenizer: Any = None) -> BatchFeature:
    """The prompts as one output of the processor: lists, or with a tokenizer tensors that are padded as it pads."""
    values: dict[str, Any] = {name: [prompt.tokens[name] for prompt in prompts] for name in prompts[0].tokens}
    if tokenizer is not None:
        fills = {"input_ids": tokenizer.pad_token_id}
        values = {name: _padded(rows, fills.get(name, 0), tokenizer.padding_side) for name, rows in values.items()}
    if any(prompt.images for prompt in prompts):
        values["pixel_values"] = torch.cat([prompt.references for prompt in prompts])
        values["image_grid_thw"] = torch.cat([prompt.grids for prompt in prompts])
    return BatchFeature(values)


def _padded(rows: Sequence[list[int]], fill: int, side: str) -> Tensor:
    longest = max(map(len, rows))
    spare = [[fill] * (longest - len(row)) for row in rows]
    pairs = zip(rows, spare, strict=True)
    return torch.tensor([pad + row if side == "left" else row + pad for row, pad in pairs])


class StepProcessor:
    """Stands in for the trainer's processor while TRL prepares a batch. It replaces `apply_chat_template` and the call;
    everything else is passed on.

    TRL asks twice: it tokenizes the conversations for the engine, then renders each row once more, and processes the
    texts with their images for the policy. Here the second answer is taken from the first: each distinct prompt is
    rendered, tokenized and matched with its images once.
    """

    def __init__(self, processor: Any, cache: ImageCache, bank: ImageBank, device: torch.device) -> None:
        self._processor = processor
        self._cache, self._bank, self._device = cache, bank, device
        self._texts: dict[str, str] = {}  # of the conversations that were rendered
        self._prompts: dict[Hashable, PromptParts] = {}  # by text and identity of the images

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)

    def apply_chat_template(self, conversation: Any, tokenize: bool = False, **kwargs: Any) -> Any:
        """Like the processor's, but equal conversations with identical images are processed once."""
        batched = bool(conversation) and isinstance(conversation[0], list)
        if not tokenize and not batched:
            return self._text(conversation, kwargs)
        if not tokenize or not batched or not kwargs.get("return_dict"):
            return self._processor.apply_chat_template(conversation, tokenize=tokenize, **kwargs)
        rendering = {name: value for name, value in kwargs.items() if name != "return_dict"}
        texts = [self._text(messages, rendering) for messages in conversation]
        return self(images=[_images_of(messages) for messages in conversation], text=texts)

    def __call__(self, images: Any = None, text: Any = None, **kwargs: Any) -> BatchFeature:
        """Like the processor's, but `pixel_values` are references (`adora_vl.dedup.image_store`)."""
        if images is None:
            output: BatchFeature = self._processor(text=text, **kwargs)
            return output
        assert kwargs in ({}, {"padding": True, "return_tensors": "pt"}), f"TRL asks for something else: {kwargs}"
        shown = [row or [] for row in images]  # of a row without images TRL gives None
        keys = [(words, tuple(map(id, row))) for words, row in zip(text, shown, strict=True)]
        rows, number = distinct_rows(keys)
        new = [row for row in rows if keys[row] not in self._prompts]
        if new:
            parts = self._processed([text[row] for row in new], [shown[row] for row in new])
            self._prompts |= {keys[row]: part for row, part in zip(new, parts, strict=True)}
        distinct = [self._prompts[keys[row]] for row in rows]
        return joined([distinct[n] for n in number], self._processor.tokenizer if kwargs else None)

    def _text(self, messages: Any, kwargs: dict[str, Any]) -> str:
        """The rendered conversation; equal ones with the same images are rendered once."""
        said = {name: value for name, value in kwargs.items() if value is not None and (name, value) != _NEUTRAL}
        key = repr((_described(messages), _described(said)))
        if key not in self._texts:
            self._texts[key] = self._processor.apply_chat_template(messages, tokenize=False, **kwargs)
        return self._texts[key]

    def _processed(self, texts: list[str], images: list[list[Any]]) -> list[PromptParts]:
        with self._referring():
            once = self._processor(images=[one for row in images for one in row] or None, text=texts)
        values = dict(once)
        counts = [len(row) for row in images]
        grids = torch.as_tensor(values.pop("image_grid_thw", torch.zeros(0, 3, dtype=torch.long)))
        references = values.pop("pixel_values", torch.zeros(0, 1, dtype=torch.long))
        grids_of = torch.split(grids, counts)
        references_of = torch.split(references, [int(grid.prod(dim=-1).sum()) for grid in grids_of])
        return [
            PromptParts({name: list(value[row]) for name, value in values.items()}, images[row], references, grids)
            for row, (references, grids) in enumerate(zip(references_of, grids_of, strict=True))
        ]

    def _referring(self) -> Any:
        """Inside this context the image processor returns references into the bank instead of pixels."""
        image_processor = self._processor.image_processor

        def preprocess(images: Any, **overrides: Any) -> BatchFeature:
            settings = effective_settings(image_processor, overrides)
            entries = [self._cache.get(image_processor, image, settings) for image in flat(images)]

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


def _images_of(messages: Any) -> list[Any]:
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    return [part["image"] for part in parts if part["type"] == "image"]
