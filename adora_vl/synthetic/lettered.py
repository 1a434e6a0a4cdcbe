"""The lettered families of drawn problems, in Geometry3K's phrasing.

Each is a text form with places and has no drawing code: `DrawnForm` draws its sentences as they are
said, and `adora_vl.geometry` solves the problem from the same ones.
"""

import functools
import math
import random
from fractions import Fraction

from adora_vl.synthetic.drawing import PLAIN_STYLE, Point, Style
from adora_vl.synthetic.drawn_form import DrawnForm
from adora_vl.synthetic.families import DrawFunction, SyntheticProblem, boxed, write_ratio
from adora_vl.synthetic.sketch import ClutteredError

MIN_LETTERED_SIZE = 168  # pixels; below, the letters are not readable
_PYTHAGOREAN_TRIPLES = (
    (3, 4, 5),
    (5, 12, 13),
    (8, 15, 17),
    (7, 24, 25),
    (20, 21, 29),
    (9, 40, 41),
    (12, 35, 37),
)


def redraw_until_clear(draw: DrawFunction) -> DrawFunction:
    """Wrap a function that draws a problem, so that it draws again until no two labels overlap."""

    @functools.wraps(draw)
    def draw_until_clear(
        rng: random.Random, size: int, level: int, style: Style
    ) -> SyntheticProblem:
        """Draw problems until one has no labels that overlap."""
        while True:
            try:
                return draw(rng, size, level, style)
            except ClutteredError:  # the next try is drawn with other random numbers
                continue

    return draw_until_clear


def right_triangle_side(
    rng: random.Random, size: int, level: int = 1, style: Style = PLAIN_STYLE
) -> SyntheticProblem:
    """Draw a right triangle with two sides, and ask for the third.

    At level 1 all sides are whole numbers. At level 3 the triangle has a side and an angle of 30,
    45 or 60 degrees. `size` is the side of the picture in pixels.
    """
    if level == 3:
        return _special_right_triangle(rng, size, style)
    if level == 1:
        ac, bc, _ = rng.choice(_PYTHAGOREAN_TRIPLES)
        factor = rng.randrange(1, 5)
        ac = ac * factor
        bc = bc * factor
    else:
        ac = rng.randrange(2, 20)
        bc = rng.randrange(2, 20)
    square = ac * ac + bc * bc
    # A longer triangle is drawn out of scale, since otherwise its labels lie on each other.
    width = max(0.35, min(2.8, bc / ac))
    positions = {"A": (0.0, 1.0), "B": (width, 0.0), "C": (0.0, 0.0)}
    form = DrawnForm(rng, size, style, positions, "triangle ABC")
    form.add_and_draw("right angle ACB")
    asks_for_leg = level == 1 and rng.random() < 0.5
    if asks_for_leg:
        hypotenuse = math.isqrt(square)
        form.add_and_draw(f"AC = {ac}", f"AB = {hypotenuse}")
        form.add("find BC")
        working = f"A C = {ac}, A B = {hypotenuse}. {hypotenuse}^2 - {ac}^2 = {bc * bc}"
        return _length_problem(
            form,
            question="Find B C.",
            answer=str(bc),
            working=working,
            wrong_answer=str(hypotenuse - ac),
        )
    form.add_and_draw(f"AC = {ac}", f"BC = {bc}")
    form.add("find AB")
    working = f"A C = {ac}, B C = {bc}. {ac}^2 + {bc}^2 = {square}"
    return _length_problem(
        form,
        question="Find A B.",
        answer=_write_root(square),
        working=working,
        wrong_answer=str(ac + bc),
    )


def _special_right_triangle(rng: random.Random, size: int, style: Style) -> SyntheticProblem:
    """Draw a right triangle with its hypotenuse and an angle of 30, 45 or 60 degrees.

    A leg is asked for. The leg `x` is opposite of the angle or beside it. `size` is the side of the
    picture in pixels.
    """
    degrees = rng.choice([30, 45, 60])
    hypotenuse = 2 * rng.randrange(2, 30)
    radians = math.radians(degrees)
    positions = {"A": (0.0, math.sin(radians)), "B": (math.cos(radians), 0.0), "C": (0.0, 0.0)}
    form = DrawnForm(rng, size, style, positions, "triangle ABC")
    is_opposite = rng.random() < 0.5
    form.add_and_draw("right angle ACB", f"AB = {hypotenuse}", f"angle ABC = {degrees}")
    form.add_and_draw("AC = x" if is_opposite else "BC = x")
    form.add("find x")  # a part of the problem that is not drawn
    angle_opposite_x = degrees if is_opposite else 90 - degrees
    half = hypotenuse // 2
    # The sine of the angle, times the hypotenuse.
    answer_by_angle = {30: f"{half}", 45: f"{half} \\sqrt {{ 2 }}", 60: f"{half} \\sqrt {{ 3 }}"}
    answer = answer_by_angle[angle_opposite_x]
    working = f"hypotenuse {hypotenuse}, angle opposite {angle_opposite_x}"
    return _length_problem(
        form, question="Find x.", answer=answer, working=working, wrong_answer=str(hypotenuse)
    )


