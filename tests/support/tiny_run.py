"""Runs of the real training command that take seconds: the tiny model, four steps, no engine."""

import contextlib
import io
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from adora_vl.train import main

TINY_RUN_STEPS = 4
TINY_RUN_KEYS = {
    "config": "configs/train/smoke_cpu.yaml",
    "use_vllm": "false",
    "max_steps": TINY_RUN_STEPS,
    "logging_steps": 1,
    "save_steps": 2,
    "save_total_limit": 9,
    "per_device_train_batch_size": 16,
    "num_generations": 4,
    "max_completion_length": 32,
    "adora_synthetic_rows": 32,
    "log_completions": "false",
    "learning_rate": 1e-3,
}


def tiny_run_arguments(output_dir: object, **overrides: object) -> list[str]:
    """Return the command-line arguments of a tiny run: ["--max_steps", "4", ...].

    `overrides`: keys that are added, or have another value.
    """
    settings = {**TINY_RUN_KEYS, "output_dir": output_dir, **overrides}
    settings["config"] = Path(__file__).parents[2] / str(settings["config"])
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def train_tiny_run(folder: Path, **overrides: object) -> Path:
    """Train a tiny run in this process, which has to succeed, and return its `output_dir`.

    `overrides`: keys of the run that are added, or have another value.
    """
    assert main(tiny_run_arguments(folder, **overrides)) == 0
    return folder


@pytest.fixture(scope="session")
def adora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run with ADORA. Tests only read it."""
    return train_tiny_run(tmp_path_factory.mktemp("runs") / "adora")


@pytest.fixture(scope="session")
def grpo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run with GRPO. Tests only read it."""
    return train_tiny_run(tmp_path_factory.mktemp("runs") / "grpo", adora_method="grpo")


@dataclass(frozen=True)
class ResumedRun:
    """A run that was resumed: its folder, and what the resumed command printed."""

    folder: Path
    printed: str


@pytest.fixture(scope="session")
def resumed_run(adora_run: Path, tmp_path_factory: pytest.TempPathFactory) -> ResumedRun:
    """Return a run killed after step 4 and resumed from checkpoint-2, a copy of `adora_run`.

    The metrics and rollouts of steps 3 and 4 were written before, and their checkpoint was not.
    """
    folder = shutil.copytree(adora_run, tmp_path_factory.mktemp("resumed") / "adora")
    shutil.rmtree(folder / f"checkpoint-{TINY_RUN_STEPS}")
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        train_tiny_run(folder)
    return ResumedRun(folder, stream.getvalue())


def read_training_log(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of `log_history` that are of training steps, from `trainer_state.json`."""
    entries = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in entries if "reward" in entry]
