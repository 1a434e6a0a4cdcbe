"""A run with trackers: each has our figures, and what it has room for of images and rollouts. Nothing is sent.

A tracker that is not installed (the extra `trackers`) is left out, and its tests say so.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from adora_vl.rollout_log import backends
from adora_vl.rollout_log.completions_table import conversation_text
from adora_vl.rollout_log.metrics_file import read_metrics
from adora_vl.train import main
from tests.tiny_run import arguments

TRACKERS = [name for name in ("tensorboard", "wandb", "trackio") if find_spec(name)]
STEPS, ROLLOUTS = 2, 16
TABLES = STEPS + 1  # TRL repeats the last one at the end of a run
FIGURE = "adora/pass_rate"


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(name not in TRACKERS, reason=f"{name} is not installed: pip install '.[trackers]'")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run with all trackers that are there. It is a process of its own, since trackio reads its folder's name when
    it is imported.
    """
    folder = tmp_path_factory.mktemp("run") / "tracked"
    words = arguments(
        folder, max_steps=STEPS, save_strategy="no", report_to=",".join(TRACKERS), log_completions="true",
        run_name="first", project="tracked",
    )  # fmt: skip
    offline = {
        "TRACKIO_DIR": str(folder.parent / "trackio"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path),
        "TERM": "dumb",
    }  # fmt: skip
    command = [sys.executable, "-m", "adora_vl.train", *words]
    subprocess.run(command, check=True, env={**os.environ, **offline}, stdin=subprocess.DEVNULL)
    return folder


def figures(run: Path) -> list[float]:
    """What metrics.jsonl has, which the trackers have to repeat."""
    found = [line[FIGURE] for line in read_metrics(run / "metrics.jsonl") if FIGURE in line]
    assert len(found) == STEPS
    return found


@needs("tensorboard")
@pytest.mark.slow
def test_tensorboard_has_our_figures(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = run.rglob("events.out.tfevents.*")
    read = EventAccumulator(str(events.parent))
    read.Reload()
    scalars = read.Scalars(f"train/{FIGURE}")
    assert [one.step for one in scalars] == [1, 2] and [one.value for one in scalars] == pytest.approx(figures(run))
    assert {"train/reward", "train/grading/correct", "train/seconds/rollout"} <= set(read.Tags()["scalars"])


@needs("wandb")
@pytest.mark.slow
def test_wandb_has_them_with_rollouts_and_images_and_stays_offline(run):
    (folder,) = (run / "wandb").glob("offline-run-*")
    assert FIGURE.encode() in next(folder.glob("*.wandb")).read_bytes()
    staged = [path.read_bytes() for path in (run / "wandb" / "artifacts" / "staging").iterdir()]
    tables = [json.loads(content) for content in staged if content.startswith(b"{")]
    tables = [table for table in tables if table["nrows"]]
    assert len(tables) >= STEPS
    for table in tables:
        rows = [dict(zip(table["columns"], values, strict=True)) for values in table["data"]]
        assert len(rows) == ROLLOUTS
        for row in rows:
            assert "<image>" in row["prompt"] and isinstance(row["adora_weight"], float) and row["verdict"]
            (image,) = row["image"]
            assert image["path"].startswith("media/images/") and image["width"] > 0
    assert any(content.startswith(b"\x89PNG") for content in staged)


@needs("trackio")
@pytest.mark.slow
def test_trackio_has_them_with_rollouts_and_images_and_stays_here(run):
    folder = run.parent / "trackio"
    with sqlite3.connect(folder / "tracked.db") as database:
        lines = [json.loads(text) for (text,) in database.execute("select metrics from metrics order by id")]
    assert [line[f"train/{FIGURE}"] for line in lines if f"train/{FIGURE}" in line] == pytest.approx(figures(run))
    tables = [line["completions"]["_value"] for line in lines if "completions" in line]
    assert [len(table) for table in tables] == [ROLLOUTS] * TABLES
    for row in (row for table in tables for row in table):
        assert "<image>" in row["prompt"] and row["verdict"]
        (image,) = row["image"]
        assert (folder / "media" / image["file_path"]).is_file()


@pytest.mark.parametrize(("name", "package"), [("wandb", "wandb"), ("mlflow", "mlflow"), ("flyte", "flytekit")])
def test_a_tracker_that_is_not_installed_is_one_line_before_anything_is_loaded(
    name, package, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    monkeypatch.setattr("adora_vl.assets.resolve_model", lambda name: pytest.fail("a model was looked for"))
    assert main(arguments(tmp_path / "run", report_to=name)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: report_to: '{name}' is not installed; pip install {package}, or leave it out")
    assert not (tmp_path / "run").exists()


def test_every_tracker_of_transformers_is_known():
    from transformers.integrations import INTEGRATION_TO_CALLBACK

    assert set(INTEGRATION_TO_CALLBACK) - {"kubeflow"} <= set(backends._PACKAGES)  # kubeflow's comes with its cluster


def test_a_prompt_as_a_text():
    image = {"type": "image"}
    messages = [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": [image, {"type": "text", "text": "Find x in "}, image]},
    ]
    assert conversation_text(messages) == "system: Think.\n\nuser: <image>Find x in <image>"
    assert conversation_text("plain") == "plain" and conversation_text([]) == ""
