"""A pool of groups that fills each generation, with the same number of groups on every rank.

A data loader draws a problem, its group begins, and its rollouts are sampled until they end, or for
as many tokens as one generation may take (`budget`). Such partial rollouts are those of Kimi k1.5
(arXiv 2501.12599, section 2.6.2) and of APRIL (arXiv 2509.18521), which have them for texts. Ours
keeps whole groups together, takes the images along, and drops nothing.

The oldest complete groups are graded. Groups without signal give their slots to groups of further
problems (`refill`: DAPO's dynamic sampling, arXiv 2503.14476). The remaining groups are weighed
once; rollouts that have not ended wait for the next generation.

All ranks begin, grade and learn from equally many groups, so a rank has to remember nothing but the
groups themselves.
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
from adora_vl.config.blocks import RolloutOptions
from adora_vl.data.dataloader import ROW_NUMBER, DistinctRows, shown_rows
from adora_vl.data.rows import images_of
from adora_vl.packing.images import DistinctImages
from adora_vl.packing.prompts import PromptBatch
from adora_vl.rollout.prompt_tokens import mismatch_named
from adora_vl.rollout.rollouts import (
    DrawnProblem,
    Rollout,
    RolloutGroup,
    RolloutKey,
    SamplingRequest,
    groups_of,
    unfinished_rollouts,
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
class Continuation:
    """What the sampler needs to continue one rollout."""

    group: RolloutGroup
    member: int  # the rollout's number in its group
    prompt_ids: list[int]
    images: list[Any]  # that the engine sees with the prompt
    # whether the images are the trainer's; else the engine's log-probabilities belong to another
    # prompt and cannot be compared with the policy's
    compared: bool
    token_budget: int | None  # tokens that may be sampled now; None: up to the rollout's end
    max_length: int  # tokens of the whole completion
    tokens_before: int  # tokens that the policy had sampled before this generation


TokenLimits = dict[int, int | None]  # by the number of the group; None: up to the rollouts' ends


class Pool:
    """Fills each generation with groups of rollouts.

    The methods are collective: every rank calls each of them, in the same order.
    """

    def __init__(
        self,
        context: StepContext,
        images: DistinctImages,
        sampler: Sampler,
        builder: BatchBuilder,
        guard: GenerationGuard,
        extensions: Sequence[Extension],
        phase: Callable[[str], AbstractContextManager[None]],
        dataset: Any,
        tool_loop: ToolLoop | None = None,
        environments: Environments | None = None,
    ) -> None:
        """Build an empty pool.

        Args:
            context: what every part of a training step is built from.
            images: reads prompts, with each distinct image processed once.
            sampler: samples the rollouts.
            builder: makes complete groups into a batch, grades and judges it.
            guard: ends the run where rows are unreadable or no server is left.
            extensions: of the run, in their order.
            phase: a context in which the seconds count as those of the named phase.
            dataset: the data set that is trained on, or a stand-in with a length and rows.
            tool_loop: answers calls of tools; None without tools.
            environments: enters groups into environments; None without environments.
        """
        self.context = context
        self.images = images
        self.sampler = sampler
        self.builder = builder
        self.accelerator = context.accelerator
        self.config = context.config
        self.log = context.log
        self.guard = guard
        self.extensions = extensions
        self.phase = phase
        self.rows = DistinctRows(dataset)
        self.options: RolloutOptions = context.config.adora_rollouts
        self.shape = BatchLayout.of(context.config)
        self.tool_loop = tool_loop
        self.environments = environments
        # Whether a rollout may pause, so that a generation may begin more groups than it learns
        # from.
        self.allows_partial = self.options.budget is not None
        # Groups that one rank learns from in a full generation.
        self.slots = self.shape.rows * self.shape.steps // self.shape.generations
        # Fewest groups that a rank may learn from: half its slots, because a smaller batch is too
        # noisy, and at least one unit for every optimizer step of the generation.
        chunks = self.shape.steps // self.shape.chunk
        units = chunks * self.shape.unit
        self.min_groups = math.ceil(max(self.slots / 2, units / self.shape.generations))
        # Whether rollouts may be older than the generation that learns from them.
        self.has_stale = self.allows_partial
        self.state = PoolState()
        # The state before the generations of the present optimizer step. A run that dies before it
        # learns from them samples them again from there.
        self._state_before_step = PoolState()
        self._sampled_at = -1  # optimizer steps that had been made when that state was noted
        # The problems of the rollouts that were read last, and their prompts.
        self._last_read: tuple[list[DrawnProblem], PromptBatch] | None = None

    # --------------------------------------------------------------------------------- a generation

    def fill(self, generation: Generation) -> None:
        """Sample, grade and judge the rows of a generation.

        In a training this also replaces groups without signal and weighs the remaining ones.

        Args:
            generation: of this rank; has its rows, and gets its rollouts, scores, batch and
                advantages here.

        Raises:
            UserError: rollouts may be stale, but the rows have no numbers.
            RunError: a row cannot be read, or a reward function or the last server failed.
        """
        rows: list[Row] = shown_rows(generation.rows)
        generation.rows = rows
        size = generation.group_size
        self.guard.check(rows, generation.key.step)
        if generation.key.mode == "train" and self.has_stale:
            if min(dict[str, Any](row).get(ROW_NUMBER, -1) for row in rows) < 0:
                raise UserError(
                    "adora_rollouts: these rows do not say their numbers, by which problems that "
                    "wait are read again (a streamed data set, or a loader of your own); load the "
                    "data set whole, or set budget and ahead off"
                )
            generation.number = self._generations_before(generation.key.step, generation.key.micro)
        first = self.accelerator.process_index * len(rows)
        drawn = groups_of(
            rows, generation.key, began=generation.number, first=first, generations=size
        )
        drawn = self._in_environments(drawn, generation.key.step, anew=True)
        if generation.key.mode == "eval":
            groups = self._sample(generation, drawn, dict.fromkeys(range(len(drawn))))
            self.builder(generation, groups, self._prompts_read(groups), aged=False)
            return
        self._begin_step(generation)
        budget = self._token_budget()
        groups = self._sample_generation(generation, drawn, budget)
        groups, min_complete = self._grade_and_refill(generation, groups, budget)
        self.state = replace(self.state, waiting=tuple(groups), min_complete=min_complete)
        if self.has_stale:
            self._log_ages(generation, budget)
        self.builder.weigh(generation, self.extensions)

    def before_weights_change(self) -> None:
        """Do what has to precede a change of the weights; here nothing.

        Called before the last micro-batch of every optimizer step.
        """

    def _begin_step(self, generation: Generation) -> None:
        """Keep the state from before the first generation of an optimizer step.

        A run that stops before it has learned from the step's generations resumes from that state.
        """
        is_first = self._sampled_at < 0
        # Without refill every waiting group needs a slot in one of the remaining generations.
        if is_first and self.allows_partial and not self.options.refill:
            self._warn_of_lost_groups(generation)
        if generation.key.step != self._sampled_at:
            self._state_before_step = self.state
            self._sampled_at = generation.key.step

    def _generations_left(self, generation: Generation) -> int:
        """Number of generations until the end of the training, including this one."""
        total = self._generations_before(int(self.context.state().max_steps))
        return total - self._generations_before(generation.key.step, generation.key.micro)

    def _generations_before(self, step: int, micro: int = 0) -> int:
        """Index of the generation that contains micro-batch `micro` of optimizer step `step`."""
        shape = self.shape
        if not shape.has_one_step:
            return math.ceil((step * shape.accumulated + micro) / shape.cycle)
        before_step = schedule.generations_in(step, *self._generations_of_step_and_epoch)
        return before_step + micro // shape.cycle

    @property
    def _generations_of_step_and_epoch(self) -> tuple[int, int]:
        """Generations of an optimizer step that takes several, and generations of an epoch."""
        shape = self.shape
        rows = len(self.rows) * shape.generations
        rows_of_generation = shape.rows * shape.steps * self.accelerator.num_processes
        return shape.accumulated // shape.cycle, rows // rows_of_generation

    def _token_budget(self) -> int | None:
        """Token budget per rollout in this generation; None for no limit.

        `auto` gives each rollout enough tokens per generation to finish within `staleness`
        generations.
        """
        budget: int | str | None = self.options.budget
        if self.options.ahead:
            parts = math.ceil(self.options.staleness / self.options.ahead)
        else:
            parts = self.options.staleness + 1
        min_budget = math.ceil(self.config.max_completion_length / parts)
        if isinstance(budget, int):
            return budget
        return schedule.automatic_budget(self.state.lengths, min_budget)

    def _begin_groups(
        self,
        generation: Generation,
        drawn: list[RolloutGroup],
        waiting: int,
        min_begun: int = 0,
    ) -> list[RolloutGroup]:
        """Begin as many groups as fit; problems that do not begin are kept for later.

        Args:
            generation: in which the groups begin.
            drawn: groups of the problems that the data loader has drawn for it.
            waiting: groups that have begun and were not learned from yet.
            min_begun: groups that begin even where fewer would fit.

        Returns:
            The groups that begin, the ones of the oldest problems first.
        """
        if not self.allows_partial:
            return drawn
        row_of = {group.problem: group.row for group in drawn}
        problems = [*self.state.drawn, *row_of]
        count = schedule.how_many_begin(
            waiting,
            complete=self.state.min_complete,
            slots=self.slots,
            remaining=self._generations_left(generation),
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

    def _with_rows(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups with rows; missing ones are read from the data set."""
        missing = [group.problem.row_number for group in groups if not group.row]
        rows: Iterator[Any] = iter(self.rows.__getitems__(missing))
        return [group if group.row else replace(group, row=next(rows)) for group in groups]

    def _sample_generation(
        self, generation: Generation, drawn: list[RolloutGroup], budget: int | None
    ) -> list[RolloutGroup]:
        """Sample the waiting groups and those that begin, by the budget or to their ends.

        Args:
            generation: that is filled.
            drawn: groups of the problems that the data loader has drawn for it.
            budget: tokens per rollout; None: all rollouts are sampled to their ends.

        Returns:
            The groups, the oldest first, of which enough are complete.
        """
        begun = self._begin_groups(generation, drawn, len(self.state.waiting))
        groups = [*self.state.waiting, *begun]
        limits: TokenLimits = dict.fromkeys(range(len(groups)))
        if budget is None:
            return self._sample(generation, groups, limits)
        needed = schedule.groups_to_complete(
            len(groups),
            slots=self.slots,
            remaining=self._generations_left(generation),
            min_groups=self.min_groups,
        )
        if needed == len(groups):
            return self._sample(generation, groups, limits)
        # A group that is as old as `staleness` allows keeps None, and is sampled to its end.
        for number, group in enumerate(groups):
            if generation.number - group.began < self.options.staleness:
                limits[number] = budget
        with self.sampler.awake():
            sampled = self._sample(generation, groups, limits)
            return self._complete_oldest(generation, sampled, needed)

    def _complete_oldest(
        self, generation: Generation, groups: list[RolloutGroup], needed: int
    ) -> list[RolloutGroup]:
        """Finish the oldest groups now if fewer than `needed` are complete.

        That is always so in the first generation of a training.
        """
        missing = needed - sum(group.complete for group in groups)
        # Collective: where one rank samples, all take part.
        if not any(gather_object([missing > 0])):
            return groups
        incomplete = [number for number, group in enumerate(groups) if not group.complete]
        oldest = incomplete[: max(0, missing)]
        return self._sample(generation, groups, dict.fromkeys(oldest))

    # ----------------------------------------------------------------------------- grade and refill

    def _grade_and_refill(
        self, generation: Generation, groups: list[RolloutGroup], budget: int | None
    ) -> tuple[list[RolloutGroup], int]:
        """Grade the complete groups, then replace those without signal by further problems.

        Rounds of further problems follow as long as any rank lacks groups with signal, `refill` of
        them at most.

        Returns:
            The groups that wait, and how many of them are complete on the rank with the fewest.
        """
        learned, groups, min_complete = self._grade_complete(generation, groups, self.slots)
        assert learned, "a generation has groups that are complete on every rank"
        lengths = _lengths(generation)
        replaced = 0
        size = generation.group_size
        share = self._note_signal_share(generation) if self.options.refill else 0.0
        for attempt in range(1, self.options.refill + 1):
            live = live_units(generation.batch["signal"], size)
            missing = self._most_missing(live)
            if not missing:
                break
            retry = generation.attempt(attempt)
            max_graded = schedule.groups_for(schedule.OVERSAMPLE * missing, [share], self.slots)
            groups = self._sample_further(
                retry, groups=groups, budget=budget, count=max_graded - min_complete
            )
            more_groups, groups, min_complete = self._grade_complete(retry, groups, max_graded)
            if not more_groups:  # on no rank: none has ended within the budget
                continue
            lengths = (*lengths, *_lengths(retry))
            # Collective: where only one of the two batches has images on some rank, their rows have
            # different columns, and no rank exchanges any.
            if not all(gather_object([retry.batch.keys() == generation.batch.keys()])):
                continue
            free_slots_for = self.slots if self.has_stale else 0
            chosen = schedule.admitted(
                live, live_units(retry.batch["signal"], size), free_slots_for
            )
            replaced += sum(number != slot for slot, number in enumerate(chosen[: len(live)]))
            candidates = [*learned, *more_groups]
            generation.batch = chosen_groups(
                generation.batch,
                further=retry.batch,
                groups=chosen,
                size=size,
                pad_id=self.context.pad_id,
            )
            learned = [candidates[number] for number in chosen]
            generation.rows = [group.row for group in learned for _ in group.rollouts]
        if self.options.refill:
            self.log("adora/refilled_groups", replaced / len(learned))
        if self.allows_partial:
            remembered = (*self.state.lengths, lengths)[-schedule.REMEMBERED :]
            self.state = replace(self.state, lengths=remembered)
        return groups, min_complete

    def _note_signal_share(self, generation: Generation) -> float:
        """Remember and return the share of groups with signal, the mean over all ranks."""
        live = live_units(generation.batch["signal"], generation.group_size)
        share_1 = torch.tensor([live.count(True) / len(live)], device=self.accelerator.device)
        share = float(self.accelerator.gather(share_1).mean())
        remembered = (*self.state.signal_shares, share)[-schedule.REMEMBERED :]
        self.state = replace(self.state, signal_shares=remembered)
        return share

    def _most_missing(self, live: Sequence[bool]) -> int:
        """How many groups with signal are missing on the rank that lacks most.

        `live` says for each group of this rank whether it has signal. Slots that stayed empty count
        as missing too.
        """
        free_slots = self.slots - len(live) if self.has_stale else 0
        missing_1 = torch.tensor([live.count(False) + free_slots], device=self.accelerator.device)
        return int(self.accelerator.gather(missing_1).max())

    def _sample_further(
        self, generation: Generation, groups: list[RolloutGroup], budget: int | None, count: int
    ) -> list[RolloutGroup]:
        """Return the groups and those of `count` further problems, sampled within the budget."""
        if count <= 0:
            return groups
        begun = self._draw_further(generation, count)
        limits: TokenLimits = {len(groups) + number: budget for number in range(len(begun))}
        self.log("adora/further_batches", 1.0)
        return self._sample(generation, [*groups, *begun], limits)

    def _draw_further(self, generation: Generation, count: int) -> list[RolloutGroup]:
        """Draw `count` further problems and begin their groups.

        The draw is seeded by the position in the run, so a resumed run draws the same problems.
        """
        rank = self.accelerator.process_index
        empty = (Rollout(),) * generation.group_size
        seed = f"{self.config.seed}/{generation.key.position}/{generation.key.attempt}/{rank}"
        row_numbers = schedule.further_rows(len(self.rows), count, seed)
        rows: list[Any] = self.rows.__getitems__(row_numbers)
        self.guard.check(rows, generation.key.step)
        first_slot = rank * self.slots  # slots are numbered over all ranks
        begun = [
            RolloutGroup(
                problem=DrawnProblem(row_number=row_number, key=generation.key, slot=slot),
                row=row,
                began=generation.number,
                rollouts=empty,
            )
            for slot, (row_number, row) in enumerate(
                zip(row_numbers, rows, strict=True), first_slot
            )
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

    def _grade_complete(
        self, generation: Generation, groups: list[RolloutGroup], max_groups: int
    ) -> tuple[list[RolloutGroup], list[RolloutGroup], int]:
        """Grade the oldest complete groups, equally many on every rank.

        Args:
            generation: gets the batch of the graded groups.
            groups: of this rank, the oldest first.
            max_groups: the most groups that are graded.

        Returns:
            The graded groups, the remaining ones, and how many of the remaining ones are complete
            on the rank with the fewest.
        """
        complete = [number for number, group in enumerate(groups) if group.complete]
        count = len(groups)
        min_complete = count
        if self.has_stale:
            # Collective: ranks may have completed unequal numbers, and have to grade equally many.
            complete_1 = torch.tensor([len(complete)], device=self.accelerator.device)
            min_complete = int(self.accelerator.gather(complete_1).min())
            count = min(min_complete, max_groups)
        graded = [groups[number] for number in complete[:count]]
        remaining = [group for number, group in enumerate(groups) if number not in complete[:count]]
        if count:
            self.builder(generation, graded, self._prompts_read(graded), aged=self.has_stale)
        return graded, remaining, min_complete - count

    # ------------------------------------------------------------------------------------- sampling

    def _sample(
        self,
        generation: Generation,
        groups: list[RolloutGroup],
        limits: TokenLimits,
        pending: PendingSamples | None = None,
    ) -> list[RolloutGroup]:
        """Continue the unfinished rollouts of the groups that `limits` names, with all their turns.

        Args:
            generation: for which they are sampled.
            groups: of this rank.
            limits: tokens per rollout by the number of the group; None: to the rollouts' ends.
                Groups without an entry stay as they are.
            pending: samples of these rollouts' first turn, where they were requested before.

        Returns:
            All groups in their order, the continued ones with longer rollouts.
        """
        unfinished = unfinished_rollouts(groups, limits)

        def sample_turn(going: dict[RolloutKey, Rollout]) -> dict[RolloutKey, Rollout]:
            nonlocal pending
            requested_before = pending
            pending = None  # holds the first turn alone
            return self._sample_turn(
                continuations,
                going,
                prompts=prompts,
                pending=requested_before,
                now=generation.key.step,
            )

        def answer_calls(key: RolloutKey, rollout: Rollout) -> Rollout:
            return self._answer_calls(continuations[key], rollout, generation.key.step)

        def has_room(key: RolloutKey, rollout: Rollout) -> bool:
            return self._max_tokens(continuations[key], rollout) > 0

        with self.phase("rollout"), self.guard.watching():
            continuations, prompts = self._continuations(generation, groups, limits, unfinished)
            continued = run_turns(
                unfinished,
                sample=sample_turn,
                answer_calls=answer_calls,
                has_room=has_room,
                any_rank=self.on_any_rank,
            )
        return [
            replace(
                group,
                rollouts=tuple(
                    continued.get(RolloutKey(number, member), rollout)
                    for member, rollout in enumerate(group.rollouts)
                ),
            )
            for number, group in enumerate(groups)
        ]

    def _sample_turn(
        self,
        continuations: Mapping[RolloutKey, Continuation],
        going: Mapping[RolloutKey, Rollout],
        *,
        prompts: PromptBatch | None,
        pending: PendingSamples | None,
        now: int,
    ) -> dict[RolloutKey, Rollout]:
        """Sample one turn of the rollouts, or take it from the pending samples.

        Args:
            continuations: by the keys of the rollouts.
            going: the rollouts that have a turn to sample.
            prompts: of all rollouts of the generation, for a sampler that reads them itself.
            pending: samples of this turn that were requested before; None: sample now.
            now: optimizer steps that have been made.
        """
        requests = [self._request(continuations[key], rollout) for key, rollout in going.items()]
        max_turn = None if self.tool_loop is None else self.tool_loop.turn_tokens
        step = now
        with mismatch_named([continuations[key].group.row for key in going]):
            if pending is not None:
                step = pending.step
                results = pending.join()
            else:
                results = self.sampler.sample(requests, prompts)
        longer: dict[RolloutKey, Rollout] = {}
        for (key, rollout), request, result in zip(going.items(), requests, results, strict=True):
            longer[key] = append_result(
                rollout,
                request,
                result,
                max_length=continuations[key].max_length,
                max_turn=max_turn,
                has_ended=self._has_ended,
                step=step,
                compared=continuations[key].compared,
            )
        return longer

    def on_any_rank(self, holds: bool) -> bool:
        """Return whether something holds on any rank.

        Without tools there is one turn, so this asks no other rank and returns False.
        """
        if self.tool_loop is None:
            return False
        holds_1 = torch.tensor([holds], device=self.accelerator.device)
        return bool(self.accelerator.gather(holds_1).any())

    def _continuations(
        self,
        generation: Generation,
        groups: list[RolloutGroup],
        limits: TokenLimits,
        unfinished: Mapping[RolloutKey, Rollout],
    ) -> tuple[dict[RolloutKey, Continuation], PromptBatch | None]:
        """What the sampler needs to continue these rollouts, by their keys, and their prompts.

        A rank without unfinished rollouts reads nothing, and has no prompts.
        """
        if not unfinished:
            return {}, None
        rows = [groups[number].row for number, _ in unfinished]
        prompts = self.images.prompts(rows, generation.key.mode, refill=generation.key.attempt > 0)
        self._last_read = [groups[number].problem for number, _ in unfinished], prompts
        extensions = self.extensions if generation.key.mode == "train" else ()
        images = prompts.images or [None] * len(rows)
        replacements = other_images(extensions, groups=groups, members=[*unfinished], images=images)
        continuations: dict[RolloutKey, Continuation] = {}
        for (number, member), prompt_ids, trainer_images, replacement in zip(
            unfinished, prompts.ids, images, replacements, strict=True
        ):
            continuations[RolloutKey(number, member)] = Continuation(
                group=groups[number],
                member=member,
                prompt_ids=prompt_ids,
                images=list(replacement or trainer_images or ()),
                compared=replacement is None,
                token_budget=limits[number],
                max_length=self.config.max_completion_length,
                tokens_before=len(unfinished[RolloutKey(number, member)].policy_tokens),
            )
        return continuations, prompts

    def _max_tokens(self, continuation: Continuation, rollout: Rollout) -> int:
        """How many tokens the rollout may sample in its next turn."""
        limit = continuation.max_length - len(rollout.tokens)
        if continuation.token_budget is not None:
            sampled = len(rollout.policy_tokens)
            limit = min(limit, continuation.token_budget - sampled + continuation.tokens_before)
        if self.tool_loop is not None and self.tool_loop.turn_tokens is not None:
            limit = min(limit, self.tool_loop.turn_tokens - len(rollout.last_turn_tokens))
        return limit

    def _request(self, continuation: Continuation, rollout: Rollout) -> SamplingRequest:
        """The request for the next turn of a rollout."""
        group = continuation.group
        member = continuation.member
        tokens = rollout.tokens
        seed = None
        if self.config.uses("seeded_rollouts"):
            seed = group.seed(self.config.seed, member, rollout)
        # Only rollouts that have not begun share their prompt, and so a request.
        shares_request = not tokens and self.config.uses("group_requests")
        return SamplingRequest(
            prompt_ids=[*continuation.prompt_ids, *tokens],
            images=[*continuation.images, *(picture.image for picture in rollout.pictures)],
            group=group.problem if shares_request else (group.problem, member),
            seed=seed,
            max_tokens=self._max_tokens(continuation, rollout),
        )

    def _answer_calls(self, continuation: Continuation, rollout: Rollout, step: int) -> Rollout:
        """A rollout whose turn has ended, with what tools answer to the calls in it."""
        # A turn may also have been stopped because it repeats itself; then it calls nothing.
        if self.tool_loop is None or not self._has_ended(rollout.last_turn_tokens):
            return rollout
        return self.tool_loop(
            rollout,
            images_of(continuation.group.row),
            prompt_length=len(continuation.prompt_ids),
            max_length=continuation.max_length,
            step=step,
            seed=continuation.group.tool_seed(self.config.seed, continuation.member),
        )

    def _has_ended(self, tokens: Sequence[int]) -> bool:
        """Whether a turn of these tokens has come to its end by itself."""
        return self.builder.ends.ended(tokens, self.builder.ends.decode(tokens))

    def _prompts_read(self, groups: Sequence[RolloutGroup]) -> PromptBatch | None:
        """The prompts that were read last, if they are those of exactly these groups.

        They are handed out once, since the image bank is emptied at the next read.
        """
        last_read = self._last_read
        self._last_read = None
        if last_read is None:
            return None
        problems, prompts = last_read
        is_same = problems == [group.problem for group in groups for _ in group.rollouts]
        return prompts if is_same else None

    # ------------------------------------------------------------------------- messages and figures

    def _warn_of_lost_groups(self, generation: Generation) -> None:
        """Warn that some groups in progress cannot be used before `max_steps`.

        That happens where a run resumes with fewer steps than it had begun groups for. The first
        rank warns, once.
        """
        waiting = len(self.state.waiting)
        waiting += sum(len(pending.groups) for pending in self.state.pending)
        learnable = self._generations_left(generation) * self.slots
        if waiting > learnable and self.accelerator.is_main_process:
            steps_needed = math.ceil(waiting / self.slots) * self.shape.updates
            tqdm.write(
                f"max_steps: {self.context.state().max_steps} ends the run before "
                f"{waiting - learnable} of the {waiting} groups per process that the checkpoint has "
                "set aside (adora_rollouts.budget) can be learned from; "
                f"{generation.key.step + steps_needed} is enough for all",
                file=sys.stderr,
            )

    def _log_ages(self, generation: Generation, budget: int | None) -> None:
        """Log how old the rollouts of the batch are, and how many unfinished ones wait."""
        ages_B = generation.batch["age"]
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
            self.log("adora/unfinished", unfinished_R.sum().item())
            self.log("adora/rollout_budget", budget or self.config.max_completion_length)

    # --------------------------------------------------------------------------------- a checkpoint

    def save(self, folder: Path) -> None:
        """Write what waits on this rank into a checkpoint.

        Where nothing was learned from the last generations, a resumed run samples them again, so
        the state from before them is written.
        """
        if not self.has_stale:
            return
        learned_nothing = self.context.state().global_step == self._sampled_at
        state = self._state_before_step if learned_nothing else self.state
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


def _lengths(generation: Generation) -> tuple[int, ...]:
    """Tokens of every rollout of a graded generation, of all ranks."""
    if generation.scores is None:
        return ()
    return tuple(map(int, generation.scores.lengths_B.tolist()))
