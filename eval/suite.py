"""`python -m eval all`: a row of a table of benchmarks, with one start of the engine."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from adora_vl.utils.cli import imports

with imports():
    from adora_vl.evals.asking import AskOptions, ask, check_options, check_output, questions
    from adora_vl.evals.benchmark import named
    from adora_vl.evals.compare import ScoreFile, between_problems, read_run
    from adora_vl.evals.inference.engines import build_engine
    from adora_vl.evals.inference.predictions import PREDICTIONS
    from adora_vl.evals.inference.runner import bounded, ranks
    from adora_vl.evals.options import ScoreOptions
    from adora_vl.evals.records import Benchmark
    from adora_vl.evals.scoring.files import write_score
    from adora_vl.evals.scoring.score import share_of_the_data
    from adora_vl.utils.cli import Parser, exit_code_of, optional, path
    from adora_vl.utils.errors import UserError
    from eval.command import parse

# The columns of the tables of autumn 2026, by the place of their data on the hub.
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
# what papers quote; else the accuracy of all answers
_FIGURE = {
    "mathverse": "five_versions",
    "wemath": "strict",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns the exit code: 0 for success, 2 for wrong input, 130 after Ctrl-C.
    """

    interrupted = "what was answered is kept, and the same command goes on from there"
    return exit_code_of(lambda: _run(*build_parser().parse_known_args(argv)), interrupted)


def build_parser() -> Parser:
    """The options of the command; those of the inference are the ones of each benchmark."""
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
        help="a run of each benchmark in it is resumed",
    )
    add(
        "--beside",
        type=optional(path),
        metavar="DIR",
        help="another model's --output: with paired differences to it",
    )
    return parser


def _run(given: Namespace, more: Sequence[str]) -> None:
    """Ask all benchmarks, and print the row.

    Raises `UserError`, where it can before anything is asked.
    """
    tasks: list[tuple[Benchmark, AskOptions, ScoreOptions]] = []
    for name, on_the_hub in SUITES[given.suite].items():
        benchmark = named(name)
        here = given.data / name if given.data else None
        if here is not None and not here.exists():
            raise UserError(
                f"data: {str(given.data)!r} has no {name!r}; put it there, or leave --data out "
                "for the hub"
            )
        words = [
            "run",
            "--data",
            str(here or on_the_hub),
            "--output",
            str(given.output / name),
            *more,
        ]
        command = parse(words, benchmark)
        assert command.ask is not None
        assert command.score is not None
        tasks.append((benchmark, command.ask, command.score))
        check_output(command.ask.output)
    others = (
        [read_run(str(given.beside / task[0].name), str(given.beside)) for task in tasks]
        if given.beside
        else []
    )
    settings = check_options(tasks[0][1])
    asked = [questions(benchmark, options) for benchmark, options, _ in tasks]
    problems = [problem for each in asked for problem in each.problems]
    told = settings.with_tool_prompt(tasks[0][1].system_prompt)
    # Built at the first call, for the longest text and the most images of all.
    engine = cache(lambda: build_engine(bounded(settings, problems, told)))
    processes = ranks()
    for (benchmark, options, score_options), each in zip(tasks, asked, strict=True):
        ask(
            benchmark=benchmark,
            options=options,
            settings=settings,
            selection=each,
            processes=replace(processes, run=benchmark.name),
            build=lambda _: engine(),
        )
        if processes.rank == 0:
            write_score(benchmark, options.output / PREDICTIONS, score_options)
    if processes.rank == 0:
        runs = [read_run(str(options.output), str(given.output)) for _, options, _ in tasks]
        print("\n".join(["", *row(runs, others)]))


def row(runs: Sequence[ScoreFile], others: Sequence[ScoreFile] = ()) -> list[str]:
    """The lines of the table: a column for each run, of other runs too, and their paired
    differences.
    """
    names = [run.score["benchmark"] for run in runs]
    rows = [("", names)] + [
        (side[0].name, [_figure(run) for run in side]) for side in (others, runs) if side
    ]
    if others:
        found = [between_problems([other], [run]) for other, run in zip(others, runs, strict=True)]
        shown = [
            f"{100 * one.value:+.1f} [{100 * (one.low or 0):+.1f}, {100 * (one.high or 0):+.1f}]"
            if one
            else "-"
            for one in found
        ]
        rows.append(("difference of accuracy", shown))
    partial = any(share_of_the_data(run.score) for run in (*runs, *others))
    first = max(len(name) for name, _ in rows)
    wide = max(len(cell) for _, cells in rows for cell in cells)
    return [
        " ".join([f"{name:<{first}}", *(f"{cell:>{wide}}" for cell in cells)])
        for name, cells in rows
    ] + [
        "in %, with 95 % intervals; mathverse over its five versions, wemath its strict score"
        + ("; (n of N): over a part of the problems" if partial else "")
        + ("; differences by paired bootstrap over the problems" if others else "")
    ]


def _figure(run: ScoreFile) -> str:
    cell = run.cells.get(_FIGURE.get(run.score["benchmark"], "all")) or {"accuracy": float("nan")}
    text = f"{100 * cell['accuracy']:.1f}"
    if "wilson_95" in cell:
        low, high = cell["wilson_95"]
        text += f" [{100 * low:.1f}, {100 * high:.1f}]"
    part = share_of_the_data(run.score)
    return f"{text} ({part})" if part else text


if __name__ == "__main__":
    raise SystemExit(main())
