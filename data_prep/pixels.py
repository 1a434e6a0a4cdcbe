"""How large Qwen2.5-VL's own processor makes a picture: its rule, taken from Transformers, and what follows from it."""

from __future__ import annotations

import sys
from functools import lru_cache

UNIT = 28  # pixels: one image token is 28 x 28 (14 of a patch, merged 2 x 2)
MODEL_MIN_PIXELS, MODEL_MAX_PIXELS = 56 * 56, 16384 * UNIT**2  # of Qwen2.5-VL's published preprocessor_config.json
MAX_PIXELS = 2**31  # of a limit; any image that can be decoded has fewer
WIDEST = 200  # above this ratio of the sides the model's processor raises, in the middle of a training


@lru_cache(maxsize=4096)
def model_size(
    width: int, height: int, min_pixels: int = MODEL_MIN_PIXELS, max_pixels: int = MODEL_MAX_PIXELS
) -> tuple[int, int]:
    """Width and height, multiples of 28, that the processor with these limits resizes to. Raises `ValueError`."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize  # seconds, so only where needed

    new_height, new_width = smart_resize(height, width, UNIT, min_pixels, max_pixels)
    return int(new_width), int(new_height)


def image_tokens(width: int, height: int) -> int:
    """Tokens of a picture in Qwen2.5-VL's prompt with the model's own limits. Raises `ValueError`."""
    new_width, new_height = model_size(width, height)
    return new_width // UNIT * (new_height // UNIT)


def size_within(width: int, height: int, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
    """The size to store: unchanged where the processor with these limits would only round it to multiples of 28.

    Outside of the limits it is the size that the processor would choose, so it has nothing left to do. Raises
    `ValueError` where the rule has no size within the limits: a side is never under 28 pixels.
    """
    rounded = round(width / UNIT) * round(height / UNIT) * UNIT**2
    if not (min_pixels or 0) <= rounded <= (max_pixels or sys.maxsize):
        low, high = min_pixels or UNIT**2, max_pixels or sys.maxsize
        new_width, new_height = model_size(width, height, low, high)
        if not low <= new_width * new_height <= high:
            raise ValueError(f"no size of its shape is within {low} to {high} pixels")
        return new_width, new_height
    return width, height
