"""The verbs of each benchmark, `infer`, `score` and `run`, with their options."""

import argparse
import json
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from adora_vl.data.prompts import asks_for_answer_tags
from adora_vl.models.load import model_hash
from adora_vl.utils.cli import (
    Parser,
    amount,
    exit_code_of,
    number,
    optional,
    path,
    read_mapping,
    text,
    whole,
)
from adora_vl.utils.errors import UserError, did_you_mean, refuse
from adora_vl.utils.files import check_folder, check_json, make_folder, written_to
from adora_vl.utils.hub import notes_on
from adora_vl.utils.own_files import look_beside
from eval.benchmark import loaded
from eval.inference.engines import (
    build_engine,
    check_loadable,
    default_engine,
    settings_of,
    tool_options_of,
)
from eval.inference.predictions import PREDICTIONS, read_predictions, score_path
from eval.inference.provenance import (
    FILE_NAME,
    Fields,
    add_asking,
    read,
    settle_prompts,
    versions,
    write_json,
)
from eval.inference.requests import ENGINES, AnswerEngine, AnswerEngineSettings
from eval.inference.runner import Ranks, infer, ranks
from eval.inference.views import VIEWS, shown_as
from eval.records import Benchmark, Prediction, Problem, Scored
from eval.scoring.score import own_cells, score
from eval.scoring.table import table

VERBS = {"infer": "answer the problems", "score": "score answers", "run": "both"}
_NEEDED = {
    "infer": ("model", "data", "output"),
    "score": ("predictions", "output"),
    "run": ("model", "data", "output"),
}
MAX_SAMPLES = 1024


