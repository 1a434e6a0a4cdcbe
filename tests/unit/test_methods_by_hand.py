"""The family of advantages by worked examples, and numbers that change over the steps."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch

from adora_vl.advantage import METHODS, MethodRun, Schedule, group_advantages
from adora_vl.advantage.a_grae import a_grae
from adora_vl.advantage.canon import canon, upper_half
from adora_vl.advantage.d3s import d3s, most_varied
from adora_vl.advantage.dapo import drop_constant, overlong_penalty
from adora_vl.advantage.mc_grpo import mc_grpo
from adora_vl.advantage.ngrpo import ngrpo
from adora_vl.advantage.options import AdoraOptions, DapoOptions
from adora_vl.advantage.rrb import rrb
from adora_vl.advantage.schedule import within
from adora_vl.advantage.ssb import ssb
from tests.unit.methods_support import batch, float64, run  # noqa: F401

NAN = float("nan")


def test_lite_ppo_by_hand():
    # deviations from the groups' means -1/2 and 1/2, and none; all four rewards: mean 3/4, deviation 1/2
    rewards = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    assert METHODS["lite_ppo"].settings["scale_rewards"] == "batch"
    assert group_advantages(rewards, scale="batch", eps=0.0).tolist() == [[-1.0, 1.0], [0.0, 0.0]]


def test_mc_grpo_by_hand():
    # median 0.1, deviations 0.1 0 0.9, so MAD 0.1; the pivot's share is 3/2
    assert mc_grpo(torch.tensor([[0.0, 0.1, 1.0]]), eps=0.0).tolist() == [pytest.approx([-1.5, 0.0, 13.5])]
    # two of three agree: MAD 0, so the deviation about the median, sqrt(1 / 2)
    assert mc_grpo(torch.tensor([[0.0, 0.0, 1.0]]), eps=0.0).tolist() == [pytest.approx([0.0, 0.0, 1.5 * math.sqrt(2)])]


def test_mc_grpo_with_three_rewards_can_reach_ten():
    """`docs/algorithm.md` warns of it: the median absolute deviation is 0.1 there."""
    rewards = torch.tensor([[1.0, 0.1, 0.1, 0.1, 0.1, 0.0, 0.0, 0.0, 0.0]])
    assert mc_grpo(rewards).max() == pytest.approx(0.9 / (0.1 + 1e-4) * 9 / 8) == pytest.approx(10.1, abs=0.05)
    assert group_advantages(rewards).max() == pytest.approx(2.6, abs=0.05)


def test_ngrpo_by_hand():
    """The paper's own case: one right of eight gives 2.47 and -0.35 with GRPO, 1.76 and -0.50 with NGRPO."""
    rewards = torch.tensor([[1.0] + [0.0] * 7])
    assert group_advantages(rewards)[0, :2].tolist() == pytest.approx([2.474, -0.354], abs=2e-3)
    assert ngrpo(rewards)[0, :2].tolist() == pytest.approx([1.764, -0.504], abs=1e-3)
    # wrong throughout: mean (0 + 0 + 1) / 3, deviation sqrt(1 / 3)
    assert ngrpo(torch.zeros(1, 2), eps=0.0).tolist() == [pytest.approx([-math.sqrt(1 / 3)] * 2)]
    assert ngrpo(torch.ones(1, 4)).tolist() == [[0.0] * 4]


def test_ngrpo_has_no_signal_where_all_are_right():
    rewards = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    assert ngrpo(rewards)[0].tolist() == [0.0, 0.0, 0.0] and (ngrpo(rewards)[1] < 0).all()


def test_a_grae_by_hand():
    advantages = torch.tensor([[1.0, -1.0], [3.0, -1.0]])
    rates = torch.tensor([0.25, 0.75])  # R = 1/2
    result = a_grae(advantages, rates, alpha=1.0, eps=0.0)
    easy, hard = 0.25 / (1 - math.sqrt(0.75)), 0.25 / math.sqrt(0.75)
    assert result[0].tolist() == pytest.approx([0.5 * (0.25 / 0.5 + 0.25 / 0.5), -(0.25 / 0.5 + 0.25 / 0.5)])
    assert result[1].tolist() == pytest.approx([1.5 * (easy + hard), -(easy + hard)])
    assert a_grae(advantages, rates, curriculum=False, alpha=0.5).tolist() == advantages.tolist()


