"""A limit of open files that is too low is one line, before a run or when it is reached."""

import errno
import resource
import sys

import pytest

from adora_vl.config.run_context import RunContext
from adora_vl.config.sharding import Sharding
from adora_vl.doctor.checks import check_open_files as doctor_check
from adora_vl.preflight.check_machine import check_machine
from adora_vl.utils import interrupts
from adora_vl.utils.checks import Status
from adora_vl.utils.errors import UserError
from adora_vl.utils.open_files import NEEDED_OPEN_FILES, open_files_message
from tests.support.stand_ins import training_config

REMEDY = "`ulimit -n 1024` in a new shell allows more"


class Limits:
    """Stands in for the limits of open files that the kernel has for this process."""

    def __init__(self, soft: int, hard: int) -> None:
        self.limits = (soft, hard)

    def get(self, kind: int) -> tuple[int, int]:
        """Return soft and hard limit, as `resource.getrlimit`."""
        return self.limits

    def set(self, kind: int, limits: tuple[int, int]) -> None:
        """Set soft and hard limit, as `resource.setrlimit`."""
        self.limits = limits


@pytest.fixture
def limit_to(monkeypatch):
    """Return a function that gives this process other limits."""

    def limit(soft: int, hard: int) -> Limits:
        limits = Limits(soft, hard)
        monkeypatch.setattr(resource, "getrlimit", limits.get)
        monkeypatch.setattr(resource, "setrlimit", limits.set)
        return limits

    return limit


def check_run(*, use_vllm: bool, processes: int) -> None:
    """Make the preflight checks of a machine."""
    context = RunContext(
        on_this_machine=True, sharding=Sharding(processes=processes), output_dir_mode="ignore"
    )
    check_machine(training_config(use_vllm=use_vllm), context)


@pytest.fixture(autouse=True)
def only_this_check(monkeypatch):
    """Leave the checks of optimizer and trackers out."""
    for name in ("check_optimizer", "check_trackers"):
        monkeypatch.setattr(f"adora_vl.preflight.check_machine.{name}", lambda argument: None)


def test_a_hard_limit_that_is_too_low_is_refused_before_a_run_with_an_engine(limit_to):
    limit_to(soft=48, hard=48)
    for use_vllm, processes in ((True, 1), (False, 2)):
        with pytest.raises(UserError, match=r"^open files: the limit is 48 \(ulimit -n\)") as error:
            check_run(use_vllm=use_vllm, processes=processes)
        assert REMEDY in str(error.value)
    # Without an engine and other processes a run has a handful of files open.
    check_run(use_vllm=False, processes=1)


@pytest.mark.parametrize("hard", [4096, resource.RLIM_INFINITY])
def test_a_soft_limit_is_raised_as_far_as_needed(limit_to, hard):
    limits = limit_to(soft=48, hard=hard)
    check_run(use_vllm=True, processes=1)
    assert limits.limits == (NEEDED_OPEN_FILES, hard)


@pytest.mark.parametrize("soft", [1024, resource.RLIM_INFINITY])
def test_a_limit_that_is_high_enough_stays(limit_to, soft):
    limits = limit_to(soft=soft, hard=resource.RLIM_INFINITY)
    check_run(use_vllm=True, processes=1)
    assert limits.limits == (soft, resource.RLIM_INFINITY)


def test_the_doctor_names_the_limit_and_the_remedy(limit_to):
    limit_to(soft=48, hard=48)
    check = doctor_check()
    assert check.status is Status.FAILED
    assert check.detail == f"48 allowed (ulimit -n), {NEEDED_OPEN_FILES} needed"
    assert check.remedy.startswith(REMEDY)
    limit_to(soft=48, hard=4096)
    assert doctor_check().status is Status.PASSED


def test_any_command_that_reaches_the_limit_ends_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(interrupts, "_runs_command_of_ours", lambda: True)
    interrupts.install_interrupt_hook()
    error = OSError(errno.EMFILE, "Too many open files", "a file")
    with pytest.raises(SystemExit) as exit_error:
        sys.excepthook(OSError, error, None)
    assert exit_error.value.code == 1
    line = capsys.readouterr().err
    assert line.startswith("error: open files: all ")
    assert REMEDY in line
    assert line.count("\n") == 1


def test_other_errors_are_not_taken_for_it():
    assert open_files_message(OSError(errno.ENOSPC, "No space left on device")) == ""
    assert open_files_message(ValueError("24")) == ""
