"""The types that pass between the parts of a training step.

They are a row, a batch, a copy of its rows on the CPU, and the context that the parts are built
from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypedDict, cast

import torch
from accelerate import Accelerator
from PIL import Image
from torch import Tensor
from transformers import TrainerState

from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.batch_plan import BatchLayout


class Row(TypedDict, total=False):
    """One example of the data set, as TRL's data loader gives it.

    `id` names the row in messages, `problem` is the text of the problem without a prompt around it,
    `answer` the reference answer, and `choices` are those of a multiple-choice problem. A data set
    may have further columns; reward functions get all of them.
    """

    id: str
    prompt: list[dict[str, Any]]  # messages
    problem: str
    answer: str
    choices: list[str] | None
    images: list[Image.Image]
    image: Image.Image | None  # TRL's other column for one image


class Batch(TypedDict, total=False):
    """One rank's rollouts: a whole generation, or a micro-batch of it.

    There are B rollouts. Their prompts are padded to P tokens, their completions to C tokens.
    """

    prompt_ids: Tensor  # (B, P), padded on the left
    prompt_mask: Tensor  # (B, P), 0 at padding
    completion_ids: Tensor  # (B, C), padded on the right
    completion_mask: Tensor  # (B, C), 0 at padding
    advantages: Tensor  # (B,), or (B, C) where tokens are weighed
    num_items_in_batch: Tensor  # (), tokens of the loss, of all ranks
    old_per_token_logps: Tensor  # (B, C), by the policy before it learns from this generation
    ref_per_token_logps: Tensor  # (B, C), by the reference model
    # (B, C), by the engine: NaN where it was not asked, minus infinity where it gave no number
    sampling_per_token_logps: Tensor
    importance_sampling_ratio: Tensor  # (B, C) or (B, 1), policy over engine
    tool_mask: Tensor  # (B, C), 1 at tokens that the policy sampled, 0 at tokens of tools
    mm_token_type_ids: Tensor  # (B, P + C), 1 at the tokens of images
    pixel_values: Tensor  # patches, or their numbers (adora_vl.packing.image_store)
    image_grid_thw: Tensor  # (images, 3)
    num_images: list[int]  # (B,)
    # TRL has the columns above. This package adds those below.
    # (B,), how many tokens at the beginning of each completion are not compared with the engine:
    # those that earlier weights have sampled (adora_rollouts.budget). Where an extension changes
    # the images of a rollout, it is the length of the whole completion.
    stale_tokens: Tensor
    segments: Tensor  # (B,), in how many parts the rollout was sampled
    age: Tensor  # (B,), generations since its group began
    # (B,), the numbers of its rollouts in the record's tables (adora_vl.record.recorder)
    rollout_number: Tensor
    # Only a micro-batch has the columns below.
    share_of_rows: float  # its number of rows, divided by the average of all micro-batches
    share_of_tokens: Tensor  # (), its number of tokens, divided by the average
    loss_tokens: int  # the number of tokens that its loss counts, on all ranks together
    rows_on_cpu: RowsOnCpu  # checkpoints leave it out


class RowImages(NamedTuple):
    """The images of a row, or of its prompt or completion alone, one after the other."""

    pixels: Tensor  # patch numbers of an image bank (patches, 1), or pixels (patches, D)
    grids: Tensor  # (images, 3): each image's (temporal, height, width) in patches


@dataclass(frozen=True)
class RowsOnCpu:
    """What a forward pass has to know of B rows, copied to the CPU.

    A pass that reads it from here never waits for the GPU. The prompts are padded to P tokens, the
    completions to C tokens.
    """

    prompt_ids: Tensor  # (B, P)
    prompt_mask: Tensor  # (B, P)
    prompt_token_types: Tensor | None  # (B, P), 1 at the tokens of images
    completion_lengths: list[int]  # (B,), in tokens
    images: list[RowImages | None]  # of each row, those of its prompt and completion together
    # (B, C), 1 at tokens that the policy sampled, 0 at tokens of tools; None in a run without
    # tools, where the policy samples every token
    policy_mask: Tensor | None = None
    # (B, C), 1 at the tokens of images; None where no completion has images
    completion_token_types: Tensor | None = None

    @classmethod
    def of(
        cls,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        completion_mask: Tensor,
        columns: Mapping[str, Any],
    ) -> RowsOnCpu:
        """Copy what a pass has to know of a batch's rows to the CPU with a single wait for the GPU.

        Args:
            prompt_ids: (B, P).
            prompt_mask: (B, P).
            completion_mask: (B, C).
            columns: the batch's columns of images and tools by their names. Pixels are large and
                stay on their device. Patch numbers of an image bank are copied.
        """
        # Either numbers of patches in an image bank, which are copied, or pixels, which stay on
        # their device.
        pixels: Any = columns.get("pixel_values")
        has_patch_numbers = pixels is not None and not pixels.is_floating_point()
        prompt_types, completion_types = _split_token_types(columns, prompt_ids.size(1))
        tensors_to_copy = {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "lengths": completion_mask.sum(dim=1),
            "prompt_types": prompt_types,
            "completion_types": completion_types,
            "policy_mask": columns.get("tool_mask"),
            "grids": columns.get("image_grid_thw"),
            "patch_numbers": pixels if has_patch_numbers else None,
        }
        host_tensors = _copy_to_host(tensors_to_copy)
        completion_types = host_tensors["completion_types"]
        if completion_types is not None and not completion_types.any():
            completion_types = None  # no completion has an image
        return cls(
            prompt_ids=cast("Tensor", host_tensors["prompt_ids"]),
            prompt_mask=cast("Tensor", host_tensors["prompt_mask"]),
            prompt_token_types=host_tensors["prompt_types"],
            completion_lengths=cast("Tensor", host_tensors["lengths"]).tolist(),
            images=_images_of_rows(
                len(prompt_ids),
                pixels=host_tensors["patch_numbers"] if has_patch_numbers else pixels,
                grids=host_tensors["grids"],
                num_images=columns.get("num_images"),
            ),
            policy_mask=host_tensors["policy_mask"],
            completion_token_types=completion_types,
        )

    def loss_tokens(self, row: int) -> int:
        """Return how many tokens of a row's completion the loss counts.

        For example, a completion of 4 tokens with the policy mask (1, 0, 1, 1) has 3.
        """
        length = self.completion_lengths[row]
        if self.policy_mask is None:
            return length
        return int(self.policy_mask[row, :length].sum())

    def prompt_image_count(self, row: int) -> int:
        """Return how many images the prompt of a row has.

        An image is a run of image tokens. Runs never touch, since tokens that mark the beginning
        and the end of an image stand between them. For example, the token types (1, 1, 0, 1, 0)
        have 2 images.
        """
        if self.prompt_token_types is None:
            return 0
        is_image_token = (self.prompt_token_types[row] == 1).int()
        # A run begins at the first token, or where the difference to the token before is 1.
        begins_run = is_image_token.diff() == 1
        return int(is_image_token[0] + begins_run.sum())

    def select(self, rows: Sequence[int], first_column: int = 0) -> RowsOnCpu:
        """Return a `RowsOnCpu` of these rows alone.

        The columns of prompts before `first_column` are cut off. All of these rows have padding
        there.
        """
        rows = list(rows)
        types = self.prompt_token_types
        return RowsOnCpu(
            prompt_ids=self.prompt_ids[rows, first_column:],
            prompt_mask=self.prompt_mask[rows, first_column:],
            prompt_token_types=None if types is None else types[rows, first_column:],
            completion_lengths=[self.completion_lengths[row] for row in rows],
            images=[self.images[row] for row in rows],
            policy_mask=_rows_of(self.policy_mask, rows),
            completion_token_types=_rows_of(self.completion_token_types, rows),
        )


def _rows_of(column: Tensor | None, rows: list[int]) -> Tensor | None:
    """Return these rows of a column. Where the column is None, None is returned."""
    return None if column is None else column[rows]


def _split_token_types(
    columns: Mapping[str, Any], prompt_width: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return the token types of prompts, (B, P), and of completions, (B, C): 1 at image tokens.

    There are B rows, with prompts of P and completions of C tokens. For example, a row with the
    types (0, 1, 0, 0, 1) and a prompt of 3 tokens is split into (0, 1, 0) and (0, 1).
    """
    types = columns.get("mm_token_type_ids")
    if types is None:  # a batch without images
        return None, None
    prompt_types = types[:, :prompt_width]
    # Only a tool puts an image into a completion.
    if columns.get("tool_mask") is None:
        return prompt_types, None
    return prompt_types, types[:, prompt_width:]


