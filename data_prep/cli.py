"""The command line: `python -m data_prep {synthetic,knights,geometry3k,convert,filter,inspect}`."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from datasets import disable_progress_bars
from huggingface_hub.utils.tqdm import disable_progress_bars as disable_hub_progress_bars

from adora_vl.commands import MAX_SEED, Parser, amount, exit_code_of, number, optional, path, text, whole
from adora_vl.errors import UserError
from data_prep.convert import Conversion, convert
from data_prep.filter_command import add_filter
from data_prep.geometry3k import MAX_WORKERS, Options, prepare_geometry3k
from data_prep.inspection import GALLERY_ROWS, survey
from data_prep.knights import PEOPLE
from data_prep.knights_table import QUESTIONS
from data_prep.own.columns import columns_of_words
from data_prep.pixels import DEFAULT_FAMILY, MAX_PIXELS, UNIT, VISIONS
from data_prep.prepare import (
    DEFAULT_SIZE,
    DEFAULT_TEST_ROWS,
    MAX_ROWS,
    SIZES,
    prepare_knights,
    prepare_knights_table,
    prepare_synthetic,
)
from data_prep.quarantine import MAX_SHARE, QUARANTINE_NAME
from data_prep.sources import DATASET_ID, DIAGRAMS, SOURCES
from data_prep.storage import SPLITS, Manifest
from data_prep.synthetic.generate import LEVELS, MAX_CHOICES
from data_prep.text_report import describe


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

    synthetic = commands.add_parser("synthetic", help="drawn geometry problems; equal arguments give equal problems")
    _add_drawn(synthetic, _synthetic)
    add = synthetic.add_argument
    add("--size", type=whole(*SIZES), default=DEFAULT_SIZE, metavar="PIXELS", help="side length, default: %(default)s")
    add("--families", type=_names, default=(), metavar="A,B", help="default: the five plain ones")
    add("--level", type=whole(min(LEVELS), max(LEVELS)), default=1, help="difficulty, 1 to 3, default: %(default)s")
    add("--styles", type=_names, default=("plain",), metavar="A,B", help="default: plain")
    add("--choices", type=_choices, default=0, metavar="N", help="answers to choose from, default: 0, an open question")

    puzzles = commands.add_parser(
        "knights", help="knights-and-knaves puzzles, text without images, each with one solution"
    )
    _add_drawn(puzzles, _knights, rows_required=False)
    add = puzzles.add_argument
    add("--people", type=optional(_people), metavar="A-B", help="per puzzle, default: {}-{}".format(*PEOPLE))
    add("--source", choices=("drawn", "parquet"), default="drawn", help="default: %(default)s")
    add("--input", type=optional(path), metavar="PATH", help="parquet: the reference's data/kk, or a file of it")
    add(
        "--question", choices=QUESTIONS, help="parquet: ask for a box (the default), or leave that to the system prompt"
    )

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


def _add_output(command: argparse.ArgumentParser) -> None:
    command.add_argument("--output", type=path, required=True, metavar="DIR")
    command.add_argument("--overwrite", action="store_true", help="replace another prepared dataset there")


def _add_drawn(command: argparse.ArgumentParser, run: Any, *, rows_required: bool = True) -> None:
    """The options of what is drawn here."""
    _add_output(command)
    add = command.add_argument
    add("--rows", type=whole(1, MAX_ROWS), required=rows_required, metavar="N", help="training rows")
    add("--test-rows", type=whole(0, MAX_ROWS), metavar="M", help=f"default: {DEFAULT_TEST_ROWS}")
    add("--seed", type=whole(0, MAX_SEED), metavar="S", help="default: 0")
    command.set_defaults(run=run)


def _add_geometry3k(commands: Any) -> None:
    command = commands.add_parser("geometry3k", help="Geometry3K from the hub, Parquet files or its own folders")
    _add_output(command)
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
    _add_output(command)
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


def _names(word: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in word.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{word!r} has an empty name; write names with commas between them")
    return names


def _choices(word: str) -> int:
    return 0 if word == "0" else whole(2, MAX_CHOICES)(word)


def _people(word: str) -> tuple[int, int]:
    """`A-B` or one number."""
    first, dash, last = word.partition("-")
    one = whole(*PEOPLE)
    fewest, most = one(first), one(last if dash else first)
    if fewest > most:
        raise argparse.ArgumentTypeError(f"{word!r} has the larger number first; write {most}-{fewest}")
    return fewest, most


_DRAWN_ONLY, _PARQUET_ONLY = ("rows", "test_rows", "seed", "people"), ("input", "question")


def _knights(arguments: argparse.Namespace) -> None:
    drawn = arguments.source == "drawn"
    needed, foreign = ("rows", _PARQUET_ONLY) if drawn else ("input", _DRAWN_ONLY)
    for name in foreign:
        if (value := getattr(arguments, name)) is not None:
            raise UserError(f"{name}: {value} does not go with --source {arguments.source}; leave one of them out")
    if getattr(arguments, needed) is None:
        raise UserError(f"{needed}: --source {arguments.source} needs it; give --{needed}")
    if drawn:
        manifest = prepare_knights(
            arguments.output,
            rows=arguments.rows,
            test_rows=_or(arguments.test_rows, DEFAULT_TEST_ROWS),
            seed=_or(arguments.seed, 0),
            people=_or(arguments.people, PEOPLE),
            overwrite=arguments.overwrite,
        )
    else:
        question = _or(arguments.question, QUESTIONS[0])
        manifest = prepare_knights_table(
            arguments.output, arguments.input, question=question, overwrite=arguments.overwrite
        )
    _report(arguments.output, manifest)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _synthetic(arguments: argparse.Namespace) -> None:
    manifest = prepare_synthetic(
        arguments.output,
        rows=arguments.rows,
        test_rows=_or(arguments.test_rows, DEFAULT_TEST_ROWS),
        seed=_or(arguments.seed, 0),
        size=arguments.size,
        families=arguments.families,
        level=arguments.level,
        styles=arguments.styles,
        choices=arguments.choices,
        overwrite=arguments.overwrite,
    )
    _report(arguments.output, manifest)


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
    _report(arguments.output, manifest)


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
    _report(arguments.output, manifest)


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


def _report(output: Path, manifest: Manifest) -> None:
    counts = ", ".join(
        f"{split} {amount(manifest['counts'][split], 'row')}" for split in SPLITS if split in manifest["counts"]
    )
    print(f"{output}: {counts}; look at it with `python -m data_prep inspect {shlex.quote(str(output))}`")
    leaks, quarantined = manifest["leaks"], manifest["quarantined"]
    if leaks["found"]:
        print(
            f"leaks: {amount(leaks['found'], 'row')} with the diagram and question of a row in another split; "
            f"{leaks['dropped']} dropped from train"
        )
    if quarantined["rows"]:
        reasons = ", ".join(f"{kind} {count}" for kind, count in quarantined["reasons"].items())
        print(f"quarantined: {amount(quarantined['rows'], 'row')} ({reasons}); see {output / QUARANTINE_NAME}")
