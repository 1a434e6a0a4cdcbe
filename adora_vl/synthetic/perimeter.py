"""Problems that were built to show what attenuation is for: a short guess pays at first, a long
working pays later.

The last digit of a quadrilateral's perimeter is asked for. Two sides stand at the figure and two in
the question. In three quarters of the problems, the kind `usual`, the sides make the answer one of
two digits, so that a guess is right half of the time; in the kind `any` it is right a tenth of the
time. Only the worked sum tells the kinds apart.

A problem has its text form, and its picture is drawn by code all the same, as in `families.py`: it
has no letters, and the demo's model has learned to read it.
"""

import random
import re
from collections.abc import Sequence

from adora_vl.synthetic.drawing import PLAIN_STYLE, Canvas, Style
from adora_vl.synthetic.families import SyntheticProblem, jitter, label_inset

USUAL_DIGITS = (7, 3)  # the two last digits, one of which is the answer of most problems
USUAL_SHARE = 0.75  # the share of the problems whose answer is a usual digit
# Workings differ in length by wording alone, so that their length does not count digits.
_OPENING_WORDINGS = ("sides {} and {}. ", "sides {}, {}. ", "{} and {}. ")
_ADDITION_WORDINGS = ("{} + {} = {}. ", "{}+{}={}. ")


def perimeter_digit(
    rng: random.Random,
    size: int,
    level: int = 1,
    style: Style = PLAIN_STYLE,
    canvas_class: type[Canvas] = Canvas,
) -> SyntheticProblem:
    """Draw a quadrilateral with two of its sides, and ask for the last digit of the perimeter.

    The question has the other two sides. The wrong worked solution (`slip`) has one mistake.

    Args:
        rng: draws the sides, the positions and the wording.
        size: side of the picture in pixels.
        level: difficulty from 1 to 3, by the length of the sides.
        style: of the lines and labels.
        canvas_class: the class that draws the picture.
    """
    kind = "usual" if rng.random() < USUAL_SHARE else "any"
    end_of_sides = (10, 21, 61)[level - 1]  # the first three sides are shorter
    sides = draw_sides(rng, kind, end_of_sides)
    canvas = canvas_class(size, style)
    margin = label_inset(size)
    x = rng.uniform(0.06, 0.09) + margin
    y = 0.93 - rng.uniform(0.01, 0.04) - 1.2 * margin
    top = rng.uniform(0.04, 0.1)
    right = rng.uniform(0.9, 0.97)
    canvas.line(
        (x, y), (x, top), (rng.uniform(0.75, 0.85), rng.uniform(0.1, 0.2)), (right, y), closed=True
    )
    canvas.label(str(sides[0]), jitter(rng, (x - 0.55 * margin, (y + top) / 2), max_offset=0.02))
    canvas.label(str(sides[1]), jitter(rng, ((x + right) / 2, y + 0.8 * margin), max_offset=0.02))
    question = (
        f"The other sides are {sides[2]} and {sides[3]}. Find the last digit of the perimeter."
    )
    right_working = write_working(rng, sides)
    slipped_working = write_working(rng, sides, slip_at=rng.randrange(WORKING_STEPS))
    return SyntheticProblem(
        family="perimeter",
        image=canvas.picture(),
        question=question,
        answer=str(sum(sides) % 10),
        solution=right_working,
        slip=slipped_working,
        goal="Length",
        shapes=("Quadrilateral",),
        kind=kind,
        # The answer is the last digit of what is found.
        sentences=(
            "ABCD quadrilateral",
            f"AB = {sides[0]}",
            f"BC = {sides[1]}",
            f"CD = {sides[2]}",
            f"DA = {sides[3]}",
            "find perimeter ABCD",
        ),
    )


def draw_sides(rng: random.Random, kind: str, end: int) -> tuple[int, ...]:
    """Draw the four sides of a quadrilateral, the first three of them below `end`.

    The fourth side decides the last digit of the perimeter. In the kind `usual` it is one of the
    usual digits, else any digit. For example, the sides 7, 9 and 9 and the digit 7 need a fourth
    side of 2, since 7 + 9 + 9 + 2 = 27.
    """
    while True:
        last_digit = rng.choice(USUAL_DIGITS) if kind == "usual" else rng.randrange(10)
        three_sides = [rng.randrange(3, end) for _ in range(3)]
        fourth_side = (last_digit - sum(three_sides)) % 10
        if fourth_side == 0:
            fourth_side = 10
        sides = (*three_sides, fourth_side)
        # A side that is longer than the others together leaves no quadrilateral.
        if 2 * max(sides) < sum(sides):
            return sides


WORKING_STEPS = 5  # two readings and three sums; a slip can happen in each


def write_working(
    rng: random.Random, sides: Sequence[int], slip_at: int | None = None, slip_share: float = 0.0
) -> str:
    r"""Return a worked solution that adds up the four sides step by step, in a random wording.

    It may have mistakes ("slips"). A slip makes a number one too large, and the steps after it go
    on with that number. It can happen in five steps: in reading each of the first two sides off the
    figure (0 and 1), and in each of the three sums (2 to 4).

    `slip_at` is the step of a certain slip, from 0 to 4, or None for none. `slip_share` is the
    probability of a slip at each other step. The sides (3, 4, 5, 6) may give one of these:

    - without a slip: `sides 3, 4. 3+4=7. 7+5=12. 12 + 6 = 18. \boxed{8}`
    - with a slip at step 2, the first sum: `sides 3, 4. 3+4=8. 8+5=13. 13+6=19. \boxed{9}`
    """
    mistakes = []  # what is added by mistake in each step, 0 or 1
    for step in range(WORKING_STEPS):
        mistakes.append(1 if step == slip_at or rng.random() < slip_share else 0)
    total = sides[0] + mistakes[0]
    second_side = sides[1] + mistakes[1]
    text = rng.choice(_OPENING_WORDINGS).format(total, second_side)
    for side, mistake in zip((second_side, *sides[2:]), mistakes[2:], strict=True):
        next_total = total + side + mistake
        text += rng.choice(_ADDITION_WORDINGS).format(total, side, next_total)
        total = next_total
    return f"{text}\\boxed{{{total % 10}}}"


def write_guess(rng: random.Random) -> str:
    """Return one of the two usual digits, without a working."""
    return f"guess \\boxed{{{rng.choice(USUAL_DIGITS)}}}"


def sides_in_problem(problem: str, solution: str) -> tuple[int, ...]:
    """Return the four sides of a drawn problem, from its question and its worked solution.

    The first two numbers of the solution are the sides at the figure, and those of the question the
    other two: `sides 3 and 4. ...` and `The other sides are 5 and 6. ...` give (3, 4, 5, 6).
    """
    first_sides = re.findall(r"\d+", solution)[:2]
    other_sides = re.findall(r"\d+", problem)[:2]
    return tuple(int(side) for side in (*first_sides, *other_sides))
