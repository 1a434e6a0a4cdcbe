r"""The worker processes: killed, killed from outside, forked under, orphaned. All jobs go the way of real answers."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from adora_vl.rewards import Grade, grade, grade_batch
from adora_vl.rewards import pool as pool_module
from adora_vl.rewards.grammar import read_tree
from adora_vl.rewards.pool import Pool, Worker, close_pool, shared_pool
from adora_vl.rewards.wire import pack

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
HONEST, GOLD = r"\boxed{2(x+3)}", "2x+6"
SLOW = "((((x+1)^{64})^{64})^{64})^{64}"  # sympy computes a rational with 10^7 digits
ENDLESS = 600.0


@pytest.fixture(autouse=True)
def _fresh_pool() -> Iterator[None]:
    close_pool()
    yield
    close_pool()


def eventually(condition: Callable[[], bool], seconds: float = 20) -> bool:
    """Whether `condition` comes true; polled, since no signal tells of another process."""
    until = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < until:
        time.sleep(0.02)
    return found


def gone(pid: int) -> bool:
    """Whether a process is neither running nor a zombie that somebody should have waited for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z" and int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) != os.getpid()


def in_python(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, cwd=ROOT)


def test_no_process_is_started_for_what_needs_no_sympy() -> None:
    grade_batch([r"\boxed{\sqrt{75}}", r"\boxed{x}", "none", r"\boxed{9^{9^9}}"], [r"5\sqrt{3}", "12", "5", "9"])
    assert shared_pool().pids == []
    assert grade(HONEST, GOLD) == Grade("correct", "2(x+3)", "same_value")
    assert len(shared_pool().pids) == 1


def test_a_worker_imports_sympy_and_nothing_heavier() -> None:
    heavy = "{'torch', 'trl', 'transformers', 'numpy', 'datasets', 'math_verify', 'vllm'}"
    code = f"import sys, adora_vl.rewards.worker, adora_vl.rewards.symbolic; print(sorted({heavy} & set(sys.modules)))"
    assert in_python(code).communicate()[0].strip() == "[]"


def test_past_the_deadline_the_worker_is_killed_and_replaced() -> None:
    assert grade(HONEST, GOLD).verdict == "correct"
    (first,) = shared_pool().pids
    found = grade(rf"\boxed{{{SLOW}}}", "x", deadline_s=0.3)
    assert (found.verdict, found.reason, found.symbolic) == ("timeout", "deadline", True)
    assert found.ms < 5000
    assert gone(first)
    assert first not in shared_pool().pids
    assert grade(HONEST, GOLD).verdict == "correct"


def test_attacks_in_many_threads_neither_hang_nor_spoil_honest_answers() -> None:
    texts = [rf"\boxed{{{SLOW}}}" if row % 5 == 0 else HONEST for row in range(20)]
    with ThreadPoolExecutor(4) as threads:
        verdicts = list(threads.map(lambda text: grade(text, GOLD, deadline_s=60 if text == HONEST else 0.2), texts))
    assert [one.verdict for one in verdicts] == ["timeout" if row % 5 == 0 else "correct" for row in range(20)]
    assert len(shared_pool().pids) <= shared_pool().size


def test_in_a_batch_each_answer_has_its_own_deadline() -> None:
    texts = [rf"\boxed{{{SLOW}}}"] * 3 + [HONEST] * 10 + [r"\boxed{7}", "no box"]
    grades = grade_batch(texts, [GOLD] * 13 + ["7", "7"], deadline_s=0.5)
    assert [one.verdict for one in grades] == ["timeout"] * 3 + ["correct"] * 11 + ["unparseable"]
    assert [one.symbolic for one in grades] == [True] * 13 + [False] * 2


def test_waiting_for_a_busy_worker_counts_for_a_single_answer() -> None:
    pool = Pool(size=1)
    try:
        slow = threading.Thread(target=pool.ask, args=(read_tree(SLOW), read_tree("x"), 1.0))
        slow.start()
        assert eventually(lambda: bool(pool.pids))
        assert pool.ask(read_tree("x+1"), read_tree("1+x"), 0.1) == "deadline"
        slow.join()
        assert pool.ask(read_tree("x+1"), read_tree("1+x"), 5) == "equal"
    finally:
        pool.close()


def test_a_worker_that_was_killed_while_idle_costs_nothing() -> None:
    assert grade(HONEST, GOLD).verdict == "correct"
    (pid,) = shared_pool().pids
    os.kill(pid, signal.SIGKILL)
    assert grade(HONEST, GOLD).verdict == "correct"
    assert gone(pid)


def test_what_stops_the_run_does_not_reach_into_its_grading() -> None:
    """Slurm, systemd and torch's launcher send a stop to every process; the generation is still graded."""
    assert grade(HONEST, GOLD).verdict == "correct"
    before = shared_pool().pids
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(before[0], number)
        assert grade(HONEST, GOLD).verdict == "correct"
    assert shared_pool().pids == before


