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


def own_copy(value: object, shared_objects: Sequence[object] = ()) -> Any:
    """Return a copy of an argument of a user's function, which may edit what it gets.

    The next function, the next step and the record then still get the original. Lists, mappings,
    sets, dataclasses, pictures, arrays and tensors are copied with their contents, and an object
    that occurs twice is copied twice. Objects of any further class are shared, and so are
    `shared_objects`.
    """
    if any(value is shared for shared in shared_objects):
        return value
    if isinstance(value, list):
        if set(map(type, value)) <= _IMMUTABLE:  # rows of token ids are long
            return value[:]
        return [own_copy(item, shared_objects) for item in value]
    if type(value) is tuple:
        return tuple(own_copy(item, shared_objects) for item in value)
    if isinstance(value, dict):
        if set(map(type, value.values())) <= _IMMUTABLE:  # the log of a run has thousands of these
            return dict(value)
        return {key: own_copy(item, shared_objects) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        record = copy(value)
        for field in fields(value):
            field_copy = own_copy(getattr(value, field.name), shared_objects)
            # the dataclass may be frozen, which refuses a plain assignment
            object.__setattr__(record, field.name, field_copy)
        return record
    return _copy_of_leaf(value)


def _copy_of_leaf(value: object) -> object:
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


def _copy_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of one call as copies.

    Environments are not copied, since the call may use and change them.
    """
    environments = arguments.get("environments") or []
    copies: dict[str, Any] = own_copy(dict(arguments), shared_objects=environments)
    return copies


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
    safe_function = _SafeFunction(
        function=function,
        name=name,
        timeout=timeout,
        failures=failures,
        unscored={} if unscored is None else unscored,
        folder=Path.cwd(),
    )
    # bound methods: TRL looks at the function that it gets to see whether it has to await it
    return safe_function.call_async if is_async(function) else safe_function.call


@dataclass(frozen=True, kw_only=True)
class _SafeFunction:
    """A reward function with all that its calls need: see `safe_call`."""

    function: Callable[..., Any]
    name: str  # in messages
    timeout: float | None  # seconds of a call
    failures: list[RewardFailure]  # of all calls so far; each call may add one
    unscored: dict[int, str]  # by the number of a completion, why it has no score
    folder: Path  # the working directory to which each call returns

    def call(self, **arguments: Any) -> list[float | None]:
        """Return the rewards of a plain function, or zeros where it fails."""
        try:
            with (
                back_in(self.folder),
                backstop(self.timeout),
                deadline(self.timeout),
                in_one_process(f"reward {self.name}"),
            ):
                returned = self.function(**_copy_arguments(arguments))
                # inside of the limits, since reading the user's objects runs code of theirs
                return self._read_rewards(returned, len(arguments["completions"]))
        except KeyboardInterrupt:
            raise
        # asyncio's cancellation and a panic of compiled code are no `Exception`
        except BaseException as error:
            row = None
            # the other three kinds of error say themselves where they come from
            if not isinstance(error, OverdueError | RewardValueError | UserError):
                with (
                    back_in(self.folder),
                    backstop(self.timeout),
                    in_one_process(f"reward {self.name}"),
                ):
                    row = _first_to_fail(self.function, arguments, self.timeout)
            return self._note_failure(error, arguments, row)

    async def call_async(self, **arguments: Any) -> list[float | None]:
        """Return the rewards of an `async def`, or zeros where it fails."""
        try:
            with (
                back_in(self.folder),
                backstop(self.timeout),
                in_one_process(f"reward {self.name}"),
            ):
                async with asyncio.timeout(self.timeout) as time_limit:
                    returned = await self.function(**_copy_arguments(arguments))
            return self._read_rewards(returned, len(arguments["completions"]))
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # from outside
                raise
            # not by the kind of error: a TimeoutError may be the function's own
            if time_limit.expired():
                return self._note_failure(OverdueError(), arguments, None)
            row = None
            if not isinstance(error, RewardValueError | UserError):
                row = await _first_to_fail_async(self.function, arguments)
            return self._note_failure(error, arguments, row)

    def _read_rewards(self, returned: object, count: int) -> list[float | None]:
        """Return what the function returned as one reward per completion.

        A completion with an exception in place of its reward gets None, and its number and the
        reason go into `unscored`. Raises `RewardValueError` where a reward is no number.
        """
        rewards: list[float | None] = []
        for number, value in enumerate(checked(returned, count)):
            if isinstance(value, BaseException):
                self.unscored[number] = in_one_line(value)[:_REASON_CHARS]
                rewards.append(None)
            else:
                rewards.append(value)
        return rewards

    def _note_failure(
        self, error: BaseException, arguments: Mapping[str, Any], row: int | None
    ) -> list[float | None]:
        """Add a failure to the list, and return a reward of 0 for each completion.

        `row`: the number of a completion that also fails alone, None if unknown.
        """
        failure = _describe_failure(
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
            f"it returned {_short_repr(returned)}, not a list with one reward per completion"
        )
    if len(values) != count:
        raise RewardValueError(f"it returned {len(values)} rewards for {count} completions")
    unscored = (BaseException, type(None))
    return [
        value if isinstance(value, unscored) else _finite_number(value, row)
        for row, value in enumerate(values)
    ]


def _finite_number(value: object, row: int) -> float:
    """Return the reward of one completion as a float.

    Raises `RewardValueError` with the completion's number `row` for anything but a finite number.
    """
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, numbers.Real):
        raise RewardValueError(f"it returned {_short_repr(value)}, not a number or None", row)
    if not math.isfinite(value):
        raise RewardValueError(
            f"it returned {value}; return None for a completion that is not scored", row
        )
    return float(value)


def _short_repr(value: object) -> str:
    """Return the beginning of a value's `repr`, on one line, with its type."""
    text = " ".join(repr(value).split())
    if len(text) > _VALUE_CHARS:
        text = f"{text[:_VALUE_CHARS]}..."
    return f"{text} ({type(value).__name__})"


def _describe_failure(
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
    """Return where in the user's file an error came from, as ` (reward.py, line 7)`.

    It is the last line of that file in the traceback, since what lies below is a library's. Empty
    if no line of the traceback is in the file.
    """
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None)
    if code is None:
        return ""  # an object with `__call__`, or compiled code
    frames = traceback.extract_tb(error.__traceback__)
    line_numbers = [frame.lineno for frame in frames if frame.filename == code.co_filename]
    if not line_numbers:
        return ""
    return f" ({Path(code.co_filename).name}, line {line_numbers[-1]})"


def _single_completions(arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each completion alone, without the hooks that would log it again."""
    count = len(arguments["completions"])
    columns = {}  # the arguments with one value per completion; all others stay as they are
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
        yield _copy_arguments(single)


def _first_to_fail(
    function: Callable[..., Any], arguments: Mapping[str, Any], timeout: float | None
) -> int | None:
    """Return the number of the first completion that fails alone.

    None if none does, or one is overdue.
    """
    for row, single_arguments in enumerate(_single_completions(arguments)):
        try:
            with deadline(timeout):
                function(**single_arguments)
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
    for row, single_arguments in enumerate(_single_completions(arguments)):
        try:
            await function(**single_arguments)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException:
            return row
    return None
