"""Logic forms for the tests of the geometry engine.

A figure is a dictionary from the name of each point to its position, a complex number:
`{"A": 0j, "B": 3 + 4j}` has a point A at the origin and a point B at (3, 4).
"""

import math
from collections.abc import Mapping, Sequence

from adora_vl.geometry.logic_form import LogicForm


def measured_length(at: Mapping[str, complex], start: str, end: str) -> str:
    """Return the fact of a length, as measured in the figure `at`.

    For the points 0 and 3 it is "Equals(LengthOf(Line(A, B)), 3.0000000000)".
    """
    return f"Equals(LengthOf(Line({start}, {end})), {abs(at[start] - at[end]):.10f})"


def measured_angle(at: Mapping[str, complex], first: str, corner: str, last: str) -> str:
    """Return the fact of an angle in degrees, as measured in the figure `at`.

    For example "Equals(MeasureOf(Angle(A, B, C)), 90.0000000000)".
    """
    return (
        f"Equals(MeasureOf(Angle({first}, {corner}, {last})), "
        f"{angle_in_degrees(at, first, corner, last):.10f})"
    )


def angle_in_degrees(at: Mapping[str, complex], first: str, corner: str, last: str) -> float:
    """Return the angle at the point `corner` of the figure `at`, from 0 to 180."""
    turn = (at[first] - at[corner]).conjugate() * (at[last] - at[corner])
    return abs(math.degrees(math.atan2(turn.imag, turn.real)))


def logic_form(
    at: Mapping[str, complex],
    lines: Sequence[str],
    facts: Sequence[str],
    question: str | Sequence[str],
    circles: Sequence[str] = (),
) -> LogicForm:
    """Return the logic form of a figure: its lines, circles, points, facts and questions.

    Args:
        at: the position of each point, with y upwards; the form has it with y downwards, as pixels.
        lines: a text of two points for each line, such as "AB".
        facts: what is known of the figure, such as "Equals(LengthOf(Line(A, B)), 3)".
        question: what is to be found, such as "Find(LengthOf(Line(A, B)))", or several.
        circles: the name of each circle's centre.
    """
    questions = (question,) if isinstance(question, str) else tuple(question)
    return LogicForm(
        lines=tuple((line[0], line[1]) for line in lines),
        circles=tuple(circles),
        points={name: (point.real, -point.imag) for name, point in at.items()},
        facts=tuple(facts),
        question=questions,
    )


def on_circle(circle: str, *points: str) -> list[str]:
    """Return a fact for each point that says that it lies on this circle."""
    return [f"PointLiesOnCircle({point}, Circle({circle}, radius_0_0))" for point in points]
