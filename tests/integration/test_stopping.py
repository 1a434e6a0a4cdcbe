"""However a run is stopped, it leaves one whole checkpoint and no process.

The same command goes on from that checkpoint.
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
from adora_vl.checkpoint.store import (
    checkpoint_step,
    describe_checkpoint_damage,
    find_newest_valid_checkpoint,
    list_checkpoints,
)
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.record.metrics import METRICS_FILE, read_metrics
from tests.support.launch import cli_arguments
from tests.support.machines import TwoMachines
from tests.support.terminal import RunningCommand
from tests.support.weights import mean_weight_difference

# the fixture starts two processes six times
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
]
STEPS_PER_GENERATION = 2  # steps of one generation
STOPPING_RUN_ARGUMENTS = [
    *cli_arguments(
        config="configs/train/smoke_cpu.yaml",
        use_vllm="false",
        adora_self_check="false",
        adora_synthetic_rows=64,
        num_generations=4,
        per_device_train_batch_size=4,
        steps_per_generation=STEPS_PER_GENERATION,
        gradient_accumulation_steps=1,
        max_completion_length=8,
        logging_steps=1,
        save_strategy="no",
        save_total_limit=20,
        entropy_coef="1.0",
    ),
    "--learning_rate",
    "1e-3",  # so few tokens are never right: entropy moves the weights
]
ENDLESS_STEPS = ["--max_steps", "100000"]


def terminate_launcher(run: RunningCommand) -> None:
    """Send SIGTERM to the launcher alone."""
    run.launcher.terminate()


def terminate_everybody(run: RunningCommand) -> None:
    """Send SIGTERM to all processes, as Slurm does."""
    run.signal_everybody(signal.SIGTERM)


def terminate_everybody_twice(run: RunningCommand) -> None:
    """Send SIGTERM to all processes, and again while they save."""
    run.signal_everybody(signal.SIGTERM)
    run.wait_for_output("SIGTERM: saving", 2)
    run.signal_everybody(signal.SIGTERM)


def press_ctrl_c(run: RunningCommand) -> None:
    """Press Ctrl-C in the run's terminal."""
    run.press_ctrl_c()


def close_terminal(run: RunningCommand) -> None:
    """Close the run's terminal, as a lost connection does."""
    run.close_terminal()


def kill_launcher(run: RunningCommand) -> None:
    """Kill the launcher."""
    run.launcher.kill()


STOP_FUNCTIONS = [
    terminate_everybody,
    terminate_everybody_twice,
    press_ctrl_c,
    close_terminal,
    kill_launcher,
    terminate_launcher,
]


@dataclass(frozen=True)
class StoppedRun:
    """A run that was started and then stopped in some way.

    `output_at_step`: what it had printed when it was stopped. `saved`: the checkpoints that it
    wrote, `problems`: what is wrong with each, or None. `note`: the file that says that it stopped.
    """

    output_at_step: str
    output: str
    code: int
    saved: list[Path]
    problems: list[str | None]
    note: dict[str, object]


def start_and_stop(
    config: str, output_dir: Path, stop_function: Callable[[RunningCommand], None]
) -> StoppedRun:
    """Start a run without an end, stop it after its first step, and return what it left.

    `stop_function`: one of `STOP_FUNCTIONS`.
    """
    older_checkpoints = list_checkpoints(output_dir)
    resumed_step = checkpoint_step(older_checkpoints[0]) if older_checkpoints else 0
    with RunningCommand(config, output_dir, [*STOPPING_RUN_ARGUMENTS, *ENDLESS_STEPS]) as run:
        run.wait_for_step(resumed_step + 1)
        output_at_step = run.output
        stop_function(run)
        code = run.wait_for_the_end()
        output = run.output
    saved = [folder for folder in list_checkpoints(output_dir) if folder not in older_checkpoints]
    note = json.loads((output_dir / STOPPED_FILE).read_text())
    return StoppedRun(
        output_at_step=output_at_step,
        output=output,
        code=code,
        saved=saved,
        problems=[describe_checkpoint_damage(folder) for folder in saved],
        note=note,
    )


def assert_one_whole_checkpoint(stopped: StoppedRun) -> None:
    """Assert that a stopped run saved one whole checkpoint, and that its note names it.

    A signal may come at any time, so the checkpoint may be of any optimizer step.
    """
    (checkpoint,) = stopped.saved
    assert stopped.problems == [None]  # nothing is wrong with it
    step = checkpoint_step(checkpoint)
    assert stopped.note == {"exit_code": EXIT_STOPPED, "step": step, "checkpoint": checkpoint.name}


@pytest.fixture(scope="module")
def stopped_run_by_function_name(tmp_path_factory):
    """Stop one run of two processes in six ways, each time started again by the same command.

    Returns each stopped run by the name of the function that stopped it.
    """
    output_dir = tmp_path_factory.mktemp("stopping") / "out"
    return {
        stop_function.__name__: start_and_stop("cpu_zero3", output_dir, stop_function)
        for stop_function in STOP_FUNCTIONS
    }


@dataclass(frozen=True)
class RunOnTwoMachines:
    """A run with a process on each of two machines, started twice by the same command.

    The first time one machine lost its power, the second time the run was stopped.
    `seconds_to_end`: from the loss of power to the end of the other machine. `saved`: the
    checkpoint that the second start went on from, then all that were there at the end.
    """

    seconds_to_end: float
    outputs: list[str]
    codes: list[int]
    saved: list[Path]


