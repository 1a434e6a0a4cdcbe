"""Commands of Python that are forked from a process which has imported our libraries.

Importing them takes longer than most runs of the tests. pytest asks multiprocessing's fork server
for a process. A launcher in such a process forks those that it starts itself.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TypeAlias

from tests.support.paths import REPOSITORY

_FORK = multiprocessing.get_context("fork")
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
# What `Popen` takes as an output; None is that of this process.
_Stream: TypeAlias = int | IO[bytes] | IO[str] | None


class PythonProcess:
    """A running `python ARGV...`, which began with the libraries of the process that it is of.

    It has those of `subprocess.Popen`'s methods that launchers, tests and checks use.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdout: int | str | os.PathLike[str],
        stderr: int | str | os.PathLike[str],
        folder: str | os.PathLike[str] = REPOSITORY,
        starts_session: bool = False,
        from_this_process: bool = False,
    ) -> None:
        """Start the process.

        Args:
            argv: a file, or `-m` and a module, and its arguments.
            environment: its variables.
            stdout: the file to which its output is appended, or a descriptor of this process.
            stderr: the same for its errors.
            folder: its working directory.
            starts_session: whether it is a session of its own, and so a process group.
            from_this_process: whether it is forked from this process, and not from the fork server,
                which gets no descriptors.
        """
        context = _FORK if from_this_process else _FORK_SERVER
        self._process = context.Process(
            target=_run_python,
            args=(list(argv), dict(environment), (stdout, stderr), folder, starts_session),
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal, or None while the process runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the process runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code. Raises `subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        code = self.returncode
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()


def _run_python(
    argv: Sequence[str],
    environment: Mapping[str, str],
    outputs: Sequence[int | str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    starts_session: bool,
) -> None:
    """Run `python ARGV...` in this process, which was forked for it.

    Args:
        argv: a file, or `-m` and a module, and its arguments.
        environment: its variables.
        outputs: the files that get its output and its errors, or descriptors of them.
        folder: its working directory.
        starts_session: whether it becomes a session of its own, and so a process group.
    """
    if starts_session:
        os.setsid()
    # What the process before the fork does at its end and upon signals is its own.
    atexit._clear()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, output in enumerate(outputs, start=1):
        if not isinstance(output, int):
            output = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(output, descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # which depends on the variable TMPDIR
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    is_module = argv[0] == "-m"
    sys.argv = list(argv[1:] if is_module else argv)
    launches = is_module and argv[1] in MODULES_THAT_LAUNCH and PROCESS_MARK not in environment
    _set_popen(_popen_or_fork if launches and "--child" not in argv else _POPEN)
    try:
        if is_module:
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def _descriptor(stream: _Stream, default: int) -> int:
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
    stdout: _Stream = None,
    stderr: _Stream = None,
    start_new_session: bool = False,
    **options: object,
) -> subprocess.Popen[bytes] | PythonProcess:
    """Start a command as `subprocess.Popen` does, but `python -m MODULE ...` by a fork.

    The launchers that tests run start their processes by this: each would import the libraries for
    longer than it runs.
    """
    module_words = [word for word in args[1:] if word != "-u"]
    output = _descriptor(stdout, default=1)
    errors = _descriptor(stderr, default=2)
    runs_module = args[0] == sys.executable and module_words[:1] == ["-m"]
    if options or min(output, errors) < 0 or not runs_module:
        return _POPEN(
            args,
            env=env,
            cwd=cwd,
            stdout=stdout,
            stderr=stderr,
            start_new_session=start_new_session,
            **options,
        )
    return PythonProcess(
        module_words,
        env or os.environ,
        stdout=output,
        stderr=errors,
        folder=cwd or ".",
        starts_session=start_new_session,
        from_this_process=True,
    )


def _set_popen(popen: object) -> None:
    """Let this process, and torch's launcher in it, start processes by `popen`."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess.Popen = popen  # type: ignore[assignment, misc]
    subprocess_handler.Popen = popen  # type: ignore[assignment, attr-defined]


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
