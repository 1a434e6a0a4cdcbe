"""Asks a model the problems of a benchmark, and stores its answers, as the subcommand `infer` does.

The commands, `eval.suite` and an evaluation during a training come through here: `check_options`
finds mistakes before anything is loaded, `load_problems_in_view` loads the problems, and
`answer_problems` writes the answers into a folder.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from adora_vl.evals.benchmark import load_checked_problems
from adora_vl.evals.checklist import CHECKLIST_DESCRIPTION, CHECKLIST_VIEW, build_checklist
from adora_vl.evals.inference.engines import build_engine, build_settings, check_loadable
from adora_vl.evals.inference.predictions import PREDICTIONS_FILE
from adora_vl.evals.inference.provenance import FingerprintFields
from adora_vl.evals.inference.ranks import ProcessGroup
from adora_vl.evals.inference.requests import (
    AnswerEngine,
    AnswerEngineSettings,
    EngineOptions,
)
from adora_vl.evals.inference.runner import InferenceSummary, infer
from adora_vl.evals.inference.views import DESCRIPTION_BY_VIEW, apply_view
from adora_vl.evals.options import DataOptions, option
from adora_vl.evals.records import Benchmark, Problem
from adora_vl.models.load import model_hash
from adora_vl.utils.cli import integer_between, none_or, pluralize
from adora_vl.utils.errors import UserError
from adora_vl.utils.files import check_folder
from adora_vl.utils.hub import notes_on_local_copy

MAX_SAMPLES = 1024
# The options that an answer can depend on, apart from the engine, the split and the benchmark's
# own. `limit` is not among them, because a run may be extended, nor is the batch size.
_FINGERPRINT_OPTIONS = (
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
    """The options of asking a model: which one, which problems, and where the answers go."""

    data: DataOptions
    """Which problems are asked, as the benchmark's own `data_options`."""
    output: Path
    """The folder of the answers."""
    limit: int | None = option(
        None, help="use only the first N problems", type=none_or(integer_between(1)), metavar="N"
    )
    samples: int = option(
        1,
        help="answers per problem, for avg@k, pass@k",
        type=integer_between(1, MAX_SAMPLES),
        metavar="K",
    )
    view: str = option(
        "image",
        help="; ".join(
            f"{name}: {description}" for name, description in DESCRIPTION_BY_VIEW.items()
        )
        + f"; eval.compare lays them side by side. {CHECKLIST_VIEW}: {CHECKLIST_DESCRIPTION}",
        choices=[*DESCRIPTION_BY_VIEW, CHECKLIST_VIEW],
    )


def check_output(output: Path) -> None:
    """Raise `UserError` for an output folder that cannot be used, before anything is loaded."""
    check_folder("output", output)
    # `score` takes a file here, and a user may have that in mind.
    if not output.exists() and output.suffix == ".json":
        raise UserError(
            f"output: {str(output)!r} ends in .json, and a folder is made here; leave the ending "
            "out"
        )


def check_options(options: AskOptions) -> AnswerEngineSettings:
    """Check the options of asking, and turn them into the settings of an engine.

    A model folder is checked for its files, but not loaded. Raises `UserError`.
    """
    if options.samples > 1 and not options.temperature:
        raise UserError(
            f"samples: {options.samples} greedy answers are the same; give --temperature, such as "
            "1.0"
        )
    settings = build_settings(options)
    check_loadable(settings)
    return settings


class ProblemsInView(NamedTuple):
    """The problems of a run as its view shows them, and what its fingerprint says of their data.

    The view decides what the model sees: the picture, the facts of the picture in words, or both.
    """

    problems: Sequence[Problem]
    """The problems."""
    n_left_out: int
    """The number of problems without facts in words, which a view with such facts leaves out."""
    data_hash: str
    """The hash of the data that all problems were loaded from."""
    unused_options: Sequence[str]
    """The data options that changed nothing; see `LoadedProblems`."""


def load_problems_in_view(benchmark: Benchmark, options: AskOptions) -> ProblemsInView:
    """Load the problems of a benchmark, and change them to what `options.view` shows the model.

    A view shows the picture, the facts of the picture in words, both, or a grey picture. The view
    `checklist` replaces the problems by questions on what is marked in their pictures.

    `options.limit` is not applied yet. Raises `UserError` for data that cannot be loaded or asked.
    """
    loaded = load_checked_problems(benchmark, options.data)
    if options.view == CHECKLIST_VIEW:
        problems = build_checklist(loaded.problems)
        n_left_out = 0
    else:
        problems = apply_view(loaded.problems, options.view)
        n_left_out = len(loaded.problems) - len(problems)
    return ProblemsInView(
        problems=problems,
        n_left_out=n_left_out,
        data_hash=loaded.data_hash,
        unused_options=loaded.unused_options,
    )


