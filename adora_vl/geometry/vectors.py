"""Places as complex numbers, with y upwards: products, angles and crossings."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def cross(u: complex, w: complex) -> float:
    """Return the cross product of two vectors: positive with `w` against the clock from `u`."""
    return (u.conjugate() * w).imag


def dot(u: complex, w: complex) -> float:
    """Return the scalar product of two vectors."""
    return (u.conjugate() * w).real


def sine(u: complex, w: complex) -> float:
    """Return the sine of the angle between two directions; 0 where one has no length."""
    return cross(u, w) / (abs(u) * abs(w)) if u and w else 0.0


def cosine(u: complex, w: complex) -> float:
    """Return the cosine of the angle between two directions; 0 where one of them has no length."""
    return dot(u, w) / (abs(u) * abs(w)) if u and w else 0.0


def cross_each_other(ends: Sequence[complex], tolerance: float = 0.0) -> bool:
    """Tell whether the segment of the first two ends crosses that of the others.

    `tolerance`: the product of two areas that counts as no crossing.
    """
    a, b, c, d = ends
    first = cross(b - a, c - a) * cross(b - a, d - a)
    second = cross(d - c, a - c) * cross(d - c, b - c)
    return first < -tolerance and second < -tolerance


def extent_of(places: Collection[complex]) -> tuple[float, float]:
    """Return how wide and how high a number of places lie; there has to be one at least."""
    wide = max(location.real for location in places) - min(location.real for location in places)
    high = max(location.imag for location in places) - min(location.imag for location in places)
    return wide, high
