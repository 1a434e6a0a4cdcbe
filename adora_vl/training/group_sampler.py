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
from adora_vl.rollout.prompt_tokens import mismatch_named
from adora_vl.rollout.rollouts import (
    DrawnProblem,
    Rollout,
    RolloutGroup,
    RolloutKey,
    SamplingRequest,
    SamplingResult,
    unfinished_rollouts,
)
from adora_vl.rollout.samplers import AsyncServerSampler, PendingSamples, Sampler
from adora_vl.rollout.stopping import StopCriteria
from adora_vl.rollout.turns import ToolLoop, append_result, run_turns
from adora_vl.training.extensions import Extension, other_images
from adora_vl.training.generation import Generation
from adora_vl.training.pool_state import PendingGeneration, TokenLimits
from adora_vl.types import StepContext


class PromptReader:
    """Reads the prompts of rollouts, and remembers those that it read last.

    A read of a generation's first attempt empties the image bank, so references of an earlier read
    are stale: nothing but the last read can be handed out again.
    """

    def __init__(self, images: DistinctImages) -> None:
        """Read with `images`, which processes each distinct image once."""
        self.images = images
        self._problems: list[DrawnProblem] = []  # of the rollouts that were read last
        self._last: PromptBatch | None = None

    def read(self, groups: Sequence[RolloutGroup], generation: Generation) -> PromptBatch:
        """Return the prompts of rollouts, of which each of `groups` has one.

        They are read anew unless they are those that were read last.
        """
        problems = [group.problem for group in groups]
        if self._last is None or problems != self._problems:
            rows = [group.row for group in groups]
            key = generation.key
            self._last = self.images.prompts(rows, key.mode, refill=key.attempt > 0)
            self._problems = problems
        return self._last

    def take(self, groups: Sequence[RolloutGroup], generation: Generation) -> PromptBatch:
        """Return the prompts of all rollouts of `groups`, for their batch, once."""
        prompts = self.read([group for group in groups for _ in group.rollouts], generation)
        self._last = None
        return prompts


@dataclass(frozen=True, kw_only=True)
class RequestParts:
    """What the requests of one rollout have in common, in all of its turns."""

    group: RolloutGroup
    member: int
    """The rollout's number in its group."""
    prompt_ids: list[int]
    images: list[Any]
    """The images that the engine sees with the prompt."""
    compared: bool
    """Whether the images are the trainer's; else the engine's log-probabilities belong to another
    prompt and cannot be compared with the policy's."""
    token_budget: int | None
    """Tokens that may be sampled now; None: up to the rollout's end."""
    tokens_before: int
    """Tokens that the policy had sampled before this generation."""


