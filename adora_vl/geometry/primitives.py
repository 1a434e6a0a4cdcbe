"""One table: what each fact of a diagram says in primitives.

`read` turns a form into relations on a figure, and its question into the quantity that is asked.
Solver, angle chase and checks read the relations alone, so that each kind of fact is understood in
one place, its function below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations, pairwise

from adora_vl.geometry.expressions import number_of
from adora_vl.geometry.forms import Form, Term
from adora_vl.geometry.measures import Measures, unit_of
from adora_vl.geometry.quantities import (
    Between,
    Combined,
    Constant,
    Equal,
    LineDistance,
    Mean,
    Parallel,
    Perpendicular,
    Quantity,
    Relation,
    Unit,
    minus,
    over,
    plus,
    points_in,
    points_in_quantity,
)
from adora_vl.geometry.shapes import (
    CORNERS,
    Circle,
    Drawing,
    UnreadError,
    cosine,
    sides_of,
    unwrapped,
)
from adora_vl.geometry.words import words_of
from adora_vl.utils.errors import did_you_mean

# "What appears to be tangent", where the question says that; and where nobody says it.
# degrees from a right angle to the radius
SAID_TANGENT = 22.0
SEEN_TANGENT = 9.0
# degrees
_SEEN_RIGHT = 2.5
_SEEN_PARALLEL = 2.0
_OUTSIDE = 1.1  # of a drawn radius; a point farther from the centre is seen to lie outside
_SEEN_ON_CHORD = 0.03  # share of a chord's length that the centre may lie beside it
# shares of a polygon's size
_AT_CENTRE = 0.07
_AT_MIDDLE = 0.05


@dataclass
class Reading:
    """What a form says.

    `relations` hold in the figure; `sources` has for each the number of the fact that it comes of,
    in the order of the drawing's terms, or None where the picture shows it. `assumed` says these in
    words. `unread` has the facts that could not be read, with the reason.
    """

    drawing: Drawing
    measures: Measures
    relations: list[Relation] = field(default_factory=list)
    sources: list[int | None] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    unread: list[tuple[Term, str]] = field(default_factory=list)
    goal_term: Term | None = None
    goal: Quantity | None = None
    goal_fault: str = ""
    unit: Unit = "length"

    def add(self, term: Term, source: int | None) -> None:
        """Take in what a fact says; all of it or, where a part cannot be read, nothing."""
        relations: list[Relation] = []
        try:
            for relation in relations_of(self.measures, term):
                self.drawing.check_points(points_in(relation))
                relations.append(relation)
        except (UnreadError, IndexError, ValueError, ZeroDivisionError) as error:
            reason = (
                str(error)
                if isinstance(error, UnreadError)
                else "it is not in a form that is known"
            )
            self.unread.append((term, reason))
            return
        self.relations += relations
        self.sources += [source] * len(relations)

    def assume(self, relation: Relation, words: str) -> None:
        """Add a relation that the picture shows and no fact gives, with words for it."""
        self.relations.append(relation)
        self.sources.append(None)
        self.assumed.append(words)


def read(
    form: Form, *, without: Iterable[int] = (), without_words: Iterable[str] = (), looks: int = 0
) -> Reading:
    """Read a form, without the facts of these numbers, or whose words are these.

    `looks`: 1 takes in which lines look tangent, 2 also right angles, parallels and centres on
    chords, where the picture shows them and no fact says so.
    """
    drawing = Drawing(form)
    measures = Measures(drawing)
    reading = Reading(drawing=drawing, measures=measures)
    for middle, first, last in drawing.straight:
        reading.relations.append(_collinear(middle, first, last))
        reading.sources.append(None)
    words = set(without_words)
    skipped = {
        *without,
        *(number for number, term in enumerate(drawing.terms) if words_of(term) in words),
    }
    for number, term in enumerate(drawing.terms):
        if number not in skipped and term.head != "Find":
            reading.add(term, number)
    for number, term in enumerate(drawing.terms):
        if number >= len(drawing.facts) and number not in skipped:
            _add_shapes_in_question(reading, term, number)
    _add_orders(reading, skipped)
    _add_touching(reading)
    _read_goal(reading)
    if looks:
        for relation, description in seen(measures, everything=looks > 1):
            reading.assume(relation, description)
    return reading


def _add_orders(reading: Reading, skipped: set[int]) -> None:
    """A point on a segment lies between its ends, which has to be said where no place shows it."""
    places = reading.drawing.places
    for number, term in enumerate(reading.drawing.terms):
        if number in skipped or term.head != "PointLiesOnLine" or len(term.arguments) != 2:
            continue
        names = [term.arguments[0].head, *term.arguments[1].names]
        is_segment = len(set(names)) == len(names) == 3 and set(names) <= set(
            reading.drawing.points
        )
        if is_segment and not set(names) <= places.keys():
            reading.relations.append(Between(point=names[0], start=names[1], end=names[2]))
            reading.sources.append(number)


def _add_touching(reading: Reading) -> None:
    """A segment with both ends outside a circle and one point of it between them is a tangent.

    The annotation lists every point in which drawn lines meet a circle, and a segment that is none
    would have two.
    """
    drawing = reading.drawing
    places = drawing.places
    for circle in drawing.circles:
        radius = drawing.drawn_radius(circle)
        if radius is None:
            continue
        for row in drawing.rows:
            shared = [point for point in row[1:-1] if point in circle.points]
            reaches = [abs(places[end] - places[circle.centre]) for end in (row[0], row[-1])]
            meets_once = len(set(row) & set(circle.points)) == len(shared) == 1
            if not meets_once or circle.centre in row or min(reaches) < _OUTSIDE * radius:
                continue
            # A line that cuts the circle as drawn lacks a point of its annotation.
            to_point = places[shared[0]] - places[circle.centre]
            lean = abs(cosine(to_point, places[row[-1]] - places[row[0]]))
            if lean < math.sin(math.radians(SAID_TANGENT)):
                reading.relations.append(
                    Perpendicular(a=circle.centre, b=shared[0], c=row[0], d=row[-1])
                )
                reading.sources.append(None)


_HOLDS_IN_QUESTION = ("Parallelogram", "Rectangle", "Rhombus", "Square", "Kite", "Trapezoid")
_HOLDS_AROUND = ("Regular", "Right", "Isosceles", "Equilateral")
_SAYS_MORE = (
    "Similar",
    "InscribedIn",
    "CircumscribedTo",
    "IsDiagonalOf",
    "IsMidpointOf",
    "Isosceles",
)


def _add_shapes_in_question(reading: Reading, term: Term, number: int) -> None:
    """A shape that a question names holds: "the area of the rhombus" says that it is one."""
    for part in term.walk():
        if part is term or part.head in _SAYS_MORE:
            continue
        if part.head in _HOLDS_IN_QUESTION or part.head in _HOLDS_AROUND:
            unread = len(reading.unread)
            reading.add(part, number)
            del reading.unread[unread:]  # the goal itself says what is wrong with it


def _read_goal(reading: Reading) -> None:
    """Read what the question asks for, or say in `goal_fault` why it cannot be computed."""
    goal = next(
        (
            term.arguments[0]
            for term in reading.drawing.asked
            if term.head == "Find" and term.arguments
        ),
        None,
    )
    if goal is None:
        reading.goal_fault = "the question asks for nothing that can be computed"
        return
    reading.goal_term = goal
    reading.unit = unit_of(goal)
    try:
        quantity = reading.measures.value(goal)
        reading.drawing.check_points(points_in_quantity(quantity))
        reading.goal = quantity
    except (UnreadError, IndexError, ValueError, ZeroDivisionError) as error:
        reading.goal_fault = (
            str(error) if isinstance(error, UnreadError) else f"{goal} is no measure that is known"
        )
        return
    reading.assumed += reading.measures.assumed


def relations_of(measures: Measures, term: Term) -> Iterator[Relation]:
    """What a fact says, in primitives. Raises `UnreadError` for one that is not known."""
    if term.head in _SAYS_NOTHING:
        return
    rule = FACTS.get(term.head)
    if rule is None:
        raise UnreadError(f"{term.head} is no fact that is known{did_you_mean(term.head, FACTS)}")
    yield from rule(measures, term)


# Equations


def _equals(measures: Measures, term: Term) -> Iterator[Relation]:
    """An equation; also a line that is called a height or a hypotenuse."""
    if len(term.arguments) != 2:
        raise UnreadError(f"{term} has not two sides")
    left, right = term.arguments
    if left.head in CORNERS or left.head in ("Shape", "Circle", "Polygon"):
        return  # it says which shape is called so, which the drawing knows
    if left.head == "Line" and right.head in ("AltitudeOf", "HeightOf"):
        yield from _foot(
            measures,
            line=measures.drawing.segment(left),
            names=right.arguments[0].names,
            is_median=False,
        )
        return
    if left.head == "Line" and right.head == "HypotenuseOf" and len(right.arguments[0].names) == 3:
        yield from _opposite_right_angle(left.names, right.arguments[0].names)
        return
    if left.head == "Line" and right.head in ("BaseOf", "LegOf"):
        yield from _side_called(measures, left, right)
        return
    unit = unit_of(left)
    if unit == "length":
        unit = unit_of(right)
    left_value = measures.value(left)
    right_value = measures.value(right)
    if unit == "degrees" and _is_other_side(left, right):
        left_value = minus(Constant(360.0), left_value)
    yield Equal(left=left_value, right=right_value, unit=unit)


def _side_called(measures: Measures, line: Term, role: Term) -> Iterator[Relation]:
    """A side of an isosceles triangle is called its base, or one of its legs.

    One leg says nothing yet; the second one says that it is as long as the first. Raises
    `UnreadError` for the base or a leg of any other shape.
    """
    shape = role.arguments[0]
    corners = unwrapped(shape).names
    ends = measures.drawing.segment(line)
    if shape.head != "Isosceles" or len(corners) != 3 or not set(ends) <= set(corners):
        raise UnreadError(f"the form does not say what follows for {''.join(ends)}")
    if role.head == "BaseOf":
        apex = next(name for name in corners if name not in ends)
        yield _same(measures, (apex, ends[0]), (apex, ends[1]))
        return
    legs = [
        term.arguments[0].names
        for term in measures.drawing.terms
        if term.is_equation and term.arguments[1] == role
    ]
    for leg in legs:
        if set(leg) != set(ends):
            yield _same(measures, ends, leg)


def _angle_sum(measures: Measures, term: Term) -> Iterator[Relation]:
    """Two angles are supplementary, 180 degrees together, or complementary, 90."""
    total = 180.0 if term.head == "Supplementary" else 90.0
    angles = [measures.value(angle) for angle in term.arguments]
    if len(angles) != 2:
        raise UnreadError(f"{term} has not two angles")
    yield Equal(left=plus(*angles), right=Constant(total), unit="degrees")


def _is_other_side(left: Term, right: Term) -> bool:
    """Whether a number over 180 for an angle or an arc of two letters means the other side."""
    size = number_of(right.head) if not right.arguments else None
    if size is None or size <= 180:
        return False
    inner = left.arguments[0] if left.head == "MeasureOf" and left.arguments else left
    if inner.head == "Angle":
        return len(inner.names) == 3 or inner.names[0].isupper()
    return inner.head == "Arc" and len(inner.names) == 2


def _opposite_right_angle(hypotenuse: Sequence[str], triangle: Sequence[str]) -> Iterator[Relation]:
    """The corner of a triangle that is no end of the hypotenuse has a right angle."""
    corners = [name for name in triangle if name not in hypotenuse]
    if len(corners) == 1 and len(hypotenuse) == 2:
        yield _right_angle_at(corners[0], hypotenuse[0], hypotenuse[1])


def _collinear(point: str, start: str, end: str) -> Parallel:
    """Three points lie on one line: the ways from one of them to the others are parallel."""
    return Parallel(a=point, b=start, c=point, d=end)


def _right_angle_at(corner: str, first: str, last: str) -> Perpendicular:
    """The angle at a corner is right: the ways from it to the others are perpendicular."""
    return Perpendicular(a=corner, b=first, c=corner, d=last)


def _same(measures: Measures, first: Sequence[str], second: Sequence[str]) -> Relation:
    """Two distances are equal."""
    return Equal(left=measures.distance(*first), right=measures.distance(*second), unit="length")


def _same_angle(measures: Measures, first: Sequence[str], second: Sequence[str]) -> Relation:
    """Two angles are equal."""
    return Equal(left=measures.corner(*first), right=measures.corner(*second), unit="degrees")


# Points and lines


def _on_line(measures: Measures, term: Term) -> Iterator[Relation]:
    """A point lies on a line: collinear with its two ends, unless it is one of them."""
    point = measures.drawing.point(term.names[0])
    start, end = measures.drawing.segment(term.arguments[1])
    if point not in (start, end):
        yield _collinear(point, start, end)


def _on_circle(measures: Measures, term: Term) -> Iterator[Relation]:
    """A point lies on a circle, or on each of several concentric ones that have it."""
    name = term.names[0]
    target = term.arguments[1]
    radius = target.names[1] if len(target.names) > 1 else None
    centre = target.names[0] if target.names else target.head
    circles = [
        circle
        for circle in measures.drawing.circles
        if circle.centre == centre and name in circle.points
    ]
    if not circles:
        circles = [measures.drawing.circle(target)]
    if radius is None or len(circles) == 1:
        yield _reaches(measures, name, circles[0])
        return
    for circle in circles:
        yield _reaches(measures, name, circle)


def _reaches(measures: Measures, point: str, circle: Circle) -> Relation:
    """A point's distance from the centre of a circle is the radius."""
    return Equal(
        left=measures.distance(point, circle.centre), right=measures.radius(circle), unit="length"
    )


