"""The families of drawn problems, with numbers at the figure or with letters at its corners.

The workings of the plain families come in several wordings, the right ones and the slips alike.
Were there one wording, the length of an answer would count its digits: once a model writes that
wording alone, nearly all groups would be ties of length or one token from it, and ADORA's length
criterion would attenuate by nothing else.

The problems are drawn here and not by `adora_vl.geometry`, though each of them can be said in its
text form: the pictures are out of scale where labels need the room, they lean and shift by chance,
and data sets that people have made from a seed would not be the same any more. That the answers are
those that the engine solves from picture and question is tested for every family and level.
"""

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from PIL import Image

from adora_vl.synthetic.drawing import (
    PLAIN,
    Canvas,
    ClutteredError,
    Point,
    Sketch,
    Style,
    font_pixels,
)


@dataclass(frozen=True)
class SyntheticProblem:
    """A drawn problem with its right working, and one with a slip."""

    family: str
    image: Image.Image  # RGB
    question: str
    answer: str  # LaTeX
    solution: str
    slip: str
    goal: str  # what is asked for
    shapes: tuple[str, ...]  # what is drawn
    # tells the cases of a family apart that are solved in different ways; empty where it has one
    kind: str = ""


# Arguments: a generator, pixels, a level from 1 to 3, and a style.
Family = Callable[[random.Random, int, int, Style], SyntheticProblem]


def jitter(rng: random.Random, point: Point, reach: float = 0.035) -> Point:
    """Move a point by chance, by at most `reach` in x and y."""
    return (point[0] + rng.uniform(-reach, reach), point[1] + rng.uniform(-reach, reach))


def inset(size: int) -> float:
    """Return half a label's width, as a share of the picture.

    So far a label has to stay from an edge.
    """
    return 0.65 * font_pixels(size) / size


def ratio(above: int, below: int) -> str:
    """Return an integer or a reduced fraction, as LaTeX."""
    value = Fraction(above, below)
    return (
        str(value)
        if value.denominator == 1
        else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    )


def worded(rng: random.Random, *parts: tuple[str, ...], **numbers: object) -> str:
    """Return one wording of each part, with the numbers filled in."""
    return "".join(rng.choice(wordings) for wordings in parts).format(**numbers)


def isosceles_base_angle(
    rng: random.Random, size: int, level: int = 1, style: Style = PLAIN
) -> SyntheticProblem:
    """Draw an isosceles triangle with the angle at its apex, and ask for a base angle."""
    apex = rng.randrange(*((20, 165, 10), (12, 170, 2), (11, 170, 1))[level - 1])
    canvas = Canvas(size, style)
    x = rng.uniform(0.48, 0.52)
    half = rng.uniform(0.4, 0.46)
    top = rng.uniform(0.03, 0.09)
    bottom = rng.uniform(0.9, 0.96)
    canvas.line((x, top), (x - half, bottom), (x + half, bottom), closed=True)
    canvas.label(str(apex), jitter(rng, (x, 0.30 + inset(size))))
    base = f"{(180 - apex) / 2:g}"
    both = 180 - apex
    opening = ("apex {apex}. ", "the apex is {apex}. ", "apex {apex} and two equal angles. ")
    steps = ("(180 - {apex}) / 2 = ", "180 - {apex} = {both}. {both} / 2 = ")
    question = rng.choice(
        ["Find the measure of a base angle of the isosceles triangle.", "Find the base angle."]
    )
    right = worded(rng, opening, steps, apex=apex, both=both) + _box(base)
    slip = worded(rng, opening, ("180 - {apex} = ",), apex=apex) + _box(both)
    return SyntheticProblem(
        family="isosceles",
        image=canvas.picture(),
        question=question,
        answer=base,
        solution=right,
        slip=slip,
        goal="Angle",
        shapes=("Triangle",),
    )


