"""The conversion of what a user wrote to the type of its key.

A value that does not fit is refused in one line: `key: VALUE is not WHAT IT SHOULD BE`. A key takes
what its annotation says. The ranges of our keys stand beside their fields, those of keys of TRL and
Transformers in `trl_ranges.py`. NaN and infinity are refused everywhere.
"""

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from adora_vl.config.trl_ranges import NONE_IS_A_WORD, OR_FILE, RANGES, VALUE_FOR_NULL, Name
from adora_vl.utils.cli import (
    GivenTwiceError,
    flow_mapping,
    is_null,
    read_json,
    shown,
    split_list,
    truth,
    yaml_value,
)
from adora_vl.utils.errors import UserError, did_you_mean

_literal: Any = Literal  # mypy takes a Literal only of names that are written out
_OFF = ("off", "no", "none")  # a bare `off` or `no` in YAML is false
_BOUNDS = (("gt", "above"), ("ge", "of at least"), ("lt", "below"), ("le", "at most"))
_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "a mapping",
    NoneType: "null",
}
_MANY = 12  # the most names that an error line lists
_SHOWN = 80  # the most characters of a value in an error line


def convert(key: str, value: Any, hint: Any) -> Any:
    """Convert a value from the command line or a YAML file to the type of its key.

    `hint`: the annotation that says what `key` takes. A dataclass is a block of options; one with
    a `shorthand` may be written as the value of that field alone. Raises `UserError`.
    """
    kinds = _kinds(hint)
    # A word of the command line may come as a list of one.
    word = value
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        word = value[0]
    if _is_null(key, word, hint):
        if NoneType not in kinds:
            _refuse(key, None, hint)
        return VALUE_FOR_NULL.get(key)
    block = next((kind for kind in kinds if is_dataclass(kind)), None)
    if block is not None:
        return _block(key, word, block)
    if tuple in kinds:
        return _tuple(key, value, hint)
    # A key that takes a truth value or a list: `adora_stock_step: true` is not the list [true].
    if {bool, list} <= kinds and truth(word) is not None:
        return truth(word)
    # A key that takes a text or a list keeps a lone text, such as a regular expression of PEFT's.
    if list in kinds and not (str in kinds and isinstance(value, str)):
        entry_hint = _entry(hint)
        entries = _entries(key, value, entry_hint)
        return [convert(key, entry, entry_hint) for entry in entries]
    return _leaf(key, value, hint)


def _leaf(key: str, value: Any, hint: Any) -> Any:
    """Convert a value that is no block and no list, which pydantic holds against its annotation."""
    plain_value = value.value if isinstance(value, Enum) else value
    parsed = _parse(key, plain_value, hint)
    try:
        converted = _adapter(hint).validate_python(parsed, strict=True)
    except ValidationError:
        _refuse(key, value, hint)
    check_finite(key, converted)
    return converted


def _is_null(key: str, word: object, hint: object) -> bool:
    """Return whether a value is null.

    Many write none for it, but for some keys that is a word of its own.
    """
    if is_null(word):
        return True
    none_is_a_word = "none" in _names(hint) or key in NONE_IS_A_WORD
    if none_is_a_word or NoneType not in _kinds(hint):
        return False
    return isinstance(word, str) and word.strip().lower() == "none"


def convert_fields(
    config: Any, *, converted: Collection[str] = (), library_class: Any = None
) -> None:
    """Convert the values of a dataclass of keys in place, but for its defaults.

    Raises `UserError`.

    Args:
        config: the dataclass, just constructed.
        converted: the keys whose values were converted before, by a command.
        library_class: the dataclass of a library that it inherits from. The library's keys are not
            converted; they have to be finite, and in their range where `RANGES` has one.
    """
    library_keys = {key.name for key in fields(library_class)} if library_class else set()
    kind: Any = type(config)
    hints = declared(kind)
    for key in fields(config):
        if key.name in converted or key.name not in hints:
            continue
        value = getattr(config, key.name)
        if _is_default(key, value):
            continue
        hint = hints[key.name]
        if key.name not in library_keys:
            setattr(config, key.name, convert(key.name, value, hint))
        elif _range_of(key.name):
            convert(key.name, value, hint)
        else:
            check_finite(key.name, value)


