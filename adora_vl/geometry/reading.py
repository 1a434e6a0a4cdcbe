"""A form as relations: which of its facts are read, and which quantity is asked.

Solver, angle chase and checks read the relations alone. What each kind of fact says stands in the
table of `adora_vl.geometry.primitives`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from adora_vl.geometry.drawing import Drawing
from adora_vl.geometry.logic_form import LogicForm, Term
from adora_vl.geometry.looks import MAX_DEGREES_OF_STATED_TANGENT, relations_seen
from adora_vl.geometry.primitives import relations_of
from adora_vl.geometry.quantities import (
    Between,
    Perpendicular,
    Quantity,
    Relation,
    Unit,
    points_in,
    points_in_quantity,
)
from adora_vl.geometry.relations import (
    collinear,
)
from adora_vl.geometry.shapes import UnreadError
from adora_vl.geometry.term_reader import TermReader, unit_of_term
from adora_vl.geometry.vectors import cosine

# What a reading believes of the picture beside the facts: nothing, tangents alone, or all that
# `relations_seen` yields.
BelievedLooks = Literal["nothing", "tangents", "everything"]
# A point that is more than so many drawn radii away from the centre is seen to lie outside.
_MIN_RADII_OUTSIDE = 1.1
# The kinds of shapes that are facts also where only a question names them.
_KINDS_IN_QUESTION = (
    *("Parallelogram", "Rectangle", "Rhombus", "Square", "Kite", "Trapezoid"),
    *("Regular", "Right", "Equilateral"),
)


@dataclass
class Reading:
    """The facts of a logic form as relations, and the quantity that its question asks for.

    Attributes:
        drawing: The picture of the form.
        term_reader: Turns terms into quantities of the figure.
        relations: What holds in the figure.
        fact_numbers: For each relation the number of the fact that it comes of, in the order of the
            drawing's terms, or None where the picture shows it.
        assumed: What only the picture shows, in words.
        unread: The facts that could not be read, with the reason.
        goal_term: What the question asks for, as a term; None where it asks for nothing.
        goal: The same as a quantity; None where it cannot be computed.
        goal_fault: The reason why it cannot be computed.
        unit: What the goal is measured in.
    """

    drawing: Drawing
    term_reader: TermReader
    relations: list[Relation] = field(default_factory=list)
    fact_numbers: list[int | None] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    unread: list[tuple[Term, str]] = field(default_factory=list)
    goal_term: Term | None = None
    goal: Quantity | None = None
    goal_fault: str = ""
    unit: Unit = "length"

    def add_fact(self, term: Term, fact_number: int) -> None:
        """Take in what a fact says; all of it or, where a part cannot be read, nothing."""
        relations: list[Relation] = []
        try:
            for relation in relations_of(self.term_reader, term):
                self.drawing.check_points(points_in(relation))
                relations.append(relation)
        except (UnreadError, IndexError, ValueError, ZeroDivisionError) as error:
            reason = "it is not in a form that is known"
            if isinstance(error, UnreadError):
                reason = str(error)
            self.unread.append((term, reason))
            return
        for relation in relations:
            self.add_relation(relation, fact_number)

    def add_relation(self, relation: Relation, fact_number: int | None) -> None:
        """Add a relation with the number of its fact, None where the picture shows it."""
        self.relations.append(relation)
        self.fact_numbers.append(fact_number)


def read_facts(
    form: LogicForm,
    *,
    left_out: Iterable[int] = (),
    looks: BelievedLooks = "nothing",
) -> Reading:
    """Read a form, without the facts whose numbers are in `left_out`.

    `looks`: what is believed of the picture where no fact says it.
    """
    drawing = Drawing(form)
    term_reader = TermReader(drawing)
    reading = Reading(drawing=drawing, term_reader=term_reader)
    for middle, first, last in drawing.collinear_as_drawn:
        reading.add_relation(collinear(middle, first, last), fact_number=None)
    skipped = set(left_out)
    for number, term in enumerate(drawing.terms):
        if number not in skipped and term.head != "Find":
            reading.add_fact(term, number)
    for number, term in enumerate(drawing.terms):
        if number >= len(drawing.fact_terms) and number not in skipped:
            _add_shapes_in_question(reading, term, number)
    _add_orders(reading, skipped)
    _add_touching(reading)
    _read_goal(reading)
    if looks != "nothing":
        for relation, words in relations_seen(term_reader, everything=looks == "everything"):
            reading.add_relation(relation, fact_number=None)
            reading.assumed.append(words)
    return reading


def _add_orders(reading: Reading, skipped: set[int]) -> None:
    """Add that a point on a segment lies between its ends, where no place shows it."""
    places = reading.drawing.places
    for number, term in enumerate(reading.drawing.terms):
        if number in skipped or term.head != "PointLiesOnLine" or len(term.arguments) != 2:
            continue
        names = [term.arguments[0].head, *term.arguments[1].names]
        are_three_points = len(set(names)) == len(names) == 3
        if not are_three_points or not set(names) <= set(reading.drawing.points):
            continue
        # Where all three have places, the picture shows their order.
        if not set(names) <= places.keys():
            point, start, end = names
            reading.add_relation(Between(point=point, start=start, end=end), number)


def _add_touching(reading: Reading) -> None:
    """Add that a segment is a tangent, if it meets a circle in one point and both ends lie outside.

    A segment that cuts the circle would meet it in two points. The annotation lists every point in
    which a drawn line meets a circle.
    """
    drawing = reading.drawing
    places = drawing.places
    for circle in drawing.circles:
        radius = drawing.drawn_radius(circle)
        if radius is None:
            continue
        centre = places[circle.centre]
        for line in drawing.drawn_lines:
            start = line[0]
            end = line[-1]
            inner_points = [point for point in line[1:-1] if point in circle.points]
            meets_once = len(set(line) & set(circle.points)) == len(inner_points) == 1
            end_distance = min(abs(places[start] - centre), abs(places[end] - centre))
            ends_are_outside = end_distance >= _MIN_RADII_OUTSIDE * radius
            if not meets_once or circle.centre in line or not ends_are_outside:
                continue
            (touching_point,) = inner_points
            # A line that is drawn across the circle lacks a point of its annotation. The cosine of
            # the angle to the radius is the sine of how far the line is from perpendicular to it.
            lean = abs(cosine(places[touching_point] - centre, places[end] - places[start]))
            if lean < math.sin(math.radians(MAX_DEGREES_OF_STATED_TANGENT)):
                relation = Perpendicular(a=circle.centre, b=touching_point, c=start, d=end)
                reading.add_relation(relation, fact_number=None)


def _add_shapes_in_question(reading: Reading, term: Term, fact_number: int) -> None:
    """Add what shapes in a question say: in "area of the rhombus" that its sides are equal.

    `term` is the question, or a part of it, and `fact_number` its number.
    """
    for part in term.walk():
        if part is not term and part.head in _KINDS_IN_QUESTION:
            unread_before = len(reading.unread)
            reading.add_fact(part, fact_number)
            # A shape that cannot be read is no fault of its own: reading the goal names it.
            del reading.unread[unread_before:]


def _read_goal(reading: Reading) -> None:
    """Read what the question asks for, or say in `goal_fault` why it cannot be computed."""
    goals = [
        term.arguments[0]
        for term in reading.drawing.question_terms
        if term.head == "Find" and term.arguments
    ]
    if not goals:
        reading.goal_fault = "the question asks for nothing that can be computed"
        return
    goal = goals[0]
    reading.goal_term = goal
    reading.unit = unit_of_term(goal)
    try:
        quantity = reading.term_reader.quantity(goal)
        reading.drawing.check_points(points_in_quantity(quantity))
        reading.goal = quantity
    except (UnreadError, IndexError, ValueError, ZeroDivisionError) as error:
        reading.goal_fault = f"{goal} is no measure that is known"
        if isinstance(error, UnreadError):
            reading.goal_fault = str(error)
        return
    reading.assumed += reading.term_reader.assumed
