"""The options of a dry run, which are no keys of a run."""

from __future__ import annotations

from argparse import SUPPRESS
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from adora_vl.config.sharding import (
    Sharding,
    check_processes_divide_evenly,
    sharding_from_environment,
    sharding_from_file,
)
from adora_vl.utils.cli import Parser, integer_between, number_between, path_option
from adora_vl.utils.errors import UserError


@dataclass(frozen=True)
class DryRunOptions:
    """The options of a dry run, which predicts a run's memory without starting it.

    Fields that are None were not set on the command line.

    `card_gib`: memory of one GPU in GiB; by default that of this machine's GPU.
    `accelerate_config`: file that says how the run is spread over processes. `processes`: their
    number on all machines together. `rows`: number of data rows whose prompts are measured; by
    default all. `write_config`: file for a config that fits. `json`: file for the report.
    """

    card_gib: float | None = None
    accelerate_config: Path | None = None
    processes: int | None = None
    machines: int | None = None
    rows: int | None = None
    write_config: Path | None = None
    json: Path | None = None


def split_dry_run_options(arguments: Sequence[str]) -> tuple[DryRunOptions | None, list[str]]:
    """Split the options of a dry run from the arguments of a training command.

    Returns the options and the remaining arguments. Without `--dry-run` the options are None.
    Raises `UserError` for a bad value, and for one of the options without `--dry-run`.
    """
    # With SUPPRESS, the namespace has only the options that were set.
    parser = Parser(prog="python -m adora_vl.train", add_help=False, argument_default=SUPPRESS)
    parser.add_argument("--dry-run", "--dry_run", action="store_true")
    memory_gib = number_between(minimum=0.1, maximum=1e6)
    count = integer_between(minimum=1)
    converters = {
        "card_gib": memory_gib,
        "accelerate_config": path_option,
        "processes": count,
        "machines": count,
        "rows": count,
        "write_config": path_option,
        "json": path_option,
    }
    for name, converter in converters.items():
        # Both spellings, with hyphens and with underscores, as TRL takes its keys.
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*spellings, dest=name, type=converter)
    namespace, training_arguments = parser.parse_known_args(list(arguments))
    options_by_name = vars(namespace)
    is_dry_run = options_by_name.pop("dry_run", False)
    if is_dry_run:
        return DryRunOptions(**options_by_name), training_arguments
    if options_by_name:
        first_name = next(iter(options_by_name))
        option = f"--{first_name.replace('_', '-')}"
        raise UserError(f"{option}: belongs to --dry-run; add --dry-run, or leave it out")
    return None, training_arguments


def planned_sharding(options: DryRunOptions) -> Sharding:
    """Return how the run that a dry run plans for is spread over processes and machines.

    The options decide. What they leave open is taken from the launch of this process, but for
    DeepSpeed, which only the run's config knows. Raises `UserError` for FSDP, and for processes
    that do not divide evenly over the machines.
    """
    if options.accelerate_config is not None:
        return sharding_from_file(
            options.accelerate_config, processes=options.processes, machines=options.machines
        )
    sharding_of_launch = sharding_from_environment()
    machines = options.machines or sharding_of_launch.machines
    processes = options.processes or sharding_of_launch.local_processes * machines
    check_processes_divide_evenly(processes, machines)
    return Sharding(processes=processes, machines=machines)
