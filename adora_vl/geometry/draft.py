"""A logic form while its sentences are read: its facts so far and what later sentences refer to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from adora_vl.geometry.logic_form import Point, Term
from adora_vl.geometry.shapes import CORNER_COUNT_BY_SHAPE

POINT_PATTERN = r"[A-Z]'?"  # the pattern of a point's name in sentences
SHAPE_PATTERN = "|".join(name.lower() for name in CORNER_COUNT_BY_SHAPE)
ADJECTIVE_PATTERN = "regular|isosceles|right|equilateral|cyclic"  # words before a shape


class SentenceError(ValueError):
    """A sentence is not one of the grammar."""


@dataclass(frozen=True)
class SpecialTriangle:
    """A triangle that a sentence calls right or isosceles without saying which parts are meant.

    Another sentence may say it, before or behind, so it is looked at after the last one. `line` and
    `sentence` are where it stands, for the error if none does.
    """

    corners: tuple[str, ...]
    adjectives: frozenset[str]
    line: int
    sentence: str


@dataclass
class LogicFormDraft:
    """A logic form to which sentences are added: its facts, drawn lines, circles and places so far.

    `lines` has each drawn segment by its two ends, once, and `circles` the points on each circle by
    its centre. `polygons` are the shapes that sentences name, the last one last.
    `special_triangles` are those whose equal sides or right angles are still to be told.
    `line_number` and `sentence` are what is read at the moment.
    """

    facts: list[Term] = field(default_factory=list)
    question: list[Term] = field(default_factory=list)
    lines: dict[tuple[str, str], None] = field(default_factory=dict)
    circles: dict[str, list[str]] = field(default_factory=dict)
    places: dict[str, Point] = field(default_factory=dict)
    polygons: list[Term] = field(default_factory=list)
    special_triangles: list[SpecialTriangle] = field(default_factory=list)
    line_number: int = 0
    sentence: str = ""

    def draw_line(self, start: str, end: str) -> Term:
        """Note that the segment between two points is drawn, and return it as a term.

        It is noted once, in whichever order its ends are named first.
        """
        if (end, start) not in self.lines and start != end:
            self.lines[start, end] = None
        return make_term("Line", start, end)

    def draw_polygon(self, head: str, corners: Sequence[str]) -> Term:
        """Note that the sides of a polygon are drawn, and return the polygon as a term.

        `head` is its kind, such as `Triangle`, and `corners` are its corners. It becomes the last
        polygon, which a later "the triangle" means.
        """
        for i in range(len(corners)):
            self.draw_line(corners[i - 1], corners[i])
        shape = make_term(head, *corners)
        self.polygons.append(shape)
        return shape

    def add_shape(self, kind: str, corner_names: str) -> Term:
        """Add the fact that points are the corners of a shape of a kind, such as a rectangle.

        Returns the shape as a term. Raises `SentenceError` where the kind has another number of
        corners.
        """
        corners = split_point_names(corner_names)
        head = kind.capitalize()
        if len(corners) != CORNER_COUNT_BY_SHAPE[head] or len(set(corners)) != len(corners):
            raise SentenceError(
                f"a {kind} has {CORNER_COUNT_BY_SHAPE[head]} corners, and {corner_names} names {len(set(corners))}"
            )
        shape = self.draw_polygon(head, corners)
        self.facts.append(shape)
        return shape

    def last_polygon(self, kind: str | None = None) -> Term:
        """Return the polygon that was named last, of a kind such as "triangle" if one is given.

        Raises `SentenceError` where no sentence has named such a polygon.
        """
        head = kind.capitalize() if kind is not None else None
        for shape in reversed(self.polygons):
            if head in (None, "Polygon", shape.head):
                return shape
        raise SentenceError(f"it does not say which {kind or 'shape'} is meant; name its corners")

    def triangle_with(self, point: str) -> list[str]:
        """Return the corners of the only triangle that has a point as its corner.

        Raises `SentenceError` where no triangle has it, or several.
        """
        triangles = {
            frozenset(shape.names): shape.names
            for shape in self.polygons
            if len(shape.names) == 3 and point in shape.names
        }
        if len(triangles) != 1:
            raise SentenceError(f"it does not say which triangle with {point} is meant; name it")
        return next(iter(triangles.values()))

    def name_circle(self, centre: str | None) -> Term:
        """Return the circle with a centre as a term, and note the circle if it is new.

        Without a centre it is the only circle. Raises `SentenceError` where there is none, or
        several.
        """
        if centre is None:
            if len(self.circles) != 1:
                raise SentenceError("it does not say which circle is meant; name its centre")
            centre = next(iter(self.circles))
        self.circles.setdefault(centre, [])
        return make_term("Circle", centre)

    def put_on_circle(self, point: str, centre: str | None = None) -> None:
        """Add that a point lies on a circle, once. Without a centre it is the only circle."""
        name = self.name_circle(centre).names[0]
        if point not in self.circles[name]:
            self.circles[name].append(point)
            circle = make_term("Circle", name, "radius_0_0")
            self.facts.append(make_term("PointLiesOnCircle", point, circle))

    def put_arc_on_circle(self, start: str, end: str) -> None:
        """Add the fact that the ends of an arc lie on the only circle.

        Nothing is added where they lie on a circle already, or where there is no circle or several.
        """
        lie_on_circle = any({start, end} <= set(points) for points in self.circles.values())
        if not lie_on_circle and len(self.circles) == 1:
            self.put_on_circle(start)
            self.put_on_circle(end)

    def put_on_line(self, point: str, start: str, end: str) -> None:
        """Add the fact that a point lies on a segment between its ends.

        The segment and both its parts are drawn.
        """
        self.facts.append(make_term("PointLiesOnLine", point, self.draw_line(start, end)))
        self.draw_line(start, point)
        self.draw_line(point, end)

    def add_equation(self, measure: Term, size: Term) -> None:
        """Add an equation of two terms. A measure stands on its left, as in all logic forms."""
        if size.arguments and not measure.arguments:
            measure, size = size, measure
        self.facts.append(make_term("Equals", measure, size))

    def free_name(self) -> str:
        """Return a capital letter that no point has yet: O, or the first of the alphabet."""
        ends = {name for line in self.lines for name in line}
        names = {*ends, *self.circles, *self.places}
        return next(name for name in "OABCDEFGHIJKLMNPQRSTUVWXYZ" if name not in names)

    def right_corner(self, corners: Sequence[str]) -> str | None:
        """Return the corner of a triangle that a fact gives a right angle; None without one.

        The fact may say that two sides are perpendicular, that the angle is right, or that it has
        90 degrees.
        """
        for fact in self.facts:
            if fact.head == "Perpendicular":
                first_ends, second_ends = [set(line.names) for line in fact.arguments]
                shared_ends = first_ends & second_ends
                are_two_sides = first_ends | second_ends == set(corners)
                if len(shared_ends) == 1 and are_two_sides:
                    return shared_ends.pop()
            if fact.head == "RightAngle" or _gives_right_angle(fact):
                angle = next(part for part in fact.walk() if part.head == "Angle")
                # The middle one of three points, or the only one.
                corner = angle.names[len(angle.names) // 2]
                if corner in corners and set(angle.names) <= set(corners):
                    return corner
        return None

    def has_equal_parts(self, corners: Sequence[str]) -> bool:
        """Tell whether facts make two sides or two angles of a triangle equal.

        They may say so in an equation, or give both the same size.
        """
        # A set, since a fact that is given twice makes no two parts equal.
        sized_parts: set[tuple[frozenset[str], str]] = set()
        for fact in self.facts:
            if not fact.is_equation:
                continue
            parts = [_corners_of_measured_part(side, corners) for side in fact.arguments]
            if all(parts) and parts[0] != parts[1]:
                return True
            if parts[0] and not fact.arguments[1].arguments:
                size = f"{fact.arguments[0].head} {fact.arguments[1].head}"
                sized_parts.add((parts[0], size))
        distinct_sizes = {size for _, size in sized_parts}
        return len(distinct_sizes) < len(sized_parts)


def _gives_right_angle(fact: Term) -> bool:
    """Tell whether a fact gives an angle named by points as 90 degrees."""
    if not fact.is_equation or fact.arguments[1].head not in ("90", "90.0"):
        return False
    return fact.arguments[0].head == "MeasureOf" and fact.arguments[0].arguments[0].head == "Angle"


def _corners_of_measured_part(measure: Term, corners: Sequence[str]) -> frozenset[str]:
    """Return the corners that name a side or an angle of a triangle.

    `measure` may be any term; the result is empty where it measures no part of the triangle with
    these `corners`. An angle is told by its corner alone.
    """
    if measure.head not in ("LengthOf", "MeasureOf"):
        return frozenset()
    names = measure.arguments[0].names
    if not names or not set(names) <= set(corners):
        return frozenset()
    # An angle is told from the others by its corner, which stands in the middle.
    return frozenset(names) if measure.head == "LengthOf" else frozenset(names[len(names) // 2])


def make_term(head: str, *arguments: str | Term) -> Term:
    """Make a term from its head and its arguments, which are names or terms."""
    parts = tuple(Term(head=part) if isinstance(part, str) else part for part in arguments)
    return Term(head=head, arguments=parts)


def split_point_names(joined_names: str) -> list[str]:
    """Return the points of a name such as `ABC`."""
    return re.findall(POINT_PATTERN, joined_names)


def polygon_kind(corner_names: str) -> str:
    """Return what a polygon with these corners is called by their number, such as "triangle"."""
    # From three corners on; shapes with more than eight have no name that pupils use.
    kinds = ("triangle", "quadrilateral", "pentagon", "hexagon", "heptagon", "octagon")
    count = len(split_point_names(corner_names))
    return kinds[count - 3] if 3 <= count <= 8 else "polygon"
