"""The prompts of a generation, as the engine and the policy read them.

Each distinct prompt is processed once, whatever the number of its rollouts.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.feature_extraction_utils import BatchFeature
from trl.data_utils import prepare_multimodal_messages

from adora_vl.data.rows import images_of
from adora_vl.packing.image_store import (
    ImageBank,
    ImageCache,
    effective_settings,
    flat_images,
)
from adora_vl.utils import compat

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, ProcessorMixin
    from transformers.image_utils import ImageInput


@dataclass(frozen=True)
class PromptBatch:
    """The prompts of B rows."""

    messages: list[Any]  # (B,), with their images inside if any row has one; or texts
    ids: list[list[int]]  # (B,), with image tokens expanded
    # (B,), None for a row without images; None instead of the list where no row has any
    images: list[list[Any] | None] | None
    # the processor's other outputs: lists with a value per token, and the images' pixels and grids
    fields: dict[str, Any]

    @property
    def num_images(self) -> list[int]:
        """The number of images of each row, (B,)."""
        if self.images is None:
            return [0] * len(self.ids)
        return [len(row_images or ()) for row_images in self.images]


def distinct_rows(keys: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """Return the first row of each distinct key, and for every row the number of its key.

    Keys are numbered in the order in which they come first.
    """
    number_by_key: dict[Hashable, int] = {}
    first_rows = []
    for row, key in enumerate(keys):
        if key not in number_by_key:
            number_by_key[key] = len(number_by_key)
            first_rows.append(row)
    return first_rows, [number_by_key[key] for key in keys]


def messages_of(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the prompts of rows in TRL's form: with their images inside, if any row has one."""
    images = [images_of(row) for row in rows]
    if not any(images):
        return [row["prompt"] for row in rows]
    return [
        prepare_multimodal_messages(row["prompt"], images=row_images)
        for row, row_images in zip(rows, images, strict=True)
    ]


def read_prompts(
    rows: Sequence[Mapping[str, Any]],
    processor: "ProcessorMixin",
    template: Mapping[str, Any],
    processing: AbstractContextManager[Any] | None = None,
) -> PromptBatch:
    """Apply the chat template to the prompts of rows, tokenize them and process their images.

    Each distinct prompt goes through the processor (or tokenizer) once. Stock TRL calls it twice
    for every copy.

    Args:
        rows: rows of a data set, with `prompt` and mostly `images`.
        processor: that of the model, or a tokenizer.
        template: arguments of the chat template.
        processing: a context in which the processor is called.
    """
    messages = messages_of(rows)
    row_images = [images_of(row) for row in rows]
    if isinstance(messages[0], str):
        return PromptBatch(
            messages=messages,
            ids=list(processor(text=messages)["input_ids"]),
            images=None,
            fields={},
        )
    prompt_keys = [repr(_with_ids_of_images(message)) for message in messages]
    first_rows, prompt_numbers = distinct_rows(prompt_keys)
    conversations = [messages[row] for row in first_rows]
    if hasattr(processor, "tokenizer"):  # templates of processors take no plain texts
        conversations = [
            prepare_multimodal_messages(conversation) for conversation in conversations
        ]
    with processing or nullcontext():
        output = processor.apply_chat_template(
            conversation=conversations,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **template,
        )
    columns = {name: value for name, value in output.items() if name != "attention_mask"}
    pixels = columns.pop("pixel_values", None)
    grids = columns.pop("image_grid_thw", None)
    fields: dict[str, Any] = {}
    for name, values in columns.items():
        fields[name] = [list(values[number]) for number in prompt_numbers]
    ids = fields.pop("input_ids")
    if pixels is None or grids is None:
        return PromptBatch(messages=messages, ids=ids, images=None, fields=fields)
    image_counts = [len(row_images[row]) for row in first_rows]
    # (grids, pixels) of each distinct prompt
    prompt_pairs = _split_by_row(grids, torch.as_tensor(pixels), image_counts)
    fields["pixel_values"] = torch.cat([prompt_pairs[number][1] for number in prompt_numbers])
    fields["image_grid_thw"] = torch.cat([prompt_pairs[number][0] for number in prompt_numbers])
    return PromptBatch(
        messages=messages,
        ids=ids,
        images=[images or None for images in row_images],
        fields=fields,
    )


