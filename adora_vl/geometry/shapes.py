"""What the picture of a form shows: lines with their points in order, regions, polygons, circles.

Facts often name a shape only by its kind, as `Parallelogram($)` does, or an angle by its corner
alone. This module finds which corners are meant. Places are complex numbers with y upwards, in
pixels of the picture.
"""

from __future__ import annotations

import math
import re
from cmath import phase
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise

from adora_vl.geometry.forms import Form, Term, term_of

CORNERS = {
    "Triangle": 3,
    "Parallelogram": 4,
    "Rectangle": 4,
    "Rhombus": 4,
    "Square": 4,
    "Kite": 4,
    "Trapezoid": 4,
    "Quadrilateral": 4,
    "Pentagon": 5,
    "Hexagon": 6,
    "Heptagon": 7,
    "Octagon": 8,
}
COLOURS = ("Shaded", "Blue", "Green", "Red")
# Heads around a shape that say something of it, as in `Regular(Polygon($))`.
WRAPPERS = (*COLOURS, "Regular", "Right", "Isosceles", "Equilateral")
_POINT = re.compile(r"[A-Z]'?|point_\d+")
_SAME_RAY = 12.0  # degrees; two drawn rays closer than this are one
# share of a segment's length that a point may lie beside it and still seem to be on it
_STRAIGHT = 0.025
_FAR_BESIDE = 1.0  # the same share, of a point that cannot be meant to be on the segment
_MOST_FACES = 40  # corners of a region; a walk that is longer has lost its way
_UNLIKE = 0.15  # step in which a polygon's likeness to its kind is counted


class UnreadError(ValueError):
    """A fact speaks of something that the form does not have, or in a way that is not known."""


@dataclass(frozen=True)
class Circle:
    """A circle: its centre, the name of its radius, and the points on it."""

    centre: str
    radius: str
    points: tuple[str, ...]


def cross(u: complex, w: complex) -> float:
    """The cross product of two vectors: positive where `w` lies against the clock from `u`."""
    return (u.conjugate() * w).imag


def dot(u: complex, w: complex) -> float:
    """The scalar product of two vectors."""
    return (u.conjugate() * w).real


def sine(u: complex, w: complex) -> float:
    """The sine of the angle from one direction to another; 0 where one of them has no length."""
    return cross(u, w) / (abs(u) * abs(w)) if u and w else 0.0


def cosine(u: complex, w: complex) -> float:
    """The cosine of the angle between two directions; 0 where one of them has no length."""
    return dot(u, w) / (abs(u) * abs(w)) if u and w else 0.0


def cross_each_other(ends: Sequence[complex], tolerance: float = 0.0) -> bool:
    """Whether the segment between the first two ends crosses that between the others, inside both.

    `tolerance`: the product of two areas that counts as no crossing.
    """
    a, b, c, d = ends
    first = cross(b - a, c - a) * cross(b - a, d - a)
    second = cross(d - c, a - c) * cross(d - c, b - c)
    return first < -tolerance and second < -tolerance


def extent_of(places: Collection[complex]) -> tuple[float, float]:
    """How wide and how high a number of places lie; there has to be one at least."""
    wide = max(location.real for location in places) - min(location.real for location in places)
    high = max(location.imag for location in places) - min(location.imag for location in places)
    return wide, high


def sides_of(names: Sequence[str]) -> list[tuple[str, str]]:
    """The sides of a polygon by their ends; the side that closes it comes first."""
    return [(names[i - 1], names[i]) for i in range(len(names))]


def unwrapped(term: Term) -> Term:
    """The shape inside `Shaded(...)`, `Regular(...)` and the like."""
    while term.head in WRAPPERS and term.arguments:
        term = term.arguments[0]
    return term


def terms_of(texts: Iterable[str]) -> Iterator[Term]:
    """The terms of facts, each once; two in one text, with a point or semicolon between, are two."""
    for text in dict.fromkeys(texts):
        for part in re.split(r"(?<=\))\s*[.;]\s*(?=[A-Z])", text):
            term = term_of(part)
            if term is not None:
                yield term


