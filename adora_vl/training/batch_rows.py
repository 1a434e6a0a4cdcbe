"""Takes, packs, joins and replaces rows of a batch.

This file alone knows which columns are as wide as prompts, completions, or both.
"""

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
from accelerate.utils import recursively_apply, send_to_device
from torch import Tensor
from torch.nn.functional import pad
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from adora_vl.packing.image_store import ImageBanks, first_patches
from adora_vl.types import Batch

# The columns of a batch by name, where `pixel_values` is a list with the pixels, or references, of
# each row.
_SplitBatch = dict[str, Any]
# The columns of some rows, on the CPU. In `images` stands each distinct image, by the number of its
# first patch.
PackedRows = dict[str, Any]
Nested = TypeVar("Nested")  # tensors in lists, tuples and dicts
_OWN_WIDTH = ("pixel_values", "image_grid_thw")  # whatever the number of their columns


class RowReader:
    """Takes rows out of a batch, any number of times."""

    def __init__(self, batch: Batch) -> None:
        """Find the pixels of each row, or references to them, by the grids of its images."""
        self._split = _split_images(batch)

    def take(self, rows: Sequence[int]) -> Batch:
        """Return a batch of these rows, with the values that have no rows."""
        return _join_images(_take_rows(self._split, rows))

    def pack(self, rows: Sequence[int], banks: ImageBanks) -> PackedRows:
        """Return these rows, copied to the CPU as separate tensors, to send or to save.

        Each image is included once, in place of references to it. `banks` have the images.
        """
        return _pack_rows(_take_rows(self._split, rows), banks)


def _split_images(batch: Batch) -> _SplitBatch:
    """Return the batch with a list of each row's pixels, from which rows can be taken."""
    split: _SplitBatch = split_pixel_values_by_grid(dict(batch))
    return split


def _join_images(split: _SplitBatch) -> Batch:
    """Return the batch that `_split_images` has split."""
    return cast("Batch", unsplit_pixel_values_by_grid(split))


def _pack_rows(rows: _SplitBatch, banks: ImageBanks) -> PackedRows:
    """Return the rows, copied to the CPU, with each of their images once."""
    packed: PackedRows = to_cpu(
        {name: value for name, value in rows.items() if name != "pixel_values"}
    )
    references = rows.get("pixel_values")
    if isinstance(references, list):
        first_patches_by_row = [
            first_patches(references_of_row, grid)
            for references_of_row, grid in zip(references, rows["image_grid_thw"], strict=True)
        ]
        packed["pixel_values"] = first_patches_by_row
        packed["images"] = {
            start: to_cpu(banks.of(start).image(start))
            for start in {
                first_patch for row_starts in first_patches_by_row for first_patch in row_starts
            }
        }
    return packed


def unpack_rows(packed: PackedRows, banks: ImageBanks, device: torch.device) -> Batch:
    """Return packed rows as a batch. The bank of the training batch holds their images from now on."""
    rows: _SplitBatch = send_to_device({k: v for k, v in packed.items() if k != "images"}, device)
    bank = banks.extend()
    if "images" in packed and bank is not None:
        references_by_start = {
            start: bank.store(key, patches.to(device), grid).to(device)
            for start, (key, patches, grid) in packed["images"].items()
        }
        no_references = torch.zeros(0, 1, dtype=torch.long, device=device)
        rows["pixel_values"] = [
            torch.cat([no_references, *(references_by_start[start] for start in row)])
            for row in packed["pixel_values"]
        ]
    return _join_images(rows)


def to_cpu(values: Nested) -> Nested:
    """A copy of nested values whose tensors are on the CPU, each with storage of its own."""
    copied: Nested = recursively_apply(lambda tensor: tensor.detach().cpu().clone(), values)
    return copied


def _take_rows(split: _SplitBatch, rows: Sequence[int]) -> _SplitBatch:
    """Select these rows from every column. Scalars are kept."""
    selected: _SplitBatch = {}
    indices: dict[torch.device, Tensor] = {}  # one copy to a device, for which nothing waits
    for name, value in split.items():
        if isinstance(value, list):
            selected[name] = [value[row] for row in rows]
        elif isinstance(value, Tensor) and value.dim() > 0:
            if value.device not in indices:
                indices[value.device] = torch.as_tensor(rows).to(value.device, non_blocking=True)
            selected[name] = value[indices[value.device]]
        else:
            selected[name] = value
    return selected


def used_columns(prompt_mask: Tensor, lengths: Sequence[int]) -> tuple[int, int]:
    """The first column of prompts and the number of completion columns that are not all padding.

    `lengths` has the completion tokens of each row.
    """
    return int(prompt_mask.any(dim=0).int().argmax()), max(*lengths, 1)


