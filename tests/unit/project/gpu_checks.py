"""Checks that go wrong in one way each, for `test_gpu.py`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import torch

from benchmarks.gpu.setting import Setting
from benchmarks.gpu.table import Line, at_most, skipped


def fine(setting: Setting) -> Iterator[Line]:
    yield at_most("one", 1.0, 2.0, "s", "a test")


def out_of_memory(setting: Setting) -> Iterator[Line]:
    yield at_most("one", 1.0, 2.0, "s", "a test")
    raise torch.OutOfMemoryError("tried to allocate\n 80 GiB")


def killed(setting: Setting) -> Iterator[Line]:
    yield at_most("one", 1.0, 2.0, "s", "a test")
    os.kill(os.getpid(), signal.SIGKILL)


def visible(setting: Setting) -> Iterator[Line]:
    yield skipped("cards", os.environ.get("CUDA_VISIBLE_DEVICES", "all of them"))


def hangs(setting: Setting) -> Iterator[Line]:
    threading.Event().wait()
    yield at_most("never", 1.0, 2.0, "s", "a test")
