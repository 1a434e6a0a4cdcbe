"""Which rows of a generation batch share a micro-batch, and which are left out. Pure functions on row numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

# Losses that take a mean over the micro-batch's rows: with fewer rows each would weigh more.
MEAN_OVER_ROWS = frozenset({"grpo", "dr_grpo", "sapo", "luspo"})


def unit_size(rows: int, generations: int) -> int:
    """Rows that stay together: a whole group, or the part of it that `rows` a micro-batch allow."""
    return math.gcd(rows, generations)


def live_units(advantages: Tensor, unit: int) -> list[bool]:
    """Whether each unit has a row with an advantage other than 0. `advantages`: (B,) or (B, C)."""
    return [bool(part.any()) for part in torch.split(advantages, unit)]


def chosen_units(live: Sequence[bool], wanted: int) -> list[int]:
    """The live units and, up to `wanted`, the first of the others; in their order."""
    dead = [unit for unit, alive in enumerate(live) if not alive]
    kept = {unit for unit, alive in enumerate(live) if alive}
    return sorted(kept | set(dead[: max(0, wanted - len(kept))]))


def dealt(units: Sequence[int], micro_batches: int) -> list[list[int]]:
    """Neighbours into the same micro-batch, as evenly as they go. Every micro-batch gets one or more."""
    assert len(units) >= micro_batches, f"{len(units)} units for {micro_batches} micro-batches"
    share, more = divmod(len(units), micro_batches)
    sizes = [share + (number < more) for number in range(micro_batches)]
    bounds = [sum(sizes[:number]) for number in range(micro_batches + 1)]
    return [list(units[low:high]) for low, high in pairwise(bounds)]


def planned(units: Sequence[int], chunks: int, chunk: int, full: int) -> list[list[int]]:
    """The units of each of `chunks` x `chunk` micro-batches: few of `full` units rather than many of less.

    A chunk are those of one generation within one optimizer step. What a chunk does not need is empty and comes first,
    so that its last one, with which gradients are reduced, is not.
    """
    plan: list[list[int]] = []
    for part in dealt(units, chunks):
        needed = min(chunk, math.ceil(len(part) / full))
        plan += [[] for _ in range(chunk - needed)] + dealt(part, needed)
    return plan


def by_length(units: Sequence[int], lengths_B: Tensor, unit: int) -> list[int]:
    """Longest first: padding costs least among equals, and what runs out of memory does so at once."""
    longest = [int(part.max()) for part in torch.split(lengths_B, unit)]
    return sorted(units, key=lambda number: (-longest[number], number))


def take_rows(batch: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """The rows of everything that has rows; scalars stay."""
    taken: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, list):
            taken[name] = [value[row] for row in rows]
        elif isinstance(value, Tensor) and value.dim() > 0:
            taken[name] = value[torch.as_tensor(rows, device=value.device)]
        else:
            taken[name] = value
    return taken


def without_padding(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch without columns that are padding in every row: prompts on their left, completions on their right."""
    prompt_mask, completion_mask = batch["prompt_mask"], batch["completion_mask"]
    prompt, completion = prompt_mask.size(1), completion_mask.size(1)
    first = int(prompt_mask.any(dim=0).int().argmax())
    used = completion_mask.any(dim=0).nonzero()
    last = int(used[-1]) + 1 if len(used) else 1
    if first == 0 and last == completion:
        return batch
    trimmed: dict[str, Any] = {}
    for name, value in batch.items():
        if not isinstance(value, Tensor) or value.dim() < 2 or name in ("pixel_values", "image_grid_thw"):
            trimmed[name] = value
        elif name in ("prompt_ids", "prompt_mask"):
            trimmed[name] = value[:, first:]
        elif value.size(1) == prompt + completion:
            trimmed[name] = value[:, first : prompt + last]
        elif value.size(1) == completion:
            trimmed[name] = value[:, :last]
        else:
            trimmed[name] = value
    return trimmed
