"""What the kind of a polygon says in primitives, and that two polygons are similar."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

from adora_vl.geometry.forms import Term
from adora_vl.geometry.measures import Measures
from adora_vl.geometry.quantities import (
    Combined,
    Equal,
    Mean,
    Parallel,
    Perpendicular,
    Relation,
    over,
)
from adora_vl.geometry.relations import (
    four,
    right_angle_at,
    same_angle,
    same_length,
)
from adora_vl.geometry.shapes import UnreadError, unwrapped

# Shares of a polygon's size that a drawn point may be off and still be its centre, or a middle of
# a side. Annotated places are off by a few pixels.
_AT_CENTRE = 0.07
_AT_MIDDLE = 0.05


def parallelogram(measures: Measures, term: Term) -> Iterator[Relation]:
    """Say that opposite sides are parallel; rectangle, rhombus and square say more."""
    a, b, c, d = four(measures.drawing.shape(term))
    yield Parallel(a=a, b=b, c=d, d=c)
    yield Parallel(a=a, b=d, c=b, d=c)
    if term.head in ("Rectangle", "Square"):
        yield Perpendicular(a=a, b=b, c=b, d=c)
    if term.head in ("Rhombus", "Square"):
        # All four, though one would do: angles alone go by pairs of equal sides.
        for first, second in pairwise((a, b, c, d, a, b)[i : i + 2] for i in range(5)):
            yield same_length(measures, first, second)


def kite(measures: Measures, term: Term) -> Iterator[Relation]:
    """Say that two pairs of neighbouring sides are equal, as a fact or the picture says."""
    a, b, c, d = four(measures.drawing.shape(term))
    places = measures.drawing.places
    if measures.drawing.are_called_equal((a, b), (b, c)) or measures.drawing.are_called_equal(
        (c, d), (d, a)
    ):
        a, b, c, d = b, c, d, a
    elif {a, b, c, d} <= places.keys():
        sides = [abs(places[b] - places[a]), abs(places[c] - places[b])]
        sides += [abs(places[d] - places[c]), abs(places[a] - places[d])]
        if abs(sides[0] - sides[3]) + abs(sides[1] - sides[2]) >= abs(sides[0] - sides[1]) + abs(
            sides[2] - sides[3]
        ):
            a, b, c, d = b, c, d, a
    yield same_length(measures, (a, b), (a, d))
    yield same_length(measures, (c, b), (c, d))


def trapezoid(measures: Measures, term: Term) -> Iterator[Relation]:
    """Say that two opposite sides are parallel, those that the facts or the picture show."""
    a, b, c, d = four(measures.drawing.with_base_first(four(measures.drawing.shape(term))))
    yield Parallel(a=a, b=b, c=d, d=c)


def isosceles(measures: Measures, term: Term) -> Iterator[Relation]:
    """Say that two sides are equal; of a trapezoid the legs are, and the diagonals."""
    names = measures.drawing.shape(inner_shape(term))
    if len(names) == 4:
        a, b, c, d = four(measures.drawing.with_base_first(names))
        yield Parallel(a=a, b=b, c=d, d=c)
        yield same_length(measures, (a, c), (b, d))
        yield same_length(measures, (b, c), (d, a))
    elif len(names) == 3 and not measures.drawing.equal_parts_said(names):
        apex = measures.drawing.apex(names)
        first, last = [name for name in names if name != apex]
        yield same_length(measures, (apex, first), (apex, last))


def inner_shape(term: Term) -> Term:
    """Return the shape inside `Isosceles(Triangle(A, B, C))`, or the term itself."""
    return term.arguments[0] if term.arguments and term.arguments[0].arguments else term


def right(measures: Measures, term: Term) -> Iterator[Relation]:
    """Say that a triangle has a right angle at the corner that is marked, or looks like it."""
    names = measures.drawing.shape(inner_shape(term))
    corner = measures.drawing.right_corner(names)
    first, last = [name for name in names if name != corner][:2]
    yield right_angle_at(corner, first, last)


def regular(measures: Measures, term: Term) -> Iterator[Relation]:
    """Say that all sides are equal, and where these do not say so, all angles."""
    names = measures.drawing.shape(inner_shape(term))
    yield from all_equal(
        measures, names, angles=len(names) > 4 or (len(names) == 4 and term.head == "Regular")
    )


def all_equal(
    measures: Measures, names: Sequence[str], *, angles: bool | None = None
) -> Iterator[Relation]:
    """Say that all sides are equal, and with `angles` all angles.

    A drawn centre and drawn middles of sides are taken to be such.
    """
    count = len(names)
    for i in range(1, count):
        yield same_length(measures, (names[i - 1], names[i]), (names[i - 2], names[i - 1]))
    if angles if angles is not None else count > 3:
        for i in range(1, count):
            before = (names[i - 3], names[i - 2], names[i - 1])
            yield same_angle(measures, (names[i - 2], names[i - 1], names[i]), before)
    places = measures.drawing.places
    if not set(names) <= places.keys():
        return
    corners = [places[name] for name in names]
    middle = sum(corners) / count
    size = max(abs(first - second) for first, second in combinations(corners, 2))
    for name, location in sorted(places.items()):
        if name in names or name not in measures.drawing.points:
            continue
        if abs(location - middle) < _AT_CENTRE * size:
            for i in range(1, count):
                yield same_length(measures, (name, names[i - 1]), (name, names[i]))
            continue
        for i in range(count):
            if abs(location - (corners[i] + corners[i - 1]) / 2) < _AT_MIDDLE * size:
                yield Mean(point=name, points=(names[i], names[i - 1]))


def similar(measures: Measures, term: Term) -> Iterator[Relation]:
    """Say that shapes are similar, or that shapes, angles, arcs or lines are congruent."""
    if len(term.arguments) != 2:
        raise UnreadError(f"{term} has not two shapes")
    first, second = term.arguments
    is_congruent = term.head == "Congruent"
    drawing = measures.drawing
    if first.head == "Circle":
        circles = [drawing.circle(first), drawing.circle(second)]
        yield Equal(
            left=measures.radius(circles[0]), right=measures.radius(circles[1]), unit="length"
        )
        return
    if first.head in ("Angle", "Arc") and second.head in ("Angle", "Arc"):
        yield Equal(left=measures.value(first), right=measures.value(second), unit="degrees")
        return
    if first.head == "Line" and second.head == "Line":
        yield same_length(measures, drawing.segment(first), drawing.segment(second))
        return
    names = unwrapped(first).names
    partners = unwrapped(second).names
    if len(names) < 3 or len(names) != len(partners):
        names, partners = drawing.similar_pair()
    for i in range(len(names)):
        if is_congruent:
            yield same_length(measures, (names[i - 1], names[i]), (partners[i - 1], partners[i]))
        else:
            side_ratio = over(
                measures.distance(names[i - 1], names[i]),
                measures.distance(partners[i - 1], partners[i]),
            )
            previous_ratio = over(
                measures.distance(names[i - 2], names[i - 1]),
                measures.distance(partners[i - 2], partners[i - 1]),
            )
            logarithms = [
                Combined(function="log", parts=(ratio,)) for ratio in (side_ratio, previous_ratio)
            ]
            yield Equal(left=logarithms[0], right=logarithms[1], unit="plain")
        corner = (names[i - 2], names[i - 1], names[i])
        yield same_angle(measures, corner, (partners[i - 2], partners[i - 1], partners[i]))


def diagonal(measures: Measures, term: Term) -> Iterator[Relation | Term]:
    """Say that a diagonal says no more than what the shape says that has it."""
    yield term.arguments[1]
