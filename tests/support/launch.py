"""Running our commands as a user does, with what a failing test needs to show."""

import atexit
import contextlib
import math
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

from tests.support.paths import REPOSITORY

# Processes of Python are forked from one that has the libraries, whose import takes longer than
# most runs.
_FORK_SERVER = multiprocessing.get_context("forkserver")
_FORK_SERVER.set_forkserver_preload(["tests.support.preloaded"])
# Modules that start processes of Python, and wait for them
MODULES_THAT_LAUNCH = (
    "accelerate.commands.launch",
    "torch.distributed.run",
    "benchmarks.kill_and_resume",
)
# The variable by which a test finds the processes of its command. Those are not forked, since Linux
# shows the environment with which a program began, and not that of a fork.
PROCESS_MARK = "TEST_MARK"
_POPEN: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
_Output: TypeAlias = int | IO[bytes] | IO[str] | None


def cli_arguments(**keys: object) -> list[str]:
    """Return the words of a command line that set these keys, `--key value` for each."""
    argv = []
    for key, value in keys.items():
        argv += [f"--{key}", str(value)]
    return argv


class _Fork:
    """A process of `python ARGV...` that is forked from this one, with what callers ask of `Popen`.

    It begins with the libraries that this process has imported.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        outputs: Sequence[int],
        *,
        starts_session: bool,
        folder: str | os.PathLike[str],
    ) -> None:
        """Start the process.

        Args:
            argv: what stands behind `python`.
            environment: its variables.
            outputs: the descriptors that become its stdout and stderr.
            starts_session: whether it is a session of its own, and so a process group.
            folder: its working directory.
        """
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid != 0:
            return
        exit_code = 1
        try:
            if starts_session:
                os.setsid()
            # What this process does at its end and upon signals is its own.
            atexit._clear()
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _run_python(argv, environment, outputs, folder)
            exit_code = 0
        except SystemExit as ended:
            exit_code = _exit_code_of(ended)
        except BaseException:  # as Python itself does at the end of a process
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exit_code)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code. Raises `subprocess.TimeoutExpired`."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            time.sleep(0.05)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _exit_code_of(ended: SystemExit) -> int:
    """Return the exit code of a process that ends with this exception; a text is printed."""
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    print(ended.code, file=sys.stderr)
    return 1


def _descriptor(stream: _Output, default: int) -> int:
    """Return the descriptor of what `Popen` takes as an output; below 0: a pipe or /dev/null."""
    if stream is None:
        return default
    if isinstance(stream, int):
        return stream
    return stream.fileno()


def _popen_or_fork(
    args: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    stdout: _Output = None,
    stderr: _Output = None,
    start_new_session: bool = False,
    **options: object,
) -> subprocess.Popen[bytes] | _Fork:
    """Start a command as `subprocess.Popen` does, but `python -m MODULE ...` by a fork.

    The launchers that tests run start their processes by this: each would import the libraries for
    longer than it runs.
    """
    module_words = [word for word in args[1:] if word != "-u"]
    outputs = (_descriptor(stdout, default=1), _descriptor(stderr, default=2))
    runs_module = args[0] == sys.executable and module_words[:1] == ["-m"]
    if options or min(outputs) < 0 or not runs_module:
        return _POPEN(
            args,
            env=env,
            cwd=cwd,
            stdout=stdout,
            stderr=stderr,
            start_new_session=start_new_session,
            **options,
        )
    return _Fork(
        module_words,
        environment=env or os.environ,
        outputs=outputs,
        starts_session=start_new_session,
        folder=cwd or ".",
    )


def _set_popen(popen: object) -> None:
    """Let this process, and torch's launcher in it, start processes by `popen`."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess.Popen = popen  # type: ignore[assignment, misc]
    subprocess_handler.Popen = popen  # type: ignore[assignment, attr-defined]


def _run_python(
    argv: Sequence[str],
    environment: Mapping[str, str],
    outputs: Sequence[int],
    folder: str | os.PathLike[str],
) -> None:
    """Run `python ARGV...` in this process.

    Args:
        argv: a file, or `-m` and a module, and its arguments.
        environment: the variables that it gets.
        outputs: the descriptors that become stdout and stderr.
        folder: the working directory.
    """
    os.chdir(folder)
    variables = dict(environment)
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # which depends on the variable TMPDIR
    for descriptor, output in enumerate(outputs, start=1):
        os.dup2(output, descriptor)
    is_module = argv[0] == "-m"
    sys.argv = list(argv[1:] if is_module else argv)
    launches = is_module and argv[1] in MODULES_THAT_LAUNCH and PROCESS_MARK not in variables
    _set_popen(_popen_or_fork if launches and "--child" not in argv else _POPEN)
    try:
        if is_module:
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def _run_with_files(
    argv: Sequence[str],
    environment: Mapping[str, str],
    files: Sequence[str],
    folder: str | os.PathLike[str],
    starts_session: bool,
) -> None:
    """Run `python ARGV...` in this process, and append what it prints to two files.

    `starts_session`: whether the process becomes a session of its own, and so a process group.
    """
    if starts_session:
        os.setsid()
    outputs = [os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT) for file in files]
    _run_python(argv, environment, outputs, folder)


class PythonProcess:
    """A running `python ARGV...` that was forked from a process which has our libraries.

    It has those of `subprocess.Popen`'s methods that tests and checks use.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdout: str | os.PathLike[str],
        stderr: str | os.PathLike[str],
        folder: str | os.PathLike[str] = REPOSITORY,
        starts_session: bool = False,
    ) -> None:
        """Start the process.

        Args:
            argv: a file, or `-m` and a module, and its arguments.
            environment: its variables.
            stdout: the file to which its output is appended.
            stderr: the file of its errors, which may be the same.
            folder: its working directory.
            starts_session: whether it is a session of its own, and so a process group.
        """
        self._process = _FORK_SERVER.Process(
            target=_run_with_files,
            args=(
                list(argv),
                dict(environment),
                [str(stdout), str(stderr)],
                folder,
                starts_session,
            ),
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code. Raises `subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()


def popen_of_fork_server(
    args: Sequence[str],
    *,
    stdout: IO[bytes],
    stderr: IO[bytes],
    start_new_session: bool,
    cwd: str,
    env: Mapping[str, str],
) -> PythonProcess:
    """Start a command as `subprocess.Popen` does, from the process that has our libraries.

    `args`: Python and its arguments. `stdout` and `stderr` are open files.
    """
    assert args[0] == sys.executable
    return PythonProcess(
        args[1:],
        env,
        stdout=stdout.name,
        stderr=stderr.name,
        folder=cwd,
        starts_session=start_new_session,
    )


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
