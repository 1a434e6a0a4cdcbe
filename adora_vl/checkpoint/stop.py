"""SIGTERM, SIGHUP and Ctrl-C: save at the next safe point, and end with a special exit code."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from adora_vl.utils.files import replace_file
from adora_vl.utils.launch import TOO_SHORT, kills_too_early, mute_lost_outputs, under_elastic

EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: start the same command again
# A file in the output_dir of a stopped run, because launchers replace the exit code by their own.
STOPPED_FILE = "stopped.json"
# The launcher repeats a signal that all processes got; within this time both count as one.
REPEAT_S = 10.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def mark_stopped(output_dir: Path, step: int) -> None:
    """Write a file which says that a signal stopped the run, and that it can be started again.

    It is for scripts that only see the exit code of the launcher.
    """
    facts = {
        "exit_code": EXIT_STOPPED,
        "step": step,
        "checkpoint": f"{PREFIX_CHECKPOINT_DIR}-{step}",
    }
    replace_file(output_dir / STOPPED_FILE, json.dumps(facts) + "\n")


class StopOnSignal(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """The first signal to any rank saves and ends the run after the current optimizer step.

    A signal that comes `REPEAT_S` seconds later or more ends it at once, except SIGHUP: closing a
    terminal does not mean that.
    """

    def __init__(self) -> None:
        """Begin without a signal."""
        self.received: int | None = None
        self.stopped = False
        self._received_at = 0.0
        self._before: dict[int, Any] = {}
        self._failed = False

    def __enter__(self) -> StopOnSignal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Remember whether the training failed.

        After an error the launcher sends SIGTERM to all ranks, which must not end the rank that
        reports the error.
        """
        self._failed = kind is not None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Install the handlers of the signals."""
        for number in _SIGNALS:
            # nohup ignores SIGHUP, but torch's launcher handles it all the same and kills processes
            # that outlast it
            if (
                number == signal.SIGHUP
                and signal.getsignal(number) is signal.SIG_IGN
                and not under_elastic()
            ):
                continue
            self._before[number] = signal.signal(number, self._handle)
        if state.is_world_process_zero and kills_too_early():
            print(TOO_SHORT, file=sys.stderr, flush=True)

    def release(self) -> None:
        """Restore the handlers when all ranks have written everything.

        A stopped run ignores signals from now on, so that its exit code stays: the launcher sends
        one to the others as soon as the first rank has ended.
        """
        was_stopped = self.stopped or self.received is not None
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if was_stopped else handler)
        self._before.clear()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save and stop if any rank has received a signal.

        Collective: the ranks agree on it, because a signal may reach them in different steps.
        """
        # before anything is logged: a closed terminal is gone before its SIGHUP is passed on
        mute_lost_outputs()
        mine = torch.tensor([int(self.received is not None)], device=PartialState().device)
        if bool(gather(mine).any()):
            self.stopped = True
            control.should_save = control.should_training_stop = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Note the first signal; end the process at once for a later one.

        SIGHUP never ends it, since a launcher that dies may send several.
        """
        mute_lost_outputs()
        if self.received is not None:
            if number != signal.SIGHUP and time.monotonic() - self._received_at >= REPEAT_S:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self.received = number
        self._received_at = time.monotonic()
        if not self._failed:
            line = f"{signal.Signals(number).name}: saving after this optimizer step; "
            line += (
                f"another signal, {REPEAT_S:.0f} seconds from now or later, ends the run at once\n"
            )
            with contextlib.suppress(OSError):
                # a handler may not print: it may have interrupted a print
                os.write(2, line.encode())
