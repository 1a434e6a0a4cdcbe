"""The prompts of a generation, as the engine and the policy read them: each distinct one is
processed once.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.feature_extraction_utils import BatchFeature
from trl.data_utils import prepare_multimodal_messages

from adora_vl.data.rows import images_of
from adora_vl.packing.image_store import ImageBank, ImageCache, effective_settings, flat, normalized
from adora_vl.utils import compat


@dataclass(frozen=True)
class PromptBatch:
    """The prompts of B rows."""

    messages: list[Any]  # (B,), with their images inside if any row has one; or texts
    ids: list[list[int]]  # (B,), with image tokens expanded
    # (B,), None for a row without any, and where no row has one
    images: list[list[Any] | None] | None
    # beside the ids: values for each token as lists, and of images the pixels and grids
    fields: dict[str, Any]

    @property
    def num_images(self) -> list[int]:
        """Of each row, (B,)."""
        return [len(row or ()) for row in self.images or [None] * len(self.ids)]


def distinct_rows(keys: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """The first row of each distinct key, and for every row the number of its key."""
    number: dict[Hashable, int] = {}
    numbers = [number.setdefault(key, len(number)) for key in keys]
    return [numbers.index(one) for one in number.values()], numbers


def messages_of(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The prompts of rows as TRL hands them on: with their images inside, if any row has one."""
    images = [images_of(row) for row in rows]
    if not any(images):
        return [row["prompt"] for row in rows]
    return [
        prepare_multimodal_messages(row["prompt"], images=own)
        for row, own in zip(rows, images, strict=True)
    ]


def read_prompts(
    rows: Sequence[Mapping[str, Any]],
    processor: Any,
    template: Mapping[str, Any],
    processing: AbstractContextManager[Any] | None = None,
) -> PromptBatch:
    """What a processor, or a tokenizer, makes of the prompts of rows.

    Stock TRL asks it twice for every copy.

    `template`: arguments of the chat template. `processing`: a context in which the processor is
    called.
    """
    messages = messages_of(rows)
    shown = [images_of(row) for row in rows]
    if isinstance(messages[0], str):
        return PromptBatch(
            messages=messages,
            ids=list(processor(text=messages)["input_ids"]),
            images=None,
            fields={},
        )
    first, number = distinct_rows([repr(_described(one)) for one in messages])
    asked = [messages[row] for row in first]
    if hasattr(processor, "tokenizer"):  # templates of processors take no plain texts
        asked = [prepare_multimodal_messages(one) for one in asked]
    with processing or nullcontext():
        read = processor.apply_chat_template(
            conversation=asked,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **template,
        )
    made = {name: value for name, value in read.items() if name != "attention_mask"}
    of_images = {
        name: made.pop(name) for name in ("pixel_values", "image_grid_thw") if name in made
    }
    fields: dict[str, Any] = {
        name: [list(values[one]) for one in number] for name, values in made.items()
    }
    ids = fields.pop("input_ids")
    if not of_images:
        return PromptBatch(messages=messages, ids=ids, images=None, fields=fields)
    pixels = torch.as_tensor(of_images["pixel_values"])
    pairs = _by_row(of_images["image_grid_thw"], pixels, [len(shown[row]) for row in first])
    fields["pixel_values"] = torch.cat([pairs[one][1] for one in number])
    fields["image_grid_thw"] = torch.cat([pairs[one][0] for one in number])
    return PromptBatch(
        messages=messages, ids=ids, images=[row or None for row in shown], fields=fields
    )


def with_pictures(
    prompts: PromptBatch,
    pictures: Sequence[Sequence[Any]],
    process: Callable[[list[Any]], Mapping[str, Any]],
) -> PromptBatch:
    """The prompts with further images of each row, (B,), behind its own.

    `process`: makes their fields.
    """
    made = process([image for row in pictures for image in row])
    read = made["image_grid_thw"], torch.as_tensor(made["pixel_values"])
    further = _by_row(*read, [len(row) for row in pictures])
    fields = dict(prompts.fields)
    images = prompts.images or [None] * len(prompts.ids)
    own = [(read[0][:0], read[1][:0])] * len(prompts.ids)
    if prompts.images is not None:
        own = _by_row(fields["image_grid_thw"], fields["pixel_values"], prompts.num_images)
    fields.setdefault("mm_token_type_ids", [[0] * len(ids) for ids in prompts.ids])
    pairs = [pair for both in zip(own, further, strict=True) for pair in both]
    fields["image_grid_thw"] = torch.cat([grids for grids, _ in pairs])
    fields["pixel_values"] = torch.cat([pixels for _, pixels in pairs])
    shown = [[*(has or ()), *row] or None for has, row in zip(images, pictures, strict=True)]
    return PromptBatch(messages=prompts.messages, ids=prompts.ids, images=shown, fields=fields)


def _by_row(grids: Any, pixels: Tensor, counts: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Grids (images, 3) and pixels of each of the rows, which have so many images."""
    parts = torch.split(torch.as_tensor(grids), list(counts))
    return [
        *zip(
            parts, torch.split(pixels, [int(own.prod(dim=-1).sum()) for own in parts]), strict=True
        )
    ]


def referring(
    image_processor: Any, cache: ImageCache, bank: ImageBank, device: torch.device
) -> AbstractContextManager[None]:
    """Inside, the image processor returns references into the bank instead of pixels
    (`dedup.image_store`).
    """

    def preprocess(images: Any, **overrides: Any) -> BatchFeature:
        settings = effective_settings(image_processor, overrides)
        entries = [cache.get(image_processor, image, settings) for image in flat(images)]

        def normalize(patches: Any) -> Tensor:
            return normalized(image_processor, patches, settings)

        references = [bank.references(entry, normalize, device) for entry in entries]
        grids = torch.stack([entry.grid_3 for entry in entries])
        return BatchFeature({"pixel_values": torch.cat(references), "image_grid_thw": grids})

    return compat.IMAGE_PROCESSING.replaced_by(preprocess, on=image_processor)


def _described(messages: Any) -> Any:
    """The messages with each image replaced by its identity, so that comparing them compares no
    pixels.
    """
    if isinstance(messages, dict):
        return {key: _described(value) for key, value in messages.items()}
    if isinstance(messages, (list, tuple)):
        return [_described(value) for value in messages]
    return messages if isinstance(messages, (str, int, float, bool, type(None))) else id(messages)
