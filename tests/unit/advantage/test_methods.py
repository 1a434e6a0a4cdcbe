"""Methods, which make advantages from rewards: GRPO, Dr. GRPO, DAPO, ADORA and DARO.

There is an example of each by hand, the options with which each is GRPO, changes of the rewards
that must not change advantages, groups that break careless formulas, and what a method remembers.
"""

import json
import math
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from adora_vl.advantage import (
    METHODS,
    AdvantagePipeline,
    Groups,
    Schedule,
    group_advantages,
)
from adora_vl.advantage.adora import Adora
from adora_vl.advantage.daro import OUTSIDE_ALL_BINS, Daro, DaroWeights, assign_bins, losses_by_bin
from adora_vl.advantage.grpo import Dapo, DrGrpo, Grpo, overlong_penalty
from adora_vl.utils.launch import free_port
from tests.support.examples import load_example
from tests.support.reward_groups import (
    final_advantages,
    float64,  # noqa: F401  # a fixture that each test of this file uses
    groups_of_rewards,
    method_advantages,
    random_groups,
)

NAN = float("nan")
Ngrpo = load_example("ngrpo.py:Ngrpo")  # it gives a signal to groups that have none under GRPO


def advantages_by_method_alone(method, rewards, advantages=None, lengths=None):
    """Return the advantages that a method makes of these groups, without GRPO before it.

    Args:
        method: the method's object.
        rewards: (P, G).
        advantages: those that it changes, if it changes any.
        lengths: tokens of each rollout, by default 1.
    """
    if lengths is None:
        lengths = torch.ones_like(rewards)
    none_truncated = lengths < 0
    groups = Groups(rewards, lengths, none_truncated)
    return method.apply(groups, advantages, AdvantagePipeline({}))


def test_grpo_and_dr_grpo_by_hand():
    """GRPO divides the reward less the mean by the standard deviation, and Dr. GRPO does not."""
    one_right = torch.tensor([[1.0, 0.0, 0.0, 0.0]])  # mean 1/4, sample deviation 1/2
    advantages = group_advantages(one_right, eps=0.0)
    assert advantages.tolist() == [pytest.approx([1.5, -0.5, -0.5, -0.5])]
    undivided = group_advantages(torch.tensor([[1.0, 0.0]]), scale="none")
    assert undivided.tolist() == [[0.5, -0.5]]
    with pytest.raises(ValueError, match="scale"):
        group_advantages(torch.ones(1, 2), scale="groups")


def test_a_constant_group_is_exactly_zero(subtests):
    """A group of equal rewards has no signal, so its advantages are 0 without any rounding."""
    scales = ["group", "batch", "none"]
    group_sizes = [2, 3, 7, 8, 12, 16]
    equal_rewards = [0.0, 0.1, 0.3, 1.0, 1e6]
    for scale, generations, reward in product(scales, group_sizes, equal_rewards):
        with subtests.test(f"{scale} {generations} {reward}"):
            rewards = torch.full((2, generations), reward, dtype=torch.float32)
            rewards[1, 0] = 2 * reward + 7  # the other group has signal
            advantages = group_advantages(rewards, scale=scale, eps=1e-9)
            assert advantages[0].tolist() == [0.0] * generations
            assert advantages[1, 0] > 0
    # without the guard, float32 turns seven rewards of 0.1 into advantages near 1
    constant = torch.full((1, 7), 0.1, dtype=torch.float32)
    centred = constant - constant.mean()
    unguarded = centred / (centred.std() + 1e-9)
    assert unguarded.abs().max() > 0.5


def test_the_rounding_noise_of_a_constant_group_is_taken_out_before_any_method():
    """TRL's advantages of a group of equal rewards are set to 0 before a method sees them.

    They may be rounding noise, here 6e-4 at each rollout, which a method would multiply.
    """
    groups = groups_of_rewards([[0.1] * 7, [1.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0]])
    noisy = torch.full((2, 7), 6e-4)
    result = final_advantages(AdvantagePipeline({"adora": Adora()}), groups, noisy)
    assert result[0].tolist() == [0.0] * 7
    assert (result[1] != 0).all()


