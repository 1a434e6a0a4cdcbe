"""The options of a dry run, which are no keys of a run."""

from __future__ import annotations

import os
from argparse import SUPPRESS
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from adora_vl.config.sharding import (
    FSDP_IS_UNKNOWN,
    Sharding,
    from_environment,
    from_file,
    spread_over,
)
from adora_vl.utils.cli import Parser, number, path, whole
from adora_vl.utils.errors import UserError


@dataclass(frozen=True)
class DryRunOptions:
    """The options of a dry run.

    `card_gib`: memory of one GPU in GiB; None: that of the GPU of this machine. `processes`: their
    number on all machines together. `rows`: the number of rows whose prompts are measured; None:
    all. `write_config`, `json`: files to write.
    """

    card_gib: float | None = None
    accelerate_config: Path | None = None
    processes: int | None = None
    machines: int | None = None
    rows: int | None = None
    write_config: Path | None = None
    json: Path | None = None


def take_options(arguments: Sequence[str]) -> tuple[DryRunOptions | None, list[str]]:
    """Split the options of a dry run from the arguments of a training command.

    Returns the options, None without `--dry-run`, and the remaining arguments. Raises `UserError`
    for a bad value, and for an option without `--dry-run`.
    """
    parser = Parser(prog="python -m adora_vl.train", add_help=False, argument_default=SUPPRESS)
    parser.add_argument("--dry-run", "--dry_run", action="store_true")
    memory = number(0.1, 1e6)
    count = whole(1)
    for name, kind in (
        ("card_gib", memory),
        ("accelerate_config", path),
        ("processes", count),
        ("machines", count),
        ("rows", count),
        ("write_config", path),
        ("json", path),
    ):
        parser.add_argument(
            *dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), dest=name, type=kind
        )
    namespace, training_arguments = parser.parse_known_args(list(arguments))
    options = vars(namespace)
    if options.pop("dry_run", False):
        return DryRunOptions(**options), training_arguments
    stray = next(iter(options), "").replace("_", "-")
    if stray:
        raise UserError(f"--{stray}: belongs to --dry-run; add --dry-run, or leave it out")
    return None, training_arguments


def planned_sharding(options: DryRunOptions) -> Sharding:
    """Return the sharding that a dry run plans for: that of its options, or of this launch."""
    if options.accelerate_config is not None:
        return from_file(options.accelerate_config, options.processes, options.machines)
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise UserError(f"--dry-run: accelerate's config asks for FSDP; {FSDP_IS_UNKNOWN}")
    launched = from_environment()
    machines = options.machines or launched.machines
    processes = options.processes or launched.local_processes * machines
    spread_over(processes, machines)
    return replace(launched, processes=processes, machines=machines)
