"""A rollout without a reward leaves its group: it is no zero in any mean, and the run says so."""

import asyncio
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from adora_vl.advantage import METHODS, AdvantagePipeline, Groups, group_advantages
from adora_vl.advantage.adora import Adora, weigh_groups
from adora_vl.advantage.grpo import Dapo
from adora_vl.checkpoint.store import manifest_of
from adora_vl.record.metrics import METRICS, read_metrics
from adora_vl.record.rollout_figures import adora_metrics
from adora_vl.report.run_view import load_run
from adora_vl.train import main
from adora_vl.training.advantages import AdvantageComputer, Advantages, GroupAssessment
from adora_vl.training.guards import RewardGuard
from adora_vl.training.rollout_facts import RolloutFacts, weighted_sum
from adora_vl.utils.errors import RunError, SharedUserError, UserError
from tests.support.examples import example
from tests.support.facts import counted_facts, rollout_facts
from tests.support.recorded_runs import write_run
from tests.support.step_context import step_context
from tests.support.tiny_run import STEPS, arguments

NAN = float("nan")


def rewards(
    accuracy: list[float], judge: list[float], weights: Any = (1.0, 1.0), **more: Any
) -> RolloutFacts:
    """Groups of four, of two functions.

    `failed`: the rollouts for which the judge's call failed.
    """
    failed = {(row, 1): "HTTP 503" for row in more.pop("failed", ())}
    both_BF = torch.tensor([accuracy, judge]).T
    return counted_facts(both_BF, more.pop("generations", 4), failed=failed, weights=weights)


def sums(found: RolloutFacts, weights: Any = (1.0, 1.0)) -> list[float | None]:
    values = weighted_sum(found.counted_rewards_NF, torch.tensor(weights)).tolist()
    return [None if value != value else value for value in values]


def test_a_failed_call_is_no_zero_and_one_who_is_left_alone_has_nobody_to_be_compared_with():
    """Accuracy 0 throughout, and one of four calls came back: as zeros, the other three had taught
    the first one.
    """
    found = rewards([0.0] * 4, [0.5, NAN, NAN, NAN], failed=[1, 2, 3])
    assert sums(found) == [None] * 4
    assert found.missing_reasons == (None, *["judge: HTTP 503"] * 3)
    assert found.missing_share == 0.75
    assert found.why_left[0] == "no other rollout of its group has a reward"


def test_those_who_are_left_are_compared_with_each_other_alone():
    found = rewards([1.0, 0.0, 0.0, 0.0], [NAN, 0.5, 1.0, NAN], failed=[0, 3])
    assert sums(found) == [None, 0.5, 1.0, None]
    advantages = group_advantages(torch.tensor([[NAN, 0.5, 1.0, NAN]]))
    assert advantages.tolist()[0] == pytest.approx([0, -0.7070, 0.7070, 0], abs=1e-3)


def test_none_beside_a_score_in_the_same_group_is_missing_and_none_throughout_does_not_apply():
    """TRL's convention for several tasks: a function returns None for all rollouts of other tasks'
    problems.
    """
    found = rewards([1.0, 0.0, 1.0, 0.0] * 2, [NAN] * 4 + [1.0, 1.0, 0.0, NAN])
    assert sums(found) == [1.0, 0.0, 1.0, 0.0, 2.0, 1.0, 1.0, None]
    assert found.missing_reasons[7] == "judge: None"
    assert found.missing_share == 1 / 8


def test_a_call_that_failed_is_missing_even_where_it_failed_for_the_whole_group():
    found = rewards([1.0, 0.0, 1.0, 0.0], [NAN] * 4, failed=[0, 1, 2, 3])
    assert sums(found) == [None] * 4
    assert found.missing_share == 1
    # the function applies, so three more are missing
    found = rewards([1.0, 0.0, 1.0, 0.0], [NAN] * 4, failed=[0])
    assert sums(found) == [None] * 4


def test_only_functions_with_a_weight_count():
    unweighted = (1.0, 0.0)
    found = rewards([1.0, 0.0, 1.0, 0.0], [NAN, 1.0, 0.0, 1.0], unweighted, failed=[0])
    assert sums(found, unweighted) == [1.0, 0.0, 1.0, 0.0]
    assert found.missing_reasons == (None,) * 4
    found = rewards([NAN] * 4, [1.0] * 4, unweighted)
    assert sums(found, unweighted) == [None] * 4
    assert set(found.missing_reasons) == {"no reward function scored it"}


