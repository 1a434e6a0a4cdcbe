"""Signals and a launcher that goes: what counts as one, what is left ignored, and output that nobody reads any more."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adora_vl.checkpoint import launcher
from adora_vl.checkpoint.stop import REPEAT_S, StopOnSignal
from adora_vl.errors import RunError

ROOT = Path(__file__).parents[2]
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
WORKER = SimpleNamespace(is_world_process_zero=True, global_step=0)


@contextlib.contextmanager
def clock_and_kills() -> Iterator[tuple[SimpleNamespace, list[int]]]:
    """A clock that stands until it is set, and the signals by which a run would have ended itself."""
    clock, kills = SimpleNamespace(now=0.0), []
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(time, "monotonic", lambda: clock.now)
        patches.setattr(os, "kill", lambda pid, number: kills.append(number))
        patches.setattr(signal, "signal", lambda number, handler: None)
        patches.setattr(os, "write", lambda descriptor, words: len(words))
        yield clock, kills


@given(st.lists(st.tuples(st.sampled_from(SIGNALS), st.floats(0.0, 2 * REPEAT_S)), min_size=1, max_size=8))
def test_repeats_count_as_one_and_only_a_late_one_that_somebody_meant_ends_at_once(sent):
    times, now = [], 0.0
    with clock_and_kills() as (clock, kills):
        run = StopOnSignal()
        for number, gap in sent:
            now += gap
            times.append(now)
            clock.now = now
            run._handle(number, None)
    late = [number for (number, _), when in zip(sent, times, strict=True) if when - times[0] >= REPEAT_S]
    assert run.received == sent[0][0]
    assert kills == [number for number in late if number != signal.SIGHUP]


def test_what_the_launcher_sends_after_an_error_does_not_talk_over_it(capfd):
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
def handlers():
    """Puts the handlers of this process back. Under nohup SIGHUP is ignored; here it is as in a terminal."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("elastic", [False, True])
def test_under_nohup_a_closed_terminal_is_ignored_unless_the_launcher_hands_it_on(handlers, monkeypatch, elastic):
    """torch's launcher handles SIGHUP under nohup too, and kills what does not end."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if elastic:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3600")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run = StopOnSignal()
    run.on_train_begin(None, WORKER, None)
    os.kill(os.getpid(), signal.SIGHUP)
    assert (run.received == signal.SIGHUP) is elastic
    os.kill(os.getpid(), signal.SIGTERM)
    assert run.received is not None


def test_a_run_that_was_not_stopped_leaves_the_signals_as_they_were(handlers):
    run = StopOnSignal()
    run.on_train_begin(None, WORKER, None)
    assert all(signal.getsignal(number) != handler for number, handler in handlers.items())
    run.release()
    assert {number: signal.getsignal(number) for number in SIGNALS} == handlers


def test_a_stopped_run_keeps_its_exit_code_whatever_comes_after_its_last_write(handlers):
    run = StopOnSignal()
    run.on_train_begin(None, WORKER, None)
    run.stopped = True
    run.release()
    assert {signal.getsignal(number) for number in SIGNALS} == {signal.SIG_IGN}


ORPHAN = """
import os, signal, sys
from adora_vl.checkpoint import launcher
launcher._WATCH_S = 0.01
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
launcher.watch_launcher()
print("ready", flush=True)
while True:
    signal.pause()
"""
LAUNCHER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]])
sys.stdin.read()
"""


@pytest.mark.parametrize(("when", "said"), [("before training", "ready\n"), ("saves", "ready\nsaved\n")])
def test_a_process_ends_with_its_launcher_and_saves_where_there_is_something_to_save(when, said):
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, ORPHAN, when],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    first = process.stdout.readline()
    process.kill()
    assert first + process.stdout.read() == said  # to the end of the file, so the child has ended
    process.wait()


@pytest.mark.parametrize(
    ("name", "watches"), [("TORCHELASTIC_RUN_ID", True), ("ACCELERATE_DYNAMO_MODE", True), ("SHELL", False)]
)
def test_a_process_that_no_launcher_started_outlives_its_shell(monkeypatch, name, watches):
    assert not any(launcher.under_launcher({key: "1"}) for key in ("SHELL", "ACCELERATE_MIXED_PRECISION"))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("ACCELERATE_DYNAMO_MODE", raising=False)
    monkeypatch.setenv(name, "1")
    started = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: started.append(thread.name))
    launcher.watch_launcher()
    assert started == (["launcher-watch"] if watches else [])


TALKER = """
import sys
from adora_vl.checkpoint.outputs import mute_lost_outputs
mute_lost_outputs()
print("heard", flush=True)
sys.stdin.readline()
mute_lost_outputs()
print("to nobody", flush=True)
print("to nobody", file=sys.stderr, flush=True)
"""


def test_output_that_nobody_reads_any_more_does_not_end_a_run():
    """`accelerate launch ... | tee log`: Ctrl-C ends tee as well."""
    process = subprocess.Popen(
        [sys.executable, "-c", TALKER], cwd=ROOT,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "heard\n"
    process.stdout.close()
    process.stderr.close()
    process.stdin.write("\n")
    process.stdin.close()
    assert process.wait() == 0


@pytest.mark.parametrize(
    ("environment", "too_early"),
    [
        ({}, False),  # no launcher
        ({"TORCHELASTIC_RUN_ID": "1"}, True),
        ({"TORCHELASTIC_RUN_ID": "1", "ACCELERATE_CONFIG_DS_FIELDS": "zero_stage,offload_param_device"}, True),
        ({"TORCHELASTIC_RUN_ID": "1", "ACCELERATE_CONFIG_DS_FIELDS": "shutdown_timeout,zero_stage"}, False),
        ({"TORCHELASTIC_RUN_ID": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}, False),
    ],
)
def test_a_launcher_that_kills_too_early_is_told_of_once(monkeypatch, capsys, handlers, environment, too_early):
    for name in ("TORCHELASTIC_RUN_ID", "ACCELERATE_CONFIG_DS_FIELDS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for first in (True, False):
        StopOnSignal().on_train_begin(None, SimpleNamespace(is_world_process_zero=first), None)
    assert capsys.readouterr().err.count("TORCH_ELASTIC_SHUTDOWN_TIMEOUT=3600 accelerate launch") == too_early
