"""Asks a model the problems of a benchmark, as the verb `infer` does.

The commands, `eval.suite` and an evaluation during a training come through here: `check_options`
finds mistakes before anything is loaded, `problems_to_ask` loads the problems, and `answer_problems` writes the
answers into a folder.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from adora_vl.evals.benchmark import load_checked_problems
from adora_vl.evals.checklist import DESCRIPTION, VIEW, checklist
from adora_vl.evals.inference.engines import build_engine, check_loadable, settings_of
from adora_vl.evals.inference.predictions import PREDICTIONS
from adora_vl.evals.inference.provenance import Fields
from adora_vl.evals.inference.requests import (
    AnswerEngine,
    AnswerEngineSettings,
    EngineOptions,
)
from adora_vl.evals.inference.runner import Ranks, infer
from adora_vl.evals.inference.views import VIEWS, problems_in_view
from adora_vl.evals.options import DataOptions, option
from adora_vl.evals.records import Benchmark, Problem
from adora_vl.models.load import model_hash
from adora_vl.utils.cli import amount, optional, whole
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import check_folder
from adora_vl.utils.hub import notes_on

MAX_SAMPLES = 1024
# The options that an answer can depend on, beside engine, split and those of the benchmark. The
# limit is not one, because a run may be extended, nor is the batch size.
_FINGERPRINT = (
    "revision",
    "dtype",
    "max_tokens",
    "temperature",
    "samples",
    "seed",
    "min_pixels",
    "max_pixels",
    "system_prompt",
)


@dataclass(frozen=True, kw_only=True)
class AskOptions(EngineOptions):
    """The options of `infer`: the model, the problems, how it is asked, and where answers go."""

    data: DataOptions
    """Which problems are asked: an instance of the benchmark's own `data_options`."""
    output: Path
    """The folder of the answers."""
    limit: int | None = option(
        None, help="use only the first N problems", type=optional(whole(1)), metavar="N"
    )
    samples: int = option(
        1,
        help="answers per problem, for avg@k, pass@k",
        type=whole(1, MAX_SAMPLES),
        metavar="K",
    )
    view: str = option(
        "image",
        help="; ".join(f"{name}: {description}" for name, description in VIEWS.items())
        + f"; eval.compare lays them side by side. {VIEW}: {DESCRIPTION}",
        choices=[*VIEWS, VIEW],
    )


def check_output(output: Path) -> None:
    """Check the output folder before anything is loaded. Raises `UserError`."""
    check_folder("output", output)
    if not output.exists() and output.suffix == ".json":
        raise UserError(
            f"output: {str(output)!r} ends in .json, and a folder is made here; leave the ending "
            "out"
        )


def check_options(options: AskOptions) -> AnswerEngineSettings:
    """Return the engine that is asked for, whose model can be loaded. Raises `UserError`."""
    if options.samples > 1 and not options.temperature:
        raise UserError(
            f"samples: {options.samples} greedy answers are the same; give --temperature, such as "
            "1.0"
        )
    settings = settings_of(options)
    check_loadable(settings)
    return settings


class AskedProblems(NamedTuple):
    """The problems that a run asks, in its view, and what its fingerprint says of the data."""

    problems: Sequence[Problem]
    """The problems as the view of the run shows them."""
    left_out: int
    """The number of problems that the view cannot show, for lack of facts in words."""
    data_hash: str
    """The hash of the data that all problems were loaded from."""
    unused_options: Sequence[str]
    """The data options that changed nothing; see `LoadedProblems`."""


def problems_to_ask(benchmark: Benchmark, options: AskOptions) -> AskedProblems:
    """Return the problems of a benchmark as `options.view` shows them.

    They are not yet cut by `options.limit`. Raises `UserError` for data that cannot be loaded or
    asked.
    """
    everything = load_checked_problems(benchmark, options.data)
    if options.view == VIEW:
        return AskedProblems(
            problems=checklist(everything.problems),
            left_out=0,
            data_hash=everything.data_hash,
            unused_options=everything.unused_options,
        )
    problems = problems_in_view(everything.problems, options.view)
    return AskedProblems(
        problems=problems,
        left_out=len(everything.problems) - len(problems),
        data_hash=everything.data_hash,
        unused_options=everything.unused_options,
    )


def answer_problems(
    benchmark: Benchmark,
    options: AskOptions,
    settings: AnswerEngineSettings,
    selection: AskedProblems,
    processes: Ranks,
    build: Callable[[AnswerEngineSettings], AnswerEngine] | None = None,
) -> None:
    """Ask the model all questions, and write its answers into `options.output`.

    Args:
        benchmark: The benchmark, whose name and options are a part of the fingerprint.
        options: How the model is asked, and where the answers go.
        settings: The engine, as `check_options` returned it.
        selection: The problems, as `problems_to_ask` returned them.
        processes: The rank of this process; only rank 0 prints.
        build: Makes the engine in place of `build_engine`.

    Raises `UserError`, also where answers are missing at the end because calls of a server failed.
    """
    problems = selection.problems[: options.limit]
    left_out = selection.left_out
    fingerprint: Fields = {"benchmark": benchmark.name, "model": settings.model}
    # A server shows no weights that could be hashed.
    weights_hash = None if settings.endpoint else model_hash(settings.model, settings.revision)
    if weights_hash is not None and processes.rank == 0:
        print(*(f"{line}\n" for line in notes_on(settings.model)), sep="", end="", file=sys.stderr)
    fingerprint |= {"model_hash": weights_hash, "data_hash": selection.data_hash}
    fingerprint |= {"engine": options.engine, "split": options.data.split}
    fingerprint |= {name: getattr(options, name) for name in _FINGERPRINT}
    for name in benchmark.fingerprint:
        is_unused = name in selection.unused_options
        fingerprint[name] = None if is_unused else getattr(options.data, name)
    # Fields that only some runs have.
    fingerprint |= {"view": options.view} if options.view != "image" else {}
    fingerprint |= settings.described
    fingerprint |= {"left_out": left_out} if left_out else {}
    fingerprint |= {"benchmark_file": benchmark.file} if benchmark.file else {}
    summary = infer(
        problems,
        output=options.output,
        settings=settings,
        fingerprint=fingerprint,
        system_prompt=settings.with_tool_prompt(options.system_prompt),
        build=build or build_engine,
        samples=options.samples,
        in_data=len(selection.problems),
        ranks=processes,
    )
    if processes.rank:
        return
    failed = f", {amount(summary.image_failed, 'image')} failed" if summary.image_failed else ""
    failed += f", {amount(summary.too_long, 'prompt')} too long" if summary.too_long else ""
    failed += (
        f", {amount(left_out, 'problem')} left out, whose facts do not suffice in words"
        if left_out
        else ""
    )
    answered = summary.pending - summary.missing
    print(
        f"{answered} answered in {summary.seconds:.1f} s{failed} -> {options.output / PREDICTIONS}",
        file=sys.stderr,
    )
    if summary.missing:
        raise UserError(
            f"base_url: {amount(summary.missing, 'answer')} of {summary.total} could not be had; "
            "start the same command again, which asks for those alone"
        )
