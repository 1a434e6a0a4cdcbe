"""Configs and reward functions of other trainers: what they become, by hand."""

from typing import Any

import pytest
import yaml

from adora_vl.config.command import parse_command
from adora_vl.migrate import main
from adora_vl.rewards import choose_rewards
from adora_vl.utils.errors import UserError
from tests.support.disk import limit_file_size

EASYR1 = """
data: {train_files: t.parquet, prompt_key: problem, answer_key: answer, image_key: images, format_prompt: think.jinja,
  max_prompt_length: 1024, max_response_length: 512, rollout_batch_size: 64, val_files: v.parquet, seed: 1}
algorithm: {adv_estimator: grpo, use_kl_loss: true, kl_penalty: low_var_kl, kl_coef: 0.01}
worker:
  actor: {global_batch_size: 32, micro_batch_size_per_device_for_update: 4, fsdp: {enable_full_shard: true},
    model: {model_path: tiny, freeze_vision_tower: true}, optim: {lr: 1.0e-6}}
  rollout: {n: 8, top_p: 0.99, tensor_parallel_size: 1}
  reward: {reward_function: "reward.py:compute_score"}
trainer: {total_epochs: 2, experiment_name: small, logger: [file, wandb], n_gpus_per_node: 2, save_freq: 5,
  save_limit: 3, max_steps: 7}
"""
VERL = """
data: {train_files: [a.parquet, b.parquet], train_batch_size: 16, max_response_length: 256}
actor_rollout_ref:
  model: {path: tiny, lora_rank: 8}
  actor: {ppo_mini_batch_size: 16, ppo_micro_batch_size_per_gpu: 8, loss_agg_mode: seq-mean-token-mean,
    kl_loss_coef: 0.1}
  rollout: {n: 4, tensor_model_parallel_size: 1}
algorithm: {adv_estimator: rloo, norm_adv_by_std_in_grpo: false}
custom_reward_function: {path: reward.py}
trainer: {n_gpus_per_node: 1, test_freq: 3}
"""
SWIFT = """
{rlhf_type: grpo, model: tiny, dataset: data/a, num_generations: 4, freeze_vit: true, dynamic_sample: true,
 lora_rank: 8, reward_funcs: accuracy format, overlong_filter: true, resume_only_model: true}
"""
# by trainer: its config, what some keys of ours become, and what the command prints beside
CONFIG_AND_MIGRATED_BY_TRAINER: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "easyr1": (
        EASYR1,
        {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 32,  # 32 problems x 8 answers / (4 rows x 2 GPUs)
            "steps_per_generation": 64,  # of 64 problems
            "max_steps": 14,  # 7 generations, each of which is 2 optimizer steps
            "save_steps": 10,
            "beta": 0.01,
            "loss_type": "dapo",
            "epsilon_high": 0.3,
            "lr_scheduler_type": "constant",
            "vllm_max_model_length": 1536,
            "adora_freeze": ["vision_tower"],
            "report_to": ["wandb"],
            "adora_prompt": "{problem} Think, then \\boxed{{}}.",
            "adora_system_prompt": None,
            "adora_method": "grpo",
            "adora_columns": {"problem": "problem", "answer": "answer", "images": "images"},
        },
        ["data.val_files", "Look at these:", "evaluation without data: v.parquet"],
    ),
    "verl": (
        VERL,
        {
            "gradient_accumulation_steps": 8,
            "steps_per_generation": 8,
            "beta": 0.0,
            "loss_type": "grpo",
            "lora_r": 8,
            "lora_target_modules": "all-linear",
            "scale_rewards": "none",
            "epsilon_high": 0.2,
            "num_train_epochs": 30,
            "adora_columns": {
                "problem": "prompt",
                "answer": "reward_model.ground_truth",
                "images": "images",
            },
            "adora_prompt": None,
            "dataset_name": ["a.parquet", "b.parquet"],
            "adora_reward": ["reward.py:compute_score"],
        },
        ["algorithm.adv_estimator: rloo is no method here", "method: ", "eval_steps: 3"],
    ),
    "swift": (
        SWIFT,
        {
            "model_name_or_path": "tiny",
            "adora_rollouts": {"refill": 3},
            "lora_r": 8,
            "lora_alpha": 32,
            "learning_rate": 1e-4,
            "beta": 0.04,
            "use_bias_correction_kl": False,
            "temperature": 0.9,
            "top_k": 50,
            "mask_truncated_completions": True,
            "adora_reward": ["accuracy", "think_answer_format"],
            "adora_method": "grpo",
            "adora_system_prompt": None,
            "use_peft": True,
        },
        ["resume_only_model: true: a checkpoint of another trainer"],
    ),
    "trl": (
        "{model_name_or_path: tiny, num_generations: 4, dataset_config: x}",
        {
            "num_generations": 4,
            "adora_method": "grpo",
            "adora_system_prompt": None,
            "adora_reward": ["accuracy"],
            "dataset_name": ["DATA"],
        },
        ["dataset_config: x: no counterpart", "data missing", "reward missing"],
    ),
}


