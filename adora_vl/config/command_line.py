"""Command line over YAML over defaults, with errors that name the key and the nearest known one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from trl import ModelConfig
from trl.scripts.utils import TrlParser

from adora_vl.config.schema import AdoraGRPOConfig, AdoraScriptArguments
from adora_vl.config.values import convert, declared
from adora_vl.errors import UserError, nearest
from adora_vl.yaml_file import read_mapping

DATACLASSES = (AdoraScriptArguments, AdoraGRPOConfig, ModelConfig)
Parsed = tuple[AdoraScriptArguments, AdoraGRPOConfig, ModelConfig]


# What became of keys that earlier configs have.
REMOVED = {
    "adora_less_padding": "leave it out: adora_share_prompt leaves no padding, and other rows are cut to their length",
}


def known_keys() -> set[str]:
    """Every key of a training config."""
    return {field.name for dataclass in DATACLASSES for field in fields(dataclass) if field.init}


class _Parser(TrlParser):  # type: ignore[misc]  # TRL is untyped to mypy
    """TRL's parser reads the words; what they mean, and which are wrong, is said by `config/values.py` for the command
    line and the file alike. Stock TRL lets argparse convert the former and takes most of the latter as it is.
    """

    def __init__(self, dataclass_types: Any, **kwargs: Any) -> None:
        super().__init__(dataclass_types, **kwargs)
        self._declared = {key: facts for each in dataclass_types for key, facts in declared(each).items()}
        self._untouched = {action.dest: action.default for action in self._actions}
        for action in self._actions:
            if action.dest in self._declared and action.nargs != 0:
                action.metavar = action.metavar or (action.choices and f"{{{','.join(map(str, action.choices))}}}")
                action.type = action.choices = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = super().parse_known_args(args, namespace)
        for key, (hint, choices) in self._declared.items():
            value = getattr(found, key)
            if value is not self._untouched[key]:
                setattr(found, key, convert(key, value, hint, choices))
        return found, rest

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _check_keys(keys: Iterable[str], where: str) -> None:
    known = known_keys()
    for key in keys:
        if key in REMOVED:
            raise UserError(f"{where}: the key '{key}' was removed; {REMOVED[key]}")
        if key not in known:
            raise UserError(f"{where}: unknown key '{key}'{nearest(key, known)}")


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a config file, its keys checked. Raises `UserError` naming the file."""
    content = read_mapping("--config", Path(path))
    _check_keys((key for key in content if key != "env"), str(path))
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


def _command_line_keys(arguments: Sequence[str]) -> list[str]:
    """The names of `--key value` and `--key=value`, also `--no_key` of a boolean that defaults to true."""
    names = [a[2:].split("=", 1)[0].replace("-", "_") for a in arguments if a.startswith("--")]
    known = known_keys()
    return [name[3:] if name not in known and name[3:] in known and name.startswith("no_") else name for name in names]


def config_folder(arguments: Sequence[str]) -> list[Path]:
    """The folder of the config file, or nothing where there is no such file."""
    words = [part for a in arguments for part in (a.split("=", 1) if a.startswith("--config=") else [a])]
    return [Path(words[words.index("--config") + 1]).parent] if "--config" in words[:-1] else []


def given_keys(arguments: Sequence[str]) -> set[str]:
    """The keys that the user has set, in the file or on the command line."""
    words = [part for a in arguments for part in (a.split("=", 1) if a.startswith("--config=") else [a])]
    file = read_yaml(words[words.index("--config") + 1]) if "--config" in words else {}
    return {*map(str, file), *_command_line_keys(words)} & known_keys()


def parse(arguments: Sequence[str]) -> Parsed:
    """The three dataclasses of a training command. Raises `UserError` for an unknown key or a bad value."""
    arguments = list(arguments)
    if "--config" in arguments[-1:]:
        raise UserError("--config: expected the path of a YAML file after it")
    # `--config=X` is what argparse users expect to work too
    arguments = [part for a in arguments for part in (a.split("=", 1) if a.startswith("--config=") else [a])]
    if arguments.count("--config") > 1:
        raise UserError("--config: given twice; name one file, and other keys on the command line")
    if "--config" in arguments:
        read_yaml(arguments[arguments.index("--config") + 1])
    _check_keys((key for key in _command_line_keys(arguments) if key not in ("config", "help")), "command line")
    parser = _Parser(DATACLASSES, prog="python -m adora_vl.train", allow_abbrev=False)
    try:
        script, config, model = parser.parse_args_and_config(arguments)
    except UserError:
        raise
    except (ValueError, TypeError) as error:
        raise UserError(" ".join(str(error).split())) from error
    return script, config, model
