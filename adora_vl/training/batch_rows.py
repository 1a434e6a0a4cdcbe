"""Takes, packs, joins and replaces rows of a batch.

This file alone knows which columns are as wide as prompts, completions, or both.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar, cast

import torch
from accelerate.utils import recursively_apply, send_to_device
from torch import Tensor
from torch.nn.functional import pad
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from adora_vl.packing.image_store import ImageBanks, first_patches
from adora_vl.packing.prompts import IMAGE_FIELDS
from adora_vl.types import Batch

# The columns of a batch by name, of which `pixel_values` is split by row: a list with an entry for
# each row. That is its pixels, or the numbers of its patches in an image bank.
_SplitBatch = dict[str, Any]
# The columns of some rows by name, on the CPU. `images` has each distinct image once, by the number
# of its first patch.
PackedRows = dict[str, Any]
Nested = TypeVar("Nested")  # tensors in lists, tuples and dicts


def rows_of_groups(groups: Sequence[int], group_size: int) -> list[int]:
    """Return the numbers of the rows of groups: (0, 2) with groups of two are 0, 1, 4, 5."""
    return [group * group_size + member for group in groups for member in range(group_size)]


class RowReader:
    """Selects rows of a batch, any number of times.

    It splits the batch's pixels, which have an entry for each patch, by row once.
    """

    def __init__(self, batch: Batch) -> None:
        self._split = _split_images(batch)

    def take(self, rows: Sequence[int]) -> Batch:
        """Return a batch of the rows with these indices. Scalar columns stay as they are."""
        return _join_images(_take_rows(self._split, rows))

    def pack(self, rows: Sequence[int], image_banks: ImageBanks) -> PackedRows:
        """Copy rows to the CPU together with their images, to send them to another rank.

        An image that several rows share is included once. `unpack_rows` makes a batch of them
        again.

        Args:
            rows: the indices of the rows in the batch.
            image_banks: store the images, to whose patches the rows refer by number.
        """
        return _pack_rows(_take_rows(self._split, rows), image_banks)


def _split_images(batch: Batch) -> _SplitBatch:
    """Return a batch's columns with `pixel_values` as a list that has an entry for each row.

    In a batch it is one tensor with an entry for each patch of all images. For example, for rows
    with images of 4 and 6 patches, a tensor (10, D) becomes a list of tensors (4, D) and (6, D).
    """
    split: _SplitBatch = split_pixel_values_by_grid(dict(batch))
    return split


def _join_images(split: _SplitBatch) -> Batch:
    """Undo `_split_images`: make the list of each row's pixels one tensor again."""
    return cast("Batch", unsplit_pixel_values_by_grid(split))


def _pack_rows(rows: _SplitBatch, image_banks: ImageBanks) -> PackedRows:
    """Copy rows to the CPU, with each of their images once.

    In a batch `pixel_values` has patch numbers, under which an image bank stores patches. The
    number of its first patch identifies an image. In the result `pixel_values` has, for each row,
    only the numbers of first patches, and `images` has the images by these numbers. For example,
    two rows share an image of the patches 40 to 43:

        pixel_values of the rows:    [40 41 42 43], [40 41 42 43]
        pixel_values of the result:  [[40], [40]]
        images of the result:        {40: the image}
    """
    packed: PackedRows = to_cpu(
        {name: value for name, value in rows.items() if name != "pixel_values"}
    )
    patch_numbers_by_row = rows.get("pixel_values")
    if isinstance(patch_numbers_by_row, list):
        first_patches_by_row = [
            first_patches(patch_numbers, grids)
            for patch_numbers, grids in zip(
                patch_numbers_by_row, rows["image_grid_thw"], strict=True
            )
        ]
        packed["pixel_values"] = first_patches_by_row
        distinct_images = set(chain.from_iterable(first_patches_by_row))
        packed["images"] = {
            first_patch: to_cpu(image_banks.of(first_patch).image(first_patch))
            for first_patch in distinct_images
        }
    return packed


