"""The verbs of each benchmark, `infer`, `score` and `run`, with their options."""

import argparse
import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from adora_vl.evals.asking import (
    AskOptions,
    answer_problems,
    check_options,
    check_output,
    problems_to_ask,
)
from adora_vl.evals.inference.engines import tool_options_of
from adora_vl.evals.inference.predictions import PREDICTIONS
from adora_vl.evals.inference.provenance import PROMPTS, resolve_prompts
from adora_vl.evals.inference.runner import join_ranks
from adora_vl.evals.options import ScoreOptions, add_options, option_names, options_from
from adora_vl.evals.records import Benchmark
from adora_vl.evals.scoring.files import write_score
from adora_vl.utils.cli import Parser, exit_code_of, optional, path, read_mapping, text
from adora_vl.utils.errors import UserError, did_you_mean
from adora_vl.utils.own_files import search_files_beside

VERBS = {"infer": "answer the problems", "score": "score answers", "run": "both"}
_NEEDED = {
    "infer": ("model", "data", "output"),
    "score": ("predictions", "output"),
    "run": ("model", "data", "output"),
}


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command that was read: its verb, with the options of the verb."""

    verb: str
    ask: AskOptions | None = None
    """The options of `infer` and `run`."""
    score: ScoreOptions | None = None
    """The options of `score` and `run`: an instance of the benchmark's own `score_options`."""
    predictions: Path | None = None
    """The file that `score` scores; `run` scores the answers that it has asked for."""


def parse(argv: Sequence[str] | None, benchmark: Benchmark) -> Command:
    """Read a benchmark's command: the command line goes over the `--config` file.

    Raises `UserError`.
    """
    parser = build_parser(benchmark)
    words = list(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(words)
    config: Path | None = getattr(options, "config", None)
    if config is not None:
        search_files_beside(config)
        # The options of the file come first, because argparse keeps the last of two equal options.
        # `infer` ignores options for the score, so that one file serves `infer` and `run`.
        unused = set(option_names(benchmark.score_options)) if options.verb == "infer" else set()
        options = parser.parse_args(
            [options.verb, *_file_options(config, options, unused), *words[1:]]
        )
    if getattr(options, "tool_options", None) is not None:
        options.tool_options = tool_options_of(options.tools, options.tool_options)
    for name in _NEEDED[options.verb]:
        if getattr(options, name) is None:
            raise UserError(f"--{name} is missing; see {parser.prog} {options.verb} --help")
    if options.verb == "score":
        return Command(
            verb=options.verb,
            score=options_from(benchmark.score_options, options),
            predictions=options.predictions,
        )
    prompts = {name: getattr(options, name) for name in PROMPTS if hasattr(options, name)}
    vars(options).update(resolve_prompts(options.model, prompts))
    data = options_from(benchmark.data_options, options)
    return Command(
        verb=options.verb,
        ask=options_from(AskOptions, options, data=data),
        score=options_from(benchmark.score_options, options) if options.verb == "run" else None,
    )


def build_parser(benchmark: Benchmark) -> Parser:
    """Return the parser of a benchmark's command, with the options that its dataclasses have."""
    name = " FILE.py:NAME" if benchmark.file else f".{benchmark.name}"
    parser = Parser(prog=f"python -m eval{name}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="{infer,score,run}")
    for verb, help_text in VERBS.items():
        sub = verbs.add_parser(verb, help=help_text)
        if verb == "score":
            sub.add_argument(
                "--predictions",
                type=optional(path),
                metavar="FILE.jsonl",
                help="needed: answers that `infer` or another program made",
            )
            sub.add_argument(
                "--columns",
                nargs="+",
                type=_column,
                default=(),
                metavar="OURS=THEIRS",
                help="fields under another name: pid=index response=prediction",
            )
            where = "needed: a folder for score.json, or a file whose name ends in .json"
        else:
            _add_inference(sub, benchmark)
            sub.add_argument(
                "--config",
                type=optional(path),
                metavar="FILE.yaml",
                help="these options, with _ for -",
            )
            where = "needed: a folder; a run that is there is resumed"
        sub.add_argument("--output", type=optional(path), help=where)
        if verb != "infer":
            add_options(sub, benchmark.score_options)
    return parser


def _column(word: str) -> str:
    """Return a word `OURS=THEIRS` as it is.

    Raises `ArgumentTypeError` for another, of which argparse makes a line that names the option.
    """
    ours, sign, theirs = text(word).partition("=")
    if not (ours and sign and theirs):
        raise argparse.ArgumentTypeError(f"{word!r:.60} is not OURS=THEIRS")
    return word


def _add_inference(parser: argparse.ArgumentParser, benchmark: Benchmark) -> None:
    """The options of `infer` and `run`."""
    split = benchmark.split
    parser.add_argument("--data", type=optional(text), help="needed: a folder or file, or a hub id")
    parser.add_argument("--split", type=text, default=split, help=f"default {split}")
    add_options(parser, AskOptions)
    add_options(parser, benchmark.data_options)


def _file_options(file: Path, options: Namespace, unused: set[str]) -> list[str]:
    """Return the keys of a YAML file as words of a command line, so that the same code checks both.

    Keys in `unused` are left out; `options` has the options of the verb. Raises `UserError` for an
    unknown key, and for a value that is a list or a mapping where one value is expected.
    """
    content = read_mapping("config", file)
    names = set(vars(options)) - {"verb", "config"}
    words = []
    for key, value in content.items():
        if key in unused:
            continue
        if key not in names:
            raise UserError(
                f"config: {str(file)!r} has the unknown key {key!r}{did_you_mean(str(key), names)}"
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
            fault = "no list of names; write one" if key == "tools" else "not one value; write one"
            raise UserError(f"config: {key}: {value!r:.60} in {str(file)!r} is {fault}")
        is_switch = isinstance(getattr(options, key), bool)
        if (value is False and str(key).startswith("no_")) or (value is None and is_switch):
            continue
        if isinstance(value, bool) and is_switch:
            words.append(option if value else option.replace("--", "--no-", 1))
        else:
            words.append(f"{option}={'null' if value is None else value}")
    return words


def main(benchmark: Benchmark, argv: Sequence[str] | None = None) -> int:
    """Run the command of a benchmark, with the words of `argv` or of the process.

    Returns the exit code: 0 for success, 2 for wrong input, 130 after Ctrl-C.
    """

    def run() -> None:
        """Score stored answers, or ask the model and score what it answers."""
        command = parse(argv, benchmark)
        if command.predictions is not None and command.score is not None:
            write_score(benchmark, command.predictions, command.score)
            return
        assert command.ask is not None
        # Every mistake that can be found without the model is found before it is loaded.
        check_output(command.ask.output)
        processes = join_ranks()
        settings = check_options(command.ask)
        answer_problems(
            benchmark=benchmark,
            options=command.ask,
            settings=settings,
            selection=problems_to_ask(benchmark, command.ask),
            processes=processes,
        )
        # The first rank has gathered the answers of all.
        if command.score is not None and processes.rank == 0:
            write_score(benchmark, command.ask.output / PREDICTIONS, command.score)

    return exit_code_of(run, "what was answered is kept, and the same command goes on from there")
