"""The command that all benchmarks share: `infer`, `score`, and `run`, which does both."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from adora_vl.commands import amount, exit_code_of
from adora_vl.errors import UserError
from adora_vl.files import check_folder, check_json, make_folder, written_to
from adora_vl.hub import notes_on
from adora_vl.prompts import asks_for_answer_tags
from eval.endpoint_engine import endpoint_of
from eval.engines import AnswerEngineSettings, build_engine, check_loadable, check_model
from eval.fingerprint import FILE_NAME, Fields, model_hash, read, versions, write_json
from eval.options import parse
from eval.predictions import PREDICTIONS, SCORE, Prediction, read_predictions
from eval.ranks import Ranks, ranks
from eval.runner import Problem, infer, remove_empty
from eval.scoring import Score
from eval.table import table

# The options that an answer can depend on. The limit is not one, because a run may be extended, nor is the batch size.
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

    `load` returns the problems that the options ask for and a hash of their data. `score` returns the figures for
    prediction rows. `check` says what is wrong with a row, or None. `fingerprint` names further options that an answer
    depends on.
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
    """Run the command. Returns the exit code: 0 for success, 2 for wrong input, 130 after Ctrl-C."""

    def command() -> None:
        options = parse(argv, benchmark.name, benchmark.split, benchmark.add_data_options, benchmark.add_score_options)
        if options.verb == "score":
            _score(benchmark, options.predictions, options)
            return
        _check_folder(options.output)
        processes = ranks()
        _infer(benchmark, options, processes)
        if options.verb == "run" and processes.rank == 0:
            _score(benchmark, options.output / PREDICTIONS, options)

    return exit_code_of(command, "what was answered is kept, and the same command goes on from there")


def score_path(output: Path) -> Path:
    """Where a score is written: `output` itself if its name ends in .json, otherwise score.json in that folder."""
    return output if output.suffix == ".json" and not output.is_dir() else output / SCORE


def _check_folder(output: Path) -> None:
    """Check the output folder before anything is loaded. Raises `UserError`."""
    check_folder("output", output)
    if not output.exists() and output.suffix == ".json":
        raise UserError(f"output: {str(output)!r} ends in .json, and a folder is made here; leave the ending out")


def settings_of(options: Namespace) -> AnswerEngineSettings:
    """The engine that the options ask for."""
    endpoint = endpoint_of(options)
    return AnswerEngineSettings(
        model=check_model(options.model) if endpoint is None else options.model,
        engine=options.engine,
        revision=options.revision,
        dtype=options.dtype,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        min_pixels=options.min_pixels,
        max_pixels=options.max_pixels,
        batch_size=options.batch_size,
        endpoint=endpoint,
    )


def _infer(benchmark: Benchmark, options: Namespace, processes: Ranks) -> None:
    """Ask the model all questions, and write its answers into the output folder. Raises `UserError`."""
    if options.samples > 1 and not options.temperature:
        raise UserError(f"samples: {options.samples} greedy answers are the same; give --temperature, such as 1.0")
    if options.min_pixels and options.max_pixels and options.min_pixels > options.max_pixels:
        raise UserError(f"min_pixels: {options.min_pixels} is over max_pixels, {options.max_pixels}; lower it")
    settings = settings_of(options)
    check_loadable(settings)
    everything, data_hash = benchmark.load(options)
    problems = everything[: options.limit]
    fingerprint: Fields = {"benchmark": benchmark.name, "model": settings.model}
    hashed = None if settings.endpoint else model_hash(settings.model, settings.revision)  # nobody shows its weights
    if hashed is not None and processes.rank == 0:
        print(*(f"{line}\n" for line in notes_on(settings.model)), sep="", end="", file=sys.stderr)
    fingerprint |= {"model_hash": hashed, "data_hash": data_hash}
    fingerprint |= {name: getattr(options, name) for name in (*_FINGERPRINT, *benchmark.fingerprint)}
    try:
        summary = infer(
            problems,
            options.output,
            settings,
            fingerprint,
            system_prompt=options.system_prompt,
            build=build_engine,
            samples=options.samples,
            in_data=len(everything),
            ranks=processes,
        )
    except UserError:
        remove_empty(options.output)
        raise
    if processes.rank:
        return
    failed = f", {amount(summary.image_failed, 'image')} failed" if summary.image_failed else ""
    answered = summary.asked - summary.missing
    print(f"{answered} answered in {summary.seconds:.1f} s{failed} -> {options.output / PREDICTIONS}", file=sys.stderr)
    if summary.missing:
        raise UserError(
            f"base_url: {amount(summary.missing, 'answer')} of {summary.total} could not be had; start the same "
            "command again, which asks for those alone"
        )


def _score(benchmark: Benchmark, predictions: Path, options: Namespace) -> None:
    """Score a file of predictions, write the score file, and print its table."""
    output = score_path(options.output)
    check_json("output", output, "a score file", lambda score: {"benchmark", "items"} <= score.keys())
    make_folder("output", output.parent)
    score = score_file(benchmark, predictions, options)
    with written_to("output", output):
        write_json(output, score)
    print(table(score))
    print(f"-> {output}", file=sys.stderr)


def score_file(benchmark: Benchmark, predictions: Path, options: Namespace) -> Score:
    """The score of a predictions file, with the fingerprint that lies beside it, or null if there is none.

    Where its prompts asked for `<answer> </answer>`, `options.answer_tags` says so to the benchmark.
    """
    rows = read_predictions(predictions, benchmark.check)
    path = predictions.parent / FILE_NAME
    fingerprint = read(path) if path.is_file() else None
    asked = (fingerprint or {}).get("asked") or {}
    fields = (fingerprint or {}).get("fields") or {}
    options.answer_tags = asks_for_answer_tags(fields.get("system_prompt"), fields.get("prompt"))
    figures = benchmark.score(rows, options)
    items = figures.pop("items")
    return {
        "benchmark": benchmark.name,
        **figures,
        "coverage": {"answers": len(rows), "asked": asked.get("answers"), "in_data": asked.get("in_data")},
        "versions": versions(),
        "fingerprint": fingerprint,
        "items": items,
    }
