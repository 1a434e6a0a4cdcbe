"""Pictures to train and to prepare: noise, half a page, a figure of lines."""

import io
from typing import Any

import numpy as np
from PIL import Image, ImageDraw


def noise_picture(seed: int, size: tuple[int, int] = (70, 45), mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def half_black_picture(size: tuple[int, int] = (30, 20)) -> Image.Image:
    """Transparent, with a black left half: on white paper its right half is white."""
    image = Image.new("RGBA", size, (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, size[0] // 2, size[1]))
    return image


def drawing(seed: int, size: int = 200) -> Image.Image:
    """A figure of straight lines, another one for each seed."""
    image = Image.new("RGB", (size, size), "white")
    points = np.random.default_rng(seed).uniform(0.05 * size, 0.95 * size, (6, 2))
    ImageDraw.Draw(image).line(
        [tuple(point) for point in points], fill="black", width=max(1, size // 60)
    )
    return image


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()