def _perpendicular(measures: Measures, term: Term) -> Iterator[Relation]:
    """Two lines are perpendicular."""
    a, b = measures.drawing.segment(term.arguments[0])
    c, d = measures.drawing.segment(term.arguments[1])
    yield Perpendicular(a=a, b=b, c=c, d=d)


def _parallel(measures: Measures, term: Term) -> Iterator[Relation]:
    """Lines are parallel to the first; unnamed ones are those that look most parallel."""
    try:
        lines = [measures.drawing.segment(line) for line in term.arguments]
    except UnreadError:
        if not all(line.head == "Line" and len(line.names) == 1 for line in term.arguments):
            raise
        lines = measures.drawing.parallel_looking(len(term.arguments))
    for line in lines[1:]:
        yield Parallel(a=lines[0][0], b=lines[0][1], c=line[0], d=line[1])


def _intersect(measures: Measures, term: Term) -> Iterator[Relation]:
    """Lines meet in a point, which is collinear with the ends of each."""
    point = measures.drawing.point(term.arguments[-1].names[0])
    for line in term.arguments[:-1]:
        if line.head == "Line" and len(line.names) == 2 and point not in line.names:
            yield _collinear(point, line.names[0], line.names[1])


def _midpoint(measures: Measures, term: Term) -> Iterator[Relation]:
    """A point is the midpoint of a segment, or of the side of a shape that it lies on."""
    point = _point_of(measures, term.arguments[0])
    target = term.arguments[1]
    if target.head == "Line" and len(target.names) == 2:
        yield Mean(point=point, points=measures.drawing.segment(target))
    elif target.head in ("LegOf", "SideOf"):
        names = measures.drawing.shape(target.arguments[0])
        yield Mean(point=point, points=measures.drawing.side_with(point, names))
    else:
        raise UnreadError(f"the form does not say of which segment {point} is the midpoint")


