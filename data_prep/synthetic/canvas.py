"""Drawing in the unit square at any resolution; (0, 0) is the top left corner."""

from __future__ import annotations

from dataclasses import dataclass

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
    """Height of a label in a picture of `size` pixels: two digits fill half of 56 pixels, a tenth of 448."""
    return max(0.075 * size, min(24.0, 0.43 * size))


class Canvas:
    """A square picture of `size` x `size` pixels; `font_scale` makes its labels smaller or larger."""

    def __init__(self, size: int, style: Style = PLAIN, font_scale: float = 1.0) -> None:
        self.size = size
        self._pixels = size * OVERSAMPLING
        self._image = Image.new("RGB", (self._pixels, self._pixels), style.paper)
        self._style = style
        self._draw = ImageDraw.Draw(self._image)
        self._font = ImageFont.load_default(size=font_pixels(size) * OVERSAMPLING * font_scale)
        self._stroke = max(1, round(OVERSAMPLING * style.stroke * max(1.0, size / 160)))

    def _scaled(self, points: list[Point]) -> list[Point]:
        return [(x * self._pixels, y * self._pixels) for x, y in points]

    def line(self, *points: Point, closed: bool = False) -> None:
        path = self._scaled([*points, points[0]] if closed else list(points))
        self._draw.line(path, fill=self._style.ink, width=self._stroke, joint="curve")

    def circle(self, centre: Point, radius: float) -> None:
        (x, y), r = self._scaled([centre])[0], radius * self._pixels
        self._draw.ellipse((x - r, y - r, x + r, y + r), outline=self._style.ink, width=self._stroke)

    def dot(self, centre: Point) -> None:
        (x, y), r = self._scaled([centre])[0], 2.0 * self._stroke
        self._draw.ellipse((x - r, y - r, x + r, y + r), fill=self._style.ink)

    def label(self, text: str, centre: Point) -> None:
        """Text with an outline of paper, so that a line behind it does not hide a digit."""
        self._draw.text(
            self._scaled([centre])[0],
            text,
            fill=self._style.text,
            font=self._font,
            anchor="mm",
            stroke_width=self._stroke,
            stroke_fill=self._style.paper,
        )

    def picture(self) -> Image.Image:
        return self._image.resize((self.size, self.size), Image.Resampling.BOX)
