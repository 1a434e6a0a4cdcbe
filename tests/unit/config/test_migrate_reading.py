"""What `migrate` reads: scripts, words of a command, and foreign text that must become no key."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from adora_vl.config import AdoraGRPOConfig
from adora_vl.migrate.command import convert_config, main
from adora_vl.migrate.config_text import format_unmatched, yaml_text
from adora_vl.migrate.migration import Migration
from adora_vl.migrate.shell import read_script
from adora_vl.migrate.source import read_source
from adora_vl.preflight.check_keys import check_old_logps
from adora_vl.utils.errors import UserError

SCRIPT = """\
#!/bin/bash
# a comment \\
export MODEL=${MODEL:-tiny}
N=4; set -x
PROMPT="two
lines"
echo start
MAX_PIXELS=1003520 NPROC_PER_NODE=2 \\
swift rlhf \\
    --rlhf_type grpo --model $MODEL \\
    --num_generations ${N} --system "$PROMPT" \\
    --learning_rate=1e-6 --use_vllm \\
    --dataset a.jsonl b.jsonl \\
    --seed $SEED 2>&1 | tee log.txt
"""


def migrate(trainer: str, config: Path | None = None, words: Sequence[str] = ()) -> Migration:
    """Convert a config of another trainer with its own reward."""
    migration, _ = convert_config(trainer, config, reward=None, words=words)
    return migration


def test_a_script_gives_its_longest_command_with_its_variables(tmp_path):
    """A shell script gives the values of its longest command, with its variables filled in.

    A word of our command (`--num_generations 8`) replaces the script's; $SEED has no value.
    """
    file = tmp_path / "train.sh"
    file.write_text(SCRIPT)
    source = read_source(file, ["--num_generations", "8"], nested=False)
    assert source.values == {
        "rlhf_type": "grpo",
        "model": "tiny",
        "num_generations": 8,
        "system": "two\nlines",
        "learning_rate": "1e-6",
        "use_vllm": True,
        "dataset": ["a.jsonl", "b.jsonl"],
        "seed": "$SEED",
    }
    assert source.environment["MAX_PIXELS"] == "1003520"
    migration = migrate("swift", file)
    assert any("seed: $SEED is computed" in remark for remark in migration.remarks)
    assert "seed" not in migration.keys
    with pytest.raises(UserError, match="a quote is never closed, from 'python x.py --a"):
        read_script('ls\npython x.py --a "b\n', "run.sh")
    file.write_text("ls\n")
    with pytest.raises(UserError, match="has no command with KEY=VALUE or --key value"):
        read_source(file, [], nested=False)


def test_arrays_of_a_script_are_laid_into_its_command(tmp_path):
    """verl's scripts collect arguments in arrays of bash, with comments between them."""
    file = tmp_path / "run.sh"
    file.write_text(
        "N=4\nDATA=(\n    data.train_batch_size=$N  # prompts\n"
        "    data.max_prompt_length=512\n)\nONE=(a.b=1 a.c=2)\n"
        'python3 -m verl.trainer.main_ppo "${DATA[@]}" \\\n    "${ONE[@]}" trainer.nnodes=1 "$@"\n'
    )
    assert read_source(file, [], nested=True).values == {
        "data.train_batch_size": 4,
        "data.max_prompt_length": 512,
        "a.b": 1,
        "a.c": 2,
        "trainer.nnodes": 1,
    }


def test_variables_of_this_machine_stay_out_of_the_config(tmp_path, monkeypatch):
    """A script may name a secret of the environment, which must not be written into a file."""
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    file = tmp_path / "train.sh"
    file.write_text("trl grpo --model_name_or_path m --hub_token $WANDB_API_KEY --seed 1\n")
    values = read_source(file, [], nested=False).values
    assert values == {"model_name_or_path": "m", "hub_token": "$WANDB_API_KEY", "seed": 1}


