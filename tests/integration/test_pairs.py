"""Pairs of features that change how a generation is filled: each pair trains together.

A killed run goes on to the bit. A fake server answers by prompts and seeds alone.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest

from adora_vl.train import main
from benchmarks.stand_in_server import GENERATE_PATHS, FakeVLLMServer
from data_prep.cli import main as data_prep
from tests.support.async_servers import (
    REWARD_BY_LENGTH,
    ZOOM_TOOL_KEYS,
    assert_equal_end_after_kill,
    read_step_metrics,
    server_run_arguments,
    zoom_call_ids,
)
from tests.support.examples import example_entry
from tests.support.launch import cli_arguments, run_command

pytestmark = pytest.mark.slow
# Three generations of four problems, so an epoch is a step and a half.
TWO_GENERATIONS_A_STEP = {
    "steps_per_generation": 1,
    "gradient_accumulation_steps": 2,
    "adora_synthetic_rows": 12,
}
# Two generations of four optimizer steps each: a kill after the second is in the middle of one.
FOUR_UPDATES_A_GENERATION = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 4,
    "max_steps": 8,
    "adora_synthetic_rows": 24,
}
TWICE_OVER_A_GENERATION = {
    **FOUR_UPDATES_A_GENERATION,
    "steps_per_generation": 2,
    "num_iterations": 2,
}
NOISY_ROLLOUTS = f"{{{example_entry('noisy_rollouts.py:NoisyRollouts')}: {{share: 0.5}}}}"


class PairCase(NamedTuple):
    """Two or more features that a run has at once."""

    rollout_options: str  # the value of `adora_rollouts`
    keys: dict[str, Any]  # further keys
    metrics: tuple[str, ...]  # metrics that are above 0 where the features are at work


PAIR_CASES: dict[str, PairCase] = {
    "budget + servers": PairCase(
        "{budget: 6, ahead: 0}", {}, ("adora/unfinished", "adora/staleness")
    ),
    "budget + ahead": PairCase(
        "{budget: 6, ahead: 1}", {}, ("adora/unfinished", "adora/trainer_waited_s")
    ),
    "refill + ahead": PairCase(
        "{refill: 2, ahead: 1}", {}, ("adora/refilled_groups", "adora/staleness")
    ),
    "refill + budget + ahead 2": PairCase(
        "{refill: 2, budget: 6, ahead: 2}",
        {},
        ("adora/unfinished", "adora/staleness"),
    ),
    "noisy + servers": PairCase(
        "{ahead: 0}",
        {"adora_extensions": NOISY_ROLLOUTS},
        ("noisy_rollouts/level",),
    ),
    "noisy + budget + ahead": PairCase(
        "{budget: 6, ahead: 1}",
        {"adora_extensions": NOISY_ROLLOUTS},
        ("noisy_rollouts/level",),
    ),
    "no cache + refill + budget + ahead": PairCase(
        "{refill: 1, budget: 6, ahead: 1}",
        {"adora_stock_step": "[cache_images]"},
        ("adora/unfinished",),
    ),
    "two generations a step + budget + ahead": PairCase(
        "{budget: 6, ahead: 1}",
        TWO_GENERATIONS_A_STEP,
        ("adora/unfinished",),
    ),
    "four updates a generation + ahead": PairCase(
        "{ahead: 1}",
        FOUR_UPDATES_A_GENERATION,
        ("adora/staleness",),
    ),
    "twice over a generation + ahead": PairCase(
        "{ahead: 1}",
        TWICE_OVER_A_GENERATION,
        ("adora/staleness",),
    ),
    "four updates by the engine's log-probabilities + ahead": PairCase(
        "{ahead: 1, old_logps: engine}",
        {**FOUR_UPDATES_A_GENERATION, "vllm_importance_sampling_correction": "false"},
        ("adora/staleness", "adora/ratio_max"),
    ),
    "evaluation + ahead": PairCase(
        "{ahead: 1}",
        {"eval_strategy": "steps", "eval_steps": 1, "adora_eval_limit": 4},
        ("adora/staleness",),
    ),
    "tools + ahead": PairCase("{ahead: 1}", ZOOM_TOOL_KEYS, ("adora/called", "adora/staleness")),
    "tools + refill + budget + ahead 2": PairCase(
        "{refill: 1, budget: 60, ahead: 2}",
        ZOOM_TOOL_KEYS,
        ("adora/called", "adora/unfinished"),
    ),
}


def order_of_turns_in_steps(server: FakeVLLMServer) -> list[list[str]]:
    """Return, for each sync of the weights, in which order first and later turns were requested.

    For example ["first", "later", "first"]: first turns, then later ones, then first ones again. A
    later turn's prompt has the token ids of the call before it.
    """
    turns_of_steps: list[list[str]] = []
    (call_ids,) = server.turns
    call_text = str(call_ids).strip("[]")
    for path, body in server.post_requests:
        is_sync = path == "/collective_rpc"
        if is_sync and (not turns_of_steps or turns_of_steps[-1]):
            turns_of_steps.append([])
        if path in GENERATE_PATHS and turns_of_steps:
            turns = turns_of_steps[-1]
            turn = "later" if call_text in str(body) else "first"
            if turns[-1:] != [turn]:
                turns.append(turn)
    return turns_of_steps


@pytest.fixture
def server() -> Iterator[FakeVLLMServer]:
    """Start a fake vLLM server with answers of 2 to 14 tokens."""
    fake_server = FakeVLLMServer(vocabulary=200, tokens=14, shortest=2)
    yield fake_server
    fake_server.close()


@pytest.mark.parametrize("pair", PAIR_CASES)
def test_a_pair_trains_and_goes_on_to_the_bit(tmp_path, server, pair):
    """Two features at once: a killed run ends with the weights of one that was not interrupted.

    Each feature has a metric in the log that is not 0, so both were at work.
    """
    case = PAIR_CASES[pair]
    server.turns = zoom_call_ids() if "tools" in case.keys else []
    (tmp_path / "mine.py").write_text(REWARD_BY_LENGTH)
    keys = {
        "adora_rollouts": case.rollout_options,
        "max_steps": 4,
        "adora_reward": f"{tmp_path / 'mine.py'}:reward",
        "vllm_importance_sampling_mode": "token_truncate",
        **case.keys,
    }
    assert main(server_run_arguments(tmp_path / "whole", server, **keys)) == 0
    steps = read_step_metrics(tmp_path / "whole")
    for name in case.metrics:
        assert any(step.get(name) for step in steps), name
    if pair == "tools + ahead":
        turns_of_first_step, *turns_of_later_steps = order_of_turns_in_steps(server)
        assert turns_of_first_step == ["first", "later", "first"], (
            "later turns do not wait for those of the next generation"
        )
        for turns in turns_of_later_steps[:-1]:
            assert turns[-2:] == ["later", "first"]
    rows = pq.read_table(tmp_path / "whole" / "rollouts").to_pylist()
    assert len({(row["step"], row["id"], row["completion"]) for row in rows}) > 8
    assert_equal_end_after_kill(
        tmp_path / "whole",
        tmp_path / "killed",
        server,
        killed_after_step=2,
        **keys,
    )


ZOOM_ENVIRONMENT_KEYS = {
    "model_name_or_path": "tiny_zoom",
    "adora_prompt": "{problem}",
    "adora_reward": "[accuracy]",
    "adora_system_prompt": "Look with zoom.",
    "min_pixels": 3136,
    "max_pixels": 3136,
    "vllm_max_model_length": 640,
    "max_completion_length": 200,
    "max_tool_calling_iterations": 2,
    "adora_rollouts.refill": 2,
}

LOOKS_ENVIRONMENT = """
from adora_vl.tools import ours

