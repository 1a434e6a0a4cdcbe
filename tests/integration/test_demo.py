"""The demo as a user runs it, and what it promises."""

import json
import sys

import pytest

from adora_vl.models.load import PRETRAINED
from adora_vl.record.metrics import METRICS, read_metrics
from tests.integration.support import run

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1500)
def test_the_demo_shows_what_attenuation_is_for(tmp_path):
    """GRPO gives the workings up and ends with guesses; ADORA keeps them and ends clearly higher."""
    done = run(["bash", "setup/demo.sh", str(tmp_path)], timeout=1400)
    scores = {name: json.loads((tmp_path / name / "score.json").read_text()) for name in ("after-grpo", "after-adora")}
    assert scores["after-grpo"]["total"] == scores["after-adora"]["total"] >= 400
    assert scores["after-grpo"]["wilson_95"][1] < scores["after-adora"]["wilson_95"][0]
    assert scores["after-adora"]["accuracy"] - scores["after-grpo"]["accuracy"] >= 0.15
    logs = {name: [line for line in read_metrics(tmp_path / name / METRICS) if line["kind"] == "train"]
            for name in ("grpo", "adora")}  # fmt: skip
    worked = {name: lines[-1]["grading/worked"] for name, lines in logs.items()}
    assert 0.3 < logs["grpo"][0]["grading/worked"] < 0.7, "the start knows both ways"
    assert worked["grpo"] < 0.1 and worked["adora"] > 0.9, worked
    learned = done.stdout[done.stdout.index("held-out accuracy") :]
    assert "    usual" in learned and "    any" in learned and "after - GRPO: " in learned
    assert "warning" not in learned, "the scores are of other problems or settings"
    assert "built to show the mechanism" in done.stdout
    assert (tmp_path / "report.html").stat().st_size > 100_000
    print(learned)


def test_the_shipped_model_starts_with_room_to_learn(tmp_path):
    """Sampling solves 20 to 50 % of the held-out problems: groups then have right and wrong rollouts to compare."""
    data = str(tmp_path / "data")
    run([sys.executable, "-m", "data_prep", "synthetic", "--output", data, "--rows", "1", "--test-rows", "600"])
    command = ["-m", "eval.geometry3k", "run", "--model", str(PRETRAINED), "--data", data]
    run([sys.executable, *command, "--output", str(tmp_path / "out"), "--temperature", "1", "--max-tokens", "48"])
    assert 0.2 <= json.loads((tmp_path / "out" / "score.json").read_text())["accuracy"] <= 0.5
