"""What `infer` does: the problems of a benchmark, the engine for them, and the answers in a folder."""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from adora_vl.evals.benchmark import loaded
from adora_vl.evals.inference.engines import build_engine, check_loadable, settings_of
from adora_vl.evals.inference.predictions import PREDICTIONS
from adora_vl.evals.inference.provenance import Fields
from adora_vl.evals.inference.requests import AnswerEngine, AnswerEngineSettings
from adora_vl.evals.inference.runner import Ranks, infer
from adora_vl.evals.inference.views import shown_as
from adora_vl.evals.records import Benchmark, Problem
from adora_vl.models.load import model_hash
from adora_vl.utils.cli import amount
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import check_folder
from adora_vl.utils.hub import notes_on

# The options that an answer can depend on. The limit is not one, because a run may be extended, nor
# is the batch size.
_FINGERPRINT = (
    "engine",
    "split",
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


def check_output(output: Path) -> None:
    """Check the output folder before anything is loaded. Raises `UserError`."""
    check_folder("output", output)
    if not output.exists() and output.suffix == ".json":
        raise UserError(
            f"output: {str(output)!r} ends in .json, and a folder is made here; leave the ending "
            "out"
        )


def check_options(options: Namespace) -> AnswerEngineSettings:
    """The engine that is asked for, whose model can be loaded. Raises `UserError`."""
    if options.samples > 1 and not options.temperature:
        raise UserError(
            f"samples: {options.samples} greedy answers are the same; give --temperature, such as "
            "1.0"
        )
    settings = settings_of(options)
    check_loadable(settings)
    return settings


class AskedProblems(NamedTuple):
    problems: Sequence[Problem]  # as the view of a run shows them
    left_out: int  # by the view
    data_hash: str


def questions(benchmark: Benchmark, options: Namespace) -> AskedProblems:
    everything, data_hash = loaded(benchmark, options)
    shown = shown_as(everything, options.view)
    return AskedProblems(shown, len(everything) - len(shown), data_hash)


def ask(
    benchmark: Benchmark,
    options: Namespace,
    settings: AnswerEngineSettings,
    asked: AskedProblems,
    processes: Ranks,
    build: Callable[[AnswerEngineSettings], AnswerEngine] | None = None,
) -> None:
    """Ask the model all questions, and write its answers.

    `build`: in place of `build_engine`. Raises `UserError`.
    """
    problems = asked.problems[: options.limit]
    (shown, left_out, data_hash) = asked
    fingerprint: Fields = {"benchmark": benchmark.name, "model": settings.model}
    hashed = (
        None if settings.endpoint else model_hash(settings.model, settings.revision)
    )  # a server shows no weights
    if hashed is not None and processes.rank == 0:
        print(*(f"{line}\n" for line in notes_on(settings.model)), sep="", end="", file=sys.stderr)
    fingerprint |= {"model_hash": hashed, "data_hash": data_hash}
    fingerprint |= {
        name: getattr(options, name) for name in (*_FINGERPRINT, *benchmark.fingerprint)
    }
    # Fields that only some runs have.
    fingerprint |= {"view": options.view} if options.view != "image" else {}
    fingerprint |= settings.described
    fingerprint |= {"left_out": left_out} if left_out else {}
    fingerprint |= {"benchmark_file": benchmark.file} if benchmark.file else {}
    summary = infer(
        problems,
        options.output,
        settings,
        fingerprint,
        system_prompt=settings.told(options.system_prompt),
        build=build or build_engine,
        samples=options.samples,
        in_data=len(shown),
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
    answered = summary.asked - summary.missing
    print(
        f"{answered} answered in {summary.seconds:.1f} s{failed} -> {options.output / PREDICTIONS}",
        file=sys.stderr,
    )
    if summary.missing:
        raise UserError(
            f"base_url: {amount(summary.missing, 'answer')} of {summary.total} could not be had; "
            "start the same command again, which asks for those alone"
        )
