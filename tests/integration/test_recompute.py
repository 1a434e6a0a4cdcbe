"""A run recomputes so many layers as it is told, and neither its weights nor a resumed run differ."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from adora_vl.record.metrics import METRICS_FILE, read_metrics
from adora_vl.training.recompute import RECOMPUTED_LAYERS_FIGURE
from tests.support.tiny_run import train

KEYS = {"gradient_checkpointing": "true", "use_peft": "true", "lora_dropout": 0.2}


def figures_of(run: Path) -> list[dict[str, Any]]:
    """Return the figures of the training steps that no clock and no number of layers changes."""
    lines = [line for line in read_metrics(run / METRICS_FILE) if "reward" in line]
    names = ("step", "loss", "grad_norm", "entropy", "reward")
    return [{name: line[name] for name in names} for line in lines]


def numbers_of(run: Path) -> list[float | None]:
    """Return the recomputed layers of each training step."""
    return [
        line.get(RECOMPUTED_LAYERS_FIGURE)
        for line in read_metrics(run / METRICS_FILE)
        if "reward" in line
    ]


@pytest.fixture(scope="module")
def every_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run on a CPU, where all layers are recomputed by default."""
    return train(tmp_path_factory.mktemp("recompute") / "all", **KEYS)


def test_the_default_changes_nothing_on_a_cpu(every_layer):
    assert numbers_of(every_layer) == [None] * 4


def test_a_run_goes_on_to_the_bit_with_another_number(every_layer, tmp_path, capsys):
    """The checkpoint was written with all layers recomputed, and the rest is made with one."""
    resumed = Path(shutil.copytree(every_layer, tmp_path / "resumed"))
    shutil.rmtree(resumed / "checkpoint-4")
    for file in resumed.glob("*.safetensors"):
        file.unlink()
    train(resumed, **KEYS, adora_recompute=1)
    assert numbers_of(resumed) == [None, None, 1.0, 1.0]
    assert "layers are recomputed in the first micro-batch" in capsys.readouterr().out
    assert figures_of(resumed) == figures_of(every_layer)
    weights = [(run / "adapter_model.safetensors").read_bytes() for run in (resumed, every_layer)]
    assert weights[0] == weights[1]