def unpack_rows(packed: PackedRows, image_banks: ImageBanks, device: torch.device) -> Batch:
    """Return rows that `RowReader.pack` has packed as a batch on the device.

    Their images are stored in the image bank of the training batch, which gives their patches new
    numbers. `pixel_values` gets these numbers. For example, [[40], [40]], an image of four patches,
    becomes the numbers 200 to 203 for both rows, if the bank has stored patches up to 199.

    Args:
        packed: the columns of the rows, and their images by the number of the first patch.
        image_banks: the banks of this rank.
        device: where the batch is put.
    """
    columns = {name: value for name, value in packed.items() if name != "images"}
    rows: _SplitBatch = send_to_device(columns, device)
    bank = image_banks.bank_to_extend()
    if "images" in packed and bank is not None:
        # For each image the new numbers of all its patches. An image is identified by the number
        # that its first patch had in the bank that it comes from.
        patch_numbers_by_image = {
            first_patch: bank.store(key, patches.to(device), grid).to(device)
            for first_patch, (key, patches, grid) in packed["images"].items()
        }
        no_patches = torch.zeros(0, 1, dtype=torch.long, device=device)
        rows["pixel_values"] = []
        for first_patches_of_row in packed["pixel_values"]:
            patch_numbers = [patch_numbers_by_image[image] for image in first_patches_of_row]
            # `torch.cat` refuses the empty list of a row without images.
            rows["pixel_values"].append(torch.cat([no_patches, *patch_numbers]))
    return _join_images(rows)


def to_cpu(values: Nested) -> Nested:
    """Return a copy of nested values on the CPU, in which no two tensors share memory."""
    copies: Nested = recursively_apply(lambda tensor: tensor.detach().cpu().clone(), values)
    return copies


def _take_rows(split: _SplitBatch, rows: Sequence[int]) -> _SplitBatch:
    """Return the columns of the rows with these indices. Scalars stay as they are."""
    columns_of_rows: _SplitBatch = {}
    # Indexing with a list would wait for the device in every column. The row numbers are copied to
    # each device once, without waiting.
    indices_by_device: dict[torch.device, Tensor] = {}
    for name, value in split.items():
        if isinstance(value, list):
            columns_of_rows[name] = [value[row] for row in rows]
        elif isinstance(value, Tensor) and value.dim() > 0:
            device = value.device
            if device not in indices_by_device:
                indices_by_device[device] = torch.as_tensor(rows).to(device, non_blocking=True)
            columns_of_rows[name] = value[indices_by_device[device]]
        else:
            columns_of_rows[name] = value
    return columns_of_rows


class UsedColumns(NamedTuple):
    """The token columns that at least one of some rows uses. The others are padding alone."""

    first_prompt_column: int
    """The first column that a prompt uses. Prompts are padded on the left."""
    completion_width: int
    """How many columns completions use. They are padded on the right."""


def used_columns(prompt_mask: Tensor, lengths: Sequence[int]) -> UsedColumns:
    """Return which token columns at least one of some rows uses.

    For example, the prompt masks 0 0 1 1 and 0 1 1 1 with completions of 2 and 3 tokens use prompt
    columns from 1 on, and 3 completion columns.

    Args:
        prompt_mask: (B, P), B rows of P tokens, 0 at padding.
        lengths: completion tokens of each row. Two columns remain even where all are shorter, since
            TRL takes a tensor of one column for values of whole answers, and counts masked answers.
    """
    is_used_P = prompt_mask.any(dim=0)
    return UsedColumns(
        first_prompt_column=int(is_used_P.int().argmax()),  # the first 1
        completion_width=max(*lengths, 2),
    )


def without_padding(batch: dict[str, Any], columns_in_use: UsedColumns) -> dict[str, Any]:
    """Return the batch without token columns that are padding in every row.

    Prompts are cut on the left, completions on the right. For example, with `_` for padding and
    `p` and `c` for tokens of prompt and completion:

        _ _ p p  c c _        _ p p  c c
        _ p p p  c _ _   ->   p p p  c _

    If there is nothing to cut, the batch itself is returned.

    `columns_in_use`: which token columns at least one of the rows uses, from `used_columns`.
    """
    prompt_width = batch["prompt_mask"].size(1)
    completion_width = batch["completion_mask"].size(1)
    first_prompt_column = columns_in_use.first_prompt_column
    used_completion_width = columns_in_use.completion_width
    if first_prompt_column == 0 and used_completion_width == completion_width:
        return batch
    slice_by_axis = {
        "prompt": slice(first_prompt_column, None),
        "completion": slice(used_completion_width),
        "both": slice(first_prompt_column, prompt_width + used_completion_width),
    }
    narrow_batch: dict[str, Any] = {}
    for name, value in batch.items():
        axis = _token_axis(
            name, value=value, prompt_width=prompt_width, completion_width=completion_width
        )
        narrow_batch[name] = value if axis == "none" else value[:, slice_by_axis[axis]]
    return narrow_batch


