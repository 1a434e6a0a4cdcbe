"""The points and circles of a form, with the places that the picture or the facts give them.

Places are complex numbers with y upwards, in pixels of the picture.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

from adora_vl.geometry.logic_form import LogicForm, Term
from adora_vl.geometry.shapes import (
    CORNER_COUNT_BY_SHAPE,
    Circle,
    PointInPolygon,
    SeparateArcs,
    UnreadError,
    parse_terms,
    unwrap_shape,
)
from adora_vl.geometry.vectors import cross, dot, extent_of

_POINT_PATTERN = re.compile(r"[A-Z]'?|point_\d+")
# A point seems to lie on a segment if it is less than this share of the segment's length beside it.
_MAX_BEND_OF_STRAIGHT = 0.025
# The foot of a perpendicular is drawn only if its top is at least this share of the segment's
# length away from the segment.
_MIN_HEIGHT_SHARE = 0.05
# How far to the right the copy of a figure is placed, in widths of the figure: clear of it.
_COPY_OFFSET_IN_WIDTHS = 1.6
_MIN_LENGTH = 1e-9  # pixels; a segment that is shorter has no direction
# A point that is more than this share of a segment's length beside it cannot be meant to be on it.
_MAX_OFFSET_FROM_LINE = 1.0


class _CircleName(NamedTuple):
    """How facts name a circle: by its centre and its radius, which is empty where none is named."""

    centre: str
    radius: str


def _names_corners(term: Term) -> bool:
    """Tell whether a term is a shape with all its corners.

    A `Polygon` may have any number of them.
    """
    if term.head == "Polygon":
        return len(term.names) > 2
    return len(term.names) == CORNER_COUNT_BY_SHAPE.get(term.head)


class DrawnPoints:
    """The points and circles of a logic form: `places` has where each point is drawn, in pixels.

    Attributes:
        form: The logic form.
        fact_terms: Its facts as terms.
        question_terms: Its question as terms.
        terms: Both, facts first.
        places: The place of each point as a complex number with y upwards.
        imagined_points: Points whose place is guessed from facts, not annotated.
        copied_pair: Two similar shapes, if one of them was placed beside the other as its copy;
            else None.
        neighbours: For each point the points that a drawn line joins it with.
        points_on_segment: The points between the ends of each segment, by these ends.
        collinear_as_drawn: Points (B, A, C). The picture shows B between A and C, and no fact does.
        corners_by_shape: The corners of the first shape of each kind that a fact names.
        centre_by_alias: The centre of the only circle, by other names that the question gives it:
            {"O": "A"} where the picture calls it A, and the question asks for circle O.
    """

    def __init__(self, form: LogicForm) -> None:
        self.form = form
        self.fact_terms = list(parse_terms(form.facts))
        self.question_terms = list(parse_terms(form.question))
        self.terms = [*self.fact_terms, *self.question_terms]
        self.places = {name: complex(x, -y) for name, (x, y) in form.points.items()}
        self.imagined_points: set[str] = set()
        self.copied_pair: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        self.neighbours: dict[str, set[str]] = defaultdict(set)
        for start, end in form.lines:
            self.neighbours[start].add(end)
            self.neighbours[end].add(start)
        self.points_on_segment = self._points_on_segments()
        self.circles = self._circles()
        # The order matters: `_imagine_places` needs the points on segments, and
        # `_find_collinear_as_drawn` needs all places.
        self._imagine_places()
        self.collinear_as_drawn = self._find_collinear_as_drawn()
        self.corners_by_shape = self._corners_by_shape()

    def _points_on_segments(self) -> dict[tuple[str, str], set[str]]:
        """Map the ends of each segment to the points that facts put between them."""
        points_on_segment: dict[tuple[str, str], set[str]] = defaultdict(set)
        for term in self.terms:
            if term.head != "PointLiesOnLine" or len(term.arguments) != 2:
                continue
            point, line = term.arguments
            names = [point.head, *line.names]
            are_three_points = len(set(names)) == len(names) == 3
            if are_three_points and all(map(self._may_be_point, names)):
                points_on_segment[line.names[0], line.names[1]].add(point.head)
        return points_on_segment

    def _corners_by_shape(self) -> dict[str, tuple[str, ...]]:
        """Map each kind of shape to the corners of the first one that a fact names by them."""
        corners_by_shape: dict[str, tuple[str, ...]] = {}
        for term in self.terms:
            for shape in (term, *term.arguments):
                if len(shape.names) == CORNER_COUNT_BY_SHAPE.get(shape.head):
                    corners_by_shape.setdefault(shape.head, tuple(shape.names))
        return corners_by_shape

    def _may_be_point(self, name: str) -> bool:
        """Tell whether a name can be a point: a capital letter, or a name that the picture has."""
        is_drawn = name in self.form.points or name in self.neighbours
        return is_drawn or _POINT_PATTERN.fullmatch(name) is not None

    @cached_property
    def points(self) -> list[str]:
        """All points of the form, in an order that depends on their names alone.

        An alias of a centre is no point of its own.
        """
        names = {*self.form.points, *self.neighbours}
        for circle in self.circles:
            names.update((circle.centre, *circle.points))
        for term in self.terms:
            names.update(
                part.head
                for part in term.walk()
                if not part.arguments and _POINT_PATTERN.fullmatch(part.head)
            )
        return sorted(names - self.centre_by_alias.keys())

    @cached_property
    def centre_by_alias(self) -> dict[str, str]:
        """The centre of the only circle, by each other name that the question has for it.

        For example, {"O": "A"} where the question asks for the area of circle O, and the picture
        calls the centre A and has no point O. Empty where circles have different centres, since
        nothing says which of them is meant.
        """
        centres = {circle.centre for circle in self.circles}
        if len(centres) != 1:
            return {}
        (centre,) = centres
        drawn_names = {centre, *self.form.points, *self.neighbours}
        for circle in self.circles:
            drawn_names.update(circle.points)
        names_in_question = {
            part.names[0]
            for term in self.question_terms
            for part in term.walk()
            if part.head == "Circle" and part.names and _POINT_PATTERN.fullmatch(part.names[0])
        }
        return dict.fromkeys(sorted(names_in_question - drawn_names), centre)

    def require_point(self, name: str) -> str:
        """Return the name of a point as the picture has it, also for an alias of a centre.

        Raises `UnreadError` where the form has no such point.
        """
        name = self.centre_by_alias.get(name, name)
        if name not in self._point_names:
            raise UnreadError(f"there is no point {name}")
        return name

    def check_points(self, names: Iterable[str]) -> None:
        """Raise `UnreadError` where one of the points is not in the form."""
        for name in names:
            if name not in self._point_names:
                raise UnreadError(f"there is no point {name}")

    @cached_property
    def _point_names(self) -> set[str]:
        """The names of all points, for quick look-ups."""
        return set(self.points)

    def _circles(self) -> list[Circle]:
        """Return the circles of the form with their points.

        Two circles around O have the radii `radius O` and `radius O 2`.
        """
        circles = []
        count_by_centre: dict[str, int] = defaultdict(int)
        for circle_name, points in self._points_by_circle().items():
            centre = circle_name.centre
            if not _POINT_PATTERN.fullmatch(centre):
                continue
            count_by_centre[centre] += 1
            number = count_by_centre[centre]
            radius = f"radius {centre}" if number == 1 else f"radius {centre} {number}"
            circles.append(Circle(centre=centre, radius=radius, points=tuple(points)))
        return circles

    def _points_by_circle(self) -> dict[_CircleName, list[str]]:
        """Map each circle of the form to the points that facts put on it.

        Facts `PointLiesOnCircle` are read in this order:

        1. A, Circle(O, r): A is on the circle with the centre O and the radius r
        2. A, Circle(O): A is on the first circle with the centre O, which is new if there is none
        3. A, Circle($): A is on the only circle

        Before the second kind the circles that the form lists are added, with no points yet.
        """
        points_by_circle: dict[_CircleName, list[str]] = {}
        facts_without_radius: list[tuple[str, str]] = []
        for term in self.terms:
            if term.head != "PointLiesOnCircle" or len(term.arguments) != 2:
                continue
            point = term.arguments[0].head
            circle = term.arguments[1]
            if len(circle.names) > 1:
                circle_name = _CircleName(centre=circle.names[0], radius=circle.names[1])
                points = points_by_circle.setdefault(circle_name, [])
                if point not in points:
                    points.append(point)
            else:
                centre = circle.names[0] if circle.names else circle.head
                facts_without_radius.append((centre, point))
        for centre in self.form.circles:
            if centre and not any(centre == listed.centre for listed in points_by_circle):
                points_by_circle[_CircleName(centre=centre, radius="")] = []
        for centre, point in facts_without_radius:
            circle_name = next(
                (listed for listed in points_by_circle if listed.centre == centre),
                _CircleName(centre=centre, radius=""),
            )
            if centre == "$" and len(points_by_circle) == 1:
                circle_name = next(iter(points_by_circle))
            points = points_by_circle.setdefault(circle_name, [])
            if point not in points and _POINT_PATTERN.fullmatch(circle_name.centre):
                points.append(point)
        return points_by_circle

    def circle(self, term: Term | None = None) -> Circle:
        """Return the circle that a term such as `Circle(O)` names.

        The first of these that fits is returned:

        1. the largest circle with this centre
        2. the only circle of the form, also for a term without a name or for no term
        3. a new circle without points around this point
        4. the largest circle, where all circles have the same centre

        Raises `UnreadError` where the form does not say which circle is meant.
        """
        name = term.names[0] if term is not None and term.names else "$"
        name = self.centre_by_alias.get(name, name)
        centred = [circle for circle in self.circles if circle.centre == name]
        if centred:
            return self._outermost(centred)
        if len(self.circles) == 1:
            return self.circles[0]
        if name in self._point_names:
            return Circle(centre=name, radius=f"radius {name}", points=())
        if self.circles and len({circle.centre for circle in self.circles}) == 1:
            return self._outermost(self.circles)
        raise UnreadError("the form does not say which circle is meant")

    def _outermost(self, circles: Sequence[Circle]) -> Circle:
        """Return the largest of concentric circles, as far as the picture shows."""
        return max(circles, key=lambda circle: self.drawn_radius(circle) or 0.0)

    def drawn_radius(self, circle: Circle) -> float | None:
        """Return the radius in the picture; None where no point of the circle has a place."""
        if circle.centre not in self.places:
            return None
        centre = self.places[circle.centre]
        distances = [
            abs(self.places[name] - centre) for name in circle.points if name in self.places
        ]
        return sum(distances) / len(distances) if distances else None

    def circle_of_arc(self, points: Sequence[str]) -> Circle:
        """Return the circle that an arc lies on.

        Raises `UnreadError` where no circle has its ends, or several circles have them.
        """
        ends = {points[0], points[-1]}
        circles = [circle for circle in self.circles if ends <= set(circle.points)]
        if len(circles) > 1:
            # In the arc ACB, C is no centre but a point of the arc. So a circle around C that also
            # goes through A and B is not meant.
            circles = [circle for circle in circles if circle.centre not in points]
        if len(circles) != 1:
            raise UnreadError(
                f"the form does not say on which circle the arc {''.join(points)} lies"
            )
        return circles[0]

    def _imagine_places(self) -> None:
        """Give points without a place a place that the facts suggest.

        That is the place in a copy of a similar figure, or a place on their segment. The order
        matters: wrong places are dropped first, so that these points get a place on their segment.
        """
        self._drop_misplaced_points()
        self._copy_similar()
        # Twice, since a point may lie on a segment whose end has got its place only now.
        for _ in range(2):
            self._place_points_on_segments()

    def _drop_misplaced_points(self) -> None:
        """Drop the place of a point that is drawn far from the segment on which a fact puts it.

        Such a place is a mistake of the annotation.
        """
        for (first, last), points in sorted(self.points_on_segment.items()):
            for name in sorted(points):
                if {first, name, last} <= self.places.keys():
                    segment = self.places[last] - self.places[first]
                    # The distance of the point from the line, times the length of the segment.
                    offset = abs(cross(segment, self.places[name] - self.places[first]))
                    if offset > _MAX_OFFSET_FROM_LINE * abs(segment) ** 2:
                        del self.places[name]

    def _place_points_on_segments(self) -> None:
        """Place the points without a place on their segments, where both ends have places."""
        for (first, last), points in sorted(self.points_on_segment.items()):
            if first not in self.places or last not in self.places:
                continue
            for name in sorted(points - self.places.keys()):
                start = self.places[first]
                segment = self.places[last] - start
                if abs(segment) > _MIN_LENGTH:
                    share = self._foot_along_segment(name, first, last)
                    self.places[name] = start + segment * share
                    self.imagined_points.add(name)

    def _foot_along_segment(self, name: str, first: str, last: str) -> float:
        """Return how far along a segment a point lies, from 0 at `first` to 1 at `last`.

        For example, let the point be D on the segment AB. If a fact says that CD is perpendicular
        to another line, and C has a place, then D is the foot of the perpendicular from C on AB.
        Without such a fact D is taken to be the middle, 0.5.
        """
        start = self.places[first]
        segment = self.places[last] - start
        for term in self.fact_terms:
            has_two_ends = all(len(line.names) == 2 for line in term.arguments)
            if term.head != "Perpendicular" or not has_two_ends:
                continue
            for line in term.arguments:
                if name not in line.names or line.names[0] == line.names[1]:
                    continue
                top = next(point for point in line.names if point != name)
                if top not in self.places or top in (first, last):
                    continue
                to_top = self.places[top] - start
                # A top on the segment itself, or nearly so, has no foot. The cross product is the
                # height of the top times the length of the segment.
                if abs(cross(segment, to_top)) > _MIN_HEIGHT_SHARE * abs(segment) ** 2:
                    # The projection on the segment: 0.25 for A = 0, B = 4 and C = 1 + 2i.
                    return dot(segment, to_top) / abs(segment) ** 2
        return 0.5

    def _copy_similar(self) -> None:
        """Place a similar shape without places beside the one that has them, as its copy.

        The facts may name only the kinds of the two shapes. Then the only two polygons that other
        facts name are meant.
        """
        for term in self.terms:
            if term.head not in ("Similar", "Congruent") or len(term.arguments) != 2:
                continue
            first = tuple(unwrap_shape(term.arguments[0]).names)
            second = tuple(unwrap_shape(term.arguments[1]).names)
            if len(first) < 3 or len(first) != len(second):
                named = self.named_polygons
                if len(named) != 2 or len(named[0]) != len(named[1]):
                    continue
                first, second = named
            self.copied_pair = (first, second)
            for original, copy in ((first, second), (second, first)):
                if not set(original) <= self.places.keys() or set(copy) & self.places.keys():
                    continue
                places = [self.places[name] for name in original]
                width, _ = extent_of(places)
                for name, location in zip(copy, places, strict=True):
                    self.places[name] = location + _COPY_OFFSET_IN_WIDTHS * width
                    self.imagined_points.add(name)

    @cached_property
    def named_polygons(self) -> list[tuple[str, ...]]:
        """The polygons that facts name with all their corners, in order, each once."""
        parts = (part for term in self.terms for part in term.walk())
        corners_of_parts = (tuple(part.names) for part in parts if _names_corners(part))
        polygons = []
        # `dict.fromkeys` drops repetitions, and keeps the order.
        for corners in dict.fromkeys(corners_of_parts):
            are_different = len(set(corners)) == len(corners)
            if are_different and all(map(self._may_be_point, corners)):
                polygons.append(corners)
        return polygons

    def circles_in_polygons(self) -> Iterator[PointInPolygon]:
        """Yield the centres of circles that facts inscribe in polygons."""
        for term in self.terms:
            if term.head not in ("InscribedIn", "CircumscribedTo") or len(term.arguments) != 2:
                continue
            # `InscribedIn(Circle(O), ...)`, but `CircumscribedTo(..., Circle(O))`.
            circle, polygon = term.arguments
            if term.head == "CircumscribedTo":
                polygon, circle = term.arguments
            is_named_circle = circle.head == "Circle" and bool(circle.names)
            corners = tuple(polygon.names)
            if is_named_circle and corners in self.named_polygons:
                yield PointInPolygon(point=circle.names[0], corners=corners)

    def separate_arcs(self) -> list[SeparateArcs]:
        """Return the pairs of arcs of given sizes that have no common end.

        For example, facts give the sizes of the arcs AC and BD of one circle. Where no picture
        shows them, these arcs lie beside each other: a person who gives their sizes does not mean
        arcs that overlap.
        """
        centre_by_ends: dict[tuple[str, str], str] = {}
        equations = [fact for fact in self.fact_terms if fact.head == "Equals"]
        for arc in (part for fact in equations for part in fact.walk()):
            if arc.head == "Arc" and len(arc.names) == 2:
                with suppress(UnreadError):
                    centre = self.circle_of_arc(arc.names).centre
                    centre_by_ends[arc.names[0], arc.names[1]] = centre
        return [
            SeparateArcs(centre=centre_by_ends[first], first=first, second=second)
            for first, second in combinations(centre_by_ends, 2)
            if centre_by_ends[first] == centre_by_ends[second] and not set(first) & set(second)
        ]

    def _find_collinear_as_drawn(self) -> list[tuple[str, str, str]]:
        """Return the points that the picture alone shows on a line, each as (B, A, C).

        The lines AB, BC and AC are drawn, and B seems to lie on AC between A and C, but no fact
        says so. B is also added to the points on AC in `points_on_segment`.
        """
        straight = []
        for first, last in self.form.lines:
            for middle in sorted(self.neighbours[first] & self.neighbours[last]):
                if not {first, middle, last} <= self.places.keys():
                    continue
                first_to_middle = self.places[middle] - self.places[first]
                middle_to_last = self.places[last] - self.places[middle]
                length = abs(self.places[last] - self.places[first])
                is_listed = any(
                    middle in self.points_on_segment.get(ends, set())
                    for ends in ((first, last), (last, first))
                )
                is_between = dot(first_to_middle, middle_to_last) > 0
                # The cross product is the distance of B from the line AC, times the length of AC.
                offset = abs(cross(first_to_middle, middle_to_last))
                is_straight = offset < _MAX_BEND_OF_STRAIGHT * length**2
                if is_between and is_straight and not is_listed:
                    self.points_on_segment[first, last].add(middle)
                    straight.append((middle, first, last))
        return straight
