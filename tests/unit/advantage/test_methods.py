"""The family of advantages: a worked example of each method, the way back to GRPO, invariances,
groups that break careless formulas, and what a method remembers.
"""

import json
import math
import subprocess
import sys
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from adora_vl.advantage import (
    METHODS,
    AdvantagePipeline,
    Groups,
    Schedule,
    experimental,
    group_advantages,
)
from adora_vl.advantage.adora import Adora
from adora_vl.advantage.daro import OUTSIDE, Daro, DaroWeights, bin_losses, bins_of
from adora_vl.advantage.grpo import Dapo, DrGrpo, Grpo, LitePpo, overlong_penalty
from adora_vl.utils.launch import free_port
from tests.unit.advantage.methods_support import batch, float64, random_batch, run  # noqa: F401

NAN = float("nan")


def made(method, rewards, advantages=None, lengths=None):
    """What a method makes of these groups by itself."""
    lengths = torch.ones_like(rewards) if lengths is None else lengths
    return method.apply(Groups(rewards, lengths, lengths < 0), advantages, AdvantagePipeline({}))


def test_grpo_and_dr_grpo_by_hand():
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), eps=0.0)
    assert advantages.tolist() == [
        pytest.approx([1.5, -0.5, -0.5, -0.5])
    ]  # mean 1/4, sample deviation 1/2
    assert group_advantages(torch.tensor([[1.0, 0.0]]), scale="none").tolist() == [[0.5, -0.5]]
    with pytest.raises(ValueError, match="scale"):
        group_advantages(torch.ones(1, 2), scale="groups")


def test_a_constant_group_is_exactly_zero(subtests):
    for scale, generations, reward in product(
        ["group", "batch", "none"], [2, 3, 7, 8, 12, 16], [0.0, 0.1, 0.3, 1.0, 1e6]
    ):
        with subtests.test(f"{scale} {generations} {reward}"):
            rewards = torch.full((2, generations), reward, dtype=torch.float32)
            rewards[1, 0] = 2 * reward + 7  # the other group has signal
            advantages = group_advantages(rewards, scale=scale, eps=1e-9)
            assert advantages[0].tolist() == [0.0] * generations
            assert advantages[1, 0] > 0
    # without the guard, float32 turns seven rewards of 0.1 into advantages near 1
    centred = (rewards := torch.full((1, 7), 0.1, dtype=torch.float32)) - rewards.mean()
    assert (centred / (centred.std() + 1e-9)).abs().max() > 0.5


def test_the_rounding_noise_of_a_constant_group_is_taken_out_before_any_method():
    groups = batch([[0.1] * 7, [1.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0]])
    noisy = torch.full((2, 7), 6e-4)
    result = AdvantagePipeline({"adora": Adora()})(groups, noisy)
    assert result[0].tolist() == [0.0] * 7 and (result[1] != 0).all()


def test_lite_ppo_by_hand():
    # deviations from the groups' means -1/2 and 1/2, and none; all four rewards: mean 3/4,
    # deviation 1/2
    rewards = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    assert METHODS["lite_ppo"].settings["scale_rewards"] == "batch"
    assert group_advantages(rewards, scale="batch", eps=0.0).tolist() == [[-1.0, 1.0], [0.0, 0.0]]


def test_dapo_by_hand():
    assert overlong_penalty(torch.tensor([70, 80, 90, 100, 200]), 100, 20).tolist() == [
        0.0,
        0.0,
        -0.5,
        -1.0,
        -1.0,
    ]
    advantages = torch.tensor([[1.0, -1.0], [0.0, 0.0]])
    kept = made(Dapo(), advantages, advantages, torch.tensor([[5, 5], [20, 10]]))
    assert kept.tolist() == [[4.0, -4.0], [0.0, 0.0]]  # 40 tokens, of which 10 are left
    groups = batch([[1.0, 1.0, 0.0]], [[10, 95, 10]])
    method = AdvantagePipeline({"dapo": Dapo(overlong_cache=10)}, max_length=100)
    advantages = method(groups, group_advantages(groups.rewards_PG))
    assert advantages.tolist() == group_advantages(torch.tensor([[1.0, 0.5, 0.0]])).tolist()


