"""Which of the figures that fulfil the facts is meant, and whether they determine the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from adora_vl.geometry.descent import Budget
from adora_vl.geometry.solve import (
    MAX_RESIDUAL,
    FigureProblem,
    Solution,
    answers_agree,
    is_collapsed,
    is_goal_free,
)

Status = Literal["answered", "open", "ambiguous", "conflict", "collapsed", "unread"]
_MAX_RESIDUAL_OF_ROUNDED_FACTS = 0.01  # largest residual of a figure whose facts were rounded
# Figures with rounded facts are compared only where none fits much better than the others.
_MAX_RESIDUAL_RATIO = 1.3
_ROUNDED_ANSWER_TOLERANCE = 2e-3  # share by which answers of such figures may differ
_DOUBLE_ROOT_TOLERANCE = 3e-4  # share by which answers at a double root may differ
_ANSWER_TOLERANCE = 1e-5  # share by which other equal answers may differ
_ANSWER_TOLERANCE_WITHOUT_PICTURE = 1e-4  # the same where no picture chooses
_DISTANCE_PER_FAULT = 0.1  # one fault counts like this distance from the picture
# A figure is no rival of the best one if it is this many times as unlike the picture.
_CLEARLY_NEARER_RATIO = 1.5
_NEGLIGIBLE_DISTANCE = 0.02  # a difference in unlikeness that never decides


@dataclass(frozen=True)
class Outcome:
    """What the search for figures has come to: a status, and an answer with its figure.

    Attributes:
        status: Whether the facts determine the answer.
        value: The answer, or the likeliest one of several; None without a figure.
        solution: The figure with this answer.
        rival_values: The answers of other figures that fulfil the facts as well.
        alternatives: Other figures with the same answer, where no picture chooses one. They may
            differ in what is not asked for.
        at_double_root: The answer is known to about four digits alone, since the equations have a
            double root there.
        disordered_lines: Lines whose points have another order in the figure than in the facts or
            in the picture. With such a line the status is `conflict`.
    """

    status: Status
    value: float | None = None
    solution: Solution | None = None
    rival_values: tuple[float, ...] = ()
    alternatives: tuple[Solution, ...] = ()
    at_double_root: bool = False
    disordered_lines: tuple[str, ...] = ()


def choose_outcome(
    problem: FigureProblem, budget: Budget, *, starts: int | None = None, rounded: bool = False
) -> Outcome:
    """Search for figures that fulfil the facts, and choose the one that is meant.

    `budget` counts the evaluations that are left. `starts` is the number of searches; by default it
    depends on how much the picture shows. With `rounded` the facts may be off by as much as a book
    rounds them. The outcome is a conflict where the chosen figure has the points of a line in
    another order than the facts or the picture.
    """
    outcome = _choose_by_likeness(problem, budget=budget, starts=starts, rounded=rounded)
    if outcome.solution is None or outcome.status in ("conflict", "collapsed"):
        return outcome
    disordered_lines = tuple(dict.fromkeys(problem.kind.disordered_lines(outcome.solution.state)))
    if not disordered_lines:
        return outcome
    value = outcome.value if outcome.status == "answered" else None
    return replace(outcome, status="conflict", value=value, disordered_lines=disordered_lines)


def _choose_by_likeness(
    problem: FigureProblem, budget: Budget, *, starts: int | None, rounded: bool
) -> Outcome:
    """Return the outcome without a check of the order of points on lines.

    Figures that have collapsed are ignored, and figures without a fault come before all others.
    """
    max_residual = _MAX_RESIDUAL_OF_ROUNDED_FACTS if rounded else MAX_RESIDUAL
    solutions = problem.solutions(budget, starts, max_residual)
    if not solutions:
        return Outcome(status="conflict")
    if rounded:
        # Figures that fit much worse than the best one are no rivals of it.
        least_residual = min(solution.residual for solution in solutions)
        residual_bound = _MAX_RESIDUAL_RATIO * least_residual + 1e-9
        solutions = [solution for solution in solutions if solution.residual < residual_bound]
    sound_solutions = [solution for solution in solutions if not is_collapsed(solution)]
    if not sound_solutions:
        best = min(solutions, key=_unlikeness)
        return Outcome(status="collapsed", value=best.value, solution=best)
    flawless_solutions = [solution for solution in sound_solutions if solution.faults == 0]
    candidates = flawless_solutions or sound_solutions
    if not problem.places:
        return _choose_without_picture(problem, candidates, budget)
    best = min(candidates, key=_unlikeness)
    if is_goal_free(best):
        return _choose_where_goal_seems_free(
            problem, best=best, candidates=candidates, budget=budget
        )
    tolerance = _ROUNDED_ANSWER_TOLERANCE if rounded else _ANSWER_TOLERANCE
    rivals = [solution for solution in candidates if _is_rival(solution, best, tolerance)]
    rival_values = tuple(sorted({round(solution.value, 6) for solution in rivals}))
    agreeing_count = sum(
        1 for solution in sound_solutions if answers_agree(solution.value, best.value, tolerance)
    )
    # A figure that differs from the picture is meant only if a second search finds its answer too;
    # the figure itself is one of the two.
    is_doubtful = best.faults > 0 and agreeing_count < 2
    if rivals or is_doubtful:
        return Outcome(
            status="ambiguous", value=best.value, solution=best, rival_values=rival_values
        )
    return Outcome(status="answered", value=best.value, solution=best)


def _unlikeness(solution: Solution) -> tuple[float, int]:
    """Return how unlike the picture a figure is, and the number of its start.

    In comparisons the start decides between equally unlike figures: the earlier one is better.
    """
    unlikeness = solution.picture_distance + _DISTANCE_PER_FAULT * solution.faults
    return round(unlikeness, 6), solution.start


def _is_rival(solution: Solution, best: Solution, tolerance: float) -> bool:
    """Tell whether a figure has another answer, and is about as much like the picture as the best.

    `tolerance` is the relative difference of answers that counts as rounding. A figure whose goal
    may still move is no rival, and a negative answer is no rival of a positive one.
    """
    if answers_agree(solution.value, best.value, tolerance) or is_goal_free(solution):
        return False
    if best.value > 0 > solution.value:
        return False
    unlikeness, _ = _unlikeness(solution)
    least_unlikeness, _ = _unlikeness(best)
    return unlikeness < _CLEARLY_NEARER_RATIO * least_unlikeness + _NEGLIGIBLE_DISTANCE


def _rival_values(candidates: Sequence[Solution], best: Solution, tolerance: float) -> list[float]:
    """Return the answers that differ from the best one by more than a share, sorted, each once."""
    return sorted(
        {
            round(solution.value, 6)
            for solution in candidates
            if not answers_agree(solution.value, best.value, tolerance)
        }
    )


def _choose_without_picture(
    problem: FigureProblem, candidates: Sequence[Solution], budget: Budget
) -> Outcome:
    """Return the outcome where no picture chooses, so that all figures have to agree.

    `candidates` are the figures to choose from. At least two have to be there, since a single one
    may be one of several.
    """
    best = min(
        candidates, key=lambda solution: (solution.faults, solution.residual, solution.start)
    )
    rival_values = _rival_values(candidates, best, _ANSWER_TOLERANCE_WITHOUT_PICTURE)
    with_fixed_goal = [solution for solution in candidates if not is_goal_free(solution)]
    if not rival_values and len(with_fixed_goal) == len(candidates):
        neighbours = problem.neighbours(best, budget)
        rivals = [solution for solution in neighbours if solution.faults <= best.faults]
        rival_values = _rival_values(rivals, best, _ANSWER_TOLERANCE_WITHOUT_PICTURE)
    if len(with_fixed_goal) < len(candidates):
        if not rival_values and problem.goal_stays_when_pushed(best, budget):
            return Outcome(status="answered", value=best.value, solution=best, at_double_root=True)
        return Outcome(
            status="open", value=best.value, solution=best, rival_values=tuple(rival_values[:3])
        )
    if rival_values:
        return Outcome(
            status="ambiguous",
            value=best.value,
            solution=best,
            rival_values=tuple(rival_values[:3]),
        )
    if len(candidates) < 2:
        return Outcome(status="ambiguous", value=best.value, solution=best)
    alternatives = tuple(solution for solution in candidates if solution is not best)
    return Outcome(status="answered", value=best.value, solution=best, alternatives=alternatives)


def _choose_where_goal_seems_free(
    problem: FigureProblem, best: Solution, candidates: Sequence[Solution], budget: Budget
) -> Outcome:
    """Return the outcome where the goal seems free in the best figure.

    It is open, unless pushing the figure does not move the goal. Then the equations have a double
    root there, and all figures of `candidates` have about the same answer.
    """
    agreeing = [
        solution
        for solution in candidates
        if answers_agree(solution.value, best.value, _DOUBLE_ROOT_TOLERANCE)
    ]
    if len(agreeing) == len(candidates) and problem.goal_stays_when_pushed(best, budget):
        value = float(np.median([solution.value for solution in agreeing]))
        return Outcome(status="answered", value=value, solution=best, at_double_root=True)
    rival_values = _rival_values(candidates, best, _DOUBLE_ROOT_TOLERANCE)
    return Outcome(
        status="open", value=best.value, solution=best, rival_values=tuple(rival_values[:3])
    )