def polygon_interior_angle(
    rng: random.Random, size: int, level: int = 1, style: Style = PLAIN
) -> SyntheticProblem:
    """Draw a regular polygon with dots at its corners, and ask for an interior angle.

    It stands on a side as in a book. Its sides have to be counted. Turned by chance and without the
    dots, the tiny model took one polygon for another in a tenth of the cases.
    """
    sides = rng.choice(([3, 4, 5, 6, 8], [5, 6, 8, 9, 10], [7, 9, 10, 11, 12])[level - 1])
    canvas = Canvas(size, style)
    (x, y) = jitter(rng, (0.5, 0.5))
    radius = rng.uniform(0.38, 0.45)
    turn = math.radians(rng.uniform(-4, 4))
    angles = [math.pi / 2 + turn + math.pi * (2 * k + 1) / sides for k in range(sides)]
    corners = [(x + radius * math.cos(a), y + radius * math.sin(a)) for a in angles]
    canvas.line(*corners, closed=True)
    for corner in corners:
        canvas.dot(corner)
    angle = ratio((sides - 2) * 180, sides)
    outer = ratio(360, sides)
    opening = ("sides {sides}. ", "it has {sides} sides. ", "a polygon with {sides} sides. ")
    steps = (
        "({sides} - 2) * 180 / {sides} = ",
        "{triangles} triangles. {triangles} * 180 / {sides} = ",
    )
    question = rng.choice(
        [
            "Find the measure of an interior angle of the regular polygon.",
            "Find the interior angle.",
        ]
    )
    right = worded(rng, opening, steps, sides=sides, triangles=sides - 2) + _box(angle)
    slip = worded(rng, opening, ("360 / {sides} = ",), sides=sides) + _box(outer)
    return SyntheticProblem(
        family="polygon",
        image=canvas.picture(),
        question=question,
        answer=angle,
        solution=right,
        slip=slip,
        goal="Angle",
        shapes=("Polygon",),
    )


def right_triangle_hypotenuse(
    rng: random.Random, size: int, level: int = 1, style: Style = PLAIN
) -> SyntheticProblem:
    """Draw a right triangle with both legs, and ask for the hypotenuse, usually a radical."""
    largest = (7, 21, 61)[level - 1]
    across, down = rng.randrange(1, largest), rng.randrange(1, largest)
    canvas = Canvas(size, style)
    margin = inset(size)
    x = rng.uniform(0.06, 0.09) + margin
    y = 0.93 - rng.uniform(0.01, 0.04) - 1.2 * margin
    top = rng.uniform(0.04, 0.1)
    end = rng.uniform(0.9, 0.97)
    canvas.line((x, y), (x, top), (end, y), closed=True)
    canvas.label(str(down), jitter(rng, (x - 0.55 * margin, (y + top) / 2), 0.02))
    canvas.label(str(across), jitter(rng, ((x + end) / 2, y + 0.8 * margin), 0.02))
    square = across**2 + down**2
    root = math.isqrt(square)
    answer = str(root) if root * root == square else f"\\sqrt {{ {square} }}"
    boxed = str(root) if root * root == square else f"\\sqrt{{{square}}}"
    opening = (
        "legs {down} and {across}. ",
        "legs {down}, {across}. ",
        "the legs are {down} and {across}. ",
    )
    steps = (
        "{down}^2 + {across}^2 = {square}, ",
        "{down} * {down} + {across} * {across} = {square}, ",
    )
    question = rng.choice(
        ["Find the length of the hypotenuse.", "Find the hypotenuse of the right triangle."]
    )
    right = worded(rng, opening, steps, down=down, across=across, square=square) + _box(boxed)
    slip = worded(rng, opening, ("{down} + {across} = ",), down=down, across=across) + _box(
        down + across
    )
    return SyntheticProblem(
        family="right_triangle",
        image=canvas.picture(),
        question=question,
        answer=answer,
        solution=right,
        slip=slip,
        goal="Length",
        shapes=("Triangle",),
    )


