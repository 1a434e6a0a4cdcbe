"""What passes between the parts of a training step: a row, a batch, and the context that the parts
are built from.
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

    Reward functions get every column, also others.
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
    # (B,), bool: of a group that has something to teach. Until the groups are weighed, as `grades`
    signal: Tensor
    # (B, functions + 3): rewards as they count, length, whether it has no end, surprisal
    grades: Tensor
    share_of_rows: float  # rows of this micro-batch over per_device_train_batch_size
    share_of_tokens: Tensor  # (), its tokens over those of a micro-batch on average
    host: HostRows  # of a micro-batch; left out of checkpoints


@dataclass(frozen=True)
class HostRows:
    """What the host knows of B rows, so that a pass does not wait for the device to ask it.

    Tensors are on the CPU.
    """

    prompt_ids: Tensor  # (B, P)
    prompt_mask: Tensor  # (B, P)
    token_types: Tensor | None  # (B, P), 1 at the tokens of images
    lengths: list[int]  # completion tokens of each row
    # of each row: references (patches, 1) or pixels, and grids (images, 3)
    images: list[tuple[Tensor, Tensor] | None]
    own: Tensor | None = None  # (B, C), not 0 where the policy has sampled; None: everywhere
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
        """Copied from rows and from their `columns` of images and tools.

        Pixels that are no references stay there.
        """
        types, grids, counts = (
            columns.get(name) for name in ("mm_token_type_ids", "image_grid_thw", "num_images")
        )
        pixels = columns.get("pixel_values")
        images = list[tuple[Tensor, Tensor] | None]([None] * len(prompt_ids))
        own = columns.get("tool_mask")
        width = prompt_ids.size(1)
        answers = types[:, width:] if types is not None and own is not None else None
        types = types[:, :width] if types is not None else None
        references = pixels if pixels is not None and not pixels.is_floating_point() else None
        asked = (
            prompt_ids,
            prompt_mask,
            completion_mask.sum(dim=1),
            types,
            grids,
            references,
            own,
            answers,
        )
        ids, mask, lengths, types, grids, references, own, answers = _on_host(asked)
        answers = answers if answers is not None and answers.any() else None
        if pixels is not None and grids is not None and counts is not None:
            by_row = torch.split(grids, counts)
            sizes = [int(grid.prod(dim=-1).sum()) for grid in by_row]
            pixels = pixels if references is None else references
            images = list(zip(torch.split(pixels, sizes), by_row, strict=True))
        assert ids is not None and mask is not None and lengths is not None
        return cls(ids, mask, types, lengths.tolist(), images, own, answers)

    def images_of_prompt(self, row: int) -> int:
        """How many images the prompt of a row has: runs of their tokens, which never touch."""
        if self.token_types is None:
            return 0
        shows = (self.token_types[row] == 1).int()
        return int(shows[0] + (shows.diff() == 1).sum())

    def taken(self, rows: Sequence[int], first: int = 0) -> HostRows:
        """Of these rows, and of their prompts the columns from `first` on."""
        own = list(rows)
        types = self.token_types[own, first:] if self.token_types is not None else None
        ids = self.prompt_ids[own, first:]
        mask = self.prompt_mask[own, first:]
        sampled, answers = (
            None if part is None else part[own] for part in (self.own, self.answer_types)
        )
        lengths = [self.lengths[row] for row in own]
        images = [self.images[row] for row in own]
        return HostRows(
            prompt_ids=ids,
            prompt_mask=mask,
            token_types=types,
            lengths=lengths,
            images=images,
            own=sampled,
            answer_types=answers,
        )


def _on_host(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Tensors of whole numbers, copied together, so that the host waits once."""
    given = [tensor for tensor in tensors if tensor is not None]
    together = torch.cat([tensor.reshape(-1).long() for tensor in given]).cpu()
    copied = torch.split(together, [each.numel() for each in given])
    back = (copy.view(each.shape).to(each.dtype) for copy, each in zip(copied, given, strict=True))
    return [None if tensor is None else next(back) for tensor in tensors]


# the checkpoint of the present step, written by all ranks unless it is there
SaveNow = Callable[[], Path]
LogFigure = Callable[[str, float], None]  # name and value, for the next log; the same on every rank


class PolicyLogps(Protocol):
    """The policy without dropout, on a whole generation."""

    def __call__(self, batch: Batch, pixels: Tensor | None = None) -> Tensor:
        """Log-probabilities of the completions, (B, C), without gradients.

        `pixels`: in place of the batch's own.
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
    """The tokens of the loss on which the engine can be compared with the policy, (B, C): both have
    seen the same prompt, and the present weights have sampled them.
    """
    mask_BC = loss_mask(batch)
    if "stale_tokens" in batch:
        places_C = torch.arange(mask_BC.size(1), device=mask_BC.device)
        mask_BC = mask_BC * (places_C >= batch["stale_tokens"][:, None])
    return mask_BC
