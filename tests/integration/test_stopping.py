"""However a run is stopped: one whole checkpoint, nothing left running, and the same command goes
on from it.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from safetensors.torch import load_file

from adora_vl.checkpoint.stop import EXIT_STOPPED, STOPPED_FILE
from adora_vl.checkpoint.store import checkpoints, newest_valid, problem_of, step_of
from adora_vl.models.load import PRETRAINED
from adora_vl.record.metrics import METRICS_FILE, read_metrics
from tests.support.machines import TwoMachines
from tests.support.terminal import Running
from tests.support.weights import mean_difference

# the fixture starts two processes six times
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
]
CYCLE = 2  # steps of one generation
RUN = [
    "--config",
    "configs/train/smoke_cpu.yaml",
    "--use_vllm",
    "false",
    "--adora_self_check",
    "false",
    "--adora_synthetic_rows",
    "64",
    "--num_generations",
    "4",
    "--per_device_train_batch_size",
    "4",
    "--steps_per_generation",
    str(CYCLE),
    "--gradient_accumulation_steps",
    "1",
    "--max_completion_length",
    "8",
    "--logging_steps",
    "1",
    "--save_strategy",
    "no",
    "--save_total_limit",
    "20",
    "--entropy_coef",
    "1.0",
    "--learning_rate",
    "1e-3",  # so few tokens are never right: entropy moves the weights
]
ENDLESS = ["--max_steps", "100000"]


def the_launcher(run: Running) -> None:
    run.launcher.terminate()


def everybody(run: Running) -> None:
    run.signal_everybody(signal.SIGTERM)


def everybody_twice(run: Running) -> None:
    run.signal_everybody(signal.SIGTERM)
    run.wait_for_words("SIGTERM: saving", 2)
    run.signal_everybody(signal.SIGTERM)


def ctrl_c(run: Running) -> None:
    run.press_ctrl_c()


def closed_terminal(run: Running) -> None:
    run.close_terminal()


def killed_launcher(run: Running) -> None:
    run.launcher.kill()


WAYS = [everybody, everybody_twice, ctrl_c, closed_terminal, killed_launcher, the_launcher]


@dataclass(frozen=True)
class Stopped:
    """A start of the command, and what a way to stop it came to."""

    began_with: str
    output: str
    code: int
    saved: list[Path]
    problems: list[str | None]
    note: dict[str, object]


def stop(config: str, output_dir: Path, way: Callable[[Running], None]) -> Stopped:
    before = checkpoints(output_dir)
    begun = int(before[0].name.partition("-")[2]) if before else 0
    with Running(config, output_dir, [*RUN, *ENDLESS]) as run:
        run.wait_for_step(begun + 1)
        began_with = run.output
        way(run)
        code = run.wait_for_the_end()
        output = run.output
    saved = [folder for folder in checkpoints(output_dir) if folder not in before]
    note = json.loads((output_dir / STOPPED_FILE).read_text())
    return Stopped(began_with, output, code, saved, [problem_of(folder) for folder in saved], note)


def holds_one_whole_checkpoint(stopped: Stopped) -> None:
    """Assert that there is one whole checkpoint, of whichever optimizer step.

    Within a generation it holds the rollouts that are left.
    """
    (checkpoint,) = stopped.saved
    assert stopped.problems == [None]
    step = int(checkpoint.name.partition("-")[2])
    assert stopped.note == {"exit_code": EXIT_STOPPED, "step": step, "checkpoint": checkpoint.name}


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """One run under ZeRO-3, stopped in each way in turn and each time started again by the same
    command.
    """
    out = tmp_path_factory.mktemp("stopping") / "out"
    return {way.__name__: stop("cpu_zero3", out, way) for way in WAYS}


@dataclass(frozen=True)
class OnTwoMachines:
    """A run with a process on each of two machines: one lost its power, then the same command ran
    and was stopped.
    """

    ended_after: float
    outputs: list[str]
    codes: list[int]
    saved: list[Path]


@pytest.fixture(scope="module")
def two_machines(tmp_path_factory, two_processes):
    """Started by `setup/ssh/train.sh`, as a user does.

    They get at least to the first checkpoint of one machine.
    """
    first = step_of(next(iter(two_processes.values())).saved[0])
    folder = tmp_path_factory.mktemp("machines")
    out = folder / "out"
    config = "configs/accelerate/cpu_zero3.yaml"
    words = [*RUN, *ENDLESS, "--save_strategy", "steps", "--save_steps", "1"]
    outputs = []
    codes = []
    with TwoMachines(folder / "lab") as machines:
        with machines.running(config, out, words) as script:
            machines.wait_for_step(script, out, 2)
            machines.pull_the_plug(1)
            at = time.monotonic()
            codes.append(script.wait(_BOUND_S))
            ended_after = time.monotonic() - at
            outputs.append(machines.output)
        checkpoint = newest_valid(out)[0]
        logged = read_metrics(out / METRICS_FILE)[-1]["step"]
        with machines.running(config, out, words) as script:
            # the new run cuts the log back to its checkpoint
            machines.wait_for_step(script, out, max(logged + 1, first))
            script.terminate()
            codes.append(script.wait(_BOUND_S))
            outputs.append(machines.output)
    return OnTwoMachines(ended_after, outputs, codes, [checkpoint, *checkpoints(out)])


# a machine that is left alone has to notice it long before its collective calls give up (1,800 s)
_BOUND_S = 300


def test_a_machine_without_power_ends_the_other_one_with_a_line(two_machines):
    assert two_machines.codes[0] == 128 + signal.SIGKILL
    assert two_machines.ended_after < _BOUND_S
    line = next(
        line for line in two_machines.outputs[0].splitlines() if "error (rank 0 of 2)" in line
    )
    assert "another process has ended, or its machine cannot be reached" in line
    assert (
        "the same command goes on from checkpoint-" in line
        or "older checkpoints are as they were" in line
    )


def test_two_machines_go_on_and_stop_with_one_whole_checkpoint(two_machines):
    checkpoint, newest, *_ = two_machines.saved
    assert f"going on from {checkpoint}" in two_machines.outputs[1]
    assert two_machines.codes[1] == EXIT_STOPPED
    assert two_machines.outputs[1].count("Stopped after step") == 1
    assert json.loads((newest.parent / STOPPED_FILE).read_text())["checkpoint"] == newest.name
    assert [problem_of(folder) for folder in two_machines.saved] == [None] * len(two_machines.saved)


def test_two_machines_learn_what_two_processes_do(two_machines, two_processes):
    """The weights after the same steps: of a run that was killed and started again, and of one that
    was stopped.
    """
    alone = {folder.name: folder for stopped in two_processes.values() for folder in stopped.saved}
    together = {folder.name: folder for folder in two_machines.saved}
    common = sorted(alone.keys() & together.keys())
    assert common, (sorted(alone), sorted(together))
    shipped = load_file(PRETRAINED / "model.safetensors")
    for name in common:
        ours = load_file(together[name] / "model.safetensors")
        theirs = load_file(alone[name] / "model.safetensors")
        moved = mean_difference(theirs, shipped)
        assert moved > 1e-4, name
        assert mean_difference(ours, theirs) < 1e-4 * moved, name


@pytest.mark.parametrize("way", [way.__name__ for way in WAYS])
def test_two_processes_stop_with_one_whole_checkpoint(two_processes, way):
    holds_one_whole_checkpoint(two_processes[way])


def test_the_same_command_goes_on_from_each_of_them(two_processes):
    """Except from the last, of which no start follows."""
    for way, following in pairwise(WAYS):
        checkpoint = two_processes[way.__name__].saved[0]
        assert f"going on from {checkpoint}" in two_processes[following.__name__].began_with


def test_the_shipped_launcher_settings_leave_time_to_save(two_processes):
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in os.environ
    assert all(
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in stopped.began_with
        for stopped in two_processes.values()
    )


def test_one_process_saves_and_ends_when_its_launcher_is_stopped(tmp_path):
    """The launcher of one process dies of the signal at once, and leaves its child alone."""
    holds_one_whole_checkpoint(stop("cpu", tmp_path / "out", the_launcher))
