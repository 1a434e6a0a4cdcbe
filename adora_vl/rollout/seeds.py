"""The seed of each rollout, which does not depend on what was sampled before."""

from __future__ import annotations

import hashlib


def rollout_seed(run_seed: int, position: str, group: int, member: int) -> int:
    """A seed below 2^63 from the run's seed, the position in the run (`"train/12/0"`), the number of the group over all
    ranks, and the number of the rollout in its group. The seeds of a group are consecutive, as vLLM numbers the
    rollouts of one request.
    """
    digest = hashlib.sha256(f"{run_seed}/{position}/{group}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 2) + member
