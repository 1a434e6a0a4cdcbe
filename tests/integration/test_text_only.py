"""A language model without eyes trains on prompts without images: the same trainer, the same engine."""

from __future__ import annotations

import json
import re
import runpy
import sys

import pandas as pd
import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from adora_vl.models.tiny.text import TextStart, build_tiny_text_model
from tests.integration.support import run

pytestmark = pytest.mark.slow


def test_a_text_only_policy_trains_and_its_engine_follows(tmp_path, monkeypatch):
    model, out = tmp_path / "model", tmp_path / "out"
    build_tiny_text_model(model, TextStart(steps=2, batch_size=4, rows=8))  # knows nothing yet
    monkeypatch.setenv("ADORA_VL_HOME", str(tmp_path / "home"))
    run([
        sys.executable, "-m", "adora_vl.train", "--config", "configs/train/smoke_text_cpu.yaml",
        "--model_name_or_path", str(model), "--output_dir", str(out), "--adora_synthetic_rows", "64",
        "--per_device_train_batch_size", "8", "--num_generations", "4", "--max_steps", "3", "--logging_steps", "1",
        "--save_strategy", "no", "--max_completion_length", "16",
        # no answer is right yet: the entropy moves the weights
        "--entropy_coef", "1.0", "--learning_rate", "1e-2", "--adora_max_drift", "null",
        "--eval_on_start", "false", "--eval_steps", "2", "--adora_eval_limit", "5",
    ])  # fmt: skip
    log = json.loads((out / "trainer_state.json").read_text())["log_history"]
    steps = [entry for entry in log if "reward" in entry and "loss" in entry]
    assert [entry["eval_knights_accuracy"] for entry in log if "eval_knights_accuracy" in entry] == [0.0]
    assert [step["step"] for step in steps] == [1, 2, 3], "a step with an evaluation has its own figures too"
    assert all(step["adora/drift"] < 1e-4 for step in steps), "engine and trainer agree, also after two updates"
    assert steps[0]["grading/unparseable"] == 1.0
    before, after = (load_file(folder / "model.safetensors") for folder in (model, out))
    assert max((after[name] - before[name]).abs().max().item() for name in before) > 5e-3
    table = pd.read_parquet(sorted((out / "completions").glob("*.parquet"))[-1])
    assert len(table) == 8 and table["prompt"].str.contains("knave").all()
    assert AutoModelForCausalLM.from_pretrained(out).config.model_type == "qwen2"
    assert AutoTokenizer.from_pretrained(out).chat_template
    (code,) = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.S)
    (tmp_path / "card.py").write_text(code)
    monkeypatch.chdir(out)
    said = runpy.run_path(str(tmp_path / "card.py"))
    assert said["tokens"].shape[1] > said["inputs"]["input_ids"].shape[1], "the code of the card answers"
