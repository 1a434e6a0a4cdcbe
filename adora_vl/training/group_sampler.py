"""Samples the rollouts of groups: groups in, the same groups with longer rollouts out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from adora_vl.data.rows import images_of
from adora_vl.packing.images import DistinctImages
from adora_vl.packing.prompts import PromptBatch
from adora_vl.rollout.prompt_tokens import naming_mismatched_row
from adora_vl.rollout.rollouts import (
    DrawnProblem,
    Rollout,
    RolloutGroup,
    RolloutKey,
    SamplingRequest,
    SamplingResult,
    StepKey,
    unfinished_rollouts,
)
from adora_vl.rollout.samplers import AsyncServerSampler, PendingSamples, Sampler
from adora_vl.rollout.stopping import StopCriteria
from adora_vl.rollout.turns import ToolLoop, append_result, run_turns
from adora_vl.training.extensions import Extension, replaced_images
from adora_vl.training.generation import Generation
from adora_vl.training.pool_state import PendingGeneration, TokenLimits
from adora_vl.types import StepContext


class PromptReader:
    """Tokenizes prompts and processes their images, and remembers the last result.

    Prompts are needed twice: when their rollouts are sampled, and when these become a batch. Mostly
    both are the same, and are read once. Older results cannot be remembered: reading the prompts of
    a new generation empties the image bank, which stores the images that prompts refer to.
    """

    def __init__(self, images: DistinctImages) -> None:
        """Read with `images`, which processes each distinct image once."""
        self.images = images
        # The prompts that were read last, and the problem of each.
        self._last_prompts: PromptBatch | None = None
        self._last_problems: list[DrawnProblem] = []

    def read(self, group_of_rollout: Sequence[RolloutGroup], generation: Generation) -> PromptBatch:
        """Return the prompts of these rollouts, tokenized and with their images processed.

        If the same prompts were read last, that result is returned.

        Args:
            group_of_rollout: for each rollout its group.
            generation: the present one. The first call for it empties the image bank.
        """
        problems = [group.problem for group in group_of_rollout]
        if self._last_prompts is None or problems != self._last_problems:
            rows = [group.row for group in group_of_rollout]
            # A refill has further groups for the same batch, in place of those without signal. Its
            # prompts must not empty the image bank: the batch still needs its images.
            is_refill = generation.key.refill_round > 0
            self._last_prompts = self.images.prompts(rows, generation.key.mode, refill=is_refill)
            self._last_problems = problems
        return self._last_prompts

    def pop(self, groups: Sequence[RolloutGroup], generation: Generation) -> PromptBatch:
        """Return the prompts of all rollouts of these groups, and forget them.

        It is called when the groups become a batch, after which nothing reads their prompts again.
        `generation`: the present one, for prompts that have to be read again.
        """
        group_of_rollout = [group for group in groups for _ in group.rollouts]
        prompts = self.read(group_of_rollout, generation)
        self._last_prompts = None
        return prompts


@dataclass(frozen=True, kw_only=True)
class RequestParts:
    """What the sampling requests of one rollout have in common, in all of its turns."""

    group: RolloutGroup
    rollout_index: int
    """The rollout's number in its group."""
    prompt_ids: list[int]
    images: list[Any]
    """The images that the engine sees with the prompt."""
    saw_trainer_images: bool
    """Whether the images are the trainer's. If not, the engine's log-probabilities belong to
    another prompt and cannot be compared with the policy's."""
    token_budget: int | None
    """Tokens that may be sampled now; None: up to the rollout's end."""
    tokens_before: int
    """Tokens that the policy had sampled before this generation."""


