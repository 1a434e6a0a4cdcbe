"""Makes rows of problems whose facts determine their answers.

A row has the question in words, the answer of the solver, and the redrawn figure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm

from adora_vl.conversion.columns import PRESETS
from adora_vl.conversion.pipeline import SplitRows
from adora_vl.conversion.problem import ROW_LOCATION, RawProblem
from adora_vl.data.images import png_bytes
from adora_vl.geometry.exact import round_as_in_school
from adora_vl.geometry.expressions import number_in_text
from adora_vl.geometry.figure import Verdict, figure_as_json
from adora_vl.geometry.logic_form import LogicForm, points_in_term
from adora_vl.geometry.shapes import parse_terms
from adora_vl.geometry.solve_form import solve_form, solved_figure
from adora_vl.utils.cli import pluralize
from data_prep.logic_forms import facts_in_words
from data_prep.question_words import question_in_words
from data_prep.redraw import can_be_drawn, draw_form, points_in_picture

if TYPE_CHECKING:
    from datasets import Features

_SOURCE_OF_SOLVED_ROWS = "geometry3k, solved"
_REQUEST_TO_ROUND = "Round to the nearest hundredth."
# The number of the first problem in each split of Geometry3K, the last split first.
_SPLITS_WITH_FIRST_NUMBER = (("test", 2401), ("validation", 2101))
# A label may differ from the computed value by this number, or by this share of the value.
_MAX_DIFFERENCE_FROM_LABEL = 0.06
_MAX_SHARE_FROM_LABEL = 0.006


@dataclass(frozen=True)
class LabelledQuestion:
    """The wording of a problem with its reference answer."""

    number: str  # of the problem in Geometry3K
    split: str
    problem: str
    answer: str  # empty where nobody has labelled the problem


def features_with_figure() -> Features:
    """Return the columns of a data set of geometry: the usual ones, then `facts` and `figure`."""
    extra_columns = (("facts", "facts"), ("figure", "figure"))
    return replace(PRESETS["geometry3k"].columns, extras=extra_columns).features


def rows_of_solvable_forms(
    forms: Mapping[str, LogicForm], questions: Mapping[str, LabelledQuestion] | None
) -> dict[str, SplitRows]:
    """Return by split the rows of the problems whose facts determine their answer.

    Prints how many problems are left out, and why. The picture of a row is drawn only when the row
    is read, and its label is compared with the computed answer then.

    Args:
        forms: the logic form of each problem, the facts of its diagram and its question, by the
            number of the problem.
        questions: the wording of some of the problems, by number. Only these become rows. None puts
            the question of each form into words.
    """
    readers_by_split: dict[str, list[Callable[[], RawProblem]]] = {}
    left_out_counts: Counter[str] = Counter()  # how many problems are left out, by the reason
    chosen_forms = dict(forms)
    if questions is not None:
        chosen_forms = {number: form for number, form in forms.items() if number in questions}
    # The numbers are texts without leading zeros, so that the longer one is the larger.
    numbered_forms = sorted(chosen_forms.items(), key=lambda item: (len(item[0]), item[0]))
    for number, form in tqdm(numbered_forms, desc="solve", unit="form", disable=None):
        question = _question_of_form(number, form) if questions is None else questions[number]
        # By the facts alone: not by what the picture suggests, and with no fact left out.
        solution = solve_form(form, try_looks=False, try_repair=False)
        if solution.status != "answered":
            left_out_counts[f"are {solution.status}"] += 1
            continue
        if question is None or not can_be_drawn(_with_all_coordinates(form, solution)):
            left_out_counts["cannot be put into words or drawn"] += 1
            continue
        if not draws_every_asked_point(form):
            left_out_counts["ask for a point that the picture does not have"] += 1
            continue
        read_row = partial(_solved_row, question, form=form, solution=solution)
        readers_by_split.setdefault(question.split, []).append(read_row)
    for reason, count in sorted(left_out_counts.items()):
        print(f"{pluralize(count, 'problem')} left out: they {reason}")
    return {split: SplitRows.from_readers(readers) for split, readers in readers_by_split.items()}


def fact_fields(form: LogicForm | None, problem: str, row_id: str) -> dict[str, Any]:
    """Return the fields `extras` and `warnings` of a `RawProblem`, to be passed by keyword.

    `extras` has the extra columns `facts` (the facts of the diagram in words) and `figure` (the
    solved figure). A column is null where it cannot be made. A row without facts has a warning, so
    that the user learns how many there are.

    Args:
        form: the facts of the diagram and the question, as terms of a logic form; None for a
            problem without a logic form.
        problem: the text of the problem.
        row_id: the id of the row.
    """
    facts = None
    figure = None
    if form is not None:
        facts = facts_in_words(form, problem)
        figure = solved_figure(form)
    warnings = {} if facts else {"no_facts": row_id}
    return {"extras": {"facts": facts, "figure": figure}, "warnings": warnings}


def _with_all_coordinates(form: LogicForm, solution: Verdict) -> LogicForm:
    """Return a logic form whose points all have coordinates, so that it can be drawn.

    Where some points of the form have none, all coordinates are taken from the figure that the
    solver has computed from its facts, `solution.figure`.
    """
    if can_be_drawn(form) or solution.figure is None:
        return form
    return replace(form, points=points_in_picture(solution.figure.coordinates))


def draws_every_asked_point(form: LogicForm) -> bool:
    """Return whether all points that the question names are on a line or circle of the diagram."""
    question_points: set[str] = set()
    for term in parse_terms(form.question):
        question_points |= points_in_term(term)
    return question_points <= form.drawn_points


def _question_of_form(number: str, form: LogicForm) -> LabelledQuestion | None:
    """Return the question of a logic form in words; None where there are no words for it.

    The split follows from the number of the problem, as in Geometry3K.
    """
    problem = question_in_words(form)
    if problem is None:
        return None
    return LabelledQuestion(
        number=number, split=_split_of_number(number), problem=problem, answer=""
    )


def _split_of_number(number: str) -> str:
    """Return the split that Geometry3K's authors gave the problem of this number.

    For example, 2401 is a test problem, 2101 one of validation, and 17 one of training. A form
    whose name is no number is not theirs, and counts as a training problem.
    """
    if number.isdecimal():
        for split, first_number in _SPLITS_WITH_FIRST_NUMBER:
            if int(number) >= first_number:
                return split
    return "train"


def _solved_row(question: LabelledQuestion, form: LogicForm, solution: Verdict) -> RawProblem:
    """Return the row of a solved problem, with a picture that is drawn from its logic form.

    The answer of the row is the label where the problem has one, else the computed answer.

    Raises `RowError` where the label of the question differs from the computed answer.
    """
    assert solution.value is not None, "only answered problems become rows"
    rounded_question = with_rounding_request(question.problem, solution)
    row_id = f"geometry3k/{question.split}/{question.number}"
    facts = facts_in_words(form, rounded_question.problem)
    drawable_form = _with_all_coordinates(form, solution)
    solved_figure_json = None
    if solution.figure is not None:
        solved_figure_json = figure_as_json(solution.figure)
    raw_problem = RawProblem(
        id=row_id,
        split=question.split,
        source=_SOURCE_OF_SOLVED_ROWS,
        origin=f"problem {question.number}",
        images=(png_bytes(draw_form(drawable_form)),),
        problem=rounded_question.problem,
        answer=question.answer or rounded_question.answer,
        extras={"facts": facts, "figure": solved_figure_json},
        warnings={} if facts else {"no_facts": row_id},
    )
    label = number_in_text(question.answer) if question.answer else None
    # A label that is no number cannot be compared.
    if label is not None and not is_rounded_value(label, solution.value):
        raise raw_problem.row_error(
            reason="other_answer",
            wrong=(
                f"the label is {question.answer!r:.60}, and the facts of its diagram give "
                f"{rounded_question.answer}"
            ),
            remedy=f"correct the label or the facts of {ROW_LOCATION}",
        )
    return raw_problem


def is_rounded_value(label: float, value: float) -> bool:
    """Return whether a label may be a computed value, rounded as text books round.

    For example, the label 4.5 fits the value 4.514: they may differ by 0.06, or by 0.6 % of the
    label if that is more.
    """
    tolerance = max(_MAX_DIFFERENCE_FROM_LABEL, _MAX_SHARE_FROM_LABEL * abs(label))
    return abs(value - label) <= tolerance


class RoundedQuestion(NamedTuple):
    """The text of a problem and its answer, where the text says how the answer is rounded."""

    problem: str
    answer: str


def with_rounding_request(problem: str, solution: Verdict) -> RoundedQuestion:
    """Return a problem with its answer, and ask for two decimals where the answer is a long one.

    An answer that has a short form, such as `5` or `2\\sqrt{3}`, is not rounded.
    """
    assert solution.value is not None, "only answered problems become rows"
    if solution.answer is not None:
        return RoundedQuestion(problem=problem, answer=solution.answer)
    # `Round ...` or `round ...`: the question says already how its answer is rounded.
    if "ound to the nearest" not in problem:
        problem = f"{problem} {_REQUEST_TO_ROUND}"
    return RoundedQuestion(problem=problem, answer=round_as_in_school(solution.value, digits=2))
