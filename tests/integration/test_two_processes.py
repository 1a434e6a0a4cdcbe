"""ZeRO-3 on two processes: bad steps, a stop in order, going on as before, and going on with another number of them."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from adora_vl.checkpoint.store import MANIFEST, MARK, checkpoints, problem_of, publish
from adora_vl.export import main as export
from adora_vl.models.tiny.build import PRETRAINED
from tests.integration.support import launch, processes_with

pytestmark = pytest.mark.slow
RUN = [
    "--config", "configs/train/smoke_cpu.yaml", "--adora_synthetic_rows", "64", "--num_generations", "4",
    "--logging_steps", "1", "--save_steps", "1", "--save_total_limit", "4", "--adora_visual_scale_min", "0.5",
]  # fmt: skip
TWO = ["--per_device_train_batch_size", "8"]
ONE = ["--per_device_train_batch_size", "16"]


def history(folder: Path) -> list[dict]:
    entries = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in entries if "reward" in entry]


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The mean difference of two models' weights."""
    return sum((one[name] - other[name]).abs().sum().item() for name in one) / sum(t.numel() for t in one.values())


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Step 2 has a NaN on one rank, and before step 3 one rank's engine has lost the weights. What came of it."""
    out, mark = tmp_path_factory.mktemp("two") / "out", uuid.uuid4().hex
    done = launch(
        "cpu_zero3", "-m", "tests.integration.faulty", *RUN, *TWO, "--output_dir", str(out), "--max_steps", "5",
        environment={"FAULTS": "nan:2:1,drift:3:1", "TEST_MARK": mark}, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr[-3000:]
    return out, done, processes_with(mark)


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(stopped):
    out, _, _ = stopped
    assert [entry["adora/skipped_steps"] for entry in history(out / "checkpoint-2")] == [0, 1]
    first, second = (load_file(out / f"checkpoint-{step}" / "model.safetensors") for step in (1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    shipped = load_file(PRETRAINED / "model.safetensors")
    assert any(not torch.equal(first[name], shipped[name]) for name in first)


def test_all_ranks_stop_together_over_drift_with_a_whole_checkpoint(stopped):
    out, done, left = stopped
    assert done.stderr.count("error: step 2: the engine's log-probabilities are") == 1
    assert f"Checkpoint: {out / 'checkpoint-2'}" in done.stderr
    assert "Traceback (most recent call last)" not in done.stderr.split("error: step 2")[0]
    assert [path.name for path in checkpoints(out)] == ["checkpoint-2", "checkpoint-1"]
    assert [problem_of(path) for path in checkpoints(out)] == [None, None]
    assert left == []


@pytest.fixture(scope="module")
def resumed(stopped):
    """The same command again, to the end of step 3, and then once more."""
    out, _, _ = stopped
    words = ["-m", "adora_vl.train", *RUN, *TWO, "--output_dir", str(out), "--max_steps", "3"]
    launch("cpu_zero3", *words)
    before = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").unlink()  # as if the run had been killed after its last checkpoint
    done = launch("cpu_zero3", *words)
    assert "checkpoint-3 is the last step: nothing left to train" in done.stdout
    assert (out / "model.safetensors").read_bytes() == before
    return out


def test_a_second_start_goes_on_where_the_first_one_ended(resumed):
    steps = history(resumed)
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["adora/drift"] < 1e-3 for step in steps)
    with (
        safe_open(resumed / "model.safetensors", framework="pt") as saved,
        safe_open(PRETRAINED / "model.safetensors", "pt") as shipped,
    ):
        shapes = {name: saved.get_slice(name).get_shape() for name in saved.keys()}  # noqa: SIM118
        assert shapes == {name: shipped.get_slice(name).get_shape() for name in shipped.keys()}  # noqa: SIM118


def test_one_process_goes_on_with_the_steps_of_two(resumed, tmp_path):
    """Same rollouts, and weights that differ by the order of sums only; a wrong Adam step would show."""
    second, words = resumed / "checkpoint-2", ["-m", "adora_vl.train", *RUN, *ONE, "--max_steps", "3"]
    words += ["--output_dir", str(tmp_path / "out"), "--resume_from_checkpoint"]
    assert export([str(second), str(tmp_path / "whole"), "--universal"]) == 0
    launch("cpu_zero3", "--num_processes", "1", *words, str(tmp_path / "whole"))
    ours, theirs = history(tmp_path / "out")[-1], history(resumed)[-1]
    for name in ("reward", "completions/mean_length", "adora/weight_mean"):
        assert ours[name] == pytest.approx(theirs[name])
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    one, two, before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", resumed, second))
    assert distance(one, two) < 1e-4 * distance(two, before)


def test_shards_alone_are_gathered_into_the_same_weights(resumed, tmp_path):
    """As ZeRO-3 saves them without zero3_save_16bit_model: no model.safetensors in the checkpoint."""
    bare = tmp_path / "staged" / "checkpoint-3"
    ignored = shutil.ignore_patterns(MANIFEST, MARK, "model.safetensors")
    shutil.copytree(resumed / "checkpoint-3", bare, ignore=ignored)
    publish(bare, tmp_path / "checkpoint-3", {"step": 3})
    assert export([str(tmp_path / "checkpoint-3"), str(tmp_path / "model")]) == 0
    gathered, saved = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "model", resumed / "checkpoint-3")
    )
    assert gathered.keys() == saved.keys() and all(torch.equal(gathered[name], saved[name]) for name in saved)
    assert (tmp_path / "model" / "processor_config.json").is_file()
