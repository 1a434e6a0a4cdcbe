"""GRPO against ADORA on the tiny model, over several seeds: `python benchmarks/grpo_vs_adora.py --seeds 3`.

Trains every (method, seed) from the same start by the command of the demo, evaluates on the same held-out problems, and
prints the table. A finished run is not repeated. A run takes about four minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
METHODS = {"grpo": ["--adora_mode", "off"], "adora": ["--adora_mode", "attenuation"]}


def command(*words: str | Path) -> None:
    done = subprocess.run([str(word) for word in words], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stderr[-2000:]}")


def evaluate(model: Path | str, data: Path, output: Path) -> dict[str, Any]:
    options = ["--model", str(model), "--data", str(data), "--output", str(output), "--max-tokens", "48"]
    command(sys.executable, "-m", "eval.geometry3k", "run", *options)
    score: dict[str, Any] = json.loads((output / "score.json").read_text())
    return score


def one_run(folder: Path, method: str, seed: int, data: Path, extra: list[str]) -> dict[str, float]:
    """The figures of one training run, read from its folder if it is finished."""
    result = folder / "result.json"
    if not result.is_file():
        accelerate = Path(sys.executable).parent / "accelerate"
        config = ["--config_file", "configs/accelerate/cpu.yaml", "-m", "adora_vl.train"]
        run = ["--config", "configs/train/smoke_cpu.yaml", "--dataset_name", str(data), "--output_dir", str(folder)]
        command(
            accelerate, "launch", *config, *run, *METHODS[method], "--seed", str(seed), "--save_strategy", "no", *extra
        )
        score = evaluate(folder, data, folder / "eval")
        log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        entries = [entry for entry in log if "reward" in entry]
        last = entries[-max(1, len(entries) // 5) :]
        measured = {
            "accuracy": score["accuracy"],
            "reward": statistics.fmean(entry["reward"] for entry in last),
            "length": statistics.fmean(entry["completions/mean_length"] for entry in last),
            "entropy": statistics.fmean(entry["entropy"] for entry in last),
            "seconds": log[-1]["train_runtime"],
        }
        result.write_text(json.dumps(measured, indent=2))
    figures: dict[str, float] = json.loads(result.read_text())
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "runs" / "grpo_vs_adora")
    parser.add_argument("extra", nargs="*", help="further training options, after --")
    options = parser.parse_args()
    out = options.output.resolve()
    data = out / "data"
    command(sys.executable, "-m", "data_prep", "synthetic", "--output", data, "--rows", "4096", "--test-rows", "600")
    before = evaluate("adora_vl/models/tiny/pretrained", data, out / "before")
    print(f"before: {before['accuracy']:.3f} of {before['total']} held-out problems, greedy")
    print(f"{'method':8}{'seed':>6}{'accuracy':>10}{'reward':>9}{'length':>9}{'entropy':>9}{'seconds':>9}")
    means: dict[str, list[float]] = {method: [] for method in METHODS}
    for seed in range(options.seeds):
        for method in METHODS:
            f = one_run(out / f"{method}-{seed}", method, seed, data, options.extra)
            means[method].append(f["accuracy"])
            row = f"{f['accuracy']:10.3f}{f['reward']:9.3f}{f['length']:9.1f}{f['entropy']:9.3f}{f['seconds']:9.0f}"
            print(f"{method:8}{seed:>6}{row}", flush=True)
    for method, values in means.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{method:8}{'mean':>6}{statistics.fmean(values):10.3f}  (standard deviation {spread:.3f})")


if __name__ == "__main__":
    main()
