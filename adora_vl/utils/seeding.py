"""Random numbers that depend on where a run stands, and on nothing that was drawn before."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def rollout_seed(run_seed: int, draw_name: str, group: int, rollout_index: int) -> int:
    """Return the seed with which a rollout is sampled, below 2^63.

    Args:
        run_seed: the seed of the run.
        draw_name: names the draw by where in the run the rollout is sampled, such as `train/12/0`.
        group: the number of its group over all ranks.
        rollout_index: its number in the group. Seeds are consecutive in a group, as vLLM gives
            them to the rollouts of one request.
    """
    # 62 bits, so that adding the index stays below 2^63
    first_seed = hash_to_int(f"{run_seed}/{draw_name}/{group}") >> 2
    return first_seed + rollout_index


def generator_for_key(key: str) -> torch.Generator:
    """Return a random generator on the CPU that is seeded with a hash of the text `key`.

    `key`: such as `row order/SEED/EPOCH`. It begins with the name of what is drawn, so that no two
    purposes share a seed.
    """
    # 63 bits: a larger seed would not fit into torch's signed 64 bits.
    return torch.Generator().manual_seed(hash_to_int(key) >> 1)


def hash_to_int(key: str) -> int:
    """Return a hash of a text as a whole number below 2^64.

    Unlike Python's own `hash`, it is the same in every process.
    """
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")


@contextmanager
def seeded_by_key(key: str) -> Iterator[None]:
    """Seed torch with a hash of the text `key` inside the block.

    The random states of the CPU and of this process's GPU are restored after the block.
    """
    seed = hash_to_int(key) >> 1  # 63 bits, as in `generator_for_key`
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        yield


@contextmanager
def keeping_random_state() -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch after the block.

    So random numbers that are drawn inside the block change nothing that is drawn after it.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    # torch restores the state of the CPU, and of the GPUs that are named
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
