"""Calls a reward function that may fail, hang or return nonsense, and keeps the failure.

The call itself raises nothing: a rank that raises would leave the remaining ranks waiting in a
collective call. The ranks look at the failures together and stop together (`RewardGuard`).
"""

import asyncio
import inspect
import math
import numbers
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from adora_vl.utils.errors import UserError, in_one_line
from adora_vl.utils.own_files import OverdueError, back_in, backstop, deadline, in_one_process

_VALUE_CHARS = 60  # of a returned value in a message
_REASON_CHARS = 200  # of an exception's text in a message
_IMMUTABLE = {int, float, str, bool, type(None)}  # types whose values need no copy


class RewardFailure(NamedTuple):
    """The failure of a reward function in words.

    `function` is its name, `row` the completion or row of data on which it failed, `reason` how it
    failed. With `mistake` the reason is the text of a `UserError` that the function raised.
    """

    function: str
    row: str
    reason: str
    mistake: bool = False


class RewardValueError(Exception):
    """The value that a function returned is not one reward per completion.

    `row` is the number of the completion with the wrong reward, None if it is unknown.
    """

    def __init__(self, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.row = row


def own_copy(value: object, same: Sequence[object] = ()) -> Any:
    """Return a copy of an argument of a user's function, which may edit what it gets.

    The next function, the next step and the record then still get the original. Lists, mappings,
    sets, dataclasses, pictures, arrays and tensors are copied with their contents, and an object
    that occurs twice is copied twice. Objects of any further class are shared, and so are those in
    `same`.
    """
    if any(value is field for field in same):
        return value
    if isinstance(value, list):
        if set(map(type, value)) <= _IMMUTABLE:  # rows of token ids are long
            return value[:]
        return [own_copy(item, same) for item in value]
    if type(value) is tuple:
        return tuple(own_copy(item, same) for item in value)
    if isinstance(value, dict):
        if set(map(type, value.values())) <= _IMMUTABLE:  # the log of a run has thousands of these
            return dict(value)
        return {key: own_copy(item, same) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        record = copy(value)
        for field in fields(value):
            object.__setattr__(record, field.name, own_copy(getattr(value, field.name), same))
        return record
    return _copied_content(value)


def _copied_content(value: object) -> object:
    """Return a copy of a picture, an array, a tensor, a set or a bytearray.

    Any further object is returned itself.
    """
    from PIL import Image  # late, for commands that import this module and touch no image

    from adora_vl.data.shared_images import lend_copy

    if isinstance(value, Image.Image):
        return lend_copy(value)
    if isinstance(value, set | bytearray):
        return value.copy()
    # Without the library in `sys.modules` the value cannot be of one of its types.
    numpy = sys.modules.get("numpy")
    torch = sys.modules.get("torch")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return deepcopy(value)  # an array of objects has copies of these
    if torch is not None and isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value


def _arguments_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of one call as copies.

    Environments are not copied, since the call may use and change them.
    """
    copied: dict[str, Any] = own_copy(dict(arguments), same=arguments.get("environments") or [])
    return copied


def safe_call(
    function: Callable[..., Any],
    name: str,
    timeout: float | None,
    failures: list[RewardFailure],
    unscored: dict[int, str] | None = None,
) -> Callable[..., Any]:
    """Return `function` as TRL may call it: a function that does not raise; async if `function` is.

    A call that fails returns zeros, which must not be used.

    Args:
        function: a reward function in TRL's form.
        name: its name in messages.
        timeout: seconds for each call, None for no limit.
        failures: the list to which a failure is added.
        unscored: filled with the number of each completion in whose place the function returned an
            exception, and the reason; TRL gets None there.
    """
    guarded = _GuardedFunction(
        function=function,
        name=name,
        timeout=timeout,
        failures=failures,
        unscored=unscored,
        folder=Path.cwd(),
    )
    return guarded.call_async if is_async(function) else guarded.call


@dataclass(frozen=True, kw_only=True)
class _GuardedFunction:
    """A reward function whose failures are kept; the fields are the arguments of `safe_call`."""

    function: Callable[..., Any]
    name: str
    timeout: float | None
    failures: list[RewardFailure]
    unscored: dict[int, str] | None
    folder: Path
    """The working folder, into which every call comes back."""

    def call(self, **arguments: Any) -> list[float | None]:
        """Return the rewards of a plain function; zeros where it fails, which is noted."""
        try:
            with (
                back_in(self.folder),
                backstop(self.timeout),
                deadline(self.timeout),
                in_one_process(f"reward {self.name}"),
            ):
                returned = self.function(**_arguments_of(arguments))
                return self._checked_rewards(returned, len(arguments["completions"]))
        except KeyboardInterrupt:
            raise
        # asyncio's cancellation and a panic of compiled code are no `Exception`
        except BaseException as error:
            row = None
            if not isinstance(error, OverdueError | RewardValueError | UserError):
                with (
                    back_in(self.folder),
                    backstop(self.timeout),
                    in_one_process(f"reward {self.name}"),
                ):
                    row = _first_to_fail(self.function, arguments, self.timeout)
            return self._note_failure(error, arguments, row)

    async def call_async(self, **arguments: Any) -> list[float | None]:
        """Return the rewards of an `async def`; zeros where it fails, which is noted."""
        try:
            with (
                back_in(self.folder),
                backstop(self.timeout),
                in_one_process(f"reward {self.name}"),
            ):
                async with asyncio.timeout(self.timeout) as limit:
                    returned = await self.function(**_arguments_of(arguments))
            return self._checked_rewards(returned, len(arguments["completions"]))
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # from outside
                raise
            if limit.expired():
                return self._note_failure(OverdueError(), arguments, None)
            row = None
            if not isinstance(error, RewardValueError | UserError):
                row = await _first_to_fail_async(self.function, arguments)
            return self._note_failure(error, arguments, row)

    def _checked_rewards(self, returned: object, count: int) -> list[float | None]:
        """Return the checked rewards, with None for what cannot be scored, which is noted.

        Raises `RewardValueError` as `checked`.
        """
        rewards: list[float | None] = []
        for number, value in enumerate(checked(returned, count)):
            if not isinstance(value, BaseException):
                rewards.append(value)
                continue
            rewards.append(None)
            if self.unscored is not None:
                self.unscored[number] = in_one_line(value)[:_REASON_CHARS]
        return rewards

    def _note_failure(
        self, error: BaseException, arguments: Mapping[str, Any], row: int | None
    ) -> list[float | None]:
        """Note the failure, and return a reward of 0 for each completion.

        `row`: the completion that also fails alone, None if unknown.
        """
        failure = _failure(
            self.function,
            name=self.name,
            error=error,
            arguments=arguments,
            row=row,
            timeout=self.timeout,
        )
        self.failures.append(failure)
        return [0.0] * len(arguments["completions"])


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a call returns a coroutine.

    The function may also be partial, or an object with an async `__call__`.
    """
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )


def checked(returned: object, count: int) -> list[float | BaseException | None]:
    """Return the returned rewards as a list: a finite number, None or an exception per completion.

    Arrays and tensors are accepted. Raises `RewardValueError` for anything else.
    """
    values = returned.tolist() if hasattr(returned, "tolist") else returned  # of torch or NumPy
    if not isinstance(values, list | tuple):
        raise RewardValueError(
            f"it returned {_described(returned)}, not a list with one reward per completion"
        )
    if len(values) != count:
        raise RewardValueError(f"it returned {len(values)} rewards for {count} completions")
    unscored = (BaseException, type(None))
    return [
        value if isinstance(value, unscored) else _number(value, row)
        for row, value in enumerate(values)
    ]


def _number(value: object, row: int) -> float:
    """Return the reward of one completion as a float. Raises `RewardValueError`."""
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, numbers.Real):
        raise RewardValueError(f"it returned {_described(value)}, not a number or None", row)
    if not math.isfinite(value):
        raise RewardValueError(
            f"it returned {value}; return None for a completion that is not scored", row
        )
    return float(value)


