"""How a run is spread over processes and machines, and what DeepSpeed divides among them.

For a run that is planned it is read from an accelerate config. For one that was launched, processes
and machines are read from the environment, and DeepSpeed from the plugin of the run's config.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from adora_vl.utils.cli import read_mapping
from adora_vl.utils.convert import convert, options_to_dict
from adora_vl.utils.errors import UserError
from adora_vl.utils.launch import SEVERAL_PROCESSES_HINT

if TYPE_CHECKING:
    from accelerate.utils import DeepSpeedPlugin

FSDP_IS_UNSUPPORTED = (
    "is not supported, as neither its memory nor its checkpoints nor its weights in the engine were "
    "tested; use DeepSpeed (configs/accelerate/zero3.yaml)"
)

_Count = Annotated[int, Field(ge=1)]
_CountOrZero = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Sharding:
    """How a run is spread over processes and machines.

    `processes`: their number on all machines together. `zero_stage`: DeepSpeed's ZeRO stage, 0 to
    3; None without DeepSpeed. `offload_optimizer`, `offload_parameters`: whether optimizer states
    and weights lie in host memory.
    """

    processes: int = 1
    zero_stage: int | None = None
    offload_optimizer: bool = False
    offload_parameters: bool = False
    machines: int = 1

    @property
    def local_processes(self) -> int:
        """The number of processes on one machine."""
        return self.processes // self.machines

    @property
    def name(self) -> str:
        """The sharding's name in a run's fingerprint: `zero1` to `zero3`, or `none`."""
        return f"zero{self.zero_stage}" if self.zero_stage else "none"

    def describe(self) -> str:
        """Return the sharding in words, for a report.

        For example: `8 processes on 2 machines, DeepSpeed ZeRO-3, optimizer in host memory`.
        """
        processes = "one process" if self.processes == 1 else f"{self.processes} processes"
        if self.machines > 1:
            processes += f" on {self.machines} machines"
        if self.zero_stage is None:
            copies = "" if self.processes == 1 else ", each with a whole copy (DDP)"
            return f"{processes}, no sharding{copies}"
        in_host_memory: list[str] = []
        if self.offload_optimizer:
            in_host_memory.append("optimizer")
        if self.offload_parameters:
            in_host_memory.append("weights")
        text = f"{processes}, DeepSpeed ZeRO-{self.zero_stage}"
        if in_host_memory:
            text += f", {' and '.join(in_host_memory)} in host memory"
        return text


def sharding_from_file(
    path: str | Path, *, processes: int | None, machines: int | None
) -> Sharding:
    """Read how a run is spread over processes from an accelerate config.

    Args:
        path: The YAML file that `accelerate launch --config_file` takes.
        processes: Number of processes on all machines together, instead of the file's.
        machines: Number of machines, instead of the file's. Each one has as many processes as in
            the file, unless `processes` is set too.

    Raises `UserError` for a file that is no accelerate config, for FSDP, and for a file from which
    several machines cannot start.
    """
    content = read_mapping("--accelerate-config", Path(path))
    error_prefix = f"--accelerate-config: {str(path)!r}"
    if "num_processes" not in content:
        raise UserError(f"{error_prefix} is no accelerate config (no num_processes)")
    file_machines = convert(
        f"{error_prefix}: num_machines", content.get("num_machines") or 1, _Count
    )
    machines = machines or file_machines
    if not processes:
        file_processes = convert(f"{error_prefix}: num_processes", content["num_processes"], _Count)
        processes = file_processes // file_machines * machines
    check_processes_divide_evenly(processes, machines)
    distributed_type = str(content.get("distributed_type", "NO")).upper()
    if distributed_type == "FSDP":
        raise UserError(f"{error_prefix} asks for FSDP, which {FSDP_IS_UNSUPPORTED}")
    if distributed_type == "NO" and processes > 1:
        raise UserError(
            f"{error_prefix} has distributed_type: 'NO', with which accelerate starts one process, "
            f"and not {processes}; {SEVERAL_PROCESSES_HINT}"
        )
    deepspeed = options_to_dict(
        f"{error_prefix}: deepspeed_config", content.get("deepspeed_config")
    )
    if file_machines > 1:
        _check_several_machines(content, deepspeed, error_prefix=error_prefix)
    if distributed_type != "DEEPSPEED":
        return Sharding(processes=processes, machines=machines)
    if "deepspeed_config_file" in deepspeed:
        raise UserError(
            f"{error_prefix} names a DeepSpeed file; write "
            "zero_stage and the offload keys into the accelerate config"
        )
    # accelerate's default is 2
    zero_stage = convert(
        f"{error_prefix}: zero_stage", deepspeed.get("zero_stage", 2), _CountOrZero
    )
    return Sharding(
        processes=processes,
        zero_stage=zero_stage,
        offload_optimizer=_is_offloaded(deepspeed.get("offload_optimizer_device")),
        offload_parameters=_is_offloaded(deepspeed.get("offload_param_device")),
        machines=machines,
    )


def _check_several_machines(
    content: Mapping[str, Any], deepspeed: Mapping[str, Any], error_prefix: str
) -> None:
    """Raise `UserError` for an accelerate config from which several machines cannot start.

    They would wait for each other in vain, or fail after minutes.

    Args:
        content: The accelerate config.
        deepspeed: Its `deepspeed_config`, empty without one.
        error_prefix: The file, for the error.
    """
    example = "see configs/accelerate/zero3_nodes.yaml"
    if content.get("main_process_port") == 0:
        raise UserError(
            f"{error_prefix} has main_process_port: 0, which becomes another port on each machine, so "
            f"that they never meet; choose one port for all, {example}"
        )
    uses_deepspeed = str(content.get("distributed_type", "NO")).upper() == "DEEPSPEED"
    if uses_deepspeed and deepspeed.get("deepspeed_multinode_launcher") != "standard":
        raise UserError(
            f"{error_prefix} would start the machines with DeepSpeed's launcher, which needs pdsh and a "
            f"hostfile; set deepspeed_multinode_launcher: standard, {example}"
        )


def sharding_from_environment(environment: Mapping[str, str] = os.environ) -> Sharding:
    """Read over how many processes and machines this run is spread, from what a launcher sets.

    What DeepSpeed divides is not read here: a key of the run may say that too (`with_deepspeed`).

    `environment`: the environment variables of a process. Without a launcher it is one process.
    Raises `UserError` for FSDP.
    """
    if environment.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise UserError(f"accelerate launch: its config asks for FSDP, which {FSDP_IS_UNSUPPORTED}")
    processes = int(environment.get("WORLD_SIZE", "1"))
    # Without LOCAL_WORLD_SIZE all processes are on this machine.
    local_processes = int(environment.get("LOCAL_WORLD_SIZE") or processes)
    return Sharding(processes=processes, machines=max(1, processes // local_processes))


def refuse_second_deepspeed(key: object, *, launch_has_stage: bool) -> None:
    """Raise `UserError` if both the key `deepspeed` and the accelerate config set up DeepSpeed.

    accelerate refuses that too, with a message about an option that the user has not given.

    Args:
        key: The value of `deepspeed`; empty without it.
        launch_has_stage: Whether the accelerate config has a ZeRO stage.
    """
    if key and launch_has_stage:
        raise UserError(
            "deepspeed: the accelerate config sets a ZeRO stage already, and only one of them can "
            "hold; leave out the key, or launch with a config that has no DeepSpeed"
        )


def with_deepspeed(sharding: Sharding, plugin: DeepSpeedPlugin | None) -> Sharding:
    """Return a sharding with what DeepSpeed divides and offloads in a run.

    Args:
        sharding: The processes and machines of the run.
        plugin: The `deepspeed_plugin` of the run's config. Transformers makes it from the key
            `deepspeed`, or else from what `accelerate launch` sets; None without DeepSpeed.
    """
    if plugin is None:
        return replace(sharding, zero_stage=None, offload_optimizer=False, offload_parameters=False)
    return replace(
        sharding,
        zero_stage=plugin.zero_stage,
        offload_optimizer=_is_offloaded(plugin.offload_optimizer_device),
        offload_parameters=_is_offloaded(plugin.offload_param_device),
    )


def check_processes_divide_evenly(processes: int, machines: int) -> None:
    """Raise `UserError` unless the processes divide evenly over the machines.

    accelerate starts the same number of processes on each machine.
    """
    if processes % machines != 0 or processes < machines:
        raise UserError(
            f"--machines: {processes} processes cannot be spread evenly over {machines} machines; "
            "num_processes (here --processes) is the number on all of them together"
        )


def _is_offloaded(offload_device: str | None) -> bool:
    """Return whether DeepSpeed offloads to a device such as `cpu`; `none` and None mean to none."""
    return str(offload_device or "none").lower() != "none"
