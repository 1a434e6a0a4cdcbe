r"""Families with lettered figures and Geometry3K's phrasing: `Find m \angle A.`, `If A D = 27, ..., find B C.`

Every number that the solution uses is drawn or stands in the question; figures are drawn to scale where that helps a
reader, and turned at random. Level 1: integers; 2: fractions, radicals; 3: an unknown in expressions (`3x + 10`).
"""

from __future__ import annotations

import functools
import math
import random
from fractions import Fraction

from PIL import Image

from data_prep.synthetic.canvas import PLAIN, Point, Style
from data_prep.synthetic.families import Family, SyntheticProblem, ratio
from data_prep.synthetic.sketch import ClutteredError, Sketch

MIN_SIZE = 168  # pixels; below, the letters are not readable
_TRIPLES = ((3, 4, 5), (5, 12, 13), (8, 15, 17), (7, 24, 25), (20, 21, 29), (9, 40, 41), (12, 35, 37))


def clear(family: Family) -> Family:
    """The family with every problem drawn until no label touches another."""

    @functools.wraps(family)
    def drawn(rng: random.Random, size: int, level: int, style: Style) -> SyntheticProblem:
        while True:
            try:
                return family(rng, size, level, style)
            except ClutteredError:
                continue

    return drawn


def right_triangle_side(rng: random.Random, size: int, level: int = 1, style: Style = PLAIN) -> SyntheticProblem:
    """Two sides of a right triangle are drawn, the third is asked; level 3: a side and an angle of 30, 45 or 60."""
    if level == 3:
        return _special_right_triangle(rng, size, style)
    a, b = rng.choice(_TRIPLES)[:2] if level == 1 else (rng.randrange(2, 20), rng.randrange(2, 20))
    factor = rng.randrange(1, 5) if level == 1 else 1
    a, b = a * factor, b * factor
    square = a * a + b * b
    c = _root(square)
    flat = max(0.35, min(2.8, b / a))  # a longer one is drawn out of scale, else its labels lie on each other
    sketch = Sketch(rng, size, style, {"A": (0.0, 1.0), "B": (flat, 0.0), "C": (0.0, 0.0)})
    sketch.lines("ABCA")
    sketch.letters("A", "B", "C")
    sketch.right_angle("ACB")
    if level == 1 and rng.random() < 0.5:  # a leg; the hypotenuse is a whole number
        hypotenuse = math.isqrt(square)
        sketch.side("AC", str(a))
        sketch.side("AB", str(hypotenuse))
        working = f"A C = {a}, A B = {hypotenuse}. {hypotenuse}^2 - {a}^2 = {b * b}"
        return _length(sketch.picture(), "Find B C.", str(b), working, str(hypotenuse - a))
    sketch.side("AC", str(a))
    sketch.side("BC", str(b))
    working = f"A C = {a}, B C = {b}. {a}^2 + {b}^2 = {square}"
    return _length(sketch.picture(), "Find A B.", c, working, str(a + b))


def _special_right_triangle(rng: random.Random, size: int, style: Style) -> SyntheticProblem:
    """The hypotenuse and one angle are drawn; `x` stands at the leg opposite of it or beside it."""
    degrees, hypotenuse = rng.choice([30, 45, 60]), 2 * rng.randrange(2, 30)
    sketch = Sketch(
        rng,
        size,
        style,
        {"A": (0.0, math.sin(math.radians(degrees))), "B": (math.cos(math.radians(degrees)), 0.0), "C": (0.0, 0.0)},
    )
    opposite = rng.random() < 0.5
    sketch.lines("ABCA")
    sketch.letters("A", "B", "C")
    sketch.right_angle("ACB")
    sketch.side("AB", str(hypotenuse))
    sketch.angle("ABC", f"{degrees}°")
    sketch.side("AC" if opposite else "BC", "x")
    angle = degrees if opposite else 90 - degrees
    half = hypotenuse // 2
    answer = {30: f"{half}", 45: f"{half} \\sqrt {{ 2 }}", 60: f"{half} \\sqrt {{ 3 }}"}[angle]
    return _length(
        sketch.picture(), "Find x.", answer, f"hypotenuse {hypotenuse}, angle opposite {angle}", str(hypotenuse)
    )


