"""Faults in the middle of a run with a real engine.

Each ends the run with one line, a whole checkpoint and nothing running. Every start goes on from
what the one before it left, in one process with one engine (`faulty.start_in_turn`).
"""

import json
import re
import sys
import uuid
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from adora_vl.checkpoint.store import STAGING_FOLDER, describe_checkpoint_damage, list_checkpoints
from data_prep.cli import main as data_prep
from tests.support.launch import cli_arguments, command_lines_marked_with, run_command
from tests.support.user_tables import truncate_image

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def faulty_run(tmp_path_factory):
    """Start a run six times, each time with other faults, and go on where the last start ended.

    Returns its folder, what each start printed, and the command lines of processes left at the end.
    """
    folder = tmp_path_factory.mktemp("faults")
    mark = uuid.uuid4().hex
    for name in ("whole", "damaged"):
        argv = ["--output", str(folder / name), "--rows", "40", "--test-rows", "4"]
        assert data_prep(["synthetic", *argv]) == 0
    # row 14 is read in the second step
    truncate_image(folder / "damaged" / "data" / "train-00000-of-00001.parquet", 14)
    output_dir = folder / "out"
    # for each start the faults as `name:step` (`-` for none), then further arguments
    starts = [
        f"- --dataset_name {folder / 'damaged'}",
        f"disk:3 --resume_from_checkpoint {output_dir / 'checkpoint-1'}",
        "sync:4",
        "ratio:4,ratio:5,ratio:6",
        "nan:7,generate:8",
        "reward:8",
    ]
    command = [
        sys.executable,
        "-m",
        "tests.integration.faulty",
        *cli_arguments(
            config="configs/train/smoke_cpu.yaml",
            max_steps=9,
            num_generations=4,
            per_device_train_batch_size=16,
            max_completion_length=12,
            logging_steps=1,
            save_steps=1,
            save_total_limit=9,
            dataset_name=folder / "whole",
            output_dir=output_dir,
        ),
        "--adora_stock_step",
        "skip_old_pass",  # else every ratio is 1
        "--adora_self_check",
        "false",  # it would meet the fault first
    ]
    completed = run_command(
        command, environment={"STARTS": ";".join(starts), "TEST_MARK": mark}, check=False
    )
    outputs_and_codes = re.split(
        r"^start \d ended with (\d)$", completed.stdout, flags=re.MULTILINE
    )
    assert outputs_and_codes[1::2] == ["1"] * len(starts), (
        completed.stdout[-3000:] + completed.stderr[-2000:]
    )
    assert completed.returncode == 1, completed.stdout[-3000:] + completed.stderr[-2000:]
    return output_dir, outputs_and_codes[::2], command_lines_marked_with(mark)


LAST_LINE_PATTERNS = [
    r"error: step 2: row synthetic/0/train/14: an image cannot be read: Truncated File "
    r"Read\. .*"
    r"Repair or remove the row, and go on with --resume_from_checkpoint .*checkpoint-1$",
    r"error: checkpoint-3 could not be written \(no space left .*\); older .* as they were; make "
    r"room there, and the "
    r"same command goes on from checkpoint-2$",
    r"error: step 4: the engine failed in the weight sync \(ValueError: the engine core died\); "
    r"the same command goes "
    r"on from checkpoint-3$",
    r"error: step 6: 3 steps in a row were skipped: the largest importance ratio of the last is "
    r"1e\+06 .*",
    r"error: step 8: the engine failed in generate \(ValueError: the engine core died\); .* from "
    r"checkpoint-7$",
    r"error: step 8: reward boxed_accuracy_reward: 16 completions together, of row synthetic/0/train/\d+ "
    r"and others: "
    r"ZeroDivisionError: the reward's own mistake. .* go on with --resume_from_checkpoint "
    r".*checkpoint-7$",
]
CHECKPOINT_BEFORE_START = [
    "",
    "checkpoint-1",
    "checkpoint-2",
    "checkpoint-3",
    "checkpoint-6",
    "checkpoint-7",
]


@pytest.mark.parametrize("number", range(len(LAST_LINE_PATTERNS)))
def test_the_last_line_says_where_why_and_how_to_go_on_and_the_next_start_does(faulty_run, number):
    """The last line of a start is its only error, and the next start goes on where it says."""
    _, outputs, _ = faulty_run
    lines = outputs[number].rstrip("\n").splitlines()
    assert re.match(LAST_LINE_PATTERNS[number], lines[-1]), lines[-1]
    assert sum(line.startswith("error: ") for line in lines) == 1
    going_on = [line for line in lines if line.startswith("going on from ")]
    assert [Path(line.split()[-1]).name for line in going_on] == (
        [CHECKPOINT_BEFORE_START[number]] if number else []
    )


def test_the_error_of_the_engine_itself_stands_above(faulty_run):
    """The cause is printed before the one line that says what to do."""
    _, outputs, _ = faulty_run
    assert "ValueError: the engine core died\nits second line\n" in outputs[2]
    assert "Traceback" not in outputs[0]  # a stop in order needs none


def test_every_step_is_there_once_and_the_skipped_ones_changed_nothing(faulty_run):
    """After all faults the log has each step once.

    Weights have moved in no step that was skipped.
    """
    output_dir, _, _ = faulty_run
    assert [path.name for path in list_checkpoints(output_dir)] == [
        f"checkpoint-{step}" for step in range(7, 0, -1)
    ]
    assert [describe_checkpoint_damage(path) for path in list_checkpoints(output_dir)] == [None] * 7
    assert not list((output_dir / STAGING_FOLDER).iterdir())
    history = json.loads((output_dir / "checkpoint-7" / "trainer_state.json").read_text())[
        "log_history"
    ]
    assert [entry["step"] for entry in history] == list(range(1, 8))
    assert [entry["adora/skipped_steps"] for entry in history] == [0, 0, 0, 1, 1, 1, 1]
    assert history[0]["adora/ratio_max"] == pytest.approx(1, abs=1e-3)
    assert history[4]["adora/ratio_max"] > 1e5
    weights_at_2 = load_file(output_dir / "checkpoint-2" / "model.safetensors")
    weights_at_3 = load_file(output_dir / "checkpoint-3" / "model.safetensors")
    weights_at_7 = load_file(output_dir / "checkpoint-7" / "model.safetensors")
    assert all(torch.equal(weights_at_3[name], weights_at_7[name]) for name in weights_at_7)
    assert any(not torch.equal(weights_at_2[name], weights_at_3[name]) for name in weights_at_7)


def test_nothing_is_left_running(faulty_run):
    """No process of the runs is there after the last one has ended."""
    _, _, processes = faulty_run
    assert processes == []
