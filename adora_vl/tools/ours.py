"""The tools of this project.

None of them reads a file or the network, and nothing is evaluated by Python.

A model names points in the coordinates of its family: in pixels, or in thousandths of width and
height (`Vision.points_in_thousandths`). In the docstring of a tool `{points}` is replaced by words
for the unit. Regions are cut from the original picture. If the picture was made smaller for the
model, a region shows more than the model has seen.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from adora_vl.data.images import PixelLimits, model_size
from adora_vl.rewards.answer import parse_value
from adora_vl.rewards.grammar import ParseError
from adora_vl.rewards.number_with_error import NumberWithError
from adora_vl.tools.calculator import evaluate_expression

_MARK_COLOUR = (220, 20, 20)
_MAX_LABEL_CHARS = 20
_ANSWER_DIGITS = 10  # significant ones of a number in an answer


@dataclass(frozen=True)
class View:
    """The size in which a model sees a picture, and the coordinates in which it names points."""

    low: int  # the least number of pixels (width x height) that a picture is resized to
    high: int  # the largest number of pixels that a picture is resized to
    unit: int  # the side of an image token, in pixels
    relative: bool = False  # whether coordinates are in thousandths, and not in pixels

    @property
    def limits(self) -> PixelLimits:
        """The limits between which pictures are resized for the model."""
        return PixelLimits(min_pixels=self.low, max_pixels=self.high, token_side=self.unit)

    @property
    def points(self) -> str:
        """The unit of coordinates, in words that replace `{points}` in docstrings of tools."""
        return "in thousandths of its width and height" if self.relative else "in its pixels"

    def size(self, image: Image.Image) -> tuple[int, int]:
        """Return width and height in pixels, as the model sees them."""
        return model_size(*image.size, self.limits)

    def largest_coordinates(self, size: tuple[int, int]) -> tuple[float, float]:
        """Return the largest coordinates in x and y, for a picture of this width and height."""
        width, height = model_size(*size, self.limits)
        return (1000, 1000) if self.relative else (width, height)

    def to_fractions(
        self, image: Image.Image, *points: tuple[float, float]
    ) -> list[tuple[float, float]]:
        """Return points in the model's coordinates as fractions of width and height, 0 to 1.

        For example, (500, 250) in thousandths is (0.5, 0.25), and (28, 14) in pixels of a picture
        that the model sees as 112 x 56 is (0.25, 0.25). Raises `ValueError` for a point outside of
        it.
        """
        max_x, max_y = self.largest_coordinates(image.size)
        for x, y in points:
            if not (0 <= x <= max_x and 0 <= y <= max_y):
                raise ValueError(
                    f"({x:g}, {y:g}) is not in the picture, which ends at ({max_x:g}, {max_y:g})"
                )
        return [(x / max_x, y / max_y) for x, y in points]


def zoom(
    x1: float,
    y1: float,
    x2: float,
    y2: float,
    picture: int = 0,
    *,
    images: Sequence[Image.Image],
    view: View,
) -> Image.Image:
    """Look closer at a region of a picture.

    Args:
        x1: Left side of the region, {points}.
        y1: Upper side.
        x2: Right side.
        y2: Lower side.
        picture: Number of the picture, from 0.
    """
    # The model reads the docstring, with the words of `view.points` in place of `{points}`.
    image = _picture_with_number(images, picture)
    (x_low, y_low), (x_high, y_high) = view.to_fractions(image, (x1, y1), (x2, y2))
    if x_low >= x_high or y_low >= y_high:
        raise ValueError("the region is empty: x1 has to be below x2, and y1 below y2")
    width, height = image.size
    region_box = (
        math.floor(x_low * width),
        math.floor(y_low * height),
        math.ceil(x_high * width),
        math.ceil(y_high * height),
    )
    region = image.crop(region_box)
    # A model sees no picture with a side shorter than that of an image token.
    token_side = view.unit
    factor = max(1.0, token_side / min(region.size))
    if factor == 1:
        return region
    return region.resize((math.ceil(region.width * factor), math.ceil(region.height * factor)))


def mark(
    x: float, y: float, label: str, picture: int = 0, *, images: Sequence[Image.Image], view: View
) -> Image.Image:
    """Mark a point of a picture with a dot and a label.

    Args:
        x: Place from the left, {points}.
        y: Place from the top.
        label: A few letters.
        picture: Number of the picture, from 0.
    """
    # The model reads the docstring, with the words of `view.points` in place of `{points}`.
    if len(label) > _MAX_LABEL_CHARS:
        raise ValueError(f"the label has {len(label)} characters, at most {_MAX_LABEL_CHARS}")
    image = _picture_with_number(images, picture).convert("RGB")
    [fraction] = view.to_fractions(image, (x, y))
    (pixel_x, pixel_y) = _pixel_at(image, fraction)
    line_width = _line_width(image)
    radius = 2 * line_width
    image = image.copy()
    canvas = ImageDraw.Draw(image)
    canvas.ellipse(
        (pixel_x - radius, pixel_y - radius, pixel_x + radius, pixel_y + radius),
        fill=_MARK_COLOUR,
    )
    canvas.text(
        (pixel_x + radius + line_width, pixel_y),
        label,
        fill=_MARK_COLOUR,
        font=ImageFont.load_default(max(10, min(image.size) // 20)),
    )
    return image


def line(
    x1: float,
    y1: float,
    x2: float,
    y2: float,
    picture: int = 0,
    *,
    images: Sequence[Image.Image],
    view: View,
) -> Image.Image:
    """Draw a straight line into a picture.

    Args:
        x1: Where it begins from the left, {points}.
        y1: Where it begins from the top.
        x2: Where it ends from the left.
        y2: Where it ends from the top.
        picture: Number of the picture, from 0.
    """
    # The model reads the docstring, with the words of `view.points` in place of `{points}`.
    image = _picture_with_number(images, picture).convert("RGB").copy()
    fractions = view.to_fractions(image, (x1, y1), (x2, y2))
    start, end = [_pixel_at(image, fraction) for fraction in fractions]
    ImageDraw.Draw(image).line([*start, *end], fill=_MARK_COLOUR, width=_line_width(image))
    return image


def measure(  # noqa: PLR0913  # the model writes each coordinate by its name
    x1: float,
    y1: float,
    x2: float,
    y2: float,
    x3: float | None = None,
    y3: float | None = None,
    picture: int = 0,
    *,
    images: Sequence[Image.Image],
    view: View,
) -> str:
    """Measure the distance of two points of a picture, or with a third one the angle at the second.

    Args:
        x1: First point from the left, {points}.
        y1: First point from the top.
        x2: Second point from the left.
        y2: Second point from the top.
        x3: Third point from the left.
        y3: Third point from the top.
        picture: Number of the picture, from 0.
    """
    # The model reads the docstring, with the words of `view.points` in place of `{points}`.
    if (x3 is None) != (y3 is None):
        raise ValueError("a third point has both x3 and y3: give both for an angle, or neither")
    image = _picture_with_number(images, picture)
    points = [(x1, y1), (x2, y2)]
    if x3 is not None and y3 is not None:
        points.append((x3, y3))
    width, height = view.size(image)
    pixels = [(x * width, y * height) for x, y in view.to_fractions(image, *points)]
    # With a third point the second one is the vertex of an angle, and the others lie on its arms.
    first_point, second_point, *third_points = pixels
    arm_points = [first_point, *third_points]
    distances = [math.dist(second_point, arm_point) for arm_point in arm_points]
    if not all(distances):
        raise ValueError("two of the points are the same")
    if not third_points:
        return f"{distances[0]:.1f} pixels of the picture, which may not be to scale"
    vertex_x, vertex_y = second_point
    first_angle, second_angle = [math.atan2(y - vertex_y, x - vertex_x) for x, y in arm_points]
    degrees = abs(math.degrees(first_angle - second_angle)) % 360
    return f"{min(degrees, 360 - degrees):.1f} degrees in the picture, which may not be to scale"


def calculate(expression: str) -> str:
    r"""Compute the value of an expression of numbers.

    Args:
        expression: For example 2*sqrt(3)+1, 7/4, 2^10 or sin(30), with angles in degrees.
    """
    try:
        result = evaluate_expression(expression)
    except ParseError as error:
        if error.reason != "not_read":
            raise ValueError(_no_value_message(error.reason)) from None
        result = _evaluate_as_answer(expression)
    # The result is a value with a bound on its error, or an exact fraction.
    if not result.is_exact and result.magnitude <= result.error:
        return "0"  # it may be 0: cos(90) is computed as 6e-98, which is within its error
    if result.is_exact and result.value.denominator == 1:
        return str(result.value)
    return f"{float(result.value):.{_ANSWER_DIGITS}g}"


def _evaluate_as_answer(expression: str) -> NumberWithError:
    r"""Return the value of an expression that no calculator reads, like `\frac{1}{2}` or `7 1/2`.

    It is read as the grader reads an answer. Raises `ValueError` if it has no value.
    """
    answer = parse_value(expression)
    if answer.type != "number" or answer.number is None:
        raise ValueError(_no_value_message(answer.reason or answer.type))
    return answer.number


def _no_value_message(reason: str) -> str:
    """Return the message for an expression without a value."""
    return f"the expression has no value here ({reason.replace('_', ' ')})"


# The number of characters of a tool's shortest answer, for the one tool whose answers are long.
SHORTEST_ANSWER_CHARS = {"measure": len("1.0 degrees in the picture, which may not be to scale")}
BUILT_IN_TOOLS = {tool.__name__: tool for tool in (zoom, mark, line, measure, calculate)}


def _picture_with_number(images: Sequence[Image.Image], number: int) -> Image.Image:
    """Return the picture of this number. Raises `ValueError` where there is none."""
    if not 0 <= number < len(images):
        available = f"0 to {len(images) - 1}" if images else "none"
        raise ValueError(f"picture: {number} is not there ({available})")
    return images[number]


def _pixel_at(image: Image.Image, fraction: tuple[float, float]) -> tuple[float, float]:
    """Return the pixel at these fractions of width and height.

    For example, in a picture of 101 x 51 pixels (0.5, 1) is the pixel (50, 50), in the last row.
    """
    return fraction[0] * (image.width - 1), fraction[1] * (image.height - 1)


def _line_width(image: Image.Image) -> int:
    """Return the width in pixels of a line that can be seen in the picture."""
    return max(1, min(image.size) // 150)
