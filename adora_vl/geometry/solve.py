"""Figures that fulfil relations: Levenberg and Marquardt's method from several starts, and which
figure is meant.

No clock decides anything. Work is counted in evaluations of the equations, and random starts have
fixed seeds, so a slow machine gives what a quick one gives.
"""

from __future__ import annotations

import math
from cmath import phase
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from adora_vl.geometry.primitives import Reading
from adora_vl.geometry.quantities import Distance, Equal, constant_of
from adora_vl.geometry.shapes import (
    cross,
    cross_each_other,
    dot,
    extent_of,
    sides_of,
    sine,
)
from adora_vl.geometry.system import System, Vector

TIGHT = 1e-7  # largest residual of a figure that fulfils its facts
STARTS = 8
STARTS_WITHOUT_PLACES = 12
# of a form without places, until so many figures are found that are as its facts say
_MOST_STARTS = 40
_WANTED = 4
_DEFAULT_SIZE = 15.0  # of a figure with no given length
# The noise of the starts, in shares of the figure's size.
_NOISE = (0.002, 0.03, 0.03, 0.1, 0.15, 0.3)
# How much larger than the picture the figure begins; without a given length nobody knows.
_STRETCHES = (1.0, 1.0, 1.5, 1.0, 1.0, 1.0)
_WIDE_STRETCHES = (1.0, 4.0, 2.0, 0.4, 1.0, 8.0)
# First the points are held near the picture, ever less, so that small contradictions do not carry
# them away.
_PULLS = (1e-1, 1e-3)
_PULLED_STEPS = 8
_LETTER_STEPS = 25  # steps of the letters while the points are held
_STEPS = 80
# Without a picture points are moved onto their lines so often, and so far inside them.
_SWEEPS = 60
_INNER = 0.15
_TRIALS = 7  # dampings that one step tries
_RANK = 1e-6  # singular values below this share of the largest count as none
_FREE = 1e-4  # share of its gradient with which a goal may move while the facts hold
_COLLAPSED = 10  # faults of a figure in which points fall together
_SHORTEST = 0.015  # share of the figure's size; a shorter segment has fallen together
_LEAST = 1e-6  # share of the figure's size; an answer below it is none
_LEAST_BEND = 1e-3  # radians; a corner that bends less is none
_FLAT = 0.2  # sine of a drawn corner that is too flat to be compared
_SAME = 1e-5  # share by which equal answers may differ


class Budget:
    """How many evaluations of equations are left."""

    def __init__(self, evaluations: int) -> None:
        self.remaining = evaluations

    def take(self) -> bool:
        """Whether one more may be done; it counts as done."""
        self.remaining -= 1
        return self.remaining >= 0


@dataclass(frozen=True, eq=False)
class Solution:
    """A figure that fulfils the relations: its unknowns, the answer in it, and how well it is the
    one that is meant.

    `residual`: the largest. `free`: the share of the goal's gradient along which the facts let it
    move. `flattest`: how steep the equations are where they are flattest; small at a double root,
    which no computer finds to many digits. `faults`: how much the figure differs in kind from the
    picture. `far`: how far its points lie from the picture's.
    """

    v: Vector
    value: float
    residual: float
    free: float
    flattest: float
    faults: int
    far: float
    start: int


