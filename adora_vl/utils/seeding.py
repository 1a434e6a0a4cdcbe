"""Random numbers that depend on where a run stands, and on nothing that was drawn before."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def rollout_seed(run_seed: int, position: str, group: int, member: int) -> int:
    """Return the seed of a rollout, below 2^63.

    It is of the run's seed, the position in the run (`"train/12/0"`), the number of the group over
    all ranks, and that of the rollout in its group. Seeds are consecutive in a group, as vLLM
    numbers the rollouts of a request.
    """
    return (number_at(f"{run_seed}/{position}/{group}") >> 2) + member


def generator_at(key: str) -> torch.Generator:
    """Return a generator on the CPU, seeded by the text `key`.

    `key` should begin with the name of what is drawn.
    """
    return torch.Generator().manual_seed(number_at(key) >> 1)


def number_at(key: str) -> int:
    """Return a hash of the text, below 2^64.

    Unlike Python's own `hash`, it is the same in every process.
    """
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")


@contextmanager
def drawn_at(key: str) -> Iterator[None]:
    """Make what torch draws inside the block depend on the text `key` alone.

    The random states of the CPU and of this process's GPU are restored after the block.
    """
    seed = number_at(key) >> 1
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        yield


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch after the block, so that its draws
    change nothing else.
    """
    python = random.getstate()
    numpy = np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
