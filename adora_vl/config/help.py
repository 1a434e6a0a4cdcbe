"""Every key of a training config with its default and help, and what `--help` and `--help-all`
print of them. Those of TRL and Transformers are read from the sources of their dataclasses, since
importing these takes seconds.
"""

from __future__ import annotations

import ast
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from adora_vl.config.keys import AdoraKeys, AdoraScriptArguments
from adora_vl.utils.cli import yaml_line
from adora_vl.utils.errors import UserError
from adora_vl.utils.versions import installed

OURS = "adora_vl"
# Where the dataclasses are defined, and those that they inherit from.
_FILES = {
    "trl": ("trainer/grpo_config.py", "trainer/base_config.py", "trainer/model_config.py"),
    "transformers": ("training_args.py",),
}
_DATACLASSES = ("GRPOConfig", "ModelConfig")


@dataclass(frozen=True)
class Key:
    """`default` is MISSING where the source computes it.

    `library` declared the key last, and so its default.
    """

    name: str
    default: Any
    help: str
    library: str

    @property
    def options(self) -> list[Key]:
        """Those of a key that is a block of options, by their dotted names."""
        block = self.default
        return (
            [replace(key, name=f"{self.name}.{key.name}") for key in _our_keys(block)]
            if is_dataclass(block)
            else []
        )


@cache
def read_keys() -> dict[str, Key]:
    """Every key by its name.

    Raises `UserError` where a library keeps its class elsewhere, as in another version.
    """
    try:
        own = [*_our_keys(AdoraScriptArguments), *_our_keys(AdoraKeys)]
        return _keys_of_libraries() | {key.name: key for key in own}
    except (OSError, KeyError) as error:
        raise UserError(
            "the installed TRL or Transformers is another version; run `pip install -e .` again"
        ) from error


def _keys_of_libraries() -> dict[str, Key]:
    classes: dict[str, tuple[ast.ClassDef, str]] = {}
    for library, names in _FILES.items():
        spec = find_spec(library)
        folders = (spec and spec.submodule_search_locations) or ()
        trees = [ast.parse(Path(folder, name).read_bytes()) for folder in folders for name in names]
        nodes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
        classes |= {node.name: (node, library) for node in nodes}
    found: dict[str, Key] = {}
    for name in _DATACLASSES:
        found |= _keys_of_class(name, classes)
    return found


def _our_keys(dataclass: Any) -> list[Key]:
    def default(key: Any) -> Any:
        return key.default if key.default_factory is MISSING else key.default_factory()

    return [
        Key(name=each.name, default=default(each), help=each.metadata["help"], library=OURS)
        for each in fields(dataclass)
    ]


def _keys_of_class(name: str, classes: Mapping[str, tuple[ast.ClassDef, str]]) -> dict[str, Key]:
    """The fields of a class and of those that it inherits from.

    Raises `KeyError` for a class that is not there.
    """
    node, library = classes[name]
    found: dict[str, Key] = {}
    for base in node.bases:
        found |= _keys_of_class(ast.unparse(base), classes)
    for line in node.body:
        if (
            isinstance(line, ast.AnnAssign)
            and isinstance(line.target, ast.Name)
            and not line.target.id.startswith("_")
        ):
            found[line.target.id] = _read_field(line.target.id, line.value, library)
    return found


def _read_field(name: str, value: ast.expr | None, library: str) -> Key:
    """A field from what stands behind its `=`: a value, or `field(default=..., metadata={"help":
    ...})`.
    """
    if not isinstance(value, ast.Call):
        return Key(name=name, default=_literal(value), help="", library=library)
    given = {word.arg: word.value for word in value.keywords}
    default: Any = _literal(given.get("default"))
    factory = given.get("default_factory")
    if isinstance(factory, ast.Lambda):
        default = _literal(factory.body)
    elif isinstance(factory, ast.Name):
        default = {"list": [], "dict": {}}.get(factory.id, MISSING)
    metadata = given.get("metadata")
    pairs = (
        zip(metadata.keys, metadata.values, strict=True) if isinstance(metadata, ast.Dict) else ()
    )
    texts = [
        part for key, text in pairs if key and _literal(key) == "help" for part in ast.walk(text)
    ]
    help_text = "".join(
        part.value
        for part in texts
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    )
    # argparse wants % doubled
    return Key(
        name=name,
        default=default,
        help=" ".join(help_text.replace("%%", "%").split()),
        library=library,
    )


def _literal(node: ast.expr | None) -> Any:
    try:
        return MISSING if node is None else ast.literal_eval(node)
    except ValueError:
        return MISSING


_WIDTH = 100
_COLUMN = 38  # of the short list, where the words begin
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
# In few words, since most of the libraries' own are longer than a line.
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
        parts.append("\n" * bool(parts) + f"{heading}\n{'-' * len(heading)}")
        own = sorted((key for key in keys if key.library == library), key=lambda key: key.name)
        for key in [each for one in own for each in (one, *one.options)]:
            words = textwrap.fill(key.help, _WIDTH, initial_indent="    ", subsequent_indent="    ")
            parts.append(f"{_with_default(key)}\n{words}".rstrip())
    return "\n".join(parts)


def _with_default(key: Key) -> str:
    """As a line of YAML."""
    if key.default is MISSING:
        return f"{key.name}:"
    default = {} if key.options else key.default
    text = (
        json.dumps(default) if isinstance(default, str) and "\n" in default else yaml_line(default)
    )
    return f"{key.name}: {text}"
