"""Worker processes for answers that need sympy. They start when first needed, and are killed at a job's deadline.

Each worker is a fresh `python -m adora_vl.rewards.worker`, not a fork of this process: that is safe beside threads,
CUDA and vLLM, costs no copy of the trainer's memory, and does not depend on multiprocessing's start method.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, get_args

from adora_vl.rewards.grammar import Tree
from adora_vl.rewards.wire import ClosedError, pack, receive

# The last four mean that no worker answered: past the deadline, over its memory, dead twice, or none could be started.
Answer = Literal["equal", "different", "undefined", "undecided", "deadline", "memory", "worker_died", "no_worker"]

MEMORY_BYTES = 1 << 30  # of address space; a worker at rest has about 0.2 GiB
START_UP_S = 60.0  # a worker starts in half a second; this is for a machine under heavy load
MAX_WORKERS = 4
_MAX_JOBS = 2000  # of one worker, so that sympy's caches cannot grow with the length of a run
_ANSWERS = frozenset(get_args(Answer))


class Worker:
    """One worker process, used by one thread at a time."""

    def __init__(self) -> None:
        """Starts the process and does not wait for it."""
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-P", "-m", "adora_vl.rewards.worker", str(os.getpid()), str(MEMORY_BYTES)]
        self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and module
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdin and self._process.stdout
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        self._ready = False
        self.jobs = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, seconds: float) -> bool:
        """Whether the worker has finished starting within `seconds`."""
        try:
            self._ready = self._ready or receive(self._stdout.fileno(), seconds) == "ready"
        except (TimeoutError, ClosedError):
            return False
        return self._ready

    def ask(self, answer: Tree, gold: Tree, seconds: float) -> Answer:
        """The worker's answer. Raises `TimeoutError`, and `ClosedError` if the worker dies."""
        self.jobs += 1
        message = pack({"answer": answer, "gold": gold, "seconds": seconds})
        try:
            written = os.write(self._stdin.fileno(), message)
        except OSError:
            raise ClosedError from None
        if written != len(message):  # a job is far smaller than an empty pipe
            raise ClosedError
        found = receive(self._stdout.fileno(), seconds)
        if found not in _ANSWERS:
            raise ClosedError
        return found  # type: ignore[no-any-return]

    def kill(self) -> None:
        """End the process, whatever it does, and close its pipes."""
        self.end()
        self._close()

    def end(self) -> None:
        """End the process and take its exit status, so that no zombie is left."""
        self._process.kill()
        self._process.wait()

    def abandon(self) -> None:
        """In a forked child: forget the parent's worker without touching the process."""
        self._process.returncode = 0  # or its destructor would wait for a process that is not this one's child
        self._close()

    def _close(self) -> None:
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                pipe.close()


