"""How large a figure is, as far as its facts say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from adora_vl.geometry.quantities import Distance, Equal, Relation, constant_of
from adora_vl.geometry.vectors import extent_of

_DEFAULT_SIZE = 15.0  # of a figure with no given length


@dataclass(frozen=True)
class Scale:
    """The sizes of a figure and of its picture.

    `size` is the length of the figure's larger side in the problem's unit, `pixels` that side in
    the picture (1 without a picture). `is_given` says whether any given length tells the size.
    """

    size: float
    pixels: float
    is_given: bool


def estimate_scale(relations: Sequence[Relation], places: Mapping[str, complex]) -> Scale:
    """Estimate how large a figure is from the lengths that its facts give.

    Where the ends of given lengths have places, their scale to the picture says it; else the
    lengths themselves do.
    """
    pixels = 1.0
    if places:
        width, height = extent_of(list(places.values()))
        pixels = max(width, height, 1e-9)
    length_by_ends: list[tuple[Distance, float]] = []
    for relation in relations:
        if isinstance(relation, Equal) and isinstance(relation.left, Distance):
            length = constant_of(relation.right)
            if length is not None and length > 0:
                length_by_ends.append((relation.left, length))
    scales = []
    for distance, length in length_by_ends:
        if distance.start in places and distance.end in places:
            drawn_length = abs(places[distance.start] - places[distance.end])
            # Two points in one place of the picture would give a scale without bound.
            if drawn_length > 1e-6 * pixels:
                scales.append(length / drawn_length)
    # A median, since one wrong or badly drawn length must not stretch the whole figure.
    if scales:
        size = float(np.median(scales)) * pixels
    elif length_by_ends:
        # A side is often shorter than the whole figure; by how much nobody knows.
        size = 1.5 * float(np.median([length for _, length in length_by_ends]))
    else:
        size = _DEFAULT_SIZE
    return Scale(size=size, pixels=pixels, is_given=bool(length_by_ends))
