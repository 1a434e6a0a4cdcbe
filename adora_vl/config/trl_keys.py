"""Every key of a training config by its name, with its default and its help.

The keys of TRL and Transformers are parsed from the sources of their dataclasses, because importing
these takes seconds, and a misspelt key, or `--help`, is answered at once.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from adora_vl.config.keys import AdoraKeys, AdoraScriptArguments
from adora_vl.utils.convert import field_default
from adora_vl.utils.errors import UserError

OUR_LIBRARY = "adora_vl"
# The files that define the dataclasses and those that they inherit from.
_CONFIG_FILES_BY_LIBRARY = {
    "trl": ("trainer/grpo_config.py", "trainer/base_config.py", "trainer/model_config.py"),
    "transformers": ("training_args.py",),
}
_TRL_DATACLASSES = ("GRPOConfig", "ModelConfig")


@dataclass(frozen=True)
class ConfigKey:
    """One key of a training config.

    `default`: `dataclasses.MISSING` where the library's source computes it. `help`: its text in
    `--help-all`. `library`: `adora_vl`, `trl` or `transformers`; where a class overrides a key of
    its base class, the library of that class.
    """

    name: str
    default: Any
    help: str
    library: str

    @property
    def options(self) -> list[ConfigKey]:
        """The options of a key whose value is a dataclass, under dotted names; else none."""
        options = self.default
        if not is_dataclass(options):
            return []
        return [replace(option, name=f"{self.name}.{option.name}") for option in _our_keys(options)]


@dataclass(frozen=True)
class _LibraryClass:
    """A class of a library: its syntax tree, and the name of the library."""

    node: ast.ClassDef
    library: str


@cache
def config_key_by_name() -> dict[str, ConfigKey]:
    """Return every key of a training config by its name, without importing TRL.

    Raises `UserError` if TRL or Transformers has its config classes in other files than expected,
    because another version is installed.
    """
    try:
        our_keys = [*_our_keys(AdoraScriptArguments), *_our_keys(AdoraKeys)]
        return _keys_of_libraries() | {key.name: key for key in our_keys}
    except (OSError, KeyError) as error:
        raise UserError(
            "the installed TRL or Transformers is another version; run `pip install -e .` again"
        ) from error


def _keys_of_libraries() -> dict[str, ConfigKey]:
    """Return the keys of TRL and Transformers by name, parsed from the libraries' sources.

    Raises `OSError` or `KeyError` if a file or class is not where it is expected.
    """
    classes: dict[str, _LibraryClass] = {}
    for library, file_names in _CONFIG_FILES_BY_LIBRARY.items():
        spec = find_spec(library)
        if spec is None:
            continue
        for folder in spec.submodule_search_locations or ():
            for file_name in file_names:
                tree = ast.parse(Path(folder, file_name).read_bytes())
                for node in tree.body:
                    if isinstance(node, ast.ClassDef):
                        classes[node.name] = _LibraryClass(node, library)
    keys: dict[str, ConfigKey] = {}
    for class_name in _TRL_DATACLASSES:
        keys |= _keys_of_class(class_name, classes)
    return keys


def _our_keys(dataclass: Any) -> list[ConfigKey]:
    """Return the keys that a dataclass of this project declares, each with its help text."""
    return [
        ConfigKey(
            name=field.name,
            default=field_default(field),
            help=field.metadata["help"],
            library=OUR_LIBRARY,
        )
        for field in fields(dataclass)
    ]


def _keys_of_class(class_name: str, classes: Mapping[str, _LibraryClass]) -> dict[str, ConfigKey]:
    """Return the keys that a dataclass and its base classes declare, by name.

    `classes`: parsed classes of the libraries by name. Raises `KeyError` for a class that is not
    among them.
    """
    dataclass = classes[class_name]
    keys: dict[str, ConfigKey] = {}
    for base in dataclass.node.bases:
        keys |= _keys_of_class(ast.unparse(base), classes)
    # A field is an annotated assignment: `name: type = value`.
    for statement in dataclass.node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        field_name = statement.target.id
        if not field_name.startswith("_"):
            keys[field_name] = _key_of_field(field_name, statement.value, dataclass.library)
    return keys


def _key_of_field(name: str, value: ast.expr | None, library: str) -> ConfigKey:
    """Return the key that a field of a library's dataclass declares.

    `value`: the expression behind the `=` of the field. It is a plain value such as `0.2`, or a
    call such as `field(default=0.2, metadata={"help": "Lower clip."})`. None without an `=`.
    """
    if not isinstance(value, ast.Call):
        return ConfigKey(name=name, default=_literal_value(value), help="", library=library)
    arguments = {keyword.arg: keyword.value for keyword in value.keywords}
    default: Any = _literal_value(arguments.get("default"))
    factory = arguments.get("default_factory")
    if isinstance(factory, ast.Lambda):
        default = _literal_value(factory.body)
    # `list` and `dict` return an empty value. The value of any other function is not known.
    elif isinstance(factory, ast.Name):
        default = {"list": [], "dict": {}}.get(factory.id, MISSING)
    help_text = _help_in(arguments.get("metadata"))
    # The libraries double every % for argparse.
    one_line = " ".join(help_text.replace("%%", "%").split())
    return ConfigKey(name=name, default=default, help=one_line, library=library)


def _help_in(metadata: ast.expr | None) -> str:
    """Return the text of `help` in the expression of a field's metadata; empty without one."""
    if not isinstance(metadata, ast.Dict):
        return ""
    parts: list[str] = []
    for key, value in zip(metadata.keys, metadata.values, strict=True):
        # The key None stands for a `**` in the dict.
        if key is None or _literal_value(key) != "help":
            continue
        # The text may be an expression that joins several constants.
        for node in ast.walk(value):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts.append(node.value)
    return "".join(parts)


def _literal_value(node: ast.expr | None) -> Any:
    """Return the value of a literal expression; `dataclasses.MISSING` for any other or None."""
    try:
        return MISSING if node is None else ast.literal_eval(node)
    except ValueError:
        return MISSING
