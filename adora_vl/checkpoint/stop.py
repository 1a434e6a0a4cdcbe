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
from adora_vl.utils.launch import (
    SHORT_SHUTDOWN_WARNING,
    launcher_kills_early,
    under_elastic,
)
from adora_vl.utils.outputs import redirect_closed_outputs

EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: start the same command again
# A file in the output_dir of a stopped run, because launchers replace the exit code by their own.
STOPPED_FILE = "stopped.json"
# The launcher repeats a signal that all processes got; within this time both count as one.
REPEATED_SIGNAL_S = 10.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def mark_stopped(output_dir: Path, step: int) -> None:
    """Write `stopped.json`, which says that a signal stopped the run and that it can be resumed.

    It is for scripts that see the launcher's exit code instead of the run's. `step`: the optimizer
    step of the checkpoint.
    """
    content = {
        "exit_code": EXIT_STOPPED,
        "step": step,
        "checkpoint": f"{PREFIX_CHECKPOINT_DIR}-{step}",
    }
    replace_file(output_dir / STOPPED_FILE, json.dumps(content) + "\n")


class StopOnSignal(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """The first signal to any rank saves and ends the run after the current optimizer step.

    A signal that comes `REPEATED_SIGNAL_S` seconds later or more ends it at once, except SIGHUP:
    closing a terminal does not mean that.
    """

    def __init__(self) -> None:
        """Begin without a signal. The handlers are installed when the training begins."""
        # The number of the first signal to this process; None before it.
        self.received_signal: int | None = None
        # Whether a signal to one of the ranks stops the run, as all ranks have agreed.
        self.stopped = False
        # When the first signal came, in seconds of the monotonic clock.
        self._received_at = 0.0
        # The handlers that were installed before, by signal; they are restored at the end.
        self._handlers_before: dict[int, Any] = {}
        # Whether an error has ended the training.
        self._has_failed = False

    def __enter__(self) -> StopOnSignal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Remember whether the training failed.

        After an error the launcher sends SIGTERM to all ranks. The rank that reports the error then
        does not print that it saves a checkpoint.
        """
        self._has_failed = kind is not None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Install the handlers of the signals that stop a run."""
        # Under nohup a run ignores SIGHUP. With torch's elastic launcher it does not, since the
        # launcher handles SIGHUP even then, and kills processes that do not end.
        ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN and not under_elastic()
        for signal_number in _STOP_SIGNALS:
            if signal_number == signal.SIGHUP and ignores_hangup:
                continue
            self._handlers_before[signal_number] = signal.signal(signal_number, self._handle)
        # The launcher's time between SIGTERM and SIGKILL may be too short for a checkpoint.
        if state.is_world_process_zero and launcher_kills_early():
            print(SHORT_SHUTDOWN_WARNING, file=sys.stderr, flush=True)

    def release(self) -> None:
        """Restore the signal handlers, when all ranks have written everything.

        A run that a signal has stopped ignores further signals instead. The launcher sends a signal
        to the other ranks as soon as the first rank has ended, which would change their exit code.
        """
        was_stopped = self.stopped or self.received_signal is not None
        for signal_number, handler_before in self._handlers_before.items():
            signal.signal(signal_number, signal.SIG_IGN if was_stopped else handler_before)
        self._handlers_before.clear()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Have the trainer save, and then stop, if any rank has received a signal.

        Collective: the ranks decide together, because a signal may reach them in different steps.
        """
        # This comes before anything is logged. Writing to a closed terminal would fail, and a
        # terminal is closed before its SIGHUP arrives.
        redirect_closed_outputs()
        has_signal = torch.tensor(
            [int(self.received_signal is not None)], device=PartialState().device
        )
        if bool(gather(has_signal).any()):
            self.stopped = True
            control.should_save = True

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Stop the training once the checkpoint is written.

        Not before: a checkpoint notes whether the training has ended, and this one is to go on.
        """
        if self.stopped:
            control.should_training_stop = True

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        """Remember the first signal; end the process at a signal that comes much later.

        A signal within `REPEATED_SIGNAL_S` seconds counts as the first one, since launchers repeat
        a signal. SIGHUP never ends the process, since a launcher that dies may send it several
        times.

        `signal_number`: such as `signal.SIGTERM`. `frame`: where the signal has come, not read.
        """
        redirect_closed_outputs()
        if self.received_signal is not None:
            seconds_since_first = time.monotonic() - self._received_at
            if signal_number != signal.SIGHUP and seconds_since_first >= REPEATED_SIGNAL_S:
                # Send it again with the default handler, which ends the process.
                signal.signal(signal_number, signal.SIG_DFL)
                os.kill(os.getpid(), signal_number)
            return
        self.received_signal = signal_number
        self._received_at = time.monotonic()
        if self._has_failed:
            return
        line = (
            f"{signal.Signals(signal_number).name}: saving after this optimizer step; another signal, "
            f"{REPEATED_SIGNAL_S:.0f} seconds from now or later, ends the run at once\n"
        )
        # Written to file descriptor 2, stderr, because the signal may have interrupted a `print`.
        with contextlib.suppress(OSError):
            os.write(2, line.encode())
