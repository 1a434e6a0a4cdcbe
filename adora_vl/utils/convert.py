"""The conversion of what a user wrote to the type of its key or option.

A value that does not fit is refused in one line: `key: VALUE is not WHAT IT SHOULD BE`. A key takes
what its annotation says. The options of a block, a method, a reward or an extension are the fields
of a dataclass, whose annotations have their ranges. NaN and infinity are refused everywhere.
"""

import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import pydantic
from pydantic import ConfigDict, TypeAdapter, ValidationError

from adora_vl.utils.cli import (
    DuplicateKeyError,
    flow_mapping,
    is_null,
    parse_bool,
    read_json,
    short_repr,
    split_list,
    yaml_value,
)
from adora_vl.utils.errors import UserError, did_you_mean

Name = Annotated[str, pydantic.Field(pattern=r"\S", description="a name")]

_literal: Any = Literal  # mypy takes a Literal only of names that are written out
_WORDS_FOR_OFF = ("off", "no", "none")  # a bare `off` or `no` in YAML is false
# The bounds of annotated-types by their attribute, and the words for them in an error line.
_WORDS_BY_BOUND = {"gt": "above", "ge": "of at least", "lt": "below", "le": "at most"}
_WORDS_BY_TYPE = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "a mapping",
    NoneType: "null",
}
MAPPING_IN_WORDS = "a mapping, such as '{a: 1}' on the command line"
_MAX_LISTED_WORDS = 12  # the most words of a `Literal` that an error line lists
_MAX_SHOWN_CHARACTERS = 80  # the most characters of a value in an error line


def convert(key: str, value: object, hint: object) -> Any:
    """Convert a value from the command line, a YAML file or Python to the type of its key.

    Examples of a value, the annotation, and the result:

        "3"       int               3
        "null"    float | None      None
        "a,b"     list[str]         ["a", "b"]
        "1,2"     tuple[int, int]   (1, 2)

    Args:
        key: Name of the config key or option, for the errors.
        value: What the user wrote. On the command line it is a text, or a list of texts.
        hint: Annotation of the key, such as `list[str] | None`. A dataclass in it means a mapping
            of options.

    Raises `UserError` for a value that the annotation does not allow.
    """
    allowed_types = _member_types(hint)
    # A word of the command line may come as a list with this one text.
    single_value = value
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        single_value = value[0]
    if means_null(single_value, hint):
        if NoneType not in allowed_types:
            _refuse_value(key, None, hint)
        return None
    options_class = next((member for member in allowed_types if is_dataclass(member)), None)
    if options_class is not None:
        return _convert_options(key, single_value, options_class)
    if tuple in allowed_types:
        return _convert_tuple(key, value, hint)
    # A key may take either true/false or a list: `adora_stock_step: true` is not the list [true].
    if bool in allowed_types and list in allowed_types:
        truth_value = parse_bool(single_value)
        if truth_value is not None:
            return truth_value
    # A key that takes a text or a list keeps a single text, such as a regular expression of PEFT's.
    stays_text = str in allowed_types and isinstance(value, str)
    if list in allowed_types and not stays_text:
        entry_hint = _entry_hint(hint)
        entries = _list_entries(key, value, entry_hint)
        return [convert(key, entry, entry_hint) for entry in entries]
    return _convert_single(key, value, hint)


def _convert_single(key: str, value: object, hint: object) -> Any:
    """Convert a value that is neither a list nor a dataclass of options, and validate it.

    A text is parsed first, and pydantic validates the result against the annotation `hint`. Raises
    `UserError`.
    """
    plain_value = value.value if isinstance(value, Enum) else value
    parsed = _parse_text(key, plain_value, hint)
    try:
        converted = _validator(hint).validate_python(parsed, strict=True)
    except ValidationError:
        _refuse_value(key, value, hint)
    # pydantic lets NaN and infinity pass, also inside of a mapping
    check_finite(key, converted)
    return converted