def test_dapo_by_hand():
    """DAPO lowers the reward of long answers, and multiplies advantages by a ratio of tokens.

    The penalty grows from 0 at 80 tokens to -1 at 100. The ratio is all tokens over those of the
    groups with signal: TRL divides the loss by all tokens, and DAPO by those with signal.
    """
    penalties = overlong_penalty(torch.tensor([70, 80, 90, 100, 200]), 100, 20)
    assert penalties.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    advantages = torch.tensor([[1.0, -1.0], [0.0, 0.0]])
    lengths = torch.tensor([[5, 5], [20, 10]])  # 40 tokens, 10 of them in the group with signal
    weighted = advantages_by_method_alone(Dapo(), advantages, advantages, lengths)
    assert weighted.tolist() == [[4.0, -4.0], [0.0, 0.0]]
    groups = groups_of_rewards([[1.0, 1.0, 0.0]], [[10, 95, 10]])
    pipeline = AdvantagePipeline({"dapo": Dapo(overlong_cache=10)}, max_length=100)
    penalized = final_advantages(pipeline, groups, group_advantages(groups.rewards_PG))
    expected = group_advantages(torch.tensor([[1.0, 0.5, 0.0]]))
    assert penalized.tolist() == expected.tolist()


def test_adora_amplifies_after_dapo():
    """After DAPO and an amplifying ADORA an advantage has the factors of both.

    ADORA's is 2 for the first group, whose longest answer is right. DAPO's is all tokens over those
    of groups with signal. The second group has no signal, so its advantages stay 0.
    """
    groups = groups_of_rewards(
        [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]],
        [[9, 5, 5, 5], [4, 4, 4, 4]],
    )
    amplifying = Adora(mode="amplification", factor=Schedule(start=2.0))
    pipeline = AdvantagePipeline({"dapo": Dapo(), "adora": amplifying})
    grpo = group_advantages(groups.rewards_PG)
    advantages = final_advantages(pipeline, groups, grpo)
    all_tokens = 24 + 16
    tokens_with_signal = 24
    expected = grpo[0] * 2.0 * all_tokens / tokens_with_signal
    torch.testing.assert_close(advantages[0], expected)
    assert advantages[1].tolist() == [0.0] * 4


def test_daro_by_hand():
    """DARO sorts groups into bins by their pass rate, and computes a loss for each bin.

    A bin's loss is the mean over its tokens of the absolute advantages ("magnitude"), or of minus
    the advantages ("surrogate"). Groups with pass rates of 0 and 1 are in no bin.
    """
    pass_rates = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    assert assign_bins(pass_rates, 4).tolist() == [OUTSIDE_ALL_BINS, 0, 1, 2, OUTSIDE_ALL_BINS]
    # one of three scored is right: between 1/4 and 2/4, nearer the former
    assert assign_bins(torch.tensor([1 / 3]), 4).tolist() == [0]
    advantages = torch.tensor(
        [
            [1.5, -0.5, -0.5, -0.5],
            [1.0, 1.0, -1.0, -1.0],
            [0.0, 0.0, 0.0, 0.0],
        ]
    )
    tokens = torch.tensor(
        [
            [10, 10, 10, 10],
            [1, 1, 3, 3],
            [9, 9, 9, 9],
        ]
    )
    bins = torch.tensor([0, 1, OUTSIDE_ALL_BINS])
    magnitudes = losses_by_bin(advantages, tokens, bins, 3, "magnitude")
    assert magnitudes.tolist() == [30 / 40, 8 / 8, 0.0]
    surrogates = losses_by_bin(advantages, tokens, bins, 3, "surrogate")
    assert surrogates.tolist() == [0.0, 4 / 8, 0.0]


def test_daros_weights_converge_to_the_inverse_of_fixed_losses():
    """After 400 updates, weight times loss is 1 in each bin, so no difficulty dominates."""
    every_bin = torch.tensor([True, True, True])
    for losses in ([0.2, 0.9, 0.5], [3.0, 0.05, 1.0]):
        weights = DaroWeights(3, learning_rate=0.05)
        for _ in range(400):
            weights.update(torch.tensor(losses), every_bin)
        inverses = [1 / loss for loss in losses]
        assert weights.weights_M.tolist() == pytest.approx(inverses, rel=1e-3)
        contributions = weights.weights_M * torch.tensor(losses)
        no_difficulty_dominates = pytest.approx([1.0] * 3, rel=1e-3)
        assert contributions.tolist() == no_difficulty_dominates


