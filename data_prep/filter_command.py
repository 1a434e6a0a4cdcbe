"""The command `filter` of `python -m data_prep`, and its options."""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from adora_vl.evals.inference.provenance import resolve_prompts, unusual_prompts
from adora_vl.evals.inference.requests import EngineOptions, SamplingOptions, default_engine
from adora_vl.evals.options import PROMPT_OF_TRAINING, add_options, options_from
from adora_vl.utils.cli import (
    Commands,
    integer_between,
    none_or,
    number_between,
    path_option,
    path_or_id,
    text_option,
)
from adora_vl.utils.errors import UserError
from data_prep.options import number_range, refuse_options

MAX_SAMPLES = 1024  # answers to a problem; more would say nothing new of its pass rate
_OPTIONS_OF_FILTERING = ("input", "output", "model", "predictions")  # not for --attenuation


def add_filter(commands: Commands) -> None:
    """Add the command `filter`, which keeps the problems that a model solves sometimes."""
    command = commands.add_parser(
        "filter", help="keep the problems that a model solves sometimes, by sampling answers"
    )
    add = command.add_argument
    add("--input", type=none_or(path_option), metavar="DIR", help="a folder that data_prep made")
    add(
        "--output",
        type=none_or(path_option),
        metavar="DIR",
        help="the answers are kept in DIR.samples, to go on from",
    )
    add(
        "--attenuation",
        type=none_or(path_option),
        metavar="PLACE",
        help="filter nothing: say whether ADORA's attenuation would act on the answers of a run's "
        "folder, or on stored ones (DIR.samples, or a predictions file)",
    )
    add("--overwrite", action="store_true", help="replace another prepared dataset there")
    add(
        "--keep",
        type=_pass_rate_range,
        default="0.1:0.9",
        metavar="LOW:HIGH",
        help="pass rates to keep, default: %(default)s",
    )
    add(
        "--split",
        type=text_option,
        default="train",
        help="the split to filter, default: %(default)s; others are copied",
    )
    _add_answer_options(command)
    command.set_defaults(run=_run_filter)


