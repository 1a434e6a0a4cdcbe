"""The commands of `python -m data_prep` and their options."""

import argparse
import sys

from adora_vl.evals.options import options_from
from adora_vl.utils.cli import (
    MAX_SEED,
    Commands,
    Parser,
    integer_between,
    none_or,
    path_option,
    path_or_id,
    run_command,
    text_option,
)
from data_prep.convert_command import add_convert
from data_prep.drawn_commands import add_knights, add_synthetic
from data_prep.filter_command import add_filter
from data_prep.geometry3k import GEOMETRY3K_PRESET, SOURCES, Geometry3KOptions, prepare_geometry3k
from data_prep.geometry3k_folders import FILE_BY_DIAGRAM
from data_prep.options import add_cleaning, add_family, add_output
from data_prep.solve import add_solve
from data_prep.survey import (
    MAX_GALLERY_ROWS,
    print_counts,
    print_prompt,
    survey_dataset,
    survey_text,
)
from data_prep.variants import add_variants


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Returns the exit code: 0, 2 with one line where the user's input is wrong, 130 after Ctrl-C.
    """

    def run_chosen_command() -> None:
        """Run the chosen command, without progress bars in log files."""
        arguments = build_parser().parse_args(argv)
        if not sys.stderr.isatty():
            from datasets import disable_progress_bars
            from huggingface_hub.utils.tqdm import (
                disable_progress_bars as disable_hub_progress_bars,
            )

            disable_progress_bars()  # `datasets` and the hub draw their own into log files too
            disable_hub_progress_bars()
        arguments.run(arguments)

    # It prints a mistake of the user as one line, and the note after Ctrl-C.
    return run_command(
        run_chosen_command,
        interrupt_note="nothing was written, and what was there before is unchanged",
    )


def build_parser() -> Parser:
    """Return the parser of `python -m data_prep`, with all of its commands."""
    parser = Parser(
        prog="python -m data_prep",
        description="Make, and look at, data sets for training and evaluation.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    add_synthetic(commands)
    add_knights(commands)
    _add_geometry3k(commands)
    add_convert(commands)
    add_filter(commands)
    add_solve(commands)
    add_variants(commands)

    inspect = commands.add_parser(
        "inspect", help="what a prepared folder holds, as text and as an HTML page"
    )
    inspect.add_argument("folder", type=path_option, metavar="DIR", help="the prepared folder")
    inspect.add_argument(
        "--html",
        type=none_or(path_option),
        metavar="FILE",
        help="file for the page, default: DIR.html",
    )
    inspect.add_argument("--text-only", action="store_true", help="write no page")
    inspect.add_argument(
        "--model",
        type=none_or(path_or_id),
        metavar="M",
        help="measure problems with its tokenizer",
    )
    add_family(inspect)
    inspect.set_defaults(run=_run_inspect)
    return parser


def _add_geometry3k(commands: Commands) -> None:
    """Add the command `geometry3k`."""
    command = commands.add_parser(
        "geometry3k", help="Geometry3K from the hub, Parquet, its own folders or redrawn"
    )
    add_output(command)
    add = command.add_argument
    add(
        "--source",
        choices=SOURCES,
        required=True,
        help="its form: on the hub, its Parquet files, the folders of InterGPS, or diagrams that "
        "are redrawn from logic forms or facts",
    )
    add(
        "--input",
        type=none_or(path_or_id),
        metavar="ID_OR_PATH",
        help=f"an id for hub (default: {GEOMETRY3K_PRESET.id}), else a path",
    )
    add(
        "--revision",
        type=none_or(text_option),
        metavar="COMMIT",
        help="of the hub: commit, tag or branch, default: newest",
    )
    add(
        "--diagram",
        choices=FILE_BY_DIAGRAM,
        help="intergps: the picture as printed, or with every vertex lettered",
    )
    help_text = (
        "logic-forms, facts: a table with the questions (messages, solution, images), whose "
        "diagrams are redrawn"
    )
    add("--texts", type=none_or(text_option), metavar="FILE", help=help_text)
    add_cleaning(command)
    add(
        "--limit",
        type=none_or(integer_between(1)),
        metavar="N",
        help="only N rows a split: the first, or with --seed a sample",
    )
    add(
        "--seed", type=none_or(integer_between(0, MAX_SEED)), metavar="S", help="seed of the sample"
    )
    command.set_defaults(run=_run_geometry3k)


def _run_geometry3k(arguments: argparse.Namespace) -> None:
    """Run `geometry3k`: prepare the data set, and print its counts and one prompt."""
    manifest = prepare_geometry3k(
        arguments.output,
        source=arguments.source,
        location=arguments.input,
        revision=arguments.revision,
        options=options_from(Geometry3KOptions, arguments),
        workers=arguments.workers,
        overwrite=arguments.overwrite,
    )
    print_counts(arguments.output, manifest)
    print_prompt(arguments.output, manifest)


def _run_inspect(arguments: argparse.Namespace) -> None:
    """Run `inspect`: read every row of a data set, print its figures and write its page."""
    gallery_size = 0 if arguments.text_only else MAX_GALLERY_ROWS
    folder = arguments.folder.resolve()
    page_path = arguments.html or folder.with_name(f"{folder.name}.html")
    if not arguments.text_only:
        from data_prep.survey_page import check_page, write_page  # matplotlib takes a second

        check_page(page_path)  # before every row is read
    survey = survey_dataset(
        arguments.folder,
        gallery_size=gallery_size,
        model=arguments.model,
        family=arguments.family,
    )
    print(survey_text(survey))
    if not arguments.text_only:
        write_page(survey, page_path)
        print(f"\npage: {page_path}")
