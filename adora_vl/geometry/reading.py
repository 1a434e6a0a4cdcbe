"""A form as relations: which of its facts are read, and which quantity is asked.

Solver, angle chase and checks read the relations alone. What each kind of fact says stands in the
table of `adora_vl.geometry.primitives`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from adora_vl.geometry.drawing import Drawing
from adora_vl.geometry.logic_form import LogicForm, Term
from adora_vl.geometry.looks import MAX_DEGREES_OF_STATED_TANGENT, relations_seen
from adora_vl.geometry.measures import Measures, unit_of_term
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
from adora_vl.geometry.vectors import cosine

# of a drawn radius; a point farther from the centre is seen to lie outside
_MIN_RADII_OUTSIDE = 1.1
_SHAPES_IN_QUESTION = ("Parallelogram", "Rectangle", "Rhombus", "Square", "Kite", "Trapezoid")
_ADJECTIVES_IN_QUESTION = ("Regular", "Right", "Isosceles", "Equilateral")
_HEADS_READ_AS_WHOLE = (
    "Similar",
    "InscribedIn",
    "CircumscribedTo",
    "IsDiagonalOf",
    "IsMidpointOf",
    "Isosceles",
)


@dataclass
class Reading:
    """The facts of a logic form as relations, and the quantity that its question asks for.

    Attributes:
        drawing: The picture of the form.
        measures: Turns terms into quantities of the figure.
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
    measures: Measures
    relations: list[Relation] = field(default_factory=list)
    fact_numbers: list[int | None] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    unread: list[tuple[Term, str]] = field(default_factory=list)
    goal_term: Term | None = None
    goal: Quantity | None = None
    goal_fault: str = ""
    unit: Unit = "length"

    def add(self, term: Term, fact_number: int | None) -> None:
        """Take in what a fact says; all of it or, where a part cannot be read, nothing."""
        relations: list[Relation] = []
        try:
            for relation in relations_of(self.measures, term):
                self.drawing.check_points(points_in(relation))
                relations.append(relation)
        except (UnreadError, IndexError, ValueError, ZeroDivisionError) as error:
            reason = "it is not in a form that is known"
            if isinstance(error, UnreadError):
                reason = str(error)
            self.unread.append((term, reason))
            return
        self.relations += relations
        self.fact_numbers += [fact_number] * len(relations)

    def assume(self, relation: Relation, words: str) -> None:
        """Add a relation that the picture shows and no fact gives, with words for it."""
        self.relations.append(relation)
        self.fact_numbers.append(None)
        self.assumed.append(words)


def read_facts(
    form: LogicForm,
    *,
    without: Iterable[int] = (),
    looks: int = 0,
) -> Reading:
    """Read a form, without the facts of these numbers.

    `looks`: 1 takes in which lines look tangent, 2 also right angles, parallels and centres on
    chords, where the picture shows them and no fact says so.
    """
    drawing = Drawing(form)
    measures = Measures(drawing)
    reading = Reading(drawing=drawing, measures=measures)
    for middle, first, last in drawing.collinear_as_drawn:
        reading.relations.append(collinear(middle, first, last))
        reading.fact_numbers.append(None)
    skipped = set(without)
    for number, term in enumerate(drawing.terms):
        if number not in skipped and term.head != "Find":
            reading.add(term, number)
    for number, term in enumerate(drawing.terms):
        if number >= len(drawing.fact_terms) and number not in skipped:
            _add_shapes_in_question(reading, term, number)
    _add_orders(reading, skipped)
    _add_touching(reading)
    _read_goal(reading)
    if looks:
        for relation, description in relations_seen(measures, everything=looks > 1):
            reading.assume(relation, description)
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
            reading.relations.append(Between(point=point, start=start, end=end))
            reading.fact_numbers.append(number)


def _add_touching(reading: Reading) -> None:
    """Add that a segment is a tangent whose ends lie outside a circle that it meets once.

    The annotation lists every point in which drawn lines meet a circle, and a segment that is none
    would have two.
    """
    drawing = reading.drawing
    places = drawing.places
    for circle in drawing.circles:
        radius = drawing.drawn_radius(circle)
        if radius is None:
            continue
        for row in drawing.drawn_lines:
            shared = [point for point in row[1:-1] if point in circle.points]
            reaches = [abs(places[end] - places[circle.centre]) for end in (row[0], row[-1])]
            meets_once = len(set(row) & set(circle.points)) == len(shared) == 1
            if not meets_once or circle.centre in row or min(reaches) < _MIN_RADII_OUTSIDE * radius:
                continue
            # A line that cuts the circle as drawn lacks a point of its annotation. The cosine of
            # the angle to the radius is the sine of how far the line is from perpendicular to it.
            to_point = places[shared[0]] - places[circle.centre]
            lean = abs(cosine(to_point, places[row[-1]] - places[row[0]]))
            if lean < math.sin(math.radians(MAX_DEGREES_OF_STATED_TANGENT)):
                reading.relations.append(
                    Perpendicular(a=circle.centre, b=shared[0], c=row[0], d=row[-1])
                )
                reading.fact_numbers.append(None)


def _add_shapes_in_question(reading: Reading, term: Term, number: int) -> None:
    """Add what a shape says that the question names, as "area of the rhombus"."""
    for part in term.walk():
        if part is term or part.head in _HEADS_READ_AS_WHOLE:
            continue
        if part.head in _SHAPES_IN_QUESTION or part.head in _ADJECTIVES_IN_QUESTION:
            unread_before = len(reading.unread)
            reading.add(part, number)
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
        quantity = reading.measures.quantity(goal)
        reading.drawing.check_points(points_in_quantity(quantity))
        reading.goal = quantity
    except (UnreadError, IndexError, ValueError, ZeroDivisionError) as error:
        reading.goal_fault = f"{goal} is no measure that is known"
        if isinstance(error, UnreadError):
            reading.goal_fault = str(error)
        return
    reading.assumed += reading.measures.assumed
