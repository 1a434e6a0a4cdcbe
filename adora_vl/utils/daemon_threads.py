"""Runs jobs on daemon threads, which a process that ends does not wait for.

Python joins the threads of a `ThreadPoolExecutor` when a process ends. Those of
`multiprocessing.pool.ThreadPool` are daemons too, but a pool takes a tenth of a second to close,
and never returns where a job raises `SystemExit`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import TypeVar

_T = TypeVar("_T")


def run_on_daemon_threads(
    jobs: Sequence[Callable[[], _T]], max_threads: int, thread_name: str
) -> list[Future[_T]]:
    """Run all jobs on at most `max_threads` daemon threads, and wait until they are done.

    Returns a future for each job, in their order. It has the result of the job, or the exception
    that the job raised.
    """
    futures = [Future[_T]() for _ in jobs]
    queue = deque(zip(jobs, futures, strict=True))

    def run_queue() -> None:
        """Run jobs from the queue until it is empty."""
        while queue:
            with suppress(IndexError):  # another thread has taken the last job
                job, future = queue.popleft()
                set_outcome(future, job)

    threads = []
    for _ in range(min(max_threads, len(jobs))):
        threads.append(Thread(target=run_queue, name=thread_name, daemon=True))
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        # Ctrl-C ends the wait. The threads then finish their jobs and begin no others.
        queue.clear()
    return futures


def set_outcome(future: Future[_T], job: Callable[[], _T]) -> None:
    """Run `job`, and put its result or its exception into the future."""
    try:
        future.set_result(job())
    except BaseException as error:
        future.set_exception(error)