def test_with_rewards_of_0_and_1_the_weights_converge_to_a_function_of_the_pass_rate():
    """If all answers are equally long, DARO's weights depend on the pass rate alone.

    They are 1.62, 1.24 and 1.07 for 1, 2 and 4 right answers of 8, as `docs/methods.md` says.
    """
    right = torch.tensor([1, 2, 4])
    rewards_PG = (torch.arange(8)[None, :] < right[:, None]).to(torch.float64)
    bins_P = assign_bins(right / 8, 8)
    tokens_PG = torch.full((3, 8), 30.0)
    # Groups of 8 with 1 to 7 right answers; those with 0 and 8 teach nothing. M counts the bins.
    bin_count = 7
    losses_M = losses_by_bin(
        group_advantages(rewards_PG), tokens_PG, bins_P, bin_count, "magnitude"
    )
    weights = DaroWeights(bin_count, learning_rate=0.05)
    present_M = torch.isin(torch.arange(bin_count), bins_P)
    for _ in range(2000):
        weights.update(losses_M, present_M)
    weights_P = weights.weights_M[bins_P]

    assert weights_P.tolist() == pytest.approx([1.62, 1.24, 1.07], abs=0.006)
    # The mean of |advantage| in a group of 8, as TRL's standard deviation divides by 7.
    rate_P = right / 8
    mean_magnitude_P = 2 * (rate_P * (1 - rate_P) * 7 / 8).sqrt()
    assert weights_P == pytest.approx(1 / mean_magnitude_P, rel=1e-3)


def test_a_bin_that_is_absent_keeps_its_weight_and_a_tiny_loss_has_a_bounded_one():
    """The first bin's loss is 0, so its weight is 1 / `min_loss`; the second bin is absent."""
    weights = DaroWeights(2, learning_rate=0.1, min_loss=0.1)
    for _ in range(300):
        weights.update(torch.tensor([0.0, 0.5]), torch.tensor([True, False]))
    assert weights.weights_M.tolist() == pytest.approx([10.0, 1.0], rel=1e-2)


