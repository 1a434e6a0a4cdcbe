"""Divides a generation into micro-batches.

Groups stay together, groups without signal are left out, and padding is cut.

A unit is the rows that stay together: a group, or as large a part of it as divides a micro-batch
(`BatchLayout.unit`). Units move between ranks, so that no rank waits for another: with ZeRO-3 the
ranks go through their micro-batches in lockstep, and each takes as long as on the rank with the
most tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor, distributed

from adora_vl.config.batch_plan import BatchLayout
from adora_vl.config.losses import has_entropy_bonus
from adora_vl.packing.image_store import ImageBanks
from adora_vl.training.batch_rows import (
    RowReader,
    concat_rows,
    unpack_rows,
    used_columns,
    without_padding,
)
from adora_vl.training.micro_batch_room import MicroBatchRoom, unit_sizes
from adora_vl.types import Batch, HostRows, StepContext, loss_mask
from adora_vl.utils.seeding import generator_at

# Losses that take a mean over the rows of a micro-batch. With fewer rows each row would weigh more.
MEAN_OVER_ROWS = frozenset({"grpo", "dr_grpo", "sapo", "luspo"})
# Losses that divide by the tokens of the generation, which TRL is given with each micro-batch.
MEAN_OVER_TOKENS = frozenset({"dapo", "cispo", "vespo"})


# divides the places of units into micro-batches
Cut = Callable[[Sequence[int]], Sequence[Sequence[int]]]


def signal_of_units(advantages: Tensor, rows_per_unit: int) -> Tensor:
    """Return whether any advantage of each of U units is not 0, bool, (U,).

    The advantages are (B,) or (B, C); a unit is `rows_per_unit` neighbouring rows.
    """
    values_per_unit = rows_per_unit * advantages[0].numel()
    return advantages.bool().view(-1, values_per_unit).any(dim=1)


def live_units(advantages: Tensor, rows_per_unit: int) -> list[bool]:
    """Whether each unit has signal, on the host; the arguments are those of `signal_of_units`."""
    has_signal: list[bool] = signal_of_units(advantages, rows_per_unit).tolist()
    return has_signal


def choose_units(
    has_signal: Sequence[bool], min_units: int, tokens_by_unit: Sequence[int]
) -> list[int]:
    """Numbers of the units that are learned from, in ascending order.

    They are all live units, filled up to `min_units` with the shortest of the others, so that all ranks
    have equally many. `tokens_by_unit` has the tokens of each unit.
    """
    units_without_signal = sorted(
        (unit for unit, unit_has_signal in enumerate(has_signal) if not unit_has_signal),
        key=tokens_by_unit.__getitem__,
    )
    units_with_signal = {unit for unit, unit_has_signal in enumerate(has_signal) if unit_has_signal}
    missing_units = max(0, min_units - len(units_with_signal))
    return sorted(units_with_signal | set(units_without_signal[:missing_units]))


def split_evenly(units: Sequence[int], micro_batches: int) -> list[list[int]]:
    """Distribute the units over micro-batches as evenly as possible.

    Neighbours share a micro-batch, and no micro-batch stays empty.
    """
    assert len(units) >= micro_batches, f"{len(units)} units for {micro_batches} micro-batches"
    return [chunk.tolist() for chunk in torch.tensor(units).tensor_split(micro_batches)]


def plan_micro_batches(
    units: Sequence[int], optimizer_steps: int, micro_batches: int, cut: Cut
) -> list[list[int]]:
    """Return the units of every micro-batch of a generation.

    Each optimizer step uses as few of its micro-batches as possible. The others are empty and come
    first. The last one triggers the reduction of gradients, so it must not be empty.

    Args:
        units: numbers of the units to learn from, in their order.
        optimizer_steps: steps that the generation is divided among.
        micro_batches: of the generation in each of these steps.
        cut: divides the places of a step's units in this order into micro-batches.
    """
    plan: list[list[int]] = []
    for step_positions in split_evenly(range(len(units)), optimizer_steps):
        position_lists = cut(step_positions)
        assert len(position_lists) <= micro_batches, (
            f"{len(position_lists)} micro-batches for {micro_batches}"
        )
        plan += [[] for _ in range(micro_batches - len(position_lists))]
        plan += [[units[position] for position in positions] for positions in position_lists]
    return plan


def cut_by_count(
    positions: Sequence[int], micro_batches: int, max_units: int
) -> Sequence[Sequence[int]]:
    """Divide places into as few micro-batches of at most `max_units` as possible."""
    micro_batch_count = min(micro_batches, math.ceil(len(positions) / max_units))
    return split_evenly(positions, micro_batch_count)


def tokens_of_units(
    prompts_B: Tensor, answers_B: Tensor, rows_per_unit: int, *, shares_prompt: bool
) -> list[int]:
    """How many tokens the policy's pass has for each unit.

    Args:
        prompts_B: tokens of each row's prompt.
        answers_B: tokens of each row's completion.
        rows_per_unit: rows of a unit.
        shares_prompt: whether the prompt is computed once for a unit, not once for each row.
    """
    prompts_UR = prompts_B.view(-1, rows_per_unit)
    answers_UR = answers_B.view(-1, rows_per_unit)
    prompts_U = prompts_UR[:, 0] if shares_prompt else prompts_UR.sum(dim=1)
    counts: list[int] = (prompts_U + answers_UR.sum(dim=1)).tolist()
    return counts


def by_length(
    units: Sequence[int], tokens_by_unit: Sequence[int], optimizer_steps: int, seed: str
) -> list[int]:
    """Return the units in the order in which they are learned from.

    `split_evenly` divides them among `optimizer_steps`. Within a step the longest come first.
    So units of similar length meet: in a micro-batch, where they need little padding, and on
    different ranks at the same time, where none waits for another. A run that does not fit into
    memory fails at once. Each step should see units of all lengths, so it is drawn which go into
    which step; the `seed` is the same on all ranks.
    """
    longest_first = sorted(units, key=lambda unit: (-tokens_by_unit[unit], unit))
    if optimizer_steps == 1:
        return longest_first
    shuffled_positions = torch.randperm(len(units), generator=generator_at(seed)).tolist()
    ordered_units = []
    for positions_of_step in split_evenly(shuffled_positions, optimizer_steps):
        ordered_units += [longest_first[position] for position in sorted(positions_of_step)]
    return ordered_units


_CPU = torch.device("cpu")
# A unit with at least this share of the longest one's tokens may be learned from beside it. A higher
# share moves more units and saves little (`python -m benchmarks.lockstep`).
ALIKE = 0.8


class Move(NamedTuple):
    """A unit, by its number on the rank that gives it away."""

    source: int
    unit: int
    target: int


class SizedUnit(NamedTuple):
    """A unit of a rank.

    Units compare by their tokens; among equally long ones the lower number is the greater unit.
    """

    tokens: int
    negative_number: int

    @property
    def number(self) -> int:
        """The unit's number on its rank."""
        return -self.negative_number