def parse(argv: Sequence[str] | None, benchmark: Benchmark) -> Namespace:
    """The options of a benchmark's command: the command line goes over the `--config` file.

    Raises `UserError`.
    """
    parser = build_parser(benchmark)
    words = list(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(words)
    config: Path | None = getattr(options, "config", None)
    if config is not None:
        look_beside(config)
        # The options of the file come first, because argparse keeps the last of two equal options.
        # `infer` ignores options for the score, so that one file serves `infer` and `run`.
        unused = set(vars(score_defaults(benchmark))) if options.verb == "infer" else set()
        options = parser.parse_args(
            [options.verb, *_file_options(config, options, unused), *words[1:]]
        )
    if getattr(options, "tool_options", None) is not None:
        options.tool_options = tool_options_of(options)
    for name in _NEEDED[options.verb]:
        refuse(
            (
                getattr(options, name) is None,
                f"--{name} is missing; see {parser.prog} {options.verb} --help",
            )
        )
    settle_prompts(options)
    return options


def build_parser(benchmark: Benchmark) -> Parser:
    parser = Parser(
        prog="python -m eval" + (" FILE.py:NAME" if benchmark.file else f".{benchmark.name}")
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="{infer,score,run}")
    for verb, what in VERBS.items():
        sub = verbs.add_parser(verb, help=what)
        if verb == "score":
            sub.add_argument("--predictions", type=optional(path), metavar="FILE.jsonl")
            where = "a folder for score.json, or a file whose name ends in .json"
        else:
            _add_inference(sub, benchmark.split)
            sub.add_argument(
                "--config",
                type=optional(path),
                metavar="FILE.yaml",
                help="these options, with _ for -",
            )
            if benchmark.add_data_options:
                benchmark.add_data_options(sub)
            where = "a folder; a run that is there is resumed"
        sub.add_argument("--output", type=optional(path), help=where)
        if verb != "infer" and benchmark.add_score_options:
            benchmark.add_score_options(sub)
    return parser


def _add_inference(parser: argparse.ArgumentParser, split: str) -> None:
    """The options of `infer` and `run`. `split`: the default split of the benchmark."""
    add = parser.add_argument
    add(
        "--model",
        type=optional(text),
        help="a model folder, a hub id, or tiny; with openai its name there",
    )
    add_asking(parser)
    add("--data", type=optional(text), help="a folder or file, or a hub id")
    add("--split", type=text, default=split, help=f"default {split}")
    add(
        "--engine",
        choices=ENGINES,
        default=default_engine(),
        help="default: vllm where it is installed",
    )
    add(
        "--base-url",
        type=optional(text),
        metavar="URL",
        help="of the server for openai; --model is its name there",
    )
    add(
        "--concurrency",
        type=whole(1, 1024),
        default=16,
        metavar="N",
        help="calls at once, with openai; default 16",
    )
    add(
        "--timeout",
        type=number(0.001, 86400),
        default=600.0,
        metavar="SECONDS",
        help="of a call; default 600",
    )
    add("--limit", type=optional(whole(1)), metavar="N", help="use only the first N problems")
    add(
        "--temperature",
        type=number(0.01, 100, also=0.0),
        default=0.0,
        help="0: greedy, the default",
    )
    add(
        "--samples",
        type=whole(1, MAX_SAMPLES),
        default=1,
        metavar="K",
        help="answers per problem, for avg@k, pass@k",
    )
    what = "; ".join(f"{name}: {shown}" for name, shown in VIEWS.items())
    add(
        "--view",
        choices=VIEWS,
        default="image",
        help=f"{what}; eval.compare lays them side by side",
    )
    what = (
        "what the model may call between its turns, as in training: zoom, line, ... or "
        "FILE.py:FUNCTION"
    )
    add("--tools", nargs="*", type=text, default=[], metavar="TOOL", help=what)
    add(
        "--max-tool-calling-iterations",
        type=whole(1),
        default=3,
        metavar="N",
        help="turns answered; default 3",
    )
    what = (
        "as adora_tool_options, such as '{images: 4}'; --max-tokens bounds a conversation with "
        "what tools say"
    )
    add("--tool-options", type=optional(text), metavar="MAPPING", help=what)


def score_defaults(benchmark: Benchmark) -> Namespace:
    parser = Parser()
    if benchmark.add_score_options:
        benchmark.add_score_options(parser)
    return parser.parse_args([])


def _file_options(file: Path, options: Namespace, unused: set[str]) -> list[str]:
    """The keys of the YAML file as command-line words, so that both are checked by the same code."""
    content = read_mapping("config", file)
    known = set(vars(options)) - {"verb", "config"}
    words = []
    for key, value in content.items():
        if key in unused:
            continue
        refuse(
            (
                key not in known,
                f"config: {str(file)!r} has the unknown key {key!r}{did_you_mean(str(key), known)}",
            )
        )
        option = "--" + str(key).replace("_", "-")
        if (
            key == "tools"
            and isinstance(value, list)
            and all(isinstance(name, str) for name in value)
        ):
            words += [option, *value]
            continue
        if key == "tool_options" and isinstance(value, dict):
            value = json.dumps(value)
        if isinstance(value, list | dict):
            wanted = "no list of names; write one" if key == "tools" else "not one value; write one"
            raise UserError(f"config: {key}: {value!r:.60} in {str(file)!r} is {wanted}")
        is_switch = isinstance(getattr(options, key), bool)
        if (value is False and str(key).startswith("no_")) or (value is None and is_switch):
            continue
        if isinstance(value, bool) and is_switch:
            words.append(option if value else option.replace("--", "--no-", 1))
        else:
            words.append(f"{option}={'null' if value is None else value}")
    return words


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


def main(benchmark: Benchmark, argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns the exit code: 0 for success, 2 for wrong input, 130 after Ctrl-C.
    """

    def command() -> None:
        options = parse(argv, benchmark)
        if options.verb == "score":
            write_score(benchmark, options.predictions, options)
            return
        check_output(options.output)
        processes = ranks()
        ask(benchmark, options, check_options(options), questions(benchmark, options), processes)
        if options.verb == "run" and processes.rank == 0:
            write_score(benchmark, options.output / PREDICTIONS, options)

    return exit_code_of(
        command, "what was answered is kept, and the same command goes on from there"
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
    # Not fields of all runs, since earlier versions have begun some without them.
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


def write_score(benchmark: Benchmark, predictions: Path, options: Namespace) -> None:
    """Score a file of predictions, write the score file, and print its table."""
    output = score_path(options.output)
    check_json(
        "output", output, "a score file", lambda score: {"benchmark", "items"} <= score.keys()
    )
    make_folder("output", output.parent)
    scored = score_file(benchmark, predictions, options)
    with written_to("output", output):
        write_json(output, scored.score)
    print(table(scored))
    print(f"-> {output}", file=sys.stderr)


def score_file(benchmark: Benchmark, predictions: Path, options: Namespace) -> Scored:
    """The score of a predictions file, with the fingerprint that lies beside it, or null if there
    is none.
    """
    rows = read_predictions(predictions, benchmark.check, benchmark.id_column)
    path = predictions.parent / FILE_NAME
    fingerprint = read(path) if path.is_file() else None
    asked = (fingerprint or {}).get("asked") or {}
    fields = (fingerprint or {}).get("fields") or {}
    tags = asks_for_answer_tags(fields.get("system_prompt"), fields.get("prompt"))
    figures, own = score(benchmark, rows, options, answer_tags=tags)
    coverage = {
        "answers": len(rows),
        "asked": asked.get("answers"),
        "in_data": asked.get("in_data"),
    }
    items = figures.pop("items")  # last in the file, because they are long
    made = {
        **figures,
        "coverage": coverage,
        "versions": versions(),
        "fingerprint": fingerprint,
        "items": items,
    }
    return Scored(made, own)


def figures_in_training(
    benchmark: Benchmark,
    rows: Sequence[Prediction],
    options: Namespace | None = None,
    *,
    answer_tags: bool = False,
) -> dict[str, float]:
    """The score of at least one row as flat numbers for a log: `mathvista_accuracy`, its interval,
    and all that it has.

    `options`: of the benchmark's `score` verb; None: its defaults. `answer_tags`: the prompts asked
    for `<answer>`.
    """
    made, _ = score(benchmark, rows, options or score_defaults(benchmark), answer_tags=answer_tags)
    low, high = made["wilson_95"]
    flat = {"accuracy": made["accuracy"], "accuracy_low": low, "accuracy_high": high}
    flat |= {f"tokens_{kind}": known["mean"] for kind, known in made["tokens"].items() if known}
    for key, name in (("truncated", "truncated"), ("reflective_words", "reflective")):
        flat |= {name: made[key]["share"]} if made[key] else {}
    for cells in own_cells(made).values():
        flat |= {f"accuracy_{name}": cell["accuracy"] for name, cell in cells.items()}
    for name, cell in made["groups"].get("kind", {}).items():  # of drawn problems
        flat[f"{re.sub(r'[^0-9A-Za-z]+', '_', name)}_accuracy"] = cell["accuracy"]
    flat |= {
        name: figure["value"] for name, figure in made.get("samples", {}).items() if "@" in name
    }
    return {f"{benchmark.name}_{name}": value for name, value in flat.items()}
