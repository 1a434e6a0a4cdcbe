"""Every check of the command that accepts a GPU runs at the small size on a CPU."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import checks
from benchmarks.gpu.checks import CHECKS
from benchmarks.gpu.table import CheckResult
from tests.support.forked_python import popen_of_fork_server
from tests.support.gpu_checks import (
    CHECKS_FOR_A_GPU_ENGINE,
    assert_no_failure,
    check_named,
    run_check_on_cpu,
)

pytestmark = pytest.mark.slow

# In a process of its own: what needs a process group or an engine.
CHECKS_IN_OWN_PROCESS = [
    "cards",
    "zero3",
    "offload",
    "engine",
    "recipe",
    "drift",
    "server",
    "step",
    "tools",
]
CHECKS_IN_THIS_PROCESS = [
    check.name
    for check in CHECKS
    if check.name not in {*CHECKS_IN_OWN_PROCESS, *CHECKS_FOR_A_GPU_ENGINE, "deepspeed"}
]


@pytest.mark.parametrize("name", CHECKS_IN_THIS_PROCESS)
def test_a_check_runs_on_a_cpu_and_finds_nothing_wrong(name):
    """Checks that are made for a GPU run here too, on small models."""
    lines = run_check_on_cpu(name)
    if name == "attention":  # its one line has seconds, and nothing else
        assert [(line.verdict, line.note) for line in lines] == [
            (CheckResult.SKIPPED, "seconds are judged on a GPU only")
        ]
    else:
        assert_no_failure(lines)
    assert all(line.note for line in lines), (
        "each line says where its bound comes from, or why it was skipped"
    )


@pytest.mark.parametrize("name", CHECKS_IN_OWN_PROCESS)
def test_a_check_runs_in_its_own_process_and_finds_nothing_wrong(name, monkeypatch):
    """What DeepSpeed has compiled for other tests is used, which would take most of a minute."""
    # Its own process is forked from one that has the libraries already.
    monkeypatch.setattr("subprocess.Popen", popen_of_fork_server)
    check = replace(check_named(name), limit=580)
    lines = checks.run(check, "small", Path(os.environ["TORCH_EXTENSIONS_DIR"]))
    assert_no_failure(list(lines))
