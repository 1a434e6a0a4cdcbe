"""The demo as a user runs it, and what it promises: the tiny model learns geometry that it was not shown."""

from __future__ import annotations

import json
import sys

import pytest

from adora_vl.models.tiny.build import PRETRAINED
from tests.integration.support import run

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1200)
def test_the_demo_learns(tmp_path):
    done = run(["bash", "setup/demo.sh", str(tmp_path)], timeout=1100)
    before, after = (json.loads((tmp_path / name / "score.json").read_text()) for name in ("before", "after"))
    assert before["total"] == after["total"] >= 500
    assert after["accuracy"] - before["accuracy"] >= 0.20
    assert before["wilson_95"][1] < after["wilson_95"][0]
    assert "The two intervals do not overlap." in done.stdout
    learned = done.stdout[done.stdout.index("held-out accuracy") :]
    assert "    vertical" in learned and "    supplementary" in learned  # what is lost in one kind is visible
    assert "after - GRPO: " in learned and "GRPO was not run now: it is stored" in learned
    assert "warning" not in learned, "the scores are of other problems or settings"
    assert "Trained 100 steps" in done.stdout and "step 100/100  reward" in done.stdout
    assert (tmp_path / "report.html").stat().st_size > 100_000
    print(learned)


def test_the_shipped_model_starts_with_room_to_learn(tmp_path):
    """Sampling solves 20 to 50 % of the held-out problems: groups then have right and wrong rollouts to compare."""
    data = str(tmp_path / "data")
    run([sys.executable, "-m", "data_prep", "synthetic", "--output", data, "--rows", "1", "--test-rows", "600"])
    command = ["-m", "eval.geometry3k", "run", "--model", str(PRETRAINED), "--data", data]
    run([sys.executable, *command, "--output", str(tmp_path / "out"), "--temperature", "1", "--max-tokens", "48"])
    assert 0.2 <= json.loads((tmp_path / "out" / "score.json").read_text())["accuracy"] <= 0.5
