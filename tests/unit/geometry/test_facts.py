"""Facts of logic forms that Geometry3K has seldom or never, each with an answer that needs it."""

import math

import pytest

from adora_vl.geometry.solve_form import solve_form
from tests.support.geometry_forms import logic_form

RIGHT_TRIANGLE_POINTS = {"A": 0j, "B": 160 + 0j, "C": 160 + 100j}
RIGHT_TRIANGLE_FACTS = ["Perpendicular(Line(A, B), Line(B, C))"]
TWO_TRIANGLES_POINTS = {
    "A": 0j,
    "B": 60 + 0j,
    "C": 0 + 90j,
    "D": 200 + 0j,
    "E": 290 + 0j,
    "F": 200 + 135j,
}


def length_fact(line: str, size: str) -> str:
    """Return the fact that a line, say "AB", is as long as `size` says."""
    return f"Equals(LengthOf(Line({line[0]}, {line[1]})), {size})"


@pytest.mark.parametrize(
    ("facts", "question", "value"),
    [
        (
            [length_fact("AB", "12"), "Equals(CotOf(Angle(A)), 4/3)"],
            "Find(LengthOf(Line(B, C)))",
            9.0,
        ),
        (
            [length_fact("AB", "3"), "Equals(LengthOf(Line(B, C)), Pow(2, 2))"],
            "Find(LengthOf(Line(A, C)))",
            5.0,
        ),
        ([length_fact("AB", "3"), length_fact("BC", "4")], "Find(CotOf(Angle(A)))", 0.75),
        (
            [length_fact("AB", "8"), "Congruent(Line(A, B), Line(B, C))"],
            "Find(LengthOf(Line(A, C)))",
            8 * math.sqrt(2),
        ),
        (
            [length_fact("AB", "6"), "Equals(AreaOf(Triangle(A, B, C)), 24)"],
            "Find(LengthOf(Line(A, C)))",
            10.0,
        ),
        (["Complementary(Angle(A), Angle(C))"], "Find(MeasureOf(Angle(B)))", 90.0),
        # Products and sums of more than two numbers.
        (
            [length_fact("AB", "Mul(2, 3, 2)"), length_fact("BC", "5")],
            "Find(LengthOf(Line(A, C)))",
            13.0,
        ),
        (
            [length_fact("AB", "Add(2, 4, 6)"), length_fact("BC", "Mul(2, Div(5, 2))")],
            "Find(LengthOf(Line(A, C)))",
            13.0,
        ),
    ],
)
def test_a_right_triangle_by_seldom_facts(facts: list[str], question: str, value: float) -> None:
    """Each problem is on the triangle with the right angle at B."""
    result = solve_form(
        logic_form(
            RIGHT_TRIANGLE_POINTS, ["AB", "BC", "AC"], [*RIGHT_TRIANGLE_FACTS, *facts], question
        )
    )
    assert result.status == "answered", result.why
    assert not result.unread, result.why
    assert result.value == pytest.approx(value)


def test_two_separate_triangles_are_similar_as_they_look() -> None:
    """Two polygons without names, `$1` and `$2`, are the triangles of the drawing, and similar.

    They are ABC and DEF, and DF is AC times DE / AB, 8 · 6 / 4.
    """
    facts = [length_fact("AB", "4"), length_fact("DE", "6"), length_fact("AC", "8")]
    facts += [length_fact("BC", "7")]
    lines = ["AB", "BC", "AC", "DE", "EF", "DF"]
    question = ["Similar(Polygon($1),Polygon($2))", "Find(LengthOf(Line(D, F)))"]
    result = solve_form(logic_form(TWO_TRIANGLES_POINTS, lines, facts, question))
    assert result.status == "answered", result.why
    assert result.value == pytest.approx(12.0), result.why


def test_the_second_leg_of_an_isosceles_triangle_is_as_long_as_the_first() -> None:
    """BA = 2x and BC = x + 5 are equal, so x = 5; and also where AC is said to be the base."""
    points = {"A": 100 + 100j, "B": 0j, "C": 150 + 0j}
    role = "LegOf(Isosceles(Triangle(A,B,C)))"
    question = [f"Equals(Line(B,A),{role})", f"Equals(Line(B,C),{role})"]
    facts = [length_fact("AB", "2x"), length_fact("BC", "x+5"), length_fact("AC", "4")]
    result = solve_form(logic_form(points, ["AB", "BC", "AC"], facts, [*question, "Find(x)"]))
    assert result.status == "answered", result.why
    assert result.value == pytest.approx(5.0), result.why
    # As drawn the legs would be others.
    question_with_base = [f"Equals(Line(A,C),{role.replace('LegOf', 'BaseOf')})", "Find(x)"]
    assert solve_form(
        logic_form(points, ["AB", "BC", "AC"], facts, question_with_base)
    ).value == pytest.approx(5.0)


def test_the_orthocenter_lies_on_all_altitudes() -> None:
    """BH is an altitude through the orthocenter H, so the angles HBC and C sum to 90 degrees."""
    points = {"A": 60 + 120j, "B": 0j, "C": 150 + 0j, "H": 60 + 45j}
    lines = ["AB", "BC", "AC", "AH", "BH", "CH"]
    facts = ["Equals(MeasureOf(Angle(A, B, C)), 65)", "Equals(MeasureOf(Angle(A, C, B)), 50)"]
    question = ["IsOrthocenterOf(Point(H),Triangle(A,B,C))", "Find(MeasureOf(Angle(H, B, C)))"]
    result = solve_form(logic_form(points, lines, facts, question))
    assert result.status == "answered", result.why
    assert result.value == pytest.approx(40.0), result.why
