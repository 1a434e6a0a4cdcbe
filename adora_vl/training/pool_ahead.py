"""The pool where servers sample generations ahead: while the policy learns, by weights that are as
many behind.

    generation n:  weights n go into the servers' queue, then what measures their drift | the
        prompts of n + k follow, and are asked for | the rollouts of n, by weights n - k, are joined
        | grade and learn | the drift is judged, the last thing before weights change

The ratio to the engine corrects for the older weights; the old log-probabilities are the policy's
own. Since all of these rollouts are stale, the drift is measured on short ones of their own, by the
present weights. With k > 1 they come after generation n + k - 1, which the policy would otherwise
wait for where it could learn from n. With tools only the first turns are sampled ahead: the later
ones of n follow by weights n, before n + k is asked for.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from accelerate.utils import gather_object

from adora_vl.data.loading import unreadable_rows
from adora_vl.rollout.rollouts import RolloutGroup, groups_of, open_rollouts
from adora_vl.rollout.samplers import AsyncServerSampler
from adora_vl.training.generation import Generation
from adora_vl.training.pool import Pool
from adora_vl.training.pool_state import ComingGeneration
from adora_vl.training.schedule import groups_for, groups_to_complete, place_of
from adora_vl.types import Row


class PoolAhead(Pool):
    """All ranks call it together."""

    def __init__(
        self,
        *given: Any,
        next_rows: Callable[[list[int], int], list[Row]],
        drift: Callable[[list[Row], int], Callable[[], None]],
        **more: Any,
    ) -> None:
        """`next_rows`: of the generation so many after the one with rows of these numbers.

        `drift`: asks for what says how far the policy is from servers that have its present
        weights, and returns what judges it.
        """
        super().__init__(*given, **more)
        assert isinstance(self.sampler, AsyncServerSampler)
        self.servers = self.sampler
        self.next_rows = next_rows
        self.drift = drift
        self.aged = True
        # of the present weights, once servers have answered
        self._judge_drift: Callable[[], None] | None = None

    def _go_on(
        self, now: Generation, drawn: list[RolloutGroup], budget: int | None
    ) -> list[RolloutGroup]:
        """The groups of a generation that was asked for before.

        Meanwhile servers get the present weights, and more.
        """
        servers = self.servers
        expected = self.state.coming[0] if self.state.coming else None
        fits = expected is not None and expected.numbers == _numbers(drawn)
        if not all(gather_object([fits])):  # where a run begins, or goes on with other rows
            self.state = replace(self.state, coming=())
            expected = None
        with self.phase("rollout"), self.guard.watching():
            servers.give_weights()
            stale = expected is not None and expected.ticket.step != now.step
            if stale and self._judge_drift is None:  # once for all generations of a step
                self._judge_drift = self.drift(now.rows[:: now.group_size], now.step)
            # more of the present generation is asked for below
            now_first = self.waits or self.turns is not None
            self._ask_ahead(
                now, drawn=drawn, count=1 if now_first else servers.ahead + 1, budget=budget
            )
        asked = self.state.coming[0]
        groups = self._sampled(now, list(asked.groups), asked.limits, asked.ticket)
        groups = sorted([*self.state.groups, *groups], key=lambda group: group.began)
        if self.waits:
            # then what is paused does not come back
            left = self._left(now)
            last = self._left(now) <= servers.ahead
            needed = groups_to_complete(
                len(groups) + self._flying, places=self.places, left=left, least=self.least
            )
            groups = self._completed(now, groups, len(groups) if last else min(len(groups), needed))
        if now_first:
            with self.phase("rollout"), self.guard.watching():
                groups = self._ask_ahead(
                    now, drawn=drawn, count=servers.ahead + 1, budget=budget, present=groups
                )
        self.state = replace(self.state, coming=self.state.coming[1:])
        for name, seconds in servers.waited().items():
            self.log(f"adora/{name}_waited_s", max(gather_object([seconds])))
        return groups

    def before_weights_change(self) -> None:
        judge = self._judge_drift
        self._judge_drift = None
        if judge is not None:
            with self.phase("rollout"), self.guard.watching():
                judge()

    def _ask_ahead(
        self,
        now: Generation,
        drawn: list[RolloutGroup],
        count: int,
        budget: int | None,
        present: Sequence[RolloutGroup] = (),
    ) -> list[RolloutGroup]:
        """Ask until `count` generations are coming, with this one.

        Groups of `present` that go on are taken along.
        """
        rest = list(present)
        going = [group for group in present if not group.complete]
        while len(self.state.coming) < count:
            later = self._later(now, distance := len(self.state.coming))
            rows = None if later is None else self._rows_after(now, drawn, distance)
            if later is None or rows is None:
                break
            fresh = groups_of(
                rows,
                later.where,
                now.number,
                self.accelerator.process_index * len(rows),
                now.group_size,
            )
            numbers = _numbers(fresh)
            waiting = len(rest) + self._flying
            begun = [
                *self._begun(now, fresh, waiting, self._least_beside(going)),
                *self._spare(later, now.number),
            ]
            groups = [*going, *begun]
            rest = [group for group in rest if group not in going]
            going = []
            limits: dict[int, int | None] = dict.fromkeys(range(len(groups)))
            if budget is not None:
                late = [later.number - group.began >= self.asked.staleness for group in groups]
                limits = {place: None if old else budget for place, old in enumerate(late)}
            going_on = open_rollouts(groups, limits)
            asked, _ = self._asked(later, groups, limits, going_on)
            ticket = self.servers.begin(
                [self._ask(asked[place], rollout) for place, rollout in going_on.items()]
            )
            coming = ComingGeneration(
                numbers=numbers, groups=tuple(groups), limits=limits, ticket=ticket
            )
            self.state = replace(self.state, coming=(*self.state.coming, coming))
        return rest

    def _least_beside(self, going: Sequence[RolloutGroup]) -> int:
        """How many groups begin in any case in a generation that these go along with, so that it
        has `least` of its own.
        """
        if not self.waits:
            return self.least
        # Collective: the ranks may have unequal numbers that go on, and have to begin equally many.
        numbers: list[int] = gather_object([len(going)])
        fewest = min(numbers)
        return max(0, self.least - fewest)

    def _spare(self, later: Generation, began: int) -> list[RolloutGroup]:
        """Groups of further problems for those of a generation that will have no signal: then there
        is no time.
        """
        found: list[RolloutGroup] = []
        most = self.places * (1 + self.asked.refill)
        wanted = (
            groups_for(self.places, self.state.signal, most) - self.places - self.state.complete
        )
        while len(found) < wanted:
            further = replace(later, attempt=1 + len(found) // self.places)
            found += self._further(further, min(self.places, wanted - len(found)))
        return [replace(group, began=began) for group in found]

    def _with_further(
        self, generation: Generation, groups: list[RolloutGroup], budget: int | None, count: int
    ) -> list[RolloutGroup]:
        """Those that are there already."""
        return groups

    @property
    def _flying(self) -> int:
        """Groups that servers were asked for beside those of the present generation."""
        return sum(len(one.groups) for one in self.state.coming[1:])

    def _later(self, now: Generation, distance: int) -> Generation | None:
        """The generation so many after this one; None after the last."""
        if distance >= self._left(now):
            return None
        number = self._until(now.step, now.micro) + distance
        step, micro = divmod(number * self.shape.cycle, self.shape.accumulated)
        if self.shape.has_one_step:
            step, before = place_of(number, *self._in_step_and_epoch)
            micro = before * self.shape.cycle
        return replace(now, step=step, key=f"{step}/{micro}", number=number)

    def _rows_after(
        self, now: Generation, drawn: list[RolloutGroup], distance: int
    ) -> list[Row] | None:
        """Of the generation so many after this one.

        None where one cannot be read: the step that draws it says so.
        """
        if not distance:
            return now.rows
        rows: list[Row] = []
        with suppress(Exception):
            rows = self.next_rows(list(_numbers(drawn)), distance)
        readable = bool(rows) and not unreadable_rows(rows)
        return rows if all(gather_object([readable])) else None


def _numbers(groups: Sequence[RolloutGroup]) -> tuple[int, ...]:
    """Of the rows, one of each rollout, in the data set."""
    return tuple(group.problem.number for group in groups for _ in group.rollouts)