def test_a_group_of_one_is_whole():
    """As in an evaluation with one rollout a problem."""
    assert sums(rewards([1.0, 0.0], [NAN, NAN], generations=1)) == [1.0, 0.0]


def test_where_nothing_is_missing_trl_gets_what_it_gathered():
    both_BF = torch.rand(32, 2)
    assert torch.equal(counted_facts(both_BF, 8).counted_rewards_NF, both_BF)


# The tokens of those who have left still stand in the number by which TRL divides. These methods
# undo that division.
BY_TOKENS = {"dapo", "daro"}
CASES: list[tuple[str, Any]] = [(name, METHODS[name]()) for name in METHODS]
CASES += [("adora", Adora(assign=assign)) for assign in ("random", "reversed", "rate")]
CASES += [
    ("canon", example("canon.py:Canon")(measure=measure)) for measure in ("length", "entropy")
]
CASES += [("ngrpo", example("ngrpo.py:Ngrpo")())]
CASES += [("dapo", Dapo(overlong_cache=50))]


def test_a_group_that_some_have_left_is_the_group_of_the_others(subtests):
    for (name, options), scale in product(CASES, ("group", "batch", "none")):
        with subtests.test(f"{name} {options} {scale}"):
            leave(name, options, scale)


def leave(name: str, options: Any, scale: Any) -> None:
    """Groups of eight of which two, at any place, have left, and one group that all have left."""
    generator = torch.Generator().manual_seed(1)
    values = torch.tensor([0.0, 0.1, 1.0], dtype=torch.float64)
    dense_PG = values[torch.randint(0, 3, (30, 6), generator=generator)]
    dense_PG[0] = 1.0  # without signal
    places = torch.stack(
        [torch.randperm(8, generator=generator)[:6].sort().values for _ in range(30)]
    )
    lengths_PG = torch.randint(1, 99, (31, 8), generator=generator)
    surprisal_PG = torch.rand(31, 8).double()

    def batch(
        rewards_PG: torch.Tensor, lengths_PG: torch.Tensor, surprisal_PG: torch.Tensor
    ) -> torch.Tensor:
        groups = Groups(rewards_PG, lengths_PG, lengths_PG > 90, surprisal_PG=surprisal_PG)
        advantages_PG = group_advantages(rewards_PG, scale=scale)
        run = AdvantagePipeline({name: options}, scale=scale, max_length=99, seed=1)
        return run(groups, advantages_PG)

    whole_PG = torch.full((31, 8), NAN, dtype=torch.float64)
    whole_PG[:30].scatter_(1, places, dense_PG)
    whole_PG = whole_PG.roll(7, dims=0)  # the group that all have left is not the last one
    order = torch.arange(31).roll(7)
    found_PG = batch(whole_PG, lengths_PG[order], surprisal_PG[order]).roll(-7, dims=0)
    expected_PG = batch(
        dense_PG, lengths_PG[:30].gather(1, places), surprisal_PG[:30].gather(1, places)
    )
    if name in BY_TOKENS:
        expected_PG = expected_PG * lengths_PG.sum() / lengths_PG[:30].gather(1, places).sum()
    # seeded by the number of groups with signal: the same
    if name == "adora" and options.assign == "random":
        assert expected_PG.any()
    torch.testing.assert_close(found_PG[:30].gather(1, places), expected_PG, rtol=1e-5, atol=1e-6)
    assert (found_PG[whole_PG.roll(-7, dims=0).isnan()] == 0).all()
    assert found_PG.any(), "nothing was compared"


def test_daro_learns_from_the_tokens_of_those_who_are_left():
    rewards_PG = torch.tensor([[1.0, 0.0, NAN, NAN]])
    groups = Groups(
        rewards_PG, torch.tensor([[10, 30, 500, 500]]), torch.zeros(1, 4, dtype=torch.bool)
    )
    run = AdvantagePipeline({"daro": METHODS["daro"]()})
    run(groups, group_advantages(rewards_PG))
    assert run.figures["daro/loss_2_of_4"] == pytest.approx(0.7071, abs=1e-3), (
        "both advantages are of this size"
    )


