"""Guards around a call of the user's code: a deadline, one process, and the working directory."""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What a deadline may be: below, a call could not even begin; above, the timers of Python and of the
# system (2^63 nanoseconds, with the time of grace) raise an OverflowError.
MIN_DEADLINE_S = 0.001
MAX_DEADLINE_S = 10**9
GRACE_S = 30.0  # so long after the deadline a call that Python cannot interrupt ends the process
_SIGNAL_INTERVAL_S = 1.0  # between signals, for a function that catches the first one


class OverdueError(BaseException):
    """The deadline has passed.

    It is not an `Exception`, since a reward function may catch those.
    """

    def __str__(self) -> str:
        return "it did not return before the deadline"


@contextmanager
def ending_forked_children(label: str) -> Iterator[None]:
    """End a child process that the code in the `with` block forks, if it reaches the block's end.

    A function of the user's that forks has to end the child process itself (`os._exit`). Otherwise
    the child would return from the function too, and go on as a second run.

    Put this block inside the blocks of `deadline` and `backstop`, so that the child never reaches
    their ends. At its end, `backstop` would wait for a thread that a forked process does not have.

    `label`: the name of the user's function, with which the line on stderr begins.
    """
    first_pid = os.getpid()
    try:
        yield
    except SystemExit as error:
        is_child = os.getpid() != first_pid
        if is_child:
            # `sys.exit` in a child ends it as in any process: with the number that it gets as the
            # exit code, with 0 for None, and with 1 for a message.
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            os._exit(code)
        raise
    finally:
        is_child = os.getpid() != first_pid
        if is_child:
            line = (
                f"{label}: it forked a process that did not end in it (os._exit); that process "
                "was ended\n"
            )
            # Not through sys.stderr: its buffer may hold a copy of what the parent has yet to
            # write.
            os.write(2, line.encode())
            os._exit(1)


@contextmanager
def restoring_working_directory(folder: Path) -> Iterator[None]:
    """Make `folder` the working directory again when the block ends.

    Code of the user's may change the working directory, and relative paths of the run start there.
    """
    try:
        yield
    finally:
        os.chdir(folder)


@contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """Raise `OverdueError` inside the block after `seconds`, wherever Python code runs or waits.

    The signal of a timer interrupts the code. Signals only reach the main thread, so in other
    threads nothing is raised. None is no deadline.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_overdue(*_: object) -> None:
        """Handle the timer's signal."""
        raise OverdueError

    begin = time.monotonic()
    earlier_handler = signal.signal(signal.SIGALRM, raise_overdue)
    # A process has a single timer of this kind. If other code uses it, it is restored below.
    earlier_remaining_s, earlier_interval_s = signal.setitimer(
        signal.ITIMER_REAL, seconds, _SIGNAL_INTERVAL_S
    )
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier_handler)
        if earlier_remaining_s:
            # The other code's timer goes on. At least a millisecond: 0 would switch it off.
            remaining_s = max(earlier_remaining_s - (time.monotonic() - begin), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, remaining_s, earlier_interval_s)


_open_backstops: list[float] = []  # the seconds of the `backstop` blocks that are open, nested


@contextmanager
def backstop(seconds: float | None) -> Iterator[None]:
    """End the process, with a traceback, if the block takes `GRACE_S` longer than `seconds`.

    This is for compiled code, which `deadline` cannot interrupt. None is no limit. If blocks are
    nested, the outermost one sets the limit, since a process has one such timer.
    """
    if seconds is None:
        yield
        return
    if not _open_backstops and sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True, file=sys.__stderr__)
    _open_backstops.append(seconds)
    try:
        yield
    finally:
        _open_backstops.pop()
        if not _open_backstops:
            faulthandler.cancel_dump_traceback_later()
