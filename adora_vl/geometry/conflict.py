"""Which facts exclude each other, where no figure fulfils all of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adora_vl.geometry.choose import Outcome, choose_outcome
from adora_vl.geometry.descent import Budget, descend
from adora_vl.geometry.logic_form import LogicForm, Term, points_in_term
from adora_vl.geometry.quantities import Constant
from adora_vl.geometry.reading import Reading, read_facts
from adora_vl.geometry.solve import FigureProblem, answers_agree, is_collapsed
from adora_vl.geometry.term_reader import unit_of_term

_MAX_FACTS_TRIED = 14  # facts of one kind that are left out one by one
# How many searches begin for a form without a fact. They are few, since many such forms are tried.
_STARTS_WITHOUT_FACT = 4
# How many begin where the named facts alone have to hold, so that the search misses no figure.
# Few facts are cheap.
_STARTS_WITH_NAMED_FACTS = 24
_EVALUATIONS_WITH_NAMED_FACTS = 4000
_MAX_FACTS_NAMED = 6  # facts that a person still reads
_ANSWER_TOLERANCE = 1e-4  # share by which the answers of figures without a fact may differ
# A fact counts as missed if its residual is more than this share of the largest one.
_MIN_RESIDUAL_SHARE = 1e-3


@dataclass(frozen=True)
class Repair:
    """A figure that fits without some facts, and its answer.

    `left_out` has the numbers of these facts. `outcome` is the result of the search without them,
    and `problem` has the equations of the other facts.
    """

    left_out: tuple[int, ...]
    outcome: Outcome
    problem: FigureProblem


@dataclass(frozen=True)
class Conflict:
    """Which facts contradict each other, and the figures that fit without some of them.

    `facts` has the numbers of the contradicting facts: leaving out any one of them makes a figure
    fit. Where no single fact does so, they are the facts that the nearest figure misses.

    `is_certain` tells whether these facts alone exclude each other. Otherwise a figure may exist
    that the search has missed.

    `repairs` has the figures without a fault that fit. `repair` is one of them whose answer may be
    reported, since all figures of its group have the same answer.
    """

    facts: tuple[int, ...]
    repairs: tuple[Repair, ...]
    repair: Repair | None
    is_certain: bool


def find_conflict(form: LogicForm, reading: Reading, budget: Budget) -> Conflict:
    """Leave out facts until figures fit, and say which facts contradict each other.

    These are left out in turn:

    1. all lengths if the goal is an angle, or all angles if it is a length,
    2. one value after the other, such as `AB = 5`,
    3. one relation after the other, such as "AB is parallel to CD",
    4. one fact after the other that the question itself supposes.

    `budget` counts the evaluations of all trials together. Once it is spent, no figure fits any
    more.
    """
    missed_facts = _facts_missed_by_nearest_figure(FigureProblem(reading), budget)
    repairs: list[Repair] = []
    chosen_repair: Repair | None = None
    is_settled = False
    for group in _groups_to_leave_out(reading, missed_facts):
        attempts = [_try_without_facts(form, numbers, budget) for numbers in group]
        repairs_of_group = [repair for repair in attempts if repair is not None]
        repairs += repairs_of_group
        answered = [repair for repair in repairs_of_group if repair.outcome.status == "answered"]
        # The first group with an answer decides on it. Facts of later groups are only named.
        if answered and not is_settled:
            is_settled = True
            first_value = answered[0].outcome.value
            assert first_value is not None
            all_agree = all(
                answers_agree(first_value, repair.outcome.value or 0.0, _ANSWER_TOLERANCE)
                for repair in answered
            )
            if all_agree:
                chosen_repair = answered[0]
    facts_that_help = [repair.left_out[0] for repair in repairs if len(repair.left_out) == 1]
    named_facts = tuple(dict.fromkeys(facts_that_help))
    if not named_facts:
        fact_count = len(reading.drawing.terms)
        named_facts = tuple(number for number in missed_facts if number < fact_count)
    return Conflict(
        facts=named_facts[:_MAX_FACTS_NAMED],
        repairs=tuple(repairs),
        repair=chosen_repair,
        is_certain=_exclude_each_other(form, reading, named_facts),
    )


def _groups_to_leave_out(
    reading: Reading, missed_facts: Sequence[int]
) -> list[list[tuple[int, ...]]]:
    """Return the trials in four groups, as `find_conflict` lists them.

    A trial has the numbers of the facts that are left out together. For example, where facts 0 and
    1 are lengths, fact 2 is an angle, fact 3 a relation, and the goal is an angle, the groups are
    [(0, 1)], [(0,), (1,), (2,)], [(3,)] and [].
    """
    terms = reading.drawing.terms
    first_of_question = len(reading.drawing.fact_terms)
    # Facts without a relation cannot contradict anything.
    numbers_with_relations = {number for number in reading.fact_numbers if number is not None}
    sizes = [number for number in sorted(numbers_with_relations) if gives_size(terms[number])]
    size_facts = [number for number in sizes if number < first_of_question]
    other_facts = sorted(numbers_with_relations - set(sizes))
    relation_facts = [number for number in other_facts if number < first_of_question]
    question_facts = [
        number for number in sorted(numbers_with_relations) if number >= first_of_question
    ]
    groups: list[list[tuple[int, ...]]] = [_facts_of_other_kind(reading, sizes)]
    for numbers in (size_facts, relation_facts, question_facts):
        # Facts that the nearest figure misses come first, since only some facts are tried.
        missed = [number for number in numbers if number in missed_facts]
        fulfilled = [number for number in numbers if number not in missed_facts]
        chosen_numbers = [*missed, *fulfilled][:_MAX_FACTS_TRIED]
        groups.append([(number,) for number in chosen_numbers])
    return groups


def _exclude_each_other(form: LogicForm, reading: Reading, named_facts: Sequence[int]) -> bool:
    """Tell whether no figure fulfils some facts alone, with what lies on their lines and circles.

    `named_facts` has the numbers of these facts. If a figure fulfils only these few, one of the
    many starts will find it. That cannot be said of a whole diagram.
    """
    terms = reading.drawing.terms
    points = {point for number in named_facts for point in points_in_term(terms[number])}
    left_out = [
        number
        for number, term in enumerate(terms)
        if number not in named_facts
        and not (term.head.startswith("PointLiesOn") and points_in_term(term) <= points)
    ]
    named_reading = read_facts(form, left_out=left_out)
    named_reading.goal = Constant(0.0)  # any goal will do, since only a figure is looked for
    problem = FigureProblem(named_reading)
    budget = Budget(_EVALUATIONS_WITH_NAMED_FACTS)
    return not any(
        not is_collapsed(solution) and not problem.kind.disordered_lines(solution.state)
        for solution in problem.solutions(budget, starts=_STARTS_WITH_NAMED_FACTS)
    )


def gives_size(term: Term) -> bool:
    """Tell whether a fact gives the size of something: `AB = 5`, `angle ABC = 2x`."""
    return term.is_equation and not term.arguments[1].arguments


def _facts_of_other_kind(reading: Reading, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the facts that give lengths if the goal is an angle, or else those that give angles.

    `sizes` has the numbers of all facts that give sizes. The result is a list with one tuple of
    numbers. It is empty unless there are both lengths and angles.
    """
    terms = reading.drawing.terms
    lengths = tuple(number for number in sizes if unit_of_term(terms[number]) == "length")
    angles = tuple(number for number in sizes if unit_of_term(terms[number]) == "degrees")
    if not lengths or not angles:
        return []
    return [lengths if _unit_of_goal(reading) == "degrees" else angles]


