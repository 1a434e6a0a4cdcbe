"""Signals, Ctrl-C, a launcher that goes, and output that nobody reads any more."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerControl

from adora_vl import train
from adora_vl.checkpoint.stop import REPEATED_SIGNAL_S, StopOnSignal
from adora_vl.utils import launch as launcher
from adora_vl.utils.errors import RunError
from adora_vl.utils.interrupts import EXIT_INTERRUPTED
from tests.support.stand_ins import trainer_state

ROOT = Path(__file__).parents[3]
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
STATE_AT_START = trainer_state(0)


@contextlib.contextmanager
def clock_and_kills() -> Iterator[tuple[SimpleNamespace, list[int]]]:
    """Yield a clock that a test sets by `now`, and the list of signals that a run sends to itself.

    A run sends itself a signal in order to end at once. Here the signal is only noted, and no
    handler is installed.
    """
    clock = SimpleNamespace(now=0.0)
    kills = []
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(time, "monotonic", lambda: clock.now)
        patches.setattr(os, "kill", lambda pid, number: kills.append(number))
        patches.setattr(signal, "signal", lambda number, handler: None)
        patches.setattr(os, "write", lambda descriptor, words: len(words))
        yield clock, kills


@given(
    st.lists(
        st.tuples(st.sampled_from(SIGNALS), st.floats(0.0, 2 * REPEATED_SIGNAL_S)),
        min_size=1,
        max_size=8,
    )
)
def test_repeats_count_as_one_and_only_a_late_one_that_somebody_meant_ends_at_once(
    signals_and_gaps,
):
    """A run stops after its step at the first signal, and at once at another one after 10 seconds.

    `signals_and_gaps` has the signals, each with the seconds since the one before. A closed
    terminal (SIGHUP) ends nothing at once.
    """
    first_number, first_gap = signals_and_gaps[0]
    expected_kills: list[int] = []
    with clock_and_kills() as (clock, kills):
        run = StopOnSignal()
        for number, gap in signals_and_gaps:
            clock.now += gap
            run._handle(number, None)
            is_late = clock.now - first_gap >= REPEATED_SIGNAL_S
            if is_late and number != signal.SIGHUP:
                expected_kills.append(number)
    assert run.received_signal == first_number
    assert kills == expected_kills


def test_what_the_launcher_sends_after_an_error_does_not_talk_over_it(capfd):
    """After an error of its own a run is silent about SIGTERM; otherwise it says that it saves.

    A launcher ends the other processes with SIGTERM when one of them has failed.
    """
    run = StopOnSignal()
    with contextlib.suppress(RunError), run:
        raise RunError("step 3: stop")
    run._handle(signal.SIGTERM, None)
    assert capfd.readouterr().err == ""
    with (going_on := StopOnSignal()):
        going_on._handle(signal.SIGTERM, None)
    assert capfd.readouterr().err == (
        "SIGTERM: saving after this optimizer step; "
        "another signal, 10 seconds from now or later, ends the run at once\n"
    )


@pytest.fixture
def signal_handlers():
    """Put the handlers of this process back after the test; before it, SIGHUP has its default.

    Under nohup it would be ignored.
    """
    handlers_before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in handlers_before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("elastic", [False, True])
def test_under_nohup_a_closed_terminal_is_ignored_unless_the_launcher_hands_it_on(
    signal_handlers, monkeypatch, elastic
):
    """A run that inherits an ignored SIGHUP, as under nohup, ignores it, unless torch started it.

    torch's launcher handles SIGHUP under nohup too, and kills processes that do not end.
    """
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if elastic:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3600")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run = StopOnSignal()
    run.on_train_begin(None, STATE_AT_START, None)
    os.kill(os.getpid(), signal.SIGHUP)
    assert (run.received_signal == signal.SIGHUP) is elastic
    os.kill(os.getpid(), signal.SIGTERM)
    assert run.received_signal is not None


def test_a_signal_to_another_rank_stops_this_one_after_the_same_step(monkeypatch):
    """A rank saves and stops after a step if any rank has received a signal.

    The replaced `gather` adds a rank that has received `elsewhere` signals.
    """
    for signals_elsewhere, stops in ((0, False), (1, True)):
        monkeypatch.setattr(
            "adora_vl.checkpoint.stop.gather",
            lambda signals, elsewhere=signals_elsewhere: torch.cat([signals, signals + elsewhere]),
        )
        run = StopOnSignal()
        control = TrainerControl()
        run.on_step_end(None, STATE_AT_START, control)
        assert run.stopped == stops
        assert control.should_save == stops
        # The checkpoint is of a run that goes on, so the training stops after it.
        assert not control.should_training_stop
        run.on_save(None, STATE_AT_START, control)
        assert control.should_training_stop == stops


def test_a_run_that_was_not_stopped_leaves_the_signals_as_they_were(signal_handlers):
    """A program that trains may have handlers of its own."""
    run = StopOnSignal()
    run.on_train_begin(None, STATE_AT_START, None)
    assert all(signal.getsignal(number) != handler for number, handler in signal_handlers.items())
    run.release()
    assert {number: signal.getsignal(number) for number in SIGNALS} == signal_handlers


def test_a_stopped_run_keeps_its_exit_code_whatever_comes_after_its_last_write(signal_handlers):
    """A second signal while Python ends would change the exit code, so it is ignored."""
    run = StopOnSignal()
    run.on_train_begin(None, STATE_AT_START, None)
    run.stopped = True
    run.release()
    assert {signal.getsignal(number) for number in SIGNALS} == {signal.SIG_IGN}


ORPHAN_CODE = """
import os, signal, sys
from adora_vl.utils import launch as launcher
launcher._WATCH_INTERVAL_S = 0.01
if sys.argv[1] == "saves":
    def handle(number, frame):
        print("saved", flush=True)
        os._exit(0)
    signal.signal(signal.SIGHUP, handle)