def plan_moves(tokens_by_rank: Sequence[Mapping[int, int]], min_units: int = 1) -> list[Move]:
    """The units that move, so that ranks find similar ones at the same time.

    Ranks learn from their units in order of length, the longest first. So units are dealt in rounds
    of one for each rank, the longest first: the rank's own where that is about as long as the
    longest that remains anywhere; else another rank's, if there is such a one.

    Every rank computes the same plan.

    Args:
        tokens_by_rank: for each rank, the tokens of each unit that is to be learned from, by its number.
        min_units: units that every rank processes anyway.
    """
    remaining = [
        sorted((SizedUnit(count, -number) for number, count in units.items()), reverse=True)
        for units in tokens_by_rank
    ]
    ranks = range(len(remaining))
    round_count = max(min_units, math.ceil(sum(map(len, remaining)) / len(remaining)))
    moves = []
    for later_rounds in range(round_count - 1, -1, -1):
        min_tokens = ALIKE * max((units[0].tokens for units in remaining if units), default=0)
        receivers = []
        for rank, units in enumerate(remaining):
            if units and units[0].tokens >= min_tokens:
                units.pop(0)
            else:
                receivers.append(rank)
        # Ranks with the shortest units come first, ranks without any last.
        receivers.sort(key=lambda rank: (not remaining[rank], remaining[rank][:1]))
        for rank in receivers:
            if remaining[rank]:
                source = max(ranks, key=lambda giver: (remaining[giver][:1], -giver))
                gives_unit = remaining[source][0].tokens >= min_tokens
            else:
                # It gets what another rank could not learn from in the rounds after this one.
                source = max(ranks, key=lambda giver: (len(remaining[giver]), -giver))
                gives_unit = len(remaining[source]) > later_rounds
            if gives_unit:
                unit = remaining[source].pop(0)
                moves.append(Move(source, unit.number, rank))
            elif remaining[rank]:
                remaining[rank].pop(0)
    return moves


