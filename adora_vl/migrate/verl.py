"""verl's configs, which are most often the words of a script.

Keys and defaults are those of its `ppo_trainer.yaml`.
"""

from __future__ import annotations

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

_MODEL = "actor_rollout_ref.model."
_ACTOR = "actor_rollout_ref.actor."
_ROLLOUT = "actor_rollout_ref.rollout."
_DEFAULTS_FILE = Path(__file__).with_name("verl_defaults.yaml")
_KEY_MAP: KeyMap = {
    "model_name_or_path": (f"{_MODEL}path", None),
    "PROMPTS_PER_GENERATION": ("data.train_batch_size", 1024),
    "PROMPTS_PER_STEP": (f"{_ACTOR}ppo_mini_batch_size", 256),
    "per_device_train_batch_size": (f"{_ACTOR}ppo_micro_batch_size_per_gpu", 4),
    "num_generations": (f"{_ROLLOUT}n", 1),
    "epsilon": (f"{_ACTOR}clip_ratio_low", 0.2),
    "epsilon_high": (f"{_ACTOR}clip_ratio_high", 0.2),
    "delta": (f"{_ACTOR}clip_ratio_c", 3.0),
    "LOSS_AVERAGING": (f"{_ACTOR}loss_agg_mode", "token-mean"),
    "POLICY_LOSS": (f"{_ACTOR}policy_loss.loss_mode", "vanilla"),
    "USES_KL": (f"{_ACTOR}use_kl_loss", False),
    "KL_COEF": (f"{_ACTOR}kl_loss_coef", 1e-3),
    "KL_ESTIMATOR": (f"{_ACTOR}kl_loss_type", "low_var_kl"),
    "learning_rate": (f"{_ACTOR}optim.lr", 1e-6),
    "weight_decay": (f"{_ACTOR}optim.weight_decay", 0.01),
    "lr_scheduler_type": (f"{_ACTOR}optim.warmup_style", "constant"),
    "WARMUP_STEPS": (f"{_ACTOR}optim.lr_warmup_steps", -1),
    "WARMUP_SHARE": (f"{_ACTOR}optim.lr_warmup_steps_ratio", 0.0),
    "max_grad_norm": (f"{_ACTOR}grad_clip", 1.0),
    "num_iterations": (f"{_ACTOR}ppo_epochs", 1),
    "entropy_coef": (f"{_ACTOR}entropy_coeff", None),
    "gradient_checkpointing": (f"{_MODEL}enable_gradient_checkpointing", True),
    "LORA_RANK": (f"{_MODEL}lora_rank", 0),
    "lora_alpha": (f"{_MODEL}lora_alpha", 16),
    "lora_target_modules": (f"{_MODEL}target_modules", "all-linear"),
    "LORA_EXCLUDED": (f"{_MODEL}exclude_modules", None),
    "temperature": (f"{_ROLLOUT}temperature", 1.0),
    "top_p": (f"{_ROLLOUT}top_p", 1.0),
    "vllm_gpu_memory_utilization": (f"{_ROLLOUT}gpu_memory_utilization", 0.5),
    "vllm_tensor_parallel_size": (f"{_ROLLOUT}tensor_model_parallel_size", 2),
    "adora_vllm_enforce_eager": (f"{_ROLLOUT}enforce_eager", None),
    "adora_vllm_max_num_batched_tokens": (f"{_ROLLOUT}max_num_batched_tokens", None),
    "vllm_enable_sleep_mode": (f"{_ROLLOUT}free_cache_engine", True),
    "STEPS_PER_EVALUATION": ("trainer.test_freq", -1),
    "EPOCHS": ("trainer.total_epochs", 30),
    "seed": ("data.seed", None),
}
# verl's section for the difference between the engine that samples and the policy that learns.
_CORRECTION = "algorithm.rollout_correction."
# Names of "take the engine's log-probabilities as the old ones": the present and an earlier one.
_BYPASS_MODES = (f"{_CORRECTION}bypass_mode", f"{_CORRECTION}bypass_old_logprob_for_rollout")
_REWARD_FILE_KEY = "custom_reward_function.path"
_REWARD_FUNCTION_KEY = "custom_reward_function.name"
_REWARD_ARGUMENTS_KEY = "custom_reward_function.reward_kwargs"
_REWARD_MODEL_KEY = "reward_model.model.path"