def crossing_lines(
    rng: random.Random, size: int, level: int = 1, style: Style = PLAIN
) -> SyntheticProblem:
    """Draw two lines that cross with one angle, and ask for another one.

    `x` stands in the opposite (equal) or a neighbouring sector. The slip takes one case for the
    other. Both cases have a long and a short working of about the same lengths, and the slips are
    the short ones: were equal angles only copied, then the right working would be shorter than its
    slip in this case alone, and ADORA's length criterion would attenuate exactly one side of the
    decision that the picture asks for.
    """
    shown_angle = rng.randrange(*((30, 155, 10), (25, 160, 5), (21, 160, 1))[level - 1])
    vertical = rng.random() < 0.5
    canvas = Canvas(size, style)
    x, y = jitter(rng, (0.5, 0.5))
    slope = rng.uniform(0.40, 0.44)
    canvas.line((x - 0.46, y - slope), (x + 0.46, y + slope))
    canvas.line((x - 0.46, y + slope), (x + 0.46, y - slope))
    canvas.label(str(shown_angle), jitter(rng, (0.5, 0.04 + inset(size))))
    canvas.label("x", jitter(rng, (0.5, 0.96 - inset(size)) if vertical else (0.87, 0.57)))
    angle = shown_angle if vertical else 180 - shown_angle
    supplement = 180 - shown_angle
    equal = ("vertical {given}. ", "vertical angles, {given}. ")
    neighbours = ("supplementary {given}. ", "a straight angle, {given}. ")
    proof = ("180 - (180 - {given}) = ", "180 - {given} = {other}. 180 - {other} = ")
    proved = worded(rng, equal, proof, given=shown_angle, other=supplement) + _box(shown_angle)
    sums = ("x + {given} = 180. 180 - {given} = ", "they add up to 180. 180 - {given} = ")
    summed = worded(rng, neighbours, sums, given=shown_angle) + _box(supplement)
    copied = worded(rng, equal, ("x = ",), given=shown_angle) + _box(shown_angle)
    subtracted = worded(rng, neighbours, ("180 - {given} = ",), given=shown_angle) + _box(
        supplement
    )
    question = rng.choice(["Find x.", "Find the angle x at the crossing."])
    right, slip, kind = (
        (proved, subtracted, "vertical") if vertical else (summed, copied, "supplementary")
    )
    return SyntheticProblem(
        family="crossing",
        image=canvas.picture(),
        question=question,
        answer=str(angle),
        solution=right,
        slip=slip,
        goal="Angle",
        shapes=("Line",),
        kind=kind,
    )


def circle_from_radius(
    rng: random.Random, size: int, level: int = 1, style: Style = PLAIN
) -> SyntheticProblem:
    """Draw a circle with its radius, and ask for the diameter or the circumference."""
    radius = rng.randrange(2, (50, 100, 200)[level - 1])
    measure = rng.choice(["diameter", "circumference"])
    canvas = Canvas(size, style)
    centre = jitter(rng, (0.5, 0.5))
    reach = rng.uniform(0.40, 0.45)
    canvas.circle(centre, reach)
    canvas.dot(centre)
    canvas.line(centre, (centre[0] + reach, centre[1]))
    canvas.label(str(radius), jitter(rng, (0.5, 0.5 - 1.15 * inset(size))))
    unit = "" if measure == "diameter" else " \\pi"
    opening = ("radius {radius}", "the radius is {radius}", "it has radius {radius}")
    steps = (
        ". 2 * {radius} = ",
        ". {radius} + {radius} = ",
        ". two radii make a diameter. 2 * {radius} = ",
    )
    question = rng.choice([f"Find the {measure} of the circle.", f"Find the {measure}."])
    answer = f"{2 * radius}{unit}"
    right = worded(rng, opening, steps, radius=radius) + _box(answer)
    slip = worded(rng, opening, (" = ", ". the answer is "), radius=radius) + _box(
        f"{radius}{unit}"
    )
    return SyntheticProblem(
        family="circle",
        image=canvas.picture(),
        question=question,
        answer=answer,
        solution=right,
        slip=slip,
        goal="Length",
        shapes=("Circle",),
        kind=measure,
    )


FAMILIES: dict[str, Family] = {
    "isosceles": isosceles_base_angle,
    "polygon": polygon_interior_angle,
    "right_triangle": right_triangle_hypotenuse,
    "crossing": crossing_lines,
    "circle": circle_from_radius,
}
MIN_SIZE = 168  # pixels; below, the letters are not readable
_TRIPLES = (
    (3, 4, 5),
    (5, 12, 13),
    (8, 15, 17),
    (7, 24, 25),
    (20, 21, 29),
    (9, 40, 41),
    (12, 35, 37),
)