def _add_answer_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `filter` on where the answers come from, and how they are sampled."""
    add = command.add_argument
    add("--model", type=none_or(path_or_id), metavar="M", help="a model folder, a hub id, or tiny")
    add_options(command, SamplingOptions)
    add(
        "--samples",
        type=integer_between(1, MAX_SAMPLES),
        default=8,
        metavar="N",
        help="per problem, default: %(default)s",
    )
    help_text = (
        "instead of --model: answers that `python -m eval.problems infer --split train "
        "--samples N` made"
    )
    add("--predictions", type=none_or(path_option), metavar="FILE.jsonl", help=help_text)
    add(
        "--prompt",
        type=none_or(text_option),
        default=PROMPT_OF_TRAINING,
        metavar="TEMPLATE",
        help="as adora_prompt of the training that the rows are for, or none; default: that of "
        "the model's own training, else with the choices listed",
    )
    add(
        "--temperature",
        type=number_between(0.01, 100),
        default=1.0,
        metavar="T",
        help="default: %(default)s",
    )
    add("--rounding", action="store_true", help="accept rounded decimals")
    add("--engine", choices=("vllm", "transformers"), help="default: vllm where it is installed")


def _pass_rate_range(argument: str) -> tuple[float, float]:
    """Return (0.1, 0.9) for the argument `0.1:0.9`, the range of pass rates to keep.

    Raises the error that argparse shows for anything else.
    """
    if ":" not in argument:
        raise argparse.ArgumentTypeError(
            f"{argument!r} has no colon; write LOW:HIGH, such as 0.1:0.9"
        )
    return number_range(argument, separator=":", convert=number_between(0, 1))


def _check_filter_arguments(arguments: argparse.Namespace) -> None:
    """Check the options of `filter` that depend on each other.

    Raises `UserError` where folders are missing, or where there is not exactly one source of
    answers: a model to sample them with, or a file of stored ones.
    """
    for name in ("input", "output"):
        if getattr(arguments, name) is None:
            raise UserError(f"{name}: give --{name} DIR")
    has_both_or_neither = (arguments.model is None) == (arguments.predictions is None)
    if has_both_or_neither:
        raise UserError(
            "model: give --model, to sample answers with, or --predictions, answers that are there"
        )
    if arguments.predictions is None:
        return
    for name in ("prompt", "system_prompt"):
        # Stored answers were sampled with certain prompts already. The default of both options is
        # the object `PROMPT_OF_TRAINING`, so any other object was set by the user.
        is_set_by_user = getattr(arguments, name) is not PROMPT_OF_TRAINING
        if is_set_by_user:
            option = name.replace("_", "-")
            raise UserError(
                f"{name}: --{option} is for sampling, and --predictions has answers already; "
                "leave one out"
            )


def _print_attenuation_forecast(answers: Path, *, rounding: bool) -> None:
    """Print on how many groups of answers ADORA's attenuation would act.

    `answers` is a file of stored answers, a folder with one, or the folder of a run.
    """
    from data_prep import forecast  # the grader takes seconds to import

    print("\n".join(forecast.forecast_from_path(answers, rounding=rounding).lines()))


def _run_filter(arguments: argparse.Namespace) -> None:
    """Run `filter`: sample answers, or read stored ones, and write the problems that are kept.

    With `--attenuation` nothing is filtered. The command then prints for which stored answers ADORA
    would reduce the weight in training. `arguments` are the parsed options.
    """
    # Imported here, since the engines that sample take seconds to import.
    from data_prep import filter as filtering

    if arguments.attenuation is not None:
        refuse_options(
            arguments,
            *_OPTIONS_OF_FILTERING,
            why="has no effect with --attenuation, which filters nothing",
        )
        _print_attenuation_forecast(arguments.attenuation, rounding=arguments.rounding)
        return
    _check_filter_arguments(arguments)
    filtering.check_input(arguments.input, arguments.split)
    filtering.check_output(arguments.input, arguments.output)
    if arguments.predictions is None:
        answers = _sample_answers(arguments)
    else:
        answers = _AnswersFile(
            file=arguments.predictions,
            description={"predictions": str(arguments.predictions)},
        )
    low, high = arguments.keep
    manifest = filtering.filter_dataset(
        arguments.input,
        output=arguments.output,
        predictions=answers.file,
        keep=filtering.PassRateRange(low=low, high=high),
        split=arguments.split,
        rounding=arguments.rounding,
        overwrite=arguments.overwrite,
        arguments=answers.description,
    )
    print(f"{arguments.output}: {filtering.filter_report(manifest)}")
    if arguments.predictions is None and arguments.samples > 1:
        print("\nWould ADORA's attenuation act on these problems (docs/data.md)?")
        _print_attenuation_forecast(answers.file, rounding=arguments.rounding)


class _AnswersFile(NamedTuple):
    """The file of the answers that a filter goes by, and what the manifest says of them."""

    file: Path
    description: dict[str, Any]


def _sample_answers(arguments: argparse.Namespace) -> _AnswersFile:
    """Sample several answers to each problem with the model that the command names."""
    from adora_vl.evals.inference.engines import build_settings
    from data_prep import filter as filtering

    # A prompt that the user has not set is the one of the model's training.
    prompts = resolve_prompts(
        arguments.model, {"system_prompt": arguments.system_prompt, "prompt": arguments.prompt}
    )
    options = options_from(
        EngineOptions,
        arguments,
        engine=arguments.engine or default_engine(),
        system_prompt=prompts["system_prompt"],
    )
    settings = build_settings(options)
    file = filtering.sample_answers(
        arguments.input,
        split=arguments.split,
        folder=filtering.samples_folder(arguments.output),
        settings=settings,
        samples=arguments.samples,
        prompt=prompts["prompt"],
    )
    description = {
        "model": settings.model,
        "samples": arguments.samples,
        "temperature": settings.temperature,
        **unusual_prompts(prompts),  # those that differ from the defaults
    }
    return _AnswersFile(file, description)