def convert_verl(migration: Migration) -> LaunchPlan:
    """Convert a config of verl, and return how its processes are started.

    Raises:
        UserError: the sizes of its batches do not divide, or a value is no number.
    """
    migration.key_map = _KEY_MAP
    migration.defaults = read_yaml(_DEFAULTS_FILE, nested=True)
    convert_direct_keys(migration)
    # The line above reads the older key `warmup_style`, which verl takes where a config has both.
    # Without it the newer key is read.
    if migration.mapped_name("lr_scheduler_type") not in migration.values:
        migration.copy_key("lr_scheduler_type", f"{_ACTOR}optim.lr_scheduler_type")
    convert_lora(migration)
    convert_loss(migration)
    _convert_old_logps(migration)
    columns = {
        "problem": str(migration.get("data.prompt_key", "prompt")),
        # verl's rows have the answer inside of a mapping
        "answer": "reward_model.ground_truth",
        "images": str(migration.get("data.image_key", "images")),
    }
    convert_data(migration, columns, ["data.prompt_key", "data.image_key"])
    migration.set_key(
        "adora_system_prompt", None, note="verl's rows have the instruction in the prompt"
    )
    migration.set_key("adora_prompt", None, note="the prompt of the row alone")
    _convert_reward(migration)
    layout = convert_batches(migration)
    convert_steps(migration, layout)
    # FSDP divides weights and optimizer there
    return LaunchPlan(processes=layout.gpus, accelerate_config="zero3")


def _convert_old_logps(migration: Migration) -> None:
    """Convert verl's bypass mode, in which the engine's log-probabilities are the old ones.

    The ratio of new to old policy then has the difference of the engine in it. The correction for
    this difference would count it twice, so it is switched off. A run with both is refused.
    """
    enabled_names = [name for name in _BYPASS_MODES if migration.get(name, False)]
    if not enabled_names:
        return
    # Our engine returns log-probabilities with every rollout. The key only counts as read.
    migration.get(f"{_ROLLOUT}calculate_log_probs", True)
    migration.set_key("adora_rollouts", {"old_logps": "engine"}, *enabled_names)
    migration.keys.pop("vllm_importance_sampling_mode", None)
    note = "the ratio has the engine's difference already"
    migration.set_key("vllm_importance_sampling_correction", False, note=note)


def _convert_reward(migration: Migration) -> None:
    """Convert the reward function, which this package calls in the form that verl does.

    Without one the reward is `accuracy`, and a remark says what the config has in its place.
    """
    function = migration.get(_REWARD_FUNCTION_KEY, "compute_score")
    file = migration.get(_REWARD_FILE_KEY)
    if file:
        reward = f"{migration.resolve_path(file)}:{function}"
        convert_reward_function(
            migration, _REWARD_FILE_KEY, reward, options_name=_REWARD_ARGUMENTS_KEY
        )
        return
    if migration.get("reward_model.enable", False):
        model = migration.get(_REWARD_MODEL_KEY, "a reward model")
        migration.set_key("adora_reward", ["accuracy"], note="theirs is a reward model")
        migration.add_remark(
            f"reward missing: {model} gives it there; adora_reward is accuracy; serve the model "
            "and name it as a judge (docs/rewards.md), or name a function with --reward"
        )
        return
    migration.set_key("adora_reward", ["accuracy"], note="verl chooses one by data_source")
    migration.add_remark(
        "reward missing: verl chooses one by data_source; adora_reward is accuracy, 1 for a right "
        "answer in a box, and easyr1 is 0.9 of it + 0.1 for the form, as verl's for Geometry3K"
    )
