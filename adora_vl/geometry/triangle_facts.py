"""What medians, altitudes, midsegments and centres of triangles say in primitives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from adora_vl.geometry.forms import Term
from adora_vl.geometry.measures import Measures
from adora_vl.geometry.quantities import (
    Mean,
    Parallel,
    Perpendicular,
    Relation,
)
from adora_vl.geometry.relations import (
    collinear,
    four,
    opposite_right_angle,
    point_of,
    same_angle,
)
from adora_vl.geometry.shapes import UnreadError


def median(measures: Measures, term: Term) -> Iterator[Relation]:
    """Yield a median or an altitude of a triangle, or the median of a trapezoid.

    The latter joins the middles of the legs.
    """
    drawing = measures.drawing
    line = drawing.segment(term.arguments[0])
    names = drawing.shape(term.arguments[1]) if len(term.arguments[1].names) > 2 else []
    if term.arguments[1].head == "Trapezoid" and not names:
        names = drawing.shape(term.arguments[1])
    if len(names) == 4:
        yield from _midsegment_of(measures, line, names)
        return
    yield from foot(measures, line=line, names=names, is_median=term.head == "IsMedianOf")


def midsegment(measures: Measures, term: Term) -> Iterator[Relation]:
    """Say that a line joins the middles of two sides, or of a trapezoid's legs."""
    line = measures.drawing.segment(term.arguments[0])
    names = measures.drawing.shape(term.arguments[1])
    if len(names) == 4:
        yield from _midsegment_of(measures, line, names)
        return
    for point in line:
        yield Mean(point=point, points=measures.drawing.side_with(point, names))


def _midsegment_of(
    measures: Measures, line: tuple[str, str], names: Sequence[str]
) -> Iterator[Relation]:
    """Say that the median of a trapezoid joins the middles of its legs."""
    a, b, c, d = four(measures.drawing.with_base_first(names))
    yield Parallel(a=a, b=b, c=d, d=c)
    if set(line) <= measures.drawing.places.keys():
        for point in line:
            yield Mean(point=point, points=measures.drawing.side_with(point, names))
        return
    yield Mean(point=line[0], points=(b, c))
    yield Mean(point=line[1], points=(d, a))


def foot(
    measures: Measures, line: tuple[str, str], names: Sequence[str], *, is_median: bool
) -> Iterator[Relation]:
    """Yield a line from a corner of a triangle to the opposite side.

    It goes to the middle of that side, or is perpendicular to it.
    """
    tops = [name for name in line if name in names]
    feet = [name for name in line if name not in names]
    ends = [name for name in names if name not in line]
    if len(names) == 3 and len(tops) == 1 and len(feet) == 1 and len(ends) == 2:
        yield collinear(feet[0], ends[0], ends[1])
        if is_median:
            yield Mean(point=feet[0], points=(ends[0], ends[1]))
        else:
            yield Perpendicular(a=line[0], b=line[1], c=ends[0], d=ends[1])
        return
    for top, foot in (line, line[::-1]):
        for row in measures.drawing.lines:
            if foot in row[1:-1] and top not in row:
                position = row.index(foot)
                beside = (row[position - 1], row[position + 1])
                if is_median:
                    yield Mean(point=foot, points=beside)
                else:
                    yield Perpendicular(a=top, b=foot, c=beside[0], d=beside[1])
                return
    raise UnreadError(f"the form does not say where {''.join(line)} stands")


def centroid(measures: Measures, term: Term) -> Iterator[Relation]:
    """Say that a point is the mean of the corners; drawn lines from a corner through it end at midpoints."""
    drawing = measures.drawing
    point = point_of(measures, term.arguments[0])
    names = drawing.shape(term.arguments[1])
    yield Mean(point=point, points=tuple(names))
    for corner in names:
        ends = [name for name in names if name != corner]
        for row in drawing.lines:
            if corner not in row or point not in row:
                continue
            for foot in row:
                if foot not in names and drawing.are_on_one_row((foot, *ends)):
                    yield Mean(point=foot, points=tuple(ends))


def incenter(measures: Measures, term: Term) -> Iterator[Relation]:
    """Say that a point lies on the bisectors of a triangle, or of one angle."""
    point = point_of(measures, term.arguments[0])
    names = term.arguments[1].names
    if term.arguments[1].head == "Angle" and len(names) == 3:
        yield same_angle(measures, (names[0], names[1], point), (point, names[1], names[2]))
        return
    names = measures.drawing.shape(term.arguments[1])
    for i in range(3):
        yield same_angle(
            measures, (names[i - 2], names[i - 1], point), (point, names[i - 1], names[i])
        )


def orthocenter(measures: Measures, term: Term) -> Iterator[Relation]:
    """Say that a point lies on the altitudes of a triangle."""
    point = point_of(measures, term.arguments[0])
    a, b, c = measures.drawing.shape(term.arguments[1])[:3]
    yield Perpendicular(a=point, b=a, c=b, d=c)
    yield Perpendicular(a=point, b=b, c=a, d=c)


def hypotenuse(measures: Measures, term: Term) -> Iterator[Relation]:
    """Say that a side is the hypotenuse of a triangle."""
    yield from opposite_right_angle(
        term.arguments[0].names, measures.drawing.shape(term.arguments[1])
    )
