"""What a step takes: seconds by phase or as a whole, and the peak of memory."""

from __future__ import annotations

import os
import statistics
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Clock:
    """Counts seconds by phase, each without the phases inside it.

    For example, a phase of 5 seconds with another one of 2 seconds inside it counts 3.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """Start without any phase.

        `now`: `time.perf_counter`, or `time.process_time` for the seconds of all the process's
        threads, which other work on the machine disturbs less.
        """
        self.now = now
        self.seconds: dict[str, float] = defaultdict(float)
        self.phases: list[str] = []  # the phases of the present moment, the innermost last
        # For each of `phases` the seconds of phases inside it that are over.
        self._seconds_inside: list[float] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to a phase, without those of phases inside it.

        The work of other threads counts in the phase of the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        start = self.now()
        self.phases.append(name)
        self._seconds_inside.append(0.0)
        try:
            yield
        finally:
            seconds = self.now() - start
            self.phases.pop()
            seconds_inside = self._seconds_inside.pop()
            self.seconds[name] += seconds - seconds_inside
            if self._seconds_inside:
                # The phase around this one does not count these seconds.
                self._seconds_inside[-1] += seconds

    def around(self, owner: object, method: str, name: str | Callable[[Clock], str]) -> None:
        """Time every call of a method of an object or class.

        Args:
            owner: the object or class.
            method: the name of the method.
            name: the name of the phase, or a function that returns it at the time of each call.
        """
        owner_class = owner if isinstance(owner, type) else type(owner)
        # `getattr` would find `__call__` in any class: that of `type` itself.
        assert method in dir(owner_class), f"{owner_class.__name__} has no method {method}"
        original = getattr(owner, method)

        def timed(*args: object, **kwargs: object) -> object:
            phase_name = name if isinstance(name, str) else name(self)
            with self.phase(phase_name):
                return original(*args, **kwargs)

        is_static = isinstance(vars(owner).get(method), staticmethod)
        setattr(owner, method, staticmethod(timed) if is_static else timed)


def resident_bytes() -> int:
    """Return the memory of this process, with mapped files such as weights that are read."""
    resident_pages = Path("/proc/self/statm").read_text().split()[1]
    return int(resident_pages) * _PAGE_BYTES


class PeakMemory:
    """The most memory of this process since the last `restart`, looked at every few milliseconds.

    With `MALLOC_MMAP_THRESHOLD_` at 65536 large blocks go back to the system when they are freed,
    so this follows what tensors there are.

    Attributes:
        peak: the most bytes.
        peak_of_rest: the most bytes outside of the part of the step that is left out.
    """

    INTERVAL_S = 0.002

    def __init__(self, leaves_out: Callable[[], bool] = lambda: False) -> None:
        """Start to watch.

        `leaves_out`: returns whether the present moment belongs to a part of the step whose memory
        is not to count in `peak_of_rest`.
        """
        self.peak = 0
        self.peak_of_rest = 0
        self._leaves_out = leaves_out
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """Look at the memory for as long as the process lives."""
        while True:
            # The part may begin or end while the memory is read.
            was_left_out = self._leaves_out()
            used_bytes = self.now()
            self.peak = max(self.peak, used_bytes)
            if not was_left_out and not self._leaves_out():
                self.peak_of_rest = max(self.peak_of_rest, used_bytes)
            time.sleep(self.INTERVAL_S)

    def restart(self) -> None:
        """Forget the peaks so far."""
        self.peak = 0
        self.peak_of_rest = 0

    def now(self) -> int:
        """Return the bytes that the process has now."""
        return resident_bytes()


def run_seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Return the seconds of a call, until the device has finished it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def median_seconds_by_turns(
    device: torch.device, ways: Mapping[str, Callable[..., object]], repeats: int
) -> dict[str, float]:
    """Return the median seconds of each way, whose calls come by turns.

    Args:
        device: where the ways compute.
        ways: a function for each way, by its name.
        repeats: how many calls of each are counted, after a first one that is not.
    """
    seconds_by_way: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, run in ways.items():
            seconds = run_seconds(device, run)
            if turn > 0:
                seconds_by_way[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in seconds_by_way.items()}


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """Return the most bytes that new tensors had at once during a call.

    On a GPU they are those of torch's allocator.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with NewTensors() as new_tensors:
        run()
    return new_tensors.peak


class NewTensors(TorchDispatchMode):
    """Follows the tensors that operations make inside the block, until they are freed.

    `peak`: the most bytes that they had at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._bytes_by_storage: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and count the storages that it has made."""
        result = func(*args, **(kwargs or {}))
        known_storages = _storages_in((args, kwargs)).keys() | self._bytes_by_storage.keys()
        for number, storage in _storages_in(result).items():
            if number not in known_storages:
                self._bytes_by_storage[number] = storage.nbytes()
                weakref.finalize(storage, self._bytes_by_storage.pop, number, None)
        self.peak = max(self.peak, sum(self._bytes_by_storage.values()))
        return result


def _storages_in(tree: object) -> dict[int, UntypedStorage]:
    """Return the storages of the tensors in nested values, by their numbers."""
    storages = [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return {storage._cdata: storage for storage in storages}
