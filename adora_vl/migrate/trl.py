"""TRL's configs and launch lines, whose keys are ours too.

TRL's example scripts have their data, prompt and rewards in the Python file, which is not read.
"""

from __future__ import annotations

from collections.abc import Mapping

from adora_vl.config.trl_keys import config_key_by_name
from adora_vl.migrate.migration import LaunchPlan, Migration, to_words
from adora_vl.migrate.source import parse_launcher_options
from adora_vl.utils.cli import read_mapping

# What TRL's own reward functions are called here.
_PRESET_BY_REWARD = {
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
# Processes in those of TRL's own configs of accelerate that shard the model
_SHARDED_PROCESSES = 8
_PROCESS_OPTIONS = ("num_processes", "nproc_per_node")
_USUAL_COLUMNS = {
    "problem": "prompt|problem|question",
    "answer": "solution|answer",
    "images": "images|image",
}


def convert_trl(migration: Migration) -> LaunchPlan:
    """Convert a config of TRL, and return how its processes are started.

    Most of TRL's keys are keys of this package too. Data, prompt and rewards of TRL's examples
    stand in their Python code, which is not read: remarks say what to write for them.
    """
    migration.defaults = _DEFAULTS
    migration.set_method()
    _convert_rewards(migration)
    set_dataset(migration, "dataset_name", _USUAL_COLUMNS)
    migration.set_key("adora_system_prompt", None, note="TRL's data has its own")
    migration.set_key("adora_prompt", None, note="the prompt of the row alone")
    migration.add_remark(
        "prompt: the row's alone is asked; a system prompt that a script adds is "
        "adora_system_prompt"
    )
    # the older name of the same key
    migration.copy_key("dtype", "torch_dtype")
    # Transformers before 5 had the warm-up as a share too, which a number of steps replaced.
    warmup_name = "warmup_steps" if migration.get("warmup_steps", 0) else "warmup_ratio"
    migration.copy_key("warmup_steps", warmup_name)
    migration.ignore("warmup_ratio")
    prompt_tokens = migration.get("max_prompt_length")
    if prompt_tokens:
        answer_tokens = migration.get("max_completion_length", 512)
        migration.set_key(
            "vllm_max_model_length",
            int(prompt_tokens) + int(answer_tokens),
            "max_prompt_length",
            "max_completion_length",
        )
    copy_equal_keys(migration)
    warn_of_server(migration)
    return _build_launch_plan(migration)


def _build_launch_plan(migration: Migration) -> LaunchPlan:
    """Return how `accelerate launch` or `torchrun` starts the run.

    The number of processes is the first of these that there is:

    1. `--num_processes` or `--nproc_per_node` of the command
    2. `num_processes` of its file for accelerate, if the file is found
    3. 8, where the name of the file says that it shards the model, as TRL's own files do
    4. 1
    """
    options = parse_launcher_options(migration.source.launcher)
    file = options.get("config_file", "")
    sharding = sharding_config_name(file)
    path = migration.source.find_path(file)
    # The file is seldom beside the script, but TRL's own ones that shard are known.
    default_count = _SHARDED_PROCESSES if sharding else 1
    if path is not None and path.is_file():
        default_count = read_mapping("CONFIG", path).get("num_processes", default_count)
    counts = [options[name] for name in _PROCESS_OPTIONS if name in options]
    processes = str(counts[0] if counts else default_count)
    return LaunchPlan(
        processes=int(processes) if processes.isdecimal() else 1,
        accelerate_config=sharding,
    )


def sharding_config_name(name: str) -> str:
    """Return the file of `configs/accelerate` that divides the model as another config does.

    `name` is the name of a config file of accelerate or DeepSpeed. For example,
    `deepspeed_zero3.yaml` and `fsdp2.yaml` give `zero3`. The result is empty where the name does
    not say how.
    """
    for stage in ("zero3_offload", "zero3", "zero2"):
        if stage in name:
            return stage
    # FSDP divides what ZeRO-3 does
    if "fsdp" in name:
        return "zero3"
    # There is no file for stage 1. Stage 2 computes the same with less memory.
    return "zero2" if "zero1" in name else ""


def copy_equal_keys(migration: Migration) -> None:
    """Copy every value whose name is a key of this package too, unless it was converted already."""
    our_keys = config_key_by_name()
    equal_names = [
        name for name in migration.values if name not in migration.read_names and name in our_keys
    ]
    for name in equal_names:
        migration.copy_key(name, name)


def set_dataset(migration: Migration, name: str, columns: Mapping[str, str]) -> None:
    """Set the data set, and the columns that such data most often has.

    Args:
        migration: the config that is converted.
        name: the other trainer's key of the data set.
        columns: the name of a column in the data by our name of it. `a|b` means the column a or the
            column b, whichever the data has.
    """
    data_names = to_words(migration.get(name) or [])
    if not data_names:
        migration.set_key("dataset_name", ["DATA"], name, note="to be named")
        migration.add_remark(
            f"data missing: {name} is not set; write dataset_name and adora_columns"
        )
    else:
        paths = [migration.resolve_path(data_name) for data_name in data_names]
        migration.set_key("dataset_name", paths, name)
    migration.set_key(
        "adora_columns", dict(columns), note="the names that such data most often has"
    )
    migration.add_remark(
        f"answers read as: the column {columns['answer'].replace('|', ' or ')}, graded as "
        "mathematics unless the reward is your own; leave `images` out of adora_columns if the "
        "data has none, and all of it for a folder that data_prep made"
    )


def _convert_rewards(migration: Migration) -> None:
    """Convert the reward functions that a config names, and add a remark where one is missing.

    A script may have further ones in its Python code, which is not read.
    """
    entries = to_words(migration.get("reward_funcs") or [])
    presets: list[str] = []
    unknown_entries: list[str] = []
    for entry in entries:
        # an entry may be the dotted path of a function: `trl.rewards.accuracy_reward`
        _, _, function_name = entry.rpartition(".")
        if function_name in _PRESET_BY_REWARD:
            presets.append(_PRESET_BY_REWARD[function_name])
        else:
            unknown_entries.append(entry)
    if presets:
        migration.set_key("adora_reward", presets, "reward_funcs")
    else:
        migration.set_key("adora_reward", ["accuracy"], note="theirs is in the script")
    if unknown_entries or not presets:
        names = f": {', '.join(unknown_entries)}" if unknown_entries else ""
        migration.add_remark(
            f"reward missing{names}: adora_reward is {', '.join(presets) or 'accuracy'}; name the "
            "function of the script with --reward FILE.py:FUNCTION, which TRL's form fits"
        )


def warn_of_server(migration: Migration) -> None:
    """Add a remark where vLLM runs on servers, since those of another trainer do not fit."""
    mode = migration.keys.get("vllm_mode")
    if mode is not None and mode.value == "server":
        migration.add_remark(
            "engine: vllm_mode: server needs servers that you start as docs/rollouts.md says, not "
            "those of another trainer"
        )
