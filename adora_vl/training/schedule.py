"""The rules by which a pool of groups fills generations.

Each rule is a function of numbers that all ranks know, so all ranks decide alike.
"""

import math
from collections.abc import Sequence

import torch

from adora_vl.utils.seeding import generator_at

# Quantile of the answers' lengths that the automatic budget is: nine of ten answers end within it.
BUDGET_QUANTILE = 0.9
# Generations whose lengths and shares of groups with signal are remembered.
REMEMBERED = 4
# The mean longest answer of a generation must exceed the budget by this factor, else there is none.
MIN_TAIL = 1.5
# Oversample refills by this factor; 1.5 makes one round enough about as often as refilling every
# slot.
OVERSAMPLE = 1.5


def generations_in(steps: int, generations_per_step: int, generations_per_epoch: int) -> int:
    """Number of generations of the first `steps` optimizer steps.

    A step has `generations_per_step` generations, but the last step of an epoch has what is left of the epoch's
    `generations_per_epoch`.
    """
    whole_epochs, steps_of_epoch = divmod(
        steps, math.ceil(generations_per_epoch / generations_per_step)
    )
    return whole_epochs * generations_per_epoch + min(
        steps_of_epoch * generations_per_step, generations_per_epoch
    )


def place_of(
    generation: int, generations_per_step: int, generations_per_epoch: int
) -> tuple[int, int]:
    """The optimizer steps before a generation, and the generations before it in its own step."""
    whole_epochs, generations_in_epoch = divmod(generation, generations_per_epoch)
    optimizer_steps = (
        whole_epochs * math.ceil(generations_per_epoch / generations_per_step)
        + generations_in_epoch // generations_per_step
    )
    return optimizer_steps, generations_in_epoch % generations_per_step


def how_many_begin(
    waiting_groups: int,
    complete_groups: int,
    slots: int,
    remaining_generations: int,
    min_begun: int = 0,
) -> int:
    """How many groups begin in a generation.

    As many groups begin as the generation has slots, but no more than can be learned from, and
    fewer where more than half of the slots are filled by complete groups already.

    Args:
        waiting_groups: groups of earlier generations that were not learned from.
        complete_groups: how many of them are complete.
        slots: groups that a generation learns from.
        remaining_generations: generations until the end of the training, including this one.
        min_begun: groups that begin in any case. A generation that is requested ahead needs them:
            what is complete now may be used up before its turn, and what continues may continue
            with a later generation.
    """
    superfluous_groups = max(0, complete_groups - slots // 2)
    learnable_groups = remaining_generations * slots - waiting_groups
    return max(min_begun, min(slots - superfluous_groups, learnable_groups))


def groups_to_complete(
    group_count: int, slots: int, remaining_generations: int, min_groups: int
) -> int:
    """How many groups have to be complete now, so that all can be learned from in the end.

    At least `min_groups`, and no more than there are `group_count` or `slots`. `remaining_generations` counts the
    generations until the end of the training, including this one.
    """
    groups_learned_later = (remaining_generations - 1) * slots
    return min(group_count, slots, max(min_groups, group_count - groups_learned_later))


def automatic_budget(lengths: Sequence[Sequence[int]], min_budget: int) -> int | None:
    """The length that nine of ten answers had at most, and at least `min_budget`.

    `lengths` has the tokens of each answer of each remembered generation. Returns None, for no
    budget, where there are no lengths yet, and where the longest answers are not much longer: then
    little would be saved, and groups would be late for it.
    """
    ascending = sorted(length for generation in lengths for length in generation)
    if not ascending:
        return None
    quantile = ascending[math.ceil(BUDGET_QUANTILE * len(ascending)) - 1]
    budget = max(min_budget, quantile)
    mean_longest = sum(map(max, lengths)) / len(lengths)
    return budget if budget * MIN_TAIL <= mean_longest else None


def further_rows(row_count: int, group_count: int, seed: str) -> list[int]:
    """Row numbers of `group_count` further problems, out of `row_count`.

    They are drawn without repetition until all rows are used. The `seed` names the position in the
    run, so a resumed run draws the same.
    """
    drawn_rows: list[int] = torch.randperm(row_count, generator=generator_at(seed))[
        :group_count
    ].tolist()
    return [drawn_rows[index % len(drawn_rows)] for index in range(group_count)]


def groups_for(groups_with_signal: float, signal_shares: Sequence[float], max_groups: int) -> int:
    """How many groups begin, `max_groups` at most, so that on average `groups_with_signal` have signal.

    `signal_shares` has the share of groups with signal in each remembered generation; without any, every
    group is expected to have signal.
    """
    mean_share = sum(signal_shares) / len(signal_shares) if signal_shares else 1.0
    return min(max_groups, math.ceil(groups_with_signal / mean_share)) if mean_share else max_groups


def exchanges(
    has_signal: Sequence[bool], further_has_signal: Sequence[bool]
) -> list[tuple[int, int]]:
    """Pairs of a group without signal and the further group with signal that replaces it.

    There are as many pairs as both kinds allow. The arguments say for each group whether it has
    signal.
    """
    groups_without_signal = [
        group for group, group_has_signal in enumerate(has_signal) if not group_has_signal
    ]
    replacements = [
        group for group, group_has_signal in enumerate(further_has_signal) if group_has_signal
    ]
    return list(zip(groups_without_signal, replacements, strict=False))


def admitted(
    has_signal: Sequence[bool], further_has_signal: Sequence[bool], slots: int
) -> list[int]:
    """Which groups are learned from once further ones are graded.

    Free slots are filled first, with signal if possible, the same number of them on all ranks; then
    groups without signal are exchanged.

    Args:
        has_signal: for each group of the batch, whether it has signal.
        further_has_signal: the same for each further group.
        slots: groups that the batch has room for.

    Returns:
        One number for each slot, counted on from `has_signal` to `further_has_signal`.
    """
    group_in_slot = list(range(len(has_signal)))
    further_best_first = sorted(
        range(len(further_has_signal)), key=lambda number: not further_has_signal[number]
    )
    further_in_free_slots = sorted(further_best_first[: max(0, slots - len(has_signal))])
    is_exchangeable = [
        group_has_signal and number not in further_in_free_slots
        for number, group_has_signal in enumerate(further_has_signal)
    ]
    for slot, replacement in exchanges(has_signal, is_exchangeable):
        group_in_slot[slot] = len(has_signal) + replacement
    return [*group_in_slot, *(len(has_signal) + number for number in further_in_free_slots)]
