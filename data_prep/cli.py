"""The command line: `python -m data_prep {synthetic,geometry3k,inspect}`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from datasets import disable_progress_bars

from adora_vl.errors import UserError
from data_prep.inspection import describe
from data_prep.prepare import DEFAULT_SIZE, DEFAULT_TEST_ROWS, prepare_geometry3k, prepare_synthetic
from data_prep.sources import SOURCES
from data_prep.storage import Manifest


class _Parser(argparse.ArgumentParser):
    """argparse prints its usage before an error; one line is the rule of this project."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; `{self.prog} --help` lists the arguments")


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0, or 2 with one line on stderr where the user's input is wrong."""
    if not sys.stderr.isatty():
        disable_progress_bars()  # `datasets` draws its own into log files too
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
    synthetic.add_argument("--families", type=_names, default=(), metavar="A,B", help="default: all")
    synthetic.set_defaults(run=_synthetic)

    geometry3k = commands.add_parser(
        "geometry3k", help="Geometry3K from the hub, from Parquet files or from its own folders"
    )
    geometry3k.add_argument("--source", choices=SOURCES, required=True)
    geometry3k.add_argument("--input", required=True, metavar="ID_OR_PATH", help="a dataset id for hub, else a path")
    geometry3k.add_argument("--output", type=Path, required=True, metavar="DIR")
    geometry3k.add_argument(
        "--max-pixels", type=int, metavar="N", help="shrink larger images, default: keep their size"
    )
    geometry3k.add_argument("--limit", type=int, metavar="N", help="only the first N rows of every split")
    geometry3k.set_defaults(run=_geometry3k)

    inspect = commands.add_parser("inspect", help="count what a prepared folder holds")
    inspect.add_argument("folder", type=Path, metavar="DIR")
    inspect.set_defaults(run=_inspect)
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _synthetic(arguments: argparse.Namespace) -> None:
    manifest = prepare_synthetic(
        arguments.output,
        rows=arguments.rows,
        test_rows=arguments.test_rows,
        seed=arguments.seed,
        size=arguments.size,
        families=arguments.families,
    )
    _report(arguments.output, manifest)


def _geometry3k(arguments: argparse.Namespace) -> None:
    manifest = prepare_geometry3k(
        arguments.output,
        source=arguments.source,
        location=arguments.input,
        max_pixels=arguments.max_pixels,
        limit=arguments.limit,
    )
    _report(arguments.output, manifest)


def _inspect(arguments: argparse.Namespace) -> None:
    print(describe(arguments.folder))


def _report(output: Path, manifest: Manifest) -> None:
    counts = ", ".join(f"{split} {count}" for split, count in manifest["counts"].items())
    print(f"{output}: {counts} rows; look at it with `python -m data_prep inspect {output}`")
