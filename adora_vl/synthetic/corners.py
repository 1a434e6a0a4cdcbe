"""Pictures whose corners have to be looked at again.

Each corner has a number that is too small once the picture is made smaller. At 448 x 448 pixels a
model that sees 56 x 56 cannot read them. A model can that cuts an eighth of each side out of the
picture, which is then as large as what it sees.
"""

import random

from PIL import Image, ImageDraw, ImageFont

from adora_vl.synthetic.drawing import PLAIN_STYLE, Style
from adora_vl.synthetic.families import SyntheticProblem

CORNER_NAMES = ("top left", "top right", "bottom left", "bottom right")
CELLS_PER_SIDE = 8  # into how many cells a side is divided; each corner of the picture is one cell
_PLAIN_SIDE = 56  # pixels of a cell's side; a number is larger or smaller with its cell
# Where a number may begin in such a cell: the range of x, then of y.
_NUMBER_START_RANGES = ((9, 18), (8, 17))
_NUMBER_HEIGHT = 24


def draw_corner_cell(rng: random.Random, number: int, side: int = _PLAIN_SIDE) -> Image.Image:
    """Draw one corner of a picture, of `side` x `side` pixels: a grey number near its middle."""
    image = Image.new("RGB", (side, side), "white")
    x_range, y_range = _NUMBER_START_RANGES
    x = rng.randrange(*x_range) * side // _PLAIN_SIDE
    y = rng.randrange(*y_range) * side // _PLAIN_SIDE
    font = ImageFont.load_default(size=_NUMBER_HEIGHT * side / _PLAIN_SIDE)
    grey = rng.randrange(0, 90)
    ImageDraw.Draw(image).text((x, y), str(number), fill=(grey, grey, grey), font=font)
    return image


def draw_numbered_corners(rng: random.Random, size: int) -> tuple[Image.Image, dict[str, int]]:
    """Draw a picture with a number in each corner and a triangle in the middle.

    `size`: side of the picture in pixels. Returns the picture, and the number by the corner's name,
    such as `top left`.
    """
    image = Image.new("RGB", (size, size), "white")
    side = size // CELLS_PER_SIDE
    points = [
        (rng.randrange(size // 5, size * 4 // 5), rng.randrange(size // 5, size * 4 // 5))
        for _ in range(3)
    ]
    ImageDraw.Draw(image).polygon(points, outline="gray", width=max(1, size // 75))
    numbers = {corner: rng.randrange(10, 100) for corner in CORNER_NAMES}
    for corner, number in numbers.items():
        x = 0 if "left" in corner else size - side
        y = 0 if "top" in corner else size - side
        image.paste(draw_corner_cell(rng, number, side), (x, y))
    return image, numbers


def question_for_corner(corner: str) -> str:
    """Return the question for the number at a corner."""
    return f"Which number is at the {corner}?"


def answer_with_number(number: int) -> str:
    """Return a worked answer with the number in a box."""
    return f"It is \\boxed{{{number}}}"


def corner_number(
    rng: random.Random, size: int, level: int = 1, style: Style = PLAIN_STYLE
) -> SyntheticProblem:
    """Draw a problem that asks for the number in one of the picture's corners.

    The wrong worked solution (`slip`) has the number of another corner. `size` is the side of the
    picture in pixels. `level` and `style` are not used, but every family takes them.
    """
    image, numbers = draw_numbered_corners(rng, size)
    corner, wrong_corner = rng.sample(CORNER_NAMES, 2)
    right_solution = answer_with_number(numbers[corner])
    wrong_solution = answer_with_number(numbers[wrong_corner])
    question = question_for_corner(corner)
    answer = str(numbers[corner])
    return SyntheticProblem(
        family="corners",
        image=image,
        question=question,
        answer=answer,
        solution=right_solution,
        slip=wrong_solution,
        goal="Number",
        shapes=("Text",),
        kind=corner,
    )
