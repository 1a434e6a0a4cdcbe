"""What lies outside Python: programs that compile, and the NVIDIA driver."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

from adora_vl.doctor.result import Check, failed, passed, skipped

OLDEST_DRIVER = {"13": 580}  # by CUDA's major version: https://docs.nvidia.com/deploy/cuda-compatibility
Find = Callable[[str], str | None]


def check_compilers(*, needed: bool, find: Find = shutil.which) -> Check:
    """DeepSpeed compiles its CPU optimizer when a run with offload starts: with `ninja` and a C++ compiler on PATH."""
    title = "programs that compile"
    if not needed:
        return skipped(title, "this run does not use DeepSpeed")
    ninja, compiler = find("ninja"), find("c++") or find("g++")
    if ninja is None:
        return failed(title, "ninja is not on PATH", "pip install ninja in the environment that runs this command")
    if compiler is None:
        return failed(title, "no C++ compiler on PATH", "install one (Debian: apt-get install g++)")
    return passed(title, f"{ninja}, {compiler}")


def driver_version() -> str | None:
    """What nvidia-smi says; None where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(answer.stdout.split()), None)


def check_driver(*, cuda: str | None, driver: str | None) -> Check:
    """Whether the driver is new enough for the CUDA that torch is built for, `cuda` (None: a build for the CPU)."""
    title = "NVIDIA driver"
    if cuda is None:
        return skipped(title, "torch is built for the CPU")
    oldest = OLDEST_DRIVER.get(cuda.split(".")[0])
    if driver is None or oldest is None:
        return skipped(title, f"nvidia-smi gave no version; torch is built for CUDA {cuda}")
    if int(driver.split(".")[0]) < oldest:
        return failed(title, f"{driver}, but CUDA {cuda} needs {oldest} or newer", f"update it to R{oldest} or newer")
    return passed(title, f"{driver} (CUDA {cuda} needs {oldest} or newer)")
