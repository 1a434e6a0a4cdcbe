"""The regions that drawn lines enclose: faces, outline, and all polygons that could be meant."""

from __future__ import annotations

import math
from cmath import phase
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from itertools import combinations, pairwise

from adora_vl.geometry.drawn_lines import DrawnLines
from adora_vl.geometry.shapes import sides_of_polygon
from adora_vl.geometry.vectors import cross

_MAX_CORNERS_OF_FACE = 40  # corners of a region; a walk that is longer has lost its way


class Regions(DrawnLines):
    """The picture of a logic form: the regions that its drawn lines enclose.

    `places` has where each point is drawn, as a complex number with y upwards.
    """

    @cached_property
    def _neighbours_by_point(self) -> dict[str, set[str]]:
        """The next points along the drawn lines through each point: A and C for B on ABC."""
        neighbours_by_point: dict[str, set[str]] = defaultdict(set)
        for line in self.drawn_lines:
            for start, end in pairwise(line):
                neighbours_by_point[start].add(end)
                neighbours_by_point[end].add(start)
        return dict(neighbours_by_point)

    def _direction(self, start: str, end: str) -> float:
        """Return the direction from one point of the picture to another, in radians."""
        return phase(self.places[end] - self.places[start])

    @cached_property
    def faces(self) -> list[list[str]]:
        """The inner regions that drawn lines enclose, as points around them against the clock."""
        visited: set[tuple[str, str]] = set()
        faces = []
        for start in sorted(self._neighbours_by_point):
            for end in sorted(self._neighbours_by_point[start]):
                face = self._walk_face(start, end, visited)
                is_simple = len(face) > 2 and len(set(face)) == len(face)
                # The walk round the outside goes clockwise, so its area is negative.
                if is_simple and self.signed_area(face) > 0:
                    faces.append(face)
        return faces

    def _walk_face(self, start: str, end: str, visited: set[tuple[str, str]]) -> list[str]:
        """Walk round the region to the left of a drawn edge, and return its points.

        The edge goes from `start` to `end`. At each point the walk takes the edge to which the turn
        against the clock from the way back is largest. No edge lies between the two on the left,
        and so the walk keeps to the border of the same region. Its edges are added to `visited`.
        The list is empty where another walk has taken the edge in this direction already.
        """
        face: list[str] = []
        while (start, end) not in visited and len(face) < _MAX_CORNERS_OF_FACE:
            visited.add((start, end))
            face.append(start)
            next_point = self._furthest_turn(start, end)
            start = end
            end = next_point
        return face

    def _furthest_turn(self, start: str, end: str) -> str:
        """Return the neighbour of `end` to which the turn from the way back to `start` is largest.

        At a dead end the walk turns round, and `start` is returned.
        """
        back_direction = self._direction(end, start)
        next_points = [name for name in sorted(self._neighbours_by_point[end]) if name != start]
        if not next_points:
            return start
        return max(
            next_points, key=lambda name: (self._direction(end, name) - back_direction) % math.tau
        )

    def signed_area(self, corners: Sequence[str]) -> float:
        """Return the area of a polygon in square pixels, negative where its corners go clockwise.

        By the shoelace formula it is half the sum of the cross products of neighbouring corners.
        """
        places = [self.places[name] for name in corners]
        return sum(cross(places[i - 1], places[i]) for i in range(len(places))) / 2

    def without_straight_points(self, boundary: Sequence[str]) -> list[str]:
        """Return a boundary without the points at which it goes straight on."""
        count = len(boundary)
        return [
            name
            for i, name in enumerate(boundary)
            if not self.are_on_one_line((boundary[i - 1], name, boundary[(i + 1) % count]))
        ]

    @cached_property
    def polygons(self) -> list[list[str]]:
        """The corners of all regions, of pairs of them that share a side, and of the outline."""
        polygons = [self.without_straight_points(face) for face in self.faces]
        # Pairs grow with the square of the regions; a picture with more than 60 regions is rare.
        for first, second in combinations(self.faces[:60], 2):
            joined = _join_faces(first, second)
            if joined:
                polygons.append(self.without_straight_points(joined))
        outline = self.outline()
        if outline:
            polygons.append(outline)
        return polygons

    def _neighbours_without_dead_ends(self) -> dict[str, set[str]]:
        """Return the neighbours of all points from which at least two drawn edges lead on.

        A dead end that is left out may leave its neighbour as a dead end, so this goes on until no
        dead end is left.
        """
        neighbours_by_point = {
            name: set(neighbours) for name, neighbours in self._neighbours_by_point.items()
        }
        while True:
            dead_ends = sorted(
                name for name, neighbours in neighbours_by_point.items() if len(neighbours) < 2
            )
            if not dead_ends:
                return neighbours_by_point
            for name in dead_ends:
                for neighbour in neighbours_by_point.pop(name):
                    # The neighbour may be gone already, as the other end of a single edge.
                    neighbours_by_point.get(neighbour, set()).discard(name)

    def outline(self) -> list[str]:
        """Return the corners of the outer boundary, without dead ends.

        Empty where there is none, and where the boundary meets itself at a point.
        The walk begins at an outermost point of the picture, which lies on the boundary for sure.
        """
        neighbours_by_point = self._neighbours_without_dead_ends()
        if len(neighbours_by_point) < 3:
            return []
        lowest = min(
            neighbours_by_point,
            key=lambda name: (self.places[name].imag, self.places[name].real, name),
        )
        boundary = [lowest]
        current = lowest
        # Nothing lies below the lowest point, so the walk begins as if it came from there.
        back_direction = -math.pi / 2
        for _ in range(2 * _MAX_CORNERS_OF_FACE):
            next_point = self._least_turn(current, neighbours_by_point[current], back_direction)
            if next_point == lowest:
                break
            boundary.append(next_point)
            back_direction = self._direction(next_point, current)
            current = next_point
        meets_itself = len(set(boundary)) != len(boundary)
        return [] if meets_itself else self.without_straight_points(boundary)

    def _least_turn(self, current: str, neighbours: set[str], back_direction: float) -> str:
        """Return the neighbour of a point to which the turn from the way back is smallest."""

        def turn_to(name: str) -> float:
            """Return the turn from the way back to a neighbour; the way back is a full turn."""
            return (self._direction(current, name) - back_direction) % math.tau or math.tau

        return min(sorted(neighbours), key=turn_to)


def _join_faces(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Return the boundary of two regions together; empty where they share no side.

    Both go against the clock, so that a common side goes one way in one and back in the other.
    """
    first_edges = set(sides_of_polygon(first))
    second_edges = set(sides_of_polygon(second))
    shared_edges = {(start, end) for start, end in first_edges if (end, start) in second_edges}
    if not shared_edges:
        return []
    # Where the boundary goes on from each point: along all edges that are not shared.
    next_point = dict(first_edges - shared_edges)
    next_point.update(second_edges - {(end, start) for start, end in shared_edges})
    if not next_point:
        return []
    start = min(next_point)
    boundary = [start]
    point = next_point.get(start)
    while point is not None and point != start and len(boundary) < _MAX_CORNERS_OF_FACE:
        boundary.append(point)
        point = next_point.get(point)
    # Regions that touch in two places have a boundary that does not come back.
    return boundary if point == start else []