@dataclass(kw_only=True)
class GroupSampler:
    """Samples the unfinished rollouts of groups, with all their turns.

    A turn is what the policy says before it ends or calls a tool. The first turn may be requested
    from servers long before its result is needed; later turns follow the answers of tools. The
    methods are collective: every rank calls each of them, also without any group.
    """

    context: StepContext
    prompt_reader: PromptReader
    sampler: Sampler
    """Samples the rollouts with an engine, with servers or with Transformers."""
    stop_criteria: StopCriteria
    """Say whether a turn has ended by itself."""
    extensions: Sequence[Extension]
    """Those of the run, in their order; they may show the engine other images."""
    tool_loop: ToolLoop | None
    """Runs the tools that a turn calls, and appends their answers; None without tools."""
    server_context: int | None = None
    """How many tokens of a prompt with its completion the servers take. None without servers: an
    engine of this process ends a rollout there by itself."""

    def request_first_turn(
        self, generation: Generation, groups: Sequence[RolloutGroup], limits: TokenLimits
    ) -> PendingSamples:
        """Request the first turn of the unfinished rollouts, for which `finish_turns` waits.

        Servers that sample ahead begin at once. Any other sampler begins when the result is waited
        for.

        Args:
            generation: the generation that the rollouts are sampled for.
            groups: groups of this rank.
            limits: by the index of a group, how many tokens of each of its rollouts are sampled
                now; None: up to its end. Groups without an entry stay as they are.
        """
        turns = self._turns_of_unfinished(generation, groups, limits)
        requests = turns.make_requests(turns.unfinished)
        if isinstance(self.sampler, AsyncServerSampler):
            return self.sampler.submit(requests)
        sample_now = partial(self.sampler.sample, requests, turns.prompts)
        # `join` calls it later. Cached: a second call of `join` has to return the same results.
        return PendingSamples(step=generation.key.step, join=cache(sample_now))

    def finish_turns(
        self, generation: Generation, pending: PendingGeneration
    ) -> list[RolloutGroup]:
        """Wait for the first turn of a pending generation, and sample all further turns.

        Returns the groups of the pending generation in their order, with longer rollouts.

        Args:
            generation: the present one, for which the pending one was requested.
            pending: its groups, and the first turn that `request_first_turn` has requested.
        """
        turns = self._turns_of_unfinished(
            generation,
            groups=pending.groups,
            limits=pending.token_limits,
            first_samples=pending.samples,
        )
        return self._sample_turns(turns)

    def sample(
        self, generation: Generation, groups: Sequence[RolloutGroup], limits: TokenLimits
    ) -> list[RolloutGroup]:
        """Return the groups with longer rollouts, after sampling all turns of unfinished ones.

        Args:
            generation: the present generation.
            groups: groups of this rank.
            limits: by the index of a group, how many tokens of each of its rollouts are sampled
                now; None: up to its end. Groups without an entry stay as they are.
        """
        return self._sample_turns(self._turns_of_unfinished(generation, groups, limits))

    def any_rank_continues(self, continues: bool) -> bool:
        """Return whether any rank wants another turn. Collective in a run with tools.

        Without tools there is one turn only, so this asks no other rank and returns False.

        Args:
            continues: whether this rank wants one.
        """
        if self.tool_loop is None:
            return False
        accelerator = self.context.accelerator
        continues_1 = torch.tensor([continues], device=accelerator.device)
        return bool(accelerator.gather(continues_1).any())

    def _turns_of_unfinished(
        self,
        generation: Generation,
        groups: Sequence[RolloutGroup],
        limits: TokenLimits,
        first_samples: PendingSamples | None = None,
    ) -> GroupTurns:
        """Return the `GroupTurns` that samples the unfinished rollouts, with their prompts read.

        Each rollout gets its `RequestParts`: its prompt, images and token budget. In a training the
        user's extensions may change the images that the engine sees. A rank without unfinished
        rollouts reads nothing, and has no prompts.

        Args:
            generation: the present generation.
            groups: groups of this rank.
            limits: as in `sample`.
            first_samples: the samples of the first turn, where they were requested before.
        """
        unfinished = unfinished_rollouts(groups, limits)
        prompts = None
        parts_by_rollout: dict[RolloutKey, RequestParts] = {}
        if unfinished:
            group_of_rollout = [groups[key.group] for key in unfinished]
            prompts = self.prompt_reader.read(group_of_rollout, generation)
            extensions = self.extensions if generation.key.mode == "train" else ()
            parts_by_rollout = _request_parts(
                unfinished, groups, limits=limits, prompts=prompts, extensions=extensions
            )
        return GroupTurns(
            group_sampler=self,
            key=generation.key,
            groups=groups,
            unfinished=unfinished,
            parts_by_rollout=parts_by_rollout,
            prompts=prompts,
            first_samples=first_samples,
        )

    def _sample_turns(self, turns: GroupTurns) -> list[RolloutGroup]:
        """Sample turn by turn, and return all groups with the longer rollouts in their places.

        `turns`: samples one turn of the unfinished rollouts, and runs the tools that they call.
        """
        sampled_by_key = run_turns(turns.unfinished, turns, self.any_rank_continues)
        groups = []
        for number, group in enumerate(turns.groups):
            # A rollout that was not sampled, since it had ended before, stays as it is.
            rollouts = tuple(
                sampled_by_key.get(RolloutKey(group=number, rollout_index=rollout_index), rollout)
                for rollout_index, rollout in enumerate(group.rollouts)
            )
            groups.append(replace(group, rollouts=rollouts))
        return groups


