"""A synthetic picture with its question determines the answer, which is computed again from those two alone."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import pytest

from adora_vl.rewards import canonical_gold
from adora_vl.rewards.numbers import evaluate
from data_prep.images import diagram_hash
from data_prep.synthetic.canvas import STYLES, Canvas, Point
from data_prep.synthetic.generate import KNOWN, LEVELS


class _Drawn:
    """What one picture shows, as told by the drawing calls that made it: labels with places, and right angles."""

    def __init__(self) -> None:
        self.labels: list[tuple[str, Point]] = []
        self.lines: list[tuple[Point, ...]] = []

    def points(self) -> dict[str, Point]:
        """Where each capital letter stands."""
        return {text: at for text, at in self.labels if re.fullmatch("[A-Z]", text)}

    def numbers(self) -> list[int]:
        return [int(text.rstrip("°")) for text, _ in self.labels if re.fullmatch(r"\d+°?", text)]

    def values(self) -> list[str]:
        return [text for text, _ in self.labels if not re.fullmatch("[A-Z]", text)]

    def at_side(self, ends: str) -> str:
        """The value that stands nearest to the middle between two letters."""
        (x, y), (u, v) = (self.points()[letter] for letter in ends)
        return min(self._others(), key=lambda label: math.dist(label[1], ((x + u) / 2, (y + v) / 2)))[0]

    def at_corner(self, letter: str) -> str:
        """The value that stands nearest to a letter."""
        return min(self._others(), key=lambda label: math.dist(label[1], self.points()[letter]))[0]

    def _others(self) -> list[tuple[str, Point]]:
        return [label for label in self.labels if not re.fullmatch("[A-Z]", label[0])]


def _watched(monkeypatch: pytest.MonkeyPatch) -> list[_Drawn]:
    """The pictures from now on, in the order in which they are begun."""
    pictures: list[_Drawn] = []
    start, label, line = Canvas.__init__, Canvas.label, Canvas.line

    def begun(self: Canvas, *arguments: Any) -> None:
        self.drawn = _Drawn()  # type: ignore[attr-defined]
        pictures.append(self.drawn)  # type: ignore[attr-defined]
        start(self, *arguments)

    def labelled(self: Canvas, text: str, centre: Point) -> None:
        before = self.picture()
        label(self, text, centre)
        assert self.picture() != before, f"{text} cannot be seen"
        self.drawn.labels.append((text, centre))  # type: ignore[attr-defined]

    def lined(self: Canvas, *points: Point, closed: bool = False) -> None:
        self.drawn.lines.append(points)  # type: ignore[attr-defined]
        line(self, *points, closed=closed)

    monkeypatch.setattr(Canvas, "__init__", begun)
    monkeypatch.setattr(Canvas, "label", labelled)
    monkeypatch.setattr(Canvas, "line", lined)
    return pictures


def _solved_for_x(text: str, value: float) -> float:
    """x in `3x + 10 = value`."""
    match = re.fullmatch(r"(\d*)x(?: ([+-]) (\d+))?", text)
    assert match, text
    added = int(match[3] or 0) * (-1 if match[2] == "-" else 1)
    return (value - added) / int(match[1] or 1)


def _recomputed(family: str, question: str, drawn: _Drawn) -> float:
    """The answer from the question and what is drawn alone, by other formulas where there are any."""
    numbers, asked_x = drawn.numbers(), "x" in question
    if family == "isosceles":
        return 90 - numbers[0] / 2
    if family == "polygon":
        return 180 - 360 / len(drawn.lines[0])
    if family == "right_triangle":
        return math.hypot(*numbers)
    if family == "crossing":
        (_, here), (_, there) = drawn.labels
        return numbers[0] if abs(here[0] - there[0]) < 0.2 else 180 - numbers[0]
    if family == "circle":
        return 2 * numbers[0] * (math.pi if "circumference" in question else 1)
    if family == "right_triangle_side":
        if asked_x:  # x at A C is opposite of the angle at B, the right angle is at C
            angle = math.radians(int(drawn.at_corner("B").rstrip("°")))
            return int(drawn.at_side("AB")) * (math.sin(angle) if drawn.at_side("AC") == "x" else math.cos(angle))
        if question == "Find A B.":
            return math.hypot(int(drawn.at_side("AC")), int(drawn.at_side("BC")))
        return math.sqrt(int(drawn.at_side("AB")) ** 2 - int(drawn.at_side("AC")) ** 2)
    if family == "triangle_angle":
        if not asked_x:
            return 180 - sum(numbers)
        one, other = [text for text in drawn.values() if "x" in text]
        at_0 = [-_solved_for_x(text, 0) * _factor(text) for text in (one, other)]
        return (180 - numbers[0] - sum(at_0)) / (_factor(one) + _factor(other))
    if family == "inscribed_arc":
        if asked_x:
            (text,) = [text for text in drawn.values() if "x" in text]
            return _solved_for_x(text, numbers[0] / 2)
        return numbers[0] / 2 if "angle" in question else 2 * numbers[0]
    if family == "parallel_segment":
        if found := re.search(r"A D = (\d+), A B = (\d+), and A E = (\d+)", question):
            ad, ab, ae = map(int, found.groups())
            return ab * ad / ae - ab
        ab, ae, ed = (int(drawn.at_side(ends)) for ends in ("AB", "AE", "ED"))
        bc = ab / ae * ed
        return _solved_for_x(drawn.at_side("BC"), bc) if asked_x else bc
    assert family == "parallelogram_side"
    left, right = drawn.at_side("AB"), drawn.at_side("CD")
    if right.isdigit():
        return _solved_for_x(left, int(right))
    at_0 = [-_solved_for_x(text, 0) * _factor(text) for text in (left, right)]
    return (at_0[1] - at_0[0]) / (_factor(left) - _factor(right))


def _factor(text: str) -> int:
    match = re.match(r"(\d*)x", text)
    assert match, text
    return int(match[1] or 1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("family", KNOWN)
def test_the_picture_with_the_question_determines_the_answer(
    family: str, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every number that is needed is drawn, or stands in the question, apart from the others and inside."""
    pictures = _watched(monkeypatch)
    answers: dict[tuple[str, str], str] = {}
    for number in range(8):
        problem = KNOWN[family](random.Random(f"{family}{level}{number}"), 224, level, STYLES["plain"])
        value = evaluate(canonical_gold(problem.answer))
        assert value is not None
        found = _recomputed(family, problem.question, pictures[-1])
        assert math.isclose(float(value.value), found, rel_tol=1e-9), (problem.question, pictures[-1].labels)
        key = (diagram_hash(problem.image), problem.question)
        assert answers.setdefault(key, problem.answer) == problem.answer
        places = [place for _, place in pictures[-1].labels]
        assert all(0.01 < x < 0.99 and 0.01 < y < 0.99 for x, y in places)
        assert all(math.dist(one, other) > 0.05 for n, one in enumerate(places) for other in places[:n])
