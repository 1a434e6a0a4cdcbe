"""The texts of `--help` and `--help-all`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING

from adora_vl.config.trl_keys import OUR_LIBRARY, ConfigKey, config_key_by_name
from adora_vl.utils.cli import yaml_line
from adora_vl.utils.versions import installed_version

_LINE_WIDTH = 100
_TEXT_COLUMN = 38  # where the words of the short list begin
_HELP_HEAD = """\
Train a vision-language model by reinforcement learning, with vLLM for the rollouts.

  python -m adora_vl.train --config FILE.yaml [--key value ...]
  accelerate launch --config_file FILE.yaml -m adora_vl.train --config FILE.yaml [--key value ...]

A key is `key: value` in the file and `--key value` on the command line, which wins over the file.
A list is `a b`, `a,b` or `[a, b]`, nothing is `null`, a mapping is YAML or JSON, and a dot reaches
into one: --adora_rollouts.refill 2.

  --dry-run             say what the run would do and whether it fits, without loading a weight
  --card-gib 80         with it: for a GPU of this memory, where none is here
  --processes 8         with it: for so many processes, or --accelerate-config FILE.yaml
  --write-config FILE   with it: also write a config that fits
  --help-all            every key with its default: ours, then TRL's and Transformers'

The keys that are set first, with their defaults:
"""
_HELP_TAIL = """\

configs/train/annotated.yaml explains the keys that most runs touch, and docs/configuration.md all
that this project adds.
"""
# The keys of the short list in few words, because most texts of the libraries are longer than a
# line.
_TEXT_BY_COMMON_KEY = {
    "model_name_or_path": "a folder, a model of the hub, or `tiny`; has to be set",
    "dataset_name": "a prepared folder, `synthetic`, `knights`, or several",
    "adora_columns": "of your own table: {problem: question, answer: label}",
    "output_dir": "where the run is written; there it also goes on",
    "adora_reward": "what a right answer is worth, or FILE.py:FUNCTION",
    "adora_method": "adora, grpo, dapo, daro, ...; several as dapo+adora",
    "num_generations": "answers sampled per prompt, the size of a group",
    "max_completion_length": "the longest answer in tokens",
    "per_device_train_batch_size": "rollouts per micro-batch and process",
    "gradient_accumulation_steps": "micro-batches per optimizer step",
    "learning_rate": "LoRA wants about ten times as much",
    "max_steps": "optimizer steps; -1: num_train_epochs decides",
    "beta": "weight of the KL term; 0 is without it",
    "use_peft": "train LoRA matrices instead of all weights",
    "use_vllm": "sample with vLLM, which real models need",
    "vllm_gpu_memory_utilization": "share of the GPU's memory for vLLM",
    "vllm_max_model_length": "longest prompt and answer together, in tokens",
    "max_pixels": "the largest image; N pixels are about N / 784 tokens",
    "save_steps": "optimizer steps between checkpoints",
    "report_to": "also log to tensorboard, wandb or trackio",
}
_HEADING_BY_LIBRARY = {
    OUR_LIBRARY: "Keys of this project",
    "trl": "Keys of TRL",
    "transformers": "Keys of Transformers",
}


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Return whether a training command only asks for help or for the version."""
    return any(word in ("-h", "--help", "--help-all", "--version") for word in arguments)


def help_text(arguments: Sequence[str]) -> str:
    """Return the text that `--help`, `--help-all` or `--version` prints.

    Raises `UserError` if the keys cannot be read from the installed TRL and Transformers.
    """
    if "--version" in arguments:
        return f"adora_vl {installed_version('adora-vl') or 'of a checkout that is not installed'}"
    keys = config_key_by_name()
    if "--help-all" in arguments:
        return _help_of_all_keys(list(keys.values()))
    lines: list[str] = []
    for name, description in _TEXT_BY_COMMON_KEY.items():
        if name in keys:
            lines.append(f"  {_line_with_default(keys[name]):<{_TEXT_COLUMN}}{description}")
    return _HELP_HEAD + "\n".join(lines) + "\n" + _HELP_TAIL.rstrip()


def _help_of_all_keys(keys: Sequence[ConfigKey]) -> str:
    """Return the text of `--help-all`: every key with its default, and below it what it means.

    The keys of one library stand together, by name. The options of a key follow it.
    """
    parts: list[str] = []
    for library, heading in _HEADING_BY_LIBRARY.items():
        empty_line = "\n" if parts else ""
        parts.append(f"{empty_line}{heading}\n{'-' * len(heading)}")
        library_keys = [key for key in keys if key.library == library]
        for top_key in sorted(library_keys, key=lambda key: key.name):
            for key in (top_key, *top_key.options):
                help_lines = textwrap.fill(
                    key.help, _LINE_WIDTH, initial_indent="    ", subsequent_indent="    "
                )
                parts.append(f"{_line_with_default(key)}\n{help_lines}".rstrip())
    return "\n".join(parts)


def _line_with_default(key: ConfigKey) -> str:
    """Return a key with its default as a line of YAML, such as `beta: 0.0`."""
    if key.default is MISSING:
        # The library computes this default.
        return f"{key.name}:"
    # The options of a key have lines of their own.
    default = {} if key.options else key.default
    if isinstance(default, str) and "\n" in default:
        return f"{key.name}: {json.dumps(default)}"
    return f"{key.name}: {yaml_line(default)}"