def answer_problems(
    benchmark: Benchmark,
    options: AskOptions,
    settings: AnswerEngineSettings,
    view_problems: ProblemsInView,
    process_group: ProcessGroup,
    build: Callable[[AnswerEngineSettings], AnswerEngine] | None = None,
) -> None:
    """Ask the model all problems, and write its answers into the folder `options.output`.

    Answers that the folder has already are not asked for again.

    Args:
        benchmark: The benchmark, whose name and options are a part of the fingerprint.
        options: How the model is asked, and where the answers go.
        settings: The settings of the engine, as `check_options` returned them.
        view_problems: The problems, as `load_problems_in_view` returned them.
        process_group: The rank of this process. Each asks its share, and only rank 0 prints.
        build: Builds the engine, in place of `build_engine`.

    Raises `UserError`, also where answers are missing at the end because calls of a server failed.
    """
    # A server does not show its weights, so they cannot be hashed.
    weights_hash = None if settings.endpoint else model_hash(settings.model, settings.revision)
    if weights_hash is not None and process_group.rank == 0:
        for line in notes_on_local_copy(settings.model):
            print(line, file=sys.stderr)
    summary = infer(
        view_problems.problems[: options.limit],
        output=options.output,
        settings=settings,
        fingerprint=_collect_fingerprint(benchmark, options, settings, view_problems, weights_hash),
        build=build or build_engine,
        samples_per_problem=options.samples,
        problems_in_data=len(view_problems.problems),
        process_group=process_group,
    )
    if process_group.rank == 0:
        _print_summary(
            summary,
            n_left_out=view_problems.n_left_out,
            predictions=options.output / PREDICTIONS_FILE,
        )


def _collect_fingerprint(
    benchmark: Benchmark,
    options: AskOptions,
    settings: AnswerEngineSettings,
    view_problems: ProblemsInView,
    weights_hash: str | None,
) -> FingerprintFields:
    """Collect the settings that the answers of a run depend on, for the file `fingerprint.json`.

    A run is resumed only with equal fields. A field that few runs need, such as `view`, is left out
    where it has its usual value.
    """
    fields: FingerprintFields = {
        "benchmark": benchmark.name,
        "model": settings.model,
        "model_hash": weights_hash,
        "data_hash": view_problems.data_hash,
        "engine": options.engine,
        "split": options.data.split,
    }
    for name in _FINGERPRINT_OPTIONS:
        fields[name] = getattr(options, name)
    for name in benchmark.fingerprint:
        # An option that changed nothing is None, since the same questions were asked without it.
        is_unused = name in view_problems.unused_options
        fields[name] = None if is_unused else getattr(options.data, name)
    if options.view != "image":
        fields["view"] = options.view
    fields |= settings.fingerprint_fields
    if view_problems.n_left_out:
        fields["left_out"] = view_problems.n_left_out
    if benchmark.file:
        fields["benchmark_file"] = benchmark.file
    return fields


def _print_summary(summary: InferenceSummary, *, n_left_out: int, predictions: Path) -> None:
    """Print on stderr how many answers a run got, and how many problems could not be asked.

    Args:
        summary: The numbers of the run.
        n_left_out: The number of problems whose facts do not suffice in words.
        predictions: The file of the answers.

    Raises `UserError` where answers are missing.
    """
    exceptions = ""
    if summary.image_failed:
        exceptions += f", {pluralize(summary.image_failed, 'image')} failed"
    if summary.too_long:
        exceptions += f", {pluralize(summary.too_long, 'prompt')} too long"
    if n_left_out:
        left_out = pluralize(n_left_out, "problem")
        exceptions += f", {left_out} left out, whose facts do not suffice in words"
    n_answered = summary.pending - summary.missing
    print(
        f"{n_answered} answered in {summary.seconds:.1f} s{exceptions} -> {predictions}",
        file=sys.stderr,
    )
    if summary.missing:
        raise UserError(
            f"base_url: {pluralize(summary.missing, 'answer')} of {summary.total} could not be "
            "had; start the same command again, which asks for those alone"
        )
