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

from adora_vl.geometry.forms import LogicForm
from adora_vl.geometry.text import read_form_from_text
from adora_vl.geometry.verdict import MAX_FACT_LENGTH, MAX_POINTS, solve_form
from tests.support.geometry_forms import (
    angle_in_degrees,
    logic_form,
    measured_angle,
    measured_length,
    on_circle,
)

TRIANGLE_PLACES = {"A": 0j, "B": 100 + 0j, "C": 30 + 60j}
TRIANGLE_SIDES = ("AB", "BC", "CA")

angles = st.floats(35, 75)
sizes = st.floats(3, 30)


@given(st.floats(2, 20), st.floats(2, 20), st.floats(25, 150))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_two_sides_and_their_angle_give_the_third(
    first: float, second: float, angle: float
) -> None:
    at = {"A": complex(first), "B": 0j, "C": second * cmath.exp(1j * math.radians(angle))}
    facts = [
        measured_length(at, "A", "B"),
        measured_length(at, "B", "C"),
        measured_angle(at, "A", "B", "C"),
    ]
    result = solve_form(logic_form(at, TRIANGLE_SIDES, facts, "Find(LengthOf(Line(A, C)))"))
    assert (result.status, result.basis) == ("answered", "facts")
    assert result.value == pytest.approx(abs(at["A"] - at["C"]), rel=1e-6)


@given(st.floats(3, 9), st.floats(3, 9), st.floats(40, 140), st.floats(0.2, 0.8))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_a_parallelogram_is_solved_from_a_picture_that_is_not_to_scale(
    wide: float, side: float, angle: float, squeezed: float
) -> None:
    corner = side * cmath.exp(1j * math.radians(angle))
    at = {"A": 0j, "B": complex(wide), "C": wide + corner, "D": corner}
    facts = [
        measured_length(at, "A", "B"),
        measured_length(at, "A", "D"),
        measured_angle(at, "D", "A", "B"),
    ]
    drawn = {
        name: complex(100 * place.real, 100 * squeezed * place.imag) for name, place in at.items()
    }
    asked = ["Parallelogram(A,B,C,D)", "Find(LengthOf(Line(A, C)))"]
    result = solve_form(logic_form(drawn, ("AB", "BC", "CD", "DA", "AC"), facts, asked))
    assert result.status == "answered"
    assert result.value == pytest.approx(abs(at["C"]), rel=1e-6)


@given(st.floats(2, 10), st.floats(1.3, 3))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_a_tangent_is_as_long_as_the_right_triangle_has_it(radius: float, far: float) -> None:
    outside = radius * far
    touching = radius * cmath.exp(1j * math.acos(1 / far))
    at = {"O": 0j, "P": complex(outside), "T": touching}
    facts = [
        *on_circle("O", "T"),
        f"Equals(RadiusOf(Circle(O)), {radius:.10f})",
        measured_length(at, "O", "P"),
        "Tangent(Line(P, T), Circle(O))",
    ]
    result = solve_form(
        logic_form(at, ("OP", "PT", "OT"), facts, "Find(LengthOf(Line(P, T)))", ["O"])
    )
    assert result.status == "answered"
    assert result.value == pytest.approx(math.sqrt(outside**2 - radius**2), rel=1e-6)


def _draw_crossing_chords(seed: int) -> tuple[LogicForm, float]:
    """Two chords that meet inside a circle, with three of their four parts given."""
    rng = random.Random(seed)
    ends = sorted(rng.uniform(0, 2 * math.pi) for _ in range(4))
    while min(b - a for a, b in zip(ends, [*ends[1:], ends[0] + 2 * math.pi], strict=True)) < 0.5:
        ends = sorted(rng.uniform(0, 2 * math.pi) for _ in range(4))
    at = {name: 50 * cmath.exp(1j * turn) for name, turn in zip("ABCD", ends, strict=True)}
    first = at["C"] - at["A"]
    second = at["D"] - at["B"]
    share = ((at["B"] - at["A"]).conjugate() * second).imag / (first.conjugate() * second).imag
    at |= {"E": at["A"] + share * first, "O": 0j}
    facts = [
        *on_circle("O", *"ABCD"),
        "PointLiesOnLine(E, Line(A, C))",
        "PointLiesOnLine(E, Line(B, D))",
        *(measured_length(at, "E", name) for name in "ABC"),
    ]
    lines = ("AC", "BD", "AE", "EC", "BE", "ED")
    return logic_form(at, lines, facts, "Find(LengthOf(Line(E, D)))", ["O"]), abs(at["E"] - at["D"])


@pytest.mark.parametrize("seed", range(8))
def test_parts_of_chords(seed: int) -> None:
    asked, wanted = _draw_crossing_chords(seed)
    result = solve_form(asked)
    assert result.status == "answered"
    assert result.value == pytest.approx(wanted, rel=1e-6)


# Nothing that a problem does not speak of changes what is said of it.


