"""A build that was killed does not stop every later run."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from adora_vl.utils import launch

TIME_LONG_AGO = time.time() - 2 * launch.FOREIGN_BUILD_PATIENCE_S


@pytest.fixture
def make_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock of a build that was killed long ago, where torch would leave it."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    build = tmp_path / "shm_comm"
    build.mkdir()
    for file in (build / "build.ninja", build / "lock"):
        file.touch()
        os.utime(file, (TIME_LONG_AGO, TIME_LONG_AGO))
    os.utime(build, (TIME_LONG_AGO, TIME_LONG_AGO))
    return build / "lock"


def test_the_folder_is_the_one_in_which_torch_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from torch.utils.cpp_extension import _get_build_directory

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    build = Path(_get_build_directory("an_operator", verbose=False))
    assert build.parent.parent == launch.builds_folder()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "own"))
    assert Path(_get_build_directory("an_operator", verbose=False)).parent == launch.builds_folder()


def test_an_old_lock_that_nobody_holds_is_removed_in_one_line(
    make_lock: Path, capfd: pytest.CaptureFixture[str]
):
    launch.release_killed_builds(sleep=lambda _: pytest.fail("it waited"))
    assert not make_lock.exists()
    assert make_lock.with_name("build.ninja").exists()
    assert capfd.readouterr().err == f"removed {make_lock}: the build that it guarded was killed\n"


def test_the_lock_of_a_build_that_goes_on_stays(make_lock: Path):
    """However long one file takes to compile: ninja works in the folder."""
    with subprocess.Popen(["sleep", "60"], cwd=make_lock.parent) as builder:
        assert launch.build_was_killed(make_lock) is False
        launch.release_killed_builds(sleep=lambda _: pytest.fail("it waited"))
        builder.kill()
    assert make_lock.exists()
    assert launch.build_was_killed(make_lock) is True


@pytest.mark.parametrize("written", ["lock", "operator.o"])
def test_a_build_elsewhere_is_waited_for_while_it_writes(
    make_lock: Path, capfd: pytest.CaptureFixture[str], written: str
):
    """A lock without a builder here may be another machine's, which shares the home folder."""
    new = make_lock.with_name(written)
    new.touch()
    os.utime(new)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        for file in (new, make_lock, make_lock.parent):
            os.utime(file, (TIME_LONG_AGO, TIME_LONG_AGO))

    launch.release_killed_builds(sleep=sleep)
    assert len(waits) == 1
    assert not make_lock.exists()
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith("waiting up to 180 s for a build of shm_comm")
    assert f"rm {make_lock}" in first
    assert second.startswith("removed")


def test_a_lock_that_its_owner_gives_back_is_waited_for(make_lock: Path):
    os.utime(make_lock)
    launch.release_killed_builds(sleep=lambda _: make_lock.unlink())
    assert not make_lock.exists()


def test_the_other_ranks_leave_the_removal_to_the_first(
    make_lock: Path, monkeypatch: pytest.MonkeyPatch, capfd
):
    """A lock that vanished before the first rank holds its own would tell them that the build is
    done.
    """
    monkeypatch.setenv("LOCAL_RANK", "1")
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        assert make_lock.exists()
        if len(waits) == 3:
            make_lock.unlink()

    launch.release_killed_builds(sleep=sleep)
    assert len(waits) == 3
    assert not capfd.readouterr().err


def test_only_a_run_with_deepspeed_looks(make_lock: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED", raising=False)
    for under_deepspeed, stays in (
        (None, True),
        ("false", True),
        ("true", False),
    ):
        if under_deepspeed:
            monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", under_deepspeed)
        launch.prepare_engine_environment()
        assert make_lock.exists() is stays
