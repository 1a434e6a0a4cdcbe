"""Inference in several processes, as `accelerate launch` starts them. Each process answers a slice of the problems.

The processes share only a store of counters. Their engines do not know of each other.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

_PATIENCE = timedelta(days=7)  # the slowest rank's whole inference
# What a launcher sets; an engine that finds it would look for the other processes.
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")


class Ranks(Protocol):
    """Which of how many processes this is, and a place where all of them meet."""

    rank: int
    world: int

    def meet(self, where: str) -> None:
        """Return when every process has come to `where`."""
        ...


@dataclass
class Alone:
    """The place of a process that works alone."""

    rank: int = 0
    world: int = 1

    def meet(self, where: str) -> None:
        """There is nobody to wait for."""


class Launched:
    """One of several processes, which count at a store that the launcher (or rank 0) keeps."""

    def __init__(self) -> None:
        from torch.distributed.rendezvous import rendezvous

        store: Any
        store, self.rank, self.world = next(rendezvous("env://", timeout=_PATIENCE))
        self._store = store

    def meet(self, where: str) -> None:
        if self._store.add(f"adora_vl_eval/{where}", 1) == self.world:
            self._store.set(f"adora_vl_eval/{where}/all", "1")
        self._store.wait([f"adora_vl_eval/{where}/all"], _PATIENCE)


def ranks() -> Ranks:
    """This process among those of its launcher. Takes the launcher's variables away and a GPU of its own."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Alone()
    launched = Launched()
    take_gpu(int(os.environ.get("LOCAL_RANK", "0")))
    for name in _LAUNCHER:
        os.environ.pop(name, None)
    return launched


def take_gpu(local_rank: int) -> None:
    """Leave this process one of the GPUs that it sees; before CUDA starts, or it would not be heeded."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    if local_rank < len(devices):
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[local_rank]
