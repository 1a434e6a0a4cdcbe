"""Resolves all pins for a GPU together, as far as that goes without one.

    python setup/check_gpu_pins.py                     resolve, for each supported Python found here
    python setup/check_gpu_pins.py --download FOLDER   and download the wheels of this Python (4 GB)
    python setup/check_gpu_pins.py --install FOLDER    and install them by setup/install.sh (10 GB)

Nothing is installed into the environment that runs this. Exit codes: 0 the pins agree, 1 they do
not, 2 the input is wrong. The last lines say what was not checked.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[1]
CONSTRAINTS = REPOSITORY / "setup" / "constraints-gpu.txt"
SUPPORTED_PYTHONS = ("3.11", "3.12", "3.13")
# As setup/install.sh installs them: the project with its extras, and what comes without needs.
PROJECT_REQUIREMENT = ".[gpu,lora,dev]"
FURTHER_REQUIREMENTS = ("deepspeed", "bitsandbytes", "vllm-bnb-plugin")
NOT_CHECKED_NOTES = (
    "the driver (580 or newer), and whether the kernels of the wheels run on a card",
    "the extensions of vLLM on this machine where no driver is: they load libcuda.so.1",
    "other platforms than this one (x86-64 Linux is what the pins were resolved for)",
)


@dataclass(frozen=True, kw_only=True)
class ResolvedPackage:
    """A package of a resolution: its version, the file's name, and what it needs."""

    name: str
    version: str
    file: str
    needs: tuple[str, ...]


Resolution = Mapping[str, ResolvedPackage]  # by canonical name


def pins(text: str) -> dict[str, str]:
    """Return the pinned versions of a constraints file by canonical name."""
    lines = [line.strip() for line in text.splitlines()]
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def requirements() -> list[str]:
    """Return what is asked of pip.

    torch is asked for by its exact version, so that a build for CPUs (`+cpu`), which another index
    of this machine may have, is not taken for the one with CUDA.
    """
    torch = pins(CONSTRAINTS.read_text())["torch"]
    return [f"torch==={torch}", PROJECT_REQUIREMENT, *FURTHER_REQUIREMENTS]


def read_report(report: Mapping[str, object]) -> Resolution:
    """Return the packages of pip's installation report."""
    packages = {}
    installs = report["install"]
    assert isinstance(installs, list)
    for item in installs:
        metadata = item["metadata"]
        package = ResolvedPackage(
            name=metadata["name"],
            version=metadata["version"],
            file=item["download_info"]["url"].rsplit("/", 1)[-1],
            needs=tuple(metadata.get("requires_dist", ())),
        )
        packages[canonicalize_name(package.name)] = package
    return packages


def resolve(python: str) -> Resolution | str:
    """Return pip's resolution for an interpreter, or the line in which pip says why there is none.

    pip reads metadata alone where the index offers it, and installs nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "--python", python, "install", "--dry-run"]
        command += ["--quiet", "--ignore-installed", "--disable-pip-version-check"]
        command += ["--report", str(report), "-c", str(CONSTRAINTS), *requirements()]
        # DeepSpeed's metadata would need a CUDA toolkit where a GPU is.
        environment = {**os.environ, "DS_IGNORE_CUDA_DETECTION": "1"}
        done = subprocess.run(  # noqa: S603  # words of this file
            command,
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            return errors[0] if errors else f"pip ended with {done.returncode}"
        return read_report(json.loads(report.read_text()))


def describe_broken_pins(packages: Resolution) -> list[str]:
    """Return a line for each pin that the resolution misses, and for a torch without CUDA.

    pip has met the needs of what it resolved.
    """
    lines = []
    for name, version in pins(CONSTRAINTS.read_text()).items():
        package = packages.get(name)
        if package is None:
            lines.append(f"{name}=={version} is pinned, and nothing needs it")
        elif package.version != version:
            lines.append(f"{name} is {package.version}, and {version} is pinned")
    torch = packages.get("torch")
    if torch is not None and not any(need.startswith("cuda-toolkit") for need in torch.needs):
        lines.append(f"{torch.file} needs no CUDA: it is a build for CPUs")
    return lines


def interpreters() -> dict[str, str | None]:
    """Return the interpreter of each supported Python; None where this machine has none."""
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    places: dict[str, str | None] = {}
    for python in SUPPORTED_PYTHONS:
        program = sys.executable if python == running else shutil.which(f"python{python}")
        places[python] = program if program and pip_answers(program) else None
    return places


def pip_answers(program: str) -> bool:
    """Return whether an interpreter runs; a shim of pyenv may stand for none."""
    command = [program, "-c", "pass"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0  # noqa: S603


def download(packages: Resolution, folder: Path) -> str:
    """Download the wheels of a resolution, and return what that came to. Raises `SystemExit`."""
    folder.mkdir(parents=True, exist_ok=True)
    # Neither is a wheel of the index: this project, and DeepSpeed, which is built from its source.
    names = [name for name in packages if name not in ("adora-vl", "deepspeed")]
    exact = [f"{packages[name].name}==={packages[name].version}" for name in names]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "-d", str(folder), *exact]
    if subprocess.run(command, check=False).returncode != 0:  # noqa: S603
        raise SystemExit("the wheels could not all be downloaded; pip says which above")
    gibibytes = sum(file.stat().st_size for file in folder.glob("*.whl")) / 2**30
    return f"{len(names)} wheels downloaded, {gibibytes:.1f} GiB in {folder}"


def install(folder: Path) -> str:
    """Run setup/install.sh for a GPU in a clone, then `pip check`. Raises `SystemExit`."""
    clone = ["git", "clone", "--quiet", str(REPOSITORY), str(folder)]
    script = ["bash", str(folder / "setup" / "install.sh")]
    check = [str(folder / ".venv" / "bin" / "python"), "-m", "pip", "check"]
    environment = {**os.environ, "ADORA_DEVICE": "gpu", "PYTHON": sys.executable}
    for command in (clone, script, check):
        if subprocess.run(command, env=environment, check=False).returncode != 0:  # noqa: S603
            raise SystemExit(f"{' '.join(command)} failed; what it printed stands above")
    return f"setup/install.sh made {folder}/.venv, its imports work, and pip check finds no fault"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the pins, and print what holds, what does not and what was not looked at."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--download", type=Path, metavar="FOLDER")
    parser.add_argument("--install", type=Path, metavar="FOLDER")
    options = parser.parse_args(arguments)
    if options.install is not None and options.install.exists():
        parser.error(f"--install: {options.install} is there already; name a new folder")
    faults = 0
    not_checked = list(NOT_CHECKED_NOTES)
    resolution: Resolution = {}
    for python, program in interpreters().items():
        if program is None:
            not_checked.append(f"Python {python}, which is not on this machine")
            continue
        packages = resolve(program)
        if isinstance(packages, str):
            faults += 1
            print(f"Python {python}: {packages}")
            continue
        lines = describe_broken_pins(packages)
        faults += len(lines)
        agreement = f"faults: {len(lines)}" if lines else "all needs are met"
        print(f"Python {python}: {len(packages)} packages resolved together, {agreement}")
        for line in lines:
            print(f"  {line}")
        if program == sys.executable:
            resolution = packages
    if options.download is not None and resolution:
        print(download(resolution, options.download))
    if options.install is not None and faults == 0:
        print(install(options.install))
    if options.download is None:
        not_checked.append("whether every wheel can be downloaded (--download FOLDER)")
    if options.install is None:
        not_checked.append("whether they install and import together (--install FOLDER)")
    for text in not_checked:
        print(f"not checked: {text}")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
