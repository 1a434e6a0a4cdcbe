"""A rollout without a reward leaves its group: it does not count as 0, and the run says so.

A reward is missing where a reward function fails, or where it returns None for some rollouts of a
group only. Its value is NaN in the tests, and the rollout's counted reward None.
"""

import asyncio
import math
import re
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from adora_vl.advantage import METHODS, AdvantagePipeline, Groups, group_advantages
from adora_vl.advantage.adora import Adora, weigh_groups
from adora_vl.advantage.grpo import Dapo
from adora_vl.checkpoint.store import read_checkpoint_manifest
from adora_vl.record.metrics import METRICS_FILE, read_metrics
from adora_vl.record.rollout_metrics import adora_metrics
from adora_vl.report.run_view import load_run
from adora_vl.train import main
from adora_vl.training.advantages import AdvantageComputer, Advantages, GroupAssessment
from adora_vl.training.guards import RewardGuard
from adora_vl.training.rollout_facts import RolloutFacts, weighted_sum
from adora_vl.utils.errors import RunError, SharedUserError, UserError
from tests.support.examples import load_example
from tests.support.facts import facts_without_unrewarded, rollout_facts
from tests.support.recorded_runs import write_recorded_run
from tests.support.reward_groups import final_advantages
from tests.support.step_context import step_context
from tests.support.tiny_run import TINY_RUN_STEPS, tiny_run_arguments

NAN = float("nan")


def facts_of_rewards(
    accuracy: list[float],
    judge: list[float],
    weights: Sequence[float] = (1.0, 1.0),
    *,
    failed: Iterable[int] = (),
    group_size: int = 4,
) -> RolloutFacts:
    """Return the facts of rollouts that two functions have rewarded.

    Args:
        accuracy: the rewards by the first function; NaN where it gave none.
        judge: the rewards by the second function, likewise.
        weights: the weights of the two functions.
        failed: the numbers of the rollouts for which the judge's call failed.
        group_size: rollouts of a group.
    """
    reason_by_call = {(rollout, 1): "HTTP 503" for rollout in failed}
    rewards_NF = torch.tensor([accuracy, judge]).T
    return facts_without_unrewarded(rewards_NF, group_size, failed=reason_by_call, weights=weights)


def summed_rewards(
    facts: RolloutFacts, weights: Sequence[float] = (1.0, 1.0)
) -> list[float | None]:
    """Return the weighted sum of each rollout's rewards; None for one that has left its group."""
    rewards = weighted_sum(facts.counted_rewards_NF, torch.tensor(weights)).tolist()
    return [None if math.isnan(reward) else reward for reward in rewards]


def test_a_failed_call_is_no_zero_and_a_rollout_that_is_left_alone_leaves_too():
    """Rollouts whose reward failed leave their group, and so does one that is left alone in it.

    The judge has scored the first rollout, and failed for the other three. If these counted as 0,
    the first one would get an advantage that it has not earned.
    """
    facts = facts_of_rewards([0.0] * 4, [0.5, NAN, NAN, NAN], failed=[1, 2, 3])
    assert summed_rewards(facts) == [None] * 4
    assert facts.missing_reward_reasons == (None, *["judge: HTTP 503"] * 3)
    assert facts.missing_reward_share == 0.75
    assert facts.reasons_not_learned_from[0] == "no other rollout of its group has a reward"


def test_rollouts_with_a_reward_are_compared_with_each_other_alone():
    """Two of four rollouts lack the judge's reward; the other two have advantages of their pair.

    The rewards 0.5 and 1 are 0.707 standard deviations below and above their mean.
    """
    facts = facts_of_rewards([1.0, 0.0, 0.0, 0.0], [NAN, 0.5, 1.0, NAN], failed=[0, 3])
    assert summed_rewards(facts) == [None, 0.5, 1.0, None]
    advantages = group_advantages(torch.tensor([[NAN, 0.5, 1.0, NAN]]))
    assert advantages.tolist()[0] == pytest.approx([0, -0.7070, 0.7070, 0], abs=1e-3)