def means_null(value: object, hint: object) -> bool:
    """Return whether a value that a user wrote means null, for a key with the annotation `hint`.

    The words `null` and `~` always do (`is_null`). The word `none` does for a key that may be null,
    unless `none` is one of the words that the key takes. Single keys differ from that by
    `KEYS_WITH_WORD_NONE` and `NULL_VALUE_BY_KEY` in `config/trl_ranges.py`.
    """
    if is_null(value):
        return True
    if "none" in _literal_words(hint) or not allows_type(hint, NoneType):
        return False
    return isinstance(value, str) and value.strip().lower() == "none"


def _convert_options(key: str, value: object, options_class: Any) -> Any:
    """Build the dataclass of a key that takes a mapping of options, with each option converted.

    `value`: what the user wrote, in one of the forms that `_option_values` reads. Raises
    `UserError` for an unknown option, a missing option, and a wrong value.
    """
    hints = annotation_by_field(options_class)
    options = _option_values(key, value, options_class)
    refuse_unknown_options(key, options, hints)
    missing: list[str] = []
    for option_field in fields(options_class):
        has_value = option_field.name in options or field_default(option_field) is not MISSING
        if not has_value:
            missing.append(option_field.name)
    if missing:
        raise UserError(f"{key}: {value_in_words(options)} lacks {', '.join(missing)}")
    # The value of one option, the class's shorthand, may stand for the whole mapping. An error in
    # it names the key alone, since the user may not have written the option's name.
    shorthand = getattr(options_class, "shorthand", None)
    has_shorthand_only = list(options) == [shorthand]
    kwargs: dict[str, Any] = {}
    for name, option in options.items():
        option_key = key if has_shorthand_only else f"{key}.{name}"
        kwargs[name] = convert(option_key, option, hints[name])
    try:
        return options_class(**kwargs)
    except ValueError as error:
        # The class checks its options, and begins the text of its error with the option's name.
        raise UserError(f"{key}.{error}") from error


def refuse_unknown_options(key: str, options: Iterable[str], names: Collection[str]) -> None:
    """Raise `UserError` for an option that does not exist.

    `key`: the key or entry that has the options, for the error. `names`: all options that exist.
    """
    for option in options:
        if option not in names:
            listed_names = ", ".join(names) or "none"
            suggestion = did_you_mean(str(option), names)
            raise UserError(f"{key}: unknown option {option!r}, it has {listed_names}{suggestion}")


