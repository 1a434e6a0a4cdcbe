"""Checks that go wrong in one way each, for `tests/unit/project/test_gpu.py`."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu.setting import Setting
from benchmarks.gpu.table import CheckLine, at_most_line, skipped_line


def fine(setting: Setting) -> Iterator[CheckLine]:
    """Yield one line, which is fine."""
    yield at_most_line("one", 1.0, 2.0, "s", "a test")


def out_of_memory(setting: Setting) -> Iterator[CheckLine]:
    """Yield one line, and run out of memory, with an error of two lines."""
    yield at_most_line("one", 1.0, 2.0, "s", "a test")
    raise torch.OutOfMemoryError("tried to allocate\n 80 GiB")


def killed(setting: Setting) -> Iterator[CheckLine]:
    """Yield one line, and kill the process."""
    yield at_most_line("one", 1.0, 2.0, "s", "a test")
    os.kill(os.getpid(), signal.SIGKILL)


def visible(setting: Setting) -> Iterator[CheckLine]:
    """Yield one line that repeats CUDA_VISIBLE_DEVICES."""
    yield skipped_line("cards", os.environ.get("CUDA_VISIBLE_DEVICES", "all of them"))


def killed_while_it_compiles(setting: Setting) -> Iterator[CheckLine]:
    """Leave what torch leaves when it is killed while it compiles an operator.

    Beside it stands an operator that another check has compiled.
    """
    for name, file in (("finished", "finished.so"), ("half", "lock")):
        folder = Path(os.environ["TORCH_EXTENSIONS_DIR"], name)
        folder.mkdir(parents=True)
        (folder / file).touch()
    yield from killed(setting)


def finds_compiled(setting: Setting) -> Iterator[CheckLine]:
    """Yield one line with the names of the compiled operators."""
    yield skipped_line(
        "compiled",
        " ".join(sorted(path.name for path in Path(os.environ["TORCH_EXTENSIONS_DIR"]).iterdir())),
    )


def hangs(setting: Setting) -> Iterator[CheckLine]:
    """Never come to the first line."""
    threading.Event().wait()
    yield at_most_line("never", 1.0, 2.0, "s", "a test")


def interrupts_its_command(setting: Setting) -> Iterator[CheckLine]:
    """Yield one line with the id of this process, end the command as `timeout` does, and go on."""
    yield skipped_line("process", "a test", str(os.getpid()))
    for _ in range(2):
        os.kill(os.getppid(), signal.SIGTERM)
    yield from hangs(setting)
