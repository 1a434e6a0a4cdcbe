"""Drawing: an oversampled canvas, and figures on it that are sketched by their corners."""

import math
import random
from cmath import rect
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageDraw, ImageFont

Point = tuple[float, float]


@dataclass(frozen=True)
class Style:
    """Colours of lines, text and paper, and the width of a line as a multiple of the plain one."""

    ink: str = "black"
    text: str = "black"
    paper: str = "white"
    stroke: float = 1.0


PLAIN = Style()
STYLES = {
    "plain": PLAIN,
    "bold": Style(stroke=2.0),
    "textbook": Style(ink="#0b63a5", stroke=1.4),
    "pencil": Style(ink="#6e6e6e", text="#3c3c3c", paper="#f7f4ec"),
    "board": Style(ink="#f2f2f2", text="#ffffff", paper="#24523b", stroke=1.3),
}
OVERSAMPLING = 2  # Pillow's lines are not anti-aliased; drawing larger and shrinking is


def font_pixels(size: int) -> float:
    """Return the height of a label in a picture of `size` pixels.

    Two digits fill half of 56 pixels, a tenth of 448.
    """
    return max(0.075 * size, min(24.0, 0.43 * size))


class Canvas:
    """A square picture of `size` x `size` pixels, whose points are shares of its sides.

    It is drawn larger, and made smaller at the end. `font_scale` makes its labels smaller or
    larger, or `font` is theirs.
    """

    def __init__(
        self, size: int, style: Style = PLAIN, font_scale: float = 1.0, font: Any = None
    ) -> None:
        """Create an empty canvas."""
        self.size = size
        self._pixels = size * OVERSAMPLING
        self._image = Image.new("RGB", (self._pixels, self._pixels), style.paper)
        self._style = style
        self._draw = ImageDraw.Draw(self._image)
        self._font = font or ImageFont.load_default(
            size=font_pixels(size) * OVERSAMPLING * font_scale
        )
        self._stroke = max(1, round(OVERSAMPLING * style.stroke * max(1.0, size / 160)))

    def _scaled(self, points: list[Point]) -> list[Point]:
        """Return points in pixels of the large picture."""
        return [(x * self._pixels, y * self._pixels) for x, y in points]

    def line(self, *points: Point, closed: bool = False) -> None:
        """Draw a line through points, which is `closed` where it comes back to the first one."""
        path = self._scaled([*points, points[0]] if closed else list(points))
        self._draw.line(path, fill=self._style.ink, width=self._stroke, joint="curve")

    def circle(self, centre: Point, radius: float) -> None:
        """Draw a circle."""
        (x, y) = self._scaled([centre])[0]
        r = radius * self._pixels
        self._draw.ellipse(
            (x - r, y - r, x + r, y + r), outline=self._style.ink, width=self._stroke
        )

    def dot(self, centre: Point) -> None:
        """Draw a dot."""
        (x, y) = self._scaled([centre])[0]
        r = 2.0 * self._stroke
        self._draw.ellipse((x - r, y - r, x + r, y + r), fill=self._style.ink)

    def label(self, text: str, centre: Point) -> None:
        """Write a text with an outline of paper, so that a line behind it does not hide a digit."""
        position = self._scaled([centre])[0]
        style = self._style
        stroke = self._stroke
        self._draw.text(
            position,
            text,
            style.text,
            self._font,
            anchor="mm",
            stroke_width=stroke,
            stroke_fill=style.paper,
        )

    def picture(self) -> Image.Image:
        """Return the picture in its final size."""
        return self._image.resize((self.size, self.size), Image.Resampling.BOX)


FONT_SCALE = 0.62  # of the plain families' labels: a lettered figure has many
_FRAME = (0.15, 0.85)  # where the points may lie; letters stand outside of them


class ClutteredError(Exception):
    """Two labels would lie on each other: the same problem has to be drawn in another position."""


