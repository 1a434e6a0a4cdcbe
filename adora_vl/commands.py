"""What the commands have in common: their exit codes, and how their options are read."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from adora_vl.errors import UserError

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count
MAX_SEED = 2**32 - 1  # what NumPy, torch and vLLM all take
_LONGEST = 300  # characters of a complaint about an option
_NULL = ("none", "null")


class MistakesError(UserError):
    """Several mistakes of one kind, each with a line of its own."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = list(lines)


def exit_code_of(command: Callable[[], None], interrupted: str) -> int:
    """Run a command: 0 done, 2 the user's input is wrong, 130 Ctrl-C. `interrupted`: what became of its work."""
    try:
        command()
    except UserError as error:
        lines = error.lines if isinstance(error, MistakesError) else [" ".join(str(error).split())]
        print("\n".join(f"error: {line}" for line in lines), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; {interrupted}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def amount(count: int, noun: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@contextmanager
def imports() -> Iterator[None]:
    """For the imports of a command, which take seconds: Ctrl-C ends them with a line too."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted; nothing was begun", file=sys.stderr)
        raise SystemExit(EXIT_INTERRUPTED) from None


class Parser(argparse.ArgumentParser):
    """argparse prints its usage before an error; one line is the rule of this project. No option may be shortened."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **keywords})

    def error(self, message: str) -> NoReturn:
        if len(message) > _LONGEST:  # what was given stands in it
            message = f"{message[: _LONGEST // 2]}...{message[-_LONGEST // 2 :]}"
        raise UserError(f"{message}; see `{self.prog} --help`")


# Converters for argparse, which puts the name of the option before their message.


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Whole numbers from `least` to `most`."""

    def convert(text: str) -> int:
        # The length first: Python refuses to read more than 4,300 digits, with an error of its own.
        value = int(text) if len(text) < 20 and text.isascii() and text.removeprefix("-").isdecimal() else None
        if value is None or value < least or (most is not None and value > most):
            between = f"from {least} on" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r:.60} is not a whole number {between}")
        return value

    return convert


def number(least: float, most: float, *, also: float | None = None) -> Callable[[str], float]:
    """Numbers from `least` to `most`, and `also` one outside; never NaN."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (least <= value <= most or value == also):
            beside = "" if also is None else f"{also:g} or "
            raise argparse.ArgumentTypeError(f"{text!r:.60} is not {beside}a number from {least:g} to {most:g}")
        return value

    return convert


def text(value: str) -> str:
    """A text with something in it."""
    if not value.strip() or "\0" in value:
        raise argparse.ArgumentTypeError(f"{value!r} is empty or no text; write something, or leave the option out")
    return value


def path(value: str) -> Path:
    """A path. An empty one would be the folder that the command runs in."""
    found = Path(text(value))
    if any(len(part.encode(errors="surrogateescape")) > 255 for part in found.parts):
        raise argparse.ArgumentTypeError(f"{value!r:.60} has a name of over 255 bytes; shorten it")
    return found


def is_null(word: str) -> bool:
    """Whether a word on the command line is YAML's null, or `none`, which many write for it."""
    return word.strip().lower() in _NULL


def optional(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """None for `none` and `null`, else what `convert` makes of the word."""
    return lambda word: None if is_null(word) else convert(word)
