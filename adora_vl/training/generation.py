"""One generation of a run: its address, and what the stages of a training step find for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from adora_vl.packing.prompts import PromptBatch
from adora_vl.rollout.rollouts import Rollout, RolloutGroup, StepKey
from adora_vl.training.advantages import GroupAssessment
from adora_vl.training.batch_rows import chosen_groups
from adora_vl.training.rollout_facts import RolloutFacts
from adora_vl.types import Batch, Row


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """The address of a generation: where in the run it is sampled."""

    key: StepKey
    group_size: int
    """Rollouts of a group, G."""
    number: int = 0
    """Index among the generations of a training, where rollouts may be older than theirs."""

    def attempt(self, number: int) -> Generation:
        """This generation at the round `number` of further problems."""
        return replace(self, key=replace(self.key, attempt=number))


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltGroups:
    """Complete groups of this rank as a batch, before they are scored. There are B rollouts."""

    groups: Sequence[RolloutGroup]
    prompts: PromptBatch
    """The prompts of all rollouts."""
    answers: list[Any]
    """The last turns, as messages or texts."""
    texts: list[str]
    """The last turns, as texts."""
    has_end: list[bool]
    """Whether each rollout came to its end by itself."""
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
    assessment: GroupAssessment

    def exchanged(
        self, refill: ScoredGroups, chosen_by_rank: Sequence[Sequence[int]], pad_id: int, rank: int
    ) -> ScoredGroups:
        """Return the chosen groups of both, which are judged anew later.

        Args:
            refill: groups of further problems.
            chosen_by_rank: for each rank the numbers of its chosen groups; those of `refill` are counted
                on from this rank's own.
            pad_id: fills columns of token ids.
            rank: this one.
        """
        group_size = len(self.groups[0].rollouts)
        batch = chosen_groups(
            self.batch,
            further_batch=refill.batch,
            group_numbers=chosen_by_rank[rank],
            group_size=group_size,
            pad_id=pad_id,
        )
        candidates = [*self.groups, *refill.groups]
        # All ranks have equally many groups in each of the two batches.
        first_of_refill = len(self.groups) * len(chosen_by_rank)
        rollout_rows: list[int] = []
        for source_rank, chosen_groups_of_rank in enumerate(chosen_by_rank):
            for group_number in chosen_groups_of_rank:
                global_group = source_rank * len(self.groups) + group_number
                if group_number >= len(self.groups):
                    number_in_refill = group_number - len(self.groups)
                    global_group = (
                        first_of_refill + source_rank * len(refill.groups) + number_in_refill
                    )
                rollout_rows += range(global_group * group_size, (global_group + 1) * group_size)
        return replace(
            self,
            groups=[candidates[group_number] for group_number in chosen_by_rank[rank]],
            batch=batch,
            facts=self.facts.joined(refill.facts).selected(rollout_rows),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PresentGeneration:
    """The generation that is being learned from: its micro-batches, which are copies.

    Its rows, rollouts and images are not held while the policy learns.
    """

    first_micro_step: int
    """TRL's `_step` where it begins."""
    micro_batches: list[Batch]
    """An empty one has no work."""
