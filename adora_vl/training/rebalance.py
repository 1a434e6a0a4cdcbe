"""Moves units between ranks, so that no rank waits for another: neither for more units nor for longer ones.

With ZeRO-3 the ranks go through their micro-batches in lockstep, since each layer's weights are gathered from all of
them. A micro-batch takes as long as on the rank with the most tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed

from adora_vl.dedup.image_store import ImageBanks
from adora_vl.training.batch_rows import concat_rows, pack_rows, split_images, take_rows, unpack_rows
from adora_vl.types import Batch

_CPU = torch.device("cpu")


# With at least this share of the longest unit's tokens one may be learned from beside it (`benchmarks.lockstep`).
ALIKE = 0.8


class Move(NamedTuple):
    """A unit, by its number on the rank that gives it away."""

    source: int
    unit: int
    target: int


def plan_moves(tokens: Sequence[Mapping[int, int]], least: int = 1) -> list[Move]:
    """The units that move, so that ranks find similar ones at the same time, the longest first; the same on all ranks.

    Units are dealt, the longest first, in rounds of one for each rank: its own where that is about as long as the
    longest that is left; else another rank's, if there is such a one.

    `tokens`: on each rank, of each unit that is to be learned from. `least`: units that every rank processes anyway.
    """
    left = [sorted(((count, -number) for number, count in own.items()), reverse=True) for own in tokens]
    rounds = max(least, math.ceil(sum(map(len, left)) / len(left)))
    moves = []
    for further in range(rounds - 1, -1, -1):  # rounds after this one
        near = ALIKE * max((own[0][0] for own in left if own), default=0)
        taking = []
        for rank, own in enumerate(left):
            if own and own[0][0] >= near:
                own.pop(0)
            else:
                taking.append(rank)
        for rank in sorted(taking, key=lambda rank: (not left[rank], left[rank][:1])):
            source = max(range(len(left)), key=lambda other: (left[other][:1], -other))
            if not left[rank]:  # gets what another rank could not learn from in the rounds that are left
                source = max(range(len(left)), key=lambda other: (len(left[other]), -other))
                wanted = len(left[source]) > further
            else:
                wanted = left[source][0][0] >= near
            if wanted:
                moves.append(Move(source, -left[source].pop(0)[1], rank))
            elif left[rank]:
                left[rank].pop(0)
    return moves


class RowExchange:
    """Sends packed rows from rank to rank through CPU memory, so that no GPU has to hold them twice."""

    def __init__(self) -> None:
        self._group: Any = None

    def exchange(self, plan: Sequence[Move], sending: Sequence[Any], rank: int) -> list[Any]:
        """Returns what arrives on this rank. `sending`: the packed rows of this rank, in the order of the plan.

        All ranks go through the plan together.
        """
        if self._group is None:
            self._group = distributed.new_group(backend="gloo")
        waiting, arrived = list(sending), []
        for source, _, target in plan:
            if source == rank:
                distributed.send_object_list([waiting.pop(0)], dst=target, group=self._group, device=_CPU)
            elif target == rank:
                box = [None]
                distributed.recv_object_list(box, src=source, group=self._group, device=_CPU)
                arrived += box
        return arrived


def rebalanced(
    batch: Batch, live: list[bool], unit: int, plan: list[Move], rank: int, banks: ImageBanks, pad_id: int,
    exchange: Callable[[Sequence[Move], Sequence[Any], int], list[Any]],
) -> tuple[Batch, list[bool]]:  # fmt: skip
    """Carry out the `plan` of `plan_moves`; returns the new batch of this rank, and for each of its units whether it
    learns from it. All ranks call this together. Units that are given away stay in the batch with advantages of 0.

    `live`: for each unit of `unit` rows, whether it is to be learned from. `banks`: the images that the rows refer to.
    `exchange`: `RowExchange.exchange`.
    """
    live, split = list(live), split_images(batch)
    advantages, sending = batch["advantages"].clone(), []
    for source, number, _ in plan:
        if source == rank:
            live[number] = False
            rows = range(number * unit, (number + 1) * unit)
            sending.append(pack_rows(take_rows(split, rows), banks))
            advantages[rows.start : rows.stop] = 0
    batch = {**batch, "advantages": advantages}
    for packed in exchange(plan, sending, rank):
        batch = concat_rows(batch, unpack_rows(packed, banks, advantages.device), pad_id)
        live.append(True)
    banks.more()  # all ranks must take part in the same vision passes, which gather sharded weights
    return batch, live


def movable(batch: Mapping[str, Any]) -> tuple[str, ...]:
    """The columns' names, the same on all ranks. Empty where each row has pixels of its own, too large to send."""
    pixels = batch.get("pixel_values")
    return () if pixels is not None and pixels.is_floating_point() else tuple(sorted(batch))