def test_figures_and_tokens_by_the_image_leave_them_out():
    lengths_PG = torch.tensor([[5.0, 7.0, 90.0, 90.0], [90.0] * 4])
    groups = Groups(torch.tensor([[1.0, 0.0, NAN, NAN], [NAN] * 4]), lengths_PG, lengths_PG < 0)
    weighting = weigh_groups(replace(groups, truncated_PG=torch.zeros_like(groups.truncated_PG)))
    figures = adora_metrics(weighting)
    assert figures["pass_rate"] == 0.5
    assert figures["no_correct_share"] == 0.0
    assert figures["tds_share"] == 1.0
    assert (figures["length_correct"], figures["length_wrong"]) == (5.0, 7.0)
    advantages_PG = group_advantages(groups.rewards_PG)
    assessment = GroupAssessment(
        groups=groups,
        weighting=weighting,
        trl_advantages_PG=advantages_PG,
        has_signal_P=torch.tensor([True, False]),
        equal_reward_share=0.0,
        num_ranks=1,
    )
    weighed = Advantages(
        assessment=assessment,
        weighting=weighting,
        final_PG=advantages_PG,
        figures={},
    )
    assert weighed.has_signal_N.tolist() == [True, True, *[False] * 6]


def test_trls_share_of_equal_rewards_is_of_the_groups_that_are_there():
    """Of four groups one has left and one has equal rewards: TRL's figure is a half, a third is
    meant.
    """
    rewards_BF = torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0, 1.0, NAN, NAN]]).T
    computer = AdvantageComputer(step_context(), AdvantagePipeline({}), torch.ones(1))
    assessment = computer.assess(rollout_facts(rewards_BF, length_N=torch.ones(8)), 2, 0)
    assert assessment.equal_reward_share == pytest.approx(1 / 3)


def failing(completions: list[Any], **columns: Any) -> list[Any]:
    known = {"lost": TimeoutError("after 60 s\nmore"), "?": None}
    return [known.get(text, 1.0) for text in completions]


async def failing_async(completions: list[Any], **columns: Any) -> list[Any]:
    return failing(completions)


def test_an_exception_in_the_place_of_a_reward_is_a_failed_call_of_that_completion():
    """What `asyncio.gather(..., return_exceptions=True)` returns.

    Nothing stops, and the reason is known.
    """
    guard = RewardGuard(step_context())
    one, other = guard.around([failing, failing_async], ["one", "other"])
    texts = ["fine", "lost", "?"]
    assert one(completions=texts) == [1.0, None, None]
    assert asyncio.run(other(completions=["lost"])) == [None]
    guard.check(0)
    assert guard.take_failed_calls(3) == {
        (1, 0): "TimeoutError: after 60 s",
        (0, 1): "TimeoutError: after 60 s",
    }
    assert guard.take_failed_calls(3) == {}, "of one generation only"


def test_rollouts_of_other_ranks_keep_their_place(monkeypatch):
    """Rank 1 of 3 asks; each rank has four rollouts."""
    guard = RewardGuard(step_context())
    (function,) = guard.around([failing], ["one"])
    function(completions=["fine", "lost", "fine", "fine"])
    monkeypatch.setattr(
        "adora_vl.training.guards.gather_object", lambda mine: [[(3, 0, "a")], *mine, []]
    )
    assert guard.take_failed_calls(4) == {(3, 0): "a", (5, 0): "TimeoutError: after 60 s"}


def test_a_mistake_of_the_user_on_one_rank_ends_all(monkeypatch, tmp_path):
    """A key that one machine lacks: the other ranks must not wait for that one in a collective
    call.
    """

    def refused(**arguments: Any) -> list[float]:
        raise UserError("adora_reward: judge: the key is refused")

    guards = [RewardGuard(step_context(save_now=lambda: tmp_path)) for _ in range(2)]
    for guard, function in zip(guards, (refused, failing), strict=True):
        (around,) = guard.around([function], ["judge"])
        around(completions=["fine"])
    found = [*guards[0].failures, *guards[1].failures]
    monkeypatch.setattr("adora_vl.training.guards.gather_object", lambda mine: found)
    for guard in guards:
        with pytest.raises(
            SharedUserError, match=rf"^step 3: .* refused, and go on with --resume_\w+ {tmp_path}$"
        ):
            guard.check(2)


