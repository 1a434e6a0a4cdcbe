"""ms-swift's configs and `swift rlhf` lines, whose keys are mostly TRL's.

Defaults are those of ms-swift's dataclasses, many of which are not TRL's.
"""

from __future__ import annotations

from typing import Any

from adora_vl.migrate.migration import LaunchPlan, Migration, split_at_sign, to_words
from adora_vl.migrate.trl import copy_equal_keys, set_dataset, sharding_config_name, warn_of_server
from adora_vl.utils.errors import UserError

# Keys of ms-swift that TRL has under another name.
_OUR_KEY_BY_NAME = {
    "model": "model_name_or_path",
    "vllm_max_model_len": "vllm_max_model_length",
    "torch_dtype": "dtype",
    "overlong_filter": "mask_truncated_completions",
    "warmup_ratio": "warmup_steps",
    "vllm_enforce_eager": "adora_vllm_enforce_eager",
}
# The name in ms-swift and its default there by our key, where TRL has another default or name.
_NAMES_AND_DEFAULTS: dict[str, tuple[str, Any]] = {
    "beta": ("beta", 0.04),
    "temperature": ("temperature", 0.9),
    "top_p": ("top_p", 0.9),
    "top_k": ("top_k", 50),
    "max_completion_length": ("max_completion_length", 512),
    "num_generations": ("num_generations", 8),
    "num_iterations": ("num_iterations", 1),
    "loss_type": ("loss_type", "grpo"),
    "weight_decay": ("weight_decay", 0.1),
    "adam_beta2": ("adam_beta2", 0.95),
    "lr_scheduler_type": ("lr_scheduler_type", "cosine"),
    "per_device_train_batch_size": ("per_device_train_batch_size", 1),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", 1),
    "num_train_epochs": ("num_train_epochs", 3),
    "gradient_checkpointing": ("gradient_checkpointing", True),
    "logging_steps": ("logging_steps", 5),
    "vllm_gpu_memory_utilization": ("vllm_gpu_memory_utilization", 0.9),
    "report_to": ("report_to", "tensorboard"),
    "dtype": ("torch_dtype", "bfloat16"),
}
_LORA_DEFAULTS: dict[str, tuple[str, Any]] = {
    "lora_r": ("lora_rank", 8),
    "lora_alpha": ("lora_alpha", 32),
    "lora_dropout": ("lora_dropout", 0.05),
}
# The default learning rate by what is trained
_LEARNING_RATES = {"full": 1e-5, "lora": 1e-4}
# What ms-swift's reward functions are called here
_PRESET_BY_REWARD = {"accuracy": "accuracy", "format": "think_answer_format"}
_UNMATCHED_DEFAULTS = {
    "split_dataset_ratio": 0.0,
    "truncation_strategy": "left",
    "async_generate": False,
    "move_model_batches": None,
    "offload_optimizer": False,
    "offload_model": False,
    "per_device_eval_batch_size": 1,
    "use_hf": False,
    "log_entropy": False,
    "top_entropy_quantile": 1.0,
}
_HUB_PREFIXES = ("hf::", "ms::")  # before an id: the Hugging Face hub, or ModelScope
# In `owner/name:train` the word after the colon is a split if it is one of these, else a subset.
_SPLIT_NAMES = ("train", "test", "validation", "val")
# Our name of a part of the model, and whether ms-swift freezes it by default, by the key there.
_MODEL_PARTS = {
    "freeze_vit": ("vision_tower", True),
    "freeze_aligner": ("projector", True),
    "freeze_llm": ("language_model", False),
}


