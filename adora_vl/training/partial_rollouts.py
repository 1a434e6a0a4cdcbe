"""Partial rollouts: a generation stops after a budget of tokens, and what has not ended goes on in the next one.

Sources: Kimi k1.5 (arXiv 2501.12599, section 2.6.2) and APRIL (arXiv 2509.18521), for texts. Ours keeps whole groups,
takes the images along, and drops nothing: a group is learned from when its last rollout has ended, the oldest groups
first. Where complete groups wait for a place fewer begin, since waiting makes them stale; and towards the end of the
training only as many begin as can still be learned from. A problem that does not begin is the first to begin later.

All ranks begin, keep and learn from equally many groups, so only the groups themselves have to be remembered.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from adora_vl.config.batch_plan import Shape
from adora_vl.config.checks import check_budget
from adora_vl.data.dataloader import ROW_NUMBER, DistinctRows
from adora_vl.rollout.rollouts import Answers, DrawnProblem, Rollout, RolloutAnswer, RolloutGroup, Segment, Span
from adora_vl.training.generation import Extension, Generation
from adora_vl.training.policies import REMEMBERED, automatic_budget, groups_to_complete, how_many_begin, limit_of
from adora_vl.training.pool_state import PoolState
from adora_vl.types import Row, StepContext

# Samples a segment for each row. All ranks call it together, also without rows.
Sample = Callable[[list[Row], list[Segment]], list[RolloutAnswer]]


class PartialRollouts(Extension):
    """Samples a generation up to its budget, and gives it the groups that are complete. All ranks call it together."""

    def __init__(
        self, context: StepContext, sample: Sample, awake: Callable[[], AbstractContextManager[None]], dataset: Any
    ) -> None:
        """`awake`: inside, the engine does not sleep between two calls of `sample`. `dataset`: whose rows are trained
        on. Raises `UserError` where the run's other keys do not go with a budget.
        """
        check_budget(context.config)
        self.accelerator, self.config = context.accelerator, context.config
        self.log, self.state = context.log, context.state
        self.sample, self.awake, self.rows = sample, awake, DistinctRows(dataset)
        shape = Shape.of(context.config)
        self.places = shape.rows * shape.steps // shape.generations  # groups of one rank
        # Half of them: a step of a few rollouts would be noise. And a unit for every optimizer step.
        self.least = math.ceil(max(self.places / 2, shape.steps // shape.chunk * shape.unit / shape.generations))
        self.steps = shape.updates
        self.waiting, self._before = PoolState(), PoolState()  # now, and before the last generation
        self._sampled_at = -1  # the optimizer steps that had been made then
        self._figures: dict[str, float] = {}

    # ------------------------------------------------------------------------------------------ a generation

    def before_sampling(self, generation: Generation) -> None:
        """Sample, and replace the rows of the generation by those of complete groups."""
        if generation.mode != "train":
            return
        present = generation.step // self.steps
        left = math.ceil((self.state().max_steps - generation.step) / self.steps)
        if self._sampled_at < 0:
            self._say_what_is_lost(generation.step, left)
        begun, drawn = self._begun(generation, present, left)
        groups = [*self.waiting.groups, *begun]
        needed = groups_to_complete(len(groups), self.places, left, self.least)
        budget = self._budget()
        with self.awake():
            everything = needed == len(groups)
            oldest = present - self.config.adora_rollouts.staleness
            limits = [None if everything or group.began <= oldest else budget for group in groups]
            groups = self._sampled(groups, dict(enumerate(limits)), generation)
            short = needed - sum(group.complete for group in groups)
            if short > 0:  # as where a training begins: the oldest go on to their ends at once
                behind = [number for number, group in enumerate(groups) if not group.complete][:short]
                groups = self._sampled(groups, dict.fromkeys(behind), generation)
        self._give(generation, groups, drawn, present, budget)

    def _say_what_is_lost(self, step: int, left: int) -> None:
        """Of a run that goes on with fewer steps than it had begun groups for. Said once, by the first rank."""
        waiting, room = len(self.waiting.groups), left * self.places
        if waiting > room and self.accelerator.is_main_process:
            tqdm.write(
                f"max_steps: {self.state().max_steps} ends the run before {waiting - room} of the {waiting} groups per "
                "process that the checkpoint has set aside (adora_rollouts.budget) can be learned from; "
                f"{step + math.ceil(waiting / self.places) * self.steps} is enough for all",
                file=sys.stderr,
            )

    def _budget(self) -> int | None:
        """Of the present generation. With `auto` it is so large that the oldest answers, which are sampled to their
        ends, have no more than it left.
        """
        given, parts = self.config.adora_rollouts.budget, self.config.adora_rollouts.staleness + 1
        least = math.ceil(self.config.max_completion_length / parts)
        return given if isinstance(given, int) else automatic_budget(self.waiting.lengths, least)

    def _begun(
        self, generation: Generation, present: int, left: int
    ) -> tuple[list[RolloutGroup], tuple[DrawnProblem, ...]]:
        """Of those that were drawn, the groups that begin now, and the others."""
        size, first = generation.group_size, self.accelerator.process_index * self.places
        drawn, known = list(self.waiting.drawn), dict[DrawnProblem, Row]()
        for place, drawn_row in enumerate(generation.rows[::size]):
            row: Any = dict(drawn_row)
            problem = DrawnProblem(row.pop(ROW_NUMBER), generation.where, first + place)
            drawn.append(problem)
            known[problem] = row
        count = how_many_begin(len(self.waiting.groups), self.waiting.complete, self.places, left)
        begun = [RolloutGroup(one, known.get(one, Row()), present, (Rollout(),) * size) for one in drawn[:count]]
        return list(self._with_rows(begun)), tuple(drawn[count:])

    def _with_rows(self, groups: Sequence[RolloutGroup]) -> tuple[RolloutGroup, ...]:
        """The groups, with problems from the data set where they have none."""
        lacking = [group.problem.number for group in groups if not group.row]
        rows: Iterator[Any] = iter(self.rows.__getitems__(lacking))
        return tuple(group if group.row else replace(group, row=next(rows)) for group in groups)

    def _sampled(
        self, groups: list[RolloutGroup], limits: dict[int, int | None], generation: Generation
    ) -> list[RolloutGroup]:
        """The groups after their rollouts have gone on, by so many tokens or (None) to their ends. `limits`: by the
        number of the group. Those that go on come first: they would be the last to end if the engine had no place.
        """
        open_ = [
            (number, member)
            for number in limits
            for member, rollout in enumerate(groups[number].rollouts)
            if not rollout.ended
        ]
        asked = sorted(open_, key=lambda each: not groups[each[0]].rollouts[each[1]].tokens)
        segments = [self._segment(groups, limits, each, place, generation) for place, each in enumerate(asked)]
        answers = self.sample([groups[number].row for number, _ in asked], segments)
        found = {number: list(groups[number].rollouts) for number in limits}
        for (number, member), answer in zip(asked, answers, strict=True):
            rollout = found[number][member]
            span = Span(tuple(answer.tokens), tuple(answer.logps), generation.step)
            went_on = Rollout((*rollout.spans, span))
            whole = len(went_on.tokens) >= self.longest(groups[number], member)
            ended = "length" if whole else answer.reason if answer.reason != "length" else ""
            found[number][member] = replace(went_on, ended=ended)
        return [
            replace(group, rollouts=tuple(found[number])) if number in found else group
            for number, group in enumerate(groups)
        ]

    def _segment(
        self,
        groups: list[RolloutGroup],
        limits: dict[int, int | None],
        asked: tuple[int, int],
        place: int,
        generation: Generation,
    ) -> Segment:
        """What is asked of the engine for the rollout `asked`, number of its group and in it, at a place of its own."""
        number, member = asked
        group, seed, budget = groups[number], generation.sampling.seed, limits[number]
        had = group.rollouts[member].tokens
        limit = limit_of(0, 1, budget, self.longest(group, member) - len(had))
        own = seed and group.seed(seed[0], member)
        return Segment(had, limit, len(groups) + place if had else number, own)

    def longest(self, group: RolloutGroup, member: int) -> int:
        """The tokens at which an answer is cut off: the same for all, unless `benchmarks.long_tailed` sets it."""
        return int(self.config.max_completion_length)

    def _give(
        self,
        generation: Generation,
        groups: list[RolloutGroup],
        drawn: tuple[DrawnProblem, ...],
        present: int,
        budget: int | None,
    ) -> None:
        """Give the oldest complete groups to the generation, equally many on every rank, and keep the others."""
        complete = [number for number, group in enumerate(groups) if group.complete]
        device, gather = self.accelerator.device, self.accelerator.gather
        fewest = int(gather(torch.tensor([len(complete)], device=device)).min())
        count = min(fewest, self.places)
        learned = [groups[number] for number in complete[:count]]
        generation.rows = [Row(**group.row) for group in learned for _ in group.rollouts]
        rollouts = [rollout for group in learned for rollout in group.rollouts]
        ages = [present - group.began for group in learned for _ in group.rollouts]
        generation.sampling.answers = Answers(
            [rollout.tokens for rollout in rollouts],
            [rollout.logps for rollout in rollouts],
            {
                "stale_tokens": [rollout.stale(generation.step) for rollout in rollouts],
                "segments": [len(rollout.spans) for rollout in rollouts],
                "age": ages,
            },
        )
        kept = tuple(group for number, group in enumerate(groups) if number not in complete[:count])
        self._before, self._sampled_at = self.waiting, generation.step
        self.waiting = replace(self.waiting, groups=kept, drawn=drawn, complete=fewest - count)
        unfinished = sum(not rollout.ended for group in kept for rollout in group.rollouts)
        sums_R3 = gather(torch.tensor([[sum(ages), max(ages), unfinished]], device=device))
        self._figures = {
            "adora/staleness": sums_R3[:, 0].sum().item() / (len(ages) * len(sums_R3)),
            "adora/staleness_max": sums_R3[:, 1].max().item(),
            "adora/unfinished": sums_R3[:, 2].sum().item(),
            "adora/rollout_budget": budget or self.config.max_completion_length,
        }

    def after_weighing(self, generation: Generation) -> None:
        """Log the figures, and remember the lengths."""
        assert generation.scores is not None
        for name, value in self._figures.items():
            self.log(name, value)
        lengths = tuple(int(length) for length in generation.scores.lengths_B.tolist())
        self.waiting = replace(self.waiting, lengths=(*self.waiting.lengths, lengths)[-REMEMBERED:])

    # ------------------------------------------------------------------------------------------ a checkpoint

    def save(self, folder: Path) -> None:
        """Write what waits on this rank. Where nothing was learned from the last generation, it is sampled again, so
        what waited before it is written.
        """
        waiting = self._before if self.state().global_step == self._sampled_at else self.waiting
        waiting.save(folder, self.accelerator.process_index)

    def load(self, checkpoint: Path) -> None:
        """Read what `save` wrote; the problems are read from the data set.

        Raises `UserError` where another number of processes wrote it.
        """
        found = PoolState.load(checkpoint, self.accelerator.process_index, self.accelerator.num_processes)
        self.waiting = replace(found, groups=self._with_rows(found.groups))
