"""Calls a reward function that may fail, hang or return nonsense, and keeps the failure: one rank
that raises would leave the others waiting in a collective call. The ranks stop together
(`RewardGuard`).
"""

import asyncio
import inspect
import math
import numbers
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from adora_vl.utils.errors import UserError, in_one_line
from adora_vl.utils.own_files import OverdueError, back_in, backstop, deadline, in_one_process

_SHOWN = 60
_PLAIN = {int, float, str, bool, type(None)}
_REASON = 200  # characters of what an exception says


class RewardFailure(NamedTuple):
    """Which function failed, on which row, and how.

    `mistake`: `reason` is the text of a `UserError` that it raised.
    """

    function: str
    row: str
    reason: str
    mistake: bool = False


class RewardValueError(Exception):
    """What a function returned is not one reward per completion.

    `row`: the completion with the wrong one, if known.
    """

    def __init__(self, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.row = row


def own_copy(value: Any, same: Sequence[Any] = ()) -> Any:
    """A copy of what a function of somebody else's is handed: it may edit what it gets, and the
    next one, the next step and the record get what was there before.

    Lists, mappings, sets, records, pictures, arrays and tensors are copied, with all that is in
    them, each place where one stands by itself. Objects of other classes stay as they are, and so
    do those of `same`.
    """
    if any(value is one for one in same):
        return value
    if isinstance(value, list):
        if set(map(type, value)) <= _PLAIN:  # rows of token ids are long
            return value[:]
        return [own_copy(each, same) for each in value]
    if type(value) is tuple:
        return tuple(own_copy(each, same) for each in value)
    if isinstance(value, dict):
        if set(map(type, value.values())) <= _PLAIN:  # the log of a run has thousands of these
            return dict(value)
        return {key: own_copy(each, same) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        record = copy(value)
        for one in fields(value):
            object.__setattr__(record, one.name, own_copy(getattr(value, one.name), same))
        return record
    return _copied_content(value)


def _copied_content(value: Any) -> Any:
    """A picture, an array, a tensor or a set with content of its own; any other object itself."""
    from PIL import Image  # late, for commands that import this module and touch no image

    from adora_vl.data.images import lent

    if isinstance(value, Image.Image):
        return lent(value)
    if isinstance(value, set | bytearray):
        return value.copy()
    # A value of a library that nobody has imported does not exist.
    numpy = sys.modules.get("numpy")
    torch = sys.modules.get("torch")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return deepcopy(value)  # an array of objects has copies of these
    if torch is not None and isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value


def _arguments_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a reward function gets: copies, but for environments, which it may ask and change."""
    copied: dict[str, Any] = own_copy(dict(arguments), same=arguments.get("environments") or [])
    return copied


def safe_call(
    function: Callable[..., Any],
    name: str,
    timeout: float | None,
    failures: list[RewardFailure],
    unscored: dict[int, str] | None = None,
) -> Callable[..., Any]:
    """`function` as TRL calls it, sync or async as it is.

    What goes wrong is added to `failures`, and the call returns zeros, which must not be used.
    `timeout`: seconds. Where the function returns an exception in the place of a reward, TRL gets
    None, and `unscored` the completion's number with the reason.
    """
    folder = Path.cwd()

    def ended(error: BaseException, arguments: Mapping[str, Any], row: int | None) -> list[float]:
        failures.append(
            _failure(
                function, name=name, error=error, arguments=arguments, row=row, timeout=timeout
            )
        )
        return [0.0] * len(arguments["completions"])

    def rewards(found: Any, count: int) -> list[float | None]:
        values = checked(found, count)
        if unscored is not None:
            unscored.update(
                {
                    n: in_one_line(v)[:_REASON]
                    for n, v in enumerate(values)
                    if isinstance(v, BaseException)
                }
            )
        return [None if isinstance(value, BaseException) else value for value in values]

    def call(**arguments: Any) -> list[float | None]:
        try:
            with (
                back_in(folder),
                backstop(timeout),
                deadline(timeout),
                in_one_process(f"reward {name}"),
            ):
                return rewards(function(**_arguments_of(arguments)), len(arguments["completions"]))
        except KeyboardInterrupt:
            raise
        except (
            BaseException
        ) as error:  # asyncio's cancellation and a panic of compiled code are no `Exception`
            row = None
            if not isinstance(error, OverdueError | RewardValueError | UserError):
                with back_in(folder), backstop(timeout), in_one_process(f"reward {name}"):
                    row = _first_to_fail(function, arguments, timeout)
            return [*ended(error, arguments, row)]

    async def call_async(**arguments: Any) -> list[float | None]:
        try:
            with back_in(folder), backstop(timeout), in_one_process(f"reward {name}"):
                async with asyncio.timeout(timeout) as limit:
                    found = await function(**_arguments_of(arguments))
            return rewards(found, len(arguments["completions"]))
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # from outside
                raise
            if limit.expired():
                return [*ended(OverdueError(), arguments, None)]
            alone = not isinstance(error, RewardValueError | UserError)
            return [
                *ended(
                    error,
                    arguments,
                    await _first_to_fail_async(function, arguments) if alone else None,
                )
            ]

    return call_async if is_async(function) else call


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call returns a coroutine, also of a partial function or an object with an async
    `__call__`.
    """
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )


def checked(found: Any, count: int) -> list[float | BaseException | None]:
    """One finite number, None or exception per completion. Raises `RewardValueError`."""
    values = found.tolist() if hasattr(found, "tolist") else found  # of torch or NumPy
    if not isinstance(values, list | tuple):
        raise RewardValueError(
            f"it returned {_shown(found)}, not a list with one reward per completion"
        )
    if len(values) != count:
        raise RewardValueError(f"it returned {len(values)} rewards for {count} completions")
    unscored = (BaseException, type(None))
    return [
        value if isinstance(value, unscored) else _number(value, row)
        for row, value in enumerate(values)
    ]


def _number(value: Any, row: int) -> float:
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, numbers.Real):
        raise RewardValueError(f"it returned {_shown(value)}, not a number or None", row)
    if not math.isfinite(value):
        raise RewardValueError(
            f"it returned {value}; return None for a completion that is not scored", row
        )
    return float(value)


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= _SHOWN else text[:_SHOWN] + '...'} ({type(value).__name__})"


