r"""The problem families. Each draws its numbers into the picture only: the question alone never gives the answer.

A family is a function `(rng, size, level, style) -> SyntheticProblem`; level 1 has few, small numbers, level 3 many.
Answers are exact and in the style of Geometry3K's golds (`\sqrt { 34 }`, `14 \pi`). `solution` is a worked answer and
`slip` a typical pupil's wrong one: the warm start of the tiny model learns from both, training with a reward sees
neither.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from PIL import Image

from data_prep.synthetic.canvas import PLAIN, Canvas, Point, Style, font_pixels


@dataclass(frozen=True)
class SyntheticProblem:
    """One drawn problem: `image` is RGB, `answer` LaTeX, `goal` what is asked for, `shapes` what is drawn.

    `kind` tells the cases of a family apart that are solved in different ways; empty where it has one.
    """

    family: str
    image: Image.Image
    question: str
    answer: str
    solution: str
    slip: str
    goal: str
    shapes: tuple[str, ...]
    kind: str = ""


# Arguments: a generator, pixels, a level from 1 to 3, and a style.
Family = Callable[[random.Random, int, int, Style], SyntheticProblem]


def _jitter(rng: random.Random, point: Point, reach: float = 0.035) -> Point:
    return (point[0] + rng.uniform(-reach, reach), point[1] + rng.uniform(-reach, reach))


def _inset(size: int) -> float:
    """Half a label's width, as a share of the picture: how far from an edge a label has to stay."""
    return 0.65 * font_pixels(size) / size


def ratio(above: int, below: int) -> str:
    """An integer or a reduced fraction, as LaTeX."""
    value = Fraction(above, below)
    return str(value) if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def isosceles_base_angle(rng: random.Random, size: int, level: int = 1, style: Style = PLAIN) -> SyntheticProblem:
    """The apex angle is written at the apex; asked is a base angle."""
    apex = rng.randrange(*((20, 165, 10), (12, 170, 2), (11, 170, 1))[level - 1])
    canvas = Canvas(size, style)
    x, half = rng.uniform(0.48, 0.52), rng.uniform(0.4, 0.46)
    top, bottom = rng.uniform(0.03, 0.09), rng.uniform(0.9, 0.96)
    canvas.line((x, top), (x - half, bottom), (x + half, bottom), closed=True)
    canvas.label(str(apex), _jitter(rng, (x, 0.30 + _inset(size))))
    base = f"{(180 - apex) / 2:g}"
    return SyntheticProblem(
        "isosceles",
        canvas.picture(),
        rng.choice(["Find the measure of a base angle of the isosceles triangle.", "Find the base angle."]),
        base,
        f"apex {apex}. (180 - {apex}) / 2 = \\boxed{{{base}}}",
        f"apex {apex}. 180 - {apex} = \\boxed{{{180 - apex}}}",
        "Angle",
        ("Triangle",),
    )


def polygon_interior_angle(rng: random.Random, size: int, level: int = 1, style: Style = PLAIN) -> SyntheticProblem:
    """A regular polygon; its sides have to be counted."""
    sides = rng.choice(([3, 4, 5, 6, 8], [5, 6, 8, 9, 10], [7, 9, 10, 11, 12])[level - 1])
    canvas = Canvas(size, style)
    (x, y), radius, turn = _jitter(rng, (0.5, 0.5)), rng.uniform(0.38, 0.45), rng.uniform(0, 2 * math.pi / sides)
    angles = [turn + 2 * math.pi * k / sides for k in range(sides)]
    canvas.line(*[(x + radius * math.cos(a), y + radius * math.sin(a)) for a in angles], closed=True)
    angle = ratio((sides - 2) * 180, sides)
    return SyntheticProblem(
        "polygon",
        canvas.picture(),
        rng.choice(["Find the measure of an interior angle of the regular polygon.", "Find the interior angle."]),
        angle,
        f"sides {sides}. ({sides} - 2) * 180 / {sides} = \\boxed{{{angle}}}",
        f"sides {sides}. 360 / {sides} = \\boxed{{{ratio(360, sides)}}}",
        "Angle",
        ("Polygon",),
    )