class Looks:
    def reset(self, id, **row):
        self.looks = 0
        return " " if id.endswith("1") else None

    def zoom(self, x1: float, y1: float, x2: float, y2: float, picture: int = 0, *, images, view):
        self.looks += 1
        return ours.zoom(x1, y1, x2, y2, picture, images=images, view=view)

    zoom.__doc__ = ours.zoom.__doc__

    def get_reward(self):
        return self.looks / 10
"""


def kill_one_of_two_runs(folder: Path, keys: dict[str, Any]) -> Path:
    """Run two processes to the end, and once more with a kill, after which they go on.

    Both runs have to end with the same weights. Returns the folder of the run without a kill.
    """
    command = [
        sys.executable,
        "-m",
        "benchmarks.kill_and_resume",
        *cli_arguments(steps=6, kills="backward:5", processes=2, output=folder / "runs"),
    ]
    completed = run_command([*command, "--", *cli_arguments(**keys)])
    assert "checkpoint-3" in completed.stdout
    assert "weights: all equal" in completed.stdout
    (uninterrupted,) = folder.glob("runs/*/whole")
    return uninterrupted


def test_two_killed_processes_with_environments_go_on_to_the_bit(tmp_path):
    """Each process has its own groups and environments, and comes back to them after a kill.

    Unequal numbers of them have ended, or have a signal (rewards that differ within the group).
    """
    data = tmp_path / "data"
    assert (
        data_prep(["synthetic", *cli_arguments(families="corners", size=448, rows=64, output=data)])
        == 0
    )
    (tmp_path / "looks.py").write_text(LOOKS_ENVIRONMENT)
    uninterrupted = kill_one_of_two_runs(
        tmp_path,
        {
            **ZOOM_ENVIRONMENT_KEYS,
            "dataset_name": data,
            "environment_factory": f"{tmp_path}/looks.py:Looks",
        },
    )
    steps = read_step_metrics(uninterrupted)
    assert max(step["adora/refilled_groups"] for step in steps) > 0
    assert all(step["adora/called"] > 0.3 for step in steps)
    for row in pq.read_table(uninterrupted / "rollouts").to_pylist():
        answered_calls = sum(turn["by"] == "tool" and not turn["failed"] for turn in row["turns"])
        assert answered_calls <= round(row["reward/Looks"] * 10) <= row["calls"], (
            "of its own environment, begun anew"
        )


def test_two_killed_processes_with_tools_and_servers_go_on_to_the_bit(tmp_path, server):
    """The three rules for rollouts work together, with tools and after a kill.

    Groups without signal are replaced (`refill`), answers pause at a token budget, and the servers
    sample one generation ahead.
    """
    server.turns = zoom_call_ids()
    # more groups without signal
    (tmp_path / "mine.py").write_text(REWARD_BY_LENGTH.replace("3", "9"))
    uninterrupted = kill_one_of_two_runs(
        tmp_path,
        {
            **ZOOM_TOOL_KEYS,
            "use_vllm": "true",
            "vllm_mode": "server",
            "vllm_server_base_url": server.url,
            "adora_max_drift": "null",
            "vllm_server_timeout": 0.1,
            "adora_weight_transfer": "file",
            "adora_self_check": "false",
            "adora_reward": f"{tmp_path}/mine.py:reward",
            "adora_rollouts": "{refill: 2, budget: 60, ahead: 1}",
        },
    )
    steps = read_step_metrics(uninterrupted)

    assert max(step["adora/refilled_groups"] for step in steps) > 0
    assert all(step["adora/called"] > 0 for step in steps)
