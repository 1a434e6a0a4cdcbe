"""The prompts of a generation, as the engine and the policy read them.

Each distinct prompt is processed once, whatever the number of its rollouts.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.feature_extraction_utils import BatchFeature
from trl.data_utils import prepare_multimodal_messages

from adora_vl.data.rows import images_of
from adora_vl.packing.image_store import (
    ImageBank,
    ImageCache,
    effective_settings,
    flat_images,
)
from adora_vl.types import image_fields, split_images_by_row
from adora_vl.utils import compat
from adora_vl.utils.cli import pluralize
from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, ProcessorMixin
    from transformers.image_utils import ImageInput

# Outputs of a processor that have a value for each token of the prompt.
TOKEN_TYPE_FIELDS = ("token_type_ids", "mm_token_type_ids")
# Outputs of a processor that have the images of all prompts in a row.
IMAGE_FIELDS = ("pixel_values", "image_grid_thw")


@dataclass(frozen=True)
class PromptBatch:
    """The prompts of B rows."""

    messages: list[Any]  # (B,), with their images inside if any row has one; or texts
    ids: list[list[int]]  # (B,), with image tokens expanded
    # (B,), None for a row without images; None instead of the list where no row has any
    images: list[list[Any] | None] | None
    # The processor's other outputs by name: `pixel_values` and `image_grid_thw` of all images, and
    # for each row a list with a value per token, such as `mm_token_type_ids`.
    fields: dict[str, Any]

    @property
    def num_images(self) -> list[int]:
        """The number of images of each row, (B,)."""
        if self.images is None:
            return [0] * len(self.ids)
        return [len(row_images or ()) for row_images in self.images]


def distinct_rows(keys: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """Return the first row of each distinct key, and for every row the number of its key.

    For example, the keys a a b a give [0, 2] and [0, 0, 1, 0]: key 0 is first in row 0, key 1 in
    row 2.

    `keys`: a key for each row, equal for rows of equal content.
    """
    number_by_key: dict[Hashable, int] = {}
    first_rows = []
    for row, key in enumerate(keys):
        if key not in number_by_key:
            number_by_key[key] = len(number_by_key)
            first_rows.append(row)
    return first_rows, [number_by_key[key] for key in keys]


def trl_messages(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the prompts of rows as TRL's messages.

    If any row has images, all messages get the form that TRL has for images: their content is a
    list of parts, such as `{"type": "image", "image": ...}` and `{"type": "text", "text": ...}`.
    """
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
    chat_template_kwargs: Mapping[str, Any],
    processor_context: AbstractContextManager[Any] | None = None,
) -> PromptBatch:
    """Apply the chat template to the prompts of rows, tokenize them and process their images.

    Each distinct prompt goes through the processor (or tokenizer) once. Stock TRL calls it twice
    for every copy.

    Args:
        rows: rows of a data set, with `prompt` and mostly `images`.
        processor: the processor of the model, or a tokenizer.
        chat_template_kwargs: further arguments of the chat template.
        processor_context: a context manager around the processor's work; None for none.
    """
    messages = trl_messages(rows)
    is_plain_text = isinstance(messages[0], str)
    if is_plain_text:
        ids = list(processor(text=messages)["input_ids"])
        return PromptBatch(messages=messages, ids=ids, images=None, fields={})
    prompt_keys = [repr(_with_ids_of_images(message)) for message in messages]
    first_rows, prompt_numbers = distinct_rows(prompt_keys)
    distinct_messages = [messages[row] for row in first_rows]
    with processor_context or nullcontext():
        values_by_name = _tokenize_messages(distinct_messages, processor, chat_template_kwargs)
    pixels = values_by_name.pop("pixel_values", None)
    grids = values_by_name.pop("image_grid_thw", None)
    # The other values are lists with an entry for each distinct prompt. Each row gets a copy of the
    # entry of its prompt.
    fields: dict[str, Any] = {}
    for name, values in values_by_name.items():
        fields[name] = [list(values[number]) for number in prompt_numbers]
    ids = fields.pop("input_ids")
    if pixels is None:
        return PromptBatch(messages=messages, ids=ids, images=None, fields=fields)
    row_images = [images_of(row) for row in rows]
    if grids is None:
        _check_images_without_grids(row_images, fields, len(pixels) / len(distinct_messages))
        pixels_by_prompt = [torch.as_tensor(image_pixels) for image_pixels in pixels]
        fields["pixel_values"] = torch.stack(
            [pixels_by_prompt[number] for number in prompt_numbers]
        )
    else:
        image_counts = [len(row_images[row]) for row in first_rows]
        images_by_prompt = split_images_by_row(
            torch.as_tensor(pixels), torch.as_tensor(grids), image_counts
        )
        fields |= image_fields([images_by_prompt[number] for number in prompt_numbers])
    return PromptBatch(
        messages=messages,
        ids=ids,
        images=[images or None for images in row_images],
        fields=fields,
    )