@pytest.mark.parametrize("trainer", CONFIG_AND_MIGRATED_BY_TRAINER)
def test_a_config_becomes_ours_and_what_has_no_counterpart_is_named(trainer, tmp_path, capsys):
    """`migrate TRAINER c.yaml` writes c.adora.yaml, and prints what a user has to look at.

    All keys of the written file are ones that a training takes.
    """
    text, expected, expected_lines = CONFIG_AND_MIGRATED_BY_TRAINER[trainer]
    (tmp_path / "think.jinja").write_text("{{ content | trim }} Think, then \\boxed{}.\n")
    (tmp_path / "c.yaml").write_text(text)
    assert main([trainer, str(tmp_path / "c.yaml")]) == 0
    printed = capsys.readouterr().out
    migrated_config = yaml.safe_load((tmp_path / "c.adora.yaml").read_text())
    assert {key: migrated_config[key] for key in expected} == expected
    assert [line for line in expected_lines if line not in printed] == []
    assert (
        parse_command(["--config", str(tmp_path / "c.adora.yaml")]).set_keys
        >= migrated_config.keys()
    ), "every key and value is one of ours"
    # a second call would overwrite the config
    assert main([trainer, str(tmp_path / "c.yaml")]) == 2
    assert "is there" in capsys.readouterr().err


def test_a_config_that_cannot_be_written_is_one_line(tmp_path, capsys):
    """A config that cannot be written, on a full disk or below a file, ends in one line."""
    config = tmp_path / "c.yaml"
    config.write_text(EASYR1)
    with limit_file_size(10):
        assert main(["easyr1", str(config)]) == 2
    assert main(["easyr1", str(config), "--output", str(config / "x.yaml")]) == 2
    full, no_folder = capsys.readouterr().err.splitlines()
    assert full.startswith(f"error: output: '{tmp_path}/c.adora.yaml' cannot be written (File too")
    assert no_folder.startswith(f"error: output: '{config}/x.yaml' cannot be written (Not a dir")
    assert list(tmp_path.iterdir()) == [config]


def test_what_cannot_be_moved_is_one_line(tmp_path, capsys):
    """A value of another trainer's config that cannot be translated is named with its key.

    A training that is started with such a config names the command that translates it.
    """
    (tmp_path / "e.yaml").write_text(EASYR1.replace("device_for_update: 4", "device_for_update: 7"))
    assert main(["easyr1", str(tmp_path / "e.yaml")]) == 2
    assert (
        "worker.actor.global_batch_size 32 x 8 answers / (7 x 2 GPUs) is 18.28"
        in capsys.readouterr().err
    )
    (tmp_path / "g.yaml").write_text(EASYR1.replace("max_steps: 7", "max_steps: ten"))
    assert main(["easyr1", str(tmp_path / "g.yaml")]) == 2
    assert "CONFIG: trainer.max_steps: 'ten' is not a number" in capsys.readouterr().err
    (tmp_path / "h.yaml").write_text(
        VERL.replace("train_batch_size: 16", "train_batch_size: '${a.b}'")
    )
    assert main(["verl", str(tmp_path / "h.yaml")]) == 0
    assert (
        "data.train_batch_size: ${a.b} is computed; write the value itself"
        in capsys.readouterr().out
    )
    for text, name in (
        (EASYR1, "EasyR1"),
        (VERL, "verl"),
        (SWIFT, "ms-swift"),
    ):
        (tmp_path / "f.yaml").write_text(text)
        with pytest.raises(UserError, match=rf"is a config of {name}; `python -m adora_vl.migrate"):
            parse_command(["--config", str(tmp_path / "f.yaml")])


FORMS = """
def batch(reward_inputs, weight=0.5):
    return [{"overall": weight * float(one["response"] == one["ground_truth"]), "right": 1.0} for one in reward_inputs]

def single(reward_input):
    return {"overall": float(reward_input["response_length"]), "right": 0.0}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "known": float(data_source == "geo")}

def plain(solution_str, ground_truth, data_source="", extra_info=None):
    return float(solution_str == ground_truth)

def by_level(data_source, solution_str, ground_truth, extra_info):
    return float(extra_info.get("level", 0))
"""


def test_reward_functions_are_called_in_their_own_form(tmp_path, monkeypatch):
    """Reward functions in the forms of EasyR1 and verl get the arguments that they get there.

    The forms are EasyR1's for a batch and for one answer, and two of verl. Each gets a right answer
    of two tokens from "geo", and a wrong one of a token from "else".
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "forms.py").write_text(FORMS)
    entries = [f"forms.py:{name}" for name in ("batch", "single", "compute_score", "plain")]
    chosen = choose_rewards(entries)
    chosen.check_columns({"answer", "data_source", "id"})
    logged: dict[str, float] = {}
    rewards_of_functions = [
        function(
            prompts=["p"] * 2,
            completions=[[{"role": "assistant", "content": "5"}], "6"],
            completion_ids=[[1, 2], [3]],
            answer=["5", "5"],
            data_source=["geo", "else"],
            id=["a", "b"],
            log_metric=logged.__setitem__,
        )
        for function in chosen.functions
    ]
    assert rewards_of_functions == [[0.5, 0.0], [2.0, 1.0], [1.0, 0.0], [1.0, 0.0]]
    assert logged == {"batch/right": 1.0, "single/right": 0.0, "compute_score/known": 0.5}
    with pytest.raises(UserError, match="needs 'answer', which is no column"):
        chosen.check_columns({"id"})


def test_extra_info_is_a_mapping_also_where_a_prepared_data_set_has_it_as_a_text(
    tmp_path, monkeypatch
):
    """A verl reward gets `extra_info` as a mapping, even from data that store it as JSON text.

    `by_level` rewards with the level in it, and with 0 without one.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "forms.py").write_text(FORMS)
    (by_level,) = choose_rewards(["forms.py:by_level"]).functions

    rewards = by_level(
        completions=["5"] * 3,
        answer=["5"] * 3,
        extra_info=['{"level": 3, "split": "train"}', None, {"level": 2}],
    )

    assert rewards == [3.0, 0.0, 2.0]
