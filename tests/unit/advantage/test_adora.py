"""ADORA multiplies the advantages of a group by a weight; how its criteria decide the weight.

A group is temporarily disadvantageous to learn from (TDS) if its right answers are short, for
example, and is then attenuated: its weight is 0.1. An advantageous one (TAS) may be amplified. The
controls at the end weigh other groups than the criteria say, or scale the learning rate.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer

from adora_vl.advantage import AdvantagePipeline, Groups, Schedule, group_advantages, weigh_groups
from adora_vl.advantage.adora import Adora
from adora_vl.advantage.grpo import is_constant
from adora_vl.config.methods import build_pipeline, check_methods, check_methods_fit_sharding
from adora_vl.config.sharding import Sharding
from adora_vl.training.optimizer_steps import ScaledRate
from adora_vl.utils.errors import UserError
from tests.support.commands import parse
from tests.support.reward_groups import (
    adora_weights,
    final_advantages,
    groups_of_rewards,
    method_advantages,
    random_groups,
)
from tests.support.tiny_run import train_tiny_run

NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class LengthCase:
    """A group, its weight by the VLM reference, and its weight with `empty_wrong="keep"`.

    The factor is 0.1, and rollouts of 100 tokens are truncated.
    """

    rewards: list[float]
    lengths: list[int]
    weight: float
    weight_if_kept: float


LENGTH_CASES = {
    "no correct rollout": LengthCase(
        rewards=[0.0, 0.1, 0.1, 0.0],
        lengths=[5, 6, 7, 8],
        weight=1.0,
        weight_if_kept=1.0,
    ),
    "no correct one, one unscored": LengthCase(
        rewards=[0.0, NAN, 0.1, 0.0],
        lengths=[5, 600, 7, 8],
        weight=1.0,
        weight_if_kept=1.0,
    ),
    "longest correct longer than mean wrong": LengthCase(
        rewards=[1.0, 1.0, 0.1, 0.0],
        lengths=[3, 9, 4, 8],
        weight=1.0,
        weight_if_kept=1.0,
    ),
    "the longest decides, not the mean of correct": LengthCase(
        rewards=[1.0, 1.0, 1.0, 0.1],
        lengths=[1, 1, 7, 6],
        weight=1.0,
        weight_if_kept=1.0,
    ),
    "the mean of wrong decides, not the longest": LengthCase(
        rewards=[1.0, 0.1, 0.1, 0.1],
        lengths=[6, 1, 4, 9],
        weight=1.0,
        weight_if_kept=1.0,
    ),
    "correct shorter": LengthCase(
        rewards=[1.0, 1.0, 0.1, 0.0],
        lengths=[3, 5, 6, 8],
        weight=0.1,
        weight_if_kept=0.1,
    ),
    "equal lengths": LengthCase(
        rewards=[1.0, 1.0, 0.1, 0.0],
        lengths=[3, 6, 4, 8],
        weight=0.1,
        weight_if_kept=0.1,
    ),
    "all correct": LengthCase(
        rewards=[1.0, 1.0, 1.0, 1.0],
        lengths=[3, 5, 6, 8],
        weight=0.1,
        weight_if_kept=1.0,
    ),
    "every wrong one truncated": LengthCase(
        rewards=[1.0, 0.1, 0.0, 0.0],
        lengths=[50, 100, 120, 100],
        weight=0.1,
        weight_if_kept=1.0,
    ),
    "a truncated wrong one does not count": LengthCase(
        rewards=[1.0, 0.1, 0.0, 0.0],
        lengths=[50, 100, 40, 44],
        weight=1.0,
        weight_if_kept=1.0,
    ),
    "a truncated correct one counts": LengthCase(
        rewards=[1.0, 0.1, 0.0, 0.0],
        lengths=[100, 60, 40, 44],
        weight=1.0,
        weight_if_kept=1.0,
    ),
    "an unscored one is not wrong": LengthCase(
        rewards=[1.0, NAN, 0.0, 0.0],
        lengths=[50, 90, 40, 44],
        weight=1.0,
        weight_if_kept=1.0,
    ),
    "correct is above the threshold, not at it": LengthCase(
        rewards=[0.5, 0.1, 0.0, 0.0],
        lengths=[50, 90, 90, 90],
        weight=1.0,
        weight_if_kept=1.0,
    ),
}


@pytest.mark.parametrize("name", LENGTH_CASES)
def test_the_length_criterion_weighs_a_group_by_hand(name):
    """A group is attenuated unless its longest right rollout is longer than the mean wrong one.

    `empty_wrong` says whether a group without a wrong rollout to compare with is attenuated or
    kept.
    """
    case = LENGTH_CASES[name]
    rewards = torch.tensor([case.rewards])
    lengths = torch.tensor([case.lengths])
    weights = adora_weights(rewards, lengths, truncated_at=100, empty_wrong="attenuate")
    assert weights.tolist() == [pytest.approx(case.weight)]
    keeping_empty = adora_weights(rewards, lengths, truncated_at=100, empty_wrong="keep")
    assert keeping_empty.tolist() == [pytest.approx(case.weight_if_kept)]


def test_defaults_are_the_references_vlm_recipe():
    """ADORA's defaults attenuate a group to 0.1 if its right answer is shorter than the wrong."""
    rewards = torch.tensor([[1.0, 0.1]])
    lengths = torch.tensor([[3, 5]])
    assert adora_weights(rewards, lengths).tolist() == [pytest.approx(0.1)]
    assert adora_weights(rewards, lengths).dtype == torch.float32
    # without truncated_at nothing is truncated, however long
    assert adora_weights(torch.tensor([[1.0, 0.1]]), torch.tensor([[9000, 8000]])).tolist() == [1.0]


