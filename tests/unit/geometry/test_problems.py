"""Problems as a teacher writes them, with answers that we know: determined, open, contradictory, of
two solutions, not to scale.
"""

import math

import pytest

from adora_vl.geometry.solve_form import solve_form
from adora_vl.geometry.text import read_form_from_text

ANSWERED_PROBLEMS = (
    ("triangle ABC, AB = 13, BC = 14, AC = 15, find area ABC", 84.0),
    ("triangle ABC, right angle ACB, AC = 5, BC = 12, CD altitude of ABC, find CD", 60 / 13),
    ("triangle ABC, AB = AC, angle BAC = 2x, angle ABC = x + 30, find x", 30.0),
    ("triangle ABC, AB = 2x, BC = 3x, AC = 4x, find cos B", -0.25),
    ("triangle ABC, M midpoint of BC, N midpoint of AC, AM and BN meet at G, AG = 8, find GM", 4.0),
    ("triangle ABC, BD bisects angle ABC, CD bisects angle ACB, angle A = 70, find angle BDC", 125),
    ("AB parallel CD, AD and BC meet at E, angle EAB = 50, angle ECD = 60, find angle AEB", 70.0),
    ("D on AB, E on AC, DE parallel BC, AD = 3, AB = 9, BC = 12, find DE", 4.0),
    (
        "ABCD kite, AB = AD, BC = CD, AC and BD meet at E, AB = 13, BD = 10, BC = sqrt 41, find AC",
        16,
    ),
    ("kite ABCD, AB = BC, CD = DA, angle ABC = 100, angle BCD = 90, find angle CDA", 80.0),
    ("ABCD parallelogram, AC and BD meet at E, AE = 3y - 5, EC = y + 3, find AC", 14.0),
    ("ABCD trapezoid, AB ∥ CD, E midpoint of AD, F midpoint of BC, AB = 10, CD = 6, find EF", 8.0),
    ("isosceles trapezoid ABCD, AB parallel CD, AC = 2x + 1, BD = 15, find x", 7.0),
    ("rhombus ABCD, angle DAB = 60, AB = 6, find BD", 6.0),
    ("regular octagon ABCDEFGH, find angle ABC", 135.0),
    ("regular hexagon ABCDEF, AB = 2, find AD", 4.0),
    ("regular hexagon ABCDEF inscribed in circle O, OA = 5, find perimeter ABCDEF", 30.0),
    ("circle O inscribed in ABC, AB = 13, BC = 14, CA = 15, find radius O", 4.0),
    ("circle O: A, B, C, D. AC and BD meet at E. AE = 4, EC = 6, BE = 3, find ED", 8.0),
    ("circle O: A, B. PA tangent at A, PB tangent at B, angle APB = 50, find angle AOB", 130.0),
    ("circle O: A, B, C. PA tangent at A. B on PC. PA = 6, PB = 4, find PC", 9.0),
    ("circle O: A, B, C, D. B on PA, C on PD, PB = 4, BA = 5, PC = 3, find CD", 9.0),
    ("DA tangent at A to circle O, A and B on circle O, angle DAB = 60, find arc AB", 120.0),
    ("circle O: A, B. OA = 6, angle AOB = 60, find area sector AOB", 6 * math.pi),
    ("ABCD inscribed in circle O, angle ABC = 80, find angle CDA", 100.0),
    ("ABC similar DEF, AB = 3, DE = 6, area ABC = 5, find area DEF", 20.0),
    ("B on AC, AB = 2x, BC = 3x, AC = 25, find AB", 10.0),
    ("x + y = 10, x - y = 2, AB = x, find x", 6.0),
)


@pytest.mark.parametrize(("text", "value"), ANSWERED_PROBLEMS)
def test_what_facts_determine_is_answered(text: str, value: float) -> None:
    """Each problem has the value that a school book's theorem gives it."""
    result = solve_form(read_form_from_text(text))
    assert result.status == "answered", result.why
    assert result.value == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize(
    "text",
    [
        "triangle ABC, angle A = 40, find angle B",
        "ABCD quadrilateral, AB = 3, BC = 4, CD = 5, DA = 6, find AC",
        "circle O: A, B. OA = 5, find AB",
        "AB parallel CD, AB = 5, find CD",
    ],
)
def test_what_facts_leave_free_is_open(text: str) -> None:
    """A quantity that the facts do not fix is open, without a value."""
    result = solve_form(read_form_from_text(text))
    assert (result.status, result.value) == ("open", None), result.why


