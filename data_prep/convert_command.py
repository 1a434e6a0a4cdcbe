"""The command `convert` of `python -m data_prep`, and its options."""

import argparse
from dataclasses import replace

from adora_vl.conversion.columns import ANSWER_IS, PRESETS, Columns, columns_from_words
from adora_vl.conversion.convert import ConversionOptions, convert
from adora_vl.data.dataset import SPLITS
from adora_vl.evals.options import options_from
from adora_vl.utils.cli import (
    MAX_SEED,
    Commands,
    integer_between,
    none_or,
    number_between,
    path_option,
    path_or_id,
    text_option,
)
from adora_vl.utils.errors import UserError
from data_prep.options import add_cleaning, add_output
from data_prep.survey import print_counts, print_prompt

_CONVERT_EXAMPLES = """\
examples:
  python -m data_prep convert --input tasks.csv --output data/mine \\
      --columns problem=Question answer=Solution images=Photo
  python -m data_prep convert --input train.parquet --output data/mine --preset verl
"""


def add_convert(commands: Commands) -> None:
    """Add the command `convert`, which prepares a table of the user's or of the hub."""
    command = commands.add_parser(
        "convert",
        help="your own data: JSON, CSV, Excel, Parquet, a folder, a hub id",
        epilog=_CONVERT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_output(command)
    add = command.add_argument
    add(
        "--preset",
        choices=tuple(PRESETS),
        help="a published data set, or rows of another trainer; for --columns",
    )
    help_text = "a table, a folder with one, or a hub id; default: that of the preset"
    add("--input", type=none_or(path_or_id), metavar="PATH_OR_ID", help=help_text)
    add(
        "--columns",
        nargs="+",
        metavar="NAME=COLUMN",
        help="problem=question answer=label, and images=, choices=, id= where there are such; "
        "others are kept as texts; a dot leads into an object, "
        "answer=reward_model.ground_truth",
    )
    _add_reading_options(command)
    add(
        "--name",
        type=none_or(text_option),
        metavar="WORD",
        help="of the data set, for its rows' ids; default: the input's",
    )
    add(
        "--split-name",
        choices=SPLITS,
        help="of a single table, in place of what the name of its file says",
    )
    add(
        "--drop-instruction",
        action="store_true",
        help="take off what problems of other trainers say on how to answer",
    )
    _add_split_options(command)
    _add_hub_options(command)
    add_cleaning(command)
    command.set_defaults(run=_run_convert)


def _add_reading_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `convert` that say how the values of the columns are read.

    A switch that the user does not set is None, so that the value of the preset stays.
    """
    add = command.add_argument
    add(
        "--decimal-comma",
        action="store_true",
        default=None,
        help="52,5 is 52.5, and 1.234,5 is 1234.5",
    )
    add(
        "--answer-is",
        choices=ANSWER_IS,
        help="of a whole number beside choices: one of them, or its place",
    )
    add(
        "--image-dir",
        type=none_or(path_option),
        metavar="DIR",
        help="where paths of images begin, default: by the table; also of paths of another machine",
    )
    add(
        "--keep-options-in-text",
        action="store_true",
        default=None,
        help="options in the text of a problem do not become choices",
    )
    add(
        "--text-answers",
        action="store_true",
        default=None,
        help="sentences are reference answers too, right for the same text alone",
    )


def _add_split_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `convert` that say how many rows there are, and which are held out."""
    add = command.add_argument
    add(
        "--test-share",
        type=number_between(0, 0.99),
        default=0.0,
        metavar="SHARE",
        help="of train, to become the split test",
    )
    add(
        "--seed",
        type=integer_between(0, MAX_SEED),
        default=0,
        metavar="S",
        help="of the test share, default: %(default)s",
    )
    add(
        "--limit",
        type=none_or(integer_between(1)),
        metavar="N",
        help="only the first N rows of every split",
    )


def _add_hub_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `convert` that say which part of a dataset of the hub is read."""
    add = command.add_argument
    add(
        "--revision",
        type=none_or(text_option),
        metavar="COMMIT",
        help="of a hub id: commit, tag or branch",
    )
    add(
        "--subset",
        type=none_or(text_option),
        metavar="NAME",
        help="of a hub id: one of its configurations",
    )
    add(
        "--splits",
        type=_split_pair,
        nargs="+",
        default=[],
        metavar="OURS=THEIRS",
        help="of a hub id: test=testmini",
    )


def _split_pair(argument: str) -> tuple[str, str]:
    """Return ("test", "testmini"), a split here and on the hub, for the argument `test=testmini`.

    Raises the error that argparse shows for anything else.
    """
    our_split, _, hub_split = argument.partition("=")
    if our_split not in SPLITS or not hub_split.strip():
        raise argparse.ArgumentTypeError(
            f"{argument!r:.60} is not OURS=THEIRS; before the = stands {', '.join(SPLITS)}"
        )
    return our_split, hub_split


def _chosen_columns(arguments: argparse.Namespace) -> Columns:
    """Return the columns to read from the table, as `--preset` or `--columns` names them.

    Raises `UserError` unless exactly one of the two was given.
    """
    preset = PRESETS.get(arguments.preset)
    has_both_or_neither = (preset is None) == (arguments.columns is None)
    if has_both_or_neither:
        raise UserError(
            "columns: give --columns, such as problem=question answer=label, or --preset"
        )
    columns = preset.columns if preset else columns_from_words(arguments.columns)
    reading_options = {
        "decimal_comma": arguments.decimal_comma,
        "answer_is": arguments.answer_is or "",
        "image_dir": str(arguments.image_dir or ""),
        "text_answers": arguments.text_answers,
        "keep_options_in_text": arguments.keep_options_in_text,
    }
    # An option that the user has not set stays as the preset has it.
    options_set = {name: value for name, value in reading_options.items() if value}
    return replace(columns, **options_set)


def _run_convert(arguments: argparse.Namespace) -> None:
    """Run `convert`: prepare a table, and print its counts and one prompt.

    Raises `UserError` where the columns or the input are missing.
    """
    preset = PRESETS.get(arguments.preset)
    columns = _chosen_columns(arguments)
    # Where the data set of the preset is published; None for the rows of another trainer.
    published_id = preset.id if preset else None
    data_name = arguments.name
    if published_id:
        data_name = data_name or arguments.preset
    location = arguments.input or published_id
    if location is None:
        raise UserError("input: missing; give --input, a table, a folder with one, or a hub id")
    # Each other field of `ConversionOptions` has the value of the option of the same name.
    conversion = options_from(
        ConversionOptions, arguments, name=data_name, splits=dict(arguments.splits)
    )
    manifest = convert(
        location,
        arguments.output,
        columns,
        options=conversion,
        revision=arguments.revision,
        workers=arguments.workers,
        overwrite=arguments.overwrite,
    )
    print_counts(arguments.output, manifest)
    print_prompt(arguments.output, manifest)
