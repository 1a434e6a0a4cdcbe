"""The images and the M-RoPE positions of the prompts and completions of a micro-batch's rows.

All of it is computed on the host, from `HostRows`, before a row is packed.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adora_vl.packing.vision import vision_model
from adora_vl.types import HostRows, RowImages

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def prompt_images(host: HostRows, row: int) -> RowImages | None:
    """Return the images in a row's prompt; None where it has none."""
    row_images = host.images[row]
    if row_images is None:
        return None
    pixels, grids = row_images
    if host.answer_types is not None:  # the row's last images may be those of its completion
        grids = grids[: host.images_of_prompt(row)]
        prompt_patches = int(grids.prod(dim=-1).sum())
        pixels = pixels[:prompt_patches]
    return RowImages(pixels=pixels, grids=grids)


def completion_images(host: HostRows, row: int) -> RowImages | None:
    """Return the images in a row's completion, such as tools show; None where it has no tokens."""
    row_images = host.images[row]
    in_prompt = prompt_images(host, row)
    if row_images is None or in_prompt is None or not host.lengths[row]:
        return None
    pixels, grids = row_images
    return RowImages(
        pixels=pixels[len(in_prompt.pixels) :],
        grids=grids[len(in_prompt.grids) :],
    )


def prompt_positions(
    model: "PreTrainedModel",
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    token_types: Tensor | None,
    grids: Tensor | None,
) -> Tensor:
    """Return the positions of left-padded prompts as the model itself counts them.

    They are (3, N, P) for a vision-language model, whose M-RoPE has three axes, else (N, P).

    Args:
        model: the policy or the reference model, without a wrapper.
        prompt_ids: (N, P).
        prompt_mask: (N, P), 0 at padding.
        token_types: (N, P), 1 at the tokens of images; None without images.
        grids: (images, 3), of all prompts in order; None without images.
    """
    multimodal_model = vision_model(model)
    if multimodal_model is not None and token_types is not None and grids is not None:
        positions: Tensor = multimodal_model.get_rope_index(
            prompt_ids,
            mm_token_type_ids=token_types,
            image_grid_thw=grids,
            attention_mask=prompt_mask,
        )[0]
        return positions
    # Without an image all three axes count the tokens.
    token_index = (prompt_mask.cumsum(dim=-1) - 1).clamp(min=0)
    if multimodal_model is None:
        return token_index
    return token_index.expand(3, *token_index.shape)


def completion_positions(
    model: "PreTrainedModel", host: HostRows, rows: list[int]
) -> Tensor | None:
    """Return M-RoPE positions of the completions of these rows, (3, rows, C), if one has an image.

    The token after an image is as far away as the image is high or wide. None where no completion
    has an image, so that positions simply count on by one.
    """
    if host.answer_types is None or not host.answer_types[rows].any():
        return None
    assert host.token_types is not None
    prompt_mask = host.prompt_mask[rows]
    token_types = torch.cat([host.token_types[rows], host.answer_types[rows]], dim=1)
    lengths = torch.tensor([host.lengths[row] for row in rows])
    completion_mask = torch.arange(host.answer_types.size(1)) < lengths[:, None]
    row_mask = torch.cat([prompt_mask, completion_mask.to(prompt_mask.dtype)], dim=1)
    all_images = [host.images[row] for row in rows]
    grids = torch.cat([row_images.grids for row_images in all_images if row_images is not None])
    # The model counts a whole row as if it were a prompt.
    positions = prompt_positions(
        model,
        # The model reads the types of tokens and not their ids.
        prompt_ids=torch.zeros_like(token_types, dtype=torch.long),
        prompt_mask=row_mask,
        token_types=token_types,
        grids=grids,
    )
    return positions[..., prompt_mask.size(1) :]
