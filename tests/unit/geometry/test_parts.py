"""Parts of the engine: written values, exact forms, derivatives, angles alone, pictures' shapes."""

import math
import random

import numpy as np
import pytest

from adora_vl.geometry.chase import AngleChase
from adora_vl.geometry.drawing import Drawing
from adora_vl.geometry.exact import round_as_in_school, short_form
from adora_vl.geometry.expressions import (
    ExpressionError,
    number_in_text,
    parse_expression,
)
from adora_vl.geometry.logic_form import (
    MAX_DEPTH,
    form_as_record,
    parse_term,
    read_form_from_record,
)
from adora_vl.geometry.quantities import Constant, Unknown, minus, power, times
from adora_vl.geometry.reading import read_facts
from adora_vl.geometry.solve import FigureProblem
from tests.support.geometry_forms import logic_form, on_circle


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\frac{3}{4}", 0.75),
        (r"6\sqrt{2}", 6 * math.sqrt(2)),
        (r"\sqrt[3]{8}", 2.0),
        (r"\frac { 5 } { 3 } \pi", 5 * math.pi / 3),
        ("2^3", 8.0),
        ("-8", -8.0),
        ("3(4+1)", 15.0),
        ("1,234.5", 1234.5),
        (r"40^\circ", 40.0),
        ("7 - 2 - 1", 4.0),
        (".5", 0.5),
    ],
)
def test_values_are_read_as_written(text: str, value: float) -> None:
    """LaTeX, powers, products without a sign and degrees have the value that they mean."""
    assert number_in_text(text) == pytest.approx(value)


def test_a_value_with_letters_is_a_tree() -> None:
    """`parse_expression` returns nested quantities; a value with letters has no number."""
    difference = minus(times(Constant(2.0), Unknown("x")), Unknown("y"))
    assert parse_expression("3(2x - y)^2") == times(Constant(3.0), power(difference, 2.0))
    assert number_in_text("3(2*4 - 3)^2") == 75.0
    assert number_in_text("3(2x - y)^2") is None


@pytest.mark.parametrize("text", [r"\sqrt{-4}", "(-8)^{1/3}", "(2 - 6)^{0.5}"])
def test_a_root_of_a_negative_number_is_no_value(text: str) -> None:
    """An even root of a negative number is refused, however it is written."""
    assert number_in_text(text) is None
    with pytest.raises(ExpressionError, match="root of a negative number"):
        parse_expression(text)


@pytest.mark.parametrize(
    "text", ["", "2x+", "(2", "2)", "9^99", "10000000000", "(" * 40 + "1" + ")" * 40, "#"]
)
def test_what_is_no_value_is_refused(text: str) -> None:
    """Broken, huge and deeply nested expressions raise `ExpressionError`."""
    with pytest.raises(ExpressionError):
        parse_expression(text)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (12.0, "12"),
        (7.5, "7.5"),
        (5 / 3, r"\frac{5}{3}"),
        (6 * math.sqrt(2), r"6\sqrt{2}"),
        (5 * math.sqrt(3) / 2, r"\frac{5\sqrt{3}}{2}"),
        (18 * math.pi, r"18\pi"),
        (math.pi / 2, r"\frac{\pi}{2}"),
        (-math.sqrt(2), r"-\sqrt{2}"),
        (12.3456, None),
        (math.inf, None),
    ],
)
def test_exact_forms(value: float, written: str | None) -> None:
    """A value is written with fraction, root or π; None where no short form has it."""
    assert short_form(value) == written


def test_rounding_is_that_of_schools() -> None:
    """Halves are rounded up, as the decimal digits have it, and no zero has a minus."""
    assert [round_as_in_school(value, 2) for value in (2.005, 1.0, -0.001, 2.675)] == [
        "2.01",
        "1.00",
        "0.00",
        "2.68",
    ]
    assert round_as_in_school(2.5, 0) == "3"


def test_brackets_close_and_are_bounded() -> None:
    """A term with open brackets or nested too deeply is None; a good one is read back the same."""
    assert parse_term("Equals(LengthOf(Line(A, B)), 5") is None
    assert parse_term("A" * 3 + "(" * 3) is None
    assert parse_term("Line(" * (MAX_DEPTH + 2) + "A" + ")" * (MAX_DEPTH + 2)) is None
    term = parse_term("Equals(LengthOf(Line(A, B)), 2x+1)")
    assert term is not None
    assert parse_term(str(term)) == term


def test_a_form_is_read_back() -> None:
    """A form that is stored as a record and read again is the same form."""
    form = logic_form(
        {"A": 1 + 2j, "B": 0j}, ["AB"], ["Equals(LengthOf(Line(A, B)), 5)"], "Find(x)"
    )
    assert read_form_from_record(form_as_record(form)) == form


