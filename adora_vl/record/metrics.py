"""The file `metrics.jsonl` of a run: one line for each entry of the trainer's log."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import TrainerCallback

from adora_vl.utils.files import replace_file

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


METRICS = "metrics.jsonl"
Line = dict[str, Any]


def kind_of(logs: Mapping[str, Any]) -> str:
    """Return the kind of a log entry: `end` for the last one, `eval`, or `train`.

    A step in which nothing was sampled is `train` as well.
    """
    if "train_runtime" in logs:
        return "end"
    return "eval" if any(key.startswith("eval_") for key in logs) else "train"


def as_line(logs: Mapping[str, Any], step: int, now: str | None) -> Line:
    """Return a log entry as a line of JSON.

    A figure that is not finite becomes None. `now` is the time as text, None for an entry that a
    checkpoint's history has.
    """
    figures = {key: _finite(value) for key, value in logs.items() if key != "step"}
    return {"step": step, "kind": kind_of(logs), "time": now, **figures}


def _finite(value: object) -> object:
    """Return a logged value in a type of JSON; None for a number that is not finite."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    try:
        number = float(value)  # type: ignore[arg-type]  # refused below
    except (TypeError, ValueError):  # the user's own callbacks may log anything
        return str(value)
    return number if math.isfinite(number) else None


def read_metrics(path: Path) -> list[Line]:
    """Read the lines of the file; there are none if it is missing.

    A last line that a crash has cut off is left out.
    """
    if not path.is_file():
        return []
    lines = []
    for text in path.read_bytes().split(b"\n"):
        try:
            line = json.loads(text)
        except ValueError:  # the last line of a run that was killed, or the end of the file
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int) and "kind" in line:
            lines.append(line)
    return lines


def resumed_lines(
    recorded: Iterable[Line], history: Sequence[Mapping[str, Any]], step: int
) -> list[Line]:
    """Return the lines of the file of a run that resumes after `step`.

    Later lines and the run's last entry are dropped; what the file lacks of the checkpoint's
    history is added.

    Args:
        recorded: the lines of the file so far.
        history: the log entries in the checkpoint.
        step: the optimizer step of the checkpoint.
    """
    lines = [*recorded, *(as_line(entry, int(entry["step"]), None) for entry in history)]
    unique: dict[_LineKey, Line] = {}
    for line in lines:
        if line["step"] <= step and line["kind"] != "end":
            unique.setdefault(_line_key(line), line)
    # an evaluation of a step is logged before the step's own line
    return sorted(unique.values(), key=lambda line: (line["step"], line["kind"] != "eval"))


class _LineKey(NamedTuple):
    """What identifies a line: a step has one line for its training, and one for each evaluation."""

    step: int
    kind: str
    evaluation: str


def _line_key(line: Line) -> _LineKey:
    """Return what tells a line from others: its step, its kind, and its evaluation."""
    return _LineKey(
        step=line["step"],
        kind=line["kind"],
        evaluation=min((key for key in line if key.startswith("eval_")), default=""),
    )


class MetricsFile(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Writes the file in `output_dir`, on the first rank."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Begin the file: empty, or with the lines up to the step from which the run resumes."""
        if not state.is_world_process_zero:
            return
        path = Path(args.output_dir) / METRICS
        path.parent.mkdir(parents=True, exist_ok=True)
        lines: list[Line] = []
        if state.global_step:
            lines = resumed_lines(read_metrics(path), state.log_history, state.global_step)
        replace_file(path, _as_text(lines))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: object,
    ) -> None:
        """Append a line, which is on the disk when this returns."""
        if state.is_world_process_zero and logs:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            with (Path(args.output_dir) / METRICS).open("a", encoding="utf-8") as stream:
                stream.write(_as_text([as_line(logs, state.global_step, now)]))
                stream.flush()
                os.fsync(stream.fileno())


def _as_text(lines: Iterable[Line]) -> str:
    """Return lines as the text of a JSONL file."""
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