def test_adora_amplifies_with_dapos_pieces():
    groups = batch([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]], [[9, 5, 5, 5], [4, 4, 4, 4]])
    chain = AdvantagePipeline(
        {"dapo": Dapo(), "adora": Adora(mode="amplification", factor=Schedule(2.0))}
    )
    raw = group_advantages(groups.rewards_PG)
    torch.testing.assert_close(chain(groups, raw)[0], raw[0] * 2.0 * (24 + 16) / 24)
    assert chain(groups, raw)[1].tolist() == [0.0] * 4


def test_mc_grpo_by_hand():
    # median 0.1, deviations 0.1 0 0.9, so MAD 0.1; the pivot's share is 3/2
    method = experimental.McGrpo()
    scale = 1.5 / (0.1 + 1e-4)
    assert made(method, torch.tensor([[0.0, 0.1, 1.0]])).tolist() == [
        pytest.approx([-0.1 * scale, 0.0, 0.9 * scale])
    ]
    # two of three agree: MAD 0, so the deviation about the median, sqrt(1 / 2)
    scale = 1.5 / (math.sqrt(1 / 2) + 1e-4)
    assert made(method, torch.tensor([[0.0, 0.0, 1.0]])).tolist() == [
        pytest.approx([0.0, 0.0, scale])
    ]
    # `docs/methods.md` warns of it: with three rewards the median absolute deviation is 0.1, and an
    # advantage can be 10
    rewards = torch.tensor([[1.0, 0.1, 0.1, 0.1, 0.1, 0.0, 0.0, 0.0, 0.0]])
    assert made(method, rewards).max() == pytest.approx(0.9 / (0.1 + 1e-4) * 9 / 8)  # about 10.1
    assert group_advantages(rewards).max() == pytest.approx(2.6, abs=0.05)


def test_ngrpo_by_hand():
    """The paper's own case: one right of eight gives 2.47 and -0.35 with GRPO, 1.76 and -0.50 with
    NGRPO.
    """
    rewards = torch.tensor([[1.0] + [0.0] * 7])
    assert group_advantages(rewards)[0, :2].tolist() == pytest.approx([2.474, -0.354], abs=2e-3)
    assert made(experimental.Ngrpo(), rewards)[0, :2].tolist() == pytest.approx(
        [1.764, -0.504], abs=1e-3
    )
    # wrong throughout: mean (0 + 0 + 1) / 3, deviation sqrt(1 / 3)
    wrong = -(1 / 3) / (math.sqrt(1 / 3) + 1e-4)
    assert made(experimental.Ngrpo(), torch.zeros(1, 2)).tolist() == [pytest.approx([wrong] * 2)]
    assert made(experimental.Ngrpo(), torch.ones(1, 4)).tolist() == [[0.0] * 4]


def test_a_grae_by_hand():
    advantages = torch.tensor([[1.0, -1.0], [3.0, -1.0]])
    rewards = torch.tensor(
        [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]
    )  # pass rates 1/4 and 3/4, R = 1/2
    result = made(experimental.AGrae(alpha=1.0), rewards, advantages)
    easy = 0.25 / (1 - math.sqrt(0.75))
    hard = 0.25 / math.sqrt(0.75)
    assert result[0].tolist() == pytest.approx(
        [0.5 * (0.25 / 0.5 + 0.25 / 0.5), -(0.25 / 0.5 + 0.25 / 0.5)], rel=1e-5
    )
    assert result[1].tolist() == pytest.approx([1.5 * (easy + hard), -(easy + hard)], rel=1e-5)
    plain = experimental.AGrae(curriculum=False, alpha=0.5)
    assert made(plain, rewards, advantages).tolist() == advantages.tolist()


def test_canon_by_hand():
    rewards = torch.tensor([[1.0, 0.0, 1.0, 1.0]])
    lengths = torch.tensor([[1, 2, 3, 4]])
    # short ones: mean 1/2; long ones: mean 1
    for inter, expected in ((1.0, [0.0, -1.0, 0.5, 0.5]), (0.0, [0.5, -0.5, 0.0, 0.0])):
        method = experimental.Canon("length", Schedule(inter))
        assert made(method, rewards, lengths=lengths).tolist() == [expected]
    assert experimental.upper_half(torch.tensor([[5, 5, 9, 1]])).tolist() == [[0.5, 0.5, 1.0, 0.0]]
    assert experimental.upper_half(torch.tensor([[1, 2, 3]])).tolist() == [[0.0, 1.0, 1.0]]


