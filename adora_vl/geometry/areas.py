"""Areas and perimeters of shapes, circles, sectors and regions.

Nothing is guessed, but for regions that are only coloured: these go by what lies inside what, and
`TermReader.assumed` says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from adora_vl.geometry.expressions import number_in_text
from adora_vl.geometry.logic_form import Term
from adora_vl.geometry.quantities import Area, Constant, Quantity, minus, over, plus, times
from adora_vl.geometry.shapes import (
    CIRCLE_HEADS,
    COLOUR_HEADS,
    CORNER_COUNT_BY_SHAPE,
    Circle,
    UnreadError,
    unwrap_shape,
)
from adora_vl.geometry.vectors import cross

# A circle looks as if it lay inside a polygon if its centre is at least this share of its radius
# away from each side. So a tenth of the radius may reach over a side.
_MIN_RADIUS_SHARE_INSIDE = 0.9

if TYPE_CHECKING:
    from adora_vl.geometry.term_reader import TermReader


def has_coloured_part(term: Term) -> bool:
    """Tell whether a term speaks of a region that only the colours of the picture show."""
    return any(part.head in COLOUR_HEADS for part in term.walk())


def area_or_perimeter(term_reader: TermReader, term: Term) -> Quantity:
    """Return the quantity of `AreaOf(...)` or `PerimeterOf(...)` a shape, circle, sector or region.

    The first of these that fits is taken:

    1. a circle that is not coloured
    2. a sector
    3. a coloured region
    4. a shape in a drawing with circles, whose sides may be round
    5. a plain polygon

    Raises `UnreadError` where the form does not say which region is meant.
    """
    region = term.arguments[0]
    # The shape inside `Shaded(...)`, `Regular(...)` and the like.
    shape = unwrap_shape(region)
    if shape.head in CIRCLE_HEADS and not has_coloured_part(region):
        return term_reader.named_circle_measure(term)
    if shape.head == "Sector":
        circle, angle = _sector_of_term(term_reader, shape)
        if term.head == "PerimeterOf":
            return _sector_perimeter(term_reader, circle, angle)
        return _sector_area(term_reader, circle, angle)
    if region.head in COLOUR_HEADS:
        return _measure_coloured_region(term_reader, term, shape)
    if shape.head == "Shape" and term_reader.drawing.circles:
        return _measure_rounded_shape(term_reader, term, shape)
    return term_reader.polygon_measure(term.head, term_reader.drawing.corners_of_shape(region))


def _sector_of_term(term_reader: TermReader, term: Term) -> tuple[Circle, Quantity]:
    """Return the circle of a sector, such as `Sector(A, O, B)`, and its angle at the centre.

    The angle is in degrees. One of the sector's three points is the centre. A sector without three
    points is the one whose angle at the centre a fact gives. Raises `UnreadError` where none of the
    three points is a centre.
    """
    names = term.names
    if len(names) == 3:
        centres = [circle for circle in term_reader.drawing.circles if circle.centre in names]
        if not centres:
            raise UnreadError(f"{term} has no centre of a circle")
        circle = centres[0]
        ends = [name for name in names if name != circle.centre]
        return circle, term_reader.angle_between(ends[0], circle.centre, ends[1])
    circle = term_reader.drawing.circle()
    return circle, _marked_central_angle(term_reader, circle)


def _sector_area(term_reader: TermReader, circle: Circle, angle: Quantity) -> Quantity:
    """Return the area of a sector of a circle.

    `angle` is the angle of the sector at the centre, in degrees.
    """
    radius = term_reader.radius(circle)
    return times(over(angle, Constant(360.0)), Constant(math.pi), radius, radius)


def _sector_perimeter(term_reader: TermReader, circle: Circle, angle: Quantity) -> Quantity:
    """Return the perimeter of a sector of a circle: its arc and two radii.

    `angle` is the angle of the sector at the centre, in degrees.
    """
    diameter = times(Constant(2.0), term_reader.radius(circle))
    arc = times(over(angle, Constant(360.0)), Constant(math.pi), diameter)
    return plus(arc, diameter)


def _marked_central_angle(term_reader: TermReader, circle: Circle) -> Quantity:
    """Return the one angle at a centre whose size a fact gives.

    For example, it is the angle AOB of `Equals(MeasureOf(Angle(A, O, B)), 120)`. With 240 in place
    of 120 it is the angle round the other side, 360 degrees less the inner angle. Raises
    `UnreadError` where facts give the size of no angle at this centre, or of several.
    """
    # The size that a fact gives each angle, by its three points; None where it is no number.
    size_by_points: dict[tuple[str, ...], float | None] = {}
    for fact in term_reader.drawing.fact_terms:
        if not fact.is_equation or fact.arguments[0].head != "MeasureOf":
            continue
        measure, size_term = fact.arguments
        names = measure.arguments[0].names
        if len(names) == 3 and names[1] == circle.centre:
            size_by_points[tuple(names)] = number_in_text(size_term.head)
    if len(size_by_points) != 1:
        raise UnreadError("the form does not say which sector is meant")
    ((points, size),) = size_by_points.items()
    first, corner, last = points
    # `angle_between` is the inner angle, at most 180 degrees. The other way round is the rest of
    # the full turn.
    angle = term_reader.angle_between(first, corner, last)
    if size is not None and size > 180:
        return minus(Constant(360.0), angle)
    return angle


def _measure_rounded_shape(term_reader: TermReader, term: Term, shape: Term) -> Quantity:
    """Return the area or perimeter of the shape of a drawing with a circle.

    It is the sector whose angle a fact gives, else the disc where there is no outline, else the
    outline as a polygon with a half disc on a side for each circle. Raises `UnreadError` for any
    other drawing.
    """
    drawing = term_reader.drawing
    # `Shape(A)` does not list its corners. If a fact gives one angle at the centre, it is a sector.
    if shape.names == ["A"]:
        with suppress(UnreadError):
            circle = drawing.circle()
            return _sector_area(term_reader, circle, _marked_central_angle(term_reader, circle))
    outline = drawing.outline()
    if not outline:
        return term_reader.circle_measure(term.head, drawing.circle())
    if term.head == "AreaOf":
        areas = [_half_disc_area(term_reader, circle, outline) for circle in drawing.circles]
        half_discs = [area for area in areas if area is not None]
        # Each circle of the drawing has to be one of the half discs.
        if len(half_discs) == len(areas):
            term_reader.assumed.append("the figure is the polygon with half circles on its sides")
            return plus(Area(corners=tuple(outline)), *half_discs)
    raise UnreadError(f"the form does not say which region {term} is")


def _half_disc_area(
    term_reader: TermReader, circle: Circle, outline: Sequence[str]
) -> Quantity | None:
    """Return the area of half of a disc that stands on a side of an outline.

    That side is a diameter of the circle: its ends are on the circle, and the centre lies between
    them. Returns None where no side is a diameter.
    """
    for i in range(len(outline)):
        side = {outline[i - 1], outline[i]}
        if side <= set(circle.points) and term_reader.drawing.are_on_one_line(
            (*side, circle.centre)
        ):
            radius = term_reader.radius(circle)
            return times(Constant(math.pi / 2), radius, radius)
    return None


def _measure_coloured_region(term_reader: TermReader, term: Term, shape: Term) -> Quantity:
    """Return the area of a coloured region.

    With a fact `Similar` it is the area or perimeter of the similar shape that no fact gives.
    Otherwise it is the area between the outermost shape and what lies inside it.

    `term` is the whole measure such as `AreaOf(Shaded(Shape($)))`, and `shape` the shape in it.
    `term_reader.assumed` says which region was taken. Raises `UnreadError` where the form does not
    say which region is meant.
    """
    drawing = term_reader.drawing
    if shape.head == "Shape" and any(fact.head == "Similar" for fact in drawing.terms):
        return _measure_unmeasured_twin(term_reader, term)
    if term.head != "AreaOf":
        raise UnreadError(f"the form does not say which region {term} is")
    if not drawing.circles:
        raise UnreadError(f"the form does not say which region {term} is")
    return _area_between_outline_and_inside(term_reader, term)


def _measure_unmeasured_twin(term_reader: TermReader, term: Term) -> Quantity:
    """Return the area or perimeter of one of two similar shapes: the one that no fact gives.

    Raises `UnreadError` where facts give it for both shapes, or for neither.
    """
    first, second = term_reader.drawing.similar_pair()
    measured = [
        set(part.arguments[0].names)
        for fact in term_reader.drawing.terms
        if fact.head == "Equals"
        for part in fact.walk()
        if part.head == term.head and part.arguments
    ]
    unknown = [names for names in (first, second) if set(names) not in measured]
    if len(unknown) != 1:
        raise UnreadError(f"the form does not say which shape {term} is")
    return term_reader.polygon_measure(term.head, unknown[0])


def _area_between_outline_and_inside(term_reader: TermReader, term: Term) -> Quantity:
    """Return the area between the outermost shape of a drawing and what lies inside it.

    The first of these that fits is taken:

    1. two circles with one centre: the ring between them
    2. one circle with all corners of the polygon on it: the circle without the polygon
    3. a polygon with all circles inside of it: the polygon without the circles

    Raises `UnreadError` for any other picture.
    """
    drawing = term_reader.drawing
    outline = _polygon_for_region(term_reader)
    circles = drawing.circles
    if len(circles) == 2 and circles[0].centre == circles[1].centre:
        larger, smaller = sorted(circles, key=lambda circle: -(drawing.drawn_radius(circle) or 0.0))
        term_reader.assumed.append("the region is the ring between the circles")
        outer_area = term_reader.circle_measure("AreaOf", larger)
        return minus(outer_area, term_reader.circle_measure("AreaOf", smaller))
    if not outline:
        raise UnreadError(f"the form does not say which region {term} is")
    polygon = Area(corners=tuple(outline))
    name = "".join(outline)
    if len(circles) == 1 and set(outline) <= set(circles[0].points):
        _note_assumed_region(term_reader, f"the region is the circle without {name}")
        return minus(term_reader.circle_measure("AreaOf", circles[0]), polygon)
    if all(_is_within(term_reader, circle, outline) for circle in circles):
        _note_assumed_region(term_reader, f"the region is {name} without what is round inside it")
        inner_areas = [term_reader.circle_measure("AreaOf", circle) for circle in circles]
        return minus(polygon, plus(*inner_areas))
    raise UnreadError(f"the form does not say which region {term} is")


def _note_assumed_region(term_reader: TermReader, assumption: str) -> None:
    """Note in words what is assumed of a region, unless the question names a polygon.

    A question that names the polygon, and still asks for a coloured region, cannot mean the polygon
    itself. So nothing is assumed then.
    """
    heads = {part.head for term in term_reader.drawing.question_terms for part in term.walk()}
    names_shape = bool(heads & {*CORNER_COUNT_BY_SHAPE, "Polygon", "Regular"})
    if not names_shape:
        term_reader.assumed.append(assumption)


def _polygon_for_region(term_reader: TermReader) -> list[str]:
    """Return the polygon that bounds a region: the one that a fact names, else the outline."""
    for term in term_reader.drawing.terms:
        for part in term.walk():
            if len(part.names) == CORNER_COUNT_BY_SHAPE.get(part.head):
                return term_reader.drawing.in_drawing_order(part.names)
    return term_reader.drawing.outline()


def _is_within(term_reader: TermReader, circle: Circle, outline: Sequence[str]) -> bool:
    """Tell whether a circle lies inside a polygon in the picture, up to a tenth of its radius."""
    places = term_reader.drawing.places
    radius = term_reader.drawing.drawn_radius(circle)
    if radius is None or not set(outline) <= places.keys():
        return False
    # The cross product is the distance of the centre from a side, times the length of the side. It
    # is positive on the inner side if the outline runs anticlockwise; `orientation` turns the sign
    # of a clockwise one.
    orientation = 1 if term_reader.drawing.signed_area(outline) > 0 else -1
    min_distance = _MIN_RADIUS_SHARE_INSIDE * radius
    for i in range(len(outline)):
        start = places[outline[i - 1]]
        side = places[outline[i]] - start
        product = orientation * cross(side, places[circle.centre] - start)
        if product < min_distance * abs(side):
            return False
    return True