def test_canon_by_hand():
    rewards, lengths = torch.tensor([[1.0, 0.0, 1.0, 1.0]]), torch.tensor([[1, 2, 3, 4]])
    # short ones: mean 1/2; long ones: mean 1
    assert canon(rewards, lengths, inter=1.0).tolist() == [[0.0, -1.0, 0.5, 0.5]]
    assert canon(rewards, lengths, inter=0.0).tolist() == [[0.5, -0.5, 0.0, 0.0]]
    assert upper_half(torch.tensor([[5, 5, 9, 1]])).tolist() == [[0.5, 0.5, 1.0, 0.0]]
    assert upper_half(torch.tensor([[1, 2, 3]])).tolist() == [[0.0, 1.0, 1.0]]


def test_d3s_by_hand():
    values = torch.tensor([[-1.0, -0.5, 0.0, 0.5, 3.0]])
    assert most_varied(values, 2).tolist() == [[1.0, 0.0, 0.0, 0.0, 1.0]]
    assert most_varied(values, 3).tolist() == [[1.0, 1.0, 0.0, 0.0, 1.0]]
    # two right of eight, four kept: both right ones, and two of the six wrong ones by shares
    advantages = torch.tensor([[1.5, 1.5, -0.5, -0.5, -0.5, -0.5, -0.5, -0.5]])
    assert d3s(advantages, keep=0.5).tolist() == [pytest.approx([3.0, 3.0] + [-1 / 3] * 6)]
    assert d3s(torch.tensor([[0.0, 0.0], [1.0, -1.0]]), keep=0.5, across="batch").tolist() == [[0.0, 0.0], [2.0, -2.0]]


@pytest.mark.parametrize("keep", [2, 3, 5, 7])
def test_d3s_takes_the_best_of_all_subsets(keep):
    values = torch.randn(1, 8, generator=torch.Generator().manual_seed(keep))
    chosen = most_varied(values, keep)[0].bool()
    best = max(values[0, list(c)].var().item() for c in combinations(range(8), keep))
    assert chosen.sum() == keep and values[0][chosen].var().item() == pytest.approx(best)


def test_ssb_by_hand():
    advantages = torch.tensor([[3.0, -1.0, 0.0], [0.0, 0.0, 0.0]])  # four free places, drawn with 3/4 and 1/4
    assert ssb(advantages).tolist() == [[3 * 4.0, -2.0, 0.0], [0.0, 0.0, 0.0]]
    assert ssb(advantages, alpha=0.0, share=0.5).tolist() == [[3 * 2.0, -2.0, 0.0], [0.0, 0.0, 0.0]]


def test_ssb_is_the_mean_of_drawn_replays():
    """What the module claims: a factor is what copies in the free places give on average."""
    advantages = torch.tensor([[2.0, -1.0, 0.5], [0.0, 0.0, 0.0]])
    flat, generator = advantages.flatten(), torch.Generator().manual_seed(0)
    draws = torch.multinomial(flat.abs(), 30_000, replacement=True, generator=generator)
    copies = torch.bincount(draws, minlength=6) / 10_000  # three free places, filled 10,000 times
    assert ssb(advantages).flatten().tolist() == pytest.approx((flat * (1 + copies)).tolist(), rel=0.02)


def test_rrb_by_hand():
    """A box around a wrong answer (0.1) is worth a tenth of a right answer; GRPO makes both groups equal."""
    rewards = torch.tensor([[0.0, 0.1], [0.0, 1.0], [0.1, 1.0], [1.0, 1.0], [NAN, 0.5], [NAN, NAN], [0.0, 3.0]])
    advantages = torch.tensor([[-1.0, 1.0]]).repeat(7, 1)
    shares = [1.0, 10.0, 9.0, 0.0, 0.0, 0.0, 10.0]  # tenths; never above the full range
    assert (10 * rrb(advantages, rewards)[:, 1]).tolist() == pytest.approx(shares)
    assert rrb(advantages, rewards, full_range=2.0, power=2.0)[1].tolist() == [-0.25, 0.25]


