"""Which facts exclude each other, where no figure fulfils all of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from adora_vl.geometry.choose import Outcome, choose_outcome
from adora_vl.geometry.descent import Budget, descend
from adora_vl.geometry.forms import LogicForm, Term, points_in_term
from adora_vl.geometry.measures import unit_of_term
from adora_vl.geometry.quantities import Constant
from adora_vl.geometry.reading import Reading, read_facts
from adora_vl.geometry.solve import FigureProblem, answers_agree, is_collapsed

_MAX_FACTS_TRIED = 14  # facts of one kind that are left out one by one
_STARTS_WITHOUT_FACT = (
    4  # of a form without a fact, of which many are tried; two that agree end a search
)
# A contradiction that is named has to hold: few facts are cheap to search from many starts.
_STARTS_ALONE = 24
_EVALUATIONS_ALONE = 4000
_MAX_FACTS_NAMED = 6  # facts that a person still reads
_MIN_RESIDUAL_SHARE = (
    1e-3  # share of the largest residual that a fact has to have to count as involved
)


@dataclass(frozen=True)
class Repair:
    """Facts that were left out so that a figure fits, and what the figure says then.

    `left_out` are the numbers of these facts.
    """

    left_out: tuple[int, ...]
    outcome: Outcome
    problem: FigureProblem


@dataclass(frozen=True)
class Conflict:
    """What contradicts: the numbers of facts each of which alone, left out, lets a figure fit.

    Where no fact does, they are the facts that are involved. `is_certain`: these facts exclude each
    other by themselves. Where they do not, a figure may exist that the search has missed.

    `repairs` are the figures without a fault that then fit. `repair` is one of them where all of
    one kind have the same answer.
    """

    facts: tuple[int, ...]
    repairs: tuple[Repair, ...]
    repair: Repair | None
    is_certain: bool


def find_conflict(form: LogicForm, reading: Reading, budget: Budget) -> Conflict:
    """Leave out facts until figures fit, and say which facts contradict each other.

    All lengths beside angles go first, or the other way round, then one fact at a time: first the
    values that facts give, then the relations of the figure, and last what the question itself
    supposes. `budget` counts evaluations for all trials together; a trial that finds it spent
    counts as one that does not fit.
    """
    terms = reading.drawing.terms
    used = {source for source in reading.fact_numbers if source is not None}
    values = [number for number in sorted(used) if gives_size(terms[number])]
    value_facts = [number for number in values if number < len(reading.drawing.fact_terms)]
    relation_facts = [
        number for number in sorted(used - set(values)) if number < len(reading.drawing.fact_terms)
    ]
    question_facts = [
        number for number in sorted(used) if number >= len(reading.drawing.fact_terms)
    ]
    involved = _facts_missed_by_nearest_figure(FigureProblem(reading), budget)
    groups: list[list[tuple[int, ...]]] = [_facts_of_other_kind(reading, values)]
    for numbers in (value_facts, relation_facts, question_facts):
        # Facts that the nearest figure misses come first, since only so many are tried.
        likely = [number for number in numbers if number in involved]
        rest = [number for number in numbers if number not in involved]
        groups.append([(number,) for number in [*likely, *rest][:_MAX_FACTS_TRIED]])
    repairs: list[Repair] = []
    chosen: Repair | None = None
    is_settled = False
    for group in groups:
        attempts = [_try_without_facts(form, left_out, budget) for left_out in group]
        fitting = [repair for repair in attempts if repair is not None]
        repairs += fitting
        answered = [repair for repair in fitting if repair.outcome.status == "answered"]
        # The first kind of fact that helps decides; later ones are named, but answer nothing.
        if answered and not is_settled:
            is_settled = True
            first = answered[0].outcome.value
            assert first is not None
            agree = all(
                answers_agree(first, repair.outcome.value or 0.0, 1e-4) for repair in answered
            )
            chosen = answered[0] if agree else None
    single = tuple(
        dict.fromkeys(repair.left_out[0] for repair in repairs if len(repair.left_out) == 1)
    )
    named = single or tuple(number for number in involved if number < len(terms))
    return Conflict(
        facts=named[:_MAX_FACTS_NAMED],
        repairs=tuple(repairs),
        repair=chosen,
        is_certain=_exclude_each_other(form, reading, named),
    )


def _exclude_each_other(form: LogicForm, reading: Reading, named: Sequence[int]) -> bool:
    """Tell whether no figure fulfils these facts alone, with what lies on their lines and circles.

    `named` are the numbers of the facts. So few facts are fulfilled by many starts if by any
    figure, which a whole diagram is not.
    """
    terms = reading.drawing.terms
    points = {point for number in named for point in points_in_term(terms[number])}
    left_out = [
        number
        for number, term in enumerate(terms)
        if number not in named
        and not (term.head.startswith("PointLiesOn") and points_in_term(term) <= points)
    ]
    alone = read_facts(form, without=left_out)
    alone.goal = Constant(0.0)
    problem = FigureProblem(alone)
    budget = Budget(_EVALUATIONS_ALONE)
    return not any(
        not is_collapsed(solution) and not problem.kind.disordered_lines(solution.state)
        for solution in problem.solutions(budget, starts=_STARTS_ALONE)
    )


def gives_size(term: Term) -> bool:
    """Tell whether a fact gives the size of something: `AB = 5`, `angle ABC = 2x`."""
    return term.is_equation and not term.arguments[1].arguments


def _facts_of_other_kind(reading: Reading, values: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the facts of the kind that the goal is not: lengths for an angle, angles for a length.

    `values` are the numbers of all facts that give sizes. The result is a list with one group of
    numbers, or empty where only one kind is there.
    """
    terms = reading.drawing.terms
    lengths = tuple(number for number in values if unit_of_term(terms[number]) == "length")
    angles = tuple(number for number in values if unit_of_term(terms[number]) == "degrees")
    if not lengths or not angles:
        return []
    return [lengths if _unit_of_goal(reading) == "degrees" else angles]


