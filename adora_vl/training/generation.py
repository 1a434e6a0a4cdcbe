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
    assessment: GroupAssessment

    def exchange_groups(
        self, refill: ScoredGroups, chosen_by_rank: Sequence[Sequence[int]], pad_id: int, rank: int
    ) -> ScoredGroups:
        """Return the groups that are chosen among these and those of a refill.

        For example, if this rank has the groups 0 and 1, and the refill has 2 and 3, the choice
        [0, 3] replaces group 1 by group 3. In the result `assessment` is still the old one, which
        the caller replaces.

        Args:
            refill: groups of further problems, which replace groups without signal.
            chosen_by_rank: for each rank the numbers of its chosen groups. A rank's n groups in
                `self` have the numbers 0 to n - 1, and those in `refill` the numbers from n on.
            pad_id: the token that fills shorter rows.
            rank: the number of this process.
        """
        group_size = len(self.groups[0].rollouts)
        batch = chosen_groups(
            self.batch,
            refill_batch=refill.batch,
            group_numbers=chosen_by_rank[rank],
            group_size=group_size,
            pad_id=pad_id,
        )
        groups_of_rank = [*self.groups, *refill.groups]
        # The facts are those of all ranks' rollouts, unlike groups and batch.
        chosen_rollouts: list[int] = []
        for group in self._groups_in_joined_facts(refill, chosen_by_rank):
            chosen_rollouts += range(group * group_size, (group + 1) * group_size)
        return replace(
            self,
            groups=[groups_of_rank[number] for number in chosen_by_rank[rank]],
            batch=batch,
            facts=self.facts.append(refill.facts).select(chosen_rollouts),
        )

    def _groups_in_joined_facts(
        self, refill: ScoredGroups, chosen_by_rank: Sequence[Sequence[int]]
    ) -> list[int]:
        """Return the indices that the chosen groups of all ranks have in the joined facts.

        The joined facts have first the groups of `self`, rank by rank, then those of `refill`, rank
        by rank. Every rank has equally many groups in each of the two. For example, of two ranks
        with 2 groups and 1 refill group each, which choose [0, 2] and [0, 1], the indices are 0, 4,
        2 and 3.

        `chosen_by_rank`: for each rank the numbers that its chosen groups have on that rank, as in
        `exchange_groups`.
        """
        groups_per_rank = len(self.groups)
        refill_groups_per_rank = len(refill.groups)
        first_of_refill = groups_per_rank * len(chosen_by_rank)
        numbers_in_facts = []
        for rank, chosen_groups_of_rank in enumerate(chosen_by_rank):
            for number in chosen_groups_of_rank:
                if number < groups_per_rank:
                    numbers_in_facts.append(rank * groups_per_rank + number)
                else:
                    number_in_refill = number - groups_per_rank
                    first_of_rank = first_of_refill + rank * refill_groups_per_rank
                    numbers_in_facts.append(first_of_rank + number_in_refill)
        return numbers_in_facts
