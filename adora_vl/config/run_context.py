"""Where a run takes place, or would: how it is spread over GPUs, by an accelerate config or by the
environment of `accelerate launch`, what of this machine counts for it, and the flags of a dry run,
which TRL's parser does not see.
"""

from __future__ import annotations

import os
from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from adora_vl.utils.cli import Parser, number, path, read_mapping, whole
from adora_vl.utils.errors import UserError, refuse
from adora_vl.utils.launch import SEVERAL

_FSDP = (
    "its memory is not predicted, and neither its checkpoints nor its weights in the engine have "
    "been tested here; use DeepSpeed (configs/accelerate/zero3.yaml)"
)


@dataclass(frozen=True)
class Sharding:
    """`stage`: DeepSpeed's, 0 to 3; None: no DeepSpeed. `processes`: of all machines together."""

    processes: int = 1
    stage: int | None = None
    offload_optimizer: bool = False
    offload_parameters: bool = False
    machines: int = 1

    @property
    def local_processes(self) -> int:
        return self.processes // self.machines

    @property
    def name(self) -> str:
        """As a run's fingerprint has it: `zero1` to `zero3`, or `none`."""
        return f"zero{self.stage}" if self.stage else "none"

    def describe(self) -> str:
        cards = "one process" if self.processes == 1 else f"{self.processes} processes"
        if self.machines > 1:
            cards += f" on {self.machines} machines"
        if self.stage is None:
            copies = "" if self.processes == 1 else ", each with a whole copy (DDP)"
            return f"{cards}, no sharding{copies}"
        parts = {"optimizer": self.offload_optimizer, "weights": self.offload_parameters}
        moved = [name for name, there in parts.items() if there]
        return f"{cards}, DeepSpeed ZeRO-{self.stage}" + (
            f", {' and '.join(moved)} in host memory" if moved else ""
        )


def from_file(
    path: str | Path, processes: int | None = None, machines: int | None = None
) -> Sharding:
    """The sharding of an accelerate config.

    With other `machines` each has as many processes as in the file, unless `processes` says the
    sum. Raises `UserError` for no such file, for FSDP, and for what machines cannot start from.
    """
    content = read_mapping("--accelerate-config", Path(path))
    where = f"--accelerate-config: {str(path)!r}"
    if "num_processes" not in content:
        raise UserError(f"{where} is no accelerate config (no num_processes)")
    in_file = _whole("num_machines", content.get("num_machines") or 1, 1, path)
    machines = machines or in_file
    number = (
        processes
        or _whole("num_processes", content["num_processes"], 1, path) // in_file * machines
    )
    spread_over(number, machines)
    kind = str(content.get("distributed_type", "NO")).upper()
    deepspeed = content.get("deepspeed_config") or {}
    if kind == "FSDP":
        raise UserError(f"{where} asks for FSDP; {_FSDP}")
    if kind == "NO" and number > 1:
        raise UserError(
            f"{where} has distributed_type: 'NO', with which accelerate starts one process, "
            f"and not {number}; {SEVERAL}"
        )
    if not isinstance(deepspeed, dict):
        raise UserError(
            f"--accelerate-config: deepspeed_config: {deepspeed!r:.60} in {str(path)!r} is not a "
            "mapping"
        )
    launcher = deepspeed.get("deepspeed_multinode_launcher")
    seen = "see configs/accelerate/zero3_nodes.yaml"
    refuse(  # what several machines would wait for in vain, or fail on after minutes
        (
            in_file > 1 and content.get("main_process_port") == 0,
            f"{where} has main_process_port: 0, which becomes another port on each machine, so "
            f"that they never meet; choose one port for all, {seen}",
        ),
        (
            in_file > 1 and kind == "DEEPSPEED" and launcher != "standard",
            f"{where} would start the machines with DeepSpeed's launcher, which needs pdsh and a "
            f"hostfile; set deepspeed_multinode_launcher: standard, {seen}",
        ),
        (
            kind == "DEEPSPEED" and "deepspeed_config_file" in deepspeed,
            f"{where} names a DeepSpeed file; write "
            "zero_stage and the offload keys into the accelerate config",
        ),
    )
    if kind != "DEEPSPEED":
        return Sharding(number, machines=machines)
    stage = _whole("zero_stage", deepspeed.get("zero_stage", 2), 0, path)
    return _deepspeed(number, machines, {**deepspeed, "zero_stage": stage})