def triangle_angle(
    rng: random.Random, size: int, level: int = 1, style: Style = PLAIN_STYLE
) -> SyntheticProblem:
    """Draw a triangle with two angles, and ask for the third.

    At level 3 all three angles are written, two of them with an x that is asked for. `size` is the
    side of the picture in pixels.
    """
    step = 10 if level == 1 else 1
    angle_a = rng.randrange(30, 80, step)  # degrees
    angle_b = rng.randrange(30, 80, step)
    angle_c = 180 - angle_a - angle_b
    form = DrawnForm(rng, size, style, _triangle_corners(angle_a, angle_b), "triangle ABC")
    if level < 3:
        form.add_and_draw(f"angle BAC = {angle_a}", f"angle ABC = {angle_b}")
        form.add("find angle C")
        working = f"180 - {angle_a} - {angle_b}"
        return _angle_problem(
            form,
            question="Find m \\angle C.",
            answer=str(angle_c),
            working=working,
            wrong_answer=str(angle_a + angle_b),
        )
    x = rng.randrange(5, 21)
    # The angles at A and B are written as `factor * x + rest`, with a rest of 0 or more.
    factor_a = rng.randrange(1, angle_a // x + 1)
    factor_b = rng.randrange(1, angle_b // x + 1)
    written_angle_a = _write_linear_expression(factor_a, angle_a - factor_a * x)
    written_angle_b = _write_linear_expression(factor_b, angle_b - factor_b * x)
    form.add_and_draw(
        f"angle BAC = {written_angle_a}",
        f"angle ABC = {written_angle_b}",
        f"angle BCA = {angle_c}",
    )
    form.add("find x")
    working = f"({written_angle_a}) + ({written_angle_b}) + {angle_c} = 180"
    return _angle_problem(
        form,
        question="Find x.",
        answer=str(x),
        working=working,
        wrong_answer=str(180 - angle_c),
    )


def inscribed_arc(
    rng: random.Random, size: int, level: int = 1, style: Style = PLAIN_STYLE
) -> SyntheticProblem:
    """Draw an inscribed angle, and ask for its arc.

    At level 2 the arc is written and the angle asked for. At level 3 both are written, one of them
    with an x that is asked for. `size` is the side of the picture in pixels.
    """
    inscribed = rng.randrange(25, 76, 5 if level == 1 else 1)  # degrees
    arc = 2 * inscribed
    outline = ("circle O: A, B, C", "AB and BC are chords of circle O")
    form = DrawnForm(rng, size, style, _circle_with_arc(rng, arc), *outline)
    answer = arc
    wrong_answer = inscribed
    if level == 1:
        form.add_and_draw(f"angle ABC = {inscribed}")
        form.add("find arc AC")
        question = "In \\odot O, find m \\widehat{A C}."
        working = f"2 * {inscribed}"
    elif level == 2:
        form.add_and_draw(f"angle AOC = {arc}")
        form.add("find angle ABC")
        question = "In \\odot O, find m \\angle A B C."
        working = f"{arc} / 2"
        answer = inscribed
        wrong_answer = arc
    else:
        x = rng.randrange(3, 13)
        # The angle is written as `factor * x + rest`, with a rest of 0 or more.
        factor = rng.randrange(1, inscribed // x + 1)
        angle_in_picture = _write_linear_expression(factor, inscribed - factor * x)
        form.add_and_draw(f"angle AOC = {arc}", f"angle ABC = {angle_in_picture}")
        form.add("find x")
        question = "Find x."
        working = f"2 ({angle_in_picture}) = {arc}"
        answer = x
    return _angle_problem(
        form,
        question=question,
        answer=str(answer),
        working=working,
        wrong_answer=str(wrong_answer),
        shapes=("Circle",),
    )


def _circle_with_arc(rng: random.Random, arc: int) -> dict[str, Point]:
    """Return positions of points on a circle around O, with an arc of `arc` degrees from A to C.

    B lies in the middle of the rest of the circle. The whole circle has to fit into the picture, so
    its leftmost, rightmost, top and bottom points are returned too. Names of two characters, as
    theirs, are not written into the picture.
    """
    start = rng.uniform(0, 2 * math.pi)
    middle_of_rest = math.radians(arc + (360 - arc) * 0.5)
    directions = {"A": start, "C": start + math.radians(arc), "B": start + middle_of_rest}
    positions: dict[str, Point] = {
        name: (math.cos(direction), math.sin(direction)) for name, direction in directions.items()
    }
    positions["O"] = (0.0, 0.0)
    for number, extreme in enumerate(((1.0, 0.0), (-1.0, 0.0), (0.0, 1.0), (0.0, -1.0))):
        positions[f"_{number}"] = extreme
    return positions


def parallel_segment(
    rng: random.Random, size: int, level: int = 1, style: Style = PLAIN_STYLE
) -> SyntheticProblem:
    """Draw a triangle with a segment that is parallel to a side, and ask for a length.

    B lies on A C and E on A D, and B E is parallel to C D. At level 1 the lengths stand in the
    question, at level 2 at the figure. At level 3 B C is written with an x that is asked for.
    """
    ab = rng.randrange(4, 13)
    ae = rng.randrange(4, 13)
    # B C is `factor` times A B, and so is E D times A E, since the segment is parallel to C D.
    numerator = rng.randrange(1, 4 if level == 1 else 8)
    denominator = 1 if level == 1 else rng.randrange(2, 5)
    factor = Fraction(numerator, denominator)
    # A multiple of the denominator makes the other length whole. At level 2 B C need not be whole.
    ae = ae * factor.denominator
    ed = ae * factor
    if level != 2:
        ab = ab * factor.denominator
    bc = ab * factor
    outline = ("triangle ACD", "B on AC", "E on AD", "BE parallel CD")
    form = DrawnForm(rng, size, style, _triangle_with_parallel(rng, factor), *outline)
    answer = write_ratio(bc.numerator, bc.denominator)
    wrong_answer = str(ed)
    parallel = "\\overline{B E} \\parallel \\overline{C D}"
    if level == 1:
        form.add(f"AD = {ae + ed}", f"AB = {ab}", f"AE = {ae}", "find BC")
        question = f"If {parallel}, A D = {ae + ed}, A B = {ab}, and A E = {ae}, find B C."
        wrong_answer = str(ab)
    elif level == 2:
        form.add_and_draw(f"AB = {ab}", f"AE = {ae}", f"ED = {ed}")
        form.add("find BC")
        question = f"If {parallel}, find B C."
    else:
        form.add_and_draw(f"AB = {ab}", f"AE = {ae}")
        x = rng.randrange(2, 12)
        bc_in_picture = "x"
        if bc.denominator == 1:
            bc_in_picture = _write_linear_expression(1, int(bc) - x)  # such as `x + 3`
            answer = str(x)
        form.add_and_draw(f"ED = {ed}", f"BC = {bc_in_picture}")
        form.add("find x")
        question = f"If {parallel}, find x."
    return _length_problem(
        form,
        question=question,
        answer=answer,
        working=f"A B / A E = {ab} / {ae}, E D = {ed}",
        wrong_answer=wrong_answer,
        shapes=("Triangle", "Line"),
    )


def _triangle_with_parallel(rng: random.Random, factor: Fraction) -> dict[str, Point]:
    """Return the positions of a triangle A C D with B on A C and E on A D, and B E parallel to C D.

    B C is `factor` times A B, and E D is `factor` times A E. B and E stay clear of the corners,
    even if that is not to scale: with the factor 3, A B is drawn as 0.4 of A C and not as 0.25.
    """
    share = min(0.65, max(0.4, float(1 / (1 + factor))))
    height = rng.uniform(0.7, 1.2)
    return {
        "A": (0.0, 0.0),
        "C": (0.6, height),
        "D": (1.3, 0.0),
        "B": (0.6 * share, height * share),
        "E": (1.3 * share, 0.0),
    }


def parallelogram_side(
    rng: random.Random, size: int, level: int = 1, style: Style = PLAIN_STYLE
) -> SyntheticProblem:
    """Draw a parallelogram with the lengths of two opposite sides, and ask for the x in them.

    One of the lengths is an expression such as `3x + 5`, at level 3 both are. `size` is the side of
    the picture in pixels.
    """
    x = rng.randrange(2, 15) if level < 3 else rng.randrange(2, 30)
    factor = rng.randrange(2, 6)
    added = rng.randrange(1, 20)
    second_factor = rng.randrange(1, factor) if level == 3 else 0
    lean = rng.uniform(0.2, 0.5)
    height = rng.uniform(0.6, 0.9)
    positions = {"A": (0.0, 0.0), "B": (1.4, 0.0), "C": (1.4 + lean, height), "D": (lean, height)}
    form = DrawnForm(rng, size, style, positions, "ABCD parallelogram")
    value = factor * x + (added if level > 1 else 0)
    first_side = _write_linear_expression(factor, added if level > 1 else 0)
    second_side = (
        _write_linear_expression(second_factor, value - second_factor * x)
        if second_factor
        else str(value)
    )
    form.add_and_draw(f"AB = {first_side}", f"CD = {second_side}")
    form.add("find x")
    question = "Find x so that the quadrilateral is a parallelogram."
    working = f"{first_side} = {second_side}"
    return _length_problem(
        form,
        question=question,
        answer=str(x),
        working=working,
        wrong_answer=str(value),
        shapes=("Parallelogram",),
    )


_LETTERED_FAMILIES = (
    right_triangle_side,
    triangle_angle,
    inscribed_arc,
    parallel_segment,
    parallelogram_side,
)
LETTERED_FAMILY_BY_NAME: dict[str, DrawFunction] = {
    family.__name__: redraw_until_clear(family) for family in _LETTERED_FAMILIES
}


def _make_problem(
    goal: str,
    form: DrawnForm,
    question: str,
    answer: str,
    working: str,
    wrong_answer: str,
    shapes: tuple[str, ...] = ("Triangle",),
) -> SyntheticProblem:
    """Return a problem with its picture and sentences.

    Its right and its wrong worked solution (`slip`) differ in their answers alone.

    Args:
        goal: what is asked for, `Length` or `Angle`.
        form: the sentences of the problem and its picture.
        question: the question in words.
        answer: the right answer.
        working: the calculation, which both solutions have.
        wrong_answer: the answer of a typical mistake.
        shapes: what is drawn.
    """
    return SyntheticProblem(
        family="",
        image=form.picture(),
        question=question,
        answer=answer,
        solution=f"{working}. {boxed(answer)}",
        slip=f"{working}. {boxed(wrong_answer)}",
        goal=goal,
        shapes=shapes,
        sentences=form.text(),
    )


_length_problem = functools.partial(_make_problem, "Length")
_angle_problem = functools.partial(_make_problem, "Angle")


def _write_root(square: int) -> str:
    """Return the square root of a number, simplified, as Geometry3K writes it.

    For example, 50 gives `5 \\sqrt { 2 }`, and 49 gives `7`.
    """
    # The largest number whose square divides `square`.
    outside = max(k for k in range(1, math.isqrt(square) + 1) if square % (k * k) == 0)
    inside = square // (outside * outside)
    if inside == 1:
        return str(outside)
    return f"\\sqrt {{ {inside} }}" if outside == 1 else f"{outside} \\sqrt {{ {inside} }}"


def _write_linear_expression(factor: int, added: int) -> str:
    """Write a linear expression in x as books do: `3x + 10`, `x - 4`, `2x`."""
    term = "x" if factor == 1 else f"{factor}x"
    if added == 0:
        return term
    sign = "+" if added > 0 else "-"
    return f"{term} {sign} {abs(added)}"


def _triangle_corners(angle_a: float, angle_b: float) -> dict[str, Point]:
    """Return the corners of a triangle with these angles, in degrees, at A and B."""
    tangent_at_a = math.tan(math.radians(angle_a))
    tangent_at_b = math.tan(math.radians(angle_b))
    # The height divides AB, of length 1, into height / tangent_at_a and height / tangent_at_b.
    height = 1 / (1 / tangent_at_a + 1 / tangent_at_b)
    return {"A": (0.0, 0.0), "B": (1.0, 0.0), "C": (height / tangent_at_a, height)}
