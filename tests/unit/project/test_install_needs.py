"""`setup/install.sh` says what Triton lacks on a machine with a GPU before any download."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY

PROGRAMS_ON_PATH = ("bash", "dirname", "c++", "sed", "head")
# Stands for a Python without headers: its answer to the question for the file is no.
PYTHON_WITHOUT_HEADERS = """#!/bin/sh
case "$*" in *Python.h*) exit 1 ;; esac
exec {python} "$@"
"""
# Makes an environment whose pip does all it is asked for, and whose torch is a build for CPUs.
PYTHON_WITH_CPU_TORCH = """#!/bin/sh
case "$*" in *"-m venv"*)
  /bin/mkdir -p .venv/bin
  printf '#!/bin/sh\\necho "$@" >>pip.log\\ncase "$*" in *version.cuda*) exit 1 ;; esac\\n' \
    >.venv/bin/python
  /bin/chmod +x .venv/bin/python
  exit 0 ;;
esac
exec {python} "$@"
"""
PYTHON_THAT_STOPS_AT_VENV = """#!/bin/sh
case "$*" in *"-m venv"*) echo "makes the environment" >&2; exit 7 ;; esac
exec {python} "$@"
"""


def run_installer(
    folder: Path, device: str, python_script: str, *programs: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a copy of `setup/install.sh` with few programs on PATH, and a stand-in for Python.

    Args:
        folder: where the copy is written and run.
        device: the value of `ADORA_DEVICE`.
        python_script: the stand-in, such as `PYTHON_WITHOUT_HEADERS`.
        programs: the names on PATH besides those that the script always needs; they do nothing.
        environment: variables besides the usual ones.
    """
    (folder / "setup").mkdir()
    for file in ("install.sh", "constraints-cpu.txt", "constraints-gpu.txt"):
        shutil.copy(REPOSITORY / "setup" / file, folder / "setup")
    program_folder = folder / "bin"
    program_folder.mkdir()
    for program in (*PROGRAMS_ON_PATH, "sleep", "rm", "grep", "tail", "cut"):
        path = shutil.which(program)
        assert path is not None, program
        (program_folder / program).symlink_to(path)
    for program in programs:
        (program_folder / program).write_text("#!/bin/sh\n")
        (program_folder / program).chmod(0o755)
    python = folder / "python"
    python.write_text(python_script.format(python=sys.executable))
    python.chmod(0o755)
    variables = {
        "PATH": str(program_folder),
        "PYTHON": str(python),
        "ADORA_DEVICE": device,
        "HOME": os.environ["HOME"],
    }
    command = [str(program_folder / "bash"), "setup/install.sh"]
    return subprocess.run(
        command,
        cwd=folder,
        env=variables | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_missing_compiler_or_header_is_named_before_anything_is_made(case_folder):
    """The error names what to install, and there is no environment."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    cases = [
        (
            "gcc",
            PYTHON_THAT_STOPS_AT_VENV,
            [],
            {},
            "Triton needs a C compiler on a GPU, and 'gcc' was not found",
        ),
        (
            "CC",
            PYTHON_THAT_STOPS_AT_VENV,
            ["gcc"],
            {"CC": "othercc"},
            "and 'othercc' was not found",
        ),
        (
            "header",
            PYTHON_WITHOUT_HEADERS,
            ["gcc"],
            {},
            f"Python.h of Python {version} on a GPU (Debian: apt-get install python",
        ),
    ]
    for name, python_script, programs, environment, words_of_error in cases:
        with case_folder(name) as folder:
            process = run_installer(folder, "gpu", python_script, *programs, **environment)
            assert process.returncode == 2, process.stderr
            assert words_of_error in process.stderr, process.stderr
            assert not (folder / ".venv").exists()


@pytest.mark.parametrize(
    ("device", "programs"), [("gpu", ["gcc"]), ("gpu", ["clang"]), ("cpu", [])]
)
def test_with_what_it_needs_it_goes_on(device, programs, tmp_path):
    """The script goes on as far as the environment, which a stand-in refuses to make."""
    process = run_installer(tmp_path, device, PYTHON_THAT_STOPS_AT_VENV, *programs)
    assert "Triton needs" not in process.stderr
    assert "1/4 environment" in process.stdout + process.stderr


def test_a_torch_for_cpus_is_refused_for_a_gpu_and_taken_back(tmp_path):
    """Where pip knows an index of CPU builds, their `+cpu` is the newer of two equal versions."""
    process = run_installer(tmp_path, "gpu", PYTHON_WITH_CPU_TORCH, "gcc")
    assert process.returncode == 1
    assert "the torch that pip chose has no CUDA; set TORCH_INDEX" in process.stderr
    assert "uninstall -y torch torchvision" in (tmp_path / "pip.log").read_text()