class GroupSampler:
    """Samples the unfinished rollouts of groups, with all their turns.

    The methods are collective: every rank calls each of them, also without any group.
    """

    def __init__(
        self,
        context: StepContext,
        prompts: PromptReader,
        sampler: Sampler,
        stop: StopCriteria,
        extensions: Sequence[Extension],
        tool_loop: ToolLoop | None,
    ) -> None:
        """Build a sampler of groups.

        Args:
            context: what every part of a training step is built from.
            prompts: reads the prompts.
            sampler: samples the rollouts.
            stop: says whether a turn has ended by itself.
            extensions: of the run, in their order; they may show other images.
            tool_loop: answers calls of tools; None without tools.
        """
        self.accelerator = context.accelerator
        self.config = context.config
        self.prompts = prompts
        self.sampler = sampler
        self.stop = stop
        self.extensions = extensions
        self.tool_loop = tool_loop

    def begin(
        self, generation: Generation, groups: Sequence[RolloutGroup], limits: TokenLimits
    ) -> PendingSamples:
        """Ask for the first turn of the unfinished rollouts.

        Servers that sample ahead begin at once; any other sampler begins when the result is asked
        for.

        Args:
            generation: that the rollouts are sampled for.
            groups: of this rank.
            limits: tokens per rollout by the number of the group. Groups without an entry stay as
                they are.
        """
        turns = self._turns(generation, groups, limits)
        requests = turns.requests(turns.unfinished)
        if isinstance(self.sampler, AsyncServerSampler):
            return self.sampler.begin(requests)
        sample = partial(self.sampler.sample, requests, turns.prompts)
        return PendingSamples(step=generation.key.step, join=cache(sample))

    def finish(self, generation: Generation, pending: PendingGeneration) -> list[RolloutGroup]:
        """Wait for the first turn of a pending generation, and play all further ones.

        Returns its groups in their order, with longer rollouts.
        """
        return self._play(
            self._turns(generation, pending.groups, pending.token_limits, pending.samples)
        )

    def sample(
        self, generation: Generation, groups: Sequence[RolloutGroup], limits: TokenLimits
    ) -> list[RolloutGroup]:
        """Continue the unfinished rollouts of the groups that `limits` names, with all their turns.

        The arguments are those of `begin`. Returns all groups in their order.
        """
        return self._play(self._turns(generation, groups, limits))

    def any_rank_continues(self, continues: bool) -> bool:
        """Return whether any rank wants another turn. Collective in a run with tools.

        Without tools there is one turn only, so this asks no other rank and returns False.

        Args:
            continues: whether this rank wants one.
        """
        if self.tool_loop is None:
            return False
        continues_1 = torch.tensor([continues], device=self.accelerator.device)
        return bool(self.accelerator.gather(continues_1).any())

    def _turns(
        self,
        generation: Generation,
        groups: Sequence[RolloutGroup],
        limits: TokenLimits,
        first_samples: PendingSamples | None = None,
    ) -> GroupTurns:
        """Return the turns of the unfinished rollouts; reads their prompts.

        A rank without unfinished rollouts reads nothing, and has no prompts.
        """
        unfinished = unfinished_rollouts(groups, limits)
        parts: dict[RolloutKey, RequestParts] = {}
        prompts = None
        if unfinished:
            group_of_rollout = [groups[key.group] for key in unfinished]
            prompts = self.prompts.read(group_of_rollout, generation)
            trainer_images = prompts.images or [None] * len(unfinished)
            is_training = generation.key.mode == "train"
            replacements = other_images(
                self.extensions if is_training else (),
                groups=groups,
                group_and_member=[*unfinished],
                images=trainer_images,
            )
            for key, prompt_ids, images, replacement in zip(
                unfinished, prompts.ids, trainer_images, replacements, strict=True
            ):
                parts[key] = RequestParts(
                    group=groups[key.group],
                    member=key.member,
                    prompt_ids=prompt_ids,
                    images=list(replacement or images or ()),
                    # Where the engine sees another image, its prompt is not the trainer's.
                    compared=replacement is None,
                    token_budget=limits[key.group],
                    tokens_before=len(unfinished[key].policy_tokens),
                )
        return GroupTurns(
            sampler=self,
            step=generation.key.step,
            groups=groups,
            unfinished=unfinished,
            parts=parts,
            prompts=prompts,
            first_samples=first_samples,
        )

    def _play(self, turns: GroupTurns) -> list[RolloutGroup]:
        """Return all groups of the turns, with the unfinished rollouts played through."""
        continued = run_turns(turns.unfinished, turns)
        return [
            replace(
                group,
                rollouts=tuple(
                    continued.get(RolloutKey(number, member), rollout)
                    for member, rollout in enumerate(group.rollouts)
                ),
            )
            for number, group in enumerate(turns.groups)
        ]


