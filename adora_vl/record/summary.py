"""The last lines of a run: its figures before and after, and the commands that come next."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from adora_vl.checkpoint.store import checkpoints
from adora_vl.config import AdoraGRPOConfig
from adora_vl.evals.benchmark import BENCHMARK_FILES, for_data
from adora_vl.models.load import ADAPTER, MERGED
from adora_vl.record.manifest import interpreter
from adora_vl.record.metrics import ACCURACY, METRICS, PASS, differs_from_pass, kind_of, no_signal
from adora_vl.record.result import REWARD, interval_of, result_of, training_change
from adora_vl.record.rollouts import ROLLOUTS
from adora_vl.utils.cli import amount, spelled


def evaluate_command(model: Path, data: str, output: Path, max_tokens: int) -> str:
    """The command that evaluates `model` on the held-out split of `data`, with a placeholder if
    there is no such.
    """
    held_out = any(Path(data).glob("data/test-*.parquet"))
    benchmark, more = (
        (for_data(Path(data)), ["--max-tokens", str(max_tokens)]) if held_out else ("problems", [])
    )
    words = [
        "--model",
        str(model),
        "--data",
        data if held_out else "DATA",
        "--output",
        str(output),
        *more,
    ]
    return shlex.join([*_evaluator(benchmark), "run", *words])


def _evaluator(benchmark: str) -> list[str]:
    """The words that start the command of a benchmark from the current folder.

    Where that folder has an `eval.py` or a package `eval/` of the user's own, `python -m eval`
    would run it; the installed command does not look there.
    """
    for place in (Path("eval.py"), Path("eval/__init__.py")):
        if place.exists() and place.resolve().parent != BENCHMARK_FILES:
            return ["adora-vl-eval", benchmark]
    return [interpreter(), "-m", f"eval.{benchmark}"]


def merge_command(run: Path) -> str | None:
    """The command that merges a run's LoRA adapter, to where the evaluators look for it; None for a
    whole model.
    """
    if not (run / ADAPTER).is_file() or (run / "config.json").is_file():
        return None
    return shlex.join([interpreter(), "-m", "adora_vl.export", str(run), str(run / MERGED)])


def view_command(*runs: Path) -> str:
    return shlex.join([interpreter(), "-m", "adora_vl.report", *map(str, runs)])


# Title, key of the log history, format
FIGURES = (
    ("reward", "reward", "{:.3f}"),
    ("pass rate", PASS, "{:.3f}"),
    ("accuracy", ACCURACY, "{:.3f}"),
    ("TDS share", "adora/tds_share", "{:.3f}"),
    ("mean weight", "adora/weight_mean", "{:.3f}"),
    ("length, correct", "adora/length_correct", "{:.1f}"),
    ("length, wrong", "adora/length_wrong", "{:.1f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("engine drift, nats", "adora/drift", "{:.2g}"),
    ("seconds per step", "step_time", "{:.2f}"),
)


def figure_rows(history: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """For each figure its title and its means over the first and the last fifth of the logged
    steps, as text.
    """
    # The run's last entry holds the figures of the steps since the log before it.
    entries = [entry for entry in history if kind_of(entry) != "eval"]
    rows = []
    for title, key, form in FIGURES:
        if key == ACCURACY and not any(map(differs_from_pass, entries)):
            continue
        values = [entry[key] for entry in entries if entry.get(key) is not None]
        fifth = max(1, len(values) // 5)
        if values:
            rows.append(
                (title, form.format(fmean(values[:fifth])), form.format(fmean(values[-fifth:])))
            )
    return rows


def summary_lines(
    history: Sequence[Mapping[str, Any]],
    config: AdoraGRPOConfig,
    model: Path,
    seconds: float,
    *,
    data: str = "DATA",
    command: str = "",
) -> list[str]:
    """The lines of the summary; the table compares the first and the last fifth of the logged
    steps. `model`: a folder that transformers and vLLM can load, or a LoRA adapter that is to be
    merged first. `data`: the dataset's folder. `command`: the one that started the run.
    """
    steps_taken = max((entry.get("step", 0) for entry in history), default=0)
    lines = ["", f"Trained {amount(steps_taken, 'step')} in {seconds / 60:.1f} min."]
    silence = no_signal(history)
    lines += ["", f"warning: {silence}"] if silence else []
    folder = Path(config.output_dir)
    lines += _figures(folder, history)
    merge = merge_command(model)
    alone = (
        "the adapter alone, as after 4 bits or ZeRO-3 the whole model may not fit in this memory; "
        if merge
        else ""
    )
    lines += ["", f"Model         {model}  ({alone}README.md: how to load it)"]
    lines.append(f"Metrics       {folder / METRICS}")
    if config.adora_record_every:
        lines.append(f"Rollouts      {folder / ROLLOUTS}  (Parquet)")
    longest = config.max_completion_length
    calls = config.tools or config.environment_factory
    steps = {
        "View it": view_command(folder),
        "Merge it": merge,
        # The evaluators answer no calls.
        "Evaluate it": None
        if calls
        else evaluate_command(model, data=data, output=folder / "eval", max_tokens=longest),
        "Train longer": _longer(config, command),
    }
    return [*lines, *(f"{name:<13} {text}" for name, text in steps.items() if text)]


# The figures of the table that have an interval over groups; the record has them by group.
_BY_GROUP = {"reward": REWARD, "pass rate": PASS}


def _figures(folder: Path, history: Sequence[Mapping[str, Any]]) -> list[str]:
    """What came of the run, and the table of its figures, with the interval of a change where the
    groups tell it.
    """
    rows = figure_rows(history)
    if not rows:
        return []
    result = result_of(folder, history)
    lines = ["", result] if result else []
    lines += ["", f"{'':20}{'first fifth':>12}{'last fifth':>12}   change"]
    for title, first, last in rows:
        line = f"{title:20}{first:>12}{last:>12}"
        key = _BY_GROUP.get(title)
        change = training_change(folder, history, key) if key else None
        if change is not None and change.low is not None:
            line += f"   {interval_of(change)}"
        lines.append(line)
    return lines


def _longer(config: AdoraGRPOConfig, command: str) -> str | None:
    """The same command with twice as many steps; only if that run would be a continuation of this
    one.
    """
    constant = spelled(config.lr_scheduler_type) == "constant"
    if not command or not constant or not checkpoints(Path(config.output_dir)):
        return None
    if config.max_steps > 0:
        return f"{command} --max_steps {2 * config.max_steps}"
    return f"{command} --num_train_epochs {2 * config.num_train_epochs:g}"