class FigureProblem:
    """The relations of a reading, as a system with starts from the picture, and the kind of figure
    that is meant.
    """

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.drawing = reading.drawing
        self.is_scaled = False  # whether a given length says how large the figure is
        self.size, self.pixels = self._size()
        self.system = System(
            points=self.drawing.points,
            relations=reading.relations,
            goal=reading.goal,
            size=self.size,
        )
        self.places = {
            name: self.drawing.places[name]
            for name in self.drawing.points
            if name in self.drawing.places
        }
        names = sorted(self.places)
        values = [self.places[name] for name in names]
        self.middle = sum(values) / len(values) if values else 0j
        self._compile_kind()

    def _size(self) -> tuple[float, float]:
        """The length of the figure's larger side, and that side in pixels.

        The length goes by the lengths that the facts give.
        """
        places = self.drawing.places
        values = list(places.values())
        span = 1.0
        if values:
            wide, high = extent_of(values)
            span = max(wide, high, 1e-9)
        scales = []
        lengths = []
        for relation in self.reading.relations:
            if not isinstance(relation, Equal) or not isinstance(relation.left, Distance):
                continue
            length = constant_of(relation.right)
            if length is None or length <= 0:
                continue
            lengths.append(length)
            start = relation.left.start
            end = relation.left.end
            if start in places and end in places and abs(places[start] - places[end]) > 1e-6 * span:
                scales.append(length / abs(places[start] - places[end]))
        self.is_scaled = bool(lengths)
        if scales:
            return float(np.median(scales)) * span, span
        if lengths:
            return 1.5 * float(np.median(lengths)), span
        return _DEFAULT_SIZE, span

    # Starts

    def start(self, number: int) -> Vector:
        """The unknowns to begin with; the numbers from 0 on are ever further from the picture."""
        random = np.random.default_rng(number)
        system = self.system
        v = np.zeros(system.count)
        noise = _NOISE[number % len(_NOISE)]
        stretches = _STRETCHES if self.is_scaled else _WIDE_STRETCHES
        stretch = stretches[number % len(_NOISE)]
        on_circle = {circle.centre: circle.points for circle in self.drawing.circles}
        for point in system.points:
            if point in self.places:
                location = self._from_picture(point) * stretch
            else:
                location = complex(*random.normal(0, 0.4, 2))
                around = on_circle.get(point, ())
                if len(around) > 1 and set(around) <= self.places.keys():
                    location = sum(self._from_picture(name) for name in around) / len(around)
            shift = random.normal(0, noise, 2)
            i = 2 * system.position[point]
            v[i] = location.real + shift[0]
            v[i + 1] = location.imag + shift[1]
        radii = {circle.radius: circle for circle in self.drawing.circles}
        for i, name in enumerate(system.unknowns, start=system.first_unknown):
            v[i] = random.uniform(1, 30)
            if number == 0:
                v[i] = 10.0
            elif number == 1:
                v[i] = 1.0
            if name.startswith("angle "):
                v[i] = 60.0
            circle = radii.get(name)
            if name.startswith("radius "):
                v[i] = 0.3 * self.size
            if circle is not None and circle.points:
                centre = self.location(v, circle.centre)
                v[i] = self.size * float(
                    np.mean([abs(self.location(v, point) - centre) for point in circle.points])
                )
        return v

    def _on_lines(self, v: Vector, number: int) -> Vector:
        """The start `v` with points moved until they lie on the lines and circles that they are on.

        Points without a place have to begin so, else they come to lie in another order. Each fact in
        turn moves its points a little, as often as is needed; those with a place stay.
        """
        random = np.random.default_rng(number)
        position = self.system.position
        places = v[: self.system.first_unknown].reshape(-1, 2).copy()
        is_placed: set[str] = set()
        is_free = np.array([float(name not in self.places) for name in self.system.points])
        for names in self.convex:
            way_round = random.permutation(len(names))[0] + np.arange(len(names))
            for name, step in zip(names, way_round, strict=True):
                if name not in is_placed:
                    turn = math.tau * (step + random.uniform(-0.2, 0.2)) / len(names)
                    places[position[name]] = 0.5 * np.array([math.cos(turn), math.sin(turn)])
            is_placed.update(names)
        segments = [
            (position[point], position[first], position[last], random.uniform(0.25, 0.75))
            for (first, last), points in sorted(self.drawing.on_segment.items())
            for point in sorted(points)
        ]
        rounds = [
            (position[circle.centre], [position[point] for point in circle.points])
            for circle in self.drawing.circles
            if circle.points
        ]
        for _ in range(_SWEEPS):
            for point, first, last, share in segments:
                way = places[last] - places[first]
                along = float((places[point] - places[first]) @ way) / (float(way @ way) + 1e-9)
                share = min(max(along, _INNER), 1 - _INNER)
                gap = places[first] + share * way - places[point]
                places[point] += 0.5 * is_free[point] * gap
                places[first] -= 0.5 * is_free[first] * (1 - share) * gap
                places[last] -= 0.5 * is_free[last] * share * gap
            for centre, points in rounds:
                ways = places[points] - places[centre]
                lengths = np.linalg.norm(ways, axis=1, keepdims=True) + 1e-9
                places[points] += (
                    0.5 * is_free[points, None] * (lengths.mean() / lengths - 1) * ways
                )
        v = v.copy()
        v[: self.system.first_unknown] = places.reshape(-1)
        radii = {circle.radius: circle for circle in self.drawing.circles}
        for i, name in enumerate(self.system.unknowns, start=self.system.first_unknown):
            circle = radii.get(name)
            if circle is not None and circle.points:
                ways = (
                    places[[position[point] for point in circle.points]]
                    - places[position[circle.centre]]
                )
                v[i] = self.size * float(np.linalg.norm(ways, axis=1).mean())
        return v

    def _from_picture(self, point: str) -> complex:
        """A point's place in the picture, from the middle, in shares of the figure's size."""
        return (self.places[point] - self.middle) / self.pixels

    def location(self, v: Vector, point: str) -> complex:
        """A point's place in the figure, in shares of its size."""
        i = 2 * self.system.position[point]
        return complex(v[i], v[i + 1])

    # Levenberg and Marquardt

    def improved(
        self,
        v: Vector,
        budget: Budget,
        *,
        steps: int,
        first: int = 0,
        pull: float = 0.0,
    ) -> tuple[Vector, float]:
        """Go downhill from `v` in the unknowns from `first` on.

        The unknowns, and the largest residual there.

        `pull` holds the points near where they began: the squares of their ways count so much
        beside the residuals.
        """
        system = self.system
        damping = 1e-3
        begin = v
        weights = np.zeros(system.count)
        weights[: system.first_unknown] = pull
        weights = weights[first:]
        residuals, jacobian = system.residuals(v)
        for step in range(steps):
            largest = float(np.abs(residuals).max()) if len(residuals) else 0.0
            if largest < 1e-13 or not math.isfinite(largest) or not budget.take():
                break
            slopes = np.nan_to_num(jacobian[:, first:])
            away = (v - begin)[first:]
            normal = slopes.T @ slopes + np.diag(weights)
            downhill = slopes.T @ residuals + weights * away
            before = float(residuals @ residuals + weights @ away**2)
            if np.abs(downhill).max() < 1e-15:
                break
            diagonal = np.maximum(normal.diagonal(), 1e-12)
            moved = False
            for _ in range(_TRIALS):
                damped = normal + np.diag(damping * diagonal + 1e-15)
                try:
                    change = np.linalg.solve(damped, downhill)
                except np.linalg.LinAlgError:
                    damping *= 6
                    continue
                trial = v.copy()
                trial[first:] -= change
                after_residuals, after_jacobian = system.residuals(trial)
                after = float(
                    after_residuals @ after_residuals + weights @ ((trial - begin)[first:]) ** 2
                )
                if math.isfinite(after) and after < before:
                    v = trial
                    residuals = after_residuals
                    jacobian = after_jacobian
                    damping = max(damping / 8, 1e-12)
                    moved = True
                    break
                damping *= 6
            if not moved or (before - after < 1e-9 * before and before > 1e-8 and step > 15):
                break
            if pull and before - after < 1e-3 * before:
                break
        return v, float(np.abs(residuals).max()) if len(residuals) else 0.0

    def solution(self, number: int, budget: Budget, loose: float) -> Solution | None:
        """The figure that one start leads to.

        None where it does not fulfil the relations up to `loose`.
        """
        v = self.start(number)
        if len(self.places) < len(self.system.points):
            v = self._on_lines(v, number)
        if self.system.unknowns:
            v, _ = self.improved(
                v, budget=budget, steps=_LETTER_STEPS, first=self.system.first_unknown
            )
        if self.places:
            for pull in _PULLS:
                v, _ = self.improved(v, budget=budget, steps=_PULLED_STEPS, pull=pull)
        v, residual = self.improved(v, budget, steps=_STEPS)
        if not math.isfinite(residual) or residual > loose:
            return None
        return self.judged(v, residual, number)

    def judged(self, v: Vector, residual: float, start: int) -> Solution | None:
        """The solution at `v` with its answer and faults; None where the answer is not finite."""
        value, gradient = self.system.goal_at(v)
        if not math.isfinite(value):
            return None
        free, _, flattest = self.freedom(v, gradient)
        return Solution(
            v=v,
            value=value,
            residual=residual,
            free=free,
            flattest=flattest,
            faults=self.faults(v, value),
            far=self.far(v),
            start=start,
        )

    def freedom(self, v: Vector, gradient: Vector) -> tuple[float, Vector, float]:
        """How much of the goal's gradient lies along movements that all relations allow.

        Also the strongest of these movements, and how steep the equations are where they are
        flattest without being flat.
        """
        _, jacobian = self.system.residuals(v)
        lengths = np.sqrt(np.einsum("ij,ij->j", jacobian, jacobian))
        scales = 1 / np.maximum(lengths, 1e-9)
        slope = gradient * scales
        steepness = float(np.linalg.norm(slope))
        if steepness < 1e-12:
            return 0.0, np.zeros_like(v), 1.0
        if not len(jacobian):
            return 1.0, slope, 1.0
        try:
            _, sizes, directions = np.linalg.svd(
                np.nan_to_num(jacobian * scales), full_matrices=True
            )
        except np.linalg.LinAlgError:
            return 1.0, slope, 1.0
        largest = max(float(sizes[0]), 1e-9)
        rank = int((sizes > _RANK * largest).sum())
        flattest = float(sizes[rank - 1]) / largest if rank else 1.0
        # A letter whose own equation is flat, as x^2 - 6x + 9 at 3, is scaled to be as steep as
        # any.
        letters = lengths[self.system.first_unknown :] * max(self.size, 1.0)
        flattest = min([flattest, *(float(length) for length in letters if length > 0)])
        allowed = directions[rank:]
        shares = allowed @ slope
        movement = (shares @ allowed) * scales
        return float(np.linalg.norm(shares)) / steepness, movement, flattest

    # The kind of figure

    def _compile_kind(self) -> None:
        """Note what the picture shows of order, turns and crossings, for `faults`."""
        drawing = self.drawing
        places = self.places
        self.segments = sorted({line for line in drawing.form.lines if line[0] != line[1]})
        on_circles = {name for circle in drawing.circles for name in circle.points}
        self.used = sorted({name for line in self.segments for name in line} | on_circles)
        # Of a line with a point without a place it is known which points lie between its ends, and
        # not in which order.
        self.orders = [row for row in drawing.rows if len(row) > 2] + [
            [first, point, last]
            for (first, last), points in sorted(drawing.on_segment.items())
            for point in sorted(points)
            if not {first, point, last} <= places.keys()
        ]
        self.turns: list[tuple[str, str, str, float]] = []
        for corner in sorted(drawing.neighbours):
            for first, last in combinations(sorted(drawing.neighbours[corner]), 2):
                if {first, corner, last} <= places.keys():
                    bend = sine(places[first] - places[corner], places[last] - places[corner])
                    if abs(bend) > _FLAT:
                        self.turns.append((first, corner, last, bend))
        self.apart: list[tuple[str, str, str, str]] = []
        placed = [line for line in self.segments if set(line) <= places.keys()]
        if len(placed) < 30:
            rows = [set(row) for row in drawing.rows]
            for segment, second_segment in combinations(placed, 2):
                ends = (*segment, *second_segment)
                shares = len(set(ends)) < 4 or any(len(set(ends) & row) >= 3 for row in rows)
                if not shares and not cross_each_other([places[name] for name in ends]):
                    self.apart.append(ends)
        self.convex: list[tuple[str, ...]] = []
        self.inside: list[tuple[str, tuple[str, ...]]] = []
        self.arcs: list[tuple[str, tuple[str, str], tuple[str, str]]] = []
        if not places:
            self.convex = [names for names in drawing.named_polygons if len(names) > 3]
            self.inside = list(drawing.circles_in_polygons())
            self.arcs = drawing.separate_arcs()

    def faults(self, v: Vector, value: float) -> int:
        """How much a figure differs in kind from the picture: order on lines, turns, crossings.

        A figure that has collapsed counts `_COLLAPSED`.
        """
        if not self.used:
            return 0
        at = {name: self.location(v, name) for name in self.used}
        wide, high = extent_of(at.values())
        size = max(wide, high)
        count = 0
        for start, end in self.segments:
            if abs(at[start] - at[end]) < _SHORTEST * size:
                count += _COLLAPSED
        if len(self.used) > 2 and self._is_flat(list(at.values())):
            count += _COLLAPSED
        count += len(self.disordered(v))
        for first, corner, last, bend in self.turns:
            if bend * sine(at[first] - at[corner], at[last] - at[corner]) < 0:
                count += 1
        for ends in self.apart:
            if cross_each_other(
                [self.location(v, name) for name in ends], tolerance=1e-9 * size**4
            ):
                count += 1
        count += sum(1 for names in self.convex if not self._is_convex(v, names))
        count += sum(1 for centre, names in self.inside if not self._is_inside(v, centre, names))
        count += sum(1 for centre, *arcs in self.arcs if not self._are_apart(v, centre, *arcs))
        for i, name in enumerate(self.system.unknowns, start=self.system.first_unknown):
            if name.startswith("radius ") and v[i] <= 0:
                count += _COLLAPSED
        count += self.system.mirrored_corners(v)
        if self._has_to_be_positive and value <= _LEAST * self.size:
            count += _COLLAPSED
        return count

    def _is_convex(self, v: Vector, names: Sequence[str]) -> bool:
        """Whether corners go round once, with a turn to the same side at each of them."""
        corners = [self.location(v, name) for name in names]
        sides = [corners[i] - corners[i - 1] for i in range(len(corners))]
        turns = [phase(sides[i] * sides[i - 1].conjugate()) for i in range(len(sides))]
        bends_alike = min(turns) > _LEAST_BEND or max(turns) < -_LEAST_BEND
        return bends_alike and abs(sum(turns)) < 1.5 * math.tau

    def _is_inside(self, v: Vector, point: str, names: Sequence[str]) -> bool:
        """Whether a point lies on the same side of all sides of a convex polygon."""
        location = self.location(v, point)
        ends = [(self.location(v, start), self.location(v, end)) for start, end in sides_of(names)]
        beside = [cross(end - start, location - start) for start, end in ends]
        return min(beside) > 0 or max(beside) < 0

    def _are_apart(
        self, v: Vector, centre: str, first: tuple[str, str], second: tuple[str, str]
    ) -> bool:
        """Whether of two arcs, each the shorter way round, none holds an end of the other."""
        for arc, ends in ((first, second), (second, first)):
            to_start, to_end = [self._way(v, centre, name) for name in arc]
            for name in ends:
                way = self._way(v, centre, name)
                # A point of the shorter way round lies on the inner side of both radii.
                if cross(to_start, way) * cross(way, to_end) > 0 < dot(way, to_start + to_end):
                    return False
        return True

    def _way(self, v: Vector, start: str, end: str) -> complex:
        """The way from one point of the figure to another."""
        return self.location(v, end) - self.location(v, start)

    def disordered(self, v: Vector) -> list[str]:
        """The lines whose points do not lie in the order that the picture or the facts give."""
        lines = []
        for row in self.orders:
            start = self.location(v, row[0])
            way = self.location(v, row[-1]) - start
            along = [dot(self.location(v, name) - start, way) for name in row]
            lines += ["".join(row) for before, behind in pairwise(along) if before >= behind]
        return lines

    @property
    def _has_to_be_positive(self) -> bool:
        """A length, an angle or an area is positive; a letter or a cosine may be anything."""
        goal = self.reading.goal_term
        return goal is not None and bool(goal.arguments) and self.reading.unit != "plain"

    def _is_flat(self, places: Sequence[complex]) -> bool:
        """Whether all points lie on one line, which the picture's do not."""
        if any(set(self.used) <= set(row) for row in self.drawing.lines):
            return False
        if (
            self.places
            and _flatness([self.places[name] for name in self.used if name in self.places]) < 1e-2
        ):
            return False
        return _flatness(places) < 1e-3

    def far(self, v: Vector) -> float:
        """How far the points lie from those of the picture; 0 is not at all.

        The figure is turned, shifted and scaled to fit as well as it can.
        """
        names = [name for name in sorted(self.places) if name not in self.drawing.imagined]
        if len(names) < 2:
            return 0.0
        target = np.array([self.places[name] for name in names])
        reached = np.array([self.location(v, name) for name in names])
        target = target - target.mean()
        reached = reached - reached.mean()
        turn = np.vdot(reached, target) / (np.vdot(reached, reached) + 1e-30)
        return float(np.linalg.norm(target - turn * reached) / (np.linalg.norm(target) + 1e-12))

    # Which figure

    def solutions(
        self, budget: Budget, starts: int | None = None, loose: float = TIGHT
    ) -> list[Solution]:
        """The figures that the starts lead to, until two without a fault agree.

        A form without places goes through all its starts.
        """
        has_places = all(name in self.places for name in self.drawing.neighbours) and bool(
            self.places
        )
        if starts is None:
            starts = STARTS if has_places else STARTS_WITHOUT_PLACES
        max_starts = starts if self.places else max(starts, _MOST_STARTS)
        solutions: list[Solution] = []
        for number in range(max_starts):
            flawless = sum(1 for solution in solutions if solution.faults == 0)
            if budget.remaining <= 0 or (number >= starts and flawless >= _WANTED):
                break
            solution = self.solution(number, budget, loose)
            if solution is None:
                continue
            solutions.append(solution)
            tight = [
                candidate
                for candidate in solutions
                if candidate.residual < TIGHT and candidate.faults == 0
            ]
            agree = len(tight) >= 2 and is_same(tight[0].value, tight[-1].value)
            if agree and self.places:
                break
        return solutions

    def stays(self, solution: Solution, budget: Budget) -> bool:
        """Whether the goal keeps its value when the figure is pushed along free movements.

        At a double root the equations look as if they left the goal open, and do not.
        """
        _, gradient = self.system.goal_at(solution.v)
        _, movement, _ = self.freedom(solution.v, gradient)
        length = float(np.linalg.norm(movement))
        if length == 0:
            return True
        for push in (0.05, -0.05):
            v, residual = self.improved(solution.v + push * movement / length, budget, steps=_STEPS)
            value, _ = self.system.goal_at(v)
            if residual > TIGHT or not is_same(value, solution.value, 1e-3):
                return False
        return True


def is_same(first: float, second: float, share: float = _SAME) -> bool:
    """Whether two answers are equal but for rounding."""
    return abs(first - second) < share * max(1.0, abs(first))


def is_collapsed(solution: Solution) -> bool:
    """Whether points of the figure fall together, so that it is none."""
    return solution.faults >= _COLLAPSED


def is_free(solution: Solution) -> bool:
    """Whether the facts let the goal move in this figure."""
    return solution.free > _FREE


def _flatness(places: Sequence[complex]) -> float:
    """The larger of the distances from the longest line through the first point, over that line's
    length.
    """
    if len(places) < 3:
        return 1.0
    first = places[0]
    end = max(places, key=lambda location: abs(location - first))
    way = end - first
    if abs(way) == 0:
        return 0.0
    return max(abs(cross(way, location - first)) for location in places) / abs(way) ** 2