def test_rrb_only_shrinks_and_keeps_signs_and_ranks():
    rewards = torch.rand(50, 8, generator=torch.Generator().manual_seed(0)) * 1.5
    advantages = group_advantages(rewards)
    result = rrb(advantages, rewards)
    assert (result.abs() <= advantages.abs()).all() and torch.equal(result.sign(), advantages.sign())
    assert torch.equal(result.argsort(dim=1), advantages.argsort(dim=1))
    with pytest.raises(ValueError, match="full_range"):
        rrb(advantages, rewards, full_range=0.0)


def test_dapo_by_hand():
    assert overlong_penalty(torch.tensor([70, 80, 90, 100, 200]), 100, 20).tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    constant = torch.tensor([False, True])
    kept = drop_constant(torch.tensor([[1.0, -1.0], [0.0, 0.0]]), torch.tensor([[5, 5], [20, 10]]), constant)
    assert kept.tolist() == [[4.0, -4.0], [0.0, 0.0]]  # 40 tokens, of which 10 are left


def test_dapo_lowers_the_reward_of_what_is_too_long():
    groups = batch([[1.0, 1.0, 0.0]], [[10, 95, 10]])
    method = MethodRun({"dapo": DapoOptions(overlong_cache=10)}, max_length=100)
    advantages = method(groups, group_advantages(groups.rewards_PG))
    assert advantages.tolist() == group_advantages(torch.tensor([[1.0, 0.5, 0.0]])).tolist()


def test_a_schedule_by_hand():
    line = Schedule(1.0, 3.0, "linear", (10, 20))
    assert [line.at(step) for step in (0, 10, 15, 20, 99)] == [1.0, 1.0, 2.0, 3.0, 3.0]
    wave = Schedule(1.0, 3.0, "cosine", (0, 4))
    assert [wave.at(step) for step in (0, 1, 2, 4)] == pytest.approx([1.0, 2 - math.sqrt(0.5), 2.0, 3.0])
    assert Schedule(0.3).at(7) == 0.3


@pytest.mark.parametrize(
    "wrong",
    [{"shape": "step"}, {"end": 2.0}, {"shape": "linear"}, {"shape": "cosine", "end": 1.0, "steps": (5, 5)}],
    ids=str,
)
def test_a_wrong_schedule_is_refused(wrong):
    with pytest.raises(ValueError, match="shape|end|steps"):
        Schedule(1.0, **wrong)


def test_adora_changes_its_factor_and_tau_with_the_step_and_is_off_outside_its_steps():
    options = AdoraOptions(
        criteria=("difficulty",),
        factor=Schedule(0.1, 0.5, "linear", (0, 4)),
        tau=Schedule(0.25, 0.75, "linear", (4, 8)),
        steps=(0, 10),
    )
    rewards, base = [[1.0, 1.0, 0.0, 0.0]], group_advantages(torch.tensor([[1.0, 1.0, 0.0, 0.0]]))
    weights = [
        (run("adora", batch(rewards, step=step), options) / base)[0, 0].item() for step in (0, 2, 4, 5, 6, 9, 10)
    ]
    # TDS while tau is below one half, that is up to step 5
    assert weights == pytest.approx([0.1, 0.3, 0.5, 0.5, 1.0, 1.0, 1.0])


def test_only_in_these_steps_ends_before_the_second():
    assert [within(step, (2, 4)) for step in range(6)] == [False, False, True, True, False, False]
    assert within(10**9, None)


def test_the_rounding_noise_of_a_constant_group_is_taken_out_before_any_method():
    groups = batch([[0.1] * 7, [1.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0]])
    noisy = torch.full((2, 7), 6e-4)
    result = MethodRun({"adora": AdoraOptions()})(groups, noisy)
    assert result[0].tolist() == [0.0] * 7 and (result[1] != 0).all()


def test_adora_amplifies_with_dapos_pieces():
    groups = batch([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]], [[9, 5, 5, 5], [4, 4, 4, 4]])
    chain = MethodRun({"dapo": DapoOptions(), "adora": AdoraOptions(mode="amplification", factor=Schedule(2.0))})
    raw = group_advantages(groups.rewards_PG)
    torch.testing.assert_close(chain(groups, raw)[0], raw[0] * 2.0 * (24 + 16) / 24)
    assert chain(groups, raw)[1].tolist() == [0.0] * 4
