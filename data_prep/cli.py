"""The command line: `python -m data_prep {synthetic,knights,geometry3k,convert,filter,inspect}`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from typing import Any

from datasets import disable_progress_bars
from huggingface_hub.utils.tqdm import disable_progress_bars as disable_hub_progress_bars

from adora_vl.commands import MAX_SEED, Parser, exit_code_of, number, optional, path, text, whole
from data_prep.convert import Conversion, convert
from data_prep.drawn_command import add_knights, add_output, add_synthetic
from data_prep.filter_command import add_filter
from data_prep.geometry3k import MAX_WORKERS, Options, prepare_geometry3k
from data_prep.inspection import GALLERY_ROWS, survey
from data_prep.own.columns import columns_of_words
from data_prep.pixels import DEFAULT_FAMILY, MAX_PIXELS, UNIT, VISIONS
from data_prep.quarantine import MAX_SHARE
from data_prep.sources import DATASET_ID, DIAGRAMS, SOURCES
from data_prep.storage import SPLITS
from data_prep.text_report import describe, print_counts


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0, 2 with one line where the user's input is wrong, 130 after Ctrl-C."""
    if not sys.stderr.isatty():
        disable_progress_bars()  # `datasets` and the hub draw their own into log files too
        disable_hub_progress_bars()

    def command() -> None:
        arguments = parser().parse_args(argv)
        arguments.run(arguments)

    return exit_code_of(command, "nothing was written, and what was there before is unchanged")


