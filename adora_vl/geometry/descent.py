"""Levenberg and Marquardt's method: from a place downhill to where the residuals are least.

No clock decides anything. Work is counted in evaluations of the equations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from adora_vl.geometry.layout import Vector
from adora_vl.geometry.system import System

_MAX_DAMPINGS_TRIED = 7  # dampings that one step tries
_DAMPING_DIVISOR_AFTER_SUCCESS = 8.0  # after a step downhill the next one is bolder
_DAMPING_FACTOR_AFTER_FAILURE = 6.0  # after a trial that failed the next one is more careful
_MIN_DAMPING = 1e-12
_NEGLIGIBLE_RESIDUAL = 1e-13  # largest residual at which nothing is left to gain
_MIN_STEPS_BEFORE_GIVING_UP = 15  # steps before slow progress ends the search


class Budget:
    """How many evaluations of the equations a search may still do.

    Work is not counted in seconds, so that every machine ends at the same place.
    """

    def __init__(self, evaluations: int) -> None:
        self.remaining = evaluations

    def take(self) -> bool:
        """Count one more evaluation, and tell whether it may be done."""
        self.remaining -= 1
        return self.remaining >= 0


@dataclass(frozen=True)
class _Objective:
    """What a search makes small: the residuals of a system, and how far the unknowns have moved.

    The unknowns before number `first_moving` do not move. The squared distances of the others from
    `begin` are multiplied by `weights` and added to the squared residuals.
    """

    system: System
    begin: Vector
    first_moving: int
    weights: Vector

    def displacement(self, state: Vector) -> Vector:
        """Return how far the unknowns of the search are from where they began."""
        return (state - self.begin)[self.first_moving :]

    def sum_of_squares(self, state: Vector, residuals: Vector) -> float:
        """Return the sum of squares that the search makes small, for the residuals at `state`."""
        return float(residuals @ residuals + self.weights @ self.displacement(state) ** 2)


@dataclass(frozen=True)
class _Position:
    """Where a search is: the unknowns, the residuals with their derivatives, and the next damping.

    `state` has the values of all unknowns, and `jacobian` the derivatives, shape (rows, unknowns).
    """

    state: Vector
    residuals: Vector
    jacobian: Vector
    damping: float

    @property
    def largest_residual(self) -> float:
        """The largest residual; 0 where there is no equation."""
        return float(np.abs(self.residuals).max()) if len(self.residuals) else 0.0


class Descent(NamedTuple):
    """Where a search has ended: the values of all unknowns, and the largest residual there."""

    state: Vector
    residual: float


def descend(
    system: System,
    *,
    state: Vector,
    budget: Budget,
    steps: int,
    first_moving: int = 0,
    pull: float = 0.0,
) -> Descent:
    """Search downhill from `state` for unknowns with small residuals.

    Args:
        system: The equations.
        state: The values of all unknowns to begin with.
        budget: How many evaluations of the equations are left; each step takes one.
        steps: How many steps the search may take.
        first_moving: The unknowns before this number stay as they are.
        pull: The weight of the squared distances of the points from where they began, beside the
            squared residuals. It holds the points near their beginning.
    """
    weights = np.zeros(system.count)
    weights[: system.first_unknown] = pull
    objective = _Objective(
        system=system, begin=state, first_moving=first_moving, weights=weights[first_moving:]
    )
    residuals, jacobian = system.residuals(state)
    position = _Position(state=state, residuals=residuals, jacobian=jacobian, damping=1e-3)
    for step in range(steps):
        is_solved = position.largest_residual < _NEGLIGIBLE_RESIDUAL
        # Where an equation has no value, no direction leads downhill.
        has_no_value = not math.isfinite(position.largest_residual)
        if is_solved or has_no_value or not budget.take():
            break
        next_position = _step_downhill(objective, position)
        if next_position is None:
            break
        squares_before = objective.sum_of_squares(position.state, position.residuals)
        squares_after = objective.sum_of_squares(next_position.state, next_position.residuals)
        gain = squares_before - squares_after
        position = next_position
        # A search that hardly improves while the residuals are large is stuck.
        is_far = squares_before > 1e-8
        if gain < 1e-9 * squares_before and is_far and step > _MIN_STEPS_BEFORE_GIVING_UP:
            break
        # A search with a pull need not be exact, since another one follows it.
        if pull and gain < 1e-3 * squares_before:
            break
    return Descent(state=position.state, residual=position.largest_residual)


def _step_downhill(objective: _Objective, position: _Position) -> _Position | None:
    """Return the position after one step downhill, as bold as one of the trials allows.

    The step d solves the damped normal equations, and is subtracted from the unknowns x:

        (J'J + W + damping * diagonal of (J'J + W)) d = J'r + W (x - begin)

    J are the derivatives of the residuals r, and W the weights of the squared distances from the
    beginning. The unknowns before `objective.first_moving` stay where they are. More damping makes
    the step shorter and turns it towards the steepest way down.

    Returns None where the slope is 0, or where no trial leads downhill.
    """
    first_moving = objective.first_moving
    weights = objective.weights
    slopes = np.nan_to_num(position.jacobian[:, first_moving:])
    normal = slopes.T @ slopes + np.diag(weights)
    downhill = slopes.T @ position.residuals + weights * objective.displacement(position.state)
    before = objective.sum_of_squares(position.state, position.residuals)
    if np.abs(downhill).max() < 1e-15:
        return None
    diagonal = np.maximum(normal.diagonal(), 1e-12)
    damping = position.damping
    for _ in range(_MAX_DAMPINGS_TRIED):
        damped = normal + np.diag(damping * diagonal + 1e-15)
        try:
            change = np.linalg.solve(damped, downhill)
        except np.linalg.LinAlgError:
            damping *= _DAMPING_FACTOR_AFTER_FAILURE
            continue
        trial = position.state.copy()
        trial[first_moving:] -= change
        residuals, jacobian = objective.system.residuals(trial)
        after = objective.sum_of_squares(trial, residuals)
        if math.isfinite(after) and after < before:
            softer = max(damping / _DAMPING_DIVISOR_AFTER_SUCCESS, _MIN_DAMPING)
            return _Position(state=trial, residuals=residuals, jacobian=jacobian, damping=softer)
        damping *= _DAMPING_FACTOR_AFTER_FAILURE
    return None
