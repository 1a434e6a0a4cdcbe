"""The straight lines of a picture with their points in order, and which angle or line is meant."""

from __future__ import annotations

import math
from cmath import phase
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

from adora_vl.geometry.drawn_points import DrawnPoints
from adora_vl.geometry.logic_form import Term
from adora_vl.geometry.shapes import UnreadError
from adora_vl.geometry.vectors import sine

_MAX_DEGREES_OF_ONE_RAY = 12.0  # degrees; two drawn rays closer than this are one
# Degrees that lines which a text calls parallel may look askew.
_MAX_DEGREES_FROM_PARALLEL = 8.0
# A line with more points is likelier to be meant: each point makes up for this many degrees askew.
_DEGREES_PER_POINT = 0.3
# Radians: a ray so near to the bisector is the bisector itself, drawn through another point of it.
_MAX_RADIANS_OF_ONE_RAY = 0.06


class _Ray(NamedTuple):
    """A drawn ray from a corner: its direction in degrees, and a point on it."""

    degrees: float
    point: str


class DrawnLines(DrawnPoints):
    """The picture of a logic form: its straight lines with their points, and their angles.

    `places` has where each point is drawn, as a complex number with y upwards. `neighbours` has for
    each point the points that a drawn line joins it with.
    """

    @cached_property
    def drawn_lines(self) -> list[list[str]]:
        """The straight lines, each with all its points in order, as far as these have places.

        A line whose points all lie on a longer line is left out.
        """
        points_by_ends: dict[frozenset[str], set[str]] = {
            frozenset(line): set(line) for line in self.form.lines if line[0] != line[1]
        }
        for segment, points in self.points_on_segment.items():
            points_by_ends.setdefault(frozenset(segment), set(segment)).update(points)
        longest_first = sorted(
            points_by_ends.values(), key=lambda points: (-len(points), sorted(points))
        )
        lines: list[list[str]] = []
        for points in longest_first:
            placed_points = sorted(points & self.places.keys())
            is_part_of_line = any(set(placed_points) <= set(line) for line in lines)
            if len(placed_points) >= 2 and not is_part_of_line:
                lines.append(self._in_order(placed_points))
        return lines

    def _in_order(self, points: Sequence[str]) -> list[str]:
        """Return the points of a line in order, from the end that is farthest from `points[0]`."""
        start = self.places[points[0]]
        end_name = max(points, key=lambda name: abs(self.places[name] - start))
        end = self.places[end_name]
        return sorted(points, key=lambda name: abs(self.places[name] - end))

    @cached_property
    def all_lines(self) -> list[list[str]]:
        """All straight lines with their points: `drawn_lines`, and those with an unplaced point.

        The latter are in the order that the facts give: the ends outside, the points that lie on
        the line between them.
        """
        lines = list(self.drawn_lines)
        for (first, last), points in sorted(self.points_on_segment.items()):
            line = [first, *sorted(points), last]
            if not set(line) <= self.places.keys():
                lines.append(line)
        for segment in self.form.lines:
            if not any(set(segment) <= set(line) for line in lines):
                lines.append(list(segment))
        return lines

    def are_on_one_line(self, names: Iterable[str]) -> bool:
        """Tell whether one line of the drawing has all of these points."""
        required = set(names)
        return any(required <= set(line) for line in self.all_lines)

    def ends_of_line(self, term: Term) -> tuple[str, str]:
        """Return two points of the line that a term names.

        `Line(A, B)` names them itself. `Line(m)` is the segment whose length a fact gives as m.
        Raises `UnreadError` for any other term.
        """
        names = term.names
        if term.head != "Line" or not names:
            raise UnreadError(f"{term} is no line")
        if len(names) == 2:
            return self.require_point(names[0]), self.require_point(names[1])
        for fact in self.fact_terms:
            measured = _ends_of_measured_line(fact)
            if measured is not None and fact.arguments[1].head == names[0]:
                return self.require_point(measured[0]), self.require_point(measured[1])
        raise UnreadError(f"the form does not say which line {names[0]} is")

    def most_parallel_lines(self, count: int) -> list[tuple[str, str]]:
        """Return the `count` drawn lines that look most parallel, each by its two ends.

        They stand for lines whose names the picture does not have. The lines with the least rank
        are taken. The rank is the largest angle between two of them in degrees, less 0.3 for each
        point on them, since a line with more points is likelier to be meant. Raises `UnreadError`
        where no lines look parallel.
        """
        best_lines: Sequence[list[str]] = ()
        best_rank = math.inf
        for lines in combinations(self.drawn_lines, count):
            pairs = list(combinations(lines, 2))
            if any(set(first) & set(second) for first, second in pairs):
                continue  # lines that meet in a drawn point are not parallel
            if not self._have_transversal(lines):
                continue  # nothing would be said of their angles
            degrees_apart = max(self.degrees_apart(first, second) for first, second in pairs)
            point_count = sum(len(line) for line in lines)
            rank = degrees_apart - _DEGREES_PER_POINT * point_count
            if rank < best_rank:
                best_rank = rank
                best_lines = lines
        if best_rank > _MAX_DEGREES_FROM_PARALLEL:
            raise UnreadError("no lines of the picture look parallel")
        return [(line[0], line[-1]) for line in best_lines]

    def _have_transversal(self, lines: Collection[list[str]]) -> bool:
        """Tell whether a further drawn line has a common point with each of these lines."""
        other_lines = [line for line in self.drawn_lines if line not in lines]
        return any(all(set(other_line) & set(line) for line in lines) for other_line in other_lines)

    def degrees_apart(self, first: Sequence[str], second: Sequence[str]) -> float:
        """Return how many degrees two lines are from parallel in the picture, from 0 to 90."""
        u = self.places[first[-1]] - self.places[first[0]]
        w = self.places[second[-1]] - self.places[second[0]]
        return math.degrees(math.asin(min(1.0, abs(sine(u, w)))))

    def points_of_angle(self, term: Term) -> tuple[str, str, str]:
        """Return the three points of an angle that a term names, with its corner in the middle.

        Raises `UnreadError` where the corner alone does not say which angle is meant.
        """
        names = term.names
        if len(names) == 3 and len(set(names)) == 3:
            return (
                self.require_point(names[0]),
                self.require_point(names[1]),
                self.require_point(names[2]),
            )
        if len(names) != 1 or names[0] not in self._point_names:
            raise UnreadError(f"{term} is no angle of the form")
        return self._angle_at(names[0])

    def _angle_at(self, corner: str) -> tuple[str, str, str]:
        """Return the angle at a corner that is meant where the corner alone is named.

        It is the only angle there, else the one of a shape that facts name, else the widest one.
        Raises `UnreadError` where the picture shows none of these.
        """
        joined_points = self._joined_points(corner)
        if len(joined_points) == 2:
            return joined_points[0], corner, joined_points[1]
        rays = self._rays(corner, joined_points)
        if len(rays) == 2:
            return rays[0].point, corner, rays[1].point
        triangle = self.corners_by_shape.get("Triangle")
        if triangle is None or corner not in triangle:
            triangle = next(
                (shape for shape in self.corners_by_shape.values() if corner in shape), None
            )
        if triangle is not None:
            position = triangle.index(corner)
            return triangle[position - 1], corner, triangle[(position + 1) % len(triangle)]
        # The widest angle under 180 degrees, which has all other rays inside. For rays at 10, 50
        # and 100 degrees it goes from 10 to 100. In general it goes from a ray against the clock to
        # the ray before it in the sorted list; before the first ray comes the last one. The bound
        # is 179, so that a straight line is no angle.
        rays.sort()
        for position, first_ray in enumerate(rays):
            last_ray = rays[position - 1]
            width = (last_ray.degrees - first_ray.degrees) % 360
            if width < 179 and len(rays) > 1:
                return first_ray.point, corner, last_ray.point
        raise UnreadError(f"the form does not say which angle at {corner} is meant")

    def _joined_points(self, corner: str) -> list[str]:
        """Return the points that a drawn line joins with a corner, each once."""
        points = sorted(self.neighbours.get(corner, ()))
        for line in self.all_lines:
            if corner in line:
                points += [name for name in line if name != corner]
        return list(dict.fromkeys(points))

    def _rays(self, corner: str, points: Iterable[str]) -> list[_Ray]:
        """Return the drawn rays from a corner, each with the first of `points` that lies on it.

        Points in nearly the same direction are on one ray, unless they lie on two lines that the
        drawing tells apart.
        """
        rays: list[_Ray] = []
        if corner not in self.places:
            return rays
        for name in points:
            if name not in self.places:
                continue
            degrees = math.degrees(phase(self.places[name] - self.places[corner]))
            # The difference is brought to between -180 and 180: 179 and -179 degrees are 2 apart.
            same_rays = [
                ray
                for ray in rays
                if abs((degrees - ray.degrees + 180) % 360 - 180) < _MAX_DEGREES_OF_ONE_RAY
                and not self._are_on_two_lines(corner, name, ray.point)
            ]
            if not same_rays:
                rays.append(_Ray(degrees=degrees, point=name))
        return rays

    def _are_on_two_lines(self, corner: str, first: str, second: str) -> bool:
        """Tell whether two points beside a corner lie on different lines with further points."""
        long_lines = [line for line in self.drawn_lines if corner in line and len(line) > 2]
        first_lines = [line for line in long_lines if first in line]
        second_lines = [line for line in long_lines if second in line]
        have_lines = bool(first_lines and second_lines)
        return have_lines and not any(line in second_lines for line in first_lines)

    def angle_around(self, corner: str, inside: str) -> tuple[str, str, str]:
        """Return the angle that a ray from a corner to `inside` halves or divides, by three points.

        Its sides are the nearest rays on both sides of that ray. Raises `UnreadError` where there
        are no such rays.
        """
        if corner not in self.places or inside not in self.places:
            ends = [name for name in self._joined_points(corner) if name != inside]
            if len(ends) != 2:
                raise UnreadError(f"the form does not say which angle at {corner} is meant")
            return ends[0], corner, ends[1]
        start = phase(self.places[inside] - self.places[corner])
        # How far each point is turned from the ray to `inside`, against the clock.
        name_by_turn: dict[float, str] = {}
        for line in self.drawn_lines:
            if corner in line:
                for name in line:
                    if name != corner:
                        direction = phase(self.places[name] - self.places[corner])
                        name_by_turn[(direction - start) % math.tau] = name
        turns_beside = sorted(
            turn
            for turn in name_by_turn
            if _MAX_RADIANS_OF_ONE_RAY < turn < math.tau - _MAX_RADIANS_OF_ONE_RAY
        )
        if len(turns_beside) < 2:
            raise UnreadError(f"the form does not say which angle at {corner} is meant")
        return name_by_turn[turns_beside[0]], corner, name_by_turn[turns_beside[-1]]


def _ends_of_measured_line(fact: Term) -> list[str] | None:
    """Return the ends of the segment whose length a fact gives; None for any other fact."""
    if not fact.is_equation or fact.arguments[0].head != "LengthOf":
        return None
    measured = fact.arguments[0].arguments
    if not measured or measured[0].head != "Line" or len(measured[0].names) != 2:
        return None
    return measured[0].names
