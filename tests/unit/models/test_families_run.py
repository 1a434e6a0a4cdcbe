"""The families beside Qwen2.5-VL through the real commands, and runs with LoRA.

The runs are trained, frozen in part, killed and evaluated.

The weights of the other families are random, so that nothing is ever right: entropy moves them.
"""

import contextlib
import io
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from adora_vl.builtin import DEFAULT_FAMILY, TINY_FAMILIES, WarmStart
from adora_vl.builtin.tiny_vl import build_tiny_model
from adora_vl.checkpoint.run_files import list_users_files
from adora_vl.export import main as export
from adora_vl.models.families import COMPONENTS, FAMILIES, component_of
from benchmarks.kill_and_resume import comparable_results
from data_prep.cli import main as data_prep
from eval.command import main as evaluate
from eval.geometry3k import BENCHMARK
from tests.support.tiny_run import train_tiny_run

STEPS = 3


RUN_KEYS = {
    "max_steps": STEPS,
    "save_steps": 2,
    "per_device_train_batch_size": 8,
    "max_completion_length": 12,
    "entropy_coef": 1.0,
    "learning_rate": 1e-2,
    "adora_freeze": "projector",
    "log_completions": "true",
}


LORA_KEYS = {
    "use_peft": "true",
    "lora_r": 4,
    "lora_target_modules": "q_proj,v_proj",
    "save_strategy": "no",
    "max_steps": 2,
}


@dataclass(frozen=True)
class TrainedFamily:
    """A tiny model of a family, and the run that trained it with its projector frozen.

    `output` is what the run printed.
    """

    model_type: str
    model_folder: Path
    run_folder: Path
    output: str


@pytest.fixture(scope="module", params=[kind for kind in TINY_FAMILIES if kind != DEFAULT_FAMILY])
def trained_family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TrainedFamily:
    """Train a tiny model of each family but the default one, for `STEPS` steps."""
    folder = tmp_path_factory.mktemp(request.param)
    build_tiny_model(folder / "model", WarmStart(steps=0), request.param)
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        train_tiny_run(folder / "run", model_name_or_path=folder / "model", **RUN_KEYS)
    return TrainedFamily(request.param, folder / "model", folder / "run", stream.getvalue())


@pytest.fixture(scope="module")
def drawn_problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draw one problem to train on and two to evaluate on; return their folder."""
    folder = tmp_path_factory.mktemp("data") / "drawn"
    assert data_prep(["synthetic", "--output", str(folder), "--rows", "1", "--test-rows", "2"]) == 0
    return folder


def tensors_changed_by_part(before: Path, after: Path) -> Mapping[str, list[bool]]:
    """Return, for each part of the model, whether each of its tensors has changed."""
    weights_before = load_file(before / "model.safetensors")
    weights_after = load_file(after / "model.safetensors")
    assert weights_before.keys() == weights_after.keys()
    assert all(torch.isfinite(tensor).all() for tensor in weights_after.values())
    changed_by_part: dict[str, list[bool]] = {part: [] for part in COMPONENTS}
    for name, tensor in weights_before.items():
        changed_by_part[component_of(name)].append(not torch.equal(tensor, weights_after[name]))
    return changed_by_part


@pytest.mark.slow
def test_the_frozen_part_stays_and_the_others_move(trained_family):
    """The projector is frozen; the language model moves whole, and most of the vision tower."""
    changed_by_part = tensors_changed_by_part(
        trained_family.model_folder, trained_family.run_folder
    )
    assert not any(changed_by_part["projector"])
    # Qwen3-VL has two deepstack mergers besides the merger, each with six tensors.
    assert len(changed_by_part["projector"]) == (
        18 if trained_family.model_type == "qwen3_vl" else 6
    )
    assert sum(changed_by_part["vision_tower"]) > 0.8 * len(changed_by_part["vision_tower"]), (
        "a key's bias moves nothing"
    )
    assert all(changed_by_part["language_model"])


@pytest.mark.slow
def test_what_a_family_cannot_share_is_said_in_one_line(trained_family):
    """A family's note is printed once, and a family without one prints none."""
    family_note = FAMILIES[trained_family.model_type].note
    assert trained_family.output.count(f"{trained_family.model_folder}: {family_note}\n") == bool(
        family_note
    )


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_bit(trained_family, tmp_path):
    """Without its last checkpoint and model, the run ends with the results that it had."""
    interrupted_run = shutil.copytree(trained_family.run_folder, tmp_path / "again")
    shutil.rmtree(interrupted_run / f"checkpoint-{STEPS}")
    (interrupted_run / "model.safetensors").unlink()
    train_tiny_run(interrupted_run, model_name_or_path=trained_family.model_folder, **RUN_KEYS)
    assert comparable_results(interrupted_run) == comparable_results(trained_family.run_folder)


