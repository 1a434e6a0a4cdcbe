"""Jobs on daemon threads: what they raise, and what Ctrl-C ends."""

import subprocess
import sys

import pytest

from adora_vl.utils.daemon_threads import run_on_daemon_threads


def test_each_job_has_its_own_outcome():
    """A job that ends the process in a pool raises in its own future only."""

    def end_process() -> None:
        """Raise what a pool of `multiprocessing` never returns from."""
        raise SystemExit(3)

    futures = run_on_daemon_threads([lambda: None, end_process], max_threads=2, thread_name="jobs")
    assert futures[0].result() is None
    with pytest.raises(SystemExit):
        futures[1].result()
    assert run_on_daemon_threads([], max_threads=2, thread_name="jobs") == []


def test_ctrl_c_ends_the_wait_and_begins_no_further_job():
    """Ctrl-C ends the wait for a job that hangs, and the four jobs behind it do not begin.

    The job itself sends the signal, which interrupts the main thread.
    """
    script = """
import os, signal, threading
from adora_vl.utils.daemon_threads import run_on_daemon_threads
signal.signal(signal.SIGINT, signal.default_int_handler)
begun = []
def hang():
    begun.append(True)
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()
try:
    run_on_daemon_threads([hang] * 5, max_threads=1, thread_name="jobs")
except KeyboardInterrupt:
    print(len(begun))
"""
    process = subprocess.run(
        [sys.executable, "-c", script], timeout=120, check=True, capture_output=True, text=True
    )
    assert process.stdout == "1\n"
