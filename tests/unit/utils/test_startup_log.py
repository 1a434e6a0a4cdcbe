"""What libraries say while a run loads is in a file, and not lost where loading fails."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LOADING_CODE = """
import logging, os, sys
from pathlib import Path
from adora_vl.utils.errors import UserError
from adora_vl.utils.launch import StartupLog
logging.basicConfig()
print("ours before")
log = StartupLog(Path(sys.argv[1]), is_first_process=True)
with log:
    print("theirs, printed", flush=True)
    logging.warning("theirs, logged")
    os.write(2, b"theirs, of compiled code\\n")
    for number in range(30):
        print(f"line {number}", file=sys.stderr)
    {inside}
print("ours after")
logging.warning("logged after")
"""
LINES_OF_LIBRARIES = {"theirs, printed", "WARNING:root:theirs, logged", "theirs, of compiled code"}


def run_loading_code(log: Path, code_while_loading: str) -> tuple[str, list[str]]:
    """Run a process with this code while it loads; return its output and its lines of stderr."""
    command = [sys.executable, "-c", LOADING_CODE.replace("{inside}", code_while_loading), str(log)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return process.stdout, process.stderr.splitlines()


def test_the_screen_has_our_lines_and_the_file_has_theirs(tmp_path):
    """The log is begun anew, and has what was printed, logged and written by compiled code."""
    log = tmp_path / "log"
    log.write_text("of an earlier start\n")
    output, errors = run_loading_code(log, "pass")
    assert output == "ours before\nours after\n"
    assert errors == ["WARNING:root:logged after"]
    lines = log.read_text().splitlines()
    assert set(lines) >= LINES_OF_LIBRARIES
    assert "line 29" in lines
    assert "of an earlier start" not in lines


def test_the_last_of_theirs_stand_on_the_screen_where_loading_fails(tmp_path):
    """The last 20 of the 30 lines are printed, with the log's path above and the error below."""
    output, errors = run_loading_code(tmp_path / "log", "raise RuntimeError('no engine')")
    assert output == "ours before\n"
    assert errors[0].startswith("The last of what the libraries have said (")
    assert str(tmp_path / "log") in errors[0]
    assert errors[1:21] == [f"line {number}" for number in range(10, 30)]
    assert errors[-1] == "RuntimeError: no engine"


@pytest.mark.parametrize(
    "code_while_loading",
    ["raise UserError('a wrong key')", "log.release(); raise RuntimeError('later')"],
)
def test_a_mistake_and_an_error_after_the_start_stand_alone(code_while_loading, tmp_path):
    """A user's mistake, or an error after `release`, is printed without the libraries' lines."""
    _, errors = run_loading_code(tmp_path / "log", code_while_loading)
    assert errors[0] == "Traceback (most recent call last):"
    assert not any("line 2" in line for line in errors[-1:])


def test_a_library_that_prints_on_a_full_disk_is_one_line():
    """Writing to /dev/full always fails, as on a full disk."""
    _, errors = run_loading_code(Path("/dev/full"), "sys.stderr.write('x'); sys.stderr.flush()")
    message = "output: '/dev/full' cannot be written (No space left on device); free some space, or"
    assert message in errors[-1]


def test_another_full_disk_is_not_taken_for_that_of_the_file(tmp_path):
    inside = "raise OSError(28, 'No space left on device', '/cache')"
    _, errors = run_loading_code(tmp_path / "log", inside)
    assert errors[-1] == "OSError: [Errno 28] No space left on device: '/cache'"
    assert str(tmp_path / "log") in errors[0]


def test_a_file_that_cannot_be_opened_leaves_everything_on_the_screen(tmp_path):
    """Without a log, nothing is redirected."""
    output, errors = run_loading_code(tmp_path / "nowhere" / "log", "pass")
    assert "theirs, printed" in output
    assert "theirs, of compiled code" in errors