def test_d3s_by_hand():
    values = torch.tensor([[-1.0, -0.5, 0.0, 0.5, 3.0]])
    assert experimental.most_varied(values, 2).tolist() == [[1.0, 0.0, 0.0, 0.0, 1.0]]
    assert experimental.most_varied(values, 3).tolist() == [[1.0, 1.0, 0.0, 0.0, 1.0]]
    # two right of eight, four kept: both right ones, and two of the six wrong ones by shares
    advantages = torch.tensor([[1.5, 1.5, -0.5, -0.5, -0.5, -0.5, -0.5, -0.5]])
    kept = made(experimental.D3s(), advantages, advantages)
    assert kept.tolist() == [pytest.approx([3.0, 3.0] + [-1 / 3] * 6)]
    advantages = torch.tensor([[0.0, 0.0], [1.0, -1.0]])
    kept = made(experimental.D3s(across="batch"), advantages, advantages)
    assert kept.tolist() == [[0.0, 0.0], [2.0, -2.0]]


def test_d3s_takes_the_best_of_all_subsets(subtests):
    for keep in [2, 3, 5, 7]:
        with subtests.test(f"{keep}"):
            values = torch.randn(1, 8, generator=torch.Generator().manual_seed(keep))
            chosen = experimental.most_varied(values, keep)[0].bool()
            best = max(values[0, list(c)].var().item() for c in combinations(range(8), keep))
            assert chosen.sum() == keep and values[0][chosen].var().item() == pytest.approx(best)


def test_d3s_keeps_as_many_where_values_tie_and_equal_ones_in_equal_shares():
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([0.0, 0.1, 1.0])[torch.randint(0, 3, (200, 8), generator=generator)]
    same = values[:, :, None] == values[:, None, :]
    for keep in (2, 3, 4, 7):
        shares = experimental.most_varied(values, keep)
        assert shares.sum(dim=1).tolist() == pytest.approx([keep] * 200)
        assert torch.equal(
            shares[:, :, None].expand_as(same)[same], shares[:, None, :].expand_as(same)[same]
        )


def test_ssb_by_hand():
    advantages = torch.tensor(
        [[3.0, -1.0, 0.0], [0.0, 0.0, 0.0]]
    )  # four free places, drawn with 3/4 and 1/4
    for method, first in (
        (experimental.Ssb(), 4.0),
        (experimental.Ssb(share=0.5, replay_alpha=0.0), 2.0),
    ):
        assert made(method, advantages, advantages).tolist() == [
            [3 * first, -2.0, 0.0],
            [0.0, 0.0, 0.0],
        ]


def test_ssb_is_the_mean_of_drawn_replays():
    """What the module claims: a factor is what copies in the free places give on average."""
    advantages = torch.tensor([[2.0, -1.0, 0.5], [0.0, 0.0, 0.0]])
    flat = advantages.flatten()
    generator = torch.Generator().manual_seed(0)
    draws = torch.multinomial(flat.abs(), 30_000, replacement=True, generator=generator)
    copies = torch.bincount(draws, minlength=6) / 10_000  # three free places, filled 10,000 times
    mean = made(experimental.Ssb(), advantages, advantages).flatten()
    assert mean.tolist() == pytest.approx((flat * (1 + copies)).tolist(), rel=0.02)


def test_rrb_by_hand():
    """A box around a wrong answer (0.1) is worth a tenth of a right answer; GRPO makes both groups
    equal.
    """
    rewards = torch.tensor(
        [[0.0, 0.1], [0.0, 1.0], [0.1, 1.0], [1.0, 1.0], [NAN, 0.5], [NAN, NAN], [0.0, 3.0]]
    )
    advantages = torch.tensor([[-1.0, 1.0]]).repeat(7, 1)
    shares = [1.0, 10.0, 9.0, 0.0, 0.0, 0.0, 10.0]  # tenths; never above the full range
    assert (10 * made(experimental.Rrb(), rewards, advantages)[:, 1]).tolist() == pytest.approx(
        shares
    )
    other = experimental.Rrb(full_range=2.0, range_power=2.0)
    assert made(other, rewards, advantages)[1].tolist() == [-0.25, 0.25]