def _request_parts(
    unfinished: Mapping[RolloutKey, Rollout],
    groups: Sequence[RolloutGroup],
    *,
    limits: TokenLimits,
    prompts: PromptBatch,
    extensions: Sequence[Extension],
) -> dict[RolloutKey, RequestParts]:
    """Return what the sampling requests of each unfinished rollout have in common in all turns.

    Args:
        unfinished: the rollouts by the number of their group and their own number in it.
        groups: groups of this rank.
        limits: by the index of a group, how many tokens of each of its rollouts are sampled now;
            None: up to its end.
        prompts: the prompt of each unfinished rollout, with the images that the trainer sees.
        extensions: of the run; they may show the engine other images.
    """
    trainer_images = prompts.images or [None] * len(unfinished)
    replacements = replaced_images(
        extensions, groups=groups, rollout_keys=[*unfinished], trainer_images=trainer_images
    )
    parts_by_rollout: dict[RolloutKey, RequestParts] = {}
    for key, prompt_ids, images, replacement in zip(
        unfinished, prompts.ids, trainer_images, replacements, strict=True
    ):
        parts_by_rollout[key] = RequestParts(
            group=groups[key.group],
            rollout_index=key.rollout_index,
            prompt_ids=prompt_ids,
            images=list(replacement or images or ()),
            # An engine that sees other images reads another prompt than the trainer, so its
            # prompt and log-probabilities cannot be compared with the trainer's.
            saw_trainer_images=replacement is None,
            token_budget=limits[key.group],
            # The budget is of this generation; tokens from earlier ones do not count.
            tokens_before=len(unfinished[key].policy_tokens),
        )
    return parts_by_rollout


