"""Every key of a training config with its default and help, and the texts of `--help`.

The keys of TRL and Transformers are parsed from the sources of their dataclasses, because importing
these takes seconds.
"""

from __future__ import annotations

import ast
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from adora_vl.config.keys import AdoraKeys, AdoraScriptArguments
from adora_vl.utils.cli import yaml_line
from adora_vl.utils.errors import UserError
from adora_vl.utils.versions import installed

OURS = "adora_vl"
# The files that define the dataclasses and those that they inherit from.
_FILES = {
    "trl": ("trainer/grpo_config.py", "trainer/base_config.py", "trainer/model_config.py"),
    "transformers": ("training_args.py",),
}
_DATACLASSES = ("GRPOConfig", "ModelConfig")


@dataclass(frozen=True)
class Key:
    """One key of a training config.

    `default`: MISSING where the source computes it. `library`: the one that declares the key last,
    and so decides its default.
    """

    name: str
    default: Any
    help: str
    library: str

    @property
    def options(self) -> list[Key]:
        """The options of a key that is a block, under their dotted names; else none."""
        block = self.default
        if not is_dataclass(block):
            return []
        return [replace(key, name=f"{self.name}.{key.name}") for key in _our_keys(block)]


@cache
def read_keys() -> dict[str, Key]:
    """Every key by its name.

    Raises `UserError` where a library has its classes in other files, as in another version.
    """
    try:
        our_keys = [*_our_keys(AdoraScriptArguments), *_our_keys(AdoraKeys)]
        return _keys_of_libraries() | {key.name: key for key in our_keys}
    except (OSError, KeyError) as error:
        raise UserError(
            "the installed TRL or Transformers is another version; run `pip install -e .` again"
        ) from error


def _keys_of_libraries() -> dict[str, Key]:
    """The keys of TRL and Transformers, parsed from their sources."""
    classes: dict[str, tuple[ast.ClassDef, str]] = {}
    for library, names in _FILES.items():
        spec = find_spec(library)
        folders = (spec and spec.submodule_search_locations) or ()
        trees = [ast.parse(Path(folder, name).read_bytes()) for folder in folders for name in names]
        nodes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
        classes |= {node.name: (node, library) for node in nodes}
    keys: dict[str, Key] = {}
    for name in _DATACLASSES:
        keys |= _keys_of_class(name, classes)
    return keys


def _our_keys(dataclass: Any) -> list[Key]:
    """The keys of a dataclass of ours."""
    return [
        Key(
            name=option.name,
            default=_default_of(option),
            help=option.metadata["help"],
            library=OURS,
        )
        for option in fields(dataclass)
    ]


def _default_of(option: Field[Any]) -> Any:
    """The default of a field, from its factory where it has one."""
    if option.default_factory is MISSING:
        return option.default
    return option.default_factory()


def _keys_of_class(name: str, classes: Mapping[str, tuple[ast.ClassDef, str]]) -> dict[str, Key]:
    """The fields of a class and of those that it inherits from.

    Raises `KeyError` for a class that none of the files defines.
    """
    node, library = classes[name]
    keys: dict[str, Key] = {}
    for base in node.bases:
        keys |= _keys_of_class(ast.unparse(base), classes)
    for line in node.body:
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            continue
        field_name = line.target.id
        if not field_name.startswith("_"):
            keys[field_name] = _read_field(field_name, line.value, library)
    return keys


def _read_field(name: str, value: ast.expr | None, library: str) -> Key:
    """The key that a line of a dataclass declares.

    `value`: what stands behind its `=`: a value, or `field(default=..., metadata={"help": ...})`.
    """
    if not isinstance(value, ast.Call):
        return Key(name=name, default=_literal(value), help="", library=library)
    arguments = {keyword.arg: keyword.value for keyword in value.keywords}
    default: Any = _literal(arguments.get("default"))
    factory = arguments.get("default_factory")
    if isinstance(factory, ast.Lambda):
        default = _literal(factory.body)
    elif isinstance(factory, ast.Name):
        default = {"list": [], "dict": {}}.get(factory.id, MISSING)
    # The libraries double every % for argparse.
    text = _help_in(arguments.get("metadata")).replace("%%", "%")
    return Key(name=name, default=default, help=" ".join(text.split()), library=library)


def _help_in(metadata: ast.expr | None) -> str:
    """The text of `help` in the metadata of a field, whose parts may be joined by an expression."""
    if not isinstance(metadata, ast.Dict):
        return ""
    parts: list[str] = []
    for key, value in zip(metadata.keys, metadata.values, strict=True):
        if key is None or _literal(key) != "help":
            continue
        for node in ast.walk(value):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts.append(node.value)
    return "".join(parts)


def _literal(node: ast.expr | None) -> Any:
    """The value of an expression, MISSING where it is not a literal."""
    try:
        return MISSING if node is None else ast.literal_eval(node)
    except ValueError:
        return MISSING


_WIDTH = 100
_COLUMN = 38  # where the words of the short list begin
_HEAD = """\
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
_TAIL = """\

configs/train/annotated.yaml explains the keys that most runs touch, and docs/configuration.md all
that this project adds.
"""
# The keys of the short list in few words, because most texts of the libraries are longer than a
# line.
_FIRST = {
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
_HEADINGS = {
    OURS: "Keys of this project",
    "trl": "Keys of TRL",
    "transformers": "Keys of Transformers",
}


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether a training command only asks for help or for the version."""
    return any(word in ("-h", "--help", "--help-all", "--version") for word in arguments)


def help_text(arguments: Sequence[str]) -> str:
    """The help that the arguments ask for.

    Raises `UserError` where the installed libraries cannot be read.
    """
    if "--version" in arguments:
        return f"adora_vl {installed('adora-vl') or 'of a checkout that is not installed'}"
    keys = read_keys()
    if "--help-all" in arguments:
        return _all_keys(list(keys.values()))
    lines = [
        f"  {_with_default(keys[name]):<{_COLUMN}}{words}"
        for name, words in _FIRST.items()
        if name in keys
    ]
    return _HEAD + "\n".join(lines) + "\n" + _TAIL.rstrip()


def _all_keys(keys: Sequence[Key]) -> str:
    """Every key as it stands in a file with its default, and below it what it means."""
    parts: list[str] = []
    for library, heading in _HEADINGS.items():
        empty_line = "\n" if parts else ""
        parts.append(f"{empty_line}{heading}\n{'-' * len(heading)}")
        listed = sorted((key for key in keys if key.library == library), key=lambda key: key.name)
        with_options = [key for block in listed for key in (block, *block.options)]
        for key in with_options:
            words = textwrap.fill(key.help, _WIDTH, initial_indent="    ", subsequent_indent="    ")
            parts.append(f"{_with_default(key)}\n{words}".rstrip())
    return "\n".join(parts)


def _with_default(key: Key) -> str:
    """The key with its default as a line of YAML."""
    if key.default is MISSING:
        return f"{key.name}:"
    default = {} if key.options else key.default
    if isinstance(default, str) and "\n" in default:
        return f"{key.name}: {json.dumps(default)}"
    return f"{key.name}: {yaml_line(default)}"
