"""The semantics table of ADORA's length criterion, row by row, and the properties of a per-prompt weight."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from adora_vl.advantage import adora_weights, group_advantages

NAN = float("nan")

# rewards, lengths, weight by the VLM reference (factor 0.1, truncated_at 100), weight with empty_wrong="keep"
TABLE = {
    "no correct rollout": ([0.0, 0.1, 0.1, 0.0], [5, 6, 7, 8], 1.0, 1.0),
    "no correct one, one unscored": ([0.0, NAN, 0.1, 0.0], [5, 600, 7, 8], 1.0, 1.0),
    "longest correct longer than mean wrong": ([1.0, 1.0, 0.1, 0.0], [3, 9, 4, 8], 1.0, 1.0),
    "the longest decides, not the mean of correct": ([1.0, 1.0, 1.0, 0.1], [1, 1, 7, 6], 1.0, 1.0),
    "the mean of wrong decides, not the longest": ([1.0, 0.1, 0.1, 0.1], [6, 1, 4, 9], 1.0, 1.0),
    "correct shorter": ([1.0, 1.0, 0.1, 0.0], [3, 5, 6, 8], 0.1, 0.1),
    "equal lengths": ([1.0, 1.0, 0.1, 0.0], [3, 6, 4, 8], 0.1, 0.1),
    "all correct": ([1.0, 1.0, 1.0, 1.0], [3, 5, 6, 8], 0.1, 1.0),
    "every wrong one truncated": ([1.0, 0.1, 0.0, 0.0], [50, 100, 120, 100], 0.1, 1.0),
    "a truncated wrong one does not count": ([1.0, 0.1, 0.0, 0.0], [50, 100, 40, 44], 1.0, 1.0),
    "a truncated correct one counts": ([1.0, 0.1, 0.0, 0.0], [100, 60, 40, 44], 1.0, 1.0),
    "an unscored one is not wrong": ([1.0, NAN, 0.0, 0.0], [50, 90, 40, 44], 1.0, 1.0),
    "correct is above the threshold, not at it": ([0.5, 0.1, 0.0, 0.0], [50, 90, 90, 90], 1.0, 1.0),
}


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_semantics_table(case):
    rewards, lengths, attenuate, keep = TABLE[case]
    group = torch.tensor([rewards]), torch.tensor([lengths])
    for option, expected in (("attenuate", attenuate), ("keep", keep)):
        weights = adora_weights(*group, truncated_at=100, empty_wrong=option)
        assert weights.tolist() == [pytest.approx(expected)], option


def test_defaults_are_the_references_vlm_recipe():
    rewards, lengths = torch.tensor([[1.0, 0.1]]), torch.tensor([[3, 5]])
    assert adora_weights(rewards, lengths).tolist() == [pytest.approx(0.1)]
    assert adora_weights(rewards, lengths).dtype == torch.float32
    # without truncated_at nothing is truncated, however long
    assert adora_weights(torch.tensor([[1.0, 0.1]]), torch.tensor([[9000, 8000]])).tolist() == [1.0]


def test_amplification_multiplies_the_advantageous_groups_only():
    rewards = torch.tensor([[1.0, 0.1], [1.0, 0.1], [0.1, 0.1]])
    lengths = torch.tensor([[9, 5], [3, 5], [3, 5]])
    assert adora_weights(rewards, lengths, mode="amplification", factor=4.0).tolist() == [4.0, 1.0, 1.0]
    assert adora_weights(rewards, lengths, mode="off").tolist() == [1.0, 1.0, 1.0]
    assert adora_weights(rewards, lengths, factor=1.0).tolist() == [1.0, 1.0, 1.0]


# right of four, tau, weights (attenuation to 0.1, amplification to 2), and those where a pass rate of 0 does not count
DIFFICULTY = [
    (0, 0.5, (1.0, 2.0), (1.0, 1.0)),
    (1, 0.5, (1.0, 2.0), (1.0, 2.0)),
    (2, 0.5, (1.0, 2.0), (1.0, 2.0)),
    (3, 0.5, (0.1, 1.0), (0.1, 1.0)),
    (4, 0.5, (0.1, 1.0), (0.1, 1.0)),
    (1, 0.2, (0.1, 1.0), (0.1, 1.0)),
]


@pytest.mark.parametrize(("right", "tau", "published", "needing_one"), DIFFICULTY)
def test_difficulty_is_a_pass_rate_of_at_most_tau(right, tau, published, needing_one):
    rewards = torch.tensor([([1.0] * right + [0.1] * 3 + [0.0])[:4]])
    lengths = torch.tensor([[10] * 4])
    for needs_correct, weights in ((False, published), (True, needing_one)):
        own = {"criteria": ("difficulty",), "tau": tau, "difficulty_needs_correct": needs_correct}
        assert adora_weights(rewards, lengths, **own).tolist() == [pytest.approx(weights[0])]
        amplified = adora_weights(rewards, lengths, mode="amplification", factor=2.0, **own)
        assert amplified.tolist() == [pytest.approx(weights[1])]


def test_a_group_that_nothing_scored_has_no_pass_rate():
    rewards, lengths = torch.full((1, 4), NAN), torch.full((1, 4), 10)
    assert adora_weights(rewards, lengths, mode="amplification", factor=2.0, criteria=("difficulty",)).item() == 1.0


# criteria, combine, weight of a group without a correct rollout with no_correct="keep", with "attenuate"
NO_CORRECT = [
    (("length",), "any", 1.0, 0.1),
    (("difficulty",), "any", 1.0, 1.0),  # TAS: 0 is at most tau
    (("length", "difficulty"), "any", 1.0, 1.0),
    (("length", "difficulty"), "all", 1.0, 0.1),
]


@pytest.mark.parametrize(("criteria", "combine", "keep", "attenuate"), NO_CORRECT)
def test_a_group_without_a_correct_rollout_is_kept_or_attenuated(criteria, combine, keep, attenuate):
    group = torch.tensor([[0.0, 0.1, 0.1, 0.0]]), torch.tensor([[5, 6, 70, 8]])
    own = {"criteria": criteria, "combine": combine}
    assert adora_weights(*group, **own).item() == keep
    assert adora_weights(*group, **own, no_correct="attenuate").item() == pytest.approx(attenuate)


@pytest.mark.parametrize(
    "neutral", [{"mode": "off"}, {"factor": 1.0}, {"mode": "amplification", "factor": 1.0}], ids=str
)
@pytest.mark.parametrize("needs_correct", [False, True])
def test_every_option_is_grpo_to_the_bit_with_a_weight_of_one(neutral, needs_correct):
    rewards, lengths = _random_groups()
    own = {"criteria": ("length", "difficulty"), "no_correct": "attenuate", "difficulty_needs_correct": needs_correct}
    raw = group_advantages(rewards)
    assert torch.equal(raw * adora_weights(rewards, lengths, **own, **neutral)[:, None], raw)


def test_with_both_options_the_length_criterion_is_the_llm_references():
    """`compute_grpo_outcome_advantage_ADORA` written out: a maximum or a mean over nothing is -inf."""
    rewards, lengths = _random_groups(prompts=400, generations=5)
    weights = adora_weights(rewards, lengths, truncated_at=60, empty_wrong="keep", no_correct="attenuate")
    for reward, length, weight in zip(rewards, lengths, weights, strict=True):
        right, wrong = length[reward > 0.5], length[(reward <= 0.5) & (length < 60)]
        longest = right.max().item() if len(right) else float("-inf")
        mean = wrong.float().mean().item() if len(wrong) else float("-inf")
        assert weight.item() == pytest.approx(1.0 if longest > mean else 0.1)


def test_criteria_combine():
    rewards = torch.tensor([[1.0, 0.1, 0.1, 0.1], [1.0, 1.0, 1.0, 0.1], [1.0, 1.0, 1.0, 0.1]])
    lengths = torch.tensor([[1, 5, 5, 5], [9, 9, 9, 5], [1, 1, 1, 5]])  # hard but short, easy but long, neither
    both = ("length", "difficulty")
    assert adora_weights(rewards, lengths, criteria=both).tolist() == [1.0, 1.0, pytest.approx(0.1)]
    result = adora_weights(rewards, lengths, criteria=both, combine="all")
    assert result.tolist() == [pytest.approx(0.1)] * 3


def _random_groups(seed=0, prompts=64, generations=8):
    generator = torch.Generator().manual_seed(seed)
    choices = torch.tensor([0.0, 0.1, 1.0])
    rewards = choices[torch.randint(0, 3, (prompts, generations), generator=generator)]
    return rewards, torch.randint(1, 110, (prompts, generations), generator=generator)


@pytest.mark.parametrize(
    "options", [{}, {"criteria": ("length", "difficulty"), "combine": "all"}, {"no_correct": "attenuate"}], ids=str
)
def test_permuting_the_rollouts_of_a_group_changes_nothing(options):
    rewards, lengths = _random_groups()
    weights = adora_weights(rewards, lengths, truncated_at=100, **options)
    assert 0 < (weights < 1).sum() < len(weights)  # both kinds of group are there
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(weights, adora_weights(rewards[:, order], lengths[:, order], truncated_at=100, **options))


def test_a_duplicated_prompt_changes_nothing_for_others():
    rewards, lengths = _random_groups()
    doubled = adora_weights(torch.cat([rewards, rewards[:1]]), torch.cat([lengths, lengths[:1]]), truncated_at=100)
    single = adora_weights(rewards, lengths, truncated_at=100)
    assert torch.equal(doubled[:-1], single)
    assert doubled[-1] == single[0]


def test_a_weight_keeps_sign_and_ranking_inside_the_group():
    rewards, lengths = _random_groups()
    raw = group_advantages(rewards)
    weighted = raw * adora_weights(rewards, lengths)[:, None]
    assert torch.equal(raw.sign(), weighted.sign())
    assert torch.equal(raw.argsort(dim=1, stable=True), weighted.argsort(dim=1, stable=True))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mode": "attenuate"}, "mode"),
        ({"criteria": ("lenght",)}, "criteria"),
        ({"criteria": "length"}, "criteria"),
        ({"criteria": ()}, "criteria"),
        ({"combine": "or"}, "combine"),
        ({"empty_wrong": "drop"}, "empty_wrong"),
        ({"no_correct": "drop"}, "no_correct"),
        ({"factor": 1.5}, "factor"),
        ({"factor": 0.0}, "factor"),
        ({"mode": "amplification", "factor": 0.5}, "factor"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named(options, named):
    with pytest.raises(ValueError, match=named):
        adora_weights(torch.ones(2, 4), torch.ones(2, 4), **options)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"\(2, 4\)"):
        adora_weights(torch.ones(2, 4), torch.ones(2, 3))


def test_group_advantages_by_hand():
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), eps=0.0)
    assert advantages.tolist() == [pytest.approx([1.5, -0.5, -0.5, -0.5])]  # mean 1/4, sample deviation 1/2
    assert group_advantages(torch.tensor([[1.0, 0.0]]), scale="none").tolist() == [[0.5, -0.5]]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("generations", [2, 3, 7, 8, 12, 16])
@pytest.mark.parametrize("reward", [0.0, 0.1, 0.3, 1.0, 1e6])
def test_a_constant_group_is_exactly_zero(scale, generations, reward):
    rewards = torch.full((2, generations), reward)
    rewards[1, 0] = 2 * reward + 7  # the other group has signal
    advantages = group_advantages(rewards, scale=scale, eps=1e-9)
    assert advantages[0].tolist() == [0.0] * generations
    assert advantages[1, 0] > 0


def test_the_guard_is_needed():
    """Without it, float32 turns seven rewards of 0.1 into advantages near 1."""
    rewards = torch.full((1, 7), 0.1)
    centred = rewards - rewards.mean()
    assert (centred / (centred.std() + 1e-9)).abs().max() > 0.5


def test_an_unscored_rollout_has_no_advantage_and_moves_no_mean():
    advantages = group_advantages(torch.tensor([[1.0, 0.0, NAN], [NAN, NAN, NAN]]))
    assert advantages[0, 2] == 0
    assert advantages[0, 0] == -advantages[0, 1] > 0
    assert advantages[1].tolist() == [0.0, 0.0, 0.0]


def test_an_unknown_scale_is_named():
    with pytest.raises(ValueError, match="scale"):
        group_advantages(torch.ones(1, 2), scale="groups")


def test_the_package_needs_torch_and_nothing_else():
    code = (
        "import sys, torch; before = set(sys.modules); import adora_vl.advantage\n"
        "print([m for m in sys.modules if m not in before and not m.startswith('adora_vl')"
        " and m.split('.')[0] not in sys.stdlib_module_names and not m.startswith('torch')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
