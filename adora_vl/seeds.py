"""Random numbers that depend on a place in the run, and not on what was drawn before: a resumed run draws the same."""

from __future__ import annotations

import hashlib

import torch


def rollout_seed(run_seed: int, position: str, group: int, member: int) -> int:
    """A seed below 2^63 from the run's seed, the position in the run (`"train/12/0"`), the number of the group over all
    ranks, and the number of the rollout in its group. The seeds of a group are consecutive, as vLLM numbers the
    rollouts of one request.
    """
    return (number_at(f"{run_seed}/{position}/{group}") >> 2) + member


def generator_at(place: str) -> torch.Generator:
    """A generator on the CPU that is seeded by the words of `place`, which should begin with what is drawn."""
    return torch.Generator().manual_seed(number_at(place) >> 1)


def number_at(place: str) -> int:
    """A number below 2^64, the same in every process, which Python's own `hash` is not."""
    return int.from_bytes(hashlib.sha256(place.encode()).digest()[:8], "big")
