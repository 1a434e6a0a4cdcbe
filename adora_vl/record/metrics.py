"""The file `metrics.jsonl` of a run: one line for each entry of the trainer's log."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import TrainerCallback

from adora_vl.checkpoint.trl_state import LOSSES_KEY
from adora_vl.record.manifest import time_now
from adora_vl.utils.files import replace_file

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


METRICS_FILE = "metrics.jsonl"
MetricsLine = dict[str, Any]


def log_entry_kind(logs: Mapping[str, Any]) -> str:
    """Return the kind of a log entry: `train` for steps, `eval`, or `end` for the run's last one.

    Steps in which nothing was sampled, and which have no reward, are `train` as well.
    """
    # Transformers logs both once, when the training ends. The end of a run that died just before
    # that has no runtime (`write_missing_end_of_metrics`).
    if "train_runtime" in logs or "train_loss" in logs:
        return "end"
    is_evaluation = any(key.startswith("eval_") for key in logs)
    return "eval" if is_evaluation else "train"


def log_entry_to_line(logs: Mapping[str, Any], step: int, time: str | None) -> MetricsLine:
    """Return a log entry as a line of `metrics.jsonl`, before it becomes text.

    Args:
        logs: the entry; a metric of it that is not finite becomes None.
        step: the optimizer step after which it was logged.
        time: when it was logged, as text; None for an entry from a checkpoint, which does not say.
    """
    metrics = {key: _as_json_value(value) for key, value in logs.items() if key != "step"}
    return {"step": step, "kind": log_entry_kind(logs), "time": time, **metrics}


def _as_json_value(value: object) -> object:
    """Return a logged value in a type of JSON; None for a number that is not finite."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    try:
        number = float(value)  # type: ignore[arg-type]  # refused below
    except (TypeError, ValueError):  # the user's own callbacks may log anything
        return str(value)
    return number if math.isfinite(number) else None


def read_metrics(path: Path) -> list[MetricsLine]:
    """Read the lines of `metrics.jsonl` as dictionaries; an empty list if the file is missing.

    A last line that a crash has cut off is left out. A line that no run writes is left out too.
    """
    if not path.is_file():
        return []
    lines = []
    for text in path.read_bytes().split(b"\n"):
        try:
            line = json.loads(text)
        except ValueError:  # the last line of a run that was killed, or the end of the file
            continue
        if not isinstance(line, dict):
            continue
        if isinstance(line.get("step"), int) and "kind" in line:
            lines.append(line)
    return lines


def lines_kept_by_resumed_run(
    lines_of_file: Iterable[MetricsLine], history: Sequence[Mapping[str, Any]], step: int
) -> list[MetricsLine]:
    """Return the lines with which `metrics.jsonl` goes on in a run that resumes from a checkpoint.

    Lines of later steps are dropped, since these steps are made again. The entry with which the
    earlier run ended is dropped too. Lines that the file lacks are taken from the checkpoint.

    Args:
        lines_of_file: the lines of the file so far.
        history: the log entries in the checkpoint.
        step: the optimizer step of the checkpoint.
    """
    history_lines = [
        log_entry_to_line(entry, step=int(entry["step"]), time=None) for entry in history
    ]
    line_by_key: dict[_LineKey, MetricsLine] = {}
    # The file's own lines go first, since they have the time. Of two lines with the same key,
    # `setdefault` keeps the first.
    for line in [*lines_of_file, *history_lines]:
        if line["step"] <= step and line["kind"] != "end":
            line_by_key.setdefault(_line_key(line), line)
    # Sorting keeps the order of the lines of a step. Our evaluations are logged before the line of
    # their step, and those of Transformers after it.
    return sorted(line_by_key.values(), key=lambda line: line["step"])


def write_missing_end_of_metrics(
    output_dir: Path, checkpoint_manifest: Mapping[str, Any], state: TrainerState
) -> None:
    """Write the end of `metrics.jsonl`, where a run has died after the checkpoint of its last step.

    The new line has the metrics of the steps since the line before it. How long the training took
    is not known. If the file has its end already, that end is kept. The entry of the end is also
    appended to the history in `state`.

    Args:
        output_dir: the folder of the run.
        checkpoint_manifest: what the checkpoint's manifest says.
        state: the state of the training in the checkpoint.
    """
    path = output_dir / METRICS_FILE
    lines_of_file = read_metrics(path)
    ends = [line for line in lines_of_file if line["kind"] == "end"]
    lines = lines_kept_by_resumed_run(lines_of_file, state.log_history, state.global_step)
    if ends and ends[-1]["step"] == state.global_step:
        end = ends[-1]
    else:
        end = log_entry_to_line(
            _final_log_entry(checkpoint_manifest, state), step=state.global_step, time=time_now()
        )
    replace_file(path, _to_jsonl([*lines, end]))
    entry = {key: value for key, value in end.items() if key not in ("kind", "time")}
    state.log_history.append(entry)


def _final_log_entry(checkpoint_manifest: Mapping[str, Any], state: TrainerState) -> dict[str, Any]:
    """Return the entry that Transformers and TRL log when a training ends, without its times.

    The manifest has the sum of the losses up to the last logged step as `logged`, and the sum of
    the losses after it, one for each rank, as `rest`.
    """
    entry: dict[str, Any] = {"total_flos": state.total_flos, "epoch": state.epoch}
    losses = checkpoint_manifest.get(LOSSES_KEY)
    loss_sum = math.nan
    if losses is not None:
        # Transformers divides what the first rank has summed up.
        loss_sum = losses["logged"] + losses["rest"][0]
    entry["train_loss"] = loss_sum / max(state.global_step, 1)
    for name, values in checkpoint_manifest.get("metrics", {}).items():
        valid_values = [value for value in values if not math.isnan(value)]
        entry[name] = sum(valid_values) / len(valid_values) if valid_values else None
    return entry


class _LineKey(NamedTuple):
    """What identifies a line: a step has one line for its training, and one for each evaluation."""

    step: int
    kind: str
    evaluation: str


def _line_key(line: MetricsLine) -> _LineKey:
    """Return what tells a line from others: its step, its kind, and its evaluation.

    An evaluation is known by the first of its metrics in alphabetical order, such as
    `eval_geometry_accuracy`. Evaluations on several data sets have metrics of different names.
    """
    evaluation_keys = [key for key in line if key.startswith("eval_")]
    return _LineKey(
        step=line["step"], kind=line["kind"], evaluation=min(evaluation_keys, default="")
    )


class MetricsFile(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Writes every entry of the trainer's log to `metrics.jsonl` in `output_dir`, on rank 0."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Begin the file: empty, or with the lines up to the step after which the run resumes."""
        if not state.is_world_process_zero:
            return
        path = Path(args.output_dir) / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        lines: list[MetricsLine] = []
        if state.global_step:
            lines = lines_kept_by_resumed_run(
                read_metrics(path), state.log_history, state.global_step
            )
        replace_file(path, _to_jsonl(lines))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: object,
    ) -> None:
        """Append the log entry as a line, which is on the disk when this returns."""
        if not state.is_world_process_zero or not logs:
            return
        line = log_entry_to_line(logs, step=state.global_step, time=time_now())
        with (Path(args.output_dir) / METRICS_FILE).open("a", encoding="utf-8") as stream:
            stream.write(_to_jsonl([line]))
            stream.flush()
            os.fsync(stream.fileno())


def _to_jsonl(lines: Iterable[MetricsLine]) -> str:
    """Return lines as the text of a JSONL file."""
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
