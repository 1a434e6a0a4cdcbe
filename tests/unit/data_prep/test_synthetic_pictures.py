"""Drawn problems: what their pictures show, and that it determines the answer."""

import math
import random
import re
from collections.abc import Callable
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from adora_vl.data.images import pixel_hash
from adora_vl.rewards.answer import parse_value
from adora_vl.synthetic.drawing import STYLES, Canvas, Point
from adora_vl.synthetic.generate import FAMILY_BY_NAME, LEVELS


class DrawnPicture:
    """One picture as the drawing calls tell it: labels with their places, and lines."""

    def __init__(self) -> None:
        self.labels: list[tuple[str, Point]] = []
        self.lines: list[tuple[Point, ...]] = []

    def points(self) -> dict[str, Point]:
        """Return where each capital letter stands."""
        return {text: at for text, at in self.labels if re.fullmatch("[A-Z]", text)}

    def numbers(self) -> list[int]:
        """Return the labels that are numbers or degrees, as numbers."""
        return [int(text.rstrip("°")) for text, _ in self.labels if re.fullmatch(r"\d+°?", text)]

    def values(self) -> list[str]:
        """Return the labels that are no letters."""
        return [text for text, _ in self.labels if not re.fullmatch("[A-Z]", text)]

    def at_side(self, ends: str) -> str:
        """Return the value that stands nearest to the middle between two letters."""
        points = self.points()
        x, y = points[ends[0]]
        u, v = points[ends[1]]
        middle = ((x + u) / 2, (y + v) / 2)
        return min(self._others(), key=lambda label: math.dist(label[1], middle))[0]

    def at_corner(self, letter: str) -> str:
        """Return the value that stands nearest to a letter."""
        return min(self._others(), key=lambda label: math.dist(label[1], self.points()[letter]))[0]

    def _others(self) -> list[tuple[str, Point]]:
        return [label for label in self.labels if not re.fullmatch("[A-Z]", label[0])]


def record_drawings(monkeypatch: pytest.MonkeyPatch) -> list[DrawnPicture]:
    """Return a list of the pictures that are drawn from now on, in the order of their beginning.

    A label that cannot be seen fails the test.
    """
    pictures: list[DrawnPicture] = []
    original_init = Canvas.__init__
    original_label = Canvas.label
    original_line = Canvas.line
    picture_by_canvas: WeakKeyDictionary[Canvas, DrawnPicture] = WeakKeyDictionary()

    def begin_picture(self: Canvas, *arguments: Any) -> None:
        picture_by_canvas[self] = DrawnPicture()
        pictures.append(picture_by_canvas[self])
        original_init(self, *arguments)

    def record_label(self: Canvas, text: str, centre: Point) -> None:
        pixels_before = self.picture()
        original_label(self, text, centre)
        assert self.picture() != pixels_before, f"{text} cannot be seen"
        picture_by_canvas[self].labels.append((text, centre))

    def record_line(self: Canvas, *points: Point, closed: bool = False) -> None:
        picture_by_canvas[self].lines.append(points)
        original_line(self, *points, closed=closed)

    monkeypatch.setattr(Canvas, "__init__", begin_picture)
    monkeypatch.setattr(Canvas, "label", record_label)
    monkeypatch.setattr(Canvas, "line", record_line)
    return pictures


def solve_for_x(text: str, value: float) -> float:
    """Return x in an equation such as `3x + 10 = value`."""
    match = re.fullmatch(r"(\d*)x(?: ([+-]) (\d+))?", text)
    assert match, text
    added = int(match[3] or 0) * (-1 if match[2] == "-" else 1)
    return (value - added) / int(match[1] or 1)


def factor_of_x(text: str) -> int:
    """Return the factor of x in a text such as `3x + 10`."""
    match = re.match(r"(\d*)x", text)
    assert match, text
    return int(match[1] or 1)


def constant_beside_x(text: str) -> float:
    """Return the number that is added to x in a text: 10 in `3x + 10`."""
    return -solve_for_x(text, 0) * factor_of_x(text)


def recompute_isosceles(question: str, drawn: DrawnPicture) -> float:
    """Return the angle at the base; that at the top is drawn."""
    return 90 - drawn.numbers()[0] / 2


def recompute_polygon(question: str, drawn: DrawnPicture) -> float:
    """Return the inner angle of a regular polygon."""
    return 180 - 360 / len(drawn.lines[0])


def recompute_right_triangle(question: str, drawn: DrawnPicture) -> float:
    """Return the hypotenuse."""
    return math.hypot(*drawn.numbers())


def recompute_crossing(question: str, drawn: DrawnPicture) -> float:
    """Return the angle beside or opposite of the one that has a number."""
    (angle,) = drawn.numbers()
    (_, first_place), (_, second_place) = drawn.labels
    is_opposite = abs(first_place[0] - second_place[0]) < 0.2
    return angle if is_opposite else 180 - angle


def recompute_perimeter(question: str, drawn: DrawnPicture) -> float:
    """Return the last digit of the sum of all sides, in the picture and in the question."""
    return (sum(drawn.numbers()) + sum(map(int, re.findall(r"\d+", question)))) % 10


def recompute_circle(question: str, drawn: DrawnPicture) -> float:
    """Return the diameter or the circumference; the radius is drawn."""
    return 2 * drawn.numbers()[0] * (math.pi if "circumference" in question else 1)


