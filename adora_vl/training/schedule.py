"""The rules by which a pool of groups fills generations.

Each rule is a function of numbers that all ranks know, so all ranks decide alike. A slot is the
room for one group in a rank's part of a generation.
"""

import math
from collections.abc import Sequence

import torch

from adora_vl.utils.seeding import generator_for_key

# The automatic budget is this quantile of the completions' lengths: nine of ten end within it.
BUDGET_QUANTILE = 0.9
# Generations whose lengths and shares of groups with signal are remembered.
REMEMBERED_GENERATIONS = 4
# The longest completion of a generation must exceed the budget by this factor on average. Otherwise
# there is no budget.
MIN_TAIL_RATIO = 1.5
# Where groups with signal are missing, this many further groups are sampled for each missing one.
# With 1.5 one round is enough about as often as with a further group for every slot.
OVERSAMPLING_FACTOR = 1.5


def count_groups_to_begin(
    waiting_groups: int,
    complete_groups: int,
    slots: int,
    remaining_generations: int,
    min_new_groups: int = 0,
) -> int:
    """Return how many groups begin in a generation.

    The batch of a generation has slots for groups, and as many groups begin as there are slots.
    Fewer begin if complete groups of earlier generations fill more than half of the slots already,
    or if the training ends before all could be learned from. For example, with 8 slots and 10
    remaining generations, 8 groups begin if 4 waiting groups are complete, and 6 if 6 are complete.

    Args:
        waiting_groups: groups of earlier generations that were not learned from.
        complete_groups: how many of them have no unfinished rollout.
        slots: groups that a generation learns from.
        remaining_generations: generations until the end of the training, including this one.
        min_new_groups: groups that begin in any case. A generation that servers sample ahead needs
            them, since earlier ones may use up the complete groups.
    """
    complete_beyond_half = max(0, complete_groups - slots // 2)
    slots_to_fill = slots - complete_beyond_half
    # More groups than these could not be learned from until the end.
    learnable_new_groups = remaining_generations * slots - waiting_groups
    return max(min_new_groups, min(slots_to_fill, learnable_new_groups))


def groups_to_complete(
    group_count: int, slots: int, remaining_generations: int, min_groups: int
) -> int:
    """Return how many groups have to be complete now, so that the training can learn from all.

    For example, 20 groups have begun, a generation has 8 slots, and 2 generations remain. The last
    one can learn from 8, so this one would need 12, but has room for 8: the result is 8. If 5
    generations remain, `min_groups` are enough.

    Args:
        group_count: groups that have begun and were not learned from. It bounds the result.
        slots: the most groups that one generation learns from.
        remaining_generations: generations until the end of the training, including this one.
        min_groups: the fewest groups that this generation may learn from.
    """
    most_learned_later = (remaining_generations - 1) * slots
    groups_left_for_now = group_count - most_learned_later
    return min(group_count, slots, max(min_groups, groups_left_for_now))


def automatic_budget(lengths: Sequence[Sequence[int]], min_budget: int) -> int | None:
    """Return how many tokens of a rollout one generation samples at most with `budget: auto`.

    It is the length that nine of ten earlier completions did not exceed, at least `min_budget`. For
    example, of the lengths 10, 20, ... 90 and 300 nine are at most 90, so the budget is 90.

    The result is None, no budget, if there are no lengths yet. It is also None if the longest
    completions are not much longer than the budget: it would save little and delay whole groups.

    Args:
        lengths: for each remembered generation the tokens of each completion.
        min_budget: the least budget with which a rollout ends in time.
    """
    ascending_lengths = sorted(length for generation in lengths for length in generation)
    if not ascending_lengths:
        return None
    quantile_index = math.ceil(BUDGET_QUANTILE * len(ascending_lengths)) - 1
    budget = max(min_budget, ascending_lengths[quantile_index])
    longest_by_generation = [max(generation) for generation in lengths]
    mean_longest = sum(longest_by_generation) / len(lengths)
    saves_little = budget * MIN_TAIL_RATIO > mean_longest
    return None if saves_little else budget


def draw_refill_rows(row_count: int, group_count: int, seed: str) -> list[int]:
    """Return the row numbers of `group_count` problems for a refill, drawn at random.

    They are drawn without repetition until all rows are used. Then the same rows come again in the
    same order: 5 problems of 3 rows may be the rows 2 0 1 2 0.

    Args:
        row_count: rows of the data set.
        group_count: problems to draw, one for each group.
        seed: names the position in the run, so that a resumed run draws the same rows.
    """
    shuffled_rows = torch.randperm(row_count, generator=generator_for_key(seed))
    drawn_rows: list[int] = shuffled_rows[:group_count].tolist()
    return [drawn_rows[index % len(drawn_rows)] for index in range(group_count)]


def count_groups_for_signal(
    groups_with_signal: float, signal_shares: Sequence[float], max_groups: int
) -> int:
    """Return how many groups to begin, so that on average `groups_with_signal` of them have signal.

    A group has signal if its rollouts' rewards differ. For example, if half of the groups had
    signal so far, 8 groups have to begin to get 4 with signal.

    Args:
        groups_with_signal: the number that is wanted.
        signal_shares: the share of groups with signal in each remembered generation. If it is
            empty, every group is expected to have signal.
        max_groups: the most groups that begin.
    """
    mean_share = 1.0
    if signal_shares:
        mean_share = sum(signal_shares) / len(signal_shares)
    if not mean_share:  # no group had signal, so no number would be enough
        return max_groups
    return min(max_groups, math.ceil(groups_with_signal / mean_share))


def fill_slots(
    has_signal: Sequence[bool], refill_has_signal: Sequence[bool], slots: int
) -> list[int]:
    """Choose the groups to learn from among those of a batch and those of its refill.

    1. Groups of the refill fill the free slots of the batch, those with signal before the others.
    2. The remaining refill groups with signal replace groups of the batch without signal.

    For example, the batch has the groups 0 and 1, of which only 0 has signal, and 3 slots. The
    refill groups 2, 3 and 4 have signal, none, and signal. Group 2 gets the free slot and 4
    replaces 1: the result is [0, 4, 2].

    Args:
        has_signal: for each of the n groups of the batch, whether its rollouts' rewards differ.
        refill_has_signal: the same for each group of the refill.
        slots: groups that the batch has room for.

    Returns:
        The number of the group in each slot. Groups of the batch have the numbers 0 to n - 1, and
        refill groups are numbered from n on.
    """
    refill_with_signal = []
    refill_without_signal = []
    for number, group_has_signal in enumerate(refill_has_signal, start=len(has_signal)):
        if group_has_signal:
            refill_with_signal.append(number)
        else:
            refill_without_signal.append(number)
    free_slots = max(0, slots - len(has_signal))
    signal_first = [*refill_with_signal, *refill_without_signal]
    in_free_slots = sorted(signal_first[:free_slots])
    # The refill groups with signal that the free slots had no room for.
    replacements = refill_with_signal[free_slots:]
    slots_without_signal = [
        slot for slot, group_has_signal in enumerate(has_signal) if not group_has_signal
    ]
    group_in_slot = list(range(len(has_signal)))
    # Not strict: there may be more replacements than slots without signal, or fewer.
    for slot, replacement in zip(slots_without_signal, replacements, strict=False):
        group_in_slot[slot] = replacement
    return [*group_in_slot, *in_free_slots]
