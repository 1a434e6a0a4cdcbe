"""A benchmark of ours is found by where its file lies, and never by the name `eval`."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from adora_vl.evals import benchmark as benchmarks
from adora_vl.evals.benchmark import BENCHMARK_NAMES, find_benchmark
from adora_vl.utils.errors import UserError
from tests.support.paths import REPOSITORY


@pytest.mark.slow
def test_no_benchmark_needs_the_names_eval_and_data_prep(tmp_path: Path) -> None:
    """Benchmarks are found from a folder with an `eval.py` and a `data_prep.py`, which do not run.

    Python would import such a file of the user in place of our package.
    """
    for name in ("eval.py", "data_prep.py"):
        (tmp_path / name).write_text("raise SystemExit('a file of the user was run')\n")
    script = (
        "import sys\n"
        "import adora_vl.evaluation, adora_vl.record.summary, adora_vl.report.compare_runs\n"
        "from adora_vl.evals.benchmark import BENCHMARK_NAMES, find_benchmark\n"
        "print(*(find_benchmark(name).name for name in BENCHMARK_NAMES))\n"
        "print(*{'eval', 'data_prep'} & sys.modules.keys())\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines() == [" ".join(BENCHMARK_NAMES), ""]


def test_no_file_of_the_package_imports_these_names() -> None:
    """No file of `adora_vl` imports `eval` or `data_prep`, by a statement or by a call.

    `lint-imports` does not see a name that `import_module` gets as a text.
    """
    for path in sorted((REPOSITORY / "adora_vl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
                names = [ast.unparse(argument).strip("f'\"") for argument in node.args]
            top_level_names = {name.split(".")[0] for name in names}
            assert not top_level_names & {"eval", "data_prep"}, (
                f"{path}:{node.lineno}"  # type: ignore[attr-defined]
            )


def test_a_missing_file_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(benchmarks, "BENCHMARK_FOLDER", tmp_path)
    with pytest.raises(UserError, match=r"there is no mathvista\.py in .*; install adora-vl again"):
        find_benchmark("mathvista")
