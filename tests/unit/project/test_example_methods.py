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
    """The mean reward of the short half is 1/2, and that of the long half 1."""
    canon_class = load_example("canon.py:Canon")
    rewards = torch.tensor([[1.0, 0.0, 1.0, 1.0]])
    lengths = torch.tensor([[1, 2, 3, 4]])
    with_the_other_half = canon_class(measure="length", inter=Schedule(start=1.0))
    assert advantages_of(with_the_other_half, rewards, lengths).tolist() == [[0.0, -1.0, 0.5, 0.5]]
    with_its_own_half = canon_class(measure="length", inter=Schedule(start=0.0))
    assert advantages_of(with_its_own_half, rewards, lengths).tolist() == [[0.5, -0.5, 0.0, 0.0]]


def test_canon_halves_a_group_also_where_values_are_equal_or_missing():
    """Equal values count as half in each half, and a missing one is in none."""
    upper_half = load_example("canon.py:upper_half")
    tied_values = torch.tensor([[5.0, 5.0, 9.0, 1.0]])
    assert upper_half(tied_values).tolist() == [[0.5, 0.5, 1.0, 0.0]]
    values_with_nan = torch.tensor([[1.0, 2.0, math.nan]])
    assert upper_half(values_with_nan).tolist() == [[0.0, 1.0, 0.0]]


def test_canon_between_both_comparisons_is_stock():
    """With a weight of 0.5, half for each comparison, the advantages are those of GRPO."""
    canon_class = load_example("canon.py:Canon")
    neutral_canon = canon_class(inter=Schedule(start=0.5))
    groups = random_groups()
    stock_advantages = group_advantages(groups.rewards_PG, scale="none")
    assert torch.equal(
        method_advantages("canon", groups, neutral_canon, scale="none"), stock_advantages
    )
    assert not torch.equal(
        method_advantages("canon", groups, canon_class(), scale="none"), stock_advantages
    )


def test_ngrpo_gives_groups_that_are_wrong_throughout_negative_advantages():
    """The paper's own case: one right of eight gets 2.47 from GRPO, and 1.76 from NGRPO."""
    ngrpo_class = load_example("ngrpo.py:Ngrpo")
    one_right = torch.tensor([[1.0] + [0.0] * 7])
    stock_advantages = group_advantages(one_right)[0]
    assert stock_advantages[:2].tolist() == pytest.approx([2.474, -0.354], abs=2e-3)
    ngrpo_advantages = advantages_of(ngrpo_class(), one_right)[0]
    assert ngrpo_advantages[:2].tolist() == pytest.approx([1.764, -0.504], abs=1e-3)
    # Wrong throughout: the mean is (0 + 0 + 1) / 3, the deviation sqrt(1 / 3).
    expected = -(1 / 3) / (math.sqrt(1 / 3) + 1e-4)
    all_wrong = torch.zeros(1, 2)
    assert advantages_of(ngrpo_class(), all_wrong).tolist() == [pytest.approx([expected] * 2)]
    all_right = torch.ones(1, 4)
    assert advantages_of(ngrpo_class(), all_right).tolist() == [[0.0] * 4]
    groups = random_groups()
    assert torch.equal(
        method_advantages("ngrpo", groups, ngrpo_class(virtual=0)),
        method_advantages("grpo", groups),
    )
