"""The commands `synthetic` and `knights` of `python -m data_prep`, which draw problems."""

import argparse
from collections.abc import Callable

from adora_vl.synthetic.drawing import STYLES
from adora_vl.synthetic.families import PLAIN_FAMILY_BY_NAME
from adora_vl.synthetic.generate import FAMILY_BY_NAME, LEVELS, MAX_CHOICES
from adora_vl.synthetic.generated import (
    DEFAULT_SIZE,
    DEFAULT_TEST_ROWS,
    describe_puzzles,
    describe_synthetic,
    prepare_drawn,
    prepare_knights_table,
)
from adora_vl.synthetic.knights import PEOPLE_RANGE, QUESTION_STYLES
from adora_vl.utils.cli import (
    MAX_SEED,
    Commands,
    integer_between,
    none_or,
    path_option,
)
from adora_vl.utils.errors import UserError
from data_prep.options import add_output, number_range, options_set_by_user, refuse_options
from data_prep.survey import print_counts

MAX_ROWS = 10_000_000  # a typing error of more zeros would draw for days
# A label in a smaller picture cannot be read, and a larger one takes gigabytes while it is drawn.
PICTURE_SIDE_RANGE = (28, 1024)


def add_synthetic(commands: Commands) -> None:
    """Add the command `synthetic`, which draws problems."""
    command = commands.add_parser(
        "synthetic", help="drawn geometry problems; equal arguments give equal problems"
    )
    _add_drawn(command, _run_synthetic)
    add = command.add_argument
    add(
        "--size",
        type=integer_between(*PICTURE_SIDE_RANGE),
        default=DEFAULT_SIZE,
        metavar="PIXELS",
        help="side length, default: %(default)s",
    )
    add(
        "--families",
        type=_split_names,
        default=(),
        metavar="A,B",
        help=f"of {', '.join(FAMILY_BY_NAME)}; default: {', '.join(PLAIN_FAMILY_BY_NAME)}",
    )
    add(
        "--level",
        type=integer_between(min(LEVELS), max(LEVELS)),
        default=1,
        help="difficulty, 1 to 3, default: %(default)s",
    )
    add(
        "--styles",
        type=_split_names,
        default=("plain",),
        metavar="A,B",
        help=f"of {', '.join(STYLES)}; default: plain",
    )
    help_text = "answers to choose from, default: 0, an open question"
    add("--choices", type=_choice_count, default=0, metavar="N", help=help_text)
    add(
        "--figures",
        action="store_true",
        default=None,
        help="add each problem's facts and its solved figure, on which the reward `steps` checks "
        "what a response says",
    )


def add_knights(commands: Commands) -> None:
    """Add the command `knights`, which draws puzzles or reads published ones."""
    command = commands.add_parser(
        "knights", help="knights-and-knaves puzzles, texts without images, with one solution"
    )
    _add_drawn(command, _run_knights, rows_required=False)
    add = command.add_argument
    add(
        "--people",
        type=none_or(_people_range),
        metavar="A-B",
        help="per puzzle, default: {}-{}".format(*PEOPLE_RANGE),
    )
    add("--source", choices=("drawn", "parquet"), default="drawn", help="default: %(default)s")
    add(
        "--input",
        type=none_or(path_option),
        metavar="PATH",
        help="parquet: the reference's data/kk, or a file of it",
    )
    add(
        "--question",
        choices=QUESTION_STYLES,
        help="parquet: ask for a box (default), or leave that to the system prompt",
    )


def _add_drawn(
    command: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], None],
    *,
    rows_required: bool = True,
) -> None:
    """Add the options of a data set that is drawn, and the function that runs the command.

    `rows_required` says whether the user has to set the number of rows.
    """
    add_output(command)
    add = command.add_argument
    add(
        "--rows",
        type=integer_between(1, MAX_ROWS),
        required=rows_required,
        metavar="N",
        help="training rows",
    )
    add(
        "--test-rows",
        type=integer_between(0, MAX_ROWS),
        metavar="M",
        help=f"default: {DEFAULT_TEST_ROWS}",
    )
    add("--seed", type=integer_between(0, MAX_SEED), metavar="S", help="default: 0")
    command.set_defaults(run=run)


def _choice_count(word: str) -> int:
    """Return the number of choices in an argument: 0 for an open question, else at least 2.

    Raises the error that argparse shows for anything else, also for 1, which would be no choice.
    """
    if word == "0":
        return 0
    return integer_between(2, MAX_CHOICES)(word)


def _split_names(word: str) -> tuple[str, ...]:
    """Return ("plain", "scan") for the argument `plain,scan`.

    Raises the error that argparse shows for an empty name.
    """
    names = tuple(name.strip() for name in word.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(
            f"{word!r} has an empty name; write names with commas between them"
        )
    return names


def _people_range(argument: str) -> tuple[int, int]:
    """Return the least and the largest number of people: (3, 5) for `3-5`, and (3, 3) for `3`."""
    range_text = argument if "-" in argument else f"{argument}-{argument}"
    return number_range(range_text, separator="-", convert=integer_between(*PEOPLE_RANGE))


_OPTIONS_OF_DRAWN_SOURCE = ("rows", "test_rows", "seed", "people")
_OPTIONS_OF_PARQUET_SOURCE = ("input", "question")


def _run_knights(arguments: argparse.Namespace) -> None:
    """Run `knights`: draw puzzles, or read published ones from Parquet.

    Raises `UserError` for an option that belongs to the other source.
    """
    is_drawn = arguments.source == "drawn"
    needed_option = "rows" if is_drawn else "input"
    options_of_other_source = _OPTIONS_OF_PARQUET_SOURCE if is_drawn else _OPTIONS_OF_DRAWN_SOURCE
    refuse_options(
        arguments, *options_of_other_source, why=f"does not go with --source {arguments.source}"
    )
    if getattr(arguments, needed_option) is None:
        raise UserError(
            f"{needed_option}: --source {arguments.source} needs it; give --{needed_option}"
        )
    if is_drawn:
        drawn = describe_puzzles(**options_set_by_user(arguments, *_OPTIONS_OF_DRAWN_SOURCE))
        manifest = prepare_drawn(arguments.output, drawn, overwrite=arguments.overwrite)
    else:
        options = options_set_by_user(arguments, "question", "overwrite")
        manifest = prepare_knights_table(arguments.output, arguments.input, **options)
    print_counts(arguments.output, manifest)


_OPTIONS_OF_SYNTHETIC = (
    "rows",
    "test_rows",
    "seed",
    "size",
    "families",
    "level",
    "styles",
    "choices",
    "figures",
)


def _run_synthetic(arguments: argparse.Namespace) -> None:
    """Run `synthetic`: draw the problems, and print how many there are."""
    drawn = describe_synthetic(**options_set_by_user(arguments, *_OPTIONS_OF_SYNTHETIC))
    manifest = prepare_drawn(arguments.output, drawn, overwrite=arguments.overwrite)
    print_counts(arguments.output, manifest)