def _unit_of_goal(reading: Reading) -> str:
    """Return the unit of the goal. A letter has the unit of the first fact with it."""
    goal = reading.goal_term
    if goal is None or goal.arguments or not re.fullmatch("[a-z]", goal.head):
        return reading.unit
    for term in reading.drawing.terms:
        if gives_size(term) and re.search(
            rf"(?<![a-z\\]){goal.head}(?![a-z])", term.arguments[1].head
        ):
            return unit_of_term(term.arguments[0])
    return reading.unit


def _try_without_facts(form: LogicForm, left_out: tuple[int, ...], budget: Budget) -> Repair | None:
    """Search for a figure without some facts; return None where no figure without a fault fits.

    `left_out` has the numbers of these facts.
    """
    if budget.remaining <= 0:
        return None
    reading = read_facts(form, left_out=left_out)
    if reading.goal is None:
        return None
    problem = FigureProblem(reading)
    outcome = choose_outcome(problem, budget, starts=_STARTS_WITHOUT_FACT)
    if outcome.solution is None or outcome.solution.faults:
        return None
    return Repair(left_out=left_out, outcome=outcome, problem=problem)


def _facts_missed_by_nearest_figure(problem: FigureProblem, budget: Budget) -> list[int]:
    """Return the numbers of the facts that do not hold in the nearest figure, the worst first.

    The nearest figure is the one with the least sum of squared residuals that two searches find.
    """
    system = problem.system
    least_residuals: np.ndarray | None = None
    for start in (0, 1):
        first_state = problem.starts.near_picture(start)
        state, _ = descend(system, state=first_state, budget=budget, steps=60)
        residuals, _ = system.residuals(state, slopes=False)
        if not np.isfinite(residuals).all():
            continue
        if least_residuals is None or residuals @ residuals < least_residuals @ least_residuals:
            least_residuals = residuals
    if least_residuals is None or not len(least_residuals):
        return []
    reading = problem.reading
    # The keys are identities of objects, since two facts may have equal relations, which the
    # system keeps as they are. Relations that no fact gives have the number None.
    fact_by_relation_id = {
        id(relation): number
        for relation, number in zip(reading.relations, reading.fact_numbers, strict=True)
    }
    misses = np.abs(least_residuals)
    miss_by_fact: dict[int, float] = {}
    for miss, relation in zip(misses, system.residual_relations, strict=True):
        fact_number = fact_by_relation_id.get(id(relation))
        if fact_number is not None and miss > _MIN_RESIDUAL_SHARE * misses.max():
            miss_by_fact[fact_number] = max(miss_by_fact.get(fact_number, 0.0), float(miss))
    return sorted(miss_by_fact, key=lambda number: (-miss_by_fact[number], number))
