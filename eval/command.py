"""The subcommands of each benchmark, `infer`, `score` and `run`, with their options."""

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
    load_problems_in_view,
)
from adora_vl.evals.inference.engines import parse_tool_options
from adora_vl.evals.inference.predictions import PREDICTIONS_FILE
from adora_vl.evals.inference.provenance import KEY_AND_DEFAULT_BY_PROMPT, resolve_prompts
from adora_vl.evals.inference.ranks import join_process_group
from adora_vl.evals.options import ScoreOptions, add_options, option_names, options_from
from adora_vl.evals.records import Benchmark
from adora_vl.evals.scoring.files import write_score
from adora_vl.utils.cli import (
    Parser,
    none_or,
    path_option,
    path_or_id,
    read_mapping,
    run_command,
    text_option,
)
from adora_vl.utils.errors import UserError, did_you_mean
from adora_vl.utils.own_files import search_files_beside

HELP_BY_SUBCOMMAND = {
    "run": "ask the model, and score its answers",
    "infer": "ask the model alone",
    "score": "score answers that are there",
}
# The options without which a subcommand cannot run.
_REQUIRED_OPTIONS_BY_SUBCOMMAND = {
    "infer": ("model", "data", "output"),
    "score": ("predictions", "output"),
    "run": ("model", "data", "output"),
}


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line of a benchmark, read into the options of its subcommand."""

    subcommand: str
    """`infer`, `score` or `run`."""
    ask_options: AskOptions | None = None
    """The options of asking the model, for `infer` and `run`."""
    score_options: ScoreOptions | None = None
    """The options of scoring, for `score` and `run`, as the benchmark's own `score_options`."""
    predictions: Path | None = None
    """The file that `score` scores. `run` scores the answers that it has asked for itself."""


def parse_command(argv: Sequence[str] | None, benchmark: Benchmark) -> Command:
    """Parse the command line of a benchmark into the options of `infer`, `score` or `run`.

    `infer` and `run`, which ask a model, may name a YAML file of options with `--config`. An option
    of the command line takes precedence over one of the file.

    Args:
        argv: The arguments of the command line; None: those of this process.
        benchmark: The benchmark, which adds options of its own.

    Raises `UserError` for a mistake in the file or a missing option.
    """
    parser = build_parser(benchmark)
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parse_with_config_file(parser, arguments, benchmark)
    # Only the subcommands that ask a model have this option.
    if getattr(options, "tool_options", None) is not None:
        options.tool_options = parse_tool_options(options.tools, options.tool_options)
    for name in _REQUIRED_OPTIONS_BY_SUBCOMMAND[options.subcommand]:
        if getattr(options, name) is None:
            raise UserError(f"--{name} is missing; see {parser.prog} {options.subcommand} --help")
    if options.subcommand == "score":
        return Command(
            subcommand=options.subcommand,
            score_options=options_from(benchmark.score_options, options),
            predictions=options.predictions,
        )
    _fill_in_training_prompts(options)
    score_options: ScoreOptions | None = None
    if options.subcommand == "run":
        score_options = options_from(benchmark.score_options, options)
    data_options = options_from(benchmark.data_options, options)
    return Command(
        subcommand=options.subcommand,
        ask_options=options_from(AskOptions, options, data=data_options),
        score_options=score_options,
    )


def _parse_with_config_file(
    parser: Parser, arguments: Sequence[str], benchmark: Benchmark
) -> Namespace:
    """Parse a command line together with the options of its `--config` file, if it names one.

    Args:
        parser: The parser of the benchmark's command.
        arguments: The arguments of the command line; the first is the subcommand.
        benchmark: The benchmark, whose score options `infer` ignores.
    """
    options = parser.parse_args(arguments)
    config_file: Path | None = getattr(options, "config", None)  # `score` has no such option
    if config_file is None:
        return options
    # A file of the user's own that an option names may lie in the folder of the config file.
    search_files_beside(config_file)
    # `infer` ignores the options of scoring, so that one file serves `infer` and `run`.
    ignored_keys: set[str] = set()
    if options.subcommand == "infer":
        ignored_keys.update(option_names(benchmark.score_options))
    file_arguments = _read_config_arguments(config_file, options, ignored_keys)
    # argparse keeps the last of two equal options, so those of the file come first.
    return parser.parse_args([options.subcommand, *file_arguments, *arguments[1:]])