def alone(number, frame):
    print("trains on as an orphan", flush=True)
    os._exit(1)
signal.signal(signal.SIGALRM, alone)
signal.alarm(60)
launcher.end_with_launcher()
print("ready", flush=True)
while True:
    signal.pause()
"""
LAUNCHER_CODE = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]])
sys.stdin.read()
"""


def test_a_process_ends_with_its_launcher_and_saves_where_there_is_something_to_save():
    """A process whose launcher was killed ends by itself, and saves if it has a handler for that.

    Otherwise it would train on alone. The child of `ORPHAN_CODE` has such a handler with "saves".
    """
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "1", "PYTHONPATH": str(ROOT)}
    for moment, expected in {"before training": "ready\n", "saves": "ready\nsaved\n"}.items():
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER_CODE, ORPHAN_CODE, moment],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        first_line = process.stdout.readline()
        process.kill()
        # it reads to the end of the file, which comes when the child has ended too
        assert first_line + process.stdout.read() == expected
        process.wait()


def test_a_process_that_no_launcher_started_outlives_its_shell(monkeypatch):
    """Only a process of torchrun or accelerate watches its launcher, to end with it.

    Environment variables tell whether there is one.
    """
    started: list[str] = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: started.append(thread.name))
    for name, watches in {
        "SHELL": False,
        "ACCELERATE_MIXED_PRECISION": False,
        "TORCHELASTIC_RUN_ID": True,
        "ACCELERATE_DYNAMO_MODE": True,
    }.items():
        started.clear()
        with monkeypatch.context() as patch:
            patch.delenv("TORCHELASTIC_RUN_ID", raising=False)
            patch.delenv("ACCELERATE_DYNAMO_MODE", raising=False)
            patch.setenv(name, "1")
            launcher.end_with_launcher()
        assert started == (["launcher-watch"] if watches else []), name


TALKER_CODE = """
import sys
from adora_vl.utils.outputs import redirect_closed_outputs
redirect_closed_outputs()
print("heard", flush=True)
sys.stdin.readline()
redirect_closed_outputs()
print("to nobody", flush=True)
print("to nobody", file=sys.stderr, flush=True)
"""


def test_output_that_nobody_reads_any_more_does_not_end_a_run():
    """A process whose stdout and stderr are closed goes on, as after Ctrl-C in `... | tee log`.

    Ctrl-C ends tee, which read them.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", TALKER_CODE],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "heard\n"
    process.stdout.close()
    process.stderr.close()
    process.stdin.write("\n")
    process.stdin.close()
    assert process.wait() == 0


# the environment of a launcher, and whether it kills before a run can save
LAUNCHERS: list[tuple[dict[str, str], bool]] = [
    ({}, False),  # no launcher
    ({"TORCHELASTIC_RUN_ID": "1"}, True),
    (
        {
            "TORCHELASTIC_RUN_ID": "1",
            "ACCELERATE_CONFIG_DS_FIELDS": "zero_stage,offload_param_device",
        },
        True,
    ),
    (
        {"TORCHELASTIC_RUN_ID": "1", "ACCELERATE_CONFIG_DS_FIELDS": "shutdown_timeout,zero_stage"},
        False,
    ),
    ({"TORCHELASTIC_RUN_ID": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}, False),
]


@pytest.mark.usefixtures("signal_handlers")
def test_a_launcher_that_kills_too_early_is_told_of_once(monkeypatch, capsys):
    """Rank 0 warns, once, if the launcher kills its processes too early for a save.

    torch's launcher waits 30 seconds after a signal, unless an environment variable or accelerate's
    config sets another time.
    """
    for environment, too_early in LAUNCHERS:
        for name in (
            "TORCHELASTIC_RUN_ID",
            "ACCELERATE_CONFIG_DS_FIELDS",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        ):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        for first in (True, False):
            StopOnSignal().on_train_begin(None, trainer_state(is_first_rank=first), None)
        warning_count = capsys.readouterr().err.count(
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=3600 accelerate launch"
        )
        assert warning_count == (1 if too_early else 0), environment


# The first of these that a command imports, or the first file that it was told to read, is where
# Ctrl-C comes.
FIRST_IMPORTS_AND_FILES = (
    "numpy",
    "torch",
    "transformers",
    "datasets",
    "pyarrow",
    "yaml",
    "PIL",
    "safetensors",
    "a.json",
)
WORDS_BY_COMMAND = {
    "adora_vl.export": ["RUN", "OUT"],
    "adora_vl.migrate": ["easyr1", "a.json"],
    "adora_vl.report": ["."],
    "eval.compare": ["a.json", "b.json"],
    "eval": ["geometry3k", "score"],
    "adora_vl": ["train", "--config", str(ROOT / "configs/train/smoke_cpu.yaml")],
}
REASON_BY_QUICK_COMMAND = {
    "adora_vl": "lists the commands, and answers at once",
    "adora_vl.rewards.explain": "imports nothing that takes long, and answers at once",
}
# The file that Python runs at its start, before the command
SITE_CUSTOMIZE_CODE = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test runner in the background passes on that it is ignored
pressed = []
def hook(event, values):
    if event in ("import", "open") and str(values[0]) in {FIRST_IMPORTS_AND_FILES} and not pressed:
        pressed.append(values[0])
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(hook)
"""


