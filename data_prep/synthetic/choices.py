"""Four answers to choose from, three of them wrong in the way that people are wrong."""

from __future__ import annotations

import random
import re
from string import ascii_uppercase

from adora_vl.rewards import grade
from adora_vl.rewards.boxed import last_boxed

_NUMBER = re.compile(r"\d+")


def with_distractors(answer: str, slip: str, count: int, rng: random.Random) -> tuple[list[str], str]:
    """`count` different choices and the letter of the right one. `slip`: a wrong worked answer, always among them."""
    wrong: list[str] = []
    candidates = [last_boxed(slip) or "", *_variants(answer, rng)]
    for candidate in candidates:
        if len(wrong) == count - 1:
            break
        if candidate and all(
            grade(f"\\boxed{{{candidate}}}", other).verdict != "correct" for other in (answer, *wrong)
        ):
            wrong.append(candidate)
    assert len(wrong) == count - 1, f"{answer!r} has too few variants"
    place = rng.randrange(count)
    wrong.insert(place, answer)
    return wrong, ascii_uppercase[place]


def _variants(answer: str, rng: random.Random) -> list[str]:
    """The answer with its first number doubled, halved, supplemented or moved, in random order."""
    match = _NUMBER.search(answer)
    assert match, f"{answer!r} has no number"
    number = int(match.group())
    near = [2 * number, 180 - number, number + 1, number + 2, number - 2, number + 10, number - 10]
    near += [number // 2] if number % 2 == 0 else []
    rng.shuffle(near)
    values = [value for value in (*near, *range(number + 3, number + 12)) if value > 0]
    return [answer[: match.start()] + str(value) + answer[match.end() :] for value in values]
