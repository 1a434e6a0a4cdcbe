"""Two processes with ZeRO-3 that stop within a generation go on as if they had not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.kill_and_resume import facts
from tests.integration.support import launch

pytestmark = pytest.mark.slow
STEPS = {"save_steps": 1, "max_steps": 3, "per_device_train_batch_size": 4, "steps_per_generation": 4}
RUN = {
    "config": "configs/train/smoke_cpu.yaml", "use_vllm": "false", "logging_steps": 1, "save_total_limit": 9,
    "num_generations": 4, "max_completion_length": 28, "adora_synthetic_rows": 32, "learning_rate": 1e-3,
    "adora_replay_groups": 4, **STEPS,
}  # fmt: skip


def train(folder: Path) -> dict:
    words = [word for key, value in {**RUN, "output_dir": folder}.items() for word in (f"--{key}", str(value))]
    launch("cpu_zero3", "-m", "adora_vl.train", *words)
    return facts(folder)


def test_each_rank_goes_on_with_its_own_rollouts(tmp_path):
    whole = train(tmp_path / "run")
    assert {path.name for path in (tmp_path / "run" / "checkpoint-2").glob("generation-*")} == {
        "generation-00000.pt", "generation-00001.pt"
    }  # fmt: skip
    kept = [
        torch.load(tmp_path / "run" / "checkpoint-2" / f"replay-0000{rank}.pt", weights_only=True) for rank in (0, 1)
    ]
    assert kept[0] and kept[1], "the groups that may come again, of each rank"
    shutil.rmtree(tmp_path / "run" / "checkpoint-3")
    again = train(tmp_path / "run")
    assert list(whole["steps"]) == [1, 2, 3] and len(whole["rollouts"]) == 3
    assert again == whole
