"""The checks in their order, the most telling first. Modules are imported only where a check runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu.setting import Setting
    from benchmarks.gpu.table import Line


@dataclass(frozen=True)
class GPUCheck:
    """`place`: module and function, a generator of lines. `needs`: packages without which it is skipped."""

    name: str
    place: str
    limit: int  # seconds
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        return [package for package in self.needs if find_spec(package) is None]

    def load(self) -> Callable[[Setting], Iterator[Line]]:
        module, _, function = self.place.partition(":")
        run: Callable[[Setting], Iterator[Line]] = getattr(importlib.import_module(module), function)
        return run


CHECKS = (
    GPUCheck("rounding", "benchmarks.gpu.precision:cast", 120),
    GPUCheck("zero3", "benchmarks.gpu.precision:zero3", 300, ("deepspeed",)),
    GPUCheck("deepspeed", "benchmarks.gpu.offload:builds", 300, ("deepspeed",)),
    GPUCheck("lm_head", "benchmarks.gpu.lm_head:run", 90, ("trl",)),
    GPUCheck("prompts", "benchmarks.gpu.prompts:run", 180, ("trl", "accelerate")),
    GPUCheck("vision", "benchmarks.gpu.vision:run", 120),
    GPUCheck("trainer", "benchmarks.gpu.trainer:run", 300, ("trl", "peft", "datasets")),
    GPUCheck("lora_sync", "benchmarks.gpu.streaming:run", 90, ("peft",)),
    GPUCheck("offload", "benchmarks.gpu.offload:run", 300, ("deepspeed",)),
    GPUCheck("engine", "benchmarks.gpu.engine:run", 400, ("vllm", "trl", "datasets")),
)
