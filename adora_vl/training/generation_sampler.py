"""Samples generations: the stages draw, schedule and sample of a training step.

A generation is pending from the request of its rollouts until they are sampled. Without `ahead`
only the present one is, and it is sampled at once. With `ahead: k` servers sample k further ones
while the policy learns, with weights that are then up to k generations old. In generation n

1. weights n go into the servers' queue, and behind them the request that measures their drift,
2. the prompts of generation n + k are requested,
3. the rollouts of n arrive, which weights n - k have sampled,
4. they are scored and learned from,
5. the drift of weights n is measured, as the last thing before the weights change.

The importance ratio to the engine corrects for the older weights; the old log-probabilities are
the policy's own. The drift of the present weights is measured by `late_drift.py`.

With tools only the first turns are sampled ahead. The later turns of n follow by weights n, before
n + k is requested.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from accelerate.utils import gather_object

from adora_vl.data.dataloader import with_upright_rgb_images
from adora_vl.data.loading import unreadable_rows
from adora_vl.rollout.rollouts import DrawnProblem, Rollout, RolloutGroup, new_groups_of_rows
from adora_vl.rollout.samplers import AsyncServerSampler, Sampler
from adora_vl.tools.environments import Environments
from adora_vl.training.generation import Generation
from adora_vl.training.group_sampler import GroupSampler, no_token_limits
from adora_vl.training.guards import GenerationGuard
from adora_vl.training.late_drift import LateDriftCheck
from adora_vl.training.pool import Pool, row_numbers_of_rollouts
from adora_vl.training.pool_state import PendingGeneration, TokenLimits
from adora_vl.types import Row, StepContext


def no_upcoming_rows(row_numbers: Sequence[int], distance: int) -> list[Row]:
    """Return no row: before a data loader is made, the rows of later generations are not known."""
    return []


class DrawnGeneration(NamedTuple):
    """A generation and the groups of the problems that the data loader draws for it."""

    generation: Generation
    groups: list[RolloutGroup]


@dataclass(kw_only=True)
class GenerationSampler:
    """Draws, schedules and samples the groups of generations.

    A generation is all rollouts that are sampled before the policy learns again. It is pending from
    the request of its rollouts until they are sampled. With `ahead: k` servers sample the next k
    generations while the policy learns from the present one. Most groups are drawn by the data
    loader. Further ones replace groups without signal, whose rewards are all equal: refill groups,
    or spare groups if servers have to sample them ahead. `guard` ends the run for a row that cannot
    be used, and if no server is left.

    The methods are collective: every rank calls each of them, in the same order.
    """

    context: StepContext
    pool: Pool
    """Remembers the groups that were not learned from yet, and decides which begin."""
    group_sampler: GroupSampler
    """Samples the rollouts of groups."""
    guard: GenerationGuard
    """Ends the run, with a checkpoint, where a row cannot be read or no server is left."""
    phase: Callable[[str], AbstractContextManager[None]]
    """Returns a context in which the seconds count as those of the named phase."""
    environments: Environments | None
    """Gives each rollout an environment; None in a run without environments."""
    drift_check: LateDriftCheck
    """Compares the servers' log-probabilities with the policy's. It is used where servers sample
    generations ahead, so that no rollout is by the present weights."""
    upcoming_rows: Callable[[Sequence[int], int], list[Row]] = no_upcoming_rows
    """Returns the rows that the data loader draws some generations after the rows with these
    numbers; an empty list where they are not known. The trainer sets it once it has a loader."""

    @property
    def generations_ahead(self) -> int:
        """How many generations servers sample before the policy learns from the present one."""
        return self.pool.generations_ahead

    @property
    def sampler(self) -> Sampler:
        """What samples the rollouts: an engine, servers, or Transformers."""
        return self.group_sampler.sampler

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Return the context in which all ranks sample.

        Its seconds are logged. If no server is left, the run saves a checkpoint and ends. An engine
        in this process does not sleep before the block ends, so it gets the weights only once, also
        for several calls of `sample`.
        """
        with (
            self.phase("rollout"),
            self.guard.ending_run_if_no_server_is_left(),
            self.sampler.awake(),
        ):
            yield

    def keeping_engine_awake(self, policy_makes_passes: bool) -> AbstractContextManager[None]:
        """Return a context that keeps the engine awake while a generation is sampled and scored.

        With `refill` (dynamic sampling) a generation is sampled in several batches. An engine with
        sleep mode would sleep between them, and need another weight sync. Without `refill` the
        context does nothing.

        Args:
            policy_makes_passes: whether the policy makes a pass after each batch. It needs the
                engine's memory then, so the engine sleeps between batches after all.
        """
        if policy_makes_passes or not self.context.config.adora_rollouts.refill:
            return nullcontext()
        return self.sampler.awake()

    def draw(self, generation: Generation, rows: list[Row]) -> list[RolloutGroup]:
        """Turn the rows that the data loader has drawn into groups without any tokens yet.

        This is stage 1 of a generation. In a run with environments each rollout gets one of its
        own, and its prompt gets the text that the environment's `reset` returns.

        Args:
            generation: the present one.
            rows: a row for each rollout of this rank; those of a group are neighbours.

        Raises:
            RunError: an image cannot be read on some rank.
            SharedUserError: a prompt or an environment cannot be used on some rank.
        """
        rows = with_upright_rgb_images(rows)
        self.guard.refuse_unusable(rows, generation.key.step)
        groups = new_groups_of_rows(
            rows,
            generation.key,
            start_generation=generation.number,
            first_row_number=self.context.accelerator.process_index * len(rows),
            group_size=generation.group_size,
        )
        return self._enter_environments(groups, generation.key.step, begins_generation=True)

    def schedule(self, generation: Generation, drawn_groups: list[RolloutGroup]) -> None:
        """Decide which groups begin or go on, and request their rollouts.

        This is stage 2 of a generation. Afterwards the present generation is pending in the pool:
        its rollouts are requested, and `sample` waits for them.

        With `ahead` servers also get the present weights, and the requests of the next `ahead`
        generations. The exception are rollouts that are sampled in several parts, within a token
        budget or turn by turn. Then `sample` requests later generations, after it has sampled the
        remaining parts of the present one.

        Args:
            generation: the present one.
            drawn_groups: groups of the problems that the data loader has drawn for it.
        """
        if not self.generations_ahead:
            self.pool.drop_all_pending()  # a generation that was interrupted may have left one
            waiting_groups = self.pool.pop_waiting_groups()
            present = DrawnGeneration(generation=generation, groups=drawn_groups)
            self._request(
                generation,
                present,
                continued_groups=waiting_groups,
                waiting_count=len(waiting_groups),
            )
            return
        # What was requested ahead must be for the rows that are drawn now. It is not where a run
        # begins, or resumes with other rows. Collective: all ranks request anew if one has to.
        has_right_rows = self.pool.next_pending_is_for(drawn_groups)
        if not all(gather_object([has_right_rows])):
            self.pool.drop_all_pending()
        self._queue_weights(generation, drawn_groups)
        max_pending = self.generations_ahead + 1  # the present generation and those ahead
        if self.pool.samples_in_parts:
            max_pending = 1  # `sample` requests those ahead
        self._request_ahead(generation, drawn_groups, earlier_groups=[], max_pending=max_pending)

    def _queue_weights(self, generation: Generation, drawn_groups: list[RolloutGroup]) -> None:
        """Queue the present weights for the servers, and request samples that measure their drift.

        The drift is how far the servers' log-probabilities are from the policy's. If the present
        weights sample the present generation itself, its rollouts tell the drift, and no further
        samples are requested.

        Args:
            generation: the present one.
            drawn_groups: groups of the problems that the data loader has drawn for it.
        """
        assert isinstance(self.sampler, AsyncServerSampler)
        self.sampler.sync_weights()
        if self.pool.older_weights_sample_next_pending(generation.key.step):
            self.drift_check.request([group.row for group in drawn_groups], generation.key.step)

    def sample(
        self, generation: Generation, drawn_groups: list[RolloutGroup]
    ) -> list[RolloutGroup]:
        """Sample the groups of the present generation, and return them, the oldest first.

        This is stage 3. Groups that have waited since an earlier generation are returned too. With
        a token budget (`adora_rollouts.budget`) some rollouts may stay unfinished, but enough
        groups are complete to learn from.

        Args:
            generation: the present one, which `schedule` has made pending.
            drawn_groups: groups of the problems that the data loader has drawn for it.
        """
        # The generation that was requested first is the present one.
        sampled_groups = self.group_sampler.finish_turns(
            generation, self.pool.state.pending_generations[0]
        )
        groups = sorted(
            [*self.pool.pop_waiting_groups(), *sampled_groups],
            key=lambda group: group.start_generation,
        )
        if self.pool.allows_partial_rollouts:
            groups = self._sample_to_ends(generation, groups)
        # These requests had to wait until the present generation was sampled: `schedule` left them.
        if self.generations_ahead and self.pool.samples_in_parts:
            groups = self._request_ahead(
                generation, drawn_groups, groups, max_pending=self.generations_ahead + 1
            )
        self.pool.drop_first_pending()
        if isinstance(self.sampler, AsyncServerSampler):
            for name, seconds in self.sampler.pop_seconds_waited().items():
                self.context.log(f"adora/{name}_waited_s", max(gather_object([seconds])))
        return groups

    def sample_all(self, generation: Generation, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups of an evaluation, with all of their rollouts sampled to the end."""
        return self.group_sampler.sample(generation, groups, no_token_limits(groups))

    def _sample_to_ends(
        self, generation: Generation, groups: list[RolloutGroup]
    ) -> list[RolloutGroup]:
        """Sample the oldest unfinished groups to their ends, if too few groups are complete.

        Args:
            generation: the present one.
            groups: all groups of this rank, the oldest first.

        Returns:
            All groups in their order. Enough of them are complete to learn from.
        """
        groups_to_end = self.pool.groups_that_must_end(groups, generation)
        # Collective: where one rank has such groups, all take part.
        any_rank_has_some = any(gather_object([bool(groups_to_end)]))
        if not any_rank_has_some:
            return groups
        # None for each of these groups: their rollouts are sampled without a limit of tokens.
        limits: TokenLimits = dict.fromkeys(groups_to_end)
        return self.group_sampler.sample(generation, groups, limits)

    def sample_refill_groups(self, generation: Generation, count: int) -> list[RolloutGroup]:
        """Draw `count` further problems, and return their groups with sampled rollouts.

        They replace groups without signal. Each rollout gets as many tokens as the budget of this
        generation allows. With `ahead` the result is empty: spare groups were requested instead,
        since waiting for the servers here would take too long.
        """
        if self.generations_ahead or count <= 0:
            return []
        groups = self._draw_refill_groups(generation, count)
        limits: TokenLimits = dict.fromkeys(range(len(groups)), self.pool.token_budget)
        with self.sampling():
            return self.group_sampler.sample(generation, groups, limits)

    def compare_servers_before_update(self) -> None:
        """Compare the servers' log-probabilities with the policy's, in a run with `ahead`.

        `schedule` has requested samples for this. It is called before the last micro-batch of every
        optimizer step, so before the weights change. A second call in a step does nothing.
        """
        if self.drift_check.is_requested:
            with self.phase("rollout"), self.guard.ending_run_if_no_server_is_left():
                self.drift_check.finish()

    def _request_ahead(
        self,
        generation: Generation,
        drawn_groups: list[RolloutGroup],
        earlier_groups: list[RolloutGroup],
        max_pending: int,
    ) -> list[RolloutGroup]:
        """Request generations from the servers until `max_pending` of them are pending.

        The present generation counts as pending too. At the end of the training fewer are left to
        request.

        Args:
            generation: the present one.
            drawn_groups: groups of the problems that the data loader has drawn for it.
            earlier_groups: groups of this rank that began earlier. Those with unfinished rollouts
                go on in the first generation that is requested.
            max_pending: how many generations are pending afterwards.

        Returns:
            The groups of `earlier_groups` that do not go on in a request: all of them if nothing
            was requested, otherwise those that are complete.
        """
        waiting_groups = earlier_groups
        continued_groups = [group for group in earlier_groups if not group.complete]
        while len(self.pool.state.pending_generations) < max_pending:
            # 0 is the present generation, which has the drawn groups. Later ones draw their own.
            generations_from_present = len(self.pool.state.pending_generations)
            requested = self._draw_generation_after(
                generation, drawn_groups, distance=generations_from_present
            )
            if requested is None:
                break
            self._request(
                generation,
                requested,
                continued_groups=continued_groups,
                waiting_count=len(waiting_groups),
            )
            # The request has taken the unfinished groups along.
            waiting_groups = [group for group in earlier_groups if group.complete]
            continued_groups = []
        return waiting_groups

    def _request(
        self,
        generation: Generation,
        requested: DrawnGeneration,
        *,
        continued_groups: list[RolloutGroup],
        waiting_count: int,
    ) -> None:
        """Request the rollouts of a generation, and add it to the pool's pending generations.

        Its groups are those that go on, those that begin, and spare ones.

        Args:
            generation: the present one. New groups begin in it, also those of a later generation.
            requested: the generation that is requested: the present one or a later one.
            continued_groups: groups of this rank that began earlier and go on in the requested one.
            waiting_count: how many groups of this rank have begun and are not learned from yet,
                besides those of generations that were requested ahead.
        """
        begun_groups = self.pool.begin_groups(
            generation,
            requested.groups,
            waiting_count=waiting_count + self.pool.groups_requested_ahead,
            min_new_groups=self.pool.min_new_groups_beside(continued_groups),
        )
        spare_groups = self._draw_spare_groups(generation, requested.generation)
        groups = [*continued_groups, *begun_groups, *spare_groups]
        # How many tokens of each group's rollouts are sampled in that generation.
        limits = self.pool.token_limits(requested.generation, groups)
        pending = PendingGeneration(
            row_numbers=row_numbers_of_rollouts(requested.groups),
            groups=tuple(groups),
            token_limits=limits,
            samples=self.group_sampler.request_first_turn(requested.generation, groups, limits),
        )
        self.pool.add_pending(pending)

    def _draw_generation_after(
        self, generation: Generation, drawn_groups: list[RolloutGroup], distance: int
    ) -> DrawnGeneration | None:
        """Return the generation `distance` after the present one, with the groups of its problems.

        The result is None on all ranks after the last generation of the training, or if any rank
        cannot read a row now. The step that draws this row for itself then ends the run.

        Args:
            generation: the present one, in which all of these groups begin.
            drawn_groups: groups of the problems that the data loader has drawn for it.
            distance: how many generations later; 0 for the present one.
        """
        if distance == 0:
            return DrawnGeneration(generation=generation, groups=drawn_groups)
        later = self.pool.generation_numbers.generation_after(generation, distance)
        if later is None:
            return None
        rows: list[Row] = []
        # A data set may raise anything for a row that cannot be read.
        with suppress(Exception):
            rows = self.upcoming_rows(row_numbers_of_rollouts(drawn_groups), distance)
        is_readable = bool(rows) and not unreadable_rows(rows)
        # Collective: the ranks request the same generations.
        if not all(gather_object([is_readable])):
            return None
        groups = new_groups_of_rows(
            rows,
            later.key,
            start_generation=generation.number,
            first_row_number=self.context.accelerator.process_index * len(rows),
            group_size=later.group_size,
        )
        return DrawnGeneration(generation=later, groups=groups)

    def _draw_spare_groups(self, generation: Generation, later: Generation) -> list[RolloutGroup]:
        """Draw spare groups for a generation that is requested ahead; none without `ahead`.

        They replace groups without signal. Waiting for other groups would take too long when the
        rewards are known.

        Args:
            generation: the present one, in which the groups begin.
            later: the generation that they are requested for.
        """
        spare_groups: list[RolloutGroup] = []
        spare_count = self.pool.count_spare_groups()
        # They are drawn in rounds of at most as many problems as a generation has groups. For
        # example, with 4 per round 6 spare groups are 4 of round 1 and 2 of round 2. The number of
        # the round is part of the seed, so each round draws other problems.
        problems_per_round = self.pool.max_groups
        while len(spare_groups) < spare_count:
            round_number = 1 + len(spare_groups) // problems_per_round
            missing_count = spare_count - len(spare_groups)
            spare_groups += self._draw_refill_groups(
                later.for_refill_round(round_number), min(problems_per_round, missing_count)
            )
        # The later generation has seeded their draw, but they begin in the present one.
        return [replace(group, start_generation=generation.number) for group in spare_groups]

    def _draw_refill_groups(self, generation: Generation, count: int) -> list[RolloutGroup]:
        """Draw `count` further problems from the data set at random, and return their new groups.

        Raises `RunError` for a row with an image that cannot be read.
        """
        drawn_row_numbers = self.pool.draw_refill_rows(generation, count)
        rows: list[Any] = self.pool.rows.__getitems__(drawn_row_numbers)
        self.guard.refuse_unusable(rows, generation.key.step)
        empty_rollouts = (Rollout(),) * generation.group_size
        # Groups are numbered over all ranks, and the number is part of a group's seeds. Each rank
        # has `pool.max_groups` numbers of its own. For example, with 4 of them rank 1 has 4 to 7.
        first_number = self.context.accelerator.process_index * self.pool.max_groups
        groups = [
            RolloutGroup(
                problem=DrawnProblem(
                    row_number=row_number, key=generation.key, group_number=number
                ),
                row=row,
                start_generation=generation.number,
                rollouts=empty_rollouts,
            )
            for number, (row_number, row) in enumerate(
                zip(drawn_row_numbers, rows, strict=True), start=first_number
            )
        ]
        return self._enter_environments(groups, generation.key.step, begins_generation=False)

    def _enter_environments(
        self, groups: list[RolloutGroup], step: int, *, begins_generation: bool
    ) -> list[RolloutGroup]:
        """Return the groups with an environment for every rollout; unchanged without environments.

        Args:
            groups: the groups that begin.
            step: optimizer steps that have been made, for messages.
            begins_generation: whether these are the first groups of a generation. All environments
                are free again then, since no earlier rollout needs its own any more.
        """
        if self.environments is not None:
            with self.guard.ending_run_on_user_error(step):
                groups = self.environments.reset_for_groups(
                    groups,
                    self.context.config.seed,
                    control_tokens=self.guard.control_tokens,
                    begins_generation=begins_generation,
                )
        return groups
