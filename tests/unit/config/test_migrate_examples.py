"""The published examples of other trainers, in their form: read, planned and trained for two steps.

The files of `tests/support/other_trainers` are written anew in the form of EasyR1's
`qwen2_5_vl_3b_geo3k_grpo.sh` and `qwen2_5_vl_7b_geo3k_cispo.sh` on its `config.yaml`, verl's
`run_qwen2_5_vl-7b_lora.sh` and `run_qwen3_vl-8b-megatron.sh`, the launch lines of TRL's
`grpo_vlm.py` and `gspo_vlm.py`, and ms-swift's `vllm_vl7b.sh` and `run_geo3k_qwen35_2b.sh`. The
second of each has what published files have besides: another loss, arguments of a reward, a
variable inside of a default, a lost backslash, a reward model, a hub and a split in a name.
"""

import io
import json
import math
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset
from PIL import Image, ImageDraw

from adora_vl.config.command import parse_command
from adora_vl.migrate import main
from adora_vl.train import main as train

EXAMPLES = Path(__file__).parents[2] / "support" / "other_trainers"
SCRIPTS = {
    "easyr1": "easyr1/examples/qwen2_5_vl_3b_geo3k_grpo.sh",
    "verl": "verl/run_qwen2_5_vl-7b_lora.sh",
    "trl": "trl/grpo_vlm.sh",
    "swift": "swift/vllm_vl7b.sh",
    "easyr1 cispo": "easyr1/examples/qwen2_5_vl_7b_geo3k_cispo.sh",
    "verl megatron": "verl/run_qwen3_vl-8b-megatron.sh",
    "trl gspo": "trl/gspo_vlm.sh",
    "swift geo3k": "swift/run_geo3k.sh",
}
KEYS: dict[str, dict[str, Any]] = {
    "easyr1": {
        "model_name_or_path": "Qwen/Qwen2.5-VL-3B-Instruct",
        "adora_method": "grpo",
        "dataset_name": ["hiyouga/geometry3k"],
        "dataset_train_split": "train",
        "adora_columns": {"problem": "problem", "answer": "answer", "images": "images"},
        "adora_system_prompt": None,
        "num_train_epochs": 15,
        "gradient_accumulation_steps": 128 * 5 // 2,
        "steps_per_generation": 512 * 5 // 2,
        "save_steps": 5 * 4,
        "beta": 0.01,
        "use_bias_correction_kl": False,
        "max_pixels": 4194304,
        "output_dir": "runs/qwen2_5_vl_3b_geo_grpo",
    },
    "verl": {
        "model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct",
        "adora_method": "grpo",
        "dataset_name": [f"{Path.home()}/data/geo3k/train.parquet"],
        "use_peft": True,
        "lora_r": 16,
        "lora_alpha": 32,
        "gradient_accumulation_steps": 8,
        "steps_per_generation": 32,
        "vllm_enable_sleep_mode": False,
        "use_bias_correction_kl": False,
        "adora_prompt": None,
        "report_to": ["wandb"],
    },
    "trl": {
        "model_name_or_path": "Qwen/Qwen2.5-VL-3B-Instruct",
        "adora_method": "grpo",
        "learning_rate": "1e-5",
        "gradient_checkpointing": True,
        "use_vllm": True,
        "lora_target_modules": ["q_proj", "v_proj"],
        "vllm_max_model_length": 3072,
    },
    "swift": {
        "model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct",
        "adora_method": "grpo",
        "max_pixels": 1003520,
        "use_peft": True,
        "beta": 0.04,
        "use_bias_correction_kl": False,
        "top_p": 0.85,
        "warmup_steps": 0.05,
        "vllm_enable_sleep_mode": True,
        "adora_reward": ["accuracy", "think_answer_format"],
    },
    "easyr1 cispo": {
        "loss_type": "cispo",
        "epsilon_high": 1.3,
        "delta": "not written",
        "adora_vllm_max_num_batched_tokens": 22528,
    },
    "verl megatron": {
        "model_name_or_path": "Qwen/Qwen3-VL-8B-Instruct",
        "num_generations": 5,
        "vllm_tensor_parallel_size": 4,
        "importance_sampling_level": "sequence",
        "loss_type": "grpo",
        "adora_reward": ["accuracy"],
    },
    "trl gspo": {"importance_sampling_level": "sequence", "steps_per_generation": 8},
    "swift geo3k": {
        "dataset_name": ["hiyouga/geometry3k"],
        "dataset_train_split": "train",
        "reward_weights": [1.0, 0.1],
        "deepspeed": "not written",
        "eval_steps": "not written",
    },
}
REMARKS = {
    "easyr1": ["answers read as: the column answer", "evaluation without data: hiyouga/geometry3k"],
    "verl": ["reward missing", "reward_model.ground_truth", "every linear layer of the language"],
    "trl": ["reward missing", "data missing", "prompt: the row's alone"],
    "swift": ["ids of ModelScope"],
    "easyr1 cispo": ["cispo is TRL's, which bounds the ratio from above alone"],
    "verl megatron": [
        "the line before actor_rollout_ref.rollout.n=5 has no backslash",
        "reward missing: /models/verifier gives it there",
    ],
    "trl gspo": ["reward missing"],
    "swift geo3k": ["prepare hf::hiyouga/geometry3k:test by"],
}
LAUNCHES = {
    "trl": ["--accelerate-config", "configs/accelerate/zero3.yaml", "--processes", "8"],
    "trl gspo": ["--accelerate-config", "configs/accelerate/zero2.yaml", "--processes", "4"],
    "swift geo3k": [],
    "verl megatron": ["--accelerate-config", "configs/accelerate/zero3.yaml", "--processes", "8"],
}
# What the script's own words become so that the tiny model trains two steps on four problems.
SMALL = {
    "easyr1": [
        "worker.actor.model.model_path=tiny",
        "trainer.n_gpus_per_node=1",
        "data.rollout_batch_size=4",
        "worker.actor.global_batch_size=2",
        "worker.actor.micro_batch_size_per_device_for_update=8",
        "worker.rollout.n=4",
        "data.max_response_length=16",
        "worker.rollout.tensor_parallel_size=1",
    ],
    "verl": [
        "actor_rollout_ref.model.path=tiny",
        "trainer.n_gpus_per_node=1",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.n=4",
        "data.max_response_length=16",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    ],
    "trl": [
        *("--model_name_or_path", "tiny"),
        *("--per_device_train_batch_size", "8"),
        *("--num_generations", "4"),
        *("--max_completion_length", "16"),
    ],
    "swift": [
        *("--model", "tiny"),
        *("--per_device_train_batch_size", "8"),
        *("--num_generations", "4"),
        *("--max_completion_length", "16"),
        *("--vllm_tensor_parallel_size", "1"),
    ],
}
ON_CPU = {
    "use_vllm": "false",
    "vllm_enable_sleep_mode": "false",
    "use_cpu": "true",
    "bf16": "false",
    "dtype": "float32",
    "max_pixels": 12544,
    "min_pixels": 3136,
    "report_to": "none",
    "logging_steps": 1,
    "gradient_checkpointing": "false",
}