CIRCLE_FACTS = [
    *on_circle("O", "A", "B", "C"),
    "PointLiesOnLine(E, Line(A, B))",
    "Equals(LengthOf(Line(A, B)), x^2+1)",
    "Equals(MeasureOf(Angle(A, B, C)), 2y)",
    "Equals(MeasureOf(Arc(A, C, B)), 3y)",
    "Equals(MeasureOf(Angle(1)), MeasureOf(Angle(B, C, A)))",
    "Equals(AreaOf(Triangle(A, B, C)), \\frac{x}{y})",
    "Equals(SinOf(Angle(C, A, B)), 0.5)",
    "Perpendicular(Line(C, E), Line(A, B))",
    "Parallel(Line(C, E), Line(O, A))",
    "IsMidpointOf(Point(E), Line(A, B))",
    "Tangent(Line(C, E), Circle(O))",
    "Similar(Triangle(A, E, C), Triangle(B, E, C))",
    "Equals(RatioOf(Line(A,E),Line(B,E)),RatioOf(Line(C,E),Line(A,C)))",
]


@pytest.mark.parametrize("start", range(4))
def test_derivatives_are_those_of_the_residuals(start: int) -> None:
    """The slopes of all residuals are those of central differences, at a figure near the picture.

    `CIRCLE_FACTS` has a fact of each kind that has residuals.
    """
    points = {"A": 0j, "B": 100 + 5j, "C": 40 + 70j, "E": 55 + 2j, "O": 48 + 20j}
    reading = read_facts(
        logic_form(points, ["AB", "BC", "CA", "CE"], CIRCLE_FACTS, "Find(x)", ["O"])
    )
    assert not reading.unread
    problem = FigureProblem(reading)
    unknowns = problem.starts.near_picture(start) + np.random.default_rng(start).normal(
        0, 0.01, problem.system.count
    )
    _, slopes = problem.system.residuals(unknowns)

    for number in range(len(unknowns)):  # an unknown at a time
        step = 1e-6 * max(1.0, abs(unknowns[number]))
        ahead, behind = unknowns.copy(), unknowns.copy()
        ahead[number] += step
        behind[number] -= step
        difference_quotient = (
            problem.system.residuals(ahead)[0] - problem.system.residuals(behind)[0]
        ) / (2 * step)
        assert slopes[:, number] == pytest.approx(difference_quotient, abs=1e-6, rel=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_angles_alone_follow_from_parallels_and_triangles(seed: int) -> None:
    """Angles are found without lengths, from the sum in a triangle and from parallels, at any tilt.

    The triangle has `angle`, 2x and x + 9 degrees, so that x = (171 - angle) / 3.
    """
    random.seed(seed)
    tilt_in_degrees, angle = random.uniform(0, 360), random.randint(25, 65)
    turn = np.exp(1j * math.radians(tilt_in_degrees))
    points = {
        name: complex(place * turn)
        for name, place in {"A": 0j, "B": 9 + 0j, "C": 2 + 6j, "D": 12 + 6j}.items()
    }
    facts = [
        "Parallel(Line(A, B), Line(C, D))",
        f"Equals(MeasureOf(Angle(B, A, C)), {angle})",
        "Equals(MeasureOf(Angle(A, C, B)), 2x)",
        "Equals(MeasureOf(Angle(C, B, A)), x+9)",
    ]
    for question, expected in (
        ("Find(x)", (171 - angle) / 3),
        ("Find(MeasureOf(Angle(A, C, D)))", 180 - angle),
    ):
        reading = read_facts(logic_form(points, ["AB", "CD", "AC", "BC"], facts, question))
        assert AngleChase(reading).value() == pytest.approx(expected)


def test_shapes_without_names_are_found_in_the_picture() -> None:
    """A shape that the question names `$` is found in the drawing: the parallelogram ABCD.

    E lies on its edge AB, and the line DE cuts it into two faces.
    """
    points = {"A": 0j, "B": 90 + 0j, "C": 120 + 50j, "D": 30 + 50j, "E": 30 + 0j}
    drawing = Drawing(
        logic_form(
            points,
            ["AB", "BC", "CD", "DA", "DE"],
            ["PointLiesOnLine(E, Line(A, B))"],
            "Find(AreaOf(Parallelogram($)))",
        )
    )
    shape = drawing.corners_of_shape(parse_term("Parallelogram($)"))
    assert sorted(shape) == ["A", "B", "C", "D"]
    assert drawing.in_drawing_order(["A", "B", "D", "C"]) in (
        ["A", "B", "C", "D"],
        ["D", "A", "B", "C"],
    )
    assert sorted(map(sorted, drawing.faces)) == [["A", "D", "E"], ["B", "C", "D", "E"]]


def test_a_circle_that_the_picture_calls_otherwise_is_its_only_one() -> None:
    """The question says circle O, and the picture's only circle is A: O is another name of A."""
    points = {"A": 0j, "P": 50 + 0j, "M": 50 + 70j}
    facts = [
        *on_circle("A", "P"),
        "Equals(LengthOf(Line(M, P)), 16)",
        "Equals(LengthOf(Line(A, P)), x)",
    ]
    statements = ["Tangent(Line(M,P),Circle(O))", "Equals(LengthOf(Line(M,O)),20)", "Find(x)"]
    reading = read_facts(logic_form(points, ["AP", "MP", "AM"], facts, statements, ["A"]))
    assert reading.drawing.centre_by_alias == {"O": "A"}
    assert not reading.unread
