"""The pool for servers that sample generations ahead, while the policy learns.

The weights that sample a generation are then up to `ahead` generations old (k below):

    generation n:  weights n go into the servers' queue, then the request that measures their drift
        | the prompts of n + k follow, and are requested | the rollouts of n, by weights n - k, are
        joined | grade and learn | the drift is judged, as the last thing before weights change

The importance ratio to the engine corrects for the older weights; the old log-probabilities are the
policy's own. Since all of these rollouts are stale, the drift check needs on-policy samples of its
own: it requests a few short rollouts with the current weights. They are queued behind generation
n + k - 1, so for k > 1 the policy would have to wait for that generation where it could learn from
n; the result is therefore joined at the end of the step.

With tools only the first turns are sampled ahead. The later turns of n follow by weights n, before
n + k is requested.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from accelerate.utils import gather_object

from adora_vl.data.loading import unreadable_rows
from adora_vl.rollout.rollouts import RolloutGroup, StepKey, groups_of, unfinished_rollouts
from adora_vl.rollout.samplers import AsyncServerSampler
from adora_vl.training.generation import Generation
from adora_vl.training.pool import Pool, TokenLimits
from adora_vl.training.pool_state import PendingGeneration
from adora_vl.training.schedule import groups_for, groups_to_complete, place_of
from adora_vl.types import Row


class PoolAhead(Pool):
    """Fills each generation with rollouts that servers were asked for up to `ahead` generations
    before.

    The methods are collective: every rank calls each of them, in the same order.
    """

    def __init__(
        self,
        *args: Any,
        next_rows: Callable[[list[int], int], list[Row]],
        request_drift: Callable[[list[Row], int], Callable[[], None]],
        **kwargs: Any,
    ) -> None:
        """Build an empty pool; other arguments are those of `Pool`.

        Args:
            args: of `Pool`; the sampler is an `AsyncServerSampler`.
            next_rows: `next_rows(row_numbers, distance)` returns the rows of the generation
                `distance` after the one whose rows have these numbers.
            request_drift: `request_drift(rows, step)` requests short rollouts by the current
                weights, and returns what joins them and judges the drift of the servers from the
                policy.
            kwargs: of `Pool`.
        """
        super().__init__(*args, **kwargs)
        assert isinstance(self.sampler, AsyncServerSampler)
        self.servers = self.sampler
        self.next_rows = next_rows
        self.request_drift = request_drift
        self.has_stale = True
        # Judges the drift of the present weights; None where it was not requested in this step.
        self._judge_drift: Callable[[], None] | None = None

    def _sample_generation(
        self, generation: Generation, drawn: list[RolloutGroup], budget: int | None
    ) -> list[RolloutGroup]:
        """Join the groups of a generation that was requested before.

        Meanwhile the servers get the current weights and the requests of later generations.
        """
        servers = self.servers
        expected = self.state.pending[0] if self.state.pending else None
        fits = expected is not None and expected.row_numbers == _row_numbers(drawn)
        # Collective: where a run begins, or resumes with other rows, all ranks request anew.
        if not all(gather_object([fits])):
            self.state = replace(self.state, pending=())
            expected = None
        # With a budget or tools the later turns and the ends of this generation come first, so more
        # than this generation is requested only once they have been sampled.
        continues = self.allows_partial or self.tool_loop is not None
        with self.phase("rollout"), self.guard.watching():
            servers.give_weights()
            is_stale = expected is not None and expected.samples.step != generation.key.step
            if is_stale and self._judge_drift is None:  # once for all generations of a step
                problems = generation.rows[:: generation.group_size]
                self._judge_drift = self.request_drift(problems, generation.key.step)
            self._request_ahead(
                generation,
                drawn=drawn,
                count=1 if continues else servers.ahead + 1,
                budget=budget,
            )
        pending = self.state.pending[0]
        groups = self._sample(
            generation, list(pending.groups), pending.token_limits, pending.samples
        )
        groups = sorted([*self.state.waiting, *groups], key=lambda group: group.began)
        if self.allows_partial:
            groups = self._complete_needed(generation, groups)
        if continues:
            with self.phase("rollout"), self.guard.watching():
                groups = self._request_ahead(
                    generation,
                    drawn=drawn,
                    count=servers.ahead + 1,
                    budget=budget,
                    present=groups,
                )
        self.state = replace(self.state, pending=self.state.pending[1:])
        for name, seconds in servers.waited().items():
            self.log(f"adora/{name}_waited_s", max(gather_object([seconds])))
        return groups

    def before_weights_change(self) -> None:
        """Join and judge the drift that was requested in this step, if it was.

        Called before the last micro-batch of every optimizer step.
        """
        judge_drift = self._judge_drift
        self._judge_drift = None
        if judge_drift is not None:
            with self.phase("rollout"), self.guard.watching():
                judge_drift()

    def _complete_needed(
        self, generation: Generation, groups: list[RolloutGroup]
    ) -> list[RolloutGroup]:
        """Finish as many of the oldest groups as the schedule needs now."""
        remaining = self._generations_left(generation)
        needed = groups_to_complete(
            len(groups) + self._groups_ahead,
            slots=self.slots,
            remaining=remaining,
            min_groups=self.min_groups,
        )
        # In the last generations no later request continues a group that pauses, so all of them end.
        is_last = remaining <= self.servers.ahead
        count = len(groups) if is_last else min(len(groups), needed)
        return self._complete_oldest(generation, groups, count)

    def _request_ahead(
        self,
        generation: Generation,
        drawn: list[RolloutGroup],
        count: int,
        budget: int | None,
        present: Sequence[RolloutGroup] = (),
    ) -> list[RolloutGroup]:
        """Request generations until `count` are pending, including this one.

        Args:
            generation: the present one.
            drawn: groups of the problems that the data loader has drawn for it.
            count: generations that are pending afterwards, fewer at the end of the training.
            budget: tokens per rollout; None: to the rollouts' ends.
            present: groups of this rank that have been sampled so far. The unfinished ones continue
                with the next request.

        Returns:
            The groups of `present` that no request took along.
        """
        resting = list(present)
        continuing = [group for group in present if not group.complete]
        while len(self.state.pending) < count:
            distance = len(self.state.pending)
            later = self._generation_after(generation, distance)
            rows = None
            if later is not None:
                rows = self._rows_after(generation, drawn, distance)
            if later is None or rows is None:
                break
            fresh = groups_of(
                rows,
                later.key,
                began=generation.number,
                first=self.accelerator.process_index * len(rows),
                generations=generation.group_size,
            )
            row_numbers = _row_numbers(fresh)
            begun = self._begin_groups(
                generation,
                fresh,
                waiting=len(resting) + self._groups_ahead,
                min_begun=self._min_begun_beside(continuing),
            )
            groups = [*continuing, *begun, *self._draw_spare(later, generation.number)]
            resting = [group for group in resting if group not in continuing]
            continuing = []
            limits = self._limits_of(groups, later, budget)
            unfinished = unfinished_rollouts(groups, limits)
            continuations, _ = self._continuations(later, groups, limits, unfinished)
            samples = self.servers.begin(
                [self._request(continuations[key], rollout) for key, rollout in unfinished.items()]
            )
            pending = PendingGeneration(
                row_numbers=row_numbers, groups=tuple(groups), token_limits=limits, samples=samples
            )
            self.state = replace(self.state, pending=(*self.state.pending, pending))
        return resting

    def _limits_of(
        self, groups: Sequence[RolloutGroup], later: Generation, budget: int | None
    ) -> TokenLimits:
        """Tokens per rollout by the number of the group, for a generation that comes later.

        A group that will be as old as `staleness` allows is sampled to its end.
        """
        limits: TokenLimits = dict.fromkeys(range(len(groups)))
        if budget is None:
            return limits
        for number, group in enumerate(groups):
            if later.number - group.began < self.options.staleness:
                limits[number] = budget
        return limits

    def _min_begun_beside(self, continuing: Sequence[RolloutGroup]) -> int:
        """Fewest groups that begin in a generation that these groups continue in.

        With them the generation has `min_groups`. Else it could run dry: groups that are complete
        now keep problems from beginning, and may be used up before its turn.
        """
        if not self.allows_partial:
            return self.min_groups
        # Collective: the ranks may continue unequal numbers, and have to begin equally many.
        continuing_of_ranks: list[int] = gather_object([len(continuing)])
        fewest = min(continuing_of_ranks)
        return max(0, self.min_groups - fewest)

    def _draw_spare(self, later: Generation, began: int) -> list[RolloutGroup]:
        """Begin spare groups of further problems for a later generation.

        They replace its groups without signal, for which there is no time to sample others then.

        Args:
            later: the generation that they are requested for.
            began: the number of the generation in which they begin.
        """
        spare: list[RolloutGroup] = []
        max_groups = self.slots * (1 + self.options.refill)
        expected = groups_for(self.slots, self.state.signal_shares, max_groups)
        count = expected - self.slots - self.state.min_complete
        while len(spare) < count:
            attempt = later.attempt(1 + len(spare) // self.slots)
            spare += self._draw_further(attempt, min(self.slots, count - len(spare)))
        return [replace(group, began=began) for group in spare]

    def _sample_further(
        self, generation: Generation, groups: list[RolloutGroup], budget: int | None, count: int
    ) -> list[RolloutGroup]:
        """Return the groups alone: with servers there is no time to sample further problems."""
        return groups

    @property
    def _groups_ahead(self) -> int:
        """Groups of the pending generations after the present one."""
        return sum(len(pending.groups) for pending in self.state.pending[1:])

    def _generation_after(self, generation: Generation, distance: int) -> Generation | None:
        """The generation `distance` after this one; None after the last of the training."""
        if distance >= self._generations_left(generation):
            return None
        number = self._generations_before(generation.key.step, generation.key.micro) + distance
        step, micro = divmod(number * self.shape.cycle, self.shape.accumulated)
        if self.shape.has_one_step:
            step, before_in_step = place_of(number, *self._generations_of_step_and_epoch)
            micro = before_in_step * self.shape.cycle
        key = StepKey(mode="train", step=step, micro=micro)
        return replace(generation, key=key, number=number)

    def _rows_after(
        self, generation: Generation, drawn: list[RolloutGroup], distance: int
    ) -> list[Row] | None:
        """The rows of the generation `distance` after this one.

        None on all ranks where any row on any rank cannot be read; the step that draws the row
        reports it.
        """
        if not distance:
            return generation.rows
        rows: list[Row] = []
        with suppress(Exception):
            rows = self.next_rows(list(_row_numbers(drawn)), distance)
        readable = bool(rows) and not unreadable_rows(rows)
        return rows if all(gather_object([readable])) else None


def _row_numbers(groups: Sequence[RolloutGroup]) -> tuple[int, ...]:
    """Number in the data set of each rollout's row."""
    return tuple(group.problem.row_number for group in groups for _ in group.rollouts)
