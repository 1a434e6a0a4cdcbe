"""How a run is spread over GPUs: from an accelerate config, or from the environment of `accelerate launch`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adora_vl.errors import UserError
from adora_vl.yaml_file import read_mapping


@dataclass(frozen=True)
class Sharding:
    """`stage` is DeepSpeed's: 0 nothing, 1 optimizer, 2 and gradients, 3 and weights; `None` is no DeepSpeed at all."""

    processes: int = 1
    stage: int | None = None
    offload_optimizer: bool = False
    offload_parameters: bool = False

    def describe(self) -> str:
        """The sharding in words, for a report."""
        cards = "one process" if self.processes == 1 else f"{self.processes} processes"
        if self.stage is None:
            copies = "" if self.processes == 1 else ", each with a whole copy (DDP)"
            return f"{cards}, no sharding{copies}"
        moved = [
            name
            for name, there in (("optimizer", self.offload_optimizer), ("weights", self.offload_parameters))
            if there
        ]
        return f"{cards}, DeepSpeed ZeRO-{self.stage}" + (f", {' and '.join(moved)} in host memory" if moved else "")


def from_file(path: str | Path, processes: int | None = None) -> Sharding:
    """The sharding of an accelerate config. Raises `UserError` for a file that is none, and for FSDP."""
    content = read_mapping("--accelerate-config", Path(path))
    if "num_processes" not in content:
        raise UserError(f"--accelerate-config: {str(path)!r} is no accelerate config (no num_processes)")
    number = processes or _whole("num_processes", content["num_processes"], 1, path)
    kind = str(content.get("distributed_type", "NO")).upper()
    if kind == "FSDP":
        raise UserError(f"--accelerate-config: {str(path)!r} asks for FSDP; memory is predicted for DeepSpeed and DDP")
    if kind != "DEEPSPEED":
        return Sharding(number)
    deepspeed = content.get("deepspeed_config") or {}
    if not isinstance(deepspeed, dict):
        raise UserError(f"--accelerate-config: deepspeed_config: {deepspeed!r:.60} in {str(path)!r} is not a mapping")
    if "deepspeed_config_file" in deepspeed:
        raise UserError(
            f"--accelerate-config: {str(path)!r} names a DeepSpeed file; write zero_stage and the offload keys into "
            "the accelerate config"
        )
    stage = _whole("zero_stage", deepspeed.get("zero_stage", 2), 0, path)
    return _deepspeed(number, {**deepspeed, "zero_stage": stage})


def _whole(key: str, value: object, least: int, path: str | Path) -> int:
    if isinstance(value, bool) or not str(value).isdecimal() or not least <= int(str(value)):
        raise UserError(
            f"--accelerate-config: {key}: {value!r:.60} in {str(path)!r} is not a whole number of at least {least}"
        )
    return int(str(value))


def from_environment(environment: Mapping[str, str] = os.environ) -> Sharding:
    """The sharding that `accelerate launch` has told its children."""
    processes = int(environment.get("WORLD_SIZE", "1"))
    if environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() != "true":
        return Sharding(processes)
    names = ("zero_stage", "offload_optimizer_device", "offload_param_device")
    return _deepspeed(processes, {name: environment.get(f"ACCELERATE_DEEPSPEED_{name.upper()}") for name in names})


def _deepspeed(processes: int, values: Mapping[str, Any]) -> Sharding:
    devices = [str(values.get(f"offload_{part}_device") or "none").lower() for part in ("optimizer", "param")]
    return Sharding(processes, int(values.get("zero_stage") or 2), devices[0] != "none", devices[1] != "none")
