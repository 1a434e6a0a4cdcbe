"""The next generation's images, read and processed while the policy learns from the present one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from adora_vl.rollout.distinct_rows import DistinctRows

Process = Callable[[dict[str, Any]], int]  # puts the images of a row into the cache; bytes that they take there


class Order(Protocol):
    """The sampler, which knows what comes next."""

    epoch: int

    def following(self, rows: Sequence[int], epoch: int) -> list[int]: ...


class NoPrefetch:
    """Where nothing is read ahead."""

    def start(self) -> None:
        """Called when a generation is complete, and the policy is about to learn from it."""

    def finish(self) -> None:
        """Called before a generation, which has the cache for itself, and at the end."""


class ImagePrefetch(NoPrefetch):
    """A thread between two generations. It only fills what the next one looks into first: rows that are decoded, and
    the cache of processed images. It draws no random number and moves no loader, so a run with it takes the same steps.

    What cannot be read or processed is passed over here: the loader meets the row again, and it is named there.
    """

    def __init__(self, rows: DistinctRows, order: Order, process: Process, limit_bytes: int) -> None:
        """`limit_bytes`: of processed images between two generations, or the cache would push out those of the next."""
        self._rows, self._order, self._process, self._limit_bytes = rows, order, process, limit_bytes
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()

    def start(self) -> None:
        """Begin with the loader's last batch, and go on with the one after it. The loader may be a batch ahead of the
        generation, and then its last batch is read, but not processed.
        """
        self.finish()
        self._rows.forget_ahead()
        self._ending.clear()
        arguments = (self._rows.latest, self._order.epoch)
        self._thread = threading.Thread(target=self._work, args=arguments, name="prefetch")
        self._thread.start()

    def finish(self) -> None:
        """End after the row at hand, and wait for that."""
        if self._thread is not None:
            self._ending.set()
            self._thread.join()
            self._thread = None

    def _work(self, latest: list[int], epoch: int) -> None:
        held = 0
        for index in dict.fromkeys([*latest, *self._order.following(latest, epoch)]):
            interpreter_ends = not threading.main_thread().is_alive()  # it waits for this thread
            if self._ending.is_set() or interpreter_ends or held > self._limit_bytes:
                return
            with suppress(Exception):
                held += self._process(self._rows.read_ahead(index))
