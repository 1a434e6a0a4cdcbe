"""The batch that a training step passes on: TRL's dictionary, with the columns that this package reads or adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

from torch import Tensor

Row = dict[str, Any]  # one example of the data set: prompt, problem, answer, images, id, ...
LogFigure = Callable[[str, float], None]  # name and value, for the next log; the same on every rank


class Batch(TypedDict, total=False):
    """One rank's rollouts: a whole generation, or a micro-batch of it. B rollouts, P prompt and C completion tokens."""

    prompt_ids: Tensor  # (B, P), padded on the left
    prompt_mask: Tensor
    completion_ids: Tensor  # (B, C), padded on the right
    completion_mask: Tensor
    advantages: Tensor  # (B,)
    num_items_in_batch: Tensor  # tokens of the loss, of all ranks
    old_per_token_logps: Tensor  # (B, C), of the policy that the generation was sampled with
    sampling_per_token_logps: Tensor  # (B, C), of the engine
    importance_sampling_ratio: Tensor  # (B, C) or (B, 1), policy over engine
    tool_mask: Tensor
    pixel_values: Tensor  # patches, or references to them (adora_vl.dedup.image_bank)
    image_grid_thw: Tensor
    num_images: list[int]
    # added by this package
    distorted: Tensor  # (B,), bool: sampled on a distorted image (adora_vl.rollout.noise); only where some can be
    token_weights: Tensor  # (B, C), factors of the advantage (adora_vl.visual); only where tokens are weighed
    visual_dependency: Tensor  # (B,), nats per token, NaN without an image
    visual_scale: Tensor  # (B,), the factor of the rollout in its `token_weights`
    rollout_number: Tensor  # (B,), adora_vl.rollout_log.rollout_numbers
    share_of_rows: float  # rows of this micro-batch over per_device_train_batch_size


def loss_mask(batch: Batch) -> Tensor:
    """The completion tokens that the loss counts, (B, C)."""
    mask_BC = batch["completion_mask"]
    return mask_BC * batch["tool_mask"] if "tool_mask" in batch else mask_BC


def compared_mask(batch: Batch) -> Tensor:
    """The tokens of the loss on which engine and policy have seen the same prompt, (B, C)."""
    mask_BC = loss_mask(batch)
    return mask_BC * ~batch["distorted"][:, None] if "distorted" in batch else mask_BC
