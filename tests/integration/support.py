"""Running our commands as a user does, with what a failing test needs to show."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

REPOSITORY = Path(__file__).parents[2]


def run(
    command: list[str], *, timeout: int = 500, check: bool = True, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository; on failure the end of its output is the assertion's message."""
    ours = {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(REPOSITORY)}  # so that a script finds `tests`
    environment = {**os.environ, **ours, **(environment or {})}
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


# Where vLLM 0.31 (V1) asks for an image's features: the scheduler's books say that it has them, the runner has them not
# ("Encoder cache miss"), has others (an assertion without words), or as many as there are not places for.
_FEATURES = re.compile(
    r'^\s*File "[^"]*/vllm/.*, in (_gather_mm_embeddings|gather_mm_embeddings|_try_schedule_encoder_inputs|'
    r"check_and_update_cache|can_allocate|allocate|free_encoder_input|_merge_multimodal_embeddings)$"
    r"|^\S*(Error|Exception)\b.*encoder cache miss",
    re.MULTILINE | re.IGNORECASE,
)


def lost_image_features(output: str) -> bool:
    """Whether the engine ended with an error about its cache of image features, in whatever words."""
    return _FEATURES.search(re.sub(r"^\[rank\d+\]: ?", "", output, flags=re.MULTILINE)) is not None


def pids_with(mark: str) -> list[int]:
    """The processes that inherited `mark` in their environment; none that have ended."""
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


def history(folder: Path) -> list[dict[str, Any]]:
    """The lines of its log that are of training steps."""
    entries = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in entries if "reward" in entry]


def damage(split: Path, row: int) -> None:
    """Cut the image of a row short, in the Parquet file."""
    table = pq.read_table(split)
    rows = table.to_pylist()
    rows[row]["images"][0]["bytes"] = rows[row]["images"][0]["bytes"][:60]
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), split)
