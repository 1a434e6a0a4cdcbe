"""Every shipped config is parsed by the code of a real run, and its arithmetic checked for the GPUs that it names."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from transformers import Qwen2_5_VLConfig

from adora_vl.config.arithmetic import plan_batches
from adora_vl.config.command_line import parse, read_yaml
from adora_vl.config.noise import noise_settings
from adora_vl.config.run_checks import check_run
from adora_vl.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"
# train config -> the accelerate config that its header names
PAIRS = {
    "smoke_cpu": "cpu",
    "smoke_text_cpu": "cpu",
    "annotated": "cpu",
    "adora_7b_geo3k": "zero3_offload",
    "grpo_7b_geo3k": "zero3_offload",
    "noisy_7b_geo3k": "zero3_offload",
    "best_7b_geo3k": "zero3_offload",
    "adora_llm_kk": "zero3",
    "adora_3b_1gpu_lora": "gpu1",
    "adora_qwen3_vl_2b_1gpu": "gpu1",
    "adora_qwen3_vl_4b_1gpu_lora": "gpu1",
    "adora_qwen3_vl_8b_geo3k": "zero3_offload",
    "slice_7b_cpu": "cpu",
}
# The others have the 2,101 rows of Geometry3K.
ROWS = {"smoke_cpu": 4096, "smoke_text_cpu": 4096, "annotated": 4096, "slice_7b_cpu": 8, "adora_llm_kk": 4500}


def test_every_shipped_config_is_in_the_pairs():
    assert {path.stem for path in (CONFIGS / "train").glob("*.yaml")} == PAIRS.keys()
    names = {path.stem for path in (CONFIGS / "accelerate").glob("*.yaml")}
    assert names == {"cpu", "cpu_zero3", "gpu1", "zero2", "zero3", "zero3_offload", "zero3_nodes"}


@pytest.mark.parametrize("name", PAIRS)
def test_a_train_config_passes_the_checks_of_a_real_run(name, monkeypatch):
    monkeypatch.setattr("adora_vl.rollout.sync.engine_runs_on_cpu", lambda: name.endswith("_cpu"))
    path = CONFIGS / "train" / f"{name}.yaml"
    # what a machine without a GPU cannot promise is switched off here, everything else is the file's
    script, config, model = parse(["--config", str(path), "--use_cpu", "true", "--bf16", "false"])
    processes = yaml.safe_load((CONFIGS / "accelerate" / f"{PAIRS[name]}.yaml").read_text())["num_processes"]
    plan = check_run(config, model, Qwen2_5_VLConfig(), ROWS.get(name, 2101), processes)
    assert plan.generation_batch == plan.prompts_per_generation * config.num_generations
    assert model.model_name_or_path and script.dataset_name


def test_that_check_would_notice_a_dataset_that_is_too_small(monkeypatch):
    monkeypatch.setattr("adora_vl.rollout.sync.engine_runs_on_cpu", lambda: False)
    path = CONFIGS / "train" / "adora_7b_geo3k.yaml"
    _, config, model = parse(["--config", str(path), "--use_cpu", "true", "--bf16", "false"])
    with pytest.raises(UserError, match="100 rows cannot fill one generation of 128"):
        check_run(config, model, Qwen2_5_VLConfig(), 100, num_processes=8)


BATCH_KEYS = ("per_device_train_batch_size", "num_generations", "gradient_accumulation_steps", "steps_per_generation")


@pytest.mark.parametrize("name", ["adora_7b_geo3k", "grpo_7b_geo3k", "adora_qwen3_vl_8b_geo3k"])
def test_the_papers_recipe_learns_from_128_prompts_of_8_in_8_steps(name):
    content = read_yaml(CONFIGS / "train" / f"{name}.yaml")
    plan = plan_batches(num_processes=8, **{key: content[key] for key in BATCH_KEYS})
    assert (plan.prompts_per_generation, plan.generation_batch, plan.optimizer_batch) == (128, 1024, 128)
    assert plan.updates_per_generation == 8
    assert content["save_steps"] == 2101 // 128 * 8, "once per epoch"


@pytest.mark.parametrize("name", ["noisy_7b_geo3k", "best_7b_geo3k"])
def test_noisy_rollouts_learn_from_512_prompts_of_6_clean_and_6_distorted_in_4_steps(name):
    """NUS-TRAIL/NoisyRollout: rollout_batch_size 512, global_batch_size 128, n 6 twice, half the noise at 40 of 60."""
    content = read_yaml(CONFIGS / "train" / f"{name}.yaml")
    plan = plan_batches(num_processes=8, **{key: content[key] for key in BATCH_KEYS})
    assert (plan.prompts_per_generation, plan.optimizer_batch, plan.updates_per_generation) == (512, 128 * 12, 4)
    assert content["save_steps"] == 2101 // 512 * 4, "once per epoch"
    path = CONFIGS / "train" / f"{name}.yaml"
    noise = noise_settings(parse(["--config", str(path), "--use_cpu", "true", "--bf16", "false"])[1])
    assert noise.count == 6 and noise.level(0) == 499
    assert [noise.level(generation / 60) for generation in (30, 40, 50)] == [496, 251, 3]


def test_the_recipe_of_the_evidence_differs_from_noisy_rollouts_in_its_loss_only():
    noisy, best = (read_yaml(CONFIGS / "train" / f"{name}_7b_geo3k.yaml") for name in ("noisy", "best"))
    differing = {key for key in noisy.keys() | best.keys() if noisy.get(key) != best.get(key)}
    loss = {"loss_type", "sapo_temperature_pos", "sapo_temperature_neg", "epsilon", "entropy_coef"}
    assert differing == {"output_dir", *loss}


@pytest.mark.parametrize("name", [name for name, kind in PAIRS.items() if kind != "cpu"])
def test_a_micro_batch_of_a_gpu_recipe_has_whole_groups(name):
    content = read_yaml(CONFIGS / "train" / f"{name}.yaml")
    assert content["per_device_train_batch_size"] % content["num_generations"] == 0


def test_the_recipe_of_another_family_differs_in_the_model_and_its_pixels_only():
    ours, theirs = (read_yaml(CONFIGS / "train" / f"adora_{name}_geo3k.yaml") for name in ("7b", "qwen3_vl_8b"))
    differing = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    assert differing == {"model_name_or_path", "output_dir", "min_pixels", "max_pixels"}


def test_the_baseline_differs_from_the_recipe_in_its_mode_only():
    adora, grpo = (read_yaml(CONFIGS / "train" / f"{name}_7b_geo3k.yaml") for name in ("adora", "grpo"))
    differing = {key for key in adora.keys() | grpo.keys() if adora.get(key) != grpo.get(key)}
    assert {key for key in differing if not key.startswith("adora_")} == {"output_dir"}
    path = CONFIGS / "train" / "grpo_7b_geo3k.yaml"
    assert parse(["--config", str(path), "--use_cpu", "true", "--bf16", "false"])[1].adora_mode == "off"


@pytest.mark.parametrize("path", sorted((CONFIGS / "accelerate").glob("*.yaml")), ids=lambda p: p.stem)
def test_an_accelerate_config_is_one_that_accelerate_reads(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_processes >= 1
    assert (config.distributed_type.value == "DEEPSPEED") == ("zero" in path.stem)
    if "zero3" in path.stem:
        assert config.deepspeed_config["zero_stage"] == 3


@pytest.mark.parametrize("path", sorted((CONFIGS / "accelerate").glob("*zero*.yaml")), ids=lambda p: p.stem)
def test_the_launcher_of_several_processes_gives_a_stopped_run_time_to_save(path, monkeypatch):
    """Down to what torch's launcher makes of it, since accelerate hands the key on without knowing it."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import _filter_args
    from torch.distributed import run

    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    given = launch_command_parser().parse_args(["--config_file", str(path), "-m", "adora_vl.train"])
    own = ["--training_script", given.training_script, "--training_script_args", given.training_script_args]
    words = _filter_args(_validate_launch_command(given)[0], run.get_args_parser(), own)
    assert run.config_from_args(words)[0].shutdown_timeout == 3600


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--learning_rat", "1"], "unknown key 'learning_rat'; did you mean 'learning_rate'"),
        (["--adora-facter=0.2"], "did you mean 'adora_factor'"),
        (["--zzzz", "1"], "unknown key 'zzzz'$"),
        (["--learning_rate", "fast"], "learning_rate.*fast"),
        (["--adora_mode", "boost"], "adora_mode.*boost"),
        (["--config", "nowhere.yaml"], "no file 'nowhere.yaml'"),
        (["--config"], "expected the path"),
        (["--config", "a.yaml", "--config=b.yaml"], "--config: given twice"),
        (["stray", "--use_cpu", "true", "--bf16", "false"], "stray"),
    ],
    ids=str,
)
def test_a_bad_command_line_is_one_line(arguments, message):
    with pytest.raises(UserError, match=message) as caught:
        parse([*arguments])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("adora_less_padding: true\n", "the key 'adora_less_padding' was removed; leave it out"),
        ("num_generation: 8\n", "unknown key 'num_generation'; did you mean 'num_generations'"),
        ("- a\n- b\n", "expected `key: value` lines, found list"),
        ("a: [1\n", "not valid YAML"),
        ("[" * 3000, "nested too deeply"),
        ("seed: 1\nbeta: 0\nseed: 2\n", "line 3 gives 'seed' a second time"),
        ("seed: 2020-13-45\n", "not valid YAML"),
        ("? [a]\n: 1\n", "not valid YAML"),
        ("env: 5\n", "env: 5 is not a mapping of environment variables"),
        ("env: {1: 2}\n", "env: 1: 2 is not a name and a text"),
        ("env: {A=B: 2}\n", "env: 'A=B': 2 is not"),
        ("env: {A: [2]}\n", "env: 'A': \\[2\\] is not"),
    ],
)
def test_a_bad_file_is_named(tmp_path, content, message):
    file = tmp_path / "c.yaml"
    file.write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        parse(["--config", str(file)])
    assert str(file) in str(caught.value)