def test_rrbs_other_rule_by_hand():
    """The repository's: a tenth where every reward is below 0.15, and nothing else changes."""
    rewards = torch.tensor([[0.0, 0.1], [0.0, 0.15], [0.1, 1.0], [0.1, NAN]])
    advantages = torch.tensor([[-1.0, 1.0]]).repeat(4, 1)
    low = experimental.Rrb(rule="all_low")
    assert made(low, rewards, advantages)[:, 1].tolist() == [
        pytest.approx(0.1),
        1.0,
        1.0,
        pytest.approx(0.1),
    ]
    groups = batch([[0.0, 0.1], [0.1, 1.0]])
    published = run("rrb", groups)
    own = run("rrb", groups, experimental.Rrb(rule="all_low"))
    before = group_advantages(groups.rewards_PG)
    assert own.tolist() == [(before[0] * 0.1).tolist(), before[1].tolist()]
    assert (published[1] / before[1]).tolist() == pytest.approx([0.9, 0.9])
    assert torch.equal(run("rrb", groups, experimental.Rrb(rule="all_low", low_factor=1.0)), before)


def test_daro_by_hand():
    assert bins_of(torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]), 4).tolist() == [
        OUTSIDE,
        0,
        1,
        2,
        OUTSIDE,
    ]
    # one of three scored is right: between 1/4 and 2/4, nearer the former
    assert bins_of(torch.tensor([1 / 3]), 4).tolist() == [0]
    advantages = torch.tensor(
        [[1.5, -0.5, -0.5, -0.5], [1.0, 1.0, -1.0, -1.0], [0.0, 0.0, 0.0, 0.0]]
    )
    tokens = torch.tensor([[10, 10, 10, 10], [1, 1, 3, 3], [9, 9, 9, 9]])
    bins = torch.tensor([0, 1, OUTSIDE])
    assert bin_losses(advantages, tokens, bins, 3, "magnitude").tolist() == [30 / 40, 8 / 8, 0.0]
    assert bin_losses(advantages, tokens, bins, 3, "surrogate").tolist() == [0.0, 4 / 8, 0.0]


def test_daros_weights_converge_to_the_inverse_of_fixed_losses():
    for losses in ([0.2, 0.9, 0.5], [3.0, 0.05, 1.0]):
        weights = DaroWeights(3, learning_rate=0.05)
        for _ in range(400):
            weights.update(torch.tensor(losses), torch.tensor([True, True, True]))
        assert weights.weights_M.tolist() == pytest.approx([1 / loss for loss in losses], rel=1e-3)
        contributions = weights.weights_M * torch.tensor(losses)
        assert contributions.tolist() == pytest.approx(
            [1.0] * 3, rel=1e-3
        )  # no difficulty dominates


def test_with_rewards_of_0_and_1_the_weights_converge_to_a_function_of_the_pass_rate():
    """`docs/methods.md` says so: nothing else is learned from them where all answers are equally
    long.
    """
    right = torch.tensor([1, 2, 4])
    rewards_PG = (torch.arange(8)[None, :] < right[:, None]).to(torch.float64)
    bins_P = bins_of(right / 8, 8)
    losses_M = bin_losses(
        group_advantages(rewards_PG), torch.full((3, 8), 30.0), bins_P, 7, "magnitude"
    )
    weights = DaroWeights(7, learning_rate=0.05)
    present_M = torch.isin(torch.arange(7), bins_P)
    for _ in range(2000):
        weights.update(losses_M, present_M)
    rate_P = right / 8
    assert weights.weights_M[bins_P].tolist() == pytest.approx([1.62, 1.24, 1.07], abs=0.006)
    assert weights.weights_M[bins_P] == pytest.approx(
        1 / (2 * (rate_P * (1 - rate_P) * 7 / 8).sqrt()), rel=1e-3
    )


def test_a_bin_that_is_absent_keeps_its_weight_and_a_tiny_loss_has_a_bounded_one():
    weights = DaroWeights(2, learning_rate=0.1, floor=0.1)
    for _ in range(300):
        weights.update(torch.tensor([0.0, 0.5]), torch.tensor([True, False]))
    assert weights.weights_M.tolist() == pytest.approx([10.0, 1.0], rel=1e-2)