def test_trls_token_mean_with_these_advantages_is_the_weighted_sum_of_bin_losses():
    """DARO's advantages give its loss and gradient in TRL's mean over all tokens.

    DARO's loss is the sum over bins of a bin's weight times the mean over its tokens. TRL's
    `loss_type: dapo` divides by the tokens of all bins.
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

    bins = assign_bins(rates, 4)
    weighed_advantages = (
        Daro().weigh_advantages(advantages, tokens, bins, weights, rewards >= 0).flatten()[:, None]
    )
    trl_loss = surrogate(weighed_advantages).sum() / mask.sum()
    daro_loss = torch.zeros(())
    for number, weight in enumerate(weights.tolist()):
        rows = (bins == number).repeat_interleave(4)
        if rows.any():
            daro_loss = (
                daro_loss
                + weight * surrogate(advantages.flatten()[:, None])[rows].sum() / mask[rows].sum()
            )
    torch.testing.assert_close(trl_loss, daro_loss)
    trl_gradient = torch.autograd.grad(trl_loss, logps)[0]
    daro_gradient = torch.autograd.grad(daro_loss, logps)[0]
    torch.testing.assert_close(trl_gradient, daro_gradient)
    assert daro_gradient.abs().sum() > 0


def advantages_of_steps(pipeline, count, first=0):
    """Return the advantages that a pipeline makes in some steps.

    The rewards are random and depend on the step alone. `count`: how many steps. `first`: their
    first.
    """
    results = []
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        rewards = torch.randint(0, 2, (8, 4), generator=generator).float()
        lengths = torch.randint(1, 30, (8, 4), generator=generator)
        groups = Groups(rewards, lengths, lengths > 99, step=step)
        results.append(final_advantages(pipeline, groups, group_advantages(rewards)))
    return results


def test_daro_resumes_to_the_bit_and_refuses_the_state_of_another_group_size():
    """A run that is saved after 5 of 8 steps and resumed ends with the same advantages.

    The state goes through JSON, as in a checkpoint's manifest.
    """
    uninterrupted = AdvantagePipeline({"daro": Daro()})
    expected = advantages_of_steps(uninterrupted, count=8)[5:]
    stopped = AdvantagePipeline({"daro": Daro()})
    advantages_of_steps(stopped, count=5)
    saved_state = json.dumps(stopped.state())
    resumed = AdvantagePipeline({"daro": Daro()})
    resumed.load(json.loads(saved_state))

    assert resumed.state() == stopped.state(), "also if it stops before its first batch"
    resumed_steps = advantages_of_steps(resumed, count=3, first=5)
    for resumed_step, expected_step in zip(resumed_steps, expected, strict=True):
        assert torch.equal(resumed_step, expected_step)
    assert resumed.state() == uninterrupted.state()
    fresh = AdvantagePipeline({"daro": Daro()})
    assert not torch.equal(advantages_of_steps(fresh, count=1, first=5)[0], expected[0])
    with pytest.raises(ValueError, match="3 saved weights, but 7 bins"):
        DaroWeights(7, 0.1).load(DaroWeights(3, 0.1).state())


def test_each_bin_of_daro_is_logged():
    """The names of the metrics have the right answers of a group of four: `daro/weight_1_of_4`."""
    method = AdvantagePipeline({"daro": Daro()})
    advantages_of_steps(method, count=1)
    assert {f"daro/weight_{right}_of_4" for right in (1, 2, 3)} <= method.metrics.keys()
    assert "daro/loss_2_of_4" in method.metrics


def test_a_schedule_by_hand():
    """A `Schedule` goes from its start to its end between two steps, linearly or by a cosine."""
    linear = Schedule(start=1.0, end=3.0, shape="linear", steps=(10, 20))
    assert [linear.at(step) for step in (0, 10, 15, 20, 99)] == [1.0, 1.0, 2.0, 3.0, 3.0]
    cosine = Schedule(start=1.0, end=3.0, shape="cosine", steps=(0, 4))
    assert [cosine.at(step) for step in (0, 1, 2, 4)] == pytest.approx(
        [1.0, 2 - math.sqrt(0.5), 2.0, 3.0]
    )
    assert Schedule(start=0.3).at(7) == 0.3
    # steps end before the second number
    options = Adora(steps=(2, 4))
    is_on_by_step = [options.is_on(step) for step in range(6)]
    assert is_on_by_step == [False, False, True, True, False, False]
    assert Adora().is_on(10**9)


WRONG_OPTIONS: list[
    tuple[Any, dict[str, Any], str]
] = [  # the options or the formula, what is wrong, what is named
    (Daro, {"bin_loss": "mean"}, "bin_loss"),
    (Daro, {"floor": 0.0}, "floor"),
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
    """The message begins with the option's name, or has it before a colon."""
    for method_class, wrong, named in WRONG_OPTIONS:
        with (
            subtests.test(f"{method_class.__name__} {named}"),
            pytest.raises(ValueError, match=f"^{named}|\\b{named}: "),
        ):
            method_class(**wrong)


METHODS_OF_TRL_KEYS_ALONE = {"grpo", "dr_grpo"}  # TRL's own keys are all there is to them


# The setting of each method at which it is GRPO: (options, the scale of the GRPO that it then is)
NEUTRAL_OPTIONS = {
    "grpo": (Grpo(), "group"),
    "dr_grpo": (DrGrpo(), "none"),
    "dapo": (Dapo(drop_constant=False), "group"),
    "adora": (Adora(mode="off"), "group"),
    "daro": (Daro(learning_rate=0.0, by_bin_tokens=False, drop_outside=False), "group"),
}


def test_every_method_has_a_neutral_setting_and_a_source():
    """`NEUTRAL_OPTIONS` has every method, and each names the paper that it is from."""
    assert NEUTRAL_OPTIONS.keys() == METHODS.keys()
    assert all(method.source.startswith("arXiv") for method in METHODS.values())


def test_the_neutral_setting_is_grpo_to_the_bit(subtests):
    """With its neutral options a method gives GRPO's advantages, and with its defaults others."""
    for name in METHODS:
        options, scale = NEUTRAL_OPTIONS[name]
        for seed in range(3):
            with subtests.test(f"{name} {seed}"):
                groups = random_groups(seed=seed)
                stock = group_advantages(groups.rewards_PG, scale=scale)
                neutral = method_advantages(name, groups, options, scale=scale)
                assert torch.equal(neutral, stock)
                if name not in METHODS_OF_TRL_KEYS_ALONE:
                    default = method_advantages(name, groups, scale=scale)
                    assert not torch.equal(default, stock), "so it can fail"


