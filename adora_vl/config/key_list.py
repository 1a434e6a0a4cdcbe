"""Every key of a training config with its default and help. Those of TRL and Transformers are read from the sources of
their dataclasses, since importing these takes seconds.
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
from adora_vl.utils.errors import UserError

OURS = "adora_vl"
# Where the dataclasses are defined, and those that they inherit from.
_FILES = {
    "trl": ("trainer/grpo_config.py", "trainer/base_config.py", "trainer/model_config.py"),
    "transformers": ("training_args.py",),
}
_DATACLASSES = ("GRPOConfig", "ModelConfig")


@dataclass(frozen=True)
class Key:
    """`default` is MISSING where the source computes it. `library` declared the key last, and so its default."""

    name: str
    default: Any
    help: str
    library: str

    @property
    def options(self) -> list[Key]:
        """Those of a key that is a block of options, by their dotted names."""
        block = self.default
        return [replace(key, name=f"{self.name}.{key.name}") for key in _our_keys(block)] if is_dataclass(block) else []


@cache
def read_keys() -> dict[str, Key]:
    """Every key by its name. Raises `UserError` where a library's class is not where it is expected, as in another
    version.
    """
    try:
        return _keys_of_libraries() | {
            key.name: key for each in (AdoraScriptArguments, AdoraKeys) for key in _our_keys(each)
        }
    except (OSError, KeyError) as error:
        raise UserError("the installed TRL or Transformers is another version; run `pip install -e .` again") from error


def _keys_of_libraries() -> dict[str, Key]:
    classes: dict[str, tuple[ast.ClassDef, str]] = {}
    for library, names in _FILES.items():
        spec = find_spec(library)
        folders = (spec and spec.submodule_search_locations) or ()
        trees = [ast.parse(Path(folder, name).read_bytes()) for folder in folders for name in names]
        classes |= {
            node.name: (node, library) for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)
        }
    found: dict[str, Key] = {}
    for name in _DATACLASSES:
        found |= _keys_of_class(name, classes)
    return found


def _our_keys(dataclass: Any) -> list[Key]:
    return [
        Key(
            each.name,
            each.default if each.default_factory is MISSING else each.default_factory(),
            each.metadata["help"],
            OURS,
        )
        for each in fields(dataclass)
    ]


def _keys_of_class(name: str, classes: Mapping[str, tuple[ast.ClassDef, str]]) -> dict[str, Key]:
    """The fields of a class and of those that it inherits from. Raises `KeyError` for a class that is not there."""
    node, library = classes[name]
    found: dict[str, Key] = {}
    for base in node.bases:
        found |= _keys_of_class(ast.unparse(base), classes)
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and not line.target.id.startswith("_"):
            found[line.target.id] = _read_field(line.target.id, line.value, library)
    return found


def _read_field(name: str, value: ast.expr | None, library: str) -> Key:
    """A field from what stands behind its `=`: a value, or `field(default=..., metadata={"help": ...})`."""
    if not isinstance(value, ast.Call):
        return Key(name, _literal(value), "", library)
    given = {word.arg: word.value for word in value.keywords}
    default: Any = _literal(given.get("default"))
    factory = given.get("default_factory")
    if isinstance(factory, ast.Lambda):
        default = _literal(factory.body)
    elif isinstance(factory, ast.Name):
        default = {"list": [], "dict": {}}.get(factory.id, MISSING)
    metadata = given.get("metadata")
    help_text = ""
    if isinstance(metadata, ast.Dict):
        texts = [
            text for key, text in zip(metadata.keys, metadata.values, strict=True) if key and _literal(key) == "help"
        ]
        help_text = "".join(
            part.value for text in texts for part in ast.walk(text)
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        )  # fmt: skip
    return Key(name, default, " ".join(help_text.replace("%%", "%").split()), library)  # argparse wants % doubled


def _literal(node: ast.expr | None) -> Any:
    try:
        return MISSING if node is None else ast.literal_eval(node)
    except ValueError:
        return MISSING
