"""Pictures to train and to prepare: noise, half a page, a figure of lines."""

import io
from typing import Any

import numpy as np
from PIL import Image, ImageDraw


def noise_picture(seed: int, size: tuple[int, int] = (70, 45), mode: str = "RGB") -> Image.Image:
    """Return random pixels, others for each seed. `size`: width and height."""
    width, height = size
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def half_black_picture(size: tuple[int, int] = (30, 20)) -> Image.Image:
    """Return a transparent picture with a black left half: on white paper the right is white."""
    width, height = size
    nothing = (0, 0, 0, 0)
    black = (0, 0, 0, 255)
    left_half = (0, 0, width // 2, height)
    image = Image.new("RGBA", size, nothing)
    image.paste(black, left_half)
    return image


def draw_figure(seed: int, size: int = 200) -> Image.Image:
    """Return a figure of five straight lines, another one for each seed.

    `size`: both sides in pixels.
    """
    image = Image.new("RGB", (size, size), "white")
    random = np.random.default_rng(seed)
    lowest = 0.05 * size  # a margin, so that no line is cut
    highest = 0.95 * size
    corners = [tuple(point) for point in random.uniform(lowest, highest, (6, 2))]
    line_width = max(1, size // 60)
    ImageDraw.Draw(image).line(corners, fill="black", width=line_width)
    return image


def encode_picture(image: Image.Image, image_format: str = "PNG", **options: Any) -> bytes:
    """Return the picture as a file. `options`: of Pillow's writer."""
    stream = io.BytesIO()
    image.save(stream, image_format, **options)
    return stream.getvalue()