def test_trls_token_mean_with_these_advantages_is_the_weighted_sum_of_bin_losses():
    """`loss_type: dapo` divides by all tokens; the gradient by the log-probabilities must be
    DARO's.
    """
    generator = torch.Generator().manual_seed(0)
    rewards = torch.tensor(
        [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
    )
    tokens = torch.randint(1, 9, rewards.shape, generator=generator)
    advantages = group_advantages(rewards)
    weights = torch.tensor([2.0, 0.5, 3.0], dtype=torch.float64)
    rates = rewards.mean(dim=1)
    logps = torch.randn(rewards.numel(), 8, generator=generator).requires_grad_()
    mask = (torch.arange(8) < tokens.flatten()[:, None]).float()

    def surrogate(values):  # on the sampled policy
        ratio = torch.exp(logps - logps.detach())
        return -(torch.min(ratio * values, ratio.clamp(0.8, 1.2) * values) * mask).sum(dim=1)

    bins = bins_of(rates, 4)
    weighed = Daro().weighed(advantages, tokens, bins, weights, rewards >= 0).flatten()[:, None]
    trl = surrogate(weighed).sum() / mask.sum()
    papers = torch.zeros(())
    for number, weight in enumerate(weights.tolist()):
        rows = (bins == number).repeat_interleave(4)
        if rows.any():
            papers = (
                papers
                + weight * surrogate(advantages.flatten()[:, None])[rows].sum() / mask[rows].sum()
            )
    torch.testing.assert_close(trl, papers)
    ours, expected = (torch.autograd.grad(loss, logps)[0] for loss in (trl, papers))
    torch.testing.assert_close(ours, expected)
    assert expected.abs().sum() > 0


def _steps(method, count, first=0):
    generator = torch.Generator().manual_seed(first)
    results = []
    for step in range(first, first + count):
        generator.manual_seed(step)
        rewards = torch.randint(0, 2, (8, 4), generator=generator).float()
        lengths = torch.randint(1, 30, (8, 4), generator=generator)
        results.append(
            method(Groups(rewards, lengths, lengths > 99, step=step), group_advantages(rewards))
        )
    return results


def test_daro_resumes_to_the_bit_and_refuses_the_state_of_another_group_size():
    """The state goes through JSON, as in a checkpoint's manifest."""
    whole = AdvantagePipeline({"daro": Daro()})
    expected = _steps(whole, 8)[5:]
    first = AdvantagePipeline({"daro": Daro()})
    _steps(first, 5)
    resumed = AdvantagePipeline({"daro": Daro()})
    resumed.load(json.loads(json.dumps(first.state())))
    assert resumed.state() == first.state(), "also where the run stops again before its first batch"
    assert all(
        torch.equal(a, b) for a, b in zip(_steps(resumed, 3, first=5), expected, strict=True)
    )
    assert resumed.state() == whole.state()
    fresh = AdvantagePipeline({"daro": Daro()})
    assert not torch.equal(_steps(fresh, 1, first=5)[0], expected[0])
    with pytest.raises(ValueError, match="3 saved weights, but 7 bins"):
        DaroWeights(7, 0.1).load(DaroWeights(3, 0.1).state())


def test_each_bin_of_daro_is_logged():
    method = AdvantagePipeline({"daro": Daro()})
    _steps(method, 1)
    assert {f"daro/weight_{n}_of_4" for n in (1, 2, 3)} <= method.figures.keys()
    assert "daro/loss_2_of_4" in method.figures


def test_a_schedule_by_hand():
    line = Schedule(1.0, 3.0, "linear", (10, 20))
    assert [line.at(step) for step in (0, 10, 15, 20, 99)] == [1.0, 1.0, 2.0, 3.0, 3.0]
    wave = Schedule(1.0, 3.0, "cosine", (0, 4))
    assert [wave.at(step) for step in (0, 1, 2, 4)] == pytest.approx(
        [1.0, 2 - math.sqrt(0.5), 2.0, 3.0]
    )
    assert Schedule(0.3).at(7) == 0.3
    # steps end before the second number
    assert [Adora(steps=(2, 4)).is_on(step) for step in range(6)] == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]
    assert Adora().is_on(10**9)


