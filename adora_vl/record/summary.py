"""The last lines of a run: its metrics before and after, and the commands that come next."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from adora_vl.checkpoint.store import list_checkpoints
from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.blocks import ToolOptions
from adora_vl.evals.benchmark import BENCHMARK_FOLDER, benchmark_name_for
from adora_vl.models.load import ADAPTER_CONFIG_FILE, MERGED_FOLDER
from adora_vl.record.manifest import python_command
from adora_vl.record.metrics import METRICS_FILE, log_entry_kind
from adora_vl.record.progress import (
    accuracy_is_worth_showing,
    duration_text,
    no_signal_warning,
)
from adora_vl.record.record_files import ROLLOUTS_FOLDER
from adora_vl.record.result import (
    REWARD_KEY,
    describe_result,
    first_and_last_fifth,
    interval_text,
    training_change,
)
from adora_vl.record.shown_metrics import ACCURACY_KEY, METRIC_BY_KEY, PASS_RATE_KEY, SUMMARY_KEYS
from adora_vl.utils.cli import enum_value, pluralize, to_json_types, yaml_line


def evaluate_command(model: Path, data: str, output: Path, max_tokens: int) -> str:
    """Return the command that evaluates a model on the held-out split of a data set, to be printed.

    Where the data set has no such split, the command has the placeholder DATA for the user to fill.

    Args:
        model: the folder of the model.
        data: the folder of the data set.
        output: where the evaluation writes.
        max_tokens: the longest answer, in tokens.
    """
    has_held_out_split = any(Path(data).glob("data/test-*.parquet"))
    if has_held_out_split:
        benchmark = benchmark_name_for(Path(data))
        data_folder = data
        limit_options = ["--max-tokens", str(max_tokens)]
    else:
        # DATA may have other problems, which may need longer answers than those of the training.
        benchmark = "problems"
        data_folder = "DATA"
        limit_options = []
    options = ["--model", str(model), "--data", data_folder, "--output", str(output)]
    return shlex.join([*_evaluator_words(benchmark), "run", *options, *limit_options])


def _tool_options(config: AdoraGRPOConfig) -> list[str]:
    """Return the command-line options of an evaluator that give the model the run's tools.

    Options of the tools that have their default are left out.
    """
    words = ["--tools", *config.tools]
    # None or 0 is no limit, which is the evaluators' default
    max_rounds = config.max_tool_calling_iterations
    if max_rounds:
        words += ["--max-tool-calling-iterations", str(max_rounds)]
    default_options = to_json_types(ToolOptions())
    options = to_json_types(config.adora_tool_options)
    if isinstance(options, dict) and options != default_options:
        changed_options = {
            name: value for name, value in options.items() if value != default_options.get(name)
        }
        words += ["--tool-options", yaml_line(changed_options)]
    return words


def _evaluator_words(benchmark: str) -> list[str]:
    """Return the words that start the evaluator of a benchmark from the current folder.

    They are `python -m eval.<benchmark>`. Where the current folder has an `eval.py` or a package
    `eval/` of the user's own, Python would run the user's. Then the installed command `adora-vl` is
    returned, which does not look into the current folder.
    """
    # In a checkout of this project `eval/` is its own folder of benchmarks, which may be run.
    for module in (Path("eval.py"), Path("eval/__init__.py")):
        is_of_user = module.exists() and module.resolve().parent != BENCHMARK_FOLDER
        if is_of_user:
            return ["adora-vl", "eval", benchmark]
    return [python_command(), "-m", f"eval.{benchmark}"]


def merge_command(run: Path) -> str | None:
    """Return the command that merges the LoRA adapter in a run's folder into its base model.

    It writes to the subfolder in which the evaluators look for the merged model. None where the
    folder holds a whole model, which needs no merging.
    """
    has_adapter = (run / ADAPTER_CONFIG_FILE).is_file()
    has_whole_model = (run / "config.json").is_file()
    if has_whole_model or not has_adapter:
        return None
    return shlex.join(
        [python_command(), "-m", "adora_vl.export", str(run), str(run / MERGED_FOLDER)]
    )


def view_command(*runs: Path) -> str:
    """Return the command that writes the page of one or more runs."""
    folders = [str(run) for run in runs]
    return shlex.join([python_command(), "-m", "adora_vl.report", *folders])


class MetricRow(NamedTuple):
    """A row of the table of a run's metrics."""

    key: str
    """The metric's name in the log."""
    title: str
    first_mean: str
    """The metric's mean over the first fifth of the steps that logged it, as text."""
    last_mean: str
    """Its mean over the last fifth."""


