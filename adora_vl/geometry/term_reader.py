"""What a term measures: `LengthOf(Line(A, B))` or `SinOf(Angle(A))` as a quantity of a figure.

`TermReader` reads terms of one drawing. A term that cannot be read raises `UnreadError`.
"""

from __future__ import annotations

import math
import re
from cmath import phase
from collections.abc import Callable, Sequence

from adora_vl.geometry.areas import area_or_perimeter
from adora_vl.geometry.drawing import Drawing
from adora_vl.geometry.expressions import (
    MAX_EXPONENT,
    ExpressionError,
    number_in_text,
    parse_expression,
)
from adora_vl.geometry.heights import called_height, drawn_height
from adora_vl.geometry.logic_form import Term
from adora_vl.geometry.quantities import (
    Angle,
    Area,
    Arithmetic,
    Constant,
    Distance,
    Function,
    LineDistance,
    Quantity,
    Sweep,
    Unit,
    Unknown,
    minus,
    over,
    plus,
    power,
    times,
)
from adora_vl.geometry.shapes import (
    CIRCLE_HEADS,
    COLOUR_HEADS,
    CORNER_COUNT_BY_SHAPE,
    Circle,
    UnreadError,
    sides_of_polygon,
    unwrap_shape,
)
from adora_vl.geometry.vectors import cross, dot, sine

# A corner with a smaller sine is too flat for the picture to show to which side it turns.
_MIN_SINE_OF_TURN = 0.06
_UNIT_BY_HEAD: dict[str, Unit] = {
    "AreaOf": "area",
    "MeasureOf": "degrees",
    "Angle": "degrees",
    "Arc": "degrees",
    "SinOf": "plain",
    "CosOf": "plain",
    "TanOf": "plain",
    "CotOf": "plain",
    "RatioOf": "plain",
    "ScaleFactorOf": "plain",
}
_LENGTH_HEADS = (
    "LengthOf",
    "PerimeterOf",
    "CircumferenceOf",
    "RadiusOf",
    "DiameterOf",
    "HeightOf",
    "AltitudeOf",
    "MedianOf",
    "DistanceOf",
)


def unit_of_term(term: Term) -> Unit:
    """Return the unit of a term, by the outermost of its heads that has one.

    `MeasureOf(Angle(A, B, C))` is in degrees, and so is `LengthOf(Angle(A, B, C))`, which some
    annotations write. `LengthOf(Line(A, B))` is a length, and so is a term without such a head, as
    the letter `x`.
    """
    for part in term.walk():
        is_length = part.head in _LENGTH_HEADS and bool(part.arguments)
        if is_length and part.arguments[0].head not in ("MeasureOf", "Angle"):
            return "length"
        if part.head in _UNIT_BY_HEAD:
            return _UNIT_BY_HEAD[part.head]
        if re.fullmatch(r"[Aa]ngle ?\w+", part.head):
            return "degrees"
    return "length"