WRONG_OPTIONS: list[
    tuple[Any, dict[str, Any], str]
] = [  # the options or the formula, what is wrong, what is named
    (Daro, {"bin_loss": "mean"}, "bin_loss"),
    (Daro, {"floor": 0.0}, "floor"),
    (experimental.McGrpo, {"centre": "mode"}, "centre"),
    (experimental.McGrpo, {"spread": "range"}, "spread"),
    (experimental.Ngrpo, {"virtual": -1}, "virtual"),
    (experimental.AGrae, {"alpha": 0.0}, "alpha"),
    (experimental.Canon, {"measure": "words"}, "measure"),
    (experimental.Canon, {"inter": Schedule(1.5)}, "inter"),
    (experimental.D3s, {"keep": Schedule(0.0)}, "keep"),
    (experimental.D3s, {"across": "run"}, "across"),
    (experimental.Ssb, {"share": 1.5}, "share"),
    (experimental.Ssb, {"replay_alpha": -1.0}, "replay_alpha"),
    (experimental.Rrb, {"full_range": 0.0}, "full_range"),
    (experimental.Rrb, {"range_power": -1.0}, "range_power"),
    (experimental.Rrb, {"rule": "ranges"}, "rule"),
    (experimental.Rrb, {"low_factor": 1.5}, "low_factor"),
    (Schedule, {"start": 1.0, "shape": "step"}, "shape"),
    (Schedule, {"start": 1.0, "end": 2.0}, "end"),
    (Schedule, {"start": 1.0, "shape": "linear"}, "shape"),
    (Schedule, {"start": 1.0, "shape": "cosine", "end": 1.0, "steps": (5, 5)}, "shape"),
    (
        overlong_penalty,
        {"lengths": torch.zeros(1), "max_length": 100, "cache": 0},
        "overlong_cache",
    ),
]


def test_a_wrong_option_of_a_method_is_named(subtests):
    for made, wrong, named in WRONG_OPTIONS:
        with (
            subtests.test(f"{made.__name__} {named}"),
            pytest.raises(ValueError, match=f"^{named}|\\b{named}: "),
        ):
            made(**wrong)


BY_SETTINGS = {"grpo", "dr_grpo", "lite_ppo"}  # TRL's own keys are all there is to them


# The setting of each method at which it is GRPO: (options, the scale of the GRPO that it then is)
NEUTRAL = {
    "grpo": (Grpo(), "group"),
    "dr_grpo": (DrGrpo(), "none"),
    "lite_ppo": (LitePpo(), "batch"),
    "dapo": (Dapo(drop_constant=False), "group"),
    "adora": (Adora(mode="off"), "group"),
    "daro": (Daro(learning_rate=0.0, by_bin_tokens=False, drop_outside=False), "group"),
    "mc_grpo": (experimental.McGrpo(centre="mean", spread="std", exclude_pivot=False), "group"),
    "ngrpo": (experimental.Ngrpo(virtual=0), "group"),
    "a_grae": (experimental.AGrae(curriculum=False, alpha=None), "group"),
    "canon": (experimental.Canon(inter=Schedule(0.5)), "none"),
    "d3s": (experimental.D3s(keep=Schedule(1.0)), "group"),
    "ssb": (experimental.Ssb(share=0.0), "group"),
    "rrb": (experimental.Rrb(range_power=0.0), "group"),
}


def test_every_method_has_a_neutral_setting_and_a_source():
    assert NEUTRAL.keys() == METHODS.keys()
    assert all(method.source.startswith("arXiv") for method in METHODS.values())


def test_the_neutral_setting_is_grpo_to_the_bit(subtests):
    for name in METHODS:
        with subtests.test(name):
            options, scale = NEUTRAL[name]
            for seed in range(3):
                groups = random_batch(seed=seed)
                stock = group_advantages(groups.rewards_PG, scale=scale)
                assert torch.equal(run(name, groups, options, scale), stock)
                assert name in BY_SETTINGS or not torch.equal(
                    run(name, groups, None, scale), stock
                ), "so it can fail"


def test_plain_is_what_the_trainer_leaves_untouched():
    plain = {
        name
        for name, (options, _) in NEUTRAL.items()
        if AdvantagePipeline({name: options}).is_plain
    }
    assert plain == BY_SETTINGS | {"dapo", "adora", "a_grae", "ssb", "rrb"}
    assert AdvantagePipeline({"adora": Adora(factor=Schedule(1.0))}).is_plain
    assert AdvantagePipeline({"rrb": experimental.Rrb(rule="all_low", low_factor=1.0)}).is_plain
    assert not AdvantagePipeline(
        {"rrb": experimental.Rrb(rule="all_low", range_power=0.0)}
    ).is_plain
    assert not any(
        AdvantagePipeline({n: METHODS[n]()}).is_plain for n in METHODS if n not in BY_SETTINGS
    )


