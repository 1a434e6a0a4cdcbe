"""Processes that share the work on the rows of a source, and keep the order of the rows."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any

OrderedMap = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]
_ROWS_BEFORE_POOL = 32  # rows that are cleaned in this process before the pool begins
# So many rows for each worker are handed to the pool before a result is awaited.
_ROWS_IN_FLIGHT_PER_WORKER = 8


@contextmanager
def ordered_map(workers: int) -> Iterator[OrderedMap]:
    """Provide the `with` block with a function like `map` that works in several processes.

    It keeps the order. With one worker it is `map` itself. With more there is a pool of `workers`
    processes, which ends with the block. This process does the first rows itself: a small table is
    cleaned before a pool has started.
    """
    if workers == 1:
        yield map
        return
    # Workers are not forked from this process, since its threads and its lock on the output folder
    # must not live on in a worker.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["adora_vl.conversion.pipeline"])
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent) as pool:

        def map_in_pool(work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
            """Yield `work(item)` for each item, in order.

            Workers run ahead of the caller, so that they need not wait while it writes rows. They
            do so by a few items only, since every result that waits takes memory.
            """
            futures: deque[Future[Any]] = deque()
            items = iter(items)
            yield from map(work, islice(items, _ROWS_BEFORE_POOL))
            try:
                for item in items:
                    futures.append(pool.submit(work, item))
                    if len(futures) >= workers * _ROWS_IN_FLIGHT_PER_WORKER:
                        yield futures.popleft().result()
                while futures:
                    yield futures.popleft().result()
            finally:
                # After an error nobody takes these results.
                for future in futures:
                    future.cancel()

        yield map_in_pool


def _end_with_parent() -> None:
    """Start a thread in a worker process that ends the worker when its parent has died.

    Without the thread the worker would wait for its next row for ever.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    # Ctrl-C reaches the workers too. They ignore it, since the parent ends them in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        """Wait for the end of the parent, and then end this process at once."""
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


MAX_WORKERS = 64  # far above what the one writer of rows keeps up with


def usable_cores() -> int:
    """Return how many cores this process may use, the default number of workers."""
    if hasattr(os, "sched_getaffinity"):  # Linux alone has it
        return min(MAX_WORKERS, len(os.sched_getaffinity(0)))
    return min(MAX_WORKERS, os.cpu_count() or 1)
