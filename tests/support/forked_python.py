"""Commands of Python that are forked from a process which has imported our libraries.

Importing them takes longer than most runs of the tests. pytest asks multiprocessing's fork server
for a process (`PythonProcess`). A launcher in such a process forks those that it starts itself.
"""

import atexit
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
from typing import IO, TypeAlias

from tests.support.paths import REPOSITORY

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
    paths = variables.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
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
