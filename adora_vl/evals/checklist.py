"""Questions on the marks in a picture, which show whether a model reads a diagram at all.

They come from the facts that the figure of a row was drawn from, so that only what is marked is
asked. They have exact answers, and as many are answered with yes as with no.
"""

from __future__ import annotations

import hashlib
import random
from cmath import phase
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import degrees

from adora_vl.data.prompts import IMAGE_PLACEHOLDER
from adora_vl.evals.records import Problem
from adora_vl.geometry.drawing import Drawing
from adora_vl.geometry.expressions import number_in_text
from adora_vl.geometry.figure import Figure, figure_from_json
from adora_vl.utils.errors import UserError

CHECKLIST_VIEW = "checklist"
CHECKLIST_DESCRIPTION = "questions on what is marked in the picture, in place of the problem"
MAX_QUESTIONS_OF_PICTURE = 4  # on the picture of one problem
# An angle is asked about as no right angle only if it differs from one by this many degrees.
_RIGHT_ANGLE_MARGIN = 5.0
# Two lines are asked about as not parallel, or as the sides of an angle, only between these
# degrees.
_MIN_ASKED_ANGLE = 10
_MAX_ASKED_ANGLE = 170


@dataclass(frozen=True)
class MarkQuestion:
    """A question on one mark in a picture, such as a right angle or the length of a segment."""

    text: str
    answer: str
    kind: str
    """The kind of mark: `length`, `angle`, `right angle` or `parallel`."""


def build_checklist(problems: Sequence[Problem]) -> list[Problem]:
    """Replace problems by questions on what is marked in their pictures.

    Only problems whose figure has been solved have such questions. Raises `UserError` where no
    problem has one.
    """
    questions: list[Problem] = []
    for problem in problems:
        questions += _problems_from_marks(problem)
    if not questions:
        raise UserError(
            f"view: {CHECKLIST_VIEW}, and no row of the data has a figure with marks (the column `figure`, as "
            "`python -m data_prep geometry3k --source facts` writes it)"
        )
    return questions


def _problems_from_marks(problem: Problem) -> list[Problem]:
    """Return questions on the marks in a problem's picture, each as a problem to ask.

    A mark is for example a right angle, or the length of a segment. The question on it takes the
    place of the problem's question in the prompt. Its id is the id of the problem with a number
    after it, such as `geometry3k/test/15#2`.
    """
    stored_figure = problem.fields.get("figure")
    if not stored_figure:
        return []
    original_question = str(problem.fields["question"])
    kept_fields = {name: value for name, value in problem.fields.items() if name != "figure"}
    problems: list[Problem] = []
    mark_questions = questions_on_marks(figure_from_json(stored_figure), problem.pid)
    for number, mark_question in enumerate(mark_questions, start=1):
        text = mark_question.text
        # The picture keeps its place if that is a part of the question.
        if IMAGE_PLACEHOLDER in original_question:
            text = f"{IMAGE_PLACEHOLDER}{text}"
        prompt = text
        if original_question in problem.prompt:
            prompt = problem.prompt.replace(original_question, text)
        fields = {
            **kept_fields,
            "pid": f"{problem.pid}#{number}",
            "question": text,
            "answer": mark_question.answer,
            "choices": None,
            "metadata": {"family": CHECKLIST_VIEW, "kind": mark_question.kind},
        }
        problems.append(replace(problem, fields=fields, prompt=prompt, facts=None))
    return problems


def questions_on_marks(figure: Figure, seed: str) -> list[MarkQuestion]:
    """Draw at most `MAX_QUESTIONS_OF_PICTURE` questions on what is marked in a figure.

    A question with the answer yes is drawn only together with one of the same kind with the answer
    no, so that neither answer is right more often. `seed` and the figure decide which questions are
    drawn.
    """
    generator = random.Random(int(hashlib.sha256(seed.encode()).hexdigest()[:12], 16))
    drawing = Drawing(figure.form)
    number_questions = list(_questions_on_numbers(drawing))
    yes_questions = list(_yes_questions(drawing))
    no_questions = list(_no_questions(drawing, figure))
    yes_no_pairs = [
        (yes_question, no_question)
        for yes_question in yes_questions
        for no_question in no_questions
        if yes_question.kind == no_question.kind
    ]
    questions = list(generator.choice(yes_no_pairs)) if yes_no_pairs else []
    n_drawn = min(len(number_questions), MAX_QUESTIONS_OF_PICTURE - len(questions))
    questions += generator.sample(number_questions, n_drawn)
    generator.shuffle(questions)
    return questions


