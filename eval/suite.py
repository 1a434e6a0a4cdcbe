"""The command `python -m eval all`: asks a model several benchmarks, and prints a row of a table.

All benchmarks share one engine, so that the model is loaded once.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from adora_vl.evals.asking import (
    AskOptions,
    answer_problems,
    check_options,
    check_output,
    load_problems_in_view,
)
from adora_vl.evals.benchmark import find_benchmark
from adora_vl.evals.inference.engines import build_engine
from adora_vl.evals.inference.predictions import PREDICTIONS_FILE
from adora_vl.evals.inference.ranks import join_process_group
from adora_vl.evals.inference.runner import with_engine_bounds
from adora_vl.evals.options import ScoreOptions
from adora_vl.evals.records import Benchmark
from adora_vl.evals.score_differences import Difference, accuracy_difference
from adora_vl.evals.score_files import ScoreFile, read_run
from adora_vl.evals.scoring.coverage import describe_scored_part
from adora_vl.evals.scoring.files import write_score
from adora_vl.evals.scoring.table import accuracy_text, align_columns
from adora_vl.utils.cli import Parser, none_or, path_option, run_command
from adora_vl.utils.errors import UserError
from eval.command import parse_command

# The benchmarks of each suite, in the order of its columns, with the hub id of their data. Papers
# of autumn 2026 have these benchmarks in their tables.
HUB_ID_BY_BENCHMARK_BY_SUITE = {
    "reasoning": {
        "mathvista": "AI4Math/MathVista",
        "mathvision": "MathLLMs/MathVision",
        "mathverse": "AI4Math/MathVerse",
        "wemath": "We-Math/We-Math",
        "mmstar": "Lin-Chen/MMStar",
        "mmmu_pro": "MMMU/MMMU_Pro",
        "logicvista": "lscpku/LogicVista",
    }
}
# The name of the metric that papers quote, for benchmarks where it is not the accuracy of all
# answers.
_QUOTED_METRIC_BY_BENCHMARK = {
    "mathverse": "five_versions",
    "wemath": "strict",
}


class _SuiteTask(NamedTuple):
    """One benchmark of the suite, with the options of its own command."""

    benchmark: Benchmark
    ask_options: AskOptions
    score_options: ScoreOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on the arguments `argv`; None: on the command line of the process.

    Returns the exit code: 0 for success, 2 for wrong input, 130 after Ctrl-C.
    """

    def command() -> None:
        """Parse the options of the suite, and hand all others to the benchmarks."""
        suite_options, benchmark_arguments = build_parser().parse_known_args(argv)
        _run_suite(suite_options, benchmark_arguments)

    return run_command(
        command, interrupt_note="what was answered is kept, and the same command goes on from there"
    )


def build_parser() -> Parser:
    """Build the parser of `eval all`, for the options of the suite alone.

    Options that it does not know are parsed by each benchmark.
    """
    parser = Parser(
        prog="python -m eval all",
        description="A row of a table. Other options, such as --model, --engine, --max-tokens, --limit, "
        "--samples 3 --temperature 1.0, are those of the benchmarks.",
    )
    add = parser.add_argument
    add(
        "--suite",
        choices=tuple(HUB_ID_BY_BENCHMARK_BY_SUITE),
        default="reasoning",
        help="which benchmarks",
    )
    add(
        "--data",
        type=none_or(path_option),
        metavar="DIR",
        help="folders that are named as the benchmarks; default: the hub",
    )
    add(
        "--output",
        type=path_option,
        required=True,
        metavar="DIR",
        help="folder of the results; benchmarks that were started there are resumed",
    )
    add(
        "--beside",
        type=none_or(path_option),
        metavar="DIR",
        help="another model's --output; adds the paired differences to it",
    )
    return parser


def _run_suite(suite_options: Namespace, benchmark_arguments: Sequence[str]) -> None:
    """Ask all benchmarks of a suite with one engine, score the answers, and print the table.

    Args:
        suite_options: The options that `build_parser` parsed.
        benchmark_arguments: The other arguments of the command line, the same for each benchmark.

    Raises `UserError` for wrong input, wherever possible before anything is asked.
    """
    tasks: list[_SuiteTask] = []
    for name, hub_id in HUB_ID_BY_BENCHMARK_BY_SUITE[suite_options.suite].items():
        tasks.append(_parse_task(name, hub_id, suite_options, benchmark_arguments))
    other_model_runs: list[ScoreFile] = []
    if suite_options.beside:
        other_model_runs = _read_runs(suite_options.beside, tasks)
    # The options of the engine are the same for all benchmarks.
    first_options = tasks[0].ask_options
    settings = check_options(first_options)
    problems_of_tasks = [load_problems_in_view(task.benchmark, task.ask_options) for task in tasks]
    all_problems = [
        problem for view_problems in problems_of_tasks for problem in view_problems.problems
    ]
    # The engine has to fit the longest text and the most images of all benchmarks. It is built at
    # the first answer that is missing, and kept from then on.
    engine_settings = with_engine_bounds(settings, all_problems)
    shared_engine = cache(lambda: build_engine(engine_settings))
    process_group = join_process_group()
    for task, view_problems in zip(tasks, problems_of_tasks, strict=True):
        answer_problems(
            benchmark=task.benchmark,
            options=task.ask_options,
            settings=settings,
            view_problems=view_problems,
            # The ranks wait at barriers that have the name of the run, so each benchmark needs its
            # own.
            process_group=replace(process_group, run=task.benchmark.name),
            build=lambda _: shared_engine(),
        )
        if process_group.rank == 0:
            predictions_file = task.ask_options.output / PREDICTIONS_FILE
            write_score(task.benchmark, predictions_file, task.score_options)
    if process_group.rank == 0:
        runs = [
            read_run(str(task.ask_options.output), name=str(suite_options.output)) for task in tasks
        ]
        print("\n".join(["", *table_lines(runs, other_model_runs)]))


