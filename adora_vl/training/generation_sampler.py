"""Samples generations: the stages draw, schedule and sample of a training step.

Every generation is pending before it is sampled. Without `ahead` there is one, the present one,
and it is sampled at once. With `ahead: k` servers sample k further ones while the policy learns,
with weights that are then up to k generations old:

    generation n:  weights n go into the servers' queue, then the request that measures their drift
        | the prompts of n + k follow, and are requested | the rollouts of n, by weights n - k, are
        joined | score and learn | the drift is judged, as the last thing before weights change

The importance ratio to the engine corrects for the older weights; the old log-probabilities are the
policy's own. Since all of these rollouts are stale, the drift check needs on-policy samples of its
own: it requests a few short rollouts with the current weights. They are queued behind generation
n + k - 1, so for k > 1 the policy would have to wait for that generation where it could learn from
n; the result is therefore joined at the end of the step.

With tools only the first turns are sampled ahead. The later turns of n follow by weights n, before
n + k is requested.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from accelerate.utils import gather_object
from torch import Tensor

from adora_vl.data.dataloader import DistinctRows, EpochRepeatSampler, shown_rows
from adora_vl.data.loading import unreadable_rows
from adora_vl.rollout.agreement import CHECK_ROWS, CHECK_TOKENS
from adora_vl.rollout.engine_pair import EnginePair, Prompts
from adora_vl.rollout.rollouts import DrawnProblem, Rollout, RolloutGroup, groups_of
from adora_vl.rollout.samplers import AsyncServerSampler, PendingSamples, Sampler
from adora_vl.tools.environments import Environments
from adora_vl.training.generation import Generation
from adora_vl.training.group_sampler import GroupSampler, to_the_ends
from adora_vl.training.guards import GenerationGuard
from adora_vl.training.pool import Pool, row_numbers
from adora_vl.training.pool_state import PendingGeneration, TokenLimits
from adora_vl.types import Row, StepContext


@dataclass
class RowsAhead:
    """The rows that the data loader will draw; filled when the training's loader is made."""

    rows: DistinctRows | None = None
    order: EpochRepeatSampler | None = None

    def after(self, numbers: Sequence[int], distance: int) -> list[Row]:
        """Return the rows of the generation `distance` after that of these row numbers."""
        assert self.rows is not None
        assert self.order is not None
        rows: list[Row] = self.rows.rows_after(list(numbers), self.order, distance)
        return rows


@dataclass(frozen=True, kw_only=True)
class _RequestedDrift:
    """Samples of a step's weights that no one has judged yet."""

    step: int
    prompts: Prompts
    pending: PendingSamples


class LateDriftCheck:
    """Judges the drift of the present weights, of which no generation has samples yet.

    The samples are requested once in an optimizer step, and judged at its end.
    """

    def __init__(
        self, pair: EnginePair, check: Callable[[Tensor, Tensor, Tensor, int], None]
    ) -> None:
        """Build the check.

        Args:
            pair: the servers that sample, and the policy.
            check: ends the run where they are too far apart. It gets the policy's
                log-probabilities, the engine's, and the mask, (B, C) each, and the step.
        """
        self._pair = pair
        self._check = check
        self._requested: _RequestedDrift | None = None

    def request(self, rows: list[Row], step: int) -> None:
        """Request short rollouts of the first of these rows, once in an optimizer step. Collective.

        The servers have the present weights.
        """
        if self._requested is not None:
            return
        prompts = self._pair.read_prompts(rows[:CHECK_ROWS])
        pending = self._pair.begin_sampling(
            prompts, max_tokens=CHECK_TOKENS, check_name=f"drift/{step}"
        )
        self._requested = _RequestedDrift(step=step, prompts=prompts, pending=pending)

    @property
    def is_requested(self) -> bool:
        """Whether samples were requested, and are not judged yet."""
        return self._requested is not None

    def finish(self) -> None:
        """Join and judge the samples, if there are any. Collective."""
        requested = self._requested
        # Before they are joined: a second call within the step has nothing to do.
        self._requested = None
        if requested is None:
            return
        rollouts = self._pair.join_sampling(requested.prompts, requested.pending)
        # One rank may have an image among its rows where another has none.
        with self._pair.images.vision.unshared():
            logps_BC = self._pair.policy_logps(rollouts)
            self._check(logps_BC, rollouts.logps_BC, rollouts.mask_BC, requested.step)


