"""The types that pass between the parts of a training step.

They are a row, a batch, what the host knows of a batch, and the context that the parts are built
from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypedDict

import torch
from accelerate import Accelerator
from PIL import Image
from torch import Tensor
from transformers import TrainerState

from adora_vl.config import AdoraGRPOConfig


class Row(TypedDict, total=False):
    """One example of the data set, as TRL's data loader gives it.

    A data set may have further columns; reward functions get all of them.
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

    B rollouts, P prompt and C completion tokens.
    """

    prompt_ids: Tensor  # (B, P), padded on the left
    prompt_mask: Tensor
    completion_ids: Tensor  # (B, C), padded on the right
    completion_mask: Tensor
    advantages: Tensor  # (B,), or (B, C) where tokens are weighed
    num_items_in_batch: Tensor  # (), tokens of the loss, of all ranks
    old_per_token_logps: Tensor  # (B, C), of the policy that the generation was sampled with
    ref_per_token_logps: Tensor  # (B, C), of the reference model
    # (B, C), of the engine: NaN where it was not asked, minus infinity where it gave no number
    sampling_per_token_logps: Tensor
    importance_sampling_ratio: Tensor  # (B, C) or (B, 1), policy over engine
    tool_mask: Tensor  # (B, C)
    mm_token_type_ids: Tensor  # (B, P + C), 1 at the tokens of images
    pixel_values: Tensor  # patches, or references to them (adora_vl.packing.image_store)
    image_grid_thw: Tensor  # (images, 3)
    num_images: list[int]  # (B,)
    # added by this package
    # (B,), tokens at the beginning that are not compared with the engine: sampled by earlier weights
    # (adora_rollouts.budget), or all of a rollout that saw other images (an extension)
    stale_tokens: Tensor
    segments: Tensor  # (B,), in how many parts the rollout was sampled
    age: Tensor  # (B,), generations since its group began
    rollout_number: Tensor  # (B,), adora_vl.record.recorder
    share_of_rows: float  # rows of this micro-batch over per_device_train_batch_size
    share_of_tokens: Tensor  # (), its tokens over those of a micro-batch on average
    host: HostRows  # of a micro-batch; left out of checkpoints


@dataclass(frozen=True)
class HostRows:
    """What the host knows of B rows, so that a pass does not wait for the device.

    Tensors are on the CPU. The rows have P prompt and C completion tokens.
    """

    prompt_ids: Tensor  # (B, P)
    prompt_mask: Tensor  # (B, P)
    token_types: Tensor | None  # (B, P), 1 at the tokens of images
    lengths: list[int]  # completion tokens of each row
    # of each row: references (patches, 1) or pixels, and grids (images, 3)
    images: list[tuple[Tensor, Tensor] | None]
    # (B, C), not 0 where the policy has sampled; None: everywhere
    policy_mask: Tensor | None = None
    # (B, C), as `token_types`; None where completions have no images
    answer_types: Tensor | None = None

    @classmethod
    def of(
        cls,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        completion_mask: Tensor,
        columns: Mapping[str, Any],
    ) -> HostRows:
        """Copy rows to the host.

        Args:
            prompt_ids: (B, P).
            prompt_mask: (B, P).
            completion_mask: (B, C).
            columns: the batch's columns of images and tools by their names. Pixels that are not
                references stay where they are.
        """
        types = columns.get("mm_token_type_ids")
        grids = columns.get("image_grid_thw")
        counts = columns.get("num_images")
        pixels: Any = columns.get("pixel_values")
        policy_mask = columns.get("tool_mask")
        width = prompt_ids.size(1)
        # Without tools no completion has images.
        has_answer_types = types is not None and policy_mask is not None
        answer_types = types[:, width:] if types is not None and has_answer_types else None
        types = types[:, :width] if types is not None else None
        references = pixels if pixels is not None and not pixels.is_floating_point() else None
        tensors = {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "lengths": completion_mask.sum(dim=1),
            "types": types,
            "grids": grids,
            "references": references,
            "policy_mask": policy_mask,
            "answer_types": answer_types,
        }
        host = _on_host(tensors)
        answer_types = host["answer_types"]
        if answer_types is not None and not answer_types.any():
            answer_types = None
        images = list[tuple[Tensor, Tensor] | None]([None] * len(prompt_ids))
        grids = host["grids"]
        if pixels is not None and grids is not None and counts is not None:
            grids_by_row = torch.split(grids, counts)
            sizes = [int(grid.prod(dim=-1).sum()) for grid in grids_by_row]
            if references is not None:
                pixels = host["references"]
            images = list(zip(torch.split(pixels, sizes), grids_by_row, strict=True))
        lengths = host["lengths"]
        ids = host["prompt_ids"]
        mask = host["prompt_mask"]
        assert ids is not None
        assert mask is not None
        assert lengths is not None
        return cls(
            prompt_ids=ids,
            prompt_mask=mask,
            token_types=host["types"],
            lengths=lengths.tolist(),
            images=images,
            policy_mask=host["policy_mask"],
            answer_types=answer_types,
        )

    def images_of_prompt(self, row: int) -> int:
        """How many images the prompt of a row has.

        They are counted as runs of image tokens, which never touch.
        """
        if self.token_types is None:
            return 0
        shows = (self.token_types[row] == 1).int()
        return int(shows[0] + (shows.diff() == 1).sum())

    def taken(self, rows: Sequence[int], first: int = 0) -> HostRows:
        """The facts of these rows, with the columns of their prompts from `first` on."""
        rows = list(rows)
        return HostRows(
            prompt_ids=self.prompt_ids[rows, first:],
            prompt_mask=self.prompt_mask[rows, first:],
            token_types=self.token_types[rows, first:] if self.token_types is not None else None,
            lengths=[self.lengths[row] for row in rows],
            images=[self.images[row] for row in rows],
            policy_mask=self.policy_mask[rows] if self.policy_mask is not None else None,
            answer_types=self.answer_types[rows] if self.answer_types is not None else None,
        )


def _on_host(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Copy tensors of whole numbers to the host, in one piece, so that the host waits once."""
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    joined = torch.cat([tensor.reshape(-1).long() for tensor in present.values()]).cpu()
    parts = torch.split(joined, [tensor.numel() for tensor in present.values()])
    on_host = dict[str, Tensor | None](dict.fromkeys(tensors))
    for (name, tensor), part in zip(present.items(), parts, strict=True):
        on_host[name] = part.view(tensor.shape).to(tensor.dtype)
    return on_host


