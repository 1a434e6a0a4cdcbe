"""Forms for the tests of the geometry engine: from measured figures, and from sentences."""

import math
from collections.abc import Mapping, Sequence

from adora_vl.geometry.forms import LogicForm


def measured_length(at: Mapping[str, complex], start: str, end: str) -> str:
    """The fact of a length, as long as the figure has it."""
    return f"Equals(LengthOf(Line({start}, {end})), {abs(at[start] - at[end]):.10f})"


def measured_angle(at: Mapping[str, complex], first: str, corner: str, last: str) -> str:
    """The fact of an angle, as wide as the figure has it."""
    return (
        f"Equals(MeasureOf(Angle({first}, {corner}, {last})), "
        f"{angle_in_degrees(at, first, corner, last):.10f})"
    )


def angle_in_degrees(at: Mapping[str, complex], first: str, corner: str, last: str) -> float:
    """The angle at a corner of a figure, from 0 to 180."""
    turn = (at[first] - at[corner]).conjugate() * (at[last] - at[corner])
    return abs(math.degrees(math.atan2(turn.imag, turn.real)))


def logic_form(
    at: Mapping[str, complex],
    lines: Sequence[str],
    facts: Sequence[str],
    question: str | Sequence[str],
    circles: Sequence[str] = (),
) -> LogicForm:
    """A form of a figure with y upwards; its picture has y downwards."""
    questions = (question,) if isinstance(question, str) else tuple(question)
    return LogicForm(
        lines=tuple((line[0], line[1]) for line in lines),
        circles=tuple(circles),
        points={name: (point.real, -point.imag) for name, point in at.items()},
        facts=tuple(facts),
        question=questions,
    )


def on_circle(circle: str, *points: str) -> list[str]:
    """The facts that points lie on a circle."""
    return [f"PointLiesOnCircle({point}, Circle({circle}, radius_0_0))" for point in points]
