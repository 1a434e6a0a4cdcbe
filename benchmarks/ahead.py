"""Seconds of a step with rollouts one and two generations ahead, and one after the other, with a server that only
waits: what two machines give.

    python -m benchmarks.ahead [--seconds 3] [--steps 8]

Each part alone is measured, too: a server that answers at once, and the waiting. A step ahead should take little more
than the longer of the two. At last every second generation takes the server three times as long as the others, as long
on average. The figures are means without the first two steps.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from adora_vl.record.metrics import METRICS, read_metrics
from benchmarks.stand_in_server import StandIn

# Of an answer, and its limit, by which the server waits: the 8 tokens that measure the drift take it a 64th of that.
TOKENS, LIMIT = 32, 512


def seconds_of_a_step(folder: Path, ahead: int, waiting: float, steps: int, *, uneven: bool = False) -> float:
    """Train the tiny model in a process of its own; the mean of its steps' seconds."""
    server = StandIn(vocabulary=200, tokens=TOKENS, seconds_per_token=waiting / LIMIT)
    if uneven:
        server.pace = lambda syncs: 0.5 + syncs % 2
    keys = {
        "config": "configs/train/smoke_cpu.yaml", "output_dir": folder, "use_vllm": "true", "vllm_mode": "server",
        "vllm_server_base_url": server.url, "adora_weight_transfer": "file", "adora_rollouts.ahead": ahead,
        "adora_max_drift": "null", "adora_self_check": "false", "max_steps": steps, "save_strategy": "no",
        "logging_steps": 1, "adora_synthetic_rows": 64, "max_completion_length": LIMIT, "vllm_max_model_length": 1024,
        "entropy_coef": 1.0,
    }  # fmt: skip
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    try:
        subprocess.run([sys.executable, "-m", "adora_vl.train", *words], check=True, stdout=subprocess.DEVNULL)
    finally:
        server.close()
    logged = [entry for entry in read_metrics(folder / METRICS) if "seconds/rollout" in entry]
    each = [sum(value for name, value in entry.items() if name.startswith("seconds/")) for entry in logged]
    return statistics.mean(each[2:])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="that the server waits for a generation")
    parser.add_argument("--steps", type=int, default=8)
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        alone = seconds_of_a_step(Path(name, "alone"), 0, 0.0, asked.steps)
        after = seconds_of_a_step(Path(name, "after"), 0, asked.seconds, asked.steps)
        one, two = (seconds_of_a_step(Path(name, f"{k}"), k, asked.seconds, asked.steps) for k in (1, 2))
        uneven = [
            seconds_of_a_step(Path(name, f"uneven{k}"), k, asked.seconds, asked.steps, uneven=True) for k in (1, 2)
        ]
    longer = max(alone, asked.seconds)
    print(f"trainer alone {alone:.2f} s, server alone {asked.seconds:.2f} s")
    print(f"one after the other {after:.2f} s")
    print(f"one step ahead {one:.2f} s, two {two:.2f} s: {one / longer:.2f} and {two / longer:.2f} of the longer part")
    print(f"uneven: one step ahead {uneven[0]:.2f} s, two {uneven[1]:.2f} s: {uneven[1] / uneven[0]:.2f}")


if __name__ == "__main__":
    main()
