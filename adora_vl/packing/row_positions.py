"""The images and the M-RoPE positions of the prompts and completions of a micro-batch's rows.

All of it is computed on the CPU, from `RowsOnCpu`, before a row is packed.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adora_vl.packing.vision import vision_language_model
from adora_vl.types import RowImages, RowsOnCpu

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def prompt_images(rows_on_cpu: RowsOnCpu, row: int) -> RowImages | None:
    """Return the images in a row's prompt; None where no row of the batch has images.

    For example, with grids of 4, 6 and 8 patches and one image in the completion, the prompt has
    the first two grids and the first 10 patches.

    Args:
        rows_on_cpu: the copy of a batch on the CPU. It has the images of a row's prompt and
            completion together, the prompt's first.
        row: the number of the row.
    """
    row_images = rows_on_cpu.images[row]
    if row_images is None:
        return None
    if rows_on_cpu.completion_token_types is None:  # no completion has images
        return row_images
    # The images of the completion come after those of the prompt.
    grids = row_images.grids[: rows_on_cpu.prompt_image_count(row)]
    patch_count = int(grids.prod(dim=-1).sum())
    return RowImages(pixels=row_images.pixels[:patch_count], grids=grids)


def completion_images(rows_on_cpu: RowsOnCpu, row: int) -> RowImages | None:
    """Return the images in a row's completion, which tools have put there.

    They come after those of the prompt: with grids of 4, 6 and 8 patches, and two images in the
    prompt, the completion has the last grid and the last 8 patches. The result is None if no row of
    the batch has images, or if the completion has no tokens.

    Args:
        rows_on_cpu: the copy of a batch on the CPU.
        row: the number of the row.
    """
    row_images = rows_on_cpu.images[row]
    in_prompt = prompt_images(rows_on_cpu, row)
    has_tokens = rows_on_cpu.completion_lengths[row] > 0
    if row_images is None or in_prompt is None or not has_tokens:
        return None
    return RowImages(
        pixels=row_images.pixels[len(in_prompt.pixels) :],
        grids=row_images.grids[len(in_prompt.grids) :],
    )


def prompt_position_ids(
    model: "PreTrainedModel",
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    token_types: Tensor | None,
    grids: Tensor | None,
) -> Tensor:
    """Return the position ids of left-padded prompts as the model itself counts them.

    There are N prompts, padded to P tokens. The result is (3, N, P) for a vision-language model,
    whose M-RoPE has three axes, else (N, P). For example, a prompt of text with the mask 0 0 1 1 1
    has the positions 0 0 0 1 2.

    Args:
        model: the policy or the reference model, without a wrapper.
        prompt_ids: (N, P).
        prompt_mask: (N, P), 0 at padding.
        token_types: (N, P), 1 at the tokens of images; None without images.
        grids: (images, 3), of all prompts in order; None without images.
    """
    vl_model = vision_language_model(model)
    if vl_model is not None and token_types is not None and grids is not None:
        positions: Tensor
        positions, _ = vl_model.get_rope_index(
            prompt_ids,
            mm_token_type_ids=token_types,
            image_grid_thw=grids,
            attention_mask=prompt_mask,
        )
        return positions
    # Without an image all axes count the tokens; padding gets 0, and nothing reads it.
    token_index = (prompt_mask.cumsum(dim=-1) - 1).clamp(min=0)
    if vl_model is None:
        return token_index
    return token_index.expand(3, *token_index.shape)


def completion_position_ids(
    model: "PreTrainedModel", rows_on_cpu: RowsOnCpu, rows: list[int]
) -> Tensor | None:
    """Return the M-RoPE positions of the completions of these rows, (3, rows, C).

    C is the width of the completions in tokens. The result is None if no completion has an image.
    Each position is then the one before plus 1, which the caller can count. After an image the next
    position is larger by the image's height or width in tokens, whichever is more, so the model's
    own method is needed.

    Args:
        model: the policy or the reference model, without a wrapper.
        rows_on_cpu: the copy of the batch on the CPU.
        rows: numbers of rows of the batch.
    """
    token_types = rows_on_cpu.completion_token_types
    if token_types is None or not token_types[rows].any():
        return None
    assert rows_on_cpu.prompt_token_types is not None
    prompt_mask = rows_on_cpu.prompt_mask[rows]
    lengths = torch.tensor([rows_on_cpu.completion_lengths[row] for row in rows])
    completion_mask = torch.arange(token_types.size(1)) < lengths[:, None]
    # The whole row is handed to the model as if it were a prompt.
    row_mask = torch.cat([prompt_mask, completion_mask.to(prompt_mask.dtype)], dim=1)
    row_token_types = torch.cat([rows_on_cpu.prompt_token_types[rows], token_types[rows]], dim=1)
    images = [rows_on_cpu.images[row] for row in rows]
    grids = torch.cat([row_images.grids for row_images in images if row_images is not None])
    positions = prompt_position_ids(
        model,
        # The model reads the types of tokens and not their ids.
        prompt_ids=torch.zeros_like(row_token_types, dtype=torch.long),
        prompt_mask=row_mask,
        token_types=row_token_types,
        grids=grids,
    )
    prompt_width = prompt_mask.size(1)
    return positions[..., prompt_width:]
