"""Times a step with rollouts one and two generations ahead, and one after the other.

The server only waits, so that the figures are what two machines give.

    python -m benchmarks.ahead [--seconds 3] [--steps 12]

One after the other, the seconds of sampling and of the weight sync are the server's part, and the
rest is the trainer's. A step ahead should take little more than the longer of the two. At last
every second generation takes the server three times as long as the others, as long on average, and
the policy's part is made as long, by a reward that waits: then a second generation ahead helps
most. If nothing else took time, it would take 0.8 of one ahead, and no other order of short and
long generations would take less than 0.79. The figures are means without the first two steps and
the last two.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from adora_vl.record.metrics import METRICS_FILE, read_metrics
from adora_vl.utils.cli import integer_between
from benchmarks.stand_in_server import FakeVLLMServer

# Of an answer, and its limit, by which the server waits: the 8 tokens that measure the drift take
# it a 64th of that.
ANSWER_TOKENS = 32
COMPLETION_LIMIT = 512
WAITS_VARIABLE = "BENCHMARK_AHEAD_WAITS"  # of the environment, in seconds


def server_waits(completions: Sequence[object], **_: object) -> list[float]:
    """Wait, as a reward that makes the trainer's part of a step longer, and return zeros."""
    time.sleep(float(os.environ[WAITS_VARIABLE]))
    return [0.0] * len(completions)


def seconds_by_part(
    folder: Path,
    ahead: int,
    waiting: float,
    steps: int,
    *,
    uneven: bool = False,
    learning: float = 0.0,
) -> tuple[float, float]:
    """Train the tiny model in a process of its own.

    Args:
        folder: of the run.
        ahead: generations that are sampled ahead.
        waiting: seconds that the server waits for a generation.
        steps: how many are trained.
        uneven: every second generation takes the server three times as long.
        learning: seconds that the trainer waits in addition.

    Returns the mean seconds of a step for sampling, and for the rest.
    """
    server = FakeVLLMServer(
        vocabulary=200, tokens=ANSWER_TOKENS, seconds_per_token=waiting / COMPLETION_LIMIT
    )
    if uneven:
        # Factors of the waiting time, 0.5 and 1.5 by turns, whose mean is 1.
        server.pace = lambda syncs: 0.5 + syncs % 2
    keys = {
        "config": "configs/train/smoke_cpu.yaml",
        "output_dir": folder,
        "use_vllm": "true",
        "vllm_mode": "server",
        "vllm_server_base_url": server.url,
        "adora_weight_transfer": "file",
        "adora_rollouts.ahead": ahead,
        "adora_max_drift": "null",
        "adora_self_check": "false",
        "max_steps": steps,
        "save_strategy": "no",
        "logging_steps": 1,
        "adora_synthetic_rows": 64,
        "max_completion_length": COMPLETION_LIMIT,
        "vllm_max_model_length": 1024,
        "entropy_coef": 1.0,
        "adora_reward": f"{__file__}:{server_waits.__name__}",
    }
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "adora_vl.train", *words]
    environment = {**os.environ, WAITS_VARIABLE: str(learning)}
    try:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    finally:
        server.close()
    return _mean_seconds(folder)


def _mean_seconds(folder: Path) -> tuple[float, float]:
    """Return a run's mean seconds of a step for sampling, and for the rest.

    The first two and the last two steps do not count. For example, steps that take 3 seconds for
    `seconds/rollout`, 1 for `seconds/sync` and 2 for `seconds/backward` give (4.0, 2.0).
    """
    entries = [entry for entry in read_metrics(folder / METRICS_FILE) if "seconds/rollout" in entry]
    counted = entries[2:-2]
    sampling = statistics.mean(
        entry["seconds/rollout"] + entry["seconds/sync"] for entry in counted
    )
    step = statistics.mean(
        sum(value for name, value in entry.items() if name.startswith("seconds/"))
        for entry in counted
    )
    return sampling, step - sampling


def main(arguments: Sequence[str] | None = None) -> None:
    """Time all three orders, and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="that the server waits for a generation"
    )
    # The first two steps and the last two are no part of the means.
    parser.add_argument(
        "--steps", type=integer_between(5), default=12, help="of each run; 5 or more"
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        even = options.seconds, options.steps
        server, trainer = seconds_by_part(Path(name, "after"), 0, *even)
        print(
            f"one after the other {server + trainer:.2f} s: server {server:.2f}, trainer "
            f"{trainer:.2f}",
            flush=True,
        )
        one_ahead = sum(seconds_by_part(Path(name, "1"), 1, *even))
        two_ahead = sum(seconds_by_part(Path(name, "2"), 2, *even))
        longer = max(server, trainer)
        print(
            f"one step ahead {one_ahead:.2f} s, two {two_ahead:.2f} s: {one_ahead / longer:.2f} and "
            f"{two_ahead / longer:.2f} of the longer part"
        )
        # The trainer's part becomes as long as the server's.
        learning = max(0.0, server - trainer)
        one_ahead = sum(seconds_by_part(Path(name, "u1"), 1, *even, uneven=True, learning=learning))
        two_ahead = sum(seconds_by_part(Path(name, "u2"), 2, *even, uneven=True, learning=learning))
    print(
        f"uneven: one step ahead {one_ahead:.2f} s, two {two_ahead:.2f} s: "
        f"{two_ahead / one_ahead:.2f}"
    )


if __name__ == "__main__":
    main()