def test_a_neutral_pipeline_says_that_it_keeps_trls_advantages():
    """`keeps_trl_advantages` is true only where no option of a method changes advantages."""
    plain_names = set()
    for name, (options, _) in NEUTRAL_OPTIONS.items():
        if AdvantagePipeline({name: options}).keeps_trl_advantages:
            plain_names.add(name)
    assert plain_names == METHODS_OF_TRL_KEYS_ALONE | {"dapo", "adora"}
    assert AdvantagePipeline({"adora": Adora(factor=Schedule(start=1.0))}).keeps_trl_advantages
    for name in METHODS.keys() - METHODS_OF_TRL_KEYS_ALONE:
        assert not AdvantagePipeline({name: METHODS[name]()}).keeps_trl_advantages, name


def test_signal_is_what_a_group_has_to_teach_by_itself(subtests):
    """A group has signal if any of its advantages is not 0, by the methods of the run.

    The four groups are mixed, all wrong, all right, and without a right answer but with unequal
    rewards.
    """
    groups = groups_of_rewards(
        [[1.0, 0, 0, 0], [0.0] * 4, [1.0] * 4, [0.1, 0, 0, 0]], [[10, 20, 30, 40]] * 4
    )
    cases: dict[tuple[str, ...], tuple[list[bool], dict[str, Any]]] = {
        ("grpo",): ([True, False, False, True], {}),
        ("ngrpo", "dapo"): ([True, True, False, True], {"ngrpo": Ngrpo()}),
        ("ngrpo", "adora"): ([True, True, False, True], {"ngrpo": Ngrpo()}),
        ("dapo",): ([True] * 4, {"dapo": Dapo(overlong_cache=30)}),
        ("daro",): ([True, False, False, False], {}),
    }
    for names, (expected, options) in cases.items():
        with subtests.test("+".join(names)):
            pipeline = AdvantagePipeline(
                {name: options.get(name) or METHODS[name]() for name in names}, max_length=40
            )
            assert pipeline.groups_with_signal(groups).tolist() == expected
            assert pipeline.state() == {}
            advantages = final_advantages(pipeline, groups, group_advantages(groups.rewards_PG))
            assert advantages.any(dim=1).tolist() == expected, "so no method takes one for silent"


def test_a_group_to_which_another_method_gives_a_signal_counts_in_dapos_mean():
    """A group has signal for DAPO if the method before it gives it advantages other than 0.

    Two of three groups are wrong throughout, and ngrpo learns from them. So all tokens are those of
    groups with signal, and DAPO's factor is 1.
    """
    groups = groups_of_rewards([[1.0, 0], [0.0, 0], [0.0, 0]])
    pipeline = AdvantagePipeline({"ngrpo": Ngrpo(), "dapo": Dapo()})
    assert torch.equal(
        final_advantages(pipeline, groups, torch.zeros(3, 2)),
        advantages_by_method_alone(Ngrpo(), groups.rewards_PG),
    )


def test_permuting_a_group_permutes_its_advantages(subtests):
    """Any method gives a rollout the same advantage wherever it stands in its group."""
    cases: list[tuple[str, Any]] = [(name, None) for name in METHODS]
    cases += [
        ("adora", Adora(no_correct="attenuate", criteria=("length", "difficulty"), combine="all"))
    ]
    for name, options in cases:
        with subtests.test(f"{name} {options}"):
            groups = random_groups()
            order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
            names = ("rewards_PG", "lengths_PG", "truncated_PG", "surprisal_PG")
            permuted = replace(groups, **{name: getattr(groups, name)[:, order] for name in names})
            torch.testing.assert_close(
                method_advantages(name, permuted, options),
                method_advantages(name, groups, options)[:, order],
                rtol=0,
                atol=1e-9,
            )


def test_a_shift_of_all_rewards_changes_nothing(subtests):
    """Rewards that are all larger by 2 give the same advantages in every method.

    The threshold of a right answer is larger by 2 as well: 2.5 in place of 0.5.
    """
    for name in METHODS:
        with subtests.test(name):
            groups = random_groups()
            shifted = replace(groups, rewards_PG=groups.rewards_PG + 2, correct_above=2.5)
            torch.testing.assert_close(
                method_advantages(name, shifted), method_advantages(name, groups), rtol=0, atol=1e-9
            )


