"""Seconds of a step with rollouts one generation ahead, and one after the other, with a server that only waits: what
two machines give.

    python -m benchmarks.ahead [--seconds 3] [--steps 8]

Each part alone is measured, too: a server that answers at once, and the waiting. A step ahead should take little more
than the longer of the two; the figures are medians without the first two steps.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from adora_vl.record.metrics import METRICS, read_metrics
from benchmarks.stand_in_server import StandIn

TOKENS = 32  # the limit of an answer


def seconds_of_a_step(folder: Path, ahead: int, waiting: float, steps: int) -> float:
    """Train the tiny model in a process of its own; the median of its steps' seconds."""
    server = StandIn(vocabulary=200, tokens=TOKENS, seconds_per_token=waiting / TOKENS)
    keys = {
        "config": "configs/train/smoke_cpu.yaml", "output_dir": folder, "use_vllm": "true", "vllm_mode": "server",
        "vllm_server_base_url": server.url, "adora_weight_transfer": "file", "adora_rollouts.ahead": ahead,
        "adora_max_drift": "null", "adora_self_check": "false", "max_steps": steps, "save_strategy": "no",
        "logging_steps": 1, "adora_synthetic_rows": 64, "max_completion_length": TOKENS, "entropy_coef": 1.0,
    }  # fmt: skip
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    try:
        subprocess.run([sys.executable, "-m", "adora_vl.train", *words], check=True, stdout=subprocess.DEVNULL)
    finally:
        server.close()
    logged = [entry for entry in read_metrics(folder / METRICS) if "seconds/rollout" in entry]
    each = [sum(value for name, value in entry.items() if name.startswith("seconds/")) for entry in logged]
    return statistics.median(each[2:])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="that the server waits for a generation")
    parser.add_argument("--steps", type=int, default=8)
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        alone = seconds_of_a_step(Path(name, "alone"), 0, 0.0, asked.steps)
        after = seconds_of_a_step(Path(name, "after"), 0, asked.seconds, asked.steps)
        ahead = seconds_of_a_step(Path(name, "ahead"), 1, asked.seconds, asked.steps)
    longer = max(alone, asked.seconds)
    print(f"trainer alone {alone:.2f} s, server alone {asked.seconds:.2f} s")
    print(f"one after the other {after:.2f} s, one step ahead {ahead:.2f} s: {ahead / longer:.2f} of the longer part")


if __name__ == "__main__":
    main()