def _images_of_rows(
    row_count: int, pixels: Tensor | None, grids: Tensor | None, num_images: list[int] | None
) -> list[RowImages | None]:
    """Divide the images of a batch among its B rows.

    Args:
        row_count: the number of rows, B.
        pixels: one entry for each patch of all images.
        grids: (images, 3), each image's patches in time, height and width.
        num_images: images of each row, (B,).

    Returns:
        The images of each row; None for each in a batch without images.
    """
    if pixels is None or grids is None or num_images is None:
        return [None] * row_count
    return list(split_images_by_row(pixels, grids, num_images))


def split_images_by_row(
    pixels: Tensor, grids: Tensor, image_counts: Sequence[int]
) -> list[RowImages]:
    """Split the pixels (patches, D) and grids (images, 3) of a batch by row.

    An image has as many patches as the product of its grid. For example, let the grids be
    (1, 2, 2), (1, 2, 4) and (1, 2, 2). With the image counts (1, 2) the first row gets 4 patches,
    and the second row 8 + 4.

    `image_counts`: the number of images of each row.
    """
    grids_by_row = torch.split(grids, list(image_counts))
    patches_by_row = [int(row_grids.prod(dim=-1).sum()) for row_grids in grids_by_row]
    pixels_by_row = torch.split(pixels, patches_by_row)
    return [
        RowImages(pixels=row_pixels, grids=row_grids)
        for row_pixels, row_grids in zip(pixels_by_row, grids_by_row, strict=True)
    ]


