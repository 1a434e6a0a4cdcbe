"""Questions on what a picture shows, with their answers from the facts it was drawn from."""

from collections import Counter
from typing import Any

import pytest

from adora_vl.evals.checklist import MAX_QUESTIONS_OF_PICTURE, build_checklist, questions_on_marks
from adora_vl.evals.records import Problem
from adora_vl.geometry.figure import figure_as_json, figure_from_json
from adora_vl.geometry.solve_form import solve_form
from adora_vl.geometry.text import read_form_from_text
from adora_vl.rewards.grade import verify_gold
from adora_vl.utils.errors import UserError

FACTS = """
A at 0, 100
B at 120, 100
C at 90, 20
D at 10, 20
AB = 12, CD = 8, AD = 8
AB parallel CD
AB perpendicular AD
angle ABC = 63.434948822922
find BC
"""


@pytest.fixture(scope="module")
def figure_json() -> str:
    """Return a trapezoid with a right angle, as JSON: what the column `figure` of a row has."""
    result = solve_form(read_form_from_text(FACTS))
    assert result.figure is not None, result.why
    return figure_as_json(result.figure)


def build_problem(**fields: Any) -> Problem:
    """Return a problem whose prompt has its question within other words."""
    return Problem(
        fields={"pid": "geo/1", "question": "<image>Find BC.", "answer": "9", **fields},
        prompt="Think. <image>Find BC. Box it.",
        n_images=1,
        images=list,
    )


def test_questions_are_of_marks_and_have_exact_answers(figure_json: str) -> None:
    """Each question has an answer that can be graded, and one of a picture's is `yes`, one `no`.

    The lengths and the marks are those of `FACTS`.
    """
    kinds: Counter[str] = Counter()
    for seed in range(60):
        questions = questions_on_marks(figure_from_json(figure_json), str(seed))
        assert 0 < len(questions) <= MAX_QUESTIONS_OF_PICTURE
        assert len({question.text for question in questions}) == len(questions)
        answers = Counter(question.answer for question in questions)
        assert answers["yes"] == answers["no"] == 1
        for question in questions:
            assert verify_gold(question.answer) is None
            kinds[question.kind] += 1
            if question.kind == "length":
                segment = question.text[24:26]  # in "Which length is segment AB marked ..."
                assert {"AB": "12", "CD": "8", "AD": "8"}[segment] == question.answer
            if question.answer == "no" and question.kind == "parallel":
                assert "AB marked as parallel to CD" not in question.text
            if question.answer == "no" and question.kind == "right angle":
                assert "BAD" not in question.text
                assert "DAB" not in question.text
    assert kinds.keys() == {"length", "angle", "right angle", "parallel"}


def test_the_same_problem_is_asked_the_same_questions(figure_json: str) -> None:
    figure = figure_from_json(figure_json)
    assert questions_on_marks(figure, "geo/1") == questions_on_marks(figure, "geo/1")


def test_a_question_stands_in_the_words_of_the_prompt(figure_json: str) -> None:
    """A question on the figure takes the place of the problem's own, and the words around it stay.

    A problem without a figure, here `geo/2`, gets no questions.
    """
    questions = build_checklist([build_problem(figure=figure_json), build_problem(pid="geo/2")])
    assert [question.pid for question in questions] == [
        f"geo/1#{n}" for n in range(1, len(questions) + 1)
    ]
    for question in questions:
        assert question.prompt == f"Think. {question.fields['question']} Box it."
        assert question.fields["question"].startswith("<image>")
        assert "figure" not in question.fields
    with pytest.raises(UserError, match="view: checklist, and no row of the data has a figure"):
        build_checklist([build_problem()])
