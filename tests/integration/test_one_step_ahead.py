"""Rollouts that vLLM servers sample while the policy learns (`adora_rollouts.ahead`).

The tests look at which weights sample which generation, how far these are from the policy, and what
a run does after a kill. Fake servers answer by the seeds of requests alone.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from adora_vl.checkpoint.store import read_checkpoint_manifest
from adora_vl.rollout.engine_and_policy import EngineAndPolicy
from adora_vl.rollout.samplers import AsyncServerSampler
from adora_vl.rollout.weight_files import WeightFiles
from adora_vl.train import main
from adora_vl.trainer import AdoraGRPOTrainer
from adora_vl.training.guards import DriftGuard
from adora_vl.utils.errors import RolloutError
from benchmarks.stand_in_server import GENERATE_PATHS, FakeVLLMServer
from data_prep.cli import main as data_prep
from tests.support.async_servers import (
    assert_equal_end_after_kill,
    read_step_metrics,
    server_run_arguments,
)
from tests.support.user_tables import truncate_image

pytestmark = pytest.mark.slow


@pytest.fixture
def server() -> Iterator[FakeVLLMServer]:
    """Start a fake vLLM server."""
    fake_server = FakeVLLMServer(vocabulary=200)
    yield fake_server
    fake_server.close()


def test_each_generation_is_asked_for_before_the_policy_learns_from_the_one_before(
    tmp_path, server
):
    """One step ahead, the servers sample a generation while the policy learns from the one before.

    Twelve rows are three generations, so the fourth is of the next epoch. Rows and answers are the
    same as in a run that does not sample ahead.
    """
    assert main(server_run_arguments(tmp_path / "ahead", server)) == 0
    # Groups that each version of the weights was asked for, four in a generation: weights 0 sample
    # generations 0 and 1, weights 1 generation 2 and the answers whose drift is measured (requests
    # for 8 tokens), ...
    rollout_groups = _groups_by_weights(server, max_tokens=32)
    drift_groups = _groups_by_weights(server, max_tokens=8)
    assert rollout_groups == [8, 4, 4, 0]
    assert drift_groups == [0, 2, 2, 2]
    assert [step["adora/staleness"] for step in read_step_metrics(tmp_path / "ahead")] == [
        0,
        1,
        1,
        1,
    ]
    server.post_requests.clear()
    assert main(server_run_arguments(tmp_path / "after", server, adora_rollouts="{ahead: 0}")) == 0
    ahead = pq.read_table(tmp_path / "ahead" / "rollouts").to_pylist()
    after = pq.read_table(tmp_path / "after" / "rollouts").to_pylist()
    for name in ("id", "completion"):
        assert [row[name] for row in ahead] == [row[name] for row in after], name
    assert _groups_by_weights(server, max_tokens=8) == [0] * 4


def test_work_that_needs_no_server_is_done_while_servers_sample(tmp_path, server, monkeypatch):
    """Weights are written, and the next generation is requested, before rollouts are joined.

    The drift of the engine is measured when the policy has learned from all but the last
    micro-batch, since servers answer late where they are far ahead.
    """
    events: list[str] = []

    def record_calls(owner: Any, method: str, event: str) -> None:
        stock_method = getattr(owner, method)

        def call_and_record(*args: Any, **named: Any) -> Any:
            events.append(event)
            return stock_method(*args, **named)

        monkeypatch.setattr(owner, method, call_and_record)

    record_calls(WeightFiles, "write", "written")
    record_calls(AsyncServerSampler, "submit", "asked")
    record_calls(AsyncServerSampler, "_join", "joined")
    record_calls(AdoraGRPOTrainer, "_compute_loss", "learned")
    record_calls(EngineAndPolicy, "begin_sampling", "drift")
    keys: dict[str, Any] = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 8}
    keys |= {
        "max_steps": 3,
        "adora_max_drift": 99,
        "save_strategy": "no",
        "adora_rollouts": "{ahead: 2}",
        "adora_stock_step": "[fill_micro_batches]",  # else all groups share one micro-batch
    }
    assert main(server_run_arguments(tmp_path / "one", server, **keys)) == 0
    # what follows the writing of weights in each step; in the first, three generations are asked
    # for
    later_step = "drift asked joined learned joined learned"
    assert " ".join(events).split("written ")[1:] == [
        "asked asked asked joined learned learned ",
        f"{later_step} ",
        later_step,
    ]
    events.clear()
    assert main(server_run_arguments(tmp_path / "two", server, steps_per_generation=1, **keys)) == 0
    # for each step of two generations: how often drift was measured, and whether two joins stand
    # right before a pass that learns
    drift_and_order = [
        (part.count("drift"), "joined joined learned" in part)
        for part in " ".join(events).split("written ")[1:]
    ]
    assert drift_and_order == [(0, False), (1, True), (1, True)], (
        "once in a step of two generations, and judged at its end"
    )


def test_two_generations_ahead_are_sampled_by_weights_of_two_steps_before_and_end_the_same(
    tmp_path, server
):
    """A run two generations ahead ends with the same weights, with slow servers and after a kill.

    Rollouts of a step are sampled by the weights of two steps before, as soon as there are any.
    """
    keys: dict[str, Any] = {"adora_rollouts": "{ahead: 2}", "max_steps": 5}
    assert main(server_run_arguments(tmp_path / "one", server, **keys)) == 0
    # Four groups a step: those of steps 0 to 2 by the first weights, of 3 and 4 by the next two.
    assert _groups_by_weights(server, max_tokens=32) == [12, 4, 4, 0, 0]
    assert [step["adora/staleness"] for step in read_step_metrics(tmp_path / "one")] == [
        0,
        1,
        2,
        2,
        2,
    ]
    server.post_requests.clear()
    server.seconds_per_token = 0.01
    assert main(server_run_arguments(tmp_path / "two", server, **keys)) == 0
    expected = (tmp_path / "one" / "model.safetensors").read_bytes()
    assert (tmp_path / "two" / "model.safetensors").read_bytes() == expected
    assert_equal_end_after_kill(
        tmp_path / "one",
        tmp_path / "killed",
        server,
        killed_after_step=2,
        **keys,
    )


def _max_tokens(body: dict[str, Any]) -> int:
    """Return the limit of a request; one for token ids has it among its sampling parameters."""
    return int(body.get("sampling_params", body)["max_tokens"])


def _groups_by_weights(server: FakeVLLMServer, *, max_tokens: int) -> list[int]:
    """Return how many groups were requested between each sync of weights and the next.

    `max_tokens`: only requests with this limit count; rollouts have 32, and those of the drift
    check 8.
    """
    counts: list[int] = []
    for path, body in server.post_requests:
        if path == "/collective_rpc":
            counts.append(0)
        elif path in GENERATE_PATHS and _max_tokens(body) == max_tokens:
            counts[-1] += 1
    return counts


def test_a_generation_that_begins_again_is_not_counted_twice(tmp_path, server):
    """A run that fails saves a checkpoint without the figures of the generation that failed.

    A resumed run samples that generation again, so its metrics, its tokens and what a method
    remembers would count twice.
    """
    assert main(server_run_arguments(tmp_path / "whole", server, max_steps=2)) == 0
    (tmp_path / "mine.py").write_text(FAILING_REWARD)
    failing = {"adora_reward": f"{tmp_path / 'mine.py'}:fails", "save_steps": 4}
    assert main(server_run_arguments(tmp_path / "reward", server, **failing)) == 1, (
        "after the wait for the rollouts was logged"
    )
    assert (
        main(
            server_run_arguments(
                tmp_path / "drift", server, adora_max_drift=1e-3, adora_method="daro"
            )
        )
        == 1
    ), "in the first pass"
    for name, step in (("reward", 2), ("drift", 0)):
        checkpoint = tmp_path / name / f"checkpoint-{step}"
        manifest = read_checkpoint_manifest(checkpoint)
        assert manifest["metrics"] == {}
        assert manifest["methods"] == {}
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        assert state["num_input_tokens_seen"] == _tokens_seen(
            tmp_path / "whole" / f"checkpoint-{step}"
        )


def test_a_run_that_drifts_between_two_micro_batches_goes_on_with_their_whole_step(
    tmp_path, server, monkeypatch
):
    """The drift guard stops the run in the second of a step's two micro-batches.

    The checkpoint that is saved then is that of the step before, and a second start ends with the
    weights of an uninterrupted run, whether the two micro-batches are of one generation or of two.
    """
    stock_check = DriftGuard.check
    steps_of_passes = list[int]()

    def drift_in_fourth_pass(guard: DriftGuard, *args: Any) -> None:
        stock_check(guard, *args)
        steps_of_passes.append(args[-1])
        if len(steps_of_passes) == 4:
            raise RolloutError(str(guard.save_now()))

    for generations, changed_keys in (
        ("one", {}),
        ("two", {"steps_per_generation": 1}),
    ):
        keys: dict[str, Any] = {
            "adora_rollouts.ahead": 0,
            "gradient_accumulation_steps": 2,
            "per_device_train_batch_size": 8,
            "max_steps": 3,
            "save_steps": 3,
            "adora_stock_step": "[fill_micro_batches]",  # else all groups share one micro-batch
            **changed_keys,
        }
        uninterrupted = tmp_path / generations
        assert main(server_run_arguments(uninterrupted, server, **keys)) == 0
        steps_of_passes.clear()
        stopped = tmp_path / f"{generations}-stopped"
        with monkeypatch.context() as patched:
            patched.setattr(DriftGuard, "check", drift_in_fourth_pass)
            assert main(server_run_arguments(stopped, server, **keys)) == 1
            assert steps_of_passes == [0, 0, 1, 1]  # the second pass of step 1, counted from 0
        assert main(server_run_arguments(stopped, server, **keys)) == 0
        weights = (uninterrupted / "model.safetensors").read_bytes()
        assert (stopped / "model.safetensors").read_bytes() == weights
        tokens_seen = _tokens_seen(uninterrupted / "checkpoint-3")
        assert _tokens_seen(stopped / "checkpoint-3") == tokens_seen


def test_an_image_that_cannot_be_read_ends_the_run_at_the_step_that_draws_it(
    tmp_path, server, capsys
):
    """The step names the row and leaves a checkpoint; the row is not asked for ahead."""
    code = data_prep(
        ["synthetic", "--output", str(tmp_path / "data"), "--rows", "40", "--test-rows", "4"]
    )
    assert code == 0
    # a row of the second step
    truncate_image(tmp_path / "data" / "data" / "train-00000-of-00001.parquet", 14)
    code = main(
        server_run_arguments(tmp_path / "out", server, dataset_name=tmp_path / "data", save_steps=9)
    )
    assert code == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: step 2: row synthetic/0/train/14: an image cannot be read: ")
    assert last.endswith(f"--resume_from_checkpoint {tmp_path / 'out' / 'checkpoint-1'}")


def _tokens_seen(checkpoint: Path) -> int:
    """Return how many tokens the trainer had seen at a checkpoint; none before the first step."""
    file = checkpoint / "trainer_state.json"
    return int(json.loads(file.read_text())["num_input_tokens_seen"]) if file.is_file() else 0


FAILING_REWARD = """
def fails(completions, trainer_state, **kwargs):
    assert trainer_state.global_step < 2
    return [float(len(text) % 2) for text in map(str, completions)]
"""


def test_a_killed_run_goes_on_to_the_bit(tmp_path, server):
    """The run is killed after step 2 of 4, and ends with the weights of one that was not."""
    assert main(server_run_arguments(tmp_path / "whole", server)) == 0
    assert_equal_end_after_kill(
        tmp_path / "whole", tmp_path / "killed", server, killed_after_step=2
    )
    assert _groups_by_weights(server, max_tokens=32) == [4, 0], (
        "of generations 3 and 4 the first was in the checkpoint"
    )