class Sketch:
    """A figure of named points, in any unit, that are turned, perhaps mirrored, and fitted in.

    `lines`: `AB` is a segment and `ABCA` a closed triangle. `letters`: the points whose names stand
    beside them, away from the middle of the figure. `circle`: its centre, and a point on it.
    """

    def __init__(
        self,
        rng: random.Random,
        size: int,
        style: Style,
        points: dict[str, Point],
        *lines: str,
        letters: str = "",
        circle: str = "",
    ) -> None:
        """Turn the points by chance, and draw the circle, the lines and the letters.

        `size` is the side of the picture in pixels.
        """
        self._canvas = Canvas(size, style, FONT_SCALE)
        self._at = _fitted(points, rng.uniform(0, 2 * math.pi), mirrored=rng.random() < 0.5)
        xs, ys = zip(*map(_pair, self._at.values()), strict=True)
        self._centre = complex(sum(xs), sum(ys)) / len(xs)
        self._font = FONT_SCALE * font_pixels(size) / size
        # of the labels so far: left, top, right, bottom
        self._boxes: list[tuple[float, float, float, float]] = []
        if circle:
            centre, point_on = self._places(circle)
            self._canvas.circle(_pair(centre), abs(centre - point_on))
            self._canvas.dot(_pair(centre))
        self.lines(*lines)
        self.letters(letters)

    def _places(self, names: str) -> list[complex]:
        """Return the places of points by their letters."""
        return [self._at[name] for name in names]

    def lines(self, *paths: str) -> None:
        """Draw lines through points: `AB` is a segment."""
        for path in paths:
            self._canvas.line(*map(_pair, self._places(path)))

    def letters(self, names: str) -> None:
        """Write the names of points beside them, away from the middle of the figure."""
        for name in names:
            self._label(name, self._at[name] + 0.07 * _unit(self._at[name] - self._centre))

    def centre_letter(self, name: str, towards: str) -> None:
        """Write the name of a point in the middle, to the right of the way to another point."""
        self._label(name, self._at[name] + 0.07j * _unit(self._at[towards] - self._at[name]))

    def sides(self, **values: object) -> None:
        """Write each value beside the middle of its segment, away from the middle of the figure."""
        for names, value in values.items():
            start, end = self._places(names)
            middle = (start + end) / 2
            normal = 1j * _unit(end - start)
            outward = ((middle - self._centre) * normal.conjugate()).real
            distance = (0.05 + 0.008 * len(str(value))) * (1 if outward >= 0 else -1)
            self._label(str(value), middle + distance * normal)

    def angles(self, reach: float = 0.15, **texts: str) -> None:
        """Write each text into its angle, `ABC` at B, on its bisector."""
        for path, text in texts.items():
            corner, first_side, second_side = self._directions(path)
            cosine = (first_side * second_side.conjugate()).real
            opening = math.acos(max(-1.0, min(1.0, cosine)))  # rounding may pass 1
            # A narrow angle has room only farther out.
            distance = max(reach, 0.035 / math.sin(opening / 2))
            self._label(text, corner + distance * _unit(first_side + second_side))

    def right_angle(self, path: str) -> None:
        """Draw the small square in the right angle `ABC` at B."""
        corner, first_side, second_side = self._directions(path)
        steps = (first_side, first_side + second_side, second_side)
        self._canvas.line(*(_pair(corner + 0.05 * step) for step in steps))

    def _directions(self, path: str) -> tuple[complex, complex, complex]:
        """Return the corner B of the angle `ABC`, and the directions of its two sides."""
        start, corner, end = self._places(path)
        return corner, _unit(start - corner), _unit(end - corner)

    def picture(self) -> Image.Image:
        """Return the picture as it was drawn so far."""
        return self._canvas.picture()

    def _label(self, text: str, centre: complex) -> None:
        """Write a label, or raise `ClutteredError` where it would touch another one or the edge."""
        (x, y) = _pair(centre)
        half_width = 0.28 * len(text) * self._font
        half_height = 0.5 * self._font
        box = (
            x - half_width,
            y - half_height,
            x + half_width,
            y + half_height,
        )
        left, top, right, bottom = box
        touches = any(
            left < label[2] and label[0] < right and top < label[3] and label[1] < bottom
            for label in self._boxes
        )
        if touches or min(box) < 0 or max(box) > 1:
            raise ClutteredError(text)
        self._boxes.append(box)
        self._canvas.label(text, (x, y))


def _pair(point: complex) -> Point:
    """Return x and y of a point."""
    return point.real, point.imag


def _unit(direction: complex) -> complex:
    """Return the direction with the length 1."""
    return direction / abs(direction)


def _fitted(points: dict[str, Point], turn: float, *, mirrored: bool) -> dict[str, complex]:
    """Turn points about the origin, and scale them without distortion into the unit square.

    Their middle comes into its middle.
    """
    turned = {
        name: complex(-x if mirrored else x, y) * rect(1, turn) for name, (x, y) in points.items()
    }
    xs, ys = zip(*map(_pair, turned.values()), strict=True)
    scale = (_FRAME[1] - _FRAME[0]) / max(max(xs) - min(xs), max(ys) - min(ys))
    middle = complex(max(xs) + min(xs), max(ys) + min(ys)) / 2
    return {name: 0.5 + 0.5j + scale * (point - middle) for name, point in turned.items()}