def test_a_job_whose_worker_is_killed_is_tried_once_more() -> None:
    assert grade(HONEST, GOLD).verdict == "correct"
    pool, found = shared_pool(), []
    job = threading.Thread(target=lambda: found.append(grade(rf"\boxed{{{SLOW}}}", "x", deadline_s=ENDLESS)))
    job.start()
    killed: set[int] = set()
    while len(killed) < 2:
        for worker in [one for one in list(pool._all) if one.jobs and one.pid not in killed]:
            if worker.jobs > (0 if killed else 1):  # the first has had the honest job before
                os.kill(worker.pid, signal.SIGKILL)
                killed.add(worker.pid)
        time.sleep(0.01)
    job.join(timeout=30)
    assert [(one.verdict, one.reason) for one in found] == [("timeout", "worker_died")]
    assert all(gone(pid) for pid in killed)
    assert grade(HONEST, GOLD).verdict == "correct"


def test_memory_is_limited() -> None:
    assert grade(HONEST, GOLD).verdict == "correct"
    (pid,) = shared_pool().pids
    assert resource.prlimit(pid, resource.RLIMIT_AS) == (pool_module.MEMORY_BYTES, pool_module.MEMORY_BYTES)
    used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (used + (1 << 20), pool_module.MEMORY_BYTES))  # to get there sooner
    found = grade(rf"\boxed{{{SLOW}}}", "x", deadline_s=60)
    assert (found.verdict, found.reason) == ("timeout", "memory")
    assert gone(pid)
    assert grade(HONEST, GOLD).verdict == "correct"


def test_a_worker_ends_itself_where_nobody_kills_it() -> None:
    worker = Worker()
    assert worker.wait_ready(60)
    assert worker._process.stdin
    os.write(worker._process.stdin.fileno(), pack({"answer": read_tree(SLOW), "gold": read_tree("x"), "seconds": 0.1}))
    assert worker._process.wait(timeout=60) == -signal.SIGXCPU
    worker.kill()


@pytest.mark.parametrize(
    "python", ["/bin/false", str(Path(__file__).with_name("no-python"))], ids=["it ends", "it is missing"]
)
def test_a_worker_that_cannot_start_is_a_timeout_and_a_warning(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", python)
    with pytest.warns(RuntimeWarning, match="is sympy installed"):
        found = grade(HONEST, GOLD)
    assert (found.verdict, found.reason) == ("timeout", "no_worker")


def _graded_in_child(connection: multiprocessing.connection.Connection) -> None:
    connection.send((grade(HONEST, GOLD).verdict, shared_pool().pids))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_child_process_has_workers_of_its_own(method: str) -> None:
    assert grade(HONEST, GOLD).verdict == "correct"
    ours = shared_pool().pids
    context: Any = multiprocessing.get_context(method)  # typeshed's base class knows no Process
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_graded_in_child, args=(sender,))
    child.start()
    assert receiver.poll(60)
    verdict, theirs = receiver.recv()
    child.join(60)
    assert (verdict, child.exitcode) == ("correct", 0)
    assert not {*ours} & {*theirs}
    assert grade(HONEST, GOLD).verdict == "correct"
    assert shared_pool().pids == ours
    assert eventually(lambda: all(gone(pid) for pid in theirs))  # a multiprocessing child runs no exit handlers


def test_a_fork_while_a_job_is_under_way_does_not_deadlock() -> None:
    assert grade(HONEST, GOLD).verdict == "correct"
    job = threading.Thread(target=grade, args=(rf"\boxed{{{SLOW}}}", "x"), kwargs={"deadline_s": 0.7})
    job.start()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_graded_in_child, args=(sender,))
    child.start()
    assert receiver.poll(60)
    assert receiver.recv()[0] == "correct"
    child.join(60)
    job.join(60)


EXIT = r"""
    import json, threading, time
    from adora_vl.rewards import grade
    from adora_vl.rewards.pool import shared_pool
    assert grade(r"\boxed{2(x+3)}", "2x+6").verdict == "correct"
    slow = r"\boxed{((((x+1)^{64})^{64})^{64})^{64}}"
    threading.Thread(target=grade, args=(slow, "x"), kwargs={"deadline_s": DEADLINE}, daemon=True).start()
    while not any(worker.jobs > 1 for worker in shared_pool()._all):
        time.sleep(0.01)
    print(json.dumps(shared_pool().pids), flush=True)
"""


def test_leaving_ends_the_workers_at_once() -> None:
    process = in_python(EXIT.replace("DEADLINE", "600"))
    pids = json.loads(process.communicate(timeout=60)[0])
    assert process.returncode == 0
    assert pids and all(gone(pid) for pid in pids)


def test_a_killed_trainer_takes_its_workers_along() -> None:
    process = in_python(EXIT.replace("DEADLINE", "0.3") + "    time.sleep(600)\n")
    assert process.stdout
    pids = json.loads(process.stdout.readline())
    process.kill()
    process.communicate(timeout=60)
    assert pids and eventually(lambda: all(gone(pid) for pid in pids))


def test_descriptors_do_not_leak() -> None:
    assert grade(HONEST, GOLD).verdict == "correct"
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(3):
        assert grade(rf"\boxed{{{SLOW}}}", "x", deadline_s=0.05).verdict == "timeout"
    assert len([*Path("/proc/self/fd").iterdir()]) <= before
    assert resource.getrlimit(resource.RLIMIT_CPU)[0] == resource.RLIM_INFINITY  # the limits are the workers' alone
