"""A run of the real training command that takes seconds: the tiny model, four steps, without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from adora_vl.train import main

STEPS = 4
SETTINGS = {
    "config": "configs/train/smoke_cpu.yaml", "use_vllm": "false", "max_steps": STEPS, "logging_steps": 1,
    "save_steps": 2, "per_device_train_batch_size": 16, "num_generations": 4, "max_completion_length": 32,
    "adora_synthetic_rows": 32, "log_completions": "false", "learning_rate": 1e-3,
}  # fmt: skip


def arguments(folder: Path, **changed: object) -> list[str]:
    settings = {**SETTINGS, "output_dir": folder, **changed}
    settings["config"] = Path(__file__).parents[1] / str(settings["config"])
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def train(folder: Path, **changed: object) -> Path:
    """Run it in this process. Returns its `output_dir`."""
    assert main(arguments(folder, **changed)) == 0
    return folder


@pytest.fixture(scope="session")
def adora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "adora")


@pytest.fixture(scope="session")
def grpo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "grpo", adora_mode="off")