def _point_of(measures: Measures, term: Term) -> str:
    """The point that a term is or names."""
    return measures.drawing.point(term.names[0] if term.arguments else term.head)


def _right_angle(measures: Measures, term: Term) -> Iterator[Relation]:
    """An angle is right."""
    first, corner, last = measures.drawing.angle(term.arguments[0])
    yield _right_angle_at(corner, first, last)


def _bisects(measures: Measures, term: Term) -> Iterator[Relation]:
    """A line halves a segment or an angle."""
    drawing = measures.drawing
    line = drawing.segment(term.arguments[0])
    target = term.arguments[1]
    names = target.names
    if target.head == "Line" and len(names) == 2:
        middle = [name for name in line if drawing.are_on_one_row((name, *names))]
        if not middle:
            raise UnreadError(f"the form does not say where {''.join(line)} meets {''.join(names)}")
        yield Mean(point=middle[0], points=drawing.segment(target))
        return
    if target.head != "Angle":
        if len(names) != 3 or len(set(names) & set(line)) != 1:
            raise UnreadError(f"{term} is no bisector that is known")
        corner = next(name for name in names if name in line)
        sides = [name for name in names if name != corner]
        names = [sides[0], corner, sides[1]]
    if names == ["$"]:
        corner = max(line, key=lambda name: len(drawing.neighbours.get(name, ())))
        names = [corner]
    if len(names) == 1:
        inside = next(name for name in line if name != names[0])
        names = list(drawing.around(names[0], inside))
    far = [name for name in line if name != names[1]]
    if len(far) != 1:
        raise UnreadError(f"{''.join(line)} does not begin at {names[1]}")
    yield _same_angle(measures, (names[0], names[1], far[0]), (far[0], names[1], names[2]))
    if not drawing.places:
        # Without a picture the line could as well lie opposite, outside of the angle.
        half = over(measures.corner(names[0], names[1], names[2]), Constant(2.0))
        yield Equal(left=measures.corner(names[0], names[1], far[0]), right=half, unit="degrees")