def _whole(key: str, value: object, least: int, path: str | Path) -> int:
    given = f"--accelerate-config: {key}: {value!r:.60} in {str(path)!r}"
    if isinstance(value, bool) or not str(value).isdecimal() or not least <= int(str(value)):
        raise UserError(f"{given} is not a whole number of at least {least}")
    return int(str(value))


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


def take_options(arguments: Sequence[str]) -> tuple[DryRunOptions | None, list[str]]:
    """The options of a dry run, None where none is asked for, and the training arguments that are
    left. Raises `UserError` for a bad value, and for an option without `--dry-run`.
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
    found, rest = parser.parse_known_args(list(arguments))
    given = vars(found)
    if given.pop("dry_run", False):
        return DryRunOptions(**given), rest
    stray = next(iter(given), "").replace("_", "-")
    if stray:
        raise UserError(f"--{stray}: belongs to --dry-run; add --dry-run, or leave it out")
    return None, rest


@dataclass(frozen=True)
class RunContext:
    """What the checks before a run may look at.

    `here`: this machine will run it, so its packages, device, servers and folders count. `folder`:
    what becomes of `output_dir`. `paper`: nothing will run, so what is not here is not wrong.
    """

    here: bool
    sharding: Sharding
    folder: Literal["take", "look", "leave"]
    paper: bool = False

    @classmethod
    def of_launch(cls, folder: Literal["take", "look", "leave"]) -> RunContext:
        return cls(True, from_environment(), folder)

    @classmethod
    def of_dry_run(cls, options: DryRunOptions, *, here: bool) -> RunContext:
        """A run on paper. Raises `UserError` for a launch whose memory is not predicted."""
        return cls(here, _planned(options), "look" if here else "leave", paper=True)


def _planned(options: DryRunOptions) -> Sharding:
    if options.accelerate_config is not None:
        return from_file(options.accelerate_config, options.processes, options.machines)
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise UserError(f"--dry-run: accelerate's config asks for FSDP; {_FSDP}")
    found = from_environment()
    machines = options.machines or found.machines
    processes = options.processes or found.local_processes * machines
    spread_over(processes, machines)
    return replace(found, processes=processes, machines=machines)


def from_environment(environment: Mapping[str, str] = os.environ) -> Sharding:
    """The sharding that `accelerate launch` has told its children."""
    processes = int(environment.get("WORLD_SIZE", "1"))
    machines = max(1, processes // int(environment.get("LOCAL_WORLD_SIZE") or processes))
    if environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() != "true":
        return Sharding(processes, machines=machines)
    names = ("zero_stage", "offload_optimizer_device", "offload_param_device")
    values = {name: environment.get(f"ACCELERATE_DEEPSPEED_{name.upper()}") for name in names}
    return _deepspeed(processes, machines, values)


def spread_over(processes: int, machines: int) -> None:
    """Raise `UserError` unless every machine gets the same number of processes, as accelerate
    starts them.
    """
    uneven = f"--machines: {processes} processes cannot be spread evenly over {machines} machines"
    together = "num_processes (here --processes) is the number on all of them together"
    if processes % machines or processes < machines:
        raise UserError(f"{uneven}; {together}")


def _deepspeed(processes: int, machines: int, values: Mapping[str, Any]) -> Sharding:
    devices = [
        str(values.get(f"offload_{part}_device") or "none").lower()
        for part in ("optimizer", "param")
    ]
    stage = values.get("zero_stage")
    stage = 2 if stage is None else int(stage)
    return Sharding(
        processes=processes,
        stage=stage,
        offload_optimizer=devices[0] != "none",
        offload_parameters=devices[1] != "none",
        machines=machines,
    )