def image_fields(images_by_row: Sequence[RowImages]) -> dict[str, Tensor]:
    """Join the images of several rows, by the names of a model's arguments for them."""
    return {
        "pixel_values": torch.cat([images.pixels for images in images_by_row]),
        "image_grid_thw": torch.cat([images.grids for images in images_by_row]),
    }


def _copy_to_host(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Copy tensors of whole numbers to the CPU, by their names; None stays None.

    They are copied as one flat tensor, so that the CPU waits for the GPU once. For example, tensors
    of the shapes (2, 3) and (2,) are copied as 8 numbers, and get their shapes and dtypes back.
    """
    tensor_by_name = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    flat_tensors = [tensor.reshape(-1).long() for tensor in tensor_by_name.values()]
    copied_values = torch.cat(flat_tensors).cpu()
    flat_copies = torch.split(copied_values, [len(values) for values in flat_tensors])
    copy_by_name = dict[str, Tensor | None](dict.fromkeys(tensors))
    for (name, tensor), flat_copy in zip(tensor_by_name.items(), flat_copies, strict=True):
        copy_by_name[name] = flat_copy.view(tensor.shape).to(tensor.dtype)
    return copy_by_name


# Returns the checkpoint of the present step, which all ranks write together unless it is there.
# None where no training has begun.
SaveNow = Callable[[], Path | None]
# Gets name and value of a metric for the next log; the same on every rank.
LogMetric = Callable[[str, float], None]


class LogWeightedMetric(Protocol):
    """Gets a metric of some of a step's rollouts for the next log, the same on every rank."""

    def __call__(self, name: str, value: float, weight: float) -> None:
        """Add a value to the weighted average of this metric in the next log.

        `weight`: the number of tokens or rollouts that the value describes.
        """


class PolicyLogps(Protocol):
    """A function that runs the policy, without dropout, on a generation of B rollouts."""

    def __call__(self, batch: Batch, pixels: Tensor | None = None) -> Tensor:
        """Return the log-probabilities of the completions, (B, C), without gradients.

        The completions are padded to C tokens. `pixels`: used in place of the batch's own pixels;
        None for the batch's own.
        """


@dataclass(frozen=True)
class StepContext:
    """What the parts of a training step are built from."""

    accelerator: Accelerator
    config: AdoraGRPOConfig
    log: LogMetric
    pad_id: int
    # Returns the trainer's state. It is a function, since Transformers makes a new state when the
    # training begins.
    state: Callable[[], TrainerState]
    policy_logps: PolicyLogps
    save_now: SaveNow
    log_weighted: LogWeightedMetric

    @property
    def layout(self) -> BatchLayout:
        """The sizes of a generation and of its micro-batches."""
        return BatchLayout.of(self.config, processes=self.accelerator.num_processes)


def loss_mask(batch: Batch) -> Tensor:
    """Return 1 at the C completion tokens of B rollouts that the loss counts, else 0, (B, C).

    For example, the completion mask (1, 1, 1, 0) and the tool mask (1, 0, 1, 1) give (1, 0, 1, 0).
    """
    mask_BC = batch["completion_mask"]
    if "tool_mask" in batch:
        mask_BC = mask_BC * batch["tool_mask"]  # 0 at the tokens of tools
    return mask_BC


def engine_comparison_mask(batch: Batch) -> Tensor:
    """Return where the engine's log-probabilities can be compared with the policy's, (B, C).

    It is the mask of the loss, for B rollouts of C tokens, with 0 at the first `stale_tokens` of a
    rollout. Earlier weights have sampled these tokens, or the engine has seen other images than the
    policy. For example, the mask (1, 0, 1, 1) with 1 stale token gives (0, 0, 1, 1), and with 3
    stale tokens (0, 0, 0, 1).
    """
    mask_BC = loss_mask(batch)
    if "stale_tokens" in batch:
        columns_C = torch.arange(mask_BC.size(1), device=mask_BC.device)
        is_fresh_BC = columns_C >= batch["stale_tokens"][:, None]
        mask_BC = mask_BC * is_fresh_BC
    return mask_BC
