"""Where the search for a figure begins: near the picture, and ever further from it.

Random shifts have fixed seeds, so a start is the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from adora_vl.geometry.drawing import Drawing
from adora_vl.geometry.layout import Vector
from adora_vl.geometry.scale import Scale
from adora_vl.geometry.shapes import Circle
from adora_vl.geometry.system import System

# The spread of the random shifts of each start, in shares of the figure's size.
_SHIFT_BY_START = (0.002, 0.03, 0.03, 0.1, 0.15, 0.3)
# How much larger than the picture the figure begins at each start.
_STRETCH_BY_START = (1.0, 1.0, 1.5, 1.0, 1.0, 1.0)
# The same where the facts give no length, so that the size of the figure is unknown.
_WIDE_STRETCH_BY_START = (1.0, 4.0, 2.0, 0.4, 1.0, 8.0)
# The number of rounds in which points without a place are moved onto their lines.
_PULL_ROUNDS = 60
# They keep this share of a segment between themselves and its ends.
_MARGIN_AT_ENDS = 0.15


class _PointOnSegment(NamedTuple):
    """The numbers of a point and of the ends of the segment that it lies on."""

    point: int
    start: int
    end: int


class _PointsOnCircle(NamedTuple):
    """The numbers of a centre and of the points on its circle."""

    centre: int
    points: list[int]


class Starts:
    """The places and values that searches for a figure begin with: near the picture, then further.

    Args:
        system: The equations, which say where each unknown stands in the state.
        drawing: Which points lie on which lines and circles.
        scale: How large the figure is, and the picture.
        places: The places of points in the picture, as x + iy in pixels.
        convex: Polygons that go round once, as the names of their corners; only where the form has
            no places.
    """

    def __init__(
        self,
        system: System,
        drawing: Drawing,
        scale: Scale,
        places: Mapping[str, complex],
        convex: Sequence[tuple[str, ...]],
    ) -> None:
        self.system = system
        self.drawing = drawing
        self.scale = scale
        self.places = places
        self.convex = convex
        drawn = [places[name] for name in sorted(places)]
        self.middle = sum(drawn) / len(drawn) if drawn else 0j
        self.circle_by_radius = {circle.radius: circle for circle in drawing.circles}

    def near_picture(self, start_number: int) -> Vector:
        """Return the state (the values of all unknowns) that a search begins with.

        A higher `start_number` begins further from the picture. It also seeds the random shifts.
        The order of the draws must not change, or other figures would be found.
        """
        random = np.random.default_rng(start_number)
        system = self.system
        state = np.zeros(system.count)
        stretches = _STRETCH_BY_START if self.scale.is_given else _WIDE_STRETCH_BY_START
        stretch = stretches[start_number % len(stretches)]
        for point in system.points:
            location = self._location(point, stretch, random)
            shift = random.normal(0, _SHIFT_BY_START[start_number % len(_SHIFT_BY_START)], 2)
            i = 2 * system.index_by_point[point]
            state[i] = location.real + shift[0]
            state[i + 1] = location.imag + shift[1]
        for i, name in enumerate(system.unknowns, start=system.first_unknown):
            # Drawn for every unknown, also where the value is not used.
            random_value = random.uniform(1, 30)
            state[i] = self._first_value(
                name, start_number=start_number, random_value=random_value, state=state
            )
        return state

    def _location(self, point: str, stretch: float, random: np.random.Generator) -> complex:
        """Return where a point begins, before its random shift, in shares of the figure's size.

        A centre without a place begins in the middle of its circle's points, any other point
        without a place anywhere near 0, with a spread of 0.4. `stretch` is how much larger than the
        picture the figure begins.

        The random place is drawn for every point without a place, so that the draws stay in order.
        """
        if point in self.places:
            return self._from_picture(point) * stretch
        anywhere = complex(*random.normal(0, 0.4, 2))
        points_by_centre = {circle.centre: circle.points for circle in self.drawing.circles}
        on_circle = points_by_centre.get(point, ())
        if len(on_circle) > 1 and set(on_circle) <= self.places.keys():
            return sum(self._from_picture(name) for name in on_circle) / len(on_circle)
        return anywhere

    def _from_picture(self, point: str) -> complex:
        """Return a point's place in the picture, from the middle, in shares of its size."""
        return (self.places[point] - self.middle) / self.scale.pixels

    def _first_value(
        self, name: str, *, start_number: int, random_value: float, state: Vector
    ) -> float:
        """Return where a letter, a radius or a numbered angle begins.

        A radius begins with the mean distance of its circle's points in `state`, or with 0.3 of the
        figure's size where no point is on the circle. A numbered angle begins with 60 degrees. A
        letter begins with 10 in the first start, with 1 in the second, and with `random_value` in
        later ones.
        """
        circle = self.circle_by_radius.get(name)
        if circle is not None and circle.points:
            return self._mean_radius(circle, state)
        if name.startswith("radius "):
            return 0.3 * self.scale.size
        if name.startswith("angle "):
            return 60.0
        if start_number == 0:
            return 10.0
        if start_number == 1:
            return 1.0
        return random_value

    def _mean_radius(self, circle: Circle, state: Vector) -> float:
        """Return the mean distance of a circle's points from its centre in `state`."""
        centre = self.system.location(state, circle.centre)
        distances = [abs(self.system.location(state, point) - centre) for point in circle.points]
        return self.scale.size * float(np.mean(distances))

    def moved_onto_lines(self, state: Vector, start_number: int) -> Vector:
        """Return the start `state` with points moved onto the lines and circles that they are on.

        Points without a place have to begin there, or the search may bring them into another order.
        In each round every line and circle moves its points half the way. Points with a place stay.
        """
        random = np.random.default_rng(start_number)
        index_by_point = self.system.index_by_point
        places = self.system.places(state).copy()
        self._spread_polygons(places, random)
        on_segments = [
            _PointOnSegment(
                point=index_by_point[point], start=index_by_point[start], end=index_by_point[end]
            )
            for (start, end), points in sorted(self.drawing.points_on_segment.items())
            for point in sorted(points)
        ]
        on_circles = [
            _PointsOnCircle(
                centre=index_by_point[circle.centre],
                points=[index_by_point[point] for point in circle.points],
            )
            for circle in self.drawing.circles
            if circle.points
        ]
        movable = np.array([float(name not in self.places) for name in self.system.points])
        for _ in range(_PULL_ROUNDS):
            for segment in on_segments:
                _pull_onto_segment(places, segment, movable)
            for circle in on_circles:
                _pull_onto_circle(places, circle, movable)
        state = state.copy()
        state[: self.system.first_unknown] = places.reshape(-1)
        self._fit_radii(state, places)
        return state

    def _spread_polygons(self, places: Vector, random: np.random.Generator) -> None:
        """Lay the corners of convex polygons round a circle, each corner once.

        `places` are the coordinates of all points, shape (points, 2), and are changed. The circle
        is around 0 with a radius of 0.5, half of the figure's size. Of n corners number k lies at
        k/n of the full turn, shifted by up to a fifth of a step. A random corner is number 0.
        """
        placed_corners: set[str] = set()
        for names in self.convex:
            first_step = random.permutation(len(names))[0]
            for offset, name in enumerate(names):
                if name not in placed_corners:
                    step = first_step + offset
                    turn = math.tau * (step + random.uniform(-0.2, 0.2)) / len(names)
                    direction = np.array([math.cos(turn), math.sin(turn)])
                    places[self.system.index_by_point[name]] = 0.5 * direction
            placed_corners.update(names)

    def _fit_radii(self, state: Vector, places: Vector) -> None:
        """Set each radius in `state` to the mean distance of the circle's points from the centre.

        `places` are the coordinates of all points, shape (points, 2).
        """
        index_by_point = self.system.index_by_point
        for i, name in enumerate(self.system.unknowns, start=self.system.first_unknown):
            circle = self.circle_by_radius.get(name)
            if circle is None or not circle.points:
                continue
            point_numbers = [index_by_point[point] for point in circle.points]
            from_centre = places[point_numbers] - places[index_by_point[circle.centre]]
            distances = np.linalg.norm(from_centre, axis=1)
            # Places are shares of the figure's size, and radii are in the problem's unit.
            state[i] = self.scale.size * float(distances.mean())


