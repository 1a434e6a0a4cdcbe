"""The training command on real diagrams, and with LoRA, through the real stack."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors import safe_open

from adora_vl.models.tiny.build import PRETRAINED
from data_prep.cli import main as data_prep
from tests.integration.support import REPOSITORY, launch, run

pytestmark = pytest.mark.slow
SMOKE = ["-m", "adora_vl.train", "--config", str(REPOSITORY / "configs" / "train" / "smoke_cpu.yaml")]
PRETRAINED_FILE = PRETRAINED / "model.safetensors"
SMALL = [
    "--per_device_train_batch_size",
    "8",
    "--num_generations",
    "4",
    "--logging_steps",
    "1",
    "--save_strategy",
    "no",
]


def history(folder: Path) -> list[dict]:
    entries = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in entries if "reward" in entry]


def test_two_steps_on_the_real_geometry3k_problems(geometry3k_raw, tmp_path):
    """Real diagrams at own size, golds such as `5 \\sqrt { 3 }`: the tiny model solves none, but all joints hold."""
    data, out = tmp_path / "data", tmp_path / "out"
    assert data_prep(["geometry3k", "--source", "intergps", "--input", str(geometry3k_raw), "--output", str(data)]) == 0
    done = launch(
        "cpu", *SMOKE, *SMALL, "--dataset_name", str(data), "--output_dir", str(out), "--max_steps", "2",
        "--max_completion_length", "24", "--vllm_max_model_length", "1024",
    )  # fmt: skip
    assert "6 training problems; 2 prompts a generation (8 rollouts)" in done.stdout
    assert "Self-check: engine and trainer differ by" in done.stdout
    steps = history(out)
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["sampling/sampling_logp_difference/max"] < 1e-2
        assert step["adora/drift"] < 1e-3
        assert math.isfinite(step["grad_norm"])
        assert {"adora/tds_share", "adora/weight_mean", "adora/pass_rate", "grading/unparseable"} <= step.keys()
    table = pd.read_parquet(sorted((out / "completions").glob("*.parquet"))[-1])
    assert len(table) == 8
    assert {"advantage", "advantage_raw", "adora_weight", "adora_tds", "verdict", "extracted"} <= set(table.columns)
    assert ((out / "model.safetensors").is_file() and (out / "preprocessor_config.json").is_file()) or list(
        out.glob("*processor*")
    )
    assert "Trained 2 steps" in done.stdout and "python -m eval.geometry3k run" in done.stdout


def test_lora_reaches_the_engine(tmp_path):
    """With adapters merged on every sync, the engine still agrees with the policy after updates that moved it."""
    out = tmp_path / "out"
    launch(
        "cpu", *SMOKE, *SMALL, "--output_dir", str(out), "--max_steps", "4", "--learning_rate", "5e-3",
        "--adora_synthetic_rows", "64", "--use_peft", "true", "--lora_r", "4", "--lora_dropout", "0",
        "--lora_target_modules", "q_proj", "v_proj", "up_proj", "--adora_freeze_vision_tower", "true",
        "--beta", "0.01",
    )  # fmt: skip
    steps = history(out)
    assert len(steps) == 4
    assert all(step["adora/drift"] < 1e-3 for step in steps)
    assert max(step["kl"] for step in steps) > 1e-3, "the adapter did not move the policy"
    assert (out / "merged" / "model.safetensors").is_file()  # what the evaluators load
    adapter = json.loads((out / "adapter_config.json").read_text())
    assert sorted(adapter["target_modules"]) == ["q_proj", "up_proj", "v_proj"]


def test_two_zero3_processes_save_and_resume(tmp_path):
    """Sharded weights come out whole, and a second start goes on where the first one ended."""
    out = tmp_path / "out"
    words = [*SMOKE, *SMALL, "--output_dir", str(out), "--adora_synthetic_rows", "64"]
    words[words.index("no")] = "steps"
    words += ["--save_steps", "1"]
    launch("cpu_zero3", *words, "--max_steps", "2")
    done = launch("cpu_zero3", *words, "--max_steps", "3", "--resume_from_checkpoint", "true")
    assert "64 training problems; 4 prompts a generation (16 rollouts)" in done.stdout
    steps = history(out)
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["adora/drift"] < 1e-3 for step in steps)
    with safe_open(out / "model.safetensors", framework="pt") as saved, safe_open(PRETRAINED_FILE, "pt") as shipped:
        shapes = {name: saved.get_slice(name).get_shape() for name in saved.keys()}  # noqa: SIM118
        assert shapes == {name: shipped.get_slice(name).get_shape() for name in shipped.keys()}  # noqa: SIM118
        assert any(not torch.equal(saved.get_tensor(name), shipped.get_tensor(name)) for name in shapes)
    before = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").unlink()  # as if the run had been killed after its last checkpoint
    done = launch("cpu_zero3", *words, "--max_steps", "3")
    assert "checkpoint-3 is the last step: nothing left to train" in done.stdout
    assert (out / "model.safetensors").read_bytes() == before


def test_an_evaluation_on_the_way_is_the_one_that_the_saved_model_gets(tmp_path):
    """Same problems, same answers: the trainer's engine after the last step, and a fresh one on what was saved."""
    data, out = tmp_path / "data", tmp_path / "out"
    assert data_prep(["synthetic", "--output", str(data), "--rows", "64", "--test-rows", "100"]) == 0
    done = launch(
        "cpu", *SMOKE, *SMALL, "--dataset_name", str(data), "--output_dir", str(out), "--max_steps", "2",
        "--learning_rate", "1e-3", "--eval_strategy", "steps", "--eval_steps", "1", "--eval_on_start", "true",
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if ": geometry3k " in line]
    assert [line.split(":")[0] for line in lines] == ["step 0", "step 1", "step 2"]
    words = ["run", "--model", str(out), "--data", str(data), "--output", str(tmp_path / "eval"), "--max-tokens", "40"]
    run([sys.executable, "-m", "eval.geometry3k", *words])
    score = json.loads((tmp_path / "eval" / "score.json").read_text())
    assert score["total"] == 100
    log = json.loads((out / "trainer_state.json").read_text())["log_history"]
    logged = [entry["eval_geometry3k_accuracy"] for entry in log if "eval_geometry3k_accuracy" in entry]
    assert logged[-1] == pytest.approx(score["accuracy"])
    assert logged[-1] != logged[0]
