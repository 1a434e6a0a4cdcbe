"""The files of docs/examples do what they say, as a run takes them."""

import math

import pytest
import torch

from adora_vl.advantage import AdvantagePipeline, Groups, Schedule, group_advantages
from tests.support.examples import example
from tests.unit.advantage.methods_support import float64, random_batch, run  # noqa: F401


def made(method, rewards, lengths=None):
    """What a method makes of these groups by itself."""
    lengths = torch.ones_like(rewards) if lengths is None else lengths
    groups = Groups(rewards, lengths, lengths < 0)
    return method.apply(groups, torch.zeros_like(rewards), AdvantagePipeline({}))


def test_canon_compares_a_rollout_with_one_half_of_its_group():
    canon = example("canon.py:Canon")
    rewards = torch.tensor([[1.0, 0.0, 1.0, 1.0]])
    lengths = torch.tensor([[1, 2, 3, 4]])
    # The mean of the short ones is 1/2, that of the long ones 1.
    for inter, expected in ((1.0, [0.0, -1.0, 0.5, 0.5]), (0.0, [0.5, -0.5, 0.0, 0.0])):
        method = canon(measure="length", inter=Schedule(inter))
        assert made(method, rewards, lengths).tolist() == [expected]
    upper_half = example("canon.py:upper_half")
    assert upper_half(torch.tensor([[5.0, 5, 9, 1]])).tolist() == [[0.5, 0.5, 1.0, 0.0]]
    assert upper_half(torch.tensor([[1.0, 2, math.nan]])).tolist() == [[0.0, 1.0, 0.0]]
    neutral = canon(inter=Schedule(0.5))
    groups = random_batch()
    stock = group_advantages(groups.rewards_PG, scale="none")
    assert torch.equal(run("canon", groups, neutral, "none"), stock)
    assert not torch.equal(run("canon", groups, canon(), "none"), stock)


def test_ngrpo_gives_groups_that_are_wrong_throughout_negative_advantages():
    """The paper's own case: one right of eight gets 2.47 from GRPO, and 1.76 from NGRPO."""
    ngrpo = example("ngrpo.py:Ngrpo")
    rewards = torch.tensor([[1.0] + [0.0] * 7])
    assert group_advantages(rewards)[0, :2].tolist() == pytest.approx([2.474, -0.354], abs=2e-3)
    assert made(ngrpo(), rewards)[0, :2].tolist() == pytest.approx([1.764, -0.504], abs=1e-3)
    # Wrong throughout: the mean is (0 + 0 + 1) / 3, the deviation sqrt(1 / 3).
    wrong = -(1 / 3) / (math.sqrt(1 / 3) + 1e-4)
    assert made(ngrpo(), torch.zeros(1, 2)).tolist() == [pytest.approx([wrong] * 2)]
    assert made(ngrpo(), torch.ones(1, 4)).tolist() == [[0.0] * 4]
    groups = random_batch()
    assert torch.equal(run("ngrpo", groups, ngrpo(virtual=0)), run("grpo", groups))