def recompute_right_triangle_side(question: str, drawn: DrawnPicture) -> float:
    """Return the side that has no number; the right angle is at C."""
    if "x" in question:  # x at A C is opposite of the angle at B
        angle = math.radians(int(drawn.at_corner("B").rstrip("°")))
        ratio = math.sin(angle) if drawn.at_side("AC") == "x" else math.cos(angle)
        return int(drawn.at_side("AB")) * ratio
    if question == "Find A B.":
        return math.hypot(int(drawn.at_side("AC")), int(drawn.at_side("BC")))
    return math.sqrt(int(drawn.at_side("AB")) ** 2 - int(drawn.at_side("AC")) ** 2)


def recompute_triangle_angle(question: str, drawn: DrawnPicture) -> float:
    """Return the third angle, or x in two of the angles."""
    numbers = drawn.numbers()
    if "x" not in question:
        return 180 - sum(numbers)
    terms = [text for text in drawn.values() if "x" in text]
    assert len(terms) == 2
    constants = [constant_beside_x(text) for text in terms]
    return (180 - numbers[0] - sum(constants)) / sum(map(factor_of_x, terms))


def recompute_inscribed_arc(question: str, drawn: DrawnPicture) -> float:
    """Return the inscribed angle, its arc, or x in the angle."""
    arc_or_angle = drawn.numbers()[0]
    if "x" in question:
        (text,) = [text for text in drawn.values() if "x" in text]
        return solve_for_x(text, arc_or_angle / 2)
    return arc_or_angle / 2 if "angle" in question else 2 * arc_or_angle


def recompute_parallel_segment(question: str, drawn: DrawnPicture) -> float:
    """Return B D for the sides in the question, or else B C, or x in it, for those drawn."""
    if sides := re.search(r"A D = (\d+), A B = (\d+), and A E = (\d+)", question):
        ad, ab, ae = map(int, sides.groups())
        return ab * ad / ae - ab
    ab = int(drawn.at_side("AB"))
    ae = int(drawn.at_side("AE"))
    ed = int(drawn.at_side("ED"))
    bc = ab / ae * ed
    return solve_for_x(drawn.at_side("BC"), bc) if "x" in question else bc


def recompute_parallelogram_side(question: str, drawn: DrawnPicture) -> float:
    """Return x, for which A B and C D are equal."""
    left_text = drawn.at_side("AB")
    right_text = drawn.at_side("CD")
    if right_text.isdigit():
        return solve_for_x(left_text, int(right_text))
    difference = constant_beside_x(right_text) - constant_beside_x(left_text)
    return difference / (factor_of_x(left_text) - factor_of_x(right_text))


# By family: a function that returns the answer that follows from the question and the labels in the
# picture alone. It uses another formula than the drawing code, where there is one.
RECOMPUTE_BY_FAMILY: dict[str, Callable[[str, DrawnPicture], float]] = {
    "isosceles": recompute_isosceles,
    "polygon": recompute_polygon,
    "right_triangle": recompute_right_triangle,
    "crossing": recompute_crossing,
    "perimeter": recompute_perimeter,
    "circle": recompute_circle,
    "right_triangle_side": recompute_right_triangle_side,
    "triangle_angle": recompute_triangle_angle,
    "inscribed_arc": recompute_inscribed_arc,
    "parallel_segment": recompute_parallel_segment,
    "parallelogram_side": recompute_parallelogram_side,
}


def test_the_picture_with_the_question_determines_the_answer(monkeypatch, subtests):
    """The answer of each problem follows from its question and the labels in its picture alone.

    The labels are inside of the picture, and apart from each other.
    """
    pictures = record_drawings(monkeypatch)
    figure_families = FAMILY_BY_NAME.keys() - {"corners"}  # that one is no figure
    assert figure_families == RECOMPUTE_BY_FAMILY.keys()
    for family, level in product(figure_families, LEVELS):
        with subtests.test(f"{family}, level {level}"):
            answers: dict[tuple[str, str], str] = {}
            for number in range(8):
                problem = FAMILY_BY_NAME[family](
                    random.Random(f"{family}{level}{number}"), 224, level, STYLES["plain"]
                )
                parsed_answer = parse_value(problem.answer).number
                assert parsed_answer is not None
                recomputed = RECOMPUTE_BY_FAMILY[family](problem.question, pictures[-1])
                assert math.isclose(float(parsed_answer.value), recomputed, rel_tol=1e-9), (
                    problem.question,
                    pictures[-1].labels,
                )
                key = (pixel_hash(problem.image), problem.question)
                assert answers.setdefault(key, problem.answer) == problem.answer
                places = [label_place for _, label_place in pictures[-1].labels]
                assert all(0.01 < x < 0.99 and 0.01 < y < 0.99 for x, y in places)
                assert all(
                    math.dist(label, earlier_label) > 0.05
                    for n, label in enumerate(places)
                    for earlier_label in places[:n]
                )


def test_a_polygon_stands_on_a_side_with_a_dot_at_each_corner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A drawn polygon has a dot at each corner, and its lowest side tilts by four degrees at most.

    A model of the tiny one's size can count the sides of such a polygon.
    """
    pictures = record_drawings(monkeypatch)
    dots = list[Point]()
    monkeypatch.setattr(Canvas, "dot", lambda self, centre: dots.append(centre))
    for number in range(20):
        dots.clear()
        FAMILY_BY_NAME["polygon"](random.Random(number), 56, 1, STYLES["plain"])
        (corners,) = pictures[-1].lines
        assert list(corners) == dots
        (x, y), (u, v) = sorted(corners, key=lambda corner: -corner[1])[:2]
        # the lowest side is tilted by at most four degrees
        assert abs(v - y) <= math.tan(math.radians(4.01)) * abs(u - x)