@pytest.mark.parametrize(
    "text",
    [
        "triangle ABC, right angle ABC, AB = 3, BC = 4, AC = 6, find angle A",
        "ABCD rectangle, AC = 10, BD = 12, find AB",
        "circle O: A, B. OA = 5, AB = 12, find angle AOB",
        "ABCD parallelogram, angle ABC = 60, angle BCD = 100, find angle CDA",
        "ABCD square, ABE equilateral, E on CD, find AB",
        "D on AC, AD = 3, DC = 4, AC = 8, find AD",
        "D on AC, AD = 9, AC = 5, find DC",
    ],
)
def test_what_excludes_itself_is_a_conflict(text: str) -> None:
    """Facts that no figure fulfils are a conflict."""
    result = solve_form(read_form_from_text(text))
    assert result.status == "conflict", result.why


@pytest.mark.parametrize(
    "text",
    [
        "triangle ABC, AB = 10, BC = 6, angle A = 30, find AC",
        "circle O: A, B, C. angle BOC = 110, angle BAC = x, find x",
        "AB parallel CD, E on AB, F on CD, G on EF, angle AEF = 70, find angle EFD",
        "circle O: A, B, C. arc AB = 80, find angle ACB",  # C may lie on either side
        # two figures that are nearly the same: angle ABC is a little under or over 90
        "ABCD kite, AB = AD, CB = CD, area ABCD = 65.0137, DC = 10.408947, "
        "perimeter ABCD = 33.324812, find angle DBC",
        "ABCD trapezoid, AB parallel CD, AC and BD meet at E, angle EDC = 34.58008, "
        "CD = 2.121366, EA = 3.813011, BA = 6.712578, find BC",
    ],
)
def test_of_two_solutions_without_a_drawing_both_are_named(text: str) -> None:
    """Two figures fit the facts, and no place of a point chooses."""
    result = solve_form(read_form_from_text(text))
    assert result.status == "ambiguous", result.why
    assert "two figures fit" in result.why, result.why


@pytest.mark.parametrize(
    ("points", "text", "value"),
    [
        (
            "A at 0, 100. B at 100, 100. C at 90, 50.",
            "triangle ABC, AC = 10, BC = 6, angle A = 30, find AB",
            5 * math.sqrt(3) + math.sqrt(11),
        ),
        (
            "A at 0, 100. B at 60, 100. C at 90, 50.",
            "triangle ABC, AC = 10, BC = 6, angle A = 30, find AB",
            5 * math.sqrt(3) - math.sqrt(11),
        ),
        (
            "circle O: A, B, C. O at 50, 50. A at 10, 80. B at 90, 80. C at 50, 0.",
            "arc AB = 100, find angle ACB",
            50.0,
        ),
        (
            "circle O: A, B, C. O at 50, 50. A at 10, 80. B at 90, 80. C at 50, 100.",
            "arc AB = 100, find angle ACB",
            130.0,
        ),
        # a square in the picture, five times as high as wide in the facts
        (
            "A at 0, 0. B at 100, 0. C at 100, 100. D at 0, 100.",
            "ABCD rectangle, AB = 20, AC = 101, find BC",
            99.0,
        ),
    ],
)
def test_a_drawing_chooses_also_where_it_is_not_to_scale(
    points: str, text: str, value: float
) -> None:
    """The places of the points choose the solution that is nearer to what is drawn."""
    result = solve_form(read_form_from_text(f"{points} {text}"))
    assert result.status == "answered", result.why
    assert result.value == pytest.approx(value, rel=1e-6)


def test_points_without_places_lie_between_as_the_words_say() -> None:
    """A figure is found although most random starts have some point outside of its line.

    The points have no places, and lines that meet have to do so between their named ends.
    """
    text = (
        "AG and BH meet at P. AG and CK meet at Q. BH ∥ CK. D on PQ. angle APB = 70, find angle AQC"
    )
    result = solve_form(read_form_from_text(text))
    assert result.status in ("answered", "ambiguous"), result.why


def test_a_figure_that_was_not_found_is_no_contradiction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that ends without a figure is `open`, since no facts were found to contradict.

    It has so few steps here that no start arrives, and the test for contradictions finds none.
    """
    monkeypatch.setattr("adora_vl.geometry.solve._MAX_STEPS", 1)
    monkeypatch.setattr("adora_vl.geometry.solve._LETTER_STEPS", 1)
    monkeypatch.setattr("adora_vl.geometry.conflict._exclude_each_other", lambda *_: False)
    result = solve_form(
        read_form_from_text("triangle ABC, AB = 13, BC = 14, AC = 15, find area ABC")
    )
    assert result.status == "open"
    assert result.why.startswith("no figure was found")
