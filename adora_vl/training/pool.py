"""A pool of groups fills a generation: by rules, whoever samples, and to the same end on all ranks.

A problem is drawn; its group begins, and its rollouts go on until they end, or for as many tokens
as a generation may take (`budget`: partial rollouts, of Kimi k1.5, arXiv 2501.12599, section 2.6.2,
and APRIL, arXiv 2509.18521, for texts; ours keeps whole groups, takes the images along, and drops
nothing). The oldest complete groups are graded, and those without signal give their places to
groups of further problems (`refill`: DAPO's dynamic sampling, arXiv 2503.14476). What is left is
weighed once; what has not ended waits for the next generation.

All ranks begin, grade and learn from equally many groups, so only the groups themselves have to be
remembered.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from tqdm import tqdm

from adora_vl.config.batch_plan import BatchLayout
from adora_vl.config.options import RolloutOptions
from adora_vl.data.dataloader import ROW_NUMBER, DistinctRows, shown_rows
from adora_vl.data.rows import images_of
from adora_vl.packing.images import DistinctImages
from adora_vl.packing.prompts import PromptBatch
from adora_vl.rollout.prompt_tokens import mismatch_named
from adora_vl.rollout.rollouts import (
    DrawnProblem,
    Rollout,
    RolloutGroup,
    SamplingRequest,
    groups_of,
    open_rollouts,
)
from adora_vl.rollout.samplers import PendingSamples, Sampler
from adora_vl.rollout.turns import ToolLoop, append_result, run_turns
from adora_vl.tools.environments import Environments
from adora_vl.training import schedule
from adora_vl.training.batch_builder import BatchBuilder
from adora_vl.training.batch_rows import chosen_groups
from adora_vl.training.extensions import Extension, other_images
from adora_vl.training.generation import Generation
from adora_vl.training.guards import GenerationGuard
from adora_vl.training.micro_batches import live_units
from adora_vl.training.pool_state import PoolState
from adora_vl.types import Row, StepContext
from adora_vl.utils.errors import RolloutError, UserError


@dataclass(frozen=True)
class _Asked:
    """A rollout that goes on."""

    group: RolloutGroup
    member: int
    prompt: list[int]  # its tokens
    images: list[Any]  # that the engine sees with it
    compared: bool  # whether they are the trainer's, so that log-probabilities can be compared
    budget: int | None  # tokens that may come now; None: up to its end
    longest: int  # tokens of the whole answer
    said: int  # tokens that the policy has sampled before


class Pool:
    """All ranks call it together."""

    def __init__(
        self,
        context: StepContext,
        images: DistinctImages,
        sampler: Sampler,
        judge: BatchBuilder,
        guard: GenerationGuard,
        extensions: Sequence[Extension],
        phase: Callable[[str], AbstractContextManager[None]],
        dataset: Any,
        turns: ToolLoop | None = None,
        environments: Environments | None = None,
    ) -> None:
        """`phase`: inside, the seconds count as this one's.

        `dataset`: whose rows are trained on. `turns`: how calls of tools are answered, None without
        tools. `environments`: of the rollouts, where they have some.
        """
        self.context = context
        self.images = images
        self.sampler = sampler
        self.judge = judge
        self.accelerator = context.accelerator
        self.config = context.config
        self.log = context.log
        self.guard = guard
        self.extensions = extensions
        self.phase = phase
        self.rows = DistinctRows(dataset)
        self.asked: RolloutOptions = context.config.adora_rollouts
        self.shape = BatchLayout.of(context.config)
        self.turns = turns
        self.environments = environments
        # whether a generation may begin more than it learns from
        self.waits = self.asked.budget is not None
        # groups of one rank
        self.places = self.shape.rows * self.shape.steps // self.shape.generations
        # Half of them: a step of a few rollouts would be noise. And a unit for every optimizer
        # step.
        chunks = self.shape.steps // self.shape.chunk
        unit = self.shape.unit
        self.least = math.ceil(max(self.places / 2, chunks * unit / self.shape.generations))
        self.aged = self.waits  # whether rollouts may be older than their generation
        # now, and before the generations of the present step
        self.state, self._before = (
            PoolState(),
            PoolState(),
        )
        self._sampled_at = -1  # the optimizer steps that had been made then
        # the prompts that were asked last
        self._read: tuple[list[DrawnProblem], PromptBatch] | None = None

    # --------------------------------------------------------------------------------- a generation

    def fill(self, generation: Generation) -> None:
        """Sample, grade and judge the rows.

        In a training, replace groups without signal, and weigh what is left.
        """
        rows: list[Row] = shown_rows(generation.rows)
        generation.rows = rows
        size = generation.group_size
        self.guard.check(rows, generation.step)
        if generation.mode == "train" and self.aged:
            if min(dict[str, Any](row).get(ROW_NUMBER, -1) for row in rows) < 0:
                raise UserError(
                    "adora_rollouts: these rows do not say their numbers, by which problems that "
                    "wait are read again (a streamed data set, or a loader of your own); load the "
                    "data set whole, or set budget and ahead off"
                )
            generation.number = self._until(generation.step, generation.micro)
        first = self.accelerator.process_index * len(rows)
        drawn = groups_of(rows, generation.where, generation.number, first, size)
        drawn = self._entered(drawn, generation.step, anew=True)
        if generation.mode == "eval":
            groups = self._sampled(generation, drawn, dict.fromkeys(range(len(drawn))))
            self.judge(generation, groups, self._prompts(groups), aged=False)
            return
        self._note(generation)
        budget = self._budget()
        groups = self._go_on(generation, drawn, budget)
        groups, fewest = self._rounds(generation, groups, budget)
        self.state = replace(self.state, groups=tuple(groups), complete=fewest)
        if self.aged:
            self._log_ages(generation, budget)
        self.judge.weigh(generation, self.extensions)

    def before_weights_change(self) -> None:
        """Called before the last micro-batch of every optimizer step."""

    def _note(self, generation: Generation) -> None:
        """Keep what was there before an optimizer step's generations: a run that stops within goes
        on there.
        """
        # whose groups may be superfluous
        if self._sampled_at < 0 and self.waits and not self.asked.refill:
            self._say_what_is_lost(generation)
        if generation.step != self._sampled_at:
            self._before = self.state
            self._sampled_at = generation.step

    def _left(self, generation: Generation) -> int:
        """Generations of the training, with this one."""
        return self._until(int(self.context.state().max_steps)) - self._until(
            generation.step, generation.micro
        )

    def _until(self, step: int, micro: int = 0) -> int:
        """Generations of the training before a micro-batch of an optimizer step."""
        shape = self.shape
        if not shape.has_one_step:
            return math.ceil((step * shape.accumulated + micro) / shape.cycle)
        return schedule.generations_in(step, *self._in_step_and_epoch) + micro // shape.cycle

    @property
    def _in_step_and_epoch(self) -> tuple[int, int]:
        """Generations of an optimizer step that takes some, and of an epoch."""
        shape = self.shape
        rows = len(self.rows) * self.shape.generations
        return shape.accumulated // shape.cycle, rows // (
            shape.rows * shape.steps * self.accelerator.num_processes
        )

    def _budget(self) -> int | None:
        """Of this generation.

        `auto`: so large that the oldest answers, sampled to their ends, have no more left.
        """
        given: int | str | None = self.asked.budget
        parts = (
            math.ceil(self.asked.staleness / self.asked.ahead)
            if self.asked.ahead
            else self.asked.staleness + 1
        )
        least = math.ceil(self.config.max_completion_length / parts)
        return (
            given
            if isinstance(given, int)
            else schedule.automatic_budget(self.state.lengths, least)
        )

    def _begun(
        self, generation: Generation, drawn: list[RolloutGroup], waiting: int, least: int = 0
    ) -> list[RolloutGroup]:
        """The groups that begin now; the problems that do not stay drawn.

        `waiting`: groups that have begun. `least`: so many begin in any case.
        """
        if not self.waits:
            return drawn
        known = {group.problem: group.row for group in drawn}
        problems = [*self.state.drawn, *known]
        count = schedule.how_many_begin(
            waiting,
            complete=self.state.complete,
            places=self.places,
            left=self._left(generation),
            least=least,
        )
        empty = (Rollout(),) * generation.group_size
        begun = [
            RolloutGroup(
                problem=one, row=known.get(one, Row()), began=generation.number, rollouts=empty
            )
            for one in problems[:count]
        ]
        self.state = replace(self.state, drawn=tuple(problems[count:]))
        return self._with_rows(begun)

    def _with_rows(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """The groups, with problems from the data set where they have none."""
        lacking = [group.problem.number for group in groups if not group.row]
        rows: Iterator[Any] = iter(self.rows.__getitems__(lacking))
        return [group if group.row else replace(group, row=next(rows)) for group in groups]

    def _go_on(
        self, generation: Generation, drawn: list[RolloutGroup], budget: int | None
    ) -> list[RolloutGroup]:
        """The groups of a generation after their rollouts have gone on, by the budget or to their
        ends.
        """
        groups = [*self.state.groups, *self._begun(generation, drawn, len(self.state.groups))]
        limits: dict[int, int | None] = dict.fromkeys(range(len(groups)))
        if budget is None:
            return self._sampled(generation, groups, limits)
        needed = schedule.groups_to_complete(
            len(groups), places=self.places, left=self._left(generation), least=self.least
        )
        if needed == len(groups):
            return self._sampled(generation, groups, limits)
        for place, group in enumerate(groups):
            if generation.number - group.began < self.asked.staleness:
                limits[place] = budget
        with self.sampler.awake():
            return self._completed(generation, self._sampled(generation, groups, limits), needed)

    def _completed(
        self, generation: Generation, groups: list[RolloutGroup], needed: int
    ) -> list[RolloutGroup]:
        """So many are complete: as where a training begins, the oldest go on to their ends at once."""
        short = needed - sum(group.complete for group in groups)
        if not any(gather_object([short > 0])):
            return groups
        behind = [number for number, group in enumerate(groups) if not group.complete][
            : max(0, short)
        ]
        return self._sampled(generation, groups, dict.fromkeys(behind))

    def _rounds(
        self, generation: Generation, groups: list[RolloutGroup], budget: int | None
    ) -> tuple[list[RolloutGroup], int]:
        """Grade what is complete, and what further problems bring as long as any rank lacks groups
        with signal. Returns the groups that wait, and how many of them have ended on the rank with
        the fewest.
        """
        learned, groups, fewest = self._judged(generation, groups, self.places)
        assert learned, "a generation has groups that are complete on every rank"
        lengths = _lengths(generation)
        replaced = 0
        size = generation.group_size
        if self.asked.refill:
            live = live_units(generation.batch["signal"], size)
            own = torch.tensor([live.count(True) / len(live)], device=self.accelerator.device)
            share = float(self.accelerator.gather(own).mean())
            self.state = replace(
                self.state, signal=(*self.state.signal, share)[-schedule.REMEMBERED :]
            )
        for attempt in range(1, self.asked.refill + 1):
            live = live_units(generation.batch["signal"], size)
            missing = live.count(False) + (self.places - len(live) if self.aged else 0)
            lacks = int(
                self.accelerator.gather(
                    torch.tensor([missing], device=self.accelerator.device)
                ).max()
            )
            if not lacks:
                break
            further = replace(generation, attempt=attempt)
            count = schedule.groups_for(schedule.MORE * lacks, [share], self.places)
            groups = self._with_further(further, groups=groups, budget=budget, count=count - fewest)
            more, groups, fewest = self._judged(further, groups, count)
            if not more:  # on no rank: none has ended within the budget
                continue
            lengths = (*lengths, *_lengths(further))
            if not all(gather_object([further.batch.keys() == generation.batch.keys()])):
                # only one of the two batches has images, so their rows have different columns
                continue
            chosen = schedule.admitted(
                live, live_units(further.batch["signal"], size), self.places if self.aged else 0
            )
            replaced += sum(number != place for place, number in enumerate(chosen[: len(live)]))
            both = [*learned, *more]
            pad_id = self.context.pad_id
            generation.batch = chosen_groups(
                generation.batch, further=further.batch, groups=chosen, size=size, pad_id=pad_id
            )
            learned = [both[number] for number in chosen]
            generation.rows = [group.row for group in learned for _ in group.rollouts]
        if self.asked.refill:
            self.log("adora/refilled_groups", replaced / len(learned))
        if self.waits:
            self.state = replace(
                self.state, lengths=(*self.state.lengths, lengths)[-schedule.REMEMBERED :]
            )
        return groups, fewest

    def _with_further(
        self, generation: Generation, groups: list[RolloutGroup], budget: int | None, count: int
    ) -> list[RolloutGroup]:
        """The groups, and those of so many further problems."""
        if count <= 0:
            return groups
        begun = self._further(generation, count)
        limits: dict[int, int | None] = {len(groups) + place: budget for place in range(len(begun))}
        self.log("adora/further_batches", 1.0)
        return self._sampled(generation, [*groups, *begun], limits)

    def _further(self, generation: Generation, count: int) -> list[RolloutGroup]:
        """Groups of so many further problems for a generation; where the run stands seeds the
        choice.
        """
        rank = self.accelerator.process_index
        empty = (Rollout(),) * generation.group_size
        seed = f"{self.config.seed}/{generation.key}/{generation.attempt}/{rank}"
        numbers = schedule.further_rows(len(self.rows), count, seed)
        rows: list[Any] = self.rows.__getitems__(numbers)
        self.guard.check(rows, generation.step)
        begun = [
            RolloutGroup(
                problem=DrawnProblem(number, generation.where, place),
                row=row,
                began=generation.number,
                rollouts=empty,
            )
            for (place, number), row in zip(
                enumerate(numbers, rank * self.places), rows, strict=True
            )
        ]
        return self._entered(begun, generation.step, anew=False)

    def _entered(self, groups: list[RolloutGroup], step: int, *, anew: bool) -> list[RolloutGroup]:
        """The groups in environments of their own, where the run has some."""
        if self.environments is not None:
            with self.guard.beginning(step):
                groups = self.environments.entered(groups, self.config.seed, anew=anew)
        return groups

    def _judged(
        self, generation: Generation, groups: list[RolloutGroup], most: int
    ) -> tuple[list[RolloutGroup], list[RolloutGroup], int]:
        """Grade the oldest complete groups, equally many on every rank and at most so many.

        Returns them, the others, and how many of those have ended on the rank with the fewest.
        """
        complete = [number for number, group in enumerate(groups) if group.complete]
        count = len(groups)
        fewest = count
        if self.aged:
            own = torch.tensor([len(complete)], device=self.accelerator.device)
            fewest = int(self.accelerator.gather(own).min())
            count = min(fewest, most)
        graded = [groups[number] for number in complete[:count]]
        kept = [group for number, group in enumerate(groups) if number not in complete[:count]]
        if count:
            self.judge(generation, graded, self._prompts(graded), aged=self.aged)
        return graded, kept, fewest - count

    # ------------------------------------------------------------------------------------- sampling

    def _sampled(
        self,
        generation: Generation,
        groups: list[RolloutGroup],
        limits: dict[int, int | None],
        ticket: PendingSamples | None = None,
    ) -> list[RolloutGroup]:
        """The groups after their rollouts have gone on, by so many tokens or (None) to their ends.

        `limits`: by the number of the group. `ticket`: for these rollouts, where they were asked
        for before.
        """
        began = open_rollouts(groups, limits)
        tickets = [] if ticket is None else [ticket]

        def ask(going: dict[tuple[int, int], Rollout]) -> dict[tuple[int, int], Rollout]:
            asks = [self._ask(asked[place], rollout) for place, rollout in going.items()]
            step = generation.step
            turn = None if self.turns is None else self.turns.tokens
            with mismatch_named([asked[place].group.row for place in going]):
                if tickets:
                    step = tickets[0].step
                    answers = tickets.pop().join()
                else:
                    answers = self.sampler.sample(asks, prompts)
            found = {}
            for (place, rollout), one, answer in zip(going.items(), asks, answers, strict=True):
                how = turn, self._has_ended, step, asked[place].compared
                found[place] = append_result(rollout, one, answer, asked[place].longest, *how)
            return found

        with self.phase("rollout"), self.guard.watching():
            asked, prompts = self._asked(generation, groups, limits, began)
            played = run_turns(
                began,
                ask=ask,
                answered=lambda place, rollout: self._answered(
                    asked[place], rollout, generation.step
                ),
                may_go_on=lambda place, rollout: self._room(asked[place], rollout) > 0,
                any_rank=self.on_any_rank,
            )
        numbered = [(group, list(enumerate(group.rollouts))) for group in groups]
        return [
            replace(
                group, rollouts=tuple(played.get((number, member), one) for member, one in rollouts)
            )
            for number, (group, rollouts) in enumerate(numbered)
        ]

    def on_any_rank(self, goes_on: bool) -> bool:
        """Whether something holds on any rank; without tools nothing is asked of the others."""
        if self.turns is None:
            return False
        own = torch.tensor([goes_on], device=self.accelerator.device)
        return bool(self.accelerator.gather(own).any())

    def _asked(
        self,
        generation: Generation,
        groups: list[RolloutGroup],
        limits: dict[int, int | None],
        began: Mapping[tuple[int, int], Rollout],
    ) -> tuple[dict[tuple[int, int], _Asked], PromptBatch | None]:
        """What is asked for these rollouts, each by the number of its group and in it; and their
        prompts.
        """
        if not began:
            return {}, None
        rows = [groups[number].row for number, _ in began]
        prompts = self.images.prompts(rows, generation.mode, refill=generation.attempt > 0)
        self._read = [groups[number].problem for number, _ in began], prompts
        extensions = self.extensions if generation.mode == "train" else ()
        images = prompts.images or [None] * len(rows)
        others = other_images(extensions, groups=groups, members=[*began], images=images)
        asked = {}
        for (number, member), ids, own, other in zip(
            began, prompts.ids, images, others, strict=True
        ):
            longest = self.config.max_completion_length
            said = len(began[number, member].said)
            shown = ids, list(other or own or ()), other is None
            asked[number, member] = _Asked(
                groups[number], member, *shown, limits[number], longest, said
            )
        return asked, prompts

    def _room(self, asked: _Asked, rollout: Rollout) -> int:
        """How many tokens it may sample now."""
        left = asked.longest - len(rollout.tokens)
        if asked.budget is not None:
            left = min(left, asked.budget - len(rollout.said) + asked.said)
        if self.turns is not None and self.turns.tokens is not None:
            left = min(left, self.turns.tokens - len(rollout.turn))
        return left

    def _ask(self, asked: _Asked, rollout: Rollout) -> SamplingRequest:
        group = asked.group
        member = asked.member
        had = rollout.tokens
        seed = (
            group.seed(self.config.seed, member, rollout)
            if self.config.own("seeded_rollouts")
            else None
        )
        together = (
            (group.problem, member)
            if had or not self.config.own("group_requests")
            else group.problem
        )
        images = [*asked.images, *(picture.image for picture in rollout.pictures)]
        return SamplingRequest(
            ids=[*asked.prompt, *had],
            images=images,
            together=together,
            seed=seed,
            limit=self._room(asked, rollout),
        )

    def _answered(self, asked: _Asked, rollout: Rollout, step: int) -> Rollout:
        """The rollout, whose turn has ended, with what tools say to it."""
        # it may have been stopped in a loop
        if self.turns is None or not self._has_ended(rollout.turn):
            return rollout
        problem = asked.group.problem
        seed = f"{self.config.seed}/{problem.where}/{problem.place}/{asked.group.first_member + asked.member}"
        images = images_of(asked.group.row)
        prompt = len(asked.prompt)
        return self.turns(
            rollout, images, prompt=prompt, longest=asked.longest, step=step, seed=seed
        )

    def _has_ended(self, tokens: Sequence[int]) -> bool:
        return self.judge.ends.ended(tokens, self.judge.ends.decode(tokens))

    def _prompts(self, groups: Sequence[RolloutGroup]) -> PromptBatch | None:
        """Of these groups, if they are what was asked last."""
        read = self._read
        self._read = None
        same = read is not None and read[0] == [
            group.problem for group in groups for _ in group.rollouts
        ]
        return read[1] if read is not None and same else None

    # --------------------------------------------------------------------------- what is said of it

    def _say_what_is_lost(self, generation: Generation) -> None:
        """Of a run that goes on with fewer steps than it had begun groups for.

        Said once, by the first rank.
        """
        waiting = len(self.state.groups) + sum(len(one.groups) for one in self.state.coming)
        room = self._left(generation) * self.places
        if waiting > room and self.accelerator.is_main_process:
            tqdm.write(
                f"max_steps: {self.context.state().max_steps} ends the run before "
                f"{waiting - room} of the {waiting} groups per process that the checkpoint has "
                "set aside (adora_rollouts.budget) can be learned from; "
                f"{generation.step + math.ceil(waiting / self.places) * self.shape.updates} is "
                "enough for all",
                file=sys.stderr,
            )

    def _log_ages(self, generation: Generation, budget: int | None) -> None:
        ages_B = generation.batch["age"]
        waiting = [
            *self.state.groups,
            *(group for one in self.state.coming for group in one.groups),
        ]
        begun = [
            rollout for group in waiting if group.rollouts[0].spans for rollout in group.rollouts
        ]
        unfinished = sum(not rollout.ended for rollout in begun)
        own = torch.stack([ages_B.sum(), ages_B.max(), torch.full_like(ages_B[0], unfinished)])
        sums_R3 = self.accelerator.gather(own[None])
        self.log("adora/staleness", sums_R3[:, 0].sum().item() / (len(ages_B) * len(sums_R3)))
        self.log("adora/staleness_max", sums_R3[:, 1].max().item())
        if self.waits:
            self.log("adora/unfinished", sums_R3[:, 2].sum().item())
            self.log("adora/rollout_budget", budget or self.config.max_completion_length)

    # --------------------------------------------------------------------------------- a checkpoint

    def save(self, folder: Path) -> None:
        """Write what waits on this rank.

        Where nothing was learned from the last generations, they are sampled again, so what waited
        before them is written.
        """
        if not self.aged:
            return
        now = self._before if self.context.state().global_step == self._sampled_at else self.state
        there = 0
        # raised on all ranks: servers that have failed are asked again
        with suppress(RolloutError, UserError):
            for one in now.coming:
                one.ticket.join()
                there += 1
        replace(now, coming=now.coming[:there]).save(folder, self.accelerator.process_index)

    def load(self, checkpoint: Path) -> None:
        """Read what `save` wrote; the problems are read from the data set.

        Raises `UserError` where another number of processes wrote it.
        """
        found = PoolState.load(
            checkpoint, self.accelerator.process_index, self.accelerator.num_processes
        )
        coming = [replace(one, groups=tuple(self._with_rows(one.groups))) for one in found.coming]
        groups = tuple(self._with_rows(found.groups))
        self.state = replace(found, groups=groups, coming=tuple(coming))


def _lengths(generation: Generation) -> tuple[int, ...]:
    return (
        () if generation.scores is None else tuple(map(int, generation.scores.lengths_B.tolist()))
    )
