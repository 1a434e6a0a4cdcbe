"""SIGTERM and Ctrl-C: save at the next safe point, and say so with an exit code of its own."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: start the same command again
STOPPED_FILE = "stopped.json"  # in output_dir, as long as this is true: launchers replace the exit code by their own
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def mark_stopped(output_dir: Path, step: int) -> None:
    """For scripts that see the launcher's exit code only: the run was stopped by a signal and can be started again."""
    facts = {"exit_code": EXIT_STOPPED, "step": step, "checkpoint": f"{PREFIX_CHECKPOINT_DIR}-{step}"}
    (output_dir / STOPPED_FILE).write_text(json.dumps(facts) + "\n", encoding="utf-8")


class StopOnSignal(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """The first signal to any rank saves and ends the run after the optimizer step; a second one ends it at once.

    `cycle_steps`: stop on multiples of so many optimizer steps only.
    """

    def __init__(self, cycle_steps: int) -> None:
        self.cycle_steps = max(1, cycle_steps)
        self.received: int | None = None
        self.stopped = False
        self._before: dict[int, Any] = {}
        self._failed = False

    def __enter__(self) -> StopOnSignal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """After an error the launcher sends SIGTERM to all: it must not end the rank that says what happened, and
        there is nothing left to save.
        """
        self._failed = kind is not None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._handle)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All ranks agree, since a signal may reach them in different steps."""
        if state.global_step % self.cycle_steps:
            return
        mine = torch.tensor([int(self.received is not None)], device=PartialState().device)
        if bool(gather(mine).any()):
            self.stopped = True
            control.should_save = control.should_training_stop = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.received = number
        if not self._failed:
            print(f"{name}: saving after this step; a second one stops at once", file=sys.stderr, flush=True)
