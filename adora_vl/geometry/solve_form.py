"""What a form says: its answer, whether the facts determine it, and what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from adora_vl.geometry.chase import AngleChase
from adora_vl.geometry.choose import Outcome, Status, choose_outcome
from adora_vl.geometry.conflict import Conflict, Repair, find_conflict, gives_size
from adora_vl.geometry.descent import Budget
from adora_vl.geometry.exact import short_form
from adora_vl.geometry.figure import Verdict, figure_as_json, figure_of_solution, with_rivals
from adora_vl.geometry.logic_form import LogicForm, Term
from adora_vl.geometry.reading import Reading, read_facts
from adora_vl.geometry.shapes import UnreadError, parse_terms
from adora_vl.geometry.solve import FigureProblem
from adora_vl.geometry.system import System
from adora_vl.geometry.term_reader import unit_of_term
from adora_vl.geometry.words import term_in_words

# Larger forms are no diagrams of a school book, and a search in them would take minutes. The
# largest of Geometry3K has 26 points.
MAX_POINTS = 60
MAX_FACTS = 120
MAX_SEGMENTS = 200
MAX_FACT_LENGTH = 400  # characters
# Evaluations of all equations. Of Geometry3K no problem needs more than a fifth of the first.
EVALUATIONS = 6000
REPAIR_EVALUATIONS = 9000
_MIN_SLOPE = 1e-4  # equations that are flatter than this have a double root, or nearly one
_DOUBLE_ROOT_TOLERANCE = 2e-4  # share by which an answer at a double root may miss its exact form


def solve_form(form: LogicForm, *, try_looks: bool = True, try_repair: bool = True) -> Verdict:
    """Solve a logic form: find its answer, or say why there is none.

    It never raises for what a form says.

    Args:
        form: The facts of a diagram and its question.
        try_looks: Where the facts leave the goal open, assume what only the picture shows, and
            report the value that follows. The status stays `open`.
        try_repair: Where facts contradict each other, leave out one after the other to find which
            do. The status stays `conflict` or `collapsed`.
    """
    fault = describe_excess(form)
    if fault:
        return Verdict(status="unread", why=fault)
    # Far from a figure numbers overflow. The search rejects steps to such places by itself.
    with np.errstate(all="ignore"):
        verdict = _solve_small_form(form, try_looks=try_looks, try_repair=try_repair)
    if not verdict.unread:
        return verdict
    return replace(verdict, why=f"{verdict.why}; not read: {verdict.unread[0]}")


def solved_figure(form: LogicForm) -> str | None:
    """Return the solved points and values of a logic form as JSON, for the column `figure`.

    It is solved by the facts alone: not by what the picture suggests, and with no fact left out.
    Returns None where the facts do not determine the answer.
    """
    verdict = solve_form(form, try_looks=False, try_repair=False)
    if verdict.status != "answered" or verdict.figure is None:
        return None
    return figure_as_json(verdict.figure)


def _solve_small_form(form: LogicForm, *, try_looks: bool, try_repair: bool) -> Verdict:
    """Return the verdict on a form that is not too large.

    `try_looks` and `try_repair` are as in `solve_form`. A form may have any text in its facts, so
    any error in reading it gives the verdict `unread`.
    """
    try:
        reading = read_facts(form)
    except (
        UnreadError,
        IndexError,
        KeyError,
        ValueError,
        ZeroDivisionError,
        OverflowError,
        RecursionError,
    ) as error:
        return Verdict(
            status="unread", why=f"the form cannot be read ({type(error).__name__}: {error})"
        )
    unread = tuple(describe_unread_facts(form, reading))
    if reading.goal is None:
        return Verdict(status="unread", why=reading.goal_fault, unread=unread)
    verdict = _solve_reading(form, reading=reading, try_looks=try_looks, try_repair=try_repair)
    return replace(verdict, unread=unread)


def describe_unread_facts(form: LogicForm, reading: Reading) -> Iterator[str]:
    """Yield the facts that are not read, each with its place in the form and the reason."""
    for name, texts in (("fact", form.facts), ("part of the question", form.question)):
        for number, text in enumerate(texts, start=1):
            if text.strip() and not list(parse_terms([text])):
                yield f"{name} {number}, {text!r:.60}: its brackets do not close"
    position_by_term: dict[Term, str] = {}
    for number, text in enumerate(form.facts, start=1):
        for term in parse_terms([text]):
            # Of two equal facts the first one is named.
            position_by_term.setdefault(term, f"fact {number}")
    for term, reason in reading.unread:
        position = position_by_term.get(term, "the question")
        yield f"{position}, {str(term)!r:.60}: {reason}"


def _solve_reading(
    form: LogicForm, reading: Reading, *, try_looks: bool, try_repair: bool
) -> Verdict:
    """Return the verdict on a form whose facts and question are read.

    `try_looks` and `try_repair` are as in `solve_form`. The first of these that applies decides:

    1. The facts determine the goal, without an assumption from the picture.
    2. The facts determine it with an assumption from the picture (`reading.assumed`).
    3. The angles alone determine it.
    4. The facts leave it open; then what only the picture shows is tried.
    5. Several figures fit.
    6. Figures fit only with the points of a line in another order.
    7. The facts contradict each other, or only a figure fits in which points fall together, with
       the status `collapsed`.
    """
    budget = Budget(EVALUATIONS)
    problem = FigureProblem(reading)
    outcome = choose_outcome(problem, budget)
    if outcome.status == "answered":
        if reading.assumed:
            return _verdict_by_looks(form, problem, outcome)
        return _verdict_by_facts(form, problem, outcome)
    by_angles = _verdict_by_angles(reading)
    if by_angles is not None:
        return by_angles
    if outcome.status == "open" and try_looks:
        return _verdict_after_looks(form, problem=problem, outcome=outcome, budget=budget)
    if outcome.status == "open":
        return _verdict_of_open_goal(problem, outcome)
    if outcome.status == "ambiguous":
        return _verdict_of_rivals(problem, outcome)
    if outcome.disordered_lines:
        return _verdict_of_disorder(outcome)
    if not try_repair:
        why = _describe_conflict(outcome, conflict=None, reading=reading)
        return Verdict(status=outcome.status, why=why)
    return _verdict_of_conflict(form, problem, outcome, budget)


def describe_excess(form: LogicForm) -> str:
    """Return why a form is too large to be tried; empty where it is not."""
    if len(form.points) > MAX_POINTS:
        return f"it has {len(form.points)} points, over {MAX_POINTS}"
    different_facts = {*form.facts, *form.question}
    if len(different_facts) > MAX_FACTS:
        return f"it has {len(different_facts)} facts, over {MAX_FACTS}"
    if len(form.lines) > MAX_SEGMENTS:
        return f"it has {len(form.lines)} segments, over {MAX_SEGMENTS}"
    for fact in (*form.facts, *form.question):
        if len(fact) > MAX_FACT_LENGTH:
            return f"the fact {fact[:40]!r}... has {len(fact)} characters, over {MAX_FACT_LENGTH}"
    return ""


def short_answer(value: float, reading: Reading, *, share: float | None = None) -> str | None:
    r"""Return the short form of a value, such as `2\sqrt{3}` for 3.4641...; None where it has none.

    A decimal is preferred to a fraction where the facts have decimals. `share` is the relative
    error that the short form may have; the default is that of `short_form`.
    """
    texts = [*reading.drawing.form.facts, *reading.drawing.form.question]
    has_decimals = any(re.search(r"\d\.\d", text) for text in texts)
    if share is not None:
        return short_form(value, share=share, decimals=has_decimals)
    return short_form(value, decimals=has_decimals)


def _without_last_bits(value: float) -> float:
    """Return a value with ten digits, since machines differ in the last bits."""
    return float(f"{value:.10g}")


def _verdict_by_facts(form: LogicForm, problem: FigureProblem, outcome: Outcome) -> Verdict:
    """Return the verdict where the facts determine the goal.

    At a double root, as of `x^2 - 6x + 9 = 0`, the value is known to about four digits only. A
    short form that agrees with it to four digits is the answer there.
    """
    assert outcome.value is not None, "an answer has a figure"
    assert outcome.solution is not None, "an answer has a figure"
    value = _without_last_bits(outcome.value)
    answer = short_answer(outcome.value, problem.reading)
    is_doubled = outcome.at_double_root or outcome.solution.min_slope < _MIN_SLOPE
    if answer is None and is_doubled:
        answer = short_answer(outcome.value, problem.reading, share=_DOUBLE_ROOT_TOLERANCE)
    if is_doubled and answer is not None and re.fullmatch(r"-?\d+", answer):
        value = float(answer)
    figure = figure_of_solution(problem, outcome.solution, form)
    rivals = [figure_of_solution(problem, solution, form) for solution in outcome.alternatives]
    return Verdict(
        status="answered",
        value=value,
        answer=answer,
        basis="facts",
        figure=with_rivals(figure, rivals),
        why="determined by the facts",
    )


def _verdict_by_angles(reading: Reading) -> Verdict | None:
    """Return the verdict where the angles alone determine the answer; None where they do not."""
    value = AngleChase(reading).value()
    is_letter = reading.goal_term is not None and not reading.goal_term.arguments
    # A measure has to be positive, and angles determine one in degrees alone. A letter may have any
    # value.
    if value is None or reading.assumed or (value <= 0 and not is_letter):
        return None
    if reading.unit != "degrees" and not is_letter:
        return None
    return Verdict(
        status="answered",
        value=_without_last_bits(value),
        answer=short_answer(value, reading),
        basis="angles",
        why="determined by the angles alone, whatever the lengths are",
    )


def _verdict_by_looks(form: LogicForm, problem: FigureProblem, outcome: Outcome) -> Verdict:
    """Return the verdict for an answer that follows only with assumptions from the picture."""
    assert outcome.value is not None, "an answer has a figure"
    assert outcome.solution is not None, "an answer has a figure"
    assumed = tuple(dict.fromkeys(problem.reading.assumed))
    return Verdict(
        status="open",
        value=_without_last_bits(outcome.value),
        answer=short_answer(outcome.value, problem.reading),
        basis="looks",
        figure=figure_of_solution(problem, solution=outcome.solution, form=form, assumed=assumed),
        assumed=assumed,
        why=f"not determined by the facts; as the picture looks, {_join_words(assumed)}",
    )


def _verdict_after_looks(
    form: LogicForm, problem: FigureProblem, outcome: Outcome, budget: Budget
) -> Verdict:
    """Return the verdict on an open goal, after trying what the picture shows beside the facts."""
    for looks in ("tangents", "everything"):
        reading = read_facts(form, looks=looks)
        if reading.goal is None or len(reading.assumed) == len(problem.reading.assumed):
            continue
        trial = FigureProblem(reading)
        trial_outcome = choose_outcome(trial, budget)
        solution = trial_outcome.solution
        is_answered = trial_outcome.status == "answered"
        # An assumption from the picture has to lead to a figure that looks like the picture.
        if is_answered and solution is not None and solution.faults == 0:
            return _verdict_by_looks(form, trial, trial_outcome)
    return _verdict_of_open_goal(problem, outcome)


def _verdict_of_open_goal(problem: FigureProblem, outcome: Outcome) -> Verdict:
    """Return the verdict where the facts leave the goal free; it names two possible values."""
    values = [value for value in (outcome.value, *outcome.rival_values) if value is not None]
    examples = " or ".join(f"{value:.4g}" for value in values[:2])
    return Verdict(
        status="open",
        why=f"the facts leave {_describe_goal(problem.reading)} free; it may be {examples}",
    )


def _verdict_of_rivals(problem: FigureProblem, outcome: Outcome) -> Verdict:
    """Return the verdict where several figures fit, or only one, which is in doubt.

    A single figure is in doubt where it differs from the picture, or where there is no picture.
    `problem.places` has the places of points in the picture; it is empty without one.
    """
    values = [value for value in (outcome.value, *outcome.rival_values) if value is not None]
    examples = " and ".join(f"{value:.6g}" for value in values[:2])
    if len(values) < 2:
        doubt = "there may be others; places of points would say which one is meant"
        if problem.places:
            doubt = "it differs from the picture"
        return Verdict(
            status="ambiguous",
            why=f"only one figure was found, with {_describe_goal(problem.reading)} = {examples}, and "
            f"{doubt}",
        )
    return Verdict(status="ambiguous", why=f"two figures fit, with {examples}")


def _verdict_of_disorder(outcome: Outcome) -> Verdict:
    """Return the verdict where a figure fits only if points of a line change their order.

    Their right order is the one in the facts or in the picture.
    """
    lines = _join_words([f"{line} in this order" for line in outcome.disordered_lines])
    return Verdict(
        status="conflict", why=f"no figure: the other facts contradict {lines} on one line"
    )


def _verdict_of_conflict(
    form: LogicForm, problem: FigureProblem, outcome: Outcome, budget: Budget
) -> Verdict:
    """Return the verdict where no figure was found: which facts exclude each other.

    The first of these that applies decides:

    1. The angles are only rounded values of those that the lengths give: no contradiction.
    2. The form has no places, and no facts were found that surely exclude each other: `open`, since
       the search may have missed a figure.
    3. Leaving out a fact gives one answer: it is reported with the contradiction.
    4. With the facts rounded a figure fits: its answer is reported with the contradiction.
    5. Otherwise the contradiction is reported without a value.
    """
    reading = problem.reading
    conflict = find_conflict(form, reading, Budget(REPAIR_EVALUATIONS))
    why = _describe_conflict(outcome, conflict, reading)
    status: Status = "conflict" if outcome.status == "conflict" or conflict.repairs else "collapsed"
    terms = reading.drawing.terms
    by_lengths = _verdict_by_lengths(form, conflict)
    if by_lengths is not None:
        return by_lengths
    if not problem.places and not conflict.is_certain:
        return Verdict(
            status="open",
            why="no figure was found, and no facts that exclude each other; places of points would "
            "show where to begin",
        )
    if conflict.repair is not None:
        repair = conflict.repair
        assert repair.outcome.value is not None, "an answer has a figure"
        assert repair.outcome.solution is not None, "an answer has a figure"
        left_out = tuple(term_in_words(terms[number]) for number in repair.left_out)
        return Verdict(
            status=status,
            value=_without_last_bits(repair.outcome.value),
            answer=short_answer(repair.outcome.value, reading),
            basis="without a fact",
            left_out=left_out,
            why=why,
        )
    rounded = choose_outcome(problem, budget, rounded=True)
    answered_without = any(repair.outcome.status == "answered" for repair in conflict.repairs)
    if rounded.status == "answered" and not answered_without and rounded.value is not None:
        return Verdict(
            status=status,
            value=_without_last_bits(rounded.value),
            basis="rounded",
            why=f"{why}; with the facts rounded {_describe_goal(reading)} is about "
            f"{rounded.value:.4g}",
        )
    return Verdict(status=status, why=why)


def _verdict_by_lengths(form: LogicForm, conflict: Conflict) -> Verdict | None:
    """Return the answer that the lengths give, where the angles are theirs, but rounded.

    For example, a book gives lengths that make an angle of 83.6 degrees, and calls it 84 degrees.
    Returns None where an angle differs from that of the lengths by more than its rounding.
    """
    for repair in conflict.repairs:
        solution = repair.outcome.solution
        if repair.outcome.status != "answered" or solution is None:
            continue
        reading = repair.problem.reading
        terms = [reading.drawing.terms[number] for number in repair.left_out]
        if not all(gives_size(term) and unit_of_term(term) == "degrees" for term in terms):
            continue
        if all(_holds_as_rounded(repair, term) for term in terms):
            answer = _verdict_by_facts(form, repair.problem, repair.outcome)
            words = _join_words([term_in_words(term) for term in terms])
            return replace(
                answer, figure=None, why=f"determined by the lengths; {words} as they are rounded"
            )
    return None


def _holds_as_rounded(repair: Repair, term: Term) -> bool:
    """Tell whether a fact gives the angle of a figure as rounded: 84 for 83.6, or 83.6 for 83.58.

    `repair` has the figure that was found without the fact. `term` is the fact, such as
    `Equals(MeasureOf(Angle(A, B, C)), 84)`.
    """
    solution = repair.outcome.solution
    assert solution is not None, "a repair has a figure"
    measure, size = term.arguments
    number = re.fullmatch(r"\d+(?:\.(\d+))?", size.head.strip())
    if number is None:
        return False
    # A system without relations only computes its goal, here the angle in the figure.
    quantity = repair.problem.reading.term_reader.quantity(measure)
    system = repair.problem.system
    trial = System(system.points, relations=(), goal=quantity, figure_size=system.figure_size)
    value, _ = trial.goal_at(solution.state[: trial.count])
    decimals = len(number[1] or "")
    half_digit = 0.5 * 10.0**-decimals
    return abs(abs(value) - float(number[0])) <= half_digit + 1e-9


def _describe_conflict(outcome: Outcome, conflict: Conflict | None, reading: Reading) -> str:
    """Return a line that names the facts that exclude each other.

    It also says which answer follows if one of them is left out, or `-` where none follows. For
    example:

        no figure: AB = 3, BC = 4 and AC = 10 exclude each other (leaving out one of them gives:
        10, 10, -)

    `conflict` is the contradiction; None where it was not looked for.
    """
    kind = "no figure without points that fall together"
    if outcome.status == "conflict":
        kind = "no figure"
    if conflict is None or not conflict.facts:
        return f"{kind} fulfils all facts"
    terms = reading.drawing.terms
    names = [term_in_words(terms[number]) for number in conflict.facts]
    if len(names) == 1:
        return f"{kind}: {names[0]} contradicts the other facts"
    answer_by_left_out: dict[tuple[int, ...], float | None] = {}
    for repair in conflict.repairs:
        if repair.outcome.status == "answered":
            answer_by_left_out.setdefault(repair.left_out, repair.outcome.value)
    values = []
    for number in conflict.facts:
        answer = answer_by_left_out.get((number,))
        values.append("-" if answer is None else f"{answer:.6g}")
    return (
        f"{kind}: {_join_words(names)} exclude each other (leaving out one of them gives: "
        f"{', '.join(values)})"
    )


def _describe_goal(reading: Reading) -> str:
    """Return what is asked, in short words."""
    return term_in_words(reading.goal_term) if reading.goal_term is not None else "the goal"


def _join_words(words: Sequence[str]) -> str:
    """Return words as a list in a sentence: `A, B and C`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
