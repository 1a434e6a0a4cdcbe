"""The checks of `benchmarks.gpu`, which say whether a GPU is fit to train on, on a CPU."""

import torch

from benchmarks.gpu import checks
from benchmarks.gpu.checks import CHECKS, GPUCheck
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.table import CheckLine, CheckResult, table

SMALL_CHECKS_ON_CPU = Setting(full=False, device=torch.device("cpu"))
CHECKS_FOR_A_GPU_ENGINE = ["recipe_v1", "four_bit"]


def check_named(name: str) -> GPUCheck:
    """Return the check of this name."""
    (check,) = [check for check in CHECKS if check.name == name]
    return check


def run_check_on_cpu(name: str) -> list[CheckLine]:
    """Run a check at its small size, and return the lines of the table that it prints."""
    return list(checks.lines_until_error(check_named(name), SMALL_CHECKS_ON_CPU))


def failed_lines(lines: list[CheckLine]) -> list[CheckLine]:
    """Return the lines of a table whose verdict is FAIL."""
    return [line for line in lines if line.verdict is CheckResult.FAIL]


def assert_no_failure(lines: list[CheckLine]) -> None:
    """Print the table, and assert that no line failed and at least one is OK."""
    print(table(lines))
    assert failed_lines(lines) == []
    assert any(line.verdict is CheckResult.OK for line in lines)