def slow_command_modules() -> list[str]:
    """Return the modules that are commands, and take long to import."""
    modules = []
    for top in ("adora_vl", "data_prep", "eval"):
        for path in sorted((ROOT / top).rglob("*.py")):
            if '__name__ == "__main__"' in path.read_text():
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                modules.append(name.removesuffix(".__main__"))
    return [name for name in modules if name not in REASON_BY_QUICK_COMMAND]


def press_ctrl_c(command: list[str], folder: Path) -> tuple[int, str]:
    """Run Python with a command that is interrupted while it imports; return exit code and stderr.

    The command's folder is below `folder`, and holds the one file `a.json`.
    """
    start_files = folder / "start"
    start_files.mkdir()
    (start_files / "sitecustomize.py").write_text(SITE_CUSTOMIZE_CODE)
    working_folder = folder / "work"
    working_folder.mkdir()
    (working_folder / "a.json").write_text("{}")
    process = subprocess.run(
        [sys.executable, *command],
        cwd=working_folder,
        env={"PYTHONPATH": f"{start_files}:{ROOT}", "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert [path.name for path in working_folder.iterdir()] == ["a.json"]
    return process.returncode, process.stderr


@pytest.mark.slow
@pytest.mark.parametrize("module", slow_command_modules())
def test_a_command_that_is_interrupted_says_so_in_one_line(module, tmp_path):
    """A command that Ctrl-C interrupts ends with its own exit code and one line.

    Ctrl-C comes at the first slow import, or when the first file is opened.
    """
    arguments = WORDS_BY_COMMAND.get(
        module, ["--config", str(ROOT / "configs/train/smoke_cpu.yaml")]
    )
    code, output = press_ctrl_c(["-m", module, *arguments], tmp_path)
    assert code == EXIT_INTERRUPTED, output
    assert output.startswith("interrupted"), output
    assert output.count("\n") == 1, output


def test_the_installed_command_is_interrupted_in_one_line(tmp_path):
    """Ctrl-C during its imports ends the script as any command, without a traceback."""
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for name, entry_point in entry_points.items():
        module, _, function = entry_point.partition(":")
        script = tmp_path / name
        script.write_text(f"import sys; from {module} import {function}; sys.exit({function}())")
        code, output = press_ctrl_c([str(script), "eval", "geometry3k", "score"], tmp_path)
        assert (code, output) == (EXIT_INTERRUPTED, "interrupted\n")


def test_a_script_of_the_users_keeps_its_traceback(tmp_path):
    """It imports the trainer, and Ctrl-C is its own affair."""
    _, output = press_ctrl_c(["-c", "import adora_vl.evals.prepared"], tmp_path)
    assert output.startswith("Traceback"), output
    assert output.endswith("KeyboardInterrupt\n"), output


def test_a_run_that_is_interrupted_before_its_first_step(tmp_path, monkeypatch, capsys):
    """Ctrl-C outside of the training ends the command with its own exit code and one line.

    It comes while the trainer is built, and then while the config is checked.
    """

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    config = type("Config", (), {"model_init_kwargs": None, "output_dir": str(tmp_path)})
    monkeypatch.setattr(
        train,
        "prepare",
        lambda *_: SimpleNamespace(
            finished_checkpoint=None, config=config, request=SimpleNamespace(is_main_process=True)
        ),
    )
    for function in ("build_trainer", "prepare"):
        monkeypatch.setattr(train, function, interrupted)
        assert train.main(["--model_name_or_path", "tiny"]) == EXIT_INTERRUPTED
        assert (
            capsys.readouterr().err
            == "interrupted outside the training; checkpoints are as they were\n"
        )
