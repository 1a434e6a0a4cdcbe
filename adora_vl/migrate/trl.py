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
_PROCESSES = 8
_PROCESS_OPTIONS = ("num_processes", "nproc_per_node")
_COLUMNS = {
    "problem": "prompt|problem|question",
    "answer": "solution|answer",
    "images": "images|image",
}


def convert_trl(move: Migration) -> LaunchPlan:
    """Convert a config of TRL, whose launcher's options are not read."""
    move.defaults = _DEFAULTS
    move.set_method()
    _convert_rewards(move)
    name_data(move, "dataset_name", _COLUMNS)
    move.put("adora_system_prompt", None, note="TRL's data has its own")
    move.put("adora_prompt", None, note="the prompt of the row alone")
    move.remark(
        "prompt: the row's alone is asked; a system prompt that a script adds is "
        "adora_system_prompt"
    )
    # the older name
    move.take("dtype", "torch_dtype")
    prompt = move.get("max_prompt_length")
    if prompt:
        answer = move.get("max_completion_length", 512)
        length = int(prompt) + int(answer)
        move.put("vllm_max_model_length", length, "max_prompt_length", "max_completion_length")
    take_equal_keys(move)
    warn_of_server(move)
    return _launch_of(move)


def _launch_of(move: Migration) -> LaunchPlan:
    """How `accelerate launch` or `torchrun` starts the run.

    The command says how many processes, or its file for accelerate does. TRL's own files that
    shard start eight.
    """
    options = options_of(move.source.launcher)
    file = str(options.get("config_file", ""))
    sharding = sharding_of(file)
    path = move.source.find(file)
    # the file is seldom beside the script that is moved, and one that shards says 8 in TRL
    usual = _PROCESSES if sharding else 1
    if path is not None and path.is_file():
        usual = read_mapping("CONFIG", path).get("num_processes", usual)
    texts = [options[name] for name in _PROCESS_OPTIONS if name in options]
    processes = str(texts[0] if texts else usual)
    return LaunchPlan(
        processes=int(processes) if processes.isdecimal() else 1,
        accelerate=sharding,
    )


def sharding_of(name: str) -> str:
    """The file of `configs/accelerate` for the name of a config of accelerate or DeepSpeed.

    Empty where the name says nothing of how the model is divided.
    """
    for stage in ("zero3_offload", "zero3", "zero2"):
        if stage in name:
            return stage
    if "fsdp" in name:
        return "zero3"
    return "zero2" if "zero1" in name else ""


def take_equal_keys(move: Migration) -> None:
    """Take every key that has our name over as it is."""
    for name in [name for name in move.values if name not in move.used and name in read_keys()]:
        move.take(name, name)


def name_data(move: Migration, name: str, columns: Mapping[str, str]) -> None:
    """Name the data set, and the columns that its rows most often have.

    `name`: the trainer's key of the data set. `columns`: our names and theirs; `a|b` is the one
    that a table has.
    """
    listed = words_in(move.get(name) or [])
    if not listed:
        move.put("dataset_name", ["DATA"], name, note="to be named")
        move.remark(f"data missing: {name} is not set; write dataset_name and adora_columns")
    else:
        move.put("dataset_name", [move.path_of(data) for data in listed], name)
    move.put("adora_columns", dict(columns), note="the names that such data most often has")
    move.remark(
        f"answers read as: the column {columns['answer'].replace('|', ' or ')}, graded as "
        "mathematics unless the reward is your own; leave `images` out of adora_columns if the "
        "data has none, and all of it for a folder that data_prep made"
    )


def _convert_rewards(move: Migration) -> None:
    """Convert the rewards that a config names; a script has others in its Python."""
    entries = words_in(move.get("reward_funcs") or [])
    rewards = [_REWARDS.get(entry.rpartition(".")[2], "") for entry in entries]
    presets = [reward for reward in rewards if reward]
    lost = [entry for entry in entries if not _REWARDS.get(entry.rpartition(".")[2])]
    if presets:
        move.put("adora_reward", presets, "reward_funcs")
    else:
        move.put("adora_reward", ["accuracy"], note="theirs is in the script")
    if lost or not presets:
        which = f": {', '.join(lost)}" if lost else ""
        move.remark(
            f"reward missing{which}: adora_reward is {', '.join(presets) or 'accuracy'}; name the "
            "function of the script with --reward FILE.py:FUNCTION, which TRL's form fits"
        )


def warn_of_server(move: Migration) -> None:
    """Say what a served engine needs here."""
    mode, _ = move.keys.get("vllm_mode", ("", ""))
    if mode == "server":
        move.remark(
            "engine: vllm_mode: server needs servers that you start as docs/rollouts.md says, not "
            "those of another trainer"
        )