def _unit_of_goal(reading: Reading) -> str:
    """Return the unit of the goal; that of a letter is the unit of the first fact that has it."""
    goal = reading.goal_term
    if goal is None or goal.arguments or not re.fullmatch("[a-z]", goal.head):
        return reading.unit
    for term in reading.drawing.terms:
        if gives_size(term) and re.search(
            rf"(?<![a-z\\]){goal.head}(?![a-z])", term.arguments[1].head
        ):
            return unit_of_term(term.arguments[0])
    return reading.unit


def _try_without_facts(form: LogicForm, left_out: Iterable[int], budget: Budget) -> Repair | None:
    """Search a figure without some facts; None where none fits without a fault.

    `left_out` are the numbers of these facts.
    """
    numbers = tuple(left_out)
    if budget.remaining <= 0:
        return None
    reading = read_facts(form, without=numbers)
    if reading.goal is None:
        return None
    problem = FigureProblem(reading)
    result = choose_outcome(problem, budget, starts=_STARTS_WITHOUT_FACT)
    if result.solution is None or result.solution.faults:
        return None
    return Repair(left_out=numbers, outcome=result, problem=problem)


def _facts_missed_by_nearest_figure(problem: FigureProblem, budget: Budget) -> list[int]:
    """Return the numbers of the facts that the nearest figure misses, the worst missed first.

    The nearest figure misses all facts together as little as it can.
    """
    best: np.ndarray | None = None
    for number in (0, 1):
        state, _ = descend(
            problem.system, state=problem.starts.near_picture(number), budget=budget, steps=60
        )
        residuals, _ = problem.system.residuals(state, slopes=False)
        if np.isfinite(residuals).all() and (best is None or residuals @ residuals < best @ best):
            best = residuals
    if best is None or not len(best):
        return []
    sources = {
        id(relation): source
        for relation, source in zip(
            problem.reading.relations, problem.reading.fact_numbers, strict=True
        )
    }
    misses: dict[int, float] = {}
    for residual, relation in zip(np.abs(best), problem.system.residual_relations, strict=True):
        source = sources.get(id(relation))
        if source is not None and residual > _MIN_RESIDUAL_SHARE * np.abs(best).max():
            misses[source] = max(misses.get(source, 0.0), float(residual))
    return sorted(misses, key=lambda source: (-misses[source], source))
