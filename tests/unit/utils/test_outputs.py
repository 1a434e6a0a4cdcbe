"""What commands do when nobody reads what they print: a training goes on, others end quietly."""

import os
import select
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from adora_vl.utils.cli import EXIT_BROKEN_PIPE
from tests.support.paths import REPOSITORY

# Prints a line; then more, when its stdin has ended.
PRINT_TWICE = """
import sys
from adora_vl.utils.outputs import ignore_closed_outputs
ignore_closed_outputs()
print("read", flush=True)
sys.stdin.read()
for number in range(3):
    print("not read", flush=True)
    sys.stderr.write("an error line\\n")
print("the end", file=sys.stderr)
"""
PRINT_AND_WAIT = """
import sys
from adora_vl.utils.outputs import ignore_closed_outputs
ignore_closed_outputs()
print("step 1")
sys.stdin.read()
"""
PRINT_ONCE = """
import sys
from adora_vl.utils.outputs import ignore_closed_outputs
ignore_closed_outputs()
print("a line")
open("first file", "w").write("its content")
"""


class Ended(NamedTuple):
    """A process that has ended."""

    exit_code: int
    stderr: str


def run_python(words: Sequence[str], redirection: str, folder: str = ".") -> Ended:
    """Run Python with these words in a shell that redirects its output, such as `>&-`."""
    command = f'cd "$0" && exec "$@" {redirection}'
    process = subprocess.run(
        ["bash", "-c", command, folder, sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return Ended(process.returncode, process.stderr)


def test_a_line_of_a_training_reaches_a_pipe_at_once():
    """`train | tee run.log` shows each line when it is printed."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRINT_AND_WAIT],
        env={"PATH": os.defpath, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        outputs_to_read, _, _ = select.select([process.stdout], [], [], 60)
        assert outputs_to_read, "nothing came while the process was running"
        assert process.stdout.readline() == b"step 1\n"
    finally:
        process.communicate()


@pytest.mark.parametrize("options", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_a_training_goes_on_when_its_pipe_is_closed(options):
    """A process goes on when the reader of its stdout has gone, and says so once.

    It prints, waits until the pipe is closed, and prints again.
    """
    with subprocess.Popen(
        [sys.executable, *options, "-c", PRINT_TWICE],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "read\n"
        process.stdout.close()
        process.stdin.close()
        lines = process.stderr.read().splitlines()
    assert process.returncode == 0
    assert lines.pop(0).startswith("stdout has no reader any more (a closed pipe or terminal)")
    assert lines == ["an error line"] * 3 + ["the end"], "stdout's end is told once"


def test_a_training_goes_on_when_the_disk_of_its_log_is_full():
    assert run_python(["-c", PRINT_TWICE], "> /dev/full").exit_code == 0


def test_no_file_gets_what_is_printed_to_an_output_that_was_closed_before(tmp_path):
    outcome = run_python(["-c", PRINT_ONCE], ">&- 2>&-", folder=str(tmp_path))
    assert outcome.exit_code == 0
    assert (tmp_path / "first file").read_text() == "its content"


COMMANDS = [
    ["-m", "adora_vl"],
    ["-m", "adora_vl.train", "--help"],
    ["-m", "eval"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[1:]))
def test_a_command_that_only_prints_ends_without_a_traceback(words):
    """A reader that has gone, a closed output and a full disk each have their exit code."""
    # The reader ends before the command prints.
    unread = run_python(words, "| true; exit ${PIPESTATUS[0]}")
    assert unread == Ended(EXIT_BROKEN_PIPE, "")
    closed = run_python(words, ">&-")
    assert closed == Ended(0, "")
    full = run_python(words, "> /dev/full")
    assert full.exit_code == 2
    assert full.stderr.startswith(
        "error: stdout: what is printed cannot be written (No space left on device); make room"
    )
    assert full.stderr.count("\n") == 1
