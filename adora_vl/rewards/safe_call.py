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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from adora_vl.utils.call_guards import (
    OverdueError,
    backstop,
    deadline,
    ending_forked_children,
    restoring_working_directory,
)
from adora_vl.utils.errors import UserError, describe_error

_MAX_VALUE_CHARS = 60  # of a returned value in a message
_MAX_REASON_CHARS = 200  # of an exception's text in a message
_IMMUTABLE_TYPES = {int, float, str, bool, type(None)}  # types whose values need no copy


class RewardFailure(NamedTuple):
    """The failure of a reward function in words."""

    function: str
    """The name of the function."""
    rows_in_words: str
    """The rows on which it failed, as `row 12`; empty for a mistake of the user."""
    reason: str
    """How it failed."""
    is_users_mistake: bool = False
    """Whether the function raised `UserError`, whose text is the reason."""


class RewardValueError(Exception):
    """The value that a function returned is not one reward per completion.

    `completion_index` says which completion has the wrong reward; None if that is unknown.
    """

    def __init__(self, message: str, completion_index: int | None = None) -> None:
        super().__init__(message)
        self.completion_index = completion_index


def copy_argument(value: object, shared_objects: Sequence[object] = ()) -> Any:
    """Copy an argument before a user's function gets it, since the function may edit it.

    The original goes to the next function, to the next step and into the record. Lists, mappings,
    sets, dataclasses, pictures, arrays and tensors are copied with their contents. An object that
    occurs twice is copied twice. Objects of any other class are returned as they are, and so are
    `shared_objects`.
    """
    if any(value is shared for shared in shared_objects):
        return value
    if isinstance(value, list):
        # Lists of token ids are long, and a plain copy is enough for them.
        if set(map(type, value)) <= _IMMUTABLE_TYPES:
            return value[:]
        return [copy_argument(item, shared_objects) for item in value]
    if type(value) is tuple:  # a named tuple is not built from one iterable
        return tuple(copy_argument(item, shared_objects) for item in value)
    if isinstance(value, dict):
        # A run's log has thousands of such entries, and a plain copy is enough for them.
        if set(map(type, value.values())) <= _IMMUTABLE_TYPES:
            return dict(value)
        return {key: copy_argument(item, shared_objects) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        dataclass_copy = copy(value)
        for field in fields(value):
            field_copy = copy_argument(getattr(value, field.name), shared_objects)
            # The dataclass may be frozen, which refuses a plain assignment.
            object.__setattr__(dataclass_copy, field.name, field_copy)
        return dataclass_copy
    return _copy_leaf(value)


def _copy_leaf(value: object) -> object:
    """Return a copy of a picture, an array, a tensor, a set or a bytearray.

    Any other object is returned itself.
    """
    from PIL import Image  # late, for commands that import this module and touch no image

    from adora_vl.data.shared_images import copy_on_write

    if isinstance(value, Image.Image):
        return copy_on_write(value)
    if isinstance(value, set | bytearray):
        return value.copy()
    # If a library has not been imported, the value cannot have one of its types.
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
    copies: dict[str, Any] = copy_argument(dict(arguments), shared_objects=environments)
    return copies


# Metrics that the trainer logs at every step, and that other parts of a run read from the log.
_LOGGED_BY_TRAINER = frozenset(
    {"loss", "grad_norm", "learning_rate", "epoch", "step", "num_tokens", "reward", "reward_std"}
)


def _with_checked_logging(arguments: Mapping[str, Any], counts: Counter[str]) -> dict[str, Any]:
    """Return the arguments of one call with logging hooks that check what the function logs.

    Two mistakes are found. A column with fewer values than completions would shift the values of
    all later completions in the table; `counts` shows it after the call. A metric with the name of
    one of the trainer's metrics would replace it in the log; it raises `RewardValueError` at once.

    Args:
        arguments: the arguments of the call. TRL's hooks among them, `log_extra` and `log_metric`,
            are replaced. Arguments without hooks are returned unchanged.
        counts: gets the number of values of each column while the function logs. The caller then
            compares it with the number of completions.
    """
    log_extra = arguments.get("log_extra")
    log_metric = arguments.get("log_metric")
    if log_extra is None or log_metric is None:
        return dict(arguments)

    def log_and_count(column: str, values: Iterable[object]) -> None:
        values = list(values)
        counts[column] += len(values)
        log_extra(column, values)

    def log_number(name: str, value: object) -> None:
        if name in _LOGGED_BY_TRAINER:
            raise RewardValueError(
                f"it logged the metric {name!r}, which the trainer logs itself; give it another "
                "name"
            )
        number = value.item() if hasattr(value, "item") else value
        if not isinstance(number, numbers.Real):
            raise RewardValueError(
                f"it logged {_short_repr(value)} as the metric {name!r}, which is no number"
            )
        log_metric(name, float(number))

    return {**arguments, "log_extra": log_and_count, "log_metric": log_number}


def safe_call(
    function: Callable[..., Any],
    name: str,
    timeout: float | None,
    failures: list[RewardFailure],
    unscored: dict[int, str] | None = None,
) -> Callable[..., Any]:
    """Wrap a reward function so that it never raises; the result is async if `function` is.

    A failure is added to `failures` instead. The call then returns zeros, which must not be used:
    the caller stops the run.

    Args:
        function: a reward function with TRL's signature.
        name: its name in messages.
        timeout: seconds for each call, None for no limit.
        failures: the list to which a failure is added.
        unscored: gets the reason for each completion for which the function returned an exception
            instead of a number, by the number of the completion. TRL gets None for it.
    """
    safe_function = _SafeFunction(
        function=function,
        name=name,
        timeout=timeout,
        failures=failures,
        unscored={} if unscored is None else unscored,
        folder=Path.cwd(),
    )
    # TRL inspects the function that it gets to see whether it has to await it.
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

    def call(self, /, **arguments: Any) -> list[float | None]:
        """Return the rewards of a plain function, or zeros where it fails.

        The function may change the working directory, hang, or fork a process; the `with` undoes
        or ends each of these.
        """
        try:
            with (
                restoring_working_directory(self.folder),
                backstop(self.timeout),
                deadline(self.timeout),
                ending_forked_children(f"reward {self.name}"),
            ):
                counts = Counter[str]()
                returned = self.function(
                    **_copy_arguments(_with_checked_logging(arguments, counts))
                )
                # Still within the time limit, since reading the user's objects runs their code.
                return self._checked_rewards(returned, len(arguments["completions"]), counts)
        except KeyboardInterrupt:
            raise
        # asyncio's cancellation and a panic of compiled code are no subclasses of `Exception`.
        except BaseException as error:
            # To name the completion on which the function fails, it is called again with each
            # completion alone. Some errors need no search: a call that is overdue would be so
            # again, a wrong value says its completion, and a `UserError` is about no completion.
            completion_index = None
            if not isinstance(error, OverdueError | RewardValueError | UserError):
                with (
                    restoring_working_directory(self.folder),
                    backstop(self.timeout),
                    ending_forked_children(f"reward {self.name}"),
                ):
                    completion_index = _find_failing_completion(
                        self.function, arguments, self.timeout
                    )
            return self._record_failure(error, arguments, completion_index)

    async def call_async(self, /, **arguments: Any) -> list[float | None]:
        """Return the rewards of an `async def`, or zeros where it fails.

        The function may change the working directory, hang, or fork a process; the `with` undoes
        or ends each of these.
        """
        try:
            with (
                restoring_working_directory(self.folder),
                backstop(self.timeout),
                ending_forked_children(f"reward {self.name}"),
            ):
                counts = Counter[str]()
                copies = _copy_arguments(_with_checked_logging(arguments, counts))
                async with asyncio.timeout(self.timeout) as time_limit:
                    returned = await self.function(**copies)
            return self._checked_rewards(returned, len(arguments["completions"]), counts)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the caller has cancelled the call, so the function has not failed
            # A TimeoutError may come from the function itself, so the limit has to be asked.
            if time_limit.expired():
                return self._record_failure(OverdueError(), arguments, completion_index=None)
            # As in `call`, the function is called again with each completion alone.
            completion_index = None
            if not isinstance(error, RewardValueError | UserError):
                with (
                    restoring_working_directory(self.folder),
                    backstop(self.timeout),
                    ending_forked_children(f"reward {self.name}"),
                ):
                    completion_index = await _find_failing_completion_async(
                        self.function, arguments, self.timeout
                    )
            return self._record_failure(error, arguments, completion_index)

    def _checked_rewards(
        self, returned: object, count: int, logged_counts: Mapping[str, int]
    ) -> list[float | None]:
        """Return what the function returned as one reward per completion.

        If the function returned an exception for a completion, its reward is None, and the text of
        the exception goes into `unscored`. Raises `RewardValueError` for a reward that is no
        number, and for a logged column with more or fewer values than completions.

        Args:
            returned: what the function returned.
            count: the number of completions.
            logged_counts: the number of values that the function has logged in each column.
        """
        for column, logged_count in logged_counts.items():
            if logged_count != count:
                raise RewardValueError(
                    f"it logged {logged_count} values of {column!r} for {count} completions; log "
                    "one for each, None where there is none"
                )
        rewards: list[float | None] = []
        for number, value in enumerate(check_returned_rewards(returned, count)):
            if isinstance(value, BaseException):
                self.unscored[number] = describe_error(value)[:_MAX_REASON_CHARS]
                rewards.append(None)
            else:
                rewards.append(value)
        return rewards

    def _record_failure(
        self, error: BaseException, arguments: Mapping[str, Any], completion_index: int | None
    ) -> list[float | None]:
        """Add a failure to the list, and return a reward of 0 for each completion.

        `completion_index`: which completion also fails when it is alone; None if unknown.
        """
        failure = _describe_failure(
            self.function,
            name=self.name,
            error=error,
            arguments=arguments,
            completion_index=completion_index,
            timeout=self.timeout,
        )
        self.failures.append(failure)
        return [0.0] * len(arguments["completions"])


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a call of the function returns a coroutine.

    It does for an `async def`, a partial of one, and an object with an async `__call__`.
    """
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )


def check_returned_rewards(returned: object, count: int) -> list[float | BaseException | None]:
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
    # A function may leave a completion without a score, by None or by an exception that says why.
    unscored = (BaseException, type(None))
    return [
        value if isinstance(value, unscored) else _finite_number(value, index)
        for index, value in enumerate(values)
    ]


def _finite_number(value: object, index: int) -> float:
    """Return the reward of one completion as a float.

    Raises `RewardValueError` with the completion's index for anything but a finite number.
    """
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, numbers.Real):
        raise RewardValueError(f"it returned {_short_repr(value)}, not a number or None", index)
    if not math.isfinite(value):
        raise RewardValueError(
            f"it returned {value}; return None for a completion that is not scored", index
        )
    return float(value)


def _short_repr(value: object) -> str:
    """Return the beginning of a value's `repr`, on one line, with its type."""
    text = " ".join(repr(value).split())
    if len(text) > _MAX_VALUE_CHARS:
        text = f"{text[:_MAX_VALUE_CHARS]}..."
    return f"{text} ({type(value).__name__})"


def _describe_failure(
    function: Callable[..., Any],
    name: str,
    error: BaseException,
    arguments: Mapping[str, Any],
    completion_index: int | None,
    timeout: float | None,
) -> RewardFailure:
    """Return a failure of a reward function in words.

    Args:
        function: the reward function, for the line of its file where the error came from.
        name: its name in messages.
        error: what the call raised.
        arguments: the keyword arguments of the call.
        completion_index: which completion also fails when it is alone; None if unknown.
        timeout: the limit of the call in seconds, for an overdue one.
    """
    if isinstance(error, UserError):
        return RewardFailure(
            function=name, rows_in_words="", reason=str(error), is_users_mistake=True
        )
    location = _error_location(function, error)
    if isinstance(error, OverdueError):
        reason = f"it did not return within {timeout:g} s (adora_reward_timeout){location}"
    elif isinstance(error, RewardValueError):
        reason = str(error)
        completion_index = error.completion_index
    elif isinstance(error, SystemExit):
        code = "" if error.code is None else f"{error.code!r:.{_MAX_REASON_CHARS}}"
        reason = f"it called sys.exit({code}){location}"
    else:
        reason = f"{describe_error(error)[:_MAX_REASON_CHARS]}{location}"
    return RewardFailure(
        function=name,
        rows_in_words=_failed_rows(arguments, completion_index),
        reason=reason,
    )


def _failed_rows(arguments: Mapping[str, Any], completion_index: int | None) -> str:
    """Return in words which rows of the data set a failed call was about.

    With ids it is `row 12`, without ids `completion 3 of 8`. If `completion_index` is None,
    no completion is known to fail alone, and it is `8 completions together, of row 12 and others`.
    """
    count = len(arguments["completions"])
    ids = arguments.get("id")
    if completion_index is None and count > 1:
        together = f"{count} completions together"
        return f"{together}, of row {ids[0]} and others" if ids else together
    # A call with one completion can only have failed at that one.
    failed_index = 0 if completion_index is None else completion_index
    return f"row {ids[failed_index]}" if ids else f"completion {failed_index + 1} of {count}"


def _error_location(function: Callable[..., Any], error: BaseException) -> str:
    """Return where in the user's file an error came from, as ` (reward.py, line 7)`.

    It is the last line of that file in the traceback, since the lines after it are in libraries.
    Returns "" if no line of the traceback is in the file.
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
    """Yield for each completion the arguments of a call with it alone.

    With two completions, `completions=[a, b], answer=["1", "2"], step=5` gives first
    `completions=[a], answer=["1"], step=5` and then the same with b and 2: a list or tuple with one
    value per completion is cut to one value, and any other argument stays as it is. The logging
    hooks do nothing, since the completions have been logged already.
    """
    count = len(arguments["completions"])
    columns = {}  # the arguments with one value per completion
    for name, value in arguments.items():
        if isinstance(value, list | tuple) and len(value) == count:
            columns[name] = value
    for index in range(count):
        single_arguments = dict(arguments)
        for name, values in columns.items():
            single_arguments[name] = [values[index]]
        for hook in ("log_extra", "log_metric"):
            if hook in single_arguments:
                single_arguments[hook] = lambda *_: None
        yield _copy_arguments(single_arguments)


def _find_failing_completion(
    function: Callable[..., Any], arguments: Mapping[str, Any], timeout: float | None
) -> int | None:
    """Call the function with each completion alone, and return the index of the first that fails.

    Returns None if no completion fails, or if all calls together take longer than one call may.
    """
    try:
        with deadline(timeout):
            for index, single_arguments in enumerate(_single_completions(arguments)):
                try:
                    function(**single_arguments)
                except (KeyboardInterrupt, OverdueError):
                    raise
                except BaseException:  # a user's function may also call `sys.exit`
                    return index
    except OverdueError:
        return None
    return None


async def _find_failing_completion_async(
    function: Callable[..., Any], arguments: Mapping[str, Any], timeout: float | None
) -> int | None:
    """Await the function with each completion alone; return the index of the first that fails.

    Returns None if no completion fails, or if all calls together take longer than one call may.
    """
    async with asyncio.timeout(timeout) as time_limit:
        for index, single_arguments in enumerate(_single_completions(arguments)):
            try:
                await function(**single_arguments)
            except (KeyboardInterrupt, GeneratorExit):
                raise
            except BaseException:
                if time_limit.expired():
                    return None
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise  # the caller has cancelled the search
                return index
    return None
