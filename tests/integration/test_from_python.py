"""The trainer as a drop-in for TRL's, by the lines that the documentation shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

ROOT = Path(__file__).parents[2]


def documented() -> str:
    """The Python block of the quickstart."""
    text = (ROOT / "docs" / "quickstart.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return str(block)


def test_the_package_shows_its_classes_and_stays_light_until_they_are_asked_for():
    code = (
        "import sys, adora_vl\n"
        "assert 'torch' not in sys.modules and 'trl' not in sys.modules\n"
        "assert {'AdoraGRPOTrainer', 'AdoraGRPOConfig'} <= set(dir(adora_vl))\n"
        "try:\n    adora_vl.AdoraTrainer\nexcept AttributeError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "module 'adora_vl' has no attribute 'AdoraTrainer'\n"


def test_the_documented_lines_train_and_record(tmp_path):
    """Own column, two images, three turns, own reward: trained for two steps, and recorded with all of it."""
    lines = documented()
    assert len([line for line in lines.splitlines() if line.strip()]) <= 15
    script = tmp_path / "own.py"
    script.write_text(lines.replace("runs/python", str(tmp_path / "out")))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["kind"] == "end" and metrics[-1]["step"] == 2
    rollouts = pq.read_table(tmp_path / "out" / "rollouts").to_pylist()
    assert len(rollouts) == 16 and {row["problem"] for row in rollouts} == {"Which one is darker?"}
    assert all(len(row["images"]) == 2 and row["answer"] is None for row in rollouts)
    assert all(row["reward"] == row["reward/brief"] for row in rollouts)
