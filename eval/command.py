"""The verbs of each benchmark, `infer`, `score` and `run`, with their options."""

import argparse
import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from adora_vl.evals.asking import ask, check_options, check_output, questions
from adora_vl.evals.inference.engines import default_engine, tool_options_of
from adora_vl.evals.inference.predictions import PREDICTIONS
from adora_vl.evals.inference.provenance import add_asking, settle_prompts
from adora_vl.evals.inference.requests import ENGINES
from adora_vl.evals.inference.runner import ranks
from adora_vl.evals.inference.views import VIEWS
from adora_vl.evals.records import Benchmark
from adora_vl.evals.scoring.files import score_defaults, write_score
from adora_vl.utils.cli import (
    Parser,
    exit_code_of,
    number,
    optional,
    path,
    read_mapping,
    text,
    whole,
)
from adora_vl.utils.errors import UserError, did_you_mean, refuse
from adora_vl.utils.own_files import look_beside

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