class TermReader:
    """Turns terms such as `LengthOf(Line(A, B))` into quantities of a figure.

    `drawing` is the picture of the logic form, which says which points, circles and shapes the
    terms mean. While terms are read, `assumed` collects in words what only the picture shows and
    the facts do not say.
    """

    def __init__(self, drawing: Drawing) -> None:
        self.drawing = drawing
        self.assumed: list[str] = []

    def quantity(self, term: Term) -> Quantity:
        """Return the quantity that a term measures: the distance AB for `LengthOf(Line(A, B))`.

        Raises `UnreadError` where the term is no measure that is known.
        """
        if not term.arguments:
            return self._quantity_of_text(term.head)
        rule = _RULE_BY_HEAD.get(term.head)
        if rule is None:
            raise UnreadError(f"{term} is no measure that is known")
        return rule(self, term)

    def quantities(self, term: Term) -> list[Quantity]:
        """Return the quantities that the arguments of a term measure, in order."""
        return [self.quantity(argument) for argument in term.arguments]

    def _quantity_of_text(self, text: str) -> Quantity:
        """Return what a term without arguments measures.

        It is an angle (`angle 1`), a radius (`Radius`), or an expression of numbers and letters
        (`3x + 5`). Raises `UnreadError` for any other text.
        """
        numbered = re.fullmatch(r"[Aa]ngle ?(\w+)", text)
        if numbered:
            return Unknown(f"angle {numbered[1]}")
        if text == "Radius":
            return self.radius(self.drawing.circle())
        try:
            return parse_expression(text)
        except ExpressionError as error:
            raise UnreadError(str(error)) from error

    # Lengths

    def distance(self, start: str, end: str) -> Distance:
        """Return the distance of two points. Raises `UnreadError` if the form has no such point."""
        return Distance(
            start=self.drawing.require_point(start), end=self.drawing.require_point(end)
        )

    def radius(self, circle: Circle) -> Unknown:
        """Return the radius of a circle as an unknown, whose value the solver finds."""
        return Unknown(circle.radius)

    def segment_length(self, term: Term) -> Quantity:
        """Return the length of a segment, by its two ends or by its small letter.

        `Line(m)` is the segment whose length the problem calls m. Raises `UnreadError` for any
        other name.
        """
        names = term.names
        if len(names) == 2:
            return self.distance(names[0], names[1])
        if len(names) == 1 and re.fullmatch("[a-z]", names[0]):
            return Unknown(names[0])
        raise UnreadError(f"{term} is no segment")

    def length_of(self, term: Term) -> Quantity:
        """Return the quantity of `LengthOf(...)`, whose argument is a segment, an arc or a measure.

        The length of an arc is its angle at the centre, in radians, times the radius.
        """
        inner = term.arguments[0]
        # `LengthOf(A, B)`, without a `Line` around the two ends.
        if len(term.names) == 2 and not inner.arguments:
            return self.distance(term.names[0], term.names[1])
        if not inner.arguments:
            return self.quantity(inner)
        arc = inner
        if inner.head in ("Minor", "Major"):
            arc = inner.arguments[0]
        if arc.head == "Arc":
            radius = self.radius(self.drawing.circle_of_arc(arc.names))
            radians_per_degree = Constant(math.pi / 180)
            return times(self.quantity(inner), radius, radians_per_degree)
        return self.quantity(inner)

    def circle_measure(self, head: str, circle: Circle) -> Quantity:
        """Return radius, diameter, area or circumference of a circle.

        `head` says which of them is meant: `RadiusOf`, `DiameterOf`, `AreaOf` or any other for the
        circumference.
        """
        radius = self.radius(circle)
        if head == "RadiusOf":
            return radius
        if head == "DiameterOf":
            return times(Constant(2.0), radius)
        if head == "AreaOf":
            return times(Constant(math.pi), radius, radius)
        return times(Constant(2 * math.pi), radius)

    def named_circle_measure(self, term: Term) -> Quantity:
        """Return what a term such as `RadiusOf(Circle(O))` measures of the circle that it names."""
        return self.circle_measure(term.head, self.drawing.circle(unwrap_shape(term.arguments[0])))

    def side_length(self, term: Term) -> Quantity:
        """Return the length of the side that a term such as `SideOf(Triangle(A, B, C))` means.

        The first of these that applies is taken:

        1. All sides of the shape are equal: its first side.
        2. The facts give a letter as the length of one side alone: that side.
        3. The term is `SideOf(...)`: the mean of all sides.

        Raises `UnreadError` for a leg or a base of any other shape.
        """
        shape = term.arguments[0]
        names = self.drawing.corners_of_shape(shape)
        has_equal_sides = unwrap_shape(shape).head in ("Square", "Rhombus")
        if has_equal_sides or shape.head in ("Regular", "Equilateral"):
            return self.distance(names[0], names[1])
        sides = sides_of_polygon(names)
        lettered_sides = [side for side in sides if self._has_lettered_length(side)]
        if len(lettered_sides) == 1:
            return self.distance(*lettered_sides[0])
        if term.head != "SideOf":
            raise UnreadError(f"the form does not say which side {term} is")
        # "The side" of a shape only makes sense if all sides are equal, and then it is their mean.
        perimeter = plus(*(self.distance(*side) for side in sides))
        return over(perimeter, Constant(float(len(sides))))

    def _has_lettered_length(self, side: tuple[str, str]) -> bool:
        """Tell whether a fact gives the length of a side by a letter alone, as in `AB = x`."""
        for fact in self.drawing.fact_terms:
            if fact.is_equation and fact.arguments[0].arguments:
                is_side = set(fact.arguments[0].arguments[0].names) == set(side)
                if is_side and re.fullmatch("[a-z]", fact.arguments[1].head):
                    return True
        return False

    def hypotenuse_length(self, term: Term) -> Quantity:
        """Return the length of the side of a right triangle that lies opposite its right angle."""
        names = self.drawing.corners_of_shape(term.arguments[0])
        corner = self.drawing.right_corner(names)
        legs_ends = [name for name in names if name != corner]
        return self.distance(legs_ends[0], legs_ends[1])

    def distance_from_line(self, term: Term) -> Quantity:
        """Return how far a point is from a line: `DistanceOf(O, Line(A, B))`."""
        point, line = term.arguments
        start, end = line.names
        return LineDistance(point=point.head, start=start, end=end)

    def height(self, term: Term) -> Quantity:
        """Return the height of a shape that a term such as `HeightOf(Trapezoid(A, B, C, D))` names.

        The first of these that exists is taken:

        1. A perpendicular that is drawn.
        2. A segment that a fact calls a height.
        3. For a shape with four corners, the distance of its base from the opposite side.
        4. For an equilateral triangle, the distance of any corner from the opposite side.

        Raises `UnreadError` where there is none of them.
        """
        drawn = drawn_height(self.drawing)
        if drawn is not None:
            return self.distance(*drawn)
        names = self.drawing.corners_of_shape(term.arguments[0])
        called = called_height(self.drawing)
        if called is not None:
            return self.distance(*called)
        if len(names) == 4:
            base = self.drawing.with_base_first(names)
            return LineDistance(point=base[2], start=base[0], end=base[1])
        if len(names) == 3 and self._is_equilateral(names):
            return LineDistance(point=names[0], start=names[1], end=names[2])
        raise UnreadError(f"the form does not say which height {term} is")

    def _is_equilateral(self, corners: Sequence[str]) -> bool:
        """Return whether a fact calls a triangle equilateral or regular."""
        return any(
            fact.head in ("Equilateral", "Regular") and set(fact.arguments[0].names) == set(corners)
            for fact in self.drawing.fact_terms
        )

    def median(self, term: Term) -> Quantity:
        """Return the length of the median of a trapezoid: the mean of its parallel sides.

        Raises `UnreadError` for a triangle, which has three medians.
        """
        names = self.drawing.corners_of_shape(term.arguments[0])
        if len(names) != 4:
            raise UnreadError(f"the form does not say which median {term} is")
        a, b, c, d = self.drawing.with_base_first(names)
        return over(plus(self.distance(a, b), self.distance(c, d)), Constant(2.0))

    def scale_factor(self, term: Term) -> Quantity:
        """Return the ratio of two similar shapes.

        For two polygons it is the quotient of their first sides. For two points, a point and its
        image, it is the quotient of their distances from a centre on the same line. Raises
        `UnreadError` unless the term has two shapes.
        """
        if len(term.arguments) != 2:
            raise UnreadError(f"{term} has not two shapes")
        first = unwrap_shape(term.arguments[0]).names
        second = unwrap_shape(term.arguments[1]).names
        drawing = self.drawing
        are_points = len(first) == len(second) == 1 and {*first, *second} <= set(drawing.points)
        if are_points:
            (point,) = first
            (image,) = second
            for centre in drawing.points:
                is_further_point = centre not in (point, image)
                if is_further_point and drawing.are_on_one_line((centre, point, image)):
                    return over(self.distance(centre, image), self.distance(centre, point))
        if len(first) < 3 or len(first) != len(second):
            first, second = drawing.similar_pair()
        first_side = self.distance(first[0], first[1])
        second_side = self.distance(second[0], second[1])
        # In Geometry3K the coloured shape that is named first is the right one of the two.
        if any(argument.head in COLOUR_HEADS for argument in term.arguments):
            return over(second_side, first_side)
        return over(first_side, second_side)

    # Angles and arcs

    def drawn_turn(self, first: str, corner: str, last: str) -> int:
        """Return which way the picture turns from the ray to `first` to the ray to `last`.

        Both rays begin at `corner`. The result is 1 for anticlockwise and -1 for clockwise. It is 0
        where the corner is too flat to show it, or where a point has no place.
        """
        places = self.drawing.places
        if not {first, corner, last} <= places.keys():
            return 0
        bend = sine(places[first] - places[corner], places[last] - places[corner])
        if abs(bend) < _MIN_SINE_OF_TURN:
            return 0
        return 1 if bend > 0 else -1

    def angle_between(self, first: str, corner: str, last: str) -> Angle:
        """Return the angle at `corner` between the rays to `first` and `last`.

        It has the way that the picture turns it, so that a mirrored figure is no solution.
        """
        names = [self.drawing.require_point(name) for name in (first, corner, last)]
        return Angle(first=names[0], corner=names[1], last=names[2], turn=self.drawn_turn(*names))

    def angle(self, term: Term) -> Quantity:
        """Return the angle that a term names by three points, its corner, a number or a letter.

        The angle of a number or a letter, such as `Angle(1)`, is an unknown of its own. `Angle($)`
        is the angle at the centre of a circle over one side of a regular polygon.
        """
        names = term.names
        if names == ["$"]:
            return self.central_angle()
        if len(names) == 1:
            (name,) = names
            is_number_or_letter = re.fullmatch(r"\d+|[a-z]", name) is not None
            # A small letter may also be a point of the picture.
            if is_number_or_letter and name not in self.drawing.neighbours:
                return Unknown(f"angle {name}")
        return self.angle_between(*self.drawing.points_of_angle(term))

    def central_angle(self) -> Quantity:
        """Return the angle at the centre of a circle over one side of the regular polygon in it.

        Raises `UnreadError` where no fact inscribes a regular polygon in a circle.
        """
        for term in self.drawing.terms:
            if term.head != "InscribedIn" or len(term.arguments) != 2:
                continue
            shape = term.arguments[0]
            if shape.head in ("Regular", "Square"):
                circle = self.drawing.circle(term.arguments[1])
                names = self.inscribed_corners(shape, circle)
                return self.angle_between(names[0], circle.centre, names[1])
        raise UnreadError("the form does not say which angle is meant")

    def inscribed_corners(self, shape: Term, circle: Circle) -> list[str]:
        """Return the corners of a shape that is inscribed in a circle.

        For a `Polygon` in a circle whose centre has a place, they are the points of the circle at
        which two or more drawn lines meet, in their order round the circle. For any other shape, or
        where fewer than three such points are found, they are the result of `corners_of_shape`.
        """
        on_circle = [name for name in circle.points if name in self.drawing.places]
        if circle.centre not in self.drawing.places or unwrap_shape(shape).head != "Polygon":
            return self.drawing.corners_of_shape(shape)
        centre = self.drawing.places[circle.centre]
        corners = [name for name in on_circle if len(self.drawing.neighbours.get(name, ())) >= 2]
        if len(corners) < 3:
            return self.drawing.corners_of_shape(shape)
        return sorted(corners, key=lambda name: phase(self.drawing.places[name] - centre))

    def arc_angle(self, term: Term) -> Quantity:
        """Return the angle of an arc at the centre, in degrees.

        `Arc(A, B)` is the shorter way round from A to B, and `Arc(A, C, B)` is the way through C.
        Some annotations write the centre in place of C; then it is the shorter way. Without a place
        of C it is the longer way. Raises `UnreadError` where C has a place and another point none.
        """
        names = term.names
        if len(names) not in (2, 3):
            raise UnreadError(f"{term} is no arc")
        circle = self.drawing.circle_of_arc(names)
        if len(names) == 2 or names[1] == circle.centre:
            return self.angle_between(names[0], circle.centre, names[-1])
        if names[1] not in self.drawing.places:
            return minus(Constant(360.0), self.angle_between(names[0], circle.centre, names[2]))
        if not {*names, circle.centre} <= self.drawing.places.keys():
            raise UnreadError(f"the form does not say which way round {term} goes")
        centre = self.drawing.places[circle.centre]
        first, middle, last = [self.drawing.places[name] - centre for name in names]
        # These are anticlockwise turns from the first point, up to a full turn: atan2(u × w, u · w)
        # is the angle from u to w. The arc is anticlockwise if the middle point comes before the
        # last one on this way.
        turn_to_middle = math.atan2(cross(first, middle), dot(first, middle)) % math.tau
        turn_to_last = math.atan2(cross(first, last), dot(first, last)) % math.tau
        turn = 1 if turn_to_middle < turn_to_last else -1
        return Sweep(first=names[0], corner=circle.centre, last=names[2], turn=turn)

    def minor_arc_angle(self, term: Term) -> Quantity:
        """Return the angle at the centre over the shorter arc between two points.

        The term is `Minor(Arc(A, B))` or `Major(Arc(A, B))`. For a major arc the caller subtracts
        the result from 360.
        """
        names = term.arguments[0].names
        if len(names) < 2:
            raise UnreadError(f"{term} is no arc")
        return self.angle_between(names[0], self.drawing.circle_of_arc(names).centre, names[-1])

    def inner_quantity(self, term: Term) -> Quantity:
        """Return the quantity inside `MeasureOf(...)`, since an angle or an arc is its measure."""
        return self.quantity(term.arguments[0])

    # Areas and perimeters

    def polygon_measure(self, head: str, corners: Sequence[str]) -> Quantity:
        """Return the perimeter of a polygon for the head `PerimeterOf`, else its area.

        `corners` are in the order round the polygon.
        """
        if head == "PerimeterOf":
            return plus(*(self.distance(*side) for side in sides_of_polygon(corners)))
        return Area(corners=tuple(corners))

    # Arithmetic

    def ratio(self, term: Term) -> Quantity:
        """Return the quotient of the two arguments of `RatioOf(...)` or `Div(...)`.

        A single argument, as in `RatioOf(SinOf(A))`, is a ratio already. The quotient of two shapes
        is their scale factor.
        """
        if len(term.arguments) == 1:
            return self.quantity(term.arguments[0])
        if any(unwrap_shape(argument).head in CORNER_COUNT_BY_SHAPE for argument in term.arguments):
            return self.scale_factor(term)
        parts = self.quantities(term)
        return over(parts[0], parts[1])

    def sum(self, term: Term) -> Quantity:
        """Return the sum of all arguments.

        A circle without a measure has that of the first argument: in
        `SumOf(CircumferenceOf(Circle(A)), Circle(B))` both circles mean their circumference.
        """
        first = term.arguments[0]
        parts = []
        for argument in term.arguments:
            if argument.head in CIRCLE_HEADS and first.head not in CIRCLE_HEADS:
                argument = Term(head=first.head, arguments=(argument,))
            parts.append(self.quantity(argument))
        return plus(*parts)

    def average(self, term: Term) -> Quantity:
        """Return the mean of all arguments."""
        return over(self.sum(term), Constant(float(len(term.arguments))))

    def whole_power(self, term: Term) -> Quantity:
        """Return the first argument to the power of the second one, which has to be a number.

        Raises `UnreadError` for another exponent, and for one that is too large.
        """
        exponent = number_in_text(term.arguments[-1].head)
        if len(term.arguments) != 2 or exponent is None or abs(exponent) > MAX_EXPONENT:
            raise UnreadError(f"{term} is no power that is known")
        return power(self.quantity(term.arguments[0]), exponent)

    def product(self, term: Term) -> Quantity:
        """Return the product of all arguments."""
        return times(*self.quantities(term))

    def difference(self, term: Term) -> Quantity:
        """Return the first argument minus the second. Raises `UnreadError` unless there are two."""
        parts = self.quantities(term)
        if len(parts) != 2:
            raise UnreadError(f"{term} has not two parts")
        return minus(parts[0], parts[1])

    def half(self, term: Term) -> Quantity:
        """Return half of the argument."""
        return over(self.quantity(term.arguments[0]), Constant(2.0))

    def cotangent(self, term: Term) -> Quantity:
        """Return the cotangent of an angle, as 1 over its tangent."""
        tangent = Term(head="TanOf", arguments=term.arguments)
        return over(Constant(1.0), self.trigonometric(tangent))

    def trigonometric(self, term: Term) -> Quantity:
        """Return sine, cosine or tangent of an angle, as in `SinOf(Angle(A, B, C))`.

        A capital letter alone, as in `SinOf(A)`, names the corner of the angle.
        """
        names: dict[str, Function] = {"SinOf": "sin", "CosOf": "cos", "TanOf": "tan"}
        inner = term.arguments[0]
        if inner.arguments or len(inner.head) > 1 or not inner.head.isupper():
            return Arithmetic(function=names[term.head], parts=(self.quantity(inner),))
        angle = self.angle_between(
            *self.drawing.points_of_angle(Term(head="Angle", arguments=(inner,)))
        )
        return Arithmetic(function=names[term.head], parts=(angle,))


