"""kill -9 in the middle of inference: what is there stays, nothing is asked twice, the end is the same file."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.unit import killed_infer

pytestmark = pytest.mark.slow

ANSWERS = killed_infer.PROBLEMS * killed_infer.SAMPLES
SECONDS_A_BATCH = 0.05


def start(output: Path, seconds_a_batch: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.unit.killed_infer", str(output), str(seconds_a_batch)]
    return subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL)


def rows_there(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def killed_beyond(output: Path, rows: int, extra_s: float) -> bool:
    """Start, kill -9 a moment after more than `rows` rows are there; whether it was still running."""
    process = start(output, SECONDS_A_BATCH)
    while rows_there(output / "predictions.jsonl") <= rows and process.poll() is None:
        time.sleep(0.002)  # polling a process, not waiting for luck
    time.sleep(extra_s)
    running = process.poll() is None
    process.kill()
    process.wait()
    return running


def test_three_kills_leave_the_file_of_an_uninterrupted_run(tmp_path: Path) -> None:
    killed_infer.main(tmp_path / "whole", 0.0)
    whole = (tmp_path / "whole" / "predictions.jsonl").read_bytes()
    draw = random.Random()  # another moment each time
    parts = tmp_path / "parts"
    seen = 0
    for _ in range(3):
        assert killed_beyond(parts, seen, draw.uniform(0, 2 * SECONDS_A_BATCH))
        before, seen = seen, rows_there(parts / "predictions.jsonl")
        assert before < seen < ANSWERS
        assert whole.startswith((parts / "predictions.jsonl").read_bytes().rpartition(b"\n")[0])
    assert start(parts, 0.0).wait() == 0
    assert (parts / "predictions.jsonl").read_bytes() == whole
    rows = [json.loads(line) for line in whole.splitlines()]
    assert len({(row["pid"], row.get("sample", 0)) for row in rows}) == len(rows) == ANSWERS
    assert sum(row["finish_reason"] == "image_failed" for row in rows) == ANSWERS // 10
