"""Reads the tool calls in a turn, and writes tools' schemas, in the Hermes form that Qwen knows.

A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in the turn of the policy. The
answer is a turn of the user with `<tool_response>...</tool_response>`. A wrong call is answered by
one line that says what is wrong.
"""

import inspect
import json
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, NoReturn, get_type_hints

import numpy as np
import torch
from transformers.utils import get_json_schema

from adora_vl.utils.call_guards import (
    backstop,
    deadline,
    ending_forked_children,
    restoring_working_directory,
)
from adora_vl.utils.cli import refuse_repeated_keys
from adora_vl.utils.errors import UserError, describe_error
from adora_vl.utils.seeding import hash_to_int, keeping_random_state

HIDDEN_PARAMETERS = ("images", "view")  # the run passes these; no model is told of them
_MAX_CALL_CHARS = 4000
_MAX_ARGUMENT_NESTING = 8  # of lists and objects in the arguments of a call
_MAX_ERROR_CHARS = 200  # of an error line for the model
_CALL_PATTERN = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FOLDER_PATH_PATTERN = re.compile(r"(?<![\w<])(?:~|\.{1,2})?/(?:[\w.~+-]+/)*")
_PYTHON_TYPES_BY_JSON_TYPE: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class CallError(Exception):
    """A call of a tool is wrong; the text tells the model what to change."""


class ToolCall(NamedTuple):
    """A call that a model has written."""

    name: str  # of the tool
    arguments: dict[str, Any]