def test_amplification_multiplies_the_advantageous_groups_only():
    """Amplification gives its factor to groups whose right answer is longer, and 1 to others.

    The first group has a longer right answer, the second a shorter one, the third none.
    """
    rewards = torch.tensor([[1.0, 0.1], [1.0, 0.1], [0.1, 0.1]])
    lengths = torch.tensor([[9, 5], [3, 5], [3, 5]])
    amplified = adora_weights(rewards, lengths, mode="amplification", factor=4.0)
    assert amplified.tolist() == [4.0, 1.0, 1.0]
    assert adora_weights(rewards, lengths, mode="off").tolist() == [1.0, 1.0, 1.0]
    assert adora_weights(rewards, lengths, factor=1.0).tolist() == [1.0, 1.0, 1.0]


@dataclass(frozen=True, kw_only=True)
class DifficultyCase:
    """How many of four rollouts are right, and the group's weight with a threshold of `tau`.

    Attenuation is to 0.1, amplification to 2.
    """

    right_count: int
    tau: float
    attenuated_weight: float
    amplified_weight: float


# As published: a pass rate of 0 is at most any tau.
PUBLISHED_DIFFICULTY_CASES = [
    DifficultyCase(right_count=0, tau=0.5, attenuated_weight=1.0, amplified_weight=2.0),
    DifficultyCase(right_count=1, tau=0.5, attenuated_weight=1.0, amplified_weight=2.0),
    DifficultyCase(right_count=2, tau=0.5, attenuated_weight=1.0, amplified_weight=2.0),
    DifficultyCase(right_count=3, tau=0.5, attenuated_weight=0.1, amplified_weight=1.0),
    DifficultyCase(right_count=4, tau=0.5, attenuated_weight=0.1, amplified_weight=1.0),
    DifficultyCase(right_count=1, tau=0.2, attenuated_weight=0.1, amplified_weight=1.0),
]
# With needs_correct a group without a right rollout is left as it is.
CASE_WITHOUT_RIGHT = DifficultyCase(
    right_count=0,
    tau=0.5,
    attenuated_weight=1.0,
    amplified_weight=1.0,
)
CASES_THAT_NEED_A_RIGHT = [CASE_WITHOUT_RIGHT, *PUBLISHED_DIFFICULTY_CASES[1:]]


@pytest.mark.parametrize(
    ("needs_correct", "case"),
    [
        *[(False, case) for case in PUBLISHED_DIFFICULTY_CASES],
        *[(True, case) for case in CASES_THAT_NEED_A_RIGHT],
    ],
)
def test_difficulty_is_a_pass_rate_of_at_most_tau(needs_correct, case):
    """A group of four is difficult if at most the share `tau` of it is right.

    Attenuation multiplies the other groups by 0.1, amplification the difficult ones by 2.0. With
    `needs_correct` a group without a right rollout keeps its weight. Rewards: 1.0 right, 0.1 wrong.
    """
    rewards = torch.full((1, 4), 0.1)
    rewards[:, : case.right_count] = 1.0
    lengths = torch.full((1, 4), 10)
    options: dict[str, Any] = {
        "criteria": ("difficulty",),
        "tau": case.tau,
        "needs_correct": needs_correct,
    }
    attenuated = adora_weights(rewards, lengths, **options)

    assert attenuated.tolist() == [pytest.approx(case.attenuated_weight)]
    amplified = adora_weights(
        rewards,
        lengths,
        mode="amplification",
        factor=2.0,
        **options,
    )
    assert amplified.tolist() == [pytest.approx(case.amplified_weight)]


def test_a_group_of_which_nothing_is_scored_is_not_hard():
    """A group without any reward is not difficult, so amplification leaves its weight at 1.

    It has no pass rate.
    """
    rewards = torch.full((1, 4), NAN)
    lengths = torch.full((1, 4), 10)
    weights = adora_weights(
        rewards, lengths, mode="amplification", factor=2.0, criteria=("difficulty",)
    )
    assert weights.item() == 1.0