def score_model(model: Path, data: Path, output: Path) -> dict[str, Any]:
    """Evaluate a model on the two problems with Transformers, and return what `score.json` says."""
    arguments = [
        "run",
        "--model",
        str(model),
        "--data",
        str(data),
        "--output",
        str(output),
        "--engine",
        "transformers",
    ]
    assert evaluate(BENCHMARK, [*arguments, "--max-tokens", "8"]) == 0
    result: dict[str, Any] = json.loads((output / "score.json").read_text())
    return result


@pytest.mark.slow
def test_a_run_and_its_adapter_are_evaluated(trained_family, drawn_problems, tmp_path):
    """A whole model is scored, and a LoRA run with its merged model."""
    assert score_model(trained_family.run_folder, drawn_problems, tmp_path / "whole")["total"] == 2
    lora_run_keys = {**RUN_KEYS, "adora_freeze": "[]", **LORA_KEYS}
    adapted_run = train_tiny_run(
        tmp_path / "lora", model_name_or_path=trained_family.model_folder, **lora_run_keys
    )
    changed_by_part = tensors_changed_by_part(trained_family.model_folder, adapted_run / "merged")
    assert any(changed_by_part["language_model"])
    assert not any(changed_by_part["projector"])
    assert not any(changed_by_part["vision_tower"])
    assert score_model(adapted_run, drawn_problems, tmp_path / "adapted")["total"] == 2


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the tiny model with LoRA for one step; return the run's folder."""
    return train_tiny_run(tmp_path_factory.mktemp("lora") / "run", **{**LORA_KEYS, "max_steps": 1})


def test_the_evaluation_of_a_lora_run(lora_run, drawn_problems, tmp_path, capsys):
    """An evaluation of a LoRA run uses its merged model, and leaves no file in the run's folder."""
    capsys.readouterr()
    result = score_model(lora_run, drawn_problems, tmp_path / "eval")
    stderr = capsys.readouterr().err
    assert (
        f"{lora_run} holds a LoRA adapter; its merged model is used: {lora_run / 'merged'}\n"
        in stderr
    )
    assert result["total"] == 2
    assert result["fingerprint"]["fields"]["model"] == str(lora_run / "merged")
    assert not [path.name for path in lora_run.iterdir() if "partial" in path.name]
    assert list_users_files(lora_run) == [], (
        "the run does not know its adapter and its merged model for its own"
    )


def test_the_adapter_of_a_language_model_is_exported_too(tmp_path):
    """A model without images has, exported, the logits of base and adapter."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    base = Qwen2ForCausalLM(Qwen2Config(vocab_size=32, num_key_value_heads=2, **sizes))
    base.save_pretrained(tmp_path / "base")
    base.name_or_path = str(tmp_path / "base")
    adapted_model = get_peft_model(
        base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    )
    adapted_model.save_pretrained(tmp_path / "run")
    assert export([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    ids = torch.arange(8)[None]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.allclose(exported(ids).logits, adapted_model(ids).logits, atol=1e-5)
