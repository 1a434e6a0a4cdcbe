"""Every key of a training config by its name, with its default and its help.

The keys of TRL and Transformers are parsed from the sources of their dataclasses, because importing
these takes seconds, and a misspelt key, or `--help`, is answered at once.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from adora_vl.config.keys import AdoraKeys, AdoraScriptArguments
from adora_vl.utils.errors import UserError

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
    """Return every key by its name.

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
    """Return the keys of TRL and Transformers, parsed from their sources."""
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
    """Return the keys of a dataclass of ours."""
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
    """Return the default of a field, from its factory where it has one."""
    if option.default_factory is MISSING:
        return option.default
    return option.default_factory()


def _keys_of_class(name: str, classes: Mapping[str, tuple[ast.ClassDef, str]]) -> dict[str, Key]:
    """Return the fields of a class and of those that it inherits from.

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
    """Return the key that a line of a dataclass declares.

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
    """Return the text of `help` in the metadata of a field; an expression may join its parts."""
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
    """Return the value of an expression, MISSING where it is not a literal."""
    try:
        return MISSING if node is None else ast.literal_eval(node)
    except ValueError:
        return MISSING
