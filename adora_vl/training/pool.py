"""A pool of groups that fills each generation, with the same number of groups on every rank.

A data loader draws a problem, its group begins, and its rollouts are sampled until they end, or for
as many tokens as one generation may take (`budget`). Kimi k1.5 (arXiv 2501.12599, section 2.6.2)
and APRIL (arXiv 2509.18521) have such partial rollouts for texts. Ours keeps whole groups together,
takes the images along, and drops nothing.

The pool remembers the groups and has the rules; it neither samples nor scores. A generation is
pending from the request of its rollouts until they are sampled. With `ahead: k` the k generations
after the present one are pending too. All ranks begin, score and learn from equally many groups, so
a rank has to remember nothing but its groups.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from tqdm import tqdm

from adora_vl.config.batch_plan import BatchLayout
from adora_vl.config.blocks import RolloutOptions
from adora_vl.data.dataloader import DistinctRows
from adora_vl.rollout.rollouts import Rollout, RolloutGroup
from adora_vl.training import schedule
from adora_vl.training.advantages import GroupAssessment
from adora_vl.training.generation import Generation
from adora_vl.training.generation_numbers import GenerationNumbers
from adora_vl.training.pool_state import PendingGeneration, PoolState, TokenLimits
from adora_vl.types import Batch, Row, StepContext
from adora_vl.utils.errors import RolloutError, UserError


class Pool:
    """Remembers the groups of a run, and decides which of them begin, go on, and are learned from.

    A group is a problem with its rollouts, and is complete if all of these have ended. With a token
    budget (`adora_rollouts.budget`) a generation samples only so many tokens of a rollout, which
    then goes on in the next generation. Its group waits meanwhile. With `ahead` servers sample
    later generations while the policy learns from the present one; they are pending until their
    rollouts arrive. In both cases rollouts may be stale: older than the generation that learns from
    them.

    All of this is in `state`, which is replaced as a whole.
    """

    def __init__(self, context: StepContext, dataset: Any, *, has_tools: bool = False) -> None:
        """Build an empty pool.

        Args:
            context: accelerator, config, log and state, which every part of a training step gets.
            dataset: the data set that is trained on, or a stand-in with a length and rows.
            has_tools: whether the run has tools, so that rollouts may have several turns.
        """
        self.context = context
        self.accelerator = context.accelerator
        self.config = context.config
        self.log = context.log
        self.rows = DistinctRows(dataset)
        self.options: RolloutOptions = context.config.adora_rollouts
        self.layout = context.layout
        # How many generations servers sample before the policy learns from the present one.
        self.generations_ahead = self.options.ahead
        # Whether a rollout may stay unfinished and go on in a later generation. Then a generation
        # may begin more groups than it learns from.
        self.allows_partial_rollouts = self.options.budget is not None
        # Whether rollouts may be older than the generation that learns from them.
        self.allows_stale_rollouts = self.allows_partial_rollouts or self.generations_ahead > 0
        # Whether rollouts are sampled in several parts: within a token budget, or turn by turn.
        self.samples_in_parts = self.allows_partial_rollouts or has_tools
        # The most groups that one rank learns from in a generation, and the fewest.
        self.max_groups = self.layout.rows_per_process // self.layout.num_generations
        self.min_groups = _fewest_groups(self.layout, self.max_groups)
        self.generation_numbers = GenerationNumbers(
            context, self.rows, is_numbered=self.allows_stale_rollouts
        )
        self.state = PoolState()
        # The state before the generations of the present optimizer step. A run that dies before it
        # learns from them samples them again from there.
        self.state_before_step = PoolState()
        # The optimizer step that `state_before_step` belongs to; -1 before the first.
        self.step_of_state_before = -1

    # --------------------------------------------------------------- which groups begin and go on

    def remember_state_before_step(self, generation: Generation) -> None:
        """Keep a copy of the state, if this generation is the first of its optimizer step.

        A run that stops before it has learned from the step's generations resumes from that copy.
        In the first step of a run this also warns if the run ends too early to learn from all
        groups that wait.

        `generation`: the generation that is sampled next.
        """
        is_first_of_run = self.step_of_state_before < 0
        # Groups wait only where rollouts may stay unfinished. Without refill every one of them
        # needs room in one of the remaining generations.
        if is_first_of_run and self.allows_partial_rollouts and not self.options.refill:
            self._warn_of_lost_groups(generation)
        if generation.key.step != self.step_of_state_before:
            self.state_before_step = self.state
            self.step_of_state_before = generation.key.step

    @property
    def token_budget(self) -> int | None:
        """The most tokens of a rollout that the present generation samples; None for no limit.

        With `budget: auto` it follows from the lengths of earlier rollouts. It is so large that a
        rollout of `max_completion_length` ends before it is older than `staleness` generations. For
        example, with `staleness` 3 a rollout has at most 4 parts, so a completion of 1,000 tokens
        needs 250 tokens in each.
        """
        budget: int | str | None = self.options.budget
        if budget is None or isinstance(budget, int):
            return budget
        max_parts = self.options.staleness + 1  # a part in each generation
        if self.generations_ahead:
            # When a rollout is to go on, `generations_ahead` generations have been requested
            # already. So its next part is sampled that many generations later.
            max_parts = math.ceil(self.options.staleness / self.generations_ahead)
        min_budget = math.ceil(self.config.max_completion_length / max_parts)
        return schedule.automatic_budget(self.state.recent_lengths, min_budget)

    def begin_groups(
        self,
        generation: Generation,
        drawn_groups: Sequence[RolloutGroup],
        *,
        waiting_count: int,
        min_new_groups: int,
    ) -> list[RolloutGroup]:
        """Return the groups that begin in a generation, those of the oldest problems first.

        Without a token budget all drawn groups begin. With one, some groups of earlier generations
        may still wait, so fewer new ones are needed. Problems that do not begin now are remembered,
        and begin before later ones.

        Args:
            generation: the generation in which the groups begin.
            drawn_groups: groups of the problems that the data loader has drawn.
            waiting_count: how many groups have begun and were not learned from yet.
            min_new_groups: how many groups begin in any case.
        """
        if not self.allows_partial_rollouts:
            return list(drawn_groups)
        row_by_problem = {group.problem: group.row for group in drawn_groups}
        # Problems that were drawn earlier and have not begun come first.
        problems = [*self.state.drawn_problems, *row_by_problem]
        begun_count = schedule.count_groups_to_begin(
            waiting_count,
            complete_groups=self.state.min_complete_groups,
            slots=self.max_groups,
            remaining_generations=self.generation_numbers.count_remaining(generation),
            min_new_groups=min_new_groups,
        )
        self.state = replace(self.state, drawn_problems=tuple(problems[begun_count:]))
        begun_groups = [
            RolloutGroup(
                problem=problem,
                # The rows of earlier problems are not remembered. They are read below.
                row=row_by_problem.get(problem, Row()),
                start_generation=generation.number,
                rollouts=(Rollout(),) * generation.group_size,
            )
            for problem in problems[:begun_count]
        ]
        return self._read_missing_rows(begun_groups)

    def min_new_groups_beside(self, continuing_groups: Sequence[RolloutGroup]) -> int:
        """Return how many groups have to begin beside those that go on, in a run with `ahead`.

        With `ahead` servers sample a generation before it is known which groups the policy learns
        from until then. So each generation needs `min_groups` groups of its own, the fewest that a
        rank may learn from. For example, if 4 are needed, and two ranks continue 3 and 1, both
        begin 3. Without `ahead` the result is 0. Collective with `ahead` and a token budget.

        `continuing_groups`: this rank's groups whose unfinished rollouts go on in the generation.
        """
        if not self.generations_ahead:
            return 0
        if not self.allows_partial_rollouts:
            return self.min_groups
        # Collective: the ranks may continue unequal numbers, and have to begin equally many.
        continuing_by_rank: list[int] = gather_object([len(continuing_groups)])
        return max(0, self.min_groups - min(continuing_by_rank))

    def token_limits(self, generation: Generation, groups: Sequence[RolloutGroup]) -> TokenLimits:
        """Return how many tokens of each rollout are sampled now, by the index of its group.

        None means that the rollouts of a group are sampled to their ends. All groups get None if
        there is no token budget, or if all have to end now. Otherwise those get None that are as
        old as `staleness` allows, and the others get the budget. For example, with a budget of 250
        and `staleness` 1, a group of the previous generation and a new one get {0: None, 1: 250}.

        Args:
            generation: the generation whose rollouts are sampled.
            groups: this rank's groups in it.
        """
        limit_by_group: TokenLimits = dict.fromkeys(range(len(groups)))  # None for each group
        budget = self.token_budget
        if budget is None:
            return limit_by_group
        # With `ahead` it is known only when the rollouts arrive how many groups have to end.
        if not self.generations_ahead:
            all_must_end = self._count_groups_needed(generation, len(groups)) == len(groups)
            if all_must_end:
                return limit_by_group
        for number, group in enumerate(groups):
            age = generation.number - group.start_generation
            # An older group keeps None: it may not go on in a later generation.
            if age < self.options.staleness:
                limit_by_group[number] = budget
        return limit_by_group

    def groups_that_must_end(
        self, groups: Sequence[RolloutGroup], generation: Generation
    ) -> list[int]:
        """Return the indices of the groups whose rollouts have to be sampled to their ends now.

        The present generation has to have enough complete groups to learn from. If some are
        missing, as in the first generation of a training, the oldest unfinished groups fill up. For
        example, if 3 complete groups are needed and 1 of 5 is complete, the 2 oldest unfinished
        ones have to end.

        Args:
            groups: groups of this rank, the oldest first.
            generation: the present one.
        """
        needed_count = min(len(groups), self._count_groups_needed(generation, len(groups)))
        # With `ahead` the last generations of the training are requested already, so that no later
        # request can go on with a group.
        remaining_count = self.generation_numbers.count_remaining(generation)
        if remaining_count <= self.generations_ahead:
            needed_count = len(groups)
        unfinished_indices = [index for index, group in enumerate(groups) if not group.complete]
        complete_count = len(groups) - len(unfinished_indices)
        missing_count = max(0, needed_count - complete_count)
        return unfinished_indices[:missing_count]

    def _count_groups_needed(self, generation: Generation, group_count: int) -> int:
        """Return how many of this rank's groups have to be complete after the present generation.

        The generation needs at least `min_groups` to learn from. Towards the end of the training it
        needs more, since all groups have to be learned from before it ends.

        Args:
            generation: the present one.
            group_count: how many groups of this rank have begun and were not learned from.
        """
        return schedule.groups_to_complete(
            group_count + self.groups_requested_ahead,
            slots=self.max_groups,
            remaining_generations=self.generation_numbers.count_remaining(generation),
            min_groups=self.min_groups,
        )

    def draw_refill_rows(self, generation: Generation, count: int) -> list[int]:
        """Draw `count` problems for a refill at random, and return the numbers of their rows.

        Their groups replace groups without signal. The draw is seeded by the position in the run,
        so a resumed run draws the same problems.
        """
        rank = self.accelerator.process_index
        key = generation.key
        seed = f"{self.config.seed}/{key.position}/{key.refill_round}/{rank}"
        return schedule.draw_refill_rows(len(self.rows), count, seed)

    def count_spare_groups(self) -> int:
        """Return how many spare groups are requested with a generation that servers sample ahead.

        Spare groups replace groups without signal, whose rollouts get equal rewards. How many are
        needed follows from the share of groups with signal so far. Without `ahead` the result is 0:
        groups can then be replaced when the rewards are known (`Refill`).
        """
        if not self.generations_ahead:
            return 0
        # `refill` is the most rounds of spare groups, each of at most `max_groups` groups.
        needed_groups = schedule.count_groups_for_signal(
            self.max_groups,
            self.state.recent_signal_shares,
            max_groups=self.max_groups * (1 + self.options.refill),
        )
        # Every rank has at least this many complete groups that wait. They serve as spare ones.
        complete_waiting_groups = self.state.min_complete_groups
        return max(0, needed_groups - self.max_groups - complete_waiting_groups)

    # ------------------------------------------------------------------------- pending generations

    def next_pending_is_for(self, drawn_groups: Sequence[RolloutGroup]) -> bool:
        """Return whether the next pending generation was requested for the rows of these groups."""
        pending = self.state.pending_generations
        return bool(pending) and pending[0].row_numbers == row_numbers_of_rollouts(drawn_groups)

    def older_weights_sample_next_pending(self, step: int) -> bool:
        """Return whether weights from before this step sample the next pending generation.

        If none is pending, the next one is sampled by the present weights.
        """
        if not self.state.pending_generations:
            return False
        next_pending = self.state.pending_generations[0]
        return next_pending.samples.step != step

    def drop_all_pending(self) -> None:
        """Forget all pending generations, which were requested for other rows."""
        self.state = replace(self.state, pending_generations=())

    def add_pending(self, generation: PendingGeneration) -> None:
        """Add a pending generation behind the others."""
        self.state = replace(
            self.state, pending_generations=(*self.state.pending_generations, generation)
        )

    def drop_first_pending(self) -> None:
        """Forget the first pending generation, which has been sampled."""
        self.state = replace(self.state, pending_generations=self.state.pending_generations[1:])

    @property
    def groups_requested_ahead(self) -> int:
        """How many groups the pending generations after the present one have."""
        return sum(len(pending.groups) for pending in self.state.pending_generations[1:])

    # ------------------------------------------------------------------------------- waiting groups

    def pop_waiting_groups(self) -> list[RolloutGroup]:
        """Return the groups that wait, and remove them from the waiting ones."""
        waiting = list(self.state.waiting_groups)
        self.state = replace(self.state, waiting_groups=())
        return waiting

    def select_complete(
        self, groups: Sequence[RolloutGroup], max_groups: int
    ) -> list[RolloutGroup]:
        """Return the oldest complete groups, equally many on every rank, and let all others wait.

        A group is complete if all of its rollouts have ended. For example, if this rank has 5
        complete groups and another rank has 3, the 3 oldest are returned. The others are stored in
        `state.waiting_groups`. Collective, unless all rollouts end in the generation in which they
        begin.

        Args:
            groups: this rank's groups, the oldest first.
            max_groups: the most groups that are selected.
        """
        if not self.allows_stale_rollouts:
            # All rollouts were sampled to their ends in this generation.
            self.state = replace(self.state, waiting_groups=(), min_complete_groups=0)
            return list(groups)
        complete_indices = [index for index, group in enumerate(groups) if group.complete]
        # Collective: ranks may have completed unequal numbers, and have to score equally many.
        complete_count_1 = torch.tensor([len(complete_indices)], device=self.accelerator.device)
        min_complete = int(self.accelerator.gather(complete_count_1).min())
        selected_count = min(min_complete, max_groups)
        selected_indices = complete_indices[:selected_count]
        waiting_groups = [
            group for index, group in enumerate(groups) if index not in selected_indices
        ]
        self.state = replace(
            self.state,
            waiting_groups=tuple(waiting_groups),
            min_complete_groups=min_complete - selected_count,
        )
        return [groups[index] for index in selected_indices]

    def count_missing_groups(self, assessment: GroupAssessment) -> int:
        """Return how many groups with signal are missing on the rank that lacks most.

        A group has signal if its rollouts' rewards differ. A rank's batch has slots for
        `max_groups` groups. A group is missing for each slot that is free, and for each group
        without signal. For example, with 4 slots, 3 groups and one of them without signal, 2 groups
        are missing.
        """
        has_signal_by_rank = assessment.has_signal_by_rank
        groups_of_rank = has_signal_by_rank.size(1)  # ranks have equally many
        groups_without_signal = (~has_signal_by_rank).sum(dim=1)  # of each rank
        missing_count = int(groups_without_signal.max())
        # Without stale rollouts every generation fills all slots by itself.
        if self.allows_stale_rollouts:
            missing_count += self.max_groups - groups_of_rank
        return missing_count

    def choose_groups(
        self, assessment: GroupAssessment, refill: GroupAssessment
    ) -> list[list[int]]:
        """Return for each rank the numbers of the groups to learn from, once a refill is graded.

        The groups of the refill first fill free slots of the batch. Then those with signal, whose
        rollouts' rewards differ, replace groups without. For example, [[0, 3]] says that the only
        rank keeps group 0, and that group 3 of the refill replaces group 1.

        Args:
            assessment: of the n groups that each rank has, with the numbers 0 to n - 1.
            refill: of the groups that were sampled to replace some, with the numbers from n on.
        """
        # Only in a run whose rollouts may wait for a later generation a batch can have fewer groups
        # than slots. In any other run the refill can only replace groups, as with 0 slots.
        batch_slots = self.max_groups if self.allows_stale_rollouts else 0
        return [
            schedule.fill_slots(has_signal, refill_has_signal, batch_slots)
            for has_signal, refill_has_signal in zip(
                assessment.has_signal_by_rank.tolist(),
                refill.has_signal_by_rank.tolist(),
                strict=True,
            )
        ]

    # ------------------------------------------------------------ what is remembered of generations

    def remember_signal_share(self, assessment: GroupAssessment) -> float:
        """Return the share of groups with signal, the mean over all ranks, and remember it.

        A group has signal if its rollouts' rewards differ. Later generations draw more problems
        where the remembered shares are small.
        """
        shares_by_rank = assessment.has_signal_by_rank.float().mean(dim=1)
        mean_share = shares_by_rank.mean().item()
        recent_shares = (*self.state.recent_signal_shares, mean_share)[
            -schedule.REMEMBERED_GENERATIONS :
        ]
        self.state = replace(self.state, recent_signal_shares=recent_shares)
        return mean_share

    def record_trained_batch(self, batch: Batch, lengths: Sequence[int]) -> None:
        """Log the ages of a batch's rollouts, and remember the lengths of all scored rollouts.

        The token budget of later generations follows from these lengths (`budget: auto`).
        Collective where rollouts may be older than their generation.

        Args:
            batch: what this rank learns from, once no group is replaced any more.
            lengths: the tokens of every rollout of all ranks that was scored.
        """
        if self.allows_stale_rollouts:
            self._log_ages(batch)
        if self.allows_partial_rollouts:
            all_lengths = (*self.state.recent_lengths, tuple(lengths))
            self.state = replace(
                self.state, recent_lengths=all_lengths[-schedule.REMEMBERED_GENERATIONS :]
            )

    def _warn_of_lost_groups(self, generation: Generation) -> None:
        """Warn that the training ends before it can learn from all groups that have begun.

        That happens where a run resumes with a smaller `max_steps`, so this is called in the first
        generation after a start. The first rank warns.
        """
        pending_count = sum(len(pending.groups) for pending in self.state.pending_generations)
        begun_count = len(self.state.waiting_groups) + pending_count
        # `max_groups` is how many groups a generation has on each rank.
        generations_left = self.generation_numbers.count_remaining(generation)
        learnable_count = generations_left * self.max_groups
        if begun_count > learnable_count and self.accelerator.is_main_process:
            generations_needed = math.ceil(begun_count / self.max_groups)
            steps_needed = generations_needed * self.layout.optimizer_steps_per_generation
            tqdm.write(
                f"max_steps: {self.context.state().max_steps} ends the run before "
                f"{begun_count - learnable_count} of the {begun_count} groups per process that the "
                "checkpoint has set aside (adora_rollouts.budget) can be learned from; "
                f"{generation.key.step + steps_needed} is enough for all",
                file=sys.stderr,
            )

    def _log_ages(self, batch: Batch) -> None:
        """Log how old the rollouts of the batch are, and how many unfinished ones wait. Collective.

        `batch`: B rollouts of this rank. Its column `age` has for each the generations since its
        group began.
        """
        ages_B = batch["age"]
        unfinished_count = torch.full_like(ages_B[0], self._count_unfinished_rollouts())
        # The sum and the maximum of the ages, and the count of unfinished rollouts.
        ages_3 = torch.stack([ages_B.sum(), ages_B.max(), unfinished_count])
        # One gather for all three. Each becomes a tensor with one value for each of R ranks.
        sums_R, maxima_R, unfinished_R = self.accelerator.gather(ages_3[None]).unbind(dim=1)
        rollouts_of_all_ranks = len(ages_B) * len(sums_R)
        self.log("adora/staleness", sums_R.sum().item() / rollouts_of_all_ranks)
        self.log("adora/staleness_max", maxima_R.max().item())
        if self.allows_partial_rollouts:
            budget = self.token_budget or self.config.max_completion_length
            self.log("adora/unfinished", unfinished_R.sum().item())
            self.log("adora/rollout_budget", budget)

    def _count_unfinished_rollouts(self) -> int:
        """Return how many rollouts of this rank have begun, and go on in a later generation."""
        groups = [*self.state.waiting_groups]
        # Groups of the generations that servers sample ahead may go on too.
        for generation in self.state.pending_generations:
            groups += generation.groups
        count = 0
        for group in groups:
            # The rollouts of a group begin together, so the first one stands for all. Without any
            # segment the group was requested, and nothing has been sampled yet.
            has_begun = bool(group.rollouts[0].segments)
            if has_begun:
                count += sum(not rollout.has_ended for rollout in group.rollouts)
        return count

    # --------------------------------------------------------------------------------- a checkpoint

    def save(self, folder: Path) -> None:
        """Write this rank's waiting groups and pending generations into a checkpoint.

        If the policy has not learned from the generations of the present optimizer step yet, a
        resumed run samples them again. Then the state from before them is written. Nothing is
        written in a run in which no group ever waits.

        `folder`: the folder of the checkpoint.
        """
        if not self.allows_stale_rollouts:
            return
        state = self.state
        has_learned = self.context.state().global_step != self.step_of_state_before
        if not has_learned:
            state = self.state_before_step
        arrived_count = 0
        # Rollouts that servers still sample are waited for. If a request has failed, all ranks see
        # it. Then its generation and later ones are left out, and a resumed run requests them
        # again.
        with suppress(RolloutError, UserError):
            for pending in state.pending_generations:
                pending.samples.join()
                arrived_count += 1
        state = replace(state, pending_generations=state.pending_generations[:arrived_count])
        state.save(folder, self.accelerator.process_index)

    def load(self, checkpoint: Path) -> None:
        """Restore what `save` wrote into a checkpoint. Rows are read from the data set again.

        Raises:
            UserError: another number of processes wrote unfinished rollouts.
        """
        state = PoolState.load(
            checkpoint,
            rank=self.accelerator.process_index,
            num_ranks=self.accelerator.num_processes,
        )
        pending = [
            replace(generation, groups=tuple(self._read_missing_rows(generation.groups)))
            for generation in state.pending_generations
        ]
        waiting = tuple(self._read_missing_rows(state.waiting_groups))
        self.state = replace(state, waiting_groups=waiting, pending_generations=tuple(pending))

    def _read_missing_rows(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return the same groups, each with its row: an empty row is read from the data set."""
        missing_numbers = [group.problem.row_number for group in groups if not group.row]
        rows: Iterator[Any] = iter(self.rows.__getitems__(missing_numbers))
        return [group if group.row else replace(group, row=next(rows)) for group in groups]


def _fewest_groups(layout: BatchLayout, max_groups: int) -> int:
    """Return the fewest groups that a rank may learn from in a generation.

    Gradients of fewer than half of `max_groups`, the most that it may have, would be too noisy.
    Besides, each of the generation's optimizer steps needs at least one subgroup, which is a group
    or an equal part of one. For example, a rank has at most 8 groups, of which half are 4. If 6
    optimizer steps need one group each, the result is 6.
    """
    rows_for_all_steps = layout.optimizer_steps_per_pass * layout.rows_per_subgroup
    groups_for_all_steps = rows_for_all_steps / layout.num_generations
    return math.ceil(max(max_groups / 2, groups_for_all_steps))


def row_numbers_of_rollouts(groups: Sequence[RolloutGroup]) -> tuple[int, ...]:
    """Return for each rollout the number of its row in the data set.

    For example, groups of two rollouts of the rows 7 and 4 give (7, 7, 4, 4).
    """
    return tuple(group.problem.row_number for group in groups for _ in group.rollouts)
