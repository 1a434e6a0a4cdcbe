"""From an encoded picture of any kind to an upright RGB image, and from that to PNG bytes."""

from __future__ import annotations

import io
import math

import numpy as np
from PIL import Image, ImageOps


class UnreadableImageError(ValueError):
    """Pillow cannot decode the bytes; the message says why."""


def clean_image(encoded: bytes, max_pixels: int | None = None) -> Image.Image:
    """The picture upright, flattened on white, in mode RGB, and shrunk to at most `max_pixels` pixels (None: never).

    Raises `UnreadableImageError`.
    """
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            image.load()
            flat = _flattened(ImageOps.exif_transpose(image))
    except Exception as error:  # Pillow raises nearly anything here: OSError, SyntaxError, struct.error, ...
        raise UnreadableImageError(str(error) or type(error).__name__) from error
    return flat if max_pixels is None else _shrunk(flat, max_pixels)


def png_bytes(image: Image.Image) -> bytes:
    """The image as PNG without metadata, so that equal pixels are equal bytes."""
    stream = io.BytesIO()
    image.save(stream, "PNG", icc_profile=None)
    return stream.getvalue()


def _flattened(image: Image.Image) -> Image.Image:
    """RGB on white. A transparent diagram is drawn for white paper; Pillow alone would put its lines on black."""
    if image.mode.startswith("I;16"):  # Pillow clips 16 bits at 255 instead of scaling them
        image = Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
    if not image.has_transparency_data:
        return image.convert("RGB")
    drawn = image.convert("RGBA")
    paper = Image.new("RGB", drawn.size, "white")
    paper.paste(drawn, mask=drawn.getchannel("A"))
    return paper


def _shrunk(image: Image.Image, max_pixels: int) -> Image.Image:
    """The image at the largest size of the same shape within `max_pixels`; unchanged where it fits."""
    width, height = image.size
    if width * height <= max_pixels:
        return image
    scale = math.sqrt(max_pixels / (width * height))
    new_width = min(max(1, math.floor(width * scale)), max_pixels)
    new_height = min(max(1, math.floor(height * scale)), max_pixels // new_width)
    return image.resize((new_width, new_height), Image.Resampling.LANCZOS)
