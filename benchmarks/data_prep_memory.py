"""Peak memory of data preparation by rows: `python benchmarks/data_prep_memory.py --rows 10000 100000`.

For each number: rows are drawn (`synthetic`), then read back and cleaned (`geometry3k --source parquet`), each in a
process of its own, and the kernel's peak of its resident memory is printed. About six minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def measured(*words: str) -> tuple[float, float]:
    """Peak resident memory in MiB, and seconds, of one command of data_prep."""
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "data_prep", *words],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(words)} failed")
    return usage.ru_maxrss / 1024, time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000])
    arguments = parser.parse_args()
    print(f"{'rows':>8}  {'drawn: MiB':>10}  {'s':>5}  {'cleaned: MiB':>12}  {'s':>5}")
    for rows in arguments.rows:
        with tempfile.TemporaryDirectory() as folder:
            drawn, cleaned = Path(folder) / "drawn", Path(folder) / "cleaned"
            first = measured("synthetic", "--output", str(drawn), "--rows", str(rows))
            second = measured(
                "geometry3k", "--source", "parquet", "--input", str(drawn), "--output", str(cleaned),
                "--keep-leaks",
            )  # fmt: skip
            print(f"{rows:>8}  {first[0]:>10.0f}  {first[1]:>5.0f}  {second[0]:>12.0f}  {second[1]:>5.0f}", flush=True)


if __name__ == "__main__":
    main()