_Rule = Callable[[TermReader, Term], Quantity]
_RULE_BY_HEAD: dict[str, _Rule] = {
    "Line": TermReader.segment_length,
    "LengthOf": TermReader.length_of,
    "RadiusOf": TermReader.named_circle_measure,
    "DiameterOf": TermReader.named_circle_measure,
    "CircumferenceOf": TermReader.named_circle_measure,
    "SideOf": TermReader.side_length,
    "LegOf": TermReader.side_length,
    "BaseOf": TermReader.side_length,
    "HypotenuseOf": TermReader.hypotenuse_length,
    "HeightOf": TermReader.height,
    "AltitudeOf": TermReader.height,
    "DistanceOf": TermReader.distance_from_line,
    "ScaleFactorOf": TermReader.scale_factor,
    "Angle": TermReader.angle,
    "Arc": TermReader.arc_angle,
    "Minor": TermReader.minor_arc_angle,
    "Major": lambda term_reader, term: minus(Constant(360.0), term_reader.minor_arc_angle(term)),
    "MeasureOf": TermReader.inner_quantity,
    "AreaOf": area_or_perimeter,
    "PerimeterOf": area_or_perimeter,
    "RatioOf": TermReader.ratio,
    "Div": TermReader.ratio,
    "SumOf": TermReader.sum,
    "Add": TermReader.sum,
    "Mul": TermReader.product,
    "Sub": TermReader.difference,
    "HalfOf": TermReader.half,
    "SquareOf": lambda term_reader, term: power(term_reader.quantity(term.arguments[0]), 2.0),
    "SqrtOf": lambda term_reader, term: power(term_reader.quantity(term.arguments[0]), 0.5),
    "SinOf": TermReader.trigonometric,
    "CosOf": TermReader.trigonometric,
    "TanOf": TermReader.trigonometric,
    "CotOf": TermReader.cotangent,
    "AverageOf": TermReader.average,
    "Pow": TermReader.whole_power,
    "MedianOf": TermReader.median,
}
