"""Command line over YAML over defaults, with errors that name the key and the nearest known one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from trl import ModelConfig
from trl.scripts.utils import TrlParser

from adora_vl.config.early_check import (
    OPTIONS,
    check_keys,
    command_line_keys,
    config_file,
    read_config,
    refuse_stray,
    split_words,
)
from adora_vl.config.keys import AdoraScriptArguments
from adora_vl.config.schema import AdoraGRPOConfig
from adora_vl.config.values import convert, declared
from adora_vl.utils.errors import UserError

DATACLASSES = (AdoraScriptArguments, AdoraGRPOConfig, ModelConfig)
Parsed = tuple[AdoraScriptArguments, AdoraGRPOConfig, ModelConfig]


def known_keys() -> set[str]:
    """Every key of a training config."""
    return {field.name for dataclass in DATACLASSES for field in fields(dataclass) if field.init}


class _Parser(TrlParser):  # type: ignore[misc]  # TRL is untyped to mypy
    """TRL's parser splits the command line; `config/values.py` converts and checks each value, as it does for the file.

    Stock TRL lets argparse convert the values of the command line, and takes most of those in the file as they are.
    """

    def __init__(self, dataclass_types: Any, **kwargs: Any) -> None:
        super().__init__(dataclass_types, **kwargs)
        self._declared = {key: hint for each in dataclass_types for key, hint in declared(each).items()}
        self._untouched = {action.dest: action.default for action in self._actions}
        for action in self._actions:
            if action.dest in self._declared and action.nargs != 0:
                action.metavar = action.metavar or (action.choices and f"{{{','.join(map(str, action.choices))}}}")
                action.type = action.choices = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = super().parse_known_args(args, namespace)
        for key, hint in self._declared.items():
            value = getattr(found, key)
            if value is not self._untouched[key]:
                setattr(found, key, convert(key, value, hint))
        return found, rest

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a config file, its keys checked. Raises `UserError` naming the file."""
    return read_config(Path(path), known_keys())


def given_keys(arguments: Sequence[str]) -> set[str]:
    """The keys that the user has set, in the file or on the command line."""
    known, file = known_keys(), config_file(arguments)
    return {*(read_config(file, known) if file else {}), *command_line_keys(arguments, known)} & known


def parse(arguments: Sequence[str]) -> Parsed:
    """The three dataclasses of a training command. Raises `UserError` for an unknown key or a bad value; where TRL or
    Transformers refuse it, with their own words in one line.
    """
    refuse_stray(arguments)
    known, file = known_keys(), config_file(arguments)
    if file:
        read_config(file, known)
    check_keys(command_line_keys(arguments, known), "command line", known, OPTIONS)
    parser = _Parser(DATACLASSES, prog="python -m adora_vl.train", allow_abbrev=False)
    try:
        script, config, model, left = parser.parse_args_and_config(
            split_words(arguments), return_remaining_strings=True
        )
        refuse_stray(left)
    except UserError:
        raise
    except (ValueError, TypeError) as error:
        raise UserError(" ".join(str(error).split())) from error
    return script, config, model
