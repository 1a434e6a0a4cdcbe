"""Moves units with signal from ranks that have many to ranks that have few, so that no rank waits for another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed
from trl.trainer.utils import split_pixel_values_by_grid

from adora_vl.batching.dynamic_sampling import joined
from adora_vl.batching.micro_batches import take_rows
from adora_vl.batching.parcels import packed_up, unpacked
from adora_vl.dedup.image_bank import ImageBanks

_CPU = torch.device("cpu")


def moves(counts: Sequence[int], least: int = 1) -> list[tuple[int, int]]:
    """The pairs (from rank, to rank) of all units that move. Every rank computes the same list.

    `counts`: number of units with signal on each rank. `least`: number of units that every rank processes anyway. A
    rank only gives away units above the mean (rounded up) or above `least`, whichever is larger.
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
    """Sends parcels from rank to rank through CPU memory, so that no GPU has to hold them twice."""

    def __init__(self) -> None:
        self._group: Any = None

    def carry(self, plan: Sequence[tuple[int, int]], sending: Sequence[Any], rank: int) -> list[Any]:
        """Returns what arrives on this rank. `sending`: the parcels of this rank, in the order of the plan.

        All ranks go through the plan together.
        """
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
    banks: ImageBanks,
    pad_id: int,
    carry: Callable[[Sequence[tuple[int, int]], Sequence[Any], int], list[Any]],
) -> tuple[dict[str, Any], list[bool]]:
    """Carry out the `plan`. All ranks call this together.

    Units that are given away stay in the batch with advantages of 0. Units that arrive are appended.

    Args:
        batch: the batch of this rank.
        live: for each unit, whether it has a signal.
        unit: rows per unit.
        plan: as from `moves`.
        rank: this rank.
        banks: the images that the rows refer to.
        pad_id: the token that pads.
        carry: `Carrier.carry`.

    Returns:
        The new batch, and for each of its units whether this rank learns from it.
    """
    live, split = list(live), split_pixel_values_by_grid(batch)
    advantages, sending = batch["advantages"].clone(), []
    for source, _ in plan:
        if source == rank:
            number = len(live) - 1 - live[::-1].index(True)
            live[number] = False
            rows = range(number * unit, (number + 1) * unit)
            sending.append(packed_up(take_rows(split, rows), banks))
            advantages[rows.start : rows.stop] = 0
    batch = {**batch, "advantages": advantages}
    for parcel in carry(plan, sending, rank):
        batch = joined(batch, unpacked(parcel, banks, advantages.device), pad_id)
        live.append(True)
    banks.more()  # all ranks must take part in the same vision passes, which gather sharded weights
    return batch, live


def movable(batch: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the columns, which must be the same on all ranks. Empty if each row has pixels of its own, because
    these are too large to send.
    """
    pixels = batch.get("pixel_values")
    return () if pixels is not None and pixels.is_floating_point() else tuple(sorted(batch))
