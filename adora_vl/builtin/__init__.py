"""What `tiny`, `tiny_perimeter`, `tiny_text`, `tiny_zoom`, `synthetic` and `knights` stand for, and
how the tiny models are made.
"""

from dataclasses import dataclass

DEFAULT_FAMILY = "qwen2_5_vl"
TINY_FAMILIES = (DEFAULT_FAMILY, "qwen3_vl", "qwen3_5")


@dataclass(frozen=True)
class WarmStart:
    """Steps of `batch_size` examples.

    The vision tower learns several times faster if the first prompts are short.
    """

    steps: int = 1800
    short_prompt_steps: int = 800
    batch_size: int = 64
    learning_rate: float = 1.5e-3
    rows: int = 8000
    seed: int = 1
