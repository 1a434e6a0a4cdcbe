"""Units with signal from ranks that have many of them to ranks that have few, so that none waits for another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from adora_vl.passes.bank import Banks
from adora_vl.passes.batches import take_rows
from adora_vl.passes.refill import joined


def even(counts: Sequence[int]) -> list[int]:
    """What each rank has afterwards: as even as it goes, the odd ones where the most are, so that fewest move."""
    share, more = divmod(sum(counts), len(counts))
    order = sorted(range(len(counts)), key=lambda rank: (-counts[rank], rank))
    return [share + (order.index(rank) < more) for rank in range(len(counts))]


def moves(counts: Sequence[int]) -> list[tuple[int, int]]:
    """(from, to) of each unit that moves; every rank computes the same."""
    targets = even(counts)
    giving = [rank for rank, (has, gets) in enumerate(zip(counts, targets, strict=True)) for _ in range(has - gets)]
    taking = [rank for rank, (has, gets) in enumerate(zip(counts, targets, strict=True)) for _ in range(gets - has)]
    return list(zip(giving, taking, strict=True))


def spread(
    batch: dict[str, Any],
    live: list[bool],
    unit: int,
    plan: list[tuple[int, int]],
    rank: int,
    banks: Banks,
    pad_id: int,
) -> tuple[dict[str, Any], list[bool]]:
    """Carry out the `plan` on every rank. Returned are the batch with what came at its end, and which units of it are
    to be learned from here. `unit`: rows of a unit; `live`: of each, before.
    """
    live = list(live)
    sending = []
    split = split_pixel_values_by_grid(batch)
    for source, target in plan:
        if source == rank:
            number = len(live) - 1 - live[::-1].index(True)
            live[number] = False
            rows = take_rows(split, range(number * unit, (number + 1) * unit))
            sending.append((target, _packed_up(rows, banks)))
    device = batch["prompt_ids"].device
    for target, parcel in gather_object(sending):
        if target == rank:
            batch = joined(batch, _unpacked(parcel, banks, device), pad_id)
            live.append(True)
    banks.more()  # sharded weights are gathered by all ranks at the same vision passes
    return batch, live


def _packed_up(rows: dict[str, Any], banks: Banks) -> dict[str, Any]:
    """On the CPU, without the rest of the storage that they are cut from; each image once, instead of references."""
    parcel = {name: _apart(value) for name, value in rows.items()}
    references = rows.get("pixel_values")
    if isinstance(references, list) and not references[0].is_floating_point():
        starts = [_starts(own, grid) for own, grid in zip(references, rows["image_grid_thw"], strict=True)]
        parcel["pixel_values"] = starts
        parcel["images"] = {start: _apart(banks.of(start).image(start)) for start in {s for row in starts for s in row}}
    return parcel


def _apart(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_apart(one) for one in value]
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _starts(references: Tensor, grids: Tensor) -> list[int]:
    patches = grids.prod(dim=-1)
    starts: list[int] = references[patches.cumsum(0) - patches, 0].tolist()
    return starts


def _unpacked(parcel: dict[str, Any], banks: Banks, device: torch.device) -> dict[str, Any]:
    rows = {name: _onto(value, device) for name, value in parcel.items() if name != "images"}
    bank = banks.more()
    if "images" in parcel and bank is not None:
        held = {
            start: bank.hold(key, patches.to(device), grid).to(device)
            for start, (key, patches, grid) in parcel["images"].items()
        }
        none = torch.zeros(0, 1, dtype=torch.long, device=device)
        rows["pixel_values"] = [torch.cat([none, *(held[start] for start in row)]) for row in parcel["pixel_values"]]
    whole: dict[str, Any] = unsplit_pixel_values_by_grid(rows)
    return whole


def _onto(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_onto(one, device) for one in value]
    return value.to(device) if isinstance(value, Tensor) else value
