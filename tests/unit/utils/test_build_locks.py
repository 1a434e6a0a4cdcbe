"""A build that was killed does not stop every later run."""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from adora_vl.config import AdoraGRPOConfig
from adora_vl.utils import launch

TIME_LONG_AGO = time.time() - 2 * launch.FOREIGN_BUILD_PATIENCE_S


@pytest.fixture
def abandoned_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the lock of a build that was killed long ago, where torch would leave it."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    build_folder = tmp_path / "shm_comm"
    build_folder.mkdir()
    for file in (build_folder / "build.ninja", build_folder / "lock"):
        file.touch()
        os.utime(file, (TIME_LONG_AGO, TIME_LONG_AGO))
    os.utime(build_folder, (TIME_LONG_AGO, TIME_LONG_AGO))
    return build_folder / "lock"


def test_the_folder_is_the_one_in_which_torch_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`builds_folder` follows torch's variables, as torch itself does."""
    from torch.utils.cpp_extension import _get_build_directory

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    build_folder = Path(_get_build_directory("an_operator", verbose=False))
    assert build_folder.parent.parent == launch.builds_folder()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "own"))
    assert Path(_get_build_directory("an_operator", verbose=False)).parent == launch.builds_folder()


def test_an_old_lock_that_nobody_holds_is_removed_in_one_line(
    abandoned_lock: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """No wait is needed, and the build's other files stay."""
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waited"))
    launch.release_killed_builds()
    assert not abandoned_lock.exists()
    assert abandoned_lock.with_name("build.ninja").exists()
    assert (
        capfd.readouterr().err
        == f"removed {abandoned_lock}: the build that it guarded was killed\n"
    )


def test_the_lock_of_a_build_that_goes_on_stays(
    abandoned_lock: Path, monkeypatch: pytest.MonkeyPatch
):
    """A process that works in the build's folder, as ninja does, shows that the build goes on."""
    with subprocess.Popen(["sleep", "60"], cwd=abandoned_lock.parent) as builder:
        assert launch.build_was_killed(abandoned_lock) is False
        monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waited"))
        launch.release_killed_builds()
        builder.kill()
    assert abandoned_lock.exists()
    assert launch.build_was_killed(abandoned_lock) is True


@pytest.mark.parametrize("name_of_new_file", ["lock", "operator.o"])
def test_a_build_elsewhere_is_waited_for_while_it_writes(
    abandoned_lock: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name_of_new_file: str,
):
    """A lock is left alone while a file beside it is new, and removed once all are old.

    A lock without a builder here may be another machine's, which shares the home folder.
    """
    new_file = abandoned_lock.with_name(name_of_new_file)
    new_file.touch()
    os.utime(new_file)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        """Note the wait, and let all files be old afterwards."""
        waits.append(seconds)
        for file in (new_file, abandoned_lock, abandoned_lock.parent):
            os.utime(file, (TIME_LONG_AGO, TIME_LONG_AGO))

    monkeypatch.setattr(time, "sleep", sleep)
    launch.release_killed_builds()
    assert len(waits) == 1
    assert not abandoned_lock.exists()
    waiting_line, removal_line = capfd.readouterr().err.splitlines()
    assert waiting_line.startswith("waiting up to 180 s for a build of shm_comm")
    assert f"rm {abandoned_lock}" in waiting_line
    assert removal_line.startswith("removed")


def test_a_lock_that_its_owner_gives_back_is_waited_for(
    abandoned_lock: Path, monkeypatch: pytest.MonkeyPatch
):
    """A lock of this moment is waited for, and its owner removes it."""
    os.utime(abandoned_lock)
    monkeypatch.setattr(time, "sleep", lambda _: abandoned_lock.unlink())
    launch.release_killed_builds()
    assert not abandoned_lock.exists()


def test_the_other_ranks_leave_the_removal_to_the_first(
    abandoned_lock: Path, monkeypatch: pytest.MonkeyPatch, capfd
):
    """A rank other than the first waits until the lock is gone, and does not remove it.

    Otherwise the ranks would take its removal for the end of the build, and go on too early.
    """
    monkeypatch.setenv("LOCAL_RANK", "1")
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        assert abandoned_lock.exists()
        if len(waits) == 3:
            abandoned_lock.unlink()

    monkeypatch.setattr(time, "sleep", sleep)
    launch.release_killed_builds()
    assert len(waits) == 3
    assert not capfd.readouterr().err


@pytest.mark.parametrize(
    ("launched_with_deepspeed", "key", "lock_stays"),
    [
        (None, None, True),
        ("false", None, True),
        ("true", None, False),
        (None, {"zero_optimization": {"stage": 2}}, False),
    ],
)
def test_only_a_run_with_deepspeed_looks(
    launched_with_deepspeed: str | None,
    key: dict[str, Any] | None,
    lock_stays: bool,
    abandoned_lock: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Only DeepSpeed builds operators, so that other runs leave the lock alone.

    DeepSpeed is chosen by `accelerate launch`, or by the key `deepspeed`.
    """
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED", raising=False)
    if launched_with_deepspeed is not None:
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", launched_with_deepspeed)
    AdoraGRPOConfig(output_dir="nowhere", use_cpu=True, bf16=False, deepspeed=key)
    assert abandoned_lock.exists() is lock_stays