def test_a_scale_of_all_rewards_changes_nothing_or_scales_what_is_not_divided(subtests):
    """Only the advantages of Dr. GRPO, which does not divide, grow with the rewards, here by 4."""
    for name in METHODS:
        with subtests.test(name):
            groups = random_groups()
            scaled = replace(groups, rewards_PG=groups.rewards_PG * 4, correct_above=2.0)
            is_undivided = METHODS[name].settings.get("scale_rewards") == "none"
            scale = "none" if is_undivided else "group"
            expected = method_advantages(name, groups, scale=scale) * (4 if is_undivided else 1)
            # eps is added to a deviation that is four times as large
            torch.testing.assert_close(
                method_advantages(name, scaled, scale=scale), expected, rtol=5e-3, atol=1e-3
            )


DEGENERATE_REWARDS = {
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
    """Huge, missing and equal rewards give finite advantages, and 0 where no reward is."""
    for case, name in product(DEGENERATE_REWARDS, METHODS):
        with subtests.test(f"{case} {name}"):
            groups = groups_of_rewards(DEGENERATE_REWARDS[case])
            advantages = method_advantages(name, groups)
            assert advantages.shape == groups.rewards_PG.shape
            assert advantages.isfinite().all()
            assert (advantages[groups.rewards_PG.isnan()] == 0).all()
            if case == "none scored" or case.startswith("all"):
                assert (advantages == 0).all()


def test_a_better_reward_never_has_a_lower_sign_than_a_worse_one_in_its_group(subtests):
    """No method raises the probability of a wrong rollout and lowers that of a right one."""
    for name in METHODS:
        with subtests.test(name):
            groups = random_groups()
            advantages = method_advantages(name, groups)
            rewards = groups.rewards_PG
            lowest_of_best = torch.where(
                rewards == rewards.amax(1, keepdim=True), advantages, torch.inf
            ).amin(1)
            highest_of_worst = torch.where(
                rewards == rewards.amin(1, keepdim=True), advantages, -torch.inf
            ).amax(1)
            assert (lowest_of_best >= highest_of_worst).all()


def test_the_package_needs_torch_and_nothing_else():
    """Importing `adora_vl.advantage` imports no further library."""
    code = (
        "import sys, torch; before = set(sys.modules); import adora_vl.advantage\n"
        "print([m for m in sys.modules if m not in before and not m.startswith('adora_vl')"
        " and m.split('.')[0] not in sys.stdlib_module_names and not m.startswith('torch')])"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip() == "[]"


RANK_SCRIPT = """
import sys, torch, torch.distributed as dist
from adora_vl.advantage import METHODS, Groups, AdvantagePipeline, group_advantages
from adora_vl.advantage.adora import Adora
def final_advantages(pipeline, batch, trl_advantages):
    return pipeline.compute_advantages(batch, trl_advantages, pipeline.weigh(batch))
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
        alone = final_advantages(whole, groups(rewards, lengths), group_advantages(rewards))
        # this rank graded its half of the sequences: a group may lie over both ranks
        def gathered(values):
            mine = values.flatten().chunk(2)[rank].contiguous()
            parts = [torch.empty_like(mine) for _ in range(2)]
            dist.all_gather(parts, mine)
            return torch.cat(parts).view(6, 4)
        both = final_advantages(
            method, groups(gathered(rewards), gathered(lengths)), group_advantages(gathered(rewards))
        )
        assert torch.equal(alone, both) and method.learning_rate_factor == whole.learning_rate_factor, name
    states = [None, None]
    dist.all_gather_object(states, method.state())
    assert states[0] == states[1] == whole.state(), name
print("same")
"""


@pytest.mark.slow
def test_two_ranks_compute_what_one_does(tmp_path):
    """Two processes that gather half of the rewards each compute the advantages of one process.

    `RANK_SCRIPT` compares them, and the states, for every method and control over three steps.
    """
    port = str(free_port())
    script = tmp_path / "ranks.py"
    script.write_text(RANK_SCRIPT)
    env = {"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": ""}
    command = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank_number), port], stdout=subprocess.PIPE, text=True, env=env
        )
        for rank_number in range(2)
    ]
    assert [rank.communicate(timeout=120)[0].strip() for rank in ranks] == ["same", "same"]