def build_tool_schema(
    entry: str, function: Callable[..., Any], text_by_placeholder: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the JSON schema of a tool, which tells the model how to call it.

    Transformers makes it from type hints and a Google docstring. The parameters `images` and `view`
    (`HIDDEN_PARAMETERS`) are left out, since the run itself passes them.

    Args:
        entry: the tool's entry in the key `tools`, for messages.
        function: the tool.
        text_by_placeholder: texts for names in braces in the docstring, such as `{points}`.

    Raises `UserError` for a function without a schema: an async one, one without type hints or a
    docstring for each parameter, or one with `*` or `**`.
    """
    if inspect.iscoroutinefunction(function):
        raise UserError(f"tools: {entry!r} is async; write a plain function")
    try:
        hints = get_type_hints(function)
        signature = inspect.signature(function)
        parameters = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.name not in HIDDEN_PARAMETERS
        ]
        signature = signature.replace(parameters=parameters)
        schema: dict[str, Any] = get_json_schema(_function_for_schema(function, signature, hints))
    except Exception as error:  # Transformers raises errors of its own for an incomplete docstring
        raise UserError(
            f"tools: {entry!r} needs type hints and a docstring with `Args:` that says what each "
            f"of its parameters is ({describe_error(error)[:_MAX_ERROR_CHARS]})"
        ) from error
    for parameter in parameters:
        # A model gives every argument by name.
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(
                f"tools: {entry!r} has to name each of its parameters; leave out * and **"
            )
    return _fill_placeholders(schema, text_by_placeholder or {})


def _function_for_schema(
    function: Callable[..., Any], signature: inspect.Signature, hints: Mapping[str, Any]
) -> Callable[[], None]:
    """Return an empty function with the name and docstring of a tool, and another signature.

    Transformers makes the schema of a tool from it. It cannot make it from the tool itself, which
    may have parameters that the model must not see. The function is never called.

    Args:
        function: the tool.
        signature: the tool's signature without hidden parameters.
        hints: the type hints of the tool by parameter.
    """

    def function_for_schema() -> None: ...

    assert isinstance(function_for_schema, FunctionType)
    function_for_schema.__name__ = function.__name__
    function_for_schema.__doc__ = inspect.getdoc(function)
    function_for_schema.__signature__ = signature  # type: ignore[attr-defined]
    function_for_schema.__annotations__ = {
        name: hints[name] for name in signature.parameters if name in hints
    }
    return function_for_schema


def _fill_placeholders(
    schema: dict[str, Any], text_by_placeholder: Mapping[str, str]
) -> dict[str, Any]:
    """Return a tool's schema with the placeholders in its texts replaced.

    For example, with `text_by_placeholder` `{"points": "in its pixels"}` the text "Left side,
    {points}." becomes "Left side, in its pixels.".
    """
    schema_text = json.dumps(schema)
    for placeholder, text in text_by_placeholder.items():
        escaped_text = json.dumps(text).removeprefix('"').removesuffix('"')
        schema_text = schema_text.replace(f"{{{placeholder}}}", escaped_text)
    filled_schema: dict[str, Any] = json.loads(schema_text)
    return filled_schema


def find_calls(text: str) -> list[str]:
    """Return the text of each call in a turn, between `<tool_call>` and `</tool_call>`.

    A call may lack its closing mark. For example, `so <tool_call>{1}</tool_call> and
    <tool_call>{2}` has the calls `{1}` and `{2}`.
    """
    return [match[1].strip() for match in _CALL_PATTERN.finditer(text)]


def remove_calls(text: str) -> str:
    """Return the text of a turn without its calls.

    For example, `so <tool_call>{1}</tool_call> it is` becomes `so  it is`.
    """
    return _CALL_PATTERN.sub("", text).strip()


def read_call(call_text: str) -> ToolCall:
    """Read the JSON text of a call, such as `{"name": "add", "arguments": {"a": 1}}`.

    Raises `CallError` if it is no call of a tool.
    """
    if len(call_text) > _MAX_CALL_CHARS:
        raise CallError(f"the call has {len(call_text)} characters, at most {_MAX_CALL_CHARS}")
    try:
        call = json.loads(
            call_text,
            object_pairs_hook=refuse_repeated_keys,
            parse_constant=_refuse_constant,
            parse_float=_parse_finite_float,
        )
    except RecursionError:
        raise CallError("the call is nested too deep") from None
    except ValueError as error:
        _, _, fault = describe_error(error).partition(": ")  # behind the name of the error's class
        raise CallError(f"the call is no JSON ({fault})") from None
    # A call has these two keys and no others.
    is_call = isinstance(call, dict) and isinstance(call.get("name"), str)
    if not is_call or set(call) - {"name", "arguments"}:
        raise CallError('a call is {"name": NAME, "arguments": {...}}')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        raise CallError("arguments is no object, such as {...}")
    if _is_nested_deeper(arguments, _MAX_ARGUMENT_NESTING):
        raise CallError("the call is nested too deep")
    return ToolCall(name=replace_surrogates(call["name"]), arguments=arguments)


def _refuse_constant(word: str) -> NoReturn:
    """Raise `ValueError` for `NaN` and infinities, which JSON lacks but Python's reader takes."""
    raise ValueError(f"{word} is no number")


def _parse_finite_float(digits: str) -> float:
    """Return the float of a number in JSON. Raises `ValueError` for an overflow, such as 1e999."""
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("a number without an end is no number")
    return value


def _is_nested_deeper(value: object, levels: int) -> bool:
    """Return whether a JSON value has lists and objects nested more than `levels` deep.

    For example, `{"a": [1]}` is nested deeper than 1 level and not deeper than 2. The recursion
    stops at `levels`, since a model may nest its lists too deep for Python.
    """
    items: Iterable[Any]
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, list):
        items = value
    else:
        return False
    return levels == 0 or any(_is_nested_deeper(item, levels - 1) for item in items)


