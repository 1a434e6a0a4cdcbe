"""By which rules a pool of groups fills generations, as functions of the numbers that all ranks
know.
"""

import math
from collections.abc import Sequence

import torch

from adora_vl.utils.seeding import generator_at

# `auto`: the share of the answers that end within the budget, by the answers of so many
# generations, and how many times as long as the budget the longest answer of a generation has to be
# on average.
SHARE = 0.9
REMEMBERED = 4
TAIL = 1.5
# as many further problems as lack signal on average: then one round is enough as often as with all
# places
MORE = 1.5


def generations_in(steps: int, each: int, epoch: int) -> int:
    """Generations of the first `steps` optimizer steps, `each` in a step but the last one of an
    epoch of `epoch`.
    """
    epochs, rest = divmod(steps, math.ceil(epoch / each))
    return epochs * epoch + min(rest * each, epoch)


def place_of(number: int, each: int, epoch: int) -> tuple[int, int]:
    """The optimizer steps before the generation of this number, and the generations before it in
    its own step.
    """
    epochs, rest = divmod(number, epoch)
    return epochs * math.ceil(epoch / each) + rest // each, rest % each


def how_many_begin(waiting: int, complete: int, places: int, left: int, least: int = 0) -> int:
    """How many groups begin in a generation: as many as it has places, but no more than can be
    learned from, and fewer where more are complete already than fill half of the places.

    `waiting`: groups of earlier generations, `complete` of which are. `left`: generations to come,
    with this one. `least`: so many begin in any case. A generation that is asked for ahead needs
    them, because what is complete now may be used up before its turn, and what goes on may go on
    with a later one.
    """
    superfluous = max(0, complete - places // 2)
    learnable = left * places - waiting
    return max(least, min(places - superfluous, learnable))


def groups_to_complete(groups: int, places: int, left: int, least: int) -> int:
    """How many groups have to be complete now, `least` at least, so that all can be learned from in
    the end.
    """
    return min(groups, places, max(least, groups - (left - 1) * places))


def automatic_budget(lengths: Sequence[Sequence[int]], least: int) -> int | None:
    """The length that nine of ten answers had at most, and `least`.

    None, so no budget, where there are none yet, and where those that run on are not much longer:
    little would be saved then, and groups would be late for it.
    """
    known = sorted(length for generation in lengths for length in generation)
    if not known:
        return None
    budget = max(least, known[math.ceil(SHARE * len(known)) - 1])
    return budget if budget * TAIL <= sum(map(max, lengths)) / len(lengths) else None


def further_rows(rows: int, groups: int, place: str) -> list[int]:
    """Row numbers of `groups` further problems, drawn with `place` as the seed, so a resumed run
    draws the same.
    """
    drawn: list[int] = torch.randperm(rows, generator=generator_at(place))[:groups].tolist()
    return [drawn[number % len(drawn)] for number in range(groups)]


def groups_for(with_signal: float, shares: Sequence[float], most: int) -> int:
    """How many groups begin, `most` at most, so that on average so many have signal, by the last
    `shares`.
    """
    share = sum(shares) / len(shares) if shares else 1.0
    return min(most, math.ceil(with_signal / share)) if share else most


def exchanges(live: Sequence[bool], further_live: Sequence[bool]) -> list[tuple[int, int]]:
    """Pairs (group without signal, further group with signal that replaces it), until either kind
    runs out.
    """
    dead = [group for group, alive in enumerate(live) if not alive]
    found = [group for group, alive in enumerate(further_live) if alive]
    return list(zip(dead, found, strict=False))


def admitted(live: Sequence[bool], further: Sequence[bool], places: int) -> list[int]:
    """Which groups are learned from when further ones are graded: for each place a number, counted
    on from `live` to `further`. Free places are filled first, with signal if possible, the same
    number of them on all ranks.
    """
    chosen = list(range(len(live)))
    best = sorted(range(len(further)), key=lambda number: not further[number])
    added = sorted(best[: max(0, places - len(live))])
    left = [alive and number not in added for number, alive in enumerate(further)]
    for dead, found in exchanges(live, left):
        chosen[dead] = len(live) + found
    return [*chosen, *(len(live) + number for number in added)]