# the checkpoint of the present step, written by all ranks unless it is there
SaveNow = Callable[[], Path]
LogFigure = Callable[[str, float], None]  # name and value, for the next log; the same on every rank


class PolicyLogps(Protocol):
    """The policy without dropout, on a whole generation."""

    def __call__(self, batch: Batch, pixels: Tensor | None = None) -> Tensor:
        """Log-probabilities of the completions, (B, C), without gradients.

        `pixels` is taken in place of the batch's own, if it is given.
        """


@dataclass(frozen=True)
class StepContext:
    """What the parts of a training step are built from."""

    accelerator: Accelerator
    config: AdoraGRPOConfig
    log: LogFigure
    pad_id: int
    state: Callable[[], TrainerState]  # the trainer's, which is made anew when the training begins
    policy_logps: PolicyLogps
    save_now: SaveNow


def loss_mask(batch: Batch) -> Tensor:
    """The completion tokens that the loss counts, (B, C)."""
    mask_BC = batch["completion_mask"]
    return mask_BC * batch["tool_mask"] if "tool_mask" in batch else mask_BC


def compared_mask(batch: Batch) -> Tensor:
    """The tokens of the loss on which the engine can be compared with the policy, (B, C).

    Both have seen the same prompt there, and the present weights have sampled the tokens.
    """
    mask_BC = loss_mask(batch)
    if "stale_tokens" in batch:
        columns_C = torch.arange(mask_BC.size(1), device=mask_BC.device)
        is_fresh_BC = columns_C >= batch["stale_tokens"][:, None]
        mask_BC = mask_BC * is_fresh_BC
    return mask_BC
