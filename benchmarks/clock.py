"""What a step takes: seconds by phase, and the peak of the process's memory."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Clock:
    """Seconds by phase, each without the phases inside it.

    `now`: `time.perf_counter`, or `time.process_time` for the seconds of all the process's threads, which other work on
    the machine disturbs less.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.seconds: dict[str, float] = defaultdict(float)
        self.phases: list[str] = []  # that the present moment is in, the innermost last
        self._inner: list[float] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What another thread than the main one does meanwhile is in the phase that the main one is in."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        start = self.now()
        self.phases.append(name)
        self._inner.append(0.0)
        try:
            yield
        finally:
            spent = self.now() - start
            self.phases.pop()
            self.seconds[name] += spent - self._inner.pop()
            if self._inner:
                self._inner[-1] += spent

    def around(self, owner: Any, method: str, name: str | Callable[[Clock], str]) -> None:
        """Time every call of `owner.method`. `name`: of the phase, or what names it at the time of the call."""
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name if isinstance(name, str) else name(self)):
                return original(*args, **kwargs)

        setattr(owner, method, staticmethod(timed) if isinstance(owner, type) and _is_static(owner, method) else timed)


def _is_static(owner: type, method: str) -> bool:
    return isinstance(vars(owner).get(method), staticmethod)


class PeakMemory:
    """The process's resident memory, sampled every two milliseconds. Large blocks go back to the system when freed
    (`MALLOC_MMAP_THRESHOLD_`, set by `benchmarks.step`), so this follows what tensors there are.

    `apart`: whether the present moment belongs to a part of the step whose memory is not to count in `peak_of_rest`.
    """

    def __init__(self, apart: Callable[[], bool] = lambda: False) -> None:
        self.peak = self.peak_of_rest = 0
        self._apart = apart
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            before, now = self._apart(), self.now()
            self.peak = max(self.peak, now)
            if not before and not self._apart():
                self.peak_of_rest = max(self.peak_of_rest, now)
            time.sleep(0.002)

    def restart(self) -> None:
        self.peak = self.peak_of_rest = 0

    @staticmethod
    def now() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