@dataclass(kw_only=True)
class GroupTurns:
    """Samples the turns of the unfinished rollouts of groups: the `TurnSampler` of a training.

    A turn is what the policy says before it ends or calls a tool. Each rollout has a key, the
    number of its group and its own number in the group. Its `RequestParts` are what the sampling
    requests of all of its turns have in common, such as the prompt and the token budget.
    """

    group_sampler: GroupSampler
    key: StepKey
    """The batch that the rollouts are sampled for."""
    groups: Sequence[RolloutGroup]
    unfinished: dict[RolloutKey, Rollout]
    """The rollouts that have not ended, by group and number in it."""
    parts_by_rollout: Mapping[RolloutKey, RequestParts]
    prompts: PromptBatch | None
    """The prompts of all unfinished rollouts, for a sampler that reads them itself."""
    first_samples: PendingSamples | None
    """The samples of the first turn, where they were requested before."""

    def sample(self, rollouts: Mapping[RolloutKey, Rollout]) -> dict[RolloutKey, Rollout]:
        """Sample one more turn of each rollout, as far as its token budget allows.

        Returns the longer rollouts by their keys. Raises `RolloutError`, which names the row, where
        the engine reads another prompt than the trainer.
        """
        requests = self.make_requests(rollouts)
        with naming_mismatched_row([self.parts_by_rollout[key].group.row for key in rollouts]):
            results, step_of_weights = self._sample_or_join(requests, rollouts)
        tool_loop = self.group_sampler.tool_loop
        max_tokens_of_turn = None if tool_loop is None else tool_loop.max_turn_tokens
        longer_rollouts = {}
        for (key, rollout), request, result in zip(
            rollouts.items(), requests, results, strict=True
        ):
            longer_rollouts[key] = append_result(
                rollout,
                request,
                result,
                max_turn_tokens=max_tokens_of_turn,
                stop_criteria=self.group_sampler.stop_criteria,
                step=step_of_weights,
                saw_trainer_images=self.parts_by_rollout[key].saw_trainer_images,
                context_length=self.group_sampler.server_context,
            )
        return longer_rollouts

    def answer(self, key: RolloutKey, rollout: Rollout) -> Rollout:
        """Run the tools that the rollout's last turn calls, and return it with their answers."""
        tool_loop = self.group_sampler.tool_loop
        if tool_loop is None:
            return rollout
        # A turn that did not end by itself was stopped since it repeats itself. It calls nothing.
        if not self.group_sampler.stop_criteria.has_stopped(rollout.last_turn_tokens):
            return rollout
        parts = self.parts_by_rollout[key]
        config = self.group_sampler.context.config
        return tool_loop(
            rollout,
            images_of(parts.group.row),
            prompt_length=len(parts.prompt_ids),
            max_length=config.max_completion_length,
            step=self.key.step,
            seed=parts.group.tool_seed(config.seed, parts.rollout_index),
        )

    def can_continue(self, key: RolloutKey, rollout: Rollout) -> bool:
        """Return whether the rollout may sample more tokens now."""
        return self._max_tokens(self.parts_by_rollout[key], rollout) > 0

    def make_requests(self, rollouts: Mapping[RolloutKey, Rollout]) -> list[SamplingRequest]:
        """Return the requests for the next turn of the rollouts."""
        return [
            self._make_request(self.parts_by_rollout[key], rollout)
            for key, rollout in rollouts.items()
        ]

    def _sample_or_join(
        self, requests: list[SamplingRequest], rollouts: Mapping[RolloutKey, Rollout]
    ) -> tuple[list[SamplingResult], int]:
        """Return the results of a turn, and the optimizer step of the weights that sampled it.

        The first turn may have been requested in an earlier step, and is then waited for. Later
        turns are sampled now.

        Args:
            requests: those of the turn.
            rollouts: what the requests continue, in the same order.
        """
        requested_before = self.first_samples
        self.first_samples = None
        if requested_before is not None:
            return requested_before.join(), requested_before.step
        prompts = self._prompts_of_turn(rollouts)
        return self.group_sampler.sampler.sample(requests, prompts), self.key.step

    def _prompts_of_turn(self, rollouts: Mapping[RolloutKey, Rollout]) -> PromptBatch | None:
        """Return the prompts of a turn, for a sampler that reads them; else None. Collective.

        They are the prompts of these rollouts, with their tokens and the pictures of tools so far.
        A rank without rollouts returns a prompt as a stand-in.
        """
        if not self.group_sampler.sampler.reads_prompts or self.prompts is None:
            return None
        is_first_turn = not any(rollout.segments for rollout in rollouts.values())
        has_all_rollouts = len(rollouts) == len(self.unfinished)
        if is_first_turn and has_all_rollouts:
            return self.prompts
        row_by_key = {key: row for row, key in enumerate(self.unfinished)}
        rows = [row_by_key[key] for key in rollouts]
        completions = [rollout.tokens for rollout in rollouts.values()]
        pictures = [
            [picture.image for picture in rollout.pictures] for rollout in rollouts.values()
        ]
        if not rollouts:
            # The stand-in is the first prompt, as if nothing had been sampled from it.
            rows = [0]
            completions = [[]]
            pictures = [[]]
        return self.group_sampler.prompt_reader.images.continued_prompts(
            self.prompts,
            rows=rows,
            completions=completions,
            pictures=pictures,
            mode=self.key.mode,
        )

    def _make_request(self, parts: RequestParts, rollout: Rollout) -> SamplingRequest:
        """Return the request for the next turn of a rollout: its prompt, and all tokens so far.

        `parts`: what the requests of all of its turns have in common.
        """
        config = self.group_sampler.context.config
        tokens = rollout.tokens
        seed = None
        if config.uses("seeded_rollouts"):
            seed = parts.group.seed(config.seed, parts.rollout_index, rollout)
        problem = parts.group.problem
        # Requests with equal keys become one request of vLLM for several rollouts. The rollouts of
        # a group share their prompt, and so a key, until they have tokens of their own.
        shares_request = not tokens and config.uses("group_requests")
        merge_key = problem if shares_request else (problem, parts.rollout_index)
        return SamplingRequest(
            prompt_ids=[*parts.prompt_ids, *tokens],
            images=[*parts.images, *(picture.image for picture in rollout.pictures)],
            merge_key=merge_key,
            seed=seed,
            max_tokens=self._max_tokens(parts, rollout),
            max_length=config.max_completion_length,
        )

    def _max_tokens(self, parts: RequestParts, rollout: Rollout) -> int:
        """Return how many tokens the rollout may sample in its next turn.

        The smallest of these limits counts:

        - the completion's (`max_completion_length`), less all of its tokens, those of tools
          included
        - the generation's (`adora_rollouts.budget`), less the policy's tokens in this generation
        - the turn's (`adora_tool_options.turn_tokens`), less the tokens of the present turn
        - a server's context, less prompt and completion

        For example, a completion of at most 512 tokens has 100 of the policy and 50 of a tool, so
        362 are left. With a budget of 120 in its first generation 20 are left.
        """
        max_completion_length: int = self.group_sampler.context.config.max_completion_length
        limits = [max_completion_length - len(rollout.tokens)]
        if parts.token_budget is not None:
            sampled_in_generation = len(rollout.policy_tokens) - parts.tokens_before
            limits.append(parts.token_budget - sampled_in_generation)
        tool_loop = self.group_sampler.tool_loop
        if tool_loop is not None and tool_loop.max_turn_tokens is not None:
            limits.append(tool_loop.max_turn_tokens - len(rollout.last_turn_tokens))
        server_context = self.group_sampler.server_context
        if server_context is not None:
            # A server refuses a request that could exceed its context. If the prompt fills it
            # already, 1 token is requested: the server then refuses, and names the prompt's length.
            context_left = server_context - len(parts.prompt_ids) - len(rollout.tokens)
            limits.append(max(1, context_left))
        return min(limits)


def no_token_limits(groups: Sequence[RolloutGroup]) -> TokenLimits:
    """Return token limits by which all rollouts of the groups are sampled to their ends.

    Their keys are the numbers of the groups; None stands for no limit.
    """
    return dict.fromkeys(range(len(groups)))