@dataclass(kw_only=True)
class GroupTurns:
    """Plays the turns of the unfinished rollouts of groups: the `TurnPlayer` of a training."""

    sampler: GroupSampler
    step: int
    """Optimizer steps that have been made."""
    groups: Sequence[RolloutGroup]
    unfinished: dict[RolloutKey, Rollout]
    parts: Mapping[RolloutKey, RequestParts]
    prompts: PromptBatch | None
    """The prompts of all unfinished rollouts, for a sampler that reads them itself."""
    first_samples: PendingSamples | None
    """The samples of the first turn, where they were asked for before."""

    def sample(self, rollouts: Mapping[RolloutKey, Rollout]) -> dict[RolloutKey, Rollout]:
        """Return the rollouts with one more turn, or what the token budget allows of it."""
        requests = self.requests(rollouts)
        tool_loop = self.sampler.tool_loop
        with mismatch_named([self.parts[key].group.row for key in rollouts]):
            results, step = self._results(requests)
        return {
            key: append_result(
                rollout,
                request,
                result,
                max_turn=None if tool_loop is None else tool_loop.turn_tokens,
                stop=self.sampler.stop,
                step=step,
                compared=self.parts[key].compared,
            )
            for (key, rollout), request, result in zip(
                rollouts.items(), requests, results, strict=True
            )
        }

    def answer(self, key: RolloutKey, rollout: Rollout) -> Rollout:
        """Return the rollout with what tools answer to the calls of its last turn."""
        tool_loop = self.sampler.tool_loop
        # A turn may also have been stopped because it repeats itself; then it calls nothing.
        if tool_loop is None or not self.sampler.stop.ends(rollout.last_turn_tokens):
            return rollout
        parts = self.parts[key]
        return tool_loop(
            rollout,
            images_of(parts.group.row),
            prompt_length=len(parts.prompt_ids),
            max_length=self.sampler.config.max_completion_length,
            step=self.step,
            seed=parts.group.tool_seed(self.sampler.config.seed, parts.member),
        )

    def has_room(self, key: RolloutKey, rollout: Rollout) -> bool:
        """Return whether the rollout may sample more tokens now."""
        return self._max_tokens(self.parts[key], rollout) > 0

    def any_rank_continues(self, continues: bool) -> bool:
        """Return whether any rank wants another turn. Collective in a run with tools."""
        return self.sampler.any_rank_continues(continues)

    def requests(self, rollouts: Mapping[RolloutKey, Rollout]) -> list[SamplingRequest]:
        """Return the requests for the next turn of the rollouts."""
        return [self._request(self.parts[key], rollout) for key, rollout in rollouts.items()]

    def _results(self, requests: list[SamplingRequest]) -> tuple[list[SamplingResult], int]:
        """Return the results of a turn, and the optimizer steps of the weights that sampled it."""
        samples = self.first_samples
        self.first_samples = None  # later turns are sampled now
        if samples is not None:
            return samples.join(), samples.step
        return self.sampler.sampler.sample(requests, self.prompts), self.step

    def _request(self, parts: RequestParts, rollout: Rollout) -> SamplingRequest:
        """Return the request for the next turn of a rollout."""
        config = self.sampler.config
        tokens = rollout.tokens
        seed = None
        if config.uses("seeded_rollouts"):
            seed = parts.group.seed(config.seed, parts.member, rollout)
        # Only rollouts that have not begun share their prompt, and so a request.
        shares_request = not tokens and config.uses("group_requests")
        problem = parts.group.problem
        return SamplingRequest(
            prompt_ids=[*parts.prompt_ids, *tokens],
            images=[*parts.images, *(picture.image for picture in rollout.pictures)],
            group=problem if shares_request else (problem, parts.member),
            seed=seed,
            max_tokens=self._max_tokens(parts, rollout),
            max_length=config.max_completion_length,
        )

    def _max_tokens(self, parts: RequestParts, rollout: Rollout) -> int:
        """Return how many tokens the rollout may sample in its next turn."""
        limit: int = self.sampler.config.max_completion_length - len(rollout.tokens)
        if parts.token_budget is not None:
            sampled = len(rollout.policy_tokens)
            limit = min(limit, parts.token_budget - sampled + parts.tokens_before)
        tool_loop = self.sampler.tool_loop
        if tool_loop is not None and tool_loop.turn_tokens is not None:
            limit = min(limit, tool_loop.turn_tokens - len(rollout.last_turn_tokens))
        return limit


def to_the_ends(groups: Sequence[RolloutGroup]) -> TokenLimits:
    """Limits by which all rollouts of the groups are sampled to their ends."""
    return dict.fromkeys(range(len(groups)))
