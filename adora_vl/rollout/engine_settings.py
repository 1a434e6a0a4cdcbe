"""What the engine is built with, beyond what TRL passes to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EngineSettings:
    """Settings of the engine that TRL has no field for."""

    dtype: str | None = None  # None: the policy's own
    revision: str | None = None  # TRL loads the policy at a revision, but the engine always at the newest
    max_num_batched_tokens: int = 4096
    keeps_images: bool = True  # vLLM's own store of processed images


def pixel_limits(processing_class: Any) -> dict[str, int] | None:
    """`min_pixels` and `max_pixels` of a processor, None for a tokenizer.

    vLLM reads the limits in the model's folder. It is sent the trainer's own, so that both make the same image tokens.
    """
    image_processor = getattr(processing_class, "image_processor", None)
    if image_processor is None:
        return None
    size = dict(image_processor.size)
    return {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