def right_triangle_hypotenuse(rng: random.Random, size: int, level: int = 1, style: Style = PLAIN) -> SyntheticProblem:
    """Both legs are written beside their sides; asked is the hypotenuse, usually a radical."""
    largest = (7, 21, 61)[level - 1]
    across, down = rng.randrange(1, largest), rng.randrange(1, largest)
    canvas = Canvas(size, style)
    inset = _inset(size)
    x, y = rng.uniform(0.06, 0.09) + inset, 0.93 - rng.uniform(0.01, 0.04) - 1.2 * inset
    top, right = rng.uniform(0.04, 0.1), rng.uniform(0.9, 0.97)
    canvas.line((x, y), (x, top), (right, y), closed=True)
    canvas.label(str(down), _jitter(rng, (x - 0.55 * inset, (y + top) / 2), 0.02))
    canvas.label(str(across), _jitter(rng, ((x + right) / 2, y + 0.8 * inset), 0.02))
    square = across**2 + down**2
    root = math.isqrt(square)
    answer = str(root) if root * root == square else f"\\sqrt {{ {square} }}"
    boxed = str(root) if root * root == square else f"\\sqrt{{{square}}}"
    return SyntheticProblem(
        "right_triangle",
        canvas.picture(),
        rng.choice(["Find the length of the hypotenuse.", "Find the hypotenuse of the right triangle."]),
        answer,
        f"legs {down} and {across}. {down}^2 + {across}^2 = {square}, \\boxed{{{boxed}}}",
        f"legs {down} and {across}. {down} + {across} = \\boxed{{{down + across}}}",
        "Length",
        ("Triangle",),
    )


def crossing_lines(rng: random.Random, size: int, level: int = 1, style: Style = PLAIN) -> SyntheticProblem:
    """Two lines cross; one angle is written, `x` stands in the opposite (equal) or a neighbouring sector.

    The slip takes one case for the other. Equal angles are worked out over the neighbour of both, as their proof does:
    were they only copied, then the right working would be shorter than its slip here and nowhere else, and ADORA's
    length criterion would attenuate exactly this case, one side of the decision that the picture asks for.
    """
    given = rng.randrange(*((30, 155, 10), (25, 160, 5), (21, 160, 1))[level - 1])
    vertical = rng.random() < 0.5
    canvas = Canvas(size, style)
    x, y = _jitter(rng, (0.5, 0.5))
    slope = rng.uniform(0.40, 0.44)
    canvas.line((x - 0.46, y - slope), (x + 0.46, y + slope))
    canvas.line((x - 0.46, y + slope), (x + 0.46, y - slope))
    canvas.label(str(given), _jitter(rng, (0.5, 0.04 + _inset(size))))
    canvas.label("x", _jitter(rng, (0.5, 0.96 - _inset(size)) if vertical else (0.87, 0.57)))
    angle = given if vertical else 180 - given
    supplementary = f"supplementary 180 - {given} = \\boxed{{{180 - given}}}"
    proved, copied = f"vertical {given}. 180 - (180 - {given}) =", f"vertical {given} ="
    return SyntheticProblem(
        "crossing",
        canvas.picture(),
        rng.choice(["Find x.", "Find the angle x at the crossing."]),
        str(angle),
        f"{proved} \\boxed{{{given}}}" if vertical else supplementary,
        supplementary if vertical else f"{copied} \\boxed{{{given}}}",
        "Angle",
        ("Line",),
        "vertical" if vertical else "supplementary",
    )


def circle_from_radius(rng: random.Random, size: int, level: int = 1, style: Style = PLAIN) -> SyntheticProblem:
    """The radius is written in the circle; asked is the diameter or the circumference."""
    radius = rng.randrange(2, (50, 100, 200)[level - 1])
    asked = rng.choice(["diameter", "circumference"])
    canvas = Canvas(size, style)
    centre, reach = _jitter(rng, (0.5, 0.5)), rng.uniform(0.40, 0.45)
    canvas.circle(centre, reach)
    canvas.dot(centre)
    canvas.line(centre, (centre[0] + reach, centre[1]))
    canvas.label(str(radius), _jitter(rng, (0.5, 0.5 - 1.15 * _inset(size))))
    unit = "" if asked == "diameter" else " \\pi"
    return SyntheticProblem(
        "circle",
        canvas.picture(),
        rng.choice([f"Find the {asked} of the circle.", f"Find the {asked}."]),
        f"{2 * radius}{unit}",
        f"radius {radius}. 2 * {radius} = \\boxed{{{2 * radius}{unit}}}",
        f"radius {radius} = \\boxed{{{radius}{unit}}}",
        "Length",
        ("Circle",),
        asked,
    )


FAMILIES: dict[str, Family] = {
    "isosceles": isosceles_base_angle,
    "polygon": polygon_interior_angle,
    "right_triangle": right_triangle_hypotenuse,
    "crossing": crossing_lines,
    "circle": circle_from_radius,
}
