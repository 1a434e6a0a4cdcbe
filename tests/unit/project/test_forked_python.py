"""Processes that tests fork end and print as those of a user do."""

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.forked_python import PythonProcess
from tests.support.launch import run_command

pytestmark = pytest.mark.slow

# Each line is a script, with the exit code and the end of stderr that Python gives it.
ENDS_OF_SCRIPTS = [
    ("print('done')", 0, ""),
    ("import sys; sys.exit(7)", 7, ""),
    ("import sys; sys.exit('a reason')", 1, "a reason\n"),
    ("raise ValueError('a fault')", 1, "ValueError: a fault\n"),
    ("import os; os._exit(75)", 75, ""),
    ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
]
# torch's launcher starts two processes of this module.
LAUNCHED_MODULE = """
import os, sys
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, torch: {'torch' in sys.modules}")
sys.exit(3 * int(os.environ["RANK"]))
"""


@pytest.mark.parametrize(("script", "code", "stderr"), ENDS_OF_SCRIPTS)
def test_a_forked_script_ends_as_pythons_does(script, code, stderr, tmp_path):
    file = tmp_path / "script.py"
    file.write_text(script)
    completed = run_command([sys.executable, str(file)], check=False)
    assert completed.returncode == code
    assert completed.stderr.endswith(stderr)
    assert completed.stdout == ("done\n" if code == 0 else "")


def test_a_forked_process_is_ended_by_sigterm_with_its_own_group(tmp_path):
    """A server that a test has started is in a group of its own, and ends when it is asked to."""
    file = tmp_path / "script.py"
    file.write_text("import time; open('started', 'w').close(); time.sleep(600)")
    log = tmp_path / "log"
    process = PythonProcess(
        [str(file)], os.environ, stdout=log, stderr=log, folder=tmp_path, starts_session=True
    )
    while not Path(tmp_path, "started").exists():
        assert process.poll() is None, log.read_text()
    assert os.getpgid(process.pid) == process.pid
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM


def test_processes_of_a_launcher_are_forked_and_their_end_is_the_launchers(tmp_path):
    """They have the libraries already, each has its rank, and the one that fails is named."""
    (tmp_path / "launched.py").write_text(LAUNCHED_MODULE)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    completed = run_command(
        [*launcher, "-m", "launched"], check=False, environment={"PYTHONPATH": str(tmp_path)}
    )
    assert sorted(completed.stdout.splitlines()) == [
        "rank 0 of 2, torch: True",
        "rank 1 of 2, torch: True",
    ]
    assert completed.returncode == 1
    assert "exitcode  : 3" in completed.stderr
