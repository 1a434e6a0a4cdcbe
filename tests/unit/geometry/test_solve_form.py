"""What the engine says of forms: determined, open, contradictory, two figures, not to scale; and
properties of it.
"""

import cmath
import math
import random
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adora_vl.geometry.logic_form import LogicForm
from adora_vl.geometry.solve_form import MAX_FACT_LENGTH, MAX_POINTS, solve_form
from adora_vl.geometry.text import read_form_from_text
from tests.support.geometry_forms import (
    angle_in_degrees,
    logic_form,
    measured_angle,
    measured_length,
    on_circle,
)

TRIANGLE_POINTS = {"A": 0j, "B": 100 + 0j, "C": 30 + 60j}
TRIANGLE_SIDES = ("AB", "BC", "CA")


@given(st.floats(2, 20), st.floats(2, 20), st.floats(25, 150))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_two_sides_and_their_angle_give_the_third(
    first: float, second: float, angle: float
) -> None:
    """A triangle is drawn from two sides and their angle; the third side is as long as drawn."""
    points = {"A": complex(first), "B": 0j, "C": second * cmath.exp(1j * math.radians(angle))}
    facts = [
        measured_length(points, "A", "B"),
        measured_length(points, "B", "C"),
        measured_angle(points, "A", "B", "C"),
    ]
    result = solve_form(logic_form(points, TRIANGLE_SIDES, facts, "Find(LengthOf(Line(A, C)))"))
    assert (result.status, result.basis) == ("answered", "facts")
    assert result.value == pytest.approx(abs(points["A"] - points["C"]), rel=1e-6)


@given(st.floats(3, 9), st.floats(3, 9), st.floats(40, 140), st.floats(0.2, 0.8))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_a_parallelogram_is_solved_from_a_picture_that_is_not_to_scale(
    width: float, side: float, angle: float, height_scale: float
) -> None:
    """The picture is flattened by `height_scale`; the diagonal is as long as the facts have it."""
    corner = side * cmath.exp(1j * math.radians(angle))
    points = {"A": 0j, "B": complex(width), "C": width + corner, "D": corner}
    facts = [
        measured_length(points, "A", "B"),
        measured_length(points, "A", "D"),
        measured_angle(points, "D", "A", "B"),
    ]
    drawn_points = {
        name: complex(100 * place.real, 100 * height_scale * place.imag)
        for name, place in points.items()
    }
    form = ["Parallelogram(A,B,C,D)", "Find(LengthOf(Line(A, C)))"]
    result = solve_form(logic_form(drawn_points, ("AB", "BC", "CD", "DA", "AC"), facts, form))
    assert result.status == "answered"
    assert result.value == pytest.approx(abs(points["C"]), rel=1e-6)


@given(st.floats(2, 10), st.floats(1.3, 3))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_a_tangent_is_as_long_as_the_right_triangle_has_it(
    radius: float, distance_in_radii: float
) -> None:
    """A tangent has the length of a leg in the right triangle of radius and distance.

    The triangle has its right angle at the point T where the tangent touches.
    """
    outer_distance = radius * distance_in_radii
    tangent_point = radius * cmath.exp(1j * math.acos(1 / distance_in_radii))
    points = {"O": 0j, "P": complex(outer_distance), "T": tangent_point}
    facts = [
        *on_circle("O", "T"),
        f"Equals(RadiusOf(Circle(O)), {radius:.10f})",
        measured_length(points, "O", "P"),
        "Tangent(Line(P, T), Circle(O))",
    ]
    result = solve_form(
        logic_form(points, ("OP", "PT", "OT"), facts, "Find(LengthOf(Line(P, T)))", ["O"])
    )
    assert result.status == "answered"
    assert result.value == pytest.approx(math.sqrt(outer_distance**2 - radius**2), rel=1e-6)