def _check_images_without_grids(
    row_images: Sequence[Sequence[Any]], fields: Mapping[str, Any], tiles_per_prompt: float
) -> None:
    """Raise `UserError` for images that cannot be divided by rows where they have no grids.

    In families such as LLaVA all images have equally many pixels, and the processor returns no
    grids. TRL then divides the pixels of a batch as if each row had one entry of them.

    Args:
        row_images: the images of each row.
        fields: the processor's other outputs by name.
        tiles_per_prompt: how many entries of pixels the processor has made of a prompt's images.
    """
    reason = None
    other_outputs = sorted(set(fields) - set(TOKEN_TYPE_FIELDS))
    image_counts = {len(images) for images in row_images}
    if other_outputs:
        reason = f"the processor returns {', '.join(other_outputs)} beside the pixels"
    elif image_counts != {1}:
        reason = f"a row has {pluralize(max(image_counts - {1}), 'image')}"
    elif tiles_per_prompt != 1:
        reason = "the processor divides an image into tiles"
    if reason is not None:
        raise UserError(
            f"images: {reason}; a model outside of the known families is trained on rows with one "
            "image each, which its processor returns as pixels of one size"
        )


def _tokenize_messages(
    messages: list[Any], processor: "ProcessorMixin", chat_template_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the processor's outputs for some prompts by name, such as `input_ids`.

    The chat template is applied, and images are processed. There is no attention mask, since the
    prompts are not padded.

    Args:
        messages: the messages of each prompt.
        processor: that of the model, or a tokenizer.
        chat_template_kwargs: further arguments of the chat template.
    """
    if hasattr(processor, "tokenizer"):
        # Templates of processors take no plain text as the content of a message.
        messages = [prepare_multimodal_messages(conversation) for conversation in messages]
    output = processor.apply_chat_template(
        conversation=messages,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **chat_template_kwargs,
    )
    return {name: value for name, value in output.items() if name != "attention_mask"}


def with_pictures_of_tools(
    prompts: PromptBatch,
    pictures: Sequence[Sequence[Any]],
    process: Callable[[list[Any]], Mapping[str, Any]],
) -> PromptBatch:
    """Return the prompts with further images of each row after the prompt's own images.

    For example, row 0 has the image a in its prompt and gets x from a tool; row 1 has b and gets
    nothing. The images in their new order are a x b.

    Args:
        prompts: of B rows.
        pictures: the further images of each row, (B,), such as those that tools have returned.
        process: the image processor, which returns pixels and grids of a list of images.
    """
    output = process([picture for row_pictures in pictures for picture in row_pictures])
    processed_by_row = split_images_by_row(
        torch.as_tensor(output["pixel_values"]),
        torch.as_tensor(output["image_grid_thw"]),
        image_counts=[len(row_pictures) for row_pictures in pictures],
    )
    fields = dict(prompts.fields)
    # The processed images in their new order: those of a row's prompt before the further ones.
    processed_in_order = processed_by_row
    prompt_pictures: Sequence[list[Any] | None] = [None] * len(prompts.ids)
    if prompts.images is not None:
        prompt_pictures = prompts.images
        processed_of_prompts = split_images_by_row(
            fields["pixel_values"], fields["image_grid_thw"], prompts.num_images
        )
        processed_in_order = []
        for row_images, new_images in zip(processed_of_prompts, processed_by_row, strict=True):
            processed_in_order += [row_images, new_images]
    fields |= image_fields(processed_in_order)
    # Prompts without images have no column of token types: all of their tokens are text (0).
    fields.setdefault("mm_token_type_ids", [[0] * len(ids) for ids in prompts.ids])
    pictures_by_row = []
    for row_prompt_pictures, row_pictures in zip(prompt_pictures, pictures, strict=True):
        # A row without any image has None in place of an empty list.
        pictures_by_row.append([*(row_prompt_pictures or ()), *row_pictures] or None)
    return PromptBatch(
        messages=prompts.messages, ids=prompts.ids, images=pictures_by_row, fields=fields
    )


def select_prompts(prompts: PromptBatch, rows: Sequence[int]) -> PromptBatch:
    """Return the prompts of these rows, in this order, with their images.

    `rows`: the indices of the rows.
    """
    fields: dict[str, Any] = {}
    for name, values in prompts.fields.items():
        if name not in IMAGE_FIELDS:
            fields[name] = [values[row] for row in rows]
    messages = [prompts.messages[row] for row in rows]
    ids = [prompts.ids[row] for row in rows]
    images = None if prompts.images is None else [prompts.images[row] for row in rows]
    if images is None or not any(images):
        return PromptBatch(messages=messages, ids=ids, images=None, fields=fields)
    pixels = prompts.fields["pixel_values"]
    grids = prompts.fields.get("image_grid_thw")
    if grids is None:  # each row has one image
        fields["pixel_values"] = pixels[list(rows)]
    else:
        images_by_row = split_images_by_row(pixels, grids, prompts.num_images)
        fields |= image_fields([images_by_row[row] for row in rows])
    return PromptBatch(messages=messages, ids=ids, images=images, fields=fields)


def append_completions(
    prompts: PromptBatch, completions: Sequence[Sequence[int]], image_token_id: int | None
) -> PromptBatch:
    """Return the prompts with the tokens of unfinished completions behind them.

    For example, with the image token 9, the prompt 9 7 of the types 1 0 and the completion 7 9
    give the prompt 9 7 7 9 of the types 1 0 0 1. The images of the completions are not appended:
    `with_pictures_of_tools` does that.

    Args:
        prompts: of B rows.
        completions: the token ids of the completions so far, (B,).
        image_token_id: the id of the image token; None for a text model.
    """
    fields = dict(prompts.fields)
    for name in TOKEN_TYPE_FIELDS:
        if name not in fields:
            continue
        marks_images = name == "mm_token_type_ids"
        longer_types = []
        for types, completion in zip(fields[name], completions, strict=True):
            is_image = [marks_images and token == image_token_id for token in completion]
            longer_types.append([*types, *map(int, is_image)])
        fields[name] = longer_types
    ids = [
        [*prompt_ids, *completion]
        for prompt_ids, completion in zip(prompts.ids, completions, strict=True)
    ]
    return replace(prompts, ids=ids, fields=fields)


def returning_patch_numbers(
    image_processor: "BaseImageProcessor", cache: ImageCache, bank: ImageBank, device: torch.device
) -> AbstractContextManager[None]:
    """Return a context in which the image processor stores patches and returns their numbers.

    An image bank gives numbers to patches. They take the place of pixels in the processor's output.

    Args:
        image_processor: its `preprocess` is replaced.
        cache: has images that were processed before.
        bank: stores the patches.
        device: where the patches are stored.
    """

    def preprocess(images: "ImageInput", **overrides: Any) -> BatchFeature:
        """Store the images' patches in the bank, and return their numbers as pixels."""
        settings = effective_settings(image_processor, overrides)
        processed_images = [
            cache.get(image_processor, image, settings) for image in flat_images(images)
        ]
        patch_numbers = [bank.patch_numbers(processed, device) for processed in processed_images]
        grids = torch.stack([processed.grid_thw for processed in processed_images])
        return BatchFeature({"pixel_values": torch.cat(patch_numbers), "image_grid_thw": grids})

    # A context in which `preprocess` above stands in for the processor's own method.
    return compat.IMAGE_PROCESSING.replaced_by(preprocess, on=image_processor)


def _with_ids_of_images(messages: object) -> Any:
    """Return messages with each image replaced by Python's `id` of the object.

    So messages can be compared without reading pixels: rows of one prompt have the same image
    object. For example, {"type": "image", "image": <image>} becomes {..., "image": 140023}.

    `messages`: a message, or lists of messages nested in any way.
    """
    if isinstance(messages, dict):
        return {key: _with_ids_of_images(value) for key, value in messages.items()}
    if isinstance(messages, (list, tuple)):
        return [_with_ids_of_images(value) for value in messages]
    is_plain_value = messages is None or isinstance(messages, (str, int, float, bool))
    return messages if is_plain_value else id(messages)
