"""What libraries say while they load goes into a file of the run, and on failure its last lines to the screen."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from adora_vl.utils.errors import UserError

STARTUP_LOG = ".startup.log"  # in output_dir; hidden, since no run may write over a file of the user's
_SHOWN = 20  # lines


class StartupLog:
    """Inside, both outputs of this process go into `path`, also what compiled code writes, until `release`.

    The descriptors are replaced, since loggers and progress bars keep the streams that they were made with. Where the
    file cannot be opened, everything stays on the screen.
    """

    def __init__(self, path: Path, *, first: bool = False) -> None:
        """`first`: whether the file begins anew here; the others add to it."""
        self.path, self.first = path, first
        self._screen: list[int] = []
        self._began = 0

    def __enter__(self) -> StartupLog:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if self.first else 0)
        try:
            log = os.open(self.path, flags, 0o644)
        except OSError:
            return self
        self._began = os.fstat(log).st_size
        flush_outputs()
        self._screen = [os.dup(1), os.dup(2)]
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        return self

    def release(self) -> None:
        """Give the screen back. A second call does nothing."""
        flush_outputs()
        for descriptor, screen in zip((1, 2), self._screen, strict=False):
            os.dup2(screen, descriptor)
            os.close(screen)
        self._screen = []

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        open_until_now = bool(self._screen)
        self.release()
        if open_until_now and isinstance(error, Exception) and not isinstance(error, UserError):
            with suppress(OSError):
                said = self.path.read_bytes()[self._began :].decode(errors="replace")
                if lines := [line for line in said.splitlines() if line.strip()][-_SHOWN:]:
                    head = f"The last of what the libraries have said ({self.path} has all of it):"
                    print("\n".join([head, *lines]), file=sys.stderr, flush=True)


def flush_outputs() -> None:
    """Write what both streams of Python still hold."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # a stream may be closed, or none
            stream.flush()
