"""Messages between the pool and its workers: JSON with its length before it. No pickle, so nothing to execute."""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any

_HEADER = 4
_MAX_BYTES = 1 << 20  # a job has two trees of at most 500 characters of text each


class ClosedError(Exception):
    """The other side is gone, or what came is no message."""


def pack(message: Any) -> bytes:
    """The bytes of one message."""
    body = json.dumps(message).encode()
    return len(body).to_bytes(_HEADER, "big") + body


def receive(fd: int, seconds: float | None = None) -> Any:
    """The next message from a pipe. Raises `TimeoutError` after `seconds` (None: never) and `ClosedError`.

    Waits with poll(2): no signal, so it works off the main thread, and no limit of 1024 descriptors as in select(2).
    """
    until = None if seconds is None else time.monotonic() + seconds
    length = int.from_bytes(_exactly(fd, _HEADER, until), "big")
    if length > _MAX_BYTES:
        raise ClosedError
    try:
        return json.loads(_exactly(fd, length, until))
    except ValueError:
        raise ClosedError from None


def _exactly(fd: int, count: int, until: float | None) -> bytes:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    parts: list[bytes] = []
    while count:
        wait_ms = None if until is None else max(0.0, 1000 * (until - time.monotonic()))
        if not poll.poll(wait_ms):
            raise TimeoutError
        try:
            part = os.read(fd, count)
        except OSError:
            raise ClosedError from None
        if not part:
            raise ClosedError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
