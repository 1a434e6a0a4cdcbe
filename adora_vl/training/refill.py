"""Replaces groups without signal by groups of further problems: DAPO's dynamic sampling.

A group has signal if its rollouts' rewards differ (arXiv 2503.14476).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from accelerate.utils import gather_object

from adora_vl.rollout.rollouts import RolloutGroup
from adora_vl.training.advantages import AdvantageComputer
from adora_vl.training.batch_rows import RowReader, concat_rows, rows_of_groups
from adora_vl.training.generation import Generation, ScoredGroups
from adora_vl.training.generation_sampler import GenerationSampler
from adora_vl.training.pool import Pool
from adora_vl.training.schedule import OVERSAMPLING_FACTOR, count_groups_for_signal
from adora_vl.types import StepContext

# Makes this rank's groups into a batch and scores it: stages 5 and 6 of a training step.
ScoreGroups = Callable[[Generation, Sequence[RolloutGroup]], ScoredGroups]


@dataclass(frozen=True, kw_only=True)
class Refill:
    """Samples further problems as long as any rank lacks groups with signal. Collective.

    A group has signal if its rollouts' rewards differ. The groups of further problems are called
    refill groups. They fill free slots of a rank's batch, and replace groups without signal.
    """

    context: StepContext
    pool: Pool
    generation_sampler: GenerationSampler
    advantage_computer: AdvantageComputer

    def replace_groups(
        self, generation: Generation, scored_groups: ScoredGroups, score: ScoreGroups
    ) -> ScoredGroups:
        """Return the groups to learn from, with groups without signal replaced as far as possible.

        As long as any rank lacks groups with signal, groups of further problems are sampled and
        scored, in at most `adora_rollouts.refill` rounds. Then the pool gets the lengths of all
        scored rollouts. Collective.

        Args:
            generation: the present one.
            scored_groups: this rank's groups of it.
            score: makes further groups into a batch and scores it.
        """
        completion_lengths = scored_groups.facts.length_N.int().tolist()  # of N rollouts
        if self.pool.options.refill:
            scored_groups = self._replace_in_rounds(
                generation, scored_groups, score, completion_lengths=completion_lengths
            )
        self.pool.record_trained_batch(scored_groups.batch, completion_lengths)
        return scored_groups

    def _replace_in_rounds(
        self,
        generation: Generation,
        scored_groups: ScoredGroups,
        score: ScoreGroups,
        *,
        completion_lengths: list[int],
    ) -> ScoredGroups:
        """Return the groups to learn from, after at most `adora_rollouts.refill` rounds.

        `completion_lengths`: gets the lengths of all further rollouts. The other arguments are
        those of `replace_groups`.
        """
        pool = self.pool
        signal_share = pool.remember_signal_share(scored_groups.assessment)
        replaced_count = 0
        sampled_batches = 0
        for round_number in range(1, pool.options.refill + 1):
            missing_groups = pool.count_missing_groups(scored_groups.assessment)
            if not missing_groups:
                break
            refill_round = generation.for_refill_round(round_number)
            # More than are missing, since some of the further groups have no signal either.
            max_groups = count_groups_for_signal(
                groups_with_signal=OVERSAMPLING_FACTOR * missing_groups,
                signal_shares=[signal_share],
                max_groups=pool.max_groups,
            )
            # Complete groups that wait are used first. Every rank has at least this many.
            waiting_count = pool.state.min_complete_groups
            sampled_groups = self.generation_sampler.sample_refill_groups(
                refill_round, count=max_groups - waiting_count
            )
            if sampled_groups:
                sampled_batches += 1
            complete_groups = pool.select_complete(
                [*pool.state.waiting_groups, *sampled_groups], max_groups
            )
            # With a token budget it may be that no group is complete, on all ranks alike.
            if not complete_groups:
                continue
            refill_groups = score(refill_round, complete_groups)
            completion_lengths += refill_groups.facts.length_N.int().tolist()
            # If one of the two batches has no images on some rank, their columns differ, and their
            # rows cannot be joined. Collective: then no rank joins rows.
            has_same_columns = refill_groups.batch.keys() == scored_groups.batch.keys()
            if not all(gather_object([has_same_columns])):
                continue
            chosen_by_rank = pool.choose_groups(scored_groups.assessment, refill_groups.assessment)
            replaced_count += count_replaced_groups(chosen_by_rank, len(scored_groups.groups))
            scored_groups = self.take_chosen_groups(
                generation, scored_groups, refill_groups, chosen_by_rank=chosen_by_rank
            )
        groups_of_all_ranks = len(scored_groups.groups) * self.context.accelerator.num_processes
        self.context.log("adora/refilled_groups", replaced_count / groups_of_all_ranks)
        self.context.log("adora/further_batches", sampled_batches)
        return scored_groups

    def take_chosen_groups(
        self,
        generation: Generation,
        scored_groups: ScoredGroups,
        refill_groups: ScoredGroups,
        *,
        chosen_by_rank: Sequence[Sequence[int]],
    ) -> ScoredGroups:
        """Return the groups that are chosen from a generation and its refill, assessed anew.

        For example, if this rank has the groups 0 and 1, and the refill has 2 and 3, the choice
        [0, 3] replaces group 1 by group 3. Advantages may depend on all groups of a batch, so the
        old assessments do not hold any more. `num_items_in_batch` of the batch is still the old
        one: a sum over all ranks, which is computed again when the advantages are final.

        Args:
            generation: the present one.
            scored_groups: this rank's groups of it, with the numbers 0 to n - 1.
            refill_groups: this rank's groups of further problems, with the numbers from n on.
            chosen_by_rank: for each rank the numbers of the groups to learn from.
        """
        group_size = generation.group_size
        chosen_groups = chosen_by_rank[self.context.accelerator.process_index]
        batch = concat_rows(scored_groups.batch, refill_groups.batch, self.context.pad_id)
        groups_of_rank = [*scored_groups.groups, *refill_groups.groups]
        # The facts are those of all ranks' rollouts, unlike groups and batch.
        groups_in_facts = _groups_in_joined_facts(
            chosen_by_rank,
            groups_per_rank=len(scored_groups.groups),
            refill_groups_per_rank=len(refill_groups.groups),
        )
        all_facts = scored_groups.facts.append(refill_groups.facts)
        facts = all_facts.select(rows_of_groups(groups_in_facts, group_size))
        return ScoredGroups(
            groups=[groups_of_rank[number] for number in chosen_groups],
            batch=RowReader(batch).take(rows_of_groups(chosen_groups, group_size)),
            facts=facts,
            assessment=self.advantage_computer.assess(facts, group_size, generation.key.step),
        )


def _groups_in_joined_facts(
    chosen_by_rank: Sequence[Sequence[int]], groups_per_rank: int, refill_groups_per_rank: int
) -> list[int]:
    """Return the indices that the chosen groups of all ranks have in the joined facts.

    The joined facts have first the groups of the generation, rank by rank, then those of the
    refill, rank by rank. For example, of two ranks with 2 groups and 1 refill group each, which
    choose [0, 2] and [0, 1], the indices are 0, 4, 2 and 3.

    Args:
        chosen_by_rank: for each rank the numbers of its chosen groups.
        groups_per_rank: groups of the generation that each rank has.
        refill_groups_per_rank: groups of the refill that each rank has.
    """
    first_of_refill = groups_per_rank * len(chosen_by_rank)
    numbers_in_facts = []
    for rank, chosen_groups in enumerate(chosen_by_rank):
        for number in chosen_groups:
            if number < groups_per_rank:
                numbers_in_facts.append(rank * groups_per_rank + number)
            else:
                number_in_refill = number - groups_per_rank
                first_of_rank = first_of_refill + rank * refill_groups_per_rank
                numbers_in_facts.append(first_of_rank + number_in_refill)
    return numbers_in_facts


def count_replaced_groups(chosen_by_rank: Sequence[Sequence[int]], groups_per_rank: int) -> int:
    """Return how many groups of all ranks a refill has replaced.

    A batch has slots for groups. Groups in slots that were free before do not count. For example,
    two ranks with 2 groups each and the choices [0, 3] and [0, 1, 2] give 1: group 3 replaces group
    1 on the first rank, and group 2 of the second rank gets a free slot.

    Args:
        chosen_by_rank: for each rank the number of the group in each slot. A group that stays has
            the number of its slot.
        groups_per_rank: groups that each rank had before.
    """
    replaced_count = 0
    for chosen_groups in chosen_by_rank:
        for slot, group in enumerate(chosen_groups[:groups_per_rank]):
            if group != slot:
                replaced_count += 1
    return replaced_count
