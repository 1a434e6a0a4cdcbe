"""Which rows of a generation batch share a micro-batch, and which are left out. Pure functions on row numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

# Losses that take a mean over the rows of a micro-batch. With fewer rows each row would weigh more.
MEAN_OVER_ROWS = frozenset({"grpo", "dr_grpo", "sapo", "luspo"})


def live_units(advantages: Tensor, unit: int) -> list[bool]:
    """For each unit, whether any of its advantages is not 0. `advantages`: (B,) or (B, C)."""
    return [bool(part.any()) for part in torch.split(advantages, unit)]


def chosen_units(live: Sequence[bool], wanted: int) -> list[int]:
    """All live units, filled up to `wanted` with the first of the others, in their original order."""
    dead = [unit for unit, alive in enumerate(live) if not alive]
    kept = {unit for unit, alive in enumerate(live) if alive}
    return sorted(kept | set(dead[: max(0, wanted - len(kept))]))


def dealt(units: Sequence[int], micro_batches: int) -> list[list[int]]:
    """Distribute the units as evenly as possible. Neighbours share a micro-batch, and none stays empty."""
    assert len(units) >= micro_batches, f"{len(units)} units for {micro_batches} micro-batches"
    share, more = divmod(len(units), micro_batches)
    sizes = [share + (number < more) for number in range(micro_batches)]
    bounds = [sum(sizes[:number]) for number in range(micro_batches + 1)]
    return [list(units[low:high]) for low, high in pairwise(bounds)]


def planned(units: Sequence[int], chunks: int, chunk: int, full: int) -> list[list[int]]:
    """The units of each of `chunks` x `chunk` micro-batches.

    A chunk is the set of micro-batches that one generation contributes to one optimizer step. A chunk uses as few
    micro-batches as possible, each of up to `full` units. The others are empty and come first. The last one triggers
    the reduction of gradients, so it must not be empty.
    """
    plan: list[list[int]] = []
    for part in dealt(units, chunks):
        needed = min(chunk, math.ceil(len(part) / full))
        plan += [[] for _ in range(chunk - needed)] + dealt(part, needed)
    return plan


def by_length(units: Sequence[int], lengths_B: Tensor, unit: int) -> list[int]:
    """The units by falling length. Units of similar length need little padding, and with the longest first a run that
    does not fit into memory fails at once.
    """
    longest = [int(part.max()) for part in torch.split(lengths_B, unit)]
    return sorted(units, key=lambda number: (-longest[number], number))


def take_rows(batch: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Select these rows from every column. Scalars are kept."""
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
    """Cut off columns that are padding in every row: on the left of prompts and on the right of completions."""
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