def test_none_beside_a_score_in_the_same_group_is_missing_and_none_throughout_does_not_apply():
    """A function that gives None to a whole group does not apply to it; else None is missing.

    The judge is silent on the whole first group, so its problem is of another task, as in TRL. In
    the second group it scores three rollouts, so the fourth lacks its reward and has none.
    """
    facts = facts_of_rewards([1.0, 0.0, 1.0, 0.0] * 2, [NAN] * 4 + [1.0, 1.0, 0.0, NAN])
    assert summed_rewards(facts) == [1.0, 0.0, 1.0, 0.0, 2.0, 1.0, 1.0, None]
    assert facts.missing_reward_reasons[7] == "judge: None"
    assert facts.missing_reward_share == 1 / 8


def test_a_call_that_failed_is_missing_even_where_it_failed_for_the_whole_group():
    """A function that returns None for a whole group does not apply to it; one that fails does."""
    facts = facts_of_rewards([1.0, 0.0, 1.0, 0.0], [NAN] * 4, failed=[0, 1, 2, 3])
    assert summed_rewards(facts) == [None] * 4
    assert facts.missing_reward_share == 1
    # A call that failed shows that the function applies, so the other three lack its reward.
    facts = facts_of_rewards([1.0, 0.0, 1.0, 0.0], [NAN] * 4, failed=[0])
    assert summed_rewards(facts) == [None] * 4


def test_only_functions_with_a_weight_count():
    """A reward that a function of weight 0 gives, or fails to give, changes nothing."""
    judge_without_weight = (1.0, 0.0)
    facts = facts_of_rewards(
        [1.0, 0.0, 1.0, 0.0], [NAN, 1.0, 0.0, 1.0], judge_without_weight, failed=[0]
    )
    assert summed_rewards(facts, judge_without_weight) == [1.0, 0.0, 1.0, 0.0]
    assert facts.missing_reward_reasons == (None,) * 4
    facts = facts_of_rewards([NAN] * 4, [1.0] * 4, judge_without_weight)
    assert summed_rewards(facts, judge_without_weight) == [None] * 4
    assert set(facts.missing_reward_reasons) == {"no reward function scored it"}


def test_a_group_of_one_is_whole():
    """An evaluation may have one rollout a problem, so no other one has to be left beside it."""
    assert summed_rewards(facts_of_rewards([1.0, 0.0], [NAN, NAN], group_size=1)) == [1.0, 0.0]


def test_where_nothing_is_missing_trl_gets_what_it_gathered():
    """The rewards of 4 groups of 8 rollouts by 2 functions stay what they are."""
    rewards_NF = torch.rand(32, 2)
    facts = facts_without_unrewarded(rewards_NF, generations=8)
    assert torch.equal(facts.counted_rewards_NF, rewards_NF)


# TRL divides the loss by the tokens of all rollouts, also of those that have left. These methods
# multiply by that number, so their advantages are larger where rollouts have left.
METHODS_THAT_WEIGH_BY_TOKENS = {"dapo", "daro"}
METHOD_CASES: list[tuple[str, Any]] = [(name, METHODS[name]()) for name in METHODS]
METHOD_CASES += [("adora", Adora(assign=assign)) for assign in ("random", "reversed", "rate")]
METHOD_CASES += [
    ("canon", load_example("canon.py:Canon")(measure=measure)) for measure in ("length", "entropy")
]
METHOD_CASES += [("ngrpo", load_example("ngrpo.py:Ngrpo")())]
METHOD_CASES += [("dapo", Dapo(overlong_cache=50))]


def test_a_group_that_some_have_left_is_the_group_of_the_others(subtests):
    """Two of eight rollouts without a reward change nothing for the other six, in any method."""
    for (name, options), scale in product(METHOD_CASES, ("group", "batch", "none")):
        with subtests.test(f"{name} {options} {scale}"):
            assert_equal_to_groups_of_six(name, options, scale)


