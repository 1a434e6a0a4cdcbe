"""The picture of a form: which of its shapes, corners and sides a fact means.

Facts often name a shape only by its kind, as `Parallelogram($)` does, or an angle by its corner
alone.
"""

from __future__ import annotations

import math
from cmath import phase
from collections.abc import Collection, Sequence

from adora_vl.geometry.likeness import Likeness
from adora_vl.geometry.logic_form import Term, inner_names
from adora_vl.geometry.shapes import (
    COLOUR_HEADS,
    CORNER_COUNT_BY_SHAPE,
    UnreadError,
    sides_of_polygon,
    unwrap_shape,
)
from adora_vl.geometry.vectors import cosine, cross_each_other, sine


class Drawing(Likeness):
    """The picture of a logic form: which of its shapes, corners and sides a fact means.

    `places` has where each point is drawn, as a complex number with y upwards. `terms` are the
    facts and the question, `fact_terms` the facts alone.
    """

    def corners_of_shape(self, term: Term) -> list[str]:
        """Return the corners of the shape that a term names, in the order round the shape.

        Facts often name a shape only by its kind, as `Parallelogram($)` does. Such a shape is the
        one of that kind that another fact names with its corners, else the drawn polygon that looks
        most like the kind.

        Raises `UnreadError` where the picture does not show which shape is meant.
        """
        if term.head in COLOUR_HEADS:
            raise UnreadError(f"the form does not say where the region {term} lies")
        shape = unwrap_shape(term)
        names = shape.names
        if len(names) >= 3 and all(name in self._point_names for name in names):
            return self.in_drawing_order(names)
        if shape.head == "Shape" and names == ["A"] and not self.circles:
            return self._require_shape(self.outline(), term)
        if shape.head in self.corners_by_shape:
            return self.in_drawing_order(self.corners_by_shape[shape.head])
        corner_count = CORNER_COUNT_BY_SHAPE.get(shape.head)
        if corner_count is None:
            may_be_outline = shape.head in ("Shape", "Figure") and not self.circles
            if may_be_outline or shape.head == "Polygon":
                return self._require_shape(self.outline(), term)
            raise UnreadError(f"the form does not say which shape {term} is")
        likest = self._most_alike_polygon(shape.head, corner_count)
        if likest is not None:
            return likest
        for named_corners in self.corners_by_shape.values():
            if len(named_corners) == corner_count:
                return list(named_corners)
        return self._require_shape(corners=None, term=term)

    def _require_shape(self, corners: list[str] | None, term: Term) -> list[str]:
        """Return the corners of a shape themselves. Raises `UnreadError` where there are none."""
        if not corners:
            raise UnreadError(f"the picture does not show which shape {term} is")
        return corners

    def in_drawing_order(self, corners: Sequence[str]) -> list[str]:
        """Return corners in the order round the shape.

        They may be named crosswise, as ABCD for A, B, D, C.
        """
        corners = list(corners)
        if len(corners) < 4 or not set(corners) <= self.places.keys():
            return corners
        places = [self.places[name] for name in corners]
        sides = [(places[i - 1], places[i]) for i in range(len(corners))]
        sides_cross = any(
            cross_each_other((*side, *earlier_side))
            for i, side in enumerate(sides)
            for earlier_side in sides[:i]
        )
        if not sides_cross:
            return corners
        middle = sum(places) / len(places)
        return sorted(corners, key=lambda name: phase(self.places[name] - middle))

    def right_corner(self, corners: Sequence[str]) -> str:
        """Return the corner of a triangle with the right angle.

        It is the corner that a fact marks as right, else the one whose angle looks most like it.
        """
        for term in self.fact_terms:
            if term.head == "Perpendicular" and len(term.arguments) == 2:
                shared = set(term.arguments[0].names) & set(term.arguments[1].names)
                if len(shared) == 1 and shared <= set(corners):
                    return shared.pop()
        if not set(corners) <= self.places.keys():
            return corners[1]

        def leaning(i: int) -> float:
            """Return how far the corner is from a right angle: the cosine between its sides."""
            corner = self.places[corners[i]]
            to_previous = self.places[corners[i - 1]] - corner
            to_next = self.places[corners[(i + 1) % 3]] - corner
            return abs(cosine(to_previous, to_next))

        return corners[min(range(3), key=leaning)]

    def side_with(self, point: str, corners: Sequence[str]) -> tuple[str, str]:
        """Return the side of a polygon that a point lies on, by its two ends.

        Where no line goes through the point and a side, it is the side whose middle is nearest.
        Raises `UnreadError` where a place is missing for that.
        """
        sides = sides_of_polygon(corners)
        for side in sides:
            if self.are_on_one_line((point, *side)):
                return side
        if not {point, *corners} <= self.places.keys():
            raise UnreadError(f"the form does not say on which side {point} lies")

        def distance_to_middle(side: tuple[str, str]) -> float:
            """Return how far the point is from the middle of a side, in pixels."""
            middle = (self.places[side[0]] + self.places[side[1]]) / 2
            return abs(self.places[point] - middle)

        return min(sides, key=distance_to_middle)

    def with_base_first(self, corners: Sequence[str]) -> list[str]:
        """Return the corners of a trapezoid with the first side parallel to the third."""
        # Sets of ends, since a fact may name a side from either end.
        sides = [frozenset((corners[i], corners[(i + 1) % 4])) for i in range(4)]
        parallel_pairs = [
            {frozenset(line.names) for line in term.arguments}
            for term in self.fact_terms
            if term.head == "Parallel"
        ]
        for i in (0, 1):
            if {sides[i], sides[i + 2]} in parallel_pairs:
                return [*corners[i:], *corners[:i]]
        if not set(corners) <= self.places.keys():
            return list(corners)
        # No fact says it, so it is the pair of sides that looks more parallel.
        a, b, c, d = [self.places[name] for name in corners]
        sine_of_first_pair = abs(sine(b - a, c - d))
        sine_of_second_pair = abs(sine(c - b, d - a))
        if sine_of_first_pair > sine_of_second_pair:
            return [*corners[1:], corners[0]]
        return list(corners)

    def apex(self, corners: Sequence[str]) -> str:
        """Return the corner of an isosceles triangle at which the two sides look equal."""
        if not set(corners) <= self.places.keys():
            return corners[0]

        def difference(i: int) -> float:
            """Return how unequal the two sides at a corner are: the logarithm of their ratio."""
            corner = self.places[corners[i]]
            length_before = abs(corner - self.places[corners[i - 1]])
            length_behind = abs(corner - self.places[corners[(i + 1) % 3]])
            if not length_before or not length_behind:
                return math.inf
            return abs(math.log(length_before / length_behind))

        return corners[min(range(3), key=difference)]

    def has_stated_equal_parts(self, triangle: Sequence[str]) -> bool:
        """Tell whether a fact says already which sides or angles of a triangle are equal."""
        corners = set(triangle)
        for term in self.terms:
            if not term.is_equation:
                continue
            sides = [set(inner_names(side, "LengthOf")) for side in term.arguments]
            are_sides = all(len(side) == 2 and side <= corners for side in sides)
            if are_sides and sides[0] != sides[1]:
                return True
            angles = [inner_names(angle, "MeasureOf") for angle in term.arguments]
            if all(len(angle) == 3 and angle[1] in corners for angle in angles):
                return True
        return False

    def are_stated_equal(self, first: Collection[str], second: Collection[str]) -> bool:
        """Tell whether the facts say that two segments are equal, or give both the same length.

        Each segment is named by its two ends.
        """
        lengths: dict[frozenset[str], set[str]] = {
            frozenset(first): set(),
            frozenset(second): set(),
        }
        for term in self.fact_terms:
            if not term.is_equation:
                continue
            sides = [frozenset(inner_names(side, "LengthOf")) for side in term.arguments]
            if set(sides) == lengths.keys():
                return True
            if sides[0] in lengths and not term.arguments[1].arguments:
                lengths[sides[0]].add(term.arguments[1].head)
        return bool(lengths[frozenset(first)] & lengths[frozenset(second)])
