"""A seed for every rollout, from what the rollout is and not from what was sampled before it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any


def rollout_seed(run_seed: int, position: str, row: int) -> int:
    """63 bits from the run's seed, the position in the run (`"train/12/0"`) and the row over all ranks."""
    digest = hashlib.sha256(f"{run_seed}/{position}/{row}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seeded(generate: Callable[..., Any], seeds: Sequence[int]) -> Callable[..., Any]:
    """`LLM.generate` with one copy of the sampling parameters a prompt, each with its own seed."""

    def generate_with_seeds(prompts: Sequence[Any], sampling_params: Any, **kwargs: Any) -> Any:
        assert len(prompts) == len(seeds), f"{len(prompts)} prompts and {len(seeds)} seeds"
        each = [sampling_params.clone() for _ in prompts]
        for parameters, seed in zip(each, seeds, strict=True):
            parameters.seed = seed
        return generate(prompts, sampling_params=each, **kwargs)

    return generate_with_seeds
