"""One readable line per logged step; on a terminal there is a progress bar below it."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback

from adora_vl.rollout_log.phases import PHASES

# Title, key of the log, format, factor
_FIGURES = (
    ("reward", "reward", "{:.3f}", 1),
    ("pass", "adora/pass_rate", "{:.0f}%", 100),
    ("TDS", "adora/tds_share", "{:.0f}%", 100),
    ("length", "completions/mean_length", "{:.0f}", 1),
    ("drift", "adora/drift", "{:.1g}", 1),
)
_WINDOW = 20  # the remaining time is estimated from this many steps


def duration(seconds: float) -> str:
    """`45s`, `3m05s`, `2h07m`, `1d03h`."""
    whole = round(seconds)
    for big, small, long, short in ((86400, 3600, "d", "h"), (3600, 60, "h", "m"), (60, 1, "m", "s")):
        if whole >= big:
            return f"{whole // big}{long}{whole % big // small:02}{short}"
    return f"{whole}s"


def progress_line(logs: Mapping[str, Any], step: int, total: int, left_s: float | None) -> str:
    """The known figures. Seconds are per step, as the mean since the last line."""
    parts = [f"step {step:>{len(str(total))}}/{total}"]
    for title, key, form, factor in _FIGURES:
        if logs.get(key) is not None:
            parts.append(f"{title} {form.format(factor * logs[key])}")
    seconds = {phase: logs.get(f"seconds/{phase}") for phase in PHASES}
    known = {phase: value for phase, value in seconds.items() if value is not None}
    line = "  ".join(parts)
    if known:
        line += f" | {_short(sum(known.values()))} s: "
        line += " ".join(f"{phase} {_short(value)}" for phase, value in known.items())
    return line if left_s is None else f"{line} | {duration(left_s)} left"


def _short(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.0f}"


class ProgressLine(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Replaces Transformers' progress bar and printed dictionaries. Only the first rank prints."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._ends: deque[tuple[int, float]] = deque(maxlen=_WINDOW)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._ends.clear()
        self._ends.append((state.global_step, time.monotonic()))
        silent = args.disable_tqdm or not sys.stderr.isatty()
        self._bar = tqdm(
            total=state.max_steps, initial=state.global_step, disable=silent, unit="step", dynamic_ncols=True
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._ends.append((state.global_step, time.monotonic()))
            self._bar.update(1)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self._bar is not None and logs and "reward" in logs:
            self._bar.write(progress_line(logs, state.global_step, state.max_steps, self._left(state)))
            sys.stdout.flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _left(self, state: Any) -> float | None:
        (first, began), (last, ended) = self._ends[0], self._ends[-1]
        return (ended - began) / (last - first) * (state.max_steps - last) if last > first else None