def test_a_generation_without_one_reward_ends_the_run_in_one_line(tmp_path):
    guard = RewardGuard(step_context(save_now=lambda: tmp_path))
    guard.check_scored(rewards([0.0] * 4, [1.0, NAN, NAN, NAN]).missing_reasons, 2)
    with pytest.raises(RunError) as error:
        guard.check_scored(rewards([0.0] * 4, [NAN] * 4, failed=range(4)).missing_reasons, 2)
    assert str(error.value) == (
        "step 3: not one of 4 rollouts has a reward (judge: HTTP 503). Nothing of this step was "
        f"applied. Repair the reward, and go on with --resume_from_checkpoint {tmp_path}"
    )


OWN = """
from pathlib import Path

def flaky(completions, prompts, trainer_state, **kwargs):
    # By number of the group: nothing is missing, does not apply, two calls fail, three fail, one is None
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
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(OWN)
    return file


@pytest.mark.slow
def test_the_run_learns_from_those_who_are_left_and_says_who_is_not(own, tmp_path, capsys):
    words = arguments(tmp_path / "run", save_strategy="no")
    assert main([*words, "--adora_reward", "format", f"{own}:flaky", "--adora_method", "grpo"]) == 0
    rollouts = pd.read_parquet(tmp_path / "run" / "rollouts")
    first = rollouts[rollouts["step"] == 1].reset_index(drop=True)
    groups = [part for _, part in first.groupby("group")]
    parts = [part["reward/format_reward"] + part["reward/flaky"] for part in groups]
    assert groups[0]["reward"].tolist() == parts[0].tolist()
    assert groups[0]["missing"].isna().all()
    assert groups[1]["reward"].tolist() == groups[1]["reward/format_reward"].tolist()
    assert groups[2]["reward"].isna().tolist() == [True, False, False, True]
    why = "flaky: ConnectionError: no route to the judge"
    assert groups[2]["missing"].fillna("").tolist() == [why, "", "", why]
    assert groups[2]["reward/format_reward"].notna().all()
    assert groups[3]["missing"].tolist() == [
        "no other rollout of its group has a reward",
        why,
        why,
        why,
    ]
    for part, left in zip(groups, (4, 4, 2, 0), strict=True):
        kept = torch.tensor(part["reward"].dropna().to_numpy())
        assert len(kept) == left
        expected = group_advantages(kept[None])[0] if left else kept
        assert part["advantage"][part["reward"].notna()].tolist() == pytest.approx(
            expected.tolist(), abs=2e-3
        )
        assert (part["advantage"][part["reward"].isna()] == 0).all()
    metrics = [
        line for line in read_metrics(tmp_path / "run" / METRICS) if "rewards/missing" in line
    ]
    assert [line["rewards/missing"] for line in metrics] == [5 / 16] * STEPS
    assert metrics[0]["reward"] == pytest.approx(first["reward"].mean(), abs=1e-6)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(printed) == STEPS
    assert all("  without reward 31%  " in line for line in printed)


@pytest.mark.slow
def test_the_run_stops_where_no_rollout_has_a_reward_and_goes_on_from_there(own, tmp_path, capsys):
    words = [*arguments(tmp_path / "run"), "--adora_reward", "format", f"{own}:gone"]
    assert main(words) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert re.fullmatch(
        r"error: step 2: not one of 16 rollouts has a reward \(gone: ConnectionError: no route to "
        r"the judge\)\. "
        r"Nothing of this step was applied\. Repair the reward, and go on with --resume_from_\w+ "
        r"\S+checkpoint-1",
        line,
    )
    saved = manifest_of(tmp_path / "run" / "checkpoint-1")["metrics"]
    assert saved == {}, (
        "a mean over the steps of a log would count those of the second generation twice"
    )
    own.with_name("back").touch()
    assert main([*words, *line.split()[-2:]]) == 0
    metrics = [
        line for line in read_metrics(tmp_path / "run" / METRICS) if "rewards/missing" in line
    ]
    assert [line["rewards/missing"] for line in metrics] == [0.0] * STEPS


def test_a_report_of_a_group_that_some_have_left(tmp_path):
    run = write_run(tmp_path / "run", 1, reward=None, missing="judge: HTTP 503")
    (group, *_) = load_run(run, 100).groups
    assert group["why"].startswith("No rollout of the group has a reward")
