"""What the engine is built with, beyond what TRL passes to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from adora_vl.models.load import pixel_limits as limits_of


@dataclass(frozen=True)
class EngineSettings:
    """Settings of the engine that TRL has no field for."""

    dtype: str | None = None  # None: the policy's own
    revision: str | None = None  # TRL loads the policy at a revision, but the engine always at the newest
    enforce_eager: bool | None = None  # without torch.compile and CUDA graphs; None: on a CPU
    max_num_batched_tokens: int = 4096
    keeps_images: bool = True  # vLLM's own store of processed images


def pixel_limits(processing_class: Any) -> dict[str, int] | None:
    """`min_pixels` and `max_pixels` of a processor, None for a tokenizer and for other ways of sizing an image.

    vLLM reads the limits of the model folder; sending it the trainer's own makes the two prompts agree.
    """
    return limits_of(getattr(processing_class, "image_processor", None))
