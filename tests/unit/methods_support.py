"""Small batches for the tests of the methods."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from adora_vl.advantage import METHODS, Groups, MethodRun, group_advantages


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """New tensors are float64, so that no bound of rounding depends on the processor."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def batch(rewards, lengths=None, surprisal=None, **facts) -> Groups:
    rewards = torch.tensor(rewards)
    lengths = torch.tensor(lengths) if lengths is not None else torch.full(rewards.shape, 10)
    surprisal = torch.tensor(surprisal) if surprisal is not None else lengths / 10
    return Groups(rewards, lengths, lengths >= 100, surprisal_PG=surprisal, **facts)


def run(name, groups, options=None, scale="group"):
    """A method as the trainer applies it, on GRPO's advantages."""
    method = MethodRun({name: METHODS[name].options() if options is None else options}, scale=scale)
    return method(groups, group_advantages(groups.rewards_PG, scale=scale))