def _perpendicular_bisector(measures: Measures, term: Term) -> Iterator[Relation]:
    """A line is the perpendicular bisector of a segment, or of all sides of a triangle."""
    drawing = measures.drawing
    names = term.arguments[1].names
    if term.arguments[1].head == "Triangle" and len(names) == 3:
        meeting = [
            meeting_fact.arguments[-1].names[0]
            for meeting_fact in drawing.terms
            if meeting_fact.head == "IntersectAt" and meeting_fact.arguments[-1].names
        ]
        if not meeting:
            raise UnreadError("the form does not say where the perpendicular bisectors meet")
        for i in range(3):
            yield _same(measures, (meeting[0], names[i]), (meeting[0], names[i - 1]))
            yield from _feet_in_the_middle(drawing, start=names[i], end=names[i - 1], names=names)
        return
    start, end = drawing.segment(term.arguments[0])
    if len(names) != 2:
        raise UnreadError(
            "the form does not say of which segment the line is the perpendicular bisector"
        )
    yield Perpendicular(a=start, b=end, c=names[0], d=names[1])
    yield _same(measures, (start, names[0]), (start, names[1]))


def _feet_in_the_middle(
    drawing: Drawing, start: str, end: str, names: Sequence[str]
) -> Iterator[Relation]:
    """The perpendicular bisector of a side stands on the point that looks like its midpoint.

    There is at most one such point for a side.
    """
    places = drawing.places
    candidates = []
    for row in drawing.rows:
        if start in row and end in row:
            for point in row:
                if point not in names:
                    halves = (abs(places[point] - places[start]), abs(places[point] - places[end]))
                    candidates.append((abs(halves[0] / max(halves[1], 1e-9) - 1), point))
    if candidates and min(candidates)[0] < 0.12:
        yield Mean(point=min(candidates)[1], points=(start, end))


