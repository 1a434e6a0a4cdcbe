"""Figures that fulfil relations: the search from several starts, and how each is judged.

No clock decides anything. Work is counted in evaluations of the equations, and random starts have
fixed seeds, so a slow machine gives what a quick one gives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from adora_vl.geometry.descent import Budget, descend
from adora_vl.geometry.kind import COLLAPSED, KindOfFigure
from adora_vl.geometry.layout import Vector
from adora_vl.geometry.quantities import Distance, Equal, constant_of
from adora_vl.geometry.reading import Reading
from adora_vl.geometry.system import System
from adora_vl.geometry.vectors import extent_of

TIGHT = 1e-7  # largest residual of a figure that fulfils its facts
# Each start costs a search; with a picture the first two figures that agree end it.
STARTS = 8
# Without a picture all have to agree, so two figures that fit are to be found, not one.
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
_RANK = 1e-6  # singular values below this share of the largest count as none
_FREE = 1e-4  # share of its gradient with which a goal may move while the facts hold
_LEAST = 1e-6  # share of the figure's size; an answer below it is none
_SAME = 1e-5  # share by which equal answers may differ


@dataclass(frozen=True, eq=False)
class Solution:
    """A figure that fulfils the relations: its unknowns, its answer, and how well it is meant.

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
    """The relations of a reading as a system, with starts from the picture.

    `kind` is the kind of figure that is meant; `size` the length of the figure's larger side, and
    `pixels` that side in the picture.
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
        self.kind = KindOfFigure(self.drawing, self.system, self.places)

    def _size(self) -> tuple[float, float]:
        """Return the length of the figure's larger side, and that side in pixels.

        The length goes by the lengths that the facts give: by their scale to the picture where
        their ends have places there, else by their own middle value. Also notes in `is_scaled`
        whether there is any such length.
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
            if start not in places or end not in places:
                continue
            drawn_length = abs(places[start] - places[end])
            # Two points in one place of the picture would give a scale without bound.
            if drawn_length > 1e-6 * span:
                scales.append(length / drawn_length)
        self.is_scaled = bool(lengths)
        # A median, since one wrong or badly drawn length must not stretch the whole figure.
        if scales:
            return float(np.median(scales)) * span, span
        if lengths:
            # A side is often shorter than the whole figure, by how much nobody knows.
            return 1.5 * float(np.median(lengths)), span
        return _DEFAULT_SIZE, span

    # Starts

    def start(self, number: int) -> Vector:
        """Return the unknowns to begin with, ever further from the picture.

        `number` is that of the start; it seeds the noise, so that a start is always the same. The
        order of the draws from it must not change, or other figures would be found.
        """
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
                centre = self.system.location(v, circle.centre)
                v[i] = self.size * float(
                    np.mean(
                        [abs(self.system.location(v, point) - centre) for point in circle.points]
                    )
                )
        return v

    def _on_lines(self, v: Vector, number: int) -> Vector:
        """Return the start `v` with points moved onto the lines and circles that they are on.

        Points without a place have to begin so, else they come to lie in another order. Each fact in
        turn moves its points a little, as often as is needed; those with a place stay.
        """
        random = np.random.default_rng(number)
        position = self.system.position
        places = v[: self.system.first_unknown].reshape(-1, 2).copy()
        is_placed: set[str] = set()
        is_free = np.array([float(name not in self.places) for name in self.system.points])
        for names in self.kind.convex:
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
        """Return a point's place in the picture, from the middle, in shares of its size."""
        return (self.places[point] - self.middle) / self.pixels

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
        """Go downhill from `v` in the unknowns from `first` on, as `descend` does.

        The unknowns, and the largest residual there.
        """
        return descend(self.system, v=v, budget=budget, steps=steps, first=first, pull=pull)

    def solution(self, number: int, budget: Budget, loose: float) -> Solution | None:
        """Return the figure that one start leads to.

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
        """Return the solution at `v` with its answer; None where that is not finite."""
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
            faults=self._faults(v, value),
            far=self.kind.far(v),
            start=start,
        )

    def _faults(self, v: Vector, value: float) -> int:
        """Return the faults of a figure in kind, and of an answer that cannot be one.

        A length, an angle or an area is positive; a letter or a cosine may be anything.
        """
        count = self.kind.faults(v)
        goal = self.reading.goal_term
        is_measure = goal is not None and bool(goal.arguments) and self.reading.unit != "plain"
        if self.kind.used and is_measure and value <= _LEAST * self.size:
            count += COLLAPSED
        return count

    def freedom(self, v: Vector, gradient: Vector) -> tuple[float, Vector, float]:
        """Return how much of the goal's gradient lies along movements that all relations allow.

        Also the strongest of these movements, and how steep the equations are where they are
        flattest without being flat.
        """
        _, jacobian = self.system.residuals(v)
        # Each unknown is scaled by its own column, so that a letter in degrees and a place in
        # shares of the figure's size count alike in the rank.
        lengths = np.sqrt(np.einsum("ij,ij->j", jacobian, jacobian))
        scales = 1 / np.maximum(lengths, 1e-9)
        slope = gradient * scales
        steepness = float(np.linalg.norm(slope))
        # A goal that does not depend on the unknowns at all is fixed by every figure.
        if steepness < 1e-12:
            return 0.0, np.zeros_like(v), 1.0
        # Without any equation nothing holds the goal.
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

    # Which figure

    def solutions(
        self, budget: Budget, starts: int | None = None, loose: float = TIGHT
    ) -> list[Solution]:
        """Return the figures that the starts lead to, until two without a fault agree.

        A form without places goes through all its starts.
        """
        has_places = all(name in self.places for name in self.drawing.neighbours) and bool(
            self.places
        )
        if starts is None:
            starts = STARTS if has_places else STARTS_WITHOUT_PLACES
        max_starts = starts if self.places else max(starts, _MOST_STARTS)
        solutions: list[Solution] = []
        # In the order of the starts: the ones nearest to the picture are the likeliest.
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
        """Tell whether the goal keeps its value when the figure is pushed along free movements.

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
    """Tell whether two answers are equal but for rounding."""
    return abs(first - second) < share * max(1.0, abs(first))


def is_collapsed(solution: Solution) -> bool:
    """Tell whether points of the figure fall together, so that it is none."""
    return solution.faults >= COLLAPSED


def is_free(solution: Solution) -> bool:
    """Tell whether the facts let the goal move in this figure."""
    return solution.free > _FREE