def rebalanced(
    batch: Batch,
    has_signal: list[bool],
    rows_per_unit: int,
    moves: list[Move],
    rank: int,
    banks: ImageBanks,
    pad_id: int,
    exchange: Callable[[Sequence[Move], Sequence[Any], int], list[Any]],
) -> tuple[Batch, list[bool]]:
    """Carry out a plan of `plan_moves`. Collective.

    Units that are given away stay in the batch with advantages of 0.

    Args:
        batch: of this rank.
        has_signal: for each of its units, whether it is to be learned from.
        rows_per_unit: rows of a unit.
        moves: the same on all ranks.
        rank: this one.
        banks: have the images that the rows refer to.
        pad_id: fills columns of token ids.
        exchange: `exchange(plan, packed_units, rank)` sends the packed units and returns those that
            arrive.

    Returns:
        The new batch of this rank, and for each of its units whether it is to be learned from.
    """
    has_signal = list(has_signal)
    reader = RowReader(batch)
    advantages = batch["advantages"].clone()
    packed_units = []
    for source, unit, _ in moves:
        if source == rank:
            has_signal[unit] = False
            rows = range(unit * rows_per_unit, (unit + 1) * rows_per_unit)
            packed_units.append(reader.pack(rows, banks))
            advantages[rows.start : rows.stop] = 0
    batch = {**batch, "advantages": advantages}
    for packed_unit in exchange(moves, packed_units, rank):
        batch = concat_rows(batch, unpack_rows(packed_unit, banks, advantages.device), pad_id)
        has_signal.append(True)
    banks.extend()  # all ranks must take part in the same vision passes, which gather sharded weights
    return batch, has_signal