# Circles


def _tangent(measures: Measures, term: Term) -> Iterator[Relation]:
    """A line touches a circle; unnamed lines are those that look like tangents."""
    line = term.arguments[0]
    if line.head == "Line" and line.names[:1] == ["$"]:
        for relation, _ in _seen_tangents(measures, SAID_TANGENT):
            yield relation
        return
    yield _touches(
        measures, measures.drawing.circle(term.arguments[1]), measures.drawing.segment(line)
    )


def _touches(measures: Measures, circle: Circle, line: tuple[str, str]) -> Relation:
    """A line touches a circle.

    It is perpendicular to the radius at the point that they share, else at the distance of a
    radius.
    """
    drawing = measures.drawing
    shared = [name for name in line if name in circle.points]
    if not shared:
        shared = [name for name in circle.points if drawing.are_on_one_row((name, *line))]
    if shared:
        far_end = next(name for name in line if name != shared[0])
        return Perpendicular(a=circle.centre, b=shared[0], c=shared[0], d=far_end)
    reach = LineDistance(point=circle.centre, start=line[0], end=line[1])
    return Equal(left=reach, right=measures.radius(circle), unit="length")


def _diameter(measures: Measures, term: Term) -> Iterator[Relation]:
    """A segment is a diameter: its middle is the centre, and an end lies on the circle."""
    circle = measures.drawing.circle(term.arguments[1])
    line = measures.drawing.segment(term.arguments[0])
    yield Mean(point=circle.centre, points=line)
    yield _reaches(measures, line[0], circle)


def _chord(measures: Measures, term: Term) -> Iterator[Relation]:
    """Both ends of a chord lie on the circle; of a radius, the end that is not the centre."""
    circle = measures.drawing.circle(term.arguments[1])
    for name in measures.drawing.segment(term.arguments[0]):
        if name != circle.centre:
            yield _reaches(measures, name, circle)


def _secant(measures: Measures, term: Term) -> Iterator[Relation]:
    """A secant says no more than which of its points lie on the circle, which the picture has."""
    circle = measures.drawing.circle(term.arguments[1])
    for name in measures.drawing.segment(term.arguments[0]):
        if name in circle.points:
            yield _reaches(measures, name, circle)


def _inscribed(measures: Measures, term: Term) -> Iterator[Relation]:
    """A circle touches all sides of a shape, or a shape has its corners on a circle."""
    shape, target = term.arguments
    if shape.head in ("Circle", "Cirle"):
        circle = measures.drawing.circle(shape)
        names = measures.drawing.shape(target)
        for side in sides_of(names):
            yield _touches(measures, circle, side)
        yield from _inside(measures, target)
        return
    circle = measures.drawing.circle(target)
    names = measures.inscribed(shape, circle)
    if shape.head == "Regular" or shape.head == "Equilateral":
        yield from _all_equal(measures, names)
    else:
        yield from _inside(measures, shape)
    for name in names:
        yield _reaches(measures, name, circle)


def _circumscribed(measures: Measures, term: Term) -> Iterator[Relation]:
    """The sides of a shape touch a circle."""
    names = measures.drawing.shape(term.arguments[0])
    circle = measures.drawing.circle(term.arguments[1])
    for side in sides_of(names):
        yield _touches(measures, circle, side)
    yield from _inside(measures, term.arguments[0])