def convert_swift(migration: Migration) -> LaunchPlan:
    """Convert a config of ms-swift, and return how its processes are started.

    Raises:
        UserError: the config trains by another method than GRPO.
    """
    migration.defaults = _UNMATCHED_DEFAULTS
    method = migration.get("rlhf_type", "grpo")
    if method != "grpo":
        raise UserError(
            f"CONFIG: rlhf_type: {method} is not grpo, and nothing else is trained here"
        )
    if not migration.get("model"):
        migration.add_remark("model missing: model is not set; write model_name_or_path")
    for name, key in _OUR_KEY_BY_NAME.items():
        migration.copy_key(key, name)
    migration.set_method()
    for key, (name, default) in _NAMES_AND_DEFAULTS.items():
        migration.copy_key(key, name, default)
    _convert_tuner(migration)
    _convert_loss(migration)
    _convert_data(migration)
    _convert_engine(migration)
    # Here a file of accelerate says how the model is divided, which the launch plan names.
    deepspeed = str(migration.get("deepspeed", ""))
    copy_equal_keys(migration)
    warn_of_server(migration)
    _convert_evaluation(migration)
    # The name of a file for DeepSpeed may not say how it divides the model.
    default_sharding = "zero2" if deepspeed else ""
    processes = migration.source.environment.get("NPROC_PER_NODE", "1")
    return LaunchPlan(
        processes=int(processes) if processes.isdecimal() else 1,
        accelerate_config=sharding_config_name(deepspeed) or default_sharding,
    )


def _convert_evaluation(migration: Migration) -> None:
    """Add a remark on how to evaluate during training, since that cannot be converted.

    An evaluation of this package needs a folder of problems that data_prep has prepared.
    """
    # ms-swift evaluates as often as it saves, unless `eval_steps` says otherwise
    steps_between = migration.get("save_steps", 500)
    # Both keys were copied, as TRL has them too, but they cannot stay: without problems to evaluate
    # on a run with them is refused.
    eval_steps = migration.keys.pop("eval_steps", None)
    eval_strategy = migration.keys.pop("eval_strategy", None)
    if eval_steps is not None:
        steps_between = eval_steps.value
    data_names = " ".join(to_words(migration.get("val_dataset") or []))
    if eval_strategy is None and not data_names:
        return
    migration.add_remark(
        f"evaluation without data: prepare {data_names or 'problems'} by `python -m data_prep "
        f"convert`, then adora_eval: [problems=FOLDER], eval_strategy: steps, eval_steps: {steps_between}"
    )


def _convert_tuner(migration: Migration) -> None:
    """Convert what is trained: all weights or a LoRA adapter, in which parts, at which rate.

    ms-swift's adapter is by default on all linear layers outside of the frozen parts, which are the
    vision tower and the projector. An adapter of this package is on the same layers where none are
    named, so the keys are left out then.
    """
    # the older name of the key is `train_type`
    name = "tuner_type" if "tuner_type" in migration.values else "train_type"
    kind = str(migration.get(name, "lora"))
    default_rate = _LEARNING_RATES.get(kind, _LEARNING_RATES["lora"])
    migration.set_key(
        "learning_rate", migration.get("learning_rate", default_rate), "learning_rate"
    )
    frozen_parts = [
        part for key, (part, default) in _MODEL_PARTS.items() if migration.get(key, default)
    ]
    if kind == "full":
        migration.set_key("adora_freeze", frozen_parts, *_MODEL_PARTS)
        return
    if kind not in ("lora", "qlora"):
        migration.add_remark(f"adapter: {name}: {kind} became LoRA")
    migration.set_key("use_peft", True, name)
    for key, (lora_name, default) in _LORA_DEFAULTS.items():
        migration.copy_key(key, lora_name, default)
    targets = to_words(migration.get("target_modules", "all-linear"))
    freezes_default_parts = frozen_parts == ["vision_tower", "projector"]
    has_default_targets = targets == ["all-linear"]
    if not has_default_targets:
        migration.set_key("lora_target_modules", targets, "target_modules")
    elif not freezes_default_parts:
        migration.set_key("lora_target_modules", "all-linear", "target_modules")
    if not freezes_default_parts or not has_default_targets:
        migration.set_key("adora_freeze", frozen_parts, *_MODEL_PARTS)
    if migration.get("quant_bits", 0) == 4:
        migration.set_key("load_in_4bit", True, "quant_bits")


def _convert_loss(migration: Migration) -> None:
    """Convert the KL term, and the replacement of groups whose rewards are all equal."""
    beta = migration.keys["beta"].value
    if float(beta) > 0:
        note = "theirs does not weight the KL by the ratio of policies, TRL does by default"
        migration.set_key("use_bias_correction_kl", False, note=note)
    if migration.get("dynamic_sample", False):
        tries = int(migration.get("max_resample_times", 3))
        migration.set_key("adora_rollouts", {"refill": tries}, "max_resample_times")


