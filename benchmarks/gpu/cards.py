"""Two processes that add and hand over tensors: two cards with NCCL, or gloo on a CPU."""

from collections.abc import Iterator
from datetime import timedelta

import torch
from torch import distributed, multiprocessing
from torch.multiprocessing.spawn import spawn

from adora_vl.utils.files import GIB
from adora_vl.utils.launch import free_port
from benchmarks.gpu.setting import JUDGED_ON_GPU_ONLY, Setting
from benchmarks.gpu.table import CheckLine, at_least_line, skipped_line, verdict_line
from benchmarks.measure import run_seconds

NUMBER_OF_CARDS = 2
_HANG_TIMEOUT = timedelta(seconds=60)


def run(setting: Setting) -> Iterator[CheckLine]:
    """Let two processes on two cards sum and hand over tensors, and report the rate of a sum.

    Without a GPU two processes on the CPU do so by gloo.
    """
    card_count = torch.cuda.device_count() if setting.on_gpu else NUMBER_OF_CARDS
    if card_count < NUMBER_OF_CARDS:
        yield skipped_line(
            "two cards with NCCL", f"NCCL needs {NUMBER_OF_CARDS} cards, here is {card_count}"
        )
        return
    results = multiprocessing.get_context("spawn").SimpleQueue()
    spawn(_member, (free_port(), setting, results), nprocs=NUMBER_OF_CARDS, join=True)
    backend, right, rate = results.get()
    yield verdict_line(
        f"{backend}: sums and a tensor handed over",
        "right" if right else "wrong",
        "right",
        right,
        "exact",
    )
    title = f"{backend}: GiB per second of an all-reduce"
    if setting.on_gpu:
        yield at_least_line(
            title,
            value=rate,
            bound=1.0,
            unit="",
            source="ours: slower than any bus says that NCCL fell back to sockets",
        )
    else:
        yield skipped_line(title, JUDGED_ON_GPU_ONLY, f"{rate:.2g}")


def _member(rank: int, port: int, setting: Setting, results: multiprocessing.SimpleQueue) -> None:
    """Sum and hand over tensors as one of the processes.

    The first rank puts the backend, whether all was right, and the rate into `results`.
    """
    device = torch.device("cuda", rank) if setting.on_gpu else setting.device
    backend = "nccl" if setting.on_gpu else "gloo"
    if setting.on_gpu:
        torch.cuda.set_device(device)
    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group(
        backend, init_method=address, rank=rank, world_size=NUMBER_OF_CARDS, timeout=_HANG_TIMEOUT
    )
    try:
        numbers = torch.arange(2**26 if setting.full else 2**16, dtype=torch.float32, device=device)
        summed, handed = numbers + rank, numbers + rank
        distributed.all_reduce(summed)
        distributed.broadcast(handed, src=0)
        right = torch.tensor(
            float(added(numbers, summed) and torch.equal(handed, numbers)), device=device
        )
        distributed.all_reduce(right, op=distributed.ReduceOp.MIN)
        spent = run_seconds(device, lambda: distributed.all_reduce(handed))
        if rank == 0:
            results.put((backend, bool(right), numbers.nbytes / GIB / spent))
        distributed.barrier()
    finally:
        distributed.destroy_process_group()


def added(numbers: torch.Tensor, summed: torch.Tensor) -> bool:
    """Return whether `summed` is the sum over the ranks of the numbers and the rank."""
    return torch.equal(summed, NUMBER_OF_CARDS * numbers + sum(range(NUMBER_OF_CARDS)))