@dataclass(frozen=True, kw_only=True)
class NoCorrectCase:
    """Criteria, and what a group without a right rollout weighs by them."""

    criteria: tuple[str, ...]
    combine: str
    weight_with_keep: float
    """With `no_correct="keep"`."""
    weight_with_attenuate: float
    """With `no_correct="attenuate"`."""


NO_CORRECT_CASES = [
    NoCorrectCase(
        criteria=("length",), combine="any", weight_with_keep=1.0, weight_with_attenuate=0.1
    ),
    # a pass rate of 0 is at most tau, so the group is advantageous
    NoCorrectCase(
        criteria=("difficulty",), combine="any", weight_with_keep=1.0, weight_with_attenuate=1.0
    ),
    NoCorrectCase(
        criteria=("length", "difficulty"),
        combine="any",
        weight_with_keep=1.0,
        weight_with_attenuate=1.0,
    ),
    NoCorrectCase(
        criteria=("length", "difficulty"),
        combine="all",
        weight_with_keep=1.0,
        weight_with_attenuate=0.1,
    ),
]


@pytest.mark.parametrize("case", NO_CORRECT_CASES)
def test_a_group_without_a_correct_rollout_is_kept_or_attenuated(case):
    """The option `no_correct` keeps or attenuates a group in which no rollout is right.

    It has no effect where the criteria call the group advantageous, as `difficulty` does.
    """
    rewards = torch.tensor([[0.0, 0.1, 0.1, 0.0]])
    lengths = torch.tensor([[5, 6, 70, 8]])
    options: dict[str, Any] = {"criteria": case.criteria, "combine": case.combine}
    weights_if_kept = adora_weights(rewards, lengths, **options)
    assert weights_if_kept.item() == case.weight_with_keep
    weights_if_attenuated = adora_weights(rewards, lengths, no_correct="attenuate", **options)
    assert weights_if_attenuated.item() == pytest.approx(case.weight_with_attenuate)


def test_a_group_is_advantageous_by_any_or_by_all_criteria():
    """Three groups are hard and short, easy and long, and easy and short in their right answers.

    With `combine="any"` the first two are advantageous, and with "all" none is.
    """
    rewards = torch.tensor([[1.0, 0.1, 0.1, 0.1], [1.0, 1.0, 1.0, 0.1], [1.0, 1.0, 1.0, 0.1]])
    # hard but short, easy but long, neither
    lengths = torch.tensor([[1, 5, 5, 5], [9, 9, 9, 5], [1, 1, 1, 5]])
    criteria = ("length", "difficulty")
    assert adora_weights(rewards, lengths, criteria=criteria).tolist() == [
        1.0,
        1.0,
        pytest.approx(0.1),
    ]
    weights_by_all = adora_weights(rewards, lengths, criteria=criteria, combine="all")
    assert weights_by_all.tolist() == [pytest.approx(0.1)] * 3


@dataclass(frozen=True, kw_only=True)
class TieCase:
    """A group, and whether its longest right rollout is as long as the mean of its wrong ones.

    Wrong rollouts of 100 tokens were truncated and do not count.
    """

    rewards: list[float]
    lengths: list[int]
    is_tie: bool


TIE_CASES = [
    TieCase(
        rewards=[1.0, 1.0, 0.1, 0.0],
        lengths=[3, 6, 4, 8],
        is_tie=True,
    ),
    TieCase(
        rewards=[1.0, 0.1, 0.1, 0.0],
        lengths=[7, 6, 7, 8],
        is_tie=True,
    ),
    TieCase(
        rewards=[1.0, 0.1, 0.1, 0.0],
        lengths=[7, 6, 7, 9],
        is_tie=False,
    ),
    # one wrong rollout was truncated
    TieCase(
        rewards=[1.0, 0.1, 0.1, 0.0],
        lengths=[7, 6, 8, 100],
        is_tie=True,
    ),
    # there is no wrong rollout to compare with
    TieCase(
        rewards=[1.0, 1.0, 1.0, 1.0],
        lengths=[5, 5, 5, 5],
        is_tie=False,
    ),
    # every wrong rollout was truncated
    TieCase(
        rewards=[1.0, 0.1, 0.0, 0.0],
        lengths=[100, 100, 100, 100],
        is_tie=False,
    ),
    # there is no right rollout
    TieCase(
        rewards=[0.0, 0.1, 0.0, 0.0],
        lengths=[5, 5, 5, 5],
        is_tie=False,
    ),
]


@pytest.mark.parametrize("case", TIE_CASES)
def test_ties_of_length_are_attenuated_as_in_the_references_or_kept(case):
    """A group with a tie is attenuated by default, and keeps its weight with `ties="keep"`.

    The longest right rollout of a tie is as long as the mean of the wrong ones. For any other group
    the option changes nothing.
    """
    rewards = torch.tensor([case.rewards])
    lengths = torch.tensor([case.lengths])
    strict = adora_weights(rewards, lengths, truncated_at=100)
    lenient = adora_weights(rewards, lengths, truncated_at=100, ties="keep")
    if case.is_tie:
        assert strict.item() == pytest.approx(0.1)
        assert lenient.item() == 1.0
    else:
        assert torch.equal(strict, lenient)


