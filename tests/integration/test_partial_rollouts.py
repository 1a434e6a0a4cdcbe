"""Rollouts that a token budget pauses and that go on in the next generation, with a real engine.

After a kill they go on too: see `test_resume.py`.
"""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from benchmarks.kill_and_resume import comparable_results
from tests.support.launch import accelerate_launch, cli_arguments

pytestmark = pytest.mark.slow
RUN_KEYS = {
    "config": "configs/train/smoke_cpu.yaml",
    "logging_steps": 1,
    "save_strategy": "no",
    "num_generations": 4,
    "per_device_train_batch_size": 24,
    "adora_synthetic_rows": 64,
    "max_steps": 4,
    "max_completion_length": 32,
}


def train_with_engine(folder: Path, **keys: object) -> Path:
    """Train a small run with an engine in its process, and return its folder."""
    argv = cli_arguments(**{**RUN_KEYS, **keys, "output_dir": folder})
    accelerate_launch("cpu", "-m", "adora_vl.train", *argv)
    return folder


def read_logged_values(folder: Path, name: str) -> list[float]:
    """Return the values that were logged under a name, in order."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry[name] for entry in history if name in entry]


def test_a_budget_that_no_answer_reaches_is_the_run_without_it_to_the_bit(tmp_path):
    """Figures, tables and weights are equal, apart from what only a run with a budget logs."""

    def results_without_budget_metrics(folder: Path) -> dict[str, Any]:
        results = comparable_results(folder)
        metrics_of_a_budget = ("adora/staleness", "adora/unfinished", "adora/rollout_budget")
        # their ages are recorded with a budget alone; the tables have the rest
        del results["rollouts"]
        results["steps"] = {
            number: {
                name: value
                for name, value in metrics.items()
                if not name.startswith(metrics_of_a_budget)
            }
            for number, metrics in results["steps"].items()
        }
        return results

    without_budget = results_without_budget_metrics(train_with_engine(tmp_path / "without"))
    with_budget = results_without_budget_metrics(
        # 32 is the most tokens of an answer
        train_with_engine(tmp_path / "with", adora_rollouts="{budget: 32}")
    )
    assert without_budget == with_budget
    assert len(without_budget["steps"]) == len(without_budget["tables"]) == 4


def test_with_the_same_weights_a_continued_answer_is_as_likely_as_one_that_was_never_cut(tmp_path):
    """The policy, which sees the answer whole, gives its tokens the engine's log-probabilities.

    Answers pause after each 9 tokens, and with a learning rate of 0 all weights are the same. So
    the engine has seen the prompt, the image and the tokens of before when it went on.
    """
    output_dir = train_with_engine(tmp_path / "run", adora_rollouts="{budget: 9}", learning_rate=0)
    rollouts = pd.read_parquet(output_dir / "rollouts")
    assert (rollouts["segments"] > 1).mean() > 0.5
    assert rollouts["age"].max() >= 1
    assert max(read_logged_values(output_dir, "sampling/sampling_logp_difference/max")) < 1e-4
    assert read_logged_values(output_dir, "adora/unfinished")[0] > 0
    assert read_logged_values(output_dir, "adora/unfinished")[-1] == 0


def test_only_tokens_of_the_present_weights_are_held_against_the_engine(tmp_path):
    """Tokens of earlier weights differ much from the policy, and the drift leaves them out.

    Answers pause after each 9 tokens, and the learning rate moves the weights in between.
    """
    output_dir = train_with_engine(
        tmp_path / "run", adora_rollouts="{budget: 9}", learning_rate=1e-3
    )
    assert max(read_logged_values(output_dir, "sampling/sampling_logp_difference/max")) > 1e-2, (
        "the importance ratio to the engine corrects for these"
    )
    assert max(read_logged_values(output_dir, "adora/drift")) < 1e-4
    assert pd.read_parquet(output_dir / "rollouts")["drift"].max() < 1e-4


def test_an_answer_that_loops_is_ended_by_the_engine_and_counts_as_truncated(tmp_path):
    """A looping answer is whole before the budget ends it: nothing is set aside, no turn ended."""
    loops = {
        "repetition_detection": {"max_pattern_size": 2, "min_count": 4},
        "logit_bias": {"50": 100.0},
    }
    # the policy has no such bias, so it is not compared with the engine
    uncompared = {"adora_self_check": "false", "adora_max_drift": "null"}
    output_dir = train_with_engine(
        tmp_path,
        adora_rollouts="{budget: 9}",
        max_steps=1,
        generation_kwargs=json.dumps(loops),
        **uncompared,
    )
    rollouts = pd.read_parquet(output_dir / "rollouts")

    assert set(rollouts["length"]) == {4}
    assert set(rollouts["segments"]) == {1}
    assert rollouts["truncated"].all()
    assert read_logged_values(output_dir, "adora/unfinished") == [0]
