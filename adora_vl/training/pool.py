"""A pool of groups that fills each generation, with the same number of groups on every rank.

A data loader draws a problem, its group begins, and its rollouts are sampled until they end, or for
as many tokens as one generation may take (`budget`). Such partial rollouts are those of Kimi k1.5
(arXiv 2501.12599, section 2.6.2) and of APRIL (arXiv 2509.18521), which have them for texts. Ours
keeps whole groups together, takes the images along, and drops nothing.

The pool remembers the groups and has the rules; it neither samples nor scores. Every generation is
pending before it is sampled: with `ahead: k` those of the k generations after the present one too.
All ranks begin, score and learn from equally many groups, so a rank has to remember nothing but the
groups themselves.
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
from adora_vl.data.dataloader import ROW_NUMBER, DistinctRows
from adora_vl.rollout.rollouts import Rollout, RolloutGroup, StepKey
from adora_vl.training import schedule
from adora_vl.training.advantages import GroupAssessment
from adora_vl.training.generation import Generation
from adora_vl.training.pool_state import PendingGeneration, PoolState, TokenLimits
from adora_vl.types import Batch, Row, StepContext
from adora_vl.utils.errors import RolloutError, UserError


class Pool:
    """Remembers the groups of a run, and says which of them begin, go on, and are learned from.

    Only three fields change: `state`, and `state_before_step` with the `step` that it belongs to.
    """

    def __init__(self, context: StepContext, dataset: Any, *, tools: bool = False) -> None:
        """Build an empty pool.

        Args:
            context: what every part of a training step is built from.
            dataset: the data set that is trained on, or a stand-in with a length and rows.
            tools: whether rollouts may have several turns.
        """
        self.context = context
        self.accelerator = context.accelerator
        self.config = context.config
        self.log = context.log
        self.rows = DistinctRows(dataset)
        self.options: RolloutOptions = context.config.adora_rollouts
        self.layout = BatchLayout.of(context.config)
        # Generations that servers sample before the policy learns from the present one.
        self.generations_ahead = self.options.ahead
        # Whether a rollout may pause, so that a generation may begin more groups than it learns
        # from.
        self.allows_partial = self.options.budget is not None
        # Whether rollouts may be older than the generation that learns from them.
        self.has_stale = self.allows_partial or self.generations_ahead > 0
        # Whether later turns, or the ends of rollouts, are sampled after a pending generation's
        # samples have arrived.
        self.samples_in_parts = self.allows_partial or tools
        # Groups that one rank learns from in a full generation.
        self.slots = (
            self.layout.micro_batch_rows
            * self.layout.steps_per_generation
            // self.layout.num_generations
        )
        # Fewest groups that a rank may learn from: half its slots, because a smaller batch is too
        # noisy, and at least one unit for every optimizer step of the generation.
        chunks = self.layout.steps_per_generation // self.layout.micro_batches_per_update
        units = chunks * self.layout.rows_per_unit
        self.min_groups = math.ceil(max(self.slots / 2, units / self.layout.num_generations))
        self.state = PoolState()
        # The state before the generations of the present optimizer step. A run that dies before it
        # learns from them samples them again from there.
        self.state_before_step = PoolState()
        self.step = -1  # optimizer steps that had been made when that state was noted

    # ------------------------------------------------------------------- where a generation stands

    def generation_at(self, key: StepKey, group_size: int, rows: Sequence[Row]) -> Generation:
        """Return the generation of a step. It is numbered only where rollouts may be stale.

        Args:
            key: the step, and the micro-batch in it.
            group_size: rollouts of a group.
            rows: the rows that were drawn for it.

        Raises:
            UserError: rollouts may be stale, but the rows have no numbers.
        """
        if key.mode != "train" or not self.has_stale:
            return Generation(key=key, group_size=group_size)
        # A negative number is that of a row outside of the data set.
        if min(dict[str, Any](row).get(ROW_NUMBER, -1) for row in rows) < 0:
            raise UserError(
                "adora_rollouts: these rows do not say their numbers, by which problems that "
                "wait are read again (a streamed data set, or a loader of your own); load the "
                "data set whole, or set budget and ahead off"
            )
        number = self._generations_before(key.step, key.micro)
        return Generation(key=key, group_size=group_size, number=number)

    def generation_after(self, generation: Generation, distance: int) -> Generation | None:
        """Return the generation `distance` after this one; None after the last of the training."""
        if distance >= self.generations_left(generation):
            return None
        number = self._generations_before(generation.key.step, generation.key.micro) + distance
        step, micro = divmod(
            number * self.layout.micro_batches_per_generation,
            self.layout.gradient_accumulation_steps,
        )
        if self.layout.has_one_step:
            step, before_in_step = schedule.place_of(number, *self._generations_of_step_and_epoch)
            micro = before_in_step * self.layout.micro_batches_per_generation
        key = StepKey(mode="train", step=step, micro=micro)
        return replace(generation, key=key, number=number)

    def generations_left(self, generation: Generation) -> int:
        """Return the number of generations until the end of the training, including this one."""
        total = self._generations_before(int(self.context.state().max_steps))
        return total - self._generations_before(generation.key.step, generation.key.micro)

    def _generations_before(self, step: int, micro: int = 0) -> int:
        """Index of the generation that contains micro-batch `micro` of optimizer step `step`."""
        layout = self.layout
        if not layout.has_one_step:
            return math.ceil(
                (step * layout.gradient_accumulation_steps + micro)
                / layout.micro_batches_per_generation
            )
        before_step = schedule.generations_in(step, *self._generations_of_step_and_epoch)
        return before_step + micro // layout.micro_batches_per_generation

    @property
    def _generations_of_step_and_epoch(self) -> tuple[int, int]:
        """Generations of an optimizer step that takes several, and generations of an epoch."""
        layout = self.layout
        rows = len(self.rows) * layout.num_generations
        rows_of_generation = (
            layout.micro_batch_rows * layout.steps_per_generation * self.accelerator.num_processes
        )
        return (
            layout.gradient_accumulation_steps // layout.micro_batches_per_generation,
            rows // rows_of_generation,
        )

    # --------------------------------------------------------------- which groups begin and go on

    def begin_step(self, generation: Generation) -> None:
        """Keep the state from before the first generation of an optimizer step.

        A run that stops before it has learned from the step's generations resumes from that state.
        """
        is_first = self.step < 0
        # Without refill every waiting group needs a slot in one of the remaining generations.
        if is_first and self.allows_partial and not self.options.refill:
            self._warn_of_lost_groups(generation)
        if generation.key.step != self.step:
            self.state_before_step = self.state
            self.step = generation.key.step

    @property
    def token_budget(self) -> int | None:
        """Token budget per rollout in the present generation; None for no limit.

        `auto` gives each rollout enough tokens per generation to finish within `staleness`
        generations.
        """
        budget: int | str | None = self.options.budget
        if budget is None or isinstance(budget, int):
            return budget
        parts = self.options.staleness + 1  # generations that a rollout may take
        if self.generations_ahead:
            parts = math.ceil(self.options.staleness / self.generations_ahead)
        min_budget = math.ceil(self.config.max_completion_length / parts)
        return schedule.automatic_budget(self.state.lengths, min_budget)

    def begin_groups(
        self,
        generation: Generation,
        drawn: Sequence[RolloutGroup],
        *,
        waiting: int,
        min_begun: int,
    ) -> list[RolloutGroup]:
        """Begin as many groups as fit; problems that do not begin are kept for later.

        Args:
            generation: in which the groups begin.
            drawn: groups of the problems that the data loader has drawn.
            waiting: groups that have begun and were not learned from yet.
            min_begun: groups that begin even where fewer would fit.

        Returns:
            The groups that begin, the ones of the oldest problems first.
        """
        if not self.allows_partial:
            return list(drawn)
        row_of = {group.problem: group.row for group in drawn}
        problems = [*self.state.drawn, *row_of]
        count = schedule.how_many_begin(
            waiting,
            complete_groups=self.state.min_complete,
            slots=self.slots,
            remaining_generations=self.generations_left(generation),
            min_begun=min_begun,
        )
        empty = (Rollout(),) * generation.group_size
        begun = [
            RolloutGroup(
                problem=problem,
                row=row_of.get(problem, Row()),
                began=generation.number,
                rollouts=empty,
            )
            for problem in problems[:count]
        ]
        self.state = replace(self.state, drawn=tuple(problems[count:]))
        return self._with_rows(begun)

    def min_begun_beside(self, continuing: Sequence[RolloutGroup]) -> int:
        """Return the fewest groups that begin in a generation that these groups continue in.

        A generation that is requested ahead has `min_groups` with them. Else it could run dry:
        groups that are complete now keep problems from beginning, and may be used up before its
        turn. Collective with `ahead` and a budget.
        """
        if not self.generations_ahead:
            return 0
        if not self.allows_partial:
            return self.min_groups
        # Collective: the ranks may continue unequal numbers, and have to begin equally many.
        continuing_of_ranks: list[int] = gather_object([len(continuing)])
        return max(0, self.min_groups - min(continuing_of_ranks))

    def token_limits(self, generation: Generation, groups: Sequence[RolloutGroup]) -> TokenLimits:
        """Return tokens per rollout of these groups, by their numbers; None: to the rollouts' ends.

        A group that is as old as `staleness` allows is sampled to its end, and so are all groups
        where all of them have to end now.
        """
        limits: TokenLimits = dict.fromkeys(range(len(groups)))
        budget = self.token_budget
        if budget is None:
            return limits
        # With `ahead` it is known only later how many have to end.
        if not self.generations_ahead and self._groups_needed(generation, len(groups)) == len(
            groups
        ):
            return limits
        for number, group in enumerate(groups):
            if generation.number - group.began < self.options.staleness:
                limits[number] = budget
        return limits

    def must_end_now(self, groups: Sequence[RolloutGroup], generation: Generation) -> list[int]:
        """Return the numbers of the oldest groups that have to end now, since too few are complete.

        That is always so in the first generation of a training.
        """
        needed = min(len(groups), self._groups_needed(generation, len(groups)))
        # In the last generations no later request continues a group that pauses, so all end.
        if self.generations_left(generation) <= self.generations_ahead:
            needed = len(groups)
        missing = needed - sum(group.complete for group in groups)
        incomplete = [number for number, group in enumerate(groups) if not group.complete]
        return incomplete[: max(0, missing)]

    def _groups_needed(self, generation: Generation, groups: int) -> int:
        """Return how many of the present `groups` have to be complete in this generation."""
        return schedule.groups_to_complete(
            groups + self.groups_ahead,
            slots=self.slots,
            remaining_generations=self.generations_left(generation),
            min_groups=self.min_groups,
        )

    def further_rows(self, generation: Generation, count: int) -> list[int]:
        """Return the row numbers of `count` further problems.

        The draw is seeded by the position in the run, so a resumed run draws the same problems.
        """
        rank = self.accelerator.process_index
        key = generation.key
        seed = f"{self.config.seed}/{key.position}/{key.attempt}/{rank}"
        return schedule.further_rows(len(self.rows), count, seed)

    def spare_groups(self) -> int:
        """Return how many spare groups a generation that is requested ahead gets.

        They replace its groups without signal, for which there is no time to sample others then.
        """
        max_groups = self.slots * (1 + self.options.refill)
        expected = schedule.groups_for(self.slots, self.state.signal_shares, max_groups)
        return expected - self.slots - self.state.min_complete

    # ------------------------------------------------------------------------- pending generations

    def pending_is_of(self, drawn: Sequence[RolloutGroup]) -> bool:
        """Return whether the next pending generation was requested for these rows."""
        pending = self.state.pending
        return bool(pending) and pending[0].row_numbers == row_numbers(drawn)

    def pending_is_older_than(self, step: int) -> bool:
        """Return whether weights of another step sample the next pending generation."""
        return bool(self.state.pending) and self.state.pending[0].samples.step != step

    def drop_pending(self) -> None:
        """Forget all pending generations, which were requested for other rows."""
        self.state = replace(self.state, pending=())

    def push(self, pending: PendingGeneration) -> None:
        """Add a pending generation behind the others."""
        self.state = replace(self.state, pending=(*self.state.pending, pending))

    def pop(self) -> None:
        """Forget the next pending generation, which has been sampled."""
        self.state = replace(self.state, pending=self.state.pending[1:])

    @property
    def groups_ahead(self) -> int:
        """Groups of the pending generations after the present one."""
        return sum(len(pending.groups) for pending in self.state.pending[1:])

    # ------------------------------------------------------------------------------- waiting groups

    def take_waiting(self) -> list[RolloutGroup]:
        """Return the groups that wait, which no longer do."""
        waiting = list(self.state.waiting)
        self.state = replace(self.state, waiting=())
        return waiting

    def select(self, groups: Sequence[RolloutGroup], max_groups: int) -> list[RolloutGroup]:
        """Return the oldest complete groups, equally many on every rank. All others wait.

        Collective where groups may be incomplete.

        Args:
            groups: of this rank, the oldest first.
            max_groups: the most groups that are selected.
        """
        if not self.has_stale:
            self.state = replace(self.state, waiting=(), min_complete=0)
            return list(groups)
        complete = [number for number, group in enumerate(groups) if group.complete]
        # Collective: ranks may have completed unequal numbers, and have to score equally many.
        complete_1 = torch.tensor([len(complete)], device=self.accelerator.device)
        min_complete = int(self.accelerator.gather(complete_1).min())
        count = min(min_complete, max_groups)
        chosen = set(complete[:count])
        waiting = [group for number, group in enumerate(groups) if number not in chosen]
        self.state = replace(self.state, waiting=tuple(waiting), min_complete=min_complete - count)
        return [groups[number] for number in complete[:count]]

    def most_missing(self, assessment: GroupAssessment) -> int:
        """Return how many groups with signal are missing on the rank that lacks most.

        Slots that stayed empty count as missing too. Only a run that keeps rollouts over generations
        has any: all others fill their slots at once.
        """
        missing = 0
        for rank in range(assessment.num_ranks):
            has_signal = assessment.signal_of(rank)
            free_slots = self.slots - len(has_signal) if self.has_stale else 0
            missing = max(missing, has_signal.count(False) + free_slots)
        return missing

    def chosen_groups(
        self, assessment: GroupAssessment, refill: GroupAssessment
    ) -> list[list[int]]:
        """Return, for each rank, the numbers of the groups that are learned from.

        Groups without signal give their slots to those of a refill that have signal, whose numbers
        are counted on from the rank's own. Slots that stayed empty are filled first.
        """
        slots = self.slots if self.has_stale else 0
        return [
            schedule.admitted(assessment.signal_of(rank), refill.signal_of(rank), slots)
            for rank in range(assessment.num_ranks)
        ]

    # --------------------------------------------------------------- what is noted of generations

    def note_signal_share(self, assessment: GroupAssessment) -> float:
        """Remember and return the share of groups with signal, the mean over all ranks."""
        has_signal = [assessment.signal_of(rank) for rank in range(assessment.num_ranks)]
        shares_R = torch.tensor([groups.count(True) / len(groups) for groups in has_signal])
        share = float(shares_R.mean())
        remembered = (*self.state.signal_shares, share)[-schedule.REMEMBERED :]
        self.state = replace(self.state, signal_shares=remembered)
        return share

    def note_learned(self, batch: Batch, lengths: Sequence[int]) -> None:
        """Note a generation once its groups are final.

        Args:
            batch: that is learned from; its ages are logged. Collective where there are any.
            lengths: tokens of every rollout of all ranks that was scored.
        """
        if self.has_stale:
            self._log_ages(batch)
        if self.allows_partial:
            remembered = (*self.state.lengths, tuple(lengths))[-schedule.REMEMBERED :]
            self.state = replace(self.state, lengths=remembered)

    def _warn_of_lost_groups(self, generation: Generation) -> None:
        """Warn that some groups in progress cannot be used before `max_steps`.

        That happens where a run resumes with fewer steps than it had begun groups for. The first
        rank warns, once.
        """
        waiting = len(self.state.waiting)
        waiting += sum(len(pending.groups) for pending in self.state.pending)
        learnable = self.generations_left(generation) * self.slots
        if waiting > learnable and self.accelerator.is_main_process:
            steps_needed = (
                math.ceil(waiting / self.slots) * self.layout.optimizer_steps_per_generation
            )
            tqdm.write(
                f"max_steps: {self.context.state().max_steps} ends the run before "
                f"{waiting - learnable} of the {waiting} groups per process that the checkpoint has "
                "set aside (adora_rollouts.budget) can be learned from; "
                f"{generation.key.step + steps_needed} is enough for all",
                file=sys.stderr,
            )

    def _log_ages(self, batch: Batch) -> None:
        """Log how old the rollouts of the batch are, and how many unfinished ones wait."""
        ages_B = batch["age"]
        waiting = [
            *self.state.waiting,
            *(group for pending in self.state.pending for group in pending.groups),
        ]
        begun = [
            rollout for group in waiting if group.rollouts[0].segments for rollout in group.rollouts
        ]
        unfinished = sum(not rollout.has_ended for rollout in begun)
        figures_3 = torch.stack(
            [ages_B.sum(), ages_B.max(), torch.full_like(ages_B[0], unfinished)]
        )
        # Collective: one row per rank (R).
        sums_R, maxima_R, unfinished_R = self.accelerator.gather(figures_3[None]).unbind(dim=1)
        self.log("adora/staleness", sums_R.sum().item() / (len(ages_B) * len(sums_R)))
        self.log("adora/staleness_max", maxima_R.max().item())
        if self.allows_partial:
            budget = self.token_budget or self.config.max_completion_length
            self.log("adora/unfinished", unfinished_R.sum().item())
            self.log("adora/rollout_budget", budget)

    # --------------------------------------------------------------------------------- a checkpoint

    def save(self, folder: Path) -> None:
        """Write what waits on this rank into a checkpoint.

        Where nothing was learned from the last generations, a resumed run samples them again, so
        the state from before them is written.
        """
        if not self.has_stale:
            return
        learned_nothing = self.context.state().global_step == self.step
        state = self.state_before_step if learned_nothing else self.state
        joined = 0
        # An error is raised on all ranks alike. The pending generations from there on are left out;
        # a resumed run requests them again.
        with suppress(RolloutError, UserError):
            for pending in state.pending:
                pending.samples.join()
                joined += 1
        replace(state, pending=state.pending[:joined]).save(folder, self.accelerator.process_index)

    def load(self, checkpoint: Path) -> None:
        """Read what `save` wrote; the rows of the groups are read from the data set.

        Raises:
            UserError: another number of processes wrote unfinished rollouts.
        """
        state = PoolState.load(
            checkpoint, self.accelerator.process_index, self.accelerator.num_processes
        )
        pending = [
            replace(generation, groups=tuple(self._with_rows(generation.groups)))
            for generation in state.pending
        ]
        waiting = tuple(self._with_rows(state.waiting))
        self.state = replace(state, waiting=waiting, pending=tuple(pending))

    def _with_rows(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups with rows; missing ones are read from the data set."""
        missing = [group.problem.row_number for group in groups if not group.row]
        rows: Iterator[Any] = iter(self.rows.__getitems__(missing))
        return [group if group.row else replace(group, row=next(rows)) for group in groups]


def row_numbers(groups: Sequence[RolloutGroup]) -> tuple[int, ...]:
    """Return the number in the data set of each rollout's row."""
    return tuple(group.problem.row_number for group in groups for _ in group.rollouts)
