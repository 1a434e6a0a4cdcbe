"""The families beside Qwen2.5-VL through the real commands: trained, frozen, killed, evaluated, and with LoRA.

Their weights are random, so that nothing is ever right: entropy moves them.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from adora_vl.families import FAMILIES
from adora_vl.models.components import COMPONENTS, component_of
from adora_vl.models.tiny.architecture import DEFAULT_FAMILY, TINY_FAMILIES
from adora_vl.models.tiny.build import build_tiny_model
from adora_vl.models.tiny.warm_start import WarmStart
from benchmarks.kill_and_resume import facts
from data_prep.cli import main as data_prep
from eval.command import main as evaluate
from eval.geometry3k.benchmark import BENCHMARK
from tests.tiny_run import train

pytestmark = pytest.mark.slow

STEPS = 3
SETTINGS = {
    "max_steps": STEPS, "save_steps": 2, "per_device_train_batch_size": 8, "max_completion_length": 12,
    "entropy_coef": 1.0, "learning_rate": 1e-2, "adora_freeze_projector": "true", "log_completions": "true",
}  # fmt: skip
LORA = {"use_peft": "true", "lora_r": 4, "lora_target_modules": "q_proj,v_proj", "save_strategy": "no", "max_steps": 2}


@dataclass(frozen=True)
class Trained:
    """A tiny model of a family, the run that trained it with its projector frozen, and what the run printed."""

    kind: str
    model: Path
    run: Path
    printed: str


@pytest.fixture(scope="module", params=[kind for kind in TINY_FAMILIES if kind != DEFAULT_FAMILY])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp(request.param)
    build_tiny_model(folder / "model", WarmStart(steps=0), request.param)
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        train(folder / "run", model_name_or_path=folder / "model", **SETTINGS)
    return Trained(request.param, folder / "model", folder / "run", stream.getvalue())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "drawn"
    assert data_prep(["synthetic", "--output", str(folder), "--rows", "1", "--test-rows", "2"]) == 0
    return folder


def moved(before: Path, after: Path) -> Mapping[str, list[bool]]:
    """By part, whether each tensor is another one."""
    one, other = (load_file(folder / "model.safetensors") for folder in (before, after))
    assert one.keys() == other.keys() and all(torch.isfinite(tensor).all() for tensor in other.values())
    found: dict[str, list[bool]] = {part: [] for part in COMPONENTS}
    for name, tensor in one.items():
        found[component_of(name)].append(not torch.equal(tensor, other[name]))
    return found


def test_the_frozen_part_stays_and_the_others_move(trained: Trained) -> None:
    parts = moved(trained.model, trained.run)
    assert not any(parts["projector"]) and len(parts["projector"]) == (18 if trained.kind == "qwen3_vl" else 6)
    assert sum(parts["vision_tower"]) > 0.8 * len(parts["vision_tower"]), "a key's bias moves nothing"
    assert all(parts["language_model"])


def test_what_a_family_cannot_share_is_said_in_one_line(trained: Trained) -> None:
    note = FAMILIES[trained.kind].note
    assert trained.printed.count(f"{trained.model}: {note}\n") == bool(note)


def test_a_killed_run_goes_on_to_the_bit(trained: Trained, tmp_path: Path) -> None:
    again = shutil.copytree(trained.run, tmp_path / "again")
    shutil.rmtree(again / f"checkpoint-{STEPS}")
    (again / "model.safetensors").unlink()
    train(again, model_name_or_path=trained.model, **SETTINGS)
    assert facts(again) == facts(trained.run)


def score(model: Path, data: Path, output: Path) -> dict[str, object]:
    words = ["run", "--model", str(model), "--data", str(data), "--output", str(output), "--engine", "transformers"]
    assert evaluate(BENCHMARK, [*words, "--max-tokens", "8"]) == 0
    found: dict[str, object] = json.loads((output / "score.json").read_text())
    return found


def test_a_run_and_its_adapter_are_evaluated(trained: Trained, data: Path, tmp_path: Path) -> None:
    assert score(trained.run, data, tmp_path / "whole")["total"] == 2
    settings = {**SETTINGS, "adora_freeze_projector": "false", **LORA}
    adapted = train(tmp_path / "lora", model_name_or_path=trained.model, **settings)
    parts = moved(trained.model, adapted / "merged")
    assert any(parts["language_model"]) and not any(parts["projector"]) and not any(parts["vision_tower"])
    assert score(adapted, data, tmp_path / "adapted")["total"] == 2
