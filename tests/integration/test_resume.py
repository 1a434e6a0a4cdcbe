"""Killed, stopped or moved: a run goes on as if nothing had happened, and its weights come out."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from contextlib import nullcontext
from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import AutoModelForImageTextToText

from adora_vl.checkpoint.stop import EXIT_STOPPED
from adora_vl.checkpoint.store import describe_checkpoint_damage, list_checkpoints
from adora_vl.export import main as export
from adora_vl.models.load import PRETRAINED_FOLDER
from benchmarks.kill_and_resume import smaller_demo_arguments
from tests.support.adapters import sft_adapter
from tests.support.examples import example_entry
from tests.support.launch import cli_arguments, command_lines_marked_with, run_command
from tests.support.paths import REPOSITORY
from tests.support.user_tables import run_convert, write_user_jsonl
from tests.support.vllm_server import vllm_server

pytestmark = pytest.mark.slow
MOVING_REFERENCE_AND_ENTROPY = cli_arguments(
    beta="0.1",
    sync_ref_model="true",
    ref_model_sync_steps=1,
    ref_model_mixup_alpha="0.5",
    use_adaptive_entropy="true",
    entropy_target=9,
    logging_steps=2,
    learning_rate="1e-3",
)
KILL_AND_RESUME_COMMAND = [sys.executable, "-m", "benchmarks.kill_and_resume", "--steps", "6"]


@pytest.mark.core
def test_a_killed_run_ends_with_the_same_losses_rollouts_and_weights(tmp_path):
    """The run has all at once that a checkpoint has to bring back.

    The learned weights of DARO, the distortion of images that half of the rollouts see, the mixture
    of two data sets, and the reference (seen in `kl`) and entropy coefficient that TRL moves. Every
    second step is logged; the checkpoint of step 3 holds the first half of a logged `loss`.
    """
    rows = [
        {"q": f"How long is side {number}?", "a": number, "image": f"pics/{number % 4}.png"}
        for number in range(9)
    ]
    columns = ("problem=q", "answer=a", "images=image")
    assert (
        run_convert(
            write_user_jsonl(tmp_path, rows), tmp_path / "own", "--name", "own", columns=columns
        )
        == 0
    )
    completed = run_command(
        [
            *KILL_AND_RESUME_COMMAND,
            "--kills",
            "backward:5",
            "--output",
            str(tmp_path),
            "--",
            "--adora_method",
            "daro+adora",
            "--adora_extensions",
            f"{{{example_entry('noisy_rollouts.py:NoisyRollouts')}: {{share: 0.5}}, "
            f"{example_entry('visual_tokens.py:VisualTokens')}: {{share: 0.5}}}}",
            "--dataset_name",
            "synthetic",
            str(tmp_path / "own"),
            "--adora_mixture",
            "0.6",
            "0.4",
            *MOVING_REFERENCE_AND_ENTROPY,
        ]
    )
    assert "checkpoint-3" in completed.stdout
    assert "3 steps, the rollouts of 6, weights: all equal" in completed.stdout
    rollouts = pd.read_parquet(next(tmp_path.glob("*/killed/rollouts")))
    # the drift of rollouts on distorted images is not measured
    all_unmeasured = (
        rollouts["drift"].isna().groupby([rollouts["step"], rollouts["rollout"] >= 2]).all()
    )
    assert all_unmeasured.xs(True, level="rollout").all(), (
        "the last two of four see a distorted image"
    )
    assert 0 < rollouts["drift"].max() < 1e-4, "the others are as close to the engine as ever"
    has_own_row = rollouts["id"].str.startswith("own/")
    is_before_checkpoint = rollouts["step"] <= 3
    assert 0.1 < has_own_row[is_before_checkpoint].mean() < 0.8
    assert 0.1 < has_own_row[~is_before_checkpoint].mean() < 0.8


@pytest.mark.parametrize("where", ["whole", "zero3", "server"])
def test_a_killed_run_from_an_adapter_ends_the_same_with_its_reference_and_its_own_head(
    tmp_path, where
):
    """A policy that starts from an adapter ends with equal losses and weights after a kill.

    Without a server, a token budget pauses answers, which go on in the next generation. A server
    gets nothing but the adapter, so that case trains no head; all three starts of it (whole,
    killed, resumed) use one server.
    """
    processes = 2 if where == "zero3" else 1
    with vllm_server(tmp_path) if where == "server" else nullcontext() as server:
        adapter = sft_adapter(
            tmp_path / "sft",
            modules_to_save=None if server else ["lm_head"],
            lora_dropout=0.05,  # TRL's default
        )
        argv = ["--model_name_or_path", str(adapter), "--beta", "0.1", "--learning_rate", "1e-3"]
        if where != "server":
            argv += ["--adora_rollouts.budget", "9"]
        if server:
            argv += [
                "--vllm_mode",
                "server",
                "--vllm_server_base_url",
                server.url,
                "--adora_weight_transfer",
                "file",
            ]
        options = ["--kills", "rollout:5", "--processes", str(processes), "--output", str(tmp_path)]
        completed = run_command([*KILL_AND_RESUME_COMMAND, *options, "--", *argv])
        if server:  # it holds the dead run's adapter too, under another name
            # The address is loopback.
            with urllib.request.urlopen(f"{server.url}/v1/models") as reply:  # noqa: S310
                models = json.load(reply)["data"]
            assert sum("adora-weights" in model["id"] for model in models) == 3
    assert "checkpoint-3" in completed.stdout
    assert "6 steps, the rollouts of 6, weights: all equal" in completed.stdout
    if where != "server":
        assert len(list(tmp_path.glob("*/killed/checkpoint-3/pool-*.pt"))) == processes
        assert pd.read_parquet(next(tmp_path.glob("*/killed/rollouts")))["segments"].max() > 1


@pytest.fixture(scope="module")
def sigterm_run(tmp_path_factory):
    """Send a run a SIGTERM in the middle of its steps; return its folder, exit code and stderr."""
    output_dir = tmp_path_factory.mktemp("stopped") / "out"
    command = [
        sys.executable,
        "-m",
        "adora_vl.train",
        *cli_arguments(
            config="configs/train/smoke_cpu.yaml",
            output_dir=output_dir,
            per_device_train_batch_size=8,
            num_generations=4,
            adora_synthetic_rows=64,
            logging_steps=1,
            save_strategy="no",
            max_steps=100000,
        ),
    ]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE, text=True
    )
    wait_for_steps(output_dir, 2, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=200)
    return output_dir, process.returncode, errors


def wait_for_steps(
    output_dir: Path, steps: int, process: subprocess.Popen[str], seconds: float = 300
) -> None:
    """Wait until a process has written the completions of so many steps, or fail."""
    deadline = time.monotonic() + seconds
    while len(list(output_dir.glob("completions/*.parquet"))) < steps:
        assert process.poll() is None, process.communicate()[1][-2000:]
        assert time.monotonic() < deadline, f"no {steps} steps within {seconds} s"
        time.sleep(0.2)


@pytest.mark.core
def test_a_sigterm_saves_and_has_an_exit_code_of_its_own(sigterm_run):
    """The run prints the command that goes on, and leaves a note for whoever started it."""
    output_dir, code, errors = sigterm_run
    assert code == EXIT_STOPPED, errors[-2000:]
    (checkpoint,) = list_checkpoints(output_dir)
    assert describe_checkpoint_damage(checkpoint) is None
    step = json.loads((checkpoint / "trainer_state.json").read_text())["global_step"]
    assert "SIGTERM: saving after this optimizer step" in errors
    assert f"Stopped after step {step}; the same command goes on from checkpoint-{step}" in errors
    note = json.loads((output_dir / "stopped.json").read_text())
    assert note == {"exit_code": EXIT_STOPPED, "step": step, "checkpoint": checkpoint.name}


def test_the_export_holds_the_checkpoints_weights_and_loads_offline(sigterm_run, tmp_path):
    """The folder has every file of the shipped model. It is never written over."""
    output_dir, _, _ = sigterm_run
    assert export([str(output_dir), str(tmp_path / "model")]) == 0
    (checkpoint,) = list_checkpoints(output_dir)
    exported = AutoModelForImageTextToText.from_pretrained(tmp_path / "model").state_dict()
    saved = AutoModelForImageTextToText.from_pretrained(checkpoint).state_dict()
    shipped = AutoModelForImageTextToText.from_pretrained(PRETRAINED_FOLDER).state_dict()
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
    assert any(not torch.equal(exported[name], shipped[name]) for name in saved)
    assert {p.name for p in PRETRAINED_FOLDER.iterdir()} - {"build.json"} <= {
        p.name for p in (tmp_path / "model").iterdir()
    }
    assert export([str(output_dir), str(tmp_path / "model")]) == 2, (
        "a folder that is there is not written over"
    )


def test_when_one_rank_dies_the_others_stop_and_nothing_is_left_running(tmp_path):
    """The launcher names the killed rank, and the checkpoint of the step before is whole."""
    mark = uuid.uuid4().hex
    command = [str(Path(sys.executable).parent / "accelerate"), "launch", "--config_file"]
    command += ["configs/accelerate/cpu_zero3.yaml", "-m", "benchmarks.kill_and_resume", "--child"]
    command += smaller_demo_arguments(tmp_path / "out", 100_000, [])
    # Rank 1 is killed in the backward pass of step 4, without a delay.
    environment = {**os.environ, "ADORA_KILL": "backward:4:0:1", "TEST_MARK": mark}
    completed = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=400
    )

    assert completed.returncode == 1
    assert "exitcode  : -9" in completed.stderr, completed.stderr[-2000:]
    assert command_lines_marked_with(mark) == []
    (checkpoint,) = list_checkpoints(tmp_path / "out")
    assert checkpoint.name == "checkpoint-3"
    assert describe_checkpoint_damage(checkpoint) is None