def _token_axis(name: str, value: object, prompt_width: int, completion_width: int) -> str:
    """Return which tokens the second dimension of a column of the batch stands for.

    The result is `prompt`, `completion`, `both` (the prompt, followed by the completion), or
    `none`. For example, of B rows with prompts 4 tokens wide and completions 3 tokens wide,
    `advantages` (B,) is `none`, log-probabilities (B, 3) are `completion`, and `mm_token_type_ids`
    (B, 7) is `both`.

    The columns of prompts are recognised by their names, and so are those of images, which have no
    tokens. All others are recognised by their width, so that a new one needs no entry in a list.

    Args:
        name: the column's name in the batch.
        value: the column.
        prompt_width: token columns of prompts in the batch.
        completion_width: token columns of completions in the batch.
    """
    # The second dimension of images counts no tokens, though it may be as wide as one that does.
    if not isinstance(value, Tensor) or value.dim() < 2 or name in IMAGE_FIELDS:
        return "none"
    if name in ("prompt_ids", "prompt_mask"):
        return "prompt"
    if value.size(1) == prompt_width + completion_width:
        return "both"
    if value.size(1) == completion_width:
        return "completion"
    return "none"


def concat_rows(batch: Batch, appended: Batch, pad_id: int) -> Batch:
    """Return a batch of the rows of both batches, all padded to the wider of the two.

    For example, a batch with completions 3 tokens wide and one with 5 become a batch with 5.

    Args:
        batch: its rows come first. Columns that are scalars are taken from it.
        appended: a batch with the same columns.
        pad_id: the token that fills shorter rows.
    """
    batches = (batch, appended)
    new_prompt_width = max(part["prompt_ids"].size(1) for part in batches)
    new_completion_width = max(part["completion_ids"].size(1) for part in batches)
    # TRL's importance ratio to the engine is (B, 1) or (B, C). If the completions of one batch are
    # one token wide, both are (B, 1), and only the other batch tells which it is.
    ratio_is_per_rollout = all(map(_has_one_ratio_per_rollout, batches))
    wide_batches = [
        _widen(
            part,
            new_prompt_width=new_prompt_width,
            new_completion_width=new_completion_width,
            pad_id=pad_id,
            ratio_is_per_rollout=ratio_is_per_rollout,
        )
        for part in batches
    ]
    # `pixel_values` has a row for each patch, and not for each rollout. It becomes a list with an
    # entry for each rollout until the two batches are joined.
    first_columns, appended_columns = map(_split_images, wide_batches)
    joined_columns: _SplitBatch = {}
    for name, value in first_columns.items():
        joined_columns[name] = value
        if isinstance(value, Tensor) and value.dim() > 0:
            joined_columns[name] = torch.cat([value, appended_columns[name]])
        elif isinstance(value, list):
            joined_columns[name] = value + appended_columns[name]
    return _join_images(joined_columns)


def _has_one_ratio_per_rollout(batch: Batch) -> bool:
    """Return whether a batch has one importance ratio to the engine for each rollout, or none.

    TRL has one ratio for each of B rollouts in the modes `sequence_*`, (B, 1), and one for each of
    C tokens otherwise, (B, C).
    """
    ratio = batch.get("importance_sampling_ratio")
    return ratio is None or ratio.size(1) == 1


def _widen(
    batch: Batch,
    new_prompt_width: int,
    new_completion_width: int,
    pad_id: int,
    ratio_is_per_rollout: bool,
) -> Batch:
    """Return the batch of B rollouts with its token columns padded to new widths.

    Prompts are padded on the left, completions on the right. Columns that have prompt and
    completion are padded on both sides: `p p c` becomes `_ p p c _ _` for prompts and completions 3
    tokens wide.

    Args:
        batch: a batch that is not wider than the new widths.
        new_prompt_width: token columns that prompts get.
        new_completion_width: token columns that completions get.
        pad_id: the token that fills columns of token ids; other columns are filled with 0.
        ratio_is_per_rollout: whether the importance ratio to the engine is (B, 1), and not (B, C)
            for C tokens. Its shape alone does not tell that if completions are one token wide.
    """
    prompt_width = batch["prompt_ids"].size(1)
    completion_width = batch["completion_ids"].size(1)
    left_padding = new_prompt_width - prompt_width
    right_padding = new_completion_width - completion_width
    padding_by_axis = {
        "prompt": (left_padding, 0),
        "completion": (0, right_padding),
        "both": (left_padding, right_padding),
    }
    wide_batch = dict[str, Any](batch)
    for name, value in dict[str, Any](batch).items():
        if name == "importance_sampling_ratio":
            axis = "none" if ratio_is_per_rollout else "completion"
            fill = 1  # TRL's VESPO takes the logarithm of the ratio without a mask
        else:
            axis = _token_axis(
                name, value, prompt_width=prompt_width, completion_width=completion_width
            )
            has_token_ids = name.endswith("_ids") and name != "mm_token_type_ids"
            fill = pad_id if has_token_ids else 0
        if axis != "none":
            wide_batch[name] = pad(value, padding_by_axis[axis], value=fill)
    return cast("Batch", wide_batch)