def assert_equal_to_groups_of_six(name: str, options: Any, scale: str) -> None:
    """Compare 30 groups of eight, which two rollouts have left, with 30 groups of the other six.

    The advantages of the six have to be equal, and those of the two have to be 0. There is one more
    group, which all rollouts have left, so its advantages are 0 too.
    """
    generator = torch.Generator().manual_seed(1)
    values = torch.tensor([0.0, 0.1, 1.0], dtype=torch.float64)
    rewards_of_six_PG = values[torch.randint(0, 3, (30, 6), generator=generator)]
    rewards_of_six_PG[0] = 1.0  # a group without signal
    # Which six of the eight rollouts remain in each group.
    remaining_PG = torch.stack(
        [torch.randperm(8, generator=generator)[:6].sort().values for _ in range(30)]
    )
    lengths_PG = torch.randint(1, 99, (31, 8), generator=generator)
    surprisal_PG = torch.rand(31, 8).double()

    def advantages(
        rewards_PG: torch.Tensor, lengths_PG: torch.Tensor, surprisal_PG: torch.Tensor
    ) -> torch.Tensor:
        """Return the final advantages of a method."""
        groups = Groups(rewards_PG, lengths_PG, lengths_PG > 90, surprisal_PG=surprisal_PG)
        trl_advantages_PG = group_advantages(rewards_PG, scale=scale)
        pipeline = AdvantagePipeline({name: options}, scale=scale, max_length=99, seed=1)
        return final_advantages(pipeline, groups, trl_advantages_PG)

    rewards_PG = torch.full((31, 8), NAN, dtype=torch.float64)
    rewards_PG[:30].scatter_(1, remaining_PG, rewards_of_six_PG)
    # The groups are moved by seven, so that the one that all have left is not the last one.
    moved_advantages_PG = advantages(
        rewards_PG.roll(7, dims=0), lengths_PG.roll(7, dims=0), surprisal_PG.roll(7, dims=0)
    )
    advantages_PG = moved_advantages_PG.roll(-7, dims=0)
    lengths_of_six_PG = lengths_PG[:30].gather(1, remaining_PG)
    expected_PG = advantages(
        rewards_of_six_PG, lengths_of_six_PG, surprisal_PG[:30].gather(1, remaining_PG)
    )
    if name in METHODS_THAT_WEIGH_BY_TOKENS:
        expected_PG = expected_PG * lengths_PG.sum() / lengths_of_six_PG.sum()
    if name == "adora" and options.assign == "random":
        # The draw is seeded by the number of groups with signal, which is the same.
        assert expected_PG.any()
    torch.testing.assert_close(
        advantages_PG[:30].gather(1, remaining_PG), expected_PG, rtol=1e-5, atol=1e-6
    )
    assert (advantages_PG[rewards_PG.isnan()] == 0).all()
    assert advantages_PG.any(), "nothing was compared"


def test_daro_learns_from_the_tokens_of_those_who_are_left():
    """DARO's loss of a group is over the tokens of the rollouts that have not left it.

    If the 1000 tokens of the two that have left counted, the loss would be much smaller.
    """
    rewards_PG = torch.tensor([[1.0, 0.0, NAN, NAN]])
    groups = Groups(
        rewards_PG, torch.tensor([[10, 30, 500, 500]]), torch.zeros(1, 4, dtype=torch.bool)
    )
    pipeline = AdvantagePipeline({"daro": METHODS["daro"]()})
    final_advantages(pipeline, groups, group_advantages(rewards_PG))
    # The rewards 1 and 0 are 0.7071 standard deviations from their mean.
    size_of_both_advantages = pytest.approx(0.7071, abs=1e-3)
    assert pipeline.metrics["daro/loss_2_of_4"] == size_of_both_advantages


