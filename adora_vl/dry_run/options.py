"""The flags of a dry run, taken out before TRL's parser sees the rest."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from adora_vl.commands import path
from adora_vl.errors import UserError

_FLAGS = ("--dry-run", "--dry_run")


@dataclass(frozen=True)
class DryRunOptions:
    """`card_gib`: memory of one GPU in GiB; None: the one that is visible."""

    card_gib: float | None = None
    accelerate_config: Path | None = None
    processes: int | None = None  # on all machines together
    machines: int | None = None
    rows: int | None = None  # of the dataset to measure; None: all
    write_config: Path | None = None
    json: Path | None = None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"--dry-run: {message}")


def wanted(arguments: Sequence[str]) -> bool:
    """Whether the command asks for a dry run."""
    return any(word in _FLAGS for word in arguments)


def take_options(arguments: Sequence[str]) -> tuple[DryRunOptions, list[str]]:
    """The options and the training arguments that are left. Raises `UserError` for a bad value."""
    parser = _Parser(prog="python -m adora_vl.train --dry-run", add_help=False, allow_abbrev=False)
    parser.add_argument(*_FLAGS, action="store_true")
    for name, kind in (
        ("card_gib", float),
        ("accelerate_config", path),
        ("processes", int),
        ("machines", int),
        ("rows", int),
        ("write_config", path),
        ("json", path),
    ):
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*spellings, dest=name, type=kind, default=None)
    found, rest = parser.parse_known_args(list(arguments))
    for name in ("card_gib", "processes", "machines", "rows"):
        value = getattr(found, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name.replace('_', '-')}: {value} must be above 0 and finite")
    return (
        DryRunOptions(
            found.card_gib,
            found.accelerate_config,
            found.processes,
            found.machines,
            found.rows,
            found.write_config,
            found.json,
        ),
        rest,
    )