def triangle_angle(rng: random.Random, size: int, level: int = 1, style: Style = PLAIN) -> SyntheticProblem:
    """Two angles of a triangle are drawn, the third is asked; level 3: all three, two of them with an x."""
    a, b = rng.randrange(30, 80, (10, 1, 1)[level - 1]), rng.randrange(30, 80, (10, 1, 1)[level - 1])
    c = 180 - a - b
    sketch = Sketch(rng, size, style, _triangle(a, b))
    sketch.lines("ABCA")
    sketch.letters("A", "B", "C")
    if level < 3:
        sketch.angle("BAC", f"{a}°")
        sketch.angle("ABC", f"{b}°")
        picture, working = sketch.picture(), f"180 - {a} - {b}"
        return _angle(picture, "Find m \\angle C.", str(c), working, str(a + b), ("Triangle",))
    x = rng.randrange(5, 21)
    first, second = rng.randrange(1, a // x + 1), rng.randrange(1, b // x + 1)
    sketch.angle("BAC", _expression(first, a - first * x))
    sketch.angle("ABC", _expression(second, b - second * x))
    sketch.angle("BCA", f"{c}°")
    working = f"({_expression(first, a - first * x)}) + ({_expression(second, b - second * x)}) + {c} = 180"
    return _angle(sketch.picture(), "Find x.", str(x), working, str(180 - c), ("Triangle",))


def inscribed_arc(rng: random.Random, size: int, level: int = 1, style: Style = PLAIN) -> SyntheticProblem:
    """An inscribed angle is drawn, its arc is asked; level 2: the other way; level 3: with an x."""
    inscribed = rng.randrange(25, 76, 5 if level == 1 else 1)
    start, third = rng.uniform(0, 2 * math.pi), math.radians(2 * inscribed + (360 - 2 * inscribed) * 0.5)
    at = {"A": start, "C": start + math.radians(2 * inscribed), "B": start + third}
    points: dict[str, Point] = {name: (math.cos(angle), math.sin(angle)) for name, angle in at.items()}
    frame: dict[str, Point] = {f"_{i}": p for i, p in enumerate(((1.0, 0.0), (-1.0, 0.0), (0.0, 1.0), (0.0, -1.0)))}
    sketch = Sketch(rng, size, style, {**points, "O": (0.0, 0.0), **frame})
    sketch.circle("O", "A")
    sketch.lines("ABC")
    sketch.letters("A", "B", "C")
    sketch.centre_letter("O", "B")
    question = "In \\odot O, find m \\widehat{A C}."
    if level == 1:
        sketch.angle("ABC", f"{inscribed}°", 0.22)
        working = f"2 * {inscribed}"
        return _angle(sketch.picture(), question, str(2 * inscribed), working, str(inscribed), ("Circle",))
    sketch.lines("AOC")
    if level == 2:
        sketch.angle("AOC", f"{2 * inscribed}°", 0.12)
        question, working = "In \\odot O, find m \\angle A B C.", f"{2 * inscribed} / 2"
        return _angle(sketch.picture(), question, str(inscribed), working, str(2 * inscribed), ("Circle",))
    x = rng.randrange(3, 13)
    factor = rng.randrange(1, inscribed // x + 1)
    text = _expression(factor, inscribed - factor * x)
    sketch.angle("ABC", text, 0.22)
    sketch.angle("AOC", f"{2 * inscribed}°", 0.12)
    working = f"2 ({text}) = {2 * inscribed}"
    return _angle(sketch.picture(), "Find x.", str(x), working, str(inscribed), ("Circle",))


def parallel_segment(rng: random.Random, size: int, level: int = 1, style: Style = PLAIN) -> SyntheticProblem:
    """B lies on A C and E on A D, and B E is parallel to C D; lengths stand in the question or at the figure."""
    ab, ae = rng.randrange(4, 13), rng.randrange(4, 13)
    factor = Fraction(rng.randrange(1, 4)) if level == 1 else Fraction(rng.randrange(1, 8), rng.randrange(2, 5))
    ed = ae * factor.denominator * factor
    ae, ab = ae * factor.denominator, ab * (factor.denominator if level != 2 else 1)
    bc = ab * factor
    share = min(0.65, max(0.4, float(1 / (1 + factor))))  # clear of the corners, not to scale beyond that
    slope = rng.uniform(0.7, 1.2)
    points = {"A": (0.0, 0.0), "C": (0.6, slope), "D": (1.3, 0.0)}
    points |= {"B": (0.6 * share, slope * share), "E": (1.3 * share, 0.0)}
    sketch = Sketch(rng, size, style, points)
    sketch.lines("ACDA", "BE")
    sketch.letters("A", "B", "C", "D", "E")
    answer, parallel = ratio(bc.numerator, bc.denominator), "\\overline{B E} \\parallel \\overline{C D}"
    working = f"A B / A E = {ab} / {ae}, E D = {ed}"
    if level == 1:
        question = f"If {parallel}, A D = {ae + ed}, A B = {ab}, and A E = {ae}, find B C."
        return _length(sketch.picture(), question, answer, working, str(ab), ("Triangle", "Line"))
    sketch.side("AB", str(ab))
    sketch.side("AE", str(ae))
    if level == 2:
        sketch.side("ED", str(ed))
        return _length(sketch.picture(), f"If {parallel}, find B C.", answer, working, str(ed), ("Triangle", "Line"))
    x = rng.randrange(2, 12)
    sketch.side("ED", f"{ed}")
    sketch.side("BC", _expression(1, int(bc) - x) if bc.denominator == 1 else "x")
    return _length(
        sketch.picture(),
        f"If {parallel}, find x.",
        str(x) if bc.denominator == 1 else answer,
        working,
        str(ed),
        ("Triangle", "Line"),
    )


def parallelogram_side(rng: random.Random, size: int, level: int = 1, style: Style = PLAIN) -> SyntheticProblem:
    """Two opposite sides carry values, one of them (level 3: both) with an x."""
    x = rng.randrange(2, 15) if level < 3 else rng.randrange(2, 30)
    factor, added = rng.randrange(2, 6), rng.randrange(1, 20)
    other = rng.randrange(1, factor) if level == 3 else 0
    lean, height = rng.uniform(0.2, 0.5), rng.uniform(0.6, 0.9)
    sketch = Sketch(
        rng, size, style, {"A": (0.0, 0.0), "B": (1.4, 0.0), "C": (1.4 + lean, height), "D": (lean, height)}
    )
    sketch.lines("ABCDA")
    sketch.letters("A", "B", "C", "D")
    value = factor * x + (added if level > 1 else 0)
    left = _expression(factor, added if level > 1 else 0)
    right = _expression(other, value - other * x) if other else str(value)
    sketch.side("AB", left)
    sketch.side("CD", right)
    question = "Find x so that the quadrilateral is a parallelogram."
    return _length(sketch.picture(), question, str(x), f"{left} = {right}", str(value), ("Parallelogram",))


LETTERED: dict[str, Family] = {
    "right_triangle_side": clear(right_triangle_side),
    "triangle_angle": clear(triangle_angle),
    "inscribed_arc": clear(inscribed_arc),
    "parallel_segment": clear(parallel_segment),
    "parallelogram_side": clear(parallelogram_side),
}


def _length(
    picture: Image.Image, question: str, answer: str, working: str, slip: str, shapes: tuple[str, ...] = ("Triangle",)
) -> SyntheticProblem:
    return _problem(picture, question, answer, working, slip, "Length", shapes)


def _angle(
    picture: Image.Image, question: str, answer: str, working: str, slip: str, shapes: tuple[str, ...]
) -> SyntheticProblem:
    return _problem(picture, question, answer, working, slip, "Angle", shapes)


def _problem(
    picture: Image.Image, question: str, answer: str, working: str, slip: str, goal: str, shapes: tuple[str, ...]
) -> SyntheticProblem:
    solution, wrong = (f"{working}. \\boxed{{{value}}}" for value in (answer, slip))
    return SyntheticProblem("", picture, question, answer, solution, wrong, goal, shapes)


def _root(square: int) -> str:
    """The square root in lowest terms, as Geometry3K writes it: `5 \\sqrt { 2 }`."""
    outside = max(k for k in range(1, math.isqrt(square) + 1) if square % (k * k) == 0)
    inside = square // (outside * outside)
    if inside == 1:
        return str(outside)
    return f"\\sqrt {{ {inside} }}" if outside == 1 else f"{outside} \\sqrt {{ {inside} }}"


def _expression(factor: int, added: int) -> str:
    """`3x + 10`, `x - 4`, `2x`."""
    term = "x" if factor == 1 else f"{factor}x"
    return term if added == 0 else f"{term} {'+' if added > 0 else '-'} {abs(added)}"


def _triangle(a: float, b: float) -> dict[str, Point]:
    """Points with these angles, in degrees, at A and B."""
    height = 1 / (1 / math.tan(math.radians(a)) + 1 / math.tan(math.radians(b)))
    return {"A": (0.0, 0.0), "B": (1.0, 0.0), "C": (height / math.tan(math.radians(a)), height)}