def draw_crossing_chords(seed: int) -> tuple[LogicForm, float]:
    """Return a form and the length that it asks for.

    Two chords meet inside a circle; three of their four parts are given, and the fourth is asked
    for.
    """
    rng = random.Random(seed)
    end_angles = sorted(rng.uniform(0, 2 * math.pi) for _ in range(4))
    # four ends in random places of the circle, each at least 0.5 radians from the next one
    while (
        min(
            b - a
            for a, b in zip(end_angles, [*end_angles[1:], end_angles[0] + 2 * math.pi], strict=True)
        )
        < 0.5
    ):
        end_angles = sorted(rng.uniform(0, 2 * math.pi) for _ in range(4))
    points = {
        name: 50 * cmath.exp(1j * angle) for name, angle in zip("ABCD", end_angles, strict=True)
    }
    first_chord = points["C"] - points["A"]
    second_chord = points["D"] - points["B"]
    # The share of the chord AC that lies before the crossing, by cross products.
    share_of_first = ((points["B"] - points["A"]).conjugate() * second_chord).imag / (
        first_chord.conjugate() * second_chord
    ).imag
    # E: where the chords AC and BD meet; O: the centre
    points |= {"E": points["A"] + share_of_first * first_chord, "O": 0j}
    facts = [
        *on_circle("O", *"ABCD"),
        "PointLiesOnLine(E, Line(A, C))",
        "PointLiesOnLine(E, Line(B, D))",
        *(measured_length(points, "E", name) for name in "ABC"),
    ]
    lines = ("AC", "BD", "AE", "EC", "BE", "ED")
    return logic_form(points, lines, facts, "Find(LengthOf(Line(E, D)))", ["O"]), abs(
        points["E"] - points["D"]
    )


@pytest.mark.parametrize("seed", range(8))
def test_parts_of_chords(seed: int) -> None:
    """The fourth part of two crossing chords is as long as drawn."""
    form, expected = draw_crossing_chords(seed)
    result = solve_form(form)
    assert result.status == "answered"
    assert result.value == pytest.approx(expected, rel=1e-6)


# -------------------------------------- what a problem does not speak of does not change its answer


def rename_points(form: LogicForm, names: dict[str, str]) -> LogicForm:
    """Return the form with the letters A to E replaced by others, in points, facts and question."""

    def renamed(text: str) -> str:
        return re.sub(r"\b[A-E]\b", lambda match: names[match[0]], text)

    return LogicForm(
        lines=tuple((names[start], names[end]) for start, end in form.lines),
        circles=form.circles,
        points={names.get(name, name): place for name, place in form.points.items()},
        facts=tuple(renamed(fact) for fact in form.facts),
        question=tuple(renamed(part) for part in form.question),
    )


@pytest.mark.parametrize("seed", range(4))
def test_turned_mirrored_scaled_renamed_and_shuffled_forms_say_the_same(seed: int) -> None:
    """A moved picture, other names and facts in another order or twice change no answer."""
    form, expected = draw_crossing_chords(seed)
    rng = random.Random(seed)
    turn_and_scale = cmath.exp(1j * rng.uniform(0, 6)) * rng.uniform(0.3, 4)

    def moved_point(x: float, y: float) -> tuple[float, float]:
        """Return a place of the picture, turned and scaled by a random factor and shifted by 77."""
        place = complex(x, y) * turn_and_scale + 77
        return place.real, place.imag

    shuffled = list(form.facts)
    rng.shuffle(shuffled)
    forms = [
        replace(form, points={name: moved_point(*place) for name, place in form.points.items()}),
        replace(form, points={name: (-x, y) for name, (x, y) in form.points.items()}),
        replace(form, facts=tuple(shuffled)),
        replace(form, facts=(*form.facts, *form.facts)),
        rename_points(form, dict(zip("ABCDE", "CEADB", strict=True))),
    ]
    for other_form in forms:
        result = solve_form(other_form)
        assert (result.status, result.basis) == ("answered", "facts")
        assert result.value == pytest.approx(expected, rel=1e-6)


def test_a_true_fact_more_changes_nothing_and_one_less_never_gives_another_answer() -> None:
    """Redundant facts leave the answer; without a needed one it is the same answer or none."""
    points = TRIANGLE_POINTS
    needed = [
        measured_length(points, "A", "B"),
        measured_length(points, "B", "C"),
        measured_angle(points, "A", "B", "C"),
    ]
    redundant = [measured_angle(points, "B", "A", "C"), measured_length(points, "A", "C")]
    expected = angle_in_degrees(points, "A", "C", "B")
    form = "Find(MeasureOf(Angle(A, C, B)))"
    for facts in (needed, [*needed, redundant[0]], [*needed, *redundant]):
        result = solve_form(logic_form(points, TRIANGLE_SIDES, facts, form))
        assert result.status == "answered"
        assert result.value == pytest.approx(expected, abs=1e-6)
    for number in range(3):
        facts = needed[:number] + needed[number + 1 :]
        result = solve_form(logic_form(points, TRIANGLE_SIDES, facts, form))
        assert result.status != "answered" or result.value == pytest.approx(expected, abs=1e-6)