def test_signal_is_what_a_group_has_to_teach_by_itself(subtests):
    """Of groups that are mixed, all wrong, all right, and without a right answer but with rewards
    that differ.
    """
    groups = batch([[1.0, 0, 0, 0], [0.0] * 4, [1.0] * 4, [0.1, 0, 0, 0]], [[10, 20, 30, 40]] * 4)
    cases: dict[tuple[str, ...], tuple[list[bool], dict[str, Any]]] = {
        ("grpo",): ([True, False, False, True], {}),
        ("ngrpo", "dapo"): ([True, True, False, True], {}),
        ("ngrpo", "adora"): ([True, True, False, True], {}),
        ("dapo",): ([True] * 4, {"dapo": Dapo(overlong_cache=30)}),
        ("daro",): ([True, False, False, False], {}),
        ("ngrpo", "rrb"): ([True, False, False, True], {}),
    }
    for names, (wanted, given) in cases.items():
        with subtests.test("+".join(names)):
            method = AdvantagePipeline(
                {name: given.get(name, METHODS[name]()) for name in names}, max_length=40
            )
            assert method.signal(groups).tolist() == wanted and method.state() == {}
            advantages = method(groups, group_advantages(groups.rewards_PG))
            assert advantages.any(dim=1).tolist() == wanted, "so no method takes one for silent"


def test_a_group_to_which_another_method_gives_a_signal_counts_in_dapos_mean():
    """Two of three groups are wrong throughout, which ngrpo learns from: nothing is silent."""
    groups = batch([[1.0, 0], [0.0, 0], [0.0, 0]])
    both = AdvantagePipeline({"ngrpo": experimental.Ngrpo(), "dapo": Dapo()})
    assert torch.equal(
        both(groups, torch.zeros(3, 2)), made(experimental.Ngrpo(), groups.rewards_PG)
    )


def test_permuting_a_group_permutes_its_advantages(subtests):
    cases: list[tuple[str, Any]] = [(name, None) for name in METHODS]
    cases += [
        ("adora", Adora(no_correct="attenuate", criteria=("length", "difficulty"), combine="all"))
    ]
    for name, options in cases:
        with subtests.test(f"{name} {options}"):
            groups = random_batch()
            order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
            names = ("rewards_PG", "lengths_PG", "truncated_PG", "surprisal_PG")
            moved = replace(groups, **{name: getattr(groups, name)[:, order] for name in names})
            torch.testing.assert_close(
                run(name, moved, options), run(name, groups, options)[:, order], rtol=0, atol=1e-9
            )


def test_a_shift_of_all_rewards_changes_nothing(subtests):
    """The threshold of a right answer and the highest reward shift with them."""
    for name in METHODS:
        with subtests.test(name):
            groups = random_batch()
            shifted = replace(groups, rewards_PG=groups.rewards_PG + 2, correct_above=2.5)
            options = experimental.Ngrpo(max_reward=3.0) if name == "ngrpo" else None
            torch.testing.assert_close(
                run(name, shifted, options), run(name, groups), rtol=0, atol=1e-9
            )


def test_a_scale_of_all_rewards_changes_nothing_or_scales_what_is_not_divided(subtests):
    for name in METHODS:
        with subtests.test(name):
            groups = random_batch()
            scaled = replace(groups, rewards_PG=groups.rewards_PG * 4, correct_above=2.0)
            undivided = METHODS[name].settings.get("scale_rewards") == "none"
            scale = "none" if undivided else "group"
            options = {
                "ngrpo": experimental.Ngrpo(max_reward=4.0),
                "rrb": experimental.Rrb(full_range=4.0),
            }.get(name)
            expected = run(name, groups, scale=scale) * (4 if undivided else 1)
            # eps is added to a deviation that is four times as large
            torch.testing.assert_close(
                run(name, scaled, options, scale), expected, rtol=5e-3, atol=1e-3
            )


