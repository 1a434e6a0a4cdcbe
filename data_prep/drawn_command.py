"""`python -m data_prep synthetic` and `knights`: their options, and what they do with them."""

from __future__ import annotations

import argparse
from typing import Any

from adora_vl.commands import MAX_SEED, optional, path, whole
from adora_vl.errors import UserError
from data_prep.knights import PEOPLE
from data_prep.knights_table import QUESTIONS
from data_prep.prepare import (
    DEFAULT_SIZE,
    DEFAULT_TEST_ROWS,
    MAX_ROWS,
    SIZES,
    prepare_knights,
    prepare_knights_table,
    prepare_synthetic,
)
from data_prep.synthetic.generate import LEVELS, MAX_CHOICES
from data_prep.text_report import print_counts


def add_synthetic(commands: Any) -> None:
    """Add the command `synthetic`."""
    synthetic = commands.add_parser("synthetic", help="drawn geometry problems; equal arguments give equal problems")
    _add_drawn(synthetic, _synthetic)
    add = synthetic.add_argument
    add("--size", type=whole(*SIZES), default=DEFAULT_SIZE, metavar="PIXELS", help="side length, default: %(default)s")
    add("--families", type=_names, default=(), metavar="A,B", help="default: the five plain ones")
    add("--level", type=whole(min(LEVELS), max(LEVELS)), default=1, help="difficulty, 1 to 3, default: %(default)s")
    add("--styles", type=_names, default=("plain",), metavar="A,B", help="default: plain")
    add("--choices", type=_choices, default=0, metavar="N", help="answers to choose from, default: 0, an open question")


def add_knights(commands: Any) -> None:
    """Add the command `knights`."""
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


def add_output(command: argparse.ArgumentParser) -> None:
    """Add where a prepared folder goes."""
    command.add_argument("--output", type=path, required=True, metavar="DIR")
    command.add_argument("--overwrite", action="store_true", help="replace another prepared dataset there")


def _add_drawn(command: argparse.ArgumentParser, run: Any, *, rows_required: bool = True) -> None:
    """The options of what is drawn here."""
    add_output(command)
    add = command.add_argument
    add("--rows", type=whole(1, MAX_ROWS), required=rows_required, metavar="N", help="training rows")
    add("--test-rows", type=whole(0, MAX_ROWS), metavar="M", help=f"default: {DEFAULT_TEST_ROWS}")
    add("--seed", type=whole(0, MAX_SEED), metavar="S", help="default: 0")
    command.set_defaults(run=run)


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
    print_counts(arguments.output, manifest)


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
    print_counts(arguments.output, manifest)
