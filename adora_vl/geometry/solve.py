"""Figures that fulfil relations: the search from several starts, and how each is judged.

No clock decides anything. Work is counted in evaluations of the equations, and random starts have
fixed seeds, so a slow machine gives what a quick one gives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from adora_vl.geometry.descent import Budget, descend
from adora_vl.geometry.kind import FAULTS_OF_COLLAPSE, KindOfFigure
from adora_vl.geometry.layout import Vector
from adora_vl.geometry.reading import Reading
from adora_vl.geometry.scale import estimate_scale
from adora_vl.geometry.starts import Starts
from adora_vl.geometry.system import System

MAX_RESIDUAL = 1e-7  # largest residual of a figure that fulfils its facts
# How many searches begin, if every point has a place in the picture. They end earlier once two
# figures agree.
START_COUNT = 8
# How many begin otherwise. They are more, so that a second figure that fits is not missed.
START_COUNT_WITHOUT_PLACES = 12
# A form without any places is searched further, until 4 figures without a fault or 40 starts.
_MAX_STARTS = 40
_ENOUGH_FLAWLESS = 4
# At first the points are held near the picture, so that small contradictions do not carry them
# away. These are the weights of their squared distances from it, beside the squared residuals.
_PULL_STRENGTHS = (1e-1, 1e-3)
_STEPS_PER_PULL = 8
_LETTER_STEPS = 25  # steps of the letters while the points are held
_MAX_STEPS = 80
_RANK_TOLERANCE = 1e-6  # singular values below this share of the largest count as none
# The largest `Freedom.share` of a goal that counts as determined.
_MAX_FREE_SHARE = 1e-4
# How far from a figure the search for its neighbours begins, in shares of its size.
_PUSHES_TO_NEIGHBOURS = (0.1, -0.1, 0.3, -0.3)
_MIN_MEASURE = 1e-6  # share of the figure's size; a measure that is smaller counts as 0
_ANSWER_TOLERANCE = 1e-5  # share by which equal answers may differ
_PUSHED_ANSWER_TOLERANCE = 1e-3  # the same after a push away from a double root and back


class Freedom(NamedTuple):
    """How far the relations of a figure leave its goal open.

    Some movements of the figure keep all relations. `share` is the part of the goal's gradient
    along them, from 0 (the goal is determined) to 1. Of these movements, `movement` changes the
    goal most.

    All other movements change the relations. `flattest` changes them least, and `min_slope` is by
    how much. It is small at a double root, such as x = 3 of `x^2 - 6x + 9 = 0`, which no computer
    finds to many digits.
    """

    share: float
    movement: Vector
    min_slope: float
    flattest: Vector


@dataclass(frozen=True, eq=False)
class Solution:
    """A figure that fulfils the relations, its answer, and how much it is like the picture.

    `state` are the unknowns, `value` is the goal's value there, and `residual` the largest
    residual. `free_share` and `min_slope` are `share` and `min_slope` of `Freedom`. `faults` counts
    how much the figure differs in kind from the picture, and `picture_distance` is how far its
    points lie from the picture's. `start` is the number of the start that led to it.
    """

    state: Vector
    value: float
    residual: float
    free_share: float
    min_slope: float
    faults: int
    picture_distance: float
    start: int


class FigureProblem:
    """The facts of a form as equations, and the search for figures that fulfil them.

    `places` are the places of points in the picture, `scale` says how large figure and picture are,
    `kind` what kind of figure is meant, and `starts` where searches begin.
    """

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.drawing = reading.drawing
        self.scale = estimate_scale(reading.relations, self.drawing.places)
        self.system = System(
            points=self.drawing.points,
            relations=reading.relations,
            goal=reading.goal,
            figure_size=self.scale.size,
        )
        self.places = {
            name: self.drawing.places[name]
            for name in self.drawing.points
            if name in self.drawing.places
        }
        self.kind = KindOfFigure(self.drawing, self.system, self.places)
        self.starts = Starts(
            system=self.system,
            drawing=self.drawing,
            scale=self.scale,
            places=self.places,
            convex=self.kind.convex_polygons,
        )

    @property
    def size(self) -> float:
        """The length of the figure's larger side, in the problem's unit."""
        return self.scale.size

    # The search

    def solution_from_start(
        self, start_number: int, budget: Budget, max_residual: float
    ) -> Solution | None:
        """Search downhill from one of the starts, and return the figure found there.

        First the letters move alone, since they begin anywhere. Then all unknowns move while the
        points are held near the picture, and last all unknowns move freely. Returns None where the
        figure has a residual over `max_residual`.
        """
        state = self.starts.near_picture(start_number)
        if len(self.places) < len(self.system.points):
            state = self.starts.moved_onto_lines(state, start_number)
        if self.system.unknowns:
            state, _ = descend(
                self.system,
                state=state,
                budget=budget,
                steps=_LETTER_STEPS,
                first_moving=self.system.first_unknown,
            )
        if self.places:
            for pull in _PULL_STRENGTHS:
                state, _ = descend(
                    self.system, state=state, budget=budget, steps=_STEPS_PER_PULL, pull=pull
                )
        state, residual = descend(self.system, state=state, budget=budget, steps=_MAX_STEPS)
        if not math.isfinite(residual) or residual > max_residual:
            return None
        return self._solution_at(state, residual=residual, start=start_number)

    def _solution_at(self, state: Vector, *, residual: float, start: int) -> Solution | None:
        """Return the solution at `state` with its answer; None where the answer is not finite.

        `state` has the values of all unknowns. `start` is the number of the start it was found
        from.
        """
        goal = self.system.goal_at(state)
        if not math.isfinite(goal.value):
            return None
        freedom = self._freedom(state, goal.slope)
        return Solution(
            state=state,
            value=goal.value,
            residual=residual,
            free_share=freedom.share,
            min_slope=freedom.min_slope,
            faults=self._faults(state, goal.value),
            picture_distance=self.kind.picture_distance(state),
            start=start,
        )

    def _faults(self, state: Vector, value: float) -> int:
        """Count how much a figure differs in kind from the picture, and what is impossible in it.

        `value` is the answer. A length, an angle or an area has to be positive. A letter or a
        cosine may have any value. An angle of more than a full turn is impossible.
        """
        count = self.kind.faults(state)
        count += FAULTS_OF_COLLAPSE * self.system.impossible_angles(state)
        goal = self.reading.goal_term
        is_measure = goal is not None and bool(goal.arguments) and self.reading.unit != "plain"
        if self.kind.used_points and is_measure and value <= _MIN_MEASURE * self.size:
            count += FAULTS_OF_COLLAPSE
        return count

    def _freedom(self, state: Vector, gradient: Vector) -> Freedom:
        """Return how far the relations leave the goal open at `state`, the values of all unknowns.

        The movements that keep all relations are the singular vectors of the relations' derivatives
        with the singular value 0. `share` is the length of the part of the goal's gradient that
        lies along them, over the length of the whole gradient. For example, let the one relation be
        y = 0 for a point (x, y). The share is 1 for the goal x, and 0 for the goal y.

        `gradient` has the goal's derivatives by all unknowns, shape (unknowns,).
        """
        _, jacobian = self.system.residuals(state)
        # Each unknown is scaled by the length of its column. Otherwise a letter in degrees and a
        # place in shares of the figure's size would count differently in the rank.
        lengths = np.sqrt(np.einsum("ij,ij->j", jacobian, jacobian))
        scales = 1 / np.maximum(lengths, 1e-9)
        slope = gradient * scales
        steepness = float(np.linalg.norm(slope))
        no_movement = np.zeros_like(state)
        # A goal that does not depend on the unknowns at all is fixed by every figure.
        if steepness < 1e-12:
            return Freedom(share=0.0, movement=no_movement, min_slope=1.0, flattest=no_movement)
        # Without any equation nothing holds the goal.
        if not len(jacobian):
            return Freedom(share=1.0, movement=slope, min_slope=1.0, flattest=no_movement)
        scaled_jacobian = np.nan_to_num(jacobian * scales)
        try:
            _, sizes, directions = np.linalg.svd(scaled_jacobian, full_matrices=True)
        except np.linalg.LinAlgError:
            return Freedom(share=1.0, movement=slope, min_slope=1.0, flattest=no_movement)
        largest = max(float(sizes[0]), 1e-9)
        rank = int((sizes > _RANK_TOLERANCE * largest).sum())
        min_slope = float(sizes[rank - 1]) / largest if rank else 1.0
        # The scaling hides a letter whose own equation is flat, as x^2 - 6x + 9 = 0 at 3. So the
        # lengths of the letters' unscaled columns count as well.
        letters = lengths[self.system.first_unknown :] * max(self.size, 1.0)
        min_slope = min([min_slope, *(float(length) for length in letters if length > 0)])
        # No relation changes along the directions behind the rank.
        allowed = directions[rank:]
        shares = allowed @ slope
        movement = (shares @ allowed) * scales
        share = float(np.linalg.norm(shares)) / steepness
        flattest = directions[rank - 1] * scales if rank else no_movement
        return Freedom(share=share, movement=movement, min_slope=min_slope, flattest=flattest)

    # Which figure

    def solutions(
        self, budget: Budget, starts: int | None = None, max_residual: float = MAX_RESIDUAL
    ) -> list[Solution]:
        """Return the figures that the starts lead to.

        With places the search ends once two figures without a fault agree. Without any places it
        goes on, since no picture tells which of several figures is meant.
        """
        if starts is None:
            starts = START_COUNT if self._is_wholly_drawn() else START_COUNT_WITHOUT_PLACES
        max_starts = starts if self.places else max(starts, _MAX_STARTS)
        solutions: list[Solution] = []
        # The first starts are nearest to the picture, and so the most likely to be right.
        for start_number in range(max_starts):
            flawless_count = sum(1 for solution in solutions if solution.faults == 0)
            has_enough = start_number >= starts and flawless_count >= _ENOUGH_FLAWLESS
            if budget.remaining <= 0 or has_enough:
                break
            solution = self.solution_from_start(start_number, budget, max_residual)
            if solution is None:
                continue
            solutions.append(solution)
            exact = [
                candidate
                for candidate in solutions
                if candidate.residual < MAX_RESIDUAL and candidate.faults == 0
            ]
            two_agree = len(exact) >= 2 and answers_agree(exact[0].value, exact[-1].value)
            if two_agree and self.places:
                break
        return solutions

    def _is_wholly_drawn(self) -> bool:
        """Tell whether the picture shows every point that lies on a drawn line."""
        return bool(self.places) and all(name in self.places for name in self.drawing.neighbours)

    def neighbours(self, solution: Solution, budget: Budget) -> list[Solution]:
        """Search on both sides of a figure for others that fulfil the relations, and return them.

        Two figures may be nearly the same, such as a kite whose corner has a little less or a
        little more than 90 degrees. All starts may lead to the same one. The other one lies in the
        direction in which the equations change least, so the search begins there.
        """
        goal = self.system.goal_at(solution.state)
        direction = self._freedom(solution.state, goal.slope).flattest
        length = float(np.linalg.norm(direction))
        if length == 0:
            return []
        neighbours: list[Solution] = []
        for push in _PUSHES_TO_NEIGHBOURS:
            pushed = solution.state + push * direction / length
            state, residual = descend(self.system, state=pushed, budget=budget, steps=_MAX_STEPS)
            if residual <= MAX_RESIDUAL:
                neighbour = self._solution_at(state, residual=residual, start=solution.start)
                if neighbour is not None:
                    neighbours.append(neighbour)
        return neighbours

    def goal_stays_when_pushed(self, solution: Solution, budget: Budget) -> bool:
        """Tell whether the goal keeps its value when the figure is pushed along a free movement.

        At a double root the derivatives say that the goal is free although it is not. A search from
        a pushed figure comes back to the same value then.
        """
        goal = self.system.goal_at(solution.state)
        freedom = self._freedom(solution.state, goal.slope)
        length = float(np.linalg.norm(freedom.movement))
        if length == 0:
            return True
        for push in (0.05, -0.05):
            pushed = solution.state + push * freedom.movement / length
            state, residual = descend(self.system, state=pushed, budget=budget, steps=_MAX_STEPS)
            goal = self.system.goal_at(state)
            has_moved = not answers_agree(goal.value, solution.value, _PUSHED_ANSWER_TOLERANCE)
            if residual > MAX_RESIDUAL or has_moved:
                return False
        return True


def answers_agree(first: float, second: float, tolerance: float = _ANSWER_TOLERANCE) -> bool:
    """Tell whether two answers differ by less than the share `tolerance` of the first."""
    return abs(first - second) < tolerance * max(1.0, abs(first))


def is_collapsed(solution: Solution) -> bool:
    """Tell whether points of the figure fall together, so that it does not count as a figure."""
    return solution.faults >= FAULTS_OF_COLLAPSE


def is_goal_free(solution: Solution) -> bool:
    """Tell whether the facts let the goal move in this figure, and so leave it open."""
    return solution.free_share > _MAX_FREE_SHARE
