"""A reward function of the user's own, named as `FILE.py:FUNCTION`: found, loaded, and checked before a run."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from adora_vl.errors import UserError, in_one_line, nearest
from adora_vl.rewards.safe_call import LOAD_TIMEOUT_S, OverdueError, deadline

# What TRL gives beside the columns of the data set.
GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


def is_own(entry: str) -> bool:
    """Whether an entry of `adora_reward` names a file, and not a preset."""
    return ".py:" in entry or entry.endswith(".py")


def own_name(entry: str) -> str:
    """The function's name in an entry: `brevity` of `my_rewards.py:brevity`."""
    return entry.rpartition(":")[2]


def find_file(entry: str, folders: Sequence[Path]) -> Path:
    """The file of an entry, looked for in `folders` in order. Raises `UserError`."""
    name, colon, function = entry.rpartition(":")
    if not colon or not function.isidentifier():
        raise UserError(f"adora_reward: {entry!r} names no function; write FILE.py:FUNCTION, as in {_example(entry)}")
    for folder in dict.fromkeys(folders):
        path = (folder / Path(name).expanduser()).resolve()
        if path.is_file():
            return path
    places = " or in ".join(repr(str(folder)) for folder in dict.fromkeys(folder.resolve() for folder in folders))
    raise UserError(f"adora_reward: {entry!r}: there is no file {name!r} in {places}")


def load(entry: str, path: Path) -> Callable[..., Any]:
    """The function of an entry. Raises `UserError` with the line where the file cannot be run, or lacks it."""
    module, name = _module(entry, path), own_name(entry)
    found = getattr(module, name, None)
    if callable(found) and not inspect.isclass(found):
        return found  # type: ignore[no-any-return]
    functions = [key for key, value in vars(module).items() if _is_function_of(module, value)]
    if found is not None:
        raise UserError(f"adora_reward: {entry!r}: {name} is no function (it is of type {type(found).__name__})")
    there = f"it has {', '.join(functions)}" if functions else "it has no function"
    raise UserError(f"adora_reward: {entry!r}: no function {name!r} there; {there}{nearest(name, functions)}")


def with_options(entry: str, function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """The function with its options filled in. Raises `UserError` for an option that it does not take."""
    if not options:
        return function
    parameters = inspect.signature(function).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    named = [each.name for each in parameters.values() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    for option in options:
        if option in GIVEN:
            raise UserError(f"adora_reward_options: {entry}: {option!r} is given by the trainer; choose another name")
        if option not in named and not takes_any:
            raise UserError(f"adora_reward_options: {entry}: no argument {option!r} there{nearest(option, named)}")
    filled = partial(function, **options)
    filled.__name__ = own_name(entry)  # type: ignore[attr-defined]  # TRL names the reward in the log by it
    return filled


def check_columns(entry: str, function: Callable[..., Any], columns: Collection[str]) -> None:
    """Raise `UserError` where a call with these columns of the data set cannot work."""
    options = set(function.keywords) if isinstance(function, partial) else set()
    taken = sorted(options & set(columns))
    if taken:
        raise UserError(f"adora_reward_options: {entry}: {taken[0]!r} is a column of the data set; rename the argument")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function that does not say what it takes
        return
    given = {*GIVEN, *columns} - {"prompt", "completion"}
    for parameter in signature.parameters.values():
        needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL,
        )  # fmt: skip
        if parameter.kind is parameter.POSITIONAL_ONLY and needed:
            raise UserError(f"adora_reward: {entry!r} takes {parameter.name!r} by position; TRL gives it by name")
        if needed and parameter.name not in given:
            raise UserError(
                f"adora_reward: {entry!r} needs {parameter.name!r}, which is no column of the data set (it has "
                f"{', '.join(sorted(columns))}){nearest(parameter.name, given)}; or set it in adora_reward_options"
            )
    if not any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values()):
        raise UserError(f"adora_reward: {entry!r} must end with **kwargs, which take the columns that it does not name")


def file_hash(path: Path) -> str:
    """The first 16 digits of the file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _module(entry: str, path: Path) -> ModuleType:
    name = f"adora_own_reward_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:  # two functions of one file share what it remembers
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # its neighbours can be imported, and hide nothing that is installed
    sys.modules[name] = module
    try:
        with deadline(LOAD_TIMEOUT_S):
            spec.loader.exec_module(module)
    except (Exception, SystemExit, OverdueError) as error:
        del sys.modules[name]
        _refuse(entry, path, error)
    return module


def _refuse(entry: str, path: Path, error: BaseException) -> NoReturn:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) and error.filename == str(path) else lines[-1:]
    at = f"line {line[0] if isinstance(line, list) else line}: " if line else ""
    raise UserError(f"adora_reward: {entry!r} cannot be loaded: {at}{in_one_line(error)}") from None


def _is_function_of(module: ModuleType, value: object) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__ and not value.__name__.startswith("_")


def _example(entry: str) -> str:
    return f"{entry.partition(':')[0] or 'my_rewards.py'}:brevity"
