"""Lettered figures: points that are turned and fitted into a picture, with letters and labels."""

import math
import random
from cmath import rect

from PIL import Image

from adora_vl.synthetic.drawing import Box, Canvas, Point, Style, font_pixels

LETTERED_FONT_SCALE = 0.62  # of the plain families' labels: a lettered figure has many
_SQUARE_SIDE = 0.05  # of the mark of a right angle, as a share of the picture
_POINT_RANGE = (0.15, 0.85)  # where x and y of the points may lie; letters stand outside of it


class ClutteredError(Exception):
    """Two labels would overlap, so the problem has to be drawn again in another position."""


class Sketch:
    """A picture of named points, which are turned, perhaps mirrored, and scaled into the picture.

    Points are complex numbers inside: fractions of the picture's sides, with y downwards. A path
    such as `AB` is a segment, and `ABCA` a closed triangle.
    """

    def __init__(
        self, rng: random.Random, size: int, style: Style, points: dict[str, Point]
    ) -> None:
        """Turn the points by a random angle, and scale them into the picture.

        `size`: side of the picture in pixels. `points`: x and y of each point by its name, in any
        unit.
        """
        self._canvas = Canvas(size, style, LETTERED_FONT_SCALE)
        self._position_by_name = _fit_into_picture(
            points, rng.uniform(0, 2 * math.pi), mirrored=rng.random() < 0.5
        )
        xs, ys = zip(*map(_x_and_y, self._position_by_name.values()), strict=True)
        self._centre = complex(sum(xs), sum(ys)) / len(xs)
        self._label_height = LETTERED_FONT_SCALE * font_pixels(size) / size
        self._label_boxes: list[Box] = []  # of the labels so far

    def position_sentences(self) -> list[str]:
        """Return a sentence such as `A at 12.0, 30.5` for each point, with its x and y in pixels.

        From them the solver of `adora_vl.geometry` knows which of two possible figures is drawn.
        Points whose names have several characters are not drawn, and are left out.
        """
        size = self._canvas.size
        return [
            f"{name} at {size * point.real:.1f}, {size * point.imag:.1f}"
            for name, point in self._position_by_name.items()
            if len(name) == 1
        ]

    def _positions(self, names: str) -> list[complex]:
        """Return the positions of points by their letters, such as `AB`."""
        return [self._position_by_name[name] for name in names]

    def line(self, path: str) -> None:
        """Draw a line through points."""
        self._canvas.line(*map(_x_and_y, self._positions(path)))

    def circle(self, centre: str, point_on_circle: str) -> None:
        """Draw a circle through a point, with a dot at its centre."""
        middle, point = self._positions(centre + point_on_circle)
        self._canvas.circle(_x_and_y(middle), radius=abs(middle - point))
        self._canvas.dot(_x_and_y(middle))

    def letters(self, names: str) -> None:
        """Write the names of points beside them, away from the middle of the figure."""
        for name in names:
            outward = _unit_vector(self._position_by_name[name] - self._centre)
            self._label(name, self._position_by_name[name] + 0.07 * outward)

    def centre_letter(self, name: str, towards: str) -> None:
        """Write the name of a circle's centre, to the right of the line to the point `towards`."""
        direction = _unit_vector(self._position_by_name[towards] - self._position_by_name[name])
        to_the_right = 1j * direction  # a quarter turn, since y points down
        self._label(name, self._position_by_name[name] + 0.07 * to_the_right)

    def side(self, path: str, text: str) -> None:
        """Write a text beside the middle of a segment, away from the middle of the figure."""
        start, end = self._positions(path)
        middle = (start + end) / 2
        normal = 1j * _unit_vector(end - start)  # at a right angle to the segment
        # The real part of a * conj(b) is the scalar product of two vectors.
        normal_points_inward = ((middle - self._centre) * normal.conjugate()).real < 0
        outward = -normal if normal_points_inward else normal
        distance = 0.05 + 0.008 * len(text)  # a longer text needs more room
        self._label(text, middle + distance * outward)

    def angle(self, path: str, text: str, min_distance: float) -> None:
        """Write a text into the angle `ABC` at B, on its bisector.

        `min_distance`: the least distance from the corner, as a fraction of the picture's side.
        """
        corner, first_side, second_side = self._directions(path)
        cosine = (first_side * second_side.conjugate()).real
        opening = math.acos(max(-1.0, min(1.0, cosine)))  # rounding may pass 1
        # A narrow angle has room only farther out.
        distance = max(min_distance, 0.035 / math.sin(opening / 2))
        self._label(text, corner + distance * _unit_vector(first_side + second_side))

    def right_angle(self, path: str) -> None:
        """Draw the small square in the right angle `ABC` at B."""
        corner, first_side, second_side = self._directions(path)
        # The three other corners of the square, seen from the corner of the angle.
        offsets = (first_side, first_side + second_side, second_side)
        self._canvas.line(*(_x_and_y(corner + _SQUARE_SIDE * offset) for offset in offsets))

    def _directions(self, path: str) -> tuple[complex, complex, complex]:
        """Return the corner B of the angle `ABC`, and the directions of its two sides."""
        start, corner, end = self._positions(path)
        return corner, _unit_vector(start - corner), _unit_vector(end - corner)

    def picture(self) -> Image.Image:
        """Return the picture as it was drawn so far."""
        return self._canvas.picture()

    def _label(self, text: str, centre: complex) -> None:
        """Write a label, or raise `ClutteredError` where it would overlap another or the edge."""
        half_width = 0.28 * len(text) * self._label_height
        half_height = 0.5 * self._label_height
        box = Box.around(centre, half_width, half_height)
        overlaps_label = any(box.overlaps(other_box) for other_box in self._label_boxes)
        is_outside = min(box) < 0 or max(box) > 1
        if overlaps_label or is_outside:
            raise ClutteredError(text)
        self._label_boxes.append(box)
        self._canvas.label(text, _x_and_y(centre))


def _x_and_y(point: complex) -> Point:
    """Return x and y of a point."""
    return point.real, point.imag


def _unit_vector(direction: complex) -> complex:
    """Return the direction with the length 1."""
    return direction / abs(direction)


def _fit_into_picture(
    points: dict[str, Point], turn: float, *, mirrored: bool
) -> dict[str, complex]:
    """Turn points about the origin by `turn` radians, and scale them evenly into the unit square.

    The middle of the points comes to 0.5 + 0.5j, and the longer side of their bounding box gets the
    length 0.7. Without a turn, A (0, 0), B (2, 0) and C (0, 1) come to 0.15 + 0.325j, 0.85 + 0.325j
    and 0.15 + 0.675j.
    """
    turned = {
        name: complex(-x if mirrored else x, y) * rect(1, turn) for name, (x, y) in points.items()
    }
    xs, ys = zip(*map(_x_and_y, turned.values()), strict=True)
    scale = (_POINT_RANGE[1] - _POINT_RANGE[0]) / max(max(xs) - min(xs), max(ys) - min(ys))
    middle = complex(max(xs) + min(xs), max(ys) + min(ys)) / 2
    return {name: 0.5 + 0.5j + scale * (point - middle) for name, point in turned.items()}