def test_the_command_line_wins_over_the_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("learning_rate: 1e-6\nuse_cpu: true\nbf16: false\nadora_factor: 0.3\nnum_generations: 4\n")
    _, config, _ = parse(["--config", str(file), "--adora_factor", "0.2"])
    assert (config.learning_rate, config.adora_factor, config.num_generations) == (1e-6, 0.2, 4)
    assert config.adora_mode == "attenuation"  # the default below both


def test_the_truncation_length_follows_the_completion_limit(tmp_path):
    base = ["--use_cpu", "true", "--bf16", "false", "--output_dir", str(tmp_path), "--max_completion_length", "4096"]
    assert parse(base)[1].truncated_at == 4094
    assert parse([*base, "--adora_truncated_at", "100"])[1].truncated_at == 100


def test_the_server_is_looked_for_on_loopback(tmp_path):
    config = parse(["--use_cpu", "true", "--bf16", "false", "--output_dir", str(tmp_path)])[1]
    assert config.vllm_server_host == "127.0.0.1"


def test_every_key_of_ours_is_documented():
    from dataclasses import fields

    from trl import GRPOConfig

    from adora_vl.config import AdoraGRPOConfig, AdoraScriptArguments

    stock = {field.name for field in fields(GRPOConfig)}
    ours = {f.name for dataclass in (AdoraScriptArguments, AdoraGRPOConfig) for f in fields(dataclass)} - stock
    text = (CONFIGS.parent / "docs" / "configuration.md").read_text()
    assert [name for name in sorted(ours) if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    ("content", "words", "presets"),
    [
        ("", [], ["adora"]),
        ("adora_reward: easyr1\n", [], ["easyr1"]),
        ("adora_reward: [accuracy, format]\n", [], ["accuracy", "format"]),
        ("adora_reward: easyr1\n", ["--adora_reward", "accuracy", "format"], ["accuracy", "format"]),
    ],
)
def test_a_reward_is_one_preset_or_a_list(tmp_path, content, words, presets):
    file = tmp_path / "c.yaml"
    file.write_text(f"use_cpu: true\nbf16: false\n{content}")
    assert parse(["--config", str(file), *words])[0].adora_reward == presets