def with_pictures(
    prompts: PromptBatch,
    pictures: Sequence[Sequence[Any]],
    process: Callable[[list[Any]], Mapping[str, Any]],
) -> PromptBatch:
    """Return the prompts with further images of each row after the prompt's own.

    `pictures`: the further images, (B,), such as those that tools have returned. `process`: the
    image processor, which returns their pixels and grids.
    """
    all_pictures = [picture for row_pictures in pictures for picture in row_pictures]
    output = process(all_pictures)
    new_grids = output["image_grid_thw"]
    new_pixels = torch.as_tensor(output["pixel_values"])
    new_pairs = _split_by_row(new_grids, new_pixels, [len(row) for row in pictures])
    fields = dict(prompts.fields)
    if prompts.images is not None:
        prompt_images = prompts.images
        prompt_pairs = _split_by_row(
            fields["image_grid_thw"], fields["pixel_values"], prompts.num_images
        )
    else:
        prompt_images = [None] * len(prompts.ids)
        prompt_pairs = [(new_grids[:0], new_pixels[:0])] * len(prompts.ids)
    fields.setdefault("mm_token_type_ids", [[0] * len(ids) for ids in prompts.ids])
    # Row by row, a prompt's own images first.
    pairs = []
    for prompt_pair, new_pair in zip(prompt_pairs, new_pairs, strict=True):
        pairs += [prompt_pair, new_pair]
    fields["image_grid_thw"] = torch.cat([grids for grids, _ in pairs])
    fields["pixel_values"] = torch.cat([pixels for _, pixels in pairs])
    images = []
    for own_images, row_pictures in zip(prompt_images, pictures, strict=True):
        images.append([*(own_images or ()), *row_pictures] or None)
    return PromptBatch(messages=prompts.messages, ids=prompts.ids, images=images, fields=fields)


def _split_by_row(
    grids: Tensor, pixels: Tensor, image_counts: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """Split grids (images, 3) and pixels (patches, D) by row.

    `image_counts`: the number of images of each row. Returns (grids, pixels) of each row.
    """
    row_grids = torch.split(torch.as_tensor(grids), list(image_counts))
    patch_counts = [int(grids_of_row.prod(dim=-1).sum()) for grids_of_row in row_grids]
    return list(zip(row_grids, torch.split(pixels, patch_counts), strict=True))


def returning_references(
    image_processor: "BaseImageProcessor", cache: ImageCache, bank: ImageBank, device: torch.device
) -> AbstractContextManager[None]:
    """Let the image processor return references into the bank instead of pixels.

    References are the numbers of patches (see `adora_vl.packing.image_store`).
    """

    def preprocess(images: "ImageInput", **overrides: Any) -> BatchFeature:
        """Return references to the images' patches in the bank, in place of the patches."""
        settings = effective_settings(image_processor, overrides)
        entries = [cache.get(image_processor, image, settings) for image in flat_images(images)]
        references = [bank.references(entry, device) for entry in entries]
        grids = torch.stack([entry.grid_3 for entry in entries])
        return BatchFeature({"pixel_values": torch.cat(references), "image_grid_thw": grids})

    return compat.IMAGE_PROCESSING.replaced_by(preprocess, on=image_processor)


def _with_ids_of_images(messages: object) -> Any:
    """Return the messages with each image replaced by its `id`.

    Comparing them then reads no pixels.
    """
    if isinstance(messages, dict):
        return {key: _with_ids_of_images(value) for key, value in messages.items()}
    if isinstance(messages, (list, tuple)):
        return [_with_ids_of_images(value) for value in messages]
    return messages if isinstance(messages, (str, int, float, bool, type(None))) else id(messages)