def clear(family: Family) -> Family:
    """Return the family with every problem drawn until no label touches another."""

    @functools.wraps(family)
    def drawn(rng: random.Random, size: int, level: int, style: Style) -> SyntheticProblem:
        """Draw problems until one has its labels clear of each other."""
        while True:
            try:
                return family(rng, size, level, style)
            except ClutteredError:
                continue

    return drawn


def right_triangle_side(
    rng: random.Random, size: int, level: int = 1, style: Style = PLAIN
) -> SyntheticProblem:
    """Draw a right triangle with two sides, and ask for the third.

    At level 3 it has a side and an angle of 30, 45 or 60.
    """
    if level == 3:
        return _special_right_triangle(rng, size, style)
    a, b = rng.choice(_TRIPLES)[:2] if level == 1 else (rng.randrange(2, 20), rng.randrange(2, 20))
    factor = rng.randrange(1, 5) if level == 1 else 1
    a = a * factor
    b = b * factor
    square = a * a + b * b
    c = _root(square)
    # a longer one is drawn out of scale, else its labels lie on each other
    flat = max(0.35, min(2.8, b / a))
    corners = {"A": (0.0, 1.0), "B": (flat, 0.0), "C": (0.0, 0.0)}
    sketch = Sketch(rng, size, style, corners, "ABCA", letters="ABC")
    sketch.right_angle("ACB")
    if level == 1 and rng.random() < 0.5:  # a leg; the hypotenuse is a whole number
        hypotenuse = math.isqrt(square)
        sketch.sides(AC=a, AB=hypotenuse)
        working = f"A C = {a}, A B = {hypotenuse}. {hypotenuse}^2 - {a}^2 = {b * b}"
        return _length(sketch.picture(), "Find B C.", str(b), working, str(hypotenuse - a))
    sketch.sides(AC=a, BC=b)
    working = f"A C = {a}, B C = {b}. {a}^2 + {b}^2 = {square}"
    return _length(sketch.picture(), "Find A B.", c, working, str(a + b))


def _special_right_triangle(rng: random.Random, size: int, style: Style) -> SyntheticProblem:
    """Draw a right triangle with its hypotenuse and one angle, and ask for a leg.

    `x` stands at the leg opposite of the angle or beside it.
    """
    degrees = rng.choice([30, 45, 60])
    hypotenuse = 2 * rng.randrange(2, 30)
    turn = math.radians(degrees)
    corners = {"A": (0.0, math.sin(turn)), "B": (math.cos(turn), 0.0), "C": (0.0, 0.0)}
    sketch = Sketch(rng, size, style, corners, "ABCA")
    opposite = rng.random() < 0.5
    sketch.letters("ABC")
    sketch.right_angle("ACB")
    sketch.sides(AB=hypotenuse)
    sketch.angles(ABC=f"{degrees}°")
    sketch.sides(**{"AC" if opposite else "BC": "x"})
    angle = degrees if opposite else 90 - degrees
    half = hypotenuse // 2
    answer = {30: f"{half}", 45: f"{half} \\sqrt {{ 2 }}", 60: f"{half} \\sqrt {{ 3 }}"}[angle]
    working = f"hypotenuse {hypotenuse}, angle opposite {angle}"
    return _length(sketch.picture(), "Find x.", answer, working, str(hypotenuse))


