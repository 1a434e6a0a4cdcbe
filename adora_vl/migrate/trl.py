"""TRL's configs and launch lines, whose keys are ours too.

TRL's example scripts have their data, prompt and rewards in the Python file, which is not read.
"""

from __future__ import annotations

from collections.abc import Mapping

from adora_vl.config.trl_keys import read_keys
from adora_vl.migrate.migration import LaunchPlan, Migration, words_in
from adora_vl.migrate.source import options_of
from adora_vl.utils.cli import read_mapping

# What TRL's own reward functions are called here.
_REWARDS = {
    "accuracy_reward": "accuracy",
    "reasoning_accuracy_reward": "accuracy",
    "think_format_reward": "think_format",
}
_DEFAULTS = {
    "dataset_test_split": "test",
    "dataset_streaming": False,
    "trust_remote_code": False,
    "ignore_bias_buffers": False,
    "log_completions": False,
}
_PROCESSES = 8  # in TRL's own configs of accelerate that shard
_PROCESS_OPTIONS = ("num_processes", "nproc_per_node")
_COLUMNS = {
    "problem": "prompt|problem|question",
    "answer": "solution|answer",
    "images": "images|image",
}


def convert_trl(migration: Migration) -> LaunchPlan:
    """Convert a config of TRL, whose launcher's options are not read."""
    migration.defaults = _DEFAULTS
    migration.set_method()
    _convert_rewards(migration)
    name_data(migration, "dataset_name", _COLUMNS)
    migration.put("adora_system_prompt", None, note="TRL's data has its own")
    migration.put("adora_prompt", None, note="the prompt of the row alone")
    migration.remark(
        "prompt: the row's alone is asked; a system prompt that a script adds is "
        "adora_system_prompt"
    )
    # the older name
    migration.copy("dtype", "torch_dtype")
    prompt = migration.get("max_prompt_length")
    if prompt:
        answer = migration.get("max_completion_length", 512)
        length = int(prompt) + int(answer)
        migration.put("vllm_max_model_length", length, "max_prompt_length", "max_completion_length")
    copy_equal_keys(migration)
    warn_of_server(migration)
    return _launch_of(migration)


def _launch_of(migration: Migration) -> LaunchPlan:
    """Return how `accelerate launch` or `torchrun` starts the run.

    The command says how many processes, or its file for accelerate does. TRL's own files that
    shard start eight.
    """
    options = options_of(migration.source.launcher)
    file = str(options.get("config_file", ""))
    sharding = sharding_of(file)
    path = migration.source.find(file)
    # the file is seldom beside the script that is moved, and one that shards says 8 in TRL
    default_count = _PROCESSES if sharding else 1
    if path is not None and path.is_file():
        default_count = read_mapping("CONFIG", path).get("num_processes", default_count)
    counts = [options[name] for name in _PROCESS_OPTIONS if name in options]
    processes = str(counts[0] if counts else default_count)
    return LaunchPlan(
        processes=int(processes) if processes.isdecimal() else 1,
        accelerate=sharding,
    )


def sharding_of(name: str) -> str:
    """Return the file of `configs/accelerate` for the name of a config of accelerate or DeepSpeed.

    Empty where the name says nothing of how the model is divided.
    """
    for stage in ("zero3_offload", "zero3", "zero2"):
        if stage in name:
            return stage
    if "fsdp" in name:
        return "zero3"
    return "zero2" if "zero1" in name else ""


def copy_equal_keys(migration: Migration) -> None:
    """Copy every value whose name is one of our keys, unless a converter has read it already."""
    our_keys = read_keys()
    equal_names = [
        name for name in migration.values if name not in migration.used and name in our_keys
    ]
    for name in equal_names:
        migration.copy(name, name)


def name_data(migration: Migration, name: str, columns: Mapping[str, str]) -> None:
    """Name the data set, and the columns that its rows most often have.

    `name`: the trainer's key of the data set. `columns`: our names and theirs; `a|b` is the one
    that a table has.
    """
    listed = words_in(migration.get(name) or [])
    if not listed:
        migration.put("dataset_name", ["DATA"], name, note="to be named")
        migration.remark(f"data missing: {name} is not set; write dataset_name and adora_columns")
    else:
        migration.put("dataset_name", [migration.path_of(data) for data in listed], name)
    migration.put("adora_columns", dict(columns), note="the names that such data most often has")
    migration.remark(
        f"answers read as: the column {columns['answer'].replace('|', ' or ')}, graded as "
        "mathematics unless the reward is your own; leave `images` out of adora_columns if the "
        "data has none, and all of it for a folder that data_prep made"
    )


def _convert_rewards(migration: Migration) -> None:
    """Convert the rewards that a config names; a script has others in its Python."""
    entries = words_in(migration.get("reward_funcs") or [])
    # an entry may be the path of a function in Python: `trl.rewards.accuracy_reward`
    rewards = [_REWARDS.get(entry.rpartition(".")[2], "") for entry in entries]
    presets = [reward for reward in rewards if reward]
    lost = [entry for entry, reward in zip(entries, rewards, strict=True) if not reward]
    if presets:
        migration.put("adora_reward", presets, "reward_funcs")
    else:
        migration.put("adora_reward", ["accuracy"], note="theirs is in the script")
    if lost or not presets:
        which = f": {', '.join(lost)}" if lost else ""
        migration.remark(
            f"reward missing{which}: adora_reward is {', '.join(presets) or 'accuracy'}; name the "
            "function of the script with --reward FILE.py:FUNCTION, which TRL's form fits"
        )


def warn_of_server(migration: Migration) -> None:
    """Add a remark where the config has vLLM on servers, which ours does not start."""
    mode, _ = migration.keys.get("vllm_mode", ("", ""))
    if mode == "server":
        migration.remark(
            "engine: vllm_mode: server needs servers that you start as docs/rollouts.md says, not "
            "those of another trainer"
        )
