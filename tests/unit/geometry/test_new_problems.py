"""200 problems that were written before the engine had seen them, with answers by formula.

Half are logic forms, half are sentences: determined, open, contradictory, with two solutions of
which the drawing chooses one, and not to scale. Each has a line of working that says why.
"""

import json
import math
from pathlib import Path

import pytest

from adora_vl.geometry.logic_form import read_form_from_record
from adora_vl.geometry.solve_form import solve_form
from adora_vl.geometry.text import read_form_from_text
from adora_vl.utils.errors import UserError

_PROBLEM_FILES = ("new_problems.json", "new_problems_2.json")
NAMED_PROBLEMS = [
    (f"{name.removesuffix('.json')}-{problem['id']}", problem)
    for name in _PROBLEM_FILES
    for problem in json.loads(Path(__file__).with_name(name).read_text())
]


def assert_answer_of_problem(problem: dict) -> None:
    """Solve one problem of the files, and compare its status and value with the stored ones."""
    form = (
        read_form_from_text(problem["text"])
        if "text" in problem
        else read_form_from_record(problem["record"])
    )
    result = solve_form(form)
    assert result.status == problem["status"], (problem["working"], result.why)
    if problem["value"] is not None:
        assert result.value == pytest.approx(problem["value"], rel=1e-6), problem["working"]


@pytest.mark.parametrize(
    "problem", [p for _, p in NAMED_PROBLEMS[::8]], ids=[n for n, _ in NAMED_PROBLEMS[::8]]
)
def test_some_new_problems_have_their_answers(problem: dict) -> None:
    """Every eighth problem; all of them are a slow test."""
    assert_answer_of_problem(problem)


@pytest.mark.slow
@pytest.mark.parametrize(
    "problem", [p for _, p in NAMED_PROBLEMS], ids=[name for name, _ in NAMED_PROBLEMS]
)
def test_all_new_problems_have_their_answers(problem: dict) -> None:
    """Each of the 200 problems has the status and the value of its file."""
    assert_answer_of_problem(problem)


def test_the_perimeter_of_a_sector_is_its_arc_and_two_radii() -> None:
    """A radius of 9 and an angle of 80 degrees give 18 + 4 pi, and not the area of the sector."""
    problem = dict(NAMED_PROBLEMS)["new_problems-l42"]
    record = {**problem["record"], "question": ["Find(PerimeterOf(Sector(O,A,B)))"]}
    result = solve_form(read_form_from_record(record))
    assert result.status == "answered"
    assert result.value == pytest.approx(18 + 4 * math.pi)


SCHOOL_PROBLEMS = json.loads(Path(__file__).with_name("school_problems.json").read_text())


@pytest.mark.parametrize("problem", SCHOOL_PROBLEMS, ids=[p["text"] for p in SCHOOL_PROBLEMS])
def test_a_problem_in_the_words_of_school_books_is_answered_or_refused(problem: dict) -> None:
    """A problem in the words of school books has its status and value, or is refused.

    The 114 problems were written down from memory before the engine knew their words. No answer may
    be wrong.
    """
    try:
        result = solve_form(read_form_from_text(problem["text"]))
    except UserError:
        assert problem["status"] == "refused"
        return
    assert result.status == problem["status"], result.why
    if problem["value"] is not None:
        assert result.value == pytest.approx(problem["value"], rel=1e-6)