@pytest.fixture(scope="module")
def run_on_two_machines(tmp_path_factory, stopped_run_by_function_name):
    """Run on two machines by `setup/ssh/train.sh`, as a user does.

    The run gets at least to the first checkpoint of the run on one machine, to be compared there.
    """
    first_run_stopped = next(iter(stopped_run_by_function_name.values()))
    first_saved_step = checkpoint_step(first_run_stopped.saved[0])
    folder = tmp_path_factory.mktemp("machines")
    output_dir = folder / "out"
    config = "configs/accelerate/cpu_zero3.yaml"
    argv = [
        *STOPPING_RUN_ARGUMENTS,
        *ENDLESS_STEPS,
        "--save_strategy",
        "steps",
        "--save_steps",
        "1",
    ]
    outputs = []
    codes = []
    with TwoMachines(folder / "lab") as machines:
        with machines.running(config, output_dir, argv) as process:
            machines.wait_for_step(process, output_dir, 2)
            machines.kill_machine(1)
            time_of_power_loss = time.monotonic()
            codes.append(process.wait(NOTICE_BOUND_S))
            seconds_to_end = time.monotonic() - time_of_power_loss
            outputs.append(machines.output)
        checkpoint = find_newest_valid_checkpoint(output_dir)[0]
        last_logged_step = read_metrics(output_dir / METRICS_FILE)[-1]["step"]
        with machines.running(config, output_dir, argv) as process:
            # the new run cuts the log back to its checkpoint
            machines.wait_for_step(process, output_dir, max(last_logged_step + 1, first_saved_step))
            process.terminate()
            codes.append(process.wait(NOTICE_BOUND_S))
            outputs.append(machines.output)
    return RunOnTwoMachines(
        seconds_to_end=seconds_to_end,
        outputs=outputs,
        codes=codes,
        saved=[checkpoint, *list_checkpoints(output_dir)],
    )


# a machine that is left alone has to notice it long before its collective calls give up (1,800 s)
NOTICE_BOUND_S = 300


def test_a_machine_without_power_ends_the_other_one_with_a_line(run_on_two_machines):
    """The other machine notices in time, and says where the run can go on."""
    assert run_on_two_machines.codes[0] == 128 + signal.SIGKILL
    assert run_on_two_machines.seconds_to_end < NOTICE_BOUND_S
    line = next(
        line
        for line in run_on_two_machines.outputs[0].splitlines()
        if "error (rank 0 of 2)" in line
    )
    assert "another process has ended, or its machine cannot be reached" in line
    assert (
        "the same command goes on from checkpoint-" in line
        or "older checkpoints are as they were" in line
    )


def test_two_machines_go_on_and_stop_with_one_whole_checkpoint(run_on_two_machines):
    """The second start goes on from the newest whole checkpoint, and stops in order."""
    checkpoint, newest, *_ = run_on_two_machines.saved
    assert f"going on from {checkpoint}" in run_on_two_machines.outputs[1]
    assert run_on_two_machines.codes[1] == EXIT_STOPPED
    assert run_on_two_machines.outputs[1].count("Stopped after step") == 1
    assert json.loads((newest.parent / STOPPED_FILE).read_text())["checkpoint"] == newest.name
    assert [describe_checkpoint_damage(folder) for folder in run_on_two_machines.saved] == [
        None
    ] * len(run_on_two_machines.saved)


def test_two_machines_learn_what_two_processes_do(
    run_on_two_machines, stopped_run_by_function_name
):
    """Checkpoints of the same step have the same weights, apart from rounding.

    The run on two machines was killed and started again, that of two processes was stopped often.
    """
    on_one_machine = {
        folder.name: folder
        for stopped in stopped_run_by_function_name.values()
        for folder in stopped.saved
    }
    on_two_machines = {folder.name: folder for folder in run_on_two_machines.saved}
    common_names = sorted(on_one_machine.keys() & on_two_machines.keys())

    assert common_names, (sorted(on_one_machine), sorted(on_two_machines))
    shipped_weights = load_file(PRETRAINED_FOLDER / "model.safetensors")
    for name in common_names:
        weights_of_two = load_file(on_two_machines[name] / "model.safetensors")
        weights_of_one = load_file(on_one_machine[name] / "model.safetensors")
        movement = mean_weight_difference(weights_of_one, shipped_weights)
        assert movement > 1e-4, name
        assert mean_weight_difference(weights_of_two, weights_of_one) < 1e-4 * movement, name


@pytest.mark.parametrize(
    "stop_function", [stop_function.__name__ for stop_function in STOP_FUNCTIONS]
)
def test_two_processes_stop_with_one_whole_checkpoint(stopped_run_by_function_name, stop_function):
    """Whichever way the run was stopped, it saved one checkpoint that is whole."""
    assert_one_whole_checkpoint(stopped_run_by_function_name[stop_function])


def test_the_same_command_goes_on_from_each_of_them(stopped_run_by_function_name):
    """The start after each stop goes on from the checkpoint that the stopped run has saved.

    The last stop is left out, as no start follows it.
    """
    for stop_function, following in pairwise(STOP_FUNCTIONS):
        checkpoint = stopped_run_by_function_name[stop_function.__name__].saved[0]
        assert (
            f"going on from {checkpoint}"
            in stopped_run_by_function_name[following.__name__].output_at_step
        )


def test_the_shipped_launcher_settings_leave_time_to_save(stopped_run_by_function_name):
    """No run warns that torch's launcher would kill it while it saves."""
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in os.environ
    assert all(
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in stopped.output_at_step
        for stopped in stopped_run_by_function_name.values()
    )


def test_one_process_saves_and_ends_when_its_launcher_is_stopped(tmp_path):
    """The launcher of one process dies of the signal at once, and leaves its child alone."""
    assert_one_whole_checkpoint(start_and_stop("cpu", tmp_path / "out", terminate_launcher))
