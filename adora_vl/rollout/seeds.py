"""A seed for every rollout, from what the rollout is and not from what was sampled before it."""

from __future__ import annotations

import hashlib


def rollout_seed(run_seed: int, position: str, group: int, member: int) -> int:
    """Below 2^63, from the run's seed, the position in the run (`"train/12/0"`), the group over all ranks, and which of
    the group's rollouts it is: they count up, as vLLM does for the rollouts of one request.
    """
    digest = hashlib.sha256(f"{run_seed}/{position}/{group}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 2) + member
