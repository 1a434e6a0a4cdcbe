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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from adora_vl.checkpoint.store import load_of_rank, save_of_rank
from adora_vl.config.batch_plan import Shape
from adora_vl.config.checks import check_budget
from adora_vl.data.dataloader import ROW_NUMBER, DistinctRows
from adora_vl.rollout.rollouts import Answers, RolloutAnswer, Segment
from adora_vl.training.generation import Extension, Generation
from adora_vl.types import Row, StepContext
from adora_vl.utils.errors import UserError
from adora_vl.utils.seeding import rollout_seed

# `auto`: the share of the answers that end within the budget, by the answers of so many generations, and how many times
# as long as the budget the longest answer of a generation has to be on average.
SHARE, REMEMBERED, TAIL = 0.9, 4, 1.5
FILES = "partial"  # in a checkpoint, one of each rank

# Samples a segment for each row. All ranks call it together, also without rows.
Sample = Callable[[list[Row], list[Segment]], list[RolloutAnswer]]


@dataclass(frozen=True)
class PartialRollout:
    """An answer so far."""

    tokens: tuple[int, ...] = ()
    logps: tuple[float | None, ...] = ()  # of the weights that sampled each token
    segments: tuple[tuple[int, int], ...] = ()  # optimizer steps that had been made, and the tokens sampled then
    ended: bool = False

    def extended(
        self, tokens: Sequence[int], logps: Sequence[float | None], step: int, *, ended: bool
    ) -> PartialRollout:
        """With a further segment, sampled by the weights of `step`."""
        segments = (*self.segments, (step, len(tokens)))
        return PartialRollout((*self.tokens, *tokens), (*self.logps, *logps), segments, ended)

    def stale(self, step: int) -> int:
        """How many tokens were sampled by the weights of earlier steps; those of this one follow them."""
        return sum(tokens for sampled_at, tokens in self.segments if sampled_at != step)


@dataclass(frozen=True)
class PartialGroup:
    """A problem and its answers so far."""

    row: Row
    number: int  # of the row in the data set
    began: int  # the generation in which it began
    where: str  # the name of that in which it was drawn
    place: int  # its number there, over all ranks
    rollouts: tuple[PartialRollout, ...]

    @property
    def complete(self) -> bool:
        return all(rollout.ended for rollout in self.rollouts)

    def seed(self, run_seed: int, member: int) -> int:
        """Of the next segment. With the seed of an earlier one its random numbers would be drawn again."""
        number = len(self.rollouts[member].segments)
        return rollout_seed(run_seed, f"{self.where}/segment-{number}" if number else self.where, self.place, member)


@dataclass(frozen=True)
class Waiting:
    """What is carried from one generation to the next."""

    groups: tuple[PartialGroup, ...] = ()  # of this rank, the oldest first
    drawn: tuple[PartialGroup, ...] = ()  # those that have not begun, without their rows
    complete: int = 0  # how many of `groups` are, on the rank with the fewest
    lengths: tuple[tuple[int, ...], ...] = ()  # tokens of the answers of the last generations, of all ranks


