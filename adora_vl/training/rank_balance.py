"""Moves subgroups of rows between ranks, so that no rank waits for another.

With ZeRO-3 the ranks go through their micro-batches in lockstep, and each micro-batch takes as long
as on the rank with the most tokens. A subgroup is the rows that stay together: a group of rollouts,
or an equal part of one (`BatchLayout.rows_per_subgroup`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed

from adora_vl.packing.image_store import ImageBanks
from adora_vl.training.batch_rows import RowReader, concat_rows, unpack_rows
from adora_vl.types import Batch

_CPU = torch.device("cpu")
# Two subgroups may be learned from at the same time if the shorter one has at least this share of
# the tokens of the longer one. A higher share moves more subgroups and saves little
# (`python -m benchmarks.lockstep`).
MIN_LENGTH_RATIO = 0.9


class SubgroupMove(NamedTuple):
    """A subgroup that goes from one rank to another."""

    source: int  # the rank that gives it away
    subgroup: int  # its number on that rank
    target: int  # the rank that gets it


class SubgroupOnRank(NamedTuple):
    """A subgroup that a rank has."""

    number: int  # on this rank
    tokens: int

    @property
    def length_order(self) -> tuple[int, int]:
        """What subgroups are ordered by: tokens. Of equally long ones the lower number wins."""
        return self.tokens, -self.number


def plan_moves(
    tokens_by_rank: Sequence[Mapping[int, int]], min_subgroups: int = 1
) -> list[SubgroupMove]:
    """Plan which subgroups go to another rank, so that all ranks take about equally long.

    A subgroup is a group of rollouts or a part of one. The ranks go through their subgroups in
    lockstep, the longest first. So subgroups are dealt like cards: in each round every rank gets
    one, and all subgroups of a round are about equally long.

    For example, rank 0 has subgroups of 90 and 88 tokens, and rank 1 has subgroups of 50 and 49:

        before:  rank 0: 90 88    rank 1: 50 49
        after:   rank 0: 90 49    rank 1: 88 50

    The plan is that subgroup 1 of each rank goes to the other. Every rank computes the same plan.

    Args:
        tokens_by_rank: for each rank, the tokens of each subgroup that is to be learned from, by
            the subgroup's number.
        min_subgroups: how many subgroups every rank processes in any case.
    """
    undealt_by_rank = []
    for tokens_of_rank in tokens_by_rank:
        subgroups = [SubgroupOnRank(number, tokens) for number, tokens in tokens_of_rank.items()]
        subgroups.sort(key=lambda subgroup: subgroup.length_order, reverse=True)
        undealt_by_rank.append(subgroups)
    subgroup_count = sum(map(len, undealt_by_rank))
    rounds = max(min_subgroups, math.ceil(subgroup_count / len(undealt_by_rank)))
    moves = []
    for round_number in range(1, rounds + 1):
        moves += _deal_round(undealt_by_rank, remaining_rounds=rounds - round_number)
    return moves


def _deal_round(
    undealt_by_rank: list[list[SubgroupOnRank]], remaining_rounds: int
) -> list[SubgroupMove]:
    """Deal a subgroup to each rank, all about equally long, and return those that change the rank.

    The rules, in the order of the code:

    1. A rank keeps its longest subgroup if that is nearly as long as the longest of all ranks.
    2. A rank with shorter subgroups gets the longest one that is left on any rank, if that is
       better than its own (`_source_of_longer_subgroup`). Otherwise it keeps its own.
    3. A rank without subgroups gets one from the rank that has most, if that rank has more than it
       can process in the remaining rounds.

    For example, rank 0 has subgroups of 90 and 88 tokens, rank 1 has 50 and 49, and one round
    follows. Rank 0 keeps 90 by rule 1. Rank 1 gets 88 by rule 2, which is a move.

    Args:
        undealt_by_rank: for each rank its subgroups that were not dealt yet, the longest first.
            Dealt subgroups are removed from these lists.
        remaining_rounds: how many rounds follow this one.
    """
    longest = max((subgroups[0].tokens for subgroups in undealt_by_rank if subgroups), default=0)
    min_tokens = MIN_LENGTH_RATIO * longest
    ranks_with_short_subgroups = []
    ranks_without_subgroups = []
    for rank, subgroups in enumerate(undealt_by_rank):
        if not subgroups:
            ranks_without_subgroups.append(rank)
        elif subgroups[0].tokens < min_tokens:
            ranks_with_short_subgroups.append(rank)
        else:
            subgroups.pop(0)  # the rank keeps it
    moves = []
    # The rank that lacks most tokens chooses first.
    ranks_with_short_subgroups.sort(key=lambda rank: undealt_by_rank[rank][0].length_order)
    for rank in ranks_with_short_subgroups:
        if undealt_by_rank[rank]:
            source = _source_of_longer_subgroup(undealt_by_rank, rank, min_tokens)
            subgroup = undealt_by_rank[source].pop(0)
            if source != rank:
                moves.append(SubgroupMove(source=source, subgroup=subgroup.number, target=rank))
        else:
            # It has given all of its subgroups to ranks with shorter ones.
            ranks_without_subgroups.append(rank)
    for rank in ranks_without_subgroups:
        source = _rank_with_most_subgroups(undealt_by_rank)
        if len(undealt_by_rank[source]) > remaining_rounds:
            subgroup = undealt_by_rank[source].pop(0)
            moves.append(SubgroupMove(source=source, subgroup=subgroup.number, target=rank))
    return moves


def _source_of_longer_subgroup(
    undealt_by_rank: Sequence[Sequence[SubgroupOnRank]], rank: int, min_tokens: float
) -> int:
    """Return the rank from which `rank` takes its next subgroup, or `rank` if it takes its own.

    In each round every rank takes one subgroup. Ideally all of them are about equally long, since
    the ranks compute them together. If `rank` has only short subgroups left, it takes the longest
    one that is left on any rank. That one has to have at least `min_tokens`, or to be much longer
    than the longest subgroup of `rank`.

    Args:
        undealt_by_rank: for each rank its subgroups that no rank has taken yet, the longest first.
        rank: the rank with short subgroups.
        min_tokens: about as many tokens as the longest subgroup of this round has.
    """
    source = _rank_with_longest_subgroup(undealt_by_rank)
    longest_left = undealt_by_rank[source][0].tokens
    is_much_longer = undealt_by_rank[rank][0].tokens < MIN_LENGTH_RATIO * longest_left
    return source if longest_left >= min_tokens or is_much_longer else rank


def _rank_with_longest_subgroup(subgroups_by_rank: Sequence[Sequence[SubgroupOnRank]]) -> int:
    """Return the rank whose first subgroup is the longest; of two equal ones the lower rank."""
    ranks_with_subgroups = [rank for rank, subgroups in enumerate(subgroups_by_rank) if subgroups]
    return max(
        ranks_with_subgroups, key=lambda rank: (subgroups_by_rank[rank][0].length_order, -rank)
    )


def _rank_with_most_subgroups(subgroups_by_rank: Sequence[Sequence[SubgroupOnRank]]) -> int:
    """Return the rank that has most subgroups; of two equal ones the lower rank."""
    ranks = range(len(subgroups_by_rank))
    return max(ranks, key=lambda rank: (len(subgroups_by_rank[rank]), -rank))


def movable_columns(batch: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the names of a batch's columns, or None if its rows cannot move to another rank.

    Rows can move only between ranks whose batches have the same columns, so the caller compares the
    names. Rows with pixels, which are floats, are too large to be sent. Rows with patch numbers,
    which are integers, are not.
    """
    pixels = batch.get("pixel_values")
    if pixels is not None and pixels.is_floating_point():
        return None
    return tuple(sorted(batch))


