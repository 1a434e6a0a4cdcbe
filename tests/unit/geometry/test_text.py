"""Facts as sentences: what a teacher writes gives the answer that she expects, and a slip is named
with its place.
"""

import json
from pathlib import Path

import pytest

from adora_vl.geometry.expressions import parse_expression
from adora_vl.geometry.solve_form import solve_form
from adora_vl.geometry.text import MAX_TEXT, read_form_from_text
from adora_vl.utils.errors import UserError


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("triangle ABC. AB = 5, AC = 5, angle A = 40; find angle B", "70"),
        ("ABCD parallelogram, AB = 2x+1, CD = 9, BC = 5\nfind perimeter ABCD", "28"),
        ("ABCD is a rectangle. AC and BD meet at E. AE = 5, AB = 6. Find area ABCD", "48"),
        ("In triangle ABC, AB = 5, BC = 12, angle B = 90. Find AC.", "13"),
        ("Triangle ABC is similar to triangle DEF. AB = 2, DE = 4, BC = 3. Find EF.", "6"),
        ("circle O: A, B, C. AB is a diameter. angle BAC = 30\nfind angle ABC", "60"),
        ("circle O: A\nDA tangent at A, OA = 5, OD = 13, find DA", "12"),
        ("AB parallel CD, AC and BD meet at E, AE = 3, EC = 6, AB = 4, find CD", "8"),
        ("triangle ABC, D on AC, BD bisects angle ABC, AB = 6, BC = 9, AC = 10, find AD", "4"),
        ("triangle ABC, D on AB, E on AC, DE ∥ BC, AD = 4, DB = 2, DE = 6, find BC", "9"),
        ("ABC ~ DEF, AB = 4, DE = 6, BC = 6, find EF", "9"),
        ("regular hexagon ABCDEF, AB = 4, find area ABCDEF", r"24\sqrt{3}"),
        ("triangle ABC, AD altitude of ABC, AB = 10, BD = 6, DC = 4, find AC", r"4\sqrt{5}"),
        ("ABCD trapezoid, AB ∥ CD, AB = 10, CD = 6, ∠A = 90°, AD = 3, find BC", "5"),
        ("triangle ABC, AB = x, BC = x + 1, AC = x + 2, right angle ABC, find x", "3"),
        ("triangle ABC, D midpoint of BC, AD = 5, angle BAC = 90, find BC", "10"),
        ("rhombus ABCD, AC = 6, BD = 8, find AB", "5"),
        ("AB = 3\nfind 2AB + 1", "7"),
        (
            "angle ABC = 2x, angle ABD = x + 10, BD bisects angle ABC, find x  # no solution but "
            "all x",
            None,
        ),
        ("circle O: A, B. arc AB = 80, OA = 9\nfind angle AOB", "80"),
        ("circle O: A, B, C. arc ABC = 98, find angle AOC", "98"),
        ("circle O: A, B, C. arc ABC = 262, find angle AOC", "98"),
        ("circle O: A\nOA = 3\nfind area circle O", r"9\pi"),
        ("triangle ABC, AB = 3, BC = 4, AC = 5, find sin A", "\\frac{4}{5}"),
        ("AB = 5 m, BC = 12 m, triangle ABC, angle B = 90, find AC", "13"),
        ("triangle ABC, AB = 2m, BC = m + 3, AB = BC, find m", "3"),
        ("isosceles triangle ABC with base BC, angle A = 40, find angle B", "70"),
        ("AB is a chord of circle O. C on the major arc AB. arc AB = 100. find angle ACB", "50"),
        ("AB is a chord of circle O. C on the minor arc AB. arc AB = 100. find angle ACB", "130"),
        ("The angles of triangle ABC are in the ratio 2 : 3 : 4. Find angle C.", "80"),
        (
            "PT is tangent to circle O at T. PAB is a secant of circle O. PT = 6, PA = 4. Find AB",
            "5",
        ),
        ("circle O inscribed in rhombus ABCD, AC = 6, BD = 8, find radius O", "\\frac{12}{5}"),
        ("circle of radius 5 with center O. find the circumference of circle O", "10\\pi"),
        ("triangle ABC. the medians AD and BE meet at G. AG = 6. find AD", "9"),
    ],
)
def test_sentences_are_solved(text: str, answer: str | None) -> None:
    """Each problem in sentences gets the answer that is worked out by hand; None: no answer."""
    result = solve_form(read_form_from_text(text))
    if answer is None:
        assert result.status != "answered"
    else:
        assert (result.status, result.answer) == ("answered", answer), result.why


# Equations in a right triangle with BC = 3, each of which AB = 5 fulfils.
SENTENCES_WITH_SQUARES = [
    "2 * AB^2 = 50",
    "3AB^2 = 75",
    "AB * BC^2 = 45",
    "AB / BC^2 = 5/9",
    "-AB^2 = -25",
    "100 - AB^2 = 75",
    "AB^2 + BC^2 = 34",
    "(2 * AB)^2 = 100",
    "AB^2^2 = 625",
]


@pytest.mark.parametrize("equation", SENTENCES_WITH_SQUARES)
def test_a_square_binds_closer_than_a_product_or_a_minus(equation: str) -> None:
    """AB = 5 fulfils each equation only if it is read with the precedence of school books."""
    result = solve_form(read_form_from_text(f"right angle ABC, BC = 3\n{equation}\nfind AB"))
    assert result.status == "answered", result.why
    assert result.value == pytest.approx(5.0)


SENTENCE_CASES = json.loads(Path(__file__).with_name("sentences.json").read_text())


