"""Evaluations during a training in which the policy samples itself, with Transformers."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adora_vl import AdoraGRPOConfig, AdoraGRPOTrainer, load_problems
from data_prep.__main__ import main as data_prep
from eval.command import main as evaluate
from eval.problems import BENCHMARK
from tests.support.launch import accelerate_launch, cli_arguments, run_command

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def problems_folder(tmp_path_factory) -> Path:
    """Return a prepared folder of drawn problems, some of which the tiny model answers right."""
    folder = tmp_path_factory.mktemp("data") / "drawn"
    sizes = ["--rows", "32", "--test-rows", "40"]
    assert data_prep(["synthetic", *sizes, "--output", str(folder)]) == 0
    return folder


def train(
    data: Path, output_dir: Path, evaluation_keys: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Train two steps without an engine, save the model, and return the entries of the log.

    Answers are drawn at a high temperature and with a penalty, which an evaluation must not do.
    """
    args = AdoraGRPOConfig(
        str(output_dir),
        use_cpu=True,
        bf16=False,
        max_steps=2,
        learning_rate=1e-3,
        logging_steps=1,
        temperature=1.5,
        repetition_penalty=1.3,
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=40,
        report_to="none",
        save_strategy="no",
        **(evaluation_keys or {}),
    )
    trainer = AdoraGRPOTrainer("tiny", "accuracy", args, load_problems(data))
    trainer.train()
    trainer.save_model()
    return trainer.state.log_history


def test_it_scores_what_the_evaluator_scores_and_changes_no_step(problems_folder, tmp_path):
    """The last accuracy is that of the saved model, and the weights are those of a run without."""
    evaluation_keys = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "eval_on_start": True,
        "adora_eval": [f"problems={problems_folder}"],
    }
    log = train(problems_folder, tmp_path / "evaluated", evaluation_keys)
    train(problems_folder, tmp_path / "plain")

    accuracies = [
        entry["eval_problems_accuracy"] for entry in log if "eval_problems_accuracy" in entry
    ]
    assert len(accuracies) == 3  # before the first step, and after each
    output = tmp_path / "predictions"
    arguments = ["run", "--model", str(tmp_path / "evaluated"), "--data", str(problems_folder)]
    arguments += ["--engine", "transformers", "--max-tokens", "40", "--output", str(output)]
    assert evaluate(BENCHMARK, arguments) == 0
    score = json.loads((output / "score.json").read_text())
    assert score["total"] == 40
    assert accuracies[-1] == pytest.approx(score["accuracy"])
    assert 0 < score["accuracy"] < 1, "nothing was compared"
    weights = load_file(tmp_path / "evaluated" / "model.safetensors")
    weights_without = load_file(tmp_path / "plain" / "model.safetensors")
    assert all(torch.equal(weights[name], weights_without[name]) for name in weights_without)


def test_tools_are_called_in_it(tmp_path):
    """Problems whose numbers can only be read with a tool are answered right in an evaluation."""
    data = tmp_path / "corners"
    arguments = ["synthetic", "--families", "corners", "--size", "448", "--rows", "16"]
    assert data_prep([*arguments, "--test-rows", "12", "--output", str(data)]) == 0
    output_dir = tmp_path / "run"
    run_command(
        [
            sys.executable,
            "-m",
            "adora_vl.train",
            *cli_arguments(
                model_name_or_path="tiny_zoom",
                dataset_name=data,
                output_dir=output_dir,
                adora_system_prompt="Look with zoom.",
                adora_prompt="{problem}",
                tools="zoom",
                min_pixels=3136,
                max_pixels=3136,
                use_vllm="false",
                use_cpu="true",
                bf16="false",
                per_device_train_batch_size=8,
                num_generations=4,
                max_completion_length=200,
                max_steps=1,
                eval_strategy="steps",
                eval_steps=5,
                eval_on_start="true",
                report_to="none",
                save_strategy="no",
            ),
        ]
    )
    log = json.loads((output_dir / "trainer_state.json").read_text())["log_history"]
    (accuracy,) = [
        entry["eval_problems_accuracy"] for entry in log if "eval_problems_accuracy" in entry
    ]
    # The model calls the tool in half of its answers. Without the call it guesses among hundreds.
    assert accuracy > 0.2


def test_two_processes_with_divided_weights_score_what_one_scores(problems_folder, tmp_path):
    """Rank 0 answers 3 of 5 problems and rank 1 two, in batches of 2.

    So rank 1 has no problem in the second batch. It samples a stand-in then, since the weights are
    divided by ZeRO-3.
    """
    output_dir = tmp_path / "run"
    completed = accelerate_launch(
        "cpu_zero3",
        "-m",
        "adora_vl.train",
        *cli_arguments(
            model_name_or_path="tiny",
            dataset_name=problems_folder,
            output_dir=output_dir,
            use_vllm="false",
            use_cpu="true",
            bf16="false",
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=40,
            max_steps=1,
            eval_strategy="steps",
            eval_steps=5,
            eval_on_start="true",
            adora_eval=f"problems={problems_folder}",
            adora_eval_limit=5,
            report_to="none",
            save_strategy="no",
        ),
    )
    output = tmp_path / "predictions"
    arguments = ["run", "--model", "tiny", "--data", str(problems_folder), "--limit", "5"]
    arguments += ["--engine", "transformers", "--max-tokens", "40", "--output", str(output)]
    assert evaluate(BENCHMARK, arguments) == 0
    score = json.loads((output / "score.json").read_text())
    log = json.loads((output_dir / "trainer_state.json").read_text())["log_history"]
    (accuracy,) = [
        entry["eval_problems_accuracy"] for entry in log if "eval_problems_accuracy" in entry
    ]
    assert accuracy == pytest.approx(score["accuracy"])
    assert "step 0: problems" in completed.stdout
    assert "5 of 40 problems asked" in completed.stdout
