"""A run recomputes as many layers as it is told, and neither weights nor a resumed run differ."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from adora_vl.record.metrics import METRICS_FILE, read_metrics
from adora_vl.training.recompute import RECOMPUTED_LAYERS_KEY
from tests.support.tiny_run import train_tiny_run

RECOMPUTE_KEYS = {"gradient_checkpointing": "true", "use_peft": "true", "lora_dropout": 0.2}


def read_comparable_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of the training steps that no clock and no number of layers changes."""
    lines = [line for line in read_metrics(run / METRICS_FILE) if "reward" in line]
    names = ("step", "loss", "grad_norm", "entropy", "reward")
    return [{name: line[name] for name in names} for line in lines]


def read_recomputed_layers(run: Path) -> list[float | None]:
    """Return how many layers each training step recomputed; None stands for all."""
    return [
        line.get(RECOMPUTED_LAYERS_KEY)
        for line in read_metrics(run / METRICS_FILE)
        if "reward" in line
    ]


@pytest.fixture(scope="module")
def run_with_all_recomputed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on a CPU, where all layers are recomputed by default; return the folder."""
    return train_tiny_run(tmp_path_factory.mktemp("recompute") / "all", **RECOMPUTE_KEYS)


@pytest.mark.slow
def test_the_default_changes_nothing_on_a_cpu(run_with_all_recomputed):
    """No step logs a number of recomputed layers, which means that all were."""
    assert read_recomputed_layers(run_with_all_recomputed) == [None] * 4


def test_a_run_goes_on_to_the_bit_with_another_number(run_with_all_recomputed, tmp_path, capsys):
    """The checkpoint was written with all layers recomputed, and the rest is made with one."""
    resumed = Path(shutil.copytree(run_with_all_recomputed, tmp_path / "resumed"))
    shutil.rmtree(resumed / "checkpoint-4")
    for file in resumed.glob("*.safetensors"):
        file.unlink()
    train_tiny_run(resumed, **RECOMPUTE_KEYS, adora_recompute=1)
    assert read_recomputed_layers(resumed) == [None, None, 1.0, 1.0]
    assert "layers are recomputed in the first micro-batch" in capsys.readouterr().out
    assert read_comparable_metrics(resumed) == read_comparable_metrics(run_with_all_recomputed)
    weights = [
        (run / "adapter_model.safetensors").read_bytes()
        for run in (resumed, run_with_all_recomputed)
    ]
    assert weights[0] == weights[1]
