"""Places as complex numbers, with y upwards: products, angles and crossings."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def cross(u: complex, w: complex) -> float:
    """Return the cross product of two vectors: positive with `w` against the clock from `u`.

    For u = a + bi and w = c + di it is ad - bc, such as 1 for u = 1 and w = i. It is also twice the
    area of the triangle with these two sides.
    """
    return (u.conjugate() * w).imag


def dot(u: complex, w: complex) -> float:
    """Return the scalar product of two vectors: ac + bd for u = a + bi and w = c + di."""
    return (u.conjugate() * w).real


def sine(u: complex, w: complex) -> float:
    """Return the sine of the angle between two directions; 0 where one has no length."""
    return cross(u, w) / (abs(u) * abs(w)) if u and w else 0.0


def cosine(u: complex, w: complex) -> float:
    """Return the cosine of the angle between two directions; 0 where one of them has no length."""
    return dot(u, w) / (abs(u) * abs(w)) if u and w else 0.0


def cross_each_other(ends: Sequence[complex], tolerance: float = 0.0) -> bool:
    """Tell whether the segment between the first two ends crosses the one between the others.

    Two points lie on different sides of a line if their cross products with it have opposite signs,
    and so a negative product. Each segment has to have the ends of the other on different sides.
    For the ends 0, 2, 1 - i and 1 + i both products are -4, so these segments cross.

    `tolerance`: a product that is not below minus this number counts as no crossing.
    """
    a, b, c, d = ends
    first = cross(b - a, c - a) * cross(b - a, d - a)
    second = cross(d - c, a - c) * cross(d - c, b - c)
    return first < -tolerance and second < -tolerance


def extent_of(places: Collection[complex]) -> tuple[float, float]:
    """Return the width and the height of one or more places together."""
    width = max(location.real for location in places) - min(location.real for location in places)
    height = max(location.imag for location in places) - min(location.imag for location in places)
    return width, height
