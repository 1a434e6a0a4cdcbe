"""The canvas of drawn problems: lines, circles, dots and labels, in a style."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from PIL import Image, ImageDraw, ImageFont

Point = tuple[float, float]


@dataclass(frozen=True)
class Style:
    """Colours of lines, text and paper, and the width of a line as a multiple of the plain one."""

    ink: str = "black"
    text: str = "black"
    paper: str = "white"
    stroke: float = 1.0


PLAIN_STYLE = Style()
STYLES = {
    "plain": PLAIN_STYLE,
    "bold": Style(stroke=2.0),
    "textbook": Style(ink="#0b63a5", stroke=1.4),
    "pencil": Style(ink="#6e6e6e", text="#3c3c3c", paper="#f7f4ec"),
    "board": Style(ink="#f2f2f2", text="#ffffff", paper="#24523b", stroke=1.3),
}


class Box(NamedTuple):
    """The rectangle that a label takes, in shares of the picture, with y downwards."""

    min_x: float
    min_y: float
    max_x: float
    max_y: float

    @classmethod
    def around(cls, centre: complex, half_width: float, half_height: float) -> Box:
        """Return the rectangle of this size around a point."""
        return cls(
            min_x=centre.real - half_width,
            min_y=centre.imag - half_height,
            max_x=centre.real + half_width,
            max_y=centre.imag + half_height,
        )

    def contains(self, point: complex) -> bool:
        """Return whether a point lies inside the rectangle."""
        return self.min_x < point.real < self.max_x and self.min_y < point.imag < self.max_y

    def overlaps(self, box: Box) -> bool:
        """Return whether the two rectangles have a point inside both."""
        overlap_in_x = self.min_x < box.max_x and box.min_x < self.max_x
        overlap_in_y = self.min_y < box.max_y and box.min_y < self.max_y
        return overlap_in_x and overlap_in_y


# How many times larger a picture is drawn. Pillow draws jagged lines, which become smooth when the
# picture is made smaller.
OVERSAMPLING = 2


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
        self, size: int, style: Style = PLAIN_STYLE, font_scale: float = 1.0, font: Any = None
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
        self._line_width = max(1, round(OVERSAMPLING * style.stroke * max(1.0, size / 160)))

    def _scaled(self, points: list[Point]) -> list[Point]:
        """Return points in pixels of the large picture."""
        return [(x * self._pixels, y * self._pixels) for x, y in points]

    def line(self, *points: Point, closed: bool = False) -> None:
        """Draw a line through points, which is `closed` where it comes back to the first one."""
        path = self._scaled([*points, points[0]] if closed else list(points))
        self._draw.line(path, fill=self._style.ink, width=self._line_width, joint="curve")

    def circle(self, centre: Point, radius: float) -> None:
        """Draw a circle."""
        x, y = self._scaled([centre])[0]
        r = radius * self._pixels
        box = (x - r, y - r, x + r, y + r)
        self._draw.ellipse(box, outline=self._style.ink, width=self._line_width)

    def dot(self, centre: Point) -> None:
        """Draw a dot."""
        x, y = self._scaled([centre])[0]
        r = 2.0 * self._line_width
        self._draw.ellipse((x - r, y - r, x + r, y + r), fill=self._style.ink)

    def label(self, text: str, centre: Point) -> None:
        """Write a text with an outline of paper, so that a line behind it does not hide a digit."""
        self._draw.text(
            self._scaled([centre])[0],
            text,
            fill=self._style.text,
            font=self._font,
            anchor="mm",  # the text's middle is at `centre`
            stroke_width=self._line_width,
            stroke_fill=self._style.paper,
        )

    def picture(self) -> Image.Image:
        """Return the picture in its final size."""
        return self._image.resize((self.size, self.size), Image.Resampling.BOX)