def test_metrics_and_signal_leave_out_rollouts_without_a_reward():
    """Metrics and signal are of the rollouts that have not left their group.

    Two rollouts of 90 tokens have left the first group, and all have left the second. So the
    metrics are those of a right answer of 5 tokens and a wrong one of 7. The group is
    disadvantageous to learn from (TDS), since its right answer is shorter.
    """
    lengths_PG = torch.tensor([[5.0, 7.0, 90.0, 90.0], [90.0] * 4])
    rewards_PG = torch.tensor([[1.0, 0.0, NAN, NAN], [NAN] * 4])
    groups = Groups(rewards_PG, lengths_PG, truncated_PG=torch.zeros_like(lengths_PG).bool())
    weighting = weigh_groups(groups)
    metrics = adora_metrics(weighting)

    assert metrics["pass_rate"] == 0.5
    assert metrics["no_correct_share"] == 0.0
    assert metrics["tds_share"] == 1.0
    assert (metrics["length_correct"], metrics["length_wrong"]) == (5.0, 7.0)
    advantages_PG = group_advantages(groups.rewards_PG)
    assessment = GroupAssessment(
        groups=groups,
        weighting=weighting,
        trl_advantages_PG=advantages_PG,
        has_signal_P=torch.tensor([True, False]),
        equal_reward_share=0.0,
        num_ranks=1,
    )
    advantages = Advantages(
        assessment=assessment,
        final_PG=advantages_PG,
        metrics={},
    )
    assert advantages.has_signal_N.tolist() == [True, True, *[False] * 6]


def test_trls_share_of_equal_rewards_is_of_the_groups_that_are_there():
    """The share of groups with equal rewards is of those that have rewards.

    One of four groups has no rewards, and one has equal rewards. TRL would count both and log 1/2.
    Ours is one of the three groups with rewards, 1/3.
    """
    rewards_BF = torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0, 1.0, NAN, NAN]]).T
    computer = AdvantageComputer(step_context(), AdvantagePipeline({}), torch.ones(1))
    facts = rollout_facts(rewards_BF, length_N=torch.ones(8))
    assessment = computer.assess(facts, group_size=2, step=0)
    assert assessment.equal_reward_share == pytest.approx(1 / 3)


def flaky(completions: list[Any], **columns: Any) -> list[Any]:
    """Reward completions with an exception for "lost", None for "?", and 1 for all others."""
    special_rewards = {"lost": TimeoutError("after 60 s\nmore"), "?": None}
    return [special_rewards.get(text, 1.0) for text in completions]


async def flaky_async(completions: list[Any], **columns: Any) -> list[Any]:
    """Reward completions as `flaky` does, as a coroutine."""
    return flaky(completions)


def test_an_exception_in_the_place_of_a_reward_is_a_failed_call_of_that_completion():
    """An exception among the rewards that a function returns is a reward that is missing.

    A judge that uses `asyncio.gather(..., return_exceptions=True)` returns such exceptions. The run
    goes on without these rewards, and records the first line of each as the reason.
    """
    guard = RewardGuard(step_context())
    function, async_function = guard.wrap_functions([flaky, flaky_async], ["flaky", "flaky_async"])
    assert function(completions=["fine", "lost", "?"]) == [1.0, None, None]
    assert asyncio.run(async_function(completions=["lost"])) == [None]
    guard.check(step=0)
    # (number of the rollout, number of the function): the reason
    assert guard.pop_failed_calls(3) == {
        (1, 0): "TimeoutError: after 60 s",
        (0, 1): "TimeoutError: after 60 s",
    }
    assert guard.pop_failed_calls(3) == {}, "they are forgotten"