def write_table(trainer: str, folder: Path, rows: int) -> Path:
    """Write a table in the trainer's form, with a picture in each row, and return its path."""
    stream = io.BytesIO()
    image = Image.new("RGB", (56, 56), "white")
    ImageDraw.Draw(image).rectangle((14, 14, 40, 40), fill="black")
    image.save(stream, "PNG")
    picture = {"bytes": stream.getvalue(), "path": None}
    problems = [f"<image>How much is {number} + 1?" for number in range(rows)]
    answers = [str(number + 1) for number in range(rows)]
    if trainer == "swift":
        (folder / "picture.png").write_bytes(stream.getvalue())
        lines = [
            {
                "messages": [{"role": "user", "content": problem}],
                "solution": answer,
                "images": ["picture.png"],
            }
            for problem, answer in zip(problems, answers, strict=True)
        ]
        file = folder / "train.jsonl"
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return file
    columns: dict[str, Any] = {"images": [[picture]] * rows}
    if trainer == "easyr1":
        columns |= {"problem": problems, "answer": answers}
    elif trainer == "verl":
        columns["prompt"] = [[{"role": "user", "content": problem}] for problem in problems]
        columns["reward_model"] = [{"style": "rule", "ground_truth": text} for text in answers]
        columns["data_source"] = ["hiyouga/geometry3k"] * rows
    else:
        columns["prompt"] = [[{"role": "user", "content": problem}] for problem in problems]
        columns["solution"] = answers
    file = folder / "train.parquet"
    Dataset.from_dict(columns).to_parquet(file)
    return file