@pytest.mark.parametrize(
    "arguments",
    [
        ["accelerate", "launch", "--num_processes", "2", "grpo.py", "--model_name_or_path", "m"],
        ["trl", "grpo", "--model_name_or_path=m"],
        ["--model_name_or_path", "m"],
        ["--config", "base.yaml", "--model_name_or_path", "m"],
    ],
)
def test_a_launch_line_is_read_without_the_launchers_own_options(arguments, tmp_path, monkeypatch):
    """A launch line is read without accelerate's options such as `--num_processes`.

    A config that it names gives what the line lacks.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text("{model_name_or_path: other, seed: 3}")
    assert main(["trl", *arguments]) == 0
    migrated_config = yaml.safe_load((tmp_path / "trl.adora.yaml").read_text())
    assert migrated_config["model_name_or_path"] == "m"
    assert "num_processes" not in migrated_config
    assert migrated_config.get("seed") == (3 if "--config" in arguments else None)


def test_a_pasted_command_keeps_the_variables_before_it(tmp_path):
    """Environment variables before a pasted command are read, and are no values of its config.

    `MAX_PIXELS` becomes a key of ours, and `NPROC_PER_NODE` is a matter of the launcher.
    """
    line = "MAX_PIXELS=1003520 NPROC_PER_NODE=2 swift rlhf --rlhf_type grpo --model m"
    migration = migrate("swift", words=line.split())
    assert migration.keys["max_pixels"][0] == 1003520
    assert migration.source.environment["NPROC_PER_NODE"] == "2"
    assert set(migration.values) >= {"rlhf_type", "model"}
    assert "MAX_PIXELS" not in migration.values


def test_a_base_config_that_is_not_here_is_said(tmp_path, monkeypatch, capsys):
    """A command whose base config is missing is migrated, with a remark on it and on what it lacks.

    EasyR1's commands name a file with all defaults, which a pasted command does not have.
    """
    monkeypatch.chdir(tmp_path)
    assert main(["easyr1", "config=examples/config.yaml", "worker.actor.model.model_path=m"]) == 0
    printed = capsys.readouterr().out
    assert "examples/config.yaml: the config that the command builds on" in printed
    assert "data missing" in printed
    assert "reward missing" in printed


def test_foreign_text_stays_in_its_comment(tmp_path):
    """Line breaks in foreign keys and values, of any kind, make no lines of the written config."""
    names = {
        "notes\nadora_reward: [hidden.py:f] #": 1,
        "value": "one\ntwo: 2\n\x85three: 3\u2028four: 4",
    }
    content = {"trainer": names, "worker": {"actor": {"model": {"model_path": "m"}}}}
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(content))
    migration = migrate("easyr1", file)
    text = yaml_text(migration, "easyr1", "a\nb: c.yaml", everything=True)
    assert yaml.safe_load(text) == {key: value for key, (value, _) in migration.keys.items()}


def test_only_what_is_not_a_default_there_is_listed(tmp_path, capsys):
    """Values without a counterpart are listed if they are not the other trainer's defaults.

    Two of the three are verl's defaults, which say nothing about this run; `--all` lists them too.
    """
    values = [
        "reward_model.reward_manager=naive",
        "trainer.critic_warmup=0",
        "data.truncation=left",
    ]
    arguments = ["actor_rollout_ref.model.path=m", *values]
    assert main(["verl", *arguments, "--output", str(tmp_path / "a.yaml")]) == 0
    short = capsys.readouterr().out
    assert "data.truncation: left" in short
    assert "reward_manager" not in short
    assert "--all lists 2 more" in short
    assert main(["verl", *arguments, "--all", "--output", str(tmp_path / "b.yaml")]) == 0
    assert "reward_model.reward_manager: naive" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "line"),
    [
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=0",
            "is not a whole number of at least 1",
        ),
        ("data.train_batch_size=0", "data.train_batch_size: 0 is not a whole number of at least 1"),
        (
            "trainer.n_gpus_per_node=0",
            "trainer.n_gpus_per_node: 0 is not a whole number of at least 1",
        ),
        ("data.train_batch_size=384", "is no multiple of actor_rollout_ref.actor.ppo_mini_batch"),
        ("stray", "'stray' belongs to no key; write KEY=VALUE"),
    ],
)
def test_what_cannot_be_is_one_line(word, line, tmp_path, capsys):
    """Values that verl itself would refuse, or fail with."""
    arguments = ["actor_rollout_ref.rollout.n=8", word, "--output", str(tmp_path / "a.yaml")]
    assert main(["verl", *arguments]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert line in errors[0]


def test_the_layers_of_an_adapter_follow_theirs(tmp_path):
    """A LoRA adapter is put on the layers that the other trainer adapts.

    verl adapts all linear layers, unless it excludes or names some.
    """
    base = ["actor_rollout_ref.model.path=m", "actor_rollout_ref.model.lora_rank=8"]
    excluded = "actor_rollout_ref.model.exclude_modules=.*visual.*"
    both = migrate("verl", words=[*base])
    assert both.keys["lora_target_modules"][0] == "all-linear"
    language = migrate("verl", words=[*base, excluded])
    assert "lora_target_modules" not in language.keys
    assert "adora_freeze" not in language.keys
    named = migrate(
        "verl", words=[*base, excluded, "actor_rollout_ref.model.target_modules=[q_proj]"]
    )
    assert named.keys["adora_freeze"][0] == ["vision_tower", "projector"]
    swift = migrate("swift", words=["--model", "m", "--freeze_vit", "false"])
    assert swift.keys["lora_target_modules"][0] == "all-linear"
    assert swift.keys["adora_freeze"][0] == ["projector"]


SWIFT = ["--model", "m", "--dataset", "rows#500"]
EASYR1 = ["worker.actor.model.model_path=m", "data.train_files=[a@train,b@test]"]
VERL = ["actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.n=8"]
# the trainer, words of its command, keys of ours that they become, parts of the remarks about them
RARE: dict[str, tuple[str, list[str], dict[str, object], list[str]]] = {
    "swift, a base in 4 bits": (
        "swift",
        [*SWIFT, "--quant_bits", "4", "--deepspeed", "zero3"],
        {"load_in_4bit": True, "dataset_name": ["rows"]},
        ["only 500 rows were asked for"],
    ),
    "swift, another tuner": (
        "swift",
        [*SWIFT, "--train_type", "adalora", "--target_modules", "q_proj", "k_proj"],
        {"lora_target_modules": ["q_proj", "k_proj"], "learning_rate": 1e-4},
        ["adapter: train_type: adalora became LoRA"],
    ),
    "swift, a server and an evaluation": (
        "swift",
        [*SWIFT, "--use_vllm", "true", "--vllm_mode", "server", "--eval_strategy", "steps"],
        {"vllm_mode": "server"},
        ["needs servers that you start", "evaluation without data", "reward missing"],
    ),
    "swift, rewards of a plugin": (
        "swift",
        [*SWIFT, "--reward_funcs", "external_r1v_acc", "format", "--external_plugins", "p.py"],
        {"adora_reward": ["think_answer_format"]},
        ["reward missing: external_r1v_acc of p.py"],
    ),
    "easyr1, filtering and two splits": (
        "easyr1",
        [*EASYR1, "algorithm.online_filtering=true", "data.shuffle=false"],
        {
            "adora_rollouts": {"refill": 20},
            "dataset_name": ["a", "b"],
            "dataset_train_split": "train",
            "shuffle_dataset": False,
        },
        ["data: train, test: one split for all is read, train"],
    ),
    "easyr1, a reward of an older kind": (
        "easyr1",
        [*EASYR1, "worker.reward.score_function=./no/such.py:score"],
        {"adora_reward": ["./no/such.py:score"]},
        ["reward: ./no/such.py is not here"],
    ),
    "trl, warm-up as a share of the run": (
        "trl",
        ["trl", "grpo", "--model_name_or_path", "m", "--warmup_ratio", "0.1"],
        {"warmup_steps": 0.1},
        ["data missing"],
    ),
    "trl, warm-up in steps and as a share": (
        "trl",
        ["trl", "grpo", "--model_name_or_path=m", "--warmup_ratio=0.1", "--warmup_steps=5"],
        {"warmup_steps": 5},
        ["data missing"],
    ),
    "verl, warm-up in steps of theirs": (
        "verl",
        [*VERL, "actor_rollout_ref.actor.optim.lr_warmup_steps=3"],
        {"warmup_steps": 12, "lr_scheduler_type": "constant_with_warmup"},
        ["reward missing"],
    ),
    "verl, warm-up of a schedule that falls": (
        "verl",
        [
            *VERL,
            "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1",
            "actor_rollout_ref.actor.optim.warmup_style=cosine",
        ],
        {"warmup_steps": 0.1, "lr_scheduler_type": "cosine"},
        ["reward missing"],
    ),
    "verl, a schedule by its newer name": (
        "verl",
        [*VERL, "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"],
        {"lr_scheduler_type": "cosine"},
        ["reward missing"],
    ),
    "verl, no steps of warm-up, and a share": (
        "verl",
        [
            *VERL,
            "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
            "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1",
        ],
        {"lr_scheduler_type": "constant"},
        ["reward missing"],
    ),
    "verl, another loss, KL and estimator": (
        "verl",
        [
            *VERL,
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
            "actor_rollout_ref.actor.use_kl_loss=True",
            "actor_rollout_ref.actor.kl_loss_type=mse",
            "algorithm.adv_estimator=gae",
        ],
        {"loss_type": "dapo", "beta": 0.001, "adora_method": "grpo"},
        ["loss: ", "KL: actor_rollout_ref.actor.kl_loss_type: mse became", "method: "],
    ),
}


@pytest.mark.parametrize("key", ["bypass_mode", "bypass_old_logprob_for_rollout"])
def test_bypass_mode_of_verl_takes_the_engines_log_probabilities(key, tmp_path, capsys):
    """verl's bypass mode becomes `old_logps: engine`, with the keys that go with it.

    None of verl's keys of that mode is reported as without a counterpart.
    """
    section = "algorithm.rollout_correction"
    scores = "actor_rollout_ref.rollout.calculate_log_probs=True"
    output = tmp_path / "bypass.yaml"
    arguments = [*VERL, scores, f"{section}.{key}=True", f"{section}.loss_type=ppo_clip"]
    assert main(["verl", *arguments, "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    keys = yaml.safe_load(output.read_text())
    assert keys["adora_rollouts"] == {"old_logps": "engine"}
    assert keys["vllm_importance_sampling_correction"] is False
    assert "vllm_importance_sampling_mode" not in keys
    assert "rollout_correction" not in printed
    assert "calculate_log_probs" not in printed
    config = AdoraGRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        use_vllm=keys["use_vllm"],
        vllm_mode=keys["vllm_mode"],
        adora_rollouts=keys["adora_rollouts"],
        vllm_importance_sampling_correction=keys["vllm_importance_sampling_correction"],
    )
    check_old_logps(config)  # raises where two keys contradict each other


def test_without_bypass_mode_the_ratio_to_the_engine_is_corrected():
    """Without the mode verl corrects for what the engine computes otherwise."""
    for words in ([], ["algorithm.rollout_correction.bypass_mode=False"]):
        keys = migrate("verl", words=[*VERL, *words]).keys
        assert "adora_rollouts" not in keys
        assert "vllm_importance_sampling_correction" not in keys
        assert keys["vllm_importance_sampling_mode"][0] == "token_truncate"


def test_another_loss_of_bypass_mode_is_listed():
    """verl can learn by REINFORCE in this mode; here it is the clipped loss."""
    section = "algorithm.rollout_correction"
    words = [f"{section}.bypass_mode=True", f"{section}.loss_type=reinforce"]
    migration = migrate("verl", words=[*VERL, *words])
    assert format_unmatched(migration, everything=False) == [
        f"  {section}.loss_type: reinforce: no counterpart"
    ]


@pytest.mark.parametrize("case", RARE)
def test_what_differs_is_converted_or_named(case):
    """Each case of `RARE` writes its keys, and remarks on what it changes."""
    trainer, words, keys, remarks = RARE[case]
    migration = migrate(trainer, words=words)
    assert {key: migration.keys[key][0] for key in keys} == keys
    for remark in remarks:
        assert any(remark in text for text in migration.remarks), migration.remarks


def test_another_algorithm_of_swift_is_refused(capsys):
    assert main(["swift", "--rlhf_type", "dpo", "--model", "m"]) == 2
    assert "rlhf_type: dpo is not grpo" in capsys.readouterr().err
    assert main(["swift"]) == 2
    assert "CONFIG: name a YAML file or a shell script" in capsys.readouterr().err