def check_arguments(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Check the arguments of a call against its tool's schema, and return them in its types.

    For example, `{"n": 3.0}` becomes `{"n": 3}` if the schema has an integer `n`. Raises
    `CallError` for an unknown or missing argument and for a wrong type.
    """
    parameters = schema["function"]["parameters"]
    properties: Mapping[str, Any] = parameters["properties"]
    for name in arguments:
        if name not in properties:
            raise CallError(f"no argument {name!r}; there are {', '.join(properties) or 'none'}")
    for name in parameters.get("required", ()):
        if name not in arguments:
            raise CallError(f"the argument {name!r} is missing")
    return {
        name: _check_argument(name, value, properties[name]) for name, value in arguments.items()
    }


def _check_argument(name: str, value: object, schema: Mapping[str, Any]) -> object:
    """Check one argument of a call, and return its value in the type of its schema.

    `schema`: the JSON schema of this argument alone. Raises `CallError` for a wrong value.
    """
    if value is None and schema.get("nullable"):
        return None
    type_or_types = schema.get("type", ())
    json_types = [type_or_types] if isinstance(type_or_types, str) else [*type_or_types]
    if "integer" in json_types and isinstance(value, float) and value.is_integer():
        value = int(value)
    any_python_type = (object,)  # for a type name that JSON schema does not have
    has_a_right_type = any(
        isinstance(value, _PYTHON_TYPES_BY_JSON_TYPE.get(json_type, any_python_type))
        for json_type in json_types
    )
    # For Python `True` is an integer too. For a tool it is not.
    is_unwanted_boolean = isinstance(value, bool) and "boolean" not in json_types
    if json_types and (not has_a_right_type or is_unwanted_boolean):
        raise CallError(f"{name} is no {' or '.join(json_types)}")
    if "number" in json_types and isinstance(value, int) and not _fits_a_float(value):
        raise CallError(f"{name} is too large a number")
    if schema.get("enum") and value not in schema["enum"]:
        raise CallError(f"{name} is not one of {', '.join(map(str, schema['enum']))}")
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        return [_check_argument(name, item, schema["items"]) for item in value]
    return value


def _fits_a_float(value: int) -> bool:
    """Return whether an integer is small enough for a float, which a tool may compute with."""
    try:
        float(value)
    except OverflowError:
        return False
    return True


def error_line(reason: str) -> str:
    """Return the line that tells a model of an error, without the folders of this machine.

    For example, the reason "no file /home/me/a.png" gives "Error: no file a.png".
    """
    without_folders = _FOLDER_PATH_PATTERN.sub("", reason)
    one_line = " ".join(without_folders.split())
    return replace_surrogates(f"Error: {one_line}")[:_MAX_ERROR_CHARS]


def replace_surrogates(text: str) -> str:
    """Return a text that a tokenizer accepts, which is one that UTF-8 can encode.

    JSON may contain half of a surrogate pair, such as `\\ud83d`, which is no character. It becomes
    a question mark.
    """
    # `str.encode` is called on the class, since a user's subclass of str may override it.
    return str.encode(text, "utf-8", "replace").decode()


@contextmanager
def run_limited(label: str, seconds: float, seed: str) -> Iterator[None]:
    """Limit the user's code inside the block in time, and isolate it from the run's random states.

    Inside the block the random states of `random`, NumPy and torch are seeded by `seed`. After it
    they are as before, and so is the working folder. A process that the code forks is ended with
    the block, since it would go on as a second run.

    Args:
        label: names the code in messages.
        seconds: the time limit.
        seed: a text that seeds the random numbers.

    Raises `OverdueError` in the block when the time is over.
    """
    with keeping_random_state():
        seed_number = hash_to_int(f"tool/{seed}")  # below 2^64
        random.seed(seed_number)
        np.random.seed(seed_number % 2**32)  # NumPy takes 32 bits
        torch.manual_seed(seed_number >> 1)  # torch takes 63 bits
        # `deadline` raises `OverdueError` in Python code. Compiled code cannot be interrupted, so a
        # thread of `backstop` ends the whole process some time later. `ending_forked_children` ends
        # forked processes. It is innermost, so that they never leave `backstop`, which would wait
        # for its thread: a forked process does not have the threads of its parent.
        with (
            restoring_working_directory(Path.cwd()),
            backstop(seconds),
            deadline(seconds),
            ending_forked_children(label),
        ):
            yield
