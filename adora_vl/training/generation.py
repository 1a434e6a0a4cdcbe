"""One generation of a run: its address, and what the stages of a training step find for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from adora_vl.packing.prompts import PromptBatch
from adora_vl.rollout.rollouts import Rollout, RolloutGroup, StepKey
from adora_vl.training.advantages import GroupAssessment
from adora_vl.training.rollout_facts import RolloutFacts
from adora_vl.types import Batch, Row


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Where in a run some groups are sampled: mode, optimizer step, and generation.

    A generation is all rollouts that are sampled before the policy learns again.
    """

    key: StepKey
    """Mode, optimizer step and micro-batch, from which seeds follow."""
    group_size: int
    """Rollouts of a group, G."""
    number: int = 0
    """Its index among the generations of a training; 0 where all rollouts are sampled at once."""

    def for_refill_round(self, round_number: int) -> Generation:
        """Return this generation in a round of its refill, which samples further problems.

        The number of the round, from 1, is part of the seeds of its rollouts.
        """
        return replace(self, key=replace(self.key, refill_round=round_number))


@dataclass(frozen=True, kw_only=True, slots=True)
class UnscoredGroups:
    """Complete groups of this rank as a batch, before they are scored. There are B rollouts."""

    groups: Sequence[RolloutGroup]
    prompts: PromptBatch
    """The prompt of each rollout."""
    completions: list[Any]
    """The last turn of each rollout as reward functions get it: a list of messages, or a text."""
    completion_texts: list[str]
    """The last turn of each rollout as a text."""
    ended_by_itself: list[bool]
    """Whether a token or string of the stop criteria ended each rollout."""
    thinking_opened: list[bool]
    """Whether each last turn began inside a block of thinking."""
    batch: Batch

    @property
    def rollouts(self) -> list[Rollout]:
        """The rollouts of all groups."""
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def rows(self) -> list[Row]:
        """The row of each rollout."""
        return [group.row for group in self.groups for _ in group.rollouts]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredGroups:
    """Groups of this rank with their batch, and what is known of the groups of all ranks."""

    groups: Sequence[RolloutGroup]
    batch: Batch
    facts: RolloutFacts
    """Rewards, lengths and ends of the rollouts of all ranks."""
    assessment: GroupAssessment
    """Which groups of all ranks have signal, and their advantages before the final ones."""
