"""How large a model's own processor makes a picture: its rule, taken from Transformers, and what follows from it.

The rule is the same in every family of `adora_vl.families` that sees; the side of an image token is not.
"""

from __future__ import annotations

import sys
from functools import lru_cache

from adora_vl.families import Vision, seeing_families

VISIONS = seeing_families()
DEFAULT_FAMILY = "qwen2_5_vl"
UNIT = min(vision.unit for vision in VISIONS.values())  # pixels: the side of the smallest image token there is
MAX_PIXELS = 2**31  # of a limit; any image that can be decoded has fewer
WIDEST = 200  # above this ratio of the sides the model's processor raises, in the middle of a training


@lru_cache(maxsize=4096)
def model_size(width: int, height: int, unit: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Width and height, multiples of `unit`, that a processor with these limits resizes to. Raises `ValueError`."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize  # seconds, so only where needed

    new_height, new_width = smart_resize(height, width, unit, min_pixels, max_pixels)
    return int(new_width), int(new_height)


def image_tokens(width: int, height: int, vision: Vision = VISIONS[DEFAULT_FAMILY]) -> int:
    """Tokens of a picture in the prompt of a model with its published limits. Raises `ValueError`."""
    unit = vision.unit
    new_width, new_height = model_size(width, height, unit, vision.min_pixels, vision.max_pixels)
    return new_width // unit * (new_height // unit)


def size_within(
    width: int, height: int, min_pixels: int | None, max_pixels: int | None, unit: int = VISIONS[DEFAULT_FAMILY].unit
) -> tuple[int, int]:
    """The size to store: unchanged where a processor with these limits would only round it to multiples of `unit`.

    Outside of the limits it is the size that the processor would choose, so it has nothing left to do. Raises
    `ValueError` where the rule has no size within the limits: a side is never under `unit` pixels.
    """
    rounded = round(width / unit) * round(height / unit) * unit**2
    if not (min_pixels or 0) <= rounded <= (max_pixels or sys.maxsize):
        low, high = min_pixels or unit**2, max_pixels or sys.maxsize
        new_width, new_height = model_size(width, height, unit, low, high)
        if not low <= new_width * new_height <= high:
            raise ValueError(f"no size of its shape is within {low} to {high} pixels")
        return new_width, new_height
    return width, height
