"""The command `python -m eval all`: a row of a table of benchmarks, with one start of the engine."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from adora_vl.utils.cli import imports

with imports():
    from adora_vl.evals.asking import (
        AskOptions,
        answer_problems,
        check_options,
        check_output,
        problems_to_ask,
    )
    from adora_vl.evals.benchmark import find_benchmark
    from adora_vl.evals.inference.engines import build_engine
    from adora_vl.evals.inference.predictions import PREDICTIONS
    from adora_vl.evals.inference.runner import join_ranks, with_engine_bounds
    from adora_vl.evals.options import ScoreOptions
    from adora_vl.evals.records import Benchmark
    from adora_vl.evals.score_differences import Difference, between_problems
    from adora_vl.evals.score_files import ScoreFile, read_run
    from adora_vl.evals.scoring.files import write_score
    from adora_vl.evals.scoring.score import share_of_the_data
    from adora_vl.utils.cli import Parser, exit_code_of, optional, path
    from adora_vl.utils.errors import UserError
    from eval.command import parse

# The columns of the tables of autumn 2026, each with the place of its data on the hub.
SUITES = {
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
# The figures that papers quote, where it is not the accuracy of all answers.
_FIGURE = {
    "mathverse": "five_versions",
    "wemath": "strict",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns the exit code: 0 for success, 2 for wrong input, 130 after Ctrl-C.
    """

    interrupted = "what was answered is kept, and the same command goes on from there"

    def command() -> None:
        suite_options, benchmark_words = build_parser().parse_known_args(argv)
        _run(suite_options, benchmark_words)

    return exit_code_of(command, interrupted)


def build_parser() -> Parser:
    """Return the parser of `eval all`; all other options are passed on to the benchmarks."""
    parser = Parser(
        prog="python -m eval all",
        description="A row of a table. Other options, such as --model, --engine, --max-tokens, --limit, "
        "--samples 3 --temperature 1.0, are those of the benchmarks.",
    )
    add = parser.add_argument
    add("--suite", choices=tuple(SUITES), default="reasoning", help="which benchmarks")
    add(
        "--data",
        type=optional(path),
        metavar="DIR",
        help="folders that are named as the benchmarks; default: the hub",
    )
    add(
        "--output",
        type=path,
        required=True,
        metavar="DIR",
        help="folder of the results; benchmarks that were started there are resumed",
    )
    add(
        "--beside",
        type=optional(path),
        metavar="DIR",
        help="another model's --output; adds the paired differences to it",
    )
    return parser


def _run(suite_options: Namespace, benchmark_words: Sequence[str]) -> None:
    """Ask all benchmarks, and print the row.

    Raises `UserError`, where it can before anything is asked.
    """
    tasks: list[tuple[Benchmark, AskOptions, ScoreOptions]] = []
    for name, on_the_hub in SUITES[suite_options.suite].items():
        benchmark = find_benchmark(name)
        folder = suite_options.data / name if suite_options.data else None
        if folder is not None and not folder.exists():
            raise UserError(
                f"data: {str(suite_options.data)!r} has no {name!r}; put it there, or leave --data "
                "out for the hub"
            )
        words = [
            "run",
            "--data",
            str(folder or on_the_hub),
            "--output",
            str(suite_options.output / name),
            *benchmark_words,
        ]
        command = parse(words, benchmark)
        assert command.ask is not None
        assert command.score is not None
        tasks.append((benchmark, command.ask, command.score))
        check_output(command.ask.output)
    beside_runs: list[ScoreFile] = []
    if suite_options.beside:
        beside_runs = [
            read_run(str(suite_options.beside / benchmark.name), str(suite_options.beside))
            for benchmark, _, _ in tasks
        ]
    # The options of the engine are the same for all benchmarks.
    first_options = tasks[0][1]
    settings = check_options(first_options)
    selections = [problems_to_ask(benchmark, options) for benchmark, options, _ in tasks]
    problems = [problem for selection in selections for problem in selection.problems]
    system_prompt = settings.with_tool_prompt(first_options.system_prompt)
    # The engine is built at the first call, for the longest text and the most images of all.
    engine = cache(lambda: build_engine(with_engine_bounds(settings, problems, system_prompt)))
    processes = join_ranks()
    for (benchmark, options, score_options), selection in zip(tasks, selections, strict=True):
        answer_problems(
            benchmark=benchmark,
            options=options,
            settings=settings,
            selection=selection,
            processes=replace(processes, run=benchmark.name),
            build=lambda _: engine(),
        )
        if processes.rank == 0:
            write_score(benchmark, options.output / PREDICTIONS, score_options)
    if processes.rank == 0:
        runs = [read_run(str(options.output), str(suite_options.output)) for _, options, _ in tasks]
        print("\n".join(["", *row(runs, beside_runs)]))


def row(runs: Sequence[ScoreFile], beside_runs: Sequence[ScoreFile] = ()) -> list[str]:
    """Return the lines of the table, with a column for each benchmark.

    Args:
        runs: The runs of the model, one for each benchmark.
        beside_runs: Those of another model in the same order. They get a row of their own, and a
            row of paired differences.
    """
    rows = [("", [run.score["benchmark"] for run in runs])]
    for side in (beside_runs, runs):
        if side:
            rows.append((side[0].name, [_figure(run) for run in side]))
    if beside_runs:
        differences = [
            _difference(between_problems([beside], [run]))
            for beside, run in zip(beside_runs, runs, strict=True)
        ]
        rows.append(("difference of accuracy", differences))
    # All cells are as wide as the widest, so that the columns stand below each other.
    name_width = max(len(name) for name, _ in rows)
    cell_width = max(len(cell) for _, cells in rows for cell in cells)
    lines = [
        " ".join([f"{name:<{name_width}}", *(f"{cell:>{cell_width}}" for cell in cells)])
        for name, cells in rows
    ]
    caption = "in %, with 95 % intervals; mathverse over its five versions, wemath its strict score"
    if any(share_of_the_data(run.score) for run in (*runs, *beside_runs)):
        caption += "; (n of N): over a part of the problems"
    if beside_runs:
        caption += "; differences by paired bootstrap over the problems"
    return [*lines, caption]


def _difference(difference: Difference | None) -> str:
    """Return a difference in points with its interval, or `-` where no problem is common."""
    if difference is None:
        return "-"
    low = difference.low or 0
    high = difference.high or 0
    return f"{100 * difference.value:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def _figure(run: ScoreFile) -> str:
    """Return the figure of a run that papers quote, with its interval and the part of the data."""
    cell = run.cells.get(_FIGURE.get(run.score["benchmark"], "all")) or {"accuracy": float("nan")}
    text = f"{100 * cell['accuracy']:.1f}"
    if "wilson_95" in cell:
        low, high = cell["wilson_95"]
        text += f" [{100 * low:.1f}, {100 * high:.1f}]"
    part = share_of_the_data(run.score)
    return f"{text} ({part})" if part else text


if __name__ == "__main__":
    raise SystemExit(main())
