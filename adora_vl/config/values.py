"""The conversion of the values of config keys, those of TRL and Transformers among them.

Keys of ours are converted by their annotations (`adora_vl/utils/convert.py`). What keys of the
libraries take is in `trl_ranges.py`.
"""

from collections.abc import Collection
from dataclasses import Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from adora_vl.config.trl_ranges import (
    JSON_FILE_KEYS,
    KEYS_WITH_WORD_NONE,
    NULL_VALUE_BY_KEY,
    PATH_KEYS,
    TYPE_BY_TRL_KEY,
)
from adora_vl.utils.cli import DuplicateKeyError, flow_mapping, read_json, short_repr
from adora_vl.utils.convert import (
    MAPPING_IN_WORDS,
    annotation_by_field,
    check_finite,
    convert,
    field_default,
    means_null,
    value_in_words,
)
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import path_problem


def convert_key(key: str, value: object, hint: object) -> Any:
    """Convert the value of a config key to its type, with the exceptions that a few keys need.

    `hint`: the annotation of the key. Raises `UserError` for a value that it does not allow.
    """
    if isinstance(value, str):
        # For these keys the word none is a value of its own, and does not mean null.
        if key in KEYS_WITH_WORD_NONE and value.strip().lower() == "none":
            return value
        # These keys take a mapping, or the path of a JSON file that has one.
        is_path = not value.lstrip().startswith("{") and not means_null(value, hint)
        if key in JSON_FILE_KEYS and is_path:
            content = _read_json_file(key, value)
            if key == "deepspeed":
                _check_deepspeed(content)
            return value
    converted = convert(key, value, hint)
    if key in PATH_KEYS:
        _refuse_impossible_paths(key, converted)
    if key == "deepspeed" and converted is not None:
        # The command line keeps a mapping as text, which Transformers reads.
        is_text = isinstance(converted, str)
        _check_deepspeed(flow_mapping(converted) or {} if is_text else converted)
    # Some keys have another value, such as an empty list, in place of null.
    if converted is None:
        return NULL_VALUE_BY_KEY.get(key)
    return converted


def _refuse_impossible_paths(key: str, value: object) -> None:
    """Raise `UserError` where a path of this value cannot exist, as one with too long a name.

    `value`: of a key that takes a path, or a list of them; it may be null or a truth value.
    """
    paths = value if isinstance(value, list) else [value]
    for path in paths:
        problem = path_problem(path) if isinstance(path, str) else ""
        if problem:
            raise UserError(
                f"{key}: {short_repr(path)} cannot be a path ({problem}); write another one"
            )


def _check_deepspeed(config: dict[str, Any]) -> None:
    """Raise `UserError` for a config of DeepSpeed without a ZeRO stage that there is.

    Accelerate reads the stage when the config is built, and says neither key nor value.
    """
    zero = config.get("zero_optimization")
    # Without a stage DeepSpeed takes 0.
    stage = zero.get("stage", 0) if isinstance(zero, dict) else None
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise UserError(
            f"deepspeed: zero_optimization: {short_repr(zero)} is not a mapping with a stage from 0 to "
            "3, such as {stage: 2}; or leave deepspeed out, and launch with "
            "configs/accelerate/zero2.yaml"
        )


def _read_json_file(key: str, path: str) -> dict[str, Any]:
    """Return the mapping in the JSON file that is the value of a key.

    Raises `UserError` where the value is not the path of such a file.
    """
    content = None
    try:
        content = read_json(Path(path.strip()).read_bytes())
    except DuplicateKeyError as error:
        raise UserError(f"{key}: {error}; keep the right one") from None
    except (OSError, ValueError, RecursionError):
        pass  # refused below
    if not isinstance(content, dict):
        raise UserError(
            f"{key}: {value_in_words(path)} is not a JSON file with a mapping in it, nor "
            f"{MAPPING_IN_WORDS}"
        )
    check_finite(key, content)
    return content


def convert_fields(
    config: Any, *, converted: Collection[str] = (), library_class: type[Any] | None = None
) -> None:
    """Convert the values of a config dataclass in place; the fields that have their default stay.

    Raises `UserError` for a value that its annotation does not allow.

    Args:
        config: The dataclass whose fields are config keys, just constructed.
        converted: The keys whose values a command has converted already; they are skipped.
        library_class: The dataclass of TRL that `config` inherits from. Of the keys that TRL alone
            declares, only those in `TYPE_BY_TRL_KEY` are converted, the table of types of this
            project for TRL's keys. In the others only NaN and infinity are refused.
    """
    config_class: Any = type(config)
    hint_by_key = annotations_of_keys(config_class)
    library_fields = {}
    if library_class is not None:
        library_fields = {field.name: field for field in fields(library_class)}
    for field in fields(config):
        if field.name in converted or field.name not in hint_by_key:
            continue
        value = getattr(config, field.name)
        if _is_default(field, value):
            continue
        # A key that this project declares anew has a field of its own, and not that of TRL.
        is_of_trl_alone = library_fields.get(field.name) is field
        if is_of_trl_alone and _type_of_library_key(field.name) is None:
            check_finite(field.name, value)
        else:
            setattr(config, field.name, convert_key(field.name, value, hint_by_key[field.name]))


def _is_default(key: Field[Any], value: object) -> bool:
    """Return whether the value of a dataclass field is the field's default, in type and value.

    The type counts since Python takes 1 and true for equal, but in the run's fingerprint they are
    different texts. A dataclass of options may contain such values, so it never counts as default.
    """
    if is_dataclass(value):
        return False
    default = field_default(key)
    return type(value) is type(default) and value == default


@cache
def annotations_of_keys(dataclass: Any) -> dict[str, Any]:
    """Return the annotation of every key that the constructor of a config dataclass takes.

    `TYPE_BY_TRL_KEY`, the table of types of this project for TRL's keys, replaces TRL's own
    annotation.
    """
    parameters = {key.name for key in fields(dataclass) if key.init}
    return {
        key: _type_of_library_key(key) or hint
        for key, hint in annotation_by_field(dataclass).items()
        if key in parameters
    }


@cache
def _type_of_library_key(key: str) -> Any:
    """Return the type that `TYPE_BY_TRL_KEY` has for a key of a library; None where it has none.

    The trackers that `report_to` takes are listed by Transformers, whose import takes seconds. So
    this annotation is not in the table, but built at its first use.
    """
    if key == "report_to":
        from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

        literal: Any = Literal  # mypy takes a Literal only of names that are written out
        tracker: Any = literal[("none", "all", *INTEGRATION_TO_CALLBACK)]
        return list[tracker] | None
    return TYPE_BY_TRL_KEY.get(key)