def movable(batch: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the columns, which must be the same on all ranks for rows to move.

    Empty where each row has pixels of its own, because these are too large to send.
    """
    pixels = batch.get("pixel_values")
    return () if pixels is not None and pixels.is_floating_point() else tuple(sorted(batch))


class MicroBatcher:
    """Divides generations into micro-batches.

    Every rank calls every method, and all get equally many micro-batches with work.
    """

    def __init__(
        self,
        context: StepContext,
        banks: ImageBanks,
        *,
        every_row_counts: bool,
        room: MicroBatchRoom | None = None,
    ) -> None:
        """Build a batcher.

        Args:
            context: what every part of a training step is built from.
            banks: have the images that rows refer to.
            every_row_counts: whether a row adds to the loss even if its advantage is 0.
            room: says which units fit into a micro-batch together; None: as many as
                `per_device_train_batch_size` has.
        """
        self.accelerator = context.accelerator
        self.room = room
        self.log = context.log
        self.pad_id = context.pad_id
        self.layout = BatchLayout.of(context.config)
        self.config = context.config
        self.banks = banks
        self._every_row_counts = every_row_counts
        # TRL's entropy bonus is a mean over the tokens of a micro-batch. Where the loss itself is a
        # mean over tokens, both are taken over the micro-batch and weighed by its tokens.
        by_tokens = context.config.loss_type in MEAN_OVER_TOKENS
        self._by_tokens = by_tokens and has_entropy_bonus(context.config)
        # the processes that exchange units, made at the first exchange
        self._group: distributed.ProcessGroup | None = None

    def split(self, batch: Batch, key: str) -> list[Batch]:
        """Divide a generation into `steps_per_generation` micro-batches of whole units. Collective.

        A unit is the rows that have to stay in one micro-batch: a group, or a part of one. An empty
        micro-batch has no work. The `key` names the position in the run, the same on all ranks, and
        seeds which units go into which optimizer step.
        """
        layout = self.layout
        rows_per_unit = layout.rows_per_unit
        optimizer_steps = layout.steps_per_generation // layout.micro_batches_per_update
        # The share of the generation's slots that have rollouts: below 1 where rollouts are
        # unfinished.
        filled_share = len(batch["advantages"]) / (
            layout.micro_batch_rows * layout.steps_per_generation
        )
        unit_count = len(batch["advantages"]) // rows_per_unit
        skips_dead = self.config.uses("skip_zero_signal") and not self._every_row_counts
        has_signal = [True] * unit_count
        if skips_dead:
            has_signal = live_units(batch["advantages"], rows_per_unit)
        if self.config.uses("spread_signal") and self.accelerator.num_processes > 1:
            batch, has_signal = self._rebalance(batch, has_signal)
        # Collective: all ranks learn from as many units as the one with the most live ones.
        most_live = max(gather_object([sum(has_signal)]))
        columns = dict[str, Any](batch)
        host = HostRows.of(
            batch["prompt_ids"], batch["prompt_mask"], batch["completion_mask"], columns
        )
        tokens_by_unit = self._tokens(
            host.prompt_mask.sum(dim=1), torch.tensor(host.completion_lengths)
        )
        # Every optimizer step needs at least one unit: an empty one would reduce no gradients.
        units = choose_units(has_signal, max(most_live, optimizer_steps), tokens_by_unit)
        self.log("adora/skipped_groups", 1 - len(units) / unit_count)
        units = by_length(
            units,
            tokens_by_unit=tokens_by_unit,
            optimizer_steps=optimizer_steps,
            seed=f"micro-batches/{self.config.seed}/{key}",
        )
        reader = RowReader(batch)
        plan = plan_micro_batches(
            units,
            optimizer_steps=optimizer_steps,
            micro_batches=layout.micro_batches_per_update,
            cut=self._cut(host, units),
        )
        parts_with_work = [part for part in plan if part]
        self.log("adora/micro_batches", len(parts_with_work) / optimizer_steps)
        return [
            self._micro_batch(reader, host=host, units=part, filled_share=filled_share)
            for part in plan
        ]

    def _cut(self, host: HostRows, units: Sequence[int]) -> Cut:
        """What divides the units, in their order, into micro-batches. Collective.

        All ranks divide theirs at the same places.
        """
        layout = self.layout
        max_units = layout.micro_batch_rows // layout.rows_per_unit
        if self.room is None or not self.config.uses("fill_micro_batches"):
            return partial(
                cut_by_count, micro_batches=layout.micro_batches_per_update, max_units=max_units
            )
        size_by_unit = unit_sizes(
            host, layout.rows_per_unit, shares_vision=self.config.uses("share_vision")
        )
        sizes_by_rank = gather_object([[size_by_unit[unit] for unit in units]])
        return partial(self.room.cut, sizes_by_rank, max_units=max_units)

    def _tokens(self, prompts_B: Tensor, answers_B: Tensor) -> list[int]:
        """Tokens of each unit in the policy's pass, from those of each row."""
        return tokens_of_units(
            prompts_B,
            answers_B=answers_B,
            rows_per_unit=self.layout.rows_per_unit,
            shares_prompt=self.config.uses("share_prompt"),
        )

    def _micro_batch(
        self, reader: RowReader, host: HostRows, units: list[int], filled_share: float
    ) -> Batch:
        """The micro-batch of some units, without padding.

        `filled_share` is the share of the generation's slots that have rollouts.
        """
        if not units:
            return {}
        rows_per_unit = self.layout.rows_per_unit
        rows = [rows_per_unit * unit + row for unit in units for row in range(rows_per_unit)]
        used_column_range = used_columns(
            host.prompt_mask[rows], [host.completion_lengths[row] for row in rows]
        )
        micro = cast("Batch", without_padding(dict(reader.take(rows)), used_column_range))
        micro["host_rows"] = host.select(rows, used_column_range[0])
        micro["share_of_rows"] = len(rows) / self.layout.micro_batch_rows / filled_share
        if self._by_tokens:
            tokens = loss_mask(micro).sum()
            micro["share_of_tokens"] = self.share_of_tokens(micro, tokens)
            # With these TRL divides by the tokens of the micro-batch.
            micro["num_items_in_batch"] = tokens * self._micro_batches
        return micro

    @property
    def _micro_batches(self) -> int:
        """Micro-batches of a generation over all ranks, with those that stay empty."""
        return int(self.accelerator.num_processes) * self.layout.steps_per_generation

    def share_of_tokens(self, micro: Batch, tokens: Tensor) -> Tensor:
        """The tokens of a micro-batch over the mean tokens of its generation's, (), float64.

        `tokens` is how many of its tokens count, ().
        """
        share = micro.get("share_of_tokens")
        if share is not None:
            return share
        return tokens.double() * self._micro_batches / micro["num_items_in_batch"].clamp(min=1)

    def weight(self, micro: Batch) -> float | Tensor:
        """The factor by which the loss of a micro-batch is scaled.

        Stock TRL takes a mean over the rows of a micro-batch, or over its tokens, so the rows or
        tokens of a small one would weigh more.
        """
        if self._by_tokens:
            return micro.get("share_of_tokens", 1.0)
        if self.config.loss_type in MEAN_OVER_ROWS:
            return micro.get("share_of_rows", 1.0)
        return 1.0

    def scaled(self, loss: Tensor, micro: Batch) -> Tensor:
        """The loss of a micro-batch times its weight among the micro-batches of the step.

        Stock TRL takes a mean over the rows of a micro-batch, however many there are, so without
        this the rows of a smaller micro-batch would weigh more.
        """
        return loss * self.weight(micro)

    def _rebalance(self, batch: Batch, has_signal: list[bool]) -> tuple[Batch, list[bool]]:
        """Move units between ranks, if one of them would otherwise take longer than the others.

        Collective. Returns the new batch, and for each unit whether it is to be learned from.
        """
        token_counts = self._tokens(
            batch["prompt_mask"].sum(dim=1), batch["completion_mask"].sum(dim=1)
        )
        tokens_by_live_unit = {
            number: count for number, count in enumerate(token_counts) if has_signal[number]
        }
        gathered = gather_object([(tokens_by_live_unit, movable(batch))])
        tokens_by_rank = [counts_of_rank for counts_of_rank, _ in gathered]
        columns_by_rank = [columns_of_rank for _, columns_of_rank in gathered]
        # A rank without images lacks their columns; then nothing moves.
        is_movable = columns_by_rank[0] and all(
            names == columns_by_rank[0] for names in columns_by_rank
        )
        moves = (
            plan_moves(
                tokens_by_rank,
                self.layout.steps_per_generation // self.layout.micro_batches_per_update,
            )
            if is_movable
            else []
        )
        self.log("adora/moved_groups", len(moves) / max(sum(map(len, tokens_by_rank)), 1))
        if not moves:
            return batch, has_signal
        rank = self.accelerator.process_index
        rows_per_unit = self.layout.rows_per_unit
        return rebalanced(
            batch,
            has_signal=has_signal,
            rows_per_unit=rows_per_unit,
            moves=moves,
            rank=rank,
            banks=self.banks,
            pad_id=self.pad_id,
            exchange=self._exchange,
        )

    def _exchange(self, moves: Sequence[Move], packed_units: Sequence[Any], rank: int) -> list[Any]:
        """Send packed rows by the plan, and return those that arrive on this rank.

        All ranks go through the plan together. Rows travel through CPU memory, so that no GPU has
        to hold them twice. `packed_units` has those of this rank in the order of the plan.
        """
        if self._group is None:
            self._group = distributed.new_group(backend="gloo")
        unsent_units = list(packed_units)
        received_units = []
        for source, _, target in moves:
            if source == rank:
                distributed.send_object_list(
                    [unsent_units.pop(0)], dst=target, group=self._group, device=_CPU
                )
            elif target == rank:
                box = [None]
                distributed.recv_object_list(box, src=source, group=self._group, device=_CPU)
                received_units += box
        return received_units