def _rename_points(asked: LogicForm, names: dict[str, str]) -> LogicForm:
    def new(text: str) -> str:
        return re.sub(r"\b[A-E]\b", lambda match: names[match[0]], text)

    return LogicForm(
        lines=tuple((names[start], names[end]) for start, end in asked.lines),
        circles=asked.circles,
        points={names.get(name, name): place for name, place in asked.points.items()},
        facts=tuple(new(fact) for fact in asked.facts),
        question=tuple(new(part) for part in asked.question),
    )


@pytest.mark.parametrize("seed", range(4))
def test_turned_mirrored_scaled_renamed_and_shuffled_forms_say_the_same(seed: int) -> None:
    asked, wanted = _draw_crossing_chords(seed)
    rng = random.Random(seed)
    turn = cmath.exp(1j * rng.uniform(0, 6)) * rng.uniform(0.3, 4)

    def moved(x: float, y: float) -> tuple[float, float]:
        place = complex(x, y) * turn + 77
        return place.real, place.imag

    shuffled = list(asked.facts)
    rng.shuffle(shuffled)
    forms = [
        replace(asked, points={name: moved(*place) for name, place in asked.points.items()}),
        replace(asked, points={name: (-x, y) for name, (x, y) in asked.points.items()}),
        replace(asked, facts=tuple(shuffled)),
        replace(asked, facts=(*asked.facts, *asked.facts)),
        _rename_points(asked, dict(zip("ABCDE", "CEADB", strict=True))),
    ]
    for changed in forms:
        result = solve_form(changed)
        assert (result.status, result.basis) == ("answered", "facts")
        assert result.value == pytest.approx(wanted, rel=1e-6)


def test_a_true_fact_more_changes_nothing_and_one_less_never_gives_another_answer() -> None:
    at = TRIANGLE_PLACES
    needed = [
        measured_length(at, "A", "B"),
        measured_length(at, "B", "C"),
        measured_angle(at, "A", "B", "C"),
    ]
    more = [measured_angle(at, "B", "A", "C"), measured_length(at, "A", "C")]
    wanted = angle_in_degrees(at, "A", "C", "B")
    asked = "Find(MeasureOf(Angle(A, C, B)))"
    for facts in (needed, [*needed, more[0]], [*needed, *more]):
        result = solve_form(logic_form(at, TRIANGLE_SIDES, facts, asked))
        assert result.status == "answered"
        assert result.value == pytest.approx(wanted, abs=1e-6)
    for number in range(3):
        facts = needed[:number] + needed[number + 1 :]
        result = solve_form(logic_form(at, TRIANGLE_SIDES, facts, asked))
        assert result.status != "answered" or result.value == pytest.approx(wanted, abs=1e-6)


# The kinds of what can be said


def test_open_where_a_side_may_be_anything() -> None:
    facts = ["Equals(LengthOf(Line(A, B)), 5)", "Equals(LengthOf(Line(B, C)), 7)"]
    result = solve_form(
        logic_form(TRIANGLE_PLACES, TRIANGLE_SIDES, facts, "Find(LengthOf(Line(A, C)))")
    )
    assert (result.status, result.value, result.basis) == ("open", None, "")
    assert "AC free" in result.why


def test_what_only_the_picture_shows_is_assumed_and_not_determined() -> None:
    right = {"A": 0j, "B": 90 + 0j, "C": 60j}
    facts = ["Equals(LengthOf(Line(A, B)), 4)", "Equals(LengthOf(Line(A, C)), 3)"]
    asked = logic_form(right, TRIANGLE_SIDES, facts, "Find(LengthOf(Line(B, C)))")
    result = solve_form(asked)
    assert (result.status, result.basis, result.answer) == ("open", "looks", "5")
    assert result.assumed == ("angle BAC is a right angle",)
    assert solve_form(asked, looks=False).value is None


@pytest.mark.parametrize(
    ("facts", "named"),
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
    facts: tuple[str, ...], named: tuple[str, ...]
) -> None:
    result = solve_form(
        logic_form(
            TRIANGLE_PLACES,
            TRIANGLE_SIDES,
            [f"Equals({fact})" for fact in facts],
            "Find(MeasureOf(Angle(A, B, C)))",
        )
    )
    assert result.status == "conflict"
    assert result.why.startswith("no figure")
    assert all(name in result.why for name in named)


# AC = 8, BC = 5 and sin A = 3/5 fit two triangles, AB = 6.4 + 1.4 and 6.4 - 1.4: angle B is acute in
# the one and obtuse in the other, as the drawing has it.
@pytest.mark.parametrize(
    ("drawn_C", "expected_AB"), [(150 + 60j, 6.4 - 1.4), (60 + 60j, 6.4 + 1.4)]
)
def test_of_two_solutions_the_drawing_chooses(drawn_C: complex, expected_AB: float) -> None:
    facts = [
        "Equals(LengthOf(Line(A, C)), 8)",
        "Equals(LengthOf(Line(B, C)), 5)",
        f"Equals(MeasureOf(Angle(C, A, B)), {math.degrees(math.asin(0.6)):.12f})",
    ]
    at = {"A": 0j, "B": 110 + 0j, "C": drawn_C}
    result = solve_form(logic_form(at, TRIANGLE_SIDES, facts, "Find(LengthOf(Line(A, B)))"))
    assert result.status == "answered"
    assert result.value == pytest.approx(expected_AB, rel=1e-6)


