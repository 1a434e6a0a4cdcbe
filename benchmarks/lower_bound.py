"""The least that a policy step can take: the matrix products that must happen, at the speed of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

TRAINED = 3  # a forward product, and two of its size in the backward pass


def products(config: Any, prompts: Sequence[int], answers: Sequence[Sequence[int]], patches: int) -> dict[str, float]:
    """Floating-point operations of a Qwen2.5-VL's policy step by part, with nothing computed twice.

    `prompts`: tokens of each group's prompt. `answers`: of each of its rollouts. `patches`: of all distinct images.
    A multiplication and its addition count as two.
    """
    text, vision = config.get_text_config(), config.vision_config
    width, head = text.hidden_size, text.hidden_size // text.num_attention_heads
    layer = 2 * width * width + 2 * width * text.num_key_value_heads * head + 3 * width * text.intermediate_size
    scored = sum(map(sum, answers))
    tokens = sum(prompts) + scored - sum(map(len, answers))
    pairs = sum(prompt * prompt / 2 for prompt in prompts)
    for prompt, group in zip(prompts, answers, strict=True):
        pairs += sum(prompt * length + length * length / 2 for length in group)
    block = 4 * vision.hidden_size**2 + 3 * vision.hidden_size * vision.intermediate_size
    return {
        "layers": 2.0 * TRAINED * layer * tokens * text.num_hidden_layers,
        "attention": 4.0 * TRAINED * width * pairs * text.num_hidden_layers,
        "head": 2.0 * TRAINED * width * text.vocab_size * scored,
        "vision": 2.0 * TRAINED * block * patches * vision.depth,
    }


def speed(dtype: torch.dtype, clock: Callable[[], float], size: int = 2048) -> float:
    """Operations per second of a square matrix product: the best of five."""
    one, other = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    took = []
    for _ in range(6):
        start = clock()
        one @ other
        took.append(clock() - start)
    return float(2 * size**3 / min(took[1:]))


def clocks() -> dict[str, Callable[[], float]]:
    return {"wall": time.perf_counter, "processor": time.process_time}
