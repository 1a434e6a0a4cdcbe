"""What the engine is built with, beyond what TRL passes to it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineSettings:
    """Settings of the engine that TRL has no field for."""

    dtype: str | None = None  # None: the policy's own
    revision: str | None = None  # TRL loads the policy at a revision, but the engine always at the newest
    enforce_eager: bool | None = None  # without torch.compile and CUDA graphs; None: on a CPU
    max_num_batched_tokens: int = 4096
    keeps_images: bool = True  # vLLM's own store of processed images
