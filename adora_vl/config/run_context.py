"""Where a run takes place: its spread over processes, and what of this machine counts for it.

The spread is read from an accelerate config or from the environment of `accelerate launch`. The
options of a dry run, which TRL's parser does not see, stand here too.
"""

from __future__ import annotations

import os
from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from adora_vl.utils.cli import Parser, number, path, read_mapping, whole
from adora_vl.utils.errors import UserError
from adora_vl.utils.launch import SEVERAL

_FSDP = (
    "its memory is not predicted, and neither its checkpoints nor its weights in the engine have "
    "been tested here; use DeepSpeed (configs/accelerate/zero3.yaml)"
)


_ELSEWHERE = (
    "the run is for another machine, so packages, trackers, servers, attention kernel, weights "
    "and output_dir were not looked at"
)
OutputDirMode = Literal["take", "look", "leave"]


@dataclass(frozen=True)
class Sharding:
    """How a run is spread over processes and machines.

    `processes`: their number on all machines together. `stage`: DeepSpeed's ZeRO stage, 0 to 3;
    None without DeepSpeed. `offload_optimizer`, `offload_parameters`: whether they lie in host
    memory.
    """

    processes: int = 1
    stage: int | None = None
    offload_optimizer: bool = False
    offload_parameters: bool = False
    machines: int = 1

    @property
    def local_processes(self) -> int:
        """The number of processes on one machine."""
        return self.processes // self.machines

    @property
    def name(self) -> str:
        """The name that a run's fingerprint has: `zero1` to `zero3`, or `none`."""
        return f"zero{self.stage}" if self.stage else "none"

    def describe(self) -> str:
        """The sharding in words, for a report."""
        cards = "one process" if self.processes == 1 else f"{self.processes} processes"
        if self.machines > 1:
            cards += f" on {self.machines} machines"
        if self.stage is None:
            copies = "" if self.processes == 1 else ", each with a whole copy (DDP)"
            return f"{cards}, no sharding{copies}"
        parts = {"optimizer": self.offload_optimizer, "weights": self.offload_parameters}
        offloaded = [name for name, in_host_memory in parts.items() if in_host_memory]
        text = f"{cards}, DeepSpeed ZeRO-{self.stage}"
        if offloaded:
            text += f", {' and '.join(offloaded)} in host memory"
        return text


