"""How much polygons of a picture look like their kind, or like each other."""

from __future__ import annotations

import math
from cmath import phase
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from adora_vl.geometry.logic_form import inner_names
from adora_vl.geometry.regions import Regions
from adora_vl.geometry.shapes import UnreadError
from adora_vl.geometry.vectors import cosine, sine

# Shapes that differ by more are not meant to be similar: 45 degrees in all, or ratios of sides that
# spread by a half in their logarithms.
_MAX_UNLIKENESS = 1.5
_UNLIKENESS_STEP = 0.15  # step in which a polygon's likeness to its kind is counted
# What makes two shapes unlike: 30 degrees of angles, or a third in the logarithms of sides' ratios.
_DEGREES_PER_UNLIKENESS = 30.0
_WEIGHT_OF_SPREAD = 3.0
_MAX_POLYGONS_COMPARED = 80  # polygons of a crowded picture whose pairs are compared


class _MatchedPolygons(NamedTuple):
    """How unlike two polygons are, and their corners in the same order."""

    unlikeness: float
    first: list[str]
    second: list[str]


class Likeness(Regions):
    """Tells how much the polygons of a picture look like their kind, or like each other.

    `places` has where each point is drawn, and `neighbours` the points that a drawn line joins it
    with. `polygons` are the polygons of the picture, each as its corners.
    """

    def _most_alike_polygon(self, kind: str, corner_count: int) -> list[str] | None:
        """Return the corners of the drawn polygon that looks most like a kind such as `Kite`.

        It has `corner_count` corners. Of equally alike polygons it is the largest. Returns None
        where no polygon has so many corners.
        """
        polygons = [names for names in self.polygons if len(names) == corner_count]
        if not polygons:
            return None

        def rank(names: list[str]) -> tuple[int, float, list[str]]:
            """Return what polygons are ranked by: likeness in steps, size, and at last names."""
            steps_unlike = round(self._unlikeness_to_kind(kind, names) / _UNLIKENESS_STEP)
            return steps_unlike, -abs(self.signed_area(names)), names

        return min(polygons, key=rank)

    def _unlikeness_to_kind(self, kind: str, corners: Sequence[str]) -> float:
        """Return how far a drawn quadrilateral is from its kind; 0 for any other polygon.

        It is a sum over pairs of sides: of sines where they should be parallel, of cosines where
        they should be perpendicular, and of logarithms of their ratio where they should be equal.
        """
        if len(corners) != 4:
            return 0.0
        a, b, c, d = [self.places[name] for name in corners]
        sides = [b - a, c - b, d - c, a - d]
        lengths = [abs(side) for side in sides]
        # Parallel sides have the sine 0.
        sines_of_opposite_sides = [
            abs(sine(sides[0], sides[2])),
            abs(sine(sides[1], sides[3])),
        ]
        unlikeness = 0.0
        if kind in ("Parallelogram", "Rectangle", "Rhombus", "Square"):
            unlikeness += sum(sines_of_opposite_sides)
        if kind in ("Rectangle", "Square"):
            unlikeness += abs(cosine(sides[0], sides[1]))
        if kind in ("Rhombus", "Square"):
            unlikeness += abs(math.log(lengths[0] / lengths[1]))
        if kind == "Trapezoid":
            unlikeness += min(sines_of_opposite_sides)
        if kind == "Kite":
            # The equal sides meet at two opposite corners, the first and third or the others.
            ratios = [abs(math.log(lengths[i] / lengths[(i + 1) % 4])) for i in range(4)]
            unlikeness += min(ratios[0] + ratios[2], ratios[1] + ratios[3])
        return unlikeness

    def similar_pair(self) -> tuple[list[str], list[str]]:
        """Return the corners of two drawn shapes that are meant to be similar, in the same order.

        The first of these that exists is taken:

        1. A shape, and another one that was placed as its copy.
        2. Two shapes whose angles are equal one by one in the facts.
        3. The two shapes that look most alike.

        Raises `UnreadError` where no two shapes look alike.
        """
        if self.copied_pair is not None:
            first_copied, second_copied = self.copied_pair
            return list(first_copied), list(second_copied)
        marked_pair = self._marked_pair()
        if marked_pair is not None:
            return marked_pair
        # Regions may give the same polygon several times, beginning at other corners.
        polygon_by_corners = {
            tuple(sorted(names)): names for names in self.polygons if len(names) > 2
        }
        polygons = list(polygon_by_corners.values())[:_MAX_POLYGONS_COMPARED]
        drawn_points = {name for name in self.neighbours if name in self.places}
        best: _MatchedPolygons | None = None
        for first, second in combinations(polygons, 2):
            # Each drawn point is a corner of one of the two that are meant.
            has_all_points = drawn_points <= {*first, *second}
            if len(first) != len(second) or not has_all_points:
                continue
            match = self._match_corners(first, second)
            if best is None or match.unlikeness < best.unlikeness:
                best = match
        if best is None or best.unlikeness >= _MAX_UNLIKENESS:
            raise UnreadError("the picture does not show which shapes are similar")
        return best.first, best.second

    def _marked_pair(self) -> tuple[list[str], list[str]] | None:
        """Return the corners of two polygons whose angles facts make equal one by one, or None.

        Only a picture without some of their places needs this, since the polygons cannot be
        compared.
        """
        partner_of_corner: dict[str, str] = {}
        for fact in self.fact_terms:
            if fact.is_equation:
                left_angle = inner_names(fact.arguments[0], "MeasureOf")
                right_angle = inner_names(fact.arguments[1], "MeasureOf")
                if len(left_angle) == 3 and len(right_angle) == 3:
                    partner_of_corner[left_angle[1]] = right_angle[1]
        every_point_has_a_place = self.neighbours.keys() <= self.places.keys()
        if len(partner_of_corner) < 3 or every_point_has_a_place:
            return None
        # Walk along drawn lines from corner to corner, which gives their order round the polygon.
        path = [min(partner_of_corner)]
        while True:
            next_corners = [
                name
                for name in sorted(self.neighbours[path[-1]])
                if name in partner_of_corner and name not in path
            ]
            if not next_corners:
                break
            path.append(next_corners[0])
        is_closed = path[0] in self.neighbours[path[-1]]
        if len(path) < len(partner_of_corner) or not is_closed:
            return None
        return path, [partner_of_corner[name] for name in path]

    def _match_corners(self, first: list[str], second: list[str]) -> _MatchedPolygons:
        """Match the corners of two polygons so that they are as little unlike as possible.

        Each corner of the second polygon is tried as the partner of the first polygon's first
        corner, clockwise and anticlockwise.
        """
        best: _MatchedPolygons | None = None
        for direction in (second, second[::-1]):
            for start in range(len(direction)):
                order = direction[start:] + direction[:start]
                unlikeness = self._unlikeness_of_pair(first, order)
                # Among equals, but for rounding, the first order stays.
                if best is None or unlikeness < best.unlikeness - 1e-6:
                    best = _MatchedPolygons(unlikeness=unlikeness, first=first, second=order)
        assert best is not None
        return best

    def _unlikeness_of_pair(self, first: Sequence[str], second: Sequence[str]) -> float:
        """Return how unlike two polygons are whose corners are partners in this order.

        Similar polygons have equal angles, and the same ratio for all pairs of sides, so it is 0
        for a polygon and one twice as large. It is a sum of two parts: the differences of all
        angles in units of 30 degrees, and 3 times the standard deviation of the ratios' logarithms.
        With logarithms a ratio and its inverse weigh alike.
        """
        first_angles, first_sides = self._angles_and_sides(first)
        second_angles, second_sides = self._angles_and_sides(second)
        pairs_of_angles = zip(first_angles, second_angles, strict=True)
        degrees_apart = sum(abs(angle - partner) for angle, partner in pairs_of_angles)
        pairs_of_sides = zip(first_sides, second_sides, strict=True)
        log_ratios = [math.log(side / partner) for side, partner in pairs_of_sides]
        unlikeness_of_angles = degrees_apart / _DEGREES_PER_UNLIKENESS
        return unlikeness_of_angles + _WEIGHT_OF_SPREAD * _standard_deviation(log_ratios)

    def _angles_and_sides(self, corners: Sequence[str]) -> tuple[list[float], list[float]]:
        """Return the drawn angles of a polygon in degrees, and the lengths of its sides."""
        places = [self.places[name] for name in corners]
        angles = []
        sides = []
        for i, location in enumerate(places):
            to_previous = places[i - 1] - location
            to_next = places[(i + 1) % len(places)] - location
            # The argument of u * conj(w) is the angle from w to u.
            turn = phase(to_previous * to_next.conjugate())
            angles.append(abs(math.degrees(turn)))
            # Never 0, since the logarithm of a ratio is taken.
            sides.append(max(abs(to_previous), 1e-9))
        return angles, sides


def _standard_deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of values, around their own mean."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