def options_to_dict(key: str, options: object) -> dict[str, Any]:
    """Return the options that a user wrote for an entry, such as a method, as a new mapping.

    None means no options: that is what YAML reads where nothing follows the name.

    `key`: the entry, for the error. Raises `UserError` for options that are no mapping.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise UserError(f"{key}: {value_in_words(options)} is not a mapping of its options")
    return {str(name): value for name, value in options.items()}


def _option_values(key: str, value: object, options_class: Any) -> Mapping[str, Any]:
    """Return the options that a value stands for, by their names, not yet converted.

    The forms of a value, with the options a and b, of which a is the class's `shorthand`:

        options_class(a=1, b=2)     {"a": 1, "b": 2}
        "{a: 1, b: 2}"              {"a": 1, "b": 2}
        1                           {"a": 1}
        {"a": 1, "b": 2}            {"a": 1, "b": 2}

    Raises `UserError` for anything else.
    """
    hints = annotation_by_field(options_class)
    shorthand = getattr(options_class, "shorthand", None)
    options: object = value
    if isinstance(value, options_class):
        options = {name: getattr(value, name) for name in hints}
    elif isinstance(value, str) and value.strip().startswith("{"):
        options = _read_mapping(key, value)
    elif shorthand is not None and not isinstance(value, Mapping):
        options = {shorthand: value}
    if not isinstance(options, Mapping):
        raise UserError(
            f"{key}: {value_in_words(value)} is not a mapping of options, which are "
            f"{', '.join(hints)}"
        )
    return options


def field_default(field: Field[Any]) -> Any:
    """Return the default of a dataclass field; `dataclasses.MISSING` if it has none."""
    if field.default_factory is MISSING:
        return field.default
    return field.default_factory()


def _convert_tuple(key: str, value: object, hint: object) -> Any:
    """Convert a list that a user wrote to a tuple, as the key's annotation asks.

    For example, `0.1,0.2` with `tuple[float, float]` gives (0.1, 0.2).

    `hint`: an annotation with `tuple[X, X]` for a fixed length, or `tuple[X, ...]` for any. All
    entries have the type X. Raises `UserError` for another length.
    """
    tuple_hint = next(member for member in _union_members(hint) if _plain_type(member) is tuple)
    arguments = get_args(tuple_hint)
    entry_hint = arguments[0]
    takes_any_length = arguments[-1] is ...
    entries = _list_entries(key, value, entry_hint)
    if not takes_any_length and len(entries) != len(arguments):
        raise UserError(f"{key}: {value_in_words(value)} is not a list of {len(arguments)}")
    return tuple(convert(key, entry, entry_hint) for entry in entries)


@cache
def annotation_by_field(dataclass: Any) -> dict[str, Any]:
    """Return the annotation of every field of a dataclass by the field's name.

    Where a field takes only certain words, its annotation is a `Literal` of them. Dataclasses of
    this project have a `Literal` already. Transformers lists the words as an `Enum`, or as
    `choices` in the field's metadata.
    """
    hints = get_type_hints(dataclass, include_extras=True)
    annotations: dict[str, Any] = {}
    for option in fields(dataclass):
        choices = option.metadata.get("choices", ())
        annotations[option.name] = _as_literal(hints[option.name], choices)
    return annotations


@cache
def _validator(hint: Any) -> TypeAdapter[Any]:
    """Return pydantic's validator for an annotation."""
    return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))


def check_finite(key: str, value: object) -> None:
    """Raise `UserError` if a value is NaN or infinity, or contains one in a mapping or list.

    JSON and YAML can contain both. `key`: where the value stands, for the error.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            check_finite(f"{key}: {name}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_finite(f"{key}: {index}", item)
    elif isinstance(value, float | int):
        # False for NaN too. `math.isfinite` would fail on an integer that is no float.
        is_finite = abs(value) <= sys.float_info.max
        if not is_finite:
            raise UserError(f"{key}: {value_in_words(value)} is not a finite number")


def _as_literal(hint: object, choices: Sequence[str] = ()) -> Any:
    """Return a `Literal` of the words that an annotation allows, or `hint` where it lists none.

    The words are `choices`, or else the values of an `Enum` in the annotation. For example, `str`
    with the choices ("a", "b") gives `Literal["a", "b"]`.
    """
    members = _union_members(hint)
    words = list(choices)
    if not words:
        for member in members:
            if isinstance(member, type) and issubclass(member, Enum):
                words += [word.value for word in member]
    if not words:
        return hint
    literal: Any = _literal[tuple(words)]
    return literal | None if NoneType in members else literal


def _union_members(hint: object) -> tuple[Any, ...]:
    """Return the members of a union, or `hint` alone where it is none."""
    if get_origin(hint) in (Union, UnionType):
        return get_args(hint)
    return (hint,)


def allows_type(hint: object, value_type: type) -> bool:
    """Return whether a key with this annotation takes values of this type."""
    return value_type in _member_types(hint)


def _member_types(hint: object) -> set[Any]:
    """Return the types of an annotation's union members, without their bounds and arguments."""
    return {_plain_type(member) for member in _union_members(hint)}


def _plain_type(hint: object) -> Any:
    """Return the type of an annotation without its bounds and arguments: `list` of `list[str]`."""
    unbounded = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return get_origin(unbounded) or unbounded