@pytest.mark.parametrize(
    ("text", "facts"), SENTENCE_CASES, ids=[text for text, _ in SENTENCE_CASES]
)
def test_each_turn_of_speech_says_its_facts(text: str, facts: list[str]) -> None:
    """`sentences.json` has sentences, each with the facts of the logic form that it states."""
    assert list(read_form_from_text(f"{text.rstrip('.')}. find x").facts) == facts


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (
            "triangle ABC, D on BC, perimeter ABC = 9.3513, area ABC = 4.094, find perimeter ABC; "
            "A at 254.3, 53.3; B at 317.3, 118.9; C at 359.5, 40.5; D at 332.3, 89.3",
            "answered",
        ),
        (
            "triangle ABC, D on AB, E on AC, BE and CD meet at F, AC + EF = 7.69, find angle BCE; "
            "A at 431.5, 107.2; B at 492.1, 291; C at 376.1, 298.3; D at 447.4, 155.3; "
            "E at 417, 157.1; F at 432.6, 184.9",
            "open",
        ),
        (
            "circle O: A, B, C, D. AC and BD meet at E, area ABCD = 23.637, find angle OBA; "
            "O at 200, 300; A at 80.3, 222.6; B at 59.3, 322.5; C at 80.4, 377.5; "
            "D at 334, 348.6; E at 80.4, 324.5",
            "open",
        ),
    ],
)
def test_a_sum_or_an_area_says_how_large_a_drawn_figure_is(text: str, status: str) -> None:
    """A problem whose size follows from a sum or an area alone has a verdict, and no conflict.

    A search that began at another size found only figures that had collapsed.
    """
    verdict = solve_form(read_form_from_text(text))
    assert verdict.status == status, verdict.why


def test_a_text_and_its_logic_form_are_one_problem() -> None:
    """Facts and question in words are read as those of the logic form."""
    form = read_form_from_text("triangle ABC, AB = 5, angle ABC = 2x+4\nfind x")
    assert form.facts == (
        "Triangle(A, B, C)",
        "Equals(LengthOf(Line(A, B)), 5)",
        "Equals(MeasureOf(Angle(A, B, C)), 2x+4)",
    )
    assert form.question == ("Find(x)",)


@pytest.mark.parametrize(
    ("text", "words_of_error"),
    [
        (
            "triangle ABC\nAB paralel CD, find AB",
            "line 2, 'AB paralel CD': 'paralel' is no word that is known; did you mean 'parallel'?",
        ),
        ("AB = 5", "nothing is asked; add a line such as 'find AC'"),
        ("AB = foo, find AB", "'foo' is no word that is known"),
        ("triangle ABCD, find AB", "a triangle has 3 corners, and ABCD names 4"),
        ("isosceles triangle ABC, find AB", "write such as AB = AC"),
        ("isosceles triangle ABC, AB = 5, BA = 5, find BC", "write such as AB = AC"),
        ("right triangle ABC, AB = 3, find AC", "write such as angle ABC = 90"),
        ("AB : BC = 1 : 2 : 3, find AB", "not as many parts"),
        ("triangle ABC, find the side", "which side is meant"),
        ("DE midsegment, find DE", "which shape is meant"),
        ("vertex A, find AB", "of which isosceles triangle A is the vertex"),
        ("AA = 5, find AB", "AA is no segment"),
        ("find radius", "which circle is meant"),
        ("AB = (5, find AB", "is not a value"),
        ("AB = 5 + , find AB", "is not a value"),
        ("AB + = CD, find AB", "something is missing"),
        ("find beauty", "'beauty' is no word that is known"),
        ("x" * (MAX_TEXT + 1), "characters, over"),
    ],
)
def test_a_slip_is_named_with_its_place(text: str, words_of_error: str) -> None:
    """A text that cannot be read is refused in one line that says what is wrong."""
    with pytest.raises(UserError) as raised:
        read_form_from_text(text)
    assert words_of_error in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "text",
    ["(" * 500, "AB = " + "(" * 300 + ", find AB", "find " * 50, "find AB" + "+AB" * 2000, "=,=;="],
)
def test_no_text_makes_it_raise_anything_else(text: str) -> None:
    """A deep, long or empty text is solved or refused with a `UserError` of one line."""
    try:
        solve_form(read_form_from_text(text))
    except UserError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("value", "value_without_unit"),
    [
        ("5 cm", "5"),
        ("5cm^2", "5"),
        ("12 square feet", "12"),
        ("4\\sqrt{3} in", "4\\sqrt{3}"),
        ("7\\text{ cm}", "7"),
        ("30^{\\circ}", "30"),
        ("5 m", "5"),
        ("5m", "5*m"),
    ],
)
def test_a_unit_behind_a_number_is_no_letter(value: str, value_without_unit: str) -> None:
    """A unit is dropped; "5m" without a space may be a letter, and is a product."""
    assert parse_expression(value) == parse_expression(value_without_unit)


def test_given_arcs_without_a_common_end_lie_beside_each_other() -> None:
    """Arcs of 80 and 60 degrees do not overlap, so their chords cross at half of 140 degrees."""
    crossing_chords = (
        "circle O: A, B, C, D. AB and CD meet at E. arc AC = 80. arc BD = 60. find angle AEC"
    )
    assert solve_form(read_form_from_text(crossing_chords)).value == pytest.approx(70)
    # With a common end the one may hold the other, and only a drawing says so.
    arcs_with_common_end = "circle O: A, B, C. arc AB = 60. arc AC = 100. find arc BC"
    assert solve_form(read_form_from_text(arcs_with_common_end)).status == "ambiguous"
