"""The command that the benchmarks share: `infer`, `score`, and `run`, which is both."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from adora_vl.errors import UserError
from eval.engines import EngineSettings, build_engine, check_model
from eval.fingerprint import FILE_NAME, Fields, model_hash, read, versions, write_json
from eval.options import parse
from eval.predictions import Prediction, read_predictions
from eval.ranks import Ranks, ranks
from eval.runner import PREDICTIONS, SCORE, Problem, infer
from eval.scoring import Score
from eval.table import table

# The options that an answer can depend on. Not the limit (a run may be extended), nor the batch size.
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


@dataclass(frozen=True)
class Benchmark:
    """What one benchmark adds to the command.

    `load` gives the problems that the options ask for and a hash of their data; `score` the figures of prediction
    rows; `check` what is wrong with a row, or None. `fingerprint` names further options that an answer depends on.
    """

    name: str
    split: str
    load: Callable[[Namespace], tuple[list[Problem], str]]
    score: Callable[[Sequence[Prediction], Namespace], Score]
    add_score_options: Callable[[ArgumentParser], None]
    add_data_options: Callable[[ArgumentParser], None] | None = None
    check: Callable[[Prediction], str | None] | None = None
    fingerprint: tuple[str, ...] = ()


def main(benchmark: Benchmark, argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code: 0 done, 2 the user's input is wrong."""
    try:
        options = parse(argv, benchmark.name, benchmark.split, benchmark.add_data_options, benchmark.add_score_options)
        if options.verb == "score":
            _score(benchmark, options.predictions, options.output, options)
            return 0
        processes = ranks()
        _infer(benchmark, options, processes)
        if options.verb == "run" and processes.rank == 0:
            _score(benchmark, options.output / PREDICTIONS, options.output / SCORE, options)
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    return 0


def settings_of(options: Namespace) -> EngineSettings:
    """The engine that the options ask for."""
    return EngineSettings(
        model=check_model(options.model),
        engine=options.engine,
        revision=options.revision,
        dtype=options.dtype,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        min_pixels=options.min_pixels,
        max_pixels=options.max_pixels,
        batch_size=options.batch_size,
    )


def _infer(benchmark: Benchmark, options: Namespace, processes: Ranks) -> None:
    if options.samples > 1 and not options.temperature:
        raise UserError(f"samples: {options.samples} greedy answers are the same; give --temperature, such as 1.0")
    settings = settings_of(options)
    problems, data_hash = benchmark.load(options)
    if options.limit is not None:
        problems = problems[: options.limit]
    fingerprint: Fields = {"benchmark": benchmark.name, "model": settings.model}
    fingerprint |= {"model_hash": model_hash(settings.model, settings.revision), "data_hash": data_hash}
    fingerprint |= {name: getattr(options, name) for name in (*_FINGERPRINT, *benchmark.fingerprint)}
    summary = infer(
        problems,
        options.output,
        settings,
        fingerprint,
        system_prompt=options.system_prompt,
        build=build_engine,
        samples=options.samples,
        ranks=processes,
    )
    if processes.rank:
        return
    failed = f", {summary.image_failed} images failed" if summary.image_failed else ""
    print(
        f"{summary.asked} answered in {summary.seconds:.1f} s{failed} -> {options.output / PREDICTIONS}",
        file=sys.stderr,
    )


def _score(benchmark: Benchmark, predictions: Path, output: Path, options: Namespace) -> None:
    score = score_file(benchmark, predictions, options)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_json(output, score)
    print(table(score))
    print(f"-> {output}", file=sys.stderr)


def score_file(benchmark: Benchmark, predictions: Path, options: Namespace) -> Score:
    """The score of a predictions file, with the fingerprint that lies beside it (null where there is none)."""
    rows = read_predictions(predictions, benchmark.check)
    fingerprint = predictions.parent / FILE_NAME
    figures = benchmark.score(rows, options)
    items = figures.pop("items")
    return {
        "benchmark": benchmark.name,
        **figures,
        "versions": versions(),
        "fingerprint": read(fingerprint) if fingerprint.is_file() else None,
        "items": items,
    }
