"""Questions on what a picture shows: whether a model reads the marks of a diagram at all.

They come of the facts that a row's figure was drawn from, so that only what is marked is asked. They
have exact answers, and as many are answered with yes as with no.
"""

from __future__ import annotations

import hashlib
import random
from cmath import phase
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import degrees

from adora_vl.data.prompts import PLACEHOLDER
from adora_vl.evals.records import Problem
from adora_vl.geometry.drawing import Drawing
from adora_vl.geometry.expressions import number_of
from adora_vl.geometry.figure import Figure, figure_from
from adora_vl.utils.errors import UserError

VIEW = "checklist"
DESCRIPTION = "questions on what is marked in the picture, in place of the problem"
MOST = 4  # questions of a problem
_RIGHT_ANGLE = 5.0  # degrees by which an angle that is no right one differs from one


@dataclass(frozen=True)
class MarkQuestion:
    """A question on one mark of a picture, with its answer and what kind of mark it is."""

    text: str
    answer: str
    kind: str


def checklist(problems: Sequence[Problem]) -> list[Problem]:
    """Return the questions on the pictures of problems that have solved figures.

    Raises `UserError` where no problem has one that a question can be asked of.
    """
    questions = [question for problem in problems for question in _questions(problem)]
    if not questions:
        raise UserError(
            f"view: {VIEW}, and no row of the data has a figure with marks (the column `figure`, as "
            "`python -m data_prep geometry3k --source facts` writes it)"
        )
    return questions


def _questions(problem: Problem) -> Iterator[Problem]:
    """The questions on one problem's picture, in the words of its prompt."""
    stored = problem.fields.get("figure")
    if not stored:
        return
    for number, question in enumerate(marks_of(figure_from(stored), problem.pid), start=1):
        old_question = str(problem.fields["question"])
        words = question.text
        if PLACEHOLDER in old_question:
            words = f"{PLACEHOLDER}{words}"
        prompt = (
            problem.prompt.replace(old_question, words) if old_question in problem.prompt else words
        )
        fields = {
            **{name: value for name, value in problem.fields.items() if name != "figure"},
            "pid": f"{problem.pid}#{number}",
            "question": words,
            "answer": question.answer,
            "choices": None,
            "metadata": {"family": VIEW, "kind": question.kind},
        }
        yield replace(problem, fields=fields, prompt=prompt, facts=None)


def marks_of(figure: Figure, seed: str) -> list[MarkQuestion]:
    """At most `MOST` questions on what is marked in a figure; seed and figure decide which."""
    draw = random.Random(int(hashlib.sha256(seed.encode()).hexdigest()[:12], 16))
    drawing = Drawing(figure.form)
    measures = list(_measures(drawing))
    positive = list(_said(drawing))
    negative = list(_not_said(drawing, figure))
    pairs = [(yes, no) for yes in positive for no in negative if yes.kind == no.kind]
    chosen = list(draw.choice(pairs)) if pairs else []
    chosen += draw.sample(measures, min(len(measures), MOST - len(chosen)))
    draw.shuffle(chosen)
    return chosen


def _measures(drawing: Drawing) -> Iterator[MarkQuestion]:
    """Questions on the numbers at segments and angles."""
    for fact in drawing.facts:
        size = number_of(fact.arguments[1].head) if fact.is_equation else None
        if size is None:
            continue
        measure, value = fact.arguments
        inner = measure.arguments[0] if measure.arguments else measure
        name = "".join(inner.names)
        if measure.head == "LengthOf" and inner.head == "Line" and len(inner.names) == 2:
            question = f"Which length is segment {name} marked with in the picture?"
            yield MarkQuestion(text=question, answer=value.head, kind="length")
        is_angle = measure.head == "MeasureOf" and inner.head == "Angle"
        if is_angle and len(inner.names) == 3 and size < 180:
            question = f"How many degrees is angle {name} marked with in the picture?"
            yield MarkQuestion(text=question, answer=value.head, kind="angle")


def _said(drawing: Drawing) -> Iterator[MarkQuestion]:
    """Questions on right angles and parallels that are marked."""
    for fact in drawing.facts:
        lines = [argument.names for argument in fact.arguments]
        if len(lines) != 2 or not all(len(line) == 2 for line in lines):
            continue
        first, second = lines
        shared = [name for name in first if name in second]
        if fact.head == "Perpendicular" and len(shared) == 1:
            ends = [name for line in lines for name in line if name != shared[0]]
            yield _right_angle(ends[0], shared[0], ends[1], answer="yes")
        if fact.head == "Parallel" and not shared:
            yield _parallel(first, second, answer="yes")


def _not_said(drawing: Drawing, figure: Figure) -> Iterator[MarkQuestion]:
    """Questions of the same kinds on what is neither marked nor so."""
    for corner in sorted(drawing.neighbours):
        for first, last in combinations(sorted(drawing.neighbours[corner]), 2):
            between = _degrees(figure, (corner, first), (corner, last))
            is_corner = between is not None and 10 < between < 170
            if between is not None and is_corner and abs(between - 90) > _RIGHT_ANGLE:
                yield _right_angle(first, corner, last, answer="no")
    for one_line, another_line in combinations(sorted(drawing.form.lines), 2):
        between = _degrees(figure, one_line, another_line)
        if set(one_line) & set(another_line) or between is None:
            continue
        if 10 < between < 170:
            yield _parallel(one_line, another_line, answer="no")


def _degrees(figure: Figure, first: tuple[str, str], second: tuple[str, str]) -> float | None:
    """The angle between two directions in the figure, in degrees; None without all places."""
    if not {*first, *second} <= figure.at.keys():
        return None
    at = {name: complex(*location) for name, location in figure.at.items()}
    ways = [at[end] - at[start] for start, end in (first, second)]
    if not all(abs(way) for way in ways):
        return None
    return abs(degrees(phase(ways[1] / ways[0])))


def _right_angle(first: str, corner: str, last: str, answer: str) -> MarkQuestion:
    question = f"Is angle {first}{corner}{last} marked as a right angle? Answer yes or no."
    return MarkQuestion(text=question, answer=answer, kind="right angle")


def _parallel(first: Sequence[str], second: Sequence[str], answer: str) -> MarkQuestion:
    names = ("".join(first), "".join(second))
    question = f"Is {names[0]} marked as parallel to {names[1]}? Answer yes or no."
    return MarkQuestion(text=question, answer=answer, kind="parallel")
