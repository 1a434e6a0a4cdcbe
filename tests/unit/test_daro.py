"""DARO: its bins, its loss through TRL's own, and weights that balance the bins and survive a checkpoint."""

from __future__ import annotations

import json

import pytest
import torch

from adora_vl.advantage import Groups, MethodRun, group_advantages
from adora_vl.advantage.daro import OUTSIDE, DaroWeights, bin_losses, bins_of, daro
from adora_vl.advantage.options import DaroOptions
from tests.unit.methods_support import float64  # noqa: F401


def test_bins_are_the_pass_rates_that_carry_a_gradient():
    assert bins_of(torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]), 4).tolist() == [OUTSIDE, 0, 1, 2, OUTSIDE]
    # one of three scored is right: between 1/4 and 2/4, nearer the former
    assert bins_of(torch.tensor([1 / 3]), 4).tolist() == [0]


def test_bin_losses_by_hand():
    advantages = torch.tensor([[1.5, -0.5, -0.5, -0.5], [1.0, 1.0, -1.0, -1.0], [0.0, 0.0, 0.0, 0.0]])
    tokens = torch.tensor([[10, 10, 10, 10], [1, 1, 3, 3], [9, 9, 9, 9]])
    bins = torch.tensor([0, 1, OUTSIDE])
    assert bin_losses(advantages, tokens, bins, 3, "magnitude").tolist() == [30 / 40, 8 / 8, 0.0]
    assert bin_losses(advantages, tokens, bins, 3, "surrogate").tolist() == [0.0, 4 / 8, 0.0]


@pytest.mark.parametrize("losses", [[0.2, 0.9, 0.5], [3.0, 0.05, 1.0]], ids=str)
def test_with_fixed_losses_the_weights_converge_to_their_inverse(losses):
    weights = DaroWeights(3, learning_rate=0.05)
    for _ in range(400):
        weights.update(torch.tensor(losses), torch.tensor([True, True, True]))
    assert weights.weights_M.tolist() == pytest.approx([1 / loss for loss in losses], rel=1e-3)
    contributions = weights.weights_M * torch.tensor(losses)
    assert contributions.tolist() == pytest.approx([1.0] * 3, rel=1e-3)  # no difficulty dominates


def test_with_rewards_of_0_and_1_the_weights_converge_to_a_function_of_the_pass_rate():
    """`docs/algorithm.md` says so: nothing else is learned from them where all answers are equally long."""
    right = torch.tensor([1, 2, 4])
    rewards_PG = (torch.arange(8)[None, :] < right[:, None]).to(torch.float64)
    bins_P = bins_of(right / 8, 8)
    losses_M = bin_losses(group_advantages(rewards_PG), torch.full((3, 8), 30.0), bins_P, 7, "magnitude")
    weights = DaroWeights(7, learning_rate=0.05)
    present_M = torch.isin(torch.arange(7), bins_P)
    for _ in range(2000):
        weights.update(losses_M, present_M)
    rate_P = right / 8
    assert weights.weights_M[bins_P].tolist() == pytest.approx([1.62, 1.24, 1.07], abs=0.006)
    assert weights.weights_M[bins_P] == pytest.approx(1 / (2 * (rate_P * (1 - rate_P) * 7 / 8).sqrt()), rel=1e-3)


def test_a_bin_that_is_absent_keeps_its_weight_and_a_tiny_loss_has_a_bounded_one():
    weights = DaroWeights(2, learning_rate=0.1, floor=0.1)
    for _ in range(300):
        weights.update(torch.tensor([0.0, 0.5]), torch.tensor([True, False]))
    assert weights.weights_M.tolist() == pytest.approx([10.0, 1.0], rel=1e-2)


def test_trls_token_mean_with_these_advantages_is_the_weighted_sum_of_bin_losses():
    """`loss_type: dapo` divides by all tokens; the gradient by the log-probabilities must be DARO's."""
    generator = torch.Generator().manual_seed(0)
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    tokens = torch.randint(1, 9, rewards.shape, generator=generator)
    advantages, weights = group_advantages(rewards), torch.tensor([2.0, 0.5, 3.0], dtype=torch.float64)
    rates = rewards.mean(dim=1)
    logps = torch.randn(rewards.numel(), 8, generator=generator).requires_grad_()
    mask = (torch.arange(8) < tokens.flatten()[:, None]).float()

    def surrogate(values):  # on the sampled policy
        ratio = torch.exp(logps - logps.detach())
        return -(torch.min(ratio * values, ratio.clamp(0.8, 1.2) * values) * mask).sum(dim=1)

    weighed = daro(advantages, tokens, rates, weights).flatten()[:, None]
    trl = surrogate(weighed).sum() / mask.sum()
    bins = bins_of(rates, 4)
    papers = torch.zeros(())
    for number, weight in enumerate(weights.tolist()):
        rows = (bins == number).repeat_interleave(4)
        if rows.any():
            papers = papers + weight * surrogate(advantages.flatten()[:, None])[rows].sum() / mask[rows].sum()
    torch.testing.assert_close(trl, papers)
    ours, expected = (torch.autograd.grad(loss, logps)[0] for loss in (trl, papers))
    torch.testing.assert_close(ours, expected)
    assert expected.abs().sum() > 0


def _steps(method, count, first=0):
    generator, results = torch.Generator().manual_seed(first), []
    for step in range(first, first + count):
        generator.manual_seed(step)
        rewards = torch.randint(0, 2, (8, 4), generator=generator).float()
        lengths = torch.randint(1, 30, (8, 4), generator=generator)
        results.append(method(Groups(rewards, lengths, lengths > 99, step=step), group_advantages(rewards)))
    return results


def test_a_resumed_run_goes_on_to_the_bit():
    """The state goes through JSON, as in a checkpoint's manifest."""
    whole = MethodRun({"daro": DaroOptions()})
    expected = _steps(whole, 8)[5:]
    first = MethodRun({"daro": DaroOptions()})
    _steps(first, 5)
    resumed = MethodRun({"daro": DaroOptions()})
    resumed.load(json.loads(json.dumps(first.state())))
    assert all(torch.equal(a, b) for a, b in zip(_steps(resumed, 3, first=5), expected, strict=True))
    assert resumed.state() == whole.state()
    fresh = MethodRun({"daro": DaroOptions()})
    assert not torch.equal(_steps(fresh, 1, first=5)[0], expected[0])


def test_a_state_of_another_group_size_is_refused():
    with pytest.raises(ValueError, match="3 saved weights, but 7 bins"):
        DaroWeights(7, 0.1).load(DaroWeights(3, 0.1).state())


def test_each_bin_is_logged():
    method = MethodRun({"daro": DaroOptions()})
    _steps(method, 1)
    assert {f"daro/weight_{n}_of_4" for n in (1, 2, 3)} <= method.figures.keys()
    assert "daro/loss_2_of_4" in method.figures
