"""`metrics.jsonl`: one JSON object per logged step, appended and flushed. A resumed run first cuts it back to its step.

A training step's line has `"kind": "train"`, an evaluation's `"eval"`, the last one `"end"`; `step` and `time` (UTC)
are in each, the other keys are those of the log. A figure that is not finite is null.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from adora_vl.files import replace_file

METRICS = "metrics.jsonl"
Line = dict[str, Any]


def kind_of(logs: Mapping[str, Any]) -> str:
    """`end` for the run's last entry, `eval` for an evaluation, else `train`, also where nothing was sampled."""
    if "train_runtime" in logs:
        return "end"
    return "eval" if any(key.startswith("eval_") for key in logs) else "train"


def as_line(logs: Mapping[str, Any], step: int, now: str | None) -> Line:
    """The object of one log entry."""
    figures = {key: _finite(value) for key, value in logs.items() if key != "step"}
    return {"step": step, "kind": kind_of(logs), "time": now, **figures}


def _finite(value: Any) -> Any:
    if isinstance(value, bool | int | str) or value is None:
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):  # the user's own callbacks may log anything
        return str(value)
    return number if math.isfinite(number) else None


def read_metrics(path: Path) -> list[Line]:
    """The lines of the file, none if it is missing. A last line that a crash has cut off is left out."""
    lines = []
    for text in path.read_bytes().split(b"\n") if path.is_file() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int) and "kind" in line:
            lines.append(line)
    return lines


def resumed_lines(found: Iterable[Line], history: Sequence[Mapping[str, Any]], step: int) -> list[Line]:
    """What the file has to hold when a run resumes after `step`: no later line, and also the lines of the checkpoint's
    history that the file lacks (the checkpoint may come from another folder).
    """
    lines = [*found, *(as_line(entry, int(entry["step"]), None) for entry in history)]
    kept: dict[tuple[Any, ...], Line] = {}
    for line in lines:
        if line["step"] <= step and line["kind"] != "end":
            kept.setdefault(_identity(line), line)
    return sorted(kept.values(), key=lambda line: (line["step"], line["kind"] != "eval"))


def _identity(line: Line) -> tuple[Any, ...]:
    """What a line is known by: a step has one line for its training, and one for each evaluation."""
    return line["step"], line["kind"], min((key for key in line if key.startswith("eval_")), default="")


class MetricsFile(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Writes the file in `output_dir`, on the first rank."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        path = Path(args.output_dir) / METRICS
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = resumed_lines(read_metrics(path), state.log_history, state.global_step) if state.global_step else []
        replace_file(path, _as_text(lines))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            with (Path(args.output_dir) / METRICS).open("a", encoding="utf-8") as stream:
                stream.write(_as_text([as_line(logs, state.global_step, now)]))
                stream.flush()
                os.fsync(stream.fileno())


def _as_text(lines: Iterable[Line]) -> str:
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