def _parse_task(
    name: str, hub_id: str, suite_options: Namespace, benchmark_arguments: Sequence[str]
) -> _SuiteTask:
    """Parse the command of one benchmark of the suite, and check its data and output folders.

    Args:
        name: The name of the benchmark. Its folders below `--data` and `--output` have that name.
        hub_id: Where its data are on the hub, for a suite without `--data`.
        suite_options: The options of the suite.
        benchmark_arguments: The arguments of the command line that all benchmarks get.

    Raises `UserError` for wrong input.
    """
    benchmark = find_benchmark(name)
    data = hub_id
    if suite_options.data:
        folder = suite_options.data / name
        if not folder.exists():
            raise UserError(
                f"data: {str(suite_options.data)!r} has no {name!r}; put it there, or leave --data "
                "out for the hub"
            )
        data = str(folder)
    output = str(suite_options.output / name)
    arguments = ["run", "--data", data, "--output", output, *benchmark_arguments]
    command = parse_command(arguments, benchmark)
    assert command.ask_options is not None  # the subcommand `run` has both kinds of options
    assert command.score_options is not None
    check_output(command.ask_options.output)
    return _SuiteTask(
        benchmark, ask_options=command.ask_options, score_options=command.score_options
    )


def _read_runs(suite_output: Path, tasks: Sequence[_SuiteTask]) -> list[ScoreFile]:
    """Read the scores that another run of the suite has in its output folder, in the tasks' order.

    All of them are named after that folder. Raises `UserError` if one is missing.
    """
    return [
        read_run(str(suite_output / task.benchmark.name), name=str(suite_output)) for task in tasks
    ]


def table_lines(runs: Sequence[ScoreFile], other_model_runs: Sequence[ScoreFile] = ()) -> list[str]:
    """Format the table of a suite, with a column for each benchmark.

    Args:
        runs: The scores of the model, one for each benchmark.
        other_model_runs: The scores of another model in the same order. They get a row of their
            own, and a row of the paired differences between the models.
    """
    # A row begins with its name, and has a cell for each benchmark.
    rows: list[list[str]] = [["", *(run.score["benchmark"] for run in runs)]]
    for model_runs in (other_model_runs, runs):
        if model_runs:
            rows.append([model_runs[0].name, *(_quoted_accuracy(run) for run in model_runs)])
    if other_model_runs:
        differences = [
            _difference_text(accuracy_difference([other_run], [run]))
            for other_run, run in zip(other_model_runs, runs, strict=True)
        ]
        rows.append(["difference of accuracy", *differences])
    caption = "in %, with 95 % intervals; mathverse over its five versions, wemath its strict score"
    if any(describe_scored_part(run.score) for run in (*runs, *other_model_runs)):
        caption += "; (n of N): over a part of the problems"
    if other_model_runs:
        caption += "; differences with their paired intervals over the problems"
    return [*align_columns(rows), caption]


def _difference_text(difference: Difference | None) -> str:
    """Format a difference in percentage points with its interval.

    For example, `+1.2 [-0.3, +2.7]`. None gives `-`: the two runs have no problem in common.
    """
    if difference is None:
        return "-"
    assert difference.low is not None  # a paired difference has an interval
    assert difference.high is not None
    low = 100 * difference.low
    high = 100 * difference.high
    return f"{100 * difference.value:+.1f} [{low:+.1f}, {high:+.1f}]"


def _quoted_accuracy(run: ScoreFile) -> str:
    """Format the metric of a run that papers quote, such as `61.2 [57.9, 64.4] (60 of 512)`.

    The last part is left out for a score of all the data.
    """
    metric_name = _QUOTED_METRIC_BY_BENCHMARK.get(run.score["benchmark"], "all")
    accuracy = accuracy_text(run.metrics.get(metric_name))
    scored_part = describe_scored_part(run.score)
    return f"{accuracy} ({scored_part})" if scored_part else accuracy


if __name__ == "__main__":
    raise SystemExit(main())