def _is_default(key: Field[Any], value: object) -> bool:
    """Return whether a field has its default.

    An equal value of another type is none, such as 1 for true: a fingerprint has it as text. So a
    block of options, which may have such values, never counts as the default.
    """
    if is_dataclass(value):
        return False
    default = key.default
    if key.default_factory is not MISSING:
        default = key.default_factory()
    return type(value) is type(default) and value == default


def _block(key: str, value: object, kind: Any) -> Any:
    """Build a block of options, the dataclass `kind`. Raises `UserError`."""
    hints = _hints(kind)
    short = getattr(kind, "shorthand", None)
    options = _options_of(key, value, kind)
    for name in options:
        if name not in hints:
            listed = f"{', '.join(hints) or 'none'}{did_you_mean(str(name), hints)}"
            raise UserError(f"{key}: unknown option {name!r}, it has {listed}")
    missing = [name for name in _required(kind) if name not in options]
    if missing:
        raise UserError(f"{key}: {_in_words(options)} lacks {', '.join(missing)}")
    kwargs: dict[str, Any] = {}
    for name, option in options.items():
        # An error in the shorthand names the key alone, since nobody wrote the option.
        is_shorthand = list(options) == [short]
        option_key = key if is_shorthand else f"{key}.{name}"
        kwargs[name] = convert(option_key, option, hints[name])
    try:
        return kind(**kwargs)
    except ValueError as error:
        # The text of such an error begins with the name of the option.
        raise UserError(f"{key}.{error}") from error


def _options_of(key: str, value: object, kind: Any) -> Mapping[str, Any]:
    """Return the options of a block, which may be written as the value of its shorthand.

    Raises `UserError` for anything else than a mapping.
    """
    hints = _hints(kind)
    short = getattr(kind, "shorthand", None)
    options: object = value
    if isinstance(value, kind):
        options = {name: getattr(value, name) for name in hints}
    elif isinstance(value, str) and value.strip().startswith("{"):
        options = _mapping(key, value, or_text=False)
    elif short is not None and not isinstance(value, Mapping):
        options = {short: value}
    if not isinstance(options, Mapping):
        raise UserError(
            f"{key}: {_in_words(value)} is not a mapping of options, which are {', '.join(hints)}"
        )
    return options


def _required(kind: Any) -> list[str]:
    """Return the names of the options of a block that have no default."""
    names: list[str] = []
    for option in fields(kind):
        if option.default is MISSING and option.default_factory is MISSING:
            names.append(option.name)
    return names


def _tuple(key: str, value: Any, hint: Any) -> Any:
    """Convert a list of a fixed length, or of any length where the annotation ends in dots."""
    inner = get_args(next(arm for arm in _arms(hint) if _kind(arm) is tuple))
    entries = _entries(key, value, inner[0])
    if inner[-1] is not ... and len(entries) != len(inner):
        raise UserError(f"{key}: {_in_words(value)} is not a list of {len(inner)}")
    return tuple(convert(key, entry, inner[0]) for entry in entries)


@cache
def _hints(dataclass: Any) -> dict[str, Any]:
    """Return the annotations of a dataclass, each with its words as a `Literal`.

    Ours are annotated so. Transformers lists them as an `Enum`, or as `choices` in the metadata.
    """
    hints = get_type_hints(dataclass, include_extras=True)
    return {
        key.name: _with_names(hints[key.name], key.metadata.get("choices", ()))
        for key in fields(dataclass)
    }


@cache
def declared(dataclass: Any) -> dict[str, Any]:
    """Return the annotation of every key of a dataclass that its constructor takes."""
    parameters = {key.name for key in fields(dataclass) if key.init}
    return {
        key: _range_of(key) or hint for key, hint in _hints(dataclass).items() if key in parameters
    }


