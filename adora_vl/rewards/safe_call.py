"""A reward function that may fail, hang or return nonsense, called so that the run learns what happened.

Nothing is raised in the call itself: one rank that raises would leave the others waiting in a collective call. The
failure is kept instead, and the ranks stop together (`RewardGuard`).
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import math
import numbers
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from adora_vl.errors import UserError, in_one_line

LOAD_TIMEOUT_S = 60.0
GRACE_S = 30.0  # what Python cannot interrupt ends the process so long after the deadline
_AGAIN_S = 1.0  # a function that catches the interruption meets it again
_SHOWN = 60


class RewardFailure(NamedTuple):
    """Which function failed, on which row of the data set, and how."""

    function: str
    row: str
    reason: str


class OverdueError(BaseException):
    """The deadline has passed. No `Exception`, which a reward function may well catch."""

    def __str__(self) -> str:
        return "it did not return before the deadline"


class RewardValueError(Exception):
    """What a function returned is not one reward per completion. `row` is the completion's number, if it is one's."""

    def __init__(self, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.row = row


@contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """Raises `OverdueError` inside after `seconds`, wherever Python code runs or waits; None is no deadline.

    A signal can only interrupt the main thread; in others nothing is raised.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def overdue(*_: object) -> None:
        raise OverdueError

    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, overdue)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # someone else's timer goes on
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-3), interval)


class _Backstop:
    """Ends the process, with a traceback, if a call is long overdue: compiled code hears no signal."""

    def __init__(self) -> None:
        self._running = 0

    @contextmanager
    def __call__(self, seconds: float | None) -> Iterator[None]:
        if seconds is None:
            yield
            return
        if not self._running and sys.__stderr__ is not None:
            faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True, file=sys.__stderr__)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                faulthandler.cancel_dump_traceback_later()


_backstop = _Backstop()


def safe_call(
    function: Callable[..., Any], name: str, timeout: float | None, failures: list[RewardFailure]
) -> Callable[..., Any]:
    """`function` as TRL calls it, sync or async as it is; what goes wrong is added to `failures`.

    A call that failed returns zeros, which nobody may use. `timeout`: seconds; None is no deadline.
    """

    def ended(error: BaseException, arguments: Mapping[str, Any], row: int | None) -> list[float]:
        failures.append(_failure(function, name, error, arguments, row, timeout))
        return [0.0] * len(arguments["completions"])

    def call(**arguments: Any) -> list[float | None]:
        try:
            with _backstop(timeout), deadline(timeout):
                return checked(function(**arguments), len(arguments["completions"]))
        except UserError:
            raise
        except (Exception, OverdueError) as error:
            row = None
            if not isinstance(error, OverdueError | RewardValueError):
                with _backstop(timeout):
                    row = _first_to_fail(function, arguments, timeout)
            return [*ended(error, arguments, row)]

    async def call_async(**arguments: Any) -> list[float | None]:
        try:
            with _backstop(timeout):
                async with asyncio.timeout(timeout) as limit:
                    found = await function(**arguments)
            return checked(found, len(arguments["completions"]))
        except Exception as error:
            if limit.expired():
                return [*ended(OverdueError(), arguments, None)]
            row = None if isinstance(error, RewardValueError) else await _first_to_fail_async(function, arguments)
            return [*ended(error, arguments, row)]

    return call_async if is_async(function) else call


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call returns a coroutine, also of a partial function or an object with an async `__call__`."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def checked(found: Any, count: int) -> list[float | None]:
    """One finite number or None per completion. Raises `RewardValueError`."""
    values = found.tolist() if hasattr(found, "tolist") else found  # of torch or NumPy
    if not isinstance(values, list | tuple):
        raise RewardValueError(f"it returned {_shown(found)}, not a list with one reward per completion")
    if len(values) != count:
        raise RewardValueError(f"it returned {len(values)} rewards for {count} completions")
    return [None if value is None else _number(value, row) for row, value in enumerate(values)]


def _number(value: Any, row: int) -> float:
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, numbers.Real):
        raise RewardValueError(f"it returned {_shown(value)}, not a number or None", row)
    if not math.isfinite(value):
        raise RewardValueError(f"it returned {value}; return None for a completion that is not scored", row)
    return float(value)


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= _SHOWN else text[:_SHOWN] + '...'} ({type(value).__name__})"


def _failure(
    function: Callable[..., Any], name: str, error: BaseException, arguments: Mapping[str, Any], row: int | None,
    timeout: float | None,
) -> RewardFailure:  # fmt: skip
    """The failure in words. `row`: the completion that fails alone."""
    place = _place(function, error)
    if isinstance(error, OverdueError):
        reason = f"it did not return within {timeout:g} s (adora_reward_timeout){place}"
    elif isinstance(error, RewardValueError):
        reason, row = str(error), error.row
    else:
        reason = f"{in_one_line(error)}{place}"
    return RewardFailure(name, _row_name(arguments, row), reason)


def _row_name(arguments: Mapping[str, Any], row: int | None) -> str:
    count, ids = len(arguments["completions"]), arguments.get("id")
    if row is None and count > 1:
        return f"{count} completions together" + (f", of row {ids[0]} and others" if ids else "")
    return f"row {ids[row or 0]}" if ids else f"completion {(row or 0) + 1} of {count}"


def _place(function: Callable[..., Any], error: BaseException) -> str:
    """Where in the function's own file it happened."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if code is not None and frame.filename == code.co_filename]
    return f" ({Path(code.co_filename).name}, line {lines[-1]})" if code is not None and lines else ""


def _alone(arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The arguments of each completion by itself, without the hooks that would log it again."""
    count = len(arguments["completions"])
    for row in range(count):
        one = {
            key: [value[row]] if isinstance(value, list | tuple) and len(value) == count else value
            for key, value in arguments.items()
        }
        one |= {hook: _nothing for hook in ("log_extra", "log_metric") if hook in one}
        yield one


def _nothing(*_: Any) -> None:
    """A logging hook that drops what it gets."""


def _first_to_fail(function: Callable[..., Any], arguments: Mapping[str, Any], timeout: float | None) -> int | None:
    for row, one in enumerate(_alone(arguments)):
        try:
            with deadline(timeout):
                function(**one)
        except OverdueError:
            return None
        except Exception:
            return row
    return None


async def _first_to_fail_async(function: Callable[..., Any], arguments: Mapping[str, Any]) -> int | None:
    for row, one in enumerate(_alone(arguments)):
        try:
            await function(**one)
        except Exception:
            return row
    return None