def _fill_in_training_prompts(options: Namespace) -> None:
    """Set prompts that the user has not given to the prompts of the model's training.

    Such a prompt is `PROMPT_OF_TRAINING` in the parsed options, which are changed in place. A model
    that was not trained by this package gets the default prompt. Not every benchmark has both
    options, `system_prompt` and `prompt`.
    """
    parsed_prompts = {
        name: getattr(options, name) for name in KEY_AND_DEFAULT_BY_PROMPT if hasattr(options, name)
    }
    vars(options).update(resolve_prompts(options.model, parsed_prompts))


def build_parser(benchmark: Benchmark) -> Parser:
    """Build the parser of a benchmark's command, with its subcommands.

    The options come from the dataclasses `AskOptions`, `data_options` and `score_options`.
    """
    # A benchmark in a file of the user's own is named on the command line by that file.
    name = " FILE.py:NAME" if benchmark.file else f".{benchmark.name}"
    parser = Parser(prog=f"python -m eval{name}")
    subparsers = parser.add_subparsers(
        dest="subcommand", required=True, metavar="{run,infer,score}"
    )
    for subcommand, help_text in HELP_BY_SUBCOMMAND.items():
        required_options = " ".join(
            f"--{option} {option.upper()}" for option in _REQUIRED_OPTIONS_BY_SUBCOMMAND[subcommand]
        )
        usage = f"{parser.prog} {subcommand} {required_options} [option ...]"
        subparser = subparsers.add_parser(subcommand, help=help_text, usage=usage)
        output_help = "needed: a folder; a run that is there is resumed"
        if subcommand == "score":
            output_help = "needed: a folder for score.json, or a file whose name ends in .json"
        subparser.add_argument("--output", type=none_or(path_option), help=output_help)
        if subcommand == "score":
            _add_prediction_options(subparser)
        else:
            _add_ask_options(subparser, benchmark)
        if subcommand != "infer":
            add_options(subparser, benchmark.score_options)
    return parser


