"""What a run says while it runs: seconds by phase, one readable line, and a file of figures that survives a crash."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from adora_vl.errors import UserError
from adora_vl.rollout_log import backends
from adora_vl.rollout_log.backends import prepare_trackers
from adora_vl.rollout_log.metrics_file import MetricsFile, as_line, read_metrics, resumed_lines
from adora_vl.rollout_log.phases import PHASES, PhaseClock
from adora_vl.rollout_log.progress import ProgressLine, duration, progress_line


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_every_second_belongs_to_one_phase():
    clock = Clock()
    phases = PhaseClock(clock, settle=lambda: None)

    def spend(seconds: float) -> None:
        clock.now += seconds

    spend(1)  # loading data
    phases.enter("policy")
    with phases.phase("rollout"):
        spend(2)
        with phases.phase("sync"):
            spend(4)
        spend(8)
    with phases.phase("grading"):
        spend(16)
    spend(32)
    phases.leave()
    with phases.phase("rollout"):  # an evaluation between two steps
        spend(64)
    assert phases.take() == {"rollout": 10, "grading": 16, "policy": 32, "sync": 4, "other": 65}
    assert phases.take() == dict.fromkeys(PHASES, 0)


def test_a_phase_that_fails_gives_its_clock_back():
    clock = Clock()
    phases = PhaseClock(clock, settle=lambda: None)
    phases.enter("policy")
    with pytest.raises(RuntimeError), phases.phase("grading"):
        clock.now += 1
        raise RuntimeError
    clock.now += 2
    phases.leave()
    assert phases.take()["grading"] == 1 and phases.take()["policy"] == 0


LOGS = {
    "reward": 0.41234, "adora/pass_rate": 0.375, "adora/tds_share": 0.25, "completions/mean_length": 211.4,
    "adora/drift": 2.1e-6, "seconds/rollout": 12.34, "seconds/grading": 0.02, "seconds/policy": 7.5,
    "seconds/sync": 0.5, "seconds/other": 0.1, "grad_norm": 1.0,
}  # fmt: skip


def test_the_progress_line():
    assert progress_line(LOGS, 40, 1000, 185.2) == (
        "step   40/1000  reward 0.412  pass 38%  TDS 25%  length 211  drift 2e-06 | "
        "20 s: rollout 12 grading 0.02 policy 7.50 sync 0.50 other 0.10 | 3m05s left"
    )
    assert progress_line({"reward": 1.0, "adora/drift": None}, 1, 9, None) == "step 1/9  reward 1.000"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.4, "59s"), (60, "1m00s"), (7620, "2h07m"), (97200, "1d03h")]
)
def test_durations_as_a_person_writes_them(seconds, text):
    assert duration(seconds) == text


def arguments(folder: Path) -> SimpleNamespace:
    return SimpleNamespace(output_dir=str(folder), disable_tqdm=False)


def state(step: int, history: list[dict] | None = None, first: bool = True) -> SimpleNamespace:
    return SimpleNamespace(global_step=step, max_steps=10, log_history=history or [], is_world_process_zero=first)


def test_only_the_first_rank_speaks(tmp_path, capsys):
    for callback in (ProgressLine(), MetricsFile()):
        callback.on_train_begin(arguments(tmp_path), state(0, first=False), None)
        callback.on_step_end(arguments(tmp_path), state(1, first=False), None)
        callback.on_log(arguments(tmp_path), state(1, first=False), None, logs=LOGS)
        callback.on_train_end(arguments(tmp_path), state(1, first=False), None)
    assert capsys.readouterr() == ("", "") and list(tmp_path.iterdir()) == []


def test_a_log_file_gets_lines_and_no_bar(tmp_path, capsys):
    line = ProgressLine()
    line.on_train_begin(arguments(tmp_path), state(0), None)
    line.on_step_end(arguments(tmp_path), state(1), None)
    line.on_log(arguments(tmp_path), state(1), None, logs=LOGS)
    line.on_log(arguments(tmp_path), state(1), None, logs={"eval_geometry3k_accuracy": 0.5})
    line.on_train_end(arguments(tmp_path), state(1), None)
    out, err = capsys.readouterr()
    assert re.fullmatch(r"step  1/10  reward 0\.412 .* left\n", out) and err == ""


def test_metrics_are_appended_and_cut_back_to_the_resumed_step(tmp_path):
    """The lines of steps that a crash has undone go away, a half line too; nothing is there twice or missing."""
    file = MetricsFile()
    file.on_train_begin(arguments(tmp_path), state(0), None)
    for step in range(1, 6):
        file.on_log(arguments(tmp_path), state(step), None, logs={"reward": step / 10, "step_time": float(step)})
        file.on_log(arguments(tmp_path), state(step), None, logs={"eval_a_accuracy": 0.1})
        file.on_log(arguments(tmp_path), state(step), None, logs={"eval_b_accuracy": 0.2})
    path = tmp_path / "metrics.jsonl"
    before = read_metrics(path)
    with path.open("a") as stream:
        stream.write('{"step": 6, "kind": "tra')
    history = [{"step": step, "reward": step / 10} for step in (1, 2, 3)]
    file.on_train_begin(arguments(tmp_path), state(3, history), None)
    assert sorted(read_metrics(path), key=str) == sorted((line for line in before if line["step"] <= 3), key=str)
    file.on_log(arguments(tmp_path), state(4), None, logs={"reward": 0.4})
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3, 4]
    file.on_train_begin(arguments(tmp_path), state(0), None)
    assert path.read_text() == ""


def test_a_checkpoint_of_another_folder_brings_its_history():
    history = [{"step": 2, "reward": 0.2}, {"step": 2, "eval_a": 1.0}, {"step": 4, "reward": 0.4}]
    lines = resumed_lines([as_line({"reward": 0.25}, 2, "then")], history, 3)
    assert [(line["step"], line["kind"]) for line in lines] == [(2, "eval"), (2, "train")]
    assert lines[1]["reward"] == 0.25 and lines[1]["time"] == "then"  # the file's own line comes first


def test_figures_that_are_not_finite_are_null():
    line = as_line(
        {"reward": 1.0, "grad_norm": math.nan, "kl": math.inf, "note": "x", "off": None, "odd": [1]}, 1, None
    )
    assert (line["grad_norm"], line["kl"], line["note"], line["off"], line["odd"]) == (None, None, "x", None, "[1]")
    assert as_line({"train_runtime": 1.0, "reward": 1.0}, 1, None)["kind"] == "end"


def test_trackers_are_offline_and_installed(monkeypatch):
    environment: dict[str, str] = {}
    monkeypatch.setattr(backends, "find_spec", lambda name: object())
    prepare_trackers(["wandb", "trackio"], "out", environment)
    kept = str(Path.cwd() / "out" / "wandb")
    assert environment == {"WANDB_MODE": "offline", "WANDB_DIR": "out", "WANDB_DATA_DIR": kept}
    environment = {"WANDB_MODE": "online"}
    prepare_trackers(["wandb"], "out", environment)
    assert environment["WANDB_MODE"] == "online"
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^report_to: 'tensorboard' is not installed; pip install tensorboard"):
        prepare_trackers(["tensorboard"], "out", environment)