def test_rollouts_of_other_ranks_keep_their_place(monkeypatch):
    """A failed call is listed under the number of its rollout among those of all ranks.

    Each rank has four. This is rank 1 of 3, so its second rollout has the number 5. A call on rank
    0 failed too.
    """
    guard = RewardGuard(step_context())
    (function,) = guard.wrap_functions([flaky], ["flaky"])
    function(completions=["fine", "lost", "fine", "fine"])
    # (number of the rollout, number of the function, the reason) of each failed call on a rank
    failed_calls_of_rank_0 = [(3, 0, "a")]
    monkeypatch.setattr(
        "adora_vl.training.guards.gather_object",
        lambda calls_of_rank: [failed_calls_of_rank_0, *calls_of_rank, []],
    )
    assert guard.pop_failed_calls(4) == {(3, 0): "a", (5, 0): "TimeoutError: after 60 s"}


def test_a_mistake_of_the_user_on_one_rank_ends_all(monkeypatch, tmp_path):
    """A `UserError` on one rank is raised on all, with the step and the checkpoint to go on from.

    One machine may lack the key of a judge, for example, so that its rank alone fails. If that rank
    ended alone, the other would wait for it in a collective call.
    """

    def refuse(**arguments: Any) -> list[float]:
        raise UserError("adora_reward: judge: the key is refused")

    guards = [RewardGuard(step_context(save_now=lambda: tmp_path)) for _ in range(2)]
    for guard, function in zip(guards, (refuse, lambda **_: [1.0]), strict=True):
        (guarded_function,) = guard.wrap_functions([function], ["judge"])
        guarded_function(completions=["fine"])
    failures_of_ranks = [*guards[0].failures, *guards[1].failures]
    monkeypatch.setattr(
        "adora_vl.training.guards.gather_object", lambda failures: failures_of_ranks
    )
    for guard in guards:
        with pytest.raises(
            SharedUserError, match=rf"^step 3: .* refused, and go on with --resume_\w+ {tmp_path}$"
        ):
            guard.check(step=2)  # two steps are made, so this is the third


def test_a_generation_without_one_reward_ends_the_run_in_one_line(tmp_path):
    """Where some rollouts have a reward the run goes on; where none has, it cannot learn."""
    guard = RewardGuard(step_context(save_now=lambda: tmp_path))
    some_missing = facts_of_rewards([0.0] * 4, [1.0, NAN, NAN, NAN])
    guard.check_scored(some_missing.missing_reward_reasons, step=2)
    all_missing = facts_of_rewards([0.0] * 4, [NAN] * 4, failed=range(4))
    with pytest.raises(RunError) as error:
        guard.check_scored(all_missing.missing_reward_reasons, step=2)
    assert str(error.value) == (
        "step 3: not one of 4 rollouts has a reward (judge: HTTP 503). Nothing of this step was "
        f"applied. Repair the reward, and go on with --resume_from_checkpoint {tmp_path}"
    )


# A user's file with two reward functions for four groups of four rollouts. `flaky` lacks rewards in
# different ways. `gone` has none in the second generation, until a file "back" lies beside it.
USER_FILE = """
from pathlib import Path

def flaky(completions, prompts, trainer_state, **kwargs):
    # group 0: no reward is missing; 1: the function does not apply (None); 2 and 3: calls fail
    scores = []
    for row in range(len(completions)):
        group, rollout = divmod(row, 4)
        value = 0.25 * rollout
        missing = [(), (0, 1, 2, 3), (0, 3), (1, 2, 3)][group]
        none = None if group == 1 else ConnectionError("no route to the judge")
        scores.append(none if rollout in missing else value)
    return scores

def gone(completions, trainer_state, **kwargs):
    lost = trainer_state.global_step == 1 and not Path(__file__).with_name("back").exists()
    return [ConnectionError("no route to the judge") if lost else 0.5 for _ in completions]
"""


@pytest.fixture(scope="module")
def user_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the user's file, in a folder of its own."""
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(USER_FILE)
    return file