def groups_to_begin(waiting: int, complete: int, places: int, left: int) -> int:
    """How many groups begin in a generation: as many as it has places, but no more than can be learned from, and fewer
    where more are complete already than fill half of the places.

    `waiting`: groups of earlier generations, `complete` of which are. `left`: generations of the training, with the
    present one.
    """
    return max(0, min(places - max(0, complete - places // 2), left * places - waiting))


def groups_to_complete(groups: int, places: int, left: int, least: int) -> int:
    """How many of the present groups have to be complete after a generation, so that all can be learned from in the
    end, and `least` now.
    """
    return min(groups, places, max(least, groups - (left - 1) * places))


def automatic_budget(lengths: Sequence[Sequence[int]], least: int) -> int | None:
    """The length that nine of ten answers had at most, and `least`. None, so no budget, where there are none yet, and
    where those that run on are not much longer: little would be saved then, and groups would be late for it.
    """
    known = sorted(length for generation in lengths for length in generation)
    if not known:
        return None
    budget = max(least, known[math.ceil(SHARE * len(known)) - 1])
    return budget if budget * TAIL <= sum(map(max, lengths)) / len(lengths) else None


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
        self.waiting, self._before = Waiting(), Waiting()  # now, and before the last generation
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
    ) -> tuple[list[PartialGroup], tuple[PartialGroup, ...]]:
        """Of those that were drawn, the groups that begin now, and the others without their rows."""
        size, first = generation.group_size, self.accelerator.process_index * self.places
        drawn = list(self.waiting.drawn)
        for place, drawn_row in enumerate(generation.rows[::size]):
            row: Any = dict(drawn_row)
            number = row.pop(ROW_NUMBER)
            drawn.append(
                PartialGroup(row, number, present, generation.where, first + place, (PartialRollout(),) * size)
            )
        count = groups_to_begin(len(self.waiting.groups), self.waiting.complete, self.places, left)
        begun = [replace(group, began=present) for group in self._with_rows(drawn[:count])]
        return begun, _without_rows(drawn[count:])

    def _with_rows(self, groups: Sequence[PartialGroup]) -> tuple[PartialGroup, ...]:
        """The groups, with problems from the data set where they have none."""
        lacking = [group for group in groups if not group.row]
        rows: Iterator[Any] = iter(self.rows.__getitems__([group.number for group in lacking]))
        return tuple(group if group.row else replace(group, row=next(rows)) for group in groups)

    def _sampled(
        self, groups: list[PartialGroup], limits: dict[int, int | None], generation: Generation
    ) -> list[PartialGroup]:
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
            whole = len(rollout.tokens) + len(answer.tokens) >= self.longest(groups[number], member)
            ended = whole or answer.reason != "length"
            found[number][member] = rollout.extended(answer.tokens, answer.logps, generation.step, ended=ended)
        return [
            replace(group, rollouts=tuple(found[number])) if number in found else group
            for number, group in enumerate(groups)
        ]

    def _segment(
        self,
        groups: list[PartialGroup],
        limits: dict[int, int | None],
        asked: tuple[int, int],
        place: int,
        generation: Generation,
    ) -> Segment:
        """What is asked of the engine for the rollout `asked`, number of its group and in it, at a place of its own."""
        number, member = asked
        group, seed, budget = groups[number], generation.sampling.seed, limits[number]
        had = list(group.rollouts[member].tokens)
        left = self.longest(group, member) - len(had)
        own = seed and group.seed(seed[0], member)
        return Segment(had, left if budget is None else min(left, budget), len(groups) + place if had else number, own)

    def longest(self, group: PartialGroup, member: int) -> int:
        """The tokens at which an answer is cut off: the same for all, unless `benchmarks.long_tailed` sets it."""
        return int(self.config.max_completion_length)

    def _give(
        self,
        generation: Generation,
        groups: list[PartialGroup],
        drawn: tuple[PartialGroup, ...],
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
            [list(rollout.tokens) for rollout in rollouts],
            [list(rollout.logps) for rollout in rollouts],
            {
                "stale_tokens": [rollout.stale(generation.step) for rollout in rollouts],
                "segments": [len(rollout.segments) for rollout in rollouts],
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
        plain = replace(waiting, groups=_without_rows(waiting.groups))
        save_of_rank(folder, FILES, self.accelerator.process_index, asdict(plain))

    def load(self, checkpoint: Path) -> None:
        """Read what `save` wrote; the problems are read from the data set.

        Raises `UserError` where another number of processes wrote it.
        """
        first = load_of_rank(checkpoint, FILES, 0)
        if first is None:
            return
        before, ranks = len(list(checkpoint.glob(f"{FILES}-*.pt"))), self.accelerator.num_processes
        if first["groups"] and before != ranks:
            raise UserError(
                f"resume_from_checkpoint: {str(checkpoint)!r} has unfinished rollouts (adora_rollouts.budget) of "
                f"{before} processes, now {ranks}; start as many as before"
            )
        found = load_of_rank(checkpoint, FILES, self.accelerator.process_index)
        if before != ranks:  # what was drawn belongs to those processes; it comes again in a later epoch
            found = {**first, "drawn": ()}
        groups, drawn = (
            tuple(
                PartialGroup(**{**group, "rollouts": tuple(PartialRollout(**one) for one in group["rollouts"])})
                for group in found.get(name, ())
            )
            for name in ("groups", "drawn")
        )
        self.waiting = Waiting(self._with_rows(groups), drawn, found.get("complete", 0), found["lengths"])


def _without_rows(groups: Sequence[PartialGroup]) -> tuple[PartialGroup, ...]:
    return tuple(replace(group, row=Row()) for group in groups)
