"""What the user wrote for a training command, in the file and on the command line, before anything is made of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from adora_vl.errors import UserError, nearest
from adora_vl.yaml_file import read_mapping

# What became of keys that earlier configs have.
REMOVED = {
    "adora_less_padding": "leave it out: adora_share_prompt leaves no padding, and other rows are cut to their length",
}


def split_words(arguments: Sequence[str]) -> list[str]:
    """The words of a command line. `--config=X` is what argparse users expect to work too, and TRL wants two words."""
    return [part for a in arguments for part in (a.split("=", 1) if a.startswith("--config=") else [a])]


def config_file(arguments: Sequence[str]) -> Path | None:
    """The file after `--config`. Raises `UserError` where it is missing or given twice."""
    words = split_words(arguments)
    if "--config" in words[-1:]:
        raise UserError("--config: expected the path of a YAML file after it")
    if words.count("--config") > 1:
        raise UserError("--config: given twice; name one file, and other keys on the command line")
    return Path(words[words.index("--config") + 1]) if "--config" in words else None


def check_keys(keys: Iterable[str], where: str, known: Collection[str]) -> None:
    """Raises `UserError` for a key that is not `known`, with the nearest one that is."""
    for key in keys:
        if key in REMOVED:
            raise UserError(f"{where}: the key '{key}' was removed; {REMOVED[key]}")
        if key not in known:
            raise UserError(f"{where}: unknown key '{key}'{nearest(key, known)}")


def read_config(path: Path, known: Collection[str]) -> dict[str, Any]:
    """The mapping in a config file, its keys checked. Raises `UserError` naming the file."""
    content = read_mapping("--config", path)
    check_keys((key for key in content if key != "env"), str(path), known)
    _check_environment(content.get("env", {}), str(path))
    return content


def _check_environment(variables: object, where: str) -> None:
    """TRL puts them into the environment as they are."""
    if not isinstance(variables, dict):
        raise UserError(f"{where}: env: {variables!r:.60} is not a mapping of environment variables, such as {{A: 1}}")
    for name, value in variables.items():
        text = f"{name}{value}"
        if not isinstance(name, str) or not name or "=" in name or "\0" in text or isinstance(value, dict | list):
            raise UserError(f"{where}: env: {name!r:.60}: {value!r:.60} is not a name and a text; write such as A: 1")


def command_line_values(arguments: Sequence[str], known: Collection[str]) -> dict[str, list[str]]:
    """The words after each `--key`, or behind its `=`; the last ones where a key is given twice, as argparse has it.

    `--no_key` of a boolean that defaults to true is `key` without words; argparse refuses any that follow it.
    """
    values: dict[str, list[str]] = {}
    current: list[str] = []
    for word in split_words(arguments):
        if not word.startswith("--"):
            current.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        name, current = name.replace("-", "_"), [value] if equals else []
        if name not in known and name.startswith("no_") and name[3:] in known:
            values[name[3:]] = []
        else:
            values[name] = current
    return values
