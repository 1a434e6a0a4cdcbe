"""Cleans rows in several processes, in order, with a bounded number of rows in memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

Mapper = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]
_AHEAD = 8  # rows of each worker that are on their way


@contextmanager
def ordered_map(workers: int) -> Iterator[Mapper]:
    """A `map` that keeps the order. One worker means this process; more use a pool that ends with the block."""
    if workers == 1:
        yield map
        return
    # Not forked from this process: its threads and its lock on the output folder must not live on in a worker.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["data_prep.clean_source"])
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent) as pool:

        def mapped(work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
            waiting: deque[Future[Any]] = deque()
            try:
                for item in items:
                    waiting.append(pool.submit(work, item))
                    if len(waiting) >= workers * _AHEAD:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

        yield mapped


def _end_with_parent() -> None:
    """A worker of a killed preparation would wait for its next row for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent says what becomes of it

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
