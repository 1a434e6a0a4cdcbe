"""Units with signal from ranks that have many of them to ranks that have few, so that none waits for another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import recursively_apply, send_to_device
from torch import distributed
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from adora_vl.batching.dynamic_sampling import joined
from adora_vl.batching.micro_batches import take_rows
from adora_vl.dedup.image_bank import Banks, first_patches

_CPU = torch.device("cpu")


def moves(counts: Sequence[int], least: int = 1) -> list[tuple[int, int]]:
    """(from, to) of each unit that moves; every rank computes the same.

    `counts`: units with signal of each rank. `least`: as many a rank goes through anyway. No rank keeps more than it
    must; what is below that stays where it is.
    """
    most = max(least, math.ceil(sum(counts) / len(counts)))
    giving = [rank for rank, count in enumerate(counts) for _ in range(count - most)]
    after = list(counts)
    plan = []
    for source in giving:
        target = min(range(len(after)), key=lambda rank: (after[rank], rank))
        after[target] += 1
        plan.append((source, target))
    return plan


class Carrier:
    """Takes parcels from rank to rank over the CPU, so that no card has to hold them twice."""

    def __init__(self) -> None:
        self._group: Any = None

    def carry(self, plan: Sequence[tuple[int, int]], sending: Sequence[Any], rank: int) -> list[Any]:
        """What arrives here. `sending`: this rank's parcels, in the order of the plan, which all ranks go through."""
        if self._group is None:
            self._group = distributed.new_group(backend="gloo")
        waiting, arrived = list(sending), []
        for source, target in plan:
            if source == rank:
                distributed.send_object_list([waiting.pop(0)], dst=target, group=self._group, device=_CPU)
            elif target == rank:
                box = [None]
                distributed.recv_object_list(box, src=source, group=self._group, device=_CPU)
                arrived += box
        return arrived


def rebalanced(
    batch: dict[str, Any],
    live: list[bool],
    unit: int,
    plan: list[tuple[int, int]],
    rank: int,
    banks: Banks,
    pad_id: int,
    carry: Callable[[Sequence[tuple[int, int]], Sequence[Any], int], list[Any]],
) -> tuple[dict[str, Any], list[bool]]:
    """Carry out the `plan` on every rank. Returned are the batch with what came at its end, and which units of it are
    to be learned from here. `unit`: rows of a unit; `live`: of each, before. What is given away has advantages of 0.
    """
    live, split = list(live), split_pixel_values_by_grid(batch)
    advantages, sending = batch["advantages"].clone(), []
    for source, _ in plan:
        if source == rank:
            number = len(live) - 1 - live[::-1].index(True)
            live[number] = False
            rows = range(number * unit, (number + 1) * unit)
            sending.append(_packed_up(take_rows(split, rows), banks))
            advantages[rows.start : rows.stop] = 0
    batch = {**batch, "advantages": advantages}
    for parcel in carry(plan, sending, rank):
        batch = joined(batch, _unpacked(parcel, banks, advantages.device), pad_id)
        live.append(True)
    banks.more()  # sharded weights are gathered by all ranks at the same vision passes
    return batch, live


def movable(batch: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of what a rank's rows have, which have to be alike on all ranks; empty where each row has its own
    pixels, which are too much to send.
    """
    pixels = batch.get("pixel_values")
    return () if pixels is not None and pixels.is_floating_point() else tuple(sorted(batch))


def _packed_up(rows: dict[str, Any], banks: Banks) -> dict[str, Any]:
    """On the CPU, without the rest of the storage that they are cut from; each image once, instead of references."""
    parcel: dict[str, Any] = _apart({name: value for name, value in rows.items() if name != "pixel_values"})
    references = rows.get("pixel_values")
    if isinstance(references, list):
        starts = [first_patches(own, grid) for own, grid in zip(references, rows["image_grid_thw"], strict=True)]
        parcel["pixel_values"] = starts
        parcel["images"] = {start: _apart(banks.of(start).image(start)) for start in {s for row in starts for s in row}}
    return parcel


def _apart(values: Any) -> Any:
    return recursively_apply(lambda tensor: tensor.detach().cpu().clone(), values)


def _unpacked(parcel: dict[str, Any], banks: Banks, device: torch.device) -> dict[str, Any]:
    rows: dict[str, Any] = send_to_device({k: v for k, v in parcel.items() if k != "images"}, device)
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
