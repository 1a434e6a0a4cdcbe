"""The rank and the GPU of this process among the processes that answer a benchmark together."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

_MAX_WAIT = timedelta(days=7)  # how long a rank waits for the slowest rank
# The variables that a launcher such as torchrun sets.
_LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
)


@dataclass
class ProcessGroup:
    """The processes that answer one benchmark together, as this process sees them."""

    rank: int = 0
    """The rank of this process, from 0 on."""
    world_size: int = 1
    """The number of processes."""
    store: Any = None
    """Torch's key-value store, by which processes wait for each other; None for one process."""
    run: str = ""
    """The name of the run. Barriers of several runs of the same processes need different names."""

    def barrier(self, point: str) -> None:
        """Wait until every process has come to the named point of the run.

        Each process adds 1 to a counter in the store. The process that brings the counter to
        `world_size` sets a key, for which all processes wait. A single process has no store and
        does not wait.
        """
        if self.store is None:
            return
        arrivals_key = f"adora_vl_eval/{self.run}/{point}"
        n_arrivals = self.store.add(arrivals_key, 1)
        if n_arrivals == self.world_size:
            self.store.set(f"{arrivals_key}/all", "1")
        self.store.wait([f"{arrivals_key}/all"], _MAX_WAIT)


SINGLE_PROCESS = ProcessGroup()


def join_process_group() -> ProcessGroup:
    """Join the processes that a launcher such as torchrun has started, and take a GPU of their own.

    The variables of the launcher are removed from the environment: an engine that sees them would
    wait for the other processes, though each process has an engine of its own. A process that was
    started without a launcher is alone.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return SINGLE_PROCESS
    from torch.distributed.rendezvous import rendezvous

    store, rank, world_size = next(rendezvous("env://", timeout=_MAX_WAIT))
    take_gpu(int(os.environ.get("LOCAL_RANK", "0")))
    for name in _LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    return ProcessGroup(rank=rank, world_size=world_size, store=store)


def take_gpu(local_rank: int) -> None:
    """Make the visible GPU with the number `local_rank` the only one that this process sees.

    It has to be called before CUDA starts. With more processes than GPUs, the rest see all of them.
    """
    gpus = _visible_gpus()
    if local_rank < len(gpus):
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[local_rank]


def _visible_gpus() -> list[str]:
    """Return the ids of the GPUs that `CUDA_VISIBLE_DEVICES` names, or of all in the machine."""
    import torch

    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible_devices:
        return visible_devices.split(",")
    # The count is taken only here, since it can start CUDA.
    return [str(index) for index in range(torch.cuda.device_count())]