class Pool:
    """At most `size` workers, shared by all threads of this process."""

    def __init__(self, size: int | None = None) -> None:
        self.size = size or min(MAX_WORKERS, os.cpu_count() or 1)
        self._changed = threading.Condition()
        self._free: list[Worker] = []
        self._all: set[Worker] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that there are now."""
        with self._changed:
            return [worker.pid for worker in self._all]

    def ask(self, answer: Tree, gold: Tree, seconds: float, *, queue: bool = False) -> Answer:
        """Whether two trees have the same value, within `seconds`.

        Those run while the job waits for a free worker and while the worker works; with `queue` only the latter. The
        start of a worker is not counted: it has a bound of its own, and is over before the first job of most runs ends.
        """
        until = None if queue else time.monotonic() + seconds
        found: Answer = "no_worker"
        for _ in range(2):  # whatever kills a worker, the job is tried once more
            try:
                worker = self._take(None if until is None else until - time.monotonic())
            except OSError:  # no process can be started: no memory, processes or descriptors are left
                continue
            if worker is None:
                return "no_worker" if self._closed else "deadline"
            waited = time.monotonic()
            ready = worker.wait_ready(START_UP_S)
            if until is not None:
                until += time.monotonic() - waited
            left = seconds if until is None else until - time.monotonic()
            if not ready:
                self._drop(worker)
                continue
            found = self._tried(worker, answer, gold, max(0.0, left))
            if found != "worker_died":
                return found
        if found == "no_worker" and not self._closed:
            warnings.warn("a grading worker did not start: is sympy installed?", RuntimeWarning, stacklevel=2)
        return found

    def _tried(self, worker: Worker, answer: Tree, gold: Tree, seconds: float) -> Answer:
        """A ready worker's answer; the worker is given back, or killed."""
        try:
            found = worker.ask(answer, gold, seconds)
        except TimeoutError:
            self._drop(worker, replace=True)
            return "deadline"
        except ClosedError:
            self._drop(worker)
            return "worker_died"
        if found == "memory" or worker.jobs >= _MAX_JOBS:
            self._drop(worker, replace=True)
        else:
            self._give_back(worker)
        return found

    def ask_all(self, jobs: Sequence[tuple[Tree, Tree]], seconds: float) -> list[tuple[Answer, float]]:
        """As `ask` for each pair over all workers at once, and the seconds that each took with its wait for a worker.

        Each has its own deadline of `seconds`, from when a worker takes it.
        """
        began = time.monotonic()

        def timed(job: tuple[Tree, Tree]) -> tuple[Answer, float]:
            return self.ask(*job, seconds, queue=True), time.monotonic() - began

        if len(jobs) < 2:
            return [timed(job) for job in jobs]
        with ThreadPoolExecutor(min(self.size, len(jobs)), thread_name_prefix="grading") as threads:
            return list(threads.map(timed, jobs))

    def close(self) -> None:
        """End all workers. Unfinished jobs return `no_worker`."""
        with self._changed:
            self._closed = True
            idle, working = self._free, self._all - {*self._free}
            self._all, self._free = set(), []
            self._changed.notify_all()
        for worker in idle:
            worker.kill()
        for worker in working:
            worker.end()  # the thread that waits for its answer closes the pipes

    def abandon(self) -> None:
        """In a forked child: close the copies of the pipes, so that the parent's workers still see their parent end."""
        for worker in self._all:
            worker.abandon()

    def _take(self, seconds: float | None) -> Worker | None:
        """A worker for this thread alone, started if need be; None if none gets free in time or the pool is closed.

        Raises `OSError` where the system refuses a process.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._free or len(self._all) < self.size, seconds)
            if self._closed:
                return None
            if self._free:
                return self._free.pop()
            return self._started() if len(self._all) < self.size else None

    def _started(self) -> Worker:
        worker = Worker()
        self._all.add(worker)
        return worker

    def _give_back(self, worker: Worker) -> None:
        with self._changed:
            if not self._closed:
                self._free.append(worker)
                self._changed.notify()

    def _drop(self, worker: Worker, *, replace: bool = False) -> None:
        """Kill a worker. `replace`: start the next one now, so that it is ready when it is needed."""
        worker.kill()
        with self._changed:
            self._all.discard(worker)
            if replace and not self._closed:
                with contextlib.suppress(OSError):  # the next job will try again
                    self._free.insert(0, self._started())  # at the end of the queue, which is taken from the back
            self._changed.notify()


_lock = threading.Lock()
_pool: Pool | None = None


def shared_pool() -> Pool:
    """The pool of this process, made on first use."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = Pool()
        return _pool


def close_pool() -> None:
    """End the workers of this process; the next use starts new ones."""
    global _pool
    with _lock:
        pool, _pool = _pool, None
    if pool:
        pool.close()


def _forget() -> None:
    """A forked child has none of its parent's threads, and must not share its pipes or its locks."""
    global _lock, _pool
    _lock = threading.Lock()
    pool, _pool = _pool, None
    if pool:
        pool.abandon()


atexit.register(close_pool)
os.register_at_fork(after_in_child=_forget)