@cache
def _range_of(key: str) -> Any:
    """Return the type of a key in `RANGES`, or None.

    That of `report_to` depends on Transformers, whose import takes seconds, so it is built here
    at its first use.
    """
    if key == "report_to":
        from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

        tracker: Any = _literal[("none", "all", *INTEGRATION_TO_CALLBACK)]
        return list[tracker] | None
    return RANGES.get(key)


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    """Pydantic's validator for an annotation."""
    return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))


def check_finite(key: str, value: object) -> None:
    """Raise `UserError` for NaN and infinity, also inside a mapping or list.

    JSON and YAML can contain both.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            check_finite(f"{key}: {name}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_finite(f"{key}: {index}", item)
    # written so that NaN, which compares with nothing, is refused too
    elif isinstance(value, float | int) and not abs(value) <= sys.float_info.max:
        raise UserError(f"{key}: {_in_words(value)} is not a finite number")


def _with_names(hint: Any, choices: Sequence[str] = ()) -> Any:
    """`hint` as a `Literal` of its words: its `choices`, or those of an `Enum` (`Kind | str`)."""
    enums = [arm for arm in _arms(hint) if isinstance(arm, type) and issubclass(arm, Enum)]
    words = tuple(choices) or tuple(member.value for enum in enums for member in enum)
    if not words:
        return hint
    return _literal[words] | None if NoneType in _arms(hint) else _literal[words]


def _arms(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or `hint` alone."""
    if get_origin(hint) in (Union, UnionType):
        return get_args(hint)
    return (hint,)


def takes(hint: Any, kind: type) -> bool:
    """Return whether a key with this annotation takes values of this kind."""
    return kind in _kinds(hint)


def _kinds(hint: object) -> set[Any]:
    """Return the plain types of the members of a union."""
    return {_kind(arm) for arm in _arms(hint)}


def _kind(arm: Any) -> Any:
    """Return the type without its bounds and arguments."""
    plain = get_args(arm)[0] if get_origin(arm) is Annotated else arm
    return get_origin(plain) or plain


def _names(hint: Any) -> list[str]:
    """Return the words of the `Literal` in an annotation."""
    names = [name for arm in _arms(hint) if get_origin(arm) is Literal for name in get_args(arm)]
    return [name for name in names if isinstance(name, str)]


def _entry(hint: Any) -> Any:
    """Return the annotation of the entries of a list."""
    return _with_names(next(get_args(arm)[0] for arm in _arms(hint) if _kind(arm) is list))


def _takes_names(hint: object) -> bool:
    """Return whether a text is a name where the key takes a mapping too, which is `{...}` then.

    Keys of the libraries that take both want the mapping as a text.
    """
    return Name in _arms(hint)


def _parse(key: str, value: object, hint: object) -> Any:
    """Parse a value that is a text into the kind that was meant.

    Every value on the command line is a text, and so are some words in YAML.
    """
    kinds = _kinds(hint)
    names = _names(hint)
    if bool in kinds and truth(value) is not None:
        return truth(value)
    # YAML reads a bare `off` or `no` as false.
    if names and str(value).lower() == "false":
        return next((name for name in _OFF if name in names), value)
    if kinds & {int, float} and isinstance(value, int | float | str):
        return _number(value, whole=float not in kinds)
    if dict in kinds:
        is_text = isinstance(value, str) and not value.lstrip().startswith("{")
        if is_text and _takes_names(hint):
            return value
        return _mapping(key, value, or_text=str in kinds and not _takes_names(hint))
    if str in kinds and not isinstance(value, dict | list | bool):
        return str(value)
    return value


def _number(value: int | float | str, *, whole: bool) -> Any:
    """Return the number in a text, such as 1e3, which YAML reads as a text.

    A text that is no number stays a text. `whole`: make 3.0 the integer 3.
    """
    number: Any = value
    if isinstance(value, str):
        number = _parsed_number(value)
    if whole and isinstance(number, float) and number.is_integer():
        return int(number)
    return number