def _inside(measures: Measures, term: Term) -> Iterator[Relation]:
    """What a shape inside another fact says by itself; nothing where that cannot be read."""
    if term.head in FACTS:
        relations: list[Relation] = []
        with suppress(UnreadError):
            relations.extend(relations_of(measures, term))
        yield from relations


# Polygons


def _parallelogram(measures: Measures, term: Term) -> Iterator[Relation]:
    """Opposite sides are parallel; rectangle, rhombus and square say more."""
    a, b, c, d = _four(measures.drawing.shape(term))
    yield Parallel(a=a, b=b, c=d, d=c)
    yield Parallel(a=a, b=d, c=b, d=c)
    if term.head in ("Rectangle", "Square"):
        yield Perpendicular(a=a, b=b, c=b, d=c)
    if term.head in ("Rhombus", "Square"):
        # All four, though one would do: angles alone go by pairs of equal sides.
        for first, second in pairwise((a, b, c, d, a, b)[i : i + 2] for i in range(5)):
            yield _same(measures, first, second)


def _four(names: Sequence[str]) -> tuple[str, str, str, str]:
    """The four corners of a shape. Raises `UnreadError` for another number."""
    if len(names) != 4:
        raise UnreadError(f"{''.join(names)} has not four corners")
    return names[0], names[1], names[2], names[3]


def _kite(measures: Measures, term: Term) -> Iterator[Relation]:
    """Two pairs of equal neighbouring sides; a fact or the picture says which sides are a pair."""
    a, b, c, d = _four(measures.drawing.shape(term))
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
    yield _same(measures, (a, b), (a, d))
    yield _same(measures, (c, b), (c, d))


def _trapezoid(measures: Measures, term: Term) -> Iterator[Relation]:
    """Two opposite sides are parallel, those that the facts or the picture show."""
    a, b, c, d = _four(measures.drawing.with_base_first(_four(measures.drawing.shape(term))))
    yield Parallel(a=a, b=b, c=d, d=c)


def _isosceles(measures: Measures, term: Term) -> Iterator[Relation]:
    """Two sides are equal; of a trapezoid the legs are, and the diagonals."""
    names = measures.drawing.shape(_inner(term))
    if len(names) == 4:
        a, b, c, d = _four(measures.drawing.with_base_first(names))
        yield Parallel(a=a, b=b, c=d, d=c)
        yield _same(measures, (a, c), (b, d))
        yield _same(measures, (b, c), (d, a))
    elif len(names) == 3 and not measures.drawing.equal_parts_said(names):
        apex = measures.drawing.apex(names)
        first, last = [name for name in names if name != apex]
        yield _same(measures, (apex, first), (apex, last))


def _inner(term: Term) -> Term:
    """The shape inside `Isosceles(Triangle(A, B, C))`; of `Isosceles(A, B, C)` the term itself."""
    return term.arguments[0] if term.arguments and term.arguments[0].arguments else term


def _right(measures: Measures, term: Term) -> Iterator[Relation]:
    """A triangle has a right angle at the corner that is marked, or looks like it."""
    names = measures.drawing.shape(_inner(term))
    corner = measures.drawing.right_corner(names)
    first, last = [name for name in names if name != corner][:2]
    yield _right_angle_at(corner, first, last)


def _regular(measures: Measures, term: Term) -> Iterator[Relation]:
    """All sides are equal, and where these do not say so, all angles."""
    names = measures.drawing.shape(_inner(term))
    yield from _all_equal(
        measures, names, angles=len(names) > 4 or (len(names) == 4 and term.head == "Regular")
    )


def _all_equal(
    measures: Measures, names: Sequence[str], *, angles: bool | None = None
) -> Iterator[Relation]:
    """All sides are equal, and with `angles` all angles.

    A drawn centre and drawn middles of sides are taken to be such.
    """
    count = len(names)
    for i in range(1, count):
        yield _same(measures, (names[i - 1], names[i]), (names[i - 2], names[i - 1]))
    if angles if angles is not None else count > 3:
        for i in range(1, count):
            before = (names[i - 3], names[i - 2], names[i - 1])
            yield _same_angle(measures, (names[i - 2], names[i - 1], names[i]), before)
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
                yield _same(measures, (name, names[i - 1]), (name, names[i]))
            continue
        for i in range(count):
            if abs(location - (corners[i] + corners[i - 1]) / 2) < _AT_MIDDLE * size:
                yield Mean(point=name, points=(names[i], names[i - 1]))