def parser() -> Parser:
    """The commands and their options."""
    top = Parser(
        prog="python -m data_prep", description="Make, and look at, dataset folders for training and evaluation."
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    add_synthetic(commands)
    add_knights(commands)
    _add_geometry3k(commands)
    _add_convert(commands)
    add_filter(commands)

    inspect = commands.add_parser("inspect", help="what a prepared folder holds, as text and as an HTML page")
    inspect.add_argument("folder", type=path, metavar="DIR")
    inspect.add_argument("--html", type=optional(path), metavar="FILE", help="file for the page, default: DIR.html")
    inspect.add_argument("--text-only", action="store_true", help="write no page")
    inspect.add_argument("--model", type=optional(text), metavar="M", help="measure problems with its tokenizer")
    inspect.add_argument(
        "--family", choices=tuple(VISIONS), default=DEFAULT_FAMILY,
        help="the model_type that counts image tokens, default: %(default)s",
    )  # fmt: skip
    inspect.set_defaults(run=_inspect)
    return top


def _add_geometry3k(commands: Any) -> None:
    command = commands.add_parser("geometry3k", help="Geometry3K from the hub, Parquet files or its own folders")
    add_output(command)
    add = command.add_argument
    add("--source", choices=SOURCES, required=True)
    add(
        "--input", type=optional(text), metavar="ID_OR_PATH",
        help=f"a dataset id for hub (default: {DATASET_ID}), else a path",
    )  # fmt: skip
    add(
        "--revision", type=optional(text), metavar="COMMIT",
        help="of the hub's dataset: commit, tag or branch, default: the newest",
    )  # fmt: skip
    add("--diagram", choices=DIAGRAMS, help="intergps: the picture as printed, or with every vertex lettered")
    _add_cleaning(command)
    add(
        "--family", choices=tuple(VISIONS), default=DEFAULT_FAMILY,
        help="the model_type that the pixel limits are for, default: %(default)s",
    )  # fmt: skip
    add(
        "--limit", type=optional(whole(1)), metavar="N",
        help="only N rows of every split: the first ones, or with --seed a sample",
    )  # fmt: skip
    add("--seed", type=optional(whole(0, MAX_SEED)), metavar="S", help="seed of the sample")
    command.set_defaults(run=_geometry3k)


def _add_cleaning(command: argparse.ArgumentParser) -> None:
    """The options of how the rows of a source are cleaned."""
    add = command.add_argument
    pixels = optional(whole(UNIT**2, MAX_PIXELS))  # from one image token on
    add("--max-pixels", type=pixels, metavar="N", help="shrink larger images as the model does, default: keep them")
    add("--min-pixels", type=pixels, metavar="N", help="enlarge smaller ones as the model does, default: keep them")
    add(
        "--workers", type=whole(1, MAX_WORKERS), default=1, metavar="N", help="cleaning processes, default: %(default)s"
    )
    add("--keep-leaks", action="store_true", help="keep training rows that also occur in a held-out split")
    add(
        "--allow-quarantined", type=number(0, 1), default=MAX_SHARE, metavar="SHARE",
        help="largest share of unusable rows that is not an error, default: %(default)s",
    )  # fmt: skip


def _add_convert(commands: Any) -> None:
    command = commands.add_parser("convert", help="your own data: JSONL, JSON, CSV, Parquet, a folder, a hub id")
    add_output(command)
    add = command.add_argument
    add("--input", type=text, required=True, metavar="PATH_OR_ID", help="a table, a folder with one, or a hub id")
    add(
        "--columns", nargs="+", required=True, metavar="NAME=COLUMN",
        help="problem=question answer=label, and images=, choices=, id= where there are such; others are kept as texts",
    )  # fmt: skip
    add("--name", type=optional(text), metavar="WORD", help="of the data set, for its rows' ids; default: the input's")
    add("--test-share", type=number(0, 0.99), default=0.0, metavar="SHARE", help="of train, to become the split test")
    add("--seed", type=whole(0, MAX_SEED), default=0, metavar="S", help="of the test share, default: %(default)s")
    add("--limit", type=optional(whole(1)), metavar="N", help="only the first N rows of every split")
    add("--revision", type=optional(text), metavar="COMMIT", help="of a hub id: commit, tag or branch")
    add("--subset", type=optional(text), metavar="NAME", help="of a hub id: one of its configurations")
    add("--splits", type=_split_pair, nargs="+", default=[], metavar="OURS=THEIRS", help="of a hub id: test=testmini")
    _add_cleaning(command)
    command.set_defaults(run=_convert)


def _split_pair(word: str) -> tuple[str, str]:
    ours, _, theirs = word.partition("=")
    if ours not in SPLITS or not theirs.strip():
        raise argparse.ArgumentTypeError(
            f"{word!r:.60} is not OURS=THEIRS, with one of {', '.join(SPLITS)} before the ="
        )
    return ours, theirs


def _geometry3k(arguments: argparse.Namespace) -> None:
    options = Options(**{field.name: getattr(arguments, field.name) for field in fields(Options)})
    manifest = prepare_geometry3k(
        arguments.output,
        source=arguments.source,
        location=arguments.input,
        revision=arguments.revision,
        options=options,
        workers=arguments.workers,
        overwrite=arguments.overwrite,
    )
    print_counts(arguments.output, manifest)


def _convert(arguments: argparse.Namespace) -> None:
    given = {field.name: getattr(arguments, field.name) for field in fields(Conversion) if field.name != "splits"}
    manifest = convert(
        arguments.input,
        arguments.output,
        columns_of_words(arguments.columns),
        options=Conversion(**given, splits=dict(arguments.splits)),
        revision=arguments.revision,
        workers=arguments.workers,
        overwrite=arguments.overwrite,
    )
    print_counts(arguments.output, manifest)


def _inspect(arguments: argparse.Namespace) -> None:
    gallery = 0 if arguments.text_only else GALLERY_ROWS
    folder = arguments.folder.resolve()
    path = arguments.html or folder.with_name(f"{folder.name}.html")
    if not arguments.text_only:
        from data_prep.html_report import check_page, write_page  # matplotlib takes a second

        check_page(path)  # before every row is read
    found = survey(arguments.folder, gallery=gallery, model=arguments.model, family=arguments.family)
    print(describe(found))
    if not arguments.text_only:
        write_page(found, path)
        print(f"\npage: {path}")
