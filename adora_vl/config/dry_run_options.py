"""The flags of a dry run, taken out before TRL's parser sees the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from adora_vl.utils.cli import Parser, number, path, whole
from adora_vl.utils.errors import UserError

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


def wanted(arguments: Sequence[str]) -> bool:
    """Whether the command asks for a dry run."""
    return any(word in _FLAGS for word in arguments)


def refuse_without_dry_run(arguments: Sequence[str]) -> None:
    """Raise `UserError` for an option of a dry run where none is asked for."""
    names = {field.name for field in fields(DryRunOptions)}
    given = (word.partition("=")[0] for word in arguments if word.startswith("--"))
    option = next((word for word in given if word[2:].replace("-", "_") in names), None)
    if option is not None and not wanted(arguments):
        raise UserError(f"{option}: belongs to --dry-run; add --dry-run, or leave it out")


def take_options(arguments: Sequence[str]) -> tuple[DryRunOptions, list[str]]:
    """The options and the training arguments that are left. Raises `UserError` for a bad value."""
    parser = Parser(prog="python -m adora_vl.train", add_help=False)
    parser.add_argument(*_FLAGS, action="store_true")
    memory, count = number(0.1, 1e6), whole(1)
    for name, kind in (
        ("card_gib", memory), ("accelerate_config", path), ("processes", count), ("machines", count), ("rows", count),
        ("write_config", path), ("json", path),
    ):  # fmt: skip
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*spellings, dest=name, type=kind, default=None)
    found, rest = parser.parse_known_args(list(arguments))
    return DryRunOptions(**{field.name: getattr(found, field.name) for field in fields(DryRunOptions)}), rest
