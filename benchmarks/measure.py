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
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Clock:
    """Seconds by phase, each without the phases inside it.

    `now`: `time.perf_counter`, or `time.process_time` for the seconds of all the process's threads,
    which other work on the machine disturbs less.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.seconds: dict[str, float] = defaultdict(float)
        self.phases: list[str] = []  # that the present moment is in, the innermost last
        self._seconds_inside: list[float] = []  # of phases inside each of `phases`

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
            self.seconds[name] += seconds - self._seconds_inside.pop()
            if self._seconds_inside:  # of the phase around this one
                self._seconds_inside[-1] += seconds

    def around(self, owner: Any, method: str, name: str | Callable[[Clock], str]) -> None:
        """Time every call of `owner.method`.

        `name`: of the phase, or what names it at the time of the call.
        """
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name if isinstance(name, str) else name(self)):
                return original(*args, **kwargs)

        setattr(
            owner,
            method,
            staticmethod(timed) if isinstance(owner, type) and _is_static(owner, method) else timed,
        )


def _is_static(owner: type, method: str) -> bool:
    return isinstance(vars(owner).get(method), staticmethod)


def resident_bytes(*, mapped: bool = True) -> int:
    """Return the memory of this process.

    `mapped`: with mapped files and shared memory, such as weights that are read.
    """
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - (0 if mapped else int(shared))) * _PAGE_BYTES


class PeakMemory:
    """The most memory of this process since the last `restart`, looked at every few milliseconds.

    With `MALLOC_MMAP_THRESHOLD_` at 65536 large blocks go back to the system when they are freed,
    so this follows what tensors there are. `apart`: whether the present moment belongs to a part of
    the step whose memory is not to count in `peak_of_rest`.
    """

    def __init__(
        self,
        *,
        mapped: bool = True,
        every: float = 0.002,
        apart: Callable[[], bool] = lambda: False,
    ) -> None:
        self.peak = self.peak_of_rest = 0
        self._mapped = mapped
        self._every = every
        self._apart = apart
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            before = self._apart()
            now = self.now()
            self.peak = max(self.peak, now)
            if not before and not self._apart():
                self.peak_of_rest = max(self.peak_of_rest, now)
            time.sleep(self._every)

    def restart(self) -> int:
        """Begin anew. Returns the peak until now."""
        peak = max(self.peak, self.now())
        self.peak = self.peak_of_rest = 0
        return peak

    def now(self) -> int:
        return resident_bytes(mapped=self._mapped)


def run_seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Seconds of a call, until the device has finished it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def fastest_by_turns(
    device: torch.device, ways: Mapping[str, Callable[..., object]], repeats: int
) -> dict[str, float]:
    """Median seconds of each, after one run that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, run in ways.items():
            spent = run_seconds(device, run)
            if turn:
                times[name].append(spent)
    return {name: statistics.median(spent) for name, spent in times.items()}


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """Return the most that tensors took on top of what was there: torch's allocator on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with NewTensors() as new:
        run()
    return new.peak


class NewTensors(TorchDispatchMode):
    """Bytes of the tensors that operations have made and that are still there; `peak`: the most at
    a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._sizes = dict[int, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        input_storages = {
            _storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        }
        for leaf in tree_leaves(result):
            if (
                isinstance(leaf, Tensor)
                and (number := _storage(leaf)) not in input_storages | self._sizes.keys()
            ):
                self._sizes[number] = leaf.untyped_storage().nbytes()
                weakref.finalize(leaf.untyped_storage(), self._sizes.pop, number, None)
        self.peak = max(self.peak, sum(self._sizes.values()))
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