def test_a_drawing_that_shows_none_of_two_solutions_leaves_both() -> None:
    facts = [
        "Equals(LengthOf(Line(A, C)), 8)",
        "Equals(LengthOf(Line(B, C)), 5)",
        f"Equals(MeasureOf(Angle(C, A, B)), {math.degrees(math.asin(0.6)):.12f})",
    ]
    result = solve_form(
        replace(
            logic_form(TRIANGLE_PLACES, TRIANGLE_SIDES, facts, "Find(LengthOf(Line(A, B)))"),
            points={},
        )
    )
    assert result.status == "ambiguous"
    assert "two figures fit" in result.why


def test_angles_decide_where_lengths_contradict_them() -> None:
    facts = [
        "Equals(MeasureOf(Angle(C, A, B)), 50)",
        "Equals(MeasureOf(Angle(A, B, C)), 60)",
        "Equals(LengthOf(Line(A, B)), 5)",
        "Equals(LengthOf(Line(B, C)), 50)",
    ]
    result = solve_form(
        logic_form(TRIANGLE_PLACES, TRIANGLE_SIDES, facts, "Find(MeasureOf(Angle(B, C, A)))")
    )
    assert (result.status, result.basis, result.answer) == ("answered", "angles", "70")


def test_a_length_that_would_be_negative_is_no_answer() -> None:
    line = {"A": 0j, "B": 60 + 0j, "C": 100 + 0j}
    facts = [
        "PointLiesOnLine(B, Line(A, C))",
        "Equals(LengthOf(Line(A, B)), 9)",
        "Equals(LengthOf(Line(A, C)), 5)",
    ]
    assert solve_form(
        logic_form(line, ("AC", "AB", "BC"), facts, "Find(LengthOf(Line(B, C)))")
    ).status in (
        "conflict",
        "collapsed",
    )


def test_a_letter_may_be_negative() -> None:
    facts = ["Equals(LengthOf(Line(A, B)), 2-x)", "Equals(LengthOf(Line(A, B)), 10)"]
    assert solve_form(logic_form(TRIANGLE_PLACES, TRIANGLE_SIDES, facts, "Find(x)")).answer == "-8"


def test_a_double_root_is_an_answer() -> None:
    # PQ = 6 - x, QR = 6 + x and both similar triangles: x is 0, where the equation x^2 = 0 touches.
    facts = ["Equals(LengthOf(Line(A, B)), x^2-6x+14)", "Equals(LengthOf(Line(A, B)), 5)"]
    assert solve_form(logic_form(TRIANGLE_PLACES, TRIANGLE_SIDES, facts, "Find(x)")).answer == "3"


# Bad input


def test_a_fact_that_is_not_known_is_named_with_its_place_and_the_nearest_one() -> None:
    facts = [
        "Equals(LengthOf(Line(A, B)), 5)",
        "Perpendiculr(Line(A, B), Line(B, C))",
        "Equals(LengthOf(Line(A, B), 3",
    ]
    result = solve_form(
        logic_form(TRIANGLE_PLACES, TRIANGLE_SIDES, facts, "Find(LengthOf(Line(A, B)))")
    )
    assert result.answer == "5"
    assert result.unread[0].startswith("fact 3, ")
    assert "brackets" in result.unread[0]
    assert "did you mean 'Perpendicular'" in result.unread[1]
    assert result.unread[1].startswith("fact 2, ")


@pytest.mark.parametrize(
    ("changed", "said"),
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
def test_what_cannot_be_read_says_why(changed: dict, said: str) -> None:
    asked = logic_form(TRIANGLE_PLACES, TRIANGLE_SIDES, [], "Find(LengthOf(Line(A, B)))")
    result = solve_form(replace(asked, **changed))
    assert result.status == "unread"
    assert said in result.why


@pytest.mark.parametrize(
    "value", ["9^9^9^9", "x^{x^{x}}", "1/0", r"\sqrt{-1}", "(" * 300, "-5", "x/(x-x)", "1e400", ""]
)
def test_no_value_makes_it_raise_or_hang(value: str) -> None:
    facts = [f"Equals(LengthOf(Line(A, B)), {value})", "Equals(LengthOf(Line(B, C)), x)"]
    solve_form(logic_form(TRIANGLE_PLACES, TRIANGLE_SIDES, facts, "Find(x)"))


def test_the_engine_imports_numpy_alone() -> None:
    code = (
        "import sys, adora_vl.geometry.verdict, adora_vl.geometry.text; "
        "print(sorted({'torch', 'PIL', 'datasets', 'scipy', 'matplotlib'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("sides", range(3, 13))
def test_a_regular_polygon_goes_once_round(sides: int) -> None:
    """Without a name for its number of corners too: a hexagon once fell together to 60 degrees."""
    corners = "ABCDEFGHIJKL"[:sides]
    result = solve_form(read_form_from_text(f"regular polygon {corners}\nfind angle ABC"))
    assert result.value == pytest.approx((sides - 2) * 180 / sides)
