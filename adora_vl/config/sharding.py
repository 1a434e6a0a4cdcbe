"""How a run is spread over processes and machines.

It is read from an accelerate config, or from the environment of `accelerate launch`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adora_vl.utils.cli import read_mapping
from adora_vl.utils.errors import UserError
from adora_vl.utils.launch import SEVERAL

FSDP_IS_UNKNOWN = (
    "its memory is not predicted, and neither its checkpoints nor its weights in the engine have "
    "been tested here; use DeepSpeed (configs/accelerate/zero3.yaml)"
)


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
        """Return the sharding in words, for a report."""
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
        raise UserError(f"{where} asks for FSDP; {FSDP_IS_UNKNOWN}")
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
    """Return the whole number of a key of an accelerate config.

    Raises `UserError` for anything else.
    """
    if isinstance(value, bool) or not str(value).isdecimal() or not minimum <= int(str(value)):
        raise UserError(
            f"--accelerate-config: {key}: {value!r:.60} in {str(path)!r} is not a whole number of "
            f"at least {minimum}"
        )
    return int(str(value))


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
    """Return the sharding for the DeepSpeed keys of an accelerate config; a missing stage is 2."""
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