# -------------------------------------------------------- open, assumed, contradictory, two figures


def test_open_where_a_side_may_be_anything() -> None:
    """Two sides of a triangle do not determine the third, and the engine says what is free."""
    facts = ["Equals(LengthOf(Line(A, B)), 5)", "Equals(LengthOf(Line(B, C)), 7)"]
    result = solve_form(
        logic_form(TRIANGLE_POINTS, TRIANGLE_SIDES, facts, "Find(LengthOf(Line(A, C)))")
    )
    assert (result.status, result.value, result.basis) == ("open", None, "")
    assert "AC free" in result.why


def test_what_only_the_picture_shows_is_assumed_and_not_determined() -> None:
    """A right angle that is drawn and not stated gives an answer whose basis is `looks`."""
    right_triangle_points = {"A": 0j, "B": 90 + 0j, "C": 60j}
    facts = ["Equals(LengthOf(Line(A, B)), 4)", "Equals(LengthOf(Line(A, C)), 3)"]
    form = logic_form(right_triangle_points, TRIANGLE_SIDES, facts, "Find(LengthOf(Line(B, C)))")
    result = solve_form(form)
    assert (result.status, result.basis, result.answer) == ("open", "looks", "5")
    assert result.assumed == ("angle BAC is a right angle",)
    assert solve_form(form, try_looks=False).value is None


@pytest.mark.parametrize(
    ("facts", "named_facts"),
    [
        (
            ("LengthOf(Line(A, B)), 5", "LengthOf(Line(B, C)), 2", "LengthOf(Line(C, A)), 9"),
            ("AB = 5", "BC = 2", "CA = 9"),
        ),
        (
            (
                "MeasureOf(Angle(C, A, B)), 50",
                "MeasureOf(Angle(A, B, C)), 60",
                "MeasureOf(Angle(B, C, A)), 80",
            ),
            ("angle CAB = 50", "angle ABC = 60", "angle BCA = 80"),
        ),
        (("LengthOf(Line(A, B)), 5", "LengthOf(Line(A, B)), 6"), ("AB = 5", "AB = 6")),
    ],
)
def test_facts_that_exclude_each_other_are_named(
    facts: tuple[str, ...], named_facts: tuple[str, ...]
) -> None:
    """Facts that no figure fulfils are a `conflict`, whose reason names each of them.

    They are sides that close no triangle, angles that sum to 190, and two lengths of one line.
    """
    result = solve_form(
        logic_form(
            TRIANGLE_POINTS,
            TRIANGLE_SIDES,
            [f"Equals({fact})" for fact in facts],
            "Find(MeasureOf(Angle(A, B, C)))",
        )
    )
    assert result.status == "conflict"
    assert result.why.startswith("no figure")
    assert all(name in result.why for name in named_facts)


def test_angles_decide_where_lengths_contradict_them() -> None:
    """The third angle is 180 - 50 - 60 degrees, although no such triangle has BC = 10 AB."""
    facts = [
        "Equals(MeasureOf(Angle(C, A, B)), 50)",
        "Equals(MeasureOf(Angle(A, B, C)), 60)",
        "Equals(LengthOf(Line(A, B)), 5)",
        "Equals(LengthOf(Line(B, C)), 50)",
    ]
    result = solve_form(
        logic_form(TRIANGLE_POINTS, TRIANGLE_SIDES, facts, "Find(MeasureOf(Angle(B, C, A)))")
    )
    assert (result.status, result.basis, result.answer) == ("answered", "angles", "70")


def test_a_length_that_would_be_negative_is_no_answer() -> None:
    """A question for a length that would be negative has no answer.

    B lies between A and C, and AB = 9 is longer than AC = 5: BC would be -4.
    """
    collinear_points = {"A": 0j, "B": 60 + 0j, "C": 100 + 0j}
    facts = [
        "PointLiesOnLine(B, Line(A, C))",
        "Equals(LengthOf(Line(A, B)), 9)",
        "Equals(LengthOf(Line(A, C)), 5)",
    ]
    assert solve_form(
        logic_form(collinear_points, ("AC", "AB", "BC"), facts, "Find(LengthOf(Line(B, C)))")
    ).status in (
        "conflict",
        "collapsed",
    )