def _convert_data(migration: Migration) -> None:
    """Convert data sets, prompt, rewards and the sizes of images.

    ms-swift writes a data set as `hf::owner/name:train#500`: a hub, an id, a split or a subset, and
    a number of rows. All but the hub and the id may be left out.
    """
    from adora_vl.conversion.columns import PRESETS  # importing it takes a second

    dataset_words = to_words(migration.get("dataset") or [])
    names, row_counts = split_at_sign(dataset_words, "#")
    names = [_without_hub(name) for name in names]
    names, splits_and_subsets = split_at_sign(names, ":")
    splits = [word for word in splits_and_subsets if word in _SPLIT_NAMES]
    subsets = [word for word in splits_and_subsets if word not in _SPLIT_NAMES]
    # `set_dataset` reads the names from here, now without what stood around them.
    migration.source.values = {**migration.source.values, "dataset": names}
    set_dataset(migration, "dataset", PRESETS["swift"].columns.to_mapping())
    if row_counts:
        migration.add_remark(
            f"data: dataset: only {', '.join(row_counts)} rows were asked for; all are read"
        )
    if splits:
        migration.set_key("dataset_train_split", splits[0], "dataset")
    if subsets:
        migration.add_remark(
            f"data: dataset: the subset {', '.join(subsets)} is not asked for; name a file"
        )
    hub_names = [name for name in names if migration.source.find_path(name) is None]
    if hub_names:
        migration.add_remark(
            f"data: {', '.join(hub_names)} is no file here; ids of ModelScope are read from the "
            "Hugging Face hub, where the name may be another one"
        )
    system = migration.get("system")
    system_prompt = None if system is None else migration.resolve_path(system)
    migration.set_key("adora_system_prompt", system_prompt, "system")
    # A single word is the name of a file.
    is_name = len(str(system or "").split()) == 1
    if is_name and migration.source.find_path(str(system)) is None:
        migration.add_remark(f"prompt: system: {system} is not here; copy it, or write its text")
    migration.set_key("adora_prompt", None, note="the problem of the row alone")
    _convert_rewards(migration)
    for key in ("min_pixels", "max_pixels"):
        pixels = migration.source.environment.get(key.upper(), "")
        if pixels.isdecimal():
            migration.set_key(key, int(pixels), note=f"{key.upper()} of the script")


def _without_hub(name: str) -> str:
    """Return the name of a data set without the prefix for the hub that ms-swift reads it from."""
    for prefix in _HUB_PREFIXES:
        if name.lower().startswith(prefix):
            return name[len(prefix) :]
    return name


def _convert_rewards(migration: Migration) -> None:
    """Convert the reward functions that this package has too, and add a remark on the others."""
    entries = to_words(migration.get("reward_funcs") or [])
    plugins = migration.get("external_plugins")
    presets = [_PRESET_BY_REWARD[entry] for entry in entries if entry in _PRESET_BY_REWARD]
    unknown_entries = [entry for entry in entries if entry not in _PRESET_BY_REWARD]
    if presets:
        migration.set_key("adora_reward", presets, "reward_funcs")
    else:
        migration.set_key("adora_reward", ["accuracy"], note="theirs has no counterpart")
    if unknown_entries or not presets:
        plugin_words = f" of {plugins}" if plugins else ""
        names = f": {', '.join(unknown_entries)}{plugin_words}" if unknown_entries else ""
        migration.add_remark(
            f"reward missing{names}; adora_reward is {', '.join(presets) or 'accuracy'}; write a "
            "function of completions and columns and name it with --reward FILE.py:FUNCTION"
        )


def _convert_engine(migration: Migration) -> None:
    """Convert whether and where vLLM samples, whether it sleeps, and how its drift is corrected."""
    if not migration.get("use_vllm", False):
        migration.set_key("use_vllm", False, "use_vllm")
        return
    migration.set_key("use_vllm", True, "use_vllm")
    mode = migration.get("vllm_mode", "colocate")
    migration.set_key("vllm_mode", mode, "vllm_mode")
    if mode == "colocate":
        sleeps = bool(int(migration.get("sleep_level", 0)))
        migration.set_key("vllm_enable_sleep_mode", sleeps, "sleep_level")
    note = "theirs corrects nothing; this one goes with top_p"
    migration.set_key("vllm_importance_sampling_mode", "token_truncate", note=note)