def _failure(
    function: Callable[..., Any],
    name: str,
    error: BaseException,
    arguments: Mapping[str, Any],
    row: int | None,
    timeout: float | None,
) -> RewardFailure:
    """The failure in words. `row`: the completion that fails alone."""
    if isinstance(error, UserError):
        return RewardFailure(function=name, row="", reason=str(error), mistake=True)
    place = _place(function, error)
    if isinstance(error, OverdueError):
        reason = f"it did not return within {timeout:g} s (adora_reward_timeout){place}"
    elif isinstance(error, RewardValueError):
        reason = str(error)
        row = error.row
    elif isinstance(error, SystemExit):
        reason = (
            "it called "
            f"sys.exit({'' if error.code is None else f'{error.code!r:.{_REASON}}'}){place}"
        )
    else:
        reason = f"{in_one_line(error)[:_REASON]}{place}"
    count = len(arguments["completions"])
    ids = arguments.get("id")
    where = f"row {ids[row or 0]}" if ids else f"completion {(row or 0) + 1} of {count}"
    if row is None and count > 1:
        where = f"{count} completions together" + (f", of row {ids[0]} and others" if ids else "")
    return RewardFailure(name, where, reason)


def _place(function: Callable[..., Any], error: BaseException) -> str:
    """Where in the function's own file it happened."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [
        frame.lineno for frame in frames if code is not None and frame.filename == code.co_filename
    ]
    return (
        f" ({Path(code.co_filename).name}, line {lines[-1]})" if code is not None and lines else ""
    )


def _alone(arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The arguments of each completion by itself, without the hooks that would log it again."""
    count = len(arguments["completions"])
    columns = {
        key: each
        for key, each in arguments.items()
        if isinstance(each, list | tuple) and len(each) == count
    }
    for row in range(count):
        one = {**arguments, **{key: [each[row]] for key, each in columns.items()}}
        one |= {hook: lambda *_: None for hook in ("log_extra", "log_metric") if hook in one}
        yield _arguments_of(one)


def _first_to_fail(
    function: Callable[..., Any], arguments: Mapping[str, Any], timeout: float | None
) -> int | None:
    for row, one in enumerate(_alone(arguments)):
        try:
            with deadline(timeout):
                function(**one)
        except OverdueError:
            return None
        except KeyboardInterrupt:
            raise
        except BaseException:
            return row
    return None


async def _first_to_fail_async(
    function: Callable[..., Any], arguments: Mapping[str, Any]
) -> int | None:
    for row, one in enumerate(_alone(arguments)):
        try:
            await function(**one)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException:
            return row
    return None
