"""After training with LoRA, the documented evaluation is given the run's folder and finds the merged model in it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from adora_vl.export import main as export
from data_prep.cli import main as data_prep
from eval.command import main as evaluate
from eval.geometry3k.benchmark import BENCHMARK
from tests.tiny_run import train

LORA = {"use_peft": "true", "lora_r": 4, "lora_target_modules": "q_proj,v_proj", "save_strategy": "no", "max_steps": 1}


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("lora") / "run", **LORA)


def test_the_evaluation_of_a_lora_run(lora_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, output = tmp_path / "data", tmp_path / "eval"
    assert data_prep(["synthetic", "--output", str(data), "--rows", "1", "--test-rows", "2"]) == 0
    words = ["run", "--model", str(lora_run), "--data", str(data), "--output", str(output), "--engine", "transformers"]
    capsys.readouterr()
    assert evaluate(BENCHMARK, [*words, "--max-tokens", "8"]) == 0
    said = capsys.readouterr().err
    assert f"{lora_run} holds a LoRA adapter; its merged model is used: {lora_run / 'merged'}\n" in said
    score = json.loads((output / "score.json").read_text())
    assert score["total"] == 2 and score["fingerprint"]["fields"]["model"] == str(lora_run / "merged")
    assert not [path.name for path in lora_run.iterdir() if "partial" in path.name]


def test_without_the_merged_model_one_line_says_how_to_make_it(
    lora_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(lora_run, tmp_path / "run")
    shutil.rmtree(run / "merged")
    words = ["run", "--model", str(run), "--data", "nowhere", "--output", str(tmp_path / "eval")]
    assert evaluate(BENCHMARK, words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "adora_vl.export" in said and str(run) in said


def test_the_adapter_of_a_language_model_is_exported_too(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    base = Qwen2ForCausalLM(Qwen2Config(vocab_size=32, num_key_value_heads=2, **sizes))
    base.save_pretrained(tmp_path / "base")
    base.name_or_path = str(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "run")
    assert export([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    ids = torch.arange(8)[None]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.allclose(exported(ids).logits, adapted(ids).logits, atol=1e-5)