@pytest.mark.parametrize("case", TIE_CASES)
def test_a_tie_is_counted_where_it_is_attenuated_by_its_length(case):
    """`tds_by_tie_P` marks the groups that are attenuated only because of a tie.

    In a tie the longest right rollout is as long as the mean of the wrong ones.
    """
    lengths = torch.tensor([case.lengths])
    groups = Groups(
        rewards_PG=torch.tensor([case.rewards]),
        lengths_PG=lengths,
        truncated_PG=lengths >= 100,
    )
    assert weigh_groups(groups).tds_by_tie_P.tolist() == [case.is_tie]
    keeping_ties = weigh_groups(groups, Adora(ties="keep"))
    assert not keeping_ties.tds_by_tie_P.any(), "what is kept is no TDS group"
    by_difficulty = weigh_groups(groups, Adora(criteria=("difficulty",)))
    assert not by_difficulty.tds_by_tie_P.any(), "lengths do not count without their criterion"


def test_keeping_ties_amplifies_them():
    """A tie that is not attenuated counts as advantageous, so amplification applies to it."""
    group = torch.tensor([[1.0, 0.1]]), torch.tensor([[5, 5]])
    amplification: dict[str, Any] = {"mode": "amplification", "factor": 4.0}
    attenuating_ties = adora_weights(*group, ties="attenuate", **amplification)
    assert attenuating_ties.tolist() == [1.0]
    keeping_ties = adora_weights(*group, ties="keep", **amplification)
    assert keeping_ties.tolist() == [4.0]


def test_with_both_options_the_length_criterion_is_the_llm_references():
    """With two options ADORA weighs as its reference for language models, not as that for VLMs.

    Groups without a wrong rollout are kept, and those without a right one attenuated. The expected
    weights follow the reference's code, `compute_grpo_outcome_advantage_ADORA`: a maximum or a mean
    over nothing is -inf. Rollouts of 60 tokens or more are truncated.
    """
    groups = random_groups(prompts=400, generations=5)
    rewards = groups.rewards_PG
    lengths = groups.lengths_PG
    weights = adora_weights(
        rewards, lengths, truncated_at=60, empty_wrong="keep", no_correct="attenuate"
    )
    for reward, length, weight in zip(rewards, lengths, weights, strict=True):
        is_right = reward > 0.5
        is_wrong = (reward <= 0.5) & (length < 60)
        right_lengths = length[is_right]
        wrong_lengths = length[is_wrong]
        longest = right_lengths.max().item() if len(right_lengths) else float("-inf")
        mean = wrong_lengths.float().mean().item() if len(wrong_lengths) else float("-inf")
        assert weight.item() == pytest.approx(1.0 if longest > mean else 0.1)


def test_a_wrong_argument_is_named(subtests):
    """Each wrong option of ADORA raises an error with its name."""
    cases: list[Any] = [
        ({"mode": "attenuate"}, "mode"),
        ({"criteria": ("lenght",)}, "criteria"),
        ({"criteria": "length"}, "criteria"),
        ({"criteria": ()}, "criteria"),
        ({"combine": "or"}, "combine"),
        ({"empty_wrong": "drop"}, "empty_wrong"),
        ({"ties": "drop"}, "ties"),
        ({"no_correct": "drop"}, "no_correct"),
        ({"factor": 1.5}, "factor"),
        ({"factor": 0.0}, "factor"),
        ({"mode": "amplification", "factor": 0.5}, "factor"),
        ({"tau": 0.0}, "tau"),
        ({"steps": (5, 5)}, "steps"),
    ]
    for options, named in cases:
        with subtests.test(f"{options!r:.80}"), pytest.raises(ValueError, match=named):
            adora_weights(torch.ones(2, 4), torch.ones(2, 4), **options)
    with subtests.test("shapes"), pytest.raises(ValueError, match=r"\(2, 4\)"):
        adora_weights(torch.ones(2, 4), torch.ones(2, 3))


def test_the_key_reaches_the_criterion():
    """The option `ties` of the command line decides the weight of a group with a tie."""
    tie = Groups(
        torch.tensor([[1.0, 0.0]]), torch.tensor([[5.0, 5.0]]), torch.zeros(1, 2, dtype=torch.bool)
    )
    for argv, weight in (
        ([], 0.1),
        (["--adora_method.adora.ties", "keep"], 1.0),
    ):
        options = parse_config(*argv)
        assert build_pipeline(options).weigh(tie).weights_P.tolist() == [pytest.approx(weight)]