DEGENERATE = {
    "all right": [[1.0] * 4],
    "all wrong": [[0.0] * 4],
    "all a little": [[0.1] * 4],
    "one rollout": [[1.0]],
    "two rollouts": [[1.0, 0.0]],
    "huge": [[1e30, -1e30, 1e30, 0.0]],
    "huge and constant": [[1e30] * 4],
    "none scored": [[NAN] * 4],
    "one scored": [[NAN, 1.0, NAN, NAN]],
    "some unscored": [[NAN, 1.0, 0.0, 0.1]],
    "mixed batch": [[1.0, 0.0, 0.0, 0.1], [NAN] * 4, [1.0] * 4, [1e30, 0.0, 0.0, 0.0]],
}


def test_everything_stays_finite(subtests):
    for case, name in product(DEGENERATE, METHODS):
        with subtests.test(f"{case} {name}"):
            groups = batch(DEGENERATE[case])
            result = run(name, groups)
            assert result.shape == groups.rewards_PG.shape and result.isfinite().all()
            assert (result[groups.rewards_PG.isnan()] == 0).all()
            if case in ("all right", "none scored") or (case.startswith("all") and name != "ngrpo"):
                assert (result == 0).all()


def test_a_better_reward_never_has_a_lower_sign_than_a_worse_one_in_its_group(subtests):
    """Under every method that compares whole groups no wrong rollout is lifted while a right one is
    pushed down.
    """
    for name in ["grpo", "dapo", "adora", "daro", "mc_grpo", "ngrpo", "d3s", "ssb", "rrb"]:
        with subtests.test(name):
            groups = random_batch(generations=9 if name == "mc_grpo" else 8)
            result = run(name, groups)
            rewards = groups.rewards_PG
            best = torch.where(rewards == rewards.amax(1, keepdim=True), result, torch.inf).amin(1)
            worst = torch.where(rewards == rewards.amin(1, keepdim=True), result, -torch.inf).amax(
                1
            )
            assert (best >= worst).all()


def test_the_package_needs_torch_and_nothing_else():
    code = (
        "import sys, torch; before = set(sys.modules); import adora_vl.advantage\n"
        "print([m for m in sys.modules if m not in before and not m.startswith('adora_vl')"
        " and m.split('.')[0] not in sys.stdlib_module_names and not m.startswith('torch')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


RANKS = """
import sys, torch, torch.distributed as dist
from adora_vl.advantage import METHODS, Groups, AdvantagePipeline, group_advantages
from adora_vl.advantage.adora import Adora
rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
generator = torch.Generator().manual_seed(0)
cases = [(name, METHODS[name]()) for name in METHODS]
cases += [("adora", Adora(assign=assign)) for assign in ("random", "reversed", "rate")]
for name, options in cases:
    method = AdvantagePipeline({name: options}, seed=3)
    for step in range(3):
        rewards = torch.tensor([0.0, 0.1, 1.0])[torch.randint(0, 3, (6, 4), generator=generator)]
        lengths = torch.randint(1, 50, (6, 4), generator=generator)
        whole = AdvantagePipeline({name: options}, seed=3) if step == 0 else whole
        def groups(r, l):
            return Groups(r, l, l > 45, surprisal_PG=l / 50, step=step)
        alone = whole(groups(rewards, lengths), group_advantages(rewards))
        # this rank graded its half of the sequences: a group may lie over both ranks
        def gathered(values):
            mine = values.flatten().chunk(2)[rank].contiguous()
            parts = [torch.empty_like(mine) for _ in range(2)]
            dist.all_gather(parts, mine)
            return torch.cat(parts).view(6, 4)
        both = method(groups(gathered(rewards), gathered(lengths)), group_advantages(gathered(rewards)))
        assert torch.equal(alone, both) and method.rate == whole.rate, name
    states = [None, None]
    dist.all_gather_object(states, method.state())
    assert states[0] == states[1] == whole.state(), name
print("same")
"""


def test_two_ranks_compute_what_one_does(tmp_path):
    """Real processes, gathered tensors, every method and control, three steps with what they
    remember.
    """
    port = str(free_port())
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    env = {"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": ""}
    command = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen([*command, str(r), port], stdout=subprocess.PIPE, text=True, env=env)
        for r in range(2)
    ]
    assert [rank.communicate(timeout=120)[0].strip() for rank in ranks] == ["same", "same"]
