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


def generations_in(steps: int, per_step: int, per_epoch: int) -> int:
    """Number of generations of the first `steps` optimizer steps.

    A step has `per_step` generations, but the last step of an epoch has what is left of the epoch's
    `per_epoch`.
    """
    epochs, steps_of_epoch = divmod(steps, math.ceil(per_epoch / per_step))
    return epochs * per_epoch + min(steps_of_epoch * per_step, per_epoch)


def place_of(number: int, per_step: int, per_epoch: int) -> tuple[int, int]:
    """The optimizer steps before a generation, and the generations before it in its own step."""
    epochs, in_epoch = divmod(number, per_epoch)
    steps = epochs * math.ceil(per_epoch / per_step) + in_epoch // per_step
    return steps, in_epoch % per_step


def how_many_begin(
    waiting: int, complete: int, slots: int, remaining: int, min_begun: int = 0
) -> int:
    """How many groups begin in a generation.

    As many groups begin as the generation has slots, but no more than can be learned from, and
    fewer where more than half of the slots are filled by complete groups already.

    Args:
        waiting: groups of earlier generations that were not learned from.
        complete: how many of them are complete.
        slots: groups that a generation learns from.
        remaining: generations until the end of the training, including this one.
        min_begun: groups that begin in any case. A generation that is requested ahead needs them:
            what is complete now may be used up before its turn, and what continues may continue
            with a later generation.
    """
    superfluous = max(0, complete - slots // 2)
    learnable = remaining * slots - waiting
    return max(min_begun, min(slots - superfluous, learnable))


def groups_to_complete(groups: int, slots: int, remaining: int, min_groups: int) -> int:
    """How many groups have to be complete now, so that all can be learned from in the end.

    At least `min_groups`, and no more than there are `groups` or `slots`. `remaining` counts the
    generations until the end of the training, including this one.
    """
    learned_later = (remaining - 1) * slots
    return min(groups, slots, max(min_groups, groups - learned_later))


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


def further_rows(rows: int, groups: int, seed: str) -> list[int]:
    """Row numbers of `groups` further problems, out of `rows`.

    They are drawn without repetition until all rows are used. The `seed` names the position in the
    run, so a resumed run draws the same.
    """
    drawn: list[int] = torch.randperm(rows, generator=generator_at(seed))[:groups].tolist()
    return [drawn[number % len(drawn)] for number in range(groups)]


def groups_for(with_signal: float, shares: Sequence[float], max_groups: int) -> int:
    """How many groups begin, `max_groups` at most, so that on average `with_signal` have signal.

    `shares` has the share of groups with signal in each remembered generation; without any, every
    group is expected to have signal.
    """
    share = sum(shares) / len(shares) if shares else 1.0
    return min(max_groups, math.ceil(with_signal / share)) if share else max_groups


def exchanges(live: Sequence[bool], further_live: Sequence[bool]) -> list[tuple[int, int]]:
    """Pairs of a group without signal and the further group with signal that replaces it.

    There are as many pairs as both kinds allow. The arguments say for each group whether it has
    signal.
    """
    dead = [group for group, alive in enumerate(live) if not alive]
    replacements = [group for group, alive in enumerate(further_live) if alive]
    return list(zip(dead, replacements, strict=False))


def admitted(live: Sequence[bool], further_live: Sequence[bool], slots: int) -> list[int]:
    """Which groups are learned from once further ones are graded.

    Free slots are filled first, with signal if possible, the same number of them on all ranks; then
    groups without signal are exchanged.

    Args:
        live: for each group of the batch, whether it has signal.
        further_live: the same for each further group.
        slots: groups that the batch has room for.

    Returns:
        One number for each slot, counted on from `live` to `further_live`.
    """
    chosen = list(range(len(live)))
    best_first = sorted(range(len(further_live)), key=lambda number: not further_live[number])
    added = sorted(best_first[: max(0, slots - len(live))])
    exchangeable = [alive and number not in added for number, alive in enumerate(further_live)]
    for dead, replacement in exchanges(live, exchangeable):
        chosen[dead] = len(live) + replacement
    return [*chosen, *(len(live) + number for number in added)]
