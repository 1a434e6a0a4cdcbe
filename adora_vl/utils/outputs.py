"""What becomes of stdout and stderr when nobody reads them any more, or never did."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# stdout and stderr
OUTPUT_DESCRIPTORS = (1, 2)
# What `poll` says of an output whose reader is gone
_READER_GONE_EVENTS = select.POLLERR | select.POLLHUP
# What a write says then: of a pipe, and of a terminal
_READER_GONE_ERRORS = (errno.EPIPE, errno.EIO)


def redirect_closed_outputs() -> None:
    """Redirect stdout or stderr to /dev/null if its reader is gone, such as a closed terminal.

    Otherwise the next line would end the run with an `OSError`. The descriptors are replaced, since
    tqdm and loggers use the stream objects that they were created with.
    """
    outputs = select.poll()
    for descriptor in OUTPUT_DESCRIPTORS:
        # no event is asked for, since errors are reported always
        outputs.register(descriptor, 0)
    for descriptor, events in outputs.poll(0):
        if events & _READER_GONE_EVENTS:
            redirect_to_null(descriptor)


def redirect_to_null(descriptor: int) -> None:
    """Let a descriptor of this process, such as 1 for stdout, write to /dev/null from now on."""
    null_device = os.open(os.devnull, os.O_WRONLY)
    # Where the descriptor was closed, it may be the one that `open` has returned.
    if null_device != descriptor:
        os.dup2(null_device, descriptor)
        os.close(null_device)


def flush_outputs() -> None:
    """Write out what Python holds in the buffers of stdout and stderr."""
    for stream in (sys.stdout, sys.stderr):
        # a stream may be closed, or None
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


class _LossyFile(io.FileIO):
    """An output whose writes never raise: what cannot be written is lost.

    When the reader of a pipe or the terminal is gone, the descriptor writes to /dev/null from then
    on, and stderr says so once. On a full disk only this piece is lost, since space may come back.
    """

    def write(self, data: ReadableBuffer, /) -> int:
        """Write to the output, and return the number of bytes that were written or are lost."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in _READER_GONE_ERRORS:
                redirect_to_null(self.fileno())
                _report_closed_stdout(self.fileno())
            return memoryview(data).nbytes


def _report_closed_stdout(descriptor: int) -> None:
    """Say on stderr that the reader of stdout is gone. Nobody can be told that stderr's is."""
    if descriptor != 1:
        return
    line = (
        "stdout has no reader any more (a closed pipe or terminal): the run goes on without it; "
        "metrics.jsonl in output_dir has the figures\n"
    )
    # Not by `print`, since this may be called within one.
    with suppress(OSError):
        os.write(2, line.encode())


def ignore_closed_outputs() -> None:
    """Let this process go on when nobody reads its stdout or stderr any more.

    Python raises `BrokenPipeError` at the next line, for instance when `train | head` has ended, or
    the program that writes the log. That suits a command that only prints, and not a run of hours,
    whose files can still be written.

    An output that was closed from the beginning (`>&-`) writes to /dev/null. Otherwise the next
    file that is opened would get the number of the output, and all that is printed would go there.

    This has to be called before loggers and progress bars are created, which keep the stream that
    they begin with.
    """
    sys.stdout = _stream_without_errors(sys.stdout, descriptor=1)
    sys.stderr = _stream_without_errors(sys.stderr, descriptor=2)


def _stream_without_errors(stream: TextIO | None, descriptor: int) -> TextIO:
    """Return a stream for a descriptor whose writes never raise, in place of `stream`.

    `stream`: `sys.stdout` or `sys.stderr`. It is None where the descriptor was closed from the
    beginning; a stream of a test or a notebook is returned as it is.
    """
    if stream is None:
        redirect_to_null(descriptor)
        return io.TextIOWrapper(io.FileIO(os.devnull, "w"), encoding="utf-8")
    if not _writes_to(stream, descriptor):
        return stream
    stream.flush()
    return _lossy_stream(stream, descriptor)


def _writes_to(stream: TextIO, descriptor: int) -> bool:
    """Return whether a stream is the usual one of a descriptor, not a test's or a notebook's."""
    try:
        return stream.fileno() == descriptor
    except (OSError, ValueError, AttributeError):
        return False


def _lossy_stream(stream: TextIO, descriptor: int) -> TextIO:
    """Return a text stream with the encoding of `stream`, whose writes never raise.

    It writes each line at once. Python would keep the lines for a pipe until there are 8 KB, and
    `train | tee run.log` would show steps minutes late.

    `descriptor`: what it writes to, 1 or 2.
    """
    file = _LossyFile(descriptor, "w", closefd=False)
    # `python -u` and PYTHONUNBUFFERED leave out the buffer below the text.
    is_unbuffered = isinstance(getattr(stream, "buffer", None), io.FileIO)
    return io.TextIOWrapper(
        file if is_unbuffered else io.BufferedWriter(file),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
        write_through=is_unbuffered,
    )
