"""The command line: `python -m data_prep {synthetic,knights,geometry3k,inspect}`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from datasets import disable_progress_bars
from huggingface_hub.utils.tqdm import disable_progress_bars as disable_hub_progress_bars

from adora_vl.errors import UserError
from data_prep.geometry3k import Options, prepare_geometry3k
from data_prep.inspection import GALLERY_ROWS, survey
from data_prep.knights import PEOPLE
from data_prep.prepare import DEFAULT_SIZE, DEFAULT_TEST_ROWS, prepare_knights, prepare_synthetic
from data_prep.quarantine import MAX_SHARE, QUARANTINE_NAME
from data_prep.sources import DATASET_ID, DIAGRAMS, SOURCES
from data_prep.storage import SPLITS, Manifest
from data_prep.synthetic.generate import LEVELS
from data_prep.text_report import describe


class _Parser(argparse.ArgumentParser):
    """argparse prints its usage before an error; one line is the rule of this project."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; `{self.prog} --help` lists the arguments")


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0, or 2 with one line on stderr where the user's input is wrong."""
    if not sys.stderr.isatty():
        disable_progress_bars()  # `datasets` and the hub draw their own into log files too
        disable_hub_progress_bars()
    try:
        arguments = _parser().parse_args(argv)
        arguments.run(arguments)
    except UserError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m data_prep", description="Make, and look at, dataset folders for training and evaluation."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    synthetic = commands.add_parser("synthetic", help="drawn geometry problems, the same for the same arguments")
    synthetic.add_argument("--output", type=Path, required=True, metavar="DIR")
    synthetic.add_argument("--rows", type=int, required=True, metavar="N", help="training rows")
    synthetic.add_argument("--test-rows", type=int, default=DEFAULT_TEST_ROWS, metavar="M", help="default: %(default)s")
    synthetic.add_argument("--seed", type=int, default=0, metavar="S", help="default: %(default)s")
    synthetic.add_argument(
        "--size", type=int, default=DEFAULT_SIZE, metavar="PIXELS", help="of a side, default: %(default)s"
    )
    synthetic.add_argument("--families", type=_names, default=(), metavar="A,B", help="default: the five plain ones")
    synthetic.add_argument("--level", type=int, default=1, choices=LEVELS, help="difficulty, default: %(default)s")
    synthetic.add_argument("--styles", type=_names, default=("plain",), metavar="A,B", help="default: plain")
    synthetic.add_argument(
        "--choices", type=int, default=0, metavar="N", help="answers to choose from, default: none, an open question"
    )
    synthetic.set_defaults(run=_synthetic)

    puzzles = commands.add_parser(
        "knights", help="knights-and-knaves puzzles, text without images, each with one solution"
    )
    puzzles.add_argument("--output", type=Path, required=True, metavar="DIR")
    puzzles.add_argument("--rows", type=int, required=True, metavar="N", help="training rows")
    puzzles.add_argument("--test-rows", type=int, default=DEFAULT_TEST_ROWS, metavar="M", help="default: %(default)s")
    puzzles.add_argument("--seed", type=int, default=0, metavar="S", help="default: %(default)s")
    puzzles.add_argument(
        "--people", type=_range, default=PEOPLE, metavar="A-B", help="in a puzzle, default: {}-{}".format(*PEOPLE)
    )
    puzzles.set_defaults(run=_knights)

    _add_geometry3k(commands)

    inspect = commands.add_parser("inspect", help="what a prepared folder holds, as text and as an HTML page")
    inspect.add_argument("folder", type=Path, metavar="DIR")
    inspect.add_argument("--html", type=Path, metavar="FILE", help="where the page goes, default: DIR.html")
    inspect.add_argument("--text-only", action="store_true", help="write no page")
    inspect.add_argument("--model", metavar="M", help="a model whose tokenizer measures the problems")
    inspect.set_defaults(run=_inspect)
    return parser


def _add_geometry3k(commands: Any) -> None:
    command = commands.add_parser("geometry3k", help="Geometry3K from the hub, Parquet files or its own folders")
    add = command.add_argument
    add("--source", choices=SOURCES, required=True)
    add("--input", metavar="ID_OR_PATH", help=f"a dataset id for hub (default: {DATASET_ID}), else a path")
    add("--output", type=Path, required=True, metavar="DIR")
    add("--revision", metavar="COMMIT", help="of the hub's dataset: commit, tag or branch, default: the newest")
    add("--diagram", choices=DIAGRAMS, help="intergps: the picture as printed, or with every vertex lettered")
    add("--max-pixels", type=int, metavar="N", help="shrink larger images as the model does, default: keep them")
    add(
        "--min-pixels",
        type=int,
        metavar="N",
        help="enlarge smaller ones as the model does, default: keep them",
    )
    add("--limit", type=int, metavar="N", help="only N rows of every split: the first ones, or with --seed a sample")
    add("--seed", type=int, metavar="S", help="of the sample")
    add("--workers", type=int, default=1, metavar="N", help="processes that clean, default: %(default)s")
    add(
        "--keep-leaks",
        action="store_true",
        help="keep training rows that a held-out split has too",
    )
    add(
        "--allow-quarantined",
        type=float,
        default=MAX_SHARE,
        metavar="SHARE",
        help="largest share of unusable rows that is no error, default: %(default)s",
    )
    command.set_defaults(run=_geometry3k)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    try:
        return int(first), int(last or first)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number or a range such as 3-8") from error


def _knights(arguments: argparse.Namespace) -> None:
    manifest = prepare_knights(
        arguments.output,
        rows=arguments.rows,
        test_rows=arguments.test_rows,
        seed=arguments.seed,
        people=arguments.people,
    )
    _report(arguments.output, manifest)


def _synthetic(arguments: argparse.Namespace) -> None:
    manifest = prepare_synthetic(
        arguments.output,
        rows=arguments.rows,
        test_rows=arguments.test_rows,
        seed=arguments.seed,
        size=arguments.size,
        families=arguments.families,
        level=arguments.level,
        styles=arguments.styles,
        choices=arguments.choices,
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
    )
    _report(arguments.output, manifest)


def _inspect(arguments: argparse.Namespace) -> None:
    gallery = 0 if arguments.text_only else GALLERY_ROWS
    found = survey(arguments.folder, gallery=gallery, model=arguments.model)
    print(describe(found))
    if not arguments.text_only:
        from data_prep.html_report import write_page  # matplotlib takes a second

        folder = arguments.folder.resolve()
        path = arguments.html or folder.with_name(f"{folder.name}.html")
        write_page(found, path)
        print(f"\npage: {path}")


def _report(output: Path, manifest: Manifest) -> None:
    counts = ", ".join(f"{split} {manifest['counts'][split]}" for split in SPLITS if split in manifest["counts"])
    print(f"{output}: {counts} rows; look at it with `python -m data_prep inspect {output}`")
    leaks, quarantined = manifest["leaks"], manifest["quarantined"]
    if leaks["found"]:
        print(
            f"leaks: {leaks['found']} rows have the diagram and question of a row in another split; "
            f"{leaks['dropped']} were dropped from train"
        )
    if quarantined["rows"]:
        reasons = ", ".join(f"{kind} {count}" for kind, count in quarantined["reasons"].items())
        print(f"quarantined: {quarantined['rows']} rows ({reasons}); see {output / QUARANTINE_NAME}")