@pytest.mark.slow
def test_the_run_learns_from_rollouts_with_a_reward_and_records_why_others_have_none(
    user_file, tmp_path, capsys
):
    """A judge that cannot be reached leaves rollouts without a reward, and the run goes on.

    The first of four groups has all rewards. In the second `flaky` scores none, so only the other
    function counts. The third keeps two rollouts. The last keeps one, which cannot be compared with
    any other and is left out too. Advantages are those of the rollouts that are left.
    """
    argv = tiny_run_arguments(tmp_path / "run", save_strategy="no")
    assert (
        main([*argv, "--adora_reward", "format", f"{user_file}:flaky", "--adora_method", "grpo"])
        == 0
    )
    rollouts = pd.read_parquet(tmp_path / "run" / "rollouts")
    first = rollouts[rollouts["step"] == 1].reset_index(drop=True)
    groups = [group for _, group in first.groupby("group")]
    sums_of_first_group = groups[0]["reward/format_reward"] + groups[0]["reward/flaky"]
    assert groups[0]["reward"].tolist() == sums_of_first_group.tolist()
    assert groups[0]["missing"].isna().all()
    assert groups[1]["reward"].tolist() == groups[1]["reward/format_reward"].tolist()
    assert groups[2]["reward"].isna().tolist() == [True, False, False, True]
    reason = "flaky: ConnectionError: no route to the judge"
    assert groups[2]["missing"].fillna("").tolist() == [reason, "", "", reason]
    assert groups[2]["reward/format_reward"].notna().all()
    assert groups[3]["missing"].tolist() == [
        "no other rollout of its group has a reward",
        reason,
        reason,
        reason,
    ]
    for group, remaining_count in zip(groups, (4, 4, 2, 0), strict=True):
        rewards_G = torch.tensor(group["reward"].dropna().to_numpy())
        assert len(rewards_G) == remaining_count
        expected_G = rewards_G
        if remaining_count:
            expected_G = group_advantages(rewards_G[None])[0]
        has_left = group["reward"].isna()
        advantages = group["advantage"][~has_left].tolist()
        assert advantages == pytest.approx(expected_G.tolist(), abs=2e-3)
        assert (group["advantage"][has_left] == 0).all()
    metrics = [
        line for line in read_metrics(tmp_path / "run" / METRICS_FILE) if "rewards/missing" in line
    ]
    assert [line["rewards/missing"] for line in metrics] == [5 / 16] * TINY_RUN_STEPS
    assert metrics[0]["reward"] == pytest.approx(first["reward"].mean(), abs=1e-6)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(printed) == TINY_RUN_STEPS
    assert all("  without reward 31%  " in line for line in printed)


@pytest.mark.slow
def test_the_run_stops_where_no_rollout_has_a_reward_and_goes_on_from_there(
    user_file, tmp_path, capsys
):
    """A run ends at step 2 in one line, with the checkpoint of step 1, and is resumed from it.

    The reward function `gone` fails for all rollouts of step 2, until the test repairs it.
    """
    argv = [*tiny_run_arguments(tmp_path / "run"), "--adora_reward", "format", f"{user_file}:gone"]
    assert main(argv) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert re.fullmatch(
        r"error: step 2: not one of 16 rollouts has a reward \(gone: ConnectionError: no route to "
        r"the judge\)\. "
        r"Nothing of this step was applied\. Repair the reward, and go on with --resume_from_\w+ "
        r"\S+checkpoint-1",
        line,
    )
    # Metrics of the second generation, which is sampled again, would be counted twice.
    assert read_checkpoint_manifest(tmp_path / "run" / "checkpoint-1")["metrics"] == {}
    user_file.with_name("back").touch()  # from here on the function works
    assert main([*argv, *line.split()[-2:]]) == 0
    metrics = [
        line for line in read_metrics(tmp_path / "run" / METRICS_FILE) if "rewards/missing" in line
    ]
    assert [line["rewards/missing"] for line in metrics] == [0.0] * TINY_RUN_STEPS


def test_the_report_says_that_no_rollout_of_a_group_has_a_reward(tmp_path):
    run = write_recorded_run(tmp_path / "run", step_count=1, reward=None, missing="judge: HTTP 503")
    (group, *_) = load_run(run, 100).groups
    assert group["why"].startswith("No rollout of the group has a reward")
