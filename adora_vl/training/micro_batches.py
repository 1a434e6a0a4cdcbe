"""Divides a generation into micro-batches.

Groups stay together, groups without signal are left out, and padding is cut.

A subgroup is the rows that stay together: a group of rollouts, or as large a part of it as divides
a micro-batch (`BatchLayout.rows_per_subgroup`). Subgroups may move to another rank before they are
divided (`rank_balance.py`).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor

from adora_vl.advantage.grpo import LOSSES_WITH_TOKEN_MEAN
from adora_vl.config.losses import has_entropy_bonus
from adora_vl.packing.image_store import ImageBanks
from adora_vl.training.batch_rows import (
    RowReader,
    rows_of_groups,
    used_columns,
    without_padding,
)
from adora_vl.training.micro_batch_memory import MicroBatchMemory, SubgroupSize, subgroup_sizes
from adora_vl.training.rank_balance import (
    SubgroupExchange,
    SubgroupMove,
    carry_out_moves,
    movable_columns,
    plan_moves,
)
from adora_vl.types import Batch, RowsOnCpu, StepContext, loss_mask
from adora_vl.utils.seeding import generator_for_key

# Losses that take a mean over the rows of a micro-batch. With fewer rows each row would weigh more.
LOSSES_WITH_ROW_MEAN = frozenset({"grpo", "dr_grpo", "sapo", "luspo"})

# Splits consecutive positions in the training order into the micro-batches of a step.
SplitPositions = Callable[[Sequence[int]], Sequence[Sequence[int]]]


def signal_of_subgroups(advantages: Tensor, rows_per_subgroup: int) -> Tensor:
    """Return which of U subgroups have a signal, an advantage other than 0: bool, (U,).

    For example, the advantages 0 0 1 -1 0 0 with two rows per subgroup give False, True, False.

    Args:
        advantages: (B,), one for each of B rows, or (B, C) with one for each of C tokens.
        rows_per_subgroup: rows of a subgroup, which are neighbours: a group, or a part of one.
    """
    values_per_subgroup = rows_per_subgroup * advantages[0].numel()
    return advantages.bool().view(-1, values_per_subgroup).any(dim=1)


def choose_subgroups(
    has_signal: Sequence[bool], min_subgroups: int, tokens_by_subgroup: Sequence[int]
) -> list[int]:
    """Choose the subgroups to learn from, and return their numbers in ascending order.

    All subgroups with signal are chosen. If they are fewer than `min_subgroups`, the shortest
    subgroups without signal are added, so that all ranks have equally many. Subgroups are groups of
    rollouts or parts of them. For example, of four subgroups of 9, 7, 5, 8 tokens the first and the
    last have signal. With `min_subgroups` 3 the subgroups 0, 2, 3 are chosen.

    Args:
        has_signal: for each subgroup, whether it has an advantage other than 0.
        min_subgroups: the fewest subgroups to choose.
        tokens_by_subgroup: the tokens of each subgroup.
    """
    subgroups = range(len(has_signal))
    with_signal = [subgroup for subgroup in subgroups if has_signal[subgroup]]
    without_signal = [subgroup for subgroup in subgroups if not has_signal[subgroup]]
    without_signal.sort(key=lambda subgroup: tokens_by_subgroup[subgroup])
    missing_count = max(0, min_subgroups - len(with_signal))
    return sorted([*with_signal, *without_signal[:missing_count]])


def split_evenly(items: Sequence[int], part_count: int) -> list[list[int]]:
    """Split items into parts of neighbours, as evenly as possible.

    The first parts have one item more: 0 1 2 3 4 in two parts are [[0, 1, 2], [3, 4]]. No part is
    empty, so there have to be at least `part_count` items.
    """
    assert len(items) >= part_count, f"{len(items)} items for {part_count} parts"
    return [part.tolist() for part in torch.tensor(items).tensor_split(part_count)]


def plan_micro_batches(
    subgroup_count: int, optimizer_steps: int, micro_batches_per_step: int, split: SplitPositions
) -> list[Sequence[int]]:
    """Return the subgroups of every micro-batch, as their positions in the training order.

    Each optimizer step uses as few of its micro-batches as possible. The others are empty and come
    first: the last one triggers the reduction of gradients, so it must not be empty. For example, 5
    subgroups, 2 steps of 3 micro-batches, and a split after every 2 subgroups give

        step 1:  ()  [0, 1]  [2]
        step 2:  ()  ()  [3, 4]

    Args:
        subgroup_count: subgroups (groups, or parts of them) to learn from.
        optimizer_steps: steps that the generation is divided among.
        micro_batches_per_step: how many micro-batches of the generation belong to each step.
        split: divides the positions of a step into micro-batches.
    """
    plan: list[Sequence[int]] = []
    for positions_of_step in split_evenly(range(subgroup_count), optimizer_steps):
        positions_by_micro_batch = split(positions_of_step)
        empty_count = micro_batches_per_step - len(positions_by_micro_batch)
        assert empty_count >= 0, "a step has more micro-batches than it may have"
        plan += [()] * empty_count
        plan += positions_by_micro_batch
    return plan


def split_by_count(
    positions: Sequence[int], max_micro_batches: int, max_subgroups: int
) -> Sequence[Sequence[int]]:
    """Divide positions evenly into as few micro-batches as possible.

    Each gets at most `max_subgroups` subgroups, which are groups or parts of them. A position is
    the place of a subgroup in the training order. For example, the positions 0 to 4 with
    `max_subgroups` 2 become [[0, 1], [2, 3], [4]].

    If these would be more than `max_micro_batches`, there are `max_micro_batches`, with more
    subgroups each.
    """
    micro_batch_count = min(max_micro_batches, math.ceil(len(positions) / max_subgroups))
    return split_evenly(positions, micro_batch_count)


def training_order(
    subgroups: Sequence[int], tokens_by_subgroup: Sequence[int], optimizer_steps: int, seed: str
) -> list[int]:
    """Return the subgroups in the training order: the longest of each optimizer step come first.

    The subgroups of each step are drawn at random, so that each step sees subgroups of all lengths.
    For example, subgroups 0 to 3 with 10, 40, 30 and 20 tokens, in two steps, may become 1 0 and 2
    3: subgroup 1 is longer than 0, and 2 is longer than 3.

    The longest come first for three reasons. A micro-batch has subgroups of similar length, which
    need little padding. All ranks have subgroups of similar length at the same time, so that none
    waits for another. And a run that does not fit into memory fails at once.

    Args:
        subgroups: numbers of the subgroups, which are groups or parts of them.
        tokens_by_subgroup: the tokens of each subgroup.
        optimizer_steps: steps among which `split_evenly` divides the result.
        seed: names the draw; the same on all ranks.
    """
    longest_first = sorted(
        subgroups, key=lambda subgroup: (-tokens_by_subgroup[subgroup], subgroup)
    )
    if optimizer_steps == 1:
        return longest_first
    shuffled_positions = torch.randperm(len(subgroups), generator=generator_for_key(seed)).tolist()
    ordered_subgroups = []
    # The shuffled numbers are positions in `longest_first`. So sorting the positions of a step puts
    # its longest subgroups first.
    for positions_of_step in split_evenly(shuffled_positions, optimizer_steps):
        ordered_subgroups += [longest_first[position] for position in sorted(positions_of_step)]
    return ordered_subgroups


class MicroBatcher:
    """Divides generations into micro-batches.

    A subgroup is the rows that stay in one micro-batch: a group of rollouts, or as large a part of
    it as divides a micro-batch. It has signal if any of its advantages is not 0. The training order
    is a list of a rank's subgroups, of which consecutive ones become micro-batches. `rows_on_cpu`
    is a copy of a batch's masks and lengths, which can be read without waiting for the GPU.

    Every rank calls every method, and all get equally many micro-batches with work.
    """

    def __init__(
        self,
        context: StepContext,
        image_banks: ImageBanks,
        *,
        every_row_counts: bool,
        micro_batch_memory: MicroBatchMemory | None = None,
    ) -> None:
        """Build a batcher.

        Args:
            context: accelerator, config, log and state, which every part of a training step gets.
            image_banks: have the images that rows refer to.
            every_row_counts: whether a row adds to the loss even if its advantage is 0. It does so
                with a KL term.
            micro_batch_memory: says how many groups fit into the memory that is planned for a
                micro-batch. With None a micro-batch has `per_device_train_batch_size` rows.
        """
        self.accelerator = context.accelerator
        self.micro_batch_memory = micro_batch_memory
        self.log = context.log
        self.pad_id = context.pad_id
        self.layout = context.layout
        self.config = context.config
        self.image_banks = image_banks
        self._every_row_counts = every_row_counts
        # Whether a micro-batch is weighed by its tokens. TRL's entropy bonus is a mean over the
        # tokens of the micro-batch, and TRL adds it to the loss. So with a bonus the loss has to be
        # a mean over the tokens of the micro-batch too. Without one it is divided by the tokens of
        # the generation.
        is_token_mean = context.config.loss_type in LOSSES_WITH_TOKEN_MEAN
        self._weighs_by_tokens = is_token_mean and has_entropy_bonus(context.config)
        self._subgroup_exchange = SubgroupExchange()

    def split(self, batch: Batch, key: str) -> list[Batch]:
        """Divide a generation into `steps_per_generation` micro-batches. Collective.

        The rows of a subgroup, which is a group of rollouts or an equal part of one, stay in one
        micro-batch. Subgroups whose advantages are all 0 are left out where they add nothing to the
        loss. A micro-batch that gets no subgroup is {}, and the trainer skips it.

        Args:
            batch: this rank's rows of the generation, with their advantages.
            key: names the position in the run, such as `12/0`, the same on all ranks. It seeds
                which subgroups go into which optimizer step.
        """
        layout = self.layout
        row_count = len(batch["advantages"])
        # The rows of this generation divided by the rows of a full one. It is below 1 where
        # unfinished rollouts are left to later generations.
        filled_share = row_count / layout.rows_per_process
        has_signal = self._which_subgroups_have_signal(batch["advantages"])
        rows_on_cpu = _rows_on_cpu(batch)
        sizes = self._subgroup_sizes(rows_on_cpu)
        # Ranks exchange subgroups, so that each has about as many with signal as the others.
        moves = self._plan_moves(batch, has_signal, sizes)
        if moves:
            batch, has_signal = self._carry_out(moves, batch, has_signal)
            rows_on_cpu = _rows_on_cpu(batch)
            sizes = self._subgroup_sizes(rows_on_cpu)
        subgroups = self._subgroups_to_learn_from(sizes, has_signal, key)
        self.log(
            "adora/skipped_groups", 1 - len(subgroups) / (row_count // layout.rows_per_subgroup)
        )
        sizes_by_rank: list[list[SubgroupSize]] = gather_object(
            [[sizes[subgroup] for subgroup in subgroups]]
        )
        reader = RowReader(batch)
        micro_batches: list[Batch] = []
        for positions in self._plan(sizes_by_rank):
            micro_batch = Batch()
            if positions:
                micro_batch = self._micro_batch(
                    reader,
                    rows_on_cpu=rows_on_cpu,
                    subgroups=[subgroups[position] for position in positions],
                    filled_share=filled_share,
                )
                micro_batch["loss_tokens"] = sum(
                    sizes_of_rank[position].loss_tokens
                    for sizes_of_rank in sizes_by_rank
                    for position in positions
                )
            micro_batches.append(micro_batch)
        return micro_batches

    def _which_subgroups_have_signal(self, advantages: Tensor) -> list[bool]:
        """Return for each subgroup of this rank whether it has signal, an advantage other than 0.

        All count as having signal where subgroups without it are learned from too: where a KL term
        adds to the loss of every row, and in stock TRL's step.
        """
        rows_per_subgroup = self.layout.rows_per_subgroup
        if self._every_row_counts or not self.config.uses("skip_zero_signal"):
            return [True] * (len(advantages) // rows_per_subgroup)
        flags: list[bool] = signal_of_subgroups(advantages, rows_per_subgroup).tolist()
        return flags

    def _subgroups_to_learn_from(
        self, sizes: Sequence[SubgroupSize], has_signal: Sequence[bool], key: str
    ) -> list[int]:
        """Return the numbers of this rank's subgroups to learn from, in the training order.

        Subgroups with signal, an advantage other than 0, are chosen first. All ranks learn from
        equally many subgroups: as many as the rank that has most of them with signal. Collective.

        Args:
            sizes: the size of each subgroup of this rank.
            has_signal: for each subgroup, whether it has an advantage other than 0.
            key: names the position in the run, the same on all ranks.
        """
        optimizer_steps = self.layout.optimizer_steps_per_pass
        most_with_signal = max(gather_object([sum(has_signal)]))
        tokens_by_subgroup = self._tokens_of(sizes)
        # Every optimizer step needs at least one subgroup: an empty one would reduce no gradients.
        min_subgroups = max(most_with_signal, optimizer_steps)
        return training_order(
            choose_subgroups(has_signal, min_subgroups, tokens_by_subgroup),
            tokens_by_subgroup=tokens_by_subgroup,
            optimizer_steps=optimizer_steps,
            seed=f"micro-batches/{self.config.seed}/{key}",
        )

    def _subgroup_sizes(self, rows_on_cpu: RowsOnCpu) -> list[SubgroupSize]:
        """Return the sizes of all subgroups of this rank."""
        return subgroup_sizes(
            rows_on_cpu,
            self.layout.rows_per_subgroup,
            shares_vision=self.config.shares_vision,
        )

    def _tokens_of(self, sizes: Sequence[SubgroupSize]) -> list[int]:
        """Return how many tokens the policy's pass has for each subgroup."""
        shares_prompt = self.config.uses("share_prompt")
        return [size.tokens(shares_prompt=shares_prompt) for size in sizes]

    def _plan(self, sizes_by_rank: Sequence[Sequence[SubgroupSize]]) -> list[Sequence[int]]:
        """Return for each micro-batch the positions of its subgroups in the training order.

        The plan is the same on all ranks. With a `MicroBatchMemory` a micro-batch is filled up to
        the memory that is planned for it. Otherwise it has at most `per_device_train_batch_size`
        rows.

        `sizes_by_rank`: for each rank the sizes of its subgroups in the training order.
        """
        layout = self.layout
        max_subgroups = layout.micro_batch_rows // layout.rows_per_subgroup
        split: SplitPositions = partial(
            split_by_count,
            max_micro_batches=layout.micro_batches_per_update,
            max_subgroups=max_subgroups,
        )
        if self.micro_batch_memory is not None and self.config.uses("fill_micro_batches"):
            split = partial(
                self.micro_batch_memory.split, sizes_by_rank, max_subgroups=max_subgroups
            )
        plan = plan_micro_batches(
            len(sizes_by_rank[0]),
            optimizer_steps=layout.optimizer_steps_per_pass,
            micro_batches_per_step=layout.micro_batches_per_update,
            split=split,
        )
        filled_micro_batches = [positions for positions in plan if positions]
        self.log("adora/micro_batches", len(filled_micro_batches) / layout.optimizer_steps_per_pass)
        return plan

    def _micro_batch(
        self, reader: RowReader, rows_on_cpu: RowsOnCpu, subgroups: list[int], filled_share: float
    ) -> Batch:
        """Return a micro-batch of these subgroups, padded only to its own longest row.

        Besides the columns of the generation it gets `rows_on_cpu` and what `loss_weight` reads:
        `share_of_rows`, and `share_of_tokens` where the loss is a mean over tokens.

        Args:
            reader: takes rows out of the generation.
            rows_on_cpu: the copy of the generation's rows on the CPU.
            subgroups: numbers of at least one subgroup. With two rows per subgroup, the subgroups 0
                and 3 are the rows 0, 1, 6, 7.
            filled_share: the rows of the generation divided by the rows of a full one. It is below
                1 where unfinished rollouts are left to later generations.
        """
        rows = rows_of_groups(subgroups, self.layout.rows_per_subgroup)
        columns_in_use = used_columns(
            rows_on_cpu.prompt_mask[rows], [rows_on_cpu.completion_lengths[row] for row in rows]
        )
        micro_batch = cast("Batch", without_padding(dict(reader.take(rows)), columns_in_use))
        micro_batch["rows_on_cpu"] = rows_on_cpu.select(rows, columns_in_use.first_prompt_column)
        mean_rows_of_micro_batch = self.layout.micro_batch_rows * filled_share
        micro_batch["share_of_rows"] = len(rows) / mean_rows_of_micro_batch
        if self._weighs_by_tokens:
            tokens = loss_mask(micro_batch).sum()
            micro_batch["share_of_tokens"] = self.share_of_tokens(micro_batch, tokens)
            # TRL divides the loss by `num_items_in_batch` / (micro-batches of all ranks). In stock
            # TRL that column is the number of tokens of the generation. With this value the loss
            # becomes a mean over the tokens of this micro-batch.
            micro_batch["num_items_in_batch"] = tokens * self._micro_batches_of_all_ranks
        return micro_batch

    @property
    def _micro_batches_of_all_ranks(self) -> int:
        """The number of micro-batches of a generation on all ranks, empty ones included."""
        return int(self.accelerator.num_processes) * self.layout.steps_per_generation

    def share_of_tokens(self, micro_batch: Batch, tokens: Tensor) -> Tensor:
        """Return the tokens of a micro-batch divided by the mean tokens of a micro-batch, ().

        The result is float64. For example, a generation of 800 tokens in 4 micro-batches has 200 in
        each on average, so a micro-batch of 300 tokens has a share of 1.5. `_micro_batch` may have
        stored the share in the micro-batch already.

        `tokens`: how many tokens of the micro-batch count, ().
        """
        stored_share = micro_batch.get("share_of_tokens")
        if stored_share is not None:
            return stored_share
        # Here the column still has the tokens of the whole generation on all ranks. `_micro_batch`
        # overwrites it with another number, but then it stores the share too.
        tokens_of_generation = micro_batch["num_items_in_batch"].clamp(min=1)
        return tokens.double() * self._micro_batches_of_all_ranks / tokens_of_generation

    def loss_weight(self, micro_batch: Batch) -> float | Tensor:
        """Return the factor that scales the loss of a micro-batch.

        Stock TRL takes a mean over the rows of a micro-batch, or over its tokens. So each row of a
        small micro-batch would weigh more than a row of a large one. For example, where
        micro-batches have 4 rows on average, the loss of one with 2 rows is multiplied by 0.5.

        For losses that are no such mean the factor is 1. It is also 1 where TRL has split the
        generation: its micro-batches all have the same number of rows, and no stored share.
        """
        if self._weighs_by_tokens:
            return micro_batch.get("share_of_tokens", 1.0)
        if self.config.loss_type in LOSSES_WITH_ROW_MEAN:
            return micro_batch.get("share_of_rows", 1.0)
        return 1.0

    def _plan_moves(
        self, batch: Batch, has_signal: Sequence[bool], sizes: Sequence[SubgroupSize]
    ) -> list[SubgroupMove]:
        """Return which subgroups move to another rank, since one rank would take too long.

        A subgroup is a group of rollouts, or an equal part of one. Every rank computes the same
        plan, from the tokens of all ranks' subgroups. It is empty where ranks do not exchange rows.
        Collective.

        Args:
            batch: this rank's rows of the generation.
            has_signal: for each of its subgroups, whether it is to be learned from.
            sizes: the size of each of its subgroups.
        """
        if not self.config.uses("spread_signal") or self.accelerator.num_processes == 1:
            return []
        # Only subgroups with signal move. This has the tokens of each, by the subgroup's number.
        tokens_with_signal = {
            subgroup: tokens
            for subgroup, tokens in enumerate(self._tokens_of(sizes))
            if has_signal[subgroup]
        }
        tokens_and_columns = gather_object([(tokens_with_signal, movable_columns(batch))])
        tokens_by_rank = [tokens_of_rank for tokens_of_rank, _ in tokens_and_columns]
        columns_by_rank = [columns_of_rank for _, columns_of_rank in tokens_and_columns]
        # The columns differ where a rank has no images. Rows that move have to fit into the columns
        # of the rank that gets them.
        ranks_have_same_columns = len(set(columns_by_rank)) == 1
        # None: the rows have pixels, which are too large to be sent.
        rows_can_move = columns_by_rank[0] is not None
        moves: list[SubgroupMove] = []
        if ranks_have_same_columns and rows_can_move:
            # Every rank needs a subgroup for every optimizer step: the ranks step together.
            moves = plan_moves(tokens_by_rank, min_subgroups=self.layout.optimizer_steps_per_pass)
        count_with_signal = sum(map(len, tokens_by_rank))
        # A share, in spite of its name: of 10 subgroups with signal, 2 moves are 0.2.
        self.log("adora/moved_groups", len(moves) / max(count_with_signal, 1))
        return moves

    def _carry_out(
        self, moves: list[SubgroupMove], batch: Batch, has_signal: list[bool]
    ) -> tuple[Batch, list[bool]]:
        """Move subgroups between the ranks, as `carry_out_moves` describes. Collective.

        Returns the new batch of this rank, and for each of its subgroups whether it is to be
        learned from. A subgroup that has moved away stays in the batch, and is not learned from.
        """
        return carry_out_moves(
            batch,
            has_signal=has_signal,
            rows_per_subgroup=self.layout.rows_per_subgroup,
            moves=moves,
            rank=self.accelerator.process_index,
            image_banks=self.image_banks,
            pad_id=self.pad_id,
            exchange=self._subgroup_exchange,
        )


def _rows_on_cpu(batch: Batch) -> RowsOnCpu:
    """Return a copy on the CPU of what passes have to know of a batch's rows."""
    return RowsOnCpu.of(
        batch["prompt_ids"],
        prompt_mask=batch["prompt_mask"],
        completion_mask=batch["completion_mask"],
        columns=dict[str, Any](batch),
    )
