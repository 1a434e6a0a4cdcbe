"""Rows of the dataset schema from the problem families.

A diagram belongs to the split that its own pixels decide (a hash), so train and held-out data never share a diagram,
whatever their sizes and seeds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from PIL import Image

from adora_vl.errors import UserError, nearest
from data_prep.images import diagram_hash
from data_prep.schema import Row
from data_prep.synthetic.families import FAMILIES, Problem

SPLITS = ("train", "test")
_TEST_SHARE = 0.25  # of all diagrams; the rows of a split are drawn until it is full, so this only costs redraws


def split_of(image: Image.Image) -> str:
    """The split that this diagram belongs to, in every dataset that is ever generated."""
    return "test" if int(diagram_hash(image)[:8], 16) < _TEST_SHARE * 2**32 else "train"


def _row(problem: Problem, split: str, index: int, seed: int) -> Row:
    return {
        "id": f"synthetic/{seed}/{split}/{index}",
        "images": [problem.image],
        "problem": problem.question,
        "answer": problem.answer,
        "answer_raw": problem.answer,
        "choices": None,
        "split": split,
        "source": "synthetic",
        "meta": {
            "goal": problem.goal,
            "shapes": list(problem.shapes),
            "family": problem.family,
            "solution": problem.solution,
            "slip": problem.slip,
        },
    }


def generate(
    rows: int, *, split: str = "train", seed: int = 0, size: int = 56, families: tuple[str, ...] = ()
) -> Iterator[Row]:
    """Yield `rows` rows of `split`, families in turn, each diagram at most once. `size` is in pixels.

    The same arguments give the same rows, byte for byte. Raises `UserError` on an unknown family or split.
    """
    names = families or tuple(FAMILIES)
    for name in names:
        if name not in FAMILIES:
            raise UserError(f"families: unknown family {name!r}{nearest(name, FAMILIES)}; known: {', '.join(FAMILIES)}")
    if split not in SPLITS:
        raise UserError(f"split: {split!r} is not one of {', '.join(SPLITS)}")
    rng = random.Random(f"{seed}/{split}/{size}")
    seen: set[str] = set()
    for index in range(rows):
        draw = FAMILIES[names[index % len(names)]]
        problem = draw(rng, size)
        while split_of(problem.image) != split or diagram_hash(problem.image) in seen:
            problem = draw(rng, size)
        seen.add(diagram_hash(problem.image))
        yield _row(problem, split, index, seed)