def _similar(measures: Measures, term: Term) -> Iterator[Relation]:
    """Shapes, angles, arcs, lines or circles are congruent; of shapes, similar ones as well."""
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
        yield _same(measures, drawing.segment(first), drawing.segment(second))
        return
    names = unwrapped(first).names
    partners = unwrapped(second).names
    if len(names) < 3 or len(names) != len(partners):
        names, partners = drawing.similar_pair()
    for i in range(len(names)):
        if is_congruent:
            yield _same(measures, (names[i - 1], names[i]), (partners[i - 1], partners[i]))
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
        yield _same_angle(measures, corner, (partners[i - 2], partners[i - 1], partners[i]))


# Lines of triangles and trapezoids


def _median(measures: Measures, term: Term) -> Iterator[Relation]:
    """A median or an altitude of a triangle, or the median of a trapezoid.

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
    yield from _foot(measures, line=line, names=names, is_median=term.head == "IsMedianOf")


def _midsegment(measures: Measures, term: Term) -> Iterator[Relation]:
    """A line joins the middles of two sides of a triangle or of the legs of a trapezoid."""
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
    """The median of a trapezoid joins the middles of its legs."""
    a, b, c, d = _four(measures.drawing.with_base_first(names))
    yield Parallel(a=a, b=b, c=d, d=c)
    if set(line) <= measures.drawing.places.keys():
        for point in line:
            yield Mean(point=point, points=measures.drawing.side_with(point, names))
        return
    yield Mean(point=line[0], points=(b, c))
    yield Mean(point=line[1], points=(d, a))


def _foot(
    measures: Measures, line: tuple[str, str], names: Sequence[str], *, is_median: bool
) -> Iterator[Relation]:
    """A line from a corner of a triangle to the opposite side.

    It goes to the middle of that side, or is perpendicular to it.
    """
    tops = [name for name in line if name in names]
    feet = [name for name in line if name not in names]
    ends = [name for name in names if name not in line]
    if len(names) == 3 and len(tops) == 1 and len(feet) == 1 and len(ends) == 2:
        yield _collinear(feet[0], ends[0], ends[1])
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


def _centroid(measures: Measures, term: Term) -> Iterator[Relation]:
    """The mean of the corners; drawn lines from a corner through it end at midpoints."""
    drawing = measures.drawing
    point = _point_of(measures, term.arguments[0])
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


def _incenter(measures: Measures, term: Term) -> Iterator[Relation]:
    """A point lies on the bisectors of all angles of a triangle, or of the one that is named."""
    point = _point_of(measures, term.arguments[0])
    names = term.arguments[1].names
    if term.arguments[1].head == "Angle" and len(names) == 3:
        yield _same_angle(measures, (names[0], names[1], point), (point, names[1], names[2]))
        return
    names = measures.drawing.shape(term.arguments[1])
    for i in range(3):
        yield _same_angle(
            measures, (names[i - 2], names[i - 1], point), (point, names[i - 1], names[i])
        )


def _orthocenter(measures: Measures, term: Term) -> Iterator[Relation]:
    """A point lies on the altitudes of a triangle."""
    point = _point_of(measures, term.arguments[0])
    a, b, c = measures.drawing.shape(term.arguments[1])[:3]
    yield Perpendicular(a=point, b=a, c=b, d=c)
    yield Perpendicular(a=point, b=b, c=a, d=c)


def _hypotenuse(measures: Measures, term: Term) -> Iterator[Relation]:
    """A side is the hypotenuse of a triangle."""
    yield from _opposite_right_angle(
        term.arguments[0].names, measures.drawing.shape(term.arguments[1])
    )


def _diagonal(measures: Measures, term: Term) -> Iterator[Relation]:
    """A diagonal says no more than what the shape says that has it."""
    yield from _inside(measures, term.arguments[1])


# What the picture shows


def seen(measures: Measures, *, everything: bool) -> Iterator[tuple[Relation, str]]:
    """What the picture shows and no fact says, with words for it."""
    yield from _seen_tangents(measures, SEEN_TANGENT)
    if everything:
        yield from _seen_diameters(measures)
        yield from _seen_right_angles(measures)
        yield from _seen_parallels(measures)


def _seen_tangents(measures: Measures, limit: float) -> Iterator[tuple[Relation, str]]:
    """Lines that meet a circle in one point and look perpendicular to the radius there, up to
    `limit` degrees.
    """
    drawing = measures.drawing
    places = drawing.places
    lines = [*drawing.rows, *([*line] for line in drawing.form.lines if set(line) <= places.keys())]
    for circle in drawing.circles:
        for point in circle.points:
            if circle.centre not in places or point not in places:
                continue
            to_point = places[point] - places[circle.centre]
            touched_ends: set[str] = set()
            for line in lines:
                meets_once = (
                    point in line
                    and circle.centre not in line
                    and len(set(line) & set(circle.points)) == 1
                )
                if not meets_once:
                    continue
                far = max(line, key=lambda name: abs(places[name] - places[point]))
                lean = abs(
                    math.degrees(
                        math.asin(min(1.0, abs(cosine(to_point, places[far] - places[point]))))
                    )
                )
                if far != point and lean < limit and far not in touched_ends:
                    touched_ends.add(far)
                    relation = Perpendicular(a=circle.centre, b=point, c=point, d=far)
                    yield relation, f"{point}{far} is tangent at {point}"


def _seen_diameters(measures: Measures) -> Iterator[tuple[Relation, str]]:
    """Chords that seem to go through the centre."""
    drawing = measures.drawing
    places = drawing.places
    for circle in drawing.circles:
        for start, end in drawing.form.lines:
            if (
                not {start, end} <= set(circle.points)
                or not {start, end, circle.centre} <= places.keys()
            ):
                continue
            way = places[end] - places[start]
            beside = abs((way.conjugate() * (places[circle.centre] - places[start])).imag)
            if beside < _SEEN_ON_CHORD * abs(way) ** 2 and not drawing.are_on_one_row(
                (start, end, circle.centre)
            ):
                relation = _collinear(circle.centre, start, end)
                yield relation, f"{circle.centre} lies on {start}{end}"


def _seen_right_angles(measures: Measures) -> Iterator[tuple[Relation, str]]:
    """Angles between drawn lines that look right."""
    drawing = measures.drawing
    places = drawing.places
    for corner in sorted(drawing.neighbours):
        if corner not in places:
            continue
        ends = {end for row in drawing.rows if corner in row for end in (row[0], row[-1])}
        rays = sorted(end for end in ends if end != corner and places[end] != places[corner])
        for first, last in combinations(rays, 2):
            lean = abs(cosine(places[first] - places[corner], places[last] - places[corner]))
            if lean < math.sin(math.radians(_SEEN_RIGHT)):
                relation = _right_angle_at(corner, first, last)
                yield relation, f"angle {first}{corner}{last} is a right angle"


def _seen_parallels(measures: Measures) -> Iterator[tuple[Relation, str]]:
    """Rows without a common point that look parallel."""
    drawing = measures.drawing
    for first, second in combinations(drawing.rows, 2):
        if not set(first) & set(second) and drawing.degrees_apart(first, second) < _SEEN_PARALLEL:
            relation = Parallel(a=first[0], b=first[-1], c=second[0], d=second[-1])
            yield relation, f"{first[0]}{first[-1]} is parallel to {second[0]}{second[-1]}"


_Rule = Callable[[Measures, Term], Iterator[Relation]]
FACTS: dict[str, _Rule] = {
    "Equals": _equals,
    "PointLiesOnLine": _on_line,
    "PointLiesOnCircle": _on_circle,
    "Perpendicular": _perpendicular,
    "Parallel": _parallel,
    "IntersectAt": _intersect,
    "IsMidpointOf": _midpoint,
    "RightAngle": _right_angle,
    "BisectsAngle": _bisects,
    "IsPerpendicularBisectorOf": _perpendicular_bisector,
    "Tangent": _tangent,
    "IsDiameterOf": _diameter,
    "IsChordOf": _chord,
    "IsRadiusOf": _chord,
    "Secant": _secant,
    "Supplementary": _angle_sum,
    "Complementary": _angle_sum,
    "InscribedIn": _inscribed,
    "CircumscribedTo": _circumscribed,
    "Parallelogram": _parallelogram,
    "Rectangle": _parallelogram,
    "Rhombus": _parallelogram,
    "Square": _parallelogram,
    "Kite": _kite,
    "Trapezoid": _trapezoid,
    "Isosceles": _isosceles,
    "Right": _right,
    "Equilateral": _regular,
    "Regular": _regular,
    "Similar": _similar,
    "Congruent": _similar,
    "IsMedianOf": _median,
    "IsAltitudeOf": _median,
    "IsMidsegmentOf": _midsegment,
    "IsCentroidOf": _centroid,
    "IsIncenterOf": _incenter,
    "IsOrthocenterOf": _orthocenter,
    "IsHypotenuseOf": _hypotenuse,
    "IsDiagonalOf": _diagonal,
}
# Heads that name something and say nothing of it.
_SAYS_NOTHING = (
    *("Point", "Line", "Angle", "Arc", "Circle", "Minor", "Major", "Shape", "Polygon", "Shaded"),
    *("Triangle", "Quadrilateral", "Pentagon", "Hexagon", "Heptagon", "Octagon"),
    *("LengthOf", "MeasureOf", "AreaOf", "PerimeterOf", "Find", "UseTheorem"),
)
