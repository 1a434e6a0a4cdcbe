"""A crash at any moment leaves the old output or the new one, and the next preparation clears up after it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_prep import output as output_module
from data_prep.output import complete_or_absent
from data_prep.storage import load_split
from tests.unit.data_prep_support import files, prepare, problem_folder

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]


def _synthetic(output: Path, rows: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "data_prep",
        "synthetic",
        "--output",
        str(output),
        "--rows",
        str(rows),
        "--test-rows",
        "0",
        "--overwrite",
    ]


def _partials(output: Path) -> list[Path]:
    return sorted(output.parent.glob(f".{output.name}.*"))


def _wait_until(condition: object, process: subprocess.Popen[bytes]) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "the preparation ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_kill_9_in_the_middle_leaves_the_old_output_and_the_next_run_clears_up(tmp_path: Path) -> None:
    output = tmp_path / "out"
    problem_folder(tmp_path / "raw")
    assert prepare("intergps", tmp_path / "raw", output) == 0
    before = files(output)
    process = subprocess.Popen(_synthetic(output, 100_000), cwd=REPOSITORY, stderr=subprocess.DEVNULL)
    try:  # until rows are on the disk
        _wait_until(lambda: any(p.stat().st_size > 4 for p in tmp_path.glob(".out.partial-*/data/*")), process)
        (partial,) = _partials(output)
        assert prepare("intergps", tmp_path / "raw", output) == 0, "another preparation at the same time"
        assert partial.is_dir(), "a living process was robbed of its folder"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert files(output) == before
    assert partial.is_dir()  # nobody could remove it yet
    assert prepare("intergps", tmp_path / "raw", output) == 0
    assert not _partials(output)
    assert files(output) == before


def test_kill_9_of_a_preparation_ends_its_workers(tmp_path: Path) -> None:
    for number in range(400):
        problem_folder(tmp_path / "raw", number=number)
    command = [sys.executable, "-m", "data_prep", "geometry3k", "--source", "intergps", "--workers", "2"]
    process = subprocess.Popen(
        [*command, "--input", str(tmp_path / "raw"), "--output", str(tmp_path / "out")],
        cwd=REPOSITORY,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # the workers can be found by it
    )
    try:
        _wait_until(lambda: any(p.stat().st_size > 4 for p in tmp_path.glob(".out.partial-*/data/*")), process)
        assert len(_members(process.pid)) > 2, "there are no workers to be ended"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 60
    while _members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _members(process.pid)
    assert not (tmp_path / "out").exists()


def _members(session: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(path.name))
    return found


def test_there_is_an_output_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old and new are swapped by one call; the file system of this machine can do it."""
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(Path, "rename", _refuse)
    for content in ("one", "two"):
        with complete_or_absent(tmp_path / "out") as folder:
            (folder / "manifest.json").write_text(json.dumps({"made_by": "data_prep", "files": {}, "is": content}))
        assert content in (tmp_path / "out" / "manifest.json").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _refuse(self: Path, target: Path) -> Path:
    raise AssertionError(f"renamed to {target}")


@pytest.mark.parametrize("killed_after", ["old is away", "new is in"])
def test_where_names_cannot_be_swapped_a_kill_between_the_two_renames_is_undone(
    killed_after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    problem_folder(tmp_path / "raw")
    assert prepare("intergps", tmp_path / "raw", output) == 0
    before = files(output)
    script = f"""
import os, shutil, sys
from pathlib import Path
from data_prep import output
from data_prep.cli import main
output._exchanged = lambda one, other: False
rename, calls = Path.rename, []
def dying(self, target):
    result = rename(self, target)
    calls.append(self)
    if len(calls) == {1 if killed_after == "old is away" else 2}:
        os.kill(os.getpid(), 9)
    return result
Path.rename = dying
main(sys.argv[1:])
"""
    command = [sys.executable, "-c", script, "synthetic", "--output", str(output), "--rows", "3", "--test-rows", "0"]
    command.append("--overwrite")
    done = subprocess.run(command, cwd=REPOSITORY, check=False)
    assert done.returncode == -signal.SIGKILL
    assert output.exists() == (killed_after == "new is in") and _partials(output)

    with pytest.raises(KeyboardInterrupt), complete_or_absent(output):
        raise KeyboardInterrupt  # the next preparation, whatever becomes of it, first puts things right
    assert not _partials(output)
    if killed_after == "old is away":
        assert files(output) == before
    else:
        assert load_split(output, "train").num_rows == 3


def test_two_steps_work_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_module, "_exchanged", lambda one, other: False)
    for number in (1, 2):
        problem_folder(tmp_path / "raw", number=number)
        assert prepare("intergps", tmp_path / "raw", tmp_path / "out") == 0
        assert load_split(tmp_path / "out", "train").num_rows == number
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "raw"]
