"""EasyR1's configs.

Keys are those of its `examples/config.yaml`, and defaults those of its code.
"""

from __future__ import annotations

import re
from pathlib import Path

from adora_vl.migrate.migration import KeyMap, LaunchPlan, Migration
from adora_vl.migrate.ray import (
    convert_batches,
    convert_data,
    convert_direct_keys,
    convert_lora,
    convert_loss,
    convert_reward_function,
    convert_steps,
)
from adora_vl.migrate.source import read_yaml

_ACTOR = "worker.actor."
_MODEL = "worker.actor.model."
_ROLLOUT = "worker.rollout."
_DEFAULTS_FILE = Path(__file__).with_name("easyr1_defaults.yaml")
_KEY_MAP: KeyMap = {
    "model_name_or_path": (f"{_MODEL}model_path", None),
    "PROMPTS_PER_GENERATION": ("data.rollout_batch_size", 512),
    "PROMPTS_PER_STEP": (f"{_ACTOR}global_batch_size", 256),
    "per_device_train_batch_size": (f"{_ACTOR}micro_batch_size_per_device_for_update", 4),
    "num_generations": (f"{_ROLLOUT}n", 1),
    "epsilon": (f"{_ACTOR}clip_ratio_low", 0.2),
    "epsilon_high": (f"{_ACTOR}clip_ratio_high", 0.3),
    "delta": (f"{_ACTOR}clip_ratio_dual", 3.0),
    "LOSS_AVERAGING": (f"{_ACTOR}loss_avg_mode", "token"),
    "POLICY_LOSS": (f"{_ACTOR}loss_type", "default"),
    "USES_KL": ("algorithm.use_kl_loss", False),
    "KL_COEF": ("algorithm.kl_coef", 1e-3),
    "KL_ESTIMATOR": ("algorithm.kl_penalty", "kl"),
    "learning_rate": (f"{_ACTOR}optim.lr", 1e-6),
    "weight_decay": (f"{_ACTOR}optim.weight_decay", 0.01),
    "lr_scheduler_type": (f"{_ACTOR}optim.lr_scheduler_type", "constant"),
    "WARMUP_STEPS": (f"{_ACTOR}optim.lr_warmup_steps", None),
    "WARMUP_SHARE": (f"{_ACTOR}optim.lr_warmup_ratio", 0.0),
    "max_grad_norm": (f"{_ACTOR}max_grad_norm", 1.0),
    "num_iterations": (f"{_ACTOR}ppo_epochs", 1),
    "gradient_checkpointing": (f"{_MODEL}enable_gradient_checkpointing", True),
    "LORA_RANK": (f"{_MODEL}lora.rank", 0),
    "lora_alpha": (f"{_MODEL}lora.alpha", 16),
    "lora_target_modules": (f"{_MODEL}lora.target_modules", "all-linear"),
    "temperature": (f"{_ROLLOUT}temperature", 1.0),
    "top_p": (f"{_ROLLOUT}top_p", 1.0),
    "vllm_gpu_memory_utilization": (f"{_ROLLOUT}gpu_memory_utilization", 0.6),
    "vllm_tensor_parallel_size": (f"{_ROLLOUT}tensor_parallel_size", 2),
    "adora_vllm_enforce_eager": (f"{_ROLLOUT}enforce_eager", None),
    "adora_vllm_max_num_batched_tokens": (f"{_ROLLOUT}max_num_batched_tokens", None),
    "STEPS_PER_EVALUATION": ("trainer.val_freq", -1),
    "EPOCHS": ("trainer.total_epochs", 15),
    "min_pixels": ("data.min_pixels", 262144),
    "max_pixels": ("data.max_pixels", 4194304),
    "seed": ("data.seed", 1),
}
_REWARD_FILE_KEY = "worker.reward.reward_function"
_OLDER_REWARD_FILE_KEY = "worker.reward.score_function"


