"""Running our commands as a user does, with what a failing test needs to show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def run(command: list[str], *, timeout: int = 500, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository; on failure the end of its output is the assertion's message."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    if check:
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-1500:]}\n{done.stderr[-4000:]}"
    return done


def launch(config: str, *arguments: str, timeout: int = 500, check: bool = True) -> subprocess.CompletedProcess[str]:
    """`accelerate launch` with one of the shipped accelerate configs."""
    accelerate = str(Path(sys.executable).parent / "accelerate")
    file = REPOSITORY / "configs" / "accelerate" / f"{config}.yaml"
    return run([accelerate, "launch", "--config_file", str(file), *arguments], timeout=timeout, check=check)