class SubgroupExchange:
    """Sends subgroups between ranks. Collective: all ranks go through the same plan together.

    Subgroups travel through CPU memory, so that no GPU has to hold them twice.
    """

    def __init__(self) -> None:
        # Creating the process group is collective, so it is created at the first exchange.
        self._cpu_process_group: distributed.ProcessGroup | None = None

    def __call__(
        self, moves: Sequence[SubgroupMove], packed_subgroups: Sequence[Any], rank: int
    ) -> list[Any]:
        """Send the subgroups that this rank gives away, and return those that it receives.

        Args:
            moves: the plan, the same on all ranks.
            packed_subgroups: the subgroups that this rank gives away, in the order of the plan.
            rank: the number of this process.
        """
        if self._cpu_process_group is None:
            self._cpu_process_group = distributed.new_group(backend="gloo")
        unsent_subgroups = list(packed_subgroups)
        received_subgroups = []
        for move in moves:
            if move.source == rank:
                distributed.send_object_list(
                    [unsent_subgroups.pop(0)],
                    dst=move.target,
                    group=self._cpu_process_group,
                    device=_CPU,
                )
            elif move.target == rank:
                received_subgroup = [None]  # filled in place
                distributed.recv_object_list(
                    received_subgroup,
                    src=move.source,
                    group=self._cpu_process_group,
                    device=_CPU,
                )
                received_subgroups += received_subgroup
        return received_subgroups