def convert_easyr1(migration: Migration) -> LaunchPlan:
    """Convert a config of EasyR1, and return how its processes are started.

    Raises:
        UserError: the sizes of its batches do not divide, or a value is no number.
    """
    migration.key_map = _KEY_MAP
    migration.defaults = read_yaml(_DEFAULTS_FILE, nested=True)
    convert_direct_keys(migration)
    convert_lora(migration)
    note = "frees the engine's memory in the policy step, as theirs"
    migration.set_key("vllm_enable_sleep_mode", True, note=note)
    freeze = f"{_MODEL}freeze_vision_tower"
    if migration.get(freeze, False):
        migration.set_key("adora_freeze", ["vision_tower"], freeze)
    convert_loss(migration)
    columns = {
        "problem": str(migration.get("data.prompt_key", "prompt")),
        "answer": str(migration.get("data.answer_key", "answer")),
        "images": str(migration.get("data.image_key", "images")),
    }
    convert_data(migration, columns, ["data.prompt_key", "data.answer_key", "data.image_key"])
    if migration.get("algorithm.online_filtering", False):
        tries = migration.get("trainer.max_try_make_batch", 20)
        migration.set_key(
            "adora_rollouts", {"refill": max(int(tries), 1)}, "algorithm.online_filtering"
        )
    _convert_prompt(migration)
    _convert_reward(migration)
    layout = convert_batches(migration)
    convert_steps(migration, layout)
    # FSDP divides weights and optimizer there
    return LaunchPlan(processes=layout.gpus, accelerate_config="zero3")


def _convert_prompt(migration: Migration) -> None:
    """Convert the template of the prompts from Jinja, if it has no variable but the problem.

    Any other template is named in a remark, for the user to write it anew.
    """
    name = "data.format_prompt"
    migration.set_key("adora_system_prompt", None, note="EasyR1 asks without one")
    file = migration.get(name)
    if not file:
        migration.set_key("adora_prompt", None, name, note="the problem alone, as theirs")
        return
    path = migration.source.find_path(str(file))
    if path is None:
        migration.add_remark(
            f"prompt: {name}: {str(file)!r} cannot be read; write its text as adora_prompt, "
            "with {problem} in it"
        )
        return
    jinja_text = path.read_text(encoding="utf-8").strip()
    # A zero byte stands for the problem while all other braces are doubled, as our templates need.
    marked_text = re.sub(r"{{\s*content\s*(\|\s*trim\s*)?}}", "\0", jinja_text)
    has_further_jinja = "{{" in marked_text or "{%" in marked_text
    if has_further_jinja or "\0" not in marked_text:
        migration.add_remark(
            f"prompt: {name}: more than the problem stands in {str(file)!r}; write it as "
            "adora_prompt, with {problem} in it"
        )
        return
    escaped_text = marked_text.replace("{", "{{").replace("}", "}}")
    migration.set_key("adora_prompt", escaped_text.replace("\0", "{problem}"), name)


def _convert_reward(migration: Migration) -> None:
    """Convert the reward function, which this package calls in the form that EasyR1 does.

    Without one the reward is `accuracy`, and a remark says so.
    """
    migration.ignore("worker.reward.reward_type")
    name = _REWARD_FILE_KEY if migration.get(_REWARD_FILE_KEY) else _OLDER_REWARD_FILE_KEY
    entry = migration.get(name)
    file, _, function = str(entry or "").partition(":")
    if not file.endswith(".py"):
        reason = f" ({name}: {entry} names no file)" if entry else ""
        migration.set_key("adora_reward", ["accuracy"], note="theirs is missing")
        migration.add_remark(
            f"reward missing{reason}: adora_reward is accuracy, 1 for a right answer in a box; "
            "name yours with --reward FILE.py:FUNCTION"
        )
        return
    reward = f"{migration.resolve_path(file)}:{function or 'main'}"
    convert_reward_function(migration, name, reward, options_name=f"{name}_kwargs")
