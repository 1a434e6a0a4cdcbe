"""Trackers: each has our metrics, and what it can take of images and rollouts; nothing is sent."""

import json
import math
import os
import sqlite3
import subprocess
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from adora_vl.record import trackers as backends
from adora_vl.record.metrics import read_metrics
from adora_vl.record.shown_metrics import PASS_RATE_KEY
from adora_vl.record.trackers import (
    prepare_trackers,
    restore_table,
    table_to_json,
    unify_message_contents,
)
from adora_vl.train import main
from tests.support.tiny_run import tiny_run_arguments

INSTALLED_TRACKERS = [name for name in ("tensorboard", "wandb", "trackio") if find_spec(name)]
STEP_COUNT = 2
ROLLOUTS_PER_STEP = 16
TABLES_PER_RUN = STEP_COUNT + 1  # TRL repeats the last one at the end of a run


def needs_tracker(name: str) -> pytest.MarkDecorator:
    """Skips a test where this tracker is not installed."""
    return pytest.mark.skipif(
        name not in INSTALLED_TRACKERS, reason=f"{name} is not installed: pip install '.[trackers]'"
    )


@pytest.fixture(scope="module")
def tracked_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run with all trackers that are installed, and return its folder.

    It is a process of its own, since trackio reads its folder's name when it is imported.
    """
    folder = tmp_path_factory.mktemp("run") / "tracked"
    arguments = tiny_run_arguments(
        folder,
        max_steps=STEP_COUNT,
        save_strategy="no",
        report_to=",".join(INSTALLED_TRACKERS),
        log_completions="true",
        run_name="first",
        project="tracked",
    )
    offline = {
        "TRACKIO_DIR": str(folder.parent / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TERM": "dumb",
    }
    command = [sys.executable, "-m", "adora_vl.train", *arguments]
    subprocess.run(command, check=True, env={**os.environ, **offline}, stdin=subprocess.DEVNULL)
    return folder


def logged_pass_rates(tracked_run: Path) -> list[float]:
    """Return the pass rate of each step in metrics.jsonl, which the trackers have to repeat."""
    values = [
        line[PASS_RATE_KEY]
        for line in read_metrics(tracked_run / "metrics.jsonl")
        if PASS_RATE_KEY in line
    ]
    assert len(values) == STEP_COUNT
    return values


@needs_tracker("tensorboard")
@pytest.mark.slow
def test_tensorboard_has_our_metrics(tracked_run):
    """Our metrics stand beside those of TRL, under `train/`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = tracked_run.rglob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(events.parent))
    accumulator.Reload()
    scalars = accumulator.Scalars(f"train/{PASS_RATE_KEY}")
    assert [scalar.step for scalar in scalars] == [1, 2]
    assert [scalar.value for scalar in scalars] == pytest.approx(logged_pass_rates(tracked_run))
    assert {"train/reward", "train/grading/correct", "train/seconds/rollout"} <= set(
        accumulator.Tags()["scalars"]
    )


@needs_tracker("wandb")
@pytest.mark.slow
def test_wandb_has_them_with_rollouts_and_images_and_stays_offline(tracked_run):
    """wandb keeps what it would upload in a staging folder, the table of rollouts as JSON."""
    (folder,) = (tracked_run / "wandb").glob("offline-run-*")
    assert PASS_RATE_KEY.encode() in next(folder.glob("*.wandb")).read_bytes()
    staged = [
        path.read_bytes() for path in (tracked_run / "wandb" / "artifacts" / "staging").iterdir()
    ]
    tables = [json.loads(content) for content in staged if content.startswith(b"{")]
    tables = [table for table in tables if table["nrows"]]
    assert len(tables) >= STEP_COUNT
    for table in tables:
        rows = [dict(zip(table["columns"], values, strict=True)) for values in table["data"]]
        assert len(rows) == ROLLOUTS_PER_STEP
        for row in rows:
            assert "<image>" in row["prompt"]
            assert isinstance(row["adora_weight"], float)
            assert row["verdict"]
            (image,) = row["image"]
            assert image["path"].startswith("media/images/")
            assert image["width"] > 0
    assert any(content.startswith(b"\x89PNG") for content in staged)


