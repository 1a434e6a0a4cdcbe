"""The last lines of a run: its figures before and after, and the commands that come next."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from adora_vl.checkpoint.store import checkpoints
from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.blocks import ToolOptions
from adora_vl.evals.benchmark import BENCHMARK_FILES, benchmark_name_for
from adora_vl.models.load import ADAPTER, MERGED
from adora_vl.record.figures import ACCURACY, FIGURES, PASS, SUMMARY
from adora_vl.record.manifest import interpreter
from adora_vl.record.metrics import METRICS, kind_of
from adora_vl.record.progress import differs_from_pass, no_signal
from adora_vl.record.result import REWARD, interval_of, result_of, training_change
from adora_vl.record.rollouts import ROLLOUTS
from adora_vl.utils.cli import amount, plain, spelled, yaml_line


def evaluate_command(model: Path, data: str, output: Path, max_tokens: int) -> str:
    """Return the command that evaluates a model on the held-out split of a data set.

    Where the data set has no such split, the command has the placeholder DATA.

    Args:
        model: the folder of the model.
        data: the folder of the data set.
        output: where the evaluation writes.
        max_tokens: the longest answer, in tokens.
    """
    has_held_out_split = any(Path(data).glob("data/test-*.parquet"))
    if has_held_out_split:
        benchmark = benchmark_name_for(Path(data))
        folder = data
        limit = ["--max-tokens", str(max_tokens)]
    else:
        benchmark = "problems"
        folder = "DATA"
        limit = []
    words = ["--model", str(model), "--data", folder, "--output", str(output), *limit]
    return shlex.join([*_evaluator(benchmark), "run", *words])


def _tool_words(config: AdoraGRPOConfig) -> list[str]:
    """Return the options of an evaluator that give the model the run's tools."""
    words = ["--tools", *config.tools]
    rounds = config.max_tool_calling_iterations
    if rounds:
        words += ["--max-tool-calling-iterations", str(rounds)]
    usual = plain(ToolOptions())
    options = plain(config.adora_tool_options)
    if isinstance(options, dict) and options != usual:
        changed = {name: value for name, value in options.items() if value != usual.get(name)}
        words += ["--tool-options", yaml_line(changed)]
    return words


def _evaluator(benchmark: str) -> list[str]:
    """Return the words that start the command of a benchmark from the current folder.

    Where that folder has an `eval.py` or a package `eval/` of the user's own, `python -m eval`
    would run it; the installed command does not look there.
    """
    for module in (Path("eval.py"), Path("eval/__init__.py")):
        if module.exists() and module.resolve().parent != BENCHMARK_FILES:
            return ["adora-vl-eval", benchmark]
    return [interpreter(), "-m", f"eval.{benchmark}"]


def merge_command(run: Path) -> str | None:
    """Return the command that merges a run's LoRA adapter; None where the run has a whole model.

    It writes to where the evaluators look for the merged model.
    """
    if not (run / ADAPTER).is_file() or (run / "config.json").is_file():
        return None
    return shlex.join([interpreter(), "-m", "adora_vl.export", str(run), str(run / MERGED)])


def view_command(*runs: Path) -> str:
    """Return the command that writes the page of one or more runs."""
    return shlex.join([interpreter(), "-m", "adora_vl.report", *map(str, runs)])


def figure_rows(history: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Return each figure's title, and its means over the first and last fifth of the steps."""
    # The run's last entry holds the figures of the steps since the log before it.
    entries = [entry for entry in history if kind_of(entry) != "eval"]
    rows = []
    for key in SUMMARY:
        # The accuracy is a row of its own only if it is not the pass rate.
        if key == ACCURACY and not any(map(differs_from_pass, entries)):
            continue
        values = [entry[key] for entry in entries if entry.get(key) is not None]
        if not values:
            continue
        fifth = max(1, len(values) // 5)
        figure = FIGURES[key]
        before = figure.in_table(fmean(values[:fifth]))
        after = figure.in_table(fmean(values[-fifth:]))
        rows.append((figure.title, before, after))
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
    """Return the last lines of a run: figures, files, and the commands that come next.

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
    lines = ["", f"Trained {amount(steps_taken, 'step')} in {seconds / 60:.1f} min."]
    silence = no_signal(history)
    lines += ["", f"warning: {silence}"] if silence else []
    folder = Path(config.output_dir)
    lines += _figures(folder, history)
    merge = merge_command(model)
    adapter_note = ""
    if merge:
        adapter_note = (
            "the adapter alone, as after 4 bits or ZeRO-3 the whole model may not fit in this "
            "memory; "
        )
    lines += ["", f"Model         {model}  ({adapter_note}README.md: how to load it)"]
    lines.append(f"Metrics       {folder / METRICS}")
    if config.adora_record_gb:
        lines.append(f"Rollouts      {folder / ROLLOUTS}  (Parquet)")
    evaluate = None
    # The evaluators know the tools of the key, and no environment.
    if not config.environment_factory:
        evaluate = evaluate_command(
            model,
            data=data,
            output=folder / "eval",
            max_tokens=config.max_completion_length,
        )
    if evaluate is not None and config.tools:
        evaluate += f" {shlex.join(_tool_words(config))}"
    commands = {
        "View it": view_command(folder),
        "Merge it": merge,
        "Evaluate it": evaluate,
        "Train longer": _longer(config, command),
    }
    return [*lines, *(f"{name:<13} {text}" for name, text in commands.items() if text)]


# The figures of the table that have an interval over groups; the record has them by group.
_BY_GROUP = {"reward": REWARD, FIGURES[PASS].title: PASS}


def _figures(folder: Path, history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the result of the run in one line, and the table of its figures.

    A change has an interval where the record of the groups gives one.
    """
    rows = figure_rows(history)
    if not rows:
        return []
    lines = []
    result = result_of(folder, history)
    if result:
        lines += ["", result]
    lines += ["", f"{'':20}{'first fifth':>12}{'last fifth':>12}   change"]
    for title, first_mean, last_mean in rows:
        line = f"{title:20}{first_mean:>12}{last_mean:>12}"
        key = _BY_GROUP.get(title)
        change = training_change(folder, history, key) if key else None
        if change is not None and change.low is not None:
            line += f"   {interval_of(change, of_share=key == PASS)}"
        lines.append(line)
    return lines


def _longer(config: AdoraGRPOConfig, command: str) -> str | None:
    """Return the same command with twice as many steps.

    None unless that run would continue this one. It continues where there is a checkpoint, and
    where the learning rate does not depend on the number of steps.
    """
    constant = spelled(config.lr_scheduler_type) == "constant"
    if not command or not constant or not checkpoints(Path(config.output_dir)):
        return None
    if config.max_steps > 0:
        return f"{command} --max_steps {2 * config.max_steps}"
    return f"{command} --num_train_epochs {2 * config.num_train_epochs:g}"