def _literal_words(hint: object) -> list[str]:
    """Return the words of the `Literal` in an annotation, without its true, false and numbers."""
    words: list[str] = []
    for member in _union_members(hint):
        if get_origin(member) is Literal:
            words += [word for word in get_args(member) if isinstance(word, str)]
    return words


def _entry_hint(hint: object) -> Any:
    """Return the annotation of the entries of the list in an annotation."""
    list_hint = next(member for member in _union_members(hint) if _plain_type(member) is list)
    return _as_literal(get_args(list_hint)[0])


def _parse_text(key: str, value: object, hint: object) -> Any:
    """Parse a text into the type that the annotation of its key asks for, if it has that form.

    Every value on the command line is a text, and so are some words in YAML. A value of another
    form is returned as it is, and the validation that follows refuses it. Examples:

        "yes"       bool             True
        False       Literal["off"]   "off"
        "1e3"       int              1000
        "{a: 1}"    dict             {"a": 1}
        3           str              "3"
        "x"         int              "x", which the validation refuses
    """
    allowed_types = _member_types(hint)
    words = _literal_words(hint)
    if bool in allowed_types:
        truth_value = parse_bool(value)
        if truth_value is not None:
            return truth_value
    # YAML reads a bare `off` or `no` as false, so false means this word if the key takes it.
    if words and str(value).lower() == "false":
        allowed_words_for_off = [word for word in _WORDS_FOR_OFF if word in words]
        return allowed_words_for_off[0] if allowed_words_for_off else value
    if allowed_types & {int, float} and isinstance(value, int | float | str):
        return _parse_number(value, as_integer=float not in allowed_types)
    if dict in allowed_types:
        # A key of this project may take a `Name` or a mapping. A key of a library may take a text
        # or a mapping, and then wants the mapping as a text.
        takes_name = Name in _union_members(hint)
        is_mapping_text = isinstance(value, str) and value.lstrip().startswith("{")
        if takes_name and isinstance(value, str) and not is_mapping_text:
            return value
        return _read_mapping(key, value, as_text=str in allowed_types and not takes_name)
    if str in allowed_types and not isinstance(value, dict | list | bool):
        return str(value)
    return value


def _parse_number(value: int | float | str, *, as_integer: bool) -> int | float | str:
    """Return the number that a text spells, such as 1e3, which YAML reads as a text.

    A text that spells no number is returned as it is. `as_integer`: return 3.0 as the integer 3.
    """
    number: int | float | str = value
    if isinstance(value, str):
        number = _number_or_text(value)
    if as_integer and isinstance(number, float) and number.is_integer():
        return int(number)
    return number


