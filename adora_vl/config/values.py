"""Turns what the user wrote for a key into a value. All messages about wrong values come from here.

A message reads `key: VALUE is not WHAT IT SHOULD BE`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from adora_vl.config.names import as_name, expected_names, names_of
from adora_vl.config.ranges import RANGES
from adora_vl.errors import UserError
from adora_vl.words import is_null, split_list, truth

# A run needs these keys, even if their annotation allows them to be empty.
_NEEDED = frozenset({
    "output_dir", "dataset_name", "dataset_train_split", "model_name_or_path", "model_revision", "adora_method",
    "vllm_server_host",
})  # fmt: skip
_OR_FILE = frozenset({"deepspeed", "fsdp_config", "accelerator_config"})  # a mapping, or the path of one
_OWN_MESSAGES = frozenset({"adora_method_options"})  # `config/advantage.py` says what is wrong with them
_NONE_IS_A_WORD = frozenset({"resume_from_checkpoint"})  # where null means to resume if there is a checkpoint
_NULL_IS = {"report_to": "none"}  # Transformers fails on null for this key
_SHOWN = 80


def convert(key: str, value: Any, hint: Any, choices: Any = None) -> Any:
    """Convert a value from the command line or a YAML file to the type `hint` of `key`. Raises `UserError`."""
    if is_null(value) or _is_nothing(key, value, hint, choices):
        _check_null(key, hint, choices)
        return _NULL_IS.get(key)
    if key in _OWN_MESSAGES:
        return value
    if key in RANGES or names_of(key, hint, choices):
        return _listed(key, value, hint, choices) if _is_list(hint) else _one(key, value, hint, choices)
    kinds = {get_origin(each) or each for each in (hint, *get_args(hint))}
    if Literal in kinds:
        return value
    if bool in kinds:
        return _bool(key, value, str in kinds)
    if dict in kinds:
        return _mapping(key, value)
    if list in kinds:
        return value if isinstance(value, str) and str in kinds else _entries(key, value)
    if str in kinds:
        return _text(key, value)
    return value  # an object of a library, which only Python code can pass


def check_fields(config: Any) -> None:
    """Check the numbers and names of a dataclass that Python code made without a parser. Raises `UserError`."""
    kind: Any = type(config)
    for name, (hint, choices) in declared(kind).items():
        value = getattr(config, name)
        if name in RANGES or names_of(name, hint, choices):
            if value is None:
                _check_null(name, hint, choices)
            elif name not in RANGES or not isinstance(value, str) or value in RANGES[name].also:
                convert(name, value, hint, choices)


@cache
def declared(dataclass: type) -> dict[str, tuple[Any, Any]]:
    """Annotation and choices of every key of a dataclass."""
    hints = get_type_hints(dataclass)
    return {key.name: (hints[key.name], key.metadata.get("choices")) for key in fields(dataclass) if key.init}


def _is_nothing(key: str, value: Any, hint: Any, choices: Any) -> bool:
    """Whether it is the word none, which many write for null, for a key that can be null and has no such name."""
    if not isinstance(value, str) or value.strip().lower() != "none" or key in _NONE_IS_A_WORD:
        return False
    return type(None) in get_args(hint) and "none" not in names_of(key, hint, choices)


def _check_null(key: str, hint: Any, choices: Any) -> None:
    optional = type(None) in get_args(hint)
    if not (RANGES[key].null if key in RANGES and not _is_list(hint) else optional):
        _refuse(key, None, _expected(key, None, hint, choices))


def _one(key: str, value: Any, hint: Any, choices: Any) -> Any:
    if key in RANGES:
        found: Any = value if value in RANGES[key].also else RANGES[key].number(value)
    else:
        found = as_name(key, value, names_of(key, hint, choices))
    if found is None:
        _refuse(key, value, _expected(key, value, hint, choices))
    return found


def _is_list(hint: Any) -> bool:
    return any((get_origin(each) or each) is list for each in (hint, *get_args(hint)))


def _listed(key: str, value: Any, hint: Any, choices: Any) -> Any:
    return [_one(key, entry, hint, choices) for entry in _entries(key, value)]


def _entries(key: str, value: Any) -> list[Any]:
    words = value if isinstance(value, list | tuple) else [value]
    try:
        entries = split_list(words) if all(isinstance(word, str) for word in words) else list(words)
    except ValueError as error:
        raise UserError(f"{key}: {_shown(value)} {error}; write a,b or [a,b]") from None
    if any(isinstance(entry, dict | list) or entry is None or entry == "" for entry in entries):
        _refuse(key, value, "a list of words, such as [a,b]")
    return entries


def _bool(key: str, value: Any, or_text: bool) -> Any:
    found = truth(value)
    if found is None and or_text and isinstance(value, str):
        return value
    if found is None:
        _refuse(key, value, "true or false")
    return found


def _mapping(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        check_finite(key, value)
        return value
    text = value.strip() if isinstance(value, str) else ""
    if text and not text.startswith("{") and key in _OR_FILE:
        if not Path(text).is_file():
            _refuse(key, value, "a file, nor a mapping such as '{\"a\": 1}'")
        if not _holds_a_mapping(Path(text)):
            _refuse(key, value, "a JSON file with a mapping in it")
        return value
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        _refuse(key, value, "a mapping, such as '{\"a\": 1}' on the command line")
    check_finite(key, content)
    return value


def _holds_a_mapping(file: Path) -> bool:
    try:
        return isinstance(json.loads(file.read_bytes()), dict)
    except (OSError, ValueError, RecursionError):
        return False


def check_finite(key: str, value: Any) -> None:
    """Raises `UserError` for a number inside of a mapping that is NaN or infinite, which JSON and YAML can spell."""
    if isinstance(value, Mapping | list):
        for name, inside in value.items() if isinstance(value, Mapping) else enumerate(value):
            check_finite(f"{key}: {name}", inside)
    elif isinstance(value, float) and not math.isfinite(value):
        _refuse(key, value, "a number that is finite")


def _text(key: str, value: Any) -> str:
    if isinstance(value, dict | list | bool):
        _refuse(key, value, "a text")
    if key in _NEEDED and not str(value).strip():
        _refuse(key, value, "a name: it is empty")
    return str(value)


def _expected(key: str, value: Any, hint: Any, choices: Any) -> str:
    if key in RANGES:
        return str(RANGES[key])
    known = names_of(key, hint, choices)
    return expected_names(value, known) if known else "true or false" if hint is bool else "a text"


def _refuse(key: str, value: Any, expected: str) -> NoReturn:
    raise UserError(f"{key}: {_shown(value)} is not {expected}")


def _shown(value: Any) -> str:
    """The value as a person writes it, in one line: null for None, numbers without quotes, other text with them."""
    if value is None:
        return "null"
    text = repr(value)
    if isinstance(value, str) and value.strip():
        try:
            float(value)
            text = value.strip()
        except ValueError:
            pass
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
