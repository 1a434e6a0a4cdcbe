"""A training command in a terminal of its own that runs until something stops it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from adora_vl.record.metrics import METRICS_FILE, read_metrics
from tests.support.launch import pids_marked_with
from tests.support.paths import REPOSITORY

_DEADLINE_S = 300  # for anything that a run does; a run that hangs fails the test after it
ACCELERATE_LAUNCH = [str(Path(sys.executable).parent / "accelerate"), "launch", "--config_file"]


class RunningCommand:
    """A training under `accelerate launch` in a terminal, for tests that stop it.

    `output` is what all its processes have printed so far. After the `with` block none is left.
    """

    def __init__(self, config: str, output_dir: Path, argv: list[str]) -> None:
        self.output_dir = output_dir
        self._mark = uuid.uuid4().hex
        self._output_bytes = b""
        self._test_end: int | None
        # The command writes into one end of the terminal, and the test reads from the other.
        self._test_end, command_end = pty.openpty()
        file = str(REPOSITORY / "configs" / "accelerate" / f"{config}.yaml")
        self.launcher = subprocess.Popen(
            [
                *ACCELERATE_LAUNCH,
                file,
                "-m",
                "adora_vl.train",
                *argv,
                "--output_dir",
                str(output_dir),
            ],
            cwd=REPOSITORY,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "TEST_MARK": self._mark},
            stdin=command_end,
            stdout=command_end,
            stderr=command_end,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(
                0, termios.TIOCSCTTY, 0
            ),  # or Ctrl-C and its end would be no signals
        )
        os.close(command_end)

    def __enter__(self) -> RunningCommand:
        return self

    def __exit__(self, *error: object) -> None:
        for pid in pids_marked_with(self._mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.launcher.wait()
        self.close_terminal()

    @property
    def output(self) -> str:
        """What all processes have printed so far."""
        while self._test_end is not None and select.select([self._test_end], [], [], 0)[0]:
            try:
                self._output_bytes += os.read(self._test_end, 1 << 16)
            except OSError:  # the last process has let go of the terminal
                break
        return self._output_bytes.decode(errors="replace")

    def wait_until(self, happened: Callable[[], bool], event: str) -> None:
        """Wait until `happened()` is true.

        The output is read meanwhile, since a process whose terminal is full would block. `event`:
        what is waited for, for the message; "end" if the command may end before.
        """
        end = time.monotonic() + _DEADLINE_S
        while not happened():
            assert time.monotonic() < end, (
                f"not within {_DEADLINE_S} s: {event}\n{self.output[-3000:]}"
            )
            assert self.launcher.poll() is None or event == "end", (
                f"ended before: {event}\n{self.output[-3000:]}"
            )
            select.select([self._test_end] if self._test_end is not None else [], [], [], 0.1)
            _ = self.output

    def wait_for_step(self, step: int) -> None:
        """Wait until the metrics of an optimizer step are written."""
        file = self.output_dir / METRICS_FILE
        self.wait_until(
            lambda: any(line["step"] >= step for line in read_metrics(file)), f"step {step}"
        )

    def wait_for_output(self, text: str, times: int) -> None:
        """Wait until the output has a text at least `times` times."""
        self.wait_until(lambda: self.output.count(text) >= times, text)

    def wait_for_the_end(self) -> int:
        """Wait for the end of all processes, not of the launcher alone; return the exit code."""
        self.wait_until(
            lambda: self.launcher.poll() is not None and not pids_marked_with(self._mark), "end"
        )
        return self.launcher.wait()

    def signal_everybody(self, signal_number: int) -> None:
        """Send a signal to every process, as Slurm and systemd do."""
        for pid in pids_marked_with(self._mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)

    def press_ctrl_c(self) -> None:
        """Press Ctrl-C in the terminal, which sends SIGINT to all its processes."""
        assert self._test_end is not None
        os.write(self._test_end, b"\x03")

    def close_terminal(self) -> None:
        """Close the terminal, as a lost ssh connection does."""
        if self._test_end is not None:
            os.close(self._test_end)
            self._test_end = None