class GenerationSampler:
    """Draws, schedules and samples the groups of generations.

    The methods are collective: every rank calls each of them, in the same order.
    """

    def __init__(
        self,
        context: StepContext,
        pool: Pool,
        groups: GroupSampler,
        guard: GenerationGuard,
        phase: Callable[[str], AbstractContextManager[None]],
        environments: Environments | None,
        rows_ahead: Callable[[Sequence[int], int], list[Row]],
        late_drift: LateDriftCheck,
    ) -> None:
        """Build a sampler of generations.

        Args:
            context: what every part of a training step is built from.
            pool: remembers the groups, and has the rules.
            groups: samples their rollouts.
            guard: ends the run where rows are unreadable or no server is left.
            phase: a context in which the seconds count as those of the named phase.
            environments: enters groups into environments; None without environments.
            rows_ahead: returns the rows of a later generation, as `RowsAhead.after` does.
            late_drift: judges the drift of weights of which no generation has samples.
        """
        self.accelerator = context.accelerator
        self.config = context.config
        self.log = context.log
        self.pool = pool
        self.groups = groups
        self.guard = guard
        self.phase = phase
        self.environments = environments
        self.rows_ahead = rows_ahead
        self.late_drift = late_drift
        self.ahead = pool.ahead

    @property
    def sampler(self) -> Sampler:
        """The sampler of the rollouts."""
        return self.groups.sampler

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Inside, all ranks sample: the seconds count, and a lost server saves and ends the run.

        An engine in this process stays awake until the end, so that it gets the weights once,
        however many turns and parts are sampled.
        """
        with self.phase("rollout"), self.guard.watching(), self.sampler.awake():
            yield

    def draw(self, generation: Generation, rows: list[Row]) -> list[RolloutGroup]:
        """Stage 1: the groups of the problems that the data loader has drawn, in environments.

        Raises:
            RunError: an image cannot be read on some rank.
            SharedUserError: a prompt or an environment cannot be used on some rank.
        """
        rows = shown_rows(rows)
        self.guard.check(rows, generation.key.step)
        drawn = groups_of(
            rows,
            generation.key,
            began_in=generation.number,
            first_row_number=self.accelerator.process_index * len(rows),
            group_size=generation.group_size,
        )
        return self._in_environments(drawn, generation.key.step, anew=True)

    def schedule(self, generation: Generation, drawn: list[RolloutGroup]) -> None:
        """Stage 2: which groups begin or go on, and for how many tokens.

        Afterwards the present generation is pending. With `ahead` servers get the present weights,
        and the requests of later generations; those of runs that continue rollouts wait until
        `sample` has sampled the later turns and the ends of this generation, which come first.
        """
        carried: list[RolloutGroup] = []
        upto = 1
        if self.ahead:
            # Collective: where a run begins, or resumes with other rows, all ranks request anew.
            if not all(gather_object([self.pool.pending_is_of(drawn)])):
                self.pool.drop_pending()
            self._give_weights(generation, drawn)
            if not self.pool.continues:
                upto = self.ahead + 1
        else:
            self.pool.drop_pending()  # a generation that was interrupted may have left one
            carried = self.pool.take_waiting()
        self._request(generation, drawn, carried, upto)

    def _give_weights(self, generation: Generation, drawn: list[RolloutGroup]) -> None:
        """Queue the present weights for the servers, and request what measures their drift."""
        assert isinstance(self.sampler, AsyncServerSampler)
        self.sampler.sync_weights()
        if self.pool.pending_is_older_than(generation.key.step):
            self.late_drift.request([group.row for group in drawn], generation.key.step)

    def sample(self, generation: Generation, drawn: list[RolloutGroup]) -> list[RolloutGroup]:
        """Stage 3: the groups of the present generation, the oldest first, with all turns.

        Where rollouts may pause, enough groups are complete afterwards.
        """
        groups = self.groups.finish(generation, self.pool.state.pending[0])
        groups = sorted([*self.pool.take_waiting(), *groups], key=lambda group: group.began)
        if self.pool.allows_partial:
            late = self.pool.must_end_now(groups, generation)
            to_their_ends: TokenLimits = dict.fromkeys(late)
            # Collective: where one rank samples, all take part.
            if any(gather_object([bool(late)])):
                groups = self.groups.sample(generation, groups, to_their_ends)
        if self.ahead and self.pool.continues:
            groups = self._request(generation, drawn, groups, self.ahead + 1)
        self.pool.pop()
        if isinstance(self.sampler, AsyncServerSampler):
            for name, seconds in self.sampler.pop_seconds_waited().items():
                self.log(f"adora/{name}_waited_s", max(gather_object([seconds])))
        return groups

    def sample_all(self, generation: Generation, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups of an evaluation, sampled to their ends."""
        return self.groups.sample(generation, groups, to_the_ends(groups))

    def sample_further(self, generation: Generation, count: int) -> list[RolloutGroup]:
        """Return groups of `count` further problems, sampled within the budget.

        There are none for a count below 1.

        With `ahead` there is no time to sample any: spare groups were requested instead.
        """
        if self.ahead or count <= 0:
            return []
        begun = self._draw_further(generation, count)
        self.log("adora/further_batches", 1.0)
        limits: TokenLimits = dict.fromkeys(range(len(begun)), self.pool.token_budget)
        with self.sampling():
            return self.groups.sample(generation, begun, limits)

    def before_weights_change(self) -> None:
        """Judge the drift that was requested in this step, if it was.

        Called before the last micro-batch of every optimizer step; a second call does nothing.
        """
        if self.late_drift.is_requested:
            with self.phase("rollout"), self.guard.watching():
                self.late_drift.finish()

    def _request(
        self,
        generation: Generation,
        drawn: list[RolloutGroup],
        groups: list[RolloutGroup],
        upto: int,
    ) -> list[RolloutGroup]:
        """Request generations until `upto` are pending, including the present one.

        Args:
            generation: the present one.
            drawn: groups of the problems that the data loader has drawn for it.
            groups: of this rank, which have begun. Without `ahead` all go along with the first
                request, else only the unfinished ones.
            upto: generations that are pending afterwards, fewer at the end of the training.

        Returns:
            The groups that no request took along.
        """
        resting = list(groups)
        going = [group for group in groups if not self.ahead or not group.complete]
        while len(self.pool.state.pending) < upto:
            distance = len(self.pool.state.pending)
            later: Generation | None = generation
            fresh: list[RolloutGroup] | None = drawn
            if distance > 0:
                later = self.pool.generation_after(generation, distance)
            if later is not None and distance > 0:
                fresh = self._groups_after(generation, later, drawn, distance)
            if later is None or fresh is None:
                break
            begun = self.pool.begin_groups(
                generation,
                fresh,
                waiting=len(resting) + self.pool.groups_ahead,
                min_begun=self.pool.min_begun_beside(going),
            )
            requested = [*going, *begun, *self._draw_spare(generation, later)]
            resting = [group for group in resting if group not in going]
            going = []
            limits = self.pool.token_limits(later, requested)
            pending = PendingGeneration(
                row_numbers=row_numbers(fresh),
                groups=tuple(requested),
                token_limits=limits,
                samples=self.groups.begin(later, requested, limits),
            )
            self.pool.push(pending)
        return resting

    def _groups_after(
        self,
        generation: Generation,
        later: Generation,
        drawn: list[RolloutGroup],
        distance: int,
    ) -> list[RolloutGroup] | None:
        """Return the groups of the problems that the data loader draws for a later generation.

        None on all ranks where any row on any rank cannot be read; the step that draws the row
        reports it.

        Args:
            generation: the present one, in which the groups begin.
            later: the generation that they are drawn for.
            drawn: groups of the problems of the present one.
            distance: generations between the two.
        """
        rows: list[Row] = []
        with suppress(Exception):
            rows = self.rows_ahead(list(row_numbers(drawn)), distance)
        is_readable = bool(rows) and not unreadable_rows(rows)
        # Collective: the ranks request the same generations.
        if not all(gather_object([is_readable])):
            return None
        return groups_of(
            rows,
            later.key,
            began_in=generation.number,
            first_row_number=self.accelerator.process_index * len(rows),
            group_size=later.group_size,
        )

    def _draw_spare(self, generation: Generation, later: Generation) -> list[RolloutGroup]:
        """Begin spare groups of further problems for a generation that is requested ahead."""
        spare: list[RolloutGroup] = []
        count = self.pool.spare_groups() if self.ahead else 0
        slots = self.pool.slots
        while len(spare) < count:
            attempt = later.attempt(1 + len(spare) // slots)
            spare += self._draw_further(attempt, min(slots, count - len(spare)))
        return [replace(group, began=generation.number) for group in spare]

    def _draw_further(self, generation: Generation, count: int) -> list[RolloutGroup]:
        """Draw `count` further problems and begin their groups."""
        numbers = self.pool.further_rows(generation, count)
        rows: list[Any] = self.pool.rows.__getitems__(numbers)
        self.guard.check(rows, generation.key.step)
        empty = (Rollout(),) * generation.group_size
        first_slot = self.accelerator.process_index * self.pool.slots  # numbered over all ranks
        begun = [
            RolloutGroup(
                problem=DrawnProblem(row_number=number, key=generation.key, slot=slot),
                row=row,
                began=generation.number,
                rollouts=empty,
            )
            for slot, (number, row) in enumerate(zip(numbers, rows, strict=True), first_slot)
        ]
        return self._in_environments(begun, generation.key.step, anew=False)

    def _in_environments(
        self, groups: list[RolloutGroup], step: int, *, anew: bool
    ) -> list[RolloutGroup]:
        """Give every rollout an environment of its own, where the run has environments."""
        if self.environments is not None:
            with self.guard.beginning(step):
                groups = self.environments.entered(groups, self.config.seed, anew=anew)
        return groups
