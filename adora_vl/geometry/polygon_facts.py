"""What the kind of a polygon says in primitives, and that two polygons are similar."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

from adora_vl.geometry.logic_form import Term
from adora_vl.geometry.quantities import (
    Arithmetic,
    Equal,
    Mean,
    Parallel,
    Perpendicular,
    Relation,
    over,
)
from adora_vl.geometry.relations import (
    require_four,
    right_angle_at,
    same_angle,
    same_length,
)
from adora_vl.geometry.shapes import UnreadError, unwrap_shape
from adora_vl.geometry.term_reader import TermReader

# A drawn point counts as the centre of a polygon, or as the middle of a side, if it is less than
# this share of the polygon's size away. Annotated places are off by a few pixels.
_MAX_OFFSET_FROM_CENTRE = 0.07
_MAX_OFFSET_FROM_MIDDLE = 0.05


def parallelogram(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say what a parallelogram, rectangle, rhombus or square is: opposite sides are parallel.

    A rectangle and a square also have a right angle, a rhombus and a square four equal sides.
    """
    a, b, c, d = require_four(term_reader.drawing.corners_of_shape(term))
    yield Parallel(a=a, b=b, c=d, d=c)
    yield Parallel(a=a, b=d, c=b, d=c)
    if term.head in ("Rectangle", "Square"):
        yield Perpendicular(a=a, b=b, c=b, d=c)
    if term.head in ("Rhombus", "Square"):
        # One pair of equal sides would be enough. All four are said, since the solver that works
        # with angles alone looks for pairs of equal sides.
        sides = [(a, b), (b, c), (c, d), (d, a), (a, b)]
        for side, next_side in pairwise(sides):
            yield same_length(term_reader, side, next_side)


