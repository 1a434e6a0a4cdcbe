"""Train every arm in every regime, then write tables and curves: `python -m benchmarks.attenuation`.

Every finished run is a file in OUTPUT/runs. The command can be stopped and started again: it goes on with what is
missing. `--report` only reads what is there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.attenuation.report import write_report
from benchmarks.attenuation.settings import SETTINGS, read_settings
from benchmarks.attenuation.start import ARITHMETIC, build_arithmetic

REPOSITORY = Path(__file__).parents[2]


def commit() -> str:
    """The commit that the runs are made from, with a plus sign where files differ from it."""
    said = subprocess.run(
        ["git", "describe", "--always", "--abbrev=10", "--dirty=+", "--exclude=*"],  # noqa: S607
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return said.stdout.strip() or "unknown"


def train_all(settings: Path, output: Path, workers: int) -> int:
    """Every worker trains its share of the seeds on one core. Returns how many ended with an error."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment.pop("MASTER_PORT", None)
    words = [sys.executable, "-m", "benchmarks.attenuation.worker", "--settings", str(settings)]
    words += ["--output", str(output), "--commit", commit(), "--workers", str(workers)]
    output.mkdir(parents=True, exist_ok=True)
    build_arithmetic(output / ARITHMETIC, read_settings(settings).start)
    running = []
    for worker in range(workers):
        with (output / f"worker-{worker}.log").open("a") as log:
            own = [*words, "--worker", str(worker)]
            running.append(subprocess.Popen(own, cwd=REPOSITORY, env=environment, stdout=log, stderr=log))
    return sum(process.wait() != 0 for process in running)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=Path, default=SETTINGS)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "runs" / "attenuation")
    parser.add_argument("--workers", type=int, default=2, help="processes, one core each (%(default)s)")
    parser.add_argument("--report", action="store_true", help="only read the runs that are there")
    options = parser.parse_args()
    settings, output = options.settings.resolve(), options.output.resolve()
    failed = 0 if options.report else train_all(settings, output, options.workers)
    write_report(output)
    names = [job.name for job in read_settings(settings).jobs()]
    missing = [name for name in names if not (output / "runs" / f"{name}.json").is_file()]
    if missing:
        print(f"{len(missing)} runs are missing, {missing[0]} first; see {output}/worker-*.log", file=sys.stderr)
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(main())