def migrated_config(example: str, folder: Path, words: list[str]) -> Path:
    """Convert a published example with the command, and return the path of the config.

    `words`: keys and values of the other trainer, which replace those of the example.
    """
    trainer = example.partition(" ")[0]
    shutil.copytree(EXAMPLES / trainer, folder / trainer)
    output = folder / "ours.yaml"
    assert main([trainer, str(folder / SCRIPTS[example]), *words, "--output", str(output)]) == 0
    return output


def dataset_words(trainer: str, file: Path) -> list[str]:
    """Return the words of a command that name a data set in the trainer's way."""
    if trainer in ("easyr1", "verl"):
        return [f"data.train_files={file}"]
    return ["--dataset" if trainer == "swift" else "--dataset_name", str(file)]


@pytest.mark.parametrize("trainer", SCRIPTS)
def test_a_published_example_is_read_whole(trainer, tmp_path, capsys):
    """Migrating it writes the keys that the table `KEYS` expects, and prints its remarks."""
    config = migrated_config(trainer, tmp_path, [])
    printed = capsys.readouterr().out
    ours = yaml.safe_load(config.read_text())
    written = {key: ours.get(key, "not written") for key in KEYS[trainer]}
    assert written == KEYS[trainer]
    assert parse_command(["--config", str(config)]).set_keys >= ours.keys()
    for remark in REMARKS[trainer]:
        assert remark in printed.partition("Look at these:")[2]
    next_command = printed.splitlines()[-1]
    assert next_command.startswith("Next: python -m adora_vl.train --config")
    if trainer in LAUNCHES:
        _, _, launch = next_command.partition(" --dry-run")
        assert launch.split() == LAUNCHES[trainer]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", SCRIPTS)
def test_a_published_example_is_planned(trainer, tmp_path, capsys, monkeypatch):
    """The command that `migrate` prints last, for a published example, is a dry run with a verdict.

    The data set is a table of 520 rows, in the columns that the trainer expects.
    """
    monkeypatch.setattr(
        "adora_vl.utils.hub.hub_unavailable_reason", lambda: "the hub does not answer"
    )
    # `verl megatron` is an example of verl.
    family = trainer.partition(" ")[0]
    table = write_table(family, tmp_path, rows=520)
    migrated_config(trainer, tmp_path, dataset_words(family, table))
    next_command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert next_command[:5] == ["Next:", "python", "-m", "adora_vl.train", "--config"]
    code = train([*next_command[4:], "--card-gib", "80"])
    captured = capsys.readouterr()
    assert code in (0, 1), captured.err  # whether the run fits on such a card
    verdict = "It fits: " if code == 0 else "It does NOT fit: "
    assert verdict in captured.out
    assert "adora_method:" in captured.out
    assert not [line for line in captured.err.splitlines() if line.startswith("error")]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", SMALL)
def test_a_published_example_trains_the_tiny_model(trainer, tmp_path, capsys):
    """A published example trains the tiny model for two steps after its migration.

    The words of `SMALL` make it small, as a user would try it out.
    """
    table = write_table(trainer, tmp_path, rows=8)
    config = migrated_config(trainer, tmp_path, [*dataset_words(trainer, table), *SMALL[trainer]])
    run = tmp_path / "run"
    arguments = [word for key, value in ON_CPU.items() for word in (f"--{key}", str(value))]
    code = train(
        ["--config", str(config), *arguments, "--max_steps", "2", "--output_dir", str(run)]
    )
    assert code == 0, capsys.readouterr().err
    state = json.loads((run / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    rewards = [entry["reward"] for entry in state["log_history"] if "reward" in entry]
    assert rewards
    assert all(math.isfinite(reward) for reward in rewards)