def test_adora_changes_its_factor_and_tau_with_the_step_and_is_off_outside_its_steps():
    """The factor grows from 0.1 to 0.5 in steps 0 to 4, and tau from 0.25 to 0.75 in steps 4 to 8.

    The pass rate is one half, so the group is attenuated while tau is below that, up to step 5.
    """
    options = Adora(
        criteria=("difficulty",),
        factor=Schedule(start=0.1, end=0.5, shape="linear", steps=(0, 4)),
        tau=Schedule(start=0.25, end=0.75, shape="linear", steps=(4, 8)),
        steps=(0, 10),
    )
    rewards = [[1.0, 1.0, 0.0, 0.0]]
    base = group_advantages(torch.tensor([[1.0, 1.0, 0.0, 0.0]]))
    weights = [
        (method_advantages("adora", groups_of_rewards(rewards, step=step), options) / base)[
            0, 0
        ].item()
        for step in (0, 2, 4, 5, 6, 9, 10)
    ]
    # TDS while tau is below one half, that is up to step 5
    assert weights == pytest.approx([0.1, 0.3, 0.5, 0.5, 1.0, 1.0, 1.0])


CONTROL_ASSIGNMENTS = ("random", "reversed", "rate")


def groups_of_four(seed=0, step=0, prompts=40) -> Groups:
    """Return random groups of four rollouts.

    `seed`: draws them. `step`: the optimizer step that they count as. `prompts`: how many groups.
    """
    return random_groups(prompts, 4, seed, step)


def weigh_with_assignment(assign, batch, seed=5, **options):
    """Return ADORA's weighting of a batch with a control; the assignment "criterion" is ADORA's."""
    return AdvantagePipeline({"adora": Adora(assign=assign, **options)}, seed=seed).weigh(batch)


def apply_with_assignment(assign, batch, **options):
    """Return the advantages of a batch with a control, and the pipeline that made them."""
    pipeline = AdvantagePipeline({"adora": Adora(assign=assign, **options)}, seed=5)
    return final_advantages(pipeline, batch, group_advantages(batch.rewards_PG)), pipeline


def test_the_neutral_setting_of_a_control_is_grpo_to_the_bit(subtests):
    """With mode "off" or a factor of 1, a control leaves TRL's advantages and the rate alone."""
    cases: Iterable[Any] = product(
        CONTROL_ASSIGNMENTS, [{"mode": "off"}, {"factor": Schedule(start=1.0)}]
    )
    for assign, neutral_options in cases:
        with subtests.test(f"{assign} {neutral_options!r:.80}"):
            advantages, pipeline = apply_with_assignment(
                assign, groups_of_four(), **neutral_options
            )
            assert pipeline.keeps_trl_advantages
            assert pipeline.learning_rate_factor == 1.0
            assert torch.equal(advantages, group_advantages(groups_of_four().rewards_PG))


def test_random_attenuates_as_many_groups_with_signal_but_others(subtests):
    """The control "random" gives the same weights to randomly chosen groups with signal."""
    for seed in range(5):
        with subtests.test(f"{seed}"):
            batch = groups_of_four(seed)
            by_criterion = weigh_with_assignment("criterion", batch)
            by_chance = weigh_with_assignment("random", batch)
            has_signal = ~is_constant(batch.rewards_PG)
            criterion_weights = by_criterion.weights_P[has_signal]
            random_weights = by_chance.weights_P[has_signal]
            assert torch.equal(random_weights.sort().values, criterion_weights.sort().values)
            assert not torch.equal(random_weights, criterion_weights)
            assert torch.equal(
                by_chance.weights_P[~has_signal], by_criterion.weights_P[~has_signal]
            )
            assert torch.equal(by_chance.tds_P, by_criterion.tds_P), (
                "what the criteria say stays in the log"
            )


def test_random_depends_on_the_runs_seed_and_step_alone():
    """A resumed run draws the same groups; with another step or seed it draws others."""
    before = torch.random.get_rng_state()
    first = weigh_with_assignment("random", groups_of_four(step=3)).weights_P
    assert torch.equal(torch.random.get_rng_state(), before), "no global state is touched"
    torch.manual_seed(99)
    # The global seed has no part in it, so a process of its own would do the same.
    resumed = weigh_with_assignment("random", groups_of_four(step=3)).weights_P
    assert torch.equal(first, resumed)
    assert not torch.equal(first, weigh_with_assignment("random", groups_of_four(step=4)).weights_P)
    assert not torch.equal(
        first, weigh_with_assignment("random", groups_of_four(step=3), seed=6).weights_P
    )


def test_every_group_is_chosen_equally_often_by_chance():
    """Each group with signal is attenuated in as many of 400 draws as the share of such groups."""
    is_attenuated = torch.stack(
        [
            weigh_with_assignment("random", groups_of_four(), seed=seed).weights_P < 1
            for seed in range(400)
        ]
    ).double()
    has_signal = ~is_constant(groups_of_four().rewards_PG)
    share = (
        (weigh_with_assignment("criterion", groups_of_four()).weights_P[has_signal] < 1)
        .double()
        .mean()
    )
    assert (
        is_attenuated.mean(0)[has_signal] - share
    ).abs().max() < 0.12  # 4.8 standard deviations of 400 draws at most


