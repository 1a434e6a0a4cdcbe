"""A training in a folder with a file `eval.py` or a package `eval` of the user's.

These names are common in the folders of researchers, and ours are the same. The run starts there as
in any other folder, and imports nothing of the user's.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from adora_vl.evals.benchmark import BENCHMARK_NAMES
from tests.support.paths import REPOSITORY
from tests.support.tiny_run import tiny_run_arguments

pytestmark = pytest.mark.slow
# An import of a user's own file ends the process with a line that no other error has.
ENDING_MODULE = "raise SystemExit('a file of the user was run')\n"


@pytest.fixture(scope="module")
def installed_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of this project and install it; return the folder into which it went."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    # Of a copy, since the build writes beside what it reads.
    for name in ("adora_vl", "data_prep", "eval", "configs"):
        shutil.copytree(
            REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir"]
    subprocess.run([*pip, *wheel, str(folder), str(source)], check=True)
    [built] = folder.glob("*.whl")
    site = folder / "site"
    install = ["install", "--no-deps", "--no-index", "--target", str(site), str(built)]
    subprocess.run([*pip, *install], check=True)
    return site


def run_python_in(folder: Path, package: Path, *argv: str) -> str:
    """Run `python ARGV` in a folder, with our package from `package`; return what it printed.

    The test fails where the command does, or where a user's file was imported.
    """
    environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    completed = subprocess.run(
        [sys.executable, *argv],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert completed.returncode == 0, f"{completed.stdout[-2000:]}\n{completed.stderr[-3000:]}"
    assert "a file of the user was run" not in completed.stdout + completed.stderr
    return completed.stdout


def write_modules_of_the_user(folder: Path, kind: str) -> None:
    """Write modules of the user's with the names of our two packages of commands.

    A run that imports one of them ends. kind: `files`, or `packages` for folders.
    """
    for name in ("eval", "data_prep"):
        if kind == "files":
            (folder / f"{name}.py").write_text(ENDING_MODULE)
        else:
            (folder / name).mkdir()
            (folder / name / "__init__.py").write_text(ENDING_MODULE)


def arguments_of_one_step_with_evaluations(output: Path, drawn_data: str) -> list[str]:
    """Return the arguments of a training of one step, with an evaluation before and after it."""
    argv = tiny_run_arguments(
        output,
        use_vllm="true",  # which evaluations during training need
        max_steps=1,
        max_completion_length=16,
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start="true",
        adora_eval=f"geometry3k={drawn_data}",
        adora_eval_limit=2,
    )
    return ["-m", "adora_vl.train", *argv]


@pytest.fixture(scope="module")
def drawn_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Draw a data set of geometry problems, and return its folder."""
    folder = tmp_path_factory.mktemp("data") / "drawn"
    argv = ["synthetic", "--output", str(folder), "--rows", "1", "--test-rows", "2"]
    run_python_in(folder.parent, REPOSITORY, "-m", "data_prep", *argv)
    yield str(folder)


def test_an_eval_py_in_the_folder_is_not_run(tmp_path: Path, drawn_data: str) -> None:
    """A run evaluates beside a file of the user's that has the name of our package."""
    write_modules_of_the_user(tmp_path, "files")
    printed = run_python_in(
        tmp_path, REPOSITORY, *arguments_of_one_step_with_evaluations(tmp_path / "run", drawn_data)
    )
    assert "step 0: geometry3k" in printed
    assert "step 1: geometry3k" in printed
    # What the run says to do next does not run the user's file either.
    assert "adora-vl eval" in printed
    assert "-m eval." not in printed


def test_from_the_wheel_a_folder_eval_is_not_run(
    tmp_path: Path, installed_wheel: Path, drawn_data: str
) -> None:
    """With the package installed, a folder `eval` of the user's is not run in place of ours."""
    write_modules_of_the_user(tmp_path, "packages")
    where = "import adora_vl; print(adora_vl.__file__)"
    assert run_python_in(tmp_path, installed_wheel, "-c", where).startswith(str(installed_wheel))
    printed = run_python_in(
        tmp_path,
        installed_wheel,
        *arguments_of_one_step_with_evaluations(tmp_path / "run", drawn_data),
    )
    assert "step 0: geometry3k" in printed
    assert "step 1: geometry3k" in printed


def test_the_wheel_has_the_commands_and_all_benchmarks(
    tmp_path: Path, installed_wheel: Path
) -> None:
    """The wheel has `data_prep` and a module for each benchmark, where `python -m` finds them."""
    for name in BENCHMARK_NAMES:
        assert (installed_wheel / "eval" / f"{name}.py").is_file()
    assert "usage: python -m eval.mathvista" in run_python_in(
        tmp_path, installed_wheel, "-m", "eval.mathvista", "--help"
    )
    assert "usage: python -m data_prep" in run_python_in(
        tmp_path, installed_wheel, "-m", "data_prep", "--help"
    )