def _questions_on_numbers(drawing: Drawing) -> Iterator[MarkQuestion]:
    """Yield questions on the numbers that segments and angles are marked with.

    A fact such as `Equals(LengthOf(Line(A, B)), 5)` marks the segment AB with 5. It is an equation
    of a measure and its value, where `LengthOf` is the head of the measure.
    """
    for fact in drawing.fact_terms:
        if not fact.is_equation:
            continue
        measure, value = fact.arguments
        number = number_in_text(value.head)
        if number is None:
            continue
        # What is measured, such as `Line(A, B)`. A measure without arguments is a mere number or
        # letter, and fits none of the questions below.
        measured_part = measure.arguments[0] if measure.arguments else measure
        point_names = "".join(measured_part.names)
        is_length = measure.head == "LengthOf" and measured_part.head == "Line"
        if is_length and len(measured_part.names) == 2:
            question = f"Which length is segment {point_names} marked with in the picture?"
            yield MarkQuestion(text=question, answer=value.head, kind="length")
        is_angle = measure.head == "MeasureOf" and measured_part.head == "Angle"
        if is_angle and len(measured_part.names) == 3 and number < 180:
            question = f"How many degrees is angle {point_names} marked with in the picture?"
            yield MarkQuestion(text=question, answer=value.head, kind="angle")


def _yes_questions(drawing: Drawing) -> Iterator[MarkQuestion]:
    """Yield questions on right angles and parallel lines that are marked, answered with yes.

    The fact `Perpendicular(Line(A, B), Line(B, C))` gives a question on the angle ABC.
    """
    for fact in drawing.fact_terms:
        lines = [argument.names for argument in fact.arguments]
        if len(lines) != 2 or not all(len(line) == 2 for line in lines):
            continue
        first_line, second_line = lines
        common_points = [point for point in first_line if point in second_line]
        # Perpendicular lines without a common point mark no angle that has a name.
        if fact.head == "Perpendicular" and len(common_points) == 1:
            corner = common_points[0]
            (first_end,) = set(first_line) - {corner}
            (second_end,) = set(second_line) - {corner}
            yield _question_on_right_angle(first_end, corner, second_end, answer="yes")
        if fact.head == "Parallel" and not common_points:
            yield _question_on_parallels(first_line, second_line, answer="yes")


def _no_questions(drawing: Drawing, figure: Figure) -> Iterator[MarkQuestion]:
    """Yield questions on right angles and parallel lines with the answer no.

    An angle is asked about only if it clearly differs from a right angle in the solved figure, and
    two lines only if they are clearly not parallel. A right angle without a mark would give a
    question without an exact answer.
    """
    for corner in sorted(drawing.neighbours):
        for first_end, second_end in combinations(sorted(drawing.neighbours[corner]), 2):
            angle = _angle_between(figure, (corner, first_end), (corner, second_end))
            if angle is None or not _MIN_ASKED_ANGLE < angle < _MAX_ASKED_ANGLE:
                continue
            if abs(angle - 90) > _RIGHT_ANGLE_MARGIN:
                yield _question_on_right_angle(first_end, corner, second_end, answer="no")
    for first_line, second_line in combinations(sorted(drawing.form.lines), 2):
        angle = _angle_between(figure, first_line, second_line)
        have_common_point = bool(set(first_line) & set(second_line))
        if have_common_point or angle is None:
            continue
        if _MIN_ASKED_ANGLE < angle < _MAX_ASKED_ANGLE:
            yield _question_on_parallels(first_line, second_line, answer="no")


def _angle_between(
    figure: Figure, first_line: tuple[str, str], second_line: tuple[str, str]
) -> float | None:
    """Return the angle between two lines of a figure, in degrees from 0 to 180.

    Each line is directed from its first point to its second: between (C, A) and (C, B) lies the
    angle ACB. None where the figure does not place all points, or where the points of a line fall
    together.
    """
    if not {*first_line, *second_line} <= figure.coordinates.keys():
        return None
    # As complex numbers, the quotient of two directions has the angle between them as its phase.
    directions: list[complex] = []
    for start, end in (first_line, second_line):
        directions.append(complex(*figure.coordinates[end]) - complex(*figure.coordinates[start]))
    first_direction, second_direction = directions
    if not abs(first_direction) or not abs(second_direction):
        return None
    return abs(degrees(phase(second_direction / first_direction)))


def _question_on_right_angle(
    first_end: str, corner: str, second_end: str, *, answer: str
) -> MarkQuestion:
    """Build the question whether the angle at the point `corner` is marked as a right one."""
    name = f"{first_end}{corner}{second_end}"
    question = f"Is angle {name} marked as a right angle? Answer yes or no."
    return MarkQuestion(text=question, answer=answer, kind="right angle")


def _question_on_parallels(
    first_line: Sequence[str], second_line: Sequence[str], *, answer: str
) -> MarkQuestion:
    """Build the question whether two lines, each given by its points, are marked as parallel."""
    first_name = "".join(first_line)
    second_name = "".join(second_line)
    question = f"Is {first_name} marked as parallel to {second_name}? Answer yes or no."
    return MarkQuestion(text=question, answer=answer, kind="parallel")