def _pull_onto_segment(places: Vector, segment: _PointOnSegment, movable: Vector) -> None:
    """Move a point and the ends of its segment half the way to where they fit; changes `places`.

    For a point P and a segment from S to E, P belongs at F = S + s (E - S). Here s is how far along
    the segment P lies, (P - S)·(E - S) / |E - S|², kept away from the ends. P moves by half of
    F - P. S and E move the opposite way, by the shares 1 - s and s of that half, so that the nearer
    end moves more. For P = (1, 1), S = (0, 0) and E = (2, 0), they move to (1, 0.5), (0, 0.25) and
    (2, 0.25).

    `movable` is 1 for points that may move and 0 for those that the picture shows.
    """
    start = segment.start
    end = segment.end
    along_segment = places[end] - places[start]
    from_start = places[segment.point] - places[start]
    # The small number keeps a segment without length from a division by zero.
    share = float(from_start @ along_segment) / (float(along_segment @ along_segment) + 1e-9)
    share = min(max(share, _MARGIN_AT_ENDS), 1 - _MARGIN_AT_ENDS)
    gap = places[start] + share * along_segment - places[segment.point]
    places[segment.point] += 0.5 * movable[segment.point] * gap
    places[start] -= 0.5 * movable[start] * (1 - share) * gap
    places[end] -= 0.5 * movable[end] * share * gap


def _pull_onto_circle(places: Vector, circle: _PointsOnCircle, movable: Vector) -> None:
    """Move the points of a circle half the way to their mean distance; changes `places`.

    A point at the distance r from the centre moves outwards by 0.5 (mean - r). The centre stays.
    `movable` is 1 for points that may move and 0 for those that the picture shows.
    """
    from_centre = places[circle.points] - places[circle.centre]
    lengths = np.linalg.norm(from_centre, axis=1, keepdims=True) + 1e-9
    stretch = lengths.mean() / lengths - 1
    places[circle.points] += 0.5 * movable[circle.points, None] * stretch * from_centre