def _number_or_text(text: str) -> int | float | str:
    """Return the integer that a text spells, or else the float, or else the text."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def _list_entries(key: str, value: object, entry_hint: object) -> list[Any]:
    """Return the entries of a list that may be written as `a b`, `a,b` or `[a, b]`.

    Where the entries may be mappings, a mapping with several names becomes one entry for each name.
    The entries are not converted yet. Raises `UserError` for what is no such list.
    """
    parts = value if isinstance(value, list | tuple) else [value]
    try:
        if allows_type(entry_hint, dict):
            return [entry for part in parts for entry in _names_and_mappings(key, part)]
        all_are_texts = all(isinstance(part, str) for part in parts)
        entries = split_list(parts) if all_are_texts else list(parts)
    except ValueError as error:
        raise UserError(f"{key}: {value_in_words(value)} {error}; write a,b or [a,b]") from None
    for entry in entries:
        is_word = entry is not None and entry != "" and not isinstance(entry, dict | list)
        if not is_word:
            raise UserError(f"{key}: {value_in_words(value)} is not a list of words, such as [a,b]")
    return entries


def _names_and_mappings(key: str, value: object) -> list[Any]:
    """Return the list entries that a value stands for: names, and mappings with one name each.

    The text `[a, {b: 1, c: 2}]`, for example, stands for a, {b: 1} and {c: 2}: a list of methods,
    of which b and c have options. `key`: where the value stands, for errors.
    """
    if isinstance(value, str):
        first_character = value.lstrip()[:1]
        if first_character == "{":
            value = _read_mapping(key, value)
        elif first_character == "[":
            value = yaml_value(value)
    if isinstance(value, str):
        # names such as `a,b`
        value = split_list([value])
    if isinstance(value, Mapping):
        return [{name: options} for name, options in value.items()]
    entries: list[Any] = []
    items = value if isinstance(value, list) else [value]
    for item in items:
        if isinstance(item, Mapping):
            entries += _names_and_mappings(key, item)
        else:
            entries.append(item)
    return entries


def _read_mapping(key: str, value: object, *, as_text: bool = False) -> Any:
    """Read a mapping from a text, JSON or YAML's `{a: 1}`.

    A value that is a mapping already is returned as it is.

    Args:
        key: where the value stands, for errors.
        value: what the user wrote.
        as_text: whether to return a JSON text of the mapping, and not the mapping itself.
            Transformers and TRL want it so for some of their keys.

    Raises:
        UserError: the text is no mapping, or has a key twice.
    """
    if isinstance(value, Mapping):
        return value
    text = value.strip() if isinstance(value, str) else ""
    # the same mapping as JSON, which the text is already unless it is YAML
    json_text = value
    try:
        content = read_json(text)
    except DuplicateKeyError as error:
        raise UserError(f"{key}: {error}; keep the right one") from None
    except (ValueError, RecursionError):
        # The text is no JSON. It may be YAML, where names need no quotes.
        content = flow_mapping(text)
        if content is not None:
            json_text = json.dumps(content)
    if not isinstance(content, dict):
        raise UserError(f"{key}: {value_in_words(value)} is not {MAPPING_IN_WORDS}")
    check_finite(key, content)
    return json_text if as_text else content


def _refuse_value(key: str, value: object, hint: object) -> NoReturn:
    """Raise the `UserError` for a value that the annotation `hint` of its key does not allow."""
    expected = " or ".join(map(_expected_in_words, _union_members(hint)))
    suggestion = did_you_mean(str(value), _literal_words(hint))
    raise UserError(f"{key}: {value_in_words(value)} is not {expected}{suggestion}")


def _expected_in_words(hint: object) -> str:
    """Return an annotation in words, for an error line.

    Examples:

        Literal["a", "b"]                         one of a, b
        Annotated[float, Field(gt=0, le=1)]       a number above 0 and at most 1
        int                                       a whole number

    `hint`: an annotation that is no union.
    """
    if get_origin(hint) is Literal:
        words = [str(word) for word in get_args(hint)]
        if len(words) > _MAX_LISTED_WORDS:
            return f"one of the {len(words)} names such as {', '.join(words[:3])}"
        return f"one of {', '.join(words)}" if len(words) > 1 else words[0]
    if get_origin(hint) is Annotated:
        bounded_type, field_info = get_args(hint)
        if field_info.description:
            return str(field_info.description)
        bounds: list[str] = []
        # such as `annotated_types.Gt(gt=0)`
        for bound in field_info.metadata:
            for attribute, words_before in _WORDS_BY_BOUND.items():
                if hasattr(bound, attribute):
                    bounds.append(f"{words_before} {getattr(bound, attribute)}")
        return f"{_WORDS_BY_TYPE[bounded_type]} {' and '.join(bounds)}"
    return _WORDS_BY_TYPE.get(_plain_type(hint), "an object that only Python can give")


def value_in_words(value: object) -> str:
    """Return a value for an error line.

    None becomes `null`, a text becomes `'text'`, and a number has no quotation marks. That is so
    even if the number is a text, as every value of the command line is.
    """
    if isinstance(value, str) and not isinstance(_number_or_text(value), str):
        return short_repr(value.strip(), _MAX_SHOWN_CHARACTERS).strip("'")
    return short_repr(value, _MAX_SHOWN_CHARACTERS)