class Drawing:
    """The picture of a form, and what its facts say of lines, circles and named shapes."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.facts = list(terms_of(form.facts))
        self.asked = list(terms_of(form.question))
        self.terms = [*self.facts, *self.asked]
        self.places = {name: complex(x, -y) for name, (x, y) in form.points.items()}
        self.imagined: set[str] = set()  # points whose place is guessed, not annotated
        self.copied: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        self.neighbours: dict[str, set[str]] = defaultdict(set)
        for start, end in form.lines:
            self.neighbours[start].add(end)
            self.neighbours[end].add(start)
        self.on_segment: dict[tuple[str, str], set[str]] = defaultdict(set)
        for term in self.terms:
            if term.head == "PointLiesOnLine" and len(term.arguments) == 2:
                names = [term.arguments[0].head, *term.arguments[1].names]
                if len(set(names)) == len(names) == 3 and all(map(self._may_be_point, names)):
                    self.on_segment[names[1], names[2]].add(names[0])
        self.circles = self._circles()
        self._imagine_places()
        self.straight = self._seen_straight()
        self.named: dict[str, tuple[str, ...]] = {}
        for term in self.terms:
            for shape in (term, *term.arguments):
                if len(shape.names) == CORNERS.get(shape.head):
                    self.named.setdefault(shape.head, tuple(shape.names))

    # Points and circles

    def _may_be_point(self, name: str) -> bool:
        """Whether a name is a capital letter, or one that the picture has."""
        is_drawn = name in self.form.points or name in self.neighbours
        return is_drawn or _POINT.fullmatch(name) is not None

    @cached_property
    def points(self) -> list[str]:
        """All points of the form, in an order that depends on their names alone."""
        names = {*self.form.points, *self.neighbours}
        for circle in self.circles:
            names.update((circle.centre, *circle.points))
        for term in self.terms:
            names.update(
                part.head
                for part in term.walk()
                if not part.arguments and _POINT.fullmatch(part.head)
            )
        return sorted(names - self.aliases.keys())

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Other names of the only circle: those of the question that the picture does not have.

        Maps each such name to the centre.
        """
        drawn = {circle.centre for circle in self.circles}
        if len(drawn) != 1:
            return {}
        drawn_names = {*self.form.points, *self.neighbours}.union(
            *(circle.points for circle in self.circles)
        )
        called = {
            part.names[0]
            for term in self.asked
            for part in term.walk()
            if part.head == "Circle" and part.names and _POINT.fullmatch(part.names[0])
        }
        centre = drawn.copy().pop()
        return dict.fromkeys(sorted(called - drawn_names - drawn), centre)

    def point(self, name: str) -> str:
        """The point of that name, or the one that it is another name of. Raises `UnreadError`."""
        name = self.aliases.get(name, name)
        if name not in self._known:
            raise UnreadError(f"there is no point {name}")
        return name

    def check_points(self, names: Iterable[str]) -> None:
        """Raise `UnreadError` where one of the points is not in the form."""
        for name in names:
            if name not in self._known:
                raise UnreadError(f"there is no point {name}")

    @cached_property
    def _known(self) -> set[str]:
        """The names of all points, for quick look-ups."""
        return set(self.points)

    def _circles(self) -> list[Circle]:
        """The circles of the form with their points; concentric ones have radii of their own."""
        on_circle: dict[tuple[str, str], list[str]] = {}
        nameless: list[tuple[str, str]] = []
        for term in self.terms:
            if term.head != "PointLiesOnCircle" or len(term.arguments) != 2:
                continue
            point = term.arguments[0].head
            circle = term.arguments[1]
            if len(circle.names) > 1:
                points = on_circle.setdefault((circle.names[0], circle.names[1]), [])
                if point not in points:
                    points.append(point)
            else:
                nameless.append((circle.names[0] if circle.names else circle.head, point))
        for centre in self.form.circles:
            if centre and not any(centre == listed_centre for listed_centre, _ in on_circle):
                on_circle[centre, ""] = []
        for centre, point in nameless:
            key = next((key for key in on_circle if key[0] == centre), (centre, ""))
            if centre == "$" and len(on_circle) == 1:
                key = next(iter(on_circle))
            points = on_circle.setdefault(key, [])
            if point not in points and _POINT.fullmatch(key[0]):
                points.append(point)
        count: dict[str, int] = defaultdict(int)
        circles = []
        for (centre, _), points in on_circle.items():
            if not _POINT.fullmatch(centre):
                continue
            count[centre] += 1
            number = count[centre]
            radius = f"radius {centre}" if number == 1 else f"radius {centre} {number}"
            circles.append(Circle(centre=centre, radius=radius, points=tuple(points)))
        return circles

    def circle(self, term: Term | None = None) -> Circle:
        """The circle that a term names; the only one where it names none. Raises `UnreadError`."""
        name = term.names[0] if term is not None and term.names else "$"
        name = self.aliases.get(name, name)
        centred = [circle for circle in self.circles if circle.centre == name]
        if centred:
            return self._outermost(centred)
        if len(self.circles) == 1:
            return self.circles[0]
        if name in self._known:
            return Circle(centre=name, radius=f"radius {name}", points=())
        if self.circles and len({circle.centre for circle in self.circles}) == 1:
            return self._outermost(self.circles)
        raise UnreadError("the form does not say which circle is meant")

    def _outermost(self, circles: Sequence[Circle]) -> Circle:
        """The largest of concentric circles, as far as the picture shows."""
        return max(circles, key=lambda circle: self.drawn_radius(circle) or 0.0)

    def drawn_radius(self, circle: Circle) -> float | None:
        """The radius in the picture; None where no point of the circle has a place."""
        if circle.centre not in self.places:
            return None
        reaches = [
            abs(self.places[name] - self.places[circle.centre])
            for name in circle.points
            if name in self.places
        ]
        return sum(reaches) / len(reaches) if reaches else None

    def circle_of_arc(self, names: Sequence[str]) -> Circle:
        """The circle that an arc lies on.

        Raises `UnreadError` where none or several have its ends.
        """
        ends = {names[0], names[-1]}
        having = [circle for circle in self.circles if ends <= set(circle.points)]
        if len(having) > 1:
            having = [circle for circle in having if circle.centre not in names]
        if len(having) != 1:
            raise UnreadError(
                f"the form does not say on which circle the arc {''.join(names)} lies"
            )
        return having[0]

    # Places that the annotation lacks

    def _imagine_places(self) -> None:
        """Give a point without a place one that its facts suggest.

        It is a similar figure's copy, or a foot on a line. A place far beside the line that its
        point lies on is a slip of the annotation, and counts as none.
        """
        for (first, last), points in sorted(self.on_segment.items()):
            for name in sorted(points):
                if {first, name, last} <= self.places.keys():
                    way = self.places[last] - self.places[first]
                    beside = cross(way, self.places[name] - self.places[first])
                    if abs(beside) > _FAR_BESIDE * abs(way) ** 2:
                        del self.places[name]
        self._copy_similar()
        for _ in range(2):
            for (first, last), points in sorted(self.on_segment.items()):
                if first not in self.places or last not in self.places:
                    continue
                for name in sorted(points - self.places.keys()):
                    start = self.places[first]
                    way = self.places[last] - start
                    if abs(way) > 1e-9:
                        self.places[name] = start + way * self._share_of_foot(name, first, last)
                        self.imagined.add(name)

    def _share_of_foot(self, name: str, first: str, last: str) -> float:
        """How far along a segment the foot of a perpendicular from a known point lies.

        It is the middle where there is no such perpendicular.
        """
        start = self.places[first]
        way = self.places[last] - start
        for term in self.facts:
            if term.head != "Perpendicular" or not all(
                len(line.names) == 2 for line in term.arguments
            ):
                continue
            for line in term.arguments:
                if name not in line.names or line.names[0] == line.names[1]:
                    continue
                top = next(point for point in line.names if point != name)
                if top in self.places and top not in (first, last):
                    to_top = self.places[top] - start
                    if abs(cross(way, to_top)) > 0.05 * abs(way) ** 2:
                        return dot(way, to_top) / abs(way) ** 2
        return 0.5

    def _copy_similar(self) -> None:
        """Place a similar shape without places beside the one that has them, as its copy."""
        for term in self.terms:
            if term.head not in ("Similar", "Congruent") or len(term.arguments) != 2:
                continue
            first = tuple(unwrapped(term.arguments[0]).names)
            second = tuple(unwrapped(term.arguments[1]).names)
            if len(first) < 3 or len(first) != len(second):
                named = self.named_polygons
                if len(named) != 2 or len(named[0]) != len(named[1]):
                    continue
                first, second = named
            self.copied = (first, second)
            for source, copy in ((first, second), (second, first)):
                if not set(source) <= self.places.keys() or set(copy) & self.places.keys():
                    continue
                places = [self.places[name] for name in source]
                wide, _ = extent_of(places)
                for name, location in zip(copy, places, strict=True):
                    self.places[name] = location + 1.6 * wide
                    self.imagined.add(name)

    @cached_property
    def named_polygons(self) -> list[tuple[str, ...]]:
        """The polygons that facts name with all their corners, in order, each once."""
        parts = (part for term in self.terms for part in term.walk())
        named = (tuple(part.names) for part in parts if len(part.names) == CORNERS.get(part.head))
        return [
            names
            for names in dict.fromkeys(named)
            if len(set(names)) == len(names) and all(map(self._may_be_point, names))
        ]

    def circles_in_polygons(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The centres of circles that facts inscribe in polygons, with the corners of these."""
        for term in self.terms:
            if term.head not in ("InscribedIn", "CircumscribedTo") or len(term.arguments) != 2:
                continue
            disc, polygon = term.arguments
            if term.head == "CircumscribedTo":
                polygon, disc = term.arguments
            if disc.head == "Circle" and disc.names and tuple(polygon.names) in self.named_polygons:
                yield disc.names[0], tuple(polygon.names)

    def separate_arcs(self) -> list[tuple[str, tuple[str, str], tuple[str, str]]]:
        """Pairs of arcs whose sizes facts give and that have no common end, with their centre.

        Where no picture shows them they lie beside each other: who gives the sizes of AC and BD
        does not mean arcs one of which holds an end of the other.
        """
        ends: dict[tuple[str, str], str] = {}
        for term in self.facts:
            arcs = [part for part in term.walk() if part.head == "Arc" and len(part.names) == 2]
            for arc in arcs if term.head == "Equals" else []:
                with suppress(UnreadError):
                    ends[arc.names[0], arc.names[1]] = self.circle_of_arc(arc.names).centre
        return [
            (ends[first], first, second)
            for first, second in combinations(ends, 2)
            if ends[first] == ends[second] and not set(first) & set(second)
        ]

    def _seen_straight(self) -> list[tuple[str, str, str]]:
        """The lines ABC that are drawn as AB, BC and AC with B between, each as (B, A, C).

        The facts do not say so, but the picture shows it.
        """
        straight = []
        for first, last in self.form.lines:
            for middle in sorted(self.neighbours[first] & self.neighbours[last]):
                if not {first, middle, last} <= self.places.keys():
                    continue
                before = self.places[middle] - self.places[first]
                behind = self.places[last] - self.places[middle]
                length = abs(self.places[last] - self.places[first])
                listed_points = self.on_segment.get((first, last), set()) | self.on_segment.get(
                    (last, first), set()
                )
                is_between = dot(before, behind) > 0
                is_beside = abs(cross(before, behind)) >= _STRAIGHT * length**2
                if is_between and not is_beside and middle not in listed_points:
                    self.on_segment[first, last].add(middle)
                    straight.append((middle, first, last))
        return straight

    # Lines

    @cached_property
    def rows(self) -> list[list[str]]:
        """The straight lines with all their points in order, as far as these have places."""
        on_line: dict[frozenset[str], set[str]] = {
            frozenset(line): set(line) for line in self.form.lines if line[0] != line[1]
        }
        for segment, points in self.on_segment.items():
            on_line.setdefault(frozenset(segment), set(segment)).update(points)
        rows: list[list[str]] = []
        for points in sorted(on_line.values(), key=lambda points: (-len(points), sorted(points))):
            placed = sorted(points & self.places.keys())
            if len(placed) < 2 or any(set(placed) <= set(row) for row in rows):
                continue
            start = self.places[placed[0]]
            end = self.places[max(placed, key=lambda name: abs(self.places[name] - start))]
            rows.append(sorted(placed, key=lambda name: abs(self.places[name] - end)))
        return rows

    @cached_property
    def lines(self) -> list[list[str]]:
        """All lines: `rows`, and those with a point that has no place.

        The latter are in the order that the facts give: the ends outside, the points that lie on
        the line between them.
        """
        lines = list(self.rows)
        for (first, last), points in sorted(self.on_segment.items()):
            line = [first, *sorted(points), last]
            if not set(line) <= self.places.keys():
                lines.append(line)
        for segment in self.form.lines:
            if not any(set(segment) <= set(line) for line in lines):
                lines.append(list(segment))
        return lines

    def are_on_one_row(self, names: Iterable[str]) -> bool:
        """Whether one line of the drawing has all of these points."""
        required = set(names)
        return any(required <= set(row) for row in self.lines)

    def segment(self, term: Term) -> tuple[str, str]:
        """The two points of a line; of `Line(m)`, of the segment whose length is m.

        Raises `UnreadError`.
        """
        names = term.names
        if term.head != "Line" or not names:
            raise UnreadError(f"{term} is no line")
        if len(names) == 2:
            return self.point(names[0]), self.point(names[1])
        for fact in self.facts:
            measured = _measured_line(fact)
            if measured is not None and fact.arguments[1].head == names[0]:
                return self.point(measured[0]), self.point(measured[1])
        raise UnreadError(f"the form does not say which line {names[0]} is")

    def parallel_looking(self, count: int) -> list[tuple[str, str]]:
        """The rows that look most parallel, for lines whose names the picture does not have.

        Raises `UnreadError`.
        """
        best: tuple[float, tuple[list[str], ...]] | None = None
        for rows in combinations(self.rows, count):
            if any(set(first) & set(second) for first, second in combinations(rows, 2)):
                continue
            has_transversal = any(
                all(set(row) & set(third) for row in rows)
                for third in self.rows
                if third not in rows
            )
            if not has_transversal:
                continue
            apart = max(
                self.degrees_apart(first, second) for first, second in combinations(rows, 2)
            )
            rank = apart - 0.3 * sum(len(row) for row in rows)
            if best is None or rank < best[0]:
                best = (rank, rows)
        if best is None or best[0] > 8:
            raise UnreadError("no lines of the picture look parallel")
        return [(row[0], row[-1]) for row in best[1]]

    def degrees_apart(self, first: Sequence[str], second: Sequence[str]) -> float:
        """How many degrees two rows are from parallel in the picture, from 0 to 90."""
        u = self.places[first[-1]] - self.places[first[0]]
        w = self.places[second[-1]] - self.places[second[0]]
        return math.degrees(math.asin(min(1.0, abs(sine(u, w)))))

    # Angles

    def angle(self, term: Term) -> tuple[str, str, str]:
        """The three points of an angle.

        Raises `UnreadError` where the corner alone does not say which one is meant.
        """
        names = term.names
        if len(names) == 3 and len(set(names)) == 3:
            return self.point(names[0]), self.point(names[1]), self.point(names[2])
        if len(names) != 1 or names[0] not in self._known:
            raise UnreadError(f"{term} is no angle of the form")
        return self._angle_at(names[0])

    def _angle_at(self, corner: str) -> tuple[str, str, str]:
        """The angle at a corner that has only one, or of a named shape, or the widest."""
        near = self._near(corner)
        if len(near) == 2:
            return near[0], corner, near[1]
        rays = self._rays(corner, near)
        if len(rays) == 2:
            return rays[0][1], corner, rays[1][1]
        triangle = self.named.get("Triangle")
        if triangle is None or corner not in triangle:
            triangle = next((shape for shape in self.named.values() if corner in shape), None)
        if triangle is not None:
            position = triangle.index(corner)
            return triangle[position - 1], corner, triangle[(position + 1) % len(triangle)]
        # The widest angle under 180 degrees, which has all other rays inside.
        rays.sort()
        for position, (direction, name) in enumerate(rays):
            before, last = rays[position - 1]
            if (before - direction) % 360 < 179 and len(rays) > 1:
                return name, corner, last
        raise UnreadError(f"the form does not say which angle at {corner} is meant")

    def _near(self, corner: str) -> list[str]:
        """The points that a drawn line joins with a corner."""
        near = sorted(self.neighbours.get(corner, ()))
        for row in self.lines:
            if corner in row:
                near += [name for name in row if name != corner]
        return list(dict.fromkeys(near))

    def _rays(self, corner: str, near: Iterable[str]) -> list[tuple[float, str]]:
        """The directions of the rays from a corner in degrees, each once, with a point on each."""
        rays: list[tuple[float, str]] = []
        if corner not in self.places:
            return rays
        for name in near:
            if name not in self.places:
                continue
            direction = math.degrees(phase(self.places[name] - self.places[corner]))
            if not any(
                abs((direction - ray_direction + 180) % 360 - 180) < _SAME_RAY
                and not self._are_on_two_lines(corner, (name, ray_name))
                for ray_direction, ray_name in rays
            ):
                rays.append((direction, name))
        return rays

    def _are_on_two_lines(self, corner: str, names: Collection[str]) -> bool:
        """Whether two points beside a corner lie on lines of at least three points that differ."""
        long_rows = [row for row in self.rows if corner in row and len(row) > 2]
        lines = [[row for row in long_rows if name in row] for name in names]
        return all(lines) and not any(row in lines[1] for row in lines[0])

    def around(self, corner: str, inside: str) -> tuple[str, str, str]:
        """The nearest rays on both sides of the ray from a corner to `inside`.

        Raises `UnreadError`.
        """
        if corner not in self.places or inside not in self.places:
            near = [name for name in self._near(corner) if name != inside]
            if len(near) != 2:
                raise UnreadError(f"the form does not say which angle at {corner} is meant")
            return near[0], corner, near[1]
        start = phase(self.places[inside] - self.places[corner])
        turns: dict[float, str] = {}
        for row in self.rows:
            if corner in row:
                for name in row:
                    if name != corner:
                        turns[
                            (phase(self.places[name] - self.places[corner]) - start) % math.tau
                        ] = name
        beside = sorted(turn for turn in turns if 0.06 < turn < math.tau - 0.06)
        if len(beside) < 2:
            raise UnreadError(f"the form does not say which angle at {corner} is meant")
        return turns[beside[0]], corner, turns[beside[-1]]

    # Regions and polygons

    @cached_property
    def _borders(self) -> dict[str, set[str]]:
        """Which points are next to each other on a drawn line."""
        borders: dict[str, set[str]] = defaultdict(set)
        for row in self.rows:
            for start, end in pairwise(row):
                borders[start].add(end)
                borders[end].add(start)
        return dict(borders)

    def _direction(self, start: str, end: str) -> float:
        """The direction of the way between two points, in radians."""
        return phase(self.places[end] - self.places[start])

    @cached_property
    def faces(self) -> list[list[str]]:
        """The inner regions that the drawn lines enclose, each as the points around it against the
        clock.
        """
        visited: set[tuple[str, str]] = set()
        faces = []
        for start in sorted(self._borders):
            for end in sorted(self._borders[start]):
                face = self._face(start, end, visited)
                if len(face) > 2 and len(set(face)) == len(face) and self.signed_area(face) > 0:
                    faces.append(face)
        return faces

    def _face(self, start: str, end: str, visited: set[tuple[str, str]]) -> list[str]:
        """The region to one side of a drawn edge; edges that it goes along are added to `visited`."""
        face: list[str] = []
        while (start, end) not in visited and len(face) < _MOST_FACES:
            visited.add((start, end))
            face.append(start)
            back = self._direction(end, start)
            onward = [name for name in sorted(self._borders[end]) if name != start] or [start]
            following = max(onward, key=lambda name: (self._direction(end, name) - back) % math.tau)
            start = end
            end = following
        return face

    def signed_area(self, names: Sequence[str]) -> float:
        """The area in square pixels by the shoelace formula; positive against the clock."""
        places = [self.places[name] for name in names]
        return sum(cross(places[i - 1], places[i]) for i in range(len(places))) / 2

    def corners(self, boundary: Sequence[str]) -> list[str]:
        """A boundary without the points at which it goes straight on."""
        count = len(boundary)
        return [
            name
            for i, name in enumerate(boundary)
            if not self.are_on_one_row((boundary[i - 1], name, boundary[(i + 1) % count]))
        ]

    @cached_property
    def polygons(self) -> list[list[str]]:
        """The corners of all regions, of all pairs of regions that share a side, and of the
        outline.
        """
        polygons = [self.corners(face) for face in self.faces]
        for first, second in combinations(self.faces[:60], 2):
            joined = _joined(first, second)
            if joined:
                polygons.append(self.corners(joined))
        outline = self.outline()
        if outline:
            polygons.append(outline)
        return polygons

    def outline(self, within: Iterable[str] | None = None) -> list[str]:
        """The corners of the outer boundary, without dead ends.

        Empty where there is none that is simple.
        """
        borders = {name: set(near) for name, near in self._borders.items()}
        if within is not None:
            borders = {name: near for name, near in borders.items() if name in set(within)}
        while True:
            dead = sorted(name for name, near in borders.items() if len(near) < 2)
            if not dead:
                break
            for name in dead:
                for neighbour in borders.pop(name):
                    borders.get(neighbour, set()).discard(name)
        if len(borders) < 3:
            return []
        first = min(
            borders, key=lambda name: (self.places[name].imag, self.places[name].real, name)
        )
        boundary = [first]
        current = first
        back = -math.pi / 2
        for _ in range(2 * _MOST_FACES):
            came_from = back

            def turn(name: str, at: str = current, came_from: float = came_from) -> float:
                return (self._direction(at, name) - came_from) % math.tau or math.tau

            following = min(sorted(borders[current]), key=turn)
            if following == first:
                break
            boundary.append(following)
            back = self._direction(following, current)
            current = following
        return [] if len(set(boundary)) != len(boundary) else self.corners(boundary)

    @cached_property
    def components(self) -> list[set[str]]:
        """The parts of the drawing that no line connects, from left to right."""
        remaining = set(self.neighbours)
        components = []
        while remaining:
            waiting = [min(remaining)]
            component: set[str] = set()
            while waiting:
                name = waiting.pop()
                if name not in component:
                    component.add(name)
                    waiting += sorted(self.neighbours[name] - component)
            remaining -= component
            components.append(component)
        return sorted(components, key=self._leftmost)

    def _leftmost(self, component: set[str]) -> float:
        """How far to the left a part of the drawing reaches."""
        return min(
            (self.places[name].real for name in component if name in self.places), default=0.0
        )

    def shape(self, term: Term) -> list[str]:
        """The corners of a shape in the order of the drawing.

        A shape without names is the one that is drawn.

        Raises `UnreadError` where the picture does not show which shape is meant.
        """
        if term.head in COLOURS:
            raise UnreadError(f"the form does not say where the region {term} lies")
        shape = unwrapped(term)
        names = shape.names
        if len(names) >= 3 and all(name in self._known for name in names):
            return self.in_drawing_order(names)
        if shape.head == "Shape" and names == ["A"] and not self.circles:
            return self._needed(self.outline(), term)
        if shape.head in self.named:
            return self.in_drawing_order(self.named[shape.head])
        count = CORNERS.get(shape.head)
        if count is None:
            if shape.head in ("Shape", "Polygon", "Figure") and (
                not self.circles or shape.head == "Polygon"
            ):
                return self._needed(self.outline(), term)
            raise UnreadError(f"the form does not say which shape {term} is")
        best = self._likest(shape.head, count)
        if best is not None:
            return best
        same_size = next(
            (list(named) for named in self.named.values() if len(named) == count), None
        )
        if same_size is None and count == 3:
            triangles = [
                names
                for names in combinations(sorted(self.neighbours), 3)
                if all(second in self.neighbours[first] for first, second in combinations(names, 2))
            ]
            same_size = list(triangles[0]) if len(triangles) == 1 else None
        return self._needed(same_size, term)

    def _needed(self, names: list[str] | None, term: Term) -> list[str]:
        """The names themselves. Raises `UnreadError` where there are none."""
        if not names:
            raise UnreadError(f"the picture does not show which shape {term} is")
        return names

    def in_drawing_order(self, names: Sequence[str]) -> list[str]:
        """Corners in the order round the shape.

        They may be named crosswise, as ABCD for A, B, D, C.
        """
        names = list(names)
        if len(names) < 4 or not set(names) <= self.places.keys():
            return names
        places = [self.places[name] for name in names]
        crossed = any(
            cross_each_other((places[i - 1], places[i], places[j - 1], places[j]))
            for i in range(len(names))
            for j in range(i)
        )
        if not crossed:
            return names
        middle = sum(places) / len(places)
        return sorted(names, key=lambda name: phase(self.places[name] - middle))

    def _likest(self, head: str, count: int) -> list[str] | None:
        """The drawn polygon with so many corners that looks most like its kind.

        The largest comes first among equals.
        """
        ranked = [
            (round(self._unlikeness(head, names) / _UNLIKE), -abs(self.signed_area(names)), names)
            for names in self.polygons
            if len(names) == count
        ]
        return min(ranked)[2] if ranked else None

    def _unlikeness(self, head: str, names: Sequence[str]) -> float:
        """How far a polygon of the picture is from its kind; 0 for one that has no kind to be like."""
        if len(names) != 4:
            return 0.0
        a, b, c, d = [self.places[name] for name in names]
        sides = [b - a, c - b, d - c, a - d]
        lengths = [abs(side) for side in sides]
        askew = [abs(sine(sides[0], sides[2])), abs(sine(sides[1], sides[3]))]
        unlike = 0.0
        if head in ("Parallelogram", "Rectangle", "Rhombus", "Square"):
            unlike += sum(askew)
        if head in ("Rectangle", "Square"):
            unlike += abs(cosine(sides[0], sides[1]))
        if head in ("Rhombus", "Square"):
            unlike += abs(math.log(lengths[0] / lengths[1]))
        if head == "Trapezoid":
            unlike += min(askew)
        if head == "Kite":
            ratios = [abs(math.log(lengths[i] / lengths[(i + 1) % 4])) for i in range(4)]
            unlike += min(ratios[0] + ratios[2], ratios[1] + ratios[3])
        return unlike

    # Parts of shapes

    def right_corner(self, names: Sequence[str]) -> str:
        """The corner of a triangle with the right angle.

        It is the marked one, else the one that looks most like it.
        """
        for term in self.facts:
            if term.head == "Perpendicular" and len(term.arguments) == 2:
                shared = set(term.arguments[0].names) & set(term.arguments[1].names)
                if len(shared) == 1 and shared <= set(names):
                    return shared.pop()
        if not set(names) <= self.places.keys():
            return names[1]

        def leaning(i: int) -> float:
            """How far the corner is from a right angle: the cosine between its sides."""
            corner = self.places[names[i]]
            return abs(
                cosine(self.places[names[i - 1]] - corner, self.places[names[(i + 1) % 3]] - corner)
            )

        return names[min(range(3), key=leaning)]

    def side_with(self, point: str, names: Sequence[str]) -> tuple[str, str]:
        """The side of a polygon that a point lies on.

        It is the side whose middle is nearest where no line goes through the point.
        """
        sides = sides_of(names)
        for side in sides:
            if self.are_on_one_row((point, *side)):
                return side
        if not {point, *names} <= self.places.keys():
            raise UnreadError(f"the form does not say on which side {point} lies")
        return min(
            sides,
            key=lambda side: abs(
                self.places[point] - (self.places[side[0]] + self.places[side[1]]) / 2
            ),
        )

    def with_base_first(self, names: Sequence[str]) -> list[str]:
        """The corners of a trapezoid, turned so that the first side is parallel to the third."""
        sides = [frozenset((names[i], names[(i + 1) % 4])) for i in range(4)]
        parallel_pairs = [
            {frozenset(line.names) for line in term.arguments}
            for term in self.facts
            if term.head == "Parallel"
        ]
        for i in (0, 1):
            if {sides[i], sides[i + 2]} in parallel_pairs:
                return [*names[i:], *names[:i]]
        if not set(names) <= self.places.keys():
            return list(names)
        a, b, c, d = [self.places[name] for name in names]
        first_leans = abs(sine(b - a, c - d)) > abs(sine(c - b, d - a))
        return [*names[1:], names[0]] if first_leans else list(names)

    def apex(self, names: Sequence[str]) -> str:
        """The corner of an isosceles triangle at which the two sides look equal."""
        if not set(names) <= self.places.keys():
            return names[0]

        def difference(i: int) -> float:
            """How unequal the two sides at a corner are: the logarithm of their ratio."""
            corner = self.places[names[i]]
            before = abs(corner - self.places[names[i - 1]])
            behind = abs(corner - self.places[names[(i + 1) % 3]])
            return abs(math.log(before / behind)) if before and behind else math.inf

        return names[min(range(3), key=difference)]

    def equal_parts_said(self, names: Sequence[str]) -> bool:
        """Whether a fact says already which sides or angles of a triangle are equal."""
        corners = set(names)
        for term in self.terms:
            if not term.is_equation:
                continue
            sides = [set(_inner_names(side, "LengthOf")) for side in term.arguments]
            if all(len(side) == 2 and side <= corners for side in sides) and sides[0] != sides[1]:
                return True
            angles = [_inner_names(angle, "MeasureOf") for angle in term.arguments]
            if all(len(angle) == 3 and angle[1] in corners for angle in angles):
                return True
        return False

    def are_called_equal(self, first: Collection[str], second: Collection[str]) -> bool:
        """Whether the facts say that two segments are equal, or give both the same length."""
        lengths: dict[frozenset[str], set[str]] = {
            frozenset(first): set(),
            frozenset(second): set(),
        }
        for term in self.facts:
            if not term.is_equation:
                continue
            sides = [frozenset(_inner_names(side, "LengthOf")) for side in term.arguments]
            if set(sides) == lengths.keys():
                return True
            if sides[0] in lengths and not term.arguments[1].arguments:
                lengths[sides[0]].add(term.arguments[1].head)
        return bool(lengths[frozenset(first)] & lengths[frozenset(second)])

    def similar_pair(self) -> tuple[list[str], list[str]]:
        """Two drawn shapes that are meant to be similar, corner by corner. Raises `UnreadError`."""
        if self.copied is not None:
            return list(self.copied[0]), list(self.copied[1])
        marked = self._marked_pair()
        if marked is not None:
            return marked
        parts = [part for part in self.components if len(part) >= 3 and part <= self.places.keys()]
        if len(parts) == 2:
            first = self.outline(parts[0])
            second = self.outline(parts[1])
            if first and len(first) == len(second):
                return first, self._matched(first, second)[1]
        shapes = list(
            {tuple(sorted(names)): names for names in self.polygons if len(names) > 2}.values()
        )
        drawn = {name for name in self.neighbours if name in self.places}
        best: tuple[float, list[str], list[str]] | None = None
        for first, second in combinations(shapes[:80], 2):
            if len(first) == len(second) and {*first, *second} >= drawn:
                distance, order = self._matched(first, second)
                if best is None or distance < best[0]:
                    best = (distance, first, order)
        if best is None or best[0] >= 1.5:
            raise UnreadError("the picture does not show which shapes are similar")
        return best[1], best[2]

    def _marked_pair(self) -> tuple[list[str], list[str]] | None:
        """Two polygons whose corners facts make equal one by one, where the picture has not the
        places of both.
        """
        partners: dict[str, str] = {}
        for fact in self.facts:
            if fact.is_equation:
                first = _inner_names(fact.arguments[0], "MeasureOf")
                second = _inner_names(fact.arguments[1], "MeasureOf")
                if len(first) == 3 and len(second) == 3:
                    partners[first[1]] = second[1]
        if len(partners) < 3 or self.neighbours.keys() <= self.places.keys():
            return None
        path = [min(partners)]
        while True:
            onward = [
                name
                for name in sorted(self.neighbours[path[-1]])
                if name in partners and name not in path
            ]
            if not onward:
                break
            path.append(onward[0])
        if len(path) < len(partners) or path[0] not in self.neighbours[path[-1]]:
            return None
        return path, [partners[name] for name in path]

    def _matched(self, first: list[str], second: list[str]) -> tuple[float, list[str]]:
        """How unlike two polygons are at best, and the order of the second one's corners then."""
        wanted_angles, wanted_lengths = self._measures(first)
        best: tuple[float, list[str]] | None = None
        for way in (second, second[::-1]):
            for start in range(len(way)):
                order = way[start:] + way[:start]
                angles, lengths = self._measures(order)
                ratios = [math.log(x / y) for x, y in zip(wanted_lengths, lengths, strict=True)]
                mean = sum(ratios) / len(ratios)
                spread = math.sqrt(sum((ratio - mean) ** 2 for ratio in ratios) / len(ratios))
                turned = sum(abs(x - y) for x, y in zip(wanted_angles, angles, strict=True)) / 30
                if best is None or turned + 3 * spread < best[0] - 1e-6:
                    best = (turned + 3 * spread, order)
        assert best is not None
        return best

    def _measures(self, names: Sequence[str]) -> tuple[list[float], list[float]]:
        """The angles of a polygon in degrees and the lengths of its sides, in the picture."""
        places = [self.places[name] for name in names]
        angles = []
        for i, location in enumerate(places):
            turn = phase(
                (places[i - 1] - location) * (places[(i + 1) % len(places)] - location).conjugate()
            )
            angles.append(abs(math.degrees(turn)))
        return angles, [max(abs(places[i] - places[i - 1]), 1e-9) for i in range(len(places))]


def _measured_line(fact: Term) -> list[str] | None:
    """The ends of the segment whose length a fact gives; None for any other fact."""
    if not fact.is_equation or fact.arguments[0].head != "LengthOf":
        return None
    measured = fact.arguments[0].arguments
    if not measured or measured[0].head != "Line" or len(measured[0].names) != 2:
        return None
    return measured[0].names


def _inner_names(term: Term, head: str) -> list[str]:
    """The names of `Line(A, B)`, also inside `LengthOf(...)`."""
    return term.arguments[0].names if term.head == head and term.arguments else term.names


def _joined(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """The boundary of two regions together; empty where they share no side."""
    edges = set(sides_of(first))
    second_edges = set(sides_of(second))
    shared = {(start, end) for start, end in edges if (end, start) in second_edges}
    if not shared:
        return []
    onward = dict(edges - shared)
    onward.update(second_edges - {(end, start) for start, end in shared})
    if not onward:
        return []
    start = min(onward)
    boundary = [start]
    following = onward.get(start)
    while following is not None and following != start and len(boundary) < _MOST_FACES:
        boundary.append(following)
        following = onward.get(following)
    return boundary if following == start else []
