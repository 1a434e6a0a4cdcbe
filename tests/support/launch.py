"""Running our commands as a user does, with what a failing test needs to show."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.forked_python import PythonProcess
from tests.support.paths import REPOSITORY


def cli_arguments(**keys: object) -> list[str]:
    """Return the words of a command line that set these keys, `--key value` for each."""
    argv = []
    for key, value in keys.items():
        argv += [f"--{key}", str(value)]
    return argv


def _run_in_fork(
    argv: list[str], environment: dict[str, str], timeout: int
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGV...` in a fork of a process that has imported our libraries."""
    with tempfile.TemporaryDirectory() as folder:
        stdout = Path(folder, "out")
        stderr = Path(folder, "err")
        process = PythonProcess(argv, environment, stdout=stdout, stderr=stderr)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"not done after {timeout} s: {argv}\n{stderr.read_text()[-3000:]}"
            ) from None
        finally:
            process.kill()
        return subprocess.CompletedProcess(argv, code, stdout.read_text(), stderr.read_text())


def run_command(
    command: list[str],
    *,
    timeout: int = 500,
    check: bool = True,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository's folder, and return the completed process with its output.

    Args:
        command: the program and its arguments.
        timeout: seconds after which the command is killed and the test fails.
        check: whether another exit code than 0 fails the test, with the end of the output.
        environment: variables that are added to this process's.
    """
    # so that a script finds `tests`
    ours = {
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(REPOSITORY),
    }
    environment = {**os.environ, **ours, **(environment or {})}
    if command[0] == sys.executable:
        completed = _run_in_fork(command[1:], environment, timeout)
    else:
        completed = subprocess.run(
            command,
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    if check:
        assert completed.returncode == 0, (
            f"{' '.join(command)}\n{completed.stdout[-1500:]}\n{completed.stderr[-4000:]}"
        )
    return completed


def accelerate_launch(
    config: str, *arguments: str, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run `accelerate launch` with a config of `configs/accelerate`; return the process that ended.

    With "cpu", one process, Python runs without the launcher, unless there are options for it such
    as `--num_processes`. That launcher is not forked: a run reads from its command line how it was
    started.

    Args:
        config: the name of the accelerate config, such as "cpu_zero3".
        arguments: the script, or `-m` and a module, and its arguments.
        options: keyword arguments of `run_command`.
    """
    if config == "cpu" and not arguments[0].startswith("--"):
        return run_command([sys.executable, *arguments], **options)
    file = ["--config_file", str(REPOSITORY / "configs" / "accelerate" / f"{config}.yaml")]
    if config == "cpu":
        return run_command(
            [str(Path(sys.executable).with_name("accelerate")), "launch", *file, *arguments],
            **options,
        )
    return run_command(
        [sys.executable, "-m", "accelerate.commands.launch", *file, *arguments], **options
    )


def pids_marked_with(mark: str) -> list[int]:
    """Return the ids of running processes that have the text `mark` in their environment.

    A test starts a command with a random mark in a variable, which all its children inherit.
    """
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                pids.append(int(folder.name))
    return pids


def command_lines_marked_with(mark: str) -> list[str]:
    """Return the command lines of running processes that have `mark` in their environment.

    They get 10 seconds to end.
    """
    for _ in range(50):
        command_lines = []
        for pid in pids_marked_with(mark):
            with contextlib.suppress(OSError):
                command_lines.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
        if not command_lines:
            break
        time.sleep(0.2)
    return command_lines