def without_padding(
    batch: dict[str, Any], used_range: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Cut off columns that are padding in every row.

    They are on the left of prompts and on the right of completions. `used_range` has the `used_columns`
    of these rows, where they are known.
    """
    prompt_width = batch["prompt_mask"].size(1)
    completion_width = batch["completion_mask"].size(1)
    first_prompt_column, completion_columns = used_range or used_columns(
        batch["prompt_mask"], batch["completion_mask"].sum(dim=1).tolist()
    )
    if first_prompt_column == 0 and completion_columns == completion_width:
        return batch
    slices = {
        "prompt": slice(first_prompt_column, None),
        "both": slice(first_prompt_column, prompt_width + completion_columns),
        "answer": slice(completion_columns),
    }
    trimmed: dict[str, Any] = {}
    for name, value in batch.items():
        axis = _token_axis(
            name, value=value, prompt_width=prompt_width, completion_width=completion_width
        )
        trimmed[name] = value[:, slices[axis]] if axis else value
    return trimmed


def _token_axis(name: str, value: object, prompt_width: int, completion_width: int) -> str:
    """Which token axis a column has: 'prompt', 'answer' (the completion), 'both' or ''.

    `prompt_width` and `completion_width` are the widths of the batch.
    """
    if not isinstance(value, Tensor) or value.dim() < 2 or name in _OWN_WIDTH:
        return ""
    if name in ("prompt_ids", "prompt_mask"):
        return "prompt"
    return {completion_width: "answer", prompt_width + completion_width: "both"}.get(
        value.size(1), ""
    )


def concat_rows(batch: Batch, appended: Batch, pad_id: int) -> Batch:
    """The rows of both batches, padded to the wider of the two.

    Values without rows are taken from `batch`.
    """
    batches = (batch, appended)
    prompt_width = max(part["prompt_ids"].size(1) for part in batches)
    completion_width = max(part["completion_ids"].size(1) for part in batches)
    sequence_ratio = all(_has_one_ratio_a_rollout(part) for part in batches)
    splits = []
    for part in batches:
        widened = _widened(
            part,
            new_prompt_width=prompt_width,
            new_completion_width=completion_width,
            pad_id=pad_id,
            sequence_ratio=sequence_ratio,
        )
        splits.append(_split_images(widened))
    first_split, second_split = splits
    joined: _SplitBatch = {}
    for name, value in first_split.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            joined[name] = torch.cat([value, second_split[name]])
        elif isinstance(value, list):
            joined[name] = value + second_split[name]
        else:
            joined[name] = value
    return _join_images(joined)


def chosen_groups(
    batch: Batch, further_batch: Batch, group_numbers: Sequence[int], group_size: int, pad_id: int
) -> Batch:
    """The chosen groups of both batches, padded to the wider of the two.

    `num_items_in_batch` is left unchanged, because it is a sum over all ranks.

    Args:
        batch: its groups are numbered first.
        further_batch: its groups are numbered on from there.
        group_numbers: numbers of the chosen groups.
        group_size: rows of a group.
        pad_id: fills columns of token ids.
    """
    rows = [group * group_size + member for group in group_numbers for member in range(group_size)]
    return RowReader(concat_rows(batch, further_batch, pad_id)).take(rows)


def _has_one_ratio_a_rollout(batch: Batch) -> bool:
    """Whether the importance ratio to the engine is one number per rollout."""
    ratio = batch.get("importance_sampling_ratio")
    return ratio is None or ratio.size(1) == 1


def _widened(
    batch: Batch,
    new_prompt_width: int,
    new_completion_width: int,
    pad_id: int,
    sequence_ratio: bool,
) -> Batch:
    """Pad prompts on the left, completions on the right, and columns of both on both sides.

    `new_prompt_width` and `new_completion_width` are the new widths. `sequence_ratio` says whether the importance ratio
    to the engine is one number per rollout, which has no token axis.
    """
    prompt_width = batch["prompt_ids"].size(1)
    completion_width = batch["completion_ids"].size(1)
    on_left = new_prompt_width - prompt_width
    on_right = new_completion_width - completion_width
    padding_by_axis = {"prompt": (on_left, 0), "both": (on_left, on_right), "answer": (0, on_right)}
    widened = dict[str, Any]()
    for name, value in dict[str, Any](batch).items():
        fill = pad_id if name.endswith("_ids") and name != "mm_token_type_ids" else 0
        if name == "importance_sampling_ratio":  # TRL's VESPO takes its logarithm without a mask
            widened[name] = value if sequence_ratio else pad(value, (0, on_right), value=1)
        else:
            axis = _token_axis(
                name, value, prompt_width=prompt_width, completion_width=completion_width
            )
            widened[name] = pad(value, padding_by_axis[axis], value=fill) if axis else value
    return cast("Batch", widened)