def carry_out_moves(
    batch: Batch,
    has_signal: list[bool],
    rows_per_subgroup: int,
    moves: list[SubgroupMove],
    rank: int,
    image_banks: ImageBanks,
    pad_id: int,
    exchange: Callable[[Sequence[SubgroupMove], Sequence[Any], int], list[Any]],
) -> tuple[Batch, list[bool]]:
    """Move subgroups between ranks as planned, and return this rank's new batch. Collective.

    A subgroup is `rows_per_subgroup` neighbouring rows. Subgroups that arrive are appended.
    Subgroups that are given away stay in the batch with advantages of 0, and are not learned from
    here. For example, with two rows per subgroup, a rank that has subgroups 0 and 1 gives away
    subgroup 1 and gets another one. Its new batch has six rows: subgroup 0, subgroup 1 with
    advantages of 0, and the new subgroup. `has_signal` is then True, False, True.

    Args:
        batch: the batch of this rank.
        has_signal: for each of its subgroups, whether it is to be learned from.
        rows_per_subgroup: rows of a subgroup.
        moves: the plan of `plan_moves`, the same on all ranks.
        rank: the number of this process.
        image_banks: have the images that the rows refer to.
        pad_id: the token that fills shorter rows.
        exchange: sends the subgroups that this rank gives away, and returns the subgroups that
            arrive, as `SubgroupExchange` does. Subgroups are sent as copies on the CPU, with their
            images.

    Returns:
        The new batch of this rank, and for each of its subgroups whether it is to be learned from.
    """
    has_signal = list(has_signal)  # a copy: the caller's list stays as it is
    reader = RowReader(batch)
    advantages = batch["advantages"].clone()
    packed_subgroups = []
    for move in moves:
        if move.source == rank:
            has_signal[move.subgroup] = False
            first_row = move.subgroup * rows_per_subgroup
            rows = range(first_row, first_row + rows_per_subgroup)
            packed_subgroups.append(reader.pack(rows, image_banks))
            advantages[rows.start : rows.stop] = 0
    batch = {**batch, "advantages": advantages}
    for packed_subgroup in exchange(moves, packed_subgroups, rank):
        arrived_rows = unpack_rows(packed_subgroup, image_banks, advantages.device)
        batch = concat_rows(batch, arrived_rows, pad_id)
        has_signal.append(True)
    # Subgroups that arrive bring new images. A frozen vision tower computes their features in a
    # pass that is collective with sharded weights, so every rank marks its bank.
    image_banks.mark_new_images()
    return batch, has_signal
