"""What facts of circles say in primitives: tangents, chords, shapes inside and around."""

from __future__ import annotations

from collections.abc import Iterator

from adora_vl.geometry.logic_form import Term
from adora_vl.geometry.looks import MAX_DEGREES_OF_STATED_TANGENT, tangents_seen
from adora_vl.geometry.polygon_facts import equal_sides_and_angles
from adora_vl.geometry.quantities import (
    Mean,
    Relation,
)
from adora_vl.geometry.relations import (
    lies_on_circle,
    touches_line,
)
from adora_vl.geometry.shapes import sides_of_polygon
from adora_vl.geometry.term_reader import TermReader


def on_circle(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say that a point lies on a circle, as the fact `PointLiesOnCircle(A, Circle(O))` does.

    Several circles may have the same centre. Then the circle is meant that lists the point.
    """
    name = term.names[0]
    target = term.arguments[1]
    centre = target.names[0] if target.names else target.head
    circles = [
        circle
        for circle in term_reader.drawing.circles
        if circle.centre == centre and name in circle.points
    ]
    circle = circles[0] if circles else term_reader.drawing.circle(target)
    yield lies_on_circle(term_reader, name, circle)


def tangent(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say that a line touches a circle, as the fact `Tangent(Line(A, B), Circle(O))` does.

    `Line($)` names no line. It means all lines that look like tangents in the picture.
    """
    line = term.arguments[0]
    if line.head == "Line" and line.names[:1] == ["$"]:
        for relation, _ in tangents_seen(term_reader, MAX_DEGREES_OF_STATED_TANGENT):
            yield relation
        return
    yield touches_line(
        term_reader,
        term_reader.drawing.circle(term.arguments[1]),
        term_reader.drawing.ends_of_line(line),
    )


def diameter(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say that a segment is a diameter of a circle, as `IsDiameterOf(Line(A, B), Circle(O))` does.

    Its middle is the centre, and one end lies on the circle, so that the other end does too.
    """
    circle = term_reader.drawing.circle(term.arguments[1])
    line = term_reader.drawing.ends_of_line(term.arguments[0])
    yield Mean(point=circle.centre, points=line)
    yield lies_on_circle(term_reader, line[0], circle)


def chord(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say that the ends of a chord lie on the circle, as `IsChordOf(Line(A, B), Circle(O))` does.

    Of a radius, which is read here too, one end is the centre, and only the other lies on the
    circle.
    """
    circle = term_reader.drawing.circle(term.arguments[1])
    for name in term_reader.drawing.ends_of_line(term.arguments[0]):
        if name != circle.centre:
            yield lies_on_circle(term_reader, name, circle)


def secant(term_reader: TermReader, term: Term) -> Iterator[Relation]:
    """Say which ends of a secant lie on the circle, as `Secant(Line(P, B), Circle(O))` does.

    An end lies on the circle if the circle lists it as one of its points.
    """
    circle = term_reader.drawing.circle(term.arguments[1])
    for name in term_reader.drawing.ends_of_line(term.arguments[0]):
        if name in circle.points:
            yield lies_on_circle(term_reader, name, circle)


def inscribed(term_reader: TermReader, term: Term) -> Iterator[Relation | Term]:
    """Say that one figure is inscribed in another: `InscribedIn(Triangle(A, B, C), Circle(O))`.

    A circle in a shape touches all its sides. A shape in a circle has all its corners on it. The
    shape itself is yielded as a term, since its kind says more: a square has right angles.
    """
    shape, target = term.arguments
    if shape.head in ("Circle", "Cirle"):  # Geometry3K misspells it in places
        circle = term_reader.drawing.circle(shape)
        names = term_reader.drawing.corners_of_shape(target)
        for side in sides_of_polygon(names):
            yield touches_line(term_reader, circle, side)
        yield target
        return
    circle = term_reader.drawing.circle(target)
    names = term_reader.inscribed_corners(shape, circle)
    if shape.head == "Regular" or shape.head == "Equilateral":
        yield from equal_sides_and_angles(term_reader, names)
    else:
        yield shape
    for name in names:
        yield lies_on_circle(term_reader, name, circle)


def circumscribed(term_reader: TermReader, term: Term) -> Iterator[Relation | Term]:
    """Say that the sides of a shape touch a circle: `CircumscribedTo(Square(...), Circle(O))`.

    The shape itself is yielded as a term, since its kind says more.
    """
    names = term_reader.drawing.corners_of_shape(term.arguments[0])
    circle = term_reader.drawing.circle(term.arguments[1])
    for side in sides_of_polygon(names):
        yield touches_line(term_reader, circle, side)
    yield term.arguments[0]