def from_file(
    path: str | Path, processes: int | None = None, machines: int | None = None
) -> Sharding:
    """Read the sharding from an accelerate config.

    `processes`, `machines`: replace the numbers in the file. With other `machines` each one has as
    many processes as in the file, unless `processes` gives their number on all machines together.
    Raises `UserError` for a file that is no accelerate config, for FSDP, and for a file from which
    several machines cannot start.
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
    example = "see configs/accelerate/zero3_nodes.yaml"
    # With these, several machines would wait for each other in vain, or fail after minutes.
    if in_file > 1 and content.get("main_process_port") == 0:
        raise UserError(
            f"{where} has main_process_port: 0, which becomes another port on each machine, so "
            f"that they never meet; choose one port for all, {example}"
        )
    if in_file > 1 and kind == "DEEPSPEED" and launcher != "standard":
        raise UserError(
            f"{where} would start the machines with DeepSpeed's launcher, which needs pdsh and a "
            f"hostfile; set deepspeed_multinode_launcher: standard, {example}"
        )
    if kind == "DEEPSPEED" and "deepspeed_config_file" in deepspeed:
        raise UserError(
            f"{where} names a DeepSpeed file; write "
            "zero_stage and the offload keys into the accelerate config"
        )
    if kind != "DEEPSPEED":
        return Sharding(number, machines=machines)
    stage = _whole("zero_stage", deepspeed.get("zero_stage", 2), 0, path)
    return _deepspeed(number, machines, {**deepspeed, "zero_stage": stage})


def _whole(key: str, value: object, minimum: int, path: str | Path) -> int:
    """The whole number of a key of an accelerate config. Raises `UserError` for anything else."""
    if isinstance(value, bool) or not str(value).isdecimal() or not minimum <= int(str(value)):
        raise UserError(
            f"--accelerate-config: {key}: {value!r:.60} in {str(path)!r} is not a whole number of "
            f"at least {minimum}"
        )
    return int(str(value))


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


@dataclass(frozen=True, kw_only=True)
class Messages:
    """What the checks say to the user, in their order.

    `notes`: lines about the run, printed before it starts. `unknown`: lines about what could not be
    checked; only a dry run has any.
    """

    notes: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @classmethod
    def for_context(cls, context: RunContext) -> Messages:
        """The messages before the first check."""
        return cls(unknown=[] if context.local else [_ELSEWHERE])


@dataclass(frozen=True)
class RunContext:
    """What the checks before a run may look at.

    `local`: this machine will run it, so its packages, device, servers and folders count.
    `sharding`: how the run is spread over processes. `output_dir_mode`: whether `output_dir` is
    locked for the run (`take`), only looked at (`look`) or left alone (`leave`). `dry_run`:
    nothing will run, so what is missing on this machine is unknown, and not wrong.
    """

    local: bool
    sharding: Sharding
    output_dir_mode: OutputDirMode
    dry_run: bool = False

    @classmethod
    def of_launch(cls, output_dir_mode: OutputDirMode) -> RunContext:
        """The context of this process, as it was launched."""
        return cls(
            local=True, sharding=from_environment(), output_dir_mode=output_dir_mode, dry_run=False
        )

    @classmethod
    def of_dry_run(cls, options: DryRunOptions, *, local: bool) -> RunContext:
        """The context of a dry run.

        `local`: whether it plans for this machine. Raises `UserError` for a launch whose memory is
        not predicted.
        """
        return cls(
            local=local,
            sharding=_planned(options),
            output_dir_mode="look" if local else "leave",
            dry_run=True,
        )


def _planned(options: DryRunOptions) -> Sharding:
    """The sharding that a dry run plans for: that of its options, or of this launch."""
    if options.accelerate_config is not None:
        return from_file(options.accelerate_config, options.processes, options.machines)
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise UserError(f"--dry-run: accelerate's config asks for FSDP; {_FSDP}")
    launched = from_environment()
    machines = options.machines or launched.machines
    processes = options.processes or launched.local_processes * machines
    spread_over(processes, machines)
    return replace(launched, processes=processes, machines=machines)


def from_environment(environment: Mapping[str, str] = os.environ) -> Sharding:
    """Read the sharding from the environment that `accelerate launch` sets for its children."""
    processes = int(environment.get("WORLD_SIZE", "1"))
    machines = max(1, processes // int(environment.get("LOCAL_WORLD_SIZE") or processes))
    if environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() != "true":
        return Sharding(processes, machines=machines)
    names = ("zero_stage", "offload_optimizer_device", "offload_param_device")
    values = {name: environment.get(f"ACCELERATE_DEEPSPEED_{name.upper()}") for name in names}
    return _deepspeed(processes, machines, values)


def spread_over(processes: int, machines: int) -> None:
    """Raise `UserError` unless every machine gets the same number of processes.

    accelerate starts the same number on each.
    """
    if processes % machines or processes < machines:
        raise UserError(
            f"--machines: {processes} processes cannot be spread evenly over {machines} machines; "
            "num_processes (here --processes) is the number on all of them together"
        )


def _deepspeed(processes: int, machines: int, values: Mapping[str, Any]) -> Sharding:
    """The sharding for the DeepSpeed keys of an accelerate config; a missing stage is 2."""
    optimizer_device = str(values.get("offload_optimizer_device") or "none").lower()
    param_device = str(values.get("offload_param_device") or "none").lower()
    stage = values.get("zero_stage")
    stage = 2 if stage is None else int(stage)
    return Sharding(
        processes=processes,
        stage=stage,
        offload_optimizer=optimizer_device != "none",
        offload_parameters=param_device != "none",
        machines=machines,
    )
