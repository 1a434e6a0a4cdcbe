"""Divides a generation into micro-batches.

Groups stay together, those without signal are left out, padding is cut.

A unit is the rows that stay together: a group, or as large a part of it as divides a micro-batch
(`BatchLayout.unit`). Units move between ranks, so that none waits for another: with ZeRO-3 the ranks go
through their micro-batches in lockstep, and one takes as long as on the rank with the most tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor, distributed

from adora_vl.config.batch_plan import BatchLayout
from adora_vl.config.losses import has_entropy_bonus
from adora_vl.packing.image_store import ImageBanks
from adora_vl.training.batch_rows import (
    SplitBatch,
    concat_rows,
    join_images,
    pack_rows,
    split_images,
    take_rows,
    unpack_rows,
    used_columns,
    without_padding,
)
from adora_vl.types import Batch, HostRows, StepContext, loss_mask
from adora_vl.utils.seeding import generator_at

# Losses that take a mean over the rows of a micro-batch. With fewer rows each row would weigh more.
MEAN_OVER_ROWS = frozenset({"grpo", "dr_grpo", "sapo", "luspo"})
# Losses that divide by the tokens of the generation, which TRL is given with each micro-batch.
MEAN_OVER_TOKENS = frozenset({"dapo", "cispo", "vespo"})


def live_units(advantages: Tensor, unit: int) -> list[bool]:
    """For each unit, whether any of its advantages is not 0. `advantages`: (B,) or (B, C)."""
    alive: list[bool] = advantages.bool().view(-1, unit * advantages[0].numel()).any(dim=1).tolist()
    return alive


def chosen_units(live: Sequence[bool], wanted: int, tokens: Sequence[int]) -> list[int]:
    """All live units, filled up to `wanted` with the shortest of the others, in their original
    order.
    """
    dead = sorted((unit for unit, alive in enumerate(live) if not alive), key=tokens.__getitem__)
    kept = {unit for unit, alive in enumerate(live) if alive}
    return sorted(kept | set(dead[: max(0, wanted - len(kept))]))


def split_evenly(units: Sequence[int], micro_batches: int) -> list[list[int]]:
    """Distribute the units as evenly as possible.

    Neighbours share a micro-batch, and none stays empty.
    """
    assert len(units) >= micro_batches, f"{len(units)} units for {micro_batches} micro-batches"
    return [part.tolist() for part in torch.tensor(units).tensor_split(micro_batches)]


def planned(units: Sequence[int], chunks: int, chunk: int, full: int) -> list[list[int]]:
    """The units of each of `chunks` x `chunk` micro-batches.

    A chunk is the set of micro-batches that one generation contributes to one optimizer step. A
    chunk uses as few micro-batches as possible, each of up to `full` units. The others are empty
    and come first. The last one triggers the reduction of gradients, so it must not be empty.
    """
    plan: list[list[int]] = []
    for part in split_evenly(units, chunks):
        needed = min(chunk, math.ceil(len(part) / full))
        plan += [[] for _ in range(chunk - needed)] + split_evenly(part, needed)
    return plan


def tokens_of_units(
    prompts_B: Tensor, answers_B: Tensor, unit: int, *, shares_prompt: bool
) -> list[int]:
    """How many tokens the policy's pass has for each unit, with its prompt once or once for each
    row.
    """
    prompts_UR = prompts_B.view(-1, unit)
    answers_UR = answers_B.view(-1, unit)
    own_U = prompts_UR[:, 0] if shares_prompt else prompts_UR.sum(dim=1)
    counts: list[int] = (own_U + answers_UR.sum(dim=1)).tolist()
    return counts


def by_length(units: Sequence[int], tokens: Sequence[int], chunks: int, place: str) -> list[int]:
    """The units in the order in which they are learned from, divided into `chunks` optimizer steps
    by `split_evenly`.

    Within a step the longest come first. So units of similar length meet, in a micro-batch, where
    they need little padding, and on ranks, where none waits for another; and a run that does not
    fit into memory fails at once. Each step should see units of all lengths: which go into which
    step is drawn by `place`, the same for all ranks.
    """
    longest_first = sorted(units, key=lambda number: (-tokens[number], number))
    if chunks == 1:
        return longest_first
    drawn = torch.randperm(len(units), generator=generator_at(place)).tolist()
    return [longest_first[rank] for part in split_evenly(drawn, chunks) for rank in sorted(part)]


_CPU = torch.device("cpu")
# With at least this share of the longest unit's tokens one may be learned from beside it
# (`benchmarks.lockstep`).
ALIKE = 0.8


class Move(NamedTuple):
    """A unit, by its number on the rank that gives it away."""

    source: int
    unit: int
    target: int


def plan_moves(tokens: Sequence[Mapping[int, int]], least: int = 1) -> list[Move]:
    """The units that move, so that ranks find similar ones at the same time, the longest first; the
    same on all ranks.

    Units are dealt, the longest first, in rounds of one for each rank: its own where that is about
    as long as the longest that is left; else another rank's, if there is such a one.

    `tokens`: on each rank, of each unit that is to be learned from. `least`: units that every rank
    processes anyway.
    """
    left = [
        sorted(((count, -number) for number, count in own.items()), reverse=True) for own in tokens
    ]
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
            if not left[
                rank
            ]:  # gets what another rank could not learn from in the rounds that are left
                source = max(range(len(left)), key=lambda other: (len(left[other]), -other))
                wanted = len(left[source]) > further
            else:
                wanted = left[source][0][0] >= near
            if wanted:
                moves.append(Move(source, -left[source].pop(0)[1], rank))
            elif left[rank]:
                left[rank].pop(0)
    return moves


def rebalanced(
    batch: Batch,
    live: list[bool],
    unit: int,
    plan: list[Move],
    rank: int,
    banks: ImageBanks,
    pad_id: int,
    exchange: Callable[[Sequence[Move], Sequence[Any], int], list[Any]],
) -> tuple[Batch, list[bool]]:
    """Carry out the `plan` of `plan_moves`; returns the new batch of this rank, and for each of its
    units whether it learns from it. All ranks call this together. Units that are given away stay in
    the batch with advantages of 0.

    `live`: for each unit of `unit` rows, whether it is to be learned from. `banks`: the images that
    the rows refer to. `exchange`: sends packed rows, by the plan.
    """
    live = list(live)
    split = split_images(batch)
    advantages = batch["advantages"].clone()
    sending = []
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
    """The columns' names, the same on all ranks.

    Empty where each row has pixels of its own, too large to send.
    """
    pixels = batch.get("pixel_values")
    return () if pixels is not None and pixels.is_floating_point() else tuple(sorted(batch))


class MicroBatcher:
    """Divides generations.

    All ranks call every method together and get equally many micro-batches with work.
    """

    def __init__(self, context: StepContext, banks: ImageBanks, *, every_row_counts: bool) -> None:
        """`every_row_counts`: whether a row adds to the loss even if its advantage is 0."""
        self.accelerator = context.accelerator
        self.log = context.log
        self.pad_id = context.pad_id
        self.shape = BatchLayout.of(context.config)
        self.config = context.config
        self.banks = banks
        self._every_row_counts = every_row_counts
        # TRL's entropy bonus is a mean over the tokens of a micro-batch. Where the loss itself is a
        # mean over tokens, both are taken over the micro-batch and weighed by its tokens.
        by_tokens = context.config.loss_type in MEAN_OVER_TOKENS
        self._by_tokens = by_tokens and has_entropy_bonus(context.config)
        self._group: Any = None  # of the exchange

    def split(self, batch: Batch, key: str) -> list[Batch]:
        """Divide the generation into `steps_per_generation` micro-batches of whole units.

        An empty one has no work.

        `key`: where the run stands, the same on all ranks.
        """
        shape = self.shape
        unit = self.shape.unit
        chunks = self.shape.steps // self.shape.chunk
        # less where rollouts are unfinished
        filled = len(batch["advantages"]) / (shape.rows * shape.steps)
        count = len(batch["advantages"]) // unit
        takes_all = not self.config.own("skip_zero_signal")
        live = (
            [True] * count
            if self._every_row_counts or takes_all
            else live_units(batch["advantages"], unit)
        )
        if self.config.own("spread_signal") and self.accelerator.num_processes > 1:
            batch, live = self._rebalance(batch, live)
        wanted = max(gather_object([sum(live)]))
        columns = dict[str, Any](batch)
        host = HostRows.of(
            batch["prompt_ids"], batch["prompt_mask"], batch["completion_mask"], columns
        )
        tokens = self._tokens(host.prompt_mask.sum(dim=1), torch.tensor(host.lengths))
        units = chosen_units(live, max(wanted, chunks), tokens)
        self.log("adora/skipped_groups", 1 - len(units) / count)
        units = by_length(
            units, tokens=tokens, chunks=chunks, place=f"micro-batches/{self.config.seed}/{key}"
        )
        split = split_images(batch)
        plan = planned(units, chunks=chunks, chunk=shape.chunk, full=shape.rows // unit)
        return [self._micro_batch(split, host=host, units=part, filled=filled) for part in plan]

    def _tokens(self, prompts_B: Tensor, answers_B: Tensor) -> list[int]:
        return tokens_of_units(
            prompts_B,
            answers_B=answers_B,
            unit=self.shape.unit,
            shares_prompt=self.config.own("share_prompt"),
        )

    def _micro_batch(
        self, split: SplitBatch, host: HostRows, units: list[int], filled: float
    ) -> Batch:
        """`filled`: the share of the generation's places that have rollouts."""
        if not units:
            return {}
        unit = self.shape.unit
        rows = [unit * number + row for number in units for row in range(unit)]
        used = used_columns(host.prompt_mask[rows], [host.lengths[row] for row in rows])
        micro = cast("Batch", without_padding(dict(join_images(take_rows(split, rows))), used))
        micro["host"] = host.taken(rows, used[0])
        micro["share_of_rows"] = len(rows) / self.shape.rows / filled
        if self._by_tokens:
            tokens = loss_mask(micro).sum()
            micro["share_of_tokens"] = self.share_of_tokens(micro, tokens)
            # With these TRL divides by the tokens of the micro-batch.
            micro["num_items_in_batch"] = tokens * self._places
        return micro

    @property
    def _places(self) -> int:
        """Micro-batches of a generation over all ranks, with those that stay empty."""
        return int(self.accelerator.num_processes) * self.shape.steps

    def share_of_tokens(self, micro: Batch, tokens: Tensor) -> Tensor:
        """The tokens of a micro-batch over those of a micro-batch of its generation on average,
        (), float64.

        `tokens`: how many of its tokens count, ().
        """
        known = micro.get("share_of_tokens")
        if known is not None:
            return known
        return tokens.double() * self._places / micro["num_items_in_batch"].clamp(min=1)

    def weight(self, micro: Batch) -> float | Tensor:
        """By what the loss of a micro-batch is scaled.

        Stock TRL takes a mean over its rows, or over its tokens, so those of a small one would
        weigh more.
        """
        if self._by_tokens:
            return micro.get("share_of_tokens", 1.0)
        if self.config.loss_type in MEAN_OVER_ROWS:
            return micro.get("share_of_rows", 1.0)
        return 1.0

    def scaled(self, loss: Tensor, micro: Batch) -> Tensor:
        """The loss of a micro-batch by its weight among those of the step."""
        return loss * self.weight(micro)

    def _rebalance(self, batch: Batch, live: list[bool]) -> tuple[Batch, list[bool]]:
        """Move units between ranks, if one of them would otherwise take longer than the others."""
        counts = self._tokens(batch["prompt_mask"].sum(dim=1), batch["completion_mask"].sum(dim=1))
        own = {number: tokens for number, tokens in enumerate(counts) if live[number]}
        tokens, names = zip(*gather_object([(own, movable(batch))]), strict=True)
        # a rank without images lacks their columns
        alike = names[0] and all(those == names[0] for those in names)
        plan = plan_moves(tokens, self.shape.steps // self.shape.chunk) if alike else []
        self.log("adora/moved_groups", len(plan) / max(sum(map(len, tokens)), 1))
        if not plan:
            return batch, live
        rank = self.accelerator.process_index
        unit = self.shape.unit
        return rebalanced(
            batch,
            live=live,
            unit=unit,
            plan=plan,
            rank=rank,
            banks=self.banks,
            pad_id=self.pad_id,
            exchange=self._exchange,
        )

    def _exchange(self, plan: Sequence[Move], sending: Sequence[Any], rank: int) -> list[Any]:
        """What arrives on this rank of packed rows that go through CPU memory, so that no GPU has
        to hold them twice. `sending`: those of this rank, in the order of the plan, which all ranks
        go through together.
        """
        if self._group is None:
            self._group = distributed.new_group(backend="gloo")
        waiting = list(sending)
        arrived = []
        for source, _, target in plan:
            if source == rank:
                distributed.send_object_list(
                    [waiting.pop(0)], dst=target, group=self._group, device=_CPU
                )
            elif target == rank:
                box = [None]
                distributed.recv_object_list(box, src=source, group=self._group, device=_CPU)
                arrived += box
        return arrived
