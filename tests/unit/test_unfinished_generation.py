"""Several optimizer steps learn from one generation: what changes from step to step, and a stop between them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adora_vl.batching.unfinished import file_of
from adora_vl.train import main
from benchmarks.kill_and_resume import facts
from tests.tiny_run import arguments, train

pytestmark = pytest.mark.slow

CYCLE, SAVED, STEPS = 4, 3, 7
RUNS: dict[str, dict[str, Any]] = {
    "one optimizer step a micro-batch": {"per_device_train_batch_size": 8, "steps_per_generation": CYCLE},
    # two micro-batches per step, every rollout twice, and features of a frozen tower that are kept for a generation
    "rollouts learned from twice": {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4,
        "num_iterations": 2, "adora_freeze_vision_tower": "true", "adora_freeze_projector": "true",
    },
    "stock's work": {
        "per_device_train_batch_size": 8, "steps_per_generation": CYCLE, "adora_cache_images": "false",
        "adora_share_vision": "false", "adora_share_prompt": "false", "adora_skip_zero_signal": "false",
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=RUNS)
def whole(request, tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """A run of two generations that is saved within each of them."""
    settings = {**RUNS[request.param], "save_steps": SAVED, "max_steps": STEPS, "log_completions": "true"}
    return train(tmp_path_factory.mktemp("whole") / "run", **settings), settings


def lines(run: Path) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, (run / "metrics.jsonl").open()) if line["kind"] == "train"]


def test_rollouts_are_sampled_once_a_generation_and_clipping_acts_after_the_first_step(whole):
    steps = lines(whole[0])
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert [step["step"] for step in steps if "reward" in step] == [1, 1 + CYCLE]
    # The old log-probabilities are those of the policy that sampled: the ratios are 1 up to float32's rounding before
    # its first update, and not after it.
    for step in steps:
        if step["step"] % CYCLE == 1:
            assert step["adora/ratio_max"] == pytest.approx(1, abs=1e-4) and step["clip_ratio/region_mean"] == 0
    assert max(step["adora/ratio_max"] for step in steps) > 1.2
    assert max(step["clip_ratio/region_mean"] for step in steps) > 0


def test_a_run_that_stopped_within_a_generation_goes_on_to_the_bit(whole, tmp_path):
    run, settings = whole
    assert file_of(run / f"checkpoint-{SAVED}", 0).is_file()
    again = shutil.copytree(run, tmp_path / "again")
    for step in (2 * SAVED, STEPS):
        shutil.rmtree(again / f"checkpoint-{step}")
    train(again, **settings)
    assert {name: facts(again)[name] for name in ("steps", "rollouts")} == {
        name: facts(run)[name] for name in ("steps", "rollouts")
    }
    before, after = (load_file(folder / "model.safetensors") for folder in (run, again))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_other_sizes_are_refused_where_rollouts_are_left(whole, tmp_path, capsys):
    run, settings = whole
    other = {**settings, "steps_per_generation": 8, "resume_from_checkpoint": run / f"checkpoint-{SAVED}"}
    assert main(arguments(tmp_path / "out", **other)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "was saved in the middle of a generation" in error
    assert "steps_per_generation: 4, now 8; set it as before" in error


def test_between_two_generations_there_is_nothing_to_keep(adora_run):
    assert not list(adora_run.glob("checkpoint-*/generation-*"))