def kite(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say that a kite has two pairs of equal neighbouring sides, as a fact or the picture says.

    The sides of a pair meet at two opposite corners. Which corners these are is not in the name of
    the shape.
    """
    a, b, c, d = require_four(term_reader.drawing.corners_of_shape(term))
    if _equal_sides_meet_at_second(term_reader, (a, b, c, d)):
        # The corners are counted from the second one, so that the equal sides meet at the first.
        a, b, c, d = b, c, d, a
    yield same_length(term_reader, (a, b), (a, d))
    yield same_length(term_reader, (c, b), (c, d))


def _equal_sides_meet_at_second(
    term_reader: TermReader, corners: tuple[str, str, str, str]
) -> bool:
    """Tell whether a kite's equal sides meet at its second and fourth corner.

    With the corners A, B, C, D that is AB = BC and CD = DA. They do if a fact says one of these
    equations. Without such a fact they do if these sides differ less in the picture than AB from DA
    and BC from CD.
    """
    a, b, c, d = corners
    drawing = term_reader.drawing
    if drawing.are_stated_equal((a, b), (b, c)) or drawing.are_stated_equal((c, d), (d, a)):
        return True
    places = drawing.places
    if not set(corners) <= places.keys():
        return False
    ab = abs(places[b] - places[a])
    bc = abs(places[c] - places[b])
    cd = abs(places[d] - places[c])
    da = abs(places[a] - places[d])
    unequal_at_first_and_third = abs(ab - da) + abs(bc - cd)
    unequal_at_second_and_fourth = abs(ab - bc) + abs(cd - da)
    return unequal_at_first_and_third >= unequal_at_second_and_fourth


def trapezoid(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say that two opposite sides are parallel: those that the facts or the picture show."""
    a, b, c, d = require_four(
        term_reader.drawing.with_base_first(
            require_four(term_reader.drawing.corners_of_shape(term))
        )
    )
    yield Parallel(a=a, b=b, c=d, d=c)


def isosceles(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say that two sides of a triangle are equal, as the fact `Isosceles(Triangle(A, B, C))` does.

    In an isosceles trapezoid the legs are equal, and so are the diagonals. Nothing is said of a
    triangle for which other facts say already which sides or angles are equal.
    """
    names = term_reader.drawing.corners_of_shape(inner_shape(term))
    if len(names) == 4:
        a, b, c, d = require_four(term_reader.drawing.with_base_first(names))
        yield Parallel(a=a, b=b, c=d, d=c)
        yield same_length(term_reader, (a, c), (b, d))
        yield same_length(term_reader, (b, c), (d, a))
    elif len(names) == 3 and not term_reader.drawing.has_stated_equal_parts(names):
        apex = term_reader.drawing.apex(names)
        first, last = [name for name in names if name != apex]
        yield same_length(term_reader, (apex, first), (apex, last))


def inner_shape(term: Term) -> Term:
    """Return the shape inside `Isosceles(Triangle(A, B, C))`, or the term itself."""
    return term.arguments[0] if term.arguments and term.arguments[0].arguments else term


def right(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say that a triangle has a right angle, as the fact `Right(Triangle(A, B, C))` does.

    It is at the corner that a fact marks as right, else at the corner that looks most like it.
    """
    names = term_reader.drawing.corners_of_shape(inner_shape(term))
    corner = term_reader.drawing.right_corner(names)
    first, last = [name for name in names if name != corner][:2]
    yield right_angle_at(corner, first, last)


def regular(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say that a polygon is regular: `Regular(Polygon(...))` or `Equilateral(Triangle(A, B, C))`.

    All sides are equal. All angles are also said to be equal where equal sides do not make a
    polygon regular: with more than four corners, and for a quadrilateral that is called `Regular`.
    """
    corners = term_reader.drawing.corners_of_shape(inner_shape(term))
    # Equal sides make a triangle regular, and four of them only make a rhombus. A fact `Square`
    # says its right angles elsewhere.
    is_regular_quadrilateral = len(corners) == 4 and term.head == "Regular"
    yield from equal_sides_and_angles(
        term_reader, corners, angles=len(corners) > 4 or is_regular_quadrilateral
    )


def equal_sides_and_angles(
    term_reader: TermReader, corners: Sequence[str], *, angles: bool | None = None
) -> Iterator[Relation]:
    """Say that all sides are equal, and with `angles` all angles.

    A drawn point that looks like the centre, or like the middle of a side, is said to be that.

    Of n sides n - 1 equations are enough, of the angles as well.

    Args:
        term_reader: makes the quantities.
        corners: names of the polygon's corners, in the order round it.
        angles: whether all angles are said to be equal; None: only with more than three corners.
    """
    count = len(corners)
    for i in range(1, count):
        side = (corners[i - 1], corners[i])
        side_before = (corners[i - 2], corners[i - 1])
        yield same_length(term_reader, side, side_before)
    if angles is None:
        angles = count > 3
    if angles:
        for i in range(1, count):
            angle = (corners[i - 2], corners[i - 1], corners[i])
            angle_before = (corners[i - 3], corners[i - 2], corners[i - 1])
            yield same_angle(term_reader, angle, angle_before)
    if set(corners) <= term_reader.drawing.places.keys():
        yield from _drawn_centre_and_middles(term_reader, corners)


def _drawn_centre_and_middles(
    term_reader: TermReader, corners: Sequence[str]
) -> Iterator[Relation]:
    """Say that points which look like a polygon's centre, or like the middle of a side, are that.

    All corners have places in the picture.
    """
    drawing = term_reader.drawing
    corner_places = [drawing.places[name] for name in corners]
    centre = sum(corner_places) / len(corners)
    size = max(abs(first - second) for first, second in combinations(corner_places, 2))
    for name, location in sorted(drawing.places.items()):
        if name in corners or name not in drawing.points:
            continue
        is_at_centre = abs(location - centre) < _MAX_OFFSET_FROM_CENTRE * size
        if is_at_centre:
            for i in range(1, len(corners)):
                radius = (name, corners[i - 1])
                next_radius = (name, corners[i])
                yield same_length(term_reader, radius, next_radius)
            continue
        for i in range(len(corners)):
            middle_of_side = (corner_places[i] + corner_places[i - 1]) / 2
            if abs(location - middle_of_side) < _MAX_OFFSET_FROM_MIDDLE * size:
                yield Mean(point=name, points=(corners[i], corners[i - 1]))


def similar(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say that shapes are similar or congruent: `Similar(Triangle(A, B, C), Triangle(D, E, F))`.

    Congruent circles have one radius, congruent angles and arcs one size, congruent lines one
    length. Polygons without names are the two in the picture that are most alike.

    Raises `UnreadError` where the term has not two shapes, or the picture does not show them.
    """
    if len(term.arguments) != 2:
        raise UnreadError(f"{term} has not two shapes")
    first, second = term.arguments
    drawing = term_reader.drawing
    if first.head == "Circle":
        first_radius = term_reader.radius(drawing.circle(first))
        second_radius = term_reader.radius(drawing.circle(second))
        yield Equal(left=first_radius, right=second_radius, unit="length")
        return
    if first.head in ("Angle", "Arc") and second.head in ("Angle", "Arc"):
        yield Equal(
            left=term_reader.quantity(first), right=term_reader.quantity(second), unit="degrees"
        )
        return
    if first.head == "Line" and second.head == "Line":
        yield same_length(term_reader, drawing.ends_of_line(first), drawing.ends_of_line(second))
        return
    corners = unwrap_shape(first).names
    partners = unwrap_shape(second).names
    if len(corners) < 3 or len(corners) != len(partners):
        corners, partners = drawing.similar_pair()
    if term.head == "Congruent":
        yield from _congruent_polygons(term_reader, corners, partners)
    else:
        yield from _similar_polygons(term_reader, corners, partners)


def _congruent_polygons(
    term_reader: TermReader, corners: Sequence[str], partners: Sequence[str]
) -> Iterator[Relation]:
    """Say that sides and angles of two polygons are equal, corner by corner.

    `corners` and `partners` name the corners of both polygons in the same order.
    """
    for i in range(len(corners)):
        side = (corners[i - 1], corners[i])
        partner_side = (partners[i - 1], partners[i])
        yield same_length(term_reader, side, partner_side)
        yield _equal_angles_at_corner(term_reader, corners, partners, i)


def _similar_polygons(
    term_reader: TermReader, corners: Sequence[str], partners: Sequence[str]
) -> Iterator[Relation]:
    """Say that two polygons have the same ratio for all their sides, and equal angles.

    `corners` and `partners` name the corners of both polygons in the same order. Each relation
    compares the ratio of one pair of sides with the ratio of the pair before: AB / DE = BC / EF.
    """
    for i in range(len(corners)):
        ratios = [
            over(
                term_reader.distance(corners[end - 1], corners[end]),
                term_reader.distance(partners[end - 1], partners[end]),
            )
            for end in (i, i - 1)
        ]
        # Logarithms, so that a ratio and its inverse weigh alike.
        first_log, second_log = [Arithmetic(function="log", parts=(ratio,)) for ratio in ratios]
        yield Equal(left=first_log, right=second_log, unit="plain")
        yield _equal_angles_at_corner(term_reader, corners, partners, i)


def _equal_angles_at_corner(
    term_reader: TermReader, corners: Sequence[str], partners: Sequence[str], end: int
) -> Relation:
    """Say that the angle before corner number `end` is the same in both polygons."""
    angle = (corners[end - 2], corners[end - 1], corners[end])
    partner_angle = (partners[end - 2], partners[end - 1], partners[end])
    return same_angle(term_reader, angle, partner_angle)


def diagonal(term_reader: TermReader, term: Term) -> Iterator[Relation | Term]:
    """Yield the shape of a fact such as `IsDiagonalOf(Line(A, C), Square(A, B, C, D))` as a term.

    The kind of the shape says something, here equal sides and right angles. That a segment is its
    diagonal says nothing more.
    """
    yield term.arguments[1]