def _add_prediction_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `score` that say where the answers are and how their fields are named."""
    parser.add_argument(
        "--predictions",
        type=none_or(path_option),
        metavar="FILE.jsonl",
        help="needed: answers that `infer` or another program made",
    )
    parser.add_argument(
        "--columns",
        nargs="+",
        type=text_option,
        default=(),
        metavar="OURS=THEIRS",
        help="fields under another name: pid=index response=prediction",
    )


def _add_ask_options(parser: argparse.ArgumentParser, benchmark: Benchmark) -> None:
    """Add the options of asking a model, which `infer` and `run` have in common."""
    split = benchmark.split
    parser.add_argument(
        "--data", type=none_or(path_or_id), help="needed: a folder or file, or a hub id"
    )
    parser.add_argument("--split", type=text_option, default=split, help=f"default {split}")
    add_options(parser, AskOptions)
    add_options(parser, benchmark.data_options)
    parser.add_argument(
        "--config",
        type=none_or(path_option),
        metavar="FILE.yaml",
        help="these options, with _ for -",
    )


def _read_config_arguments(
    config_file: Path, options: Namespace, ignored_keys: set[str]
) -> list[str]:
    """Turn the keys of a YAML file into command-line arguments, so that argparse checks both.

    The file `max_tokens: 512` gives `["--max-tokens=512"]`.

    Args:
        config_file: The YAML file, with an option under each key.
        options: The parsed options of the subcommand, with their defaults. Their names are the
            keys that the file may have.
        ignored_keys: Options of another subcommand, which are left out.

    Raises `UserError` for an unknown key, and for a list or a mapping where an option takes one
    value.
    """
    content = read_mapping("config", config_file)
    known_keys = set(vars(options)) - {"subcommand", "config"}
    arguments: list[str] = []
    for key, value in content.items():
        if key in ignored_keys:
            continue
        if key not in known_keys:
            suggestion = did_you_mean(str(key), known_keys)
            raise UserError(f"config: {str(config_file)!r} has the unknown key {key!r}{suggestion}")
        # A switch without a value on the command line has a truth value as its default.
        is_switch = isinstance(getattr(options, key), bool)
        arguments += _option_to_arguments(
            str(key), value, is_switch=is_switch, config_file=config_file
        )
    return arguments


def _option_to_arguments(
    key: str, value: object, *, is_switch: bool, config_file: Path
) -> list[str]:
    """Turn one key of the config file into arguments of the command line.

    - `max_tokens: 512` becomes `--max-tokens=512`
    - `min_pixels: null` becomes `--min-pixels=null`
    - `tools: [zoom]` becomes `--tools zoom`
    - `tool_options: {images: 4}` becomes `--tool-options={"images": 4}`
    - `rounding: true` becomes `--rounding`, and `rounding: false` becomes `--no-rounding`
    - `no_image: false` and `rounding: null` become nothing

    Args:
        key: The name of the option, with `_` for `-`.
        value: Its value in the file.
        is_switch: Whether the option is `--name` or `--no-name`, without a value.
        config_file: The file, for messages.
    """
    option = "--" + key.replace("_", "-")
    # Two options have more than one value in YAML: `tools` is a list, and `tool_options` a mapping,
    # which the command line takes as one text.
    if key == "tools" and isinstance(value, list) and all(isinstance(name, str) for name in value):
        return [option, *value]
    if key == "tool_options" and isinstance(value, dict):
        value = json.dumps(value)
    if isinstance(value, list | dict):
        fault = "no list of names; write one" if key == "tools" else "not one value; write one"
        raise UserError(f"config: {key}: {value!r:.60} in {str(config_file)!r} is {fault}")
    if is_switch and value is None:
        return []
    if is_switch and value is True:
        return [option]
    if is_switch and value is False:
        # A switch such as `--no-image` has no opposite. It is off unless it is given.
        return [] if key.startswith("no_") else [option.replace("--", "--no-", 1)]
    value_text = "null" if value is None else value
    return [f"{option}={value_text}"]


def main(benchmark: Benchmark, argv: Sequence[str] | None = None) -> int:
    """Run the command of a benchmark, such as `python -m eval.mmstar run ...`.

    Args:
        benchmark: The benchmark.
        argv: The arguments of the command line; None: those of this process.

    Returns the exit code: 0 for success, 2 for wrong input, 130 after Ctrl-C.
    """

    def run() -> None:
        """Score stored answers, or ask the model and score what it answers."""
        command = parse_command(argv, benchmark)
        if command.predictions is not None and command.score_options is not None:
            write_score(benchmark, command.predictions, command.score_options)
            return
        assert command.ask_options is not None  # every subcommand but `score` has these options
        # Every mistake that can be found without the model is found before it is loaded.
        check_output(command.ask_options.output)
        process_group = join_process_group()
        settings = check_options(command.ask_options)
        answer_problems(
            benchmark=benchmark,
            options=command.ask_options,
            settings=settings,
            view_problems=load_problems_in_view(benchmark, command.ask_options),
            process_group=process_group,
        )
        # Rank 0 has gathered the answers of all ranks into one file.
        if command.score_options is not None and process_group.rank == 0:
            write_score(
                benchmark, command.ask_options.output / PREDICTIONS_FILE, command.score_options
            )

    return run_command(
        run, interrupt_note="what was answered is kept, and the same command goes on from there"
    )