@needs_tracker("trackio")
@pytest.mark.slow
def test_trackio_has_metrics_rollouts_and_images_on_this_machine(tracked_run):
    """trackio writes a SQLite database beside the run, with the pictures in files beside it."""
    folder = tracked_run.parent / "trackio"  # `tracked_run` is the run's `output_dir`
    with sqlite3.connect(folder / "tracked.db") as database:
        lines = [
            json.loads(text)
            for (text,) in database.execute("select metrics from metrics order by id")
        ]
    assert [
        line[f"train/{PASS_RATE_KEY}"] for line in lines if f"train/{PASS_RATE_KEY}" in line
    ] == pytest.approx(logged_pass_rates(tracked_run))
    tables = [line["completions"]["_value"] for line in lines if "completions" in line]
    assert [len(table) for table in tables] == [ROLLOUTS_PER_STEP] * TABLES_PER_RUN
    for row in (row for table in tables for row in table):
        assert "<image>" in row["prompt"]
        assert row["verdict"]
        (image,) = row["image"]
        assert (folder / "media" / image["file_path"]).is_file()


def test_a_tracker_that_is_not_installed_is_one_line_before_anything_is_loaded(
    tmp_path, monkeypatch, capsys
):
    """Here no tracker is installed, and a model that is looked for fails the test."""
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    monkeypatch.setattr(
        "adora_vl.preflight.check_model.resolve_model",
        lambda name: pytest.fail("a model was looked for"),
    )
    for name, package in (
        ("wandb", "wandb"),
        ("mlflow", "mlflow"),
        ("flyte", "flytekit"),
    ):
        assert main(tiny_run_arguments(tmp_path / "run", report_to=name)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(
            f"error: report_to: '{name}' is not installed; pip install {package}, or leave it out"
        )
    assert not (tmp_path / "run").exists()


def test_trackers_are_offline(monkeypatch):
    """wandb is set to be offline, unless the user has set WANDB_MODE."""
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    prepare_trackers(["wandb", "trackio"], "out")
    folder = str(Path.cwd() / "out" / "wandb")
    assert environment == {"WANDB_MODE": "offline", "WANDB_DIR": "out", "WANDB_DATA_DIR": folder}
    environment["WANDB_MODE"] = "online"
    prepare_trackers(["wandb"], "out")
    assert environment["WANDB_MODE"] == "online"


def empty_logs(size: int = 2) -> dict[str, Any]:
    """Build an empty table of completions, TRL's `_logs`, for `size` rows."""
    column: Callable[[], deque[Any]] = partial(deque, maxlen=size)
    return {
        "images": column(),
        "prompt": column(),
        "completion": column(),
        "rewards": defaultdict(column),
        "advantages": column(),
        "extra": defaultdict(column),
    }


def test_what_was_kept_comes_back():
    """TRL's table of the last completions goes into a checkpoint as JSON, and back into `_logs`."""
    full = empty_logs()
    full["prompt"].extend([[{"role": "user", "content": [{"type": "image"}]}], "text"])
    full["completion"].extend(["a", "b"])
    full["rewards"]["accuracy"].extend([1.0, float("nan")])
    full["advantages"].extend([0.1 + 0.2, -1.0])
    full["extra"]["mine"].extend([np.float32(0.5), {1, 2}])
    stale = empty_logs()
    stale["completion"].extend(["of another", "generation"])
    restore_table(table_to_json(full), stale)
    assert stale["prompt"] == full["prompt"]
    assert stale["completion"] == full["completion"]
    assert stale["advantages"] == full["advantages"]
    assert stale["advantages"].maxlen == 2
    assert stale["rewards"]["accuracy"][0] == 1.0
    assert math.isnan(stale["rewards"]["accuracy"][1])
    assert list(stale["extra"]["mine"]) == [0.5, "{1, 2}"]
    restore_table("", stale)
    assert list(stale["completion"]) == ["a", "b"], "a checkpoint without a table changes nothing"


def test_prompts_of_a_rank_with_images_and_of_one_without_make_one_column(tmp_path):
    """A text in a prompt becomes a list with one part where another prompt has images.

    pandas cannot write texts and lists into one column, and two ranks send just that.
    """
    prompts: deque[Any] = deque(
        [
            [
                {
                    "role": "user",
                    "content": [{"type": "image"}, {"type": "text", "text": "What is x?"}],
                }
            ],
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "What is 2 + 2?"},
            ],
        ]
    )
    prompts_before = [list(prompt) for prompt in prompts]
    with pytest.raises(ValueError, match="cannot mix list and non-list"):
        pd.DataFrame({"prompt": prompts}).to_parquet(tmp_path / "table.parquet")
    unify_message_contents(prompts)
    pd.DataFrame({"prompt": prompts}).to_parquet(tmp_path / "table.parquet")
    assert prompts[0] == prompts_before[0]
    assert [message["content"][0]["text"] for message in prompts[1]] == [
        "Be brief.",
        "What is 2 + 2?",
    ]
    texts: list[Any] = [prompts_before[1], "text", ["a", "b"]]
    prompts_without_image: deque[Any] = deque(texts)
    unify_message_contents(prompts_without_image)
    assert list(prompts_without_image) == texts, "without an image all are texts already"
