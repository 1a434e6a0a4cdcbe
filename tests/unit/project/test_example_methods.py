"""The methods of docs/examples compute what their papers say."""

import math

import pytest
import torch

from adora_vl.advantage import AdvantagePipeline, Groups, Schedule, group_advantages
from tests.support.examples import load_example
from tests.support.reward_groups import method_advantages, random_groups


def advantages_of(method, rewards, lengths=None):
    """Return what a method by itself makes of these groups."""
    lengths = torch.ones_like(rewards) if lengths is None else lengths
    groups = Groups(rewards, lengths, lengths < 0)
    return method.apply(groups, torch.zeros_like(rewards), AdvantagePipeline({}))


def test_canon_compares_a_rollout_with_one_half_of_its_group():
    canon = load_example("canon.py:Canon")
    rewards = torch.tensor([[1.0, 0.0, 1.0, 1.0]])
    lengths = torch.tensor([[1, 2, 3, 4]])
    # The mean of the short ones is 1/2, that of the long ones 1.
    with_the_other_half = canon(measure="length", inter=Schedule(1.0))
    assert advantages_of(with_the_other_half, rewards, lengths).tolist() == [[0.0, -1.0, 0.5, 0.5]]
    with_its_own_half = canon(measure="length", inter=Schedule(0.0))
    assert advantages_of(with_its_own_half, rewards, lengths).tolist() == [[0.5, -0.5, 0.0, 0.0]]


def test_canon_halves_a_group_also_where_values_are_equal_or_missing():
    upper_half = load_example("canon.py:upper_half")
    tied = torch.tensor([[5.0, 5.0, 9.0, 1.0]])
    assert upper_half(tied).tolist() == [[0.5, 0.5, 1.0, 0.0]]
    missing = torch.tensor([[1.0, 2.0, math.nan]])
    assert upper_half(missing).tolist() == [[0.0, 1.0, 0.0]]


def test_canon_between_both_comparisons_is_stock():
    canon = load_example("canon.py:Canon")
    neutral = canon(inter=Schedule(0.5))
    groups = random_groups()
    stock = group_advantages(groups.rewards_PG, scale="none")
    assert torch.equal(method_advantages("canon", groups, neutral, "none"), stock)
    assert not torch.equal(method_advantages("canon", groups, canon(), "none"), stock)


def test_ngrpo_gives_groups_that_are_wrong_throughout_negative_advantages():
    """The paper's own case: one right of eight gets 2.47 from GRPO, and 1.76 from NGRPO."""
    ngrpo = load_example("ngrpo.py:Ngrpo")
    one_right = torch.tensor([[1.0] + [0.0] * 7])
    stock = group_advantages(one_right)[0]
    assert stock[:2].tolist() == pytest.approx([2.474, -0.354], abs=2e-3)
    ours = advantages_of(ngrpo(), one_right)[0]
    assert ours[:2].tolist() == pytest.approx([1.764, -0.504], abs=1e-3)
    # Wrong throughout: the mean is (0 + 0 + 1) / 3, the deviation sqrt(1 / 3).
    expected = -(1 / 3) / (math.sqrt(1 / 3) + 1e-4)
    all_wrong = torch.zeros(1, 2)
    assert advantages_of(ngrpo(), all_wrong).tolist() == [pytest.approx([expected] * 2)]
    all_right = torch.ones(1, 4)
    assert advantages_of(ngrpo(), all_right).tolist() == [[0.0] * 4]
    groups = random_groups()
    assert torch.equal(
        method_advantages("ngrpo", groups, ngrpo(virtual=0)), method_advantages("grpo", groups)
    )