def _described(value: object) -> str:
    """Return the beginning of a value's `repr`, on one line, with its type."""
    text = " ".join(repr(value).split())
    if len(text) > _VALUE_CHARS:
        text = f"{text[:_VALUE_CHARS]}..."
    return f"{text} ({type(value).__name__})"


def _failure(
    function: Callable[..., Any],
    name: str,
    error: BaseException,
    arguments: Mapping[str, Any],
    row: int | None,
    timeout: float | None,
) -> RewardFailure:
    """Return the failure in words.

    `row` is the completion that also fails alone, None if unknown.
    """
    if isinstance(error, UserError):
        return RewardFailure(function=name, row="", reason=str(error), mistake=True)
    location = _location(function, error)
    if isinstance(error, OverdueError):
        reason = f"it did not return within {timeout:g} s (adora_reward_timeout){location}"
    elif isinstance(error, RewardValueError):
        reason = str(error)
        row = error.row
    elif isinstance(error, SystemExit):
        code = "" if error.code is None else f"{error.code!r:.{_REASON_CHARS}}"
        reason = f"it called sys.exit({code}){location}"
    else:
        reason = f"{in_one_line(error)[:_REASON_CHARS]}{location}"
    # A row of the data set is named by its id, where it has one; else by its place in the batch.
    count = len(arguments["completions"])
    ids = arguments.get("id")
    index = 0 if row is None else row
    where = f"row {ids[index]}" if ids else f"completion {index + 1} of {count}"
    if row is None and count > 1:
        where = f"{count} completions together"
        if ids:
            where += f", of row {ids[0]} and others"
    return RewardFailure(name, where, reason)


def _location(function: Callable[..., Any], error: BaseException) -> str:
    """Return the file and the last line of the function's file in the traceback.

    The text is empty if the traceback has none.
    """
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [
        frame.lineno for frame in frames if code is not None and frame.filename == code.co_filename
    ]
    if code is None or not lines:
        return ""
    return f" ({Path(code.co_filename).name}, line {lines[-1]})"


def _alone(arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each completion alone, without the hooks that would log it again."""
    count = len(arguments["completions"])
    columns = {}
    for name, value in arguments.items():
        if isinstance(value, list | tuple) and len(value) == count:
            columns[name] = value
    for row in range(count):
        single = dict(arguments)
        for name, values in columns.items():
            single[name] = [values[row]]
        for hook in ("log_extra", "log_metric"):
            if hook in single:
                single[hook] = lambda *_: None
        yield _arguments_of(single)


def _first_to_fail(
    function: Callable[..., Any], arguments: Mapping[str, Any], timeout: float | None
) -> int | None:
    """Return the number of the first completion that fails alone.

    None if none does, or one is overdue.
    """
    for row, single in enumerate(_alone(arguments)):
        try:
            with deadline(timeout):
                function(**single)
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
    """Return the number of the first completion that fails alone, for an async function."""
    for row, single in enumerate(_alone(arguments)):
        try:
            await function(**single)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException:
            return row
    return None
