"""How large a figure is, as far as its facts say."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from adora_vl.geometry.quantities import (
    Area,
    Arithmetic,
    Constant,
    Distance,
    Equal,
    Quantity,
    Relation,
    constant_of,
    points_in_quantity,
)
from adora_vl.geometry.vectors import cross, extent_of

_DEFAULT_SIZE = 15.0  # of a figure with no given length


@dataclass(frozen=True)
class Scale:
    """The sizes of a figure and of its picture.

    `size` is the length of the figure's larger side in the problem's unit, `pixels` that side in
    the picture (1 without a picture). `is_given` says whether a given length or area tells the
    size.
    """

    size: float
    pixels: float
    is_given: bool


def estimate_scale(relations: Sequence[Relation], places: Mapping[str, complex]) -> Scale:
    """Estimate how large a figure is from the lengths that its facts give.

    The first of these that is known is taken:

    1. The scale of given lengths to the picture, times the size of the picture. For example, AB = 5
       is 100 pixels long in a picture of 300 pixels, so the size is 15.
    2. The same with given sums of lengths, or given areas.
    3. 1.5 times the median of the given lengths.
    4. A default size.
    """
    pixels = 1.0
    if places:
        width, height = extent_of(list(places.values()))
        pixels = max(width, height, 1e-9)
    given_lengths: list[tuple[Distance, float]] = []
    for relation in relations:
        if isinstance(relation, Equal) and isinstance(relation.left, Distance):
            length = constant_of(relation.right)
            if length is not None and length > 0:
                given_lengths.append((relation.left, length))
    scales = []
    for distance, length in given_lengths:
        if distance.start in places and distance.end in places:
            drawn_length = abs(places[distance.start] - places[distance.end])
            # Two points in one place of the picture would give a scale without bound.
            if drawn_length > 1e-6 * pixels:
                scales.append(length / drawn_length)
    if not scales:
        scales = [scale for relation in relations for scale in _scales_of_measure(relation, places)]
    # A median, since one wrong or badly drawn length must not stretch the whole figure.
    if scales:
        size = float(np.median(scales)) * pixels
    elif given_lengths:
        # A side is often shorter than the whole figure; by how much nobody knows.
        size = 1.5 * float(np.median([length for _, length in given_lengths]))
    else:
        size = _DEFAULT_SIZE
    return Scale(size=size, pixels=pixels, is_given=bool(scales or given_lengths))


def _scales_of_measure(relation: Relation, places: Mapping[str, complex]) -> Iterator[float]:
    """Yield how many units of the problem a pixel has, by a given sum of lengths or a given area.

    Nothing is yielded for any other relation, or where a point has no place in the picture.
    """
    if not isinstance(relation, Equal) or relation.unit not in ("length", "area"):
        return
    given_value = constant_of(relation.right)
    drawn_value = constant_of(_as_drawn(relation.left, places))
    if given_value is None or drawn_value is None or min(given_value, drawn_value) <= 0:
        return
    ratio = given_value / drawn_value
    # An area grows with the square of the scale.
    yield math.sqrt(ratio) if relation.unit == "area" else ratio


def _as_drawn(quantity: Quantity, places: Mapping[str, complex]) -> Quantity:
    """Return a quantity with its lengths and areas replaced by their numbers in the picture.

    For example, `AB + BC` becomes `100.0 + 50.0`. Any other part of it stays as it is.
    """
    if not set(points_in_quantity(quantity)) <= places.keys():
        return quantity
    if isinstance(quantity, Distance):
        return Constant(abs(places[quantity.start] - places[quantity.end]))
    if isinstance(quantity, Area):
        corners = [places[name] for name in quantity.corners]
        next_corners = [*corners[1:], corners[0]]
        # The shoelace formula: the sum of the cross products over all sides is twice the area.
        doubled = sum(map(cross, corners, next_corners))
        return Constant(abs(doubled) / 2)
    if isinstance(quantity, Arithmetic):
        parts = tuple(_as_drawn(part, places) for part in quantity.parts)
        return Arithmetic(function=quantity.function, parts=parts)
    return quantity
