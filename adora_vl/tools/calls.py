"""How a call is written, read and answered, in Hermes' form as Qwen's models know it.

A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in the policy's turn; the
answer is a turn of the user's with `<tool_response>...</tool_response>`. What is wrong with a call
is its answer, in one line.
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
from typing import Any, get_type_hints

import numpy as np
import torch
from transformers.utils import get_json_schema

from adora_vl.utils.cli import each_once
from adora_vl.utils.errors import UserError, in_one_line
from adora_vl.utils.own_files import back_in, backstop, deadline, in_one_process
from adora_vl.utils.seeding import kept_random_state, number_at

HIDDEN = ("images", "view")  # parameters that the model knows nothing of
# characters and nesting of a call
_MOST = 4000
_DEPTH = 8
_LINE = 200  # characters of an error
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_PATH = re.compile(r"(?<![\w<])(?:~|\.{1,2})?/(?:[\w.~+-]+/)*")
_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class CallError(Exception):
    """What is wrong with a call, for the model."""


def schema_of(
    entry: str, function: Callable[..., Any], words: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What a model is told of a tool, as Transformers makes it of type hints and a Google
    docstring, without `HIDDEN`.

    `words`: in the docstring's braces. Raises `UserError` for a function of which none can be made.
    """
    if inspect.iscoroutinefunction(function):
        raise UserError(f"tools: {entry!r} is async; write a plain function")
    try:
        hints = get_type_hints(function)
        signature = inspect.signature(function)
        shown = [one for one in signature.parameters.values() if one.name not in HIDDEN]

        def told() -> None: ...

        assert isinstance(told, FunctionType)
        told.__name__ = function.__name__
        told.__doc__ = inspect.getdoc(function)
        told.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        told.__annotations__ = {one.name: hints[one.name] for one in shown if one.name in hints}
        made: dict[str, Any] = get_json_schema(told)
    except Exception as error:  # Transformers has classes of its own for what a docstring lacks
        raise UserError(
            f"tools: {entry!r} needs type hints and a docstring with `Args:` that says what each "
            f"of its parameters is ({in_one_line(error)[:_LINE]})"
        ) from error
    kinds = {one.kind for one in shown}
    if kinds & {
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
        inspect.Parameter.POSITIONAL_ONLY,
    }:
        raise UserError(f"tools: {entry!r} has to name each of its parameters; leave out * and **")
    text = json.dumps(made)
    for name, word in (words or {}).items():
        text = text.replace(f"{{{name}}}", json.dumps(word)[1:-1])
    filled: dict[str, Any] = json.loads(text)
    return filled


def calls_in(text: str) -> list[str]:
    """What stands between the marks of each call of a turn; the last one may have no end."""
    return [found[1].strip() for found in _CALL.finditer(text)]


def read_call(written: str) -> tuple[str, dict[str, Any]]:
    """Name and arguments. Raises `CallError`."""
    if len(written) > _MOST:
        raise CallError(f"the call has {len(written)} characters, at most {_MOST}")
    try:
        call = json.loads(
            written, object_pairs_hook=each_once, parse_constant=_no_number, parse_float=_finite
        )
    except RecursionError:
        raise CallError("the call is nested too deep") from None
    except ValueError as error:
        raise CallError(f"the call is no JSON ({in_one_line(error).partition(': ')[2]})") from None
    if (
        not isinstance(call, dict)
        or not isinstance(call.get("name"), str)
        or set(call) - {"name", "arguments"}
    ):
        raise CallError('a call is {"name": NAME, "arguments": {...}}')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        raise CallError("arguments is no object, such as {...}")
    if _is_deeper(arguments, _DEPTH):
        raise CallError("the call is nested too deep")
    return clean(call["name"]), arguments


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no number")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _no_number("a number without an end")


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects stand in one another on more than so many levels.

    It looks no further down than that, however deep a model has nested them.
    """
    inside: Iterable[Any] = ()
    if isinstance(value, dict):
        inside = value.values()
    elif isinstance(value, list):
        inside = value
    else:
        return False
    return levels == 0 or any(_is_deeper(one, levels - 1) for one in inside)


def checked(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as the schema has them; whole numbers may be written as 3.0.

    Raises `CallError`.
    """
    wanted = schema["function"]["parameters"]
    known: Mapping[str, Any] = wanted["properties"]
    for name in arguments:
        if name not in known:
            raise CallError(f"no argument {name!r}; there are {', '.join(known) or 'none'}")
    for name in wanted.get("required", ()):
        if name not in arguments:
            raise CallError(f"the argument {name!r} is missing")
    return {name: _fitting(name, value, known[name]) for name, value in arguments.items()}


def _fitting(name: str, value: Any, wanted: Mapping[str, Any]) -> Any:
    if value is None and wanted.get("nullable"):
        return None
    kinds = wanted.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else [*kinds]
    if "integer" in kinds and isinstance(value, float) and value.is_integer():
        value = int(value)
    fits = [kind for kind in kinds if isinstance(value, _TYPES.get(kind, (object,)))]
    if kinds and (not fits or (isinstance(value, bool) and "boolean" not in kinds)):
        raise CallError(f"{name} is no {' or '.join(kinds)}")
    if "number" in kinds and isinstance(value, int) and not _is_a_float(value):
        raise CallError(f"{name} is too large a number")
    if wanted.get("enum") and value not in wanted["enum"]:
        raise CallError(f"{name} is not one of {', '.join(map(str, wanted['enum']))}")
    if isinstance(value, list) and isinstance(wanted.get("items"), Mapping):
        return [_fitting(name, one, wanted["items"]) for one in value]
    return value


def _is_a_float(value: int) -> bool:
    """Whether a whole number is small enough for the arithmetic of a tool."""
    try:
        float(value)
    except OverflowError:
        return False
    return True


def error_line(reason: str) -> str:
    """What the model reads: one line without a path."""
    return clean("Error: " + " ".join(_PATH.sub("", reason).split()))[:_LINE]


def clean(text: str) -> str:
    """Text that a tokenizer takes: half a character, as JSON can have it, becomes a question mark."""
    return str.encode(text, "utf-8", "replace").decode()  # of a class of somebody's, too


@contextmanager
def limited(what: str, seconds: float, seed: str) -> Iterator[None]:
    """Inside, code of the user's runs for so long, with random numbers named by `seed`; the run's
    own stay.
    """
    with kept_random_state():
        number = number_at(f"tool/{seed}")
        random.seed(number)
        np.random.seed(number % 2**32)
        torch.manual_seed(number >> 1)
        with back_in(Path.cwd()), backstop(seconds), deadline(seconds), in_one_process(what):
            yield