def test_reversed_gives_the_factor_to_the_groups_that_the_criterion_spares(subtests):
    """The control "reversed" attenuates advantageous groups, or amplifies disadvantageous ones."""
    for mode, factor in [("attenuation", 0.1), ("amplification", 2.0)]:
        with subtests.test(mode):
            batch = groups_of_four()
            options = {"mode": mode, "factor": Schedule(factor)}
            by_criterion = weigh_with_assignment("criterion", batch, **options)
            by_reversal = weigh_with_assignment("reversed", batch, **options)
            gets_factor = by_criterion.weights_P != 1
            gets_factor_reversed = by_reversal.weights_P != 1
            assert gets_factor.any()
            assert gets_factor_reversed.any()
            assert not (gets_factor & gets_factor_reversed).any()
            neither = ~by_criterion.tds_P & ~by_criterion.tas_P
            assert torch.equal(gets_factor | gets_factor_reversed, ~neither), (
                "a group without a right rollout keeps its weight"
            )
            assert bool(
                (by_reversal.weights_P[gets_factor_reversed] == torch.tensor(factor).float()).all()
            )


def test_a_control_gives_the_factor_of_the_step_and_is_off_outside_its_steps():
    """A control uses the factor of the step, and has no effect outside of the option `steps`.

    The factor grows from 0.1 at step 0 to 0.5 at step 4. With `steps` (0, 2) step 2 is outside.
    """
    factor = Schedule(start=0.1, end=0.5, shape="linear", steps=(0, 4))
    for step, expected in (
        (0, 0.1),
        (2, 0.3),
        (9, 0.5),
    ):
        weights_P = weigh_with_assignment(
            "reversed", groups_of_four(step=step), factor=factor
        ).weights_P
        assert sorted({round(weight, 6) for weight in weights_P.tolist()}) == [expected, 1.0]
        assert bool(
            (
                weigh_with_assignment("random", groups_of_four(step=step), steps=(0, 2)).weights_P
                < 1
            ).any()
        ) is (step < 2)
    assert (
        apply_with_assignment("rate", groups_of_four(step=2), steps=(0, 2))[1].learning_rate_factor
        == 1.0
    )


def test_rate_is_the_mean_weight_of_the_groups_with_signal_and_leaves_the_advantages():
    """The control "rate" multiplies the learning rate by the mean weight, and weighs no group."""
    batch = groups_of_four()
    advantages, pipeline = apply_with_assignment("rate", batch)
    assert torch.equal(advantages, group_advantages(batch.rewards_PG))
    has_signal = ~is_constant(batch.rewards_PG)
    assert (
        pipeline.learning_rate_factor
        == weigh_with_assignment("criterion", batch).weights_P[has_signal].mean().item()
    )
    assert 0.1 < pipeline.learning_rate_factor < 1
    assert pipeline.metrics == {"rate_scale": pipeline.learning_rate_factor}
    assert bool((pipeline.weighting.weights_P == 1).all())
    assert (
        apply_with_assignment("rate", groups_of_four(prompts=2))[1].learning_rate_factor == 1.0
    ), "nothing has signal"


def test_rate_survives_a_checkpoint_between_two_updates_of_a_generation():
    """The factor of the learning rate is saved as JSON, and the resumed run has the same."""
    _, run = apply_with_assignment("rate", groups_of_four())
    resumed = AdvantagePipeline({"adora": Adora(assign="rate")}, seed=5)
    resumed.load(json.loads(json.dumps(run.state())))
    assert resumed.learning_rate_factor == run.learning_rate_factor != 1.0
    assert AdvantagePipeline({"adora": Adora()}).state() == {}


