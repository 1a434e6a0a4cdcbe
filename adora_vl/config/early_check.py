"""A wrong key or value is named before TRL and Transformers are imported, which takes some seconds.

What the user wrote is read here, in the file and on the command line, before a config is made of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from adora_vl.config.key_list import read_keys
from adora_vl.config.keys import AdoraKeys, AdoraScriptArguments
from adora_vl.config.values import RANGES, convert, declared, takes_list
from adora_vl.utils.cli import is_null, read_mapping
from adora_vl.utils.errors import UserError, nearest

# What became of keys that earlier configs have.
REMOVED = {
    "adora_less_padding": "leave it out: adora_share_prompt leaves no padding, and other rows are cut to their length",
}
# What the training command takes beside the keys, for a word that is meant as one of them.
OPTIONS = ("config", "dry-run", "card-gib", "processes", "accelerate-config", "write-config", "help", "help-all")
_NOT_READ: Any = object()  # stands for a value that is left to the parser, such as that of a switch without a word


def early_check(arguments: Sequence[str]) -> None:
    """Raises `UserError` for a key that no training config has, in the file or on the command line, for a file that
    cannot be read, for a value that its key does not take, where the key's range is ours, and where no model is named.
    """
    refuse_stray(arguments)
    known = read_keys()
    if known is None:
        return
    file = config_file(arguments)
    given: dict[str, Any] = dict(read_config(file, known)) if file else {}
    check_keys(command_line_keys(arguments, known), "command line", known, OPTIONS)
    hints = {**RANGES, **declared(AdoraScriptArguments), **declared(AdoraKeys)}
    given |= dict.fromkeys(command_line_keys(arguments, known), _NOT_READ) | _command_line_values(arguments, hints)
    if "output_dir" in given:
        check_output_dir(given["output_dir"])
    for key, value in given.items():
        if key in hints and value is not _NOT_READ:
            convert(key, value, hints[key])
    if "model_name_or_path" not in given:
        raise UserError(
            "model_name_or_path: not set; name a file with --config FILE.yaml, or a model folder, a hub id or 'tiny' "
            "(`python -m adora_vl.train --help`)"
        )


def refuse_stray(words: Sequence[str]) -> None:
    """Raise `UserError` where words of a command line, or those that its keys have left, do not begin with a key."""
    if words and not words[0].startswith("--"):
        raise UserError(f"command line: {words[0]!r} belongs to no key; write --config FILE.yaml, or --key value")


def check_output_dir(value: Any) -> None:
    """Raise `UserError` for a place that nobody means: null would be a folder of Transformers' choice."""
    if is_null(value):
        raise UserError("output_dir: null is no folder; name one for this run, such as runs/first")
    if isinstance(value, str) and value.strip() and Path(value).resolve() == Path(Path(value).resolve().anchor):
        raise UserError(f"output_dir: {value!r} is the root of the file system; name a folder for this run")


def _command_line_values(arguments: Sequence[str], hints: dict[str, Any]) -> dict[str, Any]:
    """The words of each key: all of them for a list, else its one word."""
    found: dict[str, Any] = {}
    words: list[str] = []
    for word in split_words(arguments):
        if not word.startswith("--"):
            words.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        words = [value] if equals else []
        found[name.replace("-", "_")] = words
    return {
        key: words if takes_list(hints[key]) else words[0] if len(words) == 1 else _NOT_READ
        for key, words in found.items()
        if key in hints
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


def check_keys(keys: Iterable[str], where: str, known: Collection[str], options: Collection[str] = ()) -> None:
    """Raises `UserError` for a key that is not `known`, with the nearest one that is, or of the `options`."""
    spelled = {option.replace("-", "_"): f"--{option}" for option in options}
    for key in keys:
        if key in REMOVED:
            raise UserError(f"{where}: the key '{key}' was removed; {REMOVED[key]}")
        if key not in known:
            close = nearest(key, {**dict.fromkeys(known), **spelled})
            meant = f"; did you mean '{spelled.get(close, close)}'?" if close else ""
            raise UserError(f"{where}: unknown key '{key}'{meant}")


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


def command_line_keys(arguments: Sequence[str], known: Collection[str]) -> list[str]:
    """The keys on a command line but `--config`. `--no_key` of a boolean is `key`."""
    keys = []
    for word in split_words(arguments):
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            negated = name not in known and name.startswith("no_") and name[3:] in known
            keys.append(name[3:] if negated else name)
    return [key for key in keys if key != "config"]