def _parsed_number(text: str) -> int | float | str:
    """Return the integer or the number that a text is, else the text."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def _entries(key: str, value: object, entry_hint: object) -> list[Any]:
    """Return the entries of a list that may be written as `a b`, `a,b` or `[a, b]`.

    Where an entry may be a mapping, a mapping of several names is one for each. Raises `UserError`.
    """
    words = value if isinstance(value, list | tuple) else [value]
    try:
        if takes(entry_hint, dict):
            return [entry for word in words for entry in _entries_of(key, word)]
        all_texts = all(isinstance(word, str) for word in words)
        entries = split_list(words) if all_texts else list(words)
    except ValueError as error:
        raise UserError(f"{key}: {_in_words(value)} {error}; write a,b or [a,b]") from None
    if any(isinstance(entry, dict | list) or entry is None or entry == "" for entry in entries):
        raise UserError(f"{key}: {_in_words(value)} is not a list of words, such as [a,b]")
    return entries


def _entries_of(key: str, word: object) -> list[Any]:
    """Return the entries that a word stands for: names, or mappings with one name each."""
    value = word
    if isinstance(word, str):
        start = word.lstrip()[:1]
        if start == "{":
            value = _mapping(key, word, or_text=False)
        elif start == "[":
            value = yaml_value(word)
    if isinstance(value, str):
        value = split_list([value])
    if isinstance(value, Mapping):
        return [{name: options} for name, options in value.items()]
    entries: list[Any] = []
    items = value if isinstance(value, list) else [value]
    for item in items:
        if isinstance(item, Mapping):
            entries += _entries_of(key, item)
        else:
            entries.append(item)
    return entries


def _mapping(key: str, value: object, *, or_text: bool) -> Any:
    """Read a mapping from JSON, from YAML's `{a: 1}`, or from the path of a JSON file.

    `or_text`: the key takes texts too, so a text is checked and stays a text, of JSON. Raises
    `UserError`.
    """
    if isinstance(value, Mapping):
        return value
    text = value.strip() if isinstance(value, str) else ""
    file = None
    if key in OR_FILE and text and not text.startswith("{"):
        file = Path(text)
    try:
        content = read_json(file.read_bytes() if file else text)
    except GivenTwiceError as error:
        raise UserError(f"{key}: {error}; keep the right one") from None
    except (OSError, ValueError, RecursionError):
        content = None
        if file is None:
            content = flow_mapping(text)
        if content is not None:
            value = json.dumps(content)
    if not isinstance(content, dict):
        file_or = "a JSON file with a mapping in it, nor " if file else ""
        mapping = "a mapping, such as '{a: 1}' on the command line"
        raise UserError(f"{key}: {_in_words(value)} is not {file_or}{mapping}")
    check_finite(key, content)
    return value if or_text else content


def _refuse(key: str, value: object, hint: object) -> NoReturn:
    """Raise the `UserError` for a value that is not what its key takes."""
    expected = " or ".join(map(_described, _arms(hint)))
    raise UserError(
        f"{key}: {_in_words(value)} is not {expected}{did_you_mean(str(value), _names(hint))}"
    )


def _described(arm: Any) -> str:
    """Return the member of a union in words, such as `a number above 0 and at most 1`."""
    if get_origin(arm) is Literal:
        names = [str(name) for name in get_args(arm)]
        if len(names) > _MANY:
            return f"one of the {len(names)} names such as {', '.join(names[:3])}"
        return f"one of {', '.join(names)}" if len(names) > 1 else names[0]
    if get_origin(arm) is Annotated:
        kind, limits = get_args(arm)
        if limits.description:
            return str(limits.description)
        bounds: list[str] = []
        for bound in limits.metadata:
            for name, word in _BOUNDS:
                if hasattr(bound, name):
                    bounds.append(f"{word} {getattr(bound, name)}")
        return f"{_KINDS[kind]} {' and '.join(bounds)}"
    return _KINDS.get(_kind(arm), "an object that only Python can give")


def _in_words(value: object) -> str:
    """Return the value as a person writes it, in one line.

    None is null, numbers stand without quotes, and other texts with them.
    """
    if isinstance(value, str) and not isinstance(_parsed_number(value), str):
        return shown(value.strip(), _SHOWN).strip("'")
    return shown(value, _SHOWN)