def metric_rows(history: Sequence[Mapping[str, Any]]) -> list[MetricRow]:
    """Return the table of a run's metrics: means over the first and the last fifth of the log.

    A metric that was never logged has no row. `history` is the trainer's log history.
    """
    # The last entry of a run counts too: it has the metrics of the steps since the entry before.
    entries = [entry for entry in history if log_entry_kind(entry) != "eval"]
    rows = []
    for key in SUMMARY_KEYS:
        # The accuracy gets a row only if it is not the same as the pass rate.
        if key == ACCURACY_KEY and not any(accuracy_is_worth_showing(entry) for entry in entries):
            continue
        values = [entry[key] for entry in entries if entry.get(key) is not None]
        if not values:
            continue
        first_values, last_values = first_and_last_fifth(values)
        metric = METRIC_BY_KEY[key]
        rows.append(
            MetricRow(
                key=key,
                title=metric.title,
                first_mean=metric.format_for_table(fmean(first_values)),
                last_mean=metric.format_for_table(fmean(last_values)),
            )
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
    """Return what a run prints when it ends: metrics, files, and the commands that come next.

    Args:
        history: the log history.
        config: the run's settings.
        model: a folder that Transformers and vLLM can load, or a LoRA adapter that is to be merged
            first.
        seconds: how long the training took.
        data: the folder of the data set.
        command: the command that started the run; empty where it is not known.
    """
    steps_taken = max((entry.get("step", 0) for entry in history), default=0)
    lines = ["", f"Trained {pluralize(steps_taken, 'step')} in {duration_text(seconds)}."]
    warning = no_signal_warning(history)
    if warning is not None:
        lines += ["", f"warning: {warning}"]
    folder = Path(config.output_dir)
    lines += _metric_lines(folder, history)
    command_to_merge = merge_command(model)
    adapter_note = ""
    if command_to_merge is not None:
        adapter_note = (
            "the adapter alone, as after 4 bits or ZeRO-3 the whole model may not fit in this "
            "memory; "
        )
    lines += ["", f"Model         {model}  ({adapter_note}README.md: how to load it)"]
    lines.append(f"Metrics       {folder / METRICS_FILE}")
    if config.adora_record_gb:
        lines.append(f"Rollouts      {folder / ROLLOUTS_FOLDER}  (Parquet)")
    command_to_evaluate = None
    # The evaluators can use the tools of the key `tools`, but no environment.
    if not config.environment_factory:
        command_to_evaluate = evaluate_command(
            model,
            data=data,
            output=folder / "eval",
            max_tokens=config.max_completion_length,
        )
    if command_to_evaluate is not None and config.tools:
        command_to_evaluate += f" {shlex.join(_tool_options(config))}"
    command_by_title = {
        "View it": view_command(folder),
        "Merge it": command_to_merge,
        "Evaluate it": command_to_evaluate,
        "Train longer": _command_for_longer_run(config, command),
    }
    for title, next_command in command_by_title.items():
        if next_command is not None:
            lines.append(f"{title:<13} {next_command}")
    return lines


# The metrics whose change has an interval: the record has a value of them for each group.
_KEYS_WITH_INTERVAL = (REWARD_KEY, PASS_RATE_KEY)


def _metric_lines(folder: Path, history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the result of the run in one line, and the table of its metrics.

    The last column has the change of a metric with its interval, where the record of the rollouts
    gives one. The list is empty where nothing was logged.
    """
    rows = metric_rows(history)
    if not rows:
        return []
    lines = []
    result = describe_result(folder, history)
    if result is not None:
        lines += ["", result]
    lines += ["", f"{'':20}{'first fifth':>12}{'last fifth':>12}   change"]
    for row in rows:
        line = f"{row.title:20}{row.first_mean:>12}{row.last_mean:>12}"
        change = None
        if row.key in _KEYS_WITH_INTERVAL:
            change = training_change(folder, history, row.key)
        if change is not None and change.low is not None:
            line += f"   {interval_text(change, of_share=row.key == PASS_RATE_KEY)}"
        lines.append(line)
    return lines


def _command_for_longer_run(config: AdoraGRPOConfig, command: str) -> str | None:
    """Return the run's command with twice as many steps, which continues this run.

    None where the longer run would not continue this one. Without a checkpoint it begins anew. If
    the learning rate depends on the number of steps, a longer run has other rates from the start.

    Args:
        config: the run's settings.
        command: the command that started the run; empty where it is not known.
    """
    has_constant_rate = enum_value(config.lr_scheduler_type) == "constant"
    has_checkpoint = bool(list_checkpoints(Path(config.output_dir)))
    if command == "" or not has_constant_rate or not has_checkpoint:
        return None
    if config.max_steps > 0:
        return _with_option(command, "--max_steps", f"{2 * config.max_steps}")
    return _with_option(command, "--num_train_epochs", f"{2 * config.num_train_epochs:g}")


def _with_option(command: str, option: str, value: str) -> str:
    """Return a command with a value of an option, in the place of earlier values of it.

    For example, `train --max_steps 10 --seed 1` with `--max_steps` of 20 becomes
    `train --seed 1 --max_steps 20`.
    """
    words: list[str] = []
    is_value_of_option = False
    for word in shlex.split(command):
        if is_value_of_option:
            is_value_of_option = False
        elif word == option:
            is_value_of_option = True
        elif not word.startswith(f"{option}="):
            words.append(word)
    return shlex.join([*words, option, value])
