"""The kind of a figure: order on lines, turns at corners, crossings, as the picture or words say.

Figures of another kind fulfil the same facts, such as a pentagram for a pentagon.
"""

from __future__ import annotations

import math
from cmath import phase
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np

from adora_vl.geometry.drawing import Drawing
from adora_vl.geometry.layout import Vector
from adora_vl.geometry.shapes import PointInPolygon, SeparateArcs, sides_of_polygon
from adora_vl.geometry.system import System
from adora_vl.geometry.vectors import cross, cross_each_other, dot, extent_of, sine

FAULTS_OF_COLLAPSE = 10  # faults of a figure in which points fall together
_MIN_SEGMENT_SHARE = 0.015  # share of the figure's size; a shorter segment has fallen together
_MIN_BEND = 1e-3  # radians; a corner that bends less does not count as a corner
_MAX_SEGMENTS_COMPARED = 30  # from this number of segments on their pairs are not compared
_MIN_SINE_OF_CORNER = 0.2  # a drawn corner with a smaller sine is too flat to be compared


class DrawnTurn(NamedTuple):
    """A corner that the picture bends visibly.

    `bend` is the sine of the angle from the first side to the last, positive against the clock.
    """

    first: str
    corner: str
    last: str
    bend: float


class KindOfFigure:
    """What the picture of a form shows of order, turns and crossings, to compare figures with.

    Attributes:
        segments: The drawn segments, by their ends.
        used_points: The points of segments and circles; only they are compared.
        point_orders: The points of each line in the order in which they lie on it.
        drawn_turns: The corners that the picture bends.
        uncrossed_pairs: The pairs of segments that do not cross in the picture, as four ends.
        convex_polygons: Polygons that go round once. This and the following are empty where there
            is a picture, since it shows them.
        inner_points: Points that lie inside polygons.
        separate_arcs: Pairs of arcs that lie beside each other.
    """

    def __init__(self, drawing: Drawing, system: System, places: Mapping[str, complex]) -> None:
        self.drawing = drawing
        self.system = system
        self.places = places
        self.segments = sorted({line for line in drawing.form.lines if line[0] != line[1]})
        points_on_circles = {name for circle in drawing.circles for name in circle.points}
        ends_of_segments = {name for line in self.segments for name in line}
        self.used_points = sorted(ends_of_segments | points_on_circles)
        self.point_orders = self._seen_orders()
        self.drawn_turns = self._seen_turns()
        self.uncrossed_pairs = self._seen_apart()
        self.convex_polygons: list[tuple[str, ...]] = []
        self.inner_points: list[PointInPolygon] = []
        self.separate_arcs: list[SeparateArcs] = []
        if not places:
            self.convex_polygons = [names for names in drawing.named_polygons if len(names) > 3]
            self.inner_points = list(drawing.circles_in_polygons())
            self.separate_arcs = drawing.separate_arcs()

    def _seen_orders(self) -> list[list[str]]:
        """Return the points of each line in order.

        Where a point of a line has no place, the order of the points between its ends is not known.
        Then each of them counts as a line of its own: end, point, end.
        """
        lines = [line for line in self.drawing.drawn_lines if len(line) > 2]
        triples = [
            [first, point, last]
            for (first, last), points in sorted(self.drawing.points_on_segment.items())
            for point in sorted(points)
            if not {first, point, last} <= self.places.keys()
        ]
        return lines + triples

    def _seen_turns(self) -> list[DrawnTurn]:
        """Return the drawn corners that bend visibly."""
        places = self.places
        turns: list[DrawnTurn] = []
        for corner in sorted(self.drawing.neighbours):
            neighbours = sorted(self.drawing.neighbours[corner])
            for first, last in combinations(neighbours, 2):
                if not {first, corner, last} <= places.keys():
                    continue
                to_first = places[first] - places[corner]
                to_last = places[last] - places[corner]
                bend = sine(to_first, to_last)
                if abs(bend) > _MIN_SINE_OF_CORNER:
                    turns.append(DrawnTurn(first=first, corner=corner, last=last, bend=bend))
        return turns

    def _seen_apart(self) -> list[tuple[str, str, str, str]]:
        """Return the pairs of drawn segments that do not cross, as four ends."""
        apart: list[tuple[str, str, str, str]] = []
        placed = [line for line in self.segments if set(line) <= self.places.keys()]
        # The number of pairs grows with the square. A crowded picture shows its kind in other ways.
        if len(placed) >= _MAX_SEGMENTS_COMPARED:
            return apart
        points_of_lines = [set(line) for line in self.drawing.drawn_lines]
        for segment, second_segment in combinations(placed, 2):
            ends = (*segment, *second_segment)
            has_common_end = len(set(ends)) < 4
            # Where three of four ends lie on one line, a segment may touch the other one.
            may_touch = any(len(points.intersection(ends)) >= 3 for points in points_of_lines)
            if has_common_end or may_touch:
                continue
            if not cross_each_other([self.places[name] for name in ends]):
                apart.append(ends)
        return apart

    def faults(self, state: Vector) -> int:
        """Count how much the figure at `state` differs in kind from the picture, or from the words.

        Each of these counts 1: a line with its points in another order, a corner that turns to the
        other side, two segments that cross and do not cross in the picture. Each sign of a collapse
        counts `FAULTS_OF_COLLAPSE`, so that a collapsed figure is worse than one that differs in a
        few places. The count is 0 where nothing is drawn, since there is nothing to compare.
        """
        if not self.used_points:
            return 0
        location_by_name = {name: self.system.location(state, name) for name in self.used_points}
        collapse_count = self._collapses(state, location_by_name)
        return FAULTS_OF_COLLAPSE * collapse_count + self._differences(state, location_by_name)

    def _collapses(self, state: Vector, location_by_name: Mapping[str, complex]) -> int:
        """Count the signs of a collapse: segments or radii without length, and points on one line.

        `location_by_name` has the places of the used points at `state`, the values of all unknowns.
        """
        width, height = extent_of(location_by_name.values())
        shortest = _MIN_SEGMENT_SHARE * max(width, height)
        collapsed_segments = [
            line
            for line in self.segments
            if abs(location_by_name[line[0]] - location_by_name[line[1]]) < shortest
        ]
        count = len(collapsed_segments)
        if len(self.used_points) > 2 and self._is_flat(list(location_by_name.values())):
            count += 1
        for i, name in enumerate(self.system.unknowns, start=self.system.first_unknown):
            if name.startswith("radius ") and state[i] <= 0:
                count += 1
        return count

    def _differences(self, state: Vector, location_by_name: Mapping[str, complex]) -> int:
        """Count how often the figure at `state` differs from the picture, or from the words."""
        width, height = extent_of(location_by_name.values())
        # Compared with a product of two areas, which grows with the fourth power of lengths.
        tolerance = 1e-9 * max(width, height) ** 4
        count = len(self.disordered_lines(state)) + self.system.atoms.mirrored_corners(state)
        for turn in self.drawn_turns:
            to_first = location_by_name[turn.first] - location_by_name[turn.corner]
            to_last = location_by_name[turn.last] - location_by_name[turn.corner]
            # Opposite signs: the corner bends to the other side than in the picture.
            if turn.bend * sine(to_first, to_last) < 0:
                count += 1
        for ends in self.uncrossed_pairs:
            if cross_each_other([location_by_name[name] for name in ends], tolerance=tolerance):
                count += 1
        count += sum(1 for names in self.convex_polygons if not self._is_convex(state, names))
        count += sum(
            1 for inner_point in self.inner_points if not self._is_inside(state, inner_point)
        )
        count += sum(1 for arcs in self.separate_arcs if not self._are_apart(state, arcs))
        return count

    def _is_convex(self, state: Vector, corners: Sequence[str]) -> bool:
        """Tell whether corners go round once in the figure, turning to the same side at each."""
        places = [self.system.location(state, name) for name in corners]
        # Index -1 is the last corner, so that the side which closes the polygon comes first.
        sides = []
        for i in range(len(places)):
            sides.append(places[i] - places[i - 1])
        turns = []
        for i in range(len(sides)):
            # The argument of w * conj(u) is the angle from u to w.
            turns.append(phase(sides[i] * sides[i - 1].conjugate()))
        always_left = min(turns) > _MIN_BEND
        always_right = max(turns) < -_MIN_BEND
        # A pentagram also bends to one side alone, but goes round twice. Its turns add up to two
        # full turns, and the turns of a convex polygon to one. The bound lies between them.
        goes_round_once = abs(sum(turns)) < 1.5 * math.tau
        return (always_left or always_right) and goes_round_once

    def _is_inside(self, state: Vector, inner_point: PointInPolygon) -> bool:
        """Tell whether a point lies inside a convex polygon: on the same side of all its sides."""
        location = self.system.location(state, inner_point.point)
        # Positive to the left of a side. A point on a side itself does not lie inside.
        distances_left = []
        for start_name, end_name in sides_of_polygon(inner_point.corners):
            start = self.system.location(state, start_name)
            end = self.system.location(state, end_name)
            distances_left.append(cross(end - start, location - start))
        return min(distances_left) > 0 or max(distances_left) < 0

    def _are_apart(self, state: Vector, arcs: SeparateArcs) -> bool:
        """Tell whether two arcs have no part in common in the figure.

        Each arc is the shorter way round between its ends. They have a part in common if an end of
        one lies on the other.
        """
        for arc, ends in ((arcs.first, arcs.second), (arcs.second, arcs.first)):
            to_start = self._vector(state, arcs.centre, arc[0])
            to_end = self._vector(state, arcs.centre, arc[1])
            for name in ends:
                radius = self._vector(state, arcs.centre, name)
                # A point of the shorter way round lies between both radii: the turn from the first
                # to it has the sign of the turn from it to the second. That is also true of the
                # points opposite; the scalar product with the sum of both radii rules them out.
                is_between = cross(to_start, radius) * cross(radius, to_end) > 0
                if is_between and dot(radius, to_start + to_end) > 0:
                    return False
        return True

    def _vector(self, state: Vector, start: str, end: str) -> complex:
        """Return the vector from one point of the figure to another."""
        return self.system.location(state, end) - self.system.location(state, start)

    def disordered_lines(self, state: Vector) -> list[str]:
        """Return the lines whose points lie in another order than in the picture or the facts.

        A line is there once for each pair of neighbouring points that are in the wrong order.
        """
        disordered_lines = []
        for names in self.point_orders:
            along_line = self._vector(state, names[0], names[-1])
            # How far along the line each point lies; the values have to grow.
            distances_along = [
                dot(self._vector(state, names[0], name), along_line) for name in names
            ]
            for distance, next_distance in pairwise(distances_along):
                if distance >= next_distance:
                    disordered_lines.append("".join(names))
        return disordered_lines

    def _is_flat(self, places: Sequence[complex]) -> bool:
        """Tell whether all points of the figure lie on one line, which the picture's do not.

        The limit for the picture is ten times the limit for the figure, since pixels are rounded.
        """
        if self.drawing.are_on_one_line(self.used_points):
            return False
        if self.places:
            drawn = [self.places[name] for name in self.used_points if name in self.places]
            if _flatness(drawn) < 1e-2:
                return False
        return _flatness(places) < 1e-3

    def picture_distance(self, state: Vector) -> float:
        """Return how far the points of the figure lie from those of the picture; 0 where they fit.

        The figure is turned, shifted and scaled to fit as well as it can. The distance is a share
        of the picture's size.
        """
        # Imagined points have places that nobody drew, so they say nothing of the picture.
        names = [name for name in sorted(self.places) if name not in self.drawing.imagined_points]
        if len(names) < 2:
            return 0.0
        drawn = np.array([self.places[name] for name in names])
        solved = np.array([self.system.location(state, name) for name in names])
        drawn = drawn - drawn.mean()
        solved = solved - solved.mean()
        # The complex factor f for which the sum of |drawn - f * solved|² is least: the sum of
        # conj(solved) * drawn over that of |solved|². Its angle turns the figure, its size
        # scales it. The small number keeps a figure that has collapsed into one point from a
        # division by zero.
        factor = np.vdot(solved, drawn) / (np.vdot(solved, solved) + 1e-30)
        return float(np.linalg.norm(drawn - factor * solved) / (np.linalg.norm(drawn) + 1e-12))


def _flatness(places: Sequence[complex]) -> float:
    """Return how flat places lie: 0 on one line, 1 for fewer than three.

    It is the largest distance from the longest line through the first one, over that line's length.
    For example, it is 0.1 for 0, 10 and 5 + i. The cross product is a distance times that length,
    so it is divided by the length twice.
    """
    if len(places) < 3:
        return 1.0
    first = places[0]
    end = max(places, key=lambda location: abs(location - first))
    along_line = end - first
    if abs(along_line) == 0:
        return 0.0
    largest_product = max(abs(cross(along_line, location - first)) for location in places)
    return largest_product / abs(along_line) ** 2