def triangle_angle(
    rng: random.Random, size: int, level: int = 1, style: Style = PLAIN
) -> SyntheticProblem:
    """Draw a triangle with two angles, and ask for the third.

    At level 3 it has all three, two of them with an x.
    """
    a, b = (
        rng.randrange(30, 80, (10, 1, 1)[level - 1]),
        rng.randrange(30, 80, (10, 1, 1)[level - 1]),
    )
    c = 180 - a - b
    sketch = Sketch(rng, size, style, _triangle(a, b), "ABCA", letters="ABC")
    if level < 3:
        sketch.angles(BAC=f"{a}°", ABC=f"{b}°")
        picture = sketch.picture()
        working = f"180 - {a} - {b}"
        return _angle(picture, "Find m \\angle C.", str(c), working, str(a + b), ("Triangle",))
    x = rng.randrange(5, 21)
    first = rng.randrange(1, a // x + 1)
    second = rng.randrange(1, b // x + 1)
    first_angle = _expression(first, a - first * x)
    second_angle = _expression(second, b - second * x)
    sketch.angles(BAC=first_angle, ABC=second_angle, BCA=f"{c}°")
    working = f"({first_angle}) + ({second_angle}) + {c} = 180"
    return _angle(sketch.picture(), "Find x.", str(x), working, str(180 - c), ("Triangle",))


def inscribed_arc(
    rng: random.Random, size: int, level: int = 1, style: Style = PLAIN
) -> SyntheticProblem:
    """Draw an inscribed angle, and ask for its arc.

    At level 2 the arc is written and the angle asked, at level 3 they have an x.
    """
    inscribed = rng.randrange(25, 76, 5 if level == 1 else 1)
    start = rng.uniform(0, 2 * math.pi)
    third = math.radians(2 * inscribed + (360 - 2 * inscribed) * 0.5)
    at = {"A": start, "C": start + math.radians(2 * inscribed), "B": start + third}
    points: dict[str, Point] = {
        name: (math.cos(angle), math.sin(angle)) for name, angle in at.items()
    }
    frame: dict[str, Point] = {
        f"_{i}": p for i, p in enumerate(((1.0, 0.0), (-1.0, 0.0), (0.0, 1.0), (0.0, -1.0)))
    }
    sketch = Sketch(
        rng, size, style, {**points, "O": (0.0, 0.0), **frame}, "ABC", letters="ABC", circle="OA"
    )
    sketch.centre_letter("O", "B")
    question = "In \\odot O, find m \\widehat{A C}."
    if level == 1:
        sketch.angles(0.22, ABC=f"{inscribed}°")
        working = f"2 * {inscribed}"
        return _angle(
            sketch.picture(), question, str(2 * inscribed), working, str(inscribed), ("Circle",)
        )
    sketch.lines("AOC")
    if level == 2:
        sketch.angles(0.12, AOC=f"{2 * inscribed}°")
        question = "In \\odot O, find m \\angle A B C."
        working = f"{2 * inscribed} / 2"
        return _angle(
            sketch.picture(), question, str(inscribed), working, str(2 * inscribed), ("Circle",)
        )
    x = rng.randrange(3, 13)
    factor = rng.randrange(1, inscribed // x + 1)
    text = _expression(factor, inscribed - factor * x)
    sketch.angles(0.22, ABC=text)
    sketch.angles(0.12, AOC=f"{2 * inscribed}°")
    working = f"2 ({text}) = {2 * inscribed}"
    return _angle(sketch.picture(), "Find x.", str(x), working, str(inscribed), ("Circle",))


def parallel_segment(
    rng: random.Random, size: int, level: int = 1, style: Style = PLAIN
) -> SyntheticProblem:
    """Draw a triangle with a segment that is parallel to a side, and ask for a length.

    B lies on A C and E on A D, and B E is parallel to C D. The lengths stand in the question or at
    the figure.
    """
    ab, ae = rng.randrange(4, 13), rng.randrange(4, 13)
    factor = (
        Fraction(rng.randrange(1, 4))
        if level == 1
        else Fraction(rng.randrange(1, 8), rng.randrange(2, 5))
    )
    ed = ae * factor.denominator * factor
    ae = ae * factor.denominator
    ab = ab * (factor.denominator if level != 2 else 1)
    bc = ab * factor
    # clear of the corners, not to scale beyond that
    share = min(0.65, max(0.4, float(1 / (1 + factor))))
    slope = rng.uniform(0.7, 1.2)
    points = {"A": (0.0, 0.0), "C": (0.6, slope), "D": (1.3, 0.0)}
    points |= {"B": (0.6 * share, slope * share), "E": (1.3 * share, 0.0)}
    sketch = Sketch(rng, size, style, points, "ACDA", "BE", letters="ABCDE")
    answer = ratio(bc.numerator, bc.denominator)
    parallel = "\\overline{B E} \\parallel \\overline{C D}"
    working = f"A B / A E = {ab} / {ae}, E D = {ed}"
    if level == 1:
        question = f"If {parallel}, A D = {ae + ed}, A B = {ab}, and A E = {ae}, find B C."
        return _length(sketch.picture(), question, answer, working, str(ab), ("Triangle", "Line"))
    sketch.sides(AB=ab, AE=ae)
    if level == 2:
        sketch.sides(ED=ed)
        return _length(
            sketch.picture(),
            f"If {parallel}, find B C.",
            answer,
            working,
            str(ed),
            ("Triangle", "Line"),
        )
    x = rng.randrange(2, 12)
    sketch.sides(ED=ed, BC=_expression(1, int(bc) - x) if bc.denominator == 1 else "x")
    answer = str(x) if bc.denominator == 1 else answer
    return _length(
        sketch.picture(), f"If {parallel}, find x.", answer, working, str(ed), ("Triangle", "Line")
    )


def parallelogram_side(
    rng: random.Random, size: int, level: int = 1, style: Style = PLAIN
) -> SyntheticProblem:
    """Draw a parallelogram with values at two opposite sides.

    One of the values has an x, at level 3 both.
    """
    x = rng.randrange(2, 15) if level < 3 else rng.randrange(2, 30)
    factor = rng.randrange(2, 6)
    added = rng.randrange(1, 20)
    second_factor = rng.randrange(1, factor) if level == 3 else 0
    lean = rng.uniform(0.2, 0.5)
    height = rng.uniform(0.6, 0.9)
    corners = {"A": (0.0, 0.0), "B": (1.4, 0.0), "C": (1.4 + lean, height), "D": (lean, height)}
    sketch = Sketch(rng, size, style, corners, "ABCDA", letters="ABCD")
    value = factor * x + (added if level > 1 else 0)
    first_side = _expression(factor, added if level > 1 else 0)
    second_side = (
        _expression(second_factor, value - second_factor * x) if second_factor else str(value)
    )
    sketch.sides(AB=first_side, CD=second_side)
    question = "Find x so that the quadrilateral is a parallelogram."
    return _length(
        sketch.picture(),
        question,
        str(x),
        f"{first_side} = {second_side}",
        str(value),
        ("Parallelogram",),
    )


_LETTERED = (
    right_triangle_side,
    triangle_angle,
    inscribed_arc,
    parallel_segment,
    parallelogram_side,
)
LETTERED: dict[str, Family] = {family.__name__: clear(family) for family in _LETTERED}


def _box(answer: object) -> str:
    """Return an answer in a box."""
    return f"\\boxed{{{answer}}}"


def _problem(
    goal: str,
    picture: Image.Image,
    question: str,
    answer: str,
    working: str,
    slip: str,
    shapes: tuple[str, ...] = ("Triangle",),
) -> SyntheticProblem:
    """Return a problem of a lettered family; both workings are the same but for their answers."""
    return SyntheticProblem(
        family="",
        image=picture,
        question=question,
        answer=answer,
        solution=f"{working}. {_box(answer)}",
        slip=f"{working}. {_box(slip)}",
        goal=goal,
        shapes=shapes,
    )


_length = functools.partial(_problem, "Length")
_angle = functools.partial(_problem, "Angle")


def _root(square: int) -> str:
    """Return the square root in lowest terms, as Geometry3K writes it: `5 \\sqrt { 2 }`."""
    outside = max(k for k in range(1, math.isqrt(square) + 1) if square % (k * k) == 0)
    inside = square // (outside * outside)
    if inside == 1:
        return str(outside)
    return f"\\sqrt {{ {inside} }}" if outside == 1 else f"{outside} \\sqrt {{ {inside} }}"


def _expression(factor: int, added: int) -> str:
    """Return a linear expression as it is written: `3x + 10`, `x - 4`, `2x`."""
    term = "x" if factor == 1 else f"{factor}x"
    return term if added == 0 else f"{term} {'+' if added > 0 else '-'} {abs(added)}"


def _triangle(a: float, b: float) -> dict[str, Point]:
    """Return the corners of a triangle with these angles, in degrees, at A and B."""
    height = 1 / (1 / math.tan(math.radians(a)) + 1 / math.tan(math.radians(b)))
    return {"A": (0.0, 0.0), "B": (1.0, 0.0), "C": (height / math.tan(math.radians(a)), height)}