def test_the_optimizer_steps_with_the_scaled_rate_and_has_its_own_again():
    """The callback multiplies the learning rate of 0.3 by 0.7 for one step, and restores it."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.3)
    factors = iter([0.7, 1.0])
    callback = ScaledRate(lambda: next(factors))
    changes = []
    for _ in range(2):
        weight.grad = torch.ones(1)
        callback.on_pre_optimizer_step(None, None, None, optimizer=optimizer)
        weight_before = weight.item()
        optimizer.step()
        callback.on_optimizer_step(None, None, None, optimizer=optimizer)
        changes.append(weight_before - weight.item())
        assert optimizer.param_groups[0]["lr"] == 0.3
    assert changes == pytest.approx([0.21, 0.3])


@pytest.mark.slow
def test_a_run_takes_its_steps_with_the_logged_rate(tmp_path, monkeypatch):
    """A training takes each optimizer step with the rate of 1e-3 times the logged factor.

    1e-3 is the learning rate of the tiny run.
    """
    stock_step = AcceleratedOptimizer.step
    rates = []

    def record_rate_and_step(self, *arguments):
        rates.append(self.param_groups[0]["lr"])
        return stock_step(self, *arguments)

    monkeypatch.setattr(AcceleratedOptimizer, "step", record_rate_and_step)
    options = '{"adora": {"assign": "rate", "criteria": ["difficulty"], "tau": 0.25}}'
    folder = train_tiny_run(tmp_path / "run", save_strategy="no", adora_method=options, max_steps=3)
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    scales = [entry["adora/rate_scale"] for entry in log if "adora/rate_scale" in entry]
    assert rates == pytest.approx([1e-3 * scale for scale in scales], rel=1e-4)
    assert len(rates) == 3
    assert min(scales) < 1
    assert all(
        "adora/reflective_per_1000_tokens" in entry for entry in log if "adora/rate_scale" in entry
    )


def parse_config(*arguments):
    """Return the training config that these command-line arguments set."""
    return parse(["--use_cpu", "true", "--bf16", "false", "--output_dir", "x", *arguments])[1]


def test_the_key_sets_the_control_and_refuses_an_unknown_one():
    """The command line chooses a control, which draws by the seed of the run."""
    argv = ["--adora_method.adora.assign", "random", "--seed", "7"]
    assert build_pipeline(parse_config(*argv)).adora_options.assign == "random"
    assert build_pipeline(parse_config(*argv)).seed == 7
    with pytest.raises(
        UserError, match="assign: 'randm' is not one of criterion, random, reversed, rate"
    ):
        parse_config("--adora_method.adora.assign", "randm")


RATE_ASSIGNMENT_ARGV = [
    "--adora_method.adora.assign",
    "rate",
    "--gradient_accumulation_steps",
    "4",
]


def test_a_step_has_one_rate(subtests):
    """An optimizer step over two generations would take the learning rate of the second alone."""
    for argv, message in [
        (
            ["--steps_per_generation", "2"],
            "steps_per_generation: 2 with assign: rate, .*accumulation_steps: 4",
        ),
        (["--steps_per_generation", "6"], "steps_per_generation: 6 with assign: rate"),
    ]:
        with subtests.test(f"{argv!r:.80}"):
            for fits in (["8"], ["2", "--num_iterations", "2"]):
                check_methods(parse_config(*RATE_ASSIGNMENT_ARGV, "--steps_per_generation", *fits))
            with pytest.raises(UserError, match=message):
                check_methods(parse_config(*RATE_ASSIGNMENT_ARGV, *argv))


def test_no_learning_rate_is_scaled_with_deepspeed():
    """DeepSpeed takes its step before the rate can be scaled, so any of its stages is refused."""
    config = parse_config(*RATE_ASSIGNMENT_ARGV)
    check_methods_fit_sharding(config, Sharding(processes=2))
    with pytest.raises(UserError, match="assign: rate does not work with DeepSpeed"):
        check_methods_fit_sharding(config, Sharding(processes=2, zero_stage=0))
    default = parse_config("--adora_method.adora.assign", "criterion")
    check_methods_fit_sharding(default, Sharding(processes=2, zero_stage=3))


# Work in place of length


def with_net_claims(groups: Groups, net_claims: torch.Tensor | list[list[float]]) -> Groups:
    """Return the groups with these net claims of each rollout, [[2, 0], [1, 1]].

    The net claims of an answer are its new true claims less its false ones, and at least 0. The
    criterion "working" compares groups by them in place of length.
    """
    return replace(groups, net_claims_PG=torch.as_tensor(net_claims, dtype=torch.float64))


def test_where_net_claims_are_lengths_the_criterion_working_is_the_criterion_length(subtests):
    """Weights and verdicts are the same by both criteria, whatever the other options are.

    The verdicts say which groups are temporarily disadvantageous (TDS) or advantageous (TAS) to
    learn from, and which are disadvantageous by a tie.
    """
    options = {
        "mode": ("attenuation", "amplification"),
        "combine": ("any", "all"),
        "empty_wrong": ("attenuate", "keep"),
        "ties": ("attenuate", "keep"),
        "no_correct": ("attenuate", "keep"),
        "others": ((), ("difficulty",)),
    }
    ties = 0
    for values in product(*options.values()):
        chosen_options: dict[str, Any] = dict(zip(options, values, strict=True))
        other_criteria = chosen_options.pop("others")
        chosen_options["factor"] = 0.1 if chosen_options["mode"] == "attenuation" else 4.0
        with subtests.test(str(values)):
            groups = random_groups(prompts=200, seed=7)
            # Coarse lengths, so that the longest right rollout often ties with the wrong ones.
            groups = replace(groups, lengths_PG=groups.lengths_PG // 30)
            groups = with_net_claims(groups, groups.lengths_PG)
            by_length = weigh_groups(
                groups, Adora(criteria=("length", *other_criteria), **chosen_options)
            )
            by_net_claims = weigh_groups(
                groups, Adora(criteria=("working", *other_criteria), **chosen_options)
            )
            for name in ("weights_P", "tds_P", "tas_P", "tds_by_tie_P"):
                assert torch.equal(getattr(by_length, name), getattr(by_net_claims, name)), name
            advantageous_groups = by_length.tas_P.sum()
            assert 0 < advantageous_groups < len(by_length.tas_P), "neither none nor all"
            ties += int(by_length.tds_by_tie_P.sum())
    assert ties > 0, "no group was a tie, so the option `ties` was not compared"


@pytest.mark.parametrize(
    ("rewards", "net_claims", "weight"),
    [
        ([1.0, 1.0, 0.1, 0.0], [0, 3, 2, 1], 1.0),  # a right one has worked more than wrong ones do
        ([1.0, 1.0, 0.1, 0.0], [0, 1, 2, 1], 0.1),  # right ones are luck
        ([1.0, 1.0, 0.1, 0.0], [0, 2, 3, 1], 0.1),  # a tie counts as in the references
        ([1.0, 1.0, 1.0, 1.0], [0, 2, 3, 1], 0.1),  # no wrong one
        ([0.1, 0.0, 0.1, 0.1], [0, 2, 3, 1], 1.0),  # no right one
        ([1.0, NAN, 0.1, 0.0], [2, 9, 1, 1], 1.0),  # one that has left its group is not compared
    ],
)
def test_groups_are_weighed_by_net_claims(rewards, net_claims, weight):
    """The criterion "working" keeps a group's weight at 1 if a right rollout has more net claims.

    The most net claims of a right rollout are compared with the mean of the wrong ones; else the
    group is attenuated to 0.1. One without a right rollout keeps its weight.
    """
    groups = with_net_claims(groups_of_rewards([rewards], [[5, 5, 90, 5]]), [net_claims])
    weighting = weigh_groups(groups, Adora(criteria=("working",)))
    assert weighting.weights_P.tolist() == [pytest.approx(weight)]


def test_a_problem_without_a_figure_goes_by_length_or_keeps_its_weight():
    """Groups whose net claims are unknown (NaN) are compared by length, or keep their weight.

    Net claims are unknown where a problem has no figure. By length the first group is attenuated,
    and the second is not. With `no_figure="keep"` neither is.
    """
    rewards = [[1.0, 1.0, 0.1, 0.0]] * 2
    lengths = [
        [3, 5, 6, 8],
        [3, 9, 4, 8],
    ]  # disadvantageous and advantageous by length
    unknown_work = [[NAN] * 4] * 2
    groups = with_net_claims(groups_of_rewards(rewards, lengths), unknown_work)
    by_length = weigh_groups(groups, Adora(criteria=("working",)))

    assert by_length.weights_P.tolist() == [pytest.approx(0.1), 1.0]
    mode: Any
    for mode, factor in (("attenuation", 0.1), ("amplification", 4.0)):
        options = Adora(
            criteria=("working",),
            no_figure="keep",
            mode=mode,
            factor=factor,
        )
        weighting = weigh_groups(groups, options)
        assert weighting.weights_P.tolist() == [1.0, 1.0]
        assert not (weighting.tds_P | weighting.tas_P).any()
    two_criteria = Adora(criteria=("working", "length"), no_figure="keep", combine="all")
    assert weigh_groups(groups, two_criteria).weights_P.tolist() == [pytest.approx(0.1), 1.0]


def test_net_claims_that_were_not_counted_are_refused():
    """The criterion "working" raises an error for groups without them."""
    groups = groups_of_rewards([[1.0, 0.1]])
    with pytest.raises(ValueError, match="working needs the net claims of each rollout"):
        weigh_groups(groups, Adora(criteria=("working",)))


def test_controls_act_on_weights_by_net_claims_as_on_those_by_length():
    """The sum of weights is kept by "random", their mean is "rate", and "reversed" inverts them."""
    groups = random_groups(prompts=60, seed=3)
    groups = with_net_claims(groups, torch.randint(0, 4, groups.rewards_PG.shape))
    options = Adora(criteria=("working",))
    weighting = weigh_groups(groups, options)
    has_signal_P = groups.rewards_differ_P
    shuffled = replace(options, assign="random").assign_weights(
        weighting, has_signal_P, seed=1, step=2
    )

    assert shuffled.weights_P.sum() == pytest.approx(weighting.weights_P.sum())
    assert not torch.equal(shuffled.weights_P, weighting.weights_P)
    by_rate = replace(options, assign="rate").assign_weights(
        weighting, has_signal_P, seed=1, step=2
    )
    assert by_rate.learning_rate_factor == pytest.approx(
        weighting.weights_P[has_signal_P].mean().item()
    )
    reversed_weighting = replace(options, assign="reversed").assign_weights(
        weighting, has_signal_P, seed=1, step=2
    )
    assert torch.equal(reversed_weighting.weights_P < 1, weighting.tas_P)
