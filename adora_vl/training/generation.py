"""One generation of a run: its address, and what the stages of a training step find for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from adora_vl.packing.prompts import PromptBatch
from adora_vl.rollout.rollouts import Rollout, RolloutGroup, StepKey
from adora_vl.training.advantages import JudgedGroups
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
    judged: JudgedGroups
    was_exchanged: bool = False
    """Whether these groups were scored in several batches, so that they have to be judged again."""

    def exchanged(
        self, refill: ScoredGroups, chosen: Sequence[Sequence[int]], pad_id: int, rank: int
    ) -> ScoredGroups:
        """Return the chosen groups of both, which are judged anew later.

        Args:
            refill: groups of further problems.
            chosen: for each rank the numbers of its chosen groups; those of `refill` are counted
                on from this rank's own.
            pad_id: fills columns of token ids.
            rank: this one.
        """
        size = len(self.groups[0].rollouts)
        batch = chosen_groups(
            self.batch, further=refill.batch, groups=chosen[rank], size=size, pad_id=pad_id
        )
        candidates = [*self.groups, *refill.groups]
        # All ranks have equally many groups in each of the two batches.
        first_of_refill = len(self.groups) * len(chosen)
        rows: list[int] = []
        for number_of_rank, numbers in enumerate(chosen):
            for number in numbers:
                group = number_of_rank * len(self.groups) + number
                if number >= len(self.groups):
                    later = number - len(self.groups)
                    group = first_of_refill + number_of_rank * len(refill.groups) + later
                rows += range(group * size, (group + 1) * size)
        return replace(
            self,
            groups=[candidates[number] for number in chosen[rank]],
            batch=batch,
            facts=self.facts.joined(refill.facts).selected(rows),
            was_exchanged=True,
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
