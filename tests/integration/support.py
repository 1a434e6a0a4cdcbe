"""Running our commands as a user does, with what a failing test needs to show."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


def run(
    command: list[str], *, timeout: int = 500, check: bool = True, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository; on failure the end of its output is the assertion's message."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", **(environment or {})}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    if check:
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-1500:]}\n{done.stderr[-4000:]}"
    return done


def launch(config: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """`accelerate launch` with one of the shipped accelerate configs; `options` are those of `run`."""
    accelerate = str(Path(sys.executable).parent / "accelerate")
    file = REPOSITORY / "configs" / "accelerate" / f"{config}.yaml"
    return run([accelerate, "launch", "--config_file", str(file), *arguments], **options)


def pids_with(mark: str) -> list[int]:
    """The processes that inherited `mark` in their environment, graders' workers among them; none that have ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def processes_with(mark: str) -> list[str]:
    """The command lines of the processes that inherited `mark`; they may take a moment to end."""
    for _ in range(50):
        found = []
        for pid in pids_with(mark):
            with contextlib.suppress(OSError):
                found.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
        if not found:
            break
        time.sleep(0.2)
    return found