def test_a_letter_may_be_negative() -> None:
    """AB = 2 - x = 10 makes x = -8; only lengths have to be positive."""
    facts = ["Equals(LengthOf(Line(A, B)), 2-x)", "Equals(LengthOf(Line(A, B)), 10)"]
    assert solve_form(logic_form(TRIANGLE_POINTS, TRIANGLE_SIDES, facts, "Find(x)")).answer == "-8"


def test_a_double_root_is_an_answer() -> None:
    """x² - 6x + 14 = 5 is (x - 3)² = 0, which touches zero at 3 and does not change its sign."""
    facts = ["Equals(LengthOf(Line(A, B)), x^2-6x+14)", "Equals(LengthOf(Line(A, B)), 5)"]
    assert solve_form(logic_form(TRIANGLE_POINTS, TRIANGLE_SIDES, facts, "Find(x)")).answer == "3"


# ---------------------------------------------------------------------------------------- bad input


def test_a_fact_that_is_not_known_is_named_with_its_place_and_the_nearest_one() -> None:
    """Facts that cannot be read are listed in `unread`, each with its place; the others are used.

    A misspelt relation is listed with the nearest one that is known.
    """
    facts = [
        "Equals(LengthOf(Line(A, B)), 5)",
        "Perpendiculr(Line(A, B), Line(B, C))",
        "Equals(LengthOf(Line(A, B), 3",
    ]
    result = solve_form(
        logic_form(TRIANGLE_POINTS, TRIANGLE_SIDES, facts, "Find(LengthOf(Line(A, B)))")
    )
    assert result.answer == "5"
    assert result.unread[0].startswith("fact 3, ")
    assert "brackets" in result.unread[0]
    assert "did you mean 'Perpendicular'" in result.unread[1]
    assert result.unread[1].startswith("fact 2, ")


@pytest.mark.parametrize(
    ("changed_fields", "words_of_error"),
    [
        ({"question": ()}, "asks for nothing"),
        ({"question": ("Find(Beauty(A))",)}, "no measure"),
        (
            {"facts": (f"Equals(LengthOf(Line(A, B)), {'1+' * MAX_FACT_LENGTH}1)",)},
            "characters, over",
        ),
        (
            {"points": {f"point_{number}": (1.0, 2.0) for number in range(MAX_POINTS + 1)}},
            "points, over",
        ),
    ],
)
def test_what_cannot_be_read_says_why(changed_fields: dict, words_of_error: str) -> None:
    """A form without a question, with an unknown measure, or too large, is `unread`."""
    form = logic_form(TRIANGLE_POINTS, TRIANGLE_SIDES, [], "Find(LengthOf(Line(A, B)))")
    result = solve_form(replace(form, **changed_fields))
    assert result.status == "unread"
    assert words_of_error in result.why


@pytest.mark.parametrize(
    "value", ["9^9^9^9", "x^{x^{x}}", "1/0", r"\sqrt{-1}", "(" * 300, "-5", "x/(x-x)", "1e400", ""]
)
def test_no_value_makes_it_raise_or_hang(value: str) -> None:
    """A huge, undefined, nested or empty value ends in a verdict; which one is not tested."""
    facts = [f"Equals(LengthOf(Line(A, B)), {value})", "Equals(LengthOf(Line(B, C)), x)"]
    solve_form(logic_form(TRIANGLE_POINTS, TRIANGLE_SIDES, facts, "Find(x)"))


def test_the_engine_imports_numpy_alone() -> None:
    """A new process that imports the engine has loaded none of the heavy packages."""
    code = (
        "import sys, adora_vl.geometry.solve_form, adora_vl.geometry.text; "
        "print(sorted({'torch', 'PIL', 'datasets', 'scipy', 'matplotlib'} & set(sys.modules)))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "[]"


@pytest.mark.parametrize("sides", range(3, 13))
def test_a_regular_polygon_goes_once_round(sides: int) -> None:
    """Without a name for its number of corners too: a hexagon once fell together to 60 degrees."""
    corners = "ABCDEFGHIJKL"[:sides]
    result = solve_form(read_form_from_text(f"regular polygon {corners}\nfind angle ABC"))
    assert result.value == pytest.approx((sides - 2) * 180 / sides)
