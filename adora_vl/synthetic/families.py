"""The plain families of drawn problems: numbers at the figure, and no letters.

The workings of the plain families come in several wordings, the right ones and the slips alike.
Were there one wording, the length of an answer would count its digits: once a model writes that
wording alone, nearly all groups would be ties of length or one token from it, and ADORA's length
criterion would attenuate by nothing else.

Each problem has its text form (`sentences`), from which `adora_vl.geometry` solves it. Its picture
is drawn by code all the same: it has no letters, leans and shifts by chance, and the small models
of the package have learned to read these pictures, which must not change by a pixel. The families
of `lettered.py` are drawn from their text form.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from string import ascii_uppercase

from PIL import Image

from adora_vl.synthetic.drawing import PLAIN_STYLE, Canvas, Point, Style, font_pixels


@dataclass(frozen=True)
class SyntheticProblem:
    """A drawn problem with two worked solutions: a right one, and one with a typical mistake."""

    family: str
    image: Image.Image  # RGB
    question: str
    answer: str  # LaTeX
    solution: str  # the right worked solution, which ends with the answer in a box
    slip: str  # a worked solution with a typical mistake, which ends with a wrong answer in a box
    goal: str  # what is asked for: `Angle`, `Length` or `Number`
    shapes: tuple[str, ...]  # what is drawn, such as `Triangle`
    # tells the cases of a family apart that are solved in different ways; empty where it has one
    kind: str = ""
    # the problem in the text form of `adora_vl.geometry`; empty where a text form cannot say it
    sentences: tuple[str, ...] = ()


# Arguments: a generator, pixels, a level from 1 to 3, and a style.
DrawFunction = Callable[[random.Random, int, int, Style], SyntheticProblem]


def jitter(rng: random.Random, point: Point, max_offset: float = 0.035) -> Point:
    """Return a point that is moved at random, by at most `max_offset` in x and y."""
    x, y = point
    moved_x = x + rng.uniform(-max_offset, max_offset)
    moved_y = y + rng.uniform(-max_offset, max_offset)
    return (moved_x, moved_y)


def label_inset(size: int) -> float:
    """Return how far a label's centre stays from an edge, as a fraction of the picture's side."""
    return 0.65 * font_pixels(size) / size


def write_ratio(above: int, below: int) -> str:
    """Return an integer or a reduced fraction, as LaTeX."""
    value = Fraction(above, below)
    if value.denominator == 1:
        return str(value)
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def choose_wording(rng: random.Random, *parts: tuple[str, ...], **numbers: object) -> str:
    """Draw one wording of each part of a text, join them, and fill in the numbers by name.

    The parts `("apex {apex}. ", "the apex is {apex}. ")` and `("180 - {apex} = ",)` with `apex=40`
    give `apex 40. 180 - 40 = ` or `the apex is 40. 180 - 40 = `.
    """
    text = "".join(rng.choice(wordings) for wordings in parts)
    return text.format(**numbers)


def isosceles_base_angle(
    rng: random.Random, size: int, level: int = 1, style: Style = PLAIN_STYLE
) -> SyntheticProblem:
    """Draw an isosceles triangle with the angle at its apex, and ask for a base angle.

    `size` is the side of the picture in pixels, and `level` the difficulty from 1 to 3. The
    problem has a right worked solution, and one with a mistake (`slip`), which forgets to halve.
    """
    # The range of the angle at the apex, in degrees, by level: start, end and step.
    start, stop, step = ((20, 165, 10), (12, 170, 2), (11, 170, 1))[level - 1]
    apex = rng.randrange(start, stop, step)
    # Positions are fractions of the picture's sides, with y downwards, and vary a little by chance.
    canvas = Canvas(size, style)
    x = rng.uniform(0.48, 0.52)
    half_width = rng.uniform(0.4, 0.46)
    top = rng.uniform(0.03, 0.09)
    bottom = rng.uniform(0.9, 0.96)
    canvas.line((x, top), (x - half_width, bottom), (x + half_width, bottom), closed=True)
    canvas.label(str(apex), jitter(rng, (x, 0.30 + label_inset(size))))
    base = f"{(180 - apex) / 2:g}"
    both_base_angles = 180 - apex
    opening = ("apex {apex}. ", "the apex is {apex}. ", "apex {apex} and two equal angles. ")
    steps = ("(180 - {apex}) / 2 = ", "180 - {apex} = {both}. {both} / 2 = ")
    question = rng.choice(
        ["Find the measure of a base angle of the isosceles triangle.", "Find the base angle."]
    )
    right_solution = choose_wording(rng, opening, steps, apex=apex, both=both_base_angles)
    right_solution += boxed(base)
    wrong_solution = choose_wording(rng, opening, ("180 - {apex} = ",), apex=apex)
    wrong_solution += boxed(both_base_angles)
    return SyntheticProblem(
        family="isosceles",
        image=canvas.picture(),
        question=question,
        answer=base,
        solution=right_solution,
        slip=wrong_solution,
        goal="Angle",
        shapes=("Triangle",),
        sentences=("triangle ABC", "AB = AC", f"angle BAC = {apex}", "find angle ABC"),
    )


def polygon_interior_angle(
    rng: random.Random, size: int, level: int = 1, style: Style = PLAIN_STYLE
) -> SyntheticProblem:
    """Draw a regular polygon with dots at its corners, and ask for an interior angle.

    Its sides have to be counted in the picture. It stands on a side as in a book, and has the dots,
    since a tiny model took one polygon for another in a tenth of the cases where it did not.

    `size` is the side of the picture in pixels, and `level` the difficulty from 1 to 3. The wrong
    worked solution (`slip`) takes the exterior angle for the interior one.
    """
    sides_of_levels = ([3, 4, 5, 6, 8], [5, 6, 8, 9, 10], [7, 9, 10, 11, 12])
    sides = rng.choice(sides_of_levels[level - 1])
    # Positions are fractions of the picture's sides, with y downwards, and vary a little by chance.
    canvas = Canvas(size, style)
    x, y = jitter(rng, (0.5, 0.5))
    radius = rng.uniform(0.38, 0.45)
    turn = math.radians(rng.uniform(-4, 4))
    # Half a step from straight down, so that a side lies at the bottom.
    directions = [math.pi / 2 + turn + math.pi * (2 * k + 1) / sides for k in range(sides)]
    corners = [
        (x + radius * math.cos(direction), y + radius * math.sin(direction))
        for direction in directions
    ]
    canvas.line(*corners, closed=True)
    for corner in corners:
        canvas.dot(corner)
    angle = write_ratio((sides - 2) * 180, sides)
    exterior_angle = write_ratio(360, sides)
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
    right_solution = choose_wording(rng, opening, steps, sides=sides, triangles=sides - 2)
    right_solution += boxed(angle)
    wrong_solution = choose_wording(rng, opening, ("360 / {sides} = ",), sides=sides)
    wrong_solution += boxed(exterior_angle)
    return SyntheticProblem(
        family="polygon",
        image=canvas.picture(),
        question=question,
        answer=angle,
        solution=right_solution,
        slip=wrong_solution,
        goal="Angle",
        shapes=("Polygon",),
        sentences=(f"regular polygon {ascii_uppercase[:sides]}", "find angle ABC"),
    )


def right_triangle_hypotenuse(
    rng: random.Random, size: int, level: int = 1, style: Style = PLAIN_STYLE
) -> SyntheticProblem:
    """Draw a right triangle with both legs, and ask for the hypotenuse, usually a radical.

    `size` is the side of the picture in pixels, and `level` the difficulty from 1 to 3. The wrong
    worked solution (`slip`) adds the legs.
    """
    leg_end = (7, 21, 61)[level - 1]  # the legs are shorter
    across = rng.randrange(1, leg_end)  # the length of the horizontal leg
    down = rng.randrange(1, leg_end)  # of the vertical one
    # Positions are fractions of the picture's sides, with y downwards, and vary a little by chance.
    canvas = Canvas(size, style)
    margin = label_inset(size)
    x = rng.uniform(0.06, 0.09) + margin
    y = 0.93 - rng.uniform(0.01, 0.04) - 1.2 * margin
    top = rng.uniform(0.04, 0.1)
    end = rng.uniform(0.9, 0.97)
    canvas.line((x, y), (x, top), (end, y), closed=True)
    canvas.label(str(down), jitter(rng, (x - 0.55 * margin, (y + top) / 2), max_offset=0.02))
    canvas.label(str(across), jitter(rng, ((x + end) / 2, y + 0.8 * margin), max_offset=0.02))
    square = across**2 + down**2
    root = math.isqrt(square)
    is_whole = root * root == square
    answer = str(root) if is_whole else f"\\sqrt {{ {square} }}"  # as Geometry3K spells it
    answer_in_solution = str(root) if is_whole else f"\\sqrt{{{square}}}"
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
    right_solution = choose_wording(rng, opening, steps, down=down, across=across, square=square)
    right_solution += boxed(answer_in_solution)
    wrong_solution = choose_wording(
        rng, opening, ("{down} + {across} = ",), down=down, across=across
    )
    wrong_solution += boxed(down + across)
    return SyntheticProblem(
        family="right_triangle",
        image=canvas.picture(),
        question=question,
        answer=answer,
        solution=right_solution,
        slip=wrong_solution,
        goal="Length",
        shapes=("Triangle",),
        sentences=("triangle ABC", "right angle ABC", f"AB = {down}", f"BC = {across}", "find AC"),
    )


# Two lines that cross, in pixels with y downwards: without places nobody knows which angle is
# which.
_CROSSING_SENTENCES = (
    "A at 0, 0",
    "B at 100, 90",
    "C at 0, 90",
    "D at 100, 0",
    "AB and CD meet at E",
)


def crossing_lines(
    rng: random.Random, size: int, level: int = 1, style: Style = PLAIN_STYLE
) -> SyntheticProblem:
    """Draw two lines that cross with one angle, and ask for another one.

    The angle `x` is opposite of the given one (and equal to it), or beside it. The wrong worked
    solution (`slip`) takes one case for the other. In both cases the right solution is long and the
    wrong one short. If an equal angle were just copied, the right solution would be the shorter one
    in this case, and ADORA, which goes by length, would treat the two cases differently.

    `size` is the side of the picture in pixels, and `level` the difficulty from 1 to 3.
    """
    start, stop, step = ((30, 155, 10), (25, 160, 5), (21, 160, 1))[level - 1]
    shown_angle = rng.randrange(start, stop, step)  # degrees
    is_opposite = rng.random() < 0.5
    # Positions are fractions of the picture's sides, with y downwards, and vary a little by chance.
    canvas = Canvas(size, style)
    x, y = jitter(rng, (0.5, 0.5))
    slope = rng.uniform(0.40, 0.44)
    canvas.line((x - 0.46, y - slope), (x + 0.46, y + slope))
    canvas.line((x - 0.46, y + slope), (x + 0.46, y - slope))
    canvas.label(str(shown_angle), jitter(rng, (0.5, 0.04 + label_inset(size))))
    label_at = (0.5, 0.96 - label_inset(size)) if is_opposite else (0.87, 0.57)
    canvas.label("x", jitter(rng, label_at))
    supplement = 180 - shown_angle
    # The beginnings of solutions for an x opposite of the shown angle, and for one beside it.
    opposite = ("vertical {shown}. ", "vertical angles, {shown}. ")
    beside = ("supplementary {shown}. ", "a straight angle, {shown}. ")
    opposite_steps = ("180 - (180 - {shown}) = ", "180 - {shown} = {other}. 180 - {other} = ")
    beside_steps = ("x + {shown} = 180. 180 - {shown} = ", "they add up to 180. 180 - {shown} = ")
    # All four are drawn in every case, so that the random numbers after them are the same.
    long_opposite = choose_wording(
        rng, opposite, opposite_steps, shown=shown_angle, other=supplement
    )
    long_beside = choose_wording(rng, beside, beside_steps, shown=shown_angle)
    short_opposite = choose_wording(rng, opposite, ("x = ",), shown=shown_angle)
    short_beside = choose_wording(rng, beside, ("180 - {shown} = ",), shown=shown_angle)
    question = rng.choice(["Find x.", "Find the angle x at the crossing."])
    if is_opposite:
        answer = shown_angle
        asked_angle = "CEB"
        right_solution = long_opposite + boxed(shown_angle)
        wrong_solution = short_beside + boxed(supplement)
    else:
        answer = supplement
        asked_angle = "DEB"
        right_solution = long_beside + boxed(supplement)
        wrong_solution = short_opposite + boxed(shown_angle)
    return SyntheticProblem(
        family="crossing",
        image=canvas.picture(),
        question=question,
        answer=str(answer),
        solution=right_solution,
        slip=wrong_solution,
        goal="Angle",
        shapes=("Line",),
        kind="vertical" if is_opposite else "supplementary",
        sentences=(*_CROSSING_SENTENCES, f"angle AED = {shown_angle}", f"find angle {asked_angle}"),
    )


def circle_from_radius(
    rng: random.Random, size: int, level: int = 1, style: Style = PLAIN_STYLE
) -> SyntheticProblem:
    """Draw a circle with its radius, and ask for the diameter or the circumference.

    `size` is the side of the picture in pixels, and `level` the difficulty from 1 to 3. The wrong
    worked solution (`slip`) forgets to double.
    """
    radius_end = (50, 100, 200)[level - 1]  # the radius is smaller
    radius = rng.randrange(2, radius_end)
    measure = rng.choice(["diameter", "circumference"])
    # Positions are fractions of the picture's sides, with y downwards, and vary a little by chance.
    canvas = Canvas(size, style)
    centre = jitter(rng, (0.5, 0.5))
    drawn_radius = rng.uniform(0.40, 0.45)  # not to scale
    canvas.circle(centre, drawn_radius)
    canvas.dot(centre)
    canvas.line(centre, (centre[0] + drawn_radius, centre[1]))
    canvas.label(str(radius), jitter(rng, (0.5, 0.5 - 1.15 * label_inset(size))))
    unit = "" if measure == "diameter" else " \\pi"
    opening = ("radius {radius}", "the radius is {radius}", "it has radius {radius}")
    steps = (
        ". 2 * {radius} = ",
        ". {radius} + {radius} = ",
        ". two radii make a diameter. 2 * {radius} = ",
    )
    question = rng.choice([f"Find the {measure} of the circle.", f"Find the {measure}."])
    answer = f"{2 * radius}{unit}"
    right_solution = choose_wording(rng, opening, steps, radius=radius) + boxed(answer)
    wrong_solution = choose_wording(rng, opening, (" = ", ". the answer is "), radius=radius)
    wrong_solution += boxed(f"{radius}{unit}")
    return SyntheticProblem(
        family="circle",
        image=canvas.picture(),
        question=question,
        answer=answer,
        solution=right_solution,
        slip=wrong_solution,
        goal="Length",
        shapes=("Circle",),
        kind=measure,
        sentences=("circle O: A", f"radius O = {radius}", f"find {measure} O"),
    )


PLAIN_FAMILY_BY_NAME: dict[str, DrawFunction] = {
    "isosceles": isosceles_base_angle,
    "polygon": polygon_interior_angle,
    "right_triangle": right_triangle_hypotenuse,
    "crossing": crossing_lines,
    "circle": circle_from_radius,
}


def boxed(answer: object) -> str:
    """Return an answer as LaTeX in a box: `\\boxed{40}`."""
    return f"\\boxed{{{answer}}}"
